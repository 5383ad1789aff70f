"""Frames of keys with large channels: the same on a GPU and on a CPU, however the tokens come."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from tests.gpu.packed_cases import to_torch

HEADS_Q, HEADS, DIM = 8, 2, 64


def tokens(n: int, factor: float) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((1, n, heads, DIM)) for heads in (HEADS_Q, HEADS, HEADS))
    k[:, :, 1, [5, 37]] *= factor
    q[:, :, HEADS_Q // HEADS :, [5, 37]] /= factor
    return tuple(x.astype(np.float16) for x in (q, k, v))


@pytest.mark.parametrize("parts", [(200,), (10, 190), (50, 5, 145), (1,) * 80, (3,) * 30, (70, 1, 9)])
@pytest.mark.parametrize("factor", [1.0, 7.0, 45.0])
@pytest.mark.parametrize("bits", [(2, 3, 4, 8), (4,)])
def test_frames_are_those_of_a_cpu(parts: tuple[int, ...], factor: float, bits: tuple[int, ...]) -> None:
    whole = tokens(sum(parts), factor)
    caches, outs, first = [], [], 0
    for device in ("cpu", "cuda"):
        caches.append(
            MixedPrecisionCache(
                1, HEADS_Q, HEADS, DIM, budget=None, bits=bits, dtype="float16", device=device
            )
        )
    for n in parts:
        now = [np.ascontiguousarray(x[:, first : first + n]) for x in whole]
        first += n
        outs.append(
            [np.asarray(caches[0].step(0, *now)), caches[1].step(0, *map(to_torch, now)).cpu().numpy()]
        )
    one, other = (cache.pages(0) for cache in caches)
    assert np.array_equal(one.k_mean, other.k_mean)
    assert np.array_equal(one.k_shift, other.k_shift)
    assert np.array_equal(*(cache._runner._device.read("asked")[0] for cache in caches))
    assert np.flatnonzero(one.k_shift[0, 1]).tolist() == ([5, 37] if factor > 1 else [])
    assert not one.k_shift[0, 0].any()
    for wanted, got in outs:
        assert np.abs(wanted - got).max() < 0.02
    assert np.array_equal(*(cache.to_cpu().pages(0).k_shift for cache in caches))
