"""Rotation, scales and codes on the CPU against the reference, bit for bit, zeros with their signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlab.numba_kernels.cpu.scales import DECODED, RAW, encode_vector, log_of_block, rotate_row
from numba import njit
from numpy.typing import NDArray

from kvlab.ops.cpu.page_tokens import prepared_frames
from kvlab.reference import pages as reference
from tests.strategies import SEEDS, VECTOR_KINDS, page_vectors

HEAD_DIMS = range(16, 257, 16)
QUANTISED = (2, 3, 4, 8)
POISON = np.float32(np.nan)

head_dims = st.sampled_from(HEAD_DIMS)


@njit
def _rotate_all(x: Any, n: int, frames: Any, of_row: Any, out: Any) -> None:
    for i in range(len(of_row)):
        rotate_row(x, i * n, n, log_of_block(n), frames, of_row[i], out)


def rotated(
    x: NDArray[np.float32], mean: NDArray[np.float16] | None = None, of_row: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    means = np.empty((0, x.shape[1]), np.float16) if mean is None else mean
    before, out = (x.copy(), means.copy()), np.full_like(x, POISON)
    shifts, exponents = np.zeros((len(means), x.shape[1] // 2), np.uint8), np.zeros((len(means), 2), np.int8)
    frames = prepared_frames(means, shifts, exponents)
    _rotate_all(
        x.reshape(-1), x.shape[1], frames, np.full(len(x), -1) if of_row is None else of_row, out.reshape(-1)
    )
    assert_same_bits(x, before[0])
    assert np.array_equal(means, before[1], equal_nan=True)
    return out


def assert_same_bits(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@njit
def _encode_all(
    x: Any, n: int, bits: int, guess: Any, decoded: Any, codes: Any, byte: Any, row: Any, sizes: Any
) -> None:
    for i in range(len(byte)):
        byte[i] = encode_vector(x, i * n, bits, guess, DECODED if decoded[i] else RAW, row, sizes)
        codes[i] = row


def encoded(
    x: NDArray[np.float32], bits: int, decoded: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    n = x.shape[1]
    codes, byte = np.full(x.shape, 999, np.uint32), np.full(len(x), 999, np.int64)
    row, sizes = np.full(n, 999, np.uint32), np.full(n, POISON)
    _encode_all(x.reshape(-1), n, bits, reference.GUESS[bits], decoded, codes, byte, row, sizes)
    return codes, byte


def assert_same(x: NDArray[np.float32], bits: int) -> None:
    """Vectors that are raw, that come from codes, and both together."""
    for decoded in (np.zeros(len(x), bool), np.ones(len(x), bool), np.arange(len(x)) % 3 == 0):
        expected = reference.encode(x, bits, decoded)
        for got, wanted in zip(encoded(x, bits, decoded), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@given(SEEDS, st.integers(1, 40), head_dims)
def test_rotations_are_those_of_the_reference(seed: int, n: int, head_dim: int) -> None:
    x = page_vectors(np.random.default_rng(seed), n, head_dim)
    assert_same_bits(rotated(x), reference.rotate(x))


@given(SEEDS, st.integers(1, 40), st.integers(1, 5), head_dims)
def test_rotations_with_means_are_those_of_the_reference(
    seed: int, n: int, heads: int, head_dim: int
) -> None:
    """Means of any size, one that is a vector itself, means of zeros, and of heads that do not occur."""
    rng = np.random.default_rng(seed)
    x, of_row = page_vectors(rng, n, head_dim), rng.integers(0, heads, n)
    with np.errstate(over="ignore"):
        mean = page_vectors(rng, heads, head_dim, VECTOR_KINDS[:-1]).astype(np.float16)
        mean[0] = x[0]
    mean[~np.isfinite(mean)] = 65504
    mean[rng.random(heads) < 0.2] *= 0
    assert_same_bits(rotated(x, mean, of_row), reference.rotate(x, mean[of_row]))
    near = mean[of_row] * (1 + rng.standard_normal(x.shape, dtype=np.float32) / 4096)
    assert_same_bits(rotated(near, mean, of_row), reference.rotate(near, mean[of_row]))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
def test_means_of_every_size(head_dim: int) -> None:
    """All powers of 2 of a mean with all of what lies around it: all units from the least on, all shifts."""
    rng = np.random.default_rng(head_dim)
    mean = (rng.standard_normal((41, head_dim)) * 2.0 ** np.arange(-26, 15)[:, None]).astype(np.float16)
    of_row = np.repeat(np.arange(41), 60)
    power = np.tile(np.arange(-45.0, 15.0), 41)[:, None]
    x = (rng.standard_normal((len(of_row), head_dim)) * 2.0**power).astype(np.float32)
    assert_same_bits(rotated(x, mean, of_row), reference.rotate(x, mean[of_row]))
    x += mean[of_row]
    assert_same_bits(rotated(x, mean, of_row), reference.rotate(x, mean[of_row]))
    assert (rotated(x, mean, of_row) != rotated(x - mean[of_row])).any()
    assert (rotated(x, mean, of_row) != rotated(x, mean, of_row[::-1].copy())).any()


@given(SEEDS, st.integers(1, 40), head_dims, st.sampled_from(QUANTISED), st.booleans())
def test_codes_and_scales_are_those_of_the_reference(
    seed: int, n: int, head_dim: int, bits: int, is_rotated: bool
) -> None:
    x = page_vectors(np.random.default_rng(seed), n, head_dim)
    assert_same(reference.rotate(x) if is_rotated else x, bits)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16), st.sampled_from(QUANTISED))
def test_any_sixteen_floats(patterns: list[int], bits: int) -> None:
    """As hypothesis likes them: it finds its own zeros, repetitions and ends of ranges."""
    x = np.array([patterns], np.uint32).view(np.float32)
    assert_same_bits(rotated(x), reference.rotate(x))
    assert_same(x, bits)


@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("bits", QUANTISED)
def test_vectors_of_every_size(bits: int, head_dim: int) -> None:
    """All mantissas of 7 bits with all exponents: all borders of guesses, scales, units and halvings."""
    size = (np.arange(0, 0x7F80, dtype=np.uint32) << 16).view(np.float32)
    x = np.repeat(size[:, None], head_dim, axis=1)
    x[:, 1::2] *= -1
    x[1::2, 2:] *= np.float32(0.37)
    assert_same(x, bits)
    for end in (0, np.inf):
        assert_same(np.nextafter(x[:: bits + 3], np.float32(end)), bits)


@pytest.mark.parametrize("bits", QUANTISED)
def test_ties(bits: int) -> None:
    """Elements half way between parts of a scale or between sizes, on borders of cells, or next to them."""
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((300, 64), dtype=np.float32)
    _, byte = reference.encode(x, bits)
    scale = reference.SCALES[byte][:, None]
    part = np.exp2(np.floor(np.log2(scale)) - {2: 6, 3: 5, 4: 4, 8: 4}[bits])
    unit = np.exp2(np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True))) - 7)
    x[:, :20] = np.rint(x[:, :20] / part) * part + part / 2
    x[:, 20:40] = np.rint(x[:, 20:40] / unit) * unit + unit / 2
    x[:, 40:56] = np.rint(x[:, 40:56] / scale) * scale
    for wanted in (x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))):
        assert_same(wanted, bits)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_equally_good_scales(bits: int) -> None:
    """Of short vectors of few whole numbers some have equal errors for two scales."""
    rng = np.random.default_rng(bits)
    x = np.rint(rng.standard_normal((20000, 16)) * rng.choice([8, 60], (20000, 1))).astype(np.float32)
    assert_same(x, bits)


def test_one_bit_more_or_less_is_seen() -> None:
    """The comparison rejects scales next to the best, codes next to the nearest, and the other rounding."""
    x = page_vectors(np.random.default_rng(1), 100, 64, ("normal",))
    x = x / np.abs(x).max(axis=1, keepdims=True)
    for bits in QUANTISED:
        codes, byte = encoded(x, bits, np.zeros(len(x), bool))
        scale = reference.SCALES[byte][:, None]
        wrong = reference.grid_codes(x + scale / 16, scale, bits)
        assert (codes != wrong).any()
    bits_of = reference.rotate(x).view(np.uint32)
    assert (rotated(x * np.float32(1 + 2**-12)).view(np.uint32) != bits_of).any()
    unit = np.float32(2.0**-17)  # of whole numbers: what is less is not seen
    whole = np.rint(x / unit) * unit
    assert_same_bits(rotated(whole), reference.rotate(whole + np.where(np.abs(whole) < 0.5, unit / 4, 0)))
    assert (rotated(whole + unit).view(np.uint32) != reference.rotate(whole).view(np.uint32)).any()
