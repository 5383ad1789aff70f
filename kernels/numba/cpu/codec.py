"""Codecs on the CPU: the arithmetic of kvlab/reference/codec.py, bit for bit, at the speed of memory.

Here groups run along a row; `columns` has those that run across rows. A parallel task takes some rows
through all steps, in scratch memory that stays in the first-level cache: load as float32, find the scales,
make the codes, pack. Arrays are flat and addressed by position: slicing them would cost more than the work on
a group.

Nothing here may use `fastmath`: codes must be the same on every backend.
"""

import numpy as np
from numba import prange

from .bits import pack_run, pack_ternary_run, unpack_run, unpack_ternary_run
from .elements import load_values, store_values
from .groups import (
    measure_magnitude,
    measure_range,
    measure_squares,
    pad,
    rotate,
    rotation_factor,
    round_to_codes,
    round_to_ternary,
)
from .simd import LANES, helper, kernel, load_codes, load_digits, look_up, splat, store
from .units import COUNTED, STEP, count_borders
from .words import AFFINE, HADAMARD, NAN_WORD, TERNARY, WIDE, find_scales, word_value

_HALF = np.float32(0.5)
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


def tables_of_borders(borders):
    """Return what `count_borders` wants of borders: rows of bytes, and the codes of integers."""
    limit, positive = int(borders[-1]) + 1, borders[borders > 0]
    rows = np.repeat(positive[: len(positive) if len(positive) in COUNTED else 0].astype(np.int8), STEP)
    return rows, np.searchsorted(borders, np.arange(-limit, limit), side="right").astype(np.uint8)


@kernel
def quantize_rows(
    x16, x32, dtype, n, codec, bits, group, unit, borders, table, half_levels, packed, scale, offset
):
    """Quantise rows of n elements in groups along the row; return how many groups cannot be represented.

    x16 : uint16 (rows * n), the bits of float16 or bfloat16, or empty; x32 : float32 (rows * n), or empty
    unit : float32, of the codebook, and borders, table of `tables_of_borders` (HADAMARD)
    half_levels : float32 (SYMMETRIC)
    packed : uint8 (rows * row bytes); scale, offset : uint16 (rows * groups), offset empty if not AFFINE
    """
    groups = (n + group - 1) // group
    rows = scale.size // groups
    row_bytes = packed.size // rows
    top = np.float32(2**bits - 1)
    stride = pad(group)
    block = max(1, _BLOCK // n)
    of_groups = pad(block * groups)
    bad = 0
    for task in prange((rows + _BLOCKS * block - 1) // (_BLOCKS * block)):
        values = np.empty(block * groups * stride + STEP, np.float32)
        squares = np.empty(stride, np.float32)
        indices = np.empty(stride + LANES, np.uint16)
        codes = np.empty(block * n + STEP, np.uint8)
        stats = np.zeros((4, of_groups), np.float32)
        words = np.empty((2, of_groups), np.uint16)
        for row0 in range(task * _BLOCKS * block, min(rows, (task + 1) * _BLOCKS * block), block):
            block_rows = min(block, rows - row0)
            for k in range(block_rows * groups):
                first = k % groups * group
                count = min(group, n - first)
                load_values(x16, x32, dtype, (row0 + k // groups) * n + first, count, values, k * stride)
                if codec == AFFINE:
                    stats[0, k], stats[1, k] = measure_range(values, k * stride, count)
                else:
                    stats[1, k] = measure_magnitude(values, k * stride, count)
            if codec >= HADAMARD:
                measure_squares(codec, values, stride, block_rows, n, group, squares, stats)
            find_scales(codec, top, half_levels, stats, block_rows * groups, words)
            if codec == HADAMARD:
                count_borders(
                    values, stride, block_rows, n, group, stats[2], unit, borders, table, indices, codes
                )
            for k in range(block_rows * groups):
                first = k % groups * group
                count = min(group, n - first)
                at = k // groups * n + first
                if codec == TERNARY:
                    round_to_ternary(values, k * stride, count, stats[2, k], codes, at)
                elif codec != HADAMARD:
                    round_to_codes(values, k * stride, count, stats[2, k], stats[3, k], top, codes, at)
                if words[0, k] == NAN_WORD:
                    codes[at : at + count] = 0
                    bad += 1
                scale[row0 * groups + k] = words[0, k]
                if codec == AFFINE:
                    offset[row0 * groups + k] = words[1, k]
            _pack_rows(codec, codes, block_rows, n, bits, packed, row0 * row_bytes, row_bytes)
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
    whole = n % group == 0 and group % LANES == 0  # then all groups of a block are finished together
    bad = 0
    for task in prange((rows + _BLOCKS * block - 1) // (_BLOCKS * block)):
        values = np.empty(max(block * n, pad(group)), np.float32)
        codes = np.zeros(block * n + LANES, np.uint8)
        rest = np.empty(LANES, np.uint16)
        for row0 in range(task * _BLOCKS * block, min(rows, (task + 1) * _BLOCKS * block), block):
            block_rows = min(block, rows - row0)
            bad += np.int64(
                _unpack_rows(codec, packed, row0 * row_bytes, row_bytes, bits, codes, block_rows, n)
            )
            for k in range(block_rows * groups):
                first = k % groups * group
                count = min(group, n - first)
                at = k // groups * n + first
                start = at if whole else 0
                word = scale[row0 * groups + k]
                wide = (word & WIDE) != 0
                s = word_value(np.uint16(word & ~WIDE), wide)
                if codec == HADAMARD:
                    for i in range(0, count, LANES):
                        store(values, start + i, look_up(levels, codes, at + i) * splat(s))
                    if not whole:
                        rotate(values, count, count & -count, rotation_factor(count))
                elif codec == TERNARY:
                    for i in range(0, count, LANES):
                        store(values, start + i, load_digits(codes, at + i) * splat(s))
                else:
                    o = word_value(offset[row0 * groups + k], wide) if codec == AFFINE else -(s * half_top)
                    vs, vo = splat(s), splat(o)
                    for i in range(0, count, LANES):
                        store(values, start + i, load_codes(codes, at + i) * vs + vo)
                if not whole:
                    store_values(values, dtype, out16, out32, row0 * n + at, count, rest)
            if whole:
                if codec == HADAMARD:
                    rotate(values, block_rows * n, group & -group, factor)
                store_values(values, dtype, out16, out32, row0 * n, block_rows * n, rest)
    return bad
