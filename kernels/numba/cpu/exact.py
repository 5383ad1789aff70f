"""Attention over the exact tokens of a step on the CPU: dense, causal, a few blocks of panels and tiles.

Panels of 24 query rows and tiles of 64 keys are those of `tiles`; so are the products:

    scores[key][24] = keys @ queries;  totals[channel][24] = totals * rescale + values @ weights

An item of work is a (batch row, KV head) and a block of PANELS panels. Its answer does not depend on the
thread that took it. Tiles are copied, because an invisible token may hold anything: it becomes zeros, and its
scores -inf. Scratch of a thread at head_dim 64: tiles 36 KiB, queries and totals 96 KiB, scores 6 KiB.

Queries are not scaled, scores are, as in `attention`; large weights are computed again (`sharpen_softmax`).
Arrays are float32 in C order: q, out (batch, rows, heads_q, head_dim); k, v (batch, keys, heads, head_dim);
visible bool (batch, keys); lse (batch, heads_q, rows), natural, float64 where `attend_exact` writes it.
"""

import math

import numpy as np

from .expand import PADDING
from .simd import LANES, helper, load, splat, store, total
from .softmax import LOG2_E, exp2, serial, take_number
from .tiles import (
    CHUNK_OF_STORED,
    KEYS,
    LOWEST,
    MINUS_INFINITY,
    PANEL,
    PANELS,
    apply_mask,
    cap,
    fused,
    multiply,
    sharpen_softmax,
    update_softmax,
)

_ZERO = np.float32(0)


@helper
def _read_panel(q, head, group, first, scale, queries):
    """queries (head_dim, PANEL) = scale * q of the rows (position, head of the group) from `first` on."""
    for lane in range(PANEL):
        row = first + lane
        if row < q.shape[0] * group:
            query = q[row // group, head * group + row % group]
            for channel in range(q.shape[2]):
                queries[channel * PANEL + lane] = scale * query[channel]
        else:
            for channel in range(q.shape[2]):
                queries[channel * PANEL + lane] = 0


@helper
def _read_tile(x, visible, head, key, tile):
    """tile (KEYS, head_dim + PADDING) = the elements of KEYS keys from `key` on; 0 where there is none."""
    head_dim = x.shape[2]
    for j in range(KEYS):
        at, seen = j * (head_dim + PADDING), key + j < x.shape[0] and visible[key + j]
        for channel in range(head_dim):
            tile[at + channel] = x[key + j, head, channel] if seen else _ZERO


@helper
def _score(tile, queries, head_dim, first, group, behind, key, visible, rate, softcap, marks, scores):
    """scores (KEYS, PANEL) of a tile and the query rows from `first` on: -inf where a key is not seen."""
    multiply(tile, head_dim + PADDING, 1, queries, head_dim, CHUNK_OF_STORED, scores, KEYS, marks, True)
    if softcap > 0:
        cap(scores, KEYS, rate, softcap)
    if first // group + behind < key + KEYS - 1:  # the first row does not see all keys
        for lane in range(PANEL):
            marks[lane] = 0
            marks[PANEL + lane] = max(-1, min((first + lane) // group + behind - key, KEYS))
        apply_mask(scores, KEYS, marks[:PANEL], marks[PANEL:])
    for j in range(KEYS):
        if key + j >= visible.size or not visible[key + j]:
            for lane in range(0, PANEL, LANES):
                store(scores, j * PANEL + lane, splat(MINUS_INFINITY))


@serial
def attend_exact(counter, q, k, v, visible, sign, scale_log2, rate, softcap, out, lse):
    """Attend all items: what one thread does, taking items from the counter until none is left.

    Scores are sign * <q, k>, with a softcap then softcap * tanh(rate * score); scale_log2 > 0 brings them to
    units of log 2.
    """
    batch, positions, heads_q, head_dim = q.shape
    keys, heads = k.shape[1:3]
    group, behind = heads_q // heads, keys - positions
    rows = positions * group
    blocks = (rows + PANELS * PANEL - 1) // (PANELS * PANEL)
    keys_tile, values_tile = np.zeros((2, KEYS * (head_dim + PADDING)), np.float32)
    queries, totals = np.empty((2, PANELS, head_dim * PANEL), np.float32)
    row_max, row_sum = np.empty((2, PANELS, PANEL), np.float32)
    scores, marks = np.empty(KEYS * PANEL, np.float32), np.empty(2 * PANEL, np.float32)
    peak, nobody, exact_sums = np.empty(PANEL, np.float32), np.empty(0, np.float32), np.empty((2, 0))
    sums, exponents = np.empty(LANES, np.float64), np.empty(LANES, np.float32)
    item = take_number(counter)
    while item < batch * heads * blocks:
        row, head, start = item // (heads * blocks), item // blocks % heads, item % blocks * PANELS * PANEL
        panels = min(PANELS, (rows - start + PANEL - 1) // PANEL)
        for p in range(panels):
            _read_panel(q[row], head, group, start + p * PANEL, sign, queries[p])
            for i in range(head_dim * PANEL):
                totals[p, i] = 0
            for lane in range(PANEL):
                row_max[p, lane], row_sum[p, lane] = LOWEST, 0
        last = min(start + panels * PANEL, rows) - 1
        for key in range(0, last // group + behind + 1, KEYS):
            _read_tile(k[row], visible[row], head, key, keys_tile)
            _read_tile(v[row], visible[row], head, key, values_tile)
            for p in range(panels):
                first = start + p * PANEL
                if (min(first + PANEL, rows) - 1) // group + behind < key:
                    continue
                _score(
                    keys_tile, queries[p], head_dim, first, group, behind, key, visible[row], rate, softcap,
                    marks, scores,
                )  # fmt: skip
                update_softmax(scores, KEYS, scale_log2, row_max[p], row_sum[p], marks, peak)
                sharpen_softmax(
                    scores, KEYS, keys_tile, head_dim + PADDING, queries[p], head_dim, scale_log2, rate,
                    softcap, nobody, False, row_max[p], row_sum[p], marks, peak, exact_sums, sums, exponents,
                )  # fmt: skip
                multiply(
                    values_tile, 1, head_dim + PADDING, scores, KEYS, KEYS, totals[p], head_dim, marks, False
                )
        for i in range(start, last + 1):
            p, lane = (i - start) // PANEL, (i - start) % PANEL
            position, own = i // group, head * group + i % group
            whole = row_sum[p, lane]
            for channel in range(head_dim):
                sum_of = totals[p, channel * PANEL + lane]
                out[row, position, own, channel] = _ZERO if whole == 0 else sum_of / whole
            log = -np.inf
            if whole != 0:
                log = np.float64(row_max[p, lane]) / np.float64(LOG2_E) + math.log(np.float64(whole))
            lse[row, own, position] = log
        item = take_number(counter)


@serial
def sum_exact_mass(counter, q, k, visible, scale, softcap, lse, mass):
    """mass (batch, heads, keys) = mean of exp(score - lse) over the rows of q, the last ones, and a group.

    What one thread does: pairs of a batch row and a KV head, by the counter. Scores are computed again, which
    costs less than keeping those of all keys. A row with lse -inf sees no key and gives nothing.
    """
    batch, positions, heads_q, head_dim = q.shape
    keys, heads = k.shape[1:3]
    group, behind = heads_q // heads, keys - positions
    rows = positions * group
    tile = np.zeros(KEYS * (head_dim + PADDING), np.float32)
    queries, scores = np.empty(head_dim * PANEL, np.float32), np.empty(KEYS * PANEL, np.float32)
    marks, below = np.empty((2, 2 * PANEL), np.float32)
    item = take_number(counter)
    while item < batch * heads:
        row, head = item // heads, item % heads
        own = mass[row, head]
        for key in range(keys):
            own[key] = 0
        for first in range(0, rows, PANEL):
            _read_panel(q[row], head, group, first, scale, queries)
            for lane in range(PANEL):
                i, whole = first + lane, MINUS_INFINITY
                if i < rows:
                    whole = lse[row, head * group + i % group, i // group]
                below[lane] = MINUS_INFINITY if whole == MINUS_INFINITY else -whole * LOG2_E
            for key in range(0, (min(first + PANEL, rows) - 1) // group + behind + 1, KEYS):
                _read_tile(k[row], visible[row], head, key, tile)
                _score(
                    tile, queries, head_dim, first, group, behind, key, visible[row], np.float32(1) / softcap,
                    softcap, marks, scores,
                )  # fmt: skip
                for j in range(min(KEYS, keys - key)):
                    p = splat(_ZERO)
                    for lane in range(0, PANEL, LANES):
                        shifted = fused(load(scores, j * PANEL + lane), splat(LOG2_E), load(below, lane))
                        p = p + exp2(shifted)
                    own[key + j] += total(p)
        for key in range(keys):
            own[key] /= np.float32(max(rows, 1))
        item = take_number(counter)


@serial
def merge_two(out_a, lse_a, rest_a, out_b, lse_b, out, lse):
    """out, lse = attention over the keys of both parts; a part in which a row saw nothing adds nothing.

    rest_a, of the shape of lse_a or empty: what lse_a lost when it was rounded.
    """
    batch, rows, heads, head_dim = out.shape
    for row in range(batch):
        for position in range(rows):
            for head in range(heads):
                a, b = np.float64(lse_a[row, head, position]), np.float64(lse_b[row, head, position])
                if rest_a.size:
                    a += rest_a[row, head, position]
                new_max = max(a, b)
                base = 0.0 if new_max == -np.inf else new_max
                weight_a, weight_b = math.exp(a - base), math.exp(b - base)
                whole = weight_a + weight_b
                lse[row, head, position] = base + math.log(whole) if whole != 0 else -np.inf
                part_a = np.float32(weight_a / whole) if whole != 0 else _ZERO
                part_b = np.float32(weight_b / whole) if whole != 0 else _ZERO
                x, y = out_a[row, position, head], out_b[row, position, head]
                line = out[row, position, head]
                for channel in range(head_dim):
                    line[channel] = (x[channel] * part_a if part_a != 0 else _ZERO) + (
                        y[channel] * part_b if part_b != 0 else _ZERO
                    )
