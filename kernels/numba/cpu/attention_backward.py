"""Gradients of attention on the CPU: two passes that share no sum, so every bit is the same every time.

With s the scores, p = exp(s - lse) and delta[row] = <dout[row], out[row]>, for each row and key it sees:

    slope = p * (<dout[row], v[key]> - delta[row])      what the loss gains from a score, before scale and cap
    dq[row] = scale * sum over keys slope * k[key]
    dk[key] = scale * sum over rows slope * q[row]      dv[key] = sum over rows p * dout[row]

The first pass takes items of 8 panels of query rows, as the forward does, and gives dq and delta; the second
items of 4 tiles of keys, and gives dk and dv, summed in float32 over the rows of all heads that read the KV
head. Both compute p and slope, which makes 7 products instead of 5; but nothing is added from two threads, no
sum waits in memory beyond scratch, and no row depends on its batch mates. Panels and tiles are those of
cpu/tiles.py. Scratch memory of a thread at head_dim 128: 450 KiB in the first pass, 620 KiB in the second.

`lse` and `out` may be those of more keys than there are here: then the gradients are those of this part.

`out` was rounded, and the slopes of all keys of a row get what delta lost by that. Slopes of equal keys add
up to 0, so their dq would be nothing else. Where a tile holds all keys of a row, delta therefore is the mean
of <dout, v> by its weights, if rounding explains the difference. In float32 it is corrected over several
tiles, too, at the end of the first pass, and dq for what large weights made of it (`_correct_dpsum`).
"""

import numpy as np
from numba import njit, types

from .elements import FLOAT32, load_values, store_values
from .simd import LANES, any_above, helper, load, magnitude, splat, store, where
from .softmax import LOG2_E, exp2, take_number
from .tiles import (
    ALL_EQUAL,
    CHUNK,
    KEYS,
    MINUS_INFINITY,
    PANEL,
    PANELS,
    READ,
    WRITE,
    apply_mask,
    array_type,
    cap_and_bend,
    count_near,
    fused,
    large_share,
    mask_of,
    multiply,
    read_panel,
    read_tile,
    rows_near,
    sharpen,
)

TILES = 4
"""Tiles of keys that share a panel of query rows in the second pass."""

ROUNDING = (2.0**-10, 2.0**-7, 2.0**-20)
"""What rounding explains of the difference of two <dout, out>, in their terms, by dtype: 2 units in the last
place of an out of 16 bits, 16 of one in float32, whose sums err more."""

_SQUARE = PANEL * PANEL
_LEAST = np.float32(2.0**-126)  # a weight below this is 0, see `exp2`
_NEARLY = np.float32(2.0**-14)  # so near to 1 are the weights of a row that has no other keys
_ZERO, _HALF, _ONE, _INFINITY = np.float32(0), np.float32(0.5), np.float32(1), np.float32(np.inf)


@helper
def _read_logs(lse, seq, head, group, row, rows, logs):
    """logs (PANEL,) = lse of the rows; +inf, which gives no weight, where there is none."""
    for lane in range(PANEL):
        logs[lane] = _INFINITY
        if row + lane < rows:
            position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
            if lse[seq[0], own, position] != MINUS_INFINITY:
                logs[lane] = lse[seq[0], own, position]


@helper
def _slope(weight, product, delta):
    """What the loss gains from a capped score, 0 from that of a hidden key, whose product may be anything."""
    return where(splat(_LEAST) > weight, splat(_ZERO), weight * (product - delta))


@helper
def _add_product(sums, at, number, x):
    store(sums, at, fused(splat(number), x, load(sums, at)))


@helper
def _probabilities(
    scores, slopes, keys, hidden, first, last, tile, pitch, queries, channels, dtype, factor, rate, softcap,
    near, equal, logs, dpsum, slack, weights, gains, large, bends, sums, exponents,
):  # fmt: skip
    """Turn scores into probabilities, and slopes, which hold <dout, v>, into slopes.

    dpsum (PANEL,) is found anew for rows with a `slack` (PANEL,), all of whose keys are here; `slack` may be
    empty. Unless they are empty, weights and gains (PANEL,) grow by probabilities and by slopes before the
    cap, and large (channels, PANEL) by large weights, after the cap, times their keys. `bends` is scratch.
    equal: no row sees other keys than equal ones, which all have the weight of the first.
    """
    if softcap > 0:
        cap_and_bend(scores, keys, rate, softcap, bends)
    if hidden:
        apply_mask(scores, keys, first, last)
    for lane in range(0, PANEL, LANES):
        limit = large_share(load(logs, lane) * splat(LOG2_E), softcap)
        threshold = splat(_HALF)
        if near.size:
            limit = where(load(near, lane), splat(_ZERO), limit)
            threshold = where(load(near, lane), splat(_ZERO), threshold)
        below, delta = splat(_ZERO) - load(logs, lane), load(dpsum, lane)
        whole = products = gain = bent_sum = splat(_ZERO)
        sharp = bend = splat(_ZERO)
        if equal:
            sharp = sharpen(
                splat(_ONE), sharp, tile, 0, queries, lane, channels, factor, rate, softcap, logs, LOG2_E,
                near, bends, lane, sums, exponents,
            )  # fmt: skip
            bend = load(bends, lane)
        for at in range(lane, keys * PANEL, PANEL):
            weight = exp2(fused(load(scores, at), splat(factor), below) * splat(LOG2_E))
            if equal:
                weight = where(weight > splat(_ZERO), sharp, weight)
                if softcap > 0:
                    store(bends, at, bend)
                bent_sum = bent_sum + (weight * bend if softcap > 0 else weight)
            elif dtype == FLOAT32 and any_above(weight, limit):
                key = at // PANEL * pitch
                weight = sharpen(
                    weight, limit, tile, key, queries, lane, channels, factor, rate, softcap, logs, LOG2_E,
                    near, bends, at, sums, exponents,
                )  # fmt: skip
                if large.size and any_above(weight, threshold):
                    bent = weight * load(bends, at) if softcap > 0 else weight
                    bent = where(weight > threshold, bent, splat(_ZERO))
                    for channel in range(channels):
                        _add_product(large, channel * PANEL + lane, tile[key + channel], bent)
            store(scores, at, weight)
            whole = whole + weight
            if slack.size:
                products = products + where(splat(_LEAST) > weight, splat(_ZERO), weight * load(slopes, at))
            else:
                slope = _slope(weight, load(slopes, at), delta)
                gain = gain + slope
                store(slopes, at, slope * load(bends, at) if softcap > 0 else slope)
        if equal and large.size:
            for channel in range(channels):
                _add_product(large, channel * PANEL + lane, tile[channel], bent_sum)
        if slack.size:
            own = products / whole
            own = where(load(slack, lane) > magnitude(own - delta), own, delta)
            delta = where(splat(_NEARLY) > magnitude(whole - splat(_ONE)), own, delta)
            store(dpsum, lane, delta)
            for at in range(lane, keys * PANEL, PANEL):
                slope = _slope(load(scores, at), load(slopes, at), delta)
                gain = gain + slope
                store(slopes, at, slope * load(bends, at) if softcap > 0 else slope)
        if gains.size:
            store(weights, lane, load(weights, lane) + whole)
            store(gains, lane, load(gains, lane) + gain)


@helper
def _find_dpsum(dout, out, dtype, seq, head, group, row, rows, line, other, dpsum, slack):
    """dpsum (PANEL,) = <dout, out> of the rows, 0 beyond the last; slack: what rounding explains of it."""
    channels = dout[0].shape[3] + dout[1].shape[3]
    part = ROUNDING[dtype]
    for lane in range(PANEL):
        dpsum[lane] = slack[lane] = 0
        if row + lane < rows:
            position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
            load_values(
                dout[0][seq[0], position, own],
                dout[1][seq[0], position, own],
                dtype,
                0,
                channels,
                line,
                0,
            )
            load_values(
                out[0][seq[0], position, own], out[1][seq[0], position, own], dtype, 0, channels, other, 0
            )
            total = terms = 0.0
            for channel in range(channels):
                product = np.float64(line[channel]) * np.float64(other[channel])
                total += product
                terms += abs(product)
            dpsum[lane], slack[lane] = total, part * terms


@helper
def _correct_dpsum(weights, gains, large, slack, channels, dpsum, totals):
    """Let slopes of a row add up to 0, if they are those of all its keys and rounding explains what they do.

    dq needs it of large weights alone: others are many, and what they do cancels.
    """
    for lane in range(0, PANEL, LANES):
        whole = load(weights, lane)
        rest = load(gains, lane) / whole
        rest = where(load(slack, lane) > magnitude(rest), rest, splat(_ZERO))
        rest = where(splat(_NEARLY) > magnitude(whole - splat(_ONE)), rest, splat(_ZERO))
        store(dpsum, lane, load(dpsum, lane) + rest)
        for at in range(lane, channels * PANEL, PANEL):
            store(totals, at, fused(load(large, at), splat(_ZERO) - rest, load(totals, at)))


@helper
def _keep_dpsum(dpsum, seq, head, group, row, rows, kept):
    """Write dpsum of the rows to `kept`."""
    for lane in range(min(PANEL, rows - row)):
        position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
        kept[seq[0], own, position] = dpsum[lane]


@helper
def _slack_of_whole_rows(seq, group, row, rows, key, left, right, slack, found):
    """Say whether rows see no key but those of the tile at `key`; found (PANEL,) = their slack, of others 0.

    `found` is not written where the first or the last row says that there are none.
    """
    behind, top, bottom = seq[4] - seq[2], row // group, (min(row + PANEL, rows) - 1) // group
    if max(bottom + behind - left, 0) < key or min(top + behind + right, seq[4] - 1) >= key + KEYS:
        return False
    some = False
    for lane in range(PANEL):
        position = (row + lane) // group + behind
        whole = max(position - left, 0) >= key and min(position + right, seq[4] - 1) < key + KEYS
        found[lane] = slack[lane] if whole else 0
        some |= whole
    return some


@helper
def _read_dpsum(kept, seq, head, group, row, rows, dpsum):
    for lane in range(PANEL):
        dpsum[lane] = 0
        if row + lane < rows:
            position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
            dpsum[lane] = kept[seq[0], own, position]


@helper
def _write_queries(totals, seq, head, group, row, rows, scale, dtype, line, rest, out16, out32):
    channels = out16.shape[3] + out32.shape[3]
    for lane in range(min(PANEL, rows - row)):
        position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
        for channel in range(channels):
            line[channel] = totals[channel * PANEL + lane] * scale
        store_values(
            line, dtype, out16[seq[0], position, own], out32[seq[0], position, own], 0, channels, rest
        )


@helper
def _write_keys(totals, seq, head, key, keys, scale, dtype, line, rest, out16, out32):
    """Write sums of a tile of keys in the dtype of k or, where out32 has the channels, in float32."""
    channels = out16.shape[3] + out32.shape[3]
    dtype = FLOAT32 if out32.shape[3] > 0 else dtype
    for j in range(keys):
        at = seq[3] + key + j
        for channel in range(channels):
            line[channel] = totals[(channel // PANEL * KEYS + j) * PANEL + channel % PANEL] * scale
        store_values(line, dtype, out16[seq[0], at, head], out32[seq[0], at, head], 0, channels, rest)


@helper
def _turn(panel, channels, squares):
    """squares (blocks, rows, PANEL): a panel with its channels in blocks of 24, a row of it contiguous."""
    for channel in range(channels):
        first = channel // PANEL * _SQUARE + channel % PANEL
        for lane in range(PANEL):
            squares[first + lane * PANEL] = panel[channel * PANEL + lane]


@helper
def _add_rows(weights, keys, squares, blocks, ones, totals):
    """totals (blocks, KEYS, PANEL) += weights (keys, PANEL) @ squares, block by block."""
    for block in range(blocks):
        multiply(
            weights, PANEL, 1, squares[block * _SQUARE :], PANEL, PANEL, totals[block * KEYS * PANEL :], keys,
            ones, False,
        )  # fmt: skip


_COMMON = (
    types.int64[::1], array_type(types.int64, 2), array_type(types.int64, 2), READ, READ, READ, READ,
)  # fmt: skip
_NUMBERS = (*(types.int64,) * 4, *(types.float32,) * 5)
_ROWS = array_type(types.float32, 3)
_QUERIES = types.void(*_COMMON, READ, _ROWS, *_NUMBERS, array_type(types.float32, 3, False), WRITE)
_KEYS = types.void(*_COMMON, _ROWS, _ROWS, *_NUMBERS, WRITE, WRITE)


@njit(_QUERIES, error_model="numpy", nogil=True, cache=True)
def backward_queries(
    counter, items, seq_info, dout, q, k, v, out, lse, dtype, group, left, right, sign, factor, rate,
    softcap, scale, delta, dq,
):  # fmt: skip
    """First pass: dq, and delta (batch, heads, seqlen) for the second; what one thread does.

    Arguments as of `attention.attend`; dout and out as q, scale the factor on the scores.
    """
    channels = q[0].shape[3] + q[1].shape[3]
    width = (channels + LANES - 1) // LANES * LANES
    pitch = width + LANES
    keys_tile, values_tile = np.zeros((2, KEYS * pitch), np.float32)
    queries, above, totals, large = np.empty((4, PANELS, width * PANEL), np.float32)
    logs, dpsum, slack, weights, gains = np.empty((5, PANELS, PANEL), np.float32)
    scores, slopes, bends = np.empty((3, KEYS * PANEL), np.float32)
    first, last, marks, near = np.empty((4, PANEL), np.float32)
    line, other, rest = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(LANES, np.uint16)
    sums, exponents = np.empty(LANES, np.float64), np.empty(LANES, np.float32)
    ones, nothing, nobody = np.ones(PANEL, np.float32), np.empty(0, np.float32), np.empty(0, np.int64)
    item = take_number(counter)
    while item < items.shape[0]:
        seq, head = seq_info[items[item, 0]], items[item, 1]
        start, rows = items[item, 2] * PANELS * PANEL, seq[2] * group
        panels = min(PANELS, (rows - start + PANEL - 1) // PANEL)
        for p in range(panels):
            row = start + p * PANEL
            read_panel(q[0], q[1], dtype, seq, head, group, row, rows, sign, line, queries[p])
            read_panel(dout[0], dout[1], dtype, seq, head, group, row, rows, _ONE, line, above[p])
            _read_logs(lse, seq, head, group, row, rows, logs[p])
            _find_dpsum(dout, out, dtype, seq, head, group, row, rows, line, other, dpsum[p], slack[p])
            for i in range(width * PANEL):
                totals[p, i] = large[p, i] = 0
            for i in range(PANEL):
                weights[p, i] = gains[p, i] = 0
        behind = seq[4] - seq[2]
        low = max(start // group + behind - left, 0)
        high = min((min(start + panels * PANEL, rows) - 1) // group + behind + right + 1, seq[4])
        near_keys = count_near(k[1], seq, head) if dtype == FLOAT32 else (0, 0)
        for key in range(low, high, KEYS):
            keys = min(KEYS, high - key)
            padded = (keys + 3) // 4 * 4
            read_tile(k[0], k[1], dtype, seq, head, key, keys, pitch, keys_tile)
            read_tile(v[0], v[1], dtype, seq, head, key, keys, pitch, values_tile)
            for p in range(panels):
                hidden = mask_of(seq, group, start + p * PANEL, rows, key, left, right, first, last)
                if first.min() > KEYS - 1 or last.max() < 0:
                    continue
                multiply(keys_tile, pitch, 1, queries[p], channels, CHUNK, scores, padded, ones, True)
                multiply(values_tile, pitch, 1, above[p], channels, CHUNK, slopes, padded, ones, True)
                whole = _slack_of_whole_rows(
                    seq, group, start + p * PANEL, rows, key, left, right, slack[p], marks
                )
                some = rows_near(seq, group, start + p * PANEL, rows, right, nobody, near_keys, near)
                _probabilities(
                    scores, slopes, padded, hidden or padded < KEYS, first, last, keys_tile, pitch,
                    queries[p], channels, dtype, factor, rate, softcap, near if some else nothing,
                    some == ALL_EQUAL, logs[p], dpsum[p],
                    marks if whole else nothing, weights[p], gains[p], large[p], bends, sums, exponents,
                )  # fmt: skip
                multiply(keys_tile, 1, pitch, slopes, padded, KEYS, totals[p], width, ones, False)
        for p in range(panels):
            if dtype == FLOAT32:
                _correct_dpsum(weights[p], gains[p], large[p], slack[p], channels, dpsum[p], totals[p])
            _keep_dpsum(dpsum[p], seq, head, group, start + p * PANEL, rows, delta)
            _write_queries(
                totals[p], seq, head, group, start + p * PANEL, rows, scale, dtype, line, rest, dq[0], dq[1]
            )
        item = take_number(counter)


@njit(_KEYS, error_model="numpy", nogil=True, cache=True)
def backward_keys(
    counter, items, seq_info, dout, q, k, v, lse, delta, dtype, group, left, right, sign, factor, rate,
    softcap, scale, dk, dv,
):  # fmt: skip
    """Second pass: dk and dv; an item is a sequence, a KV head and a block of TILES * KEYS keys."""
    channels = q[0].shape[3] + q[1].shape[3]
    width = (channels + LANES - 1) // LANES * LANES
    pitch, blocks = width + LANES, (channels + PANEL - 1) // PANEL
    keys_tiles, values_tiles = np.zeros((2, TILES, KEYS * pitch), np.float32)
    keys_totals, values_totals = np.empty((2, TILES, blocks * KEYS * PANEL), np.float32)
    queries, above = np.empty((2, width * PANEL), np.float32)
    query_squares, above_squares = np.zeros((2, blocks * _SQUARE), np.float32)
    scores, slopes, bends = np.empty((3, KEYS * PANEL), np.float32)
    logs, dpsum, first, last, near = np.empty((5, PANEL), np.float32)
    line, rest = np.empty(width, np.float32), np.empty(LANES, np.uint16)
    sums, exponents = np.empty(LANES, np.float64), np.empty(LANES, np.float32)
    ones, nothing, nobody = np.ones(PANEL, np.float32), np.empty(0, np.float32), np.empty(0, np.int64)
    item = take_number(counter)
    while item < items.shape[0]:
        seq, head = seq_info[items[item, 0]], items[item, 1]
        begin, rows = items[item, 2] * TILES * KEYS, seq[2] * group
        end = min(begin + TILES * KEYS, seq[4])
        tiles = (end - begin + KEYS - 1) // KEYS
        for t in range(tiles):
            key = begin + t * KEYS
            keys = min(KEYS, end - key)
            read_tile(k[0], k[1], dtype, seq, head, key, keys, pitch, keys_tiles[t])
            read_tile(v[0], v[1], dtype, seq, head, key, keys, pitch, values_tiles[t])
            for i in range(blocks * KEYS * PANEL):
                keys_totals[t, i] = values_totals[t, i] = 0
        near_keys = count_near(k[1], seq, head) if dtype == FLOAT32 else (0, 0)
        behind = seq[4] - seq[2]
        low = max(begin - right - behind, 0) * group
        high = min(end + left - behind, seq[2]) * group
        for row in range(low, high, PANEL):
            read_panel(q[0], q[1], dtype, seq, head, group, row, rows, sign, line, queries)
            read_panel(dout[0], dout[1], dtype, seq, head, group, row, rows, _ONE, line, above)
            _turn(queries, channels, query_squares)
            _turn(above, channels, above_squares)
            _read_logs(lse, seq, head, group, row, rows, logs)
            _read_dpsum(delta, seq, head, group, row, rows, dpsum)
            some = rows_near(seq, group, row, rows, right, nobody, near_keys, near)
            for t in range(tiles):
                key = begin + t * KEYS
                padded = (min(KEYS, end - key) + 3) // 4 * 4
                hidden = mask_of(seq, group, row, rows, key, left, right, first, last)
                if first.min() > KEYS - 1 or last.max() < 0:
                    continue
                multiply(keys_tiles[t], pitch, 1, queries, channels, CHUNK, scores, padded, ones, True)
                multiply(values_tiles[t], pitch, 1, above, channels, CHUNK, slopes, padded, ones, True)
                _probabilities(
                    scores, slopes, padded, hidden or padded < KEYS, first, last, keys_tiles[t], pitch,
                    queries, channels, dtype, factor, rate, softcap, near if some else nothing,
                    some == ALL_EQUAL, logs, dpsum, nothing, nothing, nothing, nothing, bends, sums,
                    exponents,
                )  # fmt: skip
                _add_rows(scores, padded, above_squares, blocks, ones, values_totals[t])
                _add_rows(slopes, padded, query_squares, blocks, ones, keys_totals[t])
        for t in range(tiles):
            key = begin + t * KEYS
            keys = min(KEYS, end - key)
            _write_keys(keys_totals[t], seq, head, key, keys, scale, dtype, line, rest, dk[0], dk[1])
            _write_keys(values_totals[t], seq, head, key, keys, _ONE, dtype, line, rest, dv[0], dv[1])
        item = take_number(counter)
