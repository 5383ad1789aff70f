"""Files of version 1: rows had windows of exact tokens outside pages, and no open pages.

A window held the newest tokens (`residual`), the first ones until the mean of their keys was taken, or sinks
for which bytes were few. Here they become pages: of width 16 behind those of the ladder, the same bits, or,
sinks, of the highest width whose pages fit the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.contents import Arrays
from kvlab.cache.frame import LAST, key_mean
from kvlab.cache.ladder import Layer, LayerFormat
from kvlab.cache.store import OPEN_PAGES
from kvlab.errors import FormatError
from kvlab.pages import TOKENS_PER_PAGE, PageLayout, encode_importance, rotate_vectors, write_tokens

__all__ = ["upgraded"]

Layouts = tuple[PageLayout, ...]


def upgraded(
    layers: Sequence[Layer],
    layouts: list[Layouts],
    row_budget: int | None,
    states: list[dict[str, Any]],
    arrays: Arrays,
) -> tuple[list[dict[str, Any]], Arrays]:
    """Return what a file of version 1 holds as `kvlab.cache.contents` has it.

    Parameters
    ----------
    layers : sequence of Layer
    layouts : list
        Pages of each layer that there is memory for, `DeviceStore.layouts`.
    row_budget : int or None
        Bytes that a row of a layer may take.
    states, arrays
        Of the file.
    """
    found, arrays = Arrays(), dict(arrays)
    for number, (layer, pages) in enumerate(zip(layers, layouts, strict=True)):
        prefix = f"{number}."
        mine = {
            name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)
        }
        found |= {prefix + name: x for name, x in _layer(layer, pages, row_budget, mine).items()}
    if arrays:
        raise FormatError(f"unknown entries {sorted(arrays)[:3]}")
    return [state | {"room": 0, "tidy": False} for state in states], found


def _layer(layer: Layer, layouts: Layouts, row_budget: int | None, mine: Arrays) -> Arrays:
    batch, heads = mine["num_pages"].shape
    waiting = len(layer.stored.layouts)
    bh = np.repeat(np.arange(batch * heads), mine["num_pages"].ravel())
    tables = {name: [mine[name]] for name in ("rung", "count", "base")}
    owners, pools = [bh], [[mine[f"pool{r}"]] for r in range(len(layer.store.layouts))]
    pools += [[] for _ in layouts[len(pools) :]]
    for row in range(batch):
        window = {name: mine.pop(f"window{row}.{name}") for name in ("k", "v", "position", "observed")}
        if not len(window["position"]):
            continue
        runs = _runs(window["position"])
        if not mine["has_mean"][row] and waiting == len(layouts):  # bytes are too few to wait
            mean = key_mean(window["k"][:LAST].astype(np.float32))
            mine["k_mean"][row], mine["has_mean"][row] = mean, True
        rung = waiting if not mine["has_mean"][row] else waiting - 1
        if mine["has_mean"][row] and not layer.residual:
            rung = _widest(layer.store, row_budget, mine["rung"][bh // heads == row], len(runs))
        for first, last in runs:
            pages = _pages(layouts[rung], layer.store.dtype, window, mine["k_mean"][row], first, last)
            owners.append(row * heads + np.arange(heads))
            for name, value in (
                ("rung", rung),
                ("count", last - first),
                ("base", window["position"][first] >> 16),
            ):
                tables[name].append(np.full(heads, value, mine[name].dtype))
            pools[rung].append(pages)
    owner = np.concatenate(owners)
    order, rungs = np.argsort(owner, kind="stable"), np.concatenate(tables["rung"])
    found = {name: np.concatenate(parts)[order] for name, parts in tables.items()}
    for r, parts in enumerate(pools):
        pool = np.concatenate([np.zeros((0, layouts[r].nbytes), np.uint8), *parts])
        found[f"pool{r}"] = pool[np.argsort(owner[rungs == r], kind="stable")]
    counts = np.bincount(owner, minlength=batch * heads).reshape(batch, heads)
    found["num_pages"] = counts.astype(np.int32)
    found["open"] = np.full((batch, heads, OPEN_PAGES), -1, np.int32)
    return found | {name: mine[name] for name in ("k_mean", "has_mean")}


def _pages(
    layout: PageLayout, dtype: str, window: Arrays, mean: NDArray[np.float16], first: int, last: int
) -> NDArray[np.uint8]:
    """A page for each head with tokens `first` to `last - 1` of a window."""
    heads, n = len(mean), last - first
    pool = np.zeros((heads, layout.nbytes), np.uint8)
    page, slot = np.repeat(np.arange(heads), n), np.tile(np.arange(n), heads)
    k, v = (
        window[side][first:last].swapaxes(0, 1).reshape(heads * n, -1).astype(np.float32) for side in "kv"
    )
    k = rotate_vectors(k, mean, page) if layout.bits_k < 16 else k
    v = rotate_vectors(v) if layout.bits_v < 16 else v
    write_tokens(pool, layout, dtype, page, slot, k, v)
    layout.positions_in(pool)[:, :n] = window["position"][first:last] & 0xFFFF
    layout.importance_in(pool)[:, :n] = encode_importance(window["observed"][:, first:last])
    return pool


def _widest(store: LayerFormat, row_budget: int | None, rungs: NDArray[np.uint8], pages: int) -> int:
    """The highest rung of which a row with pages of these rungs can have so many more for each head."""
    if row_budget is None:
        return len(store.layouts) - 1
    left = row_budget - store.fixed_nbytes - sum(store.page_bytes(int(r)) for r in rungs)
    more = pages * store.num_heads_kv
    return max([r for r in range(len(store.layouts)) if more * store.page_bytes(r) <= left], default=0)


def _runs(position: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut tokens into pages: none has more than 64, or positions of two runs of 65,536."""
    found: list[tuple[int, int]] = []
    borders = [0, *(np.flatnonzero(np.diff(position >> 16)) + 1).tolist(), len(position)]
    for begin, end in pairwise(borders):
        starts = range(begin, end, TOKENS_PER_PAGE)
        found += [(start, min(start + TOKENS_PER_PAGE, end)) for start in starts]
    return found
