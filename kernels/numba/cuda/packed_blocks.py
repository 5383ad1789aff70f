"""Decode attention over packed pages: the products K q of keys in blocks of channels.

They follow those of `cuda/packed_products.py`, and come to one sum: a code of any width times the `FACTORS`
of that width still is a byte. A function is made for each profile, so that a lane loads the words of several
blocks together, whatever their widths: it waits for memory once for all of them.
"""

import numpy as np
from numba import cuda

from .integers import pieces_of
from .packed_products import make_key_products, nothing
from .page import BLOCKS, FACTORS, device, load_tile_of

int32, uint32, int64 = np.int32, np.uint32, np.int64


def profiles_of(names):
    """Return the profiles that a text such as k8422k4220 names, each four widths."""
    return [tuple(map(int, name)) for name in names.split("k")[1:]]


def words_of_profile(profile, head_dim):
    """Return how many words the codes of a profile take: those of the lanes side by side."""
    return (head_dim // 64 * sum(profile) + 3) // 4 * 32


def make_choice(values):
    """Make the device function that returns values[i]."""
    first = values[0]
    if len(values) == 1:
        return device(lambda i: first)
    rest = make_choice(values[1:])

    @device
    def choice(i):
        return first if i == 0 else rest(i - 1)

    return choice


def codes_of_block(bits):
    """Make the device function that returns four codes of a row of a tile, times their factor, as bytes.

    `odd`: whether a tile is the second of a word.
    """
    factor = uint32(FACTORS[bits])

    @device
    def codes(words, at, later, odd):
        if bits == 8:
            return words[at + later]
        if bits == 4:
            return uint32(((words[at] >> uint32(4 * later)) & uint32(0x0F0F0F0F)) * factor)
        shift = 5 - 4 * odd - 2 * later  # to bit 5, which counts 32
        word = words[at] << uint32(shift) if shift > 0 else words[at] >> uint32(-shift)
        return uint32(word & uint32(0x60606060))

    return codes


def make_block(profile, block, dtype, head_dim, rows):
    """Make the device functions that load what a lane has of a block of a page, and add its K q of two pages.

    The third result is how many words are loaded of a page.
    """
    bits, tiles = profile[block], head_dim // 64
    run = profile.index(bits)
    first_tile, first_word = (block - run) * tiles, sum(profile[:run]) * tiles // 4 * 32
    per_tile, load_rows, codes = max(1, bits // 4), load_tile_of(bits, dtype, head_dim), codes_of_block(bits)
    take_pairs, add_row, _ = make_key_products(rows)

    @device
    def load_block(memory, at, words, to):
        for j in range(tiles):
            tile = first_tile + j
            if bits == 2:
                words[to + j] = memory[at + first_word + 32 * (tile >> 1)]
            else:
                load_rows(memory, at + first_word, tile, words, to + per_tile * j)

    @device
    def add_tile(words, at, odd, q, sums, token):
        for later in range(2):
            add_row(codes(words, at, later, odd), q, sums, token + later)

    @device
    def add_block(words, to, of_page, query_pairs, pairs_at, q, sums):
        for j in range(tiles):
            at, odd = to + per_tile * j, (first_tile + j) & 1
            take_pairs(query_pairs, pairs_at + uint32(8 * (block * tiles + j) * rows), q)
            add_tile(words, at, odd, q, sums, 0)
            add_tile(words, at + of_page, odd, q, sums, 2)

    return load_block, add_block, per_tile * tiles


def make_part(blocks):
    """Make of several blocks, as `make_block` returns them, one of their words together."""
    load_first, add_first, words_of_first = blocks[0]
    if len(blocks) == 1:
        return blocks[0]
    load_rest, add_rest, words_of_rest = make_part(blocks[1:])

    @device
    def load_blocks(memory, at, words, to):
        load_first(memory, at, words, to)
        load_rest(memory, at, words, to + words_of_first)

    @device
    def add_blocks(words, to, of_page, query_pairs, pairs_at, q, sums):
        add_first(words, to, of_page, query_pairs, pairs_at, q, sums)
        add_rest(words, to + words_of_first, of_page, query_pairs, pairs_at, q, sums)

    return load_blocks, add_blocks, words_of_first + words_of_rest


@device
def no_part(memory, pool, page_at, first_page, query_pairs, pairs_at, q, sums):
    """Stand behind the last part."""


def make_parts(parts, few_registers):
    """Make the device function that adds K q of two pages of the quad, part after part."""
    if not parts:
        return no_part
    load_blocks, add_blocks, of_page = parts[0]
    rest, all_words = make_parts(parts[1:], few_registers), 2 * of_page

    @device
    def add_parts(memory, pool, page_at, first_page, query_pairs, pairs_at, q, sums):
        words = cuda.local.array(all_words, uint32)
        load_blocks(memory, pool + 4 * int64(page_at[first_page]), words, 0)
        load_blocks(memory, pool + 4 * int64(page_at[first_page + uint32(1)]), words, of_page)
        add_blocks(words, 0, of_page, query_pairs, pairs_at, q, sums)
        if few_registers:
            cuda.syncwarp()  # the next words are loaded only now: registers would not hold more
        rest(memory, pool, page_at, first_page, query_pairs, pairs_at, q, sums)

    return add_parts


def make_profile_scores(profile, dtype, head_dim, rows, few_registers):
    """Make the device function that writes K q of keys of a profile: see `make_scores`.

    sums_of_h[piece][block][u][rows] are those of each block. Results are as they should be, in units of q.
    """
    half_sums, pieces, per_q, pair_words = 4 * rows, pieces_of(dtype), 2 * rows, head_dim // 2 * rows
    blocks = [make_block(profile, block, dtype, head_dim, rows) for block in range(BLOCKS) if profile[block]]
    together = max(1, BLOCKS * 64 // head_dim)
    parts = [make_part(blocks[first : first + together]) for first in range(0, len(blocks), together)]
    add_parts = make_parts(parts, few_registers)
    _, _, write_token = make_key_products(rows)
    lacks = make_choice([FACTORS.get(bits, 0) * (2**bits - 1) for bits in profile])

    @device  # four calls, as of `write_token`
    def start_token(starts, sums, token):
        for row in range(rows):
            sums[token * rows + row] = starts[row]

    @device
    def write_scores(memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at):
        q = cuda.local.array(per_q, uint32)
        sums = cuda.local.array(half_sums, int32)
        starts = cuda.local.array(rows, int32)
        for piece in range(pieces):
            pairs_at = uint32(piece * pair_words + (lane & 3) * rows)
            for row in range(rows):
                starts[row] = 0
                for block in range(BLOCKS):
                    at = uint32((4 * (BLOCKS * piece + block) + (lane & 3)) * rows + row)
                    starts[row] -= sums_of_h[at] * lacks(block)
            for first_b in range(0, 4, 2):
                start_token(starts, sums, 0)
                start_token(starts, sums, 1)
                start_token(starts, sums, 2)
                start_token(starts, sums, 3)
                add_parts(memory, pool, page_at, quad_at + uint32(first_b), query_pairs, pairs_at, q, sums)
                start = uint32(exchange_at + 2 * first_b * rows)
                write_token(sums, 0, piece, exchange, start)
                write_token(sums, 1, piece, exchange, start)
                write_token(sums, 2, piece, exchange, start)
                write_token(sums, 3, piece, exchange, start)

    return write_scores


def make_block_scores(profiles, *common):
    """Make the device function that writes K q of keys of profiles[i]; it does nothing if there are none."""
    if not profiles:
        return device(nothing)
    first = make_profile_scores(profiles[0], *common)
    if len(profiles) == 1:

        @device
        def write_scores(
            memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at, i
        ):
            first(memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at)

        return write_scores
    rest = make_block_scores(profiles[1:], *common)

    @device
    def write_some_scores(
        memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at, i
    ):
        if i == 0:
            first(memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at)
        else:
            rest(memory, pool, page_at, quad_at, lane, query_pairs, sums_of_h, exchange, exchange_at, i - 1)

    return write_some_scores
