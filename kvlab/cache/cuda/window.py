"""The residual window of a cache on a device: pages of width 16 beside those of the ladder.

A device appends every token to an open page of the top rung. For a cache with a residual window that is one
more rung, the cache's dtype unchanged, whose pages hold the window and what has come since the last plan
(`window` of kvlab/cache/cuda/plan.py). Files have windows and not that rung: `joined` puts a layer's window
into pages, and `split` takes it out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.cache.frame import LAST
from kvlab.cache.ladder import Ladder, Rung
from kvlab.cache.layer import Layer
from kvlab.cache.store import LayerStore
from kvlab.cache.window import Window
from kvlab.pages import (
    TOKENS_PER_PAGE,
    decode_importance,
    encode_importance,
    read_tokens,
    write_tokens,
)

__all__ = ["EXACT", "arena_share", "joined", "split", "store_on_gpu", "window_nbytes"]

EXACT = Rung(16, 16)


def window_nbytes(residual: int, heads: int, page_nbytes: int) -> int:
    """Bytes that the pages of a row's window take: full ones, and two that are not."""
    return heads * page_nbytes * (-(-residual // TOKENS_PER_PAGE) + 2) if residual else 0


def store_on_gpu(layer: Layer) -> LayerStore:
    """The shape of a layer's pages on the GPU: that on the CPU, or one with a rung for the window."""
    store = layer.store
    if not layer.residual:
        return store
    ladder = (*store.whole_ladder, EXACT)
    return LayerStore(ladder, store.batch, store.num_heads_kv, store.head_dim, store.dtype)


def arena_share(layers: Sequence[Layer], capacity: int, share: int | None) -> int | None:
    """Bytes of a row to have memory for; None: all tokens at the top rung, which may be the window's."""
    if share is not None or not layers[0].residual:
        return share
    needs = []
    for layer in layers:
        store, exact = layer.store, store_on_gpu(layer)
        pages = capacity // TOKENS_PER_PAGE + (1 + (capacity >> 16)) * len(store.ladder)
        window = exact.page_bytes(len(exact.ladder) - 1)
        needs.append(
            store.num_heads_kv * pages * store.page_bytes(len(store.ladder) - 1)
            + window_nbytes(_most_exact(layer), store.num_heads_kv, window)
            + store.fixed_nbytes
        )
    return max(needs)


def _most_exact(layer: Layer) -> int:
    """Tokens that a window holds after a plan: more than `residual` until the mean of keys is taken."""
    return max(layer.residual, LAST - 1) if layer.takes_mean else layer.residual


def joined(layer: Layer, ladder: Ladder) -> LayerStore:
    """Return pages and table of a layer whose windows lie in pages behind those of its own rungs.

    Rows that wait for the mean of their keys have them at the last rung of `ladder`, others at that behind
    their own, which may be the same.
    """
    store, top = layer.store, len(layer.store.layouts)
    wide = LayerStore(ladder, store.batch, store.num_heads_kv, store.head_dim, store.dtype)
    runs = [_runs(window.position) for window in layer.windows]
    most, heads = max(map(len, runs), default=0), np.arange(store.num_heads_kv)
    layout = wide.layouts[top]
    last = len(wide.layouts) - 1
    rungs = np.where(layer.has_mean, top, last)
    pools = {}
    for rung in (top, last):
        pages = sum(len(run) for run, own in zip(runs, rungs, strict=True) if own == rung)
        pools[rung] = np.zeros((pages * len(heads), layout.nbytes), np.uint8)
    filled = dict.fromkeys(pools, 0)
    names = ("rung", "count", "index", "base")
    tables = {name: np.pad(getattr(store, name), ((0, 0), (0, 0), (0, most))) for name in names}
    num_pages = store.num_pages.copy()
    for row, window in enumerate(layer.windows):
        for first, end in runs[row]:
            rung = int(rungs[row])
            pool, page = pools[rung], filled[rung]
            n, entry = end - first, (row, heads, num_pages[row])
            tables["rung"][entry], tables["count"][entry] = rung, n
            tables["index"][entry], tables["base"][entry] = page + heads, window.position[first] >> 16
            where, slot = np.repeat(page + heads, n), np.tile(np.arange(n), len(heads))
            k, v = (
                x[first:end].swapaxes(0, 1).reshape(-1, store.head_dim).astype(np.float32)
                for x in (window.k, window.v)
            )
            write_tokens(pool, layout, store.dtype, where, slot, k, v)
            layout.positions_in(pool)[where, slot] = np.tile(window.position[first:end] & 0xFFFF, len(heads))
            codes = encode_importance(window.observed[:, first:end])
            layout.importance_in(pool)[where, slot] = codes.ravel()
            num_pages[row] += 1
            filled[rung] += len(heads)
    wide.restore([*store.pools, *pools.values()], tables, num_pages, store.k_mean.copy())
    return wide


def _runs(position: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut tokens into pages: none has more than 64, or positions of two runs of 65,536."""
    found: list[tuple[int, int]] = []
    borders = [0, *(np.flatnonzero(np.diff(position >> 16)) + 1).tolist(), len(position)]
    for begin, end in pairwise(borders):
        starts = range(begin, end, TOKENS_PER_PAGE)
        found += [(start, min(start + TOKENS_PER_PAGE, end)) for start in starts]
    return found


def split(wide: LayerStore, layer: Layer) -> None:
    """Fill a layer from pages whose last rungs hold its windows; the inverse of `joined`."""
    top, store = len(layer.store.layouts), layer.store
    exact = wide.live() & (wide.rung >= top)
    layer.windows = [_window(wide, row, top) for row in range(wide.batch)]
    kept = wide.live() & ~exact
    order = np.argsort(~kept, axis=2, kind="stable")
    num_pages = kept.sum(2).astype(np.int32)
    most = int(num_pages.max(initial=0))
    tables: dict[str, NDArray[Any]] = {
        name: np.take_along_axis(getattr(wide, name), order, 2)[:, :, :most].copy()
        for name in ("rung", "count", "index", "base")
    }
    for table in tables.values():
        table[np.arange(most) >= num_pages[..., None]] = 0
    store.restore(wide.pools[:top], tables, num_pages, wide.k_mean.copy())


def _window(wide: LayerStore, row: int, top: int) -> Window:
    tokens = wide.tokens(row)
    mine = np.flatnonzero(tokens.rung >= top)
    tokens = tokens.part(mine[np.lexsort((tokens.position[mine], tokens.head[mine]))])
    shape = (wide.num_heads_kv, len(tokens) // wide.num_heads_kv)
    index = wide.index[row, tokens.head, tokens.page].astype(np.int64)
    rung = int(tokens.rung.max(initial=top))  # the same for all of a row
    k, v = read_tokens(wide.pools[rung], wide.layouts[rung], wide.dtype, index, tokens.slot)
    k, v = (x.reshape(*shape, wide.head_dim).swapaxes(0, 1) for x in (k, v))
    dtype = numpy_dtype(wide.dtype)
    observed = decode_importance(tokens.code).reshape(shape)
    return Window(k.astype(dtype), v.astype(dtype), tokens.position.reshape(shape)[0], observed)
