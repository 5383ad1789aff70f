"""Codecs on the CPU: the arithmetic of kvlab/reference/codec.py, bit for bit, at the speed of memory.

A group, the elements that share a scale, is loaded into a small float32 buffer (padded to whole vectors), its
scale is found, and its codes go to a second buffer, which is packed while it is still in the first-level
cache. Arrays are flat and addressed by position: slicing them would cost more than the work on a group.

Nothing here may use `fastmath`: codes must be the same on every backend.
"""

import numpy as np
from numba import prange

from .cpu_bits import pack_run, pack_ternary_run, unpack_run, unpack_ternary_run
from .cpu_simd import (
    LANES,
    bits_of,
    butterflies,
    float_of_bits,
    float_of_half,
    half_of,
    helper,
    highest,
    kernel,
    load,
    load_bfloat,
    load_codes,
    load_half,
    lowest,
    magnitude,
    maximum,
    minimum,
    splat,
    store,
    store_bfloat,
    store_codes,
    store_half,
    total,
)

AFFINE, SYMMETRIC, HADAMARD, TERNARY = range(4)
FLOAT16, BFLOAT16, FLOAT32 = range(3)

_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_NARROW_FROM, _NARROW_TO = np.float32(2.0**-14), np.float32(32752)
_LARGEST = np.float32(2.0**126)
_LARGEST_HALF = np.float32(65504)
_TERNARY_LEVEL = np.float32(1.2240064)
_WIDE, _HALF_NAN = np.uint16(0x8000), np.uint16(0x7E00)


# ---------------------------------------------------------------------------------------------------------
# Memory: three element types to and from float32 buffers
# ---------------------------------------------------------------------------------------------------------


@helper
def _load_values(x16, x32, dtype, first, count, values):
    """Read count elements at `first` of x16 or x32 to values[0:count], whole vectors; the rest is 0."""
    whole = count // LANES * LANES
    if dtype == FLOAT16:
        for i in range(0, whole, LANES):
            store(values, i, load_half(x16, first + i))
    elif dtype == BFLOAT16:
        for i in range(0, whole, LANES):
            store(values, i, load_bfloat(x16, first + i))
    else:
        for i in range(0, whole, LANES):
            store(values, i, load(x32, first + i))
    if whole < count:
        store(values, whole, splat(_ZERO))
        for i in range(whole, count):
            if dtype == FLOAT16:
                values[i] = float_of_half(x16[first + i])
            elif dtype == BFLOAT16:
                values[i] = float_of_bits(np.uint32(x16[first + i]) << np.uint32(16))
            else:
                values[i] = x32[first + i]


@helper
def _store_values(values, dtype, out16, out32, first, count, rest):
    """Write values[0:count] to out16 or out32 at `first`, rounded to nearest; float16 saturates at 65504."""
    whole = count // LANES * LANES
    if dtype == FLOAT16:
        top, bottom = splat(_LARGEST_HALF), splat(-_LARGEST_HALF)
        for i in range(0, whole, LANES):
            store_half(out16, first + i, maximum(bottom, minimum(top, load(values, i))))
    elif dtype == BFLOAT16:
        for i in range(0, whole, LANES):
            store_bfloat(out16, first + i, load(values, i))
    else:
        for i in range(0, whole, LANES):
            store(out32, first + i, load(values, i))
    if whole < count:
        if dtype == FLOAT16:
            top, bottom = splat(_LARGEST_HALF), splat(-_LARGEST_HALF)
            store_half(rest, 0, maximum(bottom, minimum(top, load(values, whole))))
        elif dtype == BFLOAT16:
            store_bfloat(rest, 0, load(values, whole))
        for i in range(whole, count):
            if dtype == FLOAT32:
                out32[first + i] = values[i]
            else:
                out16[first + i] = rest[i - whole]


# ---------------------------------------------------------------------------------------------------------
# Scales and offsets: 16-bit words
# ---------------------------------------------------------------------------------------------------------


@helper
def _is_wide(largest):
    return (largest > _NARROW_TO) | ((largest < _NARROW_FROM) & (largest > _ZERO))


@helper
def _round_up(value, wide):
    """Return the least bfloat16 (wide) or float16 that is not below value, as its bits."""
    if wide:
        bits = bits_of(value)
        inexact = (value > _ZERO) & ((bits & np.uint32(0xFFFF)) != 0)
        return np.uint16((bits >> np.uint32(16)) + np.uint32(inexact))
    word = half_of(value)
    if float_of_half(word) < value:
        return np.uint16(word - 1) if word & np.uint16(0x8000) else np.uint16(word + 1)
    return word


@helper
def _word_value(word, wide):
    if wide:
        return float_of_bits(np.uint32(word) << np.uint32(16))
    return float_of_half(word)


@helper
def _scale_word(step, wide):
    """Return the word of a scale, with the mark of a bfloat16 one, and the scale it stands for."""
    word = _round_up(step, wide)
    return (word | _WIDE if wide else word), _word_value(word, wide)


@helper
def _read_scale(word):
    wide = (word & _WIDE) != 0
    return _word_value(np.uint16(word & np.uint16(0x7FFF)), wide), wide


# ---------------------------------------------------------------------------------------------------------
# One group: values to codes
# ---------------------------------------------------------------------------------------------------------


@helper
def _round_to_codes(values, padded, offset, scale, top, codes, first):
    o, s, zero, t = splat(offset), splat(scale), splat(_ZERO), splat(top)
    for i in range(0, padded, LANES):
        code = (load(values, i) - o) / s
        store_codes(codes, first + i, minimum(maximum(code, zero), t))


@helper
def _encode_affine(values, count, padded, top, codes, first):
    """Return the words of scale and offset; the scale is NaN if the group cannot be represented."""
    if count < padded:
        for i in range(count, padded):
            values[i] = values[0]
    low = high = load(values, 0)
    check = low - low
    for i in range(LANES, padded, LANES):
        x = load(values, i)
        low, high, check = minimum(x, low), maximum(x, high), check + (x - x)
    lo, hi = lowest(low) + _ZERO, highest(high) + _ZERO
    largest = max(-lo, hi)
    if not (total(check) == _ZERO and largest <= _LARGEST):
        return _HALF_NAN, _HALF_NAN
    wide = _is_wide(largest)
    offset_word = np.uint16(_round_up(-lo, wide) ^ np.uint16(0x8000))
    offset = _word_value(offset_word, wide)
    word, scale = _scale_word((hi - offset) / top, wide)
    _round_to_codes(values, padded, offset, scale, top, codes, first)
    return word, offset_word


@helper
def _largest_of(values, padded):
    """Return the largest magnitude of a group, NaN if an element is not finite."""
    high = check = splat(_ZERO)
    for i in range(0, padded, LANES):
        x = load(values, i)
        high, check = maximum(magnitude(x), high), check + (x - x)
    return highest(high) + total(check)


@helper
def _encode_symmetric(values, padded, half_levels, top, codes, first):
    largest = _largest_of(values, padded)
    if not largest <= _LARGEST:
        return _HALF_NAN
    word, scale = _scale_word(largest / half_levels, _is_wide(largest))
    _round_to_codes(values, padded, -(scale * (top * _HALF)), scale, top, codes, first)
    return word


@helper
def _root_mean_square(values, count, padded, largest, squares):
    """Return sqrt(mean of squares): summed by halves, after a division by a power of two near `largest`."""
    exponent = max(bits_of(largest) >> np.uint32(23), np.uint32(1))
    down = splat(float_of_bits(np.uint32((np.uint32(254) - exponent) << np.uint32(23))))
    for i in range(0, padded, LANES):
        y = load(values, i) * down
        store(squares, i, y * y)
    h = LANES
    while h < padded:
        h *= 2
    left = padded
    while h > LANES:
        h //= 2
        for i in range(0, left - h, LANES):
            store(squares, i, load(squares, i) + load(squares, i + h))
        left = min(left, h)
    mean = total(load(squares, 0)) / np.float32(count)
    return np.sqrt(mean) * float_of_bits(np.uint32(exponent << np.uint32(23)))


@helper
def hadamard_run(x, first, count, block):
    """Transform x[first:first + count], flat float32, in place by blocks, without the final 1 / sqrt(block).

    `block` is the largest power of two that divides `count`.
    """
    if block < LANES:
        h = 1
        while h < block:
            for start in range(first, first + count, 2 * h):
                for i in range(start, start + h):
                    a, b = x[i], x[i + h]
                    x[i], x[i + h] = a + b, a - b
            h *= 2
        return
    for i in range(first, first + count, LANES):
        store(x, i, butterflies(load(x, i)))
    h = LANES
    while 2 * h < block:  # two distances in one pass over memory
        for start in range(first, first + count, 4 * h):
            for i in range(start, start + h, LANES):
                a, b, c, d = load(x, i), load(x, i + h), load(x, i + 2 * h), load(x, i + 3 * h)
                a, b, c, d = a + b, a - b, c + d, c - d
                store(x, i, a + c)
                store(x, i + h, b + d)
                store(x, i + 2 * h, a - c)
                store(x, i + 3 * h, b - d)
        h *= 4
    if h < block:
        for start in range(first, first + count, 2 * h):
            for i in range(start, start + h, LANES):
                a, b = load(x, i), load(x, i + h)
                store(x, i, a + b)
                store(x, i + h, a - b)


@helper
def _rotate(values, count, padded):
    """Apply the orthonormal block Hadamard transform to values[0:count]."""
    block = count & -count
    hadamard_run(values, 0, count, block)
    factor = splat(np.float32(1 / np.sqrt(np.float64(block))))
    for i in range(0, padded, LANES):
        store(values, i, load(values, i) * factor)


@helper
def _encode_hadamard(values, count, padded, thresholds, scaled, squares, codes, first):
    """A code counts the thresholds below the magnitude, up or down from the middle by the sign."""
    largest = _largest_of(values, padded)
    if not largest <= _LARGEST:
        return _HALF_NAN
    rms = _root_mean_square(values, count, padded, largest, squares)
    word, scale = _scale_word(rms, _is_wide(largest))
    _rotate(values, count, padded)
    for k in range(thresholds.size):
        scaled[k] = thresholds[k] * scale
    zero, one, two, middle = splat(_ZERO), splat(_ONE), splat(_TWO), splat(np.float32(thresholds.size + 1))
    for i in range(0, padded, LANES):
        y = load(values, i)
        size, above = magnitude(y), zero
        for k in range(thresholds.size):
            above = above + (size > splat(scaled[k]))
        store_codes(codes, first + i, middle + above - (zero > y) * (two * above + one))
    return word


@helper
def _encode_ternary(values, count, padded, squares, codes, first):
    largest = _largest_of(values, padded)
    if not largest <= _LARGEST:
        return _HALF_NAN
    rms = _root_mean_square(values, count, padded, largest, squares)
    word, scale = _scale_word(rms * _TERNARY_LEVEL, _is_wide(largest))
    border, minus = splat(scale * _HALF), splat(scale * -_HALF)
    for i in range(0, padded, LANES):
        x = load(values, i)
        store_codes(codes, first + i, (x > border) - (minus > x))
    return word


@helper
def _pad(count):
    return (count + LANES - 1) // LANES * LANES


_ROWS = 64
"""Rows of one parallel task."""


@kernel
def quantize_rows(x16, x32, dtype, n, codec, bits, group, thresholds, half_levels, packed, scale, offset):
    """Quantise rows of n elements along the row; return how many groups cannot be represented.

    x16 : uint16 (rows * n) bits of float16 or bfloat16, or empty; x32 : float32 (rows * n), or empty
    thresholds : float32, of the codebook; half_levels : float32, of the symmetric codec
    packed : uint8 (rows * row bytes); scale, offset : uint16 (rows * groups), offset for AFFINE only
    """
    groups = (n + group - 1) // group
    rows = scale.size // groups
    row_bytes = packed.size // rows
    top = np.float32(2**bits - 1)
    bad = 0
    for task in prange((rows + _ROWS - 1) // _ROWS):
        values = np.empty(_pad(group), np.float32)
        squares = np.empty(_pad(group), np.float32)
        scaled = np.empty(thresholds.size, np.float32)
        codes = np.empty(n + LANES, np.uint8)
        for row in range(task * _ROWS, min(rows, (task + 1) * _ROWS)):
            for g in range(groups):
                first = g * group
                count = min(group, n - first)
                padded = _pad(count)
                _load_values(x16, x32, dtype, row * n + first, count, values)
                place = row * groups + g
                if codec == AFFINE:
                    word, offset[place] = _encode_affine(values, count, padded, top, codes, first)
                elif codec == SYMMETRIC:
                    word = _encode_symmetric(values, padded, half_levels, top, codes, first)
                elif codec == HADAMARD:
                    word = _encode_hadamard(values, count, padded, thresholds, scaled, squares, codes, first)
                else:
                    word = _encode_ternary(values, count, padded, squares, codes, first)
                scale[place] = word
                if word == _HALF_NAN:
                    bad += 1
                    codes[first : first + count] = 0
            if codec == TERNARY:
                pack_ternary_run(codes[:n].view(np.int8), packed[row * row_bytes :])
            else:
                pack_run(codes, 0, n, bits, packed, row * row_bytes)
    return bad


@kernel
def dequantize_rows(packed, n, codec, bits, group, levels, scale, offset, dtype, out16, out32):
    """Reconstruct rows of n elements; arguments as `quantize_rows`, levels : float32, of the codebook."""
    groups = (n + group - 1) // group
    rows = scale.size // groups
    row_bytes = packed.size // rows
    half_top = np.float32(2**bits - 1) * _HALF
    bad = 0
    for task in prange((rows + _ROWS - 1) // _ROWS):
        values = np.empty(_pad(group), np.float32)
        codes = np.empty(n + LANES, np.uint8)
        rest = np.empty(LANES, np.uint16)
        for row in range(task * _ROWS, min(rows, (task + 1) * _ROWS)):
            if codec == TERNARY:
                bad += np.int64(unpack_ternary_run(packed[row * row_bytes :], codes[:n].view(np.int8)))
            else:
                unpack_run(packed, row * row_bytes, bits, codes, 0, n)
            for g in range(groups):
                first = g * group
                count = min(group, n - first)
                padded = _pad(count)
                s, wide = _read_scale(scale[row * groups + g])
                if codec == HADAMARD:
                    for i in range(count):
                        values[i] = levels[codes[first + i]] * s
                    _rotate(values, count, padded)
                elif codec == TERNARY:
                    for i in range(count):
                        values[i] = np.float32(np.int8(codes[first + i])) * s
                else:
                    o = _word_value(offset[row * groups + g], wide) if codec == AFFINE else -(s * half_top)
                    vs, vo = splat(s), splat(o)
                    for i in range(0, padded, LANES):
                        store(values, i, load_codes(codes, first + i) * vs + vo)
                _store_values(values, dtype, out16, out32, row * n + first, count, rest)
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
