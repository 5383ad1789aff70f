"""Steps and codes of the page format, against float64: exact where it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference import pages
from kvlab.reference.pages import CANDIDATES, GUESS, STEPS, candidate_steps, encode, grid_codes, grid_values
from tests.strategies import SEEDS, VECTOR_KINDS, page_vectors

QUANTISED = (2, 3, 4, 8)
SEARCHED = (2, 3, 4)
HEAD_DIMS = range(16, 257, 16)
Array = NDArray[Any]

head_dims = st.sampled_from(HEAD_DIMS)
FINITE = VECTOR_KINDS[:-1]


@st.composite
def usual_vectors(draw: st.DrawFn) -> NDArray[np.float32]:
    """Draw vectors that are neither zero nor too large for a step of 2 bits."""
    x = page_vectors(np.random.default_rng(draw(SEEDS)), 20, draw(head_dims), FINITE)
    largest = np.abs(x).max(axis=1)
    return x[(largest > 0) & (largest < 2**16)]


@given(usual_vectors(), st.sampled_from(QUANTISED))
def test_candidates_stand_around_the_guess(x: NDArray[np.float32], bits: int) -> None:
    """The guess is that of float64, but for the root mean square, which may be off by half a unit."""
    guess, candidates = pages.guess_step(x, bits), candidate_steps(x, bits)
    largest, mean = np.abs(x).max(axis=1).astype(np.float64), np.square(x, dtype=np.float64).mean(axis=1)
    part, off = float(GUESS[bits]), 2.0 ** np.floor(np.log2(largest)) / 128
    low = high = part * largest
    if bits in (2, 3):
        share = 0.5 ** (4 - bits)
        low, high = (
            part * largest**share * np.maximum(np.sqrt(mean) + by, 0) ** (1 - share) for by in (-off, off)
        )
    assert (low * (1 - 2.0**-21) - 2.0**-149 <= guess).all()
    assert (guess <= high * (1 + 2.0**-21) + 2.0**-149).all()

    finite = STEPS[:0xF8].astype(np.float64)
    if bits == 8:  # the least whose grid has cells for all
        np.testing.assert_array_equal(candidates[:, 0], np.maximum(np.searchsorted(finite, guess), 1))
        return
    rounded = guess.astype(np.float16).astype(np.float64)
    distance = np.abs(finite - rounded[:, None])
    nearest = distance.argmin(axis=1)
    tied = distance[np.arange(len(x)), nearest] == distance[np.arange(len(x)), nearest + 1]
    nearest += tied & (nearest % 2 == 1)
    below = CANDIDATES[bits] // 2
    around = np.maximum(nearest, below + 1)[:, None] + np.arange(-below, below + 1)
    expected = np.where(nearest[:, None] > 0, around, 0)
    np.testing.assert_array_equal(candidates, expected)


def in_parts(x: NDArray[np.float32], candidates: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return vectors in parts of their steps, whole or of 11 bits, and the part: the lowest has 16 to 31."""
    lowest = STEPS[candidates[:, :1]].astype(np.float64)
    part = 2.0 ** (np.floor(np.log2(lowest)) - 4)
    whole = np.rint(x / part)
    mantissa, exponent = np.frexp(x / part)
    return np.where(np.abs(whole) < 2048, whole, np.ldexp(np.rint(mantissa * 2**11), exponent - 11)), part


def values_of(bits: int, step: Array) -> NDArray[np.float64]:
    """Return the grid, for steps (...,) -> (..., 2**bits)."""
    return np.asarray((2.0 * np.arange(2**bits) + 1 - 2**bits) * np.asarray(step, np.float64)[..., None])


def errors_on(x: Array, step: Array, bits: int) -> NDArray[np.float64]:
    """Return the least squared errors of vectors (n, d) on the grids of steps (n, m): (n, m)."""
    grid = values_of(bits, step)
    lowest, highest, cell = grid[..., :1], grid[..., -1:], 2 * np.asarray(step, np.float64)[..., None]
    place = np.clip(np.rint((x[:, None] - lowest) / cell), 0, 2**bits - 1)
    assert np.array_equal(lowest + (2**bits - 1) * cell, highest)
    return np.asarray(np.square(x[:, None] - (lowest + place * cell)).sum(axis=2))


@given(usual_vectors(), st.sampled_from(QUANTISED))
def test_the_code_is_that_of_the_nearest_value_and_the_step_the_best(
    x: NDArray[np.float32], bits: int
) -> None:
    """Of elements in parts of a step: within half a part of x, or 2**-11 of x where that is more."""
    candidates = candidate_steps(x, bits)
    held = candidates[:, 0] > 0
    x, candidates = x[held], candidates[held]
    codes, byte = encode(x, bits)
    assert (byte[:, None] == candidates).any(axis=1).all()
    whole, part = in_parts(x, candidates)
    off = np.abs(whole * part - x)
    assert (off <= np.maximum(part / 2, np.abs(x) * 2.0**-11)).all()
    if bits < 8:
        assert np.abs(whole).max(initial=0) < 2048

    errors = errors_on(whole * part, STEPS[candidates], bits)
    np.testing.assert_array_equal(
        np.take_along_axis(candidates, errors.argmin(axis=1)[:, None], 1)[:, 0], byte
    )
    grid = values_of(bits, STEPS[byte])
    distance = np.abs((whole * part)[..., None] - grid[:, None])
    upper = 2**bits - 1 - distance[..., ::-1].argmin(axis=2)  # of two that are equally near
    np.testing.assert_array_equal(codes, upper)

    # Rounding to parts moves the root of an error by no more than the norm of what it moves.
    value = np.take_along_axis(grid, codes.astype(np.int64), axis=1)
    found, moved = np.linalg.norm(x - value, axis=1), np.linalg.norm(off, axis=1)
    least = np.sqrt(errors_on(x.astype(np.float64), STEPS[candidates], bits).min(axis=1))
    assert (found <= (least + 2 * moved) * (1 + 1e-12)).all()
    step = STEPS[byte].astype(np.float64)[:, None]
    inside = np.abs(x) <= 2**bits * step
    assert (np.abs(x - value) <= step + off)[inside].all()
    assert inside.all() or bits < 8


@given(usual_vectors(), st.sampled_from(SEARCHED))
def test_sums_of_a_search_are_exact_in_any_order(x: NDArray[np.float32], bits: int) -> None:
    """They are at most 2**24; but at 4 bits that of the lowest byte, of 1 to 3, may be more.

    Then the largest element is below 2**-10, most others are near it, and a higher byte is chosen, whatever
    the rounding.
    """
    candidates = candidate_steps(x, bits)
    held = candidates[:, 0] > 0
    x, candidates = x[held], candidates[held]
    whole, part = in_parts(x, candidates)
    errors = errors_on(whole, STEPS[candidates] / part, bits)
    assert (errors.min(axis=1) < 2**24).all()
    beyond = (errors > 2**24).any(axis=1)
    assert bits == 4 or not beyond.any()
    assert (candidates[beyond, 0] <= 3).all()
    assert (np.abs(x[beyond]) < 2.0**-10).all()
    unit = 2.0 ** (np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True))) - 6)
    assert (np.square(np.rint(x / unit)).sum(axis=1) <= 2**22).all()


@pytest.mark.parametrize("bits", SEARCHED)
def test_the_largest_sums_of_a_search(bits: int) -> None:
    """Vectors of one size have the largest errors: all sizes, in steps of 1/2000."""
    size = np.exp(np.arange(np.log(2.0**-20), np.log(2.0**-4), 1 / 2000)).astype(np.float32)
    x = np.repeat(size[:, None], 256, axis=1)
    x = x[candidate_steps(x, bits)[:, 0] > 0]
    candidates = candidate_steps(x, bits)
    whole, part = in_parts(x, candidates)
    errors = errors_on(whole[:, :1], STEPS[candidates] / part, bits) * 256
    low = candidates[:, 0] <= 3
    assert errors[~low].max() <= 2**24
    assert (errors[low].max() > 2**24) == (bits == 4)
    assert errors[low, 1:].max() < 2**24
    assert errors.min(axis=1).max() < 2**23
    _, byte = encode(x, bits)
    np.testing.assert_array_equal(byte, np.take_along_axis(candidates, errors.argmin(1)[:, None], 1)[:, 0])


def test_of_equally_good_steps_the_lower_is_taken() -> None:
    x = np.full((1, 32), 3.1875, np.float32)
    x[0, ::2] *= -1
    candidates = candidate_steps(x, 2)
    errors = errors_on(x, STEPS[candidates], 2)[0]
    assert STEPS[candidates[0]].tolist() == [1, 1.125, 1.25, 1.375, 1.5]
    assert errors[0] == errors[1] < errors[2:].min()  # 3 and 3 * 1.125 are equally far
    assert encode(x, 2)[1] == candidates[0, 0]


def test_the_search_is_worth_its_time() -> None:
    """A byte taken without the search is not mistaken for the best of all that are tried."""
    x = np.random.default_rng(0).standard_t(4, (1000, 64)).astype(np.float32)
    for bits in SEARCHED:
        candidates = candidate_steps(x, bits)
        errors = errors_on(x, STEPS[candidates], bits)
        assert (errors.argmin(axis=1)[:, None] == np.arange(errors.shape[1])).any(axis=0).all()
        assert errors[:, CANDIDATES[bits] // 2].mean() > 1.005 * errors.min(axis=1).mean()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", QUANTISED)
def test_error_of_gaussian_vectors(bits: int, head_dim: int) -> None:
    """Next to that of the best of all bytes, and what version 1 of the search, with five of them, had."""
    x = np.random.default_rng(bits).standard_normal((4000, head_dim), dtype=np.float32)
    codes, byte = encode(x, bits)
    error = np.square(x - grid_values(codes, STEPS[byte][:, None], bits), dtype=np.float64).sum(axis=1)
    nearby = byte[:, None] + np.arange(-8, 9)
    best = errors_on(x, STEPS[nearby], bits).min(axis=1)
    assert (best <= error * 1.000001).all()
    assert error.mean() <= best.mean() * {2: 1.01, 3: 1.01, 4: 1.015, 8: 1.03}[bits]
    before = {
        64: {2: 0.1135, 3: 0.0336, 4: 0.0093, 8: 4.0e-5},
        128: {2: 0.1170, 3: 0.0358, 4: 0.0103, 8: 4.7e-5},
        256: {2: 0.1190, 3: 0.0370, 4: 0.0110, 8: 5.3e-5},
    }
    mean_error = error.mean() / np.square(x, dtype=np.float64).sum(axis=1).mean()
    assert mean_error <= before[head_dim][bits] * 1.01
    unsearched = errors_on(x, STEPS[nearby[:, [7, 9]]], bits).mean(axis=0)  # a byte below, a byte above
    assert (unsearched > error.mean() * 1.005).all()


@given(SEEDS, head_dims, st.sampled_from(QUANTISED), st.integers(-4, 20))
def test_a_vector_twice_as_large_has_the_same_codes(seed: int, head_dim: int, bits: int, power: int) -> None:
    """Its step is twice as large too; beyond the highest steps it stays what it is."""
    x = np.random.default_rng(seed).standard_normal((20, head_dim), dtype=np.float32)
    codes, byte = encode(x, bits)
    more, byte_more = encode(x * np.float32(2.0**power), bits)
    np.testing.assert_array_equal(more, codes)
    most = bits + 13 - np.floor(np.log2(np.abs(x).max(axis=1)))
    np.testing.assert_array_equal(byte_more, byte + 8 * np.minimum(power, most))
    assert (byte_more <= 0xF7).all()
    huge, byte_huge = encode(x * np.float32(2.0**110), bits)
    np.testing.assert_array_equal(huge, codes)
    np.testing.assert_array_equal(byte_huge, byte + 8 * most)


@pytest.mark.parametrize("bits", QUANTISED)
def test_vectors_without_a_step(bits: int) -> None:
    """The least step, 2**-17, is for guesses from 2**-18 on; at 8 bits for all vectors but zeros."""
    x = np.ones((7, 32), np.float32)
    x[0] = 0
    x[1], x[2] = 1e-40, 2.0**-17.2
    x[3, 7], x[4, 8], x[5, 9] = np.nan, np.inf, -np.inf
    codes, byte = encode(x, bits)
    assert (codes[:2] == 2 ** (bits - 1)).all()
    assert (codes[3:6] == 2 ** (bits - 1)).all()
    least = int(bits == 8)
    assert byte[:6].tolist() == [0, least, least, 0xFF, 0xFF, 0xFF]
    assert byte[6] == encode(x[6:], bits)[1]
    values = grid_values(codes, STEPS[byte][:, None], bits)
    assert (np.abs(values[:3]) <= least * 2.0**-17).all()
    assert np.isnan(values[3:6]).all()
    _, first = encode(np.full((1, 32), 2.0**-18 * 1.02 / float(GUESS[bits]), np.float32), bits)
    assert first[0] in (1, 2, 3)


@pytest.mark.parametrize("bits", QUANTISED)
def test_values_of_the_grid_have_their_own_codes(bits: int) -> None:
    codes = np.arange(2**bits)
    for step in STEPS[1:0xF8]:
        values = grid_values(codes, step, bits)
        np.testing.assert_array_equal(values, values_of(bits, step))
        np.testing.assert_array_equal(grid_codes(values, step, bits), codes)
