"""Codecs on the CPU: the arithmetic of kvlab/reference/codec.py, bit for bit, at the speed of memory.

Here groups run along a row; `cpu_columns` has those that run across rows. A parallel task takes some rows
through all steps, in scratch memory that stays in the first-level cache: load as float32, find the scales,
make the codes, pack. Arrays are flat and addressed by position: slicing them would cost more than the work on
a group.

Nothing here may use `fastmath`: codes must be the same on every backend.
"""

import numpy as np
from numba import prange

from .cpu_bits import pack_run, pack_ternary_run, unpack_run, unpack_ternary_run
from .cpu_elements import load_values, store_values
from .cpu_groups import (
    GRID,
    count_thresholds,
    hadamard_run,
    measure_magnitude,
    measure_range,
    pad,
    root_mean_square,
    rotate,
    rotation_factor,
    round_to_codes,
    round_to_ternary,
)
from .cpu_simd import LANES, helper, kernel, load_codes, look_up, splat, store
from .cpu_words import AFFINE, HADAMARD, NAN_WORD, TERNARY, WIDE, find_scales, word_value

_HALF = np.float32(0.5)
_TERNARY_LEVEL = np.float32(1.2240064)
_BLOCK = 4096
"""Elements that go through all steps together: 16 KiB as float32."""
_BLOCKS = 8
"""Blocks of one parallel task."""


@helper
def _pack_rows(codec, codes, rows, n, bits, packed, first, row_bytes):
    """Pack `rows` rows of n codes each to packed[first:]; as one run where rows end on byte borders."""
    if codec != TERNARY and n % 8 == 0:
        pack_run(codes, 0, rows * n, bits, packed, first)
        return
    for row in range(rows):
        if codec == TERNARY:
            values = codes[row * n : (row + 1) * n].view(np.int8)
            pack_ternary_run(values, packed[first + row * row_bytes :])
        else:
            pack_run(codes, row * n, n, bits, packed, first + row * row_bytes)


@helper
def _unpack_rows(codec, packed, first, row_bytes, bits, codes, rows, n):
    """Unpack `rows` rows of n codes each from packed[first:]; True if a ternary byte is none."""
    if codec != TERNARY and n % 8 == 0:
        unpack_run(packed, first, bits, codes, 0, rows * n)
        return False
    wrong = False
    for row in range(rows):
        if codec == TERNARY:
            values = codes[row * n : (row + 1) * n].view(np.int8)
            wrong |= unpack_ternary_run(packed[first + row * row_bytes :], values)
        else:
            unpack_run(packed, first + row * row_bytes, bits, codes, row * n, n)
    return wrong


def table_of_guesses(thresholds):
    """Return for every m how many thresholds lie below m / GRID for certain, as `count_thresholds` wants it.

    "For certain" leaves room for rounding in float32. Thresholds are more than 1 / GRID apart.
    """
    grid = np.arange(int(GRID * thresholds[-1]) + 2) / GRID * (1 - 2.0**-18)
    return np.searchsorted(thresholds.astype(np.float64), grid).astype(np.uint8)


@kernel
def quantize_rows(
    x16, x32, dtype, n, codec, bits, group, thresholds, guesses, half_levels, packed, scale, offset
):
    """Quantise rows of n elements in groups along the row; return how many groups cannot be represented.

    x16 : uint16 (rows * n), the bits of float16 or bfloat16, or empty; x32 : float32 (rows * n), or empty
    thresholds : float32, of the codebook, and guesses : uint8, of `table_of_guesses` or empty (HADAMARD)
    half_levels : float32 (SYMMETRIC)
    packed : uint8 (rows * row bytes); scale, offset : uint16 (rows * groups), offset empty if not AFFINE
    """
    groups = (n + group - 1) // group
    rows = scale.size // groups
    row_bytes = packed.size // rows
    top, factor = np.float32(2**bits - 1), rotation_factor(group)
    stride = pad(group)
    block = max(1, _BLOCK // n)
    found = pad(block * groups)
    bad = 0
    for task in prange((rows + _BLOCKS * block - 1) // (_BLOCKS * block)):
        values = np.empty(block * groups * stride, np.float32)
        squares = np.empty(stride, np.float32)
        scaled = np.empty(thresholds.size + 1, np.float32)
        indices = np.empty(stride, np.uint16)
        codes = np.empty(block * n + LANES, np.uint8)
        facts = np.zeros((4, found), np.float32)
        words = np.empty((2, found), np.uint16)
        for row0 in range(task * _BLOCKS * block, min(rows, (task + 1) * _BLOCKS * block), block):
            taken = min(block, rows - row0)
            for k in range(taken * groups):
                first = k % groups * group
                count = min(group, n - first)
                start = k * stride
                load_values(x16, x32, dtype, (row0 + k // groups) * n + first, count, values, start)
                if codec == AFFINE:
                    facts[0, k], facts[1, k] = measure_range(values, start, count)
                else:
                    facts[1, k] = measure_magnitude(values, start, count)
                if codec == HADAMARD:
                    facts[0, k] = root_mean_square(values, start, count, facts[1, k], squares)
                    rotate(values, start, count, rotation_factor(count) if count < group else factor)
                elif codec == TERNARY:
                    rms = root_mean_square(values, start, count, facts[1, k], squares)
                    facts[0, k] = rms * _TERNARY_LEVEL
            find_scales(codec, top, half_levels, facts, taken * groups, words)
            for k in range(taken * groups):
                first = k % groups * group
                count = min(group, n - first)
                at = k // groups * n + first
                if codec == HADAMARD:
                    start, found_scale = k * stride, facts[2, k]
                    count_thresholds(
                        values, start, count, found_scale, thresholds, guesses, scaled, indices, codes, at
                    )
                elif codec == TERNARY:
                    round_to_ternary(values, k * stride, count, facts[2, k], codes, at)
                else:
                    round_to_codes(values, k * stride, count, facts[2, k], facts[3, k], top, codes, at)
                if words[0, k] == NAN_WORD:
                    codes[at : at + count] = 0
                    bad += 1
                scale[row0 * groups + k] = words[0, k]
                if codec == AFFINE:
                    offset[row0 * groups + k] = words[1, k]
            _pack_rows(codec, codes, taken, n, bits, packed, row0 * row_bytes, row_bytes)
    return bad


@kernel
def dequantize_rows(packed, n, codec, bits, group, levels, scale, offset, dtype, out16, out32):
    """Reconstruct rows of n elements; arguments as `quantize_rows`, levels : float32, of the codebook.

    Returns how many blocks hold a byte that stands for no ternary values.
    """
    groups = (n + group - 1) // group
    rows = scale.size // groups
    row_bytes = packed.size // rows
    half_top, factor = np.float32(2**bits - 1) * _HALF, rotation_factor(group)
    block = max(1, _BLOCK // n)
    bad = 0
    for task in prange((rows + _BLOCKS * block - 1) // (_BLOCKS * block)):
        values = np.empty(pad(group), np.float32)
        codes = np.zeros(block * n + LANES, np.uint8)
        rest = np.empty(LANES, np.uint16)
        for row0 in range(task * _BLOCKS * block, min(rows, (task + 1) * _BLOCKS * block), block):
            taken = min(block, rows - row0)
            bad += np.int64(_unpack_rows(codec, packed, row0 * row_bytes, row_bytes, bits, codes, taken, n))
            for k in range(taken * groups):
                first = k % groups * group
                count = min(group, n - first)
                at = k // groups * n + first
                word = scale[row0 * groups + k]
                wide = (word & WIDE) != 0
                s = word_value(np.uint16(word & ~WIDE), wide)
                if codec == HADAMARD:
                    for i in range(0, count, LANES):
                        store(values, i, look_up(levels, codes, at + i) * splat(s))
                    rotate(values, 0, count, rotation_factor(count) if count < group else factor)
                elif codec == TERNARY:
                    for i in range(count):
                        values[i] = np.float32(np.int8(codes[at + i])) * s
                else:
                    o = word_value(offset[row0 * groups + k], wide) if codec == AFFINE else -(s * half_top)
                    vs, vo = splat(s), splat(o)
                    for i in range(0, count, LANES):
                        store(values, i, load_codes(codes, at + i) * vs + vo)
                store_values(values, dtype, out16, out32, row0 * n + at, count, rest)
    return bad


@kernel
def hadamard_rows(x, block, factor, out):
    """Transform the rows of x (rows, n), contiguous float32, into out; factor is float32(1 / sqrt(block))."""
    for r in prange(x.shape[0]):
        row = out[r]
        row[:] = x[r]
        hadamard_run(row, 0, row.size, block)
        for i in range(row.size):
            row[i] *= factor
