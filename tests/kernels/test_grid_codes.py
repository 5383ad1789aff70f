"""What packed_search.cuh and cache_encode.cuh take for granted.

Steps are 16 to 80 of the parts in which numbers are counted, products with rounded reciprocals have the
floors of quotients, in float32 and in float16, and sums of squares that decide are exact. There are few such
steps and a few thousand numbers, so all are tried.

A product of two float32 or float16 numbers is exact in float64, and so are the sums here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.reference.pages import CANDIDATES, STEPS, candidate_steps, grid_codes, grid_values, rotate

ROUNDER = np.float64(1.5 * 2**23)
WHOLE = np.arange(-2047, 2048, dtype=np.float64)  # numbers of parts, and of units of 2**-24 in float16
Doubles = NDArray[np.float64]


def in_parts(lowest: np.ndarray, byte: np.ndarray) -> np.ndarray:
    """A step in parts of the lowest that is tried."""
    return np.ldexp(STEPS[byte], 5 - np.frexp(STEPS[lowest])[1])


def floors(step: int, bits: int) -> np.ndarray:
    """The codes of all numbers, by floors of integers."""
    quotient = WHOLE.astype(np.int64) // (2 * step)
    return np.clip(quotient + 2 ** (bits - 1), 0, 2**bits - 1)


def steps_in_parts(bits: int) -> list[int]:
    """All that steps can be: the lowest byte that is tried is 1 or more, the highest at most 0xF7."""
    lowest = np.arange(1, 0xF8 - (CANDIDATES[bits] - 1))
    found = np.unique([in_parts(lowest, lowest + i) for i in range(CANDIDATES[bits])])
    return [int(step) for step in found]


TRIED = [(bits, step) for bits in CANDIDATES for step in steps_in_parts(bits)]
SEARCHED = [(bits, step) for bits, step in TRIED if bits < 8]


def test_steps_in_parts() -> None:
    found = [[step for b, step in TRIED if b == bits] for bits in CANDIDATES]
    assert [(min(steps), max(steps)) for steps in found] == [(16, 80), (16, 80), (16, 48), (16, 30)]


# ---- packed_search.cuh: float32


def test_rounding_by_a_sum() -> None:
    """The fused product and sum is rounded to a whole number of units, half to even."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-8200, 8200, 100_000), rng.integers(-8200, 8200, 9999) + 0.5])
    x = x.astype(np.float32).astype(np.float64)
    for unit in (1.0, 2.0**-24):
        rounded = (x * unit + ROUNDER * unit).astype(np.float32) - ROUNDER * unit
        assert np.array_equal(rounded, np.rint(x) * unit)


@pytest.mark.parametrize(("bits", "step"), TRIED)
def test_floor_of_a_product(bits: int, step: int) -> None:
    """An approximate reciprocal will do; numbers of 8 bits are the largest ones, up to 256 steps."""
    near = np.float32(0.5) / np.float32(step)
    x = np.arange(-256 * step, 256 * step + 1)
    want = np.clip(x // (2 * step) + 2 ** (bits - 1), 0, 2**bits - 1)
    for ulps in (-16, 0, 16):
        per_cell = (near.view(np.int32) + np.int32(ulps)).view(np.float32).astype(np.float64)
        code = np.floor((x + 0.5) * per_cell + ROUNDER + 2 ** (bits - 1))  # above 2**23 that is to round down
        code = np.clip(code, ROUNDER, ROUNDER + 2**bits - 1)
        assert np.array_equal(code.astype(np.float32).view(np.uint32) & 255, want)


def vectors(head_dim: int) -> np.ndarray:
    """Rotated vectors of many kinds: their largest element is near to the others, or far from them."""
    rng = np.random.default_rng(head_dim)
    outliers = rng.standard_normal((400, head_dim)) * np.exp2(rng.uniform(-9, 0, (400, 1)))
    outliers[:, :: head_dim // 8] = rng.choice([-1.0, 1.0], (400, 8))
    outliers[:, 1 :: head_dim // 4] *= np.exp2(rng.uniform(0, 4, (400, 1)))
    one = np.zeros((50, head_dim))
    one[:, 3] = np.exp2(rng.uniform(-30, 15, 50))
    flat = rng.choice([-1.0, 1.0], (50, head_dim)) * np.exp2(rng.uniform(-20, 15, (50, 1)))
    raw = [rng.standard_normal((200, head_dim)), rng.standard_t(2, (200, head_dim)), one, outliers]
    turned = [rotate(x.astype(np.float32)) for x in raw]
    return np.concatenate([*turned, one, flat, outliers]).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_sums_of_squares_are_exact(head_dim: int, bits: int) -> None:
    """All are but for those that are far too large to decide: of the lowest step at 4 bits, where that is 1.

    Then elements are 2.5 / 0.0584 times its step at most, and its grid ends at 15 times. A lane, which has up
    to 8 elements, adds from 2**23 on.
    """
    x = vectors(head_dim)
    largest = np.abs(x).max(axis=1, keepdims=True)
    rough = np.rint(np.ldexp(x, 7 - np.frexp(largest)[1]))
    assert np.square(rough).sum(axis=1).max() < 2**23
    candidates = candidate_steps(x, bits)
    held = candidates[:, 0] > 0
    x, candidates = x[held], candidates[held]
    assert len(x) > 900
    parts = np.rint(np.ldexp(x, 5 - np.frexp(STEPS[candidates[:, :1]])[1]))
    assert np.abs(parts).max() < 2048
    sums = []
    for byte in candidates.T:
        step = in_parts(candidates[:, 0], byte)[:, None]
        error = parts - grid_values(grid_codes(parts, step, bits), step, bits)
        squares = np.square(error.astype(np.float64))
        lanes = np.pad(squares, ((0, 0), (0, -head_dim % 32))).reshape(len(x), -1, 32)
        assert lanes.sum(axis=1).max() < 2**23
        sums.append(squares.sum(axis=1))
    least, most = np.min(sums, axis=0), np.max(sums, axis=0)
    assert least.max() < 2**22
    too_large = most >= 2**24
    assert not too_large.any() or bits == 4
    assert (candidates[too_large, 0] == 1).all()
    assert (most[too_large] > 8 * least[too_large]).all()


# ---- cache_encode.cuh: float16, where a whole number n is n 2**-24


def half(x: Any) -> Doubles:
    """Rounded to float16."""
    return np.asarray(x).astype(np.float16).astype(np.float64)


def half_codes(step: int, bits: int, last: float) -> Doubles:
    """Codes by two fused operations: cut to 0 ... 1, and from there to 1536 + code."""
    lift = 4 if bits < 4 else 1  # factors of float16 are less than 2**16
    cells = 2 * step * last
    factor = half(2**24 / cells / lift)
    first = half((2 ** (bits - 1) - 0.5) / last + 0.5 / cells)
    cut = np.clip(half(half(WHOLE * 2.0**-24 * lift) * factor + first), 0, 1)
    return half(cut * last + 1536) - 1536


@pytest.mark.parametrize(("bits", "step"), SEARCHED)
def test_floor_in_float16(bits: int, step: int) -> None:
    assert np.array_equal(half_codes(step, bits, 2**bits - 1), floors(step, bits))


def test_floor_in_float16_has_little_to_spare() -> None:
    """Steps of 49 parts and more, which there are not, would go wrong at 4 bits."""
    fails = [step for step in range(16, 61) if (half_codes(step, 4, 15) != floors(step, 4)).any()]
    assert min(fails) == 49


@pytest.mark.parametrize("step", steps_in_parts(8))
def test_floor_of_eight_bits(step: int) -> None:
    """By float32, rounded to nearest twice: half a number more keeps quotients from halves.

    What lies at the upper end of the grid is to be cut, and nothing else.
    """
    numbers = np.arange(-256 * step, 256 * step + 1)
    per_cell = np.float32(1) / np.float32(2 * np.ldexp(step, -24))
    first = np.float32(2.0**-25 * np.float64(per_cell) + 127.5)
    whole = (np.ldexp(numbers, -24) * np.float64(per_cell) + np.float64(first)).astype(np.float32)
    code = whole.astype(np.float64) + ROUNDER
    bits = code.astype(np.float32).view(np.uint32) & 0xFFFF
    assert bits.max() == 256
    assert np.array_equal(np.minimum(bits, 255), np.clip(numbers // (2 * step) + 128, 0, 255))


@pytest.mark.parametrize(("bits", "step"), SEARCHED)
def test_folded_numbers_are_errors(bits: int, step: int) -> None:
    """What is left of a number that is folded in the middle of what is left of the grid, time after time."""
    left = WHOLE * 2.0**-24
    for k in range(bits - 1, -1, -1):
        left = half(np.abs(left) - half(step * 2**k * 2.0**-24))
    error = WHOLE - (2 * floors(step, bits) + 1 - 2**bits) * step
    assert np.array_equal(np.abs(left) * 2.0**24, np.abs(error))


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
