"""How every worker process of the laboratory begins, so that none outlives the process that began it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from threading import Thread

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """Leave interrupts of this worker process to its parent, and end it as soon as the parent is dead.

    A parent that is killed (SIGTERM, SIGKILL, lack of memory) ends no worker, which would compute on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it
    Thread(target=_watch, name="end_with_parent", daemon=True).start()


def _watch() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # at once: nothing that this process has left to do is for anyone
