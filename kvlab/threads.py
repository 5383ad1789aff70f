"""Divide a short piece of work among threads without waiting for a thread that has not started.

A parallel loop of Numba (OpenMP) ends when all its threads have reached its end, even idle ones. On a busy
machine a thread may wait tens of milliseconds for a processor: longer than the whole call. This module serves
work of about a millisecond. A counter deals out items; the caller takes items, too, and returns when none is
left. Helpers that have not started by then are cancelled; one that sleeps where all items are done is not
waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

__all__ = ["run_parallel"]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvlab")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads do not exist in a child


def run_parallel(work: Callable[..., object], *args: Any, alone: bool = False) -> None:
    """Run ``work(*args)`` here, and at the same time on helpers; return when all items are done.

    Parameters
    ----------
    work : callable
        Takes items from a counter among its arguments until none is left, so it may run once or many times.
        It should release the GIL, as functions compiled with ``nogil=True`` do. If it returns True, all items
        are done, those of others, too; else the helpers that began are waited for.
    *args
        For every run.
    alone : bool
        Use this thread only: for work too short to divide. Otherwise as many threads as
        `numba.get_num_threads` says.

    Examples
    --------
    >>> items = list(range(100))
    >>> done = []
    >>> def work(items, done):
    ...     while items:
    ...         done.append(items.pop())
    >>> run_parallel(work, items, done)
    >>> sorted(done) == list(range(100))
    True
    """
    from numba import get_num_threads

    helpers = [] if alone else [_pool().submit(work, *args) for _ in range(get_num_threads() - 1)]
    done = False
    try:
        done = work(*args) is True
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
    for helper in begun:
        if not done:
            helper.result()
