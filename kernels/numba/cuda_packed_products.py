"""Decode attention over packed pages: the products K q and V^T p of a page, for each width.

`cuda_packed.py` says how lanes share a page. A lane first loads the words of several tiles, so that it waits
for memory once for all of them, and then takes the elements out one by one: each serves all query rows.
What costs time is the number of instructions, one for a code and one more for each query row, and the wait
for words: see docs/performance/packed_numba.md.
"""

import numpy as np
from numba import cuda

from .cuda_page import TILES_THAT_SHARE, device, element_of, load_tile_of, tile_words, words_of_tiles

uint32, float32 = np.uint32, np.float32

FLAGS = {2: 1, 3: 2, 4: 4, 8: 8, 16: 16}
"""What stands for a width in a sum of those that occur."""


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


def _nothing(*_):
    """Stand for a width that does not occur."""


def make_scores(bits, dtype, head_dim, rows, widths):
    """Make the device function that writes K q, over a lane's columns, of its 8 tokens to [8 tokens][rows].

    Tokens go in two halves, of 4, which takes fewer registers. Each of the `widths` has a q of its own.
    """
    queries_at = rows * head_dim * (widths & (FLAGS[bits] - 1)).bit_count()
    blocks, per_q, half_sums, per_tile = head_dim // 16, 2 * rows, 4 * rows, tile_words(bits, dtype)
    load_tile, element = load_tile_of(bits, dtype), element_of(bits, dtype, move=0)
    tiles, group_words = TILES_THAT_SHARE.get(bits, 1), 32 * words_of_tiles(bits, dtype)
    shared = tiles.bit_length() - 1
    at_once = max(n for n in (1, 2, 4) if blocks % n == 0 and (n < 4 or per_tile == 1))  # blocks
    aligned = at_once % tiles == 0
    all_words, take_columns = 2 * at_once * per_tile, make_take_columns(rows)

    @device
    def load_tiles(memory, at, b, first_c, words, to):
        for j in range(at_once):
            tile = b * blocks + first_c + j
            group, inside = tile >> shared, tile & (tiles - 1)
            if aligned:  # the same numbers, but `inside` is a constant
                group = b * (blocks >> shared) + (first_c >> shared) + (j >> shared)
                inside = j & (tiles - 1)
            load_tile(memory, at + group_words * group, inside, inside == 3, words, to + j * per_tile)

    @device
    def add_columns(words, at, later, q, sums, token):
        for later_row in range(2):
            for half in range(2):
                k = element(words, at, 2 * later + later_row, half)
                for row in range(rows):
                    sums[(token + later_row) * rows + row] += k * q[2 * row + half]

    @device
    def write_scores(memory, at, lane, queries, exchange, exchange_at):
        words = cuda.local.array(all_words, uint32)
        q = cuda.local.array(per_q, float32)
        sums = cuda.local.array(half_sums, float32)
        for first_b in range(0, 4, 2):
            for i in range(half_sums):
                sums[i] = float32(0)
            for step in range(blocks // at_once):
                for b in range(2):
                    load_tiles(memory, at, first_b + b, step * at_once, words, b * at_once * per_tile)
                for j in range(at_once):
                    for later in range(2):
                        columns = 2 * (step * at_once + j) + later
                        take_columns(queries, queries_at + columns * 8 * rows, lane, q)
                        for b in range(2):
                            add_columns(words, (b * at_once + j) * per_tile, later, q, sums, 2 * b)
            start = uint32(exchange_at + 2 * first_b * rows)
            for i in range(half_sums):
                exchange[start + uint32(i)] = sums[i]

    return write_scores


def make_values(bits, dtype, head_dim, rows):
    """Make the device function that adds V^T p of a lane's elements to out[head_dim / 8][rows]."""
    blocks, per_p, raw, per_tile = head_dim // 16, 2 * rows, bits == 16, tile_words(bits, dtype)
    load_tile, element = load_tile_of(bits, dtype), element_of(bits, dtype, move=1)
    tiles, group_words = TILES_THAT_SHARE.get(bits, 1), 32 * words_of_tiles(bits, dtype)
    shared = tiles.bit_length() - 1
    at_once = 4 if per_tile > 2 else 8  # blocks of channels whose words are loaded together
    alike = 3 if bits == 3 else 4  # the last of four tiles that share words is put together by itself
    all_words, take_columns = at_once * per_tile, make_take_columns(rows)

    @device
    def add_columns(words, later, p, slot, count, out, c, first):
        for later_row in range(2):
            for half in range(2):
                v = element(words, (c - first) * per_tile, 2 * later + later_row, half)
                if raw and slot + 8 * half + later >= count:
                    v = float32(0)  # an unused slot may hold NaN
                for row in range(rows):
                    out[(2 * c + later_row) * rows + row] += v * p[2 * row + half]

    # Loops of four tiles, which are sure to be unrolled.
    @device
    def load_four(memory, at, words, b, last, first, start):
        for c in range(start, min(start + 4, blocks)):
            group = c * (4 >> shared) + (b >> shared)
            load_tile(memory, at + group_words * group, b & (tiles - 1), last, words, (c - first) * per_tile)

    @device
    def add_four(words, later, p, slot, count, out, first, start):
        for c in range(start, min(start + 4, blocks)):
            add_columns(words, later, p, slot, count, out, c, first)

    @device
    def add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, last, first):
        load_four(memory, at, words, b, last, first, first)
        if at_once == 8:
            load_four(memory, at, words, b, last, first, first + 4)
        slot = 16 * (lane & 3) + 2 * b  # of half 0; half 1 is 8 later, later columns 1
        for later in range(2):
            take_columns(weights, weights_at + (2 * b + later) * 8 * rows, lane, p)
            add_four(words, later, p, slot, count, out, first, first)
            if at_once == 8:
                add_four(words, later, p, slot, count, out, first, first + 4)

    @device
    def add_block(memory, at, lane, words, p, weights, weights_at, count, out, b, last):
        add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, last, 0)
        if at_once < blocks:
            add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, last, at_once)
        if 2 * at_once < blocks:
            add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, last, 2 * at_once)
            add_tiles(memory, at, lane, words, p, weights, weights_at, count, out, b, last, 3 * at_once)

    @device
    def add_values(memory, at, lane, weights, weights_at, count, out):
        words = cuda.local.array(all_words, uint32)
        p = cuda.local.array(per_p, float32)
        for b in range(alike):
            add_block(memory, at, lane, words, p, weights, weights_at, count, out, b, False)
        if alike < 4:
            add_block(memory, at, lane, words, p, weights, weights_at, count, out, 3, True)

    return add_values


def make_by_width(make, widths, *common):
    """Make a device function for each width that occurs, and one that does nothing for each that does not."""
    skip = device(_nothing)
    return tuple(make(bits, *common) if widths & flag else skip for bits, flag in FLAGS.items())
