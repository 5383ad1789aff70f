"""One side of a packed page as a dense float32 matrix in scratch memory, for products with many query rows.

With a few query rows `fragments` multiplies codes as it expands them. With dozens the same expansion
would be repeated for every four of them, so here it is done once, and the matrices of a quad of pages, 18 KiB
a side at 64 channels, are read from the first-level cache. Nothing else changes: vectors of eight codes hold
2 rows (g) x 4 pairs of columns (u) of a tile of 16 x 16, keys by channels for K and channels by tokens for V.
Neighbouring lanes are stored together, so columns come in another order within sixteen, and so do the rows of
K, to match the columns of V:

    column 8 c + 2 u + half of a tile, and row 8 c + 2 u + half of K: at 8 half + 4 c + u    (`index_of`)
    row of V: where it was

So slot s of a page is at 4 (s % 4) + s // 4. Elements are multiplied by the scale of their token, which is
exact: an odd number below 256 times 4 bits.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from .fragments import (
    VECTOR_BYTES,
    WORD_BYTES,
    address_of,
    for_each_tile,
    load_at,
    load_twice,
    store_at,
)
from .page import PAGE, SLOTS
from .simd import helper

PADDING = 8
"""Floats behind a row of a matrix: rows a power of two apart would crowd into few sets of the first-level
cache. In K the first of them is 1, for what is added to all scores of a query."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_F32X8 = ir.VectorType(_F32, 8)

SLOT_AT = np.array([4 * (p % 4) + p // 4 for p in range(PAGE)])
"""The slot of the token that the matrix of a page has at row (K) or column (V) p; and where slot p is."""


@helper
def index_of(column):
    """Return where a column of a tile, or a channel, stands in a matrix."""
    return column // 16 * 16 + column % 2 * 8 + column % 16 // 8 * 4 + column % 8 // 2


def _lanes(order):
    return ir.Constant(ir.VectorType(_I32, len(order)), list(order))


def _four_and_four(builder, floats, first, second):
    """Four copies of floats[first] and four of floats[second]."""
    vector = ir.Constant(_F32X8, ir.Undefined)
    for lane, index in ((0, first), (4, second)):
        one = load_at(builder, address_of(builder, floats, (index, 4)), _F32)
        vector = builder.insert_element(vector, one, _I32(lane))
    return builder.shuffle_vector(vector, vector, _lanes([0] * 4 + [4] * 4))


def _store_tile(builder, tile, corner, pitch, lane_vector, scales, is_k):
    """Store eight lanes of a tile, the first element of which is at address `corner`."""
    for register in range(4):
        row_half, column_half = register % 2, register // 2
        if is_k:  # rows 2 i and 2 i + 1 of a tile stand 8 apart
            lower, apart = builder.add(lane_vector, _I64(4 * row_half)), 8
        else:
            lower, apart = builder.add(builder.mul(lane_vector, _I64(2)), _I64(8 * row_half)), 1
        rows = [lower, builder.add(lower, _I64(apart))]
        for half in range(2):
            vector, first = tile.field(register, half), 8 * half + 4 * column_half
            if tile.coded:
                if is_k:
                    factor = _four_and_four(builder, scales, *rows)
                else:
                    factor = load_twice(builder, builder.add(scales, _I64(4 * first)))
                if half:  # the numbers of the upper half of a word are 2^16 times too large
                    factor = builder.fmul(factor, ir.Constant(_F32X8, [2.0**-16] * 8))
                vector = builder.fmul(vector, factor)
            for i, own in enumerate(rows):
                four = builder.shuffle_vector(vector, vector, _lanes(range(4 * i, 4 * i + 4)))
                offset = builder.add(builder.mul(own, pitch), _I64(first))
                store_at(builder, four, address_of(builder, corner, (offset, 4)))


@intrinsic(prefer_literal=True)
def _expand(typing_context, words, scales, matrix, tiles, kind, side):
    """matrix = the elements of a side times the scales of their tokens; see `expansion`."""
    kind_name, is_k = kind.literal_value, side.literal_value == "k"

    def generate(context, builder, signature, arguments):
        words, scales, matrix, tiles = arguments[:4]
        columns = builder.mul(tiles, _I64(16)) if is_k else _I64(SLOTS)
        pitch = builder.add(columns, _I64(PADDING))

        def store_tile(number, word, tile):
            corner = address_of(builder, matrix, (number, 64) if is_k else (builder.mul(number, pitch), 64))
            with cgutils.for_range(builder, _I64(4)) as lane_vector:
                own = address_of(builder, words, (word, WORD_BYTES), (lane_vector.index, VECTOR_BYTES))
                _store_tile(builder, tile(own), corner, pitch, lane_vector.index, scales, is_k)

        def clear_tile(number):
            with cgutils.for_range(builder, _I64(PAGE)) as row:
                for column in (0, 8):
                    offset = builder.add(builder.mul(row.index, pitch), _I64(column))
                    corner = address_of(builder, matrix, (number, 64), (offset, 4))
                    store_at(builder, ir.Constant(_F32X8, [0.0] * 8), corner)

        for_each_tile(builder, kind_name, tiles, store_tile, clear_tile)
        return context.get_dummy_value()

    return types.void(words, scales, matrix, tiles, kind, side), generate


@cache
def expansion(kind, side):
    """Return the compiled C function (words, scales, matrix, tiles) for a kind of codes and "k" or "v".

    words: the codes of a side of a page; scales (16,): twice the scales of the tokens of SLOT_AT, not read
    where elements are raw; matrix: of the page, 16 rows of head_dim + PADDING for K, 16 columns of
    (head_dim, 64 + PADDING) for V; tiles: head_dim / 16. All but the last are addresses, of float32 behind
    the first.
    """

    @cfunc(types.void(types.int64, types.int64, types.int64, types.int64), cache=True)
    def packed_expansion(words, scales, matrix, tiles):
        _expand(words, scales, matrix, tiles, kind, side)

    return packed_expansion
