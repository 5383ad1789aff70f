"""The contents of a cache as plain arrays, for files, pickles and other devices.

Pages are listed in the order of the page tables, pool by pool; where they lay in memory is left out. All else
of a page table is kept: open pages without a token, and fillers, which are the other entries without one. A
cache that is filled with contents goes on as the cache they come from would.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import LONGEST, whole_number
from kvlab.arrays import dtype_name, numpy_dtype
from kvlab.cache.store import DeviceStore
from kvlab.errors import FormatError
from kvlab.ops.frame import FRAME, awaiting, check_frames
from kvlab.ops.layer_state import OPEN_PAGES, UNIT, WAITING_ENTRIES, WAITING_PAGES
from kvlab.pages import NO_PAGE, QUAD, TOKENS_PER_PAGE, PageLayout, named_pages

if TYPE_CHECKING:
    from kvlab.cache.step import DeviceCache

__all__ = ["Arrays", "check_sizes", "contents_of", "fill"]

Arrays = dict[str, NDArray[Any]]
_TABLES = {"rung": np.uint8, "count": np.uint8, "base": np.uint16}
_COUNTERS = ("seqlen", "since_collection", "lookahead", "dropped")


def contents_of(cache: DeviceCache) -> tuple[list[dict[str, Any]], Arrays]:
    """Copy what a cache holds to the host, layer by layer: counters and arrays. Waits for the device.

    Arrays of layer i are named "i.num_pages", "i.k_mean", "i.k_shift", "i.has_mean", "i.open" and, for each
    entry of the page tables, "i.rung", "i.count", "i.base"; "i.pool0" and so on are the pages of each rung,
    behind those of the ladder a rung for tokens that wait. "i.query_sums" has the rows of which tokens wait,
    and "i.k_ratio" what frames are fitted to.
    """
    store, states, arrays = cache.store, [], Arrays()
    cache.flush(cache.executor.stream(cache.like))
    for number in range(len(cache.layers)):
        counters = (x[number] for x in (cache.lengths, cache.since, cache.lookahead, cache.dropped))
        states.append(
            dict(zip(_COUNTERS, counters, strict=True)) | {"without_holes": cache.reallocator.without_holes}
        )
        tables = {name: store.executor.to_host(table[number]) for name, table in store.tables.items()}
        live, named = np.arange(store.entries) < tables["num_pages"][..., None], named_pages(tables)
        arena = store.executor.to_host(store.arenas[number]).reshape(-1, UNIT)
        index = tables["index"].view(np.uint32).astype(np.int64)
        mine: Arrays = {name: tables[name] for name in ("num_pages", *FRAME, "k_ratio", "open")}
        mine["has_mean"] = tables["waits"] == 0
        mine["query_sums"] = tables["query_sums"][awaiting(mine["has_mean"], tables["num_pages"])]
        for name, dtype in _TABLES.items():
            mine[name] = tables[name].view(dtype)[live]
        for r, layout in enumerate(store.layouts(number)):
            first = index[named & (tables["rung"] == r)]
            mine[f"pool{r}"] = arena[first[:, None] + np.arange(layout.nbytes // UNIT)].reshape(
                -1, layout.nbytes
            )
        arrays |= {f"{number}.{name}": np.array(x) for name, x in mine.items()}
    return states, arrays


def check_sizes(description: dict[str, Any], arrays: Arrays) -> None:
    """Refuse numbers in the arguments that the arrays do not bear out, before a cache is made from them."""
    arguments = description["arguments"]
    layers, rows, heads = (arguments[name] for name in ("num_layers", "batch", "num_heads_kv"))
    if layers != len(description["layers"]):
        raise FormatError(f"state of {len(description['layers'])} layers for a cache of {layers}")
    if arrays["0.num_pages"].shape != (rows, heads):
        raise FormatError(f"0.num_pages has shape {arrays['0.num_pages'].shape}, not {(rows, heads)}")


def fill(cache: DeviceCache, states: list[dict[str, Any]], arrays: Arrays) -> None:
    """Let an empty cache hold contents; it has room for their tokens.

    Raises
    ------
    FormatError
        If anything does not fit the cache, or contradicts itself.
    """
    arrays = dict(arrays)
    for number, state in enumerate(states):
        prefix = f"{number}."
        mine = {
            name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)
        }
        counters = (whole_number(state[name], f"{prefix}{name}", 0, LONGEST) for name in _COUNTERS)
        length, since, lookahead, dropped = counters
        if dropped > length:
            raise FormatError(f"{prefix}dropped is {dropped} of {length} tokens")
        try:
            tables, arena, held = _laid_out(cache.store, number, mine, length)
        except FormatError as error:
            raise FormatError(f"{prefix}{error}") from None
        overwrite = cache.executor.overwrite
        overwrite(cache.store.arenas[number], arena)
        for name, table in tables.items():
            overwrite(cache.store.tables[name][number], table)
        cache.lengths[number], cache.since[number], cache.lookahead[number] = length, since, lookahead
        cache.dropped[number] = dropped
        waits = tables["waits"] > 0
        cache.waiting.set(number, waits, np.where(waits, held, 0), length)
    if arrays:
        raise FormatError(f"unknown entries {sorted(arrays)[:3]}")
    cache.reallocator.restart(without_holes=all(bool(state["without_holes"]) for state in states))


def _laid_out(
    store: DeviceStore, number: int, mine: Arrays, length: int
) -> tuple[Arrays, NDArray[np.uint8], NDArray[np.int64]]:
    """Tables and arena of a layer that holds these arrays, and the tokens of the first head of each row."""
    batch, heads, layouts = store.batch, store.heads, store.layouts(number)
    tables = {
        name: np.zeros(tuple(table.shape[1:]), numpy_dtype(dtype_name(table)))
        for name, table in store.tables.items()
    }
    take = partial(_take, mine)
    num_pages = take("num_pages", "int32", (batch, heads))
    if (num_pages < 0).any() or (num_pages % QUAD).any() or num_pages.max(initial=0) > store.entries:
        raise FormatError(f"num_pages is not a multiple of {QUAD} within 0 to {store.entries}")
    live = np.arange(store.entries) < num_pages[..., None]
    entries = int(num_pages.sum(dtype=np.int64))
    rung, count, base = (take(name, np.dtype(kind).name, (entries,)) for name, kind in _TABLES.items())
    has_mean, opened = take("has_mean", "bool", (batch,)), take("open", "int32", (batch, heads, OPEN_PAGES))
    for name, dtype in {**FRAME, "k_ratio": "int16"}.items():
        tables[name][...] = take(name, dtype, tables[name].shape)
    waiting = awaiting(has_mean, num_pages)
    tables["query_sums"][waiting] = take("query_sums", "float32", (int(waiting.sum()), heads, store.head_dim))
    row, head, entry = np.nonzero(live)
    waits, is_open = ~has_mean[row] & (entry < WAITING_PAGES), (opened[row, head] == entry[:, None]).any(1)
    named = (count > 0) | waits | is_open  # others are fillers
    pools = _take_pools(mine, layouts, len(store.stores[number].layouts), rung[named])
    _check(store, number, (row, head, entry), rung, count, opened, has_mean)
    row, head, entry, rung_of, base_of, used = (x[named] for x in (row, head, entry, rung, base, count))
    _check_positions(layouts, pools, rung_of, used, base_of, length)
    try:
        check_frames(tables)
    except ValueError as error:
        raise FormatError(str(error)) from None
    for name, x in (("rung", rung), ("count", count), ("base", base)):
        tables[name].view(x.dtype)[live] = x
    tables["num_pages"][...], tables["open"][...], tables["seqlen"][...] = num_pages, opened, length
    tables["waits"][...], tables["num_free"][...] = ~has_mean, store.num_slabs[number]
    tables["free_slabs"][...] = store.all_slabs()[number]
    index, arena = _lay_pages(store, number, tables, (row, head, entry), rung_of, pools)
    tables["index"].view(np.uint32)[live] = NO_PAGE
    tables["index"].view(np.uint32)[row, head, entry] = index
    held = np.zeros(batch, np.int64)
    np.add.at(held, row[head == 0], used[head == 0].astype(np.int64))
    return tables, arena, held


def _take(mine: Arrays, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Take an array from those that are left."""
    array = mine.pop(name)
    if array.dtype != numpy_dtype(dtype) or array.shape != shape:
        raise FormatError(f"{name} is {array.dtype} {array.shape}, not {dtype} {shape}")
    return array


def _take_pools(
    mine: Arrays, layouts: Sequence[PageLayout], ladder: int, rung: NDArray[np.uint8]
) -> list[NDArray[Any]]:
    """Take the pages of each rung, the last arrays that are left; `rung` is that of each page."""
    if len(layouts) > ladder:  # a cache whose frames were given has no rung for tokens that wait
        mine.setdefault(f"pool{ladder}", np.empty((0, layouts[ladder].nbytes), np.uint8))
    pools = [
        _take(mine, f"pool{r}", "uint8", (int((rung == r).sum()), layout.nbytes))
        for r, layout in enumerate(layouts)
    ]
    if mine:
        raise FormatError(f"unknown entries {sorted(mine)[:3]}")
    return pools


def _check(
    store: DeviceStore, number: int, at: tuple[Any, ...], rung: Any, count: Any, opened: Any, has_mean: Any
) -> None:
    """Refuse what no cache says of its page tables; arrays have their entries, one table after the other."""
    row, head, entry = at
    ladder = len(store.stores[number].layouts)
    if (rung >= len(store.layouts(number))).any() or (count > TOKENS_PER_PAGE).any():
        raise FormatError("rung or count is out of range")
    if (np.diff(rung.astype(int)) < 0)[np.diff(entry) > 0].any() or (
        rung != np.repeat(rung[::QUAD], QUAD)
    ).any():
        raise FormatError("page tables are not sorted by rung in quads")
    is_open = (opened[row, head] == entry[:, None]).any(1)
    live = np.bincount(row * store.heads + head, minlength=opened.shape[0] * store.heads)
    if ((opened < -1) | (opened >= live.reshape(*opened.shape[:2], 1))).any():
        raise FormatError("open names pages that are not there")
    if (is_open & has_mean[row] & (rung != ladder - 1)).any():
        raise FormatError("open pages are not of the highest width")
    waits = ~has_mean[row]
    max_entries = np.where((count > 0) | is_open, WAITING_PAGES, WAITING_ENTRIES)
    if ((rung == ladder) != waits).any() or (waits & (entry >= max_entries)).any():
        raise FormatError("pages of tokens that wait are in rows that have their mean, or too many")
    if (~has_mean).any() and not store.layers[number].takes_mean:
        raise FormatError("has_mean is wrong: no row of this layer waits for the mean of its keys")


def _check_positions(
    layouts: tuple[PageLayout, ...], pools: list[Any], rung: Any, count: Any, base: Any, length: int
) -> None:
    """Refuse tokens beyond the end; arrays have an entry for each page."""
    for r, (layout, pool) in enumerate(zip(layouts, pools, strict=True)):
        mine = rung == r
        used = np.arange(TOKENS_PER_PAGE) < count[mine][:, None]
        position = (base[mine].astype(np.int64)[:, None] << 16) + layout.positions_in(pool)
        if (position[used] >= length).any():
            raise FormatError(f"a token stands at a position outside 0..{length - 1}")


def _lay_pages(
    store: DeviceStore, number: int, tables: Arrays, at: tuple[Any, Any, Any], rung: Any, pools: list[Any]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Lay pages into slabs, and those of tokens that wait behind these; return their addresses, the arena."""
    row, head, entry = at
    arena = np.zeros((len(store.arenas[number]) // UNIT, UNIT), np.uint8)
    index, slab_units = np.zeros(len(rung), np.int64), store.slab[number] // UNIT
    bh, free = row * store.heads + head, int(tables["num_free"][0])
    for r, (layout, pool) in enumerate(zip(store.layouts(number), pools, strict=True)):
        mine, units = rung == r, layout.nbytes // UNIT
        if r == len(store.stores[number].layouts):
            begin = slab_units * store.num_slabs[number]
            address = begin + (bh[mine] * WAITING_PAGES + entry[mine]) * units
        else:
            page, per_slab = np.arange(len(pool)), store.slab[number] // layout.nbytes
            n = -(-len(pool) // per_slab)
            if n > free:
                raise FormatError(f"pool{r} has more pages than there is memory for")
            slabs = tables["free_slabs"][free - n : free][::-1].astype(np.int64)
            free -= n
            tables["slabs"][r, :n], tables["slab_slot"][slabs] = slabs, np.arange(n)
            tables["used"][r], tables["slab_count"][r] = len(pool), n
            tables["entry_of"][r, : len(pool)] = (bh * store.entries + entry)[mine]
            address = slabs[page // per_slab] * slab_units + page % per_slab * units
        index[mine] = address
        arena[address[:, None] + np.arange(units)] = pool.reshape(-1, units, UNIT)
    tables["num_free"][0] = free
    return index, arena.reshape(-1)
