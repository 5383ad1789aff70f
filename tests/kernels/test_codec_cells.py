"""The cells in which CUDA kernels look a code up (codec_codes.cuh): what their arithmetic takes for granted.

A magnitude that is a rounding away from the edge of a cell may be looked up in the neighbour, so no threshold
of a codebook may stand near an edge, nor two in one cell.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.build import kernel_root
from kvlab.reference import codebooks

ROUNDING = 1e-5  # far above that of the product, far below what the header promises


def constant(name: str, bits: int) -> float:
    """Evaluate ``NAME = BITS == 3 ? a : BITS == 4 ? b : c`` of the header for a width."""
    text = (kernel_root() / "include" / "codec_codes.cuh").read_text(encoding="utf-8")
    match = re.search(rf"\b{name}\s*=\s*(BITS.*?);", text, re.DOTALL)
    assert match
    *choices, other = re.split(r"\s*:\s*", match[1])
    for choice in choices:
        relation, width, value = re.fullmatch(r"BITS (<=|==) (\d)\s*\?\s*(.*)", choice, re.DOTALL).groups()  # type: ignore[union-attr]
        if bits == int(width) or (relation == "<=" and bits < int(width)):
            other = value
            break
    half = 2 ** (bits - 1)
    numerator, _, denominator = other.replace("HALF - 1", str(half - 1)).replace("f", "").partition("/")
    return float(numerator) / float(denominator or 1)


def thresholds_of(bits: int) -> NDArray[np.float64]:
    """Return the positive ones, as float32 has them."""
    levels = np.array(codebooks.levels(bits), np.float32)
    positive = levels[len(levels) // 2 :]
    return ((positive[1:] + positive[:-1]) * np.float32(0.5)).astype(np.float64)


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_no_cell_has_two_thresholds_and_none_has_one_at_its_edge(bits: int) -> None:
    in_cells = thresholds_of(bits) * constant("A_UNIT", bits)
    last = constant("COUNT", bits) - 1
    cells = np.minimum(np.floor(in_cells), last)
    assert len(np.unique(cells)) == len(cells)
    edges = np.round(in_cells)
    inside = edges <= last  # the last cell has no upper edge
    assert np.all(np.abs(in_cells - edges)[inside] > ROUNDING * in_cells[inside])


@pytest.mark.parametrize("bits", [3, 4])
def test_signed_cells_have_one_threshold_each_and_none_at_its_edge(bits: int) -> None:
    positive, count = thresholds_of(bits), 2**bits - 1
    signed = np.concatenate([-positive[::-1], [0], positive])
    in_cells = signed / constant("CELL_WIDTH", bits) + count / 2
    assert np.array_equal(np.clip(np.floor(in_cells), 0, count - 1), np.arange(count))
    edges = np.round(in_cells)
    inside = (edges > 0) & (edges < count)
    assert np.all(np.abs(in_cells - edges)[inside] > ROUNDING * count)
