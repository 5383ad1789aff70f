"""The page format as a lane of a warp reads it: where an element is, what number it stands for.

A page holds up to 16 tokens. Its codes are two matrices, keys (16 tokens, head_dim) and values transposed
(head_dim, 16), each cut into head_dim / 16 tiles of 16 x 16. Slot s of a page is row s // 2 + 8 (s % 2) of
K's tiles and that column of V's. A warp reads a tile together: of every 32-bit word there are 32, one a lane.
Lane 4 g + u holds 8 elements of a tile, as 4 registers with 2 halves:

    row  g + 8 (register % 2)            column  2 u + half + 8 (register // 2)

so that of a tile of K it has slots 2 g and 2 g + 1. Halves of a word begin at bits 0 and 16. Register r is in
both at

    2 bits    2 tiles, 1 word     bit 8 (r // 2) + 2 (r % 2), 4 later for the second tile
    3 bits    4 tiles, 3 words    with p = 4 tile + r: bit 1 + 3 (p % 5) of word p // 5; of p = 15, bit j is
                                  bit 0 of word j. Tiles that four do not divide: as 4 bits
    4 bits    1 tile, 1 word      bit 4 r
    8 bits    1 tile, 2 words     bit 8 (r % 2) of word r // 2
    width 16  1 tile, 4 words     word r (float32: 8 words, word 2 r + half)

A code c stands for n = 2 c - (2**bits - 1), times a scale. Keys of a profile have a width for each quarter of
their channels, a *block*, in an order of the head: neighbouring blocks of one width are tiles as above, those
of the widest first, and n counts `FACTORS[width]` scales. A block of width 0 has no codes.

Codes are multiplied as bytes (`cuda/integers.py`):
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

int32, uint16, uint32, float16, float32 = np.int32, np.uint16, np.uint32, np.float16, np.float32

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

BLOCKS = 4
"""Blocks of channels of keys in a ladder with profiles."""

FACTORS = {2: 32, 4: 12, 8: 1}
"""Half a cell of each width in a profile, in scales."""

HALVES = uint32(0x00010001)
"""The lowest bit of both halves of a word."""


def stored_bits(bits, dtype):
    """Return how many bits an element of width `bits` takes: those of the cache's dtype at width 16."""
    return 32 if bits == 16 and dtype == "float32" else bits


def words_of_side(bits, dtype, head_dim):
    """Return how many words the codes of a side of a page take: those of the lanes side by side."""
    return (head_dim // 16 * stored_bits(bits, dtype) + 3) // 4 * 32


def tile_words(bits, dtype):
    """Return into how many words `load_tile_of` puts what a lane has of a tile."""
    return max(1, stored_bits(bits, dtype) // 4)


def load_tile_of(bits, dtype, head_dim):
    """Make the device function that puts what a lane has of a tile into words[to], ...

    `at` is the lane's first word of a side of a page. Coded tiles come with the columns in the order of the
    bytes, as above.
    """
    each, in_fours = tile_words(bits, dtype), head_dim // 64 * 4
    some_alone = in_fours < head_dim // 16

    @device
    def load_tile(memory, at, tile, words, to):
        for i in range(each):
            words[to + i] = memory[at + 32 * (each * tile + i)]

    @device
    def load_one_of_two(memory, at, tile, words, to):
        words[to] = memory[at + 32 * (tile >> 1)] >> uint32(4 * (tile & 1))

    @device
    def load_one_of_four(memory, at, tile, words, to):
        """Tile i of four begins with the last i pairs of word i - 1; the rest are the first of word i."""
        if some_alone and tile >= in_fours:
            alone = memory[at + 32 * (tile - in_fours // 4)]
            words[to] = ((alone << uint32(1)) & uint32(0x0E0E0E0E)) | (alone & uint32(0xF0F0F0F0))
        else:
            first_word, i = at + 96 * (tile >> 2), tile & 3
            if i < 3:
                rest = memory[first_word + 32 * i]
            else:
                rest = memory[first_word] & HALVES
                rest |= (memory[first_word + 32] & HALVES) << uint32(1)
                rest |= (memory[first_word + 64] & HALVES) << uint32(2)
                rest <<= uint32(1)
            first = memory[first_word + 32 * max(i - 1, 0)] >> uint32(15 - 3 * i)
            firsts = HALVES * uint32((2 << (3 * i)) - 2)
            word = (first & firsts) | ((rest << uint32(3 * i)) & ~firsts)
            words[to] = by_columns(word, word << uint32(2))

    @device
    def load_two_rows(memory, at, tile, words, to):
        left, right = memory[at + 64 * tile], memory[at + 64 * tile + 32]
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
def count_of(counts, page):
    """Return how many tokens a page of a quad holds, from the word with the counts of all four."""
    return int32((counts >> uint32(8 * page)) & uint32(0xFF))


@device
def scale_of(word, slot):
    """Return the scale of a slot from the word of four: a float16 without sign and lower 7 bits."""
    byte = (word >> uint32(8 * (slot & 3))) & uint32(0xFF)
    return from_float16(byte << uint32(7))
