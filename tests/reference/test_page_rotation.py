"""The rotation of the page format, against integers and float64: exact where it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference import codec
from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import rotate
from tests.strategies import SEEDS

Array = NDArray[Any]

head_dims = st.sampled_from(range(16, 257, 16))
scales = st.floats(-40, -20) | st.floats(-35, 90)  # the first around the least unit


def draw(seed: int, head_dim: int, scale: float, count: int = 20) -> NDArray[np.float32]:
    """Return Gaussian vectors, each second of them with a few elements far above the others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, head_dim))
    x[::2] *= 50.0 ** (rng.random(x[::2].shape) < 0.05)
    result: NDArray[np.float32] = (x * 2.0**scale).astype(np.float32)
    return result


def log_of_order(x: Array) -> int:
    """Return log2 of the order of the transform."""
    return int(x.shape[1] & -x.shape[1]).bit_length() - 1


def largest_of(x: Array) -> NDArray[np.float64]:
    return np.asarray(np.abs(x.astype(np.float64)).max(axis=1, keepdims=True))


def whole_numbers(x: Array, largest: Array) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the integers that a rotation adds up, and the unit of each vector: as the definition says."""
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - (23 - log_of_order(x))
    unit = 2.0 ** np.maximum(exponent, -39)
    return np.rint(x.astype(np.float64) / unit).astype(np.int64), unit


def sums_of(whole: NDArray[np.int64]) -> NDArray[np.int64]:
    """Transform integers, as a product with a matrix."""
    block = 2 ** log_of_order(whole)
    signs = np.kron(np.eye(whole.shape[1] // block, dtype=np.int64), scipy.linalg.hadamard(block))
    return np.asarray(whole @ signs)


def to_elements(sums: Array, unit: Array) -> NDArray[np.float64]:
    """Round sums half to even to multiples of 4 of 11 significant bits; multiply by unit and factor."""
    log = log_of_order(sums)
    quarters = sums.astype(np.float64) / 4
    last = 2.0 ** np.maximum(np.frexp(quarters)[1] - 11, 0)
    factor = 1.4140625 if log % 2 else 1.0
    return np.asarray(np.rint(quarters / last) * last * 4 * unit * factor * 2.0 ** -((log + 1) // 2))


@given(SEEDS, head_dims, scales)
def test_a_rotation_is_a_product_of_integer_matrices(seed: int, head_dim: int, scale: float) -> None:
    x = draw(seed, head_dim, scale)
    whole, unit = whole_numbers(x, largest_of(x))
    log = log_of_order(x)
    assert (np.abs(whole).max(axis=1) >= 2 ** (23 - log))[unit[:, 0] > 2.0**-39].all()
    assert np.abs(whole).max() <= 2 ** (24 - log)
    sums = sums_of(whole)
    assert np.abs(sums).max() <= 2**24
    np.testing.assert_array_equal(rotate(x), to_elements(sums, unit))


@given(SEEDS, head_dims, st.floats(-9, 8), st.floats(-10, 10), st.booleans())
def test_a_mean_is_taken_off_the_sums(
    seed: int, head_dim: int, scale: float, power: float, is_shared: bool
) -> None:
    """It has whole numbers of its own, of another unit; the difference is rounded to float32, and no sooner.

    With these scales a difference has no more bits than float64 keeps.
    """
    x = draw(seed, head_dim, scale + power)
    mean = draw(seed + 1, head_dim, scale, 1 if is_shared else len(x)).astype(np.float16)
    whole, unit = whole_numbers(x, np.maximum(largest_of(x), largest_of(mean)))
    of_mean, its_unit = whole_numbers(mean, largest_of(mean))
    difference = sums_of(whole) - sums_of(of_mean) * (its_unit / unit)
    expected = to_elements(difference.astype(np.float32), unit)
    np.testing.assert_array_equal(rotate(x, mean[0] if is_shared else mean), expected)


@given(SEEDS, head_dims)
def test_float32_sums_of_a_rotation_are_exact_in_any_order(seed: int, head_dim: int) -> None:
    rng = np.random.default_rng(seed)
    x = draw(seed, head_dim, 0.0, 4)
    whole, unit = whole_numbers(x, largest_of(x))
    block = 2 ** log_of_order(x)
    terms = whole.reshape(4, -1, 1, block) * scipy.linalg.hadamard(block)
    for wanted in (terms[..., rng.permutation(block)], terms[..., ::-1]):
        one_by_one = np.add.accumulate(wanted.astype(np.float32), axis=-1)[..., -1].reshape(x.shape)
        np.testing.assert_array_equal(rotate(x), to_elements(one_by_one, unit))


def is_near(rotated: Array, x: Array, mean: Array | float = 0.0) -> bool:
    """Say whether vectors are the orthonormal transform of x - mean, but for what a rotation may round.

    Elements of x and of the mean are off by half a unit, their sums by as much for each of them, and the
    difference of these by 3 units, a whole one for float32 and 2 for multiples of 4; or by 2**-11 of itself,
    and the factor by 1.1e-4 if it is no power of 2.
    """
    log = log_of_order(x)
    exact = (x.astype(np.float64) - mean) @ hadamard_matrix(x.shape[1])
    most = np.maximum(largest_of(x), np.abs(mean).max())
    unit = np.maximum(most * 2.0 ** (log - 23), 2.0**-39) * 2.0 ** (-log / 2)
    allowed = np.abs(exact) * (2.0**-11 + (1.1e-4 if log % 2 else 0)) + unit * (2.0**log + 3) * 1.001
    return bool((np.abs(rotated - exact) <= allowed).all())


@given(SEEDS, head_dims, st.floats(-25, 90))
def test_a_rotation_is_near_the_orthonormal_transform(seed: int, head_dim: int, scale: float) -> None:
    x = draw(seed, head_dim, scale)
    rotated = rotate(x)
    assert is_near(rotated, x)
    assert is_near(codec.hadamard(x), x)
    log = log_of_order(x)
    mantissa, _ = np.frexp(rotated / (1.4140625 if log % 2 else 1))
    assert (mantissa * 2**11 == np.rint(mantissa * 2**11)).all()
    step = np.abs(x).max(axis=1, keepdims=True) / 512
    for wrong in (rotated * np.float32(1.003), x, rotated[:, ::-1], rotate(np.rint(x / step) * step)):
        assert not is_near(wrong, x)


@given(SEEDS, head_dims, st.floats(-9, 8), st.floats(-10, 10))
def test_a_rotation_with_a_mean_is_near_it_too(seed: int, head_dim: int, scale: float, power: float) -> None:
    x, mean = draw(seed, head_dim, scale + power), draw(seed + 1, head_dim, scale, 1)[0].astype(np.float16)
    wide = mean.astype(np.float64)
    rotated = rotate(x, mean)
    assert is_near(rotated, x, wide)
    assert is_near(rotate((x - wide).astype(np.float32)), x, wide)
    for wrong in (rotate(x), rotate(x, -mean), rotate(x, mean[::-1]), rotate(x, mean * np.float16(1.5))):
        assert not is_near(wrong, x, wide)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_small_deviations_from_a_large_mean_are_kept(head_dim: int) -> None:
    """With deviations of 2**-8 of the mean; of a vector of 11 bits there would be little left."""
    rng = np.random.default_rng(head_dim)
    mean = rng.choice([-1.9, 1.9], head_dim).astype(np.float16)
    x = (mean + rng.standard_normal((50, head_dim)) * 2.0**-8).astype(np.float32)
    exact = (x - mean.astype(np.float64)) @ hadamard_matrix(head_dim)
    for vectors, least, most in ((x, 0, 0.008), (x.astype(np.float16).astype(np.float32), 0.03, 1)):
        error = np.linalg.norm(rotate(vectors, mean) - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert least <= error.min() <= error.max() < most


@given(SEEDS, head_dims, scales)
def test_without_a_mean_is_with_one_of_zeros(seed: int, head_dim: int, scale: float) -> None:
    x = draw(seed, head_dim, scale)
    np.testing.assert_array_equal(rotate(x, np.zeros(head_dim, np.float16)), rotate(x))
    mean = draw(seed, head_dim, 0.0, 1).astype(np.float16)
    alone = rotate(mean.astype(np.float32))
    np.testing.assert_array_equal(rotate(np.zeros_like(x), mean[0]), np.tile(-alone, (len(x), 1)))
    np.testing.assert_array_equal(rotate(mean.astype(np.float32), mean), 0)


@pytest.mark.parametrize("head_dim", [32, 64, 80])
@pytest.mark.parametrize("mean", [None, 0.0, 3.0])
def test_vectors_at_the_ends_of_float32_are_rotated(head_dim: int, mean: float | None) -> None:
    x = np.zeros((12, head_dim), np.float32)
    x[1] = -0.0
    x[2, 3] = 2.0**-40
    x[3, :2] = 1e-40
    x[4, 3] = 2.0**-37
    x[5, 3] = np.nextafter(np.float32(2.0**100), np.float32(0))
    x[6, 3] = 2.0**100
    x[7, 3] = -3e38
    x[8, 3] = np.nan
    x[9, -1] = np.inf
    x[10, :2] = -np.inf, np.nan
    x[11] = 1
    less = None if mean is None else np.full(head_dim, mean, np.float16)
    rotated = rotate(x, less)
    assert np.isnan(rotated[6:11]).all()
    for row in (0, 1, 2, 3, 4, 5, 11):  # the last between rows of NaN
        assert is_near(rotated[[row]], x[[row]], mean or 0)
        np.testing.assert_array_equal(rotated[row], rotate(x[[row]], less)[0])
    if not mean:
        assert (rotated[:4] == 0).all()
        assert (rotated[4] != 0).any()


def test_nothing_to_rotate() -> None:
    assert rotate(np.zeros((0, 64), np.float32)).shape == (0, 64)
    assert rotate(np.zeros((0, 64), np.float32), np.ones(64, np.float16)).shape == (0, 64)
