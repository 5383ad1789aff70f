"""Rows of a store in host memory, in NumPy: what kernels/cuda/pages/means.cu and rows.cu do on a GPU.

`freeze_row` takes the mean of a row's keys, that of its valid tokens FIRST to LAST - 1, when it has enough;
its tokens wait until then. `take_rows` has rows take over pages of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.frame import (
    ASKING,
    LAST,
    add_queries,
    exponent_of,
    key_gain,
    key_mean,
    key_order,
    key_shift,
)
from kvlab.cache.ladder import LayerFormat
from kvlab.cache.store import (
    MOVED,
    OPEN_PAGES,
    UNIT,
    WAITING_ENTRIES,
    WAITING_PAGES,
    DeviceStore,
    RowMove,
    named_pages,
)
from kvlab.pages import NO_PAGE, RAW, TOKENS_PER_PAGE, read_tokens, write_tokens

__all__ = ["MergedTokens", "NewRow", "copy_pages", "freeze_row", "take_rows"]

Ints = NDArray[np.int64]


class NewRow(NamedTuple):
    """New tokens of a row: k, v (steps, heads, head_dim), valid (steps,) bool, codes (heads, steps) uint8.

    q (steps or 0, query heads, head_dim): where there are none, there are no queries.
    """

    k: Any
    v: Any
    q: Any
    valid: NDArray[np.bool_]
    codes: NDArray[np.uint8]
    first: int


class MergedTokens(NamedTuple):
    """What the plan is given of all rows, as `kvlab.cache.waiting.Merged`; None: there is none."""

    before: int
    k: Any
    v: Any
    valid: Any
    importance: Any
    positions: Any


@dataclass(frozen=True)
class _Row:
    """The waiting pages of a row."""

    store: DeviceStore
    layer: int
    row: int

    @property
    def tables(self) -> dict[str, Any]:
        return {name: table[self.layer] for name, table in self.store.tables.items()}

    def address(self, head: int, page: int) -> int:
        """Of a page, in units from the start of the arena."""
        store, units = self.store, self.store.widest.nbytes // UNIT
        first = store.slab[self.layer] * store.num_slabs[self.layer] // UNIT
        return first + ((self.row * store.heads + head) * WAITING_PAGES + page) * units

    def page(self, head: int, page: int) -> NDArray[np.uint8]:
        """A page's record, (1, nbytes)."""
        start = self.address(head, page) * UNIT
        found: NDArray[np.uint8] = self.store.arenas[self.layer][start : start + self.store.widest.nbytes]
        return found[None]

    def tokens(self, head: int) -> tuple[Ints, NDArray[np.uint8], Any, Any]:
        """Positions, importance, keys and values of the tokens that wait."""
        layout, dtype = self.store.widest, self.store.stores[self.layer].dtype
        tables, positions, codes = self.tables, [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        vectors = [np.empty((2, 0, self.store.head_dim), np.float32)]
        for number in range(min(int(tables["num_pages"][self.row, head]), WAITING_PAGES)):
            at, record = (self.row, head, number), self.page(head, number)
            slots = np.arange(int(tables["count"][at]))
            vectors.append(np.stack(read_tokens(record, layout, dtype, np.zeros_like(slots), slots)))
            start = (int(tables["base"][at]) & 0xFFFF) << 16
            positions.append(layout.positions_in(record)[0, slots].astype(np.int64) + start)
            codes.append(layout.importance_in(record)[0, slots])
        k, v = np.concatenate(vectors, 1)
        return np.concatenate(positions), np.concatenate(codes), k, v

    def keep(self, new: NewRow, seen: Ints, waiting: int) -> None:
        """Copy new tokens behind `waiting` others."""
        layout, dtype = self.store.widest, self.store.stores[self.layer].dtype
        raw = np.full((2, 1), RAW, np.int16)
        for head in range(self.store.heads):
            for place, step in enumerate(seen, waiting):
                page, slot = self.page(head, place // TOKENS_PER_PAGE), place % TOKENS_PER_PAGE
                where = np.array([0]), np.array([slot])
                k, v = (x[step, head].astype(np.float32)[None] for x in (new.k, new.v))
                write_tokens(page, layout, dtype, *where, k, v, raw)
                layout.positions_in(page)[0, slot] = (new.first + step) & 0xFFFF
                layout.importance_in(page)[0, slot] = new.codes[head, step]


def freeze_row(
    store: DeviceStore, layer: int, row: int, new: NewRow, merged: MergedTokens, lookahead: int, force: bool
) -> None:
    """Take the mean of a row that has enough tokens, or keep its new ones; see `kernels.freeze_means`."""
    pages, steps = _Row(store, layer, row), len(new.valid)
    tables, end = pages.tables, new.first + steps
    waits, seen = bool(tables["waits"][row]), np.flatnonzero(new.valid)
    held = [pages.tokens(head) for head in range(store.heads)] if waits else []
    waiting = len(held[0][0]) if held else 0
    total, last = waiting + len(seen), (end + max(lookahead, 1) - 1) >> 16
    first = last
    if total:
        first = int(tables["base"][row, 0, 0]) & 0xFFFF if waiting else (new.first + int(seen[0])) >> 16
    goes = waits and (force or total >= LAST or first != last)
    if merged.valid is not None:
        _fill(merged, row, new, held if goes else [], goes or not waits)
    if waits and len(new.q):
        add_queries(tables["asked"][row], new.q[seen[max(ASKING - waiting, 0) : max(LAST - waiting, 0)]])
    for head, (_, _, k, v) in enumerate(held if goes else []):
        sample, values = (
            np.concatenate([x, y[seen, head].astype(np.float32)])[:LAST, None]
            for x, y in ((k, new.k), (v, new.v))
        )
        _freeze_head(tables, (row, head), store.stores[layer], sample, values)
    if waits and not goes:
        pages.keep(new, seen, waiting)
        segments = (first, first) if total else (end >> 16, last)
        for page in range(WAITING_ENTRIES):
            at = row, slice(None), page
            tables["rung"][at] = len(store.stores[layer].layouts)
            tables["count"][at] = np.clip(total - TOKENS_PER_PAGE * page, 0, TOKENS_PER_PAGE)
            tables["base"][at] = np.array(segments, np.uint16).view(np.int16)[min(page, 1)]
            addresses = [pages.address(head, page) for head in range(store.heads)]
            named = np.array(addresses if page < WAITING_PAGES else NO_PAGE, np.uint32)
            tables["index"][at] = named.view(np.int32)
        tables["open"][row] = total // TOKENS_PER_PAGE + np.arange(OPEN_PAGES)
    if steps:
        tables["seqlen"][row] = end
    if waits:
        tables["num_pages"][row], tables["waits"][row] = 0 if goes else WAITING_ENTRIES, not goes
    if goes:
        tables["open"][row] = -1


def _freeze_head(tables: dict[str, Any], at: tuple[int, int], store: LayerFormat, k: Any, v: Any) -> None:
    """Take the frame of a (row, KV head) from its first keys and values, (n, 1, head_dim)."""
    asked = tables["asked"][at][None]
    exponent = exponent_of(k) if store.in_blocks else None
    mean = key_mean(k, exponent, narrow=store.is_narrow)
    shift = key_shift(k, mean, asked, exponent)
    found: dict[str, Any] = {"k_mean": mean[0], "k_shift": shift[0]}
    if exponent is not None:
        order = key_order(k, mean, asked, exponent)
        gain = key_gain(k, mean, shift, order, exponent)
        found |= {"exponent": (exponent[0], exponent_of(v)[0]), "k_order": order[0], "k_gain": gain[0]}
    for name, value in found.items():
        tables[name][at] = value


def _fill(merged: MergedTokens, row: int, new: NewRow, held: list[Any], taken: bool) -> None:
    """Say which tokens of a row the plan takes in, and copy those that have waited."""
    before, heads = merged.before, len(new.codes)
    merged.valid[row] = 0
    merged.valid[row, before:] = new.valid & taken
    if not before:
        return
    merged.positions[row, :before] = 0
    merged.positions[row, before:] = new.first + np.arange(len(new.valid))
    for head, (position, code, k, v) in enumerate(held):
        n = len(position)
        merged.valid[row, :n], merged.positions[row, :n] = 1, position
        merged.importance[row * heads + head, :n] = code
        merged.k[row, :n, head], merged.v[row, :n, head] = k, v


def take_rows(store: DeviceStore, layer: int, move: RowMove) -> None:
    """Let the rows of a layer become those that a move names."""
    mine = {name: table[layer] for name, table in store.tables.items()}
    old = {name: move.source.tables[name][layer][move.rows] for name in MOVED}
    entries, slab_units = old["rung"].shape[2], store.slab[layer] // UNIT
    records = np.array([layout.nbytes // UNIT for layout in store.layouts(layer)], np.int64)
    live, named = np.arange(entries) < old["num_pages"][..., None], named_pages(old)
    waits = (old["waits"] > 0) & store.holds_waiting[layer]
    rung, index = old["rung"].astype(np.int64), old["index"].view(np.uint32).astype(np.int64)
    planned = named & ~waits[:, None, None]
    stays = planned & (move.origins < 0)[:, None, None]
    came, number = index.copy(), np.zeros_like(index)
    slab, within = np.divmod(index[stays], slab_units)
    per_slab = slab_units // records
    number[stays] = mine["slab_slot"][slab] * per_slab[rung[stays]] + within // records[rung[stays]]
    want = [
        _give_numbers(number, planned & (rung == r), stays) for r in range(len(store.stores[layer].layouts))
    ]
    _exchange_slabs(mine, [-(-n // int(pages)) for n, pages in zip(want, per_slab, strict=False)])
    mine["used"][: len(want)] = want
    at = rung[planned], number[planned]
    index[planned] = mine["slabs"][at[0], at[1] // per_slab[at[0]]] * np.int64(slab_units)
    index[planned] += at[1] % per_slab[at[0]] * records[at[0]]
    heads, bh = store.heads, np.arange(len(move.rows) * store.heads).reshape(-1, store.heads, 1)
    held = named & waits[:, None, None]
    if held.any():
        first = store.slab[layer] * store.num_slabs[layer] // UNIT
        spot = first + (bh * WAITING_PAGES + np.arange(entries)) * records[-1]
        index[held] = spot[held]
    _copy(store, layer, move, index, (planned & ~stays, stays & (came != index), rung, came), records)
    # Rows that wait have no token yet where a store has no pages for them.
    both = move.source.waiting[layer] is not None and store.waiting[layer] is not None
    for row in np.flatnonzero(waits) if both else ():
        size = heads * WAITING_PAGES * int(records[-1]) * UNIT
        there = move.source.waiting[layer][int(move.rows[row]) * size :][:size]
        store.waiting[layer][row * size :][:size] = there
    for name in ("rung", "count", "base"):
        mine[name][:, :, :entries] = old[name] * live
    mine["index"][:, :, :entries] = (index * live).astype(np.uint32).view(np.int32)
    mine["entry_of"][at] = (bh * store.entries + np.arange(entries))[planned]
    for name in old.keys() - {"rung", "count", "index", "base"}:
        mine[name][...] = old[name]


def copy_pages(store: DeviceStore, layer: int, arena: Any) -> None:
    """Copy the pages of a layer to the same places of another arena."""
    tables = {name: table[layer] for name, table in store.tables.items()}
    live = named_pages(tables)
    units, others = (x.reshape(-1, UNIT) for x in (arena, store.arenas[layer]))
    for r, layout in enumerate(store.layouts(layer)):
        first = tables["index"].view(np.uint32)[live & (tables["rung"] == r)].astype(np.int64)
        places = first[:, None] + np.arange(layout.nbytes // UNIT)
        units[places] = others[places]


def _give_numbers(number: Ints, wanted: NDArray[np.bool_], stays: NDArray[np.bool_]) -> int:
    """Number the pages of a rung without gaps; those that stay move only if they are beyond the last."""
    want, kept = int(wanted.sum()), wanted & stays
    free = np.ones(want, bool)
    free[number[kept & (number < want)]] = False
    places, beyond = np.flatnonzero(free), kept & (number >= want)
    moved = np.argsort(np.argsort(number[beyond]))
    number[beyond] = places[moved]
    number[wanted & ~stays] = places[len(moved) :]
    return want


def _exchange_slabs(mine: dict[str, Any], slabs: list[int]) -> None:
    """Give back slabs that rungs do not need any more, then take those they do."""
    num_free = int(mine["num_free"][0])
    for r, n in enumerate(slabs):
        given = mine["slabs"][r, n : mine["slab_count"][r]]
        mine["free_slabs"][num_free : num_free + len(given)] = given
        num_free += len(given)
    for r, n in enumerate(slabs):
        for i in range(int(mine["slab_count"][r]), n):
            num_free -= 1
            slab = mine["free_slabs"][num_free]
            mine["slabs"][r, i], mine["slab_slot"][slab] = slab, i
        mine["slab_count"][r] = n
    mine["num_free"][0] = num_free


def _copy(
    store: DeviceStore,
    layer: int,
    move: RowMove,
    index: Ints,
    what: tuple[Any, Any, Ints, Ints],
    records: Ints,
) -> None:
    """Copy pages: those that stay and move, then those of other rows."""
    copied, moved, rung, came = what
    units, others = (x.reshape(-1, UNIT) for x in (store.arenas[layer], move.source.arenas[layer]))
    # In place, what is copied is where the row that keeps it has it now.
    origin = index[np.maximum(move.origins, 0)] if move.in_place else came
    for which, of, pages in ((moved, units, came), (copied, units if move.in_place else others, origin)):
        for r, record in enumerate(records):
            mine = which & (rung == r)
            there, here = (x[mine][:, None] + np.arange(record) for x in (pages, index))
            units[here] = of[there]
