"""Attention of whole sequences on the CPU: tile by tile of keys, with a running softmax, in float32.

    scores[key][24]        = K tile (keys x channels) @ queries[channel][24]
    row_max, row_sum [24]  running maximum and sum of exp2: lane by lane, nothing is reduced across lanes
    totals[channel][24]    = totals * rescale + V tile^T (channels x keys) @ weights[key][24]

Panels and tiles are those of cpu/tiles.py. An item of work is 8 panels against all keys they see; a tile of
64 keys is widened to float32 once for the 8 (with 4, reading tiles took 15 % of the time). Threads take items
from a counter, and the answer does not depend on which thread took which. Scratch memory of a thread at
head_dim 128: 68 KiB of keys and values, 192 KiB of queries and totals, 6 KiB of scores.

Queries are not scaled: scores are, inside the exponent, exp2(scale_log2 * score - row_max), rounded once. In
float32 large weights are computed again from scores in float64 (`sharpen`), and all of nearly equal keys.
"""

import math

import numpy as np
from numba import njit, types

from .elements import FLOAT32, store_values
from .simd import LANES, helper
from .softmax import LOG2_E, take_number
from .tiles import (
    ALL_EQUAL,
    CHUNK_OF_ROUGH,
    KEYS,
    LOWEST,
    MINUS_INFINITY,
    PANEL,
    PANELS,
    READ,
    WRITE,
    apply_mask,
    array_type,
    cap,
    count_near,
    mask_of,
    multiply,
    read_panel,
    read_tile,
    rows_near,
    sharpen_softmax,
    update_softmax,
)


@helper
def _write_panel(
    totals, row_max, row_sum, exact_sums, seq, head, group, row, rows, dtype, line, rest, out16, out32, lse
):  # fmt: skip
    """Write out and lse of a panel: 0 and -inf for rows that saw no key. exact_sums may be 0."""
    channels = out16.shape[3] + out32.shape[3]
    for lane in range(min(PANEL, rows - row)):
        position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
        whole, of_rounded = exact_sums[0, lane], exact_sums[1, lane]
        if not whole > 0:
            whole = of_rounded = np.float64(row_sum[lane])
        factor = 0.0 if row_sum[lane] == 0 else 1.0 / of_rounded
        for channel in range(channels):
            line[channel] = totals[channel * PANEL + lane] * factor
        store_values(
            line, dtype, out16[seq[0], position, own], out32[seq[0], position, own], 0, channels, rest
        )
        log = MINUS_INFINITY
        if row_sum[lane] != 0:
            log = np.float32(np.float64(row_max[lane]) / LOG2_E + math.log(whole))
        lse[seq[0], own, position] = log


@helper
def _mask_by_limits(limits, seq, group, row, rows, key, first, last):
    """Do what `mask_of` does, for rows that see as many keys as `limits` says."""
    some = False
    for lane in range(PANEL):
        high = limits[seq[1] + min(row + lane, rows - 1) // group] - 1 - key
        first[lane], last[lane] = 0, max(-1, min(high, KEYS))
        some |= high < KEYS - 1
    return some


_SIGNATURE = types.void(
    types.int64[::1], array_type(types.int64, 2), array_type(types.int64, 2), types.int64[::1], READ, READ,
    READ, types.int64, types.int64, types.int64, types.int64, *(types.float32,) * 4, WRITE,
    array_type(types.float32, 3, False),
)  # fmt: skip


@njit(_SIGNATURE, error_model="numpy", nogil=True, cache=True)
def attend(
    counter, items, seq_info, limits, q, k, v, dtype, group, left, right, sign, scale_log2, rate, softcap,
    out, lse,
):  # fmt: skip
    """Attend all items: what one thread does, taking items from the counter until none is left.

    items (n, 3): sequence, KV head, block of PANELS * PANEL query rows. seq_info (sequences, 5): row of the
    batch, first query position and their number, first key and their number. q, k, v, out: each (16-bit,
    32-bit) arrays (batch, seqlen, heads, head_dim), of which the one that does not apply is empty; dtype as
    in `elements`. A row at position p sees the keys p - left to p + right. Scores are sign * <q, k>, sign
    1 or -1; with a softcap then softcap * tanh(rate * score); scale_log2 > 0 brings them to units of log 2.
    lse (batch, heads, seqlen).
    """
    channels = q[0].shape[3] + q[1].shape[3]
    width = (channels + LANES - 1) // LANES * LANES
    pitch = (
        width + LANES
    )  # of rows of a tile: powers of two would crowd into few sets of the first-level cache
    keys_tile, values_tile = np.zeros((2, KEYS * pitch), np.float32)
    queries, totals = np.empty((2, PANELS, width * PANEL), np.float32)
    row_max, row_sum = np.empty((2, PANELS, PANEL), np.float32)
    exact_sums = np.empty((PANELS, 2, PANEL), np.float64)
    scores = np.empty(KEYS * PANEL, np.float32)
    rescale, peak, first, last, near = np.empty((5, PANEL), np.float32)
    line, rest = np.empty(width, np.float32), np.empty(LANES, np.uint16)
    sums, exponents = np.empty(LANES, np.float64), np.empty(LANES, np.float32)
    item = take_number(counter)
    while item < items.shape[0]:
        seq, head = seq_info[items[item, 0]], items[item, 1]
        start, rows = items[item, 2] * PANELS * PANEL, seq[2] * group
        panels = min(PANELS, (rows - start + PANEL - 1) // PANEL)
        for p in range(panels):
            read_panel(q[0], q[1], dtype, seq, head, group, start + p * PANEL, rows, sign, line, queries[p])
            for i in range(PANEL):
                row_max[p, i], row_sum[p, i] = LOWEST, 0
                exact_sums[p, 0, i] = exact_sums[p, 1, i] = 0
            for i in range(width * PANEL):
                totals[p, i] = 0
        behind = seq[4] - seq[2]
        low = max(start // group + behind - left, 0)
        bottom = (min(start + panels * PANEL, rows) - 1) // group
        high = min(bottom + behind + right + 1, seq[4])
        if limits.size:
            low, high = 0, limits[seq[1] + bottom]
        near_keys = count_near(k[1], seq, head) if dtype == FLOAT32 else (0, 0)
        for key in range(low, high, KEYS):
            keys = min(KEYS, high - key)
            padded = (keys + 3) // 4 * 4
            read_tile(k[0], k[1], dtype, seq, head, key, keys, pitch, keys_tile)
            read_tile(v[0], v[1], dtype, seq, head, key, keys, pitch, values_tile)
            for p in range(panels):
                row = start + p * PANEL
                if limits.size:
                    hidden = _mask_by_limits(limits, seq, group, row, rows, key, first, last)
                else:
                    hidden = mask_of(seq, group, row, rows, key, left, right, first, last)
                if first.min() > KEYS - 1 or last.max() < 0:
                    continue
                multiply(
                    keys_tile, pitch, 1, queries[p], channels, CHUNK_OF_ROUGH, scores, padded, rescale, True
                )
                if softcap > 0:
                    cap(scores, padded, rate, softcap)
                if hidden or padded < KEYS:
                    apply_mask(scores, padded, first, last)
                update_softmax(scores, padded, scale_log2, row_max[p], row_sum[p], rescale, peak)
                if dtype == FLOAT32:
                    some = rows_near(seq, group, row, rows, right, limits, near_keys, near)
                    sharpen_softmax(
                        scores, padded, keys_tile, pitch, queries[p], channels, scale_log2, rate, softcap,
                        near if some else near[:0], some == ALL_EQUAL, row_max[p], row_sum[p], rescale,
                        peak, exact_sums[p], sums, exponents,
                    )  # fmt: skip
                multiply(
                    values_tile, 1, pitch, scores, padded, CHUNK_OF_ROUGH, totals[p], width, rescale, False
                )
        for p in range(panels):
            _write_panel(
                totals[p], row_max[p], row_sum[p], exact_sums[p], seq, head, group, start + p * PANEL, rows,
                dtype, line, rest, out[0], out[1], lse,
            )  # fmt: skip
        item = take_number(counter)
