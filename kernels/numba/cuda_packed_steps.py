"""Decode attention over packed pages: the steps of a page between K q and V^T p, and what stands around them.

Each function makes a device function for one specialisation of the kernel in `cuda_packed.py`, which says how
lanes share a page. All exchange through shared memory within a warp, so every barrier is one of a warp.
"""

import math

import numpy as np
from numba import cuda

from .cuda_page import device, from_float16, widened

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


def make_queries(head_dim, dtype, rows):
    """Make the device function that brings the query rows to shared memory: rotated, and raw behind them.

    A warp takes a row at a time. Rows are scaled, in the order in which lanes want them; bias[row] becomes
    the product with the mean of the keys.
    """
    widen, hadamard, each = widened(dtype), make_hadamard(head_dim, 32), -(-head_dim // 32)
    norm = float32(1 / math.sqrt(head_dim & -head_dim))

    @device
    def bring_row(q, source, k_mean, mean_at, scale, row, lane, queries, exchange, own, bias):
        mean_sum = float32(0)
        for i in range(each):
            channel = lane + 32 * i
            if channel < head_dim:
                x = widen(q[source + channel])
                exchange[own + channel] = x
                mean_sum += x * from_float16(k_mean[mean_at + channel])
                queries[query_place(channel, row, rows) + rows * head_dim] = x * scale
        cuda.syncwarp()  # the row is in shared memory
        hadamard(exchange, own, lane)
        for i in range(each):
            channel = lane + 32 * i
            if channel < head_dim:
                rotated = exchange[own + channel] * norm
                queries[query_place(channel, row, rows)] = rotated * scale
        cuda.syncwarp()  # the rotated row is read
        exchange[own + lane] = mean_sum
        cuda.syncwarp()  # its 32 parts of the product with the mean are there
        if lane == 0:
            total = float32(0)
            for i in range(32):
                total += exchange[own + i]
            bias[row] = total * scale
        cuda.syncwarp()  # the parts are read before the next row comes

    return bring_row


def make_whole_scores(rows, score_stride, softcap, window):
    """Make the device function that adds up the columns of two slots and turns the sums into scores.

    A row sees positions from lowest[row] on. The result says whether a score exceeds the running maximum of
    its row by more than `HEADROOM`.
    """

    @device
    def whole_scores(exchange, start, t, factor, bias, coded, cap, unused, position, lowest, peak, sums):
        rises = False
        for row in range(rows):
            s = float32(0)
            for i in range(4):
                s += exchange[start + uint32(i * score_stride + t * rows + row)]
            s *= factor
            if coded:
                s += bias[row]
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
    def raise_peaks(exchange, own, mine, sums, peak, total_weight, out):
        before = cuda.local.array(rows, float32)
        shrink = cuda.local.array(rows, float32)
        for row in range(rows):
            largest = peak[row]
            for t in range(2):
                largest = max_number(largest, sums[t * rows + row])
            exchange[uint32(mine + row)] = largest
        cuda.syncwarp()  # the largest scores of all lanes are in shared memory
        for row in range(rows):
            before[row] = peak[row]
        for i in range(32):
            for row in range(rows):
                peak[row] = max_number(peak[row], exchange[uint32(own + i * score_stride + row)])
        for row in range(rows):
            shrink[row] = math.exp(before[row] - peak[row])
            total_weight[row] *= shrink[row]
        for i in range(out_floats):
            out[i] *= shrink[i % rows]

    return raise_peaks


def make_weights(rows):
    """Make the device function that turns scores of a slot into probabilities, times the step of V."""

    @device
    def write_weights(sums, t, peak, total_weight, factor, unused, weights, to):
        for row in range(rows):
            p = float32(math.exp(sums[t * rows + row] - peak[row]))
            total_weight[row] += p
            p *= factor
            if unused:
                p = float32(0)  # the step of an unused slot may be NaN
            weights[uint32(to + 4 * row)] = p

    return write_weights


def make_result(head_dim, rows, out_stride):
    """Make the device function that writes the result of a part: sums over lanes, through shared memory."""
    out_floats, part_floats = head_dim // 8 * rows, head_dim + 2

    @device
    def write_result(exchange, own, lane, out, total_weight, peak, partial, result):
        for i in range(out_floats):
            exchange[uint32(own + lane * out_stride + i)] = out[i]
        for row in range(rows):
            exchange[uint32(own + lane * out_stride + out_floats + row)] = total_weight[row]
        cuda.syncwarp()  # the sums of all lanes are in shared memory
        for row in range(rows):
            to = (result + row) * part_floats
            for channel in range(lane, head_dim, 32):
                x = float32(0)
                for i in range(4):
                    at = own + (4 * (channel % 8) + i) * out_stride
                    x += exchange[uint32(at + (channel // 16 * 2 + channel % 16 // 8) * rows + row)]
                partial[to + channel] = x
        if lane < rows:
            total = float32(0)
            for i in range(32):
                total += exchange[own + i * out_stride + out_floats + lane]
            partial[(result + lane) * part_floats + head_dim + 1] = total
        for row in range(rows):
            partial[(result + row) * part_floats + head_dim] = peak[row]
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
    """Return where an element of q is: [block of channels][u][rows][columns 2 u, 2 u + 1, and 8 later]."""
    column = channel % 16
    u, i = column % 8 // 2, column // 8 * 2 + column % 2
    return ((channel // 16 * 4 + u) * rows + row) * 4 + i


@device
def max_number(a, b):
    """Return the larger one; b is passed over if it is NaN."""
    return b if b > a else a
