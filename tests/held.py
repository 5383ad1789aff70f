"""What a cache on a GPU holds, read by way of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from kvlab.cache.cuda.window import EXACT, joined
from kvlab.cache.layer import Layer
from kvlab.cache.pages import LayerPages
from kvlab.cache.store import LayerStore
from tests.allocations import fail_everywhere


def pages_of(cache: Any) -> list[LayerPages]:
    with cache._road.on_host(changes=False):
        return [_whole(layer).view() for layer in cache.layers]


def _whole(layer: Layer) -> LayerStore:
    """All pages that the GPU has, those of a residual window and of tokens that wait among them."""
    exact = layer.residual or any(map(len, layer.windows))
    return joined(layer, (*layer.store.whole_ladder, EXACT)) if exact else layer.store


def positions(pages: LayerPages, row: int, head: int) -> list[int]:
    found = []
    for entry in range(int(pages.num_pages[row, head])):
        at = (row, head, entry)
        layout, count = pages.layouts[pages.rung[at]], int(pages.count[at])
        held = layout.positions_in(pages.pools[pages.rung[at]])[pages.index[at], :count]
        found += [(int(pages.base[at]) << 16) + int(offset) for offset in held]
    return sorted(found)


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
        batch, lengths, before = cache.batch, list(cache._gpu._device.lengths), pages_of(cache)

        def unchanged(batch: int = batch, lengths: Any = lengths, before: Any = before) -> None:
            assert cache._gpu._device.lengths == lengths
            assert cache.batch == cache._gpu._device.store.batch == batch
            for old, new in zip(before, pages_of(cache), strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(old.pools, new.pools, strict=True))

        found.append(fail_everywhere(modules, error, work, unchanged))
    return found
