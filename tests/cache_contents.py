"""What a cache holds, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kvlab.cache.store import DeviceStore
from kvlab.ops.cpu.page_tokens import decode_tokens
from kvlab.ops.layer_state import UNIT
from kvlab.pages import LayerPages, named_pages
from tests.allocations import fail_everywhere


def pages_of(cache: Any) -> list[LayerPages]:
    return [cache.pages(layer) for layer in range(cache.num_layers)]


def seen_of(cache: Any, layer: int) -> dict[str, Any]:
    """What the next queries see of a layer, as `kvlab.packed_attention` is told it: all, or a window."""
    window = cache.windows[layer]
    if not window:
        return {}
    return {
        "window": (window - 1, -1),
        "first_position": np.full(cache.batch, cache._device.lengths[layer], np.int32),
    }


class Listed(NamedTuple):
    """Stored tokens of a row, one entry each, by head, page and slot; `page` is the entry of the table."""

    head: np.ndarray
    page: np.ndarray
    slot: np.ndarray
    rung: np.ndarray
    position: np.ndarray
    code: np.ndarray
    index: np.ndarray


def entries_with_tokens(pages: LayerPages) -> np.ndarray:
    """(row, head, entry) of all entries that name a page with a token."""
    return np.argwhere((np.arange(pages.rung.shape[2]) < pages.num_pages[..., None]) & (pages.count > 0))


def tokens_in(pages: LayerPages, row: int) -> Listed:
    found: list[Any] = [np.zeros((7, 0), np.int64)]
    for at in map(tuple, entries_with_tokens(pages)):
        if at[0] != row:
            continue
        rung, count, index = int(pages.rung[at]), int(pages.count[at]), int(pages.index[at])
        layout, record = pages.layouts[rung], pages.pools[rung][index : index + 1]
        position = (int(pages.base[at]) << 16) + layout.positions_in(record)[0, :count].astype(np.int64)
        code, same = layout.importance_in(record)[0, :count], np.ones(count, np.int64)
        found.append(
            [at[1] * same, at[2] * same, np.arange(count), rung * same, position, code, index * same]
        )
    return Listed(*np.concatenate([np.array(x, np.int64) for x in found], 1))


def contents_of(cache: Any) -> dict[tuple[int, int, int, int], tuple[int, bytes]]:
    """All tokens by (layer, row, head, position): the bits of their pages, and all that is stored of them."""
    found = {}
    for layer, pages in enumerate(pages_of(cache)):
        for row, head, entry in entries_with_tokens(pages):
            rung, count = int(pages.rung[row, head, entry]), int(pages.count[row, head, entry])
            layout, record = pages.layouts[rung], pages.pools[rung][pages.index[row, head, entry]][None]
            k, v = decode_tokens(record, layout, pages.dtype, np.zeros(count, np.int64), np.arange(count))
            lower, codes = (x[0, :count] for x in (layout.positions_in(record), layout.importance_in(record)))
            at = (int(pages.base[row, head, entry]) << 16) + lower.astype(np.int64)
            for position, *token in zip(at.tolist(), k, v, codes, strict=True):
                key = layer, int(row), int(head), position
                assert key not in found
                found[key] = sum(layout.blocks) / 4 + layout.bits_v, b"".join(x.tobytes() for x in token)
    return found


def positions(pages: LayerPages, row: int, head: int) -> list[int]:
    found = []
    for at in map(tuple, entries_with_tokens(pages)):
        if at[:2] != (row, head):
            continue
        layout, count = pages.layouts[pages.rung[at]], int(pages.count[at])
        held = layout.positions_in(pages.pools[pages.rung[at]])[pages.index[at], :count]
        found += [(int(pages.base[at]) << 16) + int(offset) for offset in held]
    return sorted(found)


def check_store(store: DeviceStore) -> None:
    """Numbers of pages have no gaps, tables agree with them, and every slab is either used or free."""
    for layer, host in enumerate(store.stores):
        mine = {name: store.executor.to_host(table[layer]) for name, table in store.tables.items()}
        live = named_pages(mine) & (mine["waits"] == 0)[:, None, None]
        rung, index = mine["rung"][live], mine["index"].view(np.uint32)[live].astype(np.int64)
        entry, slab_units = np.flatnonzero(live), store.slab[layer] // UNIT
        slab, within = index // slab_units, index % slab_units
        used = []
        for r, layout in enumerate(host.layouts):
            of, record, count = rung == r, layout.nbytes // UNIT, int(mine["used"][r])
            per_slab, held = slab_units // record, mine["slabs"][r, : mine["slab_count"][r]]
            assert not (within[of] % record).any()
            number = mine["slab_slot"][slab[of]] * per_slab + within[of] // record
            assert np.array_equal(held[mine["slab_slot"][slab[of]]], slab[of])
            assert np.array_equal(np.sort(number), np.arange(count))
            assert np.array_equal(mine["entry_of"][r][number], entry[of])
            assert len(held) == -(-count // per_slab)
            used += held.tolist()
        free = mine["free_slabs"][: int(mine["num_free"][0])].tolist()
        assert sorted(used + free) == list(range(store.num_slabs[layer]))


def failures_of_cache(
    cache: Any, few: Sequence[Any], many: Sequence[Any], modules: Iterable[ModuleType], error: BaseException
) -> list[int]:
    """Do what takes memory after each of its allocations has failed once, which changes nothing; count them.

    Steps and appends of `few` and `many` tokens (q, k, v), attention, other rows.
    """
    works = [
        lambda: cache.step(0, *few),
        lambda: cache.append(1, *few[1:]),
        lambda: cache.step(0, *many),
        lambda: cache.append(1, *many[1:]),
        lambda: cache.attend(0, many[0]),
        lambda: cache.repeat(2),
    ]
    found = []
    for work in works:
        batch, lengths, before = cache.batch, list(cache._device.lengths), pages_of(cache)

        def unchanged(batch: int = batch, lengths: Any = lengths, before: Any = before) -> None:
            assert cache._device.lengths == lengths
            assert cache.batch == cache._device.store.batch == batch
            for old, new in zip(before, pages_of(cache), strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(old.pools, new.pools, strict=True))

        found.append(fail_everywhere(modules, error, work, unchanged))
    return found
