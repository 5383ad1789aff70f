"""Rows that take over pages of other rows, in host memory: kernels/cuda/pages/rows.cu in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.rows import RowMove
from kvlab.cache.store import UNIT, WAITING_PAGES, DeviceStore

__all__ = ["take_rows"]

Ints = NDArray[np.int64]


def take_rows(store: DeviceStore, layer: int, move: RowMove) -> None:
    """Let the rows of a layer become those that a move names."""
    mine = {name: table[layer] for name, table in store.tables.items()}
    old = {name: table[layer][move.rows] for name, table in move.source.tables.items()}
    entries, slab_units = old["rung"].shape[2], store.slab[layer] // UNIT
    records = np.array([layout.nbytes // UNIT for layout in store.layouts(layer)], np.int64)
    live = np.arange(entries) < old["num_pages"][..., None]
    waits = (old["waits"] > 0) & store.holds_waiting[layer]
    rung, index = old["rung"].astype(np.int64), old["index"].view(np.uint32).astype(np.int64)
    planned = live & ~waits[:, None, None]
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
    if waits.any():
        first = store.slab[layer] * store.num_slabs[layer] // UNIT
        spot = first + (bh * WAITING_PAGES + np.arange(entries)) * records[-1]
        index[waits] = spot[waits]
    _copy(store, layer, move, index, (planned & ~stays, stays & (came != index), rung, came), records)
    # Rows that wait have no token yet where a store has no pages for them.
    held = move.source.waiting[layer] is not None and store.rows().waiting[layer] is not None
    for row in np.flatnonzero(waits) if held else ():
        size = heads * WAITING_PAGES * int(records[-1]) * UNIT
        there = move.source.waiting[layer][int(move.rows[row]) * size :][:size]
        store.rows().waiting[layer][row * size :][:size] = there
    for name in ("rung", "count", "base"):
        mine[name][:, :, :entries] = old[name] * live
    mine["index"][:, :, :entries] = (index * live).astype(np.uint32).view(np.int32)
    mine["entry_of"][at] = (bh * store.entries + np.arange(entries))[planned]
    for name in ("num_pages", "k_mean", "waits", "open", "seqlen"):
        mine[name][...] = old[name]


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
