"""Decode attention over packed pages: the softmax of a quad between K q and V^T p, and what stands around it.

Each function makes a device function for one specialisation of the kernel in `cuda/packed.py`, which says how
lanes share a page. All exchange through shared memory within a warp, so every barrier is one of a warp.
"""

import math

import numpy as np
from numba import cuda

from .integers import MAGNITUDE, PIECE, SMALLEST, nearest, pair_of, pieces_of, unit_of
from .packed_blocks import make_choice, words_of_profile
from .packed_query import max_number
from .packed_raw import place_of
from .page import device, words_of_side

int32, uint32, int64, float32 = np.int32, np.uint32, np.int64, np.float32

MERGE_THREADS = 128
HEADROOM = float32(6)
"""How far a score may exceed the running maximum of its row before the maximum follows: what is added up then
has to be rescaled, which costs more than a few larger weights."""


def make_whole_scores(rows, score_stride, softcap, window):
    """Make the device function that adds up the columns of two slots and turns the sums into scores.

    Those of coded keys are multiplied by `factor` and the unit of the query. A row sees positions from
    first_visible[row] on. The result says whether a score exceeds the running maximum of its row by more than
    `HEADROOM`.
    """

    @device
    def whole_scores(
        exchange, start, t, factor, terms, coded, cap, unused, position, first_visible, row_max, sums
    ):
        rises = False
        for row in range(rows):
            s = float32(0)
            for i in range(4):
                s += exchange[start + uint32(i * score_stride + t * rows + row)]
            if coded:
                s = s * (factor * terms[rows + row]) + terms[row]
            if softcap:
                s = cap * float32(math.tanh(s / cap))
            if unused or (window and position < first_visible[row]):
                s = float32(-math.inf)
            rises = rises or s > row_max[row] + HEADROOM
            sums[t * rows + row] = s
        return rises

    return whole_scores


def make_keep(rows):
    """Make the device function that writes a lane's scores to scores[quad][kept rows][64 slots]."""

    @device
    def keep_scores(scores, quad, lane, keep, first_kept, sums):
        slot = 16 * (lane & 3) + 2 * (lane >> 2)  # slots of page after page
        for row in range(rows):
            kept_row = int32(first_kept + row)
            if kept_row >= 0 and kept_row < keep:
                for t in range(2):
                    scores[(int64(quad) * keep + kept_row) * 64 + slot + t] = sums[t * rows + row]

    return keep_scores


def make_row_max(rows, score_stride, out_floats):
    """Make the device function that lets running maxima follow the scores, and shrinks what is added up."""

    @device
    def update_row_max(exchange, own, mine, sums, row_max, total_weight, out):
        before = cuda.local.array(rows, float32)
        rescale = cuda.local.array(rows, float32)
        for row in range(rows):
            before[row] = largest = row_max[row]
            for t in range(2):
                largest = max_number(largest, sums[t * rows + row])
            exchange[uint32(mine + row)] = largest
        cuda.syncwarp()  # the largest scores of all lanes are in shared memory
        for i in range(32):
            for row in range(rows):
                row_max[row] = max_number(row_max[row], exchange[uint32(own + i * score_stride + row)])
        for row in range(rows):
            rescale[row] = math.exp(before[row] - row_max[row])
            total_weight[row] *= rescale[row]
        for i in range(out_floats):
            out[i] *= rescale[i % rows]
        cuda.syncwarp()  # the largest scores are read

    return update_row_max


def make_weights(rows, dtype):
    """Make the device functions that turn scores of a lane's two slots into probabilities, times scales of V.

    Raw values take them as floats, by `place_of`. Coded ones take integers h, as `make_values` wants them, of
    a unit for each row and each 16 tokens that one u takes: lanes 8 u to 8 u + 7 have them.
    """
    pieces = pieces_of(dtype)

    @device
    def exp_scores(sums, t, row_max, total_weight, scale):
        for row in range(rows):
            p = float32(math.exp(sums[t * rows + row] - row_max[row]))
            total_weight[row] += p
            sums[t * rows + row] = p * scale

    @device
    def write_floats(sums, lane, weights, at):
        g, u = lane >> 2, lane & 3
        for t in range(2):  # column g + 8 t of V's tiles of page u
            to = at + (2 * u + t) * 8 * rows + place_of(g, 0, rows)
            for row in range(rows):
                weights[uint32(to) + uint32(place_of(0, row, rows))] = sums[t * rows + row]

    @device
    def write_largest(sums, lane, exchange, own):
        to = uint32(own + (4 * (lane & 7) + (lane >> 3)) * rows)
        for row in range(rows):
            a, b = sums[row].view(uint32) & MAGNITUDE, sums[rows + row].view(uint32) & MAGNITUDE
            exchange[to + uint32(row)] = uint32(max(a, b)).view(float32)

    @device
    def write_pairs(sums, lane, exchange, own, units, units_at, weight_pairs, pairs_at):
        u = lane >> 3
        largest = cuda.local.array(rows, uint32)
        for row in range(rows):
            largest[row] = SMALLEST.view(uint32)
        at = uint32(own + u * rows)
        for i in range(8):
            for row in range(rows):
                largest[row] = max(largest[row], exchange[at + uint32(4 * i * rows + row)].view(uint32))
        b, half = lane & 3, lane >> 2 & 1  # both slots are a pair of V's tiles of page b
        to = uint32(pairs_at + (8 * b + 4 * half + u) * rows)
        for row in range(rows):
            unit, inverse = unit_of(largest[row])
            if lane & 7 == 0:
                units[uint32(units_at + u * rows + row)] = unit
            a, b = sums[row] * inverse, sums[rows + row] * inverse
            for piece in range(pieces):
                weight_pairs[to + uint32(32 * piece * rows + row)] = pair_of(a, b)
                a, b = (a - nearest(a)) / PIECE, (b - nearest(b)) / PIECE

    return exp_scores, write_floats, write_largest, write_pairs


def make_result(head_dim, rows, out_stride):
    """Make the device function that writes the result of a part: sums over lanes, through shared memory."""
    out_floats, part_floats = head_dim // 8 * rows, head_dim + 2

    @device
    def write_result(exchange, own, lane, out, total_weight, row_max, partial, result):
        for i in range(out_floats):
            exchange[uint32(own + lane * out_stride + i)] = out[i]
        for row in range(rows):
            exchange[uint32(own + lane * out_stride + out_floats + row)] = total_weight[row]
        cuda.syncwarp()  # the sums of all lanes are in shared memory
        if lane < rows:
            total = float32(0)
            for i in range(32):
                total += exchange[uint32(own + i * out_stride + out_floats + lane)]
            partial[(result + lane) * part_floats + head_dim + 1] = total
        for row in range(rows):
            to = (result + row) * part_floats
            partial[to + head_dim] = row_max[row]
            for channel in range(lane, head_dim, 32):
                x = float32(0)
                for i in range(4):
                    at = own + (4 * (channel % 8) + i) * out_stride
                    x += exchange[uint32(at + (channel // 16 * 2 + channel % 16 // 8) * rows + row)]
                partial[to + channel] = x
        cuda.syncwarp()  # the sums are read before the next round exchanges anything

    return write_result


def make_widths(head_dim, dtype, widths_k, widths_v, profiles):
    """Make the device function that returns the widths of a rung, 0 for 16, and where parts of a page begin.

    In words from the codes of K, which come first: scales of K, codes of V, scales of V, positions; then the
    words of the record. At width 16 there are no scales. With `profiles`, a list, the width of K is the
    number of a profile, from 1 on.
    """
    raw_words, tiles = words_of_side(16, dtype, head_dim), head_dim // 16
    width_of_flag = {1: 2, 2: 3, 4: 4, 8: 8, 16: 0}
    only_k, only_v = width_of_flag.get(widths_k, -1), width_of_flag.get(widths_v, -1)
    if profiles:
        only_k = 1 if len(profiles) == 1 and not widths_k & 16 else -1

    @device
    def side_words(width):
        return raw_words if width == 0 else (tiles * width + 3) // 4 * 32

    k_words = side_words
    if profiles:
        k_words = make_choice([raw_words, *(words_of_profile(x, head_dim) for x in profiles)])

    @device
    def widths_of(bits_k, bits_v, rung):
        width_k = (bits_k >> (4 * rung)) & 15 if only_k < 0 else only_k
        width_v = (bits_v >> (4 * rung)) & 15 if only_v < 0 else only_v
        k_scales = k_words(width_k)
        v_codes = k_scales + (4 if width_k else 0)
        v_scales = v_codes + side_words(width_v)
        positions = v_scales + (4 if width_v else 0)
        return width_k, width_v, k_scales, v_codes, v_scales, positions, positions + 12

    return widths_of


@device
def first_page(counts):
    """Return the first page of a quad that holds tokens, if any does, from the word with all counts."""
    if counts & uint32(0xFFFF):
        return 0 if counts & uint32(0xFF) else 1
    return 2 if counts & uint32(0xFF0000) else 3


@device
def position_of(base, pair, t):
    """Return the position of one of two slots: `base` has its upper 16 bits, a half of `pair` the others."""
    return (int64(base) << 16) + int64((pair >> uint32(16 * t)) & uint32(0xFFFF))
