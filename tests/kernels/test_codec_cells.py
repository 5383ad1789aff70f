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


def cells_of(part: NDArray[np.float32], count: float) -> NDArray[np.int64]:
    """`Cells::at`: a fused operation is rounded once, the second one down to an integer."""
    whole = float(np.float32(count * (1 - 1e-6)))
    slope = (part.astype(np.float64) * -whole + 2 * whole).astype(np.float32)
    return np.floor(part.astype(np.float64) * slope).astype(np.int64)


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_no_cell_has_two_thresholds_and_none_has_one_at_its_edge(bits: int) -> None:
    part, count = thresholds_of(bits) / constant("END", bits), constant("COUNT", bits)
    place = count * (2 * part - part**2)
    assert part[-1] < 1
    assert len(np.unique(np.floor(place))) == len(place)
    assert np.all(np.abs(place - np.round(place)) > ROUNDING * count)
    assert np.array_equal(cells_of(part.astype(np.float32), count), np.floor(place))
    assert cells_of(np.ones(1, np.float32), count) == count - 1


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_a_look_up_counts_the_thresholds_below(bits: int) -> None:
    one, units, count = np.float32(1), thresholds_of(bits).astype(np.float32), int(constant("COUNT", bits))
    end = np.float32(constant("END", bits))
    cell_of_threshold = cells_of(units / end, count)
    code = np.searchsorted(cell_of_threshold, np.arange(count))  # of the lower bound of each cell
    threshold = np.append(units, np.float32(np.inf))[code]
    rng = np.random.default_rng(bits)
    edges = end * (1 - np.sqrt(1 - np.arange(count + 1) / count))
    near = (1 + np.float32(1e-7) * np.arange(-9, 10)).astype(np.float32)
    for scale in rng.lognormal(0, 3, 50).astype(np.float16).astype(np.float32):
        scaled = units * scale
        y = np.concatenate([np.outer(x, near).ravel() for x in (scaled, edges * scale)])
        y = np.concatenate([y, 6 * scale * rng.random(2000)]).astype(np.float32)
        for inverse in (one / scale) * (one + np.float32([-2e-7, 0, 2e-7])):  # rcp.approx, the factor
            cell = cells_of(np.minimum(y * (inverse / end), one), count)
            found = code[cell] + (y > threshold[cell] * scale)
            assert np.array_equal(found, (y[:, None] > scaled).sum(1))


@pytest.mark.parametrize("bits", [3, 4])
def test_signed_cells_have_one_threshold_each_and_none_at_its_edge(bits: int) -> None:
    positive, count = thresholds_of(bits), 2**bits - 1
    signed = np.concatenate([-positive[::-1], [0], positive])
    in_cells = signed / constant("CELL_WIDTH", bits) + count / 2
    assert np.array_equal(np.clip(np.floor(in_cells), 0, count - 1), np.arange(count))
    edges = np.round(in_cells)
    inside = (edges > 0) & (edges < count)
    assert np.all(np.abs(in_cells - edges)[inside] > ROUNDING * count)
