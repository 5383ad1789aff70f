"""Frames of keys: channels that are larger than others are scaled down, as their keys and queries say."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache

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
    assert np.flatnonzero(one.k_shift[0, 1]).tolist() == (PAIR if factor > 1 else [])
    assert not one.k_shift[0, 0].any()


def test_without_queries_only_outliers_are_scaled() -> None:
    moderate, large = (fed(tokens(200, factor), (200,), 4, asks=False) for factor in (7, 45))
    assert not moderate.pages(0).k_shift.any()
    assert np.flatnonzero(large.pages(0).k_shift[0, 1]).tolist() == PAIR


def test_queries_that_are_not_finite_scale_nothing_wrongly() -> None:
    q, k, v = tokens(200, 1)
    q[0, 50] = np.nan
    cache = fed((q, k, v), (200,), 4)
    assert not cache.pages(0).k_shift.any()
