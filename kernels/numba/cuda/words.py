"""Codecs on a GPU in Numba: elements, and scales and offsets as 16-bit words.

What a scale and an offset are is said in kvlab/reference/codec.py. A word is a float16, or a bfloat16 if the
sign bit of the scale is set. Numbers are taken apart as int64, in which nothing overflows, so that the same
lines run in Numba's simulator; compiled, every product and sum is rounded on its own.
"""

import math

import numpy as np
from numba import cuda, types

uint16, uint32, int64, float16, float32 = np.uint16, np.uint32, np.int64, np.float16, np.float32

device = cuda.jit(device=True)

ELEMENTS = {"float16": types.float16, "bfloat16": types.uint16, "float32": types.float32}
"""What kernels see for each type of element: a bfloat16 as its bits."""

WIDE = 0x8000
NAN_WORD = 0x7E00
LARGEST = float32(2.0**126)
LARGEST_HALF = float32(65504)

_ZERO, _NARROW_FROM, _NARROW_TO = float32(0), float32(2.0**-14), float32(32752)
_UP_24, _ROUNDER = float32(2.0**24), float32(2.0**23)


@device
def bits_of(x):
    return int64(float32(x).view(uint32))


@device
def float_of(bits):
    return uint32(bits).view(float32)


def load_element(dtype):
    """Make the device function that reads element i of x as float32."""
    if dtype == "bfloat16":

        @device
        def load(x, i):
            return float_of(int64(x[i]) << 16)

    else:

        @device
        def load(x, i):
            return float32(x[i])

    return load


def store_element(dtype):
    """Make the device function that rounds a float32 to element i of out; float16 saturates."""
    if dtype == "bfloat16":

        @device
        def store(out, i, value):
            if value != value:
                out[i] = uint16(0x7FC0)
            else:
                bits = bits_of(value)
                out[i] = uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    elif dtype == "float16":

        @device
        def store(out, i, value):
            if value > LARGEST_HALF:
                value = LARGEST_HALF
            elif value < -LARGEST_HALF:
                value = -LARGEST_HALF
            out[i] = float16(value)

    else:

        @device
        def store(out, i, value):
            out[i] = value

    return store


@device
def half_bits(x):
    """Return the bits of the float16 nearest to x, ties to even."""
    sign, size = bits_of(x) >> 31, bits_of(x) & 0x7FFFFFFF
    if size < 0x38800000:  # below 2**-14 float16 is a fixed-point number
        return sign << 15 | (bits_of(float32(float_of(size) * _UP_24) + _ROUNDER) - 0x4B000000)
    return sign << 15 | min(((size + 0xFFF + ((size >> 13) & 1)) >> 13) - 0x1C000, 0x7C00)


@device
def half_value(bits):
    """Return what the bits of a float16 stand for."""
    sign, size = (bits >> 15) & 1, bits & 0x7FFF
    if size >= 0x7C00:
        return float_of(sign << 31 | 0x7F800000 | (size & 0x3FF) << 13)
    if size < 0x400:
        value = float32(float32(size) / _UP_24)
        return -value if sign else value
    return float_of(sign << 31 | ((size << 13) + 0x38000000))


@device
def word_value(word, wide):
    """Return what 16 bits stand for: a bfloat16 if wide, else a float16."""
    return float_of(word << 16) if wide else half_value(word)


@device
def nearest_word(x, wide):
    """Return the bits of the nearest bfloat16 or float16, ties to even; x is finite."""
    if wide:
        bits = bits_of(x)
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return half_bits(x)


@device
def word_above(x, wide):
    """Return the bits of the least bfloat16 or float16 that is not below x."""
    if wide:
        bits = bits_of(x)
        return (bits >> 16) + (1 if x > _ZERO and bits & 0xFFFF else 0)
    bits = half_bits(x)
    if half_value(bits) < x:
        bits += -1 if bits & 0x8000 else 1
    return bits


@device
def is_wide(size):
    """Say whether float16 lacks the range for words of this size."""
    return size > _NARROW_TO or (size < _NARROW_FROM and size > _ZERO)


@device
def scale_word(step, wide, reach, reachable):
    """Round a scale to nearest; up, where `reach` is more than `reachable` times the nearest."""
    nearest = nearest_word(step, wide)
    if reach > float32(reachable * word_value(nearest, wide)):
        return word_above(step, wide)
    return nearest


@device
def square_root(x):
    return float32(math.sqrt(x))
