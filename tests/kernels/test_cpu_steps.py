"""Rotation, steps and codes on the CPU against the reference, bit for bit, zeros with their signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlab.numba_kernels.cpu_steps import encode_vector, rotate_rows
from numba import njit
from numpy.typing import NDArray

from kvlab.reference import pages as reference
from tests.strategies import SEEDS, page_vectors

HEAD_DIMS = range(16, 257, 16)
QUANTISED = (2, 3, 4, 8)
POISON = np.float32(np.nan)

head_dims = st.sampled_from(HEAD_DIMS)


def rotated(x: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.full(x.shape, POISON)
    before = x.copy()
    rotate_rows(x.reshape(-1), x.shape[1], out.reshape(-1))
    np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))
    return out


@njit
def _encode_all(x: Any, n: int, bits: int, guess: Any, codes: Any, byte: Any, row: Any, whole: Any) -> None:
    for i in range(len(byte)):
        byte[i] = encode_vector(x, i * n, bits, guess, row, whole)
        codes[i] = row


def encoded(x: NDArray[np.float32], bits: int) -> tuple[NDArray[Any], NDArray[Any]]:
    n = x.shape[1]
    codes, byte = np.full(x.shape, 999, np.uint32), np.full(len(x), 999, np.int64)
    row, whole = np.full(n, 999, np.uint32), np.full(n, POISON)
    _encode_all(x.reshape(-1), n, bits, reference.GUESS[bits], codes, byte, row, whole)
    return codes, byte


def assert_same(x: NDArray[np.float32], bits: int) -> None:
    for got, expected in zip(encoded(x, bits), reference.encode(x, bits), strict=True):
        np.testing.assert_array_equal(got, expected)


@given(SEEDS, st.integers(1, 40), head_dims)
def test_rotations_are_those_of_the_reference(seed: int, n: int, head_dim: int) -> None:
    x = page_vectors(np.random.default_rng(seed), n, head_dim)
    np.testing.assert_array_equal(rotated(x).view(np.uint32), reference.rotate(x).view(np.uint32))


@given(SEEDS, st.integers(1, 40), head_dims, st.sampled_from(QUANTISED), st.booleans())
def test_codes_and_steps_are_those_of_the_reference(
    seed: int, n: int, head_dim: int, bits: int, is_rotated: bool
) -> None:
    x = page_vectors(np.random.default_rng(seed), n, head_dim)
    assert_same(reference.rotate(x) if is_rotated else x, bits)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16), st.sampled_from(QUANTISED))
def test_any_sixteen_floats(patterns: list[int], bits: int) -> None:
    """As hypothesis likes them: it finds its own zeros, repetitions and ends of ranges."""
    x = np.array([patterns], np.uint32).view(np.float32)
    np.testing.assert_array_equal(rotated(x).view(np.uint32), reference.rotate(x).view(np.uint32))
    assert_same(x, bits)


@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("bits", QUANTISED)
def test_vectors_of_every_size(bits: int, head_dim: int) -> None:
    """All mantissas of 7 bits with all exponents: every border between guesses, steps, units and halvings."""
    size = (np.arange(0, 0x7F80, dtype=np.uint32) << 16).view(np.float32)
    x = np.repeat(size[:, None], head_dim, axis=1)
    x[:, 1::2] *= -1
    x[1::2, 2:] *= np.float32(0.37)
    assert_same(x, bits)
    assert_same(np.nextafter(x[:: bits + 3], np.float32(0)), bits)


@pytest.mark.parametrize("bits", QUANTISED)
def test_ties(bits: int) -> None:
    """Elements half way between two whole parts of a step, and on the borders of cells, or next to them."""
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((300, 64), dtype=np.float32)
    _, byte = reference.encode(x, bits)
    step = reference.STEPS[byte][:, None]
    part = np.exp2(np.floor(np.log2(step)) - 4)
    x[:, :40] = np.rint(x[:, :40] / part) * part + part / 2
    x[:, 40:56] = np.rint(x[:, 40:56] / step) * step
    for wanted in (x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))):
        assert_same(wanted, bits)


def test_one_bit_more_or_less_is_seen() -> None:
    """The comparison rejects steps next to the best, codes next to the nearest, and the other rounding."""
    x = page_vectors(np.random.default_rng(1), 100, 64, ("normal",))
    x = x / np.abs(x).max(axis=1, keepdims=True)
    for bits in QUANTISED:
        _, byte = encoded(x, bits)
        codes, _ = encoded(x, bits)
        wrong = reference.grid_codes(
            x + reference.STEPS[byte][:, None] / 16, reference.STEPS[byte][:, None], bits
        )
        assert (codes != wrong).any()
    bits_of = reference.rotate(x).view(np.uint32)
    assert (rotated(np.nextafter(x, np.float32(2))).view(np.uint32) != bits_of).any()
