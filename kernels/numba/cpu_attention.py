"""Attention of whole sequences on the CPU: tile by tile of keys, with a running softmax, in float32.

Everything is laid out transposed, so that a lane of a vector is a query row: a panel has 24 query rows of
one KV head, three vectors wide.

    scores[key][24]        = K tile (keys x channels) @ queries[channel][24]
    peaks, sums [24]         running maximum and sum of exp2: lane by lane, nothing is reduced across lanes
    totals[channel][24]    = totals * shrink + V tile^T (channels x keys) @ weights[key][24]

Both products are the same loop, which keeps 4 x 24 sums in 12 registers and meets K and V element by
element, so neither is ever transposed. Rows of a panel are (position, head of the group), heads fastest:
the heads that read one KV head share its tiles.

An item of work is 8 panels against all keys they see; a tile of 64 keys is widened to float32 once for the 8
(with 4, reading tiles took 15 % of the time). Threads take items from a counter, and the answer does not
depend on which thread took which. Scratch memory of a thread at head_dim 128: 68 KiB of keys and values, 192
KiB of queries and totals, 6 KiB of scores.

Queries are not scaled: scores are, inside the exponent, exp2(unit * score - peak), with one rounding.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .cpu_elements import load_values, store_values
from .cpu_fragments import multiply_add
from .cpu_packed import LOG2_E, exp2, take_number
from .cpu_simd import (
    F32X8,
    I32X8,
    LANES,
    float32x8,
    helper,
    load,
    magnitude,
    maximum,
    minimum,
    pointer_to,
    splat,
    store,
    where,
)

PANEL = 24
"""Query rows that are computed together."""

PANELS = 8
"""Panels that share a tile of keys."""

KEYS = 64

CHUNK = 8
"""Products that are added one to the other in a score. A score may be much smaller than the sums on the way
to it; with 32 its error was up to four times that of a dot product in vectors."""

_MINUS_INFINITY = np.float32(-np.inf)
_LOWEST = np.float32(-1e30)  # a peak before any key; finite, so that -inf - peak is never NaN
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)

# tanh(x) = x + x^3 P(x^2) for |x| <= 0.625, the polynomial of the Cephes library.
_TANH = tuple(map(np.float32, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1)))
_TANH_LAST, _TANH_SMALL = np.float32(-3.33332819422e-1), np.float32(0.625)
_TANH_RATE, _TANH_LARGEST = np.float32(2 * math.log2(math.e)), np.float32(40)


@intrinsic
def _multiply_add(typing_context, a, b, c):
    """Return a * b + c, rounded once where the machine can."""

    def generate(context, builder, signature, arguments):
        return multiply_add(builder, *arguments)

    return float32x8(float32x8, float32x8, float32x8), generate


@intrinsic
def _spread(typing_context, array, index):
    """Return eight copies of array[index], of float32."""

    def generate(context, builder, signature, arguments):
        kind = ir.FloatType()
        one = builder.load(pointer_to(context, builder, signature.args[0], *arguments, kind))
        lane = builder.insert_element(ir.Constant(F32X8, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(lane, lane, ir.Constant(I32X8, [0] * LANES))

    return float32x8(array, types.intp), generate


@helper
def _add(c, at, factor, x):
    store(c, at, _multiply_add(load(c, at), factor, x))


@helper
def _multiply(a, row_step, step, b, depth, chunk, c, rows, shrink, fresh):
    """c = a @ b if fresh, else c * shrink + a @ b; b (depth, PANEL), c (rows, PANEL), rows a multiple of 4.

    Element (i, k) of a is a[i * row_step + k * step]. shrink (PANEL,) is a factor of each column. Sums of
    `chunk` products are added up, which loses less than adding one product after the other.
    """
    one, chunks = splat(_ONE), (depth + chunk - 1) // chunk
    for part in range(rows // 4 * chunks):
        row, begin = part // chunks * 4, part % chunks * chunk
        first = row * row_step
        x00 = x01 = x02 = x10 = x11 = x12 = splat(_ZERO)
        x20 = x21 = x22 = x30 = x31 = x32 = splat(_ZERO)
        for k in range(begin, min(begin + chunk, depth)):
            y0, y1, y2 = load(b, k * PANEL), load(b, k * PANEL + 8), load(b, k * PANEL + 16)
            own = first + k * step
            z = _spread(a, own)
            x00, x01, x02 = _multiply_add(z, y0, x00), _multiply_add(z, y1, x01), _multiply_add(z, y2, x02)
            z = _spread(a, own + row_step)
            x10, x11, x12 = _multiply_add(z, y0, x10), _multiply_add(z, y1, x11), _multiply_add(z, y2, x12)
            z = _spread(a, own + 2 * row_step)
            x20, x21, x22 = _multiply_add(z, y0, x20), _multiply_add(z, y1, x21), _multiply_add(z, y2, x22)
            z = _spread(a, own + 3 * row_step)
            x30, x31, x32 = _multiply_add(z, y0, x30), _multiply_add(z, y1, x31), _multiply_add(z, y2, x32)
        at = row * PANEL
        if fresh and begin == 0:
            store(c, at, x00)
            store(c, at + 8, x01)
            store(c, at + 16, x02)
            store(c, at + 24, x10)
            store(c, at + 32, x11)
            store(c, at + 40, x12)
            store(c, at + 48, x20)
            store(c, at + 56, x21)
            store(c, at + 64, x22)
            store(c, at + 72, x30)
            store(c, at + 80, x31)
            store(c, at + 88, x32)
        else:
            s0 = load(shrink, 0) if begin == 0 else one
            s1 = load(shrink, 8) if begin == 0 else one
            s2 = load(shrink, 16) if begin == 0 else one
            _add(c, at, s0, x00)
            _add(c, at + 8, s1, x01)
            _add(c, at + 16, s2, x02)
            _add(c, at + 24, s0, x10)
            _add(c, at + 32, s1, x11)
            _add(c, at + 40, s2, x12)
            _add(c, at + 48, s0, x20)
            _add(c, at + 56, s1, x21)
            _add(c, at + 64, s2, x22)
            _add(c, at + 72, s0, x30)
            _add(c, at + 80, s1, x31)
            _add(c, at + 88, s2, x32)


@helper
def _tanh(x):
    square = x * x
    polynomial = splat(_TANH[0])
    for coefficient in _TANH[1:]:
        polynomial = _multiply_add(polynomial, square, splat(coefficient))
    polynomial = _multiply_add(polynomial, square, splat(_TANH_LAST))
    small = _multiply_add(polynomial * square, x, x)
    growth = exp2(minimum(splat(_TANH_LARGEST), x) * splat(_TANH_RATE))
    large = splat(_ONE) - splat(_TWO) / (growth + splat(_ONE))
    return where(magnitude(x) > splat(_TANH_SMALL), large, small)


@helper
def _cap(scores, keys, rate, softcap):
    """scores = softcap * tanh(rate * scores)."""
    for i in range(0, keys * PANEL, LANES):
        store(scores, i, splat(softcap) * _tanh(splat(rate) * load(scores, i)))


@helper
def _hide(scores, keys, first, last):
    """Hide the keys before `first` and after `last` (PANEL,) of each row, counted within the tile."""
    hidden = splat(_MINUS_INFINITY)
    for lane in range(0, PANEL, LANES):
        low, high = load(first, lane), load(last, lane)
        for j in range(keys):
            key, at = splat(np.float32(j)), j * PANEL + lane
            store(scores, at, where((low > key) + (key > high), hidden, load(scores, at)))


@helper
def _weigh(scores, keys, unit, peaks, sums, shrink):
    """Turn scores into weights exp2(unit * score - peak); raise peaks; shrink: what older weights lose.

    Peaks are rounded products with unit, so that all that is relative to one is relative to the same number.
    keys is a multiple of 4.
    """
    for lane in range(0, PANEL, LANES):
        best = load(scores, lane)
        for j in range(1, keys):
            best = maximum(load(scores, j * PANEL + lane), best)
        before = load(peaks, lane)
        peak = maximum(best * splat(unit), before)
        below = splat(_ZERO) - peak
        lost = exp2(before - peak)
        total = load(sums, lane) * lost
        for first in range(0, keys, 4):
            part = splat(_ZERO)
            for j in range(first, first + 4):
                weight = exp2(_multiply_add(load(scores, j * PANEL + lane), splat(unit), below))
                part = part + weight
                store(scores, j * PANEL + lane, weight)
            total = total + part
        store(peaks, lane, peak)
        store(sums, lane, total)
        store(shrink, lane, lost)


@helper
def _read_panel(x16, x32, dtype, place, head, group, row, rows, sign, line, queries):
    """queries (channels, PANEL) = sign * q of the rows from `row` on; 0 beyond the last of `rows`."""
    channels = x16.shape[3] + x32.shape[3]
    for lane in range(PANEL):
        if row + lane < rows:
            position, own = place[1] + (row + lane) // group, head * group + (row + lane) % group
            load_values(
                x16[place[0], position, own], x32[place[0], position, own], dtype, 0, channels, line, 0
            )
            for channel in range(line.size):
                queries[channel * PANEL + lane] = sign * line[channel]
        else:
            for channel in range(line.size):
                queries[channel * PANEL + lane] = 0


@helper
def _read_tile(x16, x32, dtype, place, head, key, keys, pitch, tile):
    """tile (KEYS, pitch) = the rows of `keys` keys from `key` on; zeros up to the next multiple of 4."""
    channels = x16.shape[3] + x32.shape[3]
    for j in range(keys):
        at = place[3] + key + j
        load_values(x16[place[0], at, head], x32[place[0], at, head], dtype, 0, channels, tile, j * pitch)
    for i in range(keys * pitch, (keys + 3) // 4 * 4 * pitch):
        tile[i] = 0


@helper
def _write_panel(totals, peaks, sums, place, head, group, row, rows, dtype, line, rest, out16, out32, lse):
    """Write out and lse of a panel: 0 and -inf for rows that saw no key."""
    channels = out16.shape[3] + out32.shape[3]
    for lane in range(min(PANEL, rows - row)):
        position, own = place[1] + (row + lane) // group, head * group + (row + lane) % group
        factor = _ZERO if sums[lane] == 0 else _ONE / sums[lane]
        for channel in range(channels):
            line[channel] = totals[channel * PANEL + lane] * factor
        store_values(
            line, dtype, out16[place[0], position, own], out32[place[0], position, own], 0, channels, rest
        )
        log = _MINUS_INFINITY
        if sums[lane] != 0:
            log = np.float32(np.float64(peaks[lane]) / LOG2_E + math.log(sums[lane]))
        lse[place[0], own, position] = log


@helper
def _mask_of(place, group, row, rows, key, left, right, first, last):
    """first, last (PANEL,): which keys of the tile at `key` each row sees; whether any is hidden."""
    behind = place[4] - place[2]
    some = False
    for lane in range(PANEL):
        position = min(row + lane, rows - 1) // group + behind
        low = max(position - left, 0) - key
        high = min(position + right, place[4] - 1) - key
        first[lane], last[lane] = max(0, min(low, KEYS)), max(-1, min(high, KEYS))
        some |= low > 0 or high < KEYS - 1
    return some


def _array(element, dimensions, readonly=True):
    return types.Array(element, dimensions, "A", readonly=readonly, aligned=False)


# Compiled once for all strides: an array of any layout fits "A".
_READ = types.Tuple((_array(types.uint16, 4), _array(types.float32, 4)))
_WRITE = types.Tuple((_array(types.uint16, 4, False), _array(types.float32, 4, False)))
_SIGNATURE = types.void(
    types.int64[::1], _array(types.int64, 2), _array(types.int64, 2), _READ, _READ, _READ, types.int64,
    types.int64, types.int64, types.int64, *(types.float32,) * 4, _WRITE,
    _array(types.float32, 3, False),
)  # fmt: skip


@njit(_SIGNATURE, error_model="numpy", nogil=True, cache=True)
def attend(counter, items, places, q, k, v, dtype, group, left, right, sign, unit, rate, softcap, out, lse):
    """Attend all items: what one thread does, taking items from the counter until none is left.

    items (n, 3): sequence, KV head, block of PANELS * PANEL query rows. places (sequences, 5): row of the
    batch, first query position and their number, first key and their number. q, k, v, out: each (16-bit,
    32-bit) arrays (batch, seqlen, heads, head_dim), of which the one that does not apply is empty; dtype as
    in `cpu_elements`. A row at position p sees the keys p - left to p + right. Scores are sign * <q, k>, sign
    1 or -1; with a softcap then softcap * tanh(rate * score); unit > 0 brings them to units of log 2. lse
    (batch, heads, seqlen).
    """
    channels = q[0].shape[3] + q[1].shape[3]
    width = (channels + LANES - 1) // LANES * LANES
    pitch = (
        width + LANES
    )  # of rows of a tile: powers of two would crowd into few sets of the first-level cache
    keys_tile, values_tile = np.zeros((2, KEYS * pitch), np.float32)
    queries, totals = np.empty((2, PANELS, width * PANEL), np.float32)
    peaks, sums = np.empty((2, PANELS, PANEL), np.float32)
    scores = np.empty(KEYS * PANEL, np.float32)
    shrink, first, last = np.empty((3, PANEL), np.float32)
    line, rest = np.empty(width, np.float32), np.empty(LANES, np.uint16)
    item = take_number(counter)
    while item < items.shape[0]:
        place, head = places[items[item, 0]], items[item, 1]
        start, rows = items[item, 2] * PANELS * PANEL, place[2] * group
        panels = min(PANELS, (rows - start + PANEL - 1) // PANEL)
        for p in range(panels):
            _read_panel(
                q[0], q[1], dtype, place, head, group, start + p * PANEL, rows, sign, line, queries[p]
            )
            for i in range(PANEL):
                peaks[p, i], sums[p, i] = _LOWEST, 0
            for i in range(width * PANEL):
                totals[p, i] = 0
        behind = place[4] - place[2]
        low = max(start // group + behind - left, 0)
        high = min((min(start + panels * PANEL, rows) - 1) // group + behind + right + 1, place[4])
        for key in range(low, high, KEYS):
            keys = min(KEYS, high - key)
            padded = (keys + 3) // 4 * 4
            _read_tile(k[0], k[1], dtype, place, head, key, keys, pitch, keys_tile)
            _read_tile(v[0], v[1], dtype, place, head, key, keys, pitch, values_tile)
            for p in range(panels):
                row = start + p * PANEL
                hidden = _mask_of(place, group, row, rows, key, left, right, first, last)
                if first.min() > KEYS - 1 or last.max() < 0:
                    continue
                _multiply(keys_tile, pitch, 1, queries[p], channels, CHUNK, scores, padded, shrink, True)
                if softcap > 0:
                    _cap(scores, padded, rate, softcap)
                if hidden or padded < KEYS:
                    _hide(scores, padded, first, last)
                _weigh(scores, padded, unit, peaks[p], sums[p], shrink)
                _multiply(values_tile, 1, pitch, scores, padded, KEYS, totals[p], width, shrink, False)
        for p in range(panels):
            _write_panel(
                totals[p], peaks[p], sums[p], place, head, group, start + p * PANEL, rows, dtype, line,
                rest, out[0], out[1], lse,
            )  # fmt: skip
        item = take_number(counter)
