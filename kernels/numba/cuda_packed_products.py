"""Decode attention over packed pages: the products K q and V^T p of a page, for each width.

`cuda_packed.py` says how lanes share a page. A lane first loads the words of several tiles, so that it waits
for memory once for all of them, and then takes the elements out one by one: each serves all query rows.
What costs time is the number of instructions, 2 to make a number of a code and one for each query row, and
the wait for words: see docs/performance/packed_numba.md.
"""

import numpy as np
from numba import cuda

from .cuda_page import TILES_THAT_SHARE, device, element_of, load_tile_of, tile_words, words_of_tiles

uint32, float32 = np.uint32, np.float32


def _nothing(*_):
    """Stand for a width that does not occur."""


def make_scores(bits, dtype, head_dim, rows):
    """Make the device function that writes K q, over a lane's columns, of its 8 tokens to [8 tokens][rows].

    Tokens go in two halves, of 4, which takes fewer registers.
    """
    blocks, per_q, half_sums, per_tile = head_dim // 16, 4 * rows, 4 * rows, tile_words(bits, dtype)
    load_tile, element = load_tile_of(bits, dtype), element_of(bits, dtype)
    tiles, group_words = TILES_THAT_SHARE.get(bits, 1), 32 * words_of_tiles(bits, dtype)
    shared, aligned = tiles.bit_length() - 1, blocks % tiles == 0
    at_once = max(n for n in (1, 2, tiles) if blocks % n == 0)  # blocks of channels loaded together
    all_words = 2 * at_once * per_tile

    @device
    def load_tiles(memory, at, b, first_c, words, to):
        for j in range(at_once):
            c = first_c + j
            if aligned:
                group, inside = b * (blocks >> shared) + (c >> shared), c & (tiles - 1)
            else:  # tiles of the next tokens share words with these
                group, inside = (b * blocks + c) >> shared, (b * blocks + c) & (tiles - 1)
            load_tile(memory, at + group_words * group, inside, words, to + j * per_tile)

    @device
    def add_tile(words, at, q, sums, token):
        for register in range(4):
            for half in range(2):
                k = element(words, at, register, half)
                for row in range(rows):
                    at_row = (token + (register & 1)) * rows + row
                    sums[at_row] += k * q[4 * row + 2 * (register >> 1) + half]

    @device
    def write_scores(memory, at, lane, queries, queries_at, exchange, exchange_at):
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
                    start = uint32(queries_at + (4 * (step * at_once + j) + (lane & 3)) * per_q)
                    for i in range(per_q):
                        q[i] = queries[start + uint32(i)]
                    for b in range(2):
                        add_tile(words, (b * at_once + j) * per_tile, q, sums, 2 * b)
            start = uint32(exchange_at + 2 * first_b * rows)
            for i in range(half_sums):
                exchange[start + uint32(i)] = sums[i]

    return write_scores


def make_values(bits, dtype, head_dim, rows):
    """Make the device function that adds V^T p of a lane's elements to out[head_dim / 8][rows]."""
    blocks, per_p, raw, per_tile = head_dim // 16, 4 * rows, bits == 16, tile_words(bits, dtype)
    load_tile, element = load_tile_of(bits, dtype), element_of(bits, dtype)
    tiles, group_words = TILES_THAT_SHARE.get(bits, 1), 32 * words_of_tiles(bits, dtype)
    shared = tiles.bit_length() - 1
    at_once = 4 if per_tile > 2 else 8  # blocks of channels whose words are loaded together
    all_words = at_once * per_tile

    @device
    def add_tile(words, p, slot, count, out, c, first):
        for register in range(4):
            for half in range(2):
                v = element(words, (c - first) * per_tile, register, half)
                if raw and slot + 8 * half + (register >> 1) >= count:
                    v = float32(0)  # an unused slot may hold NaN
                for row in range(rows):
                    channel = 2 * c + (register & 1)
                    out[channel * rows + row] += v * p[4 * row + 2 * (register >> 1) + half]

    # Loops of four tiles, which are sure to be unrolled.
    @device
    def load_four(memory, at, words, b, first, start):
        for c in range(start, min(start + 4, blocks)):
            group = c * (4 >> shared) + (b >> shared)
            load_tile(memory, at + group_words * group, b & (tiles - 1), words, (c - first) * per_tile)

    @device
    def add_four(words, p, slot, count, out, first, start):
        for c in range(start, min(start + 4, blocks)):
            add_tile(words, p, slot, count, out, c, first)

    @device
    def add_tiles(memory, at, words, p, slot, count, out, b, first):
        load_four(memory, at, words, b, first, first)
        if at_once == 8:
            load_four(memory, at, words, b, first, first + 4)
        add_four(words, p, slot, count, out, first, first)
        if at_once == 8:
            add_four(words, p, slot, count, out, first, first + 4)

    @device
    def add_values(memory, at, lane, weights, weights_at, count, out):
        words = cuda.local.array(all_words, uint32)
        p = cuda.local.array(per_p, float32)
        for b in range(4):
            start = uint32(weights_at + (4 * b + (lane & 3)) * per_p)
            for i in range(per_p):
                p[i] = weights[start + uint32(i)]
            slot = 16 * (lane & 3) + 2 * b  # of half 0, registers 0, 1; half 1 is 8 later, registers 2, 3 one
            add_tiles(memory, at, words, p, slot, count, out, b, 0)
            if at_once < blocks:
                add_tiles(memory, at, words, p, slot, count, out, b, at_once)
            if 2 * at_once < blocks:
                add_tiles(memory, at, words, p, slot, count, out, b, 2 * at_once)
                add_tiles(memory, at, words, p, slot, count, out, b, 3 * at_once)

    return add_values


def make_by_width(make, widths, *common):
    """Make a device function for each width that occurs, and one that does nothing for each that does not."""
    skip = device(_nothing)
    flags = {2: 1, 3: 2, 4: 4, 8: 8, 16: 16}
    return tuple(make(bits, *common) if widths & flag else skip for bits, flag in flags.items())
