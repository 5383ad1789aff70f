"""How far codecs may be off, against float64; and what they must give back exactly."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
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
    widest = max(np.diff(levels).max() / 2, levels[len(levels) // 2])
    count = over_groups(lambda group, **_: group.shape[-1], x, quantized)
    length = np.sqrt(over_groups(np.sum, x**2, quantized))
    relative = np.sqrt(widest**2 + np.maximum(0, 1 - levels[-1] / np.sqrt(count)) ** 2)
    # No scale is finer than the smallest bfloat16, 2^-133: a shorter vector reads as zeros.
    assert (error <= 1.01 * relative * length + 2.0**-133).all()


@given(codec_cases(codecs=("affine", "symmetric"), contents=FINITE_CONTENTS))
def test_quantising_again_gives_the_same_codes(case: CodecCase) -> None:
    first = quantize(case)
    decoded = kvlab.dequantize(first)
    again = kvlab.quantize(decoded, case.bits, **case.options)
    words, codes = words_of(first), codes_of(first)
    largest = over_groups(np.max, np.abs(decoded.astype(float)), first)
    promised = words.scale >= ulps(largest, case.x.dtype)
    if first.codec == "affine":
        promised &= words.scale >= np.where(words.wide, 2.0**-126, 2.0**-14)
        promised &= over_groups(np.min, codes, first) == 0
        # A bfloat16 scale rounded up can leave the highest of 256 levels unused, and the next one is smaller.
        promised &= ~words.wide | (over_groups(np.max, codes, first) == 2**first.bits - 1)
        if case.x.dtype != np.float32:
            assert (promised | (over_groups(np.min, codes, first) == 0) | words.wide).all()
    assert np.array_equal(codes_of(again)[promised], codes[promised])


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
    """The CPU kernel has the bits of the reference, and that the values of the matrix in float64."""
    from kvlab.numba_kernels.cpu_codec import hadamard_rows

    x = np.random.default_rng(seed).standard_normal((3, n)).astype(np.float32)
    block = hadamard_block(n)
    from_kernel = np.empty_like(x)
    hadamard_rows(x, block, np.float32(1 / np.sqrt(block)), from_kernel)
    y = hadamard(x)
    assert np.array_equal(from_kernel, y)
    matrix = np.kron(np.eye(n // block), scipy.linalg.hadamard(block)) / np.sqrt(block)
    allowed = np.log2(2 * block) * 2.0**-23 * np.linalg.norm(x, axis=-1, keepdims=True)
    assert (np.abs(y - x.astype(float) @ matrix) <= allowed).all()
    assert (np.abs(hadamard(y) - x) <= 2 * allowed).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_codebooks_meet_the_conditions_of_lloyd_and_max(bits: int) -> None:
    """A level is the mean of the Gaussian between its borders, a border the midpoint of two levels."""
    levels, positive = codebooks.levels(bits).astype(float), codebooks.thresholds(bits).astype(float)
    borders = np.concatenate([[0], positive, [np.inf]])
    assert np.array_equal(levels, -levels[::-1])
    upper = levels[len(levels) // 2 :]
    assert np.allclose(positive, (upper[1:] + upper[:-1]) / 2, rtol=0, atol=2.0**-22)
    means = -np.diff(norm.pdf(borders)) / -np.diff(norm.sf(borders))
    assert np.allclose(upper, means, rtol=1e-6)


@given(st.sampled_from((5, 6, 8)), st.floats(2.0**-99, 2.0**100, width=32))
def test_table_of_guesses_at_every_threshold(bits: int, scale: float) -> None:
    """Numbers just below, at and above a threshold get the code that counting gives, from the table too."""
    from kvlab.numba_kernels.cpu_codec import table_of_guesses
    from kvlab.numba_kernels.cpu_groups import count_thresholds

    thresholds = codebooks.thresholds(bits)
    borders = thresholds * np.float32(scale)
    near = [np.nextafter(borders, np.float32(end)) for end in (0, np.inf)]
    y = np.concatenate([borders, *near, np.array([0, scale / 100, 7 * scale], np.float32)])
    y = np.concatenate([y, -y])
    expected = np.searchsorted(borders, np.abs(y))  # borders below the magnitude
    middle = 2 ** (bits - 1)
    expected = np.where(y < 0, middle - 1 - expected, middle + expected)
    for guesses in (table_of_guesses(thresholds), np.empty(0, np.uint8)):
        codes = np.empty(len(y) + 8, np.uint8)
        values = np.concatenate([y, np.zeros(8, np.float32)])
        scratch = np.empty(len(thresholds) + 1, np.float32), np.empty(len(y) + 8, np.uint16)
        count_thresholds(values, 0, len(y), np.float32(scale), thresholds, guesses, *scratch, codes, 0)
        assert np.array_equal(codes[: len(y)], expected)
