"""Attention forward in Numba CUDA, for reading and for GPUs without the CUDA C++ kernels: all in float32.

A block has TILE rows (`cuda/attention_tiles.py`) and takes one tile of keys after the other: scores to shared
memory, the largest of a row, weights exp(score - largest) in their place, and their sum of values, by which
what was summed before is first shrunk to the new largest.

    grid (blocks of rows, KV heads, sequences), block LANES * TILE threads. Thread LANES * r + x: row r; of
    scores the keys x, x + LANES, ... of a tile, of out the channels x, x + LANES, ...

Shared memory: q, and keys, then values: 2 TILE (head_dim + 1) floats; weights, TILE (TILE + 1). Registers:
2 head_dim / LANES sums.
"""

import math

import numpy as np
from numba import cuda, types

from .attention_tiles import (
    LANES,
    LOWEST,
    POINTER_F32,
    POINTER_I32,
    SCORING,
    SHAPE,
    STRIDES,
    device,
    keys_of,
    make_copy,
    make_dot,
    offset,
    score_of,
    sees,
    sequence_of,
)
from .words import ELEMENTS, store_element

float32, int64 = np.float32, np.int64


def make_tile(head_dim, tile):
    """Make the device functions of a tile of keys: scores, their largest, sums of weights and of values."""
    dot, own = make_dot(head_dim), head_dim // LANES

    @device
    def write_scores(
        scores, queries, key_tile, r, x, row, key0, group, behind, keys, left, right, scale, softcap
    ):
        for n in range(x, tile, LANES):
            scores[r, n] = -math.inf
            if sees(row, key0 + n, group, behind, keys, left, right):
                scores[r, n] = score_of(dot(queries, r, key_tile, n), scale, softcap)

    @device
    def largest_of(scores, r, best):
        for n in range(tile):
            best = max(best, scores[r, n])
        return best

    @device
    def add_values(sums, part, weights, values, r, x, rescale):
        tile_total = float32(0)
        for i in range(own):
            part[i] = float32(0)
        for n in range(tile):
            weight = weights[r, n]
            tile_total += weight
            for i in range(own):
                part[i] += weight * values[n, x + LANES * i]
        for i in range(own):
            sums[i] = sums[i] * rescale + part[i]
        return tile_total

    return write_scores, largest_of, add_values


def attend(head_dim, dtype, tile):
    """Make the kernel; head_dim: a multiple of 16 that channels are filled up to."""
    copy, store = make_copy(dtype, head_dim, tile), store_element(dtype)
    write_scores, largest_of, add_values = make_tile(head_dim, tile)
    tall, square, own = (tile, head_dim + 1), (tile, tile + 1), head_dim // LANES

    def kernel(
        q, of_q, k, of_k, v, of_v, out, of_out, lse, lse_batch, lse_head, cu_q, cu_k, ragged,
        seqlen_q, seqlen_k, group, dim, left, right, scale, softcap,
    ):  # fmt: skip
        queries = cuda.shared.array(tall, float32)
        others = cuda.shared.array(tall, float32)
        weights = cuda.shared.array(square, float32)
        batch, start_q, positions = sequence_of(cu_q, ragged, seqlen_q)
        batch, start_k, keys = sequence_of(cu_k, ragged, seqlen_k)
        rows, row0, head = positions * group, int64(cuda.blockIdx.x) * tile, int64(cuda.blockIdx.y)
        if row0 >= rows:
            return
        r, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        row, behind = row0 + r, keys - positions
        copy(queries, q, of_q, batch, start_q, head * group, group, row0, rows, dim)
        sums, part = cuda.local.array(own, float32), cuda.local.array(own, float32)
        for i in range(own):
            sums[i] = float32(0)
        row_max, total = LOWEST, float32(0)
        first, last = keys_of(row0, tile, rows, group, behind, keys, left, right)
        for key0 in range(first, last, tile):
            cuda.syncthreads()  # all are done with the values before
            copy(others, k, of_k, batch, start_k, head, 1, key0, keys, dim)
            cuda.syncthreads()  # keys, at first queries too, are there for all
            write_scores(
                weights, queries, others, r, x, row, key0, group, behind, keys, left, right, scale, softcap
            )
            cuda.syncthreads()  # scores are there for all, and all are done with keys
            best = largest_of(weights, r, row_max)
            copy(others, v, of_v, batch, start_k, head, 1, key0, keys, dim)
            cuda.syncthreads()  # all have seen the scores
            for n in range(x, tile, LANES):
                weights[r, n] = math.exp(weights[r, n] - best)
            cuda.syncthreads()  # weights and values are there for all
            rescale = math.exp(row_max - best)
            tile_total = add_values(sums, part, weights, others, r, x, rescale)
            row_max, total = best, total * rescale + tile_total
        if row < rows:
            position, own_head = start_q + row // group, head * group + row % group
            at = offset(of_out, batch, position, own_head)
            factor = float32(0)
            if total != float32(0):
                factor = float32(1) / total
            for i in range(own):
                channel = x + LANES * i
                if channel < dim:
                    store(out, at + channel, sums[i] * factor)
            if x == 0:
                value = float32(-math.inf)
                if total != float32(0):
                    value = row_max + math.log(total)
                lse[batch * lse_batch + own_head * lse_head + position] = value

    element = types.CPointer(ELEMENTS[dtype])
    tensors = (element, STRIDES) * 4
    lse = POINTER_F32, types.int64, types.int64
    return (
        kernel,
        (*tensors, *lse, POINTER_I32, POINTER_I32, types.int64, *SHAPE, *SCORING),
        (LANES * tile, 1),
    )


# gate: attend head_dim=128 dtype=bfloat16 tile=32 registers<=255 arch=sm_80,sm_90a
