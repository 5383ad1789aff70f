"""The cells in which CUDA kernels look a code up (codec/hadamard.cu): what their arithmetic assumes.

A cell is the integer below a value in units, the low bits of a sum that is rounded down. Tables of codes
begin at cell -REACH and end below REACH.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.jit.build import kernel_root
from kvlab.reference import codebooks
from tests.strategies import WIDTHS

SOURCE = (kernel_root() / "codec/hadamard.cu").read_text(encoding="utf-8")
HEADER = (kernel_root() / "codec/codebook.cuh").read_text(encoding="utf-8")
MAGIC, MAGIC_BITS = 3 << 22, 0x4B400000


def choice(text: str, name: str, variable: str, bits: int) -> float:
    """Return what ``variable == 1 ? a : variable == 2 ? b : c`` behind `name` is for a width."""
    match = re.search(rf"\b{name}\b.*?({variable} == .*?)[;)]", text, re.DOTALL)
    assert match
    *choices, other = re.split(r"\s*:\s*", match[1])
    for one in choices:
        width, value = re.fullmatch(rf"{variable} == (\d)\s*\?\s*(\S+)", one).groups()  # type: ignore[union-attr]
        if int(width) == bits:
            other = value
    return float(other.rstrip("f"))


@pytest.mark.parametrize("bits", WIDTHS)
def test_units_are_those_of_the_reference(bits: int) -> None:
    assert np.float32(choice(HEADER, "units_of", "bits", bits)) == codebooks.units(bits)


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_saturated_cells_end_behind_the_last_border(bits: int) -> None:
    reach = choice(SOURCE, "REACH", "CODE_BITS", bits)
    assert reach % 4 == 0  # entries are written as words
    assert reach > codebooks.borders(bits)[-1]


@pytest.mark.parametrize("group", [32 << k for k in range(6)])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_cells_hold_every_value_that_a_group_may_have(bits: int, group: int) -> None:
    """No value exceeds sqrt(group) times the root mean square, of which scale and factor are roundings."""
    assert "((int)(units_of(CODE_BITS) / ROTATION * 1.01f) + 4) / 4 * 4" in SOURCE
    rotation = np.float32(1 / np.sqrt(group))
    reach = (int(codebooks.units(bits) / rotation * np.float32(1.01)) + 4) // 4 * 4
    assert reach > float(codebooks.units(bits)) * math.sqrt(group) * (1 + 2.0**-8)
    assert reach > codebooks.borders(bits)[-1]


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
