"""The cells in which CUDA kernels look a code up (codec/codes.cuh): what their arithmetic assumes.

A cell is the integer below a value in units, the low bits of a sum that is rounded down. Tables of codes
begin at cell -reach and end below reach.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.ops.cuda.codec import codebook
from kvlab.reference import codebooks
from tests.strategies import WIDTHS

MAGIC, MAGIC_BITS = 3 << 22, 0x4B400000


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_codebook_of_a_kernel_is_that_of_the_reference(bits: int) -> None:
    found = codebook(bits)
    top = 2**bits - 1
    assert found["units"] == codebooks.units(bits)
    assert np.array_equal(found["borders"][:top], codebooks.borders(bits))
    assert np.array_equal(found["levels"][: top + 1], codebooks.levels(bits))


@pytest.mark.parametrize("bits", WIDTHS)
def test_cells_beyond_the_table_have_the_code_of_its_ends(bits: int) -> None:
    borders, reach = codebooks.borders(bits), int(codebook(bits)["reach"])
    ends = np.searchsorted(borders, [-reach - 1, -reach, reach - 1, reach], side="right")
    assert ends.tolist() == [0, 0, len(borders), len(borders)]


def rounded_down(x: Fraction) -> np.float32:
    """Return the largest float32 that is not above x."""
    nearest = np.float32(float(x))
    while Fraction(float(nearest)) > x:
        nearest = np.nextafter(nearest, np.float32(-np.inf))
    return nearest


@given(st.integers(-4424, 4424), st.floats(2.0**-60, 2.0**60, width=32), st.integers(-2, 2))
def test_a_sum_rounded_down_has_the_cell_in_its_bits(cell: int, inverse: float, steps: int) -> None:
    """Also for products that lie the last bit above or below an integer."""
    y = np.float32(cell / inverse)
    for _ in range(abs(steps)):
        y = np.nextafter(y, np.float32(math.copysign(np.inf, steps)))
    product = Fraction(float(y)) * Fraction(inverse)
    found = int(rounded_down(product + MAGIC).view(np.uint32)) - MAGIC_BITS
    assert found == math.floor(product)
