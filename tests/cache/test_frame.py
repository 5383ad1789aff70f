"""Frames of keys: channels that are larger than others are scaled down, as their keys and queries say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.frame import mean_factors

HEADS_Q, HEADS, DIM = 4, 2, 64
PAIR = [5, 37]


def tokens(n: int, factor: float, dtype: str = "float16") -> tuple[np.ndarray, ...]:
    """Queries, keys and values; a pair of channels of the second head's keys is multiplied by a factor."""
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((1, n, heads, DIM)) for heads in (HEADS_Q, HEADS, HEADS))
    k[:, :, 1, PAIR] *= factor
    q[:, :, HEADS_Q // HEADS :, PAIR] /= factor
    return tuple(x.astype(dtype) for x in (q, k, v))


def fed(
    whole: tuple[np.ndarray, ...], parts: tuple[int, ...], bits: int, *, asks: bool = True
) -> MixedPrecisionCache:
    cache = MixedPrecisionCache(1, HEADS_Q, HEADS, DIM, budget=None, bits=(bits,), dtype=str(whole[0].dtype))
    first = 0
    for n in parts:
        q, k, v = (x[:, first : first + n] for x in whole)
        cache.step(0, q, k, v) if asks else cache.append(0, k, v)
        first += n
    return cache


def error(cache: MixedPrecisionCache, whole: tuple[np.ndarray, ...]) -> float:
    """Relative error of attention with the last queries."""
    q, k, v = (x.astype(np.float64)[0] for x in whole)
    out, wanted = np.asarray(cache.attend(0, whole[0][:, -16:]), np.float64)[0], []
    for head in range(HEADS_Q):
        of = head * HEADS // HEADS_Q
        scores = q[-16:, head] @ k[:, of].T / 8
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted.append(weights / weights.sum(1, keepdims=True) @ v[:, of])
    reference = np.stack(wanted, 1)
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("factor", [6.0, 11.0, 45.0])
def test_large_channels_cost_little(bits: int, factor: float, dtype: str) -> None:
    plain, large = tokens(300, 1, dtype), tokens(300, factor, dtype)
    assert error(fed(large, (300,), bits), large) < 1.1 * error(fed(plain, (300,), bits), plain)


def test_ordinary_channels_are_not_scaled() -> None:
    assert not fed(tokens(300, 1), (300,), 4).pages(0).k_shift.any()
    assert not fed(tokens(300, 1), (300,), 4, asks=False).pages(0).k_shift.any()


@pytest.mark.parametrize("parts", [(10, 190), (50, 5, 145), (1,) * 200, (47, 1, 16, 136), (60, 140)])
@pytest.mark.parametrize("factor", [1.0, 7.0, 45.0])
def test_a_frame_does_not_depend_on_how_tokens_came(parts: tuple[int, ...], factor: float) -> None:
    whole = tokens(200, factor)
    one, other = (fed(whole, x, 4).pages(0) for x in ((200,), parts))
    assert np.array_equal(one.k_shift, other.k_shift)
    assert np.flatnonzero(one.k_shift[0, 1]).tolist() == (PAIR[:1] if factor > 1 else [])
    assert not one.k_shift[0, 0].any()


def test_without_queries_only_outliers_are_scaled() -> None:
    moderate, large = (fed(tokens(200, factor), (200,), 4, asks=False) for factor in (7, 45))
    assert not moderate.pages(0).k_shift.any()
    assert np.flatnonzero(large.pages(0).k_shift[0, 1]).tolist() == PAIR[:1]


def test_queries_that_are_not_finite_scale_nothing_wrongly() -> None:
    q, k, v = tokens(200, 1)
    q[0, 50] = np.nan
    cache = fed((q, k, v), (200,), 4)
    assert not cache.pages(0).k_shift.any()


ANGLES = 1e4 ** -np.arange(0, 1, 2 / DIM)


def turned(vector: np.ndarray, length: int, angles: np.ndarray) -> np.ndarray:
    """What RoPE makes of one vector at positions 0 to length - 1, (length, DIM)."""
    n = len(angles)
    pairs = (vector[:n] + 1j * vector[n : 2 * n]) * np.exp(1j * np.arange(length)[:, None] * angles)
    rest = np.broadcast_to(vector[2 * n :], (length, DIM - 2 * n))
    return np.concatenate([pairs.real, pairs.imag, rest], 1)


@pytest.mark.parametrize("length", [2048, 5000])
@pytest.mark.parametrize("angles", [ANGLES, ANGLES[:10], np.zeros(3)])
def test_the_mean_is_as_long_as_that_of_later_tokens(length: int, angles: np.ndarray) -> None:
    """Of keys that are the same but for RoPE; but for channels that turn within the first tokens."""
    keys = turned(np.random.default_rng(0).standard_normal(DIM) + 2, length, angles)
    factor = mean_factors(angles.tolist(), DIM, length)
    seen, whole = keys[4:64].mean(0), keys.mean(0)
    n, left = len(angles), np.abs(whole - factor * seen)
    assert 0 <= factor.min() <= factor.max() <= 1
    assert (factor[2 * n :] == 1).all()
    of_pair = np.hypot(left[:n], left[n : 2 * n]) / np.hypot(keys[0, :n], keys[0, n : 2 * n])
    plain = np.hypot(*(seen - whole)[: 2 * n].reshape(2, n)) / np.hypot(keys[0, :n], keys[0, n : 2 * n])
    assert (of_pair <= plain + 0.02).all()  # of those that do not turn nothing is lost
    assert of_pair.max() < 0.75, "the turn of what is left of a mean"
    if angles is ANGLES:
        assert plain.max() > 1.2


@pytest.mark.parametrize("bits", [(2, 8), (4,), ("k4220v2", 8)])
def test_means_are_multiplied(bits: tuple[object, ...]) -> None:
    q, k, v = tokens(100, 1)
    k += np.float16(1)
    caches = [
        MixedPrecisionCache(1, HEADS_Q, HEADS, DIM, bits=bits, budget=None, plan_length=n, rotary=rotary)
        for n, rotary in ((2048, None), (2048, ANGLES), (1, [ANGLES]), (4096, ANGLES.tolist()))
    ]
    for cache in caches:
        cache.step(0, q, k, v)
    plain, known, short, long = (cache.pages(0).k_mean.astype(np.float64) for cache in caches)
    factor = mean_factors(ANGLES.tolist(), DIM, 2048)
    kept = plain != 0  # without a width of 8 some channels have no mean
    assert kept.mean() > 0.3
    assert np.allclose(known[kept], (plain * factor)[kept], rtol=2e-3, atol=1e-6)
    assert (known == short).all(), "plan_length counts from 2,048 on"
    assert not (known == long).all()


def test_rotary_is_checked_and_saved(tmp_path: Path) -> None:
    def make(rotary: object, layers: int = 2) -> MixedPrecisionCache:
        return MixedPrecisionCache(layers, HEADS_Q, HEADS, DIM, bits=(4,), budget=None, rotary=rotary)

    with pytest.raises(ValueError, match="33 angles; head_dim=64 has 32 pairs"):
        make([0.1] * 33)
    with pytest.raises(ValueError, match="names 1 layers of 2"):
        make([[0.1]])
    with pytest.raises(ValueError, match="an angle of rotary"):
        make([-0.1])
    with pytest.raises(TypeError, match="rotary must be a sequence"):
        make(10000.0)
    cache = make([ANGLES, ()])
    q, k, v = tokens(100, 1)
    for layer in range(2):
        cache.step(layer, q, k + np.float16(1), v)
    cache.save(tmp_path / "cache")
    again = MixedPrecisionCache.load(tmp_path / "cache")
    assert again.rotary_of_layers == cache.rotary_of_layers == (tuple(ANGLES), ())
    again.reset()
    for layer in range(2):
        again.step(layer, q, k + np.float16(1), v)
        assert np.array_equal(*(x.pages(layer).k_mean for x in (cache, again)))
    assert not np.array_equal(again.pages(0).k_mean, again.pages(1).k_mean)
