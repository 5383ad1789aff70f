"""Decode attention over packed pages: the products K q of keys in blocks of channels.

Neighbouring blocks of one width are a run, with products as those of `cuda/packed_products.py` and sums of
its own: codes stand at other bits of their bytes in others. What runs come to is added up in float32, each
times the cells of its width. A run is a loop over blocks, whose number is known only when the kernel runs:
so one kernel serves all profiles of the same widths.
"""

import numpy as np
from numba import cuda

from .integers import PIECE, pieces_of
from .packed_products import FLAGS, make_key_steps, make_load_tiles, nothing
from .page import BLOCKS, FACTORS, device, field_shift, power_of_two, tile_words

int32, uint32, int64, float32 = np.int32, np.uint32, np.int64, np.float32


def make_run_scores(bits, dtype, head_dim, rows, few_registers):
    """Make the device function that adds K q of blocks first to end - 1 to [8 tokens][rows].

    They have one width. It follows `make_scores`. `pool` leads to a lane's first word of the first of them;
    sums_of_h[piece][block][u][rows]. Results count units of q; those of block 0 begin the sums.
    """
    at_once, half_sums, per_tile, pieces = head_dim // 64, 4 * rows, tile_words(bits, dtype), pieces_of(dtype)
    load_tiles, largest, factor = make_load_tiles(bits, dtype, head_dim, at_once), 2**bits - 1, FACTORS[bits]
    all_words, per_q, pair_words = 2 * at_once * per_tile, 2 * rows, head_dim // 2 * rows
    take_pairs, add_tile = make_key_steps(bits, rows)

    @device
    def write_token(sums, token, exchange, start, unit, begins):
        scale = unit * (float32(factor) * power_of_two(-field_shift(bits, token & 1)))
        for row in range(rows):
            i = token * rows + row
            before = float32(0) if begins else exchange[start + uint32(i)]
            exchange[start + uint32(i)] = before + float32(sums[i]) * scale

    @device
    def write_scores(
        memory, pool, page_at, quad_at, lane, pairs, sums_of_h, exchange, exchange_at, first, end
    ):  # fmt: skip
        words = cuda.local.array(all_words, uint32)
        q = cuda.local.array(per_q, uint32)
        sums = cuda.local.array(half_sums, int32)
        for piece in range(pieces):
            pairs_at = uint32(piece * pair_words + (lane & 3) * rows)
            for first_b in range(0, 4, 2):
                for row in range(rows):
                    h = int32(0)
                    for block in range(first, end):
                        h += sums_of_h[uint32((4 * (BLOCKS * piece + block) + (lane & 3)) * rows + row)]
                    for token in range(4):
                        sums[token * rows + row] = -(h * largest << field_shift(bits, token & 1))
                for block in range(first, end):
                    for b in range(2):
                        at = pool + 4 * int64(page_at[quad_at + uint32(first_b + b)])
                        load_tiles(memory, at, (block - first) * at_once, words, b * at_once * per_tile)
                    for j in range(at_once):
                        take_pairs(pairs, pairs_at + uint32(8 * (block * at_once + j) * rows), q)
                        add_tile(words, j * per_tile, q, sums, 0)
                        add_tile(words, (at_once + j) * per_tile, q, sums, 2)
                    if few_registers:
                        cuda.syncwarp()  # as in `make_scores`
                start, begins = uint32(exchange_at + 2 * first_b * rows), first == 0 and piece == 0
                unit = PIECE if piece else float32(1)
                write_token(sums, 0, exchange, start, unit, begins)
                write_token(sums, 1, exchange, start, unit, begins)
                write_token(sums, 2, exchange, start, unit, begins)
                write_token(sums, 3, exchange, start, unit, begins)

    return write_scores


def make_block_scores(widths, dtype, head_dim, rows, few_registers):
    """Make the device function that writes K q of keys in blocks: run after run, of 8, of 4 and of 2 bits.

    `ends`, a hexadecimal digit for each of these widths, that of 8 bits lowest, says which block is the first
    behind them.
    """
    skip, block_words = device(nothing), head_dim // 64 * 32  # at 4 bits
    of_8, of_4, of_2 = (
        make_run_scores(bits, dtype, head_dim, rows, few_registers) if widths & FLAGS[bits] else skip
        for bits in (8, 4, 2)
    )

    @device
    def write_scores(memory, pool, page_at, quad_at, lane, pairs, sums_of_h, exchange, to, ends):
        end_8, end_4, end_2 = ends & 15, ends >> 4 & 15, ends >> 8
        if end_8 > 0:
            of_8(memory, pool, page_at, quad_at, lane, pairs, sums_of_h, exchange, to, 0, end_8)
        if end_4 > end_8:
            start = pool + 2 * block_words * end_8
            of_4(memory, start, page_at, quad_at, lane, pairs, sums_of_h, exchange, to, end_8, end_4)
        if end_2 > end_4:
            start = pool + block_words * (end_8 + end_4)
            of_2(memory, start, page_at, quad_at, lane, pairs, sums_of_h, exchange, to, end_4, end_2)

    return write_scores
