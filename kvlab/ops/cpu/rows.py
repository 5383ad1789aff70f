"""Rows of a layer in host memory, in NumPy: what kernels/cuda/pages/means.cu and rows.cu do on a GPU.

`freeze_row` takes the frame of a row's keys, that of its valid tokens FIRST to LAST - 1, when it has enough;
its tokens wait until then. `take_rows` has rows take over pages of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cpu.layer import HostLayer
from kvlab.ops.cpu.page_tokens import decode_tokens, encode_tokens
from kvlab.ops.frame import ASKING, LAST, add_queries, exponent_of, key_gain, key_mean, key_order, key_shift
from kvlab.ops.layer_state import MOVED, OPEN_PAGES, UNIT, WAITING_ENTRIES, WAITING_PAGES
from kvlab.pages import NO_PAGE, TOKENS_PER_PAGE, named_pages

__all__ = ["MergedTokens", "NewRow", "copy_pages_to", "freeze_row", "take_rows"]

Ints = NDArray[np.int64]


class NewRow(NamedTuple):
    """New tokens of a row: k, v (n, heads, head_dim), valid (n,) bool, codes (heads, n) uint8.

    q (n or 0, query heads, head_dim): where there are none, there are no queries.
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

    layer: HostLayer
    row: int

    def address(self, head: int, page: int) -> int:
        """Of a page, in units from the start of the arena."""
        return int(_waiting_address(self.layer, self.row * self.layer.shape[1] + head, page))

    def page(self, head: int, page: int) -> NDArray[np.uint8]:
        """A page's record, (1, nbytes)."""
        start = self.address(head, page) * UNIT
        found: NDArray[np.uint8] = self.layer.arena[start : start + self.layer.exact.nbytes]
        return found[None]

    def tokens(self, head: int) -> tuple[Ints, NDArray[np.uint8], Any, Any]:
        """Positions, importance, keys and values of the tokens that wait."""
        layout, dtype, tables = self.layer.exact, self.layer.dtype, self.layer.tables
        positions, codes = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        vectors = [np.empty((2, 0, self.layer.head_dim), np.float32)]
        for number in range(min(int(tables["num_pages"][self.row, head]), WAITING_PAGES)):
            at, record = (self.row, head, number), self.page(head, number)
            slots = np.arange(int(tables["count"][at]))
            vectors.append(np.stack(decode_tokens(record, layout, dtype, np.zeros_like(slots), slots)))
            start = (int(tables["base"][at]) & 0xFFFF) << 16
            positions.append(layout.positions_in(record)[0, slots].astype(np.int64) + start)
            codes.append(layout.importance_in(record)[0, slots])
        k, v = np.concatenate(vectors, 1)
        return np.concatenate(positions), np.concatenate(codes), k, v

    def keep(self, new: NewRow, seen: Ints, waiting: int) -> None:
        """Copy new tokens behind `waiting` others."""
        layout, dtype = self.layer.exact, self.layer.dtype
        for head in range(self.layer.shape[1]):
            for number, step in enumerate(seen, waiting):
                page, slot = self.page(head, number // TOKENS_PER_PAGE), number % TOKENS_PER_PAGE
                where = np.array([0]), np.array([slot])
                k, v = (x[step, head].astype(np.float32)[None] for x in (new.k, new.v))
                encode_tokens(page, layout, dtype, *where, k, v)
                layout.positions_in(page)[0, slot] = (new.first + step) & 0xFFFF
                layout.importance_in(page)[0, slot] = new.codes[head, step]


def freeze_row(
    layer: HostLayer, row: int, new: NewRow, merged: MergedTokens, lookahead: int, force: bool
) -> None:
    """Take the frame of a row that has enough tokens, or keep its new ones; see `freeze_means`."""
    pages, num_new, heads = _Row(layer, row), len(new.valid), layer.shape[1]
    tables, end = layer.tables, new.first + num_new
    waits, seen = bool(tables["waits"][row]), np.flatnonzero(new.valid)
    held = [pages.tokens(head) for head in range(heads)] if waits else []
    waiting = len(held[0][0]) if held else 0
    total, last = waiting + len(seen), (end + max(lookahead, 1) - 1) >> 16
    first = last
    if total:
        first = int(tables["base"][row, 0, 0]) & 0xFFFF if waiting else (new.first + int(seen[0])) >> 16
    goes = waits and (force or total >= LAST or first != last)
    if merged.valid is not None:
        _fill(merged, row, new, held if goes else [], goes or not waits)
    if waits and len(new.q):
        add_queries(tables["query_sums"][row], new.q[seen[max(ASKING - waiting, 0) : max(LAST - waiting, 0)]])
    for head, (_, _, k, v) in enumerate(held if goes else []):
        sample, values = (
            np.concatenate([x, y[seen, head].astype(np.float32)])[:LAST, None]
            for x, y in ((k, new.k), (v, new.v))
        )
        _freeze_head(layer, (row, head), sample, values)
    if waits and not goes:
        pages.keep(new, seen, waiting)
        segments = (first, first) if total else (end >> 16, last)
        for page in range(WAITING_ENTRIES):
            at = row, slice(None), page
            tables["rung"][at] = len(layer.layouts)
            tables["count"][at] = np.clip(total - TOKENS_PER_PAGE * page, 0, TOKENS_PER_PAGE)
            tables["base"][at] = np.array(segments, np.uint16).view(np.int16)[min(page, 1)]
            addresses = [pages.address(head, page) for head in range(heads)]
            named = np.array(addresses if page < WAITING_PAGES else NO_PAGE, np.uint32)
            tables["index"][at] = named.view(np.int32)
        tables["open"][row] = total // TOKENS_PER_PAGE + np.arange(OPEN_PAGES)
    if num_new:
        tables["seqlen"][row] = end
    if waits:
        tables["num_pages"][row], tables["waits"][row] = 0 if goes else WAITING_ENTRIES, not goes
    if goes:
        tables["open"][row], tables["k_ratio"][row] = -1, 0


def _freeze_head(layer: HostLayer, at: tuple[int, int], k: Any, v: Any) -> None:
    """Take the frame of a (row, KV head) from its first keys and values, (n, 1, head_dim)."""
    query_sums = layer.tables["query_sums"][at][None]
    exponent = exponent_of(k)
    mean = key_mean(k, exponent, narrow=layer.is_narrow, factor=layer.mean_factor)
    shift = key_shift(k, mean, query_sums, exponent)
    exponents = exponent[0], exponent_of(v)[0]
    found: dict[str, Any] = {"k_mean": mean[0], "k_shift": shift[0], "exponent": exponents}
    if layer.in_blocks:
        order = key_order(k, mean, query_sums, exponent)
        gain = key_gain(k, mean, shift, order, exponent)
        found |= {"k_order": order[0], "k_gain": gain[0]}
    for name, value in found.items():
        layer.tables[name][at] = value


def _fill(merged: MergedTokens, row: int, new: NewRow, held: list[Any], is_stored: bool) -> None:
    """Say which tokens of a row the plan takes in, and copy those that have waited."""
    before, heads = merged.before, len(new.codes)
    merged.valid[row] = 0
    merged.valid[row, before:] = new.valid & is_stored
    if not before:
        return
    merged.positions[row, :before] = 0
    merged.positions[row, before:] = new.first + np.arange(len(new.valid))
    for head, (position, code, k, v) in enumerate(held):
        n = len(position)
        merged.valid[row, :n], merged.positions[row, :n] = 1, position
        merged.importance[row * heads + head, :n] = code
        merged.k[row, :n, head], merged.v[row, :n, head] = k, v


def take_rows(layer: HostLayer, source: HostLayer, rows: Any, origins: Any, in_place: bool) -> None:
    """Let the rows of a layer become those of a source; arguments as of `kvlab.cache.store.RowMove`."""
    mine = layer.tables
    old = {name: source.tables[name][rows] for name in MOVED}
    entries, slab_units = old["rung"].shape[2], layer.slab // UNIT
    records = np.array([layout.nbytes // UNIT for layout in layer.all_layouts], np.int64)
    live, named = np.arange(entries) < old["num_pages"][..., None], named_pages(old)
    waits = (old["waits"] > 0) & (layer.waiting is not None)
    rung, index = old["rung"].astype(np.int64), old["index"].view(np.uint32).astype(np.int64)
    planned = named & ~waits[:, None, None]
    stays = planned & (origins < 0)[:, None, None]
    came, number = index.copy(), np.zeros_like(index)
    slab, within = np.divmod(index[stays], slab_units)
    per_slab = slab_units // records
    number[stays] = mine["slab_slot"][slab] * per_slab[rung[stays]] + within // records[rung[stays]]
    want = [_give_numbers(number, planned & (rung == r), stays) for r in range(len(layer.layouts))]
    _exchange_slabs(mine, [-(-n // int(pages)) for n, pages in zip(want, per_slab, strict=False)])
    mine["used"][: len(want)] = want
    at = rung[planned], number[planned]
    index[planned] = mine["slabs"][at[0], at[1] // per_slab[at[0]]] * np.int64(slab_units)
    index[planned] += at[1] % per_slab[at[0]] * records[at[0]]
    heads = layer.shape[1]
    bh = np.arange(len(rows) * heads).reshape(-1, heads, 1)
    held = named & waits[:, None, None]
    if held.any():
        index[held] = _waiting_address(layer, bh, np.arange(entries))[held]
    arenas = [x.arena.reshape(-1, UNIT) for x in (layer, layer if in_place else source)]
    # In place, what is copied is where the row that keeps it has it now.
    there = index[np.maximum(origins, 0)] if in_place else came
    _copy(arenas[0], arenas[0], rung, stays & (came != index), came, index, records)
    _copy(arenas[1], arenas[0], rung, planned & ~stays, there, index, records)
    # Rows that wait have no token yet where a layer has no pages for them.
    if layer.waiting is not None and source.waiting is not None:
        size = heads * WAITING_PAGES * layer.exact.nbytes
        for row in np.flatnonzero(waits):
            layer.waiting[row * size :][:size] = source.waiting[int(rows[row]) * size :][:size]
    for name in ("rung", "count", "base"):
        mine[name][:, :, :entries] = old[name] * live
    mine["index"][:, :, :entries] = (index * live).astype(np.uint32).view(np.int32)
    mine["entry_of"][at] = (bh * layer.shape[2] + np.arange(entries))[planned]
    for name in old.keys() - {"rung", "count", "index", "base"}:
        mine[name][...] = old[name]


def copy_pages_to(arena: Any, layer: HostLayer) -> None:
    """Copy the pages of a layer to the same places of another arena."""
    live, index = named_pages(layer.tables), layer.tables["index"].view(np.uint32).astype(np.int64)
    records = [layout.nbytes // UNIT for layout in layer.all_layouts]
    units, others = (x.reshape(-1, UNIT) for x in (arena, layer.arena))
    _copy(others, units, layer.tables["rung"], live, index, index, records)


def _waiting_address(layer: HostLayer, bh: Any, page: Any) -> Any:
    """Where pages of tokens that wait lie behind the slabs, in units from the start of the arena."""
    first = layer.slab * layer.num_slabs // UNIT
    return first + (bh * WAITING_PAGES + page) * (layer.exact.nbytes // UNIT)


def _give_numbers(number: Ints, wanted: NDArray[np.bool_], stays: NDArray[np.bool_]) -> int:
    """Number the pages of a rung without gaps; those that stay move only if they are beyond the last."""
    want, kept = int(wanted.sum()), wanted & stays
    free = np.ones(want, bool)
    free[number[kept & (number < want)]] = False
    unused, beyond = np.flatnonzero(free), kept & (number >= want)
    moved = np.argsort(np.argsort(number[beyond]))
    number[beyond] = unused[moved]
    number[wanted & ~stays] = unused[len(moved) :]
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
    source: Any, target: Any, rung: Any, which: NDArray[np.bool_], came: Ints, goes: Ints, records: Any
) -> None:
    """Copy the pages of some entries of tables, by rung, from units of a source to units of a target."""
    for r, record in enumerate(records):
        mine = which & (rung == r)
        there, here = (x[mine][:, None] + np.arange(record) for x in (came, goes))
        target[here] = source[there]
