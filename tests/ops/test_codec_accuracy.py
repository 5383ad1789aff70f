"""How far codecs may be off, against float64; and what they must give back exactly."""

from __future__ import annotations

import bisect
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

import kvlab
from kvlab.reference import codebooks
from kvlab.reference.codec import hadamard, hadamard_block
from tests.codecs import allowed_error, codes_of, limits, over_groups, quantize, ulps, words_of
from tests.strategies import FINITE_CONTENTS, FLOATS, WIDTHS, CodecCase, codec_cases

BACKENDS = ("cpu", "reference")


@given(
    codec_cases(codecs=("affine", "symmetric", "ternary"), contents=FINITE_CONTENTS), st.sampled_from(FLOATS)
)
def test_error_of_every_element(case: CodecCase, dtype: np.dtype[Any]) -> None:
    quantized = quantize(case)
    x = case.x.astype(float)
    error = np.abs(kvlab.dequantize(quantized, str(dtype)).astype(float) - x)
    assert (error <= allowed_error(quantized, x, dtype)).all()


@given(codec_cases(codecs=("affine", "symmetric"), contents=("normal", "any scale", "few values")))
def test_the_bound_rejects_wrong_answers(case: CodecCase) -> None:
    """Negative control: zeros, and every element one and a half steps away."""
    quantized = quantize(case)
    x, scale = case.x.astype(float), words_of(quantized).scale
    allowed = allowed_error(quantized, x, FLOATS[2])
    rounding = 2.0**-21 * over_groups(np.max, np.abs(x), quantized) + 2.0**-133
    clear = scale > 8 * rounding
    shifted = kvlab.dequantize(quantized, "float32").astype(float) + 1.5 * scale
    assert (np.abs(shifted - x) > allowed)[clear].all()
    assert (np.abs(x) > allowed)[clear & (np.abs(x) > scale)].all()


@given(codec_cases(codecs=("hadamard",), contents=FINITE_CONTENTS))
def test_error_of_rotated_groups(case: CodecCase) -> None:
    quantized = quantize(case)
    x = case.x.astype(float)
    error = np.abs(kvlab.dequantize(quantized, "float32").astype(float) - x)
    levels = codebooks.levels(int(case.bits)).astype(float)
    inner = codebooks.borders(int(case.bits)) / float(codebooks.units(int(case.bits)))
    ends = np.concatenate([levels[:1], inner, levels[-1:]])  # of the numbers that have a level
    widest = max((ends[1:] - levels).max(), (levels - ends[:-1]).max())
    count = over_groups(lambda group, **_: group.shape[-1], x, quantized)
    length = np.sqrt(over_groups(np.sum, x**2, quantized))
    relative = np.sqrt(widest**2 + np.maximum(0, 1 - levels[-1] / np.sqrt(count)) ** 2)
    # No scale is finer than the smallest bfloat16, 2^-133: a shorter vector reads as zeros.
    assert (error <= 1.01 * relative * length + 2.0**-133).all()


SUBNORMAL = np.array([[-(2.0**-24), 65504], [0, 43680], [3 * 2.0**-24, -65504]], np.float16)


@example(CodecCase(SUBNORMAL, 2, {"axis": 0, "group_size": None, "codec": "symmetric"}))
@given(codec_cases(codecs=("affine", "symmetric"), contents=FINITE_CONTENTS))
def test_quantising_again_gives_the_same_codes(case: CodecCase) -> None:
    first = quantize(case)
    decoded = kvlab.dequantize(first)
    again = kvlab.quantize(decoded, case.bits, **case.options)
    words, codes = words_of(first), codes_of(first)
    largest = over_groups(np.max, np.abs(decoded.astype(float)), first)
    # Up to 4 bits the largest output is not the largest input, so the next scale is another one.
    coarse = 2**first.bits if first.codec == "symmetric" and first.bits <= 4 else 1
    promised = words.scale >= coarse * ulps(largest, case.x.dtype)
    promised &= words.scale >= np.where(words.wide, 2.0**-126, 2.0**-14)
    if first.codec == "affine":
        promised &= over_groups(np.min, codes, first) == 0
        # A bfloat16 scale rounded up can leave the highest of 256 levels unused, and the next one is smaller.
        promised &= ~words.wide | (over_groups(np.max, codes, first) == 2**first.bits - 1)
        if case.x.dtype != np.float32:
            assert (promised | (over_groups(np.min, codes, first) == 0) | words.wide).all()
    assert np.array_equal(codes_of(again)[promised], codes[promised])


@pytest.mark.parametrize("bits", WIDTHS)
def test_where_quantising_again_begins_to_give_the_same_codes(bits: int) -> None:
    """Subnormal numbers, a group for every largest one: the stated limit holds, and no lower one would."""
    multiples = np.arange(1, 2048)[:, None] * np.linspace(-1, 1, 257)
    x = (np.round(multiples) * 2.0**-24).astype(np.float16)
    first = kvlab.quantize(x, bits, codec="symmetric")
    decoded = kvlab.dequantize(first)
    again = kvlab.quantize(decoded, bits, codec="symmetric")
    scale = words_of(first).scale[:, 0] / ulps(decoded.max(axis=1), np.dtype(np.float16))
    same = (codes_of(first) == codes_of(again)).all(axis=1)
    limit = 2**bits if 1 < bits <= 4 else 1
    assert same[scale >= limit].all()
    if limit > 1:
        assert not same[(scale >= limit - 1) & (scale < limit)].all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_constants_come_back_exactly(dtype: np.dtype[Any], backend: str) -> None:
    """As far as float16, or bfloat16 for magnitudes outside [2**-14, 32752], represents them."""
    magnitudes = [0, 1, 1.5, 2.0**-14, 2.0**-10 * 1.25, 2.0**15 * 1.5, 32752]
    magnitudes += [2.0**-20, 2.0**-24] if dtype == np.float16 else [2.0**100, 2.0**126, 2.0**-100, 2.0**-133]
    constants = np.array([sign * value for value in magnitudes for sign in (1, -1)], dtype)
    rows = np.repeat(constants[:, None], 24, axis=1)
    for bits in WIDTHS:
        quantized = kvlab.quantize(rows, bits, backend=backend)
        assert np.array_equal(kvlab.dequantize(quantized, backend=backend), rows)
        assert (quantized.scale == 0).all()
        assert (codes_of(quantized) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ends_of_the_range(dtype: np.dtype[Any], backend: str) -> None:
    info = limits(dtype)
    largest, tiny = min(float(info.max), 2.0**126), float(info.smallest_subnormal)
    pairs = np.tile(np.array([[-largest, largest], [-tiny, tiny], [0, tiny], [0, largest]], dtype), 12)
    for codec, bits in product(("affine", "symmetric"), WIDTHS):
        quantized = kvlab.quantize(pairs, bits, codec=codec, backend=backend)
        decoded = kvlab.dequantize(quantized, backend=backend).astype(float)
        assert np.isfinite(decoded).all()
        x = pairs.astype(float)
        assert (np.abs(decoded - x) <= allowed_error(quantized, x, dtype)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_results_saturate(backend: str) -> None:
    x = np.array([[-65504.0, 65504.0], [1e30, -1e30]], np.float32)
    for bits in WIDTHS:
        decoded = kvlab.dequantize(kvlab.quantize(x, bits, backend=backend), "float16", backend=backend)
        assert np.isfinite(decoded).all()
        assert np.array_equal(decoded[1], np.array([65504, -65504], np.float16))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_codebook_error_of_gaussian_rows(bits: int, head_dim: int) -> None:
    """The mean squared error is that of the Lloyd-Max codebook (Max 1960, table I, up to 5 bits).

    It is a little lower for short groups, whose largest elements are bounded by their own root mean square.
    """
    expected = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501, 5: 0.002505, 6: 0.000644, 8: 4.12e-5}
    x = np.random.default_rng(0).standard_normal((120_000 // head_dim, head_dim)).astype(np.float32)
    decoded = kvlab.dequantize(kvlab.quantize(x, bits, codec="hadamard"))
    error = np.mean((decoded - x) ** 2) / expected[bits]
    assert 1 - 4 / head_dim - 0.03 < error < 1.04


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_hadamard_transform(n: int, seed: int) -> None:
    """The reference has the values of the matrix in float64."""
    x = np.random.default_rng(seed).standard_normal((3, n)).astype(np.float32)
    block = hadamard_block(n)
    y = hadamard(x)
    matrix = np.kron(np.eye(n // block), scipy.linalg.hadamard(block)) / np.sqrt(block)
    allowed = np.log2(2 * block) * 2.0**-23 * np.linalg.norm(x, axis=-1, keepdims=True)
    assert (np.abs(y - x.astype(float) @ matrix) <= allowed).all()
    assert (np.abs(hadamard(y) - x) <= 2 * allowed).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_codebooks_meet_the_conditions_of_lloyd_and_max(bits: int) -> None:
    """A level is the mean of the Gaussian between the midpoints beside it; borders are next to those."""
    levels, borders = codebooks.levels(bits).astype(float), codebooks.borders(bits)
    assert np.array_equal(levels, -levels[::-1])
    assert np.array_equal(borders, -borders[::-1])
    assert (np.diff(borders) > 0).all()
    middles = (levels[1:] + levels[:-1]) / 2
    ends = np.concatenate([[-np.inf], middles, [np.inf]])
    assert np.allclose(levels, -np.diff(norm.pdf(ends)) / np.diff(norm.cdf(ends)), rtol=1e-6)
    assert (np.abs(borders - middles * float(codebooks.units(bits))) <= 0.501).all()
    lost = gaussian_error(levels, borders / float(codebooks.units(bits))) / gaussian_error(levels, middles)
    assert lost < 1.0017


def gaussian_error(levels: NDArray[Any], borders: NDArray[Any]) -> float:
    """Return the mean squared error of a unit Gaussian, by the integral of each cell."""
    ends = np.concatenate([[-40.0], borders, [40.0]])
    mass, density = np.diff(norm.cdf(ends)), norm.pdf(ends)
    first, second = -np.diff(density), mass - np.diff(ends * density)
    return float(np.sum(second - 2 * levels * first + levels**2 * mass))


@given(codec_cases(codecs=("hadamard",), contents=FINITE_CONTENTS), st.sampled_from(BACKENDS))
def test_a_code_counts_the_borders_at_or_below_a_value(case: CodecCase, backend: str) -> None:
    """In exact arithmetic, but for the inverse of the scale, which is a float32 with any exponent."""
    x = np.moveaxis(case.x, case.options["axis"], -1).reshape(-1, case.x.shape[case.options["axis"]])[:2]
    quantized = kvlab.quantize(x, case.bits, codec="hadamard", backend=backend)
    borders, unit = codebooks.borders(int(case.bits)).tolist(), codebooks.units(int(case.bits))
    root = np.float32(1 / np.sqrt(hadamard_block(x.shape[1])))
    scales, rows = words_of(quantized).scale, zip(x.astype(np.float32), codes_of(quantized), strict=True)
    for scale, (row, codes) in zip(scales, rows, strict=True):
        if not 2.0**-133 <= scale[0] < 2.0**100:
            continue  # 0, or an inverse that is a subnormal number
        mantissa, exponent = np.frexp(scale[0])
        inverse = Fraction(float(unit * root / np.float32(mantissa))) / Fraction(2) ** int(exponent)
        values = [Fraction(float(y)) * inverse for y in hadamard_sums(row)]
        assert codes.tolist() == [bisect.bisect_right(borders, value) for value in values]


def hadamard_sums(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the transform of `hadamard` without its factor, pair by pair."""
    y = row.copy()
    h, block = 1, hadamard_block(len(row))
    while h < block:
        for i in range(len(y)):
            if not i & h:
                y[i], y[i + h] = y[i] + y[i + h], y[i] - y[i + h]
        h *= 2
    return y


@given(st.sampled_from(WIDTHS), st.floats(2.0**-99, 2.0**100, width=32))
def test_codes_at_every_border(bits: int, scale: float) -> None:
    """Numbers just below, at and above a border, by fused operations and by float64; zeros of both signs."""
    from kvlab.numba_kernels.cpu import codec as cpu_codec
    from kvlab.numba_kernels.cpu import units as cpu_units

    borders, unit = codebooks.borders(bits), codebooks.units(bits)
    y = (borders * (scale / float(unit))).astype(np.float32)
    tiny = np.array([-(2.0**-149), -0.0, 0.0, 2.0**-149, -99 * scale, 99 * scale], np.float32)
    y = np.concatenate([y, *(np.nextafter(y, np.float32(end)) for end in (-np.inf, np.inf)), tiny])
    growth = Fraction(2) ** 60 if scale < 2.0**-66 else 1
    inverse = Fraction(float(unit / np.float32(scale * growth))) * growth
    expected = [bisect.bisect_right(borders.tolist(), Fraction(float(value)) * inverse) for value in y]
    values = np.concatenate([y, np.zeros(32, np.float32)])
    rows, table = cpu_codec.tables_of_borders(borders)
    codes, indices = np.empty((2, len(y) + 32), np.uint8), np.empty(len(values), np.uint16)
    of_group, scales = (len(values), 1, len(y), len(y)), np.array([scale], np.float32)
    assert len(y) % 2 == 1  # a block of one element, whose factor is 1
    cpu_units.count_borders(values, *of_group, scales, unit, rows, table, indices, codes[0])
    cpu_units.look_up_in_float64(values, 0, len(y), scales[0], unit, table, codes[1], 0)
    assert codes[:, : len(y)].tolist() == [expected, expected]
