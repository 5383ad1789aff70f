"""When the mean of a row's keys is frozen, and where its tokens wait until then: `freeze_means` in NumPy.

What ``kernels/cuda/pages/means.cu`` does on a GPU, row by row, for a store in host memory. Both follow
`kvlab.cache.frame`: the mean of a row is that of its valid tokens FIRST to LAST - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.frame import LAST, key_mean
from kvlab.cache.store import UNIT, WAITING_PAGES, DeviceStore
from kvlab.pages import RAW, TOKENS_PER_PAGE, read_tokens, write_tokens

__all__ = ["MergedTokens", "NewRow", "freeze_row"]

Ints = NDArray[np.int64]


class NewRow(NamedTuple):
    """New tokens of a row: k, v (steps, heads, head_dim), valid (steps,) bool, codes (heads, steps) uint8."""

    k: Any
    v: Any
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
        for number in range(int(tables["num_pages"][self.row, head])):
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
    store: DeviceStore, layer: int, row: int, new: NewRow, merged: MergedTokens, room: int, force: bool
) -> None:
    """Take the mean of a row that has enough tokens, or keep its new ones; see `kernels.freeze_means`."""
    pages, steps = _Row(store, layer, row), len(new.valid)
    tables, end = pages.tables, new.first + steps
    waits, seen = bool(tables["waits"][row]), np.flatnonzero(new.valid)
    held = [pages.tokens(head) for head in range(store.heads)] if waits else []
    waiting = len(held[0][0]) if held else 0
    total, last = waiting + len(seen), (end + max(room, 1) - 1) >> 16
    first = last
    if total:
        first = int(tables["base"][row, 0, 0]) & 0xFFFF if waiting else (new.first + int(seen[0])) >> 16
    goes = waits and (force or total >= LAST or first != last)
    if merged.valid is not None:
        _fill(merged, row, new, held if goes else [], goes or not waits)
    for head, (_, _, k, _) in enumerate(held if goes else []):
        sample = np.concatenate([k, new.k[seen, head].astype(np.float32)])[:LAST]
        tables["k_mean"][row, head] = key_mean(sample[:, None])[0]
    if waits and not goes:
        pages.keep(new, seen, waiting)
        segments = (first, first) if total else (end >> 16, last)
        for page in range(WAITING_PAGES):
            at = row, slice(None), page
            tables["rung"][at] = len(store.stores[layer].layouts)
            tables["count"][at] = np.clip(total - TOKENS_PER_PAGE * page, 0, TOKENS_PER_PAGE)
            tables["base"][at], tables["open"][at] = np.array(segments, np.uint16).view(np.int16)[page], page
            addresses = np.array([pages.address(head, page) for head in range(store.heads)], np.uint32)
            tables["index"][at] = addresses.view(np.int32)
    if steps:
        tables["seqlen"][row] = end
    if waits:
        tables["num_pages"][row], tables["waits"][row] = 0 if goes else WAITING_PAGES, not goes
    if goes:
        tables["open"][row] = -1


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
