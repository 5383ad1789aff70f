"""The memory of a cache on any device: arenas, page tables and their layout, as kernels see it.

All pages of a layer lie in one arena, cut into slabs that belong to one rung at a time, so the mixture of
rungs may change without any of them running out. Tables stand in one array a kind for all layers; the host
never reads them but where a docstring says so. What a kernel gets is an array of `LayerState` structs
(kernels/cuda/pages/state.cuh), made here.

Memory comes from an executor: on a GPU, from the framework of the first array that the cache sees.

Rows may take over pages of other rows (`move_rows`, `reorder_rows`): beams, other batches, copies, growth. In
place, a row that is wanted keeps its pages, for the first row that wants it; others get a copy, at places of
rows that nobody wants. A store with other sizes gets copies of all. The host sees none of the pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype, viewed
from kvlab.cache.layers import Layer, LayerFormat
from kvlab.ops.frame import FRAME, LAST
from kvlab.ops.layer_state import OPEN_PAGES, POINTERS, RUNGS, STATE, UNIT, WAITING_ENTRIES, WAITING_PAGES
from kvlab.ops.packed import Window
from kvlab.ops.plan import spare_nbytes
from kvlab.pages import (
    NO_PAGE,
    QUAD,
    TOKENS_PER_PAGE,
    DevicePages,
    LayerPages,
    PageLayout,
    new_pool,
    width_number,
)

__all__ = [
    "DeviceStore",
    "RowMove",
    "move_rows",
    "reorder_rows",
    "slab_nbytes",
]

_WASTE = 0.03
_ALIGNMENT = 256
"""Bytes that tables begin at a multiple of in their memory."""


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


@lru_cache(maxsize=64)  # layers are often alike
def _slabs_of(store: LayerFormat, batch: int, pages: int, most: int | None) -> tuple[int, int]:
    """Bytes of a slab of a layer, and how many hold so many pages, or `most` bytes, and spare ones."""
    records = [layout.nbytes for layout in store.layouts]
    held = pages * max(records) if most is None else min(most, pages * max(records))
    slab = slab_nbytes(tuple(records), held // max(records))
    # Every rung may leave one slab in part empty, and a slab wastes a little.
    filled = slab - max(slab % record for record in records)
    spare = spare_nbytes(batch, store.num_heads_kv, store.levels, slab)
    return slab, -(-(held + spare) // filled) + len(records) + 1


def _highest_nbytes(layer: Layer, capacity: int, rewind: int) -> int:
    """Bytes of a row of so many tokens at the highest rung, behind exact ones of the residual window."""
    store, exact = layer.store, layer.stored.page_bytes(len(layer.stored.ladder) - 1)
    tokens = min(capacity, layer.reach(rewind) or capacity)
    pages = tokens // TOKENS_PER_PAGE + (1 + (capacity >> 16)) * len(store.ladder)
    longest = max(layer.residual, LAST - 1) if layer.takes_mean else layer.residual
    window = -(-longest // TOKENS_PER_PAGE) + 2
    packed = pages * store.page_bytes(len(store.ladder) - 1)
    return store.num_heads_kv * (packed + window * exact) + store.fixed_nbytes


def _pointers(states: Any) -> NDArray[np.uint64]:
    """The addresses in `LayerState` structs, (layers, POINTERS)."""
    first = STATE.fields[POINTERS[0]][1]  # type: ignore[index]
    lines = states.view(np.uint8).reshape(len(states), STATE.itemsize)
    found: NDArray[np.uint64] = lines[:, first : first + 8 * len(POINTERS)].view(np.uint64)
    return found


class _Place(NamedTuple):
    """Where a table of all layers lies in the memory of tables."""

    begin: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


class DeviceStore:
    """Arenas and tables of all layers.

    Parameters
    ----------
    layers : sequence of Layer
    batch : int
    executor : Executor
        Whose memory it is: `kvlab.cache.cpu.CPU` or `kvlab.cache.cuda.GPU`.
    like : array
        On the device; memory comes from its framework.
    capacity : int
        Tokens of a row that the tables have room for.
    row_budgets : sequence of int, or None
        Bytes that a row may take in each layer; None: as many as the highest rung needs.
    holds_waiting : sequence of bool
        By layer: whether rows have pages to wait for the mean of their keys.
    rewind : int
        Tokens that layers with a sliding window keep beyond it.

    Attributes
    ----------
    stores : list of LayerFormat
        By layer, what pages it has.
    arenas : list of uint8 arrays
        By layer, all in `memory_of_arenas`.
    tables : dict of str to array
        (layers, ...) arrays by the names of `LayerState`.
    mean_factors : (layers, head_dim) float32 array
        On the device: what means of keys that rows take are multiplied by.
    states_pointer : int
        Address of the array of `LayerState` on the device.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        batch: int,
        executor: Any,
        like: Any,
        capacity: int,
        row_budgets: Sequence[int] | None,
        holds_waiting: Sequence[bool],
        rewind: int = 0,
    ) -> None:
        self.layers, self.stores, self.executor = layers, [layer.stored for layer in layers], executor
        stores, first, self.holds_waiting, self.rewind = self.stores, self.stores[0], holds_waiting, rewind
        factors = np.ones((len(layers), first.head_dim), np.float32)
        for number, layer in enumerate(layers):
            if layer.mean_factor is not None:
                factors[number] = layer.mean_factor
        self.mean_factors = executor.to_device(factors, like)
        self.widest, self.capacity = first.exact_layout, capacity
        self.batch, self.heads, self.head_dim = batch, first.num_heads_kv, first.head_dim
        self.num_bh, self.num_rungs = self.batch * self.heads, max(len(store.ladder) for store in stores)
        segments = -(-capacity // (1 << 16))
        others = OPEN_PAGES + 2 + self.num_rungs * (segments + QUAD - 1)  # open, left over, and fillers
        pages = -(-capacity // TOKENS_PER_PAGE) + others
        self.entries = max(-(-pages // QUAD) * QUAD, WAITING_ENTRIES)
        if row_budgets is None and layers[0].residual:  # whose pages of width 16 are for few tokens
            row_budgets = [_highest_nbytes(layer, capacity, rewind) for layer in layers]
        self.slab, self.num_slabs = [], []
        for number, store in enumerate(stores):
            reach, entries = self.reach(number), self.entries
            if reach:
                entries = min(-(-reach // TOKENS_PER_PAGE) + others, entries)
            most = None if row_budgets is None else batch * row_budgets[number]
            slab, num_slabs = _slabs_of(store, batch, self.num_bh * entries, most)
            self.slab.append(slab)
            self.num_slabs.append(num_slabs)
        self.max_slabs = max(self.num_slabs)
        self.max_pages = self.max_slabs * max(
            slab // min(layout.nbytes for layout in store.layouts)
            for slab, store in set(zip(self.slab, stores, strict=True))
        )
        waiting = self.num_bh * WAITING_PAGES * self.widest.nbytes
        arenas = [
            slab * n + waits * waiting
            for slab, n, waits in zip(self.slab, self.num_slabs, self.holds_waiting, strict=True)
        ]
        if max(arenas) > NO_PAGE * UNIT:
            raise NotImplementedError(
                f"a layer would take {max(arenas)} bytes of pages and page tables name {NO_PAGE * UNIT}: "
                "give a smaller budget, fewer rows or a shorter max_seqlen"
            )
        # One block: it is taken at once, and a copy begins while the host lays down the rest.
        self._begins = np.cumsum([0, *(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in arenas)])
        self._arena_nbytes, self.like = arenas, like
        self.memory_of_arenas = executor.arena(int(self._begins[-1]), like)
        self._places, begin = {}, 0
        for name, (shape, dtype) in self._shapes().items():
            nbytes = len(stores) * math.prod(shape) * numpy_dtype(dtype).itemsize
            self._places[name] = _Place(begin, nbytes, (len(stores), *shape), dtype)
            begin += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._columns = [POINTERS.index(name) for name in self._places]
        self._memory_of_tables = executor.empty((begin,), "uint8", like)
        self._waiting_apart: dict[int, Any] = {}
        self._first_tables, self._relative = self._empty_tables(), self._relative_states()
        self._tell()
        self._clear_tables()

    def copy(self) -> DeviceStore:
        """Return a store that holds the same pages at the same places."""
        return self._with(self.executor.copied_arenas(self), self._memory_of_tables)

    def before_move(self, waits: Sequence[bool]) -> DeviceStore:
        """Return what rows hold while others take their places: of what does not stay, a copy.

        Those are tables in `MOVED` and, in layers of which `waits` says that rows may wait, tokens that do.
        """
        pages = {layer: self.executor.copied(self.waiting[layer]) for layer, may in enumerate(waits) if may}
        return self._with(self.memory_of_arenas, self._memory_of_tables[: self._places["used"].begin], pages)

    def _with(self, arenas: Any, tables: Any, waiting: dict[int, Any] | None = None) -> DeviceStore:
        other = copy(self)
        for name in ("tables", "arenas", "waiting"):
            vars(other).pop(name, None)
        other.memory_of_arenas, other._memory_of_tables = arenas, self.executor.copied(tables)
        other._waiting_apart = waiting or {}
        other._tell()
        return other

    def arenas_in(self, memory: Any) -> list[Any]:
        """The arena of each layer in a block for all."""
        begins = zip(self._begins.tolist(), self._arena_nbytes, strict=False)
        return [memory[begin : begin + nbytes] for begin, nbytes in begins]

    @cached_property
    def arenas(self) -> list[Any]:
        """The arena of each layer."""
        return self.arenas_in(self.memory_of_arenas)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """(layers, ...) arrays by the names of `LayerState`."""
        return self._tables_in(self._memory_of_tables)

    def _tables_in(self, memory: Any) -> dict[str, Any]:
        places = {name: place for name, place in self._places.items() if place.end <= len(memory)}
        return {name: viewed(memory[x.begin : x.end], x.dtype, x.shape) for name, x in places.items()}

    def _tell(self) -> None:
        """Tell kernels where tables and arenas lie."""
        states, pointer = self._relative.view(np.uint8).copy().view(STATE), self.executor.pointer
        base = np.uint64(pointer(self._memory_of_tables))
        _pointers(states)[:, self._columns] += base
        base = np.uint64(pointer(self.memory_of_arenas))
        states["arena"] += base
        states["waiting"] += base * np.array(self.holds_waiting, np.uint64)
        for layer, pages in self._waiting_apart.items():
            states["waiting"][layer] = pointer(pages)
        self.host_states = states
        self.states = self.executor.to_device(states.view(np.uint8), self.like)
        self.states_pointer = int(pointer(self.states))

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape of a layer and dtype of each table: first those that are not all 0 in an empty store."""
        table = (self.batch, self.heads, self.entries)
        bh, slabs = table[:2], (self.max_slabs,)
        in_blocks = any(store.in_blocks for store in self.stores)
        frame = {
            "k_mean": ((*bh, self.head_dim), "float16"),
            "k_shift": ((*bh, self.head_dim), "uint8"),
            "exponent": ((*bh, 2 * in_blocks), "int8"),
            "k_order": ((*bh, self.head_dim * in_blocks), "uint8"),
            "k_gain": ((*bh, 4 * in_blocks), "float32"),
        }
        not_zero = FRAME if any(layer.frame for layer in self.layers) else ("k_order", "k_gain")
        return {
            "waits": ((self.batch,), "int32"),
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
            "asked": ((*bh, self.head_dim), "float32"),
            "seqlen": (bh, "int32"),
            "used": ((RUNGS,), "int32"),
            "slab_count": ((RUNGS,), "int32"),
            "slabs": ((self.num_rungs, *slabs), "int32"),
            "entry_of": ((self.num_rungs, self.max_pages), "int32"),
            "slab_slot": (slabs, "int32"),
            "budget": ((self.batch,), "int64"),
            "status": ((1,), "int32"),
        }

    def _empty_tables(self) -> NDArray[np.uint8]:
        """What the first tables of an empty store hold, on the host."""
        memory = np.zeros(self._places["rung"].begin, np.uint8)
        tables = self._tables_in(memory)
        tables["waits"][...] = np.array([layer.takes_mean for layer in self.layers])[:, None]
        tables["num_free"][...] = np.array(self.num_slabs)[:, None]
        tables["free_slabs"][...] = self.all_slabs()
        tables["open"][...] = -1
        tables["k_order"][...] = np.arange(tables["k_order"].shape[-1])
        tables["k_gain"][...] = 1
        for number, layer in enumerate(self.layers):
            for name, of_heads in (layer.frame or {}).items():
                tables[name][number] = of_heads
        return memory

    def clear(self) -> None:
        """Drop all tokens; takes no memory on the device."""
        self.clear_arenas()
        self._clear_tables()

    def clear_arenas(self) -> None:
        """Write zeros over all pages, or what is saved of them might show what their memory held before."""
        self.executor.fill_zero(self.memory_of_arenas)

    def _clear_tables(self) -> None:
        self._memory_of_tables[...] = 0
        self.executor.overwrite(self._memory_of_tables[: len(self._first_tables)], self._first_tables)

    def all_slabs(self) -> NDArray[np.int32]:
        """What `free_slabs` of each layer holds while no slab is taken."""
        found: NDArray[np.int32] = np.array(self.num_slabs, np.int32)[:, None] - 1
        return np.maximum(found - np.arange(self.max_slabs, dtype=np.int32), 0)

    def _relative_states(self) -> Any:
        """The `LayerState` of every layer, with addresses that count from the memory they lie in."""
        states, numbers = np.zeros(len(self.stores), STATE), np.arange(len(self.stores))
        kinds = [*zip(self.stores, self.slab, strict=True)]
        lines = states.view(np.uint8).reshape(len(numbers), STATE.itemsize)  # bytes are quicker than structs
        for kind in set(kinds):
            rungs = self._rungs(*kind).view(np.uint8)
            lines[[other == kind for other in kinds], : len(rungs)] = rungs  # the first field
        states["num_rungs"] = [len(store.ladder) for store in self.stores]
        states["evicts"] = [store.evicts for store in self.stores]
        states["slab_units"] = np.array(self.slab) // UNIT
        states["sliding_window"] = [layer.sliding_window for layer in self.layers]
        for name in ("batch", "heads", "entries", "max_slabs", "max_pages"):
            states[name] = getattr(self, name)
        begins, strides = np.array([(x.begin, x.nbytes // len(numbers)) for x in self._places.values()]).T
        _pointers(states)[:, self._columns] = begins + strides * numbers[:, None]
        states["arena"] = self._begins[:-1]
        behind = self._begins[:-1] + np.array(self.slab) * np.array(self.num_slabs)
        states["waiting"] = np.where(self.holds_waiting, behind, 0)
        return states

    def _rungs(self, store: LayerFormat, slab: int) -> Any:
        """`LayerState.rungs` of a layer."""
        found = np.zeros(RUNGS, STATE["rungs"].base)
        layouts = (*store.layouts, self.widest)
        found[: len(layouts)] = [
            (x.nbytes // UNIT, slab // x.nbytes, width_number(x.bits_k), x.bits_v, x.positions)
            for x in layouts
        ]
        return found

    @cached_property
    def waiting(self) -> list[Any]:
        """By layer, pages of tokens that wait, `WAITING_PAGES` a (row, KV head); None: no row can wait."""
        begins = [slab * n for slab, n in zip(self.slab, self.num_slabs, strict=True)]
        arenas = zip(self.arenas, begins, self.holds_waiting, strict=True)
        found = [arena[begin:] if holds else None for arena, begin, holds in arenas]
        return [self._waiting_apart.get(layer, pages) for layer, pages in enumerate(found)]

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of arenas, tables and states."""
        held = self.memory_of_arenas, self._memory_of_tables, self.states, self.mean_factors
        return sum(int(x.nbytes) for x in held)

    def reach(self, layer: int) -> int:
        """How many tokens of a layer plans keep; 0: all."""
        return self.layers[layer].reach(self.rewind)

    def window(self, layer: int, after: int = 0) -> Window | None:
        """What queries see of a layer, the first of them `after` tokens behind the stored ones."""
        sliding = self.layers[layer].sliding_window
        if not sliding:
            return None
        first = self.tables["seqlen"][layer].reshape(-1)[: self.batch]  # the same for all heads of all rows
        return Window(sliding - 1, first + after if after else first)

    def layouts(self, layer: int) -> tuple[PageLayout, ...]:
        """The pages of each rung; behind those of the ladder, that of tokens that wait."""
        layouts: tuple[PageLayout, ...] = self.stores[layer].layouts
        return (*layouts, self.widest) if self.holds_waiting[layer] else layouts

    def pages(self, layer: int, *, waiting: bool = False) -> DevicePages:
        """What packed attention reads of a layer; `waiting`: rows may have tokens that wait."""
        store, tables = self.stores[layer], self.tables
        layouts = self.layouts(layer) if waiting else store.layouts
        return DevicePages(
            layouts=layouts,
            pools=(self.arenas[layer],) * len(layouts),
            rung=tables["rung"][layer],
            count=tables["count"][layer],
            index=tables["index"][layer],
            base=tables["base"][layer],
            num_pages=tables["num_pages"][layer],
            **{name: tables[name][layer] for name in FRAME},
            dtype=store.dtype,
            unit=UNIT,
        )

    def host_pages(self, layer: int) -> LayerPages:
        """A copy of the pages of a layer on the host, pool by pool, without those that hold no token.

        Waits for the device.
        """
        names = {"rung": np.uint8, "count": np.uint8, "index": np.uint32, "base": np.uint16}
        to_host = self.executor.to_host
        arena = to_host(self.arenas[layer]).reshape(-1, UNIT)
        frame = {name: to_host(self.tables[name][layer]) for name in ("num_pages", *FRAME)}
        most, num_pages = int(frame["num_pages"].max(initial=0)), frame["num_pages"][..., None]
        tables = {name: to_host(self.tables[name][layer])[..., :most].view(x) for name, x in names.items()}
        held = np.arange(most) < num_pages
        full = held & (tables["count"] > 0)
        index = np.full(full.shape, NO_PAGE, np.uint32)
        ladder = self.stores[layer].layouts
        waiting = (tables["rung"][held] == len(ladder)).any()
        layouts, pools = self.layouts(layer) if waiting else ladder, []
        for r, layout in enumerate(layouts):
            mine = full & (tables["rung"] == r)
            first = tables["index"][mine].astype(np.int64)
            pool = new_pool(len(first), layout)
            pool[...] = arena[first[:, None] + np.arange(layout.nbytes // UNIT)].reshape(pool.shape)
            pools.append(pool)
            index[mine] = np.arange(len(first), dtype=np.uint32)
        tables["index"] = index
        return LayerPages(layouts, tuple(pools), **tables, **frame, dtype=self.stores[layer].dtype)

    def nbytes(self) -> list[int]:
        """Bytes of the live pages and tables of each layer; waits for the device."""
        used, waits, num_pages = self.read("used", "waits", "num_pages")
        waiting, found = ((waits > 0)[..., None] & (num_pages > 0)).sum((1, 2)), []
        for layer, (store, pages) in enumerate(zip(self.stores, used.tolist(), strict=True)):
            held = sum(n * store.page_bytes(r) for r, n in enumerate(pages[: len(store.ladder)]))
            heads = int(waiting[layer]) * self.holds_waiting[layer]
            found.append(held + heads * store.waiting_nbytes + self.batch * store.fixed_nbytes)
        return found

    def read(self, *names: str) -> list[NDArray[Any]]:
        """Copies of tables on the host; waits for the device."""
        return [self.executor.to_host(self.tables[name]) for name in names]


@dataclass(frozen=True)
class RowMove:
    """Where rows come from.

    Attributes
    ----------
    source : DeviceStore
        In place, what `before_move` gave.
    rows : int32 array (batch,)
        Rows of the source.
    origins : int32 array (batch,)
        -1: the row keeps pages. Else a row of the source or, in place, one that keeps those that are copied.
    kept : int32 array (batch of the source,)
        Whether a row keeps its pages for one that wants it.
    in_place : bool
    """

    source: DeviceStore
    rows: NDArray[np.int32]
    origins: NDArray[np.int32]
    kept: NDArray[np.int32]
    in_place: bool


def move_rows(source: DeviceStore, store: DeviceStore, rows: Any, stream: int) -> None:
    """Let the rows of an empty store become rows of a source."""
    rows = np.asarray(rows, np.int32)
    kept = np.zeros(source.batch, np.int32)
    store.executor.kernels(store).take_rows(RowMove(source, rows, rows, kept, in_place=False), stream)


def reorder_rows(store: DeviceStore, kernels: Any, rows: Any, waits: Sequence[bool], stream: int) -> None:
    """Let the rows of a store become others of it, as many as it has; `waits` as for `before_move`."""
    rows = np.asarray(rows, np.int32)
    wanted, first = np.unique(rows, return_index=True)
    kept, keeper = np.zeros((2, store.batch), np.int32)
    kept[wanted], keeper[wanted] = 1, first
    origins = keeper[rows]
    origins[first] = -1
    kernels.take_rows(RowMove(store.before_move(waits), rows, origins, kept, in_place=True), stream)
