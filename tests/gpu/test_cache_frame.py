"""Frames of keys with large channels: the same on a GPU and on a CPU, however the tokens come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.frame import FRAME
from kvlab.ops.key_frames import KeyFrames
from tests.gpu.packed_cases import to_torch

HEADS_Q, HEADS, DIM = 8, 2, 64


ANGLES = 1e4 ** -np.arange(0, 1, 2 / DIM)
PROFILES = ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8)


def tokens(n: int, factor: float, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((1, n, heads, DIM)) for heads in (HEADS_Q, HEADS, HEADS))
    k[:, :, 1, [5, 37]] *= factor
    q[:, :, HEADS_Q // HEADS :, [5, 37]] /= factor
    return tuple(x.astype(np.float16) for x in (q / scale, k * scale, v * scale))


@pytest.mark.parametrize("parts", [(200,), (10, 190), (50, 5, 145), (1,) * 80, (3,) * 30, (70, 1, 9)])
@pytest.mark.parametrize("factor", [1.0, 7.0, 45.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**-12])
@pytest.mark.parametrize(
    ("bits", "rotary"),
    [((2, 3, 4, 8), None), ((4,), ANGLES), (PROFILES, ANGLES[:20]), (("k4422v3", "k8444v4"), None)],
)
def test_frames_are_those_of_a_cpu(
    parts: tuple[int, ...], factor: float, bits: tuple[Any, ...], scale: float, rotary: Any
) -> None:
    whole = tokens(sum(parts), factor, scale)
    whole[1][...] += np.float16(scale)  # keys have means, or they would not be multiplied by anything
    caches, outs, first = [], [], 0
    for device in ("cpu", "cuda"):
        caches.append(
            MixedPrecisionCache(
                1, HEADS_Q, HEADS, DIM, budget=None, bits=bits, dtype="float16", device=device, rotary=rotary
            )
        )
    for n in parts:
        now = [np.ascontiguousarray(x[:, first : first + n]) for x in whole]
        first += n
        outs.append(
            [np.asarray(caches[0].step(0, *now)), caches[1].step(0, *map(to_torch, now)).cpu().numpy()]
        )
    one, other = (cache.pages(0) for cache in caches)
    for name in FRAME:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.array_equal(*(cache._device.read("query_sums")[0] for cache in caches))
    assert np.flatnonzero(one.k_shift[0, 1]).tolist() == ([5] if factor > 1 else [])
    assert not one.k_shift[0, 0].any()
    for wanted, got in outs:
        assert np.abs(wanted - got).max() < 0.02 * scale
    for name in FRAME:
        assert np.array_equal(*(getattr(cache.to_cpu().pages(0), name) for cache in caches))


@pytest.mark.parametrize("bits", [PROFILES, (2, 3, 4, 8)])
def test_given_frames_are_those_of_every_row(bits: tuple[Any, ...]) -> None:
    whole = tokens(200, 7.0)
    frames = KeyFrames.measured([whole])
    options: dict[str, Any] = {"bits": bits, "dtype": "float16", "frames": frames, "batch": 2}
    caches = [
        MixedPrecisionCache(1, HEADS_Q, HEADS, DIM, budget=0.4, plan_length=1, device=device, **options)
        for device in ("cpu", "cuda")
    ]
    rows = [np.repeat(x, 2, axis=0) for x in whole]
    for first, last in ((0, 10), (10, 150), *((i, i + 1) for i in range(150, 170))):
        now = [np.ascontiguousarray(x[:, first:last]) for x in rows]
        caches[0].step(0, *now)
        caches[1].step(0, *map(to_torch, now))
    one, other = (cache.pages(0) for cache in caches)
    assert one.rung.max() < len(one.layouts), "no token waits"
    for name in FRAME:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    caches[1].repeat(2)
    caches[1].reset()
    again = caches[1].pages(0)
    for name in FRAME:
        wanted = getattr(one, name)[:1]
        assert np.array_equal(getattr(again, name), np.repeat(wanted, 4, axis=0)), name
