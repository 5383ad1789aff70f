"""Scales and codes of the page format, against float64: exact where it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference.pages import GUESS, SCALES, encode, grid_codes, grid_values, guess_scale, search_scale
from tests.strategies import SEEDS, VECTOR_KINDS, page_vectors

QUANTISED = (2, 3, 4, 8)
SEARCHED = (2, 3, 4)
PARTS = {2: 64, 3: 32, 4: 16, 8: 16}  # of a scale, or up to twice as many: what elements are counted in
Array = NDArray[Any]
Doubles = NDArray[np.float64]

head_dims = st.sampled_from(range(16, 257, 16))
FINITE_SCALES = SCALES[:0xF8].astype(np.float64)


@st.composite
def usual_vectors(draw: st.DrawFn) -> NDArray[np.float32]:
    """Draw vectors that are neither zero nor too large for a scale of 2 bits."""
    x = page_vectors(np.random.default_rng(draw(SEEDS)), 20, draw(head_dims), VECTOR_KINDS[:-1])
    largest = np.abs(x).max(axis=1)
    return x[(largest > 0) & (largest < 2**15)]


def unit_of(x: Array) -> Doubles:
    """Return what errors are counted in: the largest element is 127 to 254 of it."""
    above = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 + 2**-7)
    return np.asarray(2.0 ** (np.floor(np.log2(above.astype(np.float64))) - 7))


@given(usual_vectors(), st.sampled_from(QUANTISED), st.booleans())
def test_the_guess(x: NDArray[np.float32], bits: int, decoded: bool) -> None:
    """It is that of float64, of sizes that are whole below 8 bits."""
    guess, unit = guess_scale(x, bits, np.full(len(x), decoded)), unit_of(x)[:, 0]
    largest = np.abs(x).max(axis=1).astype(np.float64)
    assert (largest < 254.02 * unit).all()
    assert (largest >= 126.99 * unit).all()
    sizes = np.rint(np.abs(compared(x)) / unit[:, None])
    most = largest / unit
    ratio = (np.square(sizes).sum(axis=1) + most**2) / (sizes.sum(axis=1) + most)
    wanted = {2: ratio, 3: np.sqrt(most * ratio), 4: most, 8: most}[bits] * unit * float(GUESS[bits])
    if decoded and bits < 4:
        wanted = wanted * 17 / 16
    np.testing.assert_allclose(guess, wanted, rtol=2.0**-20, atol=2.0**-149)
    if bits == 8:  # the least scale whose grid has cells for all, but 0 for what is nearer to that
        expected = np.where(128 * unit < 2.0**-16, 0, np.searchsorted(FINITE_SCALES, guess))
        np.testing.assert_array_equal(search_scale(x, 8), expected)


def test_the_guess_of_one_element() -> None:
    """One that is not among the channels that are compared: the largest element is there all the same."""
    x = np.zeros((1, 128), np.float32)
    x[0, 127] = 3.0
    for bits in SEARCHED:
        assert guess_scale(x, bits)[0] == np.float32(3.0) * GUESS[bits]
        codes, byte = encode(x, bits)
        assert abs(grid_values(codes, SCALES[byte][:, None], bits)[0, 127] - 3) < 0.5


def test_a_step_of_eight_bits_reaches_the_largest_element() -> None:
    """The least scale that does, to the last bit of float32."""
    byte = np.arange(1, 0xF0)
    most = np.repeat(SCALES[byte][:, None] * np.float32(256), 16, axis=1)
    np.testing.assert_array_equal(search_scale(most, 8), byte)
    np.testing.assert_array_equal(search_scale(np.nextafter(most, np.float32(1e9)), 8), byte + 1)


def values_of(bits: int, scale: Array) -> Doubles:
    """Return the grid, for scales (...,) -> (..., 2**bits)."""
    return np.asarray((2.0 * np.arange(2**bits) + 1 - 2**bits) * np.asarray(scale, np.float64)[..., None])


def errors_on(x: Array, scale: Array, bits: int) -> Doubles:
    """Return the least squared errors of vectors (n, d) on the grids of scales (n, m): (n, m)."""
    grid = values_of(bits, scale)
    lowest, cell = grid[..., :1], 2 * np.asarray(scale, np.float64)[..., None]
    place = np.clip(np.rint((x[:, None] - lowest) / cell), 0, 2**bits - 1)
    return np.asarray(np.square(x[:, None] - (lowest + place * cell)).sum(axis=2))


def whole_scales(byte: NDArray[np.int64], unit: Doubles, bits: int) -> Doubles:
    """Return scales in units: whole numbers, of which 2**(bits - 1) times is below 256."""
    return np.minimum(np.floor(FINITE_SCALES[byte] / unit), 255 // 2 ** (bits - 1))


def compared(x: Array) -> Array:
    """Return the channels that sums are of: three quarters of 128 and more, in units of 16."""
    head_dim = x.shape[1]
    return x[:, : int(0.75 * head_dim) // 16 * 16] if head_dim >= 128 else x


def tried(x: NDArray[np.float32], bits: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], Doubles]:
    """Return the bytes that may be tried below 8 bits, which of them are, and their errors in whole units.

    There are four: that below the guess is the second, that above it the third; the one next to the better of
    these is tried at 2 and 3 bits. All are tried only for vectors that come from codes, at 4 bits, and below
    128 channels.
    """
    of_codes = np.ones(len(x), bool)
    rounded = guess_scale(x, bits, of_codes).astype(np.float16).astype(np.float64)
    below = np.maximum(np.searchsorted(FINITE_SCALES, rounded, "right") - 1, 3)
    byte = below[:, None] + np.arange(-1, 3)
    unit = unit_of(x)
    sizes = np.rint(np.abs(compared(x)) / unit)
    errors = errors_on(sizes, whole_scales(byte, unit, bits), bits)
    upwards = errors[:, 2] < errors[:, 1]
    is_tried = np.array([bits < 4, True, True, bits < 4]) & np.ones(byte.shape, bool)
    is_tried[upwards, 0] = is_tried[~upwards, 3] = False
    return np.where(rounded[:, None] >= 2.0**-18, byte, 0), is_tried, errors


def decoded(x: Array) -> NDArray[np.bool_]:
    """Say of all vectors that they come from codes."""
    return np.ones(len(x), bool)


@given(usual_vectors(), st.sampled_from(SEARCHED))
def test_the_step_is_the_best_of_those_that_are_tried(x: NDArray[np.float32], bits: int) -> None:
    byte, is_tried, errors = tried(x, bits)
    errors = np.where(is_tried, errors, np.inf)
    best = np.array([1, 2, 0, 3])[errors[:, [1, 2, 0, 3]].argmin(axis=1)]  # of equals the first of these
    expected = byte[np.arange(len(x)), best]
    np.testing.assert_array_equal(search_scale(x, bits, decoded(x)), expected)
    np.testing.assert_array_equal(encode(x, bits, decoded(x))[1], expected)


@given(usual_vectors(), st.sampled_from((2, 3)))
def test_the_step_of_a_long_raw_vector_is_the_nearest_to_the_guess(x: NDArray[np.float32], bits: int) -> None:
    """And that of a shorter one the best of those that are tried around the guess."""
    guess = guess_scale(x, bits).astype(np.float16).astype(np.float64)
    found = search_scale(x, bits)
    np.testing.assert_array_equal(encode(x, bits)[1], found)
    np.testing.assert_array_equal(found > 0, guess >= 2.0**-18)
    guess, found = guess[found > 0], found[found > 0]
    if x.shape[1] >= 128:
        off = np.abs(FINITE_SCALES[found] - guess)
        assert (off <= np.abs(FINITE_SCALES[found - 1] - guess)).all()
        assert (off <= np.abs(FINITE_SCALES[found + 1] - guess)).all()
    else:
        below = np.maximum(np.searchsorted(FINITE_SCALES, guess, "right") - 1, 3)
        assert (np.abs(found - below - 0.5) <= 1.5).all()


@given(usual_vectors(), st.sampled_from(SEARCHED))
def test_the_error_is_near_that_of_the_best_byte_tried(x: NDArray[np.float32], bits: int) -> None:
    """Whole sizes and scales move the root of an error by no more than the norm of what moves elements."""
    byte, is_tried, _ = tried(x, bits)
    held = byte[:, 0] > 0
    x, byte, is_tried = x[held], byte[held], is_tried[held]
    unit, scale = unit_of(x), FINITE_SCALES[byte]
    codes, found = encode(x, bits, decoded(x))
    x, codes = compared(x), compared(codes)
    error = np.linalg.norm(x - grid_values(codes, SCALES[found][:, None], bits).astype(np.float64), axis=1)
    off = np.abs(np.abs(x) / unit - np.rint(np.abs(x) / unit))
    less = (2**bits - 1) * (scale / unit - whole_scales(byte, unit, bits))
    moved = unit * np.linalg.norm(off[:, None] + less[..., None], axis=2)
    rounded = np.sqrt(x.shape[1]) * FINITE_SCALES[found] / PARTS[bits]
    least = np.sqrt(errors_on(x.astype(np.float64), scale, bits)) + moved
    least = np.where(is_tried, least, np.inf).min(axis=1)
    of_found = (moved * (byte == found[:, None])).sum(axis=1)
    assert (error <= (least + of_found + rounded) * (1 + 1e-12)).all()


@given(usual_vectors(), st.sampled_from(QUANTISED))
def test_the_code_is_that_of_the_nearest_value(x: NDArray[np.float32], bits: int) -> None:
    """Of elements in parts of a scale: within half a part of x, or 2**-11 of x where that is more."""
    codes, byte = encode(x, bits)
    np.testing.assert_array_equal(byte, search_scale(x, bits))
    held = byte > 0
    if bits == 8:
        np.testing.assert_array_equal(held, 128 * unit_of(x)[:, 0] >= 2.0**-16)
    assert (codes[~held] == 2 ** (bits - 1)).all()
    x, codes, scale = x[held], codes[held], FINITE_SCALES[byte[held]][:, None]
    part = 2.0 ** np.floor(np.log2(scale)) / PARTS[bits]
    assert (scale % (part * PARTS[bits] / 8) == 0).all()  # of scales 8 to 15 times that
    mantissa, exponent = np.frexp(x / part)
    whole = np.where(exponent < 12, np.rint(x / part), np.ldexp(np.rint(mantissa * 2**11), exponent - 11))
    off = np.abs(whole * part - x)
    assert (off <= np.maximum(part / 2, np.abs(x) * 2.0**-11)).all()

    distance = np.abs((whole * part)[..., None] - values_of(bits, scale))
    upper = 2**bits - 1 - distance[..., ::-1].argmin(axis=2)  # of two that are equally near
    np.testing.assert_array_equal(codes, upper)
    inside = np.abs(x) <= 2**bits * scale
    values = grid_values(codes, SCALES[byte[held]][:, None], bits).astype(np.float64)
    assert (np.abs(x - values) <= scale + off)[inside].all()
    assert inside.all() or bits < 8


@given(usual_vectors(), st.sampled_from(SEARCHED))
def test_sums_of_a_search_are_exact_in_any_order(x: NDArray[np.float32], bits: int) -> None:
    """They are below 2**24."""
    byte, is_tried, errors = tried(x, bits)
    assert (np.square(np.rint(np.abs(x) / unit_of(x))).sum(axis=1) < 2**24).all()
    assert (errors[is_tried & (byte > 0)] < 2**24).all()


@pytest.mark.parametrize("bits", SEARCHED)
def test_the_largest_sums_of_a_search(bits: int) -> None:
    """Elements of one size, all sizes in steps of 1/2000, and zeros."""
    size = np.exp(np.arange(np.log(2.0**-18), np.log(2.0**-8), 1 / 2000)).astype(np.float32)
    x, most = np.repeat(size[:, None], 256, axis=1), 0.0
    for zeros in (0, 40, 100, 160, 200, 230, 250, 255):
        x[:, :zeros] = 0
        byte, is_tried, errors = tried(x, bits)
        most = max(most, errors[is_tried & (byte > 0)].max())
    assert 2**18 < most < 2**23


@pytest.mark.parametrize("bits", SEARCHED)
def test_of_equally_good_steps_the_lower_is_taken(bits: int) -> None:
    """And of a scale next to the better one and that, the latter."""
    rng = np.random.default_rng(bits)
    x = np.rint(rng.standard_normal((60000, 16)) * 60).astype(np.float32)
    x = x[np.abs(x).max(axis=1) > 127]
    byte, is_tried, errors = tried(x, bits)
    found = search_scale(x, bits, decoded(x))
    pair, others = (np.where(is_tried, errors, np.inf)[:, i].min(axis=1) for i in ([1, 2], [0, 3]))
    equal = (errors[:, 1] == errors[:, 2]) & (pair <= others)
    assert equal.sum() > 2
    np.testing.assert_array_equal(found[equal], byte[equal, 1])
    if bits < 4:
        equal = (pair == others) & (errors[:, 1] != errors[:, 2])
        assert equal.sum() > 2
        np.testing.assert_array_equal(found[equal], byte[equal, 1 + errors[equal, 1:3].argmin(axis=1)])


def test_the_search_is_worth_its_time() -> None:
    """A byte taken without the search is not mistaken for the best of all that are tried."""
    x = np.random.default_rng(0).standard_t(4, (1000, 64)).astype(np.float32)
    for bits in SEARCHED:
        byte, _, _ = tried(x, bits)
        found = search_scale(x, bits, decoded(x))
        wanted = [0, 1, 2, 3] if bits < 4 else [1, 2]
        assert (found[:, None] == byte[:, wanted]).any(axis=0).all()
        errors = errors_on(x, SCALES[byte], bits)
        error = errors_on(x, SCALES[found][:, None], bits).mean()
        assert (errors.mean(axis=0) > 1.005 * error).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", QUANTISED)
def test_error_of_gaussian_vectors(bits: int, head_dim: int) -> None:
    """Next to that of the best of all bytes, and what version 1 of the search, with five of them, had."""
    x = np.random.default_rng(bits).standard_normal((4000, head_dim), dtype=np.float32)
    codes, byte = encode(x, bits)
    error = np.square(x - grid_values(codes, SCALES[byte][:, None], bits), dtype=np.float64).sum(axis=1)
    nearby = byte[:, None] + np.arange(-8, 9)
    best = errors_on(x, SCALES[nearby], bits).min(axis=1)
    assert (best <= error * 1.000001).all()
    searched = {64: {2: 1.005, 3: 1.005, 4: 1.02}, 128: {4: 1.025}, 256: {4: 1.045}}[head_dim]
    most = {2: 1.02, 3: 1.035, 8: 1.03} | searched
    assert error.mean() <= best.mean() * most[bits]
    before = {
        64: {2: 0.1135, 3: 0.0336, 4: 0.0093, 8: 4.0e-5},
        128: {2: 0.1170, 3: 0.0358, 4: 0.0103, 8: 4.7e-5},
        256: {2: 0.1190, 3: 0.0370, 4: 0.0110, 8: 5.3e-5},
    }
    mean_error = error.mean() / np.square(x, dtype=np.float64).sum(axis=1).mean()
    assert mean_error <= before[head_dim][bits] * max(most[bits] - 0.01, 1.01)
    other = errors_on(x, SCALES[nearby[:, [7, 9]]], bits).mean(axis=0)  # a byte below, a byte above
    assert (other > error.mean() * 1.005).all()


@given(SEEDS, head_dims, st.sampled_from(QUANTISED), st.integers(-4, 20))
def test_a_vector_twice_as_large_has_the_same_codes(seed: int, head_dim: int, bits: int, power: int) -> None:
    """Its scale is twice as large too; beyond the highest scales it stays what it is."""
    x = np.random.default_rng(seed).standard_normal((20, head_dim), dtype=np.float32)
    codes, byte = encode(x, bits)
    more, byte_more = encode(x * np.float32(2.0**power), bits)
    np.testing.assert_array_equal(more, codes)
    most = bits + 6 - np.log2(unit_of(x)[:, 0])
    np.testing.assert_array_equal(byte_more, byte + 8 * np.minimum(power, most))
    assert (byte_more <= 0xF7).all()
    huge, byte_huge = encode(x * np.float32(2.0**110), bits)
    np.testing.assert_array_equal(huge, codes)
    np.testing.assert_array_equal(byte_huge, byte + 8 * most)


@pytest.mark.parametrize("bits", QUANTISED)
def test_vectors_without_a_step(bits: int) -> None:
    """The least scale, 2**-17, is for guesses from 2**-18 on; at 8 bits for elements from about 2**-16 on."""
    x = np.ones((8, 32), np.float32)
    x[0] = 0
    x[1], x[2], x[6] = 1e-40, 2.0**-17.2, 1e-20
    x[3, 7], x[4, 8], x[5, 9] = np.nan, np.inf, -np.inf
    codes, byte = encode(x, bits)
    assert (codes[:2] == 2 ** (bits - 1)).all()
    assert (codes[3:6] == 2 ** (bits - 1)).all()
    assert byte[:7].tolist() == [0, 0, 0, 0xFF, 0xFF, 0xFF, 0]
    assert byte[7] == encode(x[7:], bits)[1]
    values = grid_values(codes, SCALES[byte][:, None], bits)
    assert (values[[0, 1, 2, 6]] == 0).all()
    assert np.isnan(values[3:6]).all()
    border = 2.0**-16 / (1 + 2.0**-7) if bits == 8 else 2.0**-18 / float(GUESS[bits])
    _, around = encode(np.full((2, 32), [[border * 0.99], [border * 1.02]], np.float32), bits)
    assert around[0] == 0
    assert around[1] in ((1,) if bits == 8 else (2, 3))


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("size", [1e-5, 6e-5, 2e-3, 1e20, 3e38])
def test_vectors_of_the_least_and_the_largest_steps(bits: int, size: float) -> None:
    """Tiny ones are no worse off than with a scale of 0; huge ones have the codes of smaller ones."""
    x = np.random.default_rng(0).uniform(-1, 1, (50, 64)).astype(np.float32)
    x[:, 5] = 1
    x *= np.float32(size)
    codes, byte = encode(x, bits)
    assert (byte <= 0xF7).all()
    if size > 1:
        np.testing.assert_array_equal(codes, encode(np.ldexp(x, -int(np.log2(size))), bits)[0])
    else:
        error = np.square(x - grid_values(codes, SCALES[byte][:, None], bits)).sum(axis=1)
        assert (error <= np.square(x).sum(axis=1)).all()


@pytest.mark.parametrize("bits", QUANTISED)
def test_values_of_the_grid_have_their_own_codes(bits: int) -> None:
    codes = np.arange(2**bits)
    for scale in SCALES[1:0xF8]:
        values = grid_values(codes, scale, bits)
        np.testing.assert_array_equal(values, values_of(bits, scale))
        np.testing.assert_array_equal(grid_codes(values, scale, bits), codes)
