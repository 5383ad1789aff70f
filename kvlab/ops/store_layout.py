"""The memory layout of the store of a cache: offsets of slabs, arenas, tables and states, on every device.

All of it follows from sizes alone, so stores of the same sizes have one `StoreLayout`: copies of a cache, and
the beams of one prompt after another. What kernels are told are `LayerState` structs
(kernels/cuda/pages/state.cuh) whose addresses count from the memory they lie in; a store adds where that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.new_arrays import viewed
from kvlab.ops.frame import FRAME
from kvlab.ops.layer_state import OPEN_PAGES, POINTERS, RUNGS, STATE, UNIT, WAITING_ENTRIES, WAITING_PAGES
from kvlab.ops.plan import Ladder, reach_of, spare_nbytes
from kvlab.pages import NO_PAGE, QUAD, TOKENS_PER_PAGE, PageLayout, width_number

__all__ = [
    "LayerKind",
    "StoreLayout",
    "StoreSizes",
    "pointers_of",
    "slab_nbytes",
    "store_layout",
    "tables_in",
]

_WASTE = 0.03
_ALIGNMENT = 256
"""Bytes that arenas and tables begin at a multiple of in their memory."""


class LayerKind(NamedTuple):
    """What the sizes of a layer follow from; layers are often alike.

    `pages`: those of each rung. `levels`: what they cost. `row_budget`: bytes that a row may take; None: as
    many as the highest rung needs.
    """

    pages: tuple[PageLayout, ...]
    levels: Ladder
    evicts: bool
    in_blocks: bool
    takes_mean: bool
    sliding_window: int
    holds_waiting: bool
    row_budget: int | None


class StoreSizes(NamedTuple):
    """What the sizes of a whole store follow from, beside its layers.

    `capacity`: tokens of a row that tables have room for. `rewind`: tokens that layers with a sliding window
    keep beyond it. `waiting`: pages of tokens that wait. `has_frames`: frames of keys are given.
    """

    batch: int
    heads: int
    head_dim: int
    capacity: int
    rewind: int
    waiting: PageLayout
    has_frames: bool


class Region(NamedTuple):
    """Where a table of all layers lies in the memory of tables."""

    begin: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.begin + self.nbytes


_NO_REGION = Region(0, 0, (), "uint8")


@dataclass(frozen=True)
class StoreLayout:
    """What `store_layout` returns; arrays are not to be written to.

    Attributes
    ----------
    num_rungs, entries, max_slabs, max_pages : int
        Of the layer that has most.
    slab, num_slabs, arena_nbytes : tuple of int
        By layer: bytes of a slab, how many there are, bytes of the arena.
    begins : int array (layers + 1,)
        Where arenas begin in their memory, and where it ends.
    regions : dict of str to Region
        Of the states, of factors of means, and of the tables by their names in `LayerState`.
    first_tables : uint8 array
        What the memory of tables begins with in an empty store: up to `rung`. All behind is 0.
    states : STATE array (layers,)
        Their addresses count from the memory of tables, or of arenas.
    """

    num_rungs: int
    entries: int
    max_slabs: int
    max_pages: int
    slab: tuple[int, ...]
    num_slabs: tuple[int, ...]
    arena_nbytes: tuple[int, ...]
    begins: NDArray[np.int64]
    regions: dict[str, Region]
    first_tables: NDArray[np.uint8]
    states: Any

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the memory of tables."""
        return _aligned(max(region.end for region in self.regions.values()))


@lru_cache(maxsize=256)
def slab_nbytes(records: tuple[int, ...], pages: int) -> int:
    """Return the bytes of a slab: the least that waste little at every rung.

    Parameters
    ----------
    records : tuple of int
        Bytes of a page of each rung, multiples of 16.
    pages : int
        Number of pages of the widest rung that the arena is for; a slab holds a 256th of them or more.

    Examples
    --------
    >>> slab_nbytes((592, 1104, 2128), 2048)
    17024
    """
    widest = max(records)
    for size in range(widest * max(1, pages // 256), 65 * widest * max(1, pages // 256), UNIT):
        if all(size % record <= _WASTE * size for record in records):
            return size
    return widest * max(1, pages // 256)


@lru_cache(maxsize=16)
def store_layout(kinds: tuple[LayerKind, ...], of_layers: tuple[int, ...], sizes: StoreSizes) -> StoreLayout:
    """Lay down a store of layers, each of the kind that `of_layers` says.

    Raises
    ------
    NotImplementedError
        If an arena is larger than page tables can name.
    """
    num_rungs = max(len(kind.pages) for kind in kinds)
    segments = -(-sizes.capacity // (1 << 16))
    others = OPEN_PAGES + 2 + num_rungs * (segments + QUAD - 1)  # open, left over, and fillers
    pages = -(-sizes.capacity // TOKENS_PER_PAGE) + others
    entries = max(-(-pages // QUAD) * QUAD, WAITING_ENTRIES)
    slabs = [_slabs_of(kind, sizes, entries, others) for kind in kinds]
    waiting = sizes.batch * sizes.heads * WAITING_PAGES * sizes.waiting.nbytes
    arenas = [slab * n + kind.holds_waiting * waiting for kind, (slab, n) in zip(kinds, slabs, strict=True)]
    if max(arenas) > NO_PAGE * UNIT:
        raise NotImplementedError(
            f"a layer would take {max(arenas)} bytes of pages and page tables name {NO_PAGE * UNIT}: "
            "give a smaller budget, fewer rows or a shorter max_seqlen"
        )
    max_slabs = max(n for _, n in slabs)
    of_a_slab = [
        slab // min(page.nbytes for page in kind.pages) for kind, (slab, _) in zip(kinds, slabs, strict=True)
    ]
    max_pages = max_slabs * max(of_a_slab)
    in_blocks = any(kind.in_blocks for kind in kinds)
    shapes = _shapes(sizes, num_rungs, entries, max_slabs, max_pages, in_blocks)
    regions = _regions(shapes, len(of_layers))
    taken = list(map(_aligned, arenas))
    begins = np.cumsum([0, *(taken[i] for i in of_layers)])
    found = StoreLayout(
        num_rungs, entries, max_slabs, max_pages, tuple(slabs[i][0] for i in of_layers),
        tuple(slabs[i][1] for i in of_layers), tuple(arenas[i] for i in of_layers), begins, regions,
        np.zeros(regions["rung"].begin, np.uint8), np.zeros(len(of_layers), STATE),
    )  # fmt: skip
    _fill_first_tables(found, [kinds[i].takes_mean for i in of_layers])
    _fill_states(found, kinds, of_layers, sizes)
    return found


def tables_in(memory: Any, regions: dict[str, Region]) -> dict[str, Any]:
    """View those tables of all layers that a memory of tables has."""
    return {
        name: viewed(memory[x.begin : x.end], x.dtype, x.shape)
        for name, x in regions.items()
        if x.end <= len(memory)
    }


def pointers_of(states: Any) -> NDArray[np.uint64]:
    """View the addresses in `LayerState` structs, (layers, POINTERS)."""
    first = STATE.fields[POINTERS[0]][1]  # type: ignore[index]
    lines = states.view(np.uint8).reshape(len(states), STATE.itemsize)
    found: NDArray[np.uint64] = lines[:, first : first + 8 * len(POINTERS)].view(np.uint64)
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _slabs_of(kind: LayerKind, sizes: StoreSizes, entries: int, others: int) -> tuple[int, int]:
    """Bytes of a slab of a layer, and how many hold its pages, or the bytes of its rows, and spare ones."""
    records, reach = [page.nbytes for page in kind.pages], reach_of(kind.sliding_window, sizes.rewind)
    if reach:
        entries = min(-(-reach // TOKENS_PER_PAGE) + others, entries)
    held = sizes.batch * sizes.heads * entries * max(records)
    if kind.row_budget is not None:
        held = min(sizes.batch * kind.row_budget, held)
    slab = slab_nbytes(tuple(records), held // max(records))
    # Every rung may leave one slab in part empty, and a slab wastes a little.
    filled = slab - max(slab % record for record in records)
    spare = spare_nbytes(sizes.batch, sizes.heads, kind.levels, slab)
    return slab, -(-(held + spare) // filled) + len(records) + 1


def _shapes(
    sizes: StoreSizes, num_rungs: int, entries: int, max_slabs: int, max_pages: int, in_blocks: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape of a layer and dtype of each table: first those that are not all 0 in an empty store.

    Numbers of pages, of which no kernel reads more than are used, stand at the end.
    """
    bh, slabs, head_dim = (sizes.batch, sizes.heads), (max_slabs,), sizes.head_dim
    table = (*bh, entries)
    frame = {
        "k_mean": ((*bh, head_dim), "float16"),
        "k_shift": ((*bh, head_dim // 2), "uint8"),
        "exponent": ((*bh, 2), "int8"),
        "k_order": ((*bh, head_dim // 2 * in_blocks), "uint8"),
        "k_gain": ((*bh, 4 * in_blocks), "float32"),
    }
    not_zero = FRAME if sizes.has_frames else ("k_order", "k_gain")
    return {
        "states": ((STATE.itemsize,), "uint8"),
        "mean_factors": ((head_dim,), "float32"),
        "waits": ((sizes.batch,), "int32"),
        "num_free": ((1,), "int32"),
        "free_slabs": (slabs, "int32"),
        "open": ((*bh, OPEN_PAGES), "int32"),
        **{name: frame[name] for name in not_zero},
        "rung": (table, "uint8"),
        "count": (table, "uint8"),
        "index": (table, "int32"),
        "base": (table, "int16"),
        "num_pages": (bh, "int32"),
        **{name: frame[name] for name in FRAME if name not in not_zero},
        "k_ratio": ((*bh, head_dim // 2 * in_blocks), "int16"),
        "query_sums": ((*bh, head_dim), "float32"),
        "seqlen": (bh, "int32"),
        "used": ((RUNGS,), "int32"),
        "slab_count": ((RUNGS,), "int32"),
        "slabs": ((num_rungs, *slabs), "int32"),
        "slab_slot": (slabs, "int32"),
        "budget": ((sizes.batch,), "int64"),
        "status": ((1,), "int32"),
        "entry_of": ((num_rungs, max_pages), "int32"),
    }


def _regions(shapes: dict[str, tuple[tuple[int, ...], str]], layers: int) -> dict[str, Region]:
    regions, begin = {}, 0
    for name, (shape, dtype) in shapes.items():
        nbytes = layers * math.prod(shape) * numpy_dtype(dtype).itemsize
        regions[name] = Region(begin, nbytes, (layers, *shape), dtype)
        begin += _aligned(nbytes)
    return regions


def _fill_first_tables(layout: StoreLayout, takes_mean: list[bool]) -> None:
    tables = tables_in(layout.first_tables, layout.regions)
    num_slabs = np.array(layout.num_slabs, np.int32)[:, None]
    tables["waits"][...] = np.array(takes_mean)[:, None]
    tables["num_free"][...] = num_slabs
    tables["free_slabs"][...] = np.maximum(num_slabs - 1 - np.arange(layout.max_slabs, dtype=np.int32), 0)
    tables["open"][...] = -1
    tables["k_order"][...] = np.arange(tables["k_order"].shape[-1])
    tables["k_gain"][...] = tables["mean_factors"][...] = 1


def _fill_states(
    layout: StoreLayout, kinds: tuple[LayerKind, ...], of_layers: tuple[int, ...], sizes: StoreSizes
) -> None:
    found = np.zeros(len(kinds), STATE)
    for state, kind, layer in zip(found, kinds, map(of_layers.index, range(len(kinds))), strict=True):
        pages, slab = (*kind.pages, sizes.waiting), layout.slab[layer]
        state["rungs"][: len(pages)] = [
            (x.nbytes // UNIT, slab // x.nbytes, width_number(x.bits_k), x.bits_v, x.positions) for x in pages
        ]
        state["num_rungs"], state["evicts"] = len(kind.pages), kind.evicts
        state["sliding_window"], state["slab_units"] = kind.sliding_window, slab // UNIT
    states, layers = layout.states, np.arange(len(of_layers))
    lines = states.view(np.uint8).reshape(len(layers), STATE.itemsize)  # bytes are quicker than structs
    lines[...] = found.view(np.uint8).reshape(len(kinds), STATE.itemsize)[list(of_layers)]
    states["batch"], states["heads"], states["entries"] = sizes.batch, sizes.heads, layout.entries
    states["max_slabs"], states["max_pages"] = layout.max_slabs, layout.max_pages
    tables = [layout.regions.get(name, _NO_REGION) for name in POINTERS]
    begins, nbytes = np.array([(region.begin, region.nbytes) for region in tables], np.uint64).T
    pointers_of(states)[...] = begins + nbytes // len(layers) * layers[:, None].astype(np.uint64)
    states["arena"] = layout.begins[:-1]
    behind = layout.begins[:-1] + np.array(layout.slab) * np.array(layout.num_slabs)
    states["waiting"] = np.where([kinds[i].holds_waiting for i in of_layers], behind, 0)
