"""Large weights of packed attention: noted on the way, computed again at the end, from scores in float64.

A score of 40 in float32 is off by some 4e-6, and so is its weight, relatively: where few tokens have all the
weight of a row, more than float32 queries allow of out. Which weights are large (`large_share` of `tiles`) is
known when all parts of a row are there. So a part notes what is large by its own sum so far; most calls have
none left at the end. For the others the page is expanded again (`expand`), and what a weight was off by is
added to the sum of its part and, times its value, to what that part added up to.

Notes of a part and a row: number, and up to NOTES each of slot (64 * quad + slot of the quad) and weight, in
units of 2^row_max. number (num_bh, blocks, parts, rows) is empty if nothing shall be noted.
"""

import math

import numpy as np

from .doubles import dot, hadamard64
from .expand import PADDING, SLOT_AT, index_of
from .fragments import QUAD, call_product
from .key_frame import read_frame
from .page import (
    K_FUNCTION,
    K_SCALES,
    PAGE,
    POOL,
    RECORD,
    SLOTS,
    V_CODES,
    V_FUNCTION,
    V_SCALES,
    double_scales,
)
from .simd import LANES, helper, store
from .softmax import LOG2_E, serial, take_number
from .tiles import LARGE_PART, LARGEST_SIZE, LEAST_CAPPED, LEAST_SIZE

NOTES = 64
"""More weights than can be large at once: a large one is above LARGE_PART / LARGEST_SIZE of the sum."""

ALL_EQUAL = NOTES + 1
"""Number of notes where a part holds equal keys alone: one note for all. What scores in float32 are off by is
the same for all and shows in lse, however small a weight is."""

LEAST_OF_FEW, LEAST_OF_MANY = np.float32(8), LEAST_SIZE
"""The least size of scores, as LEAST_SIZE of `tiles`: with a few query rows, whose sums err more, and with
many."""

_MINUS_INFINITY, _LOG_2 = np.float32(-np.inf), math.log(2)


@helper
def note(slot, weight, limit, slots, weights, number):
    """Note a weight; return how many there are then. What is not above `limit` any more makes room."""
    if number == NOTES:
        number = 0
        for i in range(NOTES):
            if weights[i] > limit:
                slots[number], weights[number] = slots[i], weights[i]
                number += 1
    if number < NOTES:
        slots[number], weights[number] = slot, weight
        number += 1
    return number


@helper
def note_equal(slot, weight, slots, weights):
    """Note that all weights of a part are as this one, to 2^-16; return the number that says so."""
    slots[0], weights[0] = slot, weight
    return ALL_EQUAL


@helper
def rescale_notes(weights, number, factor):
    """Bring noted weights to the units of another row_max."""
    for i in range(number):
        weights[i] *= factor


@helper
def read_scales(address, scales, by_slot):
    """scales (16,) = twice the scales of the tokens of SLOT_AT."""
    for slot in range(0, PAGE, LANES):
        store(by_slot, slot, double_scales(address + slot))
    for p in range(PAGE):
        scales[p] = by_slot[SLOT_AT[p]]


@helper
def power(exponent):
    """Return 2^exponent in float64."""
    return 1.0 if exponent == 0 else math.exp(exponent * _LOG_2)


@helper
def whole_of(row_max, row_sum, own, row):
    """Return the largest row_max of the parts of a row, and their sum in units of 2 to it."""
    new_max, whole = _MINUS_INFINITY, 0.0
    for part in range(row_max.shape[1]):
        new_max = max(new_max, row_max[own, part, row])
    for part in range(row_max.shape[1]):
        if row_sum[own, part, row] != 0:
            whole += row_sum[own, part, row] * power(np.float64(row_max[own, part, row] - new_max))
    return new_max, whole


@helper
def limit_of(row_max, whole, least_size, softcap):
    """Return what a weight is above, in units of 2^row_max, if it is large."""
    least = max(LEAST_CAPPED, least_size) if softcap > 0 else least_size
    return LARGE_PART / min(max(abs(row_max), least), LARGEST_SIZE) * whole


@serial
def any_large(row_max, row_sum, notes, query_rows, least_size, softcap):
    """Say whether a noted weight of a query row is large; rows behind those fill up the last block."""
    number, _, weights = notes
    num_bh, _, parts, rows = row_max.shape
    for i in range(num_bh * query_rows):
        bh, own, row = i // query_rows, i % query_rows // rows, i % query_rows % rows
        noted = 0
        for part in range(parts):
            if number[bh, own, part, row] == ALL_EQUAL:
                return True
            noted += number[bh, own, part, row]
        if noted:
            new_max, whole = whole_of(row_max[bh], row_sum[bh], own, row)
            limit = limit_of(new_max, whole, least_size, softcap)
            for part in range(parts):
                factor = power(np.float64(row_max[bh, own, part, row] - new_max))
                for n in range(number[bh, own, part, row]):
                    if weights[bh, own, part, row, n] * factor > limit:
                        return True
    return False


@helper
def _read_query(query, scale, frame, block, coded, raw):
    """coded, raw (head_dim,) = scale * query for coded and for raw keys, channels as in `expand`.

    Returns what the mean of keys adds to scores of coded ones.
    """
    mean, powers, order, factors, line, rotated = frame
    product = 0.0
    for channel in range(query.size):
        line[channel] = scale * np.float64(query[channel])
        raw[index_of(channel)] = line[channel]
        product += line[channel] * np.float64(mean[channel])
        line[channel] *= powers[channel]
    for n in range(query.size):
        rotated[n] = line[order[n]]
    hadamard64(rotated, block)
    for n in range(query.size):
        coded[index_of(n)] = rotated[n] * factors[n]
    return product


@helper
def _read_page(layout, record, number, head_dim, scratch):
    """Expand the page at an address as page `number` of a quad, unless it is there."""
    held, keys, values, scales, by_slot = scratch
    if record == held[number]:
        return
    held[number] = record
    if layout[K_SCALES] >= 0:
        read_scales(record + layout[K_SCALES], scales, by_slot)
    matrix, tiles = keys[number].ctypes.data, head_dim // 16
    call_product(layout[K_FUNCTION], record, scales.ctypes.data, matrix, tiles)
    if layout[V_SCALES] >= 0:
        read_scales(record + layout[V_SCALES], scales, by_slot)
    matrix = values.ctypes.data + 4 * PAGE * number
    call_product(layout[V_FUNCTION], record + layout[V_CODES], scales.ctypes.data, matrix, tiles)


@helper
def _change_weight(change, values, token, out):
    """out += change * the values of a token of a quad, but for what is not finite."""
    for channel in range(out.size):
        product = change * values[channel * (SLOTS + PADDING) + token]
        if abs(product) < np.inf:
            out[channel] += product


@serial
def sharpen_parts(
    counter, q, scale, softcap, least_size, keys, block, table, layouts, parts, row_max, row_sum, notes
):  # fmt: skip
    """Compute large weights again, and mend the parts they are in: what one thread does, by the counter.

    q (batch, positions, heads, head_dim) float32; keys, block: as `read_frame` takes them; table: rung,
    count, index, base, num_pages; layouts with functions of `expand`; parts, row_max as in `merge_parts`,
    row_sum float64.
    """
    (batch, positions, heads, head_dim), (num_bh, _, splits, rows) = q.shape, row_max.shape
    kv_heads = num_bh // batch
    group, (number, slots, weights) = heads // kv_heads, notes
    mean, powers = np.empty((2, head_dim), np.float32)
    factors, line, rotated, coded, raw = np.empty((5, head_dim), np.float64)
    order, held = np.empty(head_dim, np.int64), np.empty(QUAD, np.int64)
    key_pages = np.empty((QUAD, PAGE * (head_dim + PADDING)), np.float32)
    values = np.empty(head_dim * (SLOTS + PADDING), np.float32)
    scales, by_slot = np.empty((2, PAGE), np.float32)
    bh = take_number(counter)
    while bh < num_bh:
        held[:] = 0
        read_frame(keys, bh, block, mean, powers, order, factors)
        for i in range(positions * group):
            own, row, read, bias = i // rows, i % rows, False, 0.0
            if not number[bh, own, :, row].any():
                continue
            new_max, whole = whole_of(row_max[bh], row_sum[bh], own, row)
            limit = limit_of(new_max, whole, least_size, softcap)
            for part in range(splits):
                part_max, noted = row_max[bh, own, part, row], number[bh, own, part, row]
                factor, equal = power(np.float64(part_max - new_max)), noted == ALL_EQUAL
                for n in range(1 if equal else noted):
                    before, at = weights[bh, own, part, row, n], slots[bh, own, part, row, n]
                    if not (equal or before * factor > limit):
                        continue
                    if not read:
                        query = q[bh // kv_heads, i // group, bh % kv_heads * group + i % group]
                        frame = mean, powers, order, factors, line, rotated
                        bias, read = _read_query(query, scale, frame, block, coded, raw), True
                    layout, page = layouts[table[0][bh, at // PAGE]], at // PAGE % QUAD
                    record = layout[POOL] + np.int64(table[2][bh, at // PAGE]) * layout[RECORD]
                    _read_page(layout, record, page, head_dim, (held, key_pages, values, scales, by_slot))
                    token, is_coded = SLOT_AT[at % PAGE], layout[K_SCALES] >= 0
                    first = token * (head_dim + PADDING)
                    score = dot(coded if is_coded else raw, key_pages[page], first, head_dim)
                    score += bias if is_coded else 0.0
                    if softcap > 0:
                        score = softcap * math.tanh(score / softcap)
                    weight = power(score * np.float64(LOG2_E) - part_max)
                    if equal:
                        row_sum[bh, own, part, row] *= weight / before
                        parts[0, bh, own, part, row] *= weight / before
                        parts[1, bh, own, part, row] *= weight / before
                    else:
                        out = parts[0 if layout[V_SCALES] >= 0 else 1, bh, own, part, row]
                        row_sum[bh, own, part, row] += weight - before
                        _change_weight(weight - before, values, PAGE * page + token, out)
        bh = take_number(counter)
