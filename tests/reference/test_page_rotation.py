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
from kvlab.reference.packed import hadamard_matrix
from kvlab.reference.pages import rotate
from tests.strategies import SEEDS

Array = NDArray[Any]

head_dims = st.sampled_from(range(16, 257, 16))


def draw(seed: int, head_dim: int, scale: float, count: int = 20) -> NDArray[np.float32]:
    """Return Gaussian vectors, each second of them with a few elements far above the others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, head_dim))
    x[::2] *= 50.0 ** (rng.random(x[::2].shape) < 0.05)
    result: NDArray[np.float32] = (x * 2.0**scale).astype(np.float32)
    return result


def whole_numbers(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the integers that a rotation adds up, and the unit of each vector: as the definition says."""
    block = x.shape[1] & -x.shape[1]
    stretched = (x * np.float32(2**0.5) if block.bit_length() % 2 == 0 else x).astype(np.float64)
    largest = np.abs(stretched).max(axis=1, keepdims=True)
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - 10
    unit = 2.0 ** np.maximum(exponent, -40)
    return np.rint(stretched / unit).astype(np.int64), unit


def to_11_bits(x: NDArray[np.int64]) -> NDArray[np.float64]:
    """Round integers half to even to 11 significant bits."""
    last = np.array([2.0 ** max(int(size).bit_length() - 11, 0) for size in np.abs(x).flat]).reshape(x.shape)
    return np.rint(x / last) * last


@given(SEEDS, head_dims, st.floats(-35, 90))
def test_a_rotation_is_a_product_of_integer_matrices(seed: int, head_dim: int, scale: float) -> None:
    x = draw(seed, head_dim, scale)
    whole, unit = whole_numbers(x)
    assert (np.abs(whole).max(axis=1) >= 1024)[unit[:, 0] > 2.0**-40].all()
    assert np.abs(whole).max() <= 2048
    block = head_dim & -head_dim
    sums = whole @ np.kron(np.eye(head_dim // block, dtype=np.int64), scipy.linalg.hadamard(block))
    assert np.abs(sums).max() < 2**24
    expected = to_11_bits(sums) * unit * 2.0 ** -(block.bit_length() // 2)
    np.testing.assert_array_equal(rotate(x), expected)


@given(SEEDS, head_dims)
def test_float32_sums_of_a_rotation_are_exact_in_any_order(seed: int, head_dim: int) -> None:
    rng = np.random.default_rng(seed)
    x = draw(seed, head_dim, 0.0, 4)
    whole, unit = whole_numbers(x)
    block, order = head_dim & -head_dim, rng.permutation(head_dim & -head_dim)
    terms = whole.reshape(4, -1, 1, block) * scipy.linalg.hadamard(block)
    for wanted in (terms[..., order], terms[..., ::-1]):
        one_by_one = np.add.accumulate(wanted.astype(np.float32), axis=-1)[..., -1].reshape(x.shape)
        expected = to_11_bits(one_by_one.astype(np.int64)) * unit * 2.0 ** -(block.bit_length() // 2)
        np.testing.assert_array_equal(rotate(x), expected)


def is_near(rotated: Array, x: Array) -> bool:
    """Say whether vectors are the orthonormal transform of x, but for what a rotation may round.

    An element of the input is off by half a unit, 1/1024 to 1/2048 of the largest, and a little for the root
    of 2; the transform keeps the norm of that. A result is off by 2**-11 of itself.
    """
    exact = x.astype(np.float64) @ hadamard_matrix(x.shape[1])
    at_input = np.sqrt(x.shape[1]) * np.abs(x).max(axis=1) * (2.0**-11 + 2.0**-22)
    allowed = at_input + 2.0**-11 * np.linalg.norm(rotated.astype(np.float64), axis=1)
    return bool((np.linalg.norm(rotated - exact, axis=1) <= allowed).all())


@given(SEEDS, head_dims, st.floats(-25, 90))
def test_a_rotation_is_near_the_orthonormal_transform(seed: int, head_dim: int, scale: float) -> None:
    x = draw(seed, head_dim, scale)
    rotated = rotate(x)
    assert is_near(rotated, x)
    assert is_near(codec.hadamard(x), x)
    mantissa, _ = np.frexp(rotated)
    assert (mantissa * 2**11 == np.rint(mantissa * 2**11)).all()
    step = np.abs(x).max(axis=1, keepdims=True) / 256
    for wrong in (rotated * np.float32(1.01), x, rotated[:, ::-1], rotate(np.rint(x / step) * step)):
        assert not is_near(wrong, x)


@pytest.mark.parametrize("head_dim", [32, 64, 80])
def test_vectors_at_the_ends_of_float32_are_rotated(head_dim: int) -> None:
    x = np.zeros((12, head_dim), np.float32)
    x[1] = -0.0
    x[2, 3] = 2.0**-42
    x[3, :2] = 1e-40
    x[4, 3] = 2.0**-40
    x[5, 3] = 2.0**99 * 1.4  # below 2**100 when multiplied by the square root of 2
    x[6, 3] = 2.0**100
    x[7, 3] = -3e38
    x[8, 3] = np.nan
    x[9, -1] = np.inf
    x[10, :2] = -np.inf, np.nan
    x[11] = 1
    rotated = rotate(x)
    assert (rotated[:4] == 0).all()
    assert (rotated[4] != 0).any()
    assert np.isnan(rotated[6:11]).all()
    for row in (5, 11):  # between rows of NaN
        assert is_near(rotated[[row]], x[[row]])
        np.testing.assert_array_equal(rotated[row], rotate(x[[row]])[0])


def test_nothing_to_rotate() -> None:
    assert rotate(np.zeros((0, 64), np.float32)).shape == (0, 64)
