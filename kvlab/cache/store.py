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
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype, viewed
from kvlab.cache.ladder import LayerFormat, reach_of
from kvlab.ops.cuda.pages import OPEN_PAGES, RUNGS, STATE, UNIT, WAITING_PAGES
from kvlab.ops.packed import Window
from kvlab.pages import NO_PAGE, QUAD, TOKENS_PER_PAGE, LayerPages, PageLayout, new_pool

__all__ = [
    "MOVED",
    "OPEN_PAGES",
    "STATE",
    "UNIT",
    "WAITING_PAGES",
    "DevicePages",
    "DeviceStore",
    "PagesOfRows",
    "RowMove",
    "move_rows",
    "named_pages",
    "reorder_rows",
    "slab_nbytes",
]

_WASTE = 0.03
_ALIGNMENT = 256
"""Bytes that tables begin at a multiple of in their memory."""


@dataclass(frozen=True)
class DevicePages:
    """What packed attention reads of one layer; see `kvlab.ops.packed.Pages`."""

    layouts: tuple[PageLayout, ...]
    pools: tuple[Any, ...]
    rung: Any
    count: Any
    index: Any
    base: Any
    num_pages: Any
    k_mean: Any
    k_shift: Any
    dtype: str
    unit: int = UNIT


MOVED = (
    "rung",
    "count",
    "index",
    "base",
    "num_pages",
    "k_mean",
    "k_shift",
    "asked",
    "waits",
    "open",
    "seqlen",
)
"""Tables that say what a row holds."""


@dataclass(frozen=True)
class PagesOfRows:
    """Pages of all layers and the tables that name them.

    Attributes
    ----------
    tables : dict of str to array
        (layers, batch, ...) by the names in `MOVED`.
    arenas : list of uint8 arrays
        By layer.
    waiting : list of uint8 arrays or None
        By layer, pages of tokens that wait, `WAITING_PAGES` a (row, KV head).
    """

    tables: dict[str, Any]
    arenas: list[Any]
    waiting: list[Any]


def named_pages(tables: dict[str, Any]) -> NDArray[np.bool_]:
    """Which entries of page tables on the host name a page: fillers, and those behind the end, do not."""
    index = tables["index"].view(np.uint32)
    held = np.arange(index.shape[-1]) < tables["num_pages"][..., None]
    named: NDArray[np.bool_] = held & (index != NO_PAGE)
    return named


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


class DeviceStore:
    """Arenas and tables of all layers.

    Parameters
    ----------
    stores : sequence of LayerFormat
        One a layer.
    batch : int
    executor : Executor
        Whose memory it is: `kvlab.cache.cpu.CPU` or `kvlab.cache.cuda.GPU`.
    like : array
        On the device; memory comes from its framework.
    capacity : int
        Tokens of a row that the tables have room for.
    row_budgets : sequence of int, or None
        Bytes that a row may take in each layer; None: as many as the highest rung needs.
    spare : callable
        `spare(layer, slab_nbytes)`: bytes of an arena beyond what rows may take.
    takes_mean, holds_waiting : sequence of bool
        By layer: whether the device takes the mean of its keys, and whether rows have pages to wait for it.
    sliding_windows : sequence of int
        By layer: how many tokens a query sees; 0: all.
    rewind : int
        Tokens that layers with a sliding window keep beyond it.

    Attributes
    ----------
    arenas : list of uint8 arrays
        By layer, all in `memory_of_arenas`.
    tables : dict of str to array
        (layers, ...) arrays by the names of `LayerState`.
    states_pointer : int
        Address of the array of `LayerState` on the device.
    """

    def __init__(
        self,
        stores: Sequence[LayerFormat],
        batch: int,
        executor: Any,
        like: Any,
        capacity: int,
        row_budgets: Sequence[int] | None,
        spare: Callable[[int, int], int] = lambda layer, slab: 0,
        takes_mean: Sequence[bool] = (),
        holds_waiting: Sequence[bool] = (),
        sliding_windows: Sequence[int] = (),
        rewind: int = 0,
    ) -> None:
        first, self.executor = stores[0], executor
        self.takes_mean = np.array(takes_mean or [False] * len(stores), bool)
        self.holds_waiting = list(holds_waiting or [False] * len(stores))
        self.sliding_windows = list(sliding_windows or [0] * len(stores))
        self.widest = first.exact_layout
        self.stores, self.capacity = stores, capacity
        self.batch, self.heads, self.head_dim = batch, first.num_heads_kv, first.head_dim
        self.pairs, self.num_rungs = self.batch * self.heads, max(len(store.ladder) for store in stores)
        segments = -(-capacity // (1 << 16))
        others = OPEN_PAGES + 2 + self.num_rungs * (segments + QUAD - 1)  # open, left over, and fillers
        pages = -(-capacity // TOKENS_PER_PAGE) + others
        self.entries = max(-(-pages // QUAD) * QUAD, WAITING_PAGES)
        self.slab, self.num_slabs = [], []
        for number, store in enumerate(stores):
            records = [layout.nbytes for layout in store.layouts]
            reach, entries = self.reach(number, rewind), self.entries
            if reach:
                entries = min(-(-reach // TOKENS_PER_PAGE) + others, entries)
            most = self.pairs * entries * max(records)
            held = most if row_budgets is None else min(self.batch * row_budgets[number], most)
            slab = slab_nbytes(tuple(records), held // max(records))
            self.slab.append(slab)
            # Every rung may leave one slab in part empty, and a slab wastes a little.
            filled = slab - max(slab % record for record in records)
            self.num_slabs.append(-(-(held + spare(number, slab)) // filled) + len(records) + 1)
        self.max_slabs = max(self.num_slabs)
        self.max_pages = max(
            slab // min(layout.nbytes for layout in store.layouts) * self.max_slabs
            for slab, store in zip(self.slab, stores, strict=True)
        )
        waiting = self.pairs * WAITING_PAGES * self.widest.nbytes
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
        self._arena_nbytes = arenas
        self.memory_of_arenas = executor.arena(int(self._begins[-1]), like)
        self.like = like
        sizes = [self._nbytes_of_table(*kind) for kind in self._shapes().values()]
        self._memory_of_tables = executor.empty((sum(sizes),), "uint8", like)
        self.host_states = self._states()
        self._lay_down()
        self._clear_tables()

    def copy(self) -> DeviceStore:
        """Return a store that holds the same pages at the same places."""
        other = copy(self)
        other.memory_of_arenas = self.executor.copied_arenas(self)
        other._memory_of_tables = self.executor.copied(self._memory_of_tables)
        other.host_states = self.host_states.copy()
        other._lay_down()
        return other

    def arenas_in(self, memory: Any) -> list[Any]:
        """The arena of each layer in a block for all."""
        begins = zip(self._begins.tolist(), self._arena_nbytes, strict=False)
        return [memory[begin : begin + nbytes] for begin, nbytes in begins]

    def _nbytes_of_table(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes of a table of all layers, and those up to the next."""
        nbytes = len(self.stores) * math.prod(shape) * numpy_dtype(dtype).itemsize
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _lay_down(self) -> None:
        """Cut the memory of tables, and tell kernels where tables and arenas lie."""
        layers, begin, pointer = len(self.stores), 0, self.executor.pointer
        states, numbers = self.host_states, np.arange(layers, dtype=np.uint64)
        self.tables: dict[str, Any] = {}
        for name, (shape, dtype) in self._shapes().items():
            step = math.prod(shape) * numpy_dtype(dtype).itemsize
            mine = self._memory_of_tables[begin : begin + layers * step]
            self.tables[name] = viewed(mine, dtype, (layers, *shape))
            states[name] = pointer(self.tables[name]) + np.uint64(step) * numbers
            begin += self._nbytes_of_table(shape, dtype)
        self.arenas = self.arenas_in(self.memory_of_arenas)
        states["arena"] = pointer(self.memory_of_arenas) + self._begins[:-1].astype(np.uint64)
        begins = states["arena"] + np.array(self.slab, np.uint64) * np.array(self.num_slabs, np.uint64)
        states["waiting"] = np.where(self.holds_waiting, begins, 0)
        self.states = self.executor.to_device(states.view(np.uint8), self.like)
        self.states_pointer = int(pointer(self.states))

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        table = (self.batch, self.heads, self.entries)
        pairs, slabs = table[:2], (self.max_slabs,)
        return {
            "rung": (table, "uint8"),
            "count": (table, "uint8"),
            "index": (table, "int32"),
            "base": (table, "int16"),
            "num_pages": (pairs, "int32"),
            "k_mean": ((*pairs, self.head_dim), "float16"),
            "k_shift": ((*pairs, self.head_dim), "uint8"),
            "asked": ((*pairs, self.head_dim), "float32"),
            "waits": ((self.batch,), "int32"),
            "open": ((*pairs, OPEN_PAGES), "int32"),
            "seqlen": (pairs, "int32"),
            "used": ((RUNGS,), "int32"),
            "slab_count": ((RUNGS,), "int32"),
            "slabs": ((self.num_rungs, *slabs), "int32"),
            "free_slabs": (slabs, "int32"),
            "num_free": ((1,), "int32"),
            "entry_of": ((self.num_rungs, self.max_pages), "int32"),
            "slab_slot": (slabs, "int32"),
            "budget": ((self.batch,), "int64"),
            "status": ((1,), "int32"),
        }

    def clear(self) -> None:
        """Drop all tokens; takes no memory on the device."""
        self.clear_arenas()
        self._clear_tables()

    def clear_arenas(self) -> None:
        """Write zeros over all pages, or what is saved of them might show what their memory held before."""
        self.executor.fill_zero(self.memory_of_arenas)

    def _clear_tables(self) -> None:
        overwrite = self.executor.overwrite
        self._memory_of_tables[...] = 0
        self.tables["open"][...] = -1
        overwrite(self.tables["waits"], np.repeat(self.takes_mean[:, None], self.batch, 1).astype(np.int32))
        overwrite(self.tables["free_slabs"], np.stack([*map(self.all_slabs, range(len(self.stores)))]))
        overwrite(self.tables["num_free"], np.array(self.num_slabs, np.int32)[:, None])

    def all_slabs(self, layer: int) -> NDArray[np.int32]:
        """What `free_slabs` of a layer holds while no slab is taken."""
        slabs, n = np.zeros(self.max_slabs, np.int32), self.num_slabs[layer]
        slabs[:n] = np.arange(n)[::-1]
        return slabs

    def _states(self) -> Any:
        """The `LayerState` of every layer, but for addresses."""
        states = np.zeros(len(self.stores), STATE)
        for layer, (state, store) in enumerate(zip(states, self.stores, strict=True)):
            rungs = [
                (x.nbytes // UNIT, self.slab[layer] // x.nbytes, x.bits_k, x.bits_v, x.positions)
                for x in self.layouts(layer)
            ]
            state["rungs"][: len(rungs)] = rungs
            state["num_rungs"], state["evicts"] = len(store.ladder), store.evicts
        states["slab_units"] = np.array(self.slab) // UNIT
        states["sliding_window"] = self.sliding_windows
        for name in ("batch", "heads", "entries", "max_slabs", "max_pages"):
            states[name] = getattr(self, name)
        return states

    def rows(self) -> PagesOfRows:
        """The pages of all rows."""
        begins = [slab * n for slab, n in zip(self.slab, self.num_slabs, strict=True)]
        waiting = [
            arena[begin:] if holds else None
            for arena, begin, holds in zip(self.arenas, begins, self.holds_waiting, strict=True)
        ]
        return PagesOfRows({name: self.tables[name] for name in MOVED}, self.arenas, waiting)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of arenas, tables and states."""
        return sum(int(x.nbytes) for x in (self.memory_of_arenas, self._memory_of_tables, self.states))

    def reach(self, layer: int, rewind: int) -> int:
        """`reach_of` the sliding window of a layer."""
        return reach_of(self.sliding_windows[layer], rewind)

    def window(self, layer: int, after: int = 0) -> Window | None:
        """What queries see of a layer, the first of them `after` tokens behind the stored ones."""
        sliding = self.sliding_windows[layer]
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
            k_mean=tables["k_mean"][layer],
            k_shift=tables["k_shift"][layer],
            dtype=store.dtype,
        )

    def host_pages(self, layer: int) -> LayerPages:
        """A copy of the pages of a layer on the host, pool by pool, without those that hold no token.

        Waits for the device.
        """
        names = {"rung": np.uint8, "count": np.uint8, "index": np.uint32, "base": np.uint16}
        to_host = self.executor.to_host
        arena = to_host(self.arenas[layer]).reshape(-1, UNIT)
        frame = {name: to_host(self.tables[name][layer]) for name in ("num_pages", "k_mean", "k_shift")}
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

    def nbytes(self, layer: int, used: NDArray[np.int32]) -> int:
        """Bytes of the live pages and tables of a layer, given how many pages each rung has."""
        store = self.stores[layer]
        each = [*map(store.page_bytes, range(len(store.ladder))), store.waiting_page_bytes]
        pages = sum(int(n) * size for n, size in zip(used, each, strict=False))
        return pages + self.batch * store.fixed_nbytes

    def read(self, *names: str) -> list[NDArray[Any]]:
        """Copies of tables on the host; waits for the device."""
        return [self.executor.to_host(self.tables[name]) for name in names]


@dataclass(frozen=True)
class RowMove:
    """Where rows come from.

    Attributes
    ----------
    source : PagesOfRows
    rows : int32 array (batch,)
        Rows of the source.
    origins : int32 array (batch,)
        -1: the row keeps pages. Else a row of the source or, in place, one that keeps those that are copied.
    kept : int32 array (batch of the source,)
        Whether a row keeps its pages for one that wants it.
    in_place : bool
    """

    source: PagesOfRows
    rows: NDArray[np.int32]
    origins: NDArray[np.int32]
    kept: NDArray[np.int32]
    in_place: bool


def move_rows(source: PagesOfRows, kernels: Any, rows: Any, stream: int) -> None:
    """Let the rows of an empty store become rows of a source; `kernels` are those of the store."""
    rows = np.asarray(rows, np.int32)
    kept = np.zeros(source.tables["waits"].shape[1], np.int32)
    kernels.take_rows(RowMove(source, rows, rows, kept, in_place=False), stream)


def reorder_rows(store: DeviceStore, kernels: Any, rows: Any, stream: int) -> None:
    """Let the rows of a store become others of it; as many as it has."""
    rows = np.asarray(rows, np.int32)
    wanted, first = np.unique(rows, return_index=True)
    kept, keeper = np.zeros((2, store.batch), np.int32)
    kept[wanted], keeper[wanted] = 1, first
    origins = keeper[rows]
    origins[first] = -1
    copied = store.executor.copied
    tables = {name: copied(store.tables[name]) for name in MOVED}
    waiting = [None if x is None else copied(x) for x in store.rows().waiting]
    source = PagesOfRows(tables, store.arenas, waiting)
    kernels.take_rows(RowMove(source, rows, origins, kept, in_place=True), stream)
