"""What pages/search.cuh and pages/encode_tile.cuh take for granted.

Codes are made of whole numbers of parts of a scale, which has 16 to 120 of them: products with reciprocals
that are nearly right have the floors of quotients, in float32 and in float16. There are few such scales and a
few thousand numbers, so all are tried. Scales are searched in bytes, and sums of squares are exact.

A product of two float32 or float16 numbers is exact in float64, and so are the sums here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.reference.pages import SCALES, guess_scale, rotate

ROUNDER = np.float64(1.5 * 2**23)
PARTS = {2: 64, 3: 32, 4: 16, 8: 16}  # of a scale, or up to twice as many
Doubles = NDArray[np.float64]

# Numbers of parts, and of units of 2**-24 in float16: of 11 significant bits.
_SIZES = np.concatenate([np.arange(2048), np.arange(2048, 4096, 2), np.arange(4096, 8193, 4)])
NUMBERS = np.concatenate([-_SIZES[:0:-1], _SIZES])


def scales_in_parts(bits: int) -> list[int]:
    """All that scales can be: their mantissas, subnormal numbers among them."""
    return [int(scale) for scale in np.unique(2 * PARTS[bits] * np.frexp(SCALES[1:0xF8])[0])]


# Of 4 bits in a profile half a cell is 12 scales, and whole cells have a whole number of parts.
IN_BLOCKS = [float(half) for half in np.unique(2 * PARTS[4] * np.frexp(12 * SCALES[1:0xF8])[0])]
ALL = [(bits, scale) for bits in PARTS for scale in scales_in_parts(bits)] + [(4, half) for half in IN_BLOCKS]
HALVES = [(bits, scale) for bits, scale in ALL if bits < 8]


def test_steps_in_parts() -> None:
    for bits, parts in PARTS.items():
        assert scales_in_parts(bits) == [parts // 8 * eighth for eighth in range(8, 16)]
    assert sorted(IN_BLOCKS) == [16.5, 18, 19.5, 21, 22.5, 24, 27, 30]


def floors(numbers: np.ndarray, scale: float, bits: int) -> np.ndarray:
    """The codes of whole numbers, by floors of integers."""
    return np.clip(numbers // (2 * scale) + 2 ** (bits - 1), 0, 2**bits - 1)


def reciprocal(x: np.float32, ulps: int) -> np.float32:
    """The nearest float32 of 1 / x, or one that is some ulps off."""
    result: np.float32 = ((np.float32(1) / x).view(np.int32) + np.int32(ulps)).view(np.float32)
    return result


# ---- pages/search.cuh, and pages/encode_tile.cuh at 8 bits: float32


def test_rounding_by_a_sum() -> None:
    """The fused product and sum is rounded to a whole number, half to even, and has it in its lowest bits."""
    rng = np.random.default_rng(0)
    x = [rng.uniform(-(2**20), 2**20, 100_000), rng.integers(-9999, 9999, 9999) + 0.5, [-(2.0**20), 2.0**20]]
    numbers = np.concatenate(x).astype(np.float32).astype(np.float64)
    for factor in (1.0, 0.125, 2.0**-20):
        rounded = (numbers * factor + ROUNDER).astype(np.float32).view(np.int32) - 0x4B400000
        assert np.array_equal(rounded, np.rint(numbers * factor))


def part_codes(scale: float, bits: int, ulps: int, spare: float = 0.5) -> Doubles:
    """Codes by a fused operation that is cut to a part of the grid, 0 ... 1, and one that rounds down."""
    per_unit = reciprocal(np.float32(np.ldexp(scale, bits + 1 - 24)), ulps).astype(np.float64)
    first = np.float32(per_unit * spare * 2.0**-24 + 0.5)
    part = (NUMBERS * 2.0**-24 * per_unit + np.float64(first)).astype(np.float32)
    return np.floor(np.clip(part, 0, 1).astype(np.float64) * (2**bits * (1 - 2.0**-16)))


@pytest.mark.parametrize("ulps", range(-2, 3))
@pytest.mark.parametrize(("bits", "scale"), ALL)
def test_floor_of_a_part(bits: int, scale: float, ulps: int) -> None:
    assert np.array_equal(part_codes(scale, bits, ulps), floors(NUMBERS, scale, bits))
    assert not np.array_equal(part_codes(scale, bits, ulps, spare=0.0), floors(NUMBERS, scale, bits))


# ---- pages/encode_tile.cuh below 8 bits: float16, where a whole number n is n 2**-24


def half(x: Any) -> Doubles:
    """Rounded to float16."""
    return np.asarray(x).astype(np.float16).astype(np.float64)


def half_codes(scale: float, bits: int, ulps: int = 0, spare: float = 0.5) -> Doubles:
    """Codes by two fused operations: cut to 0 ... 1, and from there to 1536 + code."""
    last = np.float32(2**bits - 1)
    part = reciprocal(np.float32(np.ldexp(scale, -24)), ulps) * (np.float32(0.5) / last)
    up = half(part)
    first = half(half(up * 2.0**-12) * 2.0**-12 * spare + 0.5)
    cut = np.clip(half(NUMBERS * 2.0**-24 * up + first), 0, 1)
    return half(cut * np.float64(last) + 1536) - 1536


@pytest.mark.parametrize("ulps", range(-2, 3))
@pytest.mark.parametrize(("bits", "scale"), HALVES)
def test_floor_in_float16(bits: int, scale: float, ulps: int) -> None:
    assert np.array_equal(half_codes(scale, bits, ulps), floors(NUMBERS, scale, bits))


def test_floor_in_float16_has_little_to_spare() -> None:
    """Scales of more parts, which there are not, would go wrong, and without half a number all would."""
    for bits, first in ((3, 102), (4, 49)):
        wrong = [s for s in range(32, 121) if (half_codes(s, bits) != floors(NUMBERS, s, bits)).any()]
        assert min(wrong) == first
    for bits, scale in HALVES:
        assert (half_codes(scale, bits, spare=0.0) != floors(NUMBERS, scale, bits)).any()


# ---- both: the search, in bytes


def vectors(head_dim: int) -> np.ndarray:
    """Rotated vectors of many kinds: their largest element is near to the others, or far from them."""
    rng = np.random.default_rng(head_dim)
    outliers = rng.standard_normal((400, head_dim)) * np.exp2(rng.uniform(-9, 0, (400, 1)))
    outliers[:, :: head_dim // 8] = rng.choice([-1.0, 1.0], (400, 8))
    outliers[:, 1 :: head_dim // 4] *= np.exp2(rng.uniform(0, 4, (400, 1)))
    one = np.zeros((50, head_dim))
    one[:, 3] = np.exp2(rng.uniform(-30, 15, 50))
    flat = rng.choice([-1.0, 1.0], (2000, head_dim)) * np.exp2(rng.uniform(-20, 15, (2000, 1)))
    raw = [rng.standard_normal((200, head_dim)), rng.standard_t(2, (200, head_dim)), one, outliers]
    turned = [rotate(x.astype(np.float32)) for x in raw]
    return np.concatenate([*turned, one, flat, outliers]).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_sizes_and_steps_are_bytes(head_dim: int, bits: int) -> None:
    """Sizes, and all scales that are tried: the largest middles of their grids; sums of squares are exact.

    Scales of tiny vectors are cut: up to byte 8 they are further apart than 1/8 of the lower one.
    """
    x = vectors(head_dim)
    above = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 + 2**-7)
    unit = np.exp2(np.floor(np.log2(above)) - 7)
    sizes = np.rint(np.abs(x) / unit).astype(np.int64)
    assert 250 < sizes.max() < 255
    assert (sizes.max(axis=1) >= 127).all()
    assert np.square(sizes).sum(axis=1).max() < 2**24

    decoded = np.arange(len(x)) % 2 == 0
    below = guess_scale(x, bits, decoded).astype(np.float16).view(np.uint16).astype(np.int64) >> 7
    tried = np.clip(below, 3, 0xF5)[:, None] + (np.arange(-1, 3) if bits < 4 else np.arange(2))
    scales = np.floor(SCALES[tried] / unit).astype(np.int64)
    is_usual = below >= 7
    assert is_usual.sum() > 1000
    assert {2: 190, 3: 170, 4: 100}[bits] < (scales[is_usual] << (bits - 1)).max() < 256
    scales = np.minimum(scales, 255 >> (bits - 1))
    assert scales.min() > 0
    left = sizes[:, None]
    for k in range(bits - 1, -1, -1):
        left = np.abs(left - (scales << k)[..., None])
    assert np.square(left).sum(axis=2).max() < 2**24


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_folded_sizes_are_errors(bits: int) -> None:
    """What is left of a size that is folded in the middle of what is left of the grid, time after time."""
    sizes = np.arange(256)
    for scale in range(1, 256 >> (bits - 1)):
        left = sizes
        for k in range(bits - 1, -1, -1):
            left = np.abs(left - (scale << k))
        error = sizes - (2 * floors(sizes, scale, bits) + 1 - 2**bits) * scale
        assert np.array_equal(left, np.abs(error))


@pytest.mark.parametrize("bits", [2, 3])
def test_errors_are_sums_of_folded_sizes(bits: int) -> None:
    """But for the sum of squares of sizes, which all scales have: every square is one of the fold before."""
    sizes = np.arange(256)
    for scale in range(1, 256 >> (bits - 1)):
        left, sums = sizes, 0
        for k in range(bits - 1, 0, -1):
            left = np.abs(left - (scale << k))
            sums = sums + left * 2 ** (k - 1)
        error = np.square(np.abs(left - scale)) - sizes**2
        of_scales = (4**bits - 1) // 3 * scale
        assert np.array_equal(error, scale * (of_scales - 2**bits * sizes - 2 * sums))


def test_bfloat16_has_the_order_of_float16() -> None:
    """Sizes of bfloat16 numbers may be compared as float16: up to what counts as infinite."""
    bits = np.arange(0x8000, dtype=np.uint16)
    as_float16, number = bits.view(np.float16), (bits.astype(np.uint32) << 16).view(np.float32)
    small = bits < 0x7C00
    assert (np.diff(as_float16[small]) > 0).all()
    assert (np.diff(number[small]) > 0).all()
    assert as_float16[0x7C00] == np.inf
    assert np.isnan(as_float16[0x7C01:]).all()
    assert not (number[~small] < 2.0**100).any()
