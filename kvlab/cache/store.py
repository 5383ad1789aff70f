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

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.layers import Layer
from kvlab.new_arrays import viewed
from kvlab.ops.frame import FRAME, LAST
from kvlab.ops.layer_state import POINTERS, STATE, UNIT
from kvlab.ops.packed import Window
from kvlab.ops.store_layout import LayerKind, StoreSizes, pointers_of, store_layout, tables_in
from kvlab.pages import NO_PAGE, TOKENS_PER_PAGE, DevicePages, LayerPages, PageLayout, new_pool

__all__ = [
    "DeviceStore",
    "RowMove",
    "move_rows",
    "reorder_rows",
]


def _highest_nbytes(layer: Layer, capacity: int, rewind: int) -> int:
    """Bytes of a row of so many tokens at the highest rung, behind exact ones of the residual window."""
    store, exact = layer.store, layer.stored.page_bytes(len(layer.stored.ladder) - 1)
    tokens = min(capacity, layer.reach(rewind) or capacity)
    pages = tokens // TOKENS_PER_PAGE + (1 + (capacity >> 16)) * len(store.ladder)
    longest = max(layer.residual, LAST - 1) if layer.takes_mean else layer.residual
    window = -(-longest // TOKENS_PER_PAGE) + 2
    packed = pages * store.page_bytes(len(store.ladder) - 1)
    return store.num_heads_kv * (packed + window * exact) + store.fixed_nbytes


def _kind_of(layer: Layer, holds_waiting: bool, row_budget: int | None) -> LayerKind:
    of = layer.stored
    return LayerKind(
        of.layouts, of.levels, of.evicts, of.in_blocks, layer.takes_mean, layer.sliding_window,
        holds_waiting, row_budget,
    )  # fmt: skip


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
        first, self.holds_waiting, self.rewind = self.stores[0], holds_waiting, rewind
        self.widest, self.capacity = first.exact_layout, capacity
        self.batch, self.heads, self.head_dim = batch, first.num_heads_kv, first.head_dim
        self.num_bh = self.batch * self.heads
        budgets = [None] * len(layers) if row_budgets is None else row_budgets
        if row_budgets is None and layers[0].residual:  # whose pages of width 16 are for few tokens
            budgets = [_highest_nbytes(layer, capacity, rewind) for layer in layers]
        keys = [*zip(layers, holds_waiting, budgets, strict=True)]
        numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}  # layers are often alike
        sizes = StoreSizes(
            batch, self.heads, self.head_dim, capacity, rewind, self.widest,
            any(layer.frame for layer in layers),
        )  # fmt: skip
        self._layout = layout = store_layout(
            tuple(_kind_of(*key) for key in numbers), tuple([numbers[key] for key in keys]), sizes
        )
        self.num_rungs, self.entries, self.max_pages = layout.num_rungs, layout.entries, layout.max_pages
        self.slab, self.num_slabs, self.max_slabs = layout.slab, layout.num_slabs, layout.max_slabs
        # One block: it is taken at once, and a copy begins while the host lays down the rest.
        self.like, self.memory_of_arenas = like, executor.arena(int(layout.begins[-1]), like)
        self._memory_of_tables = executor.empty((layout.tables_nbytes,), "uint8", like)
        self._waiting_apart: dict[int, Any] = {}
        self._lay_down_states()
        self._clear_tables()

    def copy(self) -> DeviceStore:
        """Return a store that holds the same pages at the same places."""
        return self._with(self.executor.copied_arenas(self), self._memory_of_tables)

    def before_move(self, waits: Sequence[bool]) -> DeviceStore:
        """Return what rows hold while others take their places: of what does not stay, a copy.

        Those are tables in `MOVED` and, in layers of which `waits` says that rows may wait, tokens that do.
        """
        pages = {layer: self.executor.copied(self.waiting[layer]) for layer, may in enumerate(waits) if may}
        return self._with(
            self.memory_of_arenas, self._memory_of_tables[: self._layout.regions["used"].begin], pages
        )

    def _with(self, arenas: Any, tables: Any, waiting: dict[int, Any] | None = None) -> DeviceStore:
        other = copy(self)
        for name in ("tables", "arenas", "waiting", "mean_factors"):
            vars(other).pop(name, None)
        other.memory_of_arenas, other._memory_of_tables = arenas, self.executor.copied(tables)
        other._waiting_apart = waiting or {}
        other._lay_down_states()
        self.executor.overwrite(other.states, other.host_states.view(np.uint8))
        return other

    def arenas_in(self, memory: Any) -> list[Any]:
        """The arena of each layer in a block for all."""
        begins = zip(self._layout.begins.tolist(), self._layout.arena_nbytes, strict=False)
        return [memory[begin : begin + nbytes] for begin, nbytes in begins]

    @cached_property
    def arenas(self) -> list[Any]:
        """The arena of each layer."""
        return self.arenas_in(self.memory_of_arenas)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """(layers, ...) arrays by the names of `LayerState`."""
        tables = tables_in(self._memory_of_tables, self._layout.regions)
        return {name: table for name, table in tables.items() if name in POINTERS}

    @property
    def states(self) -> Any:
        """The `LayerState` of all layers on the device, as bytes."""
        return self._memory_of_tables[: self._layout.states.nbytes]

    @cached_property
    def mean_factors(self) -> Any:
        """What means of keys that rows take are multiplied by: (layers, head_dim) float32, on the device."""
        x = self._layout.regions["mean_factors"]
        return viewed(self._memory_of_tables[x.begin : x.end], x.dtype, x.shape)

    def _lay_down_states(self) -> None:
        """Say where tables and arenas lie."""
        states = self._layout.states.view(np.uint8).copy().view(STATE)  # bytes are quicker than structs
        pointer = self.executor.pointer
        self.states_pointer = int(pointer(self._memory_of_tables))  # they stand first
        arenas, holds = np.uint64(pointer(self.memory_of_arenas)), np.array(self.holds_waiting, np.uint64)
        pointers = pointers_of(states)
        waiting = pointers[:, POINTERS.index("waiting")] + arenas * holds
        arena = pointers[:, POINTERS.index("arena")] + arenas
        pointers += np.uint64(self.states_pointer)
        states["arena"], states["waiting"] = arena, waiting
        for layer, pages in self._waiting_apart.items():
            states["waiting"][layer] = pointer(pages)
        self.host_states = states

    @property
    def _first_tables(self) -> NDArray[np.uint8]:
        """What the first tables of an empty store hold."""
        memory = self._layout.first_tables.copy()
        memory[: self.host_states.nbytes] = self.host_states.view(np.uint8)
        tables: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            given = {} if layer.mean_factor is None else {"mean_factors": layer.mean_factor}
            for name, of_layer in {**given, **(layer.frame or {})}.items():
                tables = tables or tables_in(memory, self._layout.regions)
                tables[name][number] = of_layer
        return memory

    def clear(self) -> None:
        """Drop all tokens; takes no memory on the device."""
        self.clear_arenas()
        self._clear_tables()

    def clear_arenas(self) -> None:
        """Write zeros over all pages, or what is saved of them might show what their memory held before."""
        self.executor.fill_zero(self.memory_of_arenas)

    def _clear_tables(self) -> None:
        self._memory_of_tables[: self._layout.regions["entry_of"].begin] = 0
        first = self._first_tables
        self.executor.overwrite(self._memory_of_tables[: len(first)], first)

    def all_slabs(self) -> NDArray[np.int32]:
        """What `free_slabs` of each layer holds while no slab is taken."""
        found: NDArray[np.int32] = tables_in(self._layout.first_tables, self._layout.regions)["free_slabs"]
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
        return int(self.memory_of_arenas.nbytes + self._memory_of_tables.nbytes)

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
        max_pages, num_pages = int(frame["num_pages"].max(initial=0)), frame["num_pages"][..., None]
        tables = {
            name: to_host(self.tables[name][layer])[..., :max_pages].view(x) for name, x in names.items()
        }
        held = np.arange(max_pages) < num_pages
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
