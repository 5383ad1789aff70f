"""Codecs on a GPU in Numba, bit for bit as kvlab/reference/codec.py, written for reading.

A block takes a group, the elements that share a scale, and after it the one `gridDim` further; thread t takes
the elements t, t + blockDim, ... of it. The float32 values of the group stand where all threads see them: in
shared memory or, if the group is large, in a stretch of `pitch` floats of `scratch`. Sums and butterflies run
in place there, with a barrier of the block after each step. Codes have a byte each; packing is another launch
(`bits`).

Options: dtype and codec, by name; bits; shared; of HADAMARD the codebook: unit and borders, which are whole
numbers, or levels, all ascending.
"""

import math

import numpy as np
from numba import cuda, types

from .bits import BYTES, COUNT, WORD
from .words import (
    ELEMENTS,
    LARGEST,
    NAN_WORD,
    WIDE,
    bits_of,
    device,
    float_of,
    is_wide,
    load_element,
    nearest_word,
    scale_word,
    square_root,
    store_element,
    word_above,
    word_value,
)

uint8, uint16, int8, int32, int64 = np.uint8, np.uint16, np.int8, np.int32, np.int64
float32, float64 = np.float32, np.float64

WORDS, FLOATS = types.CPointer(types.uint16), types.CPointer(types.float32)
BOUNDS = 256, 2
CONTRACT = False
CODECS = "affine", "symmetric", "hadamard", "ternary"

_ZERO, _HALF, _INFINITY = float32(0), float32(0.5), float32(np.inf)
_TERNARY_LEVEL = float32(1.2240064)
_SMALL_SCALE, _GROWTH = float32(2.0**-66), float32(2.0**60)
_ROOT_OF_HALF = float32(np.sqrt(0.5))
_ROUNDER = float32(1.5 * 2**23)  # adding it rounds to an integer, which then is the low byte
_TABLE = 256


@device
def add_halves(values, base, size):
    """Sum `size` values, a power of two, by adding the second half to the first; ends at a barrier."""
    half = size // 2
    while half:
        cuda.syncthreads()  # all terms are there
        for i in range(cuda.threadIdx.x, half, cuda.blockDim.x):
            values[base + i] = values[base + i] + values[base + half + i]
        half //= 2
    cuda.syncthreads()  # the sum is there


@device
def butterflies(values, base, count):
    """Apply the block Hadamard transform without its factor; ends at a barrier."""
    block, h = count & -count, int64(1)
    while h < block:
        cuda.syncthreads()  # all values are there
        for i in range(cuda.threadIdx.x, count // 2, cuda.blockDim.x):
            at = base + ((i // h) * 2 * h + i % h)
            a, b = values[at], values[at + h]
            values[at], values[at + h] = a + b, a - b
        h *= 2
    cuda.syncthreads()  # all values are transformed


@device
def orthonormal_factor(count):
    """Return 1 / sqrt(block), correctly rounded."""
    block, factor = count & -count, float32(1)
    while block >= 4:
        factor, block = factor * _HALF, block // 4
    return factor * _ROOT_OF_HALF if block == 2 else factor


def quantize_groups(dtype, codec, bits, shared, unit=0.0, borders=()):
    """Make the kernel (x, rows, n, group, codes, scale, offset, bad, scratch, pitch)."""

    load = load_element(dtype)
    top, half = float32(2**bits - 1), 2 ** (bits - 1)
    half_levels = float32(half if bits <= 4 else (2**bits - 1) / 2)
    reachable = float32(top + _HALF if codec == "affine" else (top + float32(1)) * _HALF)
    limit = borders[-1] + 1 if borders else 1
    codes_of_units = np.searchsorted(borders, np.arange(-limit, limit), side="right").astype(np.uint8)
    lowest, highest = float(-limit), float(limit - 1)
    unit = float32(unit)
    affine, symmetric, hadamard, ternary = (codec == name for name in CODECS)
    code_type = int8 if ternary else uint8

    def kernel(x, rows, n, group, codes, scale, offset, bad, scratch, pitch):
        table = cuda.const.array_like(codes_of_units)
        if shared:
            values, base = cuda.shared.array(0, types.float32), int64(0)
        else:
            values, base = scratch, cuda.blockIdx.x * pitch
        me, step = cuda.threadIdx.x, cuda.blockDim.x
        lows = cuda.shared.array(_TABLE, types.float32)
        highs = cuda.shared.array(_TABLE, types.float32)
        groups = (n + group - 1) // group
        for index in range(cuda.blockIdx.x, rows * groups, cuda.gridDim.x):
            start = index // groups * n + index % groups * group
            count = min(group, n - index % groups * group)

            # Lowest and highest value of the group; beside AFFINE, the largest magnitude.
            low, high, known = _INFINITY, -_INFINITY, True
            cuda.syncthreads()  # the group before is done
            for i in range(me, count, step):
                value = load(x, start + i)
                values[base + i] = value
                known = known and abs(value) <= LARGEST
                if not affine:
                    value = abs(value)
                if value < low:
                    low = value
                if value > high:
                    high = value
            lows[me], highs[me] = low, high if known else float32(np.nan)
            cuda.syncthreads()  # those of all threads are there
            for i in range(min(step, count)):
                if lows[i] < low:
                    low = lows[i]
                if highs[i] > high:
                    high = highs[i]
                known = known and highs[i] == highs[i]
            low, high = low + _ZERO, high + _ZERO

            # The scale, in one of two types of 16 bits; thread by thread the same.
            o_word, o = int64(0), _ZERO
            if affine:
                wide = is_wide(max(-low, high))
                o_word = word_above(-low, wide) ^ 0x8000
                o = word_value(o_word, wide)
                reach = high - o
                s_word = scale_word(reach / top, wide, reach, reachable)
            elif symmetric:
                width = high / half_levels
                wide = is_wide(width)
                s_word = scale_word(width, wide, high, reachable)
            else:
                exponent = max(bits_of(high) >> 23, 1)
                down, up = float_of((254 - exponent) << 23), float_of(exponent << 23)
                size = int64(1)
                while size < count:
                    size *= 2
                for i in range(me, size, step):
                    square = _ZERO
                    if i < count:
                        square = values[base + i] * down
                        square = square * square
                    values[base + i] = square
                add_halves(values, base, size)
                width = square_root(values[base] / float32(count)) * up
                if ternary:
                    width = width * _TERNARY_LEVEL
                wide = is_wide(width)
                s_word = nearest_word(width, wide)
                cuda.syncthreads()  # all have read the sum
                for i in range(me, count, step):
                    values[base + i] = load(x, start + i)
            s = word_value(s_word, wide)
            if symmetric:
                o = -(s * (top * _HALF))
            growth, inverse = float32(1), _ZERO
            if hadamard:
                butterflies(values, base, count)
                if s < _SMALL_SCALE:
                    growth = _GROWTH
                if s > _ZERO:
                    inverse = unit * orthonormal_factor(count) / (s * growth)

            # Codes.
            for i in range(me, count, step):
                value, code = values[base + i], int64(0)
                if hadamard:
                    units = float64(value * growth) * float64(inverse)
                    if units != units:
                        units = 0.0
                    code = int64(table[int64(math.floor(min(max(units, lowest), highest))) + limit])
                elif ternary:
                    border = s * _HALF
                    code = int64(value > border) - int64(value < -border)
                elif s > _ZERO:
                    quotient = (value - o) / s
                    quotient = min(max(quotient, _ZERO), top)
                    code = bits_of(quotient + _ROUNDER) & 255
                elif value > o:
                    code = int64(top)
                codes[start + i] = code_type(code if known else 0)
            if me == 0:
                scale[index] = uint16((s_word | (WIDE if wide else 0)) if known else NAN_WORD)
                if affine:
                    offset[index] = uint16(o_word if known else NAN_WORD)
                if not known:
                    bad[0] = int32(1)

    codes_type = types.CPointer(types.int8) if ternary else BYTES
    x_type = types.CPointer(ELEMENTS[dtype])
    arguments = (x_type, COUNT, COUNT, COUNT, codes_type, WORDS, WORDS, WORD, FLOATS, COUNT)
    return kernel, arguments, BOUNDS


def dequantize_groups(dtype, codec, bits, shared, levels=()):
    """Make the kernel (codes, rows, n, group, scale, offset, out, scratch, pitch)."""

    store = store_element(dtype)
    half_top = float32((2**bits - 1) / 2)
    table = np.array(levels or (0.0,), np.float32)
    affine, _, hadamard, ternary = (codec == name for name in CODECS)

    def kernel(codes, rows, n, group, scale, offset, out, scratch, pitch):
        level = cuda.const.array_like(table)
        if shared:
            values, base = cuda.shared.array(0, types.float32), int64(0)
        else:
            values, base = scratch, cuda.blockIdx.x * pitch
        me, step = cuda.threadIdx.x, cuda.blockDim.x
        groups = (n + group - 1) // group
        for index in range(cuda.blockIdx.x, rows * groups, cuda.gridDim.x):
            start = index // groups * n + index % groups * group
            count = min(group, n - index % groups * group)
            word = int64(scale[index])
            wide = word & WIDE != 0
            s = word_value(word & ~WIDE, wide)
            o = word_value(int64(offset[index]), wide) if affine else -(s * half_top)
            if hadamard:
                cuda.syncthreads()  # the group before is done
                for i in range(me, count, step):
                    values[base + i] = level[codes[start + i]] * s
                butterflies(values, base, count)
            factor = orthonormal_factor(count)
            for i in range(me, count, step):
                if hadamard:
                    value = values[base + i] * factor
                elif ternary:
                    value = float32(codes[start + i]) * s
                else:
                    value = float32(codes[start + i]) * s + o
                store(out, start + i, value)

    codes_type = types.CPointer(types.int8) if ternary else BYTES
    out_type = types.CPointer(ELEMENTS[dtype])
    return kernel, (codes_type, COUNT, COUNT, COUNT, WORDS, WORDS, out_type, FLOATS, COUNT), BOUNDS


# gate: quantize_groups dtype=float16 codec=affine,symmetric,hadamard bits=4 shared=1 registers<=128
# gate: quantize_groups dtype=bfloat16,float32 codec=affine bits=4 shared=0 registers<=128
# gate: quantize_groups dtype=float16 codec=ternary bits=2 shared=1 registers<=128
# gate: dequantize_groups dtype=float16 codec=affine,symmetric,hadamard bits=4 shared=1 registers<=128
# gate: dequantize_groups dtype=bfloat16,float32 codec=affine bits=4 shared=0 registers<=128
# gate: dequantize_groups dtype=float16 codec=ternary bits=2 shared=1 registers<=128
