"""One side of a packed page as a dense float32 matrix in scratch memory, for products with many query rows.

With a few query rows `fragments` multiplies codes as it expands them. With dozens the same expansion
would be repeated for every four of them, so here it is done once, and the matrix, 18 KiB at 64 channels, is
read from the first-level cache. Nothing else changes: vectors of eight codes hold 2 rows (g) x 4 pairs of
columns (u) of a tile of 16 x 16, keys by channels for K and channels by tokens for V. Neighbouring lanes are
stored together, so columns come in another order within eight, and so do the rows of K, to match the columns
of V:

    column 8 c + 2 u + half of a tile, and row 8 c + 2 u + half of K: at 8 c + 4 half + u    (`place_of`)
    row of V: where it was

Elements are multiplied by the step of their token, which is exact: an odd number below 256 times 4 bits.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from .fragments import VECTOR_BYTES, WORDS_PER_GROUP, Tile, address_of, load_at, load_twice, store_at
from .simd import helper

PAGE = 64
PADDING = 8
"""Floats behind a row of a matrix: rows a power of two apart would crowd into few sets of the first-level
cache. In K the first of them is 1, for what is added to all scores of a query."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_F32X8 = ir.VectorType(_F32, 8)

SLOT_AT = np.array([16 * (p % 4) + 8 * (p // 4 % 2) + 2 * (p // 16) + p // 8 % 2 for p in range(PAGE)])
"""The slot of the token that a matrix has at row (K) or column (V) p."""


@helper
def place_of(column):
    """Return where a column of a tile, or a channel, stands in a matrix."""
    return column // 8 * 8 + column % 2 * 4 + column % 8 // 2


def _lanes(order):
    return ir.Constant(ir.VectorType(_I32, len(order)), list(order))


def _four_and_four(builder, floats, first, second):
    """Four copies of floats[first] and four of floats[second]."""
    vector = ir.Constant(_F32X8, ir.Undefined)
    for lane, index in ((0, first), (4, second)):
        one = load_at(builder, address_of(builder, floats, (index, 4)), _F32)
        vector = builder.insert_element(vector, one, _I32(lane))
    return builder.shuffle_vector(vector, vector, _lanes([0] * 4 + [4] * 4))


def _store_tile(builder, tile, corner, pitch, lane_vector, steps, row, column, is_k):
    """Store eight lanes of a tile whose first element, (row, column), is at address `corner`."""
    for register in range(4):
        row_half, column_half = register % 2, register // 2
        step, apart = (1, 4) if is_k else (2, 1)  # rows 2 i and 2 i + 1 of a tile stand 4 apart in K
        lower = builder.add(builder.mul(lane_vector, _I64(step)), _I64(8 * row_half))
        rows = [lower, builder.add(lower, _I64(apart))]
        for half in range(2):
            vector, first = tile.field(register, half), 8 * column_half + 4 * half
            if tile.coded:
                if is_k:
                    factor = _four_and_four(builder, steps, *(builder.add(row, own) for own in rows))
                else:
                    factor = load_twice(builder, address_of(builder, steps, (column, 4), (_I64(first), 4)))
                if half:  # the numbers of the upper half of a word are 2^16 times too large
                    factor = builder.fmul(factor, ir.Constant(_F32X8, [2.0**-16] * 8))
                vector = builder.fmul(vector, factor)
            for i, own in enumerate(rows):
                four = builder.shuffle_vector(vector, vector, _lanes(range(4 * i, 4 * i + 4)))
                place = builder.add(builder.mul(own, pitch), _I64(first))
                store_at(builder, four, address_of(builder, corner, (place, 4)))


@intrinsic(prefer_literal=True)
def _expand(typing_context, words, steps, matrix, tiles, kind, side):
    """matrix = the elements of a side times the steps of their tokens; see `expansion`."""
    kind_name, is_k = kind.literal_value, side.literal_value == "k"

    def generate(context, builder, signature, arguments):
        words, steps, matrix, tiles = arguments[:4]
        columns = tiles if is_k else _I64(4)
        pitch = builder.add(builder.mul(columns, _I64(16)), _I64(PADDING))
        together = _I64(WORDS_PER_GROUP[kind_name][1])
        groups = builder.udiv(builder.mul(tiles, _I64(4)), together)
        with cgutils.for_range(builder, groups) as group, cgutils.for_range(builder, _I64(4)) as lane_vector:
            lane_words = address_of(builder, words, (lane_vector.index, VECTOR_BYTES))
            for place in range(together.constant):
                number = builder.add(builder.mul(group.index, together), _I64(place))
                row = builder.mul(builder.udiv(number, columns), _I64(16))
                column = builder.mul(builder.urem(number, columns), _I64(16))
                corner = address_of(builder, matrix, (builder.mul(row, pitch), 4), (column, 4))
                tile = Tile(builder, kind_name, lane_words, group.index, place)
                _store_tile(builder, tile, corner, pitch, lane_vector.index, steps, row, column, is_k)
        return context.get_dummy_value()

    return types.void(words, steps, matrix, tiles, kind, side), generate


@cache
def expansion(kind, side):
    """Return the compiled C function (words, steps, matrix, tiles) for a kind of codes and side "k" or "v".

    words: the codes of a side of a page; steps (64,): twice the steps of the tokens of SLOT_AT, not read
    where elements are raw; matrix: (64, head_dim + PADDING) for K, (head_dim, 64 + PADDING) for V; tiles:
    head_dim / 16. All but the last are addresses, of float32 behind the first.
    """

    @cfunc(types.void(types.int64, types.int64, types.int64, types.int64), cache=True)
    def packed_expansion(words, steps, matrix, tiles):
        _expand(words, steps, matrix, tiles, kind, side)

    return packed_expansion
