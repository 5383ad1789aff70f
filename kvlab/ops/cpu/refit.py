"""Fit the frames of keys in host memory to the newest tokens, as kernels/cuda/pages/refit.cuh does it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cpu.layer import HostLayer, array_at, vectors_of, view_at
from kvlab.ops.cpu.page_tokens import first_bits
from kvlab.ops.frame import BLOCKS, FITTED_TO, JUMP, MAX_RATIO, MIN_AGAIN, MIN_GROWN, further_shift
from kvlab.ops.layer_state import UNIT
from kvlab.pages import PageLayout, named_pages, of_channels, placed_channels
from kvlab.views import CudaView

__all__ = ["fit_frames", "refit_frames"]

Ints = NDArray[np.int64]


def fit_frames(layer: HostLayer, q: Any, k: Any, valid: NDArray[np.bool_]) -> None:
    """Fit frames of a layer to queries and keys (batch, num_new, heads, head_dim), before these are stored.

    `k` is rounded to the cache's dtype. `valid` (batch, num_new): those that count. See
    `kvlab.reference.blocks.follow_ratios` and `kvlab.ops.frame.further_shift`. Rows that wait for their frame
    have no ratios yet.
    """
    from kvlab.numba_kernels.cpu import cache_write

    tables = layer.tables
    ratios, shift, exponent = tables["k_ratio"], tables["k_shift"], tables["exponent"][..., :1]
    mean = tables["k_mean"].astype(np.float32)
    if exponent.any():
        mean = np.ldexp(mean, exponent.astype(np.int32))
    q, k = (np.ascontiguousarray(x, np.float32) for x in (q, k))
    rules = np.int64(MAX_RATIO), np.int64(JUMP)
    cache_write.follow_ratios(ratios, q, k, mean, np.ascontiguousarray(valid), *rules)
    if cache_write.has_grown(ratios, shift, np.int64(MIN_GROWN), np.int64(MIN_AGAIN)):
        further = further_shift(ratios, shift) * ~layer.waits[:, None, None]
        for row, head in np.argwhere(further.any(-1)):
            _refit_pages(layer, (int(row), int(head)), further[row, head])
        shift += further.astype(np.uint8)


def refit_frames(layer: HostLayer, new_tokens: Any, queries: CudaView) -> None:
    """`kvlab.ops.cuda.pages.refit_frames`."""
    (batch, heads, _), num_new, mask = layer.shape, int(new_tokens["num_new"]), int(new_tokens["valid"])
    valid = array_at(mask, (batch, num_new), "bool") if mask else np.ones((batch, num_new), bool)
    newest = slice(max(num_new - FITTED_TO, 0), num_new)
    keys, _ = vectors_of(new_tokens, (batch, num_new, heads, layer.head_dim))
    valid = (valid & ~layer.waits[:, None])[:, newest]
    fit_frames(layer, view_at(queries)[:, newest], layer.rounded(keys[:, newest]), valid)


def _refit_pages(layer: HostLayer, at: tuple[int, int], further: NDArray[np.uint8]) -> None:
    """Let the pages of a (row, KV head) hold keys whose rotary pairs are scaled down by 2**further more."""
    tables = {name: layer.tables[name][at] for name in ("rung", "count", "index", "num_pages", "k_order")}
    placed, named = (
        of_channels(further)[placed_channels(tables["k_order"])].astype(np.int64),
        named_pages(tables),
    )
    index = tables["index"].view(np.uint32).astype(np.int64)
    words = layer.arena.view(np.uint32)
    for r, layout in enumerate(layer.layouts):
        entries = np.flatnonzero(named & (tables["rung"] == r))
        if not layout.k_coded or not len(entries):
            continue
        used = np.arange(16) < tables["count"][entries, None]
        first = index[entries] * (UNIT // words.itemsize)
        where = first[:, None] + np.arange(layout.code_bytes(layout.bits_k) // words.itemsize)
        words[where] = _refit(words[where], layout, placed, used)


def _refit(
    words: NDArray[np.uint32], layout: PageLayout, placed: Ints, used: NDArray[np.bool_]
) -> NDArray[np.uint32]:
    """Return the code regions (pages, words) of keys, of which tokens (pages, 16) are used."""
    found, each = words.copy(), layout.head_dim // BLOCKS
    for run in layout.runs(layout.bits_k):
        bits = first_bits(run.bits, run.channels, "k") + 1024 * run.word
        for begin in range(0, run.channels, each):
            own = placed[run.first + begin :][:each]
            if not own.any():
                continue
            word, bit = np.divmod(bits[:, begin : begin + each], 32)
            codes = words[:, word].astype(np.int64) >> bit & ((1 << run.bits) - 1)
            change = (codes ^ _refit_codes(codes, run.bits, own)) * used[..., None]
            at: Any = slice(None), word
            np.bitwise_xor.at(found, at, (change << bit).astype(np.uint32))
    return found


def _refit_codes(codes: Ints, width: int, further: Ints) -> Ints:
    """Return the codes of a block, (..., channels): see `kvlab.reference.blocks.refit_codes`."""
    size = len(further) & -len(further)
    further = further.reshape(-1, size)
    max_further = further.max(-1, keepdims=True)
    x = _butterflies((2 * codes + 1 - (1 << width)).reshape(*codes.shape[:-1], -1, size))
    x = _butterflies(x << (max_further - further))
    cells = x + (size << width + max_further) >> size.bit_length() + max_further
    new: Ints = np.clip(cells, 0, (1 << width) - 1).reshape(codes.shape)
    return new


def _butterflies(x: Ints) -> Ints:
    """The Hadamard transform along the last axis, without a factor."""
    shape, h = x.shape, 1
    while h < shape[-1]:
        a, b = np.moveaxis(x.reshape(*shape[:-1], -1, 2, h), -2, 0)
        x, h = np.stack([a + b, a - b], -2).reshape(shape), 2 * h
    return x
