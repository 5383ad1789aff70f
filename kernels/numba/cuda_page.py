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

A code c stands for (2 c + 1 - 2**bits) * step. Read as a float32, the bits of the integer 2 c are the
denormal number 2 c * 2**-149, with which a GPU computes as fast as with any other: one subtraction makes it
the odd integer of the grid, exactly, in units of `UNIT`.
"""

import os

import numpy as np
from numba import cuda

uint16, uint32, float16, float32 = np.uint16, np.uint32, np.float16, np.float32

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0"
"""Whether this runs in Numba's CUDA simulator, which takes fewer options."""

device = cuda.jit(device=True) if SIMULATED else cuda.jit(device=True, forceinline=True)
"""Decorator of device functions. Once they are inlined, loops of constant length unroll and local arrays with
constant indices become registers."""

ALIGNED = None if SIMULATED else 16
"""Alignment of shared arrays that are read 16 bytes at a time."""

UNIT = 2.0**-149
"""The smallest float32, and the unit in which `coded_element` gives odd integers."""

BIAS = float32(2.0**112)
"""Between the exponents of float16 and float32."""

TILES_THAT_SHARE = {2: 2, 3: 4}
"""How many tiles share words, where it is not one."""


def stored_bits(bits, dtype):
    """Return how many bits an element of width `bits` takes: those of the cache's dtype at width 16."""
    return 32 if bits == 16 and dtype == "float32" else bits


def words_of_tiles(bits):
    """Return how many words a lane has of the tiles that share words; `bits` are those stored."""
    return TILES_THAT_SHARE.get(bits, 1) * bits // 4


def coded_element(bits, spread=True):
    """Make the device function that reads an element of 2, 3, 4 or 8 bits as an odd integer times `UNIT`.

    `spread`: whether pair 15 is among those it is asked for.
    """
    tiles, words = TILES_THAT_SHARE.get(bits, 1), words_of_tiles(bits)
    spread = spread and bits == 3
    shared = tiles.bit_length() - 1
    mask = uint32(2 ** (bits + 1) - 2)
    middle = float32((2**bits - 1) * UNIT)

    @device
    def element(memory, at, first, inside, register, half):
        """Read from tile first + inside; `first` begins shared words. `at`: the lane's first word."""
        at += 32 * words * (first >> shared)
        pair = 4 * inside + register
        if spread and pair == 15:
            bit0 = (memory[at] >> uint32(16 * half)) & uint32(1)
            bit1 = (memory[at + 32] >> uint32(16 * half)) & uint32(1)
            bit2 = (memory[at + 64] >> uint32(16 * half)) & uint32(1)
            twice = uint32((bit0 << uint32(1)) | (bit1 << uint32(2)) | (bit2 << uint32(3)))
        elif bits == 3:
            number = pair * 13 >> 6  # pair // 5 for pairs up to 15, cheaper
            word = memory[at + 32 * number]
            twice = uint32((word >> uint32(3 * (pair - 5 * number) + 16 * half)) & mask)
        elif bits == 2:
            word = uint32(memory[at] >> uint32(8 * inside))
            twice = uint32(((word >> uint32(2 * register + 16 * half)) << uint32(1)) & mask)
        else:
            bit = 4 * register if bits == 4 else 8 * (register & 1)
            word = memory[at + 32 * (register >> 1)] if bits == 8 else memory[at]
            twice = uint32(((word >> uint32(bit + 16 * half)) << uint32(1)) & mask)
        return twice.view(float32) - middle

    return element


def raw_element(dtype):
    """Make the device function that reads an element of width 16: the dtype of the cache, unchanged."""
    if dtype == "float32":

        @device
        def element(memory, at, first, inside, register, half):
            return uint32(memory[at + 32 * (8 * first + 2 * register + half)]).view(float32)

        return element

    widen = widened(dtype)

    @device
    def half_element(memory, at, first, inside, register, half):
        return widen(memory[at + 32 * (4 * first + register)] >> uint32(16 * half))

    return half_element


def element_of(bits, dtype, spread=True):
    """Make the device function that reads an element of width `bits`; `spread` as for `coded_element`."""
    return raw_element(dtype) if bits == 16 else coded_element(bits, spread)


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
def step_of(memory, at, slot):
    """Return the step of a slot: its byte is a float16 without sign and without its lower 7 bits."""
    byte = (memory[at + slot // 4] >> uint32(8 * (slot % 4))) & uint32(0xFF)
    return from_float16(byte << uint32(7))
