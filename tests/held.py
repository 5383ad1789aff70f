"""What a cache on a GPU holds, read by way of the host."""

from __future__ import annotations

from typing import Any

from kvlab.cache.cuda_window import joined, ladder_on_gpu
from kvlab.cache.layer import Layer
from kvlab.cache.pages import LayerPages
from kvlab.cache.store import LayerStore


def pages_of(cache: Any) -> list[LayerPages]:
    with cache._on_host(changes=False):
        return [_whole(layer).view() for layer in cache.layers]


def _whole(layer: Layer) -> LayerStore:
    """All pages that the GPU has, those of a residual window among them."""
    ladder = ladder_on_gpu(layer.store.whole_ladder, layer.residual)
    return joined(layer, ladder) if layer.residual else layer.store


def positions(pages: LayerPages, row: int, head: int) -> list[int]:
    found = []
    for entry in range(int(pages.num_pages[row, head])):
        at = (row, head, entry)
        layout, count = pages.layouts[pages.rung[at]], int(pages.count[at])
        held = layout.positions_in(pages.pools[pages.rung[at]])[pages.index[at], :count]
        found += [(int(pages.base[at]) << 16) + int(offset) for offset in held]
    return sorted(found)
