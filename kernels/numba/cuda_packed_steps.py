"""Decode attention over packed pages: the steps of a page between K q and V^T p, and what stands around them.

Each function makes a device function for one specialisation of the kernel in `cuda_packed.py`, which says how
lanes share a page. All exchange through shared memory within a warp, so every barrier is one of a warp.
"""

import math

import numpy as np
from numba import cuda

from .cuda_packed_products import FLAGS, place_of
from .cuda_page import device, factor_of, from_float16, is_exact, widened

uint32, int64, float32 = np.uint32, np.int64, np.float32

MERGE_THREADS = 128
HEADROOM = float32(6)
"""How far a score may exceed the running maximum of its row before the maximum follows: what is added up then
has to shrink, which costs more than a few larger weights."""


def make_hadamard(head_dim, threads):
    """Make the device function that rotates a vector in shared memory, not normalised.

    `threads` share the butterflies: those of a warp (32) or of a block.
    """
    block, each = head_dim & -head_dim, -(-head_dim // (2 * threads))
    whole_block = threads > 32

    @device
    def hadamard(x, at, thread):
        h = 1
        while h < block:
            for j in range(each):
                i = thread + j * threads
                if i < head_dim // 2:
                    low = at + 2 * i - (i & (h - 1))
                    a, b = x[low], x[low + h]
                    x[low], x[low + h] = a + b, a - b
            if whole_block:
                cuda.syncthreads()  # this stage is in shared memory
            else:
                cuda.syncwarp()
            h *= 2

    return hadamard


def make_queries(head_dim, dtype, rows, widths):
    """Make the device function that brings the query rows to shared memory, once for each of the `widths`.

    A warp takes a row at a time. Rows are scaled, in the order in which lanes want them; for coded widths
    they are rotated, and each x is what `factor_of` wants. In terms[2][rows] come the product with the mean
    of the keys, and the sum of x.
    """
    widen, hadamard, each = widened(dtype), make_hadamard(head_dim, 32), -(-head_dim // 32)
    norm = float32(1 / math.sqrt(head_dim & -head_dim))
    occurring = [bits % 16 for bits, flag in FLAGS.items() if widths & flag]
    copies, raw, row_floats, exact = len(occurring), widths & 16 != 0, rows * head_dim, is_exact(dtype)
    all_bits = sum(bits << 4 * i for i, bits in enumerate(occurring))

    @device
    def bring_row(q, source, k_mean, mean_at, scale, row, lane, queries, exchange, own, terms):
        mean_sum, x_sum = float32(0), float32(0)
        for i in range(each):
            channel = lane + 32 * i
            if channel < head_dim:
                x = widen(q[source + channel])
                exchange[own + channel] = x
                mean_sum += x * from_float16(k_mean[mean_at + channel])
                if raw:
                    queries[query_place(channel, row, rows) + (copies - 1) * row_floats] = x * scale
        cuda.syncwarp()  # the row is in shared memory
        hadamard(exchange, own, lane)
        for i in range(each):
            channel = lane + 32 * i
            if channel < head_dim:
                x = exchange[own + channel] * norm
                if channel & 1:
                    x = -x
                x_sum += x
                for copy in range(copies):
                    bits = (all_bits >> (4 * copy)) & 15
                    if bits:
                        place = query_place(channel, row, rows) + copy * row_floats
                        queries[place] = x * scale * factor_of(bits, channel % 16, exact)
        cuda.syncwarp()  # the rotated row is read
        exchange[own + lane], exchange[own + 32 + lane] = mean_sum, x_sum
        cuda.syncwarp()  # the 32 parts of both sums are there
        if lane < 2:
            total = float32(0)
            for i in range(32):
                total += exchange[own + 32 * lane + i]
            terms[lane * rows + row] = total * scale
        cuda.syncwarp()  # the parts are read before the next row comes

    return bring_row


def make_whole_scores(rows, score_stride, softcap, window):
    """Make the device function that adds up the columns of two slots and turns the sums into scores.

    Those of coded keys are multiplied by `factor`, the sums of x by `level`. A row sees positions from
    lowest[row] on. The result says whether a score exceeds the running maximum of
    its row by more than `HEADROOM`.
    """

    @device
    def whole_scores(
        exchange, start, t, factor, level, terms, coded, cap, unused, position, lowest, peak, sums
    ):
        rises = False
        for row in range(rows):
            s = float32(0)
            for i in range(4):
                s += exchange[start + uint32(i * score_stride + t * rows + row)]
            if coded:
                s = s * factor + (terms[row] - level * terms[rows + row])
            if softcap:
                s = cap * float32(math.tanh(s / cap))
            if unused or (window and position < lowest[row]):
                s = float32(-math.inf)
            rises = rises or s > peak[row] + HEADROOM
            sums[t * rows + row] = s
        return rises

    return whole_scores


def make_raise(rows, score_stride, out_floats):
    """Make the device function that lets running maxima follow the scores, and shrinks what is added up."""

    @device
    def raise_peaks(exchange, own, mine, sums, peak, total_weight, x_sum, out):
        before = cuda.local.array(rows, float32)
        shrink = cuda.local.array(rows, float32)
        for row in range(rows):
            before[row] = largest = peak[row]
            for t in range(2):
                largest = max_number(largest, sums[t * rows + row])
            exchange[uint32(mine + row)] = largest
        cuda.syncwarp()  # the largest scores of all lanes are in shared memory
        for i in range(32):
            for row in range(rows):
                peak[row] = max_number(peak[row], exchange[uint32(own + i * score_stride + row)])
        for row in range(rows):
            shrink[row] = math.exp(before[row] - peak[row])
            total_weight[row] *= shrink[row]
            x_sum[row] *= shrink[row]
        for i in range(out_floats):
            out[i] *= shrink[i % rows]

    return raise_peaks


def make_weights(rows):
    """Make the device function that turns scores of a slot into probabilities, and these into x of V."""

    @device
    def write_weights(sums, t, peak, total_weight, factor, level, x_sum, weights, to):
        for row in range(rows):
            p = float32(math.exp(sums[t * rows + row] - peak[row]))
            total_weight[row] += p
            x_sum[row] += p * level
            weights[uint32(to) + uint32(place_of(0, row, rows))] = p * factor

    return write_weights


def make_result(head_dim, rows, out_stride):
    """Make the device function that writes the result of a part: sums over lanes, through shared memory.

    A channel's is multiplied by `factor`, after which the sum of x is taken off.
    """
    out_floats, part_floats = head_dim // 8 * rows, head_dim + 2

    @device
    def write_result(exchange, own, lane, out, total_weight, x_sum, factor, peak, partial, result):
        for i in range(out_floats):
            exchange[uint32(own + lane * out_stride + i)] = out[i]
        for row in range(rows):
            at = own + lane * out_stride + out_floats + row
            exchange[uint32(at)], exchange[uint32(at + rows)] = total_weight[row], x_sum[row]
        cuda.syncwarp()  # the sums of all lanes are in shared memory
        total = float32(0)
        if lane < 2 * rows:
            for i in range(32):
                total += exchange[own + i * out_stride + out_floats + lane]
        if lane < rows:
            partial[(result + lane) * part_floats + head_dim + 1] = total
        cuda.syncwarp()  # they are read before totals take the place of those of lane 0
        if lane < 2 * rows:
            exchange[own + out_floats + lane] = total
        cuda.syncwarp()  # the totals are in shared memory
        for row in range(rows):
            to = (result + row) * part_floats
            partial[to + head_dim] = peak[row]
            for channel in range(lane, head_dim, 32):
                x = float32(0)
                for i in range(4):
                    at = own + (4 * (channel % 8) + i) * out_stride
                    x += exchange[uint32(at + (channel // 16 * 2 + channel % 16 // 8) * rows + row)]
                partial[to + channel] = x * factor - exchange[own + out_floats + rows + row]
        cuda.syncwarp()  # the sums are read before the next round exchanges anything

    return write_result


def make_find_page(head_dim, dtype, widths_k, widths_v):
    """Make the device function that returns where a page is: its codes of K and of V, and its steps.

    Also its widths, 0 for 16. Steps of V follow those of K, then come the positions.
    """
    raw_words = head_dim * 64 // (1 if dtype == "float32" else 2)
    width_of_flag = {1: 2, 2: 3, 4: 4, 8: 8, 16: 0}
    only_k, only_v = width_of_flag.get(widths_k, -1), width_of_flag.get(widths_v, -1)

    @device
    def find_page(pool_at, bits_k, bits_v, unit, rung, number):
        width_k = (bits_k >> (4 * rung)) & 15 if only_k < 0 else only_k
        width_v = (bits_v >> (4 * rung)) & 15 if only_v < 0 else only_v
        k_words = raw_words if width_k == 0 else 2 * head_dim * width_k
        v_words = raw_words if width_v == 0 else 2 * head_dim * width_v
        record = k_words + v_words + (16 if width_k else 0) + (16 if width_v else 0) + 48
        at = pool_at[rung] + number * (unit if unit else record)
        return width_k, width_v, at, at + k_words, at + k_words + v_words

    return find_page


@device
def position_of(base, pair, t):
    """Return the position of one of two slots: `base` has its upper 16 bits, a half of `pair` the others."""
    return (int64(base) << 16) + int64((pair >> uint32(16 * t)) & uint32(0xFFFF))


@device
def query_place(channel, row, rows):
    """Return where an element of q is: [channel // 8][place of the column and row]."""
    return channel // 8 * 8 * rows + place_of(channel % 8, row, rows)


@device
def max_number(a, b):
    """Return the larger one; b is passed over if it is NaN."""
    return b if b > a else a
