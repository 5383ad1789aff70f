"""Caches on the GPU in NumPy, and steps of them whose results and state are checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.attention import merge_attention
from kvlab.ops.packed import packed_attention
from tests.cache_contents import pages_of, positions, seen_of

LAYERS, HEADS, GROUP, DIM = 2, 2, 2, 64


def make(**options: Any) -> MixedPrecisionCache:
    options = {"batch": 2, "plan_length": 512, "bits": (2, 4, 8), "budget": 0.5, "device": "cuda", **options}
    return MixedPrecisionCache(LAYERS, HEADS * GROUP, HEADS, DIM, **options)


def draw(rng: np.random.Generator, cache: Any, steps: int) -> list[np.ndarray]:
    shapes = [(cache.batch, steps, heads, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def check_state(cache: Any, held: list[Any]) -> None:
    assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)
    assert cache.nbytes <= cache.reserved_nbytes
    assert not any(cache._device.reallocator.status(layer) for layer in range(LAYERS))
    for pages in pages_of(cache):
        pages.check_entries()
        for row, wanted in enumerate(held):
            assert all(positions(pages, row, head) == list(wanted) for head in range(HEADS))


def step(cache: Any, rng: np.random.Generator, steps: int, valid: np.ndarray | None = None) -> None:
    """Step all layers; the results are those of attention over what the pages hold and the new tokens."""
    device = cache._device
    if device is not None and steps <= 16:
        for layer in range(LAYERS):
            device.ensure_open_pages(layer, steps)
    for layer in range(LAYERS):
        before = None if device is None else pages_of(cache)[layer]  # a layer may take room from others
        visible, window = seen_of(cache, layer), cache.windows[layer] or None
        q, k, v = draw(rng, cache, steps)
        out = cache.step(layer, q, k, v, valid=valid)
        seen = np.ones(q.shape[:2], bool) if valid is None else valid
        options = {"batch": cache.batch, "budget": None, "bits": 16, "sliding_window": window}
        exact = MixedPrecisionCache(1, HEADS * GROUP, HEADS, DIM, **options)
        wanted = exact.step(0, q, k, v, valid=seen).astype(np.float32)
        if before is not None and before.num_pages.any():
            lse = _lse(q, k, seen, window or steps)
            stored = packed_attention(q.astype(np.float32), before, **visible)
            wanted, _ = merge_attention([wanted, stored.out], [lse, stored.lse])
        assert np.abs(out - wanted)[seen].max(initial=0) < 4e-3


def _lse(q: np.ndarray, k: np.ndarray, valid: np.ndarray, window: int) -> np.ndarray:
    keys = np.repeat(k.astype(np.float32), GROUP, 2)
    scores = np.einsum("bshd,bthd->bhst", q.astype(np.float32), keys) / np.sqrt(DIM)
    square = np.ones((q.shape[1], q.shape[1]), bool)
    visible = np.tril(square) & np.triu(square, 1 - window) & valid[:, None, None, :]
    return np.logaddexp.reduce(np.where(visible, scores, -np.inf), axis=-1).astype(np.float32)
