"""Caches with given frames: the same on a GPU and on a CPU, from the first token on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.frame import FRAME
from kvlab.ops.key_frames import KeyFrames
from tests.cache_contents import contents_of
from tests.gpu.packed_cases import to_torch

HEADS_Q, HEADS, LAYERS = 8, 2, 2
LADDERS: dict[str, Any] = {
    "widths": (2, "k3v2", 8),
    "blocks": ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8),
    "both": "0:2+4+8,1:k4422v3+8",
}


def tokens(seed: int, n: int, dim: int, scale: float) -> tuple[np.ndarray, ...]:
    """Keys with a mean, pairs of energies from 1 to 1/55, and queries that ask for them alike."""
    rng, size = np.random.default_rng(seed), np.tile(np.exp(-np.arange(dim // 2) * 8 / dim), 2)
    q, k, v = (rng.standard_normal((2, n, heads, dim)) for heads in (HEADS_Q, HEADS, HEADS))
    k = (k + np.random.default_rng(7).standard_normal((HEADS, dim))) * size * scale
    return tuple(x.astype(np.float16) for x in (q * size / scale, k, v * scale))


@pytest.mark.parametrize("scale", [1.0, 2.0**-8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", LADDERS)
def test_rows_have_given_frames_on_both_devices(name: str, dim: int, scale: float, tmp_path: Path) -> None:
    text = tokens(1, 400, dim, scale)
    frames = KeyFrames.measured([text, tuple(x[:, ::-1] for x in text)])
    caches = [
        MixedPrecisionCache(
            LAYERS, HEADS_Q, HEADS, dim, batch=2, bits=LADDERS[name], budget=0.4, plan_length=200,
            importance="key_norm", dtype="float16", device=device, frames=frames,
        )
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    whole, first = tokens(2, 240, dim, scale), 0
    for n in (7, 130, 1, 1, 1, 100):
        now = [np.ascontiguousarray(x[:, first : first + n]) for x in whole]
        first += n
        for layer in range(LAYERS):
            wanted = np.asarray(caches[0].step(layer, *now), np.float32)
            got = caches[1].step(layer, *map(to_torch, now)).float().cpu().numpy()
            assert np.abs(wanted - got).max() < 0.02 * scale
    assert contents_of(caches[0]) == contents_of(caches[1])
    for cache in caches:
        for layer in range(LAYERS):
            pages, given = cache.pages(layer), frames.of_layer(layer, in_blocks=name == "blocks")
            for table in given if name != "both" else ():
                assert np.array_equal(getattr(pages, table), np.stack([given[table]] * 2)), table
            assert (pages.rung < len(pages.layouts)).all()
    rows = [np.array([1, 1, 0])] * 2
    for cache, taken in zip(caches, rows, strict=True):
        cache.select(taken)
    assert contents_of(caches[0]) == contents_of(caches[1])
    caches[1].save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache", device="cpu")
    assert contents_of(loaded) == contents_of(caches[0])
    for table in FRAME:
        assert np.array_equal(getattr(loaded.pages(0), table), getattr(caches[0].pages(0), table))
    for cache, put in zip(caches, (np.asarray, to_torch), strict=True):
        cache.reset()
        for layer in range(LAYERS):
            cache.step(layer, *(put(np.repeat(x[:1, :50], 3, 0)) for x in whole))
    assert contents_of(caches[0]) == contents_of(caches[1])
