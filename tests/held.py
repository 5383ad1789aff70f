"""What a cache on a GPU holds, read by way of the host."""

from __future__ import annotations

from typing import Any

from kvlab.cache.pages import LayerPages


def pages_of(cache: Any) -> list[LayerPages]:
    with cache._on_host(changes=False):
        return [layer.store.view() for layer in cache.layers]


def positions(pages: LayerPages, row: int, head: int) -> list[int]:
    found = []
    for entry in range(int(pages.num_pages[row, head])):
        at = (row, head, entry)
        layout, count = pages.layouts[pages.rung[at]], int(pages.count[at])
        held = layout.positions_in(pages.pools[pages.rung[at]])[pages.index[at], :count]
        found += [(int(pages.base[at]) << 16) + int(offset) for offset in held]
    return sorted(found)
