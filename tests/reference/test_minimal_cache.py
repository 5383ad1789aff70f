"""The cache on one page against the real one: the same quality for the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

import kvlab
from kvlab.reference.minimal_cache import Cache, attend, build, choose_widths, dequantise, hadamard, quantise

HEAD_DIM, TOKENS = 64, 512


def keys_and_values() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys with a mean, values, queries, and an importance that differs by token."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, TOKENS, HEAD_DIM))
    importance = np.exp(2 * rng.standard_normal(TOKENS))
    return k + rng.standard_normal(HEAD_DIM), v, rng.standard_normal((8, HEAD_DIM)), importance


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.T / np.sqrt(HEAD_DIM)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) @ v


def relative_error(out: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def real_cache(
    k: np.ndarray, v: np.ndarray, bits: tuple[int, ...], budget: float | None
) -> kvlab.MixedPrecisionCache:
    cache = kvlab.MixedPrecisionCache(
        1,
        1,
        1,
        HEAD_DIM,
        bits=bits,
        budget=budget,
        plan_length=TOKENS,
        dtype="float32",
        importance="uniform",
        sink=0,
        recent=0,
    )
    cache.append(0, *(x[None, :, None].astype(np.float32) for x in (k, v)))
    return cache


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_one_width_has_the_error_of_the_real_cache(bits: int) -> None:
    k, v, q, importance = keys_and_values()
    wanted = exact(q, k, v)
    minimal = relative_error(attend(q, build(k, v, importance, 1 << 30, (bits,))), wanted)
    out = real_cache(k, v, (bits,), None).attend(0, q[None, :, None].astype(np.float32))[0, :, 0]
    # A real scale is one byte, up to an eighth too large.
    assert 0.6 < minimal / relative_error(out, wanted) < 1.15


def test_mixed_widths_fit_the_bytes_of_the_real_cache_and_are_as_exact() -> None:
    k, v, q, _ = keys_and_values()
    cache = real_cache(k, v, (2, 3, 4, 8), 0.3)
    minimal = build(k, v, np.ones(TOKENS), cache.nbytes)
    assert sum(page.nbytes for page in minimal.pages) <= cache.nbytes
    wanted = exact(q, k, v)
    real = cache.attend(0, q[None, :, None].astype(np.float32))[0, :, 0]
    assert 0.6 < relative_error(attend(q, minimal), wanted) / relative_error(real, wanted) < 1.15


def test_important_pages_get_the_bits() -> None:
    importance = np.sort(keys_and_values()[3])[::-1]
    widths = choose_widths(importance, HEAD_DIM, 40_000, (2, 3, 4, 8))
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) > 1
    with pytest.raises(ValueError, match="do not hold 512 tokens at 2 bits"):
        choose_widths(importance, HEAD_DIM, 1000, (2, 3, 4, 8))


def test_the_order_of_pages_and_the_mean_of_keys_do_not_matter() -> None:
    k, v, q, importance = keys_and_values()
    cache = build(k, v, importance, 60_000)
    turned = Cache(cache.pages[::-1], cache.k_mean)
    assert np.allclose(attend(q, cache), attend(q, turned), atol=1e-12)
    shifted = build(k + 100.0, v, importance, 60_000)
    assert np.allclose(attend(q, cache), attend(q, shifted), atol=1e-9)


def test_quantising_values_of_the_grid_is_exact() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (10, HEAD_DIM)).astype(np.uint8)
    codes[:, :2] = 0, 15  # the largest element is that of the outermost level
    values = dequantise(codes, np.linspace(0.5, 2, 10), 4)
    found, scale = quantise(values, 4)
    assert np.array_equal(found, codes)
    assert np.allclose(scale, np.linspace(0.5, 2, 10))
    assert np.allclose(hadamard(HEAD_DIM) @ hadamard(HEAD_DIM), np.eye(HEAD_DIM))
