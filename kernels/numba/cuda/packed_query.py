"""Decode attention over packed pages: how a query row comes to shared memory, in the frame of the keys.

What a key of the frame is multiplied by is in kvlab/reference/packed.py, of keys in blocks of channels in
kvlab/reference/blocks.py.
"""

import math

import numpy as np
from numba import cuda

from .integers import MAX_FIXED_POINT, PIECE, SMALLEST, nearest, pair_of, pieces_of
from .packed_raw import place_of
from .page import BLOCKS, device, from_float16, power_of_two, widened

int32, uint32, float32 = np.int32, np.uint32, np.float32


def make_hadamard(head_dim, threads, block):
    """Make the device function that rotates a vector in shared memory, not normalised, in blocks of so many.

    `threads` share the butterflies: those of a warp (32) or of a thread block.
    """
    each = -(-head_dim // (2 * threads))
    whole_block = threads > 32

    @device
    def hadamard(x, at, thread):
        h = 1
        while h < block:
            for j in range(each):
                i = thread + j * threads
                if i < head_dim // 2:
                    low = uint32(at + 2 * i - (i & (h - 1)))
                    high = uint32(low + h)
                    a, b = x[low], x[high]
                    x[low], x[high] = a + b, a - b
            if whole_block:
                cuda.syncthreads()  # this stage is in shared memory
            else:
                cuda.syncwarp()
            h *= 2

    return hadamard


def block_of(channels):
    """Return in blocks of how many channels so many are rotated: the largest power of 2 that divides them."""
    return channels & -channels


def make_queries(head_dim, dtype, rows, widths, in_blocks):
    """Make the device function that brings a query row, scaled, to shared memory; a warp takes one at a time.

    For raw keys it comes as it is, by `query_place`. For coded ones it is rotated and becomes integers h of
    one unit, as `make_scores` wants them. In terms[2][rows] come the product with the mean of the keys and
    the unit. For keys `in_blocks` it comes in their order, and is rotated in each block.
    """
    widen, each, quarter = widened(dtype), -(-head_dim // 32), head_dim // BLOCKS
    block = block_of(quarter if in_blocks else head_dim)
    hadamard, norm = make_hadamard(head_dim, 32, block), float32(1 / math.sqrt(block))
    if in_blocks:
        norm = float32(2.0 ** -((block.bit_length() - 1) // 2))
    raw, coded, pieces = widths & 16 != 0, widths & 15 != 0, pieces_of(dtype)
    words = half = head_dim // 2
    each_word = -(-words // 32)

    @device
    def channel_of_position(k_order, half_at, position):
        of_half = quarter // 2
        part = position // of_half  # two of a block: rotary pairs, and the same again
        return int32(k_order[half_at + position - of_half * ((part + 1) // 2)]) + half * (part & 1)

    @device
    def bring_pairs(x, row, lane, query_pairs, sums_of_h, exchange, own, inverse):
        for piece in range(pieces):
            sum_of_h = float32(0)
            for i in range(each):
                channel = lane + 32 * i
                if channel < head_dim:
                    if piece == 0:
                        x[i] *= inverse
                    h = nearest(x[i])
                    exchange[uint32(own + channel)] = h
                    sum_of_h += h
                    x[i] = (x[i] - h) / PIECE
            exchange[uint32(own + head_dim + lane)] = sum_of_h
            cuda.syncwarp()  # all h are there
            for i in range(each_word):
                word = lane + 32 * i
                if word < words:
                    channel = 16 * (word >> 3) + 2 * (word & 3) + (word >> 2 & 1)
                    pair = pair_of(exchange[uint32(own + channel)], exchange[uint32(own + channel + 8)])
                    query_pairs[uint32((piece * words + word) * rows + row)] = pair
            if in_blocks and lane < 4 * BLOCKS:
                sum_of_h, first = float32(0), own + quarter * (lane >> 2) + 2 * (lane & 3)
                for i in range(0, quarter, 8):
                    sum_of_h += exchange[uint32(first + i)] + exchange[uint32(first + i + 1)]
                sums_of_h[(4 * BLOCKS * piece + lane) * rows + row] = int32(sum_of_h)
            elif lane < 4 and not in_blocks:
                sum_of_h = float32(0)
                for i in range(8):  # all channels of lanes 8 j + 2 u and 8 j + 2 u + 1 are columns of u
                    sum_of_h += exchange[uint32(own + head_dim + 8 * (i >> 1) + 2 * lane + (i & 1))]
                sums_of_h[(4 * piece + lane) * rows + row] = int32(sum_of_h)
            cuda.syncwarp()  # they are read before others come

    @device
    def bring_row(
        q, source, k_mean, k_shift, frame_at, scale, row, lane, raw_queries, query_pairs, sums_of_h,
        exchange, own, terms, exponent, k_order, k_gain,
    ):  # fmt: skip
        mean_sum, largest, half_at = float32(0), SMALLEST, frame_at // 2
        x = cuda.local.array(each, float32)
        for i in range(each):
            position = lane + 32 * i
            if position < head_dim:
                channel = channel_of_position(k_order, half_at, position) if in_blocks else position
                x[i] = widen(q[source + channel]) * scale
                exchange[own + position] = x[i] * float32(
                    int32(1) << int32(k_shift[half_at + channel % half])
                )
                mean_sum += x[i] * from_float16(k_mean[frame_at + channel])
                if raw:
                    raw_queries[query_place(channel, row, rows)] = x[i]
        cuda.syncwarp()  # the row is in shared memory
        if coded:
            hadamard(exchange, own, lane)
            for i in range(each):
                position = lane + 32 * i
                if position < head_dim:
                    x[i] = exchange[own + position] * norm
                    if in_blocks:
                        x[i] /= k_gain[(frame_at + position) // quarter]
                    largest = max_number(largest, abs(x[i]))
            cuda.syncwarp()  # the rotated row is read
            exchange[own + lane], exchange[own + 32 + lane] = mean_sum, largest
            cuda.syncwarp()  # the 32 parts of the sum, and of the largest, are there
            mean_sum = float32(0)
            for i in range(32):
                mean_sum += exchange[uint32(own + i)]
                largest = max_number(largest, exchange[uint32(own + 32 + i)])
            if lane == 0:
                power = power_of_two(int32(exponent[frame_at // head_dim * 2]))
                terms[row] = mean_sum * power
                terms[rows + row] = largest / float32(MAX_FIXED_POINT) * power
            cuda.syncwarp()  # they are read before others come
            bring_pairs(
                x, row, lane, query_pairs, sums_of_h, exchange, own, float32(MAX_FIXED_POINT) / largest
            )

    return bring_row


@device
def query_place(channel, row, rows):
    """Return where an element of q is: [channel // 8][place of the column and row]."""
    return channel // 8 * 8 * rows + place_of(channel % 8, row, rows)


@device
def max_number(a, b):
    """Return the larger one; b is passed over if it is NaN."""
    return b if b > a else a
