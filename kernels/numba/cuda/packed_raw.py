"""Decode attention over packed pages: the products K q and V^T p of raw pages, in float32, one by one.

`cuda/packed_products.py` has those of coded pages, which this follows. Queries and probabilities lie in
shared memory as floats, by `place_of`.
"""

import numpy as np
from numba import cuda

from .packed_products import make_load_tiles, tiles_at_once
from .page import count_of, device, load_tile_of, raw_element, tile_words

uint32, int64, float32 = np.uint32, np.int64, np.float32


@device
def place_of(column, row, rows):
    """Return where a factor of one of 8 columns is: [half of the rows][u][rows of the half][2 u, 2 u + 1].

    Lanes take 4 of them at a time, so the four u lie side by side, in different banks of shared memory.
    """
    together = min(rows, 2)
    return (row // together * 4 + column // 2) * 2 * together + row % together * 2 + column % 2


def make_take_columns(rows):
    """Make the device function that takes a lane's two of 8 columns, [rows][2]."""

    @device
    def take_columns(factors, at, lane, x):
        start = uint32(at + place_of(2 * (lane & 3), 0, rows))
        for row in range(rows):
            for half in range(2):
                x[2 * row + half] = factors[start + uint32(place_of(half, row, rows))]

    return take_columns


def make_raw_scores(bits, dtype, head_dim, rows):
    """Make the device function that writes K q, over a lane's columns, of its 8 tokens to [8 tokens][rows].

    Tokens are two of each page, pages go by twos, which takes fewer registers.
    """
    blocks, half_sums, per_tile = head_dim // 16, 4 * rows, tile_words(bits, dtype)
    at_once, element = tiles_at_once(bits, dtype, head_dim), raw_element(dtype)
    load_tiles = make_load_tiles(bits, dtype, head_dim, at_once)
    all_words, per_q, take_columns = 2 * at_once * per_tile, 2 * rows, make_take_columns(rows)

    @device
    def add_columns(words, at, later, q, sums, token):
        for later_row in range(2):
            for half in range(2):
                k = element(words, at, 2 * later + later_row, half)
                for row in range(rows):
                    sums[(token + later_row) * rows + row] += k * q[2 * row + half]

    @device
    def write_scores(memory, pool, page_at, quad_at, lane, queries, exchange, exchange_at):
        words = cuda.local.array(all_words, uint32)
        q = cuda.local.array(per_q, float32)
        sums = cuda.local.array(half_sums, float32)
        for first_b in range(0, 4, 2):
            for i in range(half_sums):
                sums[i] = float32(0)
            for step in range(blocks // at_once):
                for b in range(2):
                    at = pool + 4 * int64(page_at[quad_at + uint32(first_b + b)])
                    load_tiles(memory, at, step * at_once, words, b * at_once * per_tile)
                for j in range(at_once):
                    for later in range(2):
                        columns = 2 * (step * at_once + j) + later
                        take_columns(queries, columns * 8 * rows, lane, q)
                        for b in range(2):
                            add_columns(words, (b * at_once + j) * per_tile, later, q, sums, 2 * b)
            start = uint32(exchange_at + 2 * first_b * rows)
            for i in range(half_sums):
                exchange[start + uint32(i)] = sums[i]

    return write_scores


def make_raw_values(bits, dtype, head_dim, rows):
    """Make the device function that adds V^T p of a lane's elements to out[head_dim / 8][rows]."""
    blocks, per_p, per_tile = head_dim // 16, 2 * rows, tile_words(bits, dtype)
    load_tile, element = load_tile_of(bits, dtype, head_dim), raw_element(dtype)
    all_words, take_columns = 4 * per_tile, make_take_columns(rows)

    @device
    def add_columns(words, later, p, slot, count, out, c, first):
        for later_row in range(2):
            for half in range(2):
                v = element(words, (c - first) * per_tile, 2 * later + later_row, half)
                if slot + 2 * half + later >= count:
                    v = float32(0)  # an unused slot may hold NaN
                for row in range(rows):
                    out[(2 * c + later_row) * rows + row] += v * p[2 * row + half]

    # Four tiles, whose words are loaded together; loops of four are sure to be unrolled.
    @device
    def add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, first):
        for c in range(first, min(first + 4, blocks)):
            load_tile(memory, at, c, words, (c - first) * per_tile)
        slot = 4 * (lane & 3)  # of half 0; half 1 is 2 later, later columns 1
        for later in range(2):
            take_columns(weights, weights_at + (2 * b + later) * 8 * rows, lane, p)
            for c in range(first, min(first + 4, blocks)):
                add_columns(words, later, p, slot, count, out, c, first)

    @device
    def add_values(memory, pool, page_at, quad_at, lane, weights, weights_at, counts, out):
        words = cuda.local.array(all_words, uint32)
        p = cuda.local.array(per_p, float32)
        for b in range(4):
            at, count = pool + 4 * int64(page_at[quad_at + uint32(b)]), count_of(counts, b)
            add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, 0)
            if blocks > 4:
                add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, 4)
            if blocks > 8:
                add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, 8)
                add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, 12)

    return add_values
