"""Gradients of attention in Numba CUDA, for reading and for GPUs without the CUDA C++ kernels: in float32.

Probabilities follow again from q, k and the log-sum-exp of a row, p = exp(score - lse), and their slopes are
ds = p (dout v - delta), with delta = dout out of the row. Three kernels: `prepare` finds the deltas, `dpsum`;
one block of `attend_queries` sums dq = ds k of TILE rows over tiles of keys; one of `attend_keys` sums dk =
ds q and dv = p dout of TILE keys over the query heads of a group and tiles of rows. Both of these compute ds
for themselves, seven products where five would do. For that no block adds to what another sums: the same bits
come out every time.

    grid (blocks of rows or keys, KV heads, sequences), block LANES * TILE threads, as in cuda/attention.py:
    thread LANES * r + x has row (or key) r, of slopes the keys (or rows) x, x + LANES, ..., of gradients the
    channels x, x + LANES, ...

Shared memory: q, dout, keys and values, 4 TILE (head_dim + 1) floats; slopes, probabilities, TILE (TILE + 1)
each. Registers: up to 4 head_dim / LANES sums.
"""

import math

import numpy as np
from numba import cuda, types

from .attention_tiles import (
    LANES,
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
    rows_of,
    sees,
    sequence_of,
)
from .words import ELEMENTS, load_element, store_element

float32, int64 = np.float32, np.int64


def arguments(dtype, gradients):
    """Return the types of what the two main kernels take: q, k, v, dout and `gradients`, then the same."""
    element = types.CPointer(ELEMENTS[dtype])
    rows = POINTER_F32, POINTER_F32, types.int64, types.int64, types.int64, types.int64  # lse, dpsum
    return (
        *((element, STRIDES) * (4 + gradients)),
        *rows, POINTER_I32, POINTER_I32, types.int64, *SHAPE, *SCORING,
    )  # fmt: skip


def make_slope(head_dim):
    """Make the device function of a row's probability at a key, and its slope."""
    dot = make_dot(head_dim)

    @device
    def slope(queries, above, r, keys, values, n, lse, delta, scale, softcap):
        score = dot(queries, r, keys, n) * scale
        bent = scale
        if softcap > float32(0):
            turned = math.tanh(score / softcap)
            score, bent = softcap * turned, scale * (float32(1) - turned * turned)
        p = math.exp(score - lse)
        return p, p * (dot(above, r, values, n) - delta) * bent

    return slope


def prepare(dtype):
    """Make the kernel of `dpsum`: a thread a row (position, head), 128 a block."""
    load = load_element(dtype)

    def kernel(dout, of_dout, out, of_out, dpsum, batch_step, head_step, positions, heads, dim, count):
        i = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)
        if i >= count:
            return
        position, head = i % positions, i // positions % heads
        batch = i // positions // heads
        at, other = offset(of_dout, batch, position, head), offset(of_out, batch, position, head)
        total = float32(0)
        for channel in range(dim):
            total += load(dout, at + channel) * load(out, other + channel)
        dpsum[batch * batch_step + head * head_step + position] = total

    element = types.CPointer(ELEMENTS[dtype])
    return kernel, (element, STRIDES, element, STRIDES, POINTER_F32, *(types.int64,) * 6), (128, 1)


def make_row_tile(head_dim, tile):
    """Make the device functions of a tile of keys for the rows of a block: slopes, then the sums of dq."""
    slope, own = make_slope(head_dim), head_dim // LANES

    @device
    def write_slopes(
        slopes, queries, above, keys, values, r, x, row, rows, key0, group, behind, length, left, right,
        row_lse, delta, scale, softcap,
    ):  # fmt: skip
        for n in range(x, tile, LANES):
            slopes[r, n] = float32(0)
            if row < rows and sees(row, key0 + n, group, behind, length, left, right):
                _, slopes[r, n] = slope(queries, above, r, keys, values, n, row_lse, delta, scale, softcap)

    @device
    def add_slopes(sums, part, slopes, keys, r, x):
        for i in range(own):
            part[i] = float32(0)
        for n in range(tile):
            for i in range(own):
                part[i] += slopes[r, n] * keys[n, x + LANES * i]
        for i in range(own):
            sums[i] += part[i]

    return write_slopes, add_slopes


def attend_queries(head_dim, dtype, tile):
    """Make the kernel of dq."""
    copy, (write_slopes, add_slopes) = make_copy(dtype, head_dim, tile), make_row_tile(head_dim, tile)
    tall, square, own = (tile, head_dim + 1), (tile, tile + 1), head_dim // LANES
    store = store_element(dtype)

    def kernel(
        q, of_q, k, of_k, v, of_v, dout, of_dout, dq, of_dq, lse, dpsum, lse_batch, lse_head,
        delta_batch, delta_head, cu_q, cu_k, ragged,
        seqlen_q, seqlen_k, group, dim, left, right, scale, softcap,
    ):  # fmt: skip
        queries = cuda.shared.array(tall, float32)
        above = cuda.shared.array(tall, float32)
        keys = cuda.shared.array(tall, float32)
        values = cuda.shared.array(tall, float32)
        slopes = cuda.shared.array(square, float32)
        batch, start_q, positions = sequence_of(cu_q, ragged, seqlen_q)
        batch, start_k, length = sequence_of(cu_k, ragged, seqlen_k)
        rows, row0, head = positions * group, int64(cuda.blockIdx.x) * tile, int64(cuda.blockIdx.y)
        if row0 >= rows:
            return
        r, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        row, behind = row0 + r, length - positions
        copy(queries, q, of_q, batch, start_q, head * group, group, row0, rows, dim)
        copy(above, dout, of_dout, batch, start_q, head * group, group, row0, rows, dim)
        position, own_head = start_q + row // group, head * group + row % group
        row_lse, delta = float32(0), float32(0)
        if row < rows:
            row_lse = lse[batch * lse_batch + own_head * lse_head + position]
            delta = dpsum[batch * delta_batch + own_head * delta_head + position]
        sums, part = cuda.local.array(own, float32), cuda.local.array(own, float32)
        for i in range(own):
            sums[i] = float32(0)
        first, last = keys_of(row0, tile, rows, group, behind, length, left, right)
        for key0 in range(first, last, tile):
            cuda.syncthreads()  # all are done with the tile before
            copy(keys, k, of_k, batch, start_k, head, 1, key0, length, dim)
            copy(values, v, of_v, batch, start_k, head, 1, key0, length, dim)
            cuda.syncthreads()  # keys and values, at first the rows too, are there for all
            write_slopes(
                slopes, queries, above, keys, values, r, x, row, rows, key0, group, behind, length, left,
                right, row_lse, delta, scale, softcap,
            )  # fmt: skip
            cuda.syncthreads()  # slopes are there for all
            add_slopes(sums, part, slopes, keys, r, x)
        if row < rows:
            at = offset(of_dq, batch, position, own_head)
            for i in range(own):
                if x + LANES * i < dim:
                    store(dq, at + x + LANES * i, sums[i])

    return kernel, arguments(dtype, 1), (LANES * tile, 1)


def make_key_tile(head_dim, tile):
    """Make the device functions of a tile of rows for the keys of a block: products, sums of dk and dv."""
    slope, own = make_slope(head_dim), head_dim // LANES

    @device
    def write_products(
        weights, slopes, queries, above, keys, values, n, x, key, row0, rows, head, start_q, group, behind,
        length, left, right, lse, lse_at, lse_head, dpsum, delta_at, delta_head, scale, softcap,
    ):  # fmt: skip
        for r in range(x, tile, LANES):
            row = row0 + r
            weights[n, r] = float32(0)
            slopes[n, r] = float32(0)
            if row < rows and sees(row, key, group, behind, length, left, right):
                at = start_q + row // group
                own_head = head * group + row % group
                row_lse = lse[lse_at + own_head * lse_head + at]
                delta = dpsum[delta_at + own_head * delta_head + at]
                weights[n, r], slopes[n, r] = slope(
                    queries, above, r, keys, values, n, row_lse, delta, scale, softcap
                )

    @device
    def add_products(sums_k, part_k, sums_v, part_v, slopes, weights, queries, above, n, x):
        for i in range(own):
            part_k[i] = float32(0)
            part_v[i] = float32(0)
        for r in range(tile):
            for i in range(own):
                part_k[i] += slopes[n, r] * queries[r, x + LANES * i]
                part_v[i] += weights[n, r] * above[r, x + LANES * i]
        for i in range(own):
            sums_k[i] += part_k[i]
            sums_v[i] += part_v[i]

    return write_products, add_products


def attend_keys(head_dim, dtype, tile):
    """Make the kernel of dk and dv."""
    copy, (write_products, add_products) = make_copy(dtype, head_dim, tile), make_key_tile(head_dim, tile)
    tall, square, own = (tile, head_dim + 1), (tile, tile + 1), head_dim // LANES
    store = store_element(dtype)

    def kernel(
        q, of_q, k, of_k, v, of_v, dout, of_dout, dk, of_dk, dv, of_dv, lse, dpsum, lse_batch, lse_head,
        delta_batch, delta_head, cu_q, cu_k, ragged,
        seqlen_q, seqlen_k, group, dim, left, right, scale, softcap,
    ):  # fmt: skip
        queries = cuda.shared.array(tall, float32)
        above = cuda.shared.array(tall, float32)
        keys = cuda.shared.array(tall, float32)
        values = cuda.shared.array(tall, float32)
        slopes = cuda.shared.array(square, float32)
        weights = cuda.shared.array(square, float32)
        batch, start_q, positions = sequence_of(cu_q, ragged, seqlen_q)
        batch, start_k, length = sequence_of(cu_k, ragged, seqlen_k)
        key0, head, rows = int64(cuda.blockIdx.x) * tile, int64(cuda.blockIdx.y), positions * group
        if key0 >= length:
            return
        n, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        key, behind = key0 + n, length - positions
        copy(keys, k, of_k, batch, start_k, head, 1, key0, length, dim)
        copy(values, v, of_v, batch, start_k, head, 1, key0, length, dim)
        sums_k, part_k = cuda.local.array(own, float32), cuda.local.array(own, float32)
        sums_v, part_v = cuda.local.array(own, float32), cuda.local.array(own, float32)
        for i in range(own):
            sums_k[i] = float32(0)
            sums_v[i] = float32(0)
        first, last = rows_of(key0, tile, rows, group, behind, length, left, right)
        for row0 in range(first, last, tile):
            cuda.syncthreads()  # all are done with the tile before
            copy(queries, q, of_q, batch, start_q, head * group, group, row0, rows, dim)
            copy(above, dout, of_dout, batch, start_q, head * group, group, row0, rows, dim)
            cuda.syncthreads()  # rows, at first keys and values too, are there for all
            write_products(
                weights, slopes, queries, above, keys, values, n, x, key, row0, rows, head, start_q, group,
                behind, length, left, right, lse, batch * lse_batch, lse_head, dpsum, batch * delta_batch,
                delta_head, scale, softcap,
            )  # fmt: skip
            cuda.syncthreads()  # probabilities and slopes are there for all
            add_products(sums_k, part_k, sums_v, part_v, slopes, weights, queries, above, n, x)
        if key < length:
            at_k = offset(of_dk, batch, start_k + key, head)
            at_v = offset(of_dv, batch, start_k + key, head)
            for i in range(own):
                if x + LANES * i < dim:
                    store(dk, at_k + x + LANES * i, sums_k[i])
                    store(dv, at_v + x + LANES * i, sums_v[i])

    return kernel, arguments(dtype, 2), (LANES * tile, 1)


# gate: prepare dtype=bfloat16 registers<=64 arch=sm_80,sm_90a
# gate: attend_queries head_dim=128 dtype=bfloat16 tile=16 registers<=255 arch=sm_80,sm_90a
# gate: attend_keys head_dim=128 dtype=bfloat16 tile=16 registers<=255 arch=sm_80,sm_90a
