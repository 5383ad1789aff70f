"""One group of a codec on the CPU: from values to scale and offset, and from those to codes.

A group is the elements that share a scale, in a float32 buffer padded to whole vectors. Its work has two
phases, so that the kernels of `cpu_codec` can run the first over many groups before the second: what waits
for the end of a reduction in one group is then hidden behind the next group. Between them, eight groups at a
time, stands `find_scales`, the rule by which a scale and an offset become 16-bit words.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cpu_simd import (
    F16X8,
    F32X8,
    I16X8,
    I32X8,
    LANES,
    bits_of,
    butterflies,
    float32x8,
    float_of_bits,
    float_of_half,
    helper,
    highest,
    load,
    lowest,
    magnitude,
    maximum,
    minimum,
    narrow_bfloat,
    pointer_to,
    splat,
    splat_i32,
    store,
    store_codes,
    store_unaligned,
    total,
    where,
)

AFFINE, SYMMETRIC, HADAMARD, TERNARY = range(4)

WIDE = np.uint16(0x8000)
"""Mark in the word of a scale: it and the offset are bfloat16."""

NAN_WORD = np.uint16(0x7E00)
"""Scale of a group that cannot be represented: it holds a NaN, an infinity or a magnitude above 2**126."""

_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_MINUS_ONE = np.float32(-1)
_NARROW_FROM, _NARROW_TO = np.float32(2.0**-14), np.float32(32752)
_TOO_LARGE = np.nextafter(np.float32(2.0**126), np.float32(np.inf))
_NAN = np.float32(np.nan)
_TERNARY_LEVEL = np.float32(1.2240064)


@helper
def pad(count):
    """Return the number of elements in whole vectors."""
    return (count + LANES - 1) // LANES * LANES


# ---------------------------------------------------------------------------------------------------------
# Words: scale and offset in 16 bits
# ---------------------------------------------------------------------------------------------------------


def _make_rounding(emit):
    @intrinsic
    def rounding(typing_context, value):
        def generate(context, builder, signature, arguments):
            return emit(builder, arguments[0])

        return float32x8(float32x8), generate

    return rounding


def _emit_bfloat_nearest(builder, value):
    words = builder.zext(narrow_bfloat(builder, value), I32X8)
    return builder.bitcast(builder.shl(words, splat_i32(16)), F32X8)


def _emit_bfloat_up(builder, value):
    """Cut the low bits, and add one in the last place if that lowered the value."""
    bits = builder.bitcast(value, I32X8)
    lost = builder.icmp_unsigned("!=", builder.and_(bits, splat_i32(0xFFFF)), splat_i32(0))
    lowered = builder.and_(lost, builder.fcmp_ordered(">", value, ir.Constant(F32X8, [0.0] * LANES)))
    cut = builder.and_(bits, splat_i32(0xFFFF0000))
    return builder.bitcast(builder.select(lowered, builder.add(cut, splat_i32(0x10000)), cut), F32X8)


def _emit_half_nearest(builder, value):
    return builder.fpext(builder.fptrunc(value, F16X8), F32X8)


def _emit_half_up(builder, value):
    """Take the nearest, or its upper neighbour (whose bits are one more above 0, one less below)."""
    half = builder.fptrunc(value, F16X8)
    bits = builder.bitcast(half, I16X8)
    negative = builder.icmp_signed("<", bits, ir.Constant(I16X8, [0] * LANES))
    one, minus_one = ir.Constant(I16X8, [1] * LANES), ir.Constant(I16X8, [-1] * LANES)
    above = builder.add(bits, builder.select(negative, minus_one, one))
    lowered = builder.fcmp_ordered("<", builder.fpext(half, F32X8), value)
    return builder.fpext(builder.bitcast(builder.select(lowered, above, bits), F16X8), F32X8)


_bfloat_nearest, _bfloat_up, _half_nearest, _half_up = map(
    _make_rounding, (_emit_bfloat_nearest, _emit_bfloat_up, _emit_half_nearest, _emit_half_up)
)


@helper
def _round_to_nearest(value, wide):
    return where(wide, _bfloat_nearest(value), _half_nearest(value))


@helper
def _round_up(value, wide):
    return where(wide, _bfloat_up(value), _half_up(value))


@intrinsic
def store_words(typing_context, row, index, value, wide):
    """Write eight bfloat16 (where wide is not 0) or float16 words; any NaN is written as 0x7E00."""

    def generate(context, builder, signature, arguments):
        array, first, value, wide = arguments
        is_wide = builder.fcmp_unordered("!=", wide, ir.Constant(F32X8, [0.0] * LANES))
        half = builder.bitcast(builder.fptrunc(value, F16X8), I16X8)
        words = builder.select(is_wide, narrow_bfloat(builder, value), half)
        is_nan = builder.fcmp_unordered("uno", value, value)
        words = builder.select(is_nan, ir.Constant(I16X8, [0x7E00] * LANES), words)
        pointer = pointer_to(context, builder, signature.args[0], array, first, I16X8)
        store_unaligned(builder, words, pointer)
        return context.get_dummy_value()

    return types.void(row, types.intp, float32x8, float32x8), generate


@helper
def find_scales(codec, top, half_levels, facts, count, words):
    """Turn what the first phase found in `count` groups into words, and into the numbers these stand for.

    facts : float32 (4, pad(count)). In: rows 0 and 1 are lowest and highest value (AFFINE), unused and
        largest magnitude (SYMMETRIC), step and largest magnitude (HADAMARD, TERNARY).
        Out: rows 2 and 3 are scale and offset.
    words : uint16 (2, pad(count)): scale and, for AFFINE, offset
    """
    zero, one, two, minus = splat(_ZERO), splat(_ONE), splat(_TWO), splat(_MINUS_ONE)
    for k in range(0, count, LANES):
        a, b = load(facts[0], k), load(facts[1], k)
        if codec == AFFINE:
            largest = maximum(a * minus, b)
            size = largest
        else:
            largest = b
            size = b / splat(half_levels) if codec == SYMMETRIC else a
        known = splat(_TOO_LARGE) > largest
        wide = (size > splat(_NARROW_TO)) + (splat(_NARROW_FROM) > size) * (size > zero)
        step, offset, reach, reachable = size, zero, zero, zero
        if codec == AFFINE:
            offset = where(known, _round_up(a * minus, wide) * minus, splat(_NAN))
            store_words(words[1], k, offset, wide)
            reach, reachable = b - offset, splat(top + _HALF)
            step = reach / splat(top)
        elif codec == SYMMETRIC:
            reach, reachable = largest, splat((top + _ONE) * _HALF)
        nearest = _round_to_nearest(step, wide)
        scale = where(reach > reachable * nearest, _round_up(step, wide), nearest)
        scale = where(known, scale, splat(_NAN))
        store_words(words[0], k, scale * (one - two * wide), wide)
        store(facts[2], k, scale)
        store(facts[3], k, scale * splat(top * -_HALF) if codec == SYMMETRIC else offset)


@helper
def word_value(word, wide):
    """Return the number that 16 bits stand for: a bfloat16 if wide, else a float16."""
    if wide:
        return float_of_bits(np.uint32(word) << np.uint32(16))
    return float_of_half(word)


# ---------------------------------------------------------------------------------------------------------
# First phase: what a group needs to know of its values
# ---------------------------------------------------------------------------------------------------------


@helper
def measure_range(values, start, count):
    """Return the lowest and the highest value, NaN if an element is not finite; fills up the last vector."""
    for i in range(start + count, start + pad(count)):
        values[i] = values[start]
    low = high = load(values, start)
    check = low - low
    for i in range(start + LANES, start + count, LANES):
        x = load(values, i)
        low, high, check = minimum(x, low), maximum(x, high), check + (x - x)
    nothing = total(check)
    return lowest(low) + nothing, highest(high) + nothing


@helper
def measure_magnitude(values, start, count):
    """Return the largest magnitude, NaN if an element is not finite."""
    high = check = splat(_ZERO)
    for i in range(start, start + count, LANES):
        x = load(values, i)
        high, check = maximum(magnitude(x), high), check + (x - x)
    return highest(high) + total(check)


@helper
def root_mean_square(values, start, count, largest, squares):
    """Return sqrt(mean of squares): summed by halves, after a division by a power of two near `largest`."""
    exponent = max(bits_of(largest) >> np.uint32(23), np.uint32(1))
    down = splat(float_of_bits(np.uint32((np.uint32(254) - exponent) << np.uint32(23))))
    left = pad(count)
    for i in range(0, left, LANES):
        y = load(values, start + i) * down
        store(squares, i, y * y)
    h = LANES
    while h < left:
        h *= 2
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

    `block` is the largest power of two that divides `count`. Butterflies run at distance h = 1, 2, 4, ...
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
def rotate(values, start, count):
    """Apply the orthonormal block Hadamard transform to values[start:start + count]."""
    block = count & -count
    hadamard_run(values, start, count, block)
    factor = splat(np.float32(1 / np.sqrt(np.float64(block))))
    for i in range(start, start + count, LANES):
        store(values, i, load(values, i) * factor)


# ---------------------------------------------------------------------------------------------------------
# Second phase: codes. Whole vectors are written, up to 7 bytes beyond the group.
# ---------------------------------------------------------------------------------------------------------


@helper
def round_to_codes(values, start, count, scale, offset, top, codes, first):
    """AFFINE and SYMMETRIC: the nearest of the equally spaced values, ties to even."""
    s, o, zero, t = splat(scale), splat(offset), splat(_ZERO), splat(top)
    for i in range(0, count, LANES):
        code = (load(values, start + i) - o) / s
        store_codes(codes, first + i, minimum(maximum(code, zero), t))


@helper
def count_thresholds(values, start, count, scale, thresholds, scaled, codes, first):
    """HADAMARD: the number of thresholds below the magnitude, up or down from the middle by the sign."""
    for k in range(thresholds.size):
        scaled[k] = thresholds[k] * scale
    zero, one, two, middle = splat(_ZERO), splat(_ONE), splat(_TWO), splat(np.float32(thresholds.size + 1))
    for i in range(0, count, LANES):
        y = load(values, start + i)
        size, above = magnitude(y), zero
        for k in range(thresholds.size):
            above = above + (size > splat(scaled[k]))
        store_codes(codes, first + i, middle + above - (zero > y) * (two * above + one))


@helper
def round_to_ternary(values, start, count, scale, codes, first):
    """TERNARY: -1, 0 or 1 as int8, by comparison with half the scale."""
    border, minus = splat(scale * _HALF), splat(scale * -_HALF)
    for i in range(0, count, LANES):
        x = load(values, start + i)
        store_codes(codes, first + i, (x > border) - (minus > x))
