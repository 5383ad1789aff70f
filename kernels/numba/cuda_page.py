"""The page format, version 1, as a lane of a warp reads it: where an element is, what number it stands for.

A code region holds the matrix of a page, keys as (64 tokens, head_dim), values transposed as (head_dim, 64),
cut into tiles of 16 x 16. K tile b * (head_dim / 16) + c and V tile c * 4 + b hold the block b of 16 tokens
and the block c of 16 channels. Token t of block b (0 to 15) is that of slot 8 (t % 8) + 2 b + t // 8, so what
one lane has of all K tiles are 8 slots side by side. A warp reads a tile together: of every 32-bit word there
are 32, one a lane. Lane 4 g + u holds 8 elements of a tile, as 4 registers with 2 halves:

    row  g + 8 (register % 2)            column  2 u + half + 8 (register // 2)

Narrow elements of several tiles share words. Pair p = 4 (tile % tiles that share) + register, the same in
both halves of a word, which begin at bits 0 and 16, is at

    2 bits    2 tiles, 1 word     bit 2 p
    3 bits    4 tiles, 3 words    bit 1 + 3 (p % 5) of word p // 5; of pair 15, bit j is bit 0 of word j
    4 bits    1 tile, 1 word      bit 4 p
    8 bits    1 tile, 2 words     bit 8 (p % 2) of word p // 2
    width 16  1 tile, 4 words     word p (float32: 8 words, word 2 p + half)

A code c stands for n = 2 c - m, m being 2**bits - 1, times a step. Masked out of its word where it is, c is
read as a float32: a denormal number, c * 2**(bit - 149), with which a GPU computes as fast as with any other.
So a code takes one instruction; all else is done to the factors x of the columns, of which there are fewer:

    sum of x n = 2 (sum of x c) - m (sum of x)

Codes of odd columns are complemented, which makes n negative, and their x are, too: so the sum of x is small,
and both sums are as exact as the difference has to be.
"""

import os

import numpy as np
from numba import cuda

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0"
"""Whether this runs in Numba's CUDA simulator, which takes fewer options."""

uint16, uint32, float16, float32 = np.uint16, np.uint32, np.float16, np.float32

if SIMULATED:

    def ask_for(pointer, index):
        """Do nothing: a simulated memory has no caches."""

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def ask_for(context, pointer, index):
        """Bring what pointer[index] is part of to the second-level cache, without waiting for it."""

        def generate(context, builder, signature, arguments):
            address = builder.gep(arguments[0], [arguments[1]])
            kind = ir.FunctionType(ir.VoidType(), [address.type])
            builder.call(ir.InlineAsm(kind, "prefetch.global.L2 [$0];", "l", side_effect=True), [address])
            return context.get_dummy_value()

        return types.void(pointer, index), generate


device = cuda.jit(device=True) if SIMULATED else cuda.jit(device=True, forceinline=True)
"""Decorator of device functions. Once they are inlined, loops of constant length unroll and local arrays with
constant indices become registers."""

ALIGNED = None if SIMULATED else 16
"""Alignment of shared arrays that are read 16 bytes at a time."""

LIFT = 60
"""Exponent by which x are raised, so that their products with denormal numbers are none."""

SUNK = 149 - LIFT
"""Exponent by which sums of such products are raised in the end."""

EXACT_LIFT = 100
"""How much of both is done to the codes where these are made exact."""

BIAS = float32(2.0**112)
"""Between the exponents of float16 and float32."""

TILES_THAT_SHARE = {2: 2, 3: 4}
"""How many tiles share words, where it is not one."""

HALVES = uint32(0x00010001)
"""The lowest bit of both halves of a word."""


def stored_bits(bits, dtype):
    """Return how many bits an element of width `bits` takes: those of the cache's dtype at width 16."""
    return 32 if bits == 16 and dtype == "float32" else bits


def words_of_tiles(bits, dtype):
    """Return how many words a lane has of the tiles that share words."""
    return TILES_THAT_SHARE.get(bits, 1) * stored_bits(bits, dtype) // 4


def tile_words(bits, dtype):
    """Return into how many words `load_tile_of` puts what a lane has of a tile."""
    return max(1, stored_bits(bits, dtype) // 4)


def load_tile_of(bits, dtype):
    """Make the device function that puts what a lane has of a tile into words[to], ...

    `at` is the lane's first word of the tiles that share words, `inside` which of them it is, `last` whether
    it is the last of four. They are moved, so that the pair of register r has the same place in all of them.
    """
    each = tile_words(bits, dtype)

    @device
    def load_tile(memory, at, inside, last, words, to):
        for i in range(each):
            words[to + i] = memory[at + 32 * i]

    @device
    def load_one_of_two(memory, at, inside, last, words, to):
        words[to] = memory[at] >> uint32(8 * inside)

    @device
    def load_one_of_four(memory, at, inside, last, words, to):
        """Tile i begins with the last i pairs of word i - 1; the rest are the first of word i."""
        if not last:
            rest = memory[at + 32 * inside]
        else:
            rest = memory[at] & HALVES
            rest |= (memory[at + 32] & HALVES) << uint32(1)
            rest |= (memory[at + 64] & HALVES) << uint32(2)
            rest <<= uint32(1)
        first = memory[at + 32 * max(inside - 1, 0)] >> uint32(15 - 3 * inside)
        firsts = HALVES * uint32((2 << (3 * inside)) - 2)
        words[to] = (first & firsts) | ((rest << uint32(3 * inside)) & ~firsts)

    return {2: load_one_of_two, 3: load_one_of_four}.get(bits, load_tile)


def element_of(bits, dtype, move):
    """Make the device function that takes an element from the words of a tile.

    A code comes as a denormal number, complemented in odd columns; in `is_exact` caches as n / 2, normal.
    Those of odd registers, which are other rows, weigh 2**bits times as much, unless `move` is 1.
    """
    if bits == 16:
        return raw_element(dtype)
    mask, first_bit, pairs, exact = 2**bits - 1, int(bits == 3), min(4, 16 // bits), is_exact(dtype)
    middle = float32(mask * 2.0 ** (EXACT_LIFT - 150))

    @device
    def element(words, at, register, half):
        moved = register & move
        word = words[at + register // pairs] >> uint32(16 * half + bits * moved)
        if half:
            word = ~word
        bit = first_bit + bits * (register % pairs - moved)
        code = uint32(word & uint32(mask << bit)).view(float32)
        if exact:
            return code * power_of_two(EXACT_LIFT) - middle * power_of_two(bit)
        return code

    return element


def is_exact(dtype):
    """Return whether codes are made n / 2 by a second instruction, so that the sum of x is not needed.

    That sum costs the last bit of a float32, which counts only if the cache is of that dtype.
    """
    return dtype == "float32"


@device
def factor_of(bits, column, exact):
    """Return what x of a column is multiplied by: undoes what bit its codes are at, and takes them twice."""
    first_bit, later = 1 if bits == 3 else 0, 2 * bits if column >= 8 and bits < 8 else 0
    return power_of_two(LIFT + 1 - first_bit - later - (EXACT_LIFT if exact else 0))


def raw_element(dtype):
    """Make the device function that takes an element of width 16: the dtype of the cache, unchanged."""
    if dtype == "float32":

        @device
        def element(words, at, register, half):
            return uint32(words[at + 2 * register + half]).view(float32)

        return element

    widen = widened(dtype)

    @device
    def half_element(words, at, register, half):
        return widen(words[at + register] >> uint32(16 * half))

    return half_element


@device
def largest_code(bits):
    """Return 2**bits - 1 as a float32."""
    return float32((1 << bits) - 1)


@device
def power_of_two(exponent):
    """Return 2**exponent, -126 to 127."""
    return uint32((127 + exponent) << 23).view(float32)


@device
def from_float16(bits):
    """Return what the lower 16 bits of an integer are as a float16; Numba has no such view of an integer.

    Mantissa and exponent moved to those of a float32 are the number times 2**-112, denormal ones included;
    only infinity and NaN need the exponent of a float32.
    """
    magnitude = uint32((uint32(bits) & uint32(0x7FFF)) << uint32(13))
    sign = uint32((uint32(bits) & uint32(0x8000)) << uint32(16))
    x = magnitude.view(float32) * BIAS
    if magnitude >= uint32(0x7C00 << 13):
        x = uint32(magnitude | uint32(0x7F800000)).view(float32)
    return uint32(x.view(uint32) | sign).view(float32)


def widened(dtype):
    """Make the device function that turns the (lower) bits of an integer into the float32 they stand for."""
    if dtype == "float32":

        @device
        def from_float32(bits):
            return uint32(bits).view(float32)

        return from_float32
    if dtype == "bfloat16":

        @device
        def from_bfloat16(bits):
            return uint32((uint32(bits) & uint32(0xFFFF)) << uint32(16)).view(float32)

        return from_bfloat16

    return from_float16


def narrowed(dtype):
    """Make the device function that rounds a float32 to `dtype`, half to even, and returns its bits."""
    if dtype == "float32":

        @device
        def to_float32(x):
            return x.view(uint32)

        return to_float32
    if dtype == "bfloat16":

        @device
        def to_bfloat16(x):
            bits = x.view(uint32)
            if x != x:
                return uint16((bits >> uint32(16)) | uint32(0x40))
            odd = (bits >> uint32(16)) & uint32(1)
            return uint16((bits + uint32(0x7FFF) + odd) >> uint32(16))

        return to_bfloat16

    @device
    def to_float16(x):
        return float16(x).view(uint16)

    return to_float16


@device
def step_of(word, slot):
    """Return the step of a slot from the word with those of four: a float16 without sign and lower 7 bits."""
    byte = (word >> uint32(8 * (slot & 3))) & uint32(0xFF)
    return from_float16(byte << uint32(7))
