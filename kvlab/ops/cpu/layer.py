"""A layer of a cache in host memory, as arrays: what kernels of a GPU are told by addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.ops.cpu.page_tokens import prepared_frames, side_formats
from kvlab.ops.frame import FRAME, FRAME_OF_BLOCKS
from kvlab.ops.layer_state import UNIT
from kvlab.pages import PageLayout
from kvlab.views import CudaView

__all__ = ["HostLayer", "array_at", "vectors_of", "view_at"]


def array_at(address: int, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None) -> Any:
    """The array of host memory at an address; strides count elements, None: contiguous."""
    kind = numpy_dtype(dtype)
    in_bytes = None if strides is None else [step * kind.itemsize for step in strides]
    if 0 in shape:
        return np.empty(shape, kind)
    last = sum((n - 1) * s for n, s in zip(shape, in_bytes, strict=True)) if in_bytes else 0
    nbytes = last + kind.itemsize if in_bytes else int(np.prod(shape)) * kind.itemsize
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    return np.ndarray(tuple(shape), kind, memory, strides=in_bytes)


def view_at(view: CudaView) -> Any:
    """The array of host memory that a view names."""
    return array_at(view.pointer, view.shape, view.dtype, view.strides)


def vectors_of(new_tokens: Any, shape: tuple[int, ...]) -> list[Any]:
    """Keys and values (batch, num_new, heads, head_dim) that a `NewTokens` struct names, float32."""
    return [
        array_at(
            int(new_tokens[side]),
            shape,
            "float32",
            [*(int(new_tokens[f"{side}_{axis}"]) for axis in ("batch", "step", "head")), 1],
        )
        for side in "kv"
    ]


@dataclass(frozen=True, eq=False)
class HostLayer:
    """Arrays of one layer, by the names of `LayerState`, and what its pages are.

    Parameters
    ----------
    tables : dict of str to array
    arena : uint8 array
    waiting : uint8 array or None
        Pages of tokens that wait for their frame; None: no row can wait.
    layouts : tuple of PageLayout
        Of the ladder; `exact`: of pages of tokens that wait.
    dtype : str
        Of exact tokens.
    slab, num_slabs : int
        Bytes of a slab, and how many the arena has.
    evicts, in_blocks, is_narrow : bool
        What the ladder has: a width 0, profiles, no width of 8 for keys.
    sliding_window : int
        How many tokens a query sees; 0: all.
    mean_factor : (head_dim,) float32 array
        What means of keys are multiplied by.
    """

    tables: dict[str, Any]
    arena: NDArray[np.uint8]
    waiting: NDArray[np.uint8] | None
    layouts: tuple[PageLayout, ...]
    exact: PageLayout
    dtype: str
    slab: int
    num_slabs: int
    evicts: bool
    in_blocks: bool
    is_narrow: bool
    sliding_window: int
    mean_factor: NDArray[np.float32]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(batch, heads, entries) of the page tables."""
        batch, heads, entries = self.tables["rung"].shape
        return batch, heads, entries

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self.exact.head_dim

    @property
    def seqlen(self) -> int:
        """Tokens of a row, padding included."""
        return int(self.tables["seqlen"].max(initial=0))

    @property
    def waits(self) -> NDArray[np.bool_]:
        """Which rows (batch,) wait for their frame."""
        found: NDArray[np.bool_] = self.tables["waits"] > 0
        return found

    @property
    def all_layouts(self) -> tuple[PageLayout, ...]:
        """The pages of each rung; behind those of the ladder, that of tokens that wait."""
        return self.layouts if self.waiting is None else (*self.layouts, self.exact)

    @cached_property
    def planned(self) -> Any:
        """The tables as the planner's kernels take them."""
        from kvlab.numba_kernels.cpu.cache_groups import Tables

        mine, (batch, heads, _) = dict(self.tables), self.shape
        rungs = [(x.nbytes // UNIT, self.slab // x.nbytes, x.positions) for x in self.layouts]
        for name in ("rung", "count", "index", "base", "open"):
            mine[name] = mine[name].reshape(batch * heads, mine[name].shape[2])
        return Tables(
            np.array(rungs, np.int64).reshape(-1, 3), self.arena, mine["rung"], mine["count"],
            mine["index"].view(np.uint32), mine["base"].view(np.uint16),
            mine["num_pages"].reshape(batch * heads), mine["open"], mine["used"], mine["slab_count"],
            mine["slabs"], mine["free_slabs"], mine["num_free"], mine["entry_of"].view(np.uint32),
            mine["slab_slot"], mine["budget"], mine["status"], mine["waits"],
        )  # fmt: skip

    @cached_property
    def with_waiting(self) -> Any:
        """`planned` with the pages of tokens that wait behind those of the ladder."""
        exact = [[x.nbytes // UNIT, 1, x.positions] for x in self.all_layouts[len(self.layouts) :]]
        rungs = np.concatenate([self.planned.rungs, np.array(exact, np.int64).reshape(-1, 3)])
        return self.planned._replace(rungs=rungs)

    @property
    def formats(self) -> Any:
        """Where codes lie in pages, as kernels take it."""
        return _formats(self.all_layouts, self.dtype)

    @property
    def frames(self) -> Any:
        """Frames of keys as kernels take them."""
        names = [name for name in FRAME if self.in_blocks or name not in FRAME_OF_BLOCKS]
        return prepared_frames(*(self.tables[name] for name in names))

    def rounded(self, x: Any) -> Any:
        """Keys or values, rounded to the cache's dtype, as float32."""
        with np.errstate(over="ignore", invalid="ignore"):  # of padding, and of places without a token
            return x.astype(numpy_dtype(self.dtype), copy=False).astype(np.float32, copy=False)

    def fresh(self, k: Any, v: Any, codes: Any, positions: Any) -> Any:
        """New tokens as kernels take them."""
        from kvlab.numba_kernels.cpu.cache_write import Fresh

        k, v = (np.ascontiguousarray(self.rounded(x)) for x in (k, v))
        return Fresh(k, v, codes, positions)

    def positions(self, address: int, num_new: int, first: int) -> NDArray[np.int32]:
        """Positions of new tokens, (batch, num_new): those at an address, or all from the first on."""
        batch = self.shape[0]
        if address:
            found: NDArray[np.int32] = array_at(address, (batch, num_new), "int32")
            return found
        return np.tile(np.arange(first, first + num_new, dtype=np.int32), (batch, 1))


@lru_cache(maxsize=64)
def _formats(layouts: tuple[PageLayout, ...], dtype: str) -> Any:
    from kvlab.numba_kernels.cpu.cache_write import Formats

    found = [side_formats(layout, dtype) for layout in layouts]
    sides = [[(s.codes, s.scales, s.bits, s.kind) for s, _ in pair] for pair in found]
    guess = [[s.guess for s, _ in pair] for pair in found]
    addresses = np.stack([np.stack([addresses for _, addresses in pair]) for pair in found])
    return Formats(np.array(sides, np.int64), np.array(guess, np.float32), addresses)
