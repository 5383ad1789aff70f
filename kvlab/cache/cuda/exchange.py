"""A cache's layers between a GPU and the CPU, page by page and bit for bit.

Rare operations (crop, beam reordering, files) are written once, for layers on the CPU. A cache on a GPU takes
its layers to the host, changes them there and puts them back: correct, and as slow as the bus. Pages that
hold no token yet are left behind; the next plan opens new ones.

The device keeps what it has until it is written over, and writing over takes no memory there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import dtype_name, numpy_dtype
from kvlab.cache.cuda.store import UNIT, WAITING_PAGES, DeviceStore
from kvlab.cache.cuda.window import EXACT, joined, split
from kvlab.cache.layer import Layer
from kvlab.cache.store import LayerStore

__all__ = ["from_layer", "to_layers"]

_TABLES = {"rung": np.uint8, "count": np.uint8, "index": np.uint32, "base": np.uint16}


def to_layers(
    device: DeviceStore, layers: Sequence[Layer], lengths: Sequence[int], which: Sequence[int]
) -> None:
    """Fill layers on the CPU, by their numbers, with what the device holds; waits for the device."""
    to_host = device.executor.to_host
    for number in which:
        layer, store = layers[number], _host_store(device, layers[number], number)
        arena = to_host(device.arenas[number]).reshape(-1, UNIT)
        mine = {name: to_host(device.tables[name][number]).view(dtype) for name, dtype in _TABLES.items()}
        num_pages, k_mean = (to_host(device.tables[name][number]) for name in ("num_pages", "k_mean"))
        _fill(store, arena, mine, num_pages, k_mean)
        if store is not layer.store:
            split(store, layer)
            store.clear()
        layer.has_mean[:] = to_host(device.tables["waits"][number]) == 0
        layer.seqlen = lengths[number]


def _host_store(device: DeviceStore, layer: Layer, number: int) -> LayerStore:
    """A store with all rungs of a layer on the device; tokens that wait have one more than the ladder."""
    store: LayerStore = device.stores[number]
    if not device.holds_waiting[number]:
        return store
    ladder = (*store.whole_ladder, EXACT)
    return LayerStore(ladder, store.batch, store.num_heads_kv, store.head_dim, store.dtype)


def _fill(
    store: LayerStore,
    arena: NDArray[np.uint8],
    tables: dict[str, NDArray[Any]],
    num_pages: NDArray[np.int32],
    k_mean: NDArray[np.float16],
) -> None:
    entries = tables["rung"].shape[2]
    full = (np.arange(entries) < num_pages[..., None]) & (tables["count"] > 0)
    # Entries in use first, in their order.
    order = np.argsort(~full, axis=2, kind="stable")
    held = full.sum(2).astype(np.int32)
    most = int(held.max(initial=0))
    taken = {name: np.take_along_axis(table, order, 2)[:, :, :most].copy() for name, table in tables.items()}
    live = np.arange(most) < held[..., None]
    pools = []
    for r, layout in enumerate(store.layouts):
        mine = live & (taken["rung"] == r)
        first = taken["index"][mine].astype(np.int64)
        pools.append(arena[first[:, None] + np.arange(layout.nbytes // UNIT)].reshape(-1, layout.nbytes))
        taken["index"][mine] = np.arange(len(first), dtype=np.uint32)
    for table in taken.values():
        table[~live] = 0
    store.restore(pools, taken, held, k_mean.copy())


def from_layer(device: DeviceStore, layer: Layer, number: int) -> None:
    """Fill a layer of the device, by its number, with one of the CPU, in place of what it held.

    Tokens that wait for a mean must be few enough for the device's pages.
    """
    store = _host_store(device, layer, number)
    if store is not layer.store:
        store = joined(layer, store.whole_ladder)
    host = _empty_tables(device, number)
    arena = np.zeros((len(device.arenas[number]) // UNIT, UNIT), np.uint8)
    _place(device, number, store, host, arena)
    host["k_mean"][...], host["seqlen"][...] = store.k_mean, layer.seqlen
    host["waits"][...] = layer.takes_mean & ~layer.has_mean
    overwrite = device.executor.overwrite
    overwrite(device.arenas[number], arena.reshape(-1))
    for name, table in host.items():
        overwrite(device.tables[name][number], table)


def _empty_tables(device: DeviceStore, number: int) -> dict[str, NDArray[Any]]:
    """Tables of a layer on the host as `DeviceStore.clear` leaves them."""
    host = {
        name: np.zeros(tuple(table.shape[1:]), numpy_dtype(dtype_name(table)))
        for name, table in device.tables.items()
    }
    host["open"][...], host["num_free"][...] = -1, device.num_slabs[number]
    host["free_slabs"][...] = device.all_slabs(number)
    return host


def _place(
    device: DeviceStore,
    number: int,
    store: LayerStore,
    host: dict[str, NDArray[Any]],
    arena: NDArray[np.uint8],
) -> None:
    """Lay the pages of a layer into slabs and write its tables."""
    live, entries = store.live(), device.entries
    if live.shape[2] > entries:
        live = live[:, :, :entries]
        if live.sum() != store.num_pages.sum():
            raise ValueError(f"the tables have {entries} entries, a row has {store.num_pages.max()} pages")
    width = live.shape[2]
    free = list(host["free_slabs"][: host["num_free"][0]])
    slab_units = device.slab[number] // UNIT
    index = np.zeros(live.shape, np.uint32)
    row, head, entry = np.nonzero(live)
    owners = ((row * live.shape[1] + head) * entries + entry).astype(np.int32)
    for r, layout in enumerate(store.layouts):
        mine = live & (store.rung[:, :, :width] == r)
        pool = store.pools[r][store.index[:, :, :width][mine]]
        if r == len(device.stores[number].layouts):
            index[mine] = _place_waiting(device, number, mine, pool, arena)
            continue
        count = int(mine.sum())
        per_slab = device.slab[number] // layout.nbytes
        slabs = [int(free.pop()) for _ in range(-(-count // per_slab))]
        host["slabs"][r, : len(slabs)] = slabs
        host["slab_slot"][slabs] = np.arange(len(slabs))
        page = np.arange(count)
        units = layout.nbytes // UNIT
        address = np.array(slabs, np.int64)[page // per_slab] * slab_units + page % per_slab * units
        arena[address[:, None] + np.arange(units)] = pool.reshape(count, units, UNIT)
        index[mine] = address
        host["used"][r], host["slab_count"][r] = count, len(slabs)
        host["entry_of"][r, :count] = owners[mine[live]]
    host["free_slabs"][: len(free)] = free
    host["num_free"][0] = len(free)
    host["rung"][:, :, :width], host["count"][:, :, :width] = (
        store.rung[:, :, :width],
        store.count[:, :, :width],
    )
    host["index"][:, :, :width] = index.view(np.int32)
    host["base"][:, :, :width] = store.base[:, :, :width].view(np.int16)
    host["num_pages"][...] = store.num_pages


def _place_waiting(
    device: DeviceStore,
    number: int,
    mine: NDArray[np.bool_],
    pool: NDArray[np.uint8],
    arena: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Lay pages of tokens that wait behind the slabs, in their order; `mine` (batch, heads, entries)."""
    units = device.widest.nbytes // UNIT
    row, head, entry = np.nonzero(mine)
    address = (row * mine.shape[1] + head) * WAITING_PAGES + entry
    first = device.slab[number] * device.num_slabs[number] // UNIT + address * units
    arena[first[:, None] + np.arange(units)] = pool.reshape(len(first), units, UNIT)
    return np.asarray(first, np.int64)
