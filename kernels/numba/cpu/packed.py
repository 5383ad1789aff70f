"""Attention of a few query rows over packed pages: the softmax around the products of `fragments`.

Work is cut into items: one (batch row, KV head), one block of up to 4 query rows, one range of quads, four
pages of one rung each. Threads take items from a counter; the answer of an item does not depend on the
thread, and the parts of a row are merged in order, so the result has the same bits for any number of threads.
Within an item:

    per quad    scores = K q, times the scales of the tokens        scores[row][64 slots]
                row_max and sum of exp2; sums are rescaled when row_max rises
                totals += V^T (p * scale)                           totals[head_dim / 16][4][2][row][8 lanes]
    at the end  out = the sums of four lanes of totals              out[row][head_dim]

Scores are in units of log 2 inside. Values of coded (rotated) pages and raw ones have their own totals,
because the coded part is rotated back at the end. Scratch memory of a thread: the totals, a quad of scores
and of weights (in float32 all scores of an item, see `packed_large`), and for raw values its pages without
their unused slots. K and V are never written out
unpacked.

Shapes: num_bh = batch * num_heads_kv; query rows are (position, head of the group), heads fastest, in blocks
of `rows`, the last block filled up. Tables and `layouts` are those of `page`; `packed_merge` makes
results of the parts.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .fragments import QUAD, add_lanes, call_product
from .groups import hadamard_run
from .key_frame import read_frame
from .packed_large import ALL_EQUAL, LEAST_OF_FEW, limit_of, note, note_equal
from .page import (
    K_FUNCTION,
    K_SCALES,
    PAGE,
    POOL,
    POSITIONS,
    RECORD,
    SLOTS,
    V_FUNCTION,
    V_SCALES,
    double_scales,
    find_records,
    leave_out_before,
    load_word,
    position_of,
    prefetch,
)
from .simd import any_above, float32x8, helper, highest, load, maximum, splat, store, total
from .softmax import LOG2_E, all_done, emit_exp2, exp2, floats, integers, serial, take_number
from .tiles import fused

UPPER_HALF = np.float32(2.0**-16)
"""Factor on the patterns that meet the upper halves of words of codes."""

HEADROOM = np.float32(8)
"""How far a score may exceed its row_max, in units of log 2, before row_max follows: shrinking all
that has been added up costs more than a few larger weights."""

_MINUS_INFINITY = np.float32(-np.inf)
_NEARLY = np.float32(1 - 2.0**-16)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_F32X8 = ir.VectorType(ir.FloatType(), 8)


@intrinsic
def _write_probabilities(typing_context, scores, new_max, scales, factor, patterns, row):
    """Write a row of the patterns of p for V, p = exp2(score - new_max) * scale; return sums of exp2 by slot.

    scores (64,), scales (64,); patterns (4 pages, 2, 2, rows, 4); `factor` is what the upper halves need.
    Slot 4 u + 2 half + column half of a page is lane u of the pattern of these halves (see `fragments`).
    """

    def generate(context, builder, signature, arguments):
        score_at, scale_at, pattern_at = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2, 4)
        )
        shape = context.make_array(signature.args[4])(context, builder, arguments[4]).shape
        rows = builder.extract_value(shape, 3)
        new_max, factor = (_spread(builder, arguments[i]) for i in (1, 3))
        total, weights = floats(0.0), []
        for i in range(0, SLOTS, 8):
            x, scale = (
                _load_floats(builder, pointer, ir.Constant(_I64, i)) for pointer in (score_at, scale_at)
            )
            p = emit_exp2(builder, builder.fsub(x, new_max))
            total = builder.fadd(total, p)
            weights.append(builder.fmul(p, scale))
        for page in range(QUAD):
            eights = weights[2 * page : 2 * page + 2]
            for half in range(2):
                if half:
                    eights = [builder.fmul(eight, factor) for eight in eights]
                for column_half in range(2):
                    order = _lanes(range(2 * half + column_half, PAGE, 4))
                    four = builder.shuffle_vector(*eights, order)
                    number = _I64((page * 2 + column_half) * 2 + half)
                    offset = builder.add(builder.mul(rows, number), arguments[5])
                    target = builder.gep(pattern_at, [builder.mul(offset, _I64(4))])
                    builder.store(four, builder.bitcast(target, four.type.as_pointer())).align = 4
        return total

    return float32x8(scores, types.float32, scales, types.float32, patterns, types.intp), generate


def _transpose(builder, vectors):
    """Four vectors a, b, c, d to [a0 b0 c0 d0 a4 b4 c4 d4], [a1 ... ], [a2 ...], [a3 ...]."""

    def shuffle(x, y, order):
        return builder.shuffle_vector(x, y, _lanes(order + [k + 4 for k in order]))

    a, b, c, d = vectors
    ab, cd = ([shuffle(x, y, [k, k + 8, k + 1, k + 9]) for k in (0, 2)] for x, y in ((a, b), (c, d)))
    return [shuffle(ab[k], cd[k], order) for k in (0, 1) for order in ([0, 1, 8, 9], [2, 3, 10, 11])]


def _lanes(order):
    return ir.Constant(ir.VectorType(_I32, len(order)), list(order))


def _spread(builder, value):
    one = builder.insert_element(ir.Constant(_F32X8, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, integers(0))


def _load_floats(builder, data, index):
    value = builder.load(builder.bitcast(builder.gep(data, [index]), _F32X8.as_pointer()))
    value.align = 4
    return value


@serial
def lay_out_queries(q, scale, keys, block, coded, raw, bias):
    """Write scale * q as patterns of `fragments`, for coded keys (rotated) and for raw ones.

    q (batch, positions, heads, head_dim) float32; coded, raw (num_bh, blocks, head_dim / 16, 2, 2, rows, 4).
    keys: their frames, and block, as `read_frame` of `key_frame` takes them; bias (num_bh, blocks, rows)
    receives <q, mean>.
    """
    batch, positions, heads, head_dim = q.shape
    num_bh, blocks, rows = bias.shape
    kv_heads = num_bh // batch
    group = heads // kv_heads
    line, rotated, mean, powers, factors = np.empty((5, head_dim), np.float32)
    order = np.empty(head_dim, np.int64)
    for bh in range(num_bh):
        read_frame(keys, bh, block, mean, powers, order, factors)
        for i in range(blocks * rows):
            own, row = i // rows, i % rows
            for channel in range(head_dim):
                line[channel] = 0
            if i < positions * group:
                query = q[bh // kv_heads, i // group, bh % kv_heads * group + i % group]
                for channel in range(head_dim):
                    line[channel] = scale * query[channel]
            _write_pattern(line, np.float32(1), raw[bh, own], row)
            product = 0.0
            for channel in range(head_dim):
                product += np.float64(line[channel]) * np.float64(mean[channel])
                line[channel] *= powers[channel]
            bias[bh, own, row] = product
            for n in range(head_dim):
                rotated[n] = line[order[n]]
            hadamard_run(rotated, 0, head_dim, block)
            for n in range(head_dim):
                rotated[n] *= factors[n]
            _write_pattern(rotated, UPPER_HALF, coded[bh, own], row)


@helper
def _write_pattern(line, upper_half, patterns, row):
    """Write one query row: patterns (head_dim / 16, 2, 2, rows, 4)."""
    for tile in range(patterns.shape[0]):
        for column_half in range(2):
            for u in range(4):
                channel = 16 * tile + 8 * column_half + 2 * u
                patterns[tile, column_half, 0, row, u] = line[channel]
                patterns[tile, column_half, 1, row, u] = line[channel + 1] * upper_half


@helper
def _read_scales(records, offset, scales):
    """Twice the scales of the tokens of a quad."""
    for page in range(QUAD):
        if records[page]:
            store(scales, PAGE * page, double_scales(records[page] + offset))
            store(scales, PAGE * page + 8, double_scales(records[page] + offset + 8))


@helper
def _clear_unused(used, scales):
    for page in range(QUAD):
        for slot in range(used[page], PAGE):
            scales[PAGE * page + slot] = 0


@helper
def _scale_scores(scores, scales, bias):
    """Raw products of coded keys to scores; the same in units of log 2."""
    for row in range(scores.shape[0]):
        own, shift = scores[row], splat(bias[row])
        for slot in range(0, SLOTS, 8):
            store(own, slot, fused(load(own, slot), load(scales, slot), shift))


@helper
def _mask_scores(scores, used, softcap):
    """Apply the soft cap, if there is one, and hide unused slots."""
    for row in range(scores.shape[0]):
        for page in range(QUAD):
            if softcap > 0:
                for slot in range(PAGE * page, PAGE * page + used[page]):
                    scores[row, slot] = softcap * LOG2_E * math.tanh(scores[row, slot] / softcap)
            for slot in range(PAGE * page + used[page], PAGE * page + PAGE):
                scores[row, slot] = _MINUS_INFINITY


@helper
def _mask_window(scores, records, offset, base, used, first_visible):
    """Hide from each row the tokens before the position first_visible[row]."""
    for page in range(QUAD):
        for slot in range(used[page]):
            position = position_of(records[page] + offset, base[page], slot)
            for row in range(scores.shape[0]):
                if position < first_visible[row]:
                    scores[row, PAGE * page + slot] = _MINUS_INFINITY


@helper
def _update_max(scores, row_max, row_sum, rescale, highest_scores):
    """Let no score exceed its row_max by more than HEADROOM; whether totals have to be rescaled."""
    changed = False
    for row in range(scores.shape[0]):
        own = scores[row]
        best = load(own, 0)
        for slot in range(8, SLOTS, 8):
            best = maximum(load(own, slot), best)
        new_max = highest(best)
        rescale[row] = 1
        highest_scores[row] = max(highest_scores[row], new_max)
        if new_max > row_max[row] + HEADROOM:
            if row_sum[row] != 0:
                rescale[row] = np.float32(2.0) ** (row_max[row] - new_max)
                row_sum[row] *= rescale[row]
                changed = True
            row_max[row] = new_max
    return changed


@helper
def _rescale_totals(totals, rows, rescale):
    for first in range(0, totals.size, 8 * rows):
        for row in range(rows):
            store(totals, first + 8 * row, load(totals, first + 8 * row) * splat(rescale[row]))


@helper
def _note_large(scores, first, held, highest_scores, row_max, row_sum, softcap, scratch, notes):
    """Note which weights of a part are large by its sum: scores (quads, rows, 64), from quad `first` on.

    held: tokens that each row sees, 0 if not all see the same; highest_scores (rows,) of the part; scratch
    (2, 8).
    """
    number, slots, weights = notes
    largest, eight = scratch[0], scratch[1]
    rows = row_sum.size
    for row in range(rows):
        largest[row] = highest_scores[row] - row_max[row]
    store(largest, 0, exp2(load(largest, 0)))
    for row in range(rows):
        number[row] = 0
        limit = limit_of(row_max[row], row_sum[row], LEAST_OF_FEW, softcap)
        equal = row_sum[row] > held * largest[row] * _NEARLY and held > 0
        if not (equal or largest[row] > limit):
            continue
        if equal:
            limit = largest[row] * _NEARLY
        threshold = np.float32(row_max[row] + math.log2(limit))
        for i in range(scores.shape[0] * SLOTS // 8):
            quad, slot = i // 8, i % 8 * 8
            if number[row] != ALL_EQUAL and any_above(load(scores[quad, row], slot), splat(threshold)):
                store(eight, 0, exp2(load(scores[quad, row], slot) - splat(row_max[row])))
                for lane in range(8):
                    if eight[lane] > limit:
                        at = SLOTS * (first + quad) + slot + lane
                        if equal:
                            number[row] = note_equal(at, eight[lane], slots[row], weights[row])
                            break
                        number[row] = note(at, eight[lane], limit, slots[row], weights[row], number[row])


@helper
def _copy_without_unused(address, head_dim, itemsize, used, words):
    """Copy the values of a page that is not full, of width 16, with zeros in its unused slots."""
    for i in range(words.size):
        words[i] = load_word(address + 4 * i)
    for slot in range(used, PAGE):
        column = slot // 2 + 8 * (slot % 2)
        for channel in range(head_dim):
            register = channel % 16 // 8 + 2 * (column // 8)
            lane = channel % 8 * 4 + column % 8 // 2
            tile = channel // 16
            if itemsize == 4:
                words[(8 * tile + 2 * register + column % 2) * 32 + lane] = 0
            else:
                keep = np.uint32(0x0000FFFF) if column % 2 else np.uint32(0xFFFF0000)
                words[(4 * tile + register) * 32 + lane] &= keep


@helper
def _add_lanes(totals, out):
    """out (rows, head_dim) = the sums of the four lanes of totals that belong together."""
    rows, head_dim = out.shape
    for row in range(rows):
        for eight in range(head_dim // 8):
            start = ((eight // 2 * 4 * 2 + eight % 2) * rows + row) * 8
            store(out[row], 8 * eight, add_lanes(totals, start, 2 * rows * 8))


@helper
def _attend_range(
    queries, table, layouts, first, last, itemsize, softcap, saved, first_saved, scratch, result
):
    """One item: attend the quads first to last - 1 of a table row with a block of queries."""
    query_coded, query_raw, bias, first_visible = queries
    rung, _, index, base = table
    all_scores, scales, weights, coded, raw, words, rescale, largest, records, values, used = scratch
    out_coded, out_raw, row_max, row_sum, notes = result
    rows, head_dim = out_coded.shape
    oldest = first_visible[0]
    hides = first_visible[rows - 1] > 0  # a later row sees no more than an earlier one
    for i in range(coded.size):
        coded[i] = raw[i] = 0
    for row in range(rows):
        row_max[row], row_sum[row], largest[0, row] = _MINUS_INFINITY, 0, _MINUS_INFINITY
    held = 0
    for quad in range(first, last):
        layout = layouts[rung[QUAD * quad]]
        tokens, own_base = find_records(table, layout, quad, records, values, used), base[QUAD * quad :]
        if hides:
            tokens = leave_out_before(oldest, layout, own_base, records, values, used)
        scores = all_scores[quad - first if notes[0].size else 0]
        if tokens == 0:
            for row in range(rows):
                for slot in range(SLOTS):
                    scores[row, slot] = _MINUS_INFINITY
            for row in range(max(0, -first_saved), min(rows, saved.shape[1] - first_saved)):
                for slot in range(SLOTS):
                    saved[quad, first_saved + row, slot] = _MINUS_INFINITY
            continue

        if quad + 1 < last:
            following = layouts[rung[QUAD * quad + QUAD]]
            for p in range(QUAD * quad + QUAD, QUAD * quad + 2 * QUAD):
                start = following[POOL] + np.int64(index[p]) * following[RECORD]
                for line in range(start // 64 * 64, start + following[POSITIONS], 64):
                    prefetch(line)

        held += tokens
        coded_keys, coded_values = layout[K_SCALES] >= 0, layout[V_SCALES] >= 0
        query = query_coded if coded_keys else query_raw
        call_product(
            layout[K_FUNCTION], records.ctypes.data, query.ctypes.data, scores.ctypes.data, head_dim // 16
        )
        if coded_keys:
            _read_scales(records, layout[K_SCALES], scales)
            _scale_scores(scores, scales, bias)
        if softcap > 0 or tokens < SLOTS:
            _mask_scores(scores, used, softcap)
        if hides:
            _mask_window(scores, records, layout[POSITIONS], own_base, used, first_visible)
        for row in range(max(0, -first_saved), min(rows, saved.shape[1] - first_saved)):
            for slot in range(SLOTS):
                saved[quad, first_saved + row, slot] = scores[row, slot] / LOG2_E
        if _update_max(scores, row_max, row_sum, rescale, largest[0]):
            _rescale_totals(coded, rows, rescale)
            _rescale_totals(raw, rows, rescale)

        if coded_values:
            _read_scales(records, layout[V_SCALES], scales)
        else:
            for slot in range(0, SLOTS, 8):
                store(scales, slot, splat(np.float32(1)))
        if tokens < SLOTS:
            _clear_unused(used, scales)
        factor = UPPER_HALF if coded_values else np.float32(1)
        for row in range(rows):
            new_max = np.float32(0) if row_max[row] == _MINUS_INFINITY else row_max[row]
            sums = _write_probabilities(scores[row], new_max, scales, factor, weights, row)
            row_sum[row] += total(sums)
        for page in range(QUAD):
            if not coded_values and 0 < used[page] < PAGE:
                _copy_without_unused(values[page], head_dim, itemsize, used[page], words[page])
                values[page] = words[page].ctypes.data
        totals = coded if coded_values else raw
        call_product(
            layout[V_FUNCTION], values.ctypes.data, weights.ctypes.data, totals.ctypes.data, head_dim // 16
        )
    _add_lanes(coded, out_coded)
    _add_lanes(raw, out_raw)
    if notes[0].size:
        quads = all_scores[: last - first]
        _note_large(
            quads, first, 0 if hides else held, largest[0], row_max, row_sum, softcap, largest[1:], notes
        )


@serial
def attend_pages(counter, queries, table, layouts, itemsize, softcap, saved, first_saved, result, notes):
    """Attend all pages, in parts: what one thread does, taking items from the counter until none is left.

    queries: coded, raw (num_bh, blocks, head_dim / 16, 2, 2, rows, 4), patterns of `fragments` for coded
    and for raw keys; bias (num_bh, blocks, rows), added to the scores of coded keys; first_visible, as bias:
    the first position that a row sees (base is read only if one is above 0). table: rung, count, index, base
    (num_bh, entries); num_pages (num_bh,). saved (num_bh, quads, saved rows, 64) receives the scores,
    natural, of query rows from first_saved on. result: out (2, num_bh, blocks, splits, rows, head_dim), what
    coded and raw values add up to, in units of 2^row_max; row_max, row_sum (num_bh, blocks, splits, rows).
    notes: those of `packed_large`.
    Returns whether all items are done.
    """
    coded, raw, bias, first_visible = queries
    rung, count, index, base, num_pages = table
    out, row_max, row_sum = result
    number, slots, noted = notes
    _, num_bh, blocks, splits, rows, head_dim = out.shape
    longest = np.int64(num_pages.max()) // QUAD // splits + 1 if number.size else 1
    scratch = (
        np.empty((longest, rows, SLOTS), np.float32),
        np.empty(SLOTS, np.float32),
        np.empty((QUAD, 2, 2, rows, 4), np.float32),
        np.empty(4 * rows * head_dim, np.float32),
        np.empty(4 * rows * head_dim, np.float32),
        np.empty((QUAD, PAGE * head_dim * itemsize // 4), np.uint32),
        np.empty(rows, np.float32),
        np.zeros((3, 8), np.float32),
        np.empty(QUAD, np.int64),
        np.empty(QUAD, np.int64),
        np.empty(QUAD, np.int64),
    )
    item, own, items = take_number(counter), 0, num_bh * blocks * splits
    while item < items:
        bh, block, part = item // (blocks * splits), item // splits % blocks, item % splits
        live = np.int64(num_pages[bh]) // QUAD
        _attend_range(
            (coded[bh, block], raw[bh, block], bias[bh, block], first_visible[bh, block]),
            (rung[bh], count[bh], index[bh], base[bh]),
            layouts,
            live * part // splits,
            live * (part + 1) // splits,
            itemsize,
            softcap,
            saved[bh],
            block * rows - first_saved,
            scratch,
            (
                out[0, bh, block, part],
                out[1, bh, block, part],
                row_max[bh, block, part],
                row_sum[bh, block, part],
                (number[bh, block, part], slots[bh, block, part], noted[bh, block, part]),
            ),
        )
        item, own = take_number(counter), own + 1
    return all_done(counter, own, items)
