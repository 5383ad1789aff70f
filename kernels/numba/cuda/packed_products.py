"""Decode attention over packed pages: the products K q and V^T p of coded pages, for each width.

`cuda/packed.py` says how lanes share a page. A lane first loads the words of several tiles, so that it waits
for memory once for all of them, then multiplies them by the integers of q and p (`cuda/integers.py`): two
instructions for four codes and a query row. What limits is in docs/performance/packed_numba.md.
"""

import numpy as np
from numba import cuda

from .integers import PIECE, first_dot, pieces_of, second_dot
from .page import codes_of, device, field_shift, load_tile_of, power_of_two, tile_words

int32, uint32, int64, float32 = np.int32, np.uint32, np.int64, np.float32

FLAGS = {2: 1, 3: 2, 4: 4, 8: 8, 16: 16}
"""What stands for a width in a sum of those that occur."""


def nothing(*_):
    """Stand for a width that does not occur."""


def make_load_tiles(bits, dtype, head_dim, at_once):
    """Make the device function that loads tiles first, ... of a page of K."""
    per_tile, load_tile = tile_words(bits, dtype), load_tile_of(bits, dtype, head_dim)

    @device
    def load_tiles(memory, at, first, words, to):
        for j in range(at_once):
            load_tile(memory, at, first + j, words, to + j * per_tile)

    return load_tiles


def tiles_at_once(bits, dtype, head_dim):
    """Return how many tiles of a page of K are loaded together."""
    blocks = head_dim // 16
    return max(n for n in (1, 2, 4) if blocks % n == 0 and (n < 4 or tile_words(bits, dtype) == 1))


def make_key_products(rows):
    """Make the device functions that take a lane's columns of q, add those of a token, and write a sum."""

    @device
    def take_pairs(query_pairs, at, q):
        for half in range(2):
            for row in range(rows):
                q[half * rows + row] = query_pairs[at + uint32(4 * half * rows + row)]

    @device
    def add_row(k, q, sums, token):
        for row in range(rows):
            i = token * rows + row
            sums[i] = second_dot(q[rows + row], k, first_dot(q[row], k, sums[i]))

    @device  # four calls, since NVVM leaves a loop as it is for some GPUs
    def write_token(sums, token, piece, exchange, start):
        for row in range(rows):
            i = token * rows + row
            if piece == 0:
                exchange[start + uint32(i)] = float32(sums[i])
            else:
                exchange[start + uint32(i)] += float32(sums[i]) * PIECE

    return take_pairs, add_row, write_token


def make_scores(bits, dtype, head_dim, rows, few_registers):
    """Make the device function that writes K q, over a lane's columns, of its 8 tokens to [8 tokens][rows].

    Tokens are two of each page, pages go by twos, which takes fewer registers. The lane's first word of a
    page of the quad is `pool` + 4 page_at[page]. query_pairs[piece][tile][half][u][rows] are those of columns
    2 u + half and 8 later of q, sums_of_h[piece][u][rows] of the h of a lane's columns. Results are
    `field_shift` powers of 2 larger than they should be, and count units of q. `few_registers`: few
    are to spare.
    """
    blocks, half_sums, per_tile, pieces = head_dim // 16, 4 * rows, tile_words(bits, dtype), pieces_of(dtype)
    at_once, codes, pair_words = tiles_at_once(bits, dtype, head_dim), codes_of(bits), head_dim // 2 * rows
    load_tiles, largest = make_load_tiles(bits, dtype, head_dim, at_once), 2**bits - 1
    all_words, per_q = 2 * at_once * per_tile, 2 * rows
    take_pairs, add_row, write_token = make_key_products(rows)

    @device
    def add_tile(words, at, q, sums, token):
        for later in range(2):
            add_row(codes(words, at, later), q, sums, token + later)

    @device
    def write_scores(memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at):
        words = cuda.local.array(all_words, uint32)
        q = cuda.local.array(per_q, uint32)
        sums = cuda.local.array(half_sums, int32)
        for piece in range(pieces):
            pairs_at = uint32(piece * pair_words + (lane & 3) * rows)
            for first_b in range(0, 4, 2):
                for row in range(rows):
                    h = sums_of_h[uint32((4 * piece + (lane & 3)) * rows + row)]
                    for token in range(4):
                        sums[token * rows + row] = -(h * largest << field_shift(bits, token & 1))
                for step in range(blocks // at_once):
                    for b in range(2):
                        at = pool + 4 * int64(page_at[quad_at + uint32(first_b + b)])
                        load_tiles(memory, at, step * at_once, words, b * at_once * per_tile)
                    for j in range(at_once):
                        take_pairs(query_pairs, pairs_at + uint32(8 * (step * at_once + j) * rows), q)
                        add_tile(words, j * per_tile, q, sums, 0)
                        add_tile(words, (at_once + j) * per_tile, q, sums, 2)
                    if few_registers:
                        cuda.syncwarp()  # the next words are loaded only now: registers would not hold more
                start = uint32(exchange_at + 2 * first_b * rows)
                write_token(sums, 0, piece, exchange, start)
                write_token(sums, 1, piece, exchange, start)
                write_token(sums, 2, piece, exchange, start)
                write_token(sums, 3, piece, exchange, start)

    return write_scores


def make_values(bits, dtype, head_dim, rows, few_registers):
    """Make the device function that adds V^T p of a lane's elements to out[head_dim / 8][rows].

    weight_pairs[piece][page][half][u][rows] are those of p, of units[u][rows]; a lane keeps those of its 16
    tokens in registers. `few_registers`: as for scores.
    """
    blocks, per_tile, pieces = head_dim // 16, tile_words(bits, dtype), pieces_of(dtype)
    load_tile, codes, largest = load_tile_of(bits, dtype, head_dim), codes_of(bits), 2**bits - 1
    at_once = 2 if bits == 8 else 4  # blocks of channels whose words are loaded together
    all_words, all_pairs, both = 4 * at_once * per_tile, 8 * rows, 2 * rows

    @device
    def take_pairs(weight_pairs, pairs_at, units, units_at, lane, piece, p, starts, scales):
        at = uint32(pairs_at + (32 * piece + (lane & 3)) * rows)
        for row in range(rows):
            twice_h = int32(0)
            for i in range(8):
                p[i * rows + row] = weight_pairs[at + uint32(4 * i * rows + row)]
                twice_h = first_dot(p[i * rows + row], uint32(0x0101), twice_h)
            unit = units[uint32(units_at + (lane & 3) * rows + row)]
            if piece:
                unit *= PIECE
            starts[row] = -((twice_h >> 1) * largest << field_shift(bits, 0))
            for later in range(2):
                scales[later * rows + row] = unit * power_of_two(-field_shift(bits, later))

    @device
    def load_tiles(memory, pool, page_at, quad_at, words, first):
        for b in range(4):
            at = pool + 4 * int64(page_at[quad_at + uint32(b)])
            for c in range(first, min(first + at_once, blocks)):
                load_tile(memory, at, c, words, (4 * (c - first) + b) * per_tile)

    @device
    def add_row(words, first_word, later, p, sums, starts, scales, out, out_at):
        for row in range(rows):
            sums[row] = starts[row] << (field_shift(bits, later) - field_shift(bits, 0))
        for b in range(4):
            v = codes(words, first_word + b * per_tile, later)
            for row in range(rows):
                i = 2 * b * rows + row
                sums[row] = second_dot(p[i + rows], v, first_dot(p[i], v, sums[row]))
        for row in range(rows):
            out[out_at + row] += float32(sums[row]) * scales[later * rows + row]

    # Calls, since NVVM does not unroll loops of so much.
    @device
    def add_block(words, p, sums, starts, scales, out, c, first):
        if c < min(first + at_once, blocks):
            first_word = 4 * (c - first) * per_tile
            add_row(words, first_word, 0, p, sums, starts, scales, out, 2 * c * rows)
            add_row(words, first_word, 1, p, sums, starts, scales, out, (2 * c + 1) * rows)

    @device
    def add_tiles(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, first):
        load_tiles(memory, pool, page_at, quad_at, words, first)
        add_block(words, p, sums, starts, scales, out, first, first)
        add_block(words, p, sums, starts, scales, out, first + 1, first)
        add_block(words, p, sums, starts, scales, out, first + 2, first)
        add_block(words, p, sums, starts, scales, out, first + 3, first)
        if few_registers:
            cuda.syncwarp()  # the next words are loaded only now: registers would not hold more

    @device
    def add_eight(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, first):
        add_tiles(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, first)
        if at_once == 2:
            add_tiles(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, first + 2)
        if first + 4 < blocks:
            add_tiles(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, first + 4)
            if at_once == 2:
                add_tiles(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, first + 6)

    @device
    def add_values(memory, pool, page_at, quad_at, lane, weight_pairs, pairs_at, units, units_at, out):
        words = cuda.local.array(all_words, uint32)
        p = cuda.local.array(all_pairs, uint32)
        sums = cuda.local.array(rows, int32)
        starts = cuda.local.array(rows, int32)
        scales = cuda.local.array(both, float32)
        for piece in range(pieces):
            take_pairs(weight_pairs, pairs_at, units, units_at, lane, piece, p, starts, scales)
            add_eight(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, 0)
            if blocks > 8:
                add_eight(memory, pool, page_at, quad_at, words, p, sums, starts, scales, out, 8)

    return add_values


def make_by_width(make, make_raw, widths, *common):
    """Make a device function for each width that occurs, and one that does nothing for each that does not."""
    skip = device(nothing)
    return tuple(
        (make_raw if bits == 16 else make)(bits, *common) if widths & flag else skip
        for bits, flag in FLAGS.items()
    )
