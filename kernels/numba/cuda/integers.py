"""Codes of packed pages times integers: `dp2a`, and numbers as integers of a unit of their own.

A code c stands for n = 2 c - m, m being 2**bits - 1. Codes are multiplied as the bytes they are: `dp2a`
multiplies two of them by two integers of 16 bits and adds that to one of 32. Queries and probabilities become
such integers: a number is h units, h being 14 bits and a sign. What is multiplied is x = 2 h, so that

    sum of h n = sum of x c - m (sum of h)

is exact: sums begin at the last term. The unit is that of a whole query row, or of the probabilities that one
lane takes of a page: relative to the largest of a page, small ones keep their weight in a long sequence.
14 bits are more than the 8 or 11 of bfloat16 and float16; float32 caches add a second piece of 14.
"""

import numpy as np

from .page import SIMULATED, device

uint32, float32 = np.uint32, np.float32

if SIMULATED:

    def _dot(half):
        def dot(pair, codes, total):
            first, second = (int(pair) & 0xFFFF ^ 0x8000) - 0x8000, (int(pair) >> 16 ^ 0x8000) - 0x8000
            two_codes = int(codes) >> 16 * half
            return np.int32(int(total) + first * (two_codes & 0xFF) + second * (two_codes >> 8 & 0xFF))

        return dot

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    def _dot(half):
        def generate(context, builder, signature, arguments):
            word = ir.IntType(32)
            kind = ir.FunctionType(word, [word] * 3)
            mode = ("lo", "hi")[half]
            assembly = ir.InlineAsm(kind, f"dp2a.{mode}.s32.u32 $0, $1, $2, $3;", "=r,r,r,r")
            return builder.call(assembly, arguments)

        def dot(context, pair, codes, total):
            return types.int32(types.uint32, types.uint32, types.int32), generate

        return intrinsic(dot)


first_dot, second_dot = _dot(0), _dot(1)
"""total + the two numbers of `pair`, signed 16 bits each, times bytes 0 and 1, or 2 and 3, of `codes`."""

MAX_FIXED_POINT = 16383
"""Largest h: that of an even integer of 16 bits."""

MAGIC = float32(1.5 * 2**23)
"""A float32 that is added to a number rounds it to an integer, which its lower bits then are."""

PIECE = float32(2.0**-14)
"""Of a second h, which counts what rounding took from the first, against the first."""

SMALLEST = float32(2.0**-90)
"""Numbers are integers relative to the largest of them, or to this one."""

MAGNITUDE = uint32(0x7FFFFFFF)
"""All bits of a float32 but its sign; as integers, magnitudes are in the same order."""


def pieces_of(dtype):
    """Return how many h a number is split into: two make the 24 bits of a float32 cache."""
    return 2 if dtype == "float32" else 1


@device
def nearest(x):
    """Return the integer nearest to x, a float32 between -2**22 and 2**22."""
    return float32(float32(x + MAGIC) - MAGIC)


@device
def pair_of(a, b):
    """Return twice the integers nearest to a and b as the two numbers of a `pair`."""
    low, high = float32(a + MAGIC).view(uint32), float32(b + MAGIC).view(uint32)
    return uint32(((low << uint32(1)) & uint32(0xFFFE)) | (high << uint32(17)))


@device
def unit_of(magnitude):
    """Return the unit in which h count numbers up to the one with these bits, and 1 / unit; without dividing.

    Between the powers of 2 around that number, 2**e and 2**(e + 1), unit is 2**(e + 1) / MAX_FIXED_POINT. If
    there is a NaN or an infinity among the numbers, it is NaN, as h cannot be.
    """
    power = (magnitude & uint32(0x7F800000)) - uint32(127 << 23)
    unit = uint32(float32(2 / MAX_FIXED_POINT).view(uint32) + power).view(float32)
    inverse = uint32(float32(MAX_FIXED_POINT / 2).view(uint32) - power).view(float32)
    return unit + float32(0) * magnitude.view(float32), inverse
