"""Affine and symmetric codecs on the CPU with groups across rows: one scale a column (per channel).

The eight lanes of a vector are eight columns, so nothing is reduced across lanes. A parallel unit is one
group of rows; it reads them twice, once for the lowest and highest value and once for the codes. Codes are
packed along the rows, as everywhere.
"""

import numpy as np
from numba import prange

from .bits import pack_run, unpack_run
from .elements import load_values, store_values
from .groups import pad
from .simd import LANES, helper, kernel, load, load_codes, maximum, minimum, splat, store, store_codes
from .words import AFFINE, NAN_WORD, SYMMETRIC, WIDE, find_scales, word_value

_BLOCK = 4096
"""Codes that are made before they are packed: a load soon after narrower stores has to wait for them."""

_ZERO, _HALF, _INFINITY = np.float32(0), np.float32(0.5), np.float32(np.inf)


@helper
def _measure_columns(x16, x32, dtype, first, step, count, width, values, stats, scratch):
    """Put the lowest and the highest value of each of `width` columns to stats[0] and stats[1].

    The `count` rows are `step` elements apart. Old and new extremes change places after every row: of a
    minimum written back in place LLVM makes a masked store, which is slow.
    """
    low, high, check = stats[0], stats[1], stats[2]
    new_low, new_high = scratch[0], scratch[1]
    for i in range(0, width, LANES):
        store(low, i, splat(_INFINITY))
        store(high, i, splat(-_INFINITY))
        store(check, i, splat(_ZERO))
    for row in range(count):
        load_values(x16, x32, dtype, first + row * step, width, values, 0)
        for i in range(0, width, LANES):
            x = load(values, i)
            store(new_low, i, minimum(x, load(low, i)))
            store(new_high, i, maximum(x, load(high, i)))
            store(check, i, load(check, i) + (x - x))
        low, new_low, high, new_high = new_low, low, new_high, high
    for i in range(0, width, LANES):  # where an element was not finite, the sum of x - x is NaN, otherwise 0
        nothing = load(check, i)
        store(stats[0], i, load(low, i) + nothing)
        store(stats[1], i, load(high, i) + nothing)


@kernel
def quantize_columns(x16, x32, dtype, shape, codec, bits, group, half_levels, packed, scale, offset):
    """Quantise x (outer, length, inner, n) in groups along `length`; AFFINE and SYMMETRIC only.

    Codes are packed along n. packed : uint8 (outer, length, inner, row bytes); scale, offset : uint16
    (outer, groups, inner, n). Otherwise as `quantize_rows`.
    """
    outer, length, inner, n = shape
    groups = (length + group - 1) // group
    row_bytes = (n * bits + 7) // 8
    top = np.float32(2**bits - 1)
    block = max(1, _BLOCK // n)
    bad = 0
    for unit in prange(outer * groups * inner):
        values = np.empty(pad(n), np.float32)
        stats = np.empty((4, pad(n)), np.float32)
        scratch = np.empty((2, pad(n)), np.float32)
        words = np.empty((2, pad(n)), np.uint16)
        codes = np.empty(block * n + LANES, np.uint8)
        g, column = unit // inner % groups, unit % inner
        row = (unit // (inner * groups) * length + g * group) * inner + column
        count = min(group, length - g * group)
        _measure_columns(x16, x32, dtype, row * n, inner * n, count, n, values, stats, scratch)
        low, high, scales, offsets = stats[0], stats[1], stats[2], stats[3]
        if codec == SYMMETRIC:
            for i in range(0, n, LANES):
                store(high, i, maximum(load(high, i), splat(_ZERO) - load(low, i)))
        find_scales(codec, top, half_levels, stats, n, words)
        zero, most = splat(_ZERO), splat(top)
        for start in range(0, count, block):
            block_rows = min(block, count - start)
            for t in range(block_rows):
                load_values(x16, x32, dtype, (row + (start + t) * inner) * n, n, values, 0)
                for i in range(0, n, LANES):
                    code = (load(values, i) - load(offsets, i)) / load(scales, i)
                    store_codes(codes, t * n + i, minimum(maximum(code, zero), most))
            run = block_rows * n if inner == 1 and n % 8 == 0 else n  # codes whose bytes follow each other
            for done in range(0, block_rows * n, run):
                target = (row + (start + done // n) * inner) * row_bytes
                pack_run(codes, done, run, bits, packed, target)
        for i in range(n):
            scale[unit * n + i] = words[0, i]
            bad += np.int64(words[0, i] == NAN_WORD)
            if codec == AFFINE:
                offset[unit * n + i] = words[1, i]
    return bad


@kernel
def dequantize_columns(packed, shape, codec, bits, group, scale, offset, dtype, out16, out32):
    """Reconstruct what `quantize_columns` made."""
    outer, length, inner, n = shape
    groups = (length + group - 1) // group
    row_bytes = (n * bits + 7) // 8
    half_top = np.float32(2**bits - 1) * _HALF
    for unit in prange(outer * groups * inner):
        values = np.empty(pad(n), np.float32)
        scales = np.empty(pad(n), np.float32)
        offsets = np.empty(pad(n), np.float32)
        codes = np.empty(pad(n), np.uint8)
        rest = np.empty(LANES, np.uint16)
        for i in range(n):
            word = scale[unit * n + i]
            wide = (word & WIDE) != 0
            scales[i] = word_value(np.uint16(word & ~WIDE), wide)
            offsets[i] = -(scales[i] * half_top)
            if codec == AFFINE:
                offsets[i] = word_value(offset[unit * n + i], wide)
        g, column = unit // inner % groups, unit % inner
        row = (unit // (inner * groups) * length + g * group) * inner + column
        for t in range(min(group, length - g * group)):
            unpack_run(packed, (row + t * inner) * row_bytes, bits, codes, 0, n)
            for i in range(0, n, LANES):
                store(values, i, load_codes(codes, i) * load(scales, i) + load(offsets, i))
            store_values(values, dtype, out16, out32, (row + t * inner) * n, n, rest)
