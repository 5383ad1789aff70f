"""Streams beside the current one, on which a GPU computes several parts at a time.

A kernel of attention fills the GPU except at its end, when fewer tiles are left than multiprocessors.
Attention over a rank's own keys and over those of others are independent, so their kernels go to streams of
their own: the next one takes the multiprocessors that the one before leaves. Results that other ranks wait
for go first, so these streams have a high priority.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

__all__ = ["Lanes"]

_cuda: Any = torch.cuda

LANES = True
"""Whether to use them; measurements turn it off."""


class Lanes:
    """Streams that begin behind what is on the current stream now; on a CPU, the only order there is.

    There are two, which are taken in turn.

    Iteration gives a context for each, in which its stream is the current one. Whoever uses what was made in
    one calls `join` first.

    Parameters
    ----------
    device : torch.device
    count : int
    first : int, optional
        Which one is taken first.
    """

    def __init__(self, device: torch.device, count: int, first: int = 0) -> None:
        self._device = device
        streams = _streams(device) if LANES and device.type == "cuda" else [None]
        self._lanes: list[Any] = [streams[n % len(streams)] for n in range(first, first + count)]
        if LANES and device.type == "cuda":
            begin = _cuda.current_stream(device).record_event()
            for lane in self._lanes:
                lane.wait_event(begin)

    def __iter__(self) -> Iterator[AbstractContextManager[Any]]:
        return iter([nullcontext() if lane is None else _cuda.stream(lane) for lane in self._lanes])

    def behind_all(self) -> AbstractContextManager[Any]:
        """Return a context of a stream that has waited for all of them."""
        if not self._lanes or self._lanes[0] is None:
            return nullcontext()
        *others, last = self._lanes
        for lane in others:
            last.wait_stream(lane)
        context: AbstractContextManager[Any] = _cuda.stream(last)
        return context

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        for lane in self._lanes:
            if lane is not None:
                _cuda.current_stream(self._device).wait_stream(lane)


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> list[Any]:
    return [_cuda.Stream(device, priority=-1) for _ in range(2)]
