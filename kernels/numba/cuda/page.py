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

A code c stands for n = 2 c - (2**bits - 1), times a step. Codes are multiplied as bytes (`cuda/integers.py`):
`load_tile_of` makes words that have both rows of a tile, in fields of which a mask leaves one. Byte 0 is
column 2 u, byte 1 column 2 u + 8, bytes 2 and 3 are one column later:

    2 bits    row g at bit 0 of a byte, row g + 8 at bit 2        4 bits    at bits 0 and 4
    3 bits    at bits 1 and 4                                     8 bits    a word for each row
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
    it is the last of four. Coded tiles come with the columns in the order of the bytes, as above.
    """
    each = tile_words(bits, dtype)

    @device
    def load_tile(memory, at, inside, last, words, to):
        for i in range(each):
            words[to + i] = memory[at + 32 * i]

    @device
    def load_one_of_two(memory, at, inside, last, words, to):
        word = memory[at] >> uint32(8 * inside)
        words[to] = by_columns(word, word << uint32(4))

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
        word = (first & firsts) | ((rest << uint32(3 * inside)) & ~firsts)
        words[to] = by_columns(word, word << uint32(2))

    @device
    def load_two_rows(memory, at, inside, last, words, to):
        left, right = memory[at], memory[at + 32]
        words[to] = by_columns(left, right << uint32(8))
        words[to + 1] = by_columns(left >> uint32(8), right)

    return {2: load_one_of_two, 3: load_one_of_four, 8: load_two_rows}.get(bits, load_tile)


@device
def by_columns(left, right):
    """Return bytes 0 and 2 of one word, 1 and 3 of another."""
    return uint32((left & uint32(0x00FF00FF)) | (right & uint32(0xFF00FF00)))


def codes_of(bits):
    """Make the device function that returns four codes of a row of a tile, as bytes, from its words.

    They are 2**shift times what they are, by `field_shift`.
    """
    mask = (2**bits - 1) * 0x01010101

    @device
    def codes(words, at, later):
        if bits == 8:
            return words[at + later]
        return uint32(words[at] & uint32(mask << field_shift(bits, later)))

    return codes


@device
def field_shift(bits, later):
    """Return the bit at which a byte has the codes of row g, or of row g + 8 (later)."""
    return (1 if bits == 3 else 0) + (bits if later and bits < 8 else 0)


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
