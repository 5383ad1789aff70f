"""Scales and offsets on the CPU: 16-bit words, eight groups at a time.

What a scale and an offset are is said in kvlab/reference/codec.py. A word is a float16, or a bfloat16 if the
sign bit of the scale is set; rounding is to nearest for scales, and up where that is asked for.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import (
    F16X8,
    F32X8,
    I16X8,
    I32X8,
    LANES,
    float32x8,
    float_of_bits,
    float_of_half,
    helper,
    load,
    maximum,
    narrow_bfloat,
    pointer_to,
    splat,
    splat_i32,
    store,
    store_unaligned,
    where,
)

AFFINE, SYMMETRIC, HADAMARD, TERNARY = range(4)

WIDE = np.uint16(0x8000)
"""Mark in the word of a scale: it and the offset are bfloat16."""

NAN_WORD = np.uint16(0x7E00)
"""Scale of a group that cannot be represented: it holds a NaN, an infinity or a magnitude above 2**126."""

_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_MINUS_ONE, _NAN = np.float32(-1), np.float32(np.nan)
_NARROW_FROM, _NARROW_TO = np.float32(2.0**-14), np.float32(32752)
_TOO_LARGE = np.nextafter(np.float32(2.0**126), np.float32(np.inf))


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
def find_scales(codec, top, half_levels, stats, count, words):
    """Turn what the first phase found in `count` groups into words, and into the numbers these stand for.

    stats : float32 (4, pad(count)). In: rows 0 and 1 are lowest and highest value (AFFINE), unused and
        largest magnitude (SYMMETRIC), step and largest magnitude (HADAMARD, TERNARY).
        Out: rows 2 and 3 are scale and offset.
    words : uint16 (2, pad(count)): scale and, for AFFINE, offset
    """
    zero, one, two, minus = splat(_ZERO), splat(_ONE), splat(_TWO), splat(_MINUS_ONE)
    for k in range(0, count, LANES):
        a, b = load(stats[0], k), load(stats[1], k)
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
        store(stats[2], k, scale)
        store(stats[3], k, scale * splat(top * -_HALF) if codec == SYMMETRIC else offset)


@helper
def word_value(word, wide):
    """Return the number that 16 bits stand for: a bfloat16 if wide, else a float16."""
    if wide:
        return float_of_bits(np.uint32(word) << np.uint32(16))
    return float_of_half(word)
