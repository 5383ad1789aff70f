"""Memory for the pages of one layer: one pool a rung, and which of its pages are free.

A pool is an array (pages, bytes of a page) that starts at a multiple of 64 bytes. It grows by a quarter; what
has never been written takes no memory of the machine. What has been written and is free again does, so a
pool with many holes is packed (`is_loose`, `replace`). Large pools are mapped on their own: among the
arrays that come and go they would pin what these leave behind, more than the pools themselves.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import OutOfMemory
from kvlab.pages import PageLayout

__all__ = ["PagePools", "new_pool"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_MAPPED = 2**18
"""Bytes from which on a pool is mapped on its own."""

_LOOSE_SHARE, _LOOSE_LEAST = 64, 8
"""A pool is loose if more than one page in so many is free, and more than a few."""


class PagePools:
    """Pools of pages, empty at first.

    Parameters
    ----------
    layouts : sequence of PageLayout
        One a rung.

    Attributes
    ----------
    memory : list of (pages, bytes of a page) uint8
        The pool of each rung.

    Examples
    --------
    >>> pools = PagePools([PageLayout(head_dim=16, bits_k=4, bits_v=4, itemsize=2)])
    >>> pools.set_free([[1]], [4])
    >>> len(pools.memory[0]), pools.is_loose(0)
    (5, False)
    """

    def __init__(self, layouts: Sequence[PageLayout]) -> None:
        self.layouts = tuple(layouts)
        self.memory = [new_pool(0, layout) for layout in self.layouts]
        self.free: list[list[int]] = [[] for _ in self.layouts]
        self.used = [0] * len(self.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, used or not."""
        return sum(pool.nbytes for pool in self.memory)

    def set_free(self, free: list[list[int]], used: list[int]) -> None:
        """Take over which pages are free, of the first `used` of each rung; pools grow if they must."""
        self.free, self.used = free, used
        for r, pages in enumerate(used):
            if pages > len(self.memory[r]):
                grown = new_pool(pages + pages // 4, self.layouts[r], used=pages)
                grown[: len(self.memory[r])] = self.memory[r]
                self.memory[r] = grown

    def is_loose(self, rung: int) -> bool:
        """Whether so many pages of a rung are free that its pool should be packed."""
        holes = len(self.free[rung])
        return holes > _LOOSE_LEAST and holes * _LOOSE_SHARE > self.used[rung]

    def replace(self, rung: int, pages: Bytes) -> None:
        """Let a pool be a copy of these pages, all of them in use."""
        self.memory[rung] = new_pool(len(pages), self.layouts[rung])
        self.memory[rung][:] = pages
        self.free[rung], self.used[rung] = [], len(pages)

    def realign(self) -> None:
        """Move the pools of a copy, which `copy.deepcopy` has put at any address, to aligned ones."""
        for r, pool in enumerate(self.memory):
            self.memory[r] = new_pool(len(pool), self.layouts[r])
            self.memory[r][:] = pool


def new_pool(pages: int, layout: PageLayout, used: int | None = None) -> Bytes:
    """Room for pages, not initialised, that starts at a multiple of 64 bytes; the first `used` come soon.

    These may lie in huge pages of the system, with which attention is up to a fifth faster; what is behind
    them would be in memory whole as soon as any of it is written.
    """
    nbytes = pages * layout.nbytes
    if nbytes >= _MAPPED:
        try:
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(
                f"no {nbytes} bytes for {pages} pages at {layout.bits_k} bits: {error}"
            ) from None
        filled = (pages if used is None else used) * layout.nbytes
        if hasattr(mmap, "MADV_HUGEPAGE") and filled:
            mapped.madvise(mmap.MADV_HUGEPAGE, 0, filled)
        return np.frombuffer(mapped, np.uint8).reshape(pages, layout.nbytes)
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].reshape(pages, layout.nbytes)
