"""Attention of dozens of query rows over packed pages: chunks of a prompt, where `packed` has a few rows.

A quad of pages is expanded once into scratch memory (`expand`) and multiplied for all query rows, in panels
of 24 (`tiles`), at the speed of a matrix product:

    per quad    keys, values = its pages, dense, times its scales     [64][head_dim], [head_dim][64]
    per panel   scores = keys @ queries                              [64 tokens][24 rows], lanes are rows
                weights, row_max, row_sum: the online softmax of `update_softmax`
                totals = totals * rescale + values @ weights          [head_dim][24]

Items of work are (batch row, KV head), a block of up to PANELS panels, a range of quads and whether its
values are coded or raw: coded values are summed in their rotated frame, so the sums of the two stay apart, as
two parts, each with its own row_max. Threads take items from a counter, and the answer of an item does not
depend on the thread; `packed_merge` merges the parts in order. Tables of pages are those of
`page`, with the functions of `expand`.

Scratch of a thread at head_dim 64: keys and values 36 KiB, queries and totals of 8 panels 97 KiB, scores 6.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .expand import PADDING, SLOT_AT, index_of
from .fragments import QUAD, call_product
from .groups import hadamard_run
from .key_frame import read_frame
from .packed_large import note, read_scales, rescale_notes
from .page import (
    K_FUNCTION,
    K_SCALES,
    PAGE,
    POSITIONS,
    SLOTS,
    V_FUNCTION,
    V_SCALES,
    find_records,
    leave_out_before,
    position_of,
)
from .simd import (
    F32X8,
    LANES,
    any_above,
    helper,
    load,
    load_unaligned,
    pointer_to,
    splat,
    store,
    store_unaligned,
)
from .softmax import LOG2_E, serial, take_number
from .tiles import (
    CHUNK_OF_STORED,
    LOWEST,
    MINUS_INFINITY,
    PANEL,
    PANELS,
    cap,
    large_share,
    multiply,
    update_softmax,
)

_ZERO = np.float32(0)


@intrinsic
def _transpose(typing_context, source, first, near, far, target):
    """target (8, 8) = the transpose of eight vectors, flat arrays.

    Vector i is source[first + i % 4 * far + i // 4 * near] on.
    """

    def generate(context, builder, signature, arguments):
        source, first, near, far, target = arguments
        rows = []
        for start in (first, builder.add(first, near)):
            for i in range(LANES // 2):
                offset = builder.add(start, builder.mul(far, ir.Constant(ir.IntType(64), i)))
                at = pointer_to(context, builder, signature.args[0], source, offset, F32X8)
                rows.append(load_unaligned(builder, at))
        for h in (1, 2, 4):  # swap the blocks of h x h off the diagonal of blocks of 2 h x 2 h
            mixed = list(rows)
            for i in range(LANES):
                if not i & h:
                    low = [k if not k & h else 8 + k - h for k in range(LANES)]
                    high = [k + h if not k & h else 8 + k for k in range(LANES)]
                    for row, order in ((i, low), (i + h, high)):
                        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
                        mixed[row] = builder.shuffle_vector(rows[i], rows[i + h], lanes)
            rows = mixed
        for i, row in enumerate(rows):
            offset = ir.Constant(ir.IntType(64), LANES * i)
            at = pointer_to(context, builder, signature.args[4], target, offset, F32X8)
            store_unaligned(builder, row, at)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, types.intp, target), generate


@serial
def lay_out_panels(q, scale, keys, block, coded, raw):
    """Write scale * q as panels, for coded keys (rotated) and for raw ones.

    q (batch, positions, heads, head_dim) float32; coded, raw (num_bh, panels, (head_dim + 1) * PANEL),
    channels as in `expand`; <q, mean> is the channel behind the others, 0 for raw keys. keys: their frames,
    and block, as `read_frame` of `key_frame` takes them.
    """
    batch, positions, heads, head_dim = q.shape
    num_bh, panels, _ = coded.shape
    kv_heads = num_bh // batch
    group = heads // kv_heads
    line, rotated, mean, powers, factors = np.empty((5, head_dim), np.float32)
    order = np.empty(head_dim, np.int64)
    for bh in range(num_bh):
        read_frame(keys, bh, block, mean, powers, order, factors)
        for i in range(panels * PANEL):
            panel, lane = i // PANEL, i % PANEL
            own_raw, own_coded = raw[bh, panel], coded[bh, panel]
            product = 0.0
            for channel in range(head_dim):
                line[channel] = 0
            if i < positions * group:
                query = q[bh // kv_heads, i // group, bh % kv_heads * group + i % group]
                for channel in range(head_dim):
                    line[channel] = scale * query[channel]
                    own_raw[index_of(channel) * PANEL + lane] = line[channel]
                    product += np.float64(line[channel]) * np.float64(mean[channel])
                    line[channel] *= powers[channel]
                for n in range(head_dim):
                    rotated[n] = line[order[n]]
                hadamard_run(rotated, 0, head_dim, block)
            else:
                for channel in range(head_dim):
                    own_raw[channel * PANEL + lane] = rotated[channel] = 0
            for n in range(head_dim):
                own_coded[index_of(n) * PANEL + lane] = rotated[n] * factors[n]
            own_raw[head_dim * PANEL + lane], own_coded[head_dim * PANEL + lane] = 0, product


@helper
def _hide(scores, used):
    for p in range(SLOTS):
        if SLOT_AT[p % PAGE] >= used[p // PAGE]:
            for lane in range(0, PANEL, LANES):
                store(scores, p * PANEL + lane, splat(MINUS_INFINITY))


@helper
def _mask_window(scores, records, offset, base, used, first_visible):
    """Hide from each row of a panel the tokens before the position first_visible[row]."""
    for page in range(QUAD):
        for slot in range(used[page]):
            position = position_of(records[page] + offset, base[page], slot)
            token = PAGE * page + SLOT_AT[slot]
            for lane in range(PANEL):
                if position < first_visible[lane]:
                    scores[token * PANEL + lane] = MINUS_INFINITY


@helper
def _clear(values, head_dim, used):
    """Zeros for the values of unused slots, which may be NaN."""
    for p in range(SLOTS):
        if SLOT_AT[p % PAGE] >= used[p // PAGE]:
            for channel in range(head_dim):
                values[channel * (SLOTS + PADDING) + p] = 0


@helper
def _keep(scores, first, saved, square):
    """saved[first + lane] = the scores of the rows of a panel by slots, where there is such a row.

    saved (rows, 64); slot s of a page is token 4 (s % 4) + s // 4 in scores.
    """
    for lane in range(0, PANEL, LANES):
        if first + lane + LANES > 0 and first + lane < saved.shape[0]:
            for slot in range(0, SLOTS, LANES):
                token = slot // PAGE * PAGE + slot % PAGE // 4
                _transpose(scores, token * PANEL + lane, PANEL, 4 * PANEL, square)
                for row in range(max(0, -first - lane), min(LANES, saved.shape[0] - first - lane)):
                    store(saved[first + lane + row], slot, load(square, LANES * row))


@helper
def _expand_quad(layout, records, codes_v, keys, values, scales, by_slot, head_dim):
    """Expand the pages of a quad that have a record; see `expand`."""
    for page in range(QUAD):
        record = records[page]
        if record:
            if layout[K_SCALES] >= 0:
                read_scales(record + layout[K_SCALES], scales, by_slot)
            matrix = keys.ctypes.data + 4 * PAGE * page * (head_dim + PADDING)
            call_product(layout[K_FUNCTION], record, scales.ctypes.data, matrix, head_dim // 16)
            if layout[V_SCALES] >= 0:
                read_scales(record + layout[V_SCALES], scales, by_slot)
            matrix = values.ctypes.data + 4 * PAGE * page
            call_product(layout[V_FUNCTION], codes_v[page], scales.ctypes.data, matrix, head_dim // 16)


@helper
def _note_large(weights, quad, row_max, row_sum, rescale, peak, softcap, square, notes):
    """Note which weights (64 tokens, PANEL) of a quad are large by the sums so far."""
    number, slots, noted = notes
    for lane in range(0, PANEL, LANES):
        for i in range(lane, lane + LANES):
            if number[i] and rescale[i] != 1:
                rescale_notes(noted[i], number[i], rescale[i])
        limit = load(row_sum, lane) * large_share(load(row_max, lane), softcap)
        if not any_above(load(peak, lane), limit):
            continue
        store(square, 0, limit)
        for p in range(SLOTS):
            if any_above(load(weights, p * PANEL + lane), limit):
                slot = SLOTS * quad + p // PAGE * PAGE + SLOT_AT[p % PAGE]
                for i in range(lane, lane + LANES):
                    weight, own = weights[p * PANEL + i], square[i - lane]
                    if weight > own:
                        number[i] = note(slot, weight, own, slots[i], noted[i], number[i])


@helper
def _attend_range(
    queries, table, layouts, first, last, raw, softcap, saved, first_saved, scratch, totals, result
):
    """One item: the quads first to last - 1 of a table row whose values are raw, or coded; PANELS at most.

    queries: coded, raw (panels, (head_dim + 1) * PANEL), first_visible (panels, PANEL);
    totals (panels, head_dim * PANEL).
    """
    query_coded, query_raw, first_visible = queries
    rung, _, _, base = table
    keys, values, scores, scales, by_slot, rescale, peak, square, records, codes_v, used = scratch
    row_max, row_sum, (number, slots, noted) = result
    largest = peak[: peak.size if number.size else 0]
    panels, head_dim = totals.shape[0], totals.shape[1] // PANEL
    oldest, hides = first_visible[0, 0], first_visible[panels - 1, PANEL - 1] > 0
    for panel in range(panels):
        for i in range(head_dim * PANEL):
            totals[panel, i] = 0
        for lane in range(PANEL):
            row_max[panel * PANEL + lane], row_sum[panel * PANEL + lane] = LOWEST, 0
    for row in range(number.size):
        number[row] = 0
    for quad in range(first, last):
        layout = layouts[rung[QUAD * quad]]
        if (layout[V_SCALES] < 0) != raw:
            continue
        tokens, own_base = find_records(table, layout, quad, records, codes_v, used), base[QUAD * quad :]
        if hides:
            tokens = leave_out_before(oldest, layout, own_base, records, codes_v, used)
        if tokens == 0:
            for row in range(max(0, first_saved), min(panels * PANEL, saved.shape[1] + first_saved)):
                for slot in range(SLOTS):
                    saved[quad, row - first_saved, slot] = MINUS_INFINITY
            continue
        _expand_quad(layout, records, codes_v, keys, values, scales, by_slot, head_dim)
        if tokens < SLOTS:
            _clear(values, head_dim, used)
        for panel in range(panels):
            query = query_coded[panel] if layout[K_SCALES] >= 0 else query_raw[panel]
            rows = slice(panel * PANEL, (panel + 1) * PANEL)
            multiply(
                keys,
                head_dim + PADDING,
                1,
                query,
                head_dim + 1,
                CHUNK_OF_STORED,
                scores,
                SLOTS,
                rescale,
                True,
            )
            if softcap > 0:
                cap(scores, SLOTS, np.float32(1) / softcap, softcap)
            if tokens < SLOTS:
                _hide(scores, used)
            if hides:
                _mask_window(scores, records, layout[POSITIONS], own_base, used, first_visible[panel])
            _keep(scores, panel * PANEL - first_saved, saved[quad], square)
            update_softmax(scores, SLOTS, LOG2_E, row_max[rows], row_sum[rows], rescale, largest)
            if number.size:
                _note_large(
                    scores, quad, row_max[rows], row_sum[rows], rescale, peak, softcap, square,
                    (number[rows], slots[rows], noted[rows]),
                )  # fmt: skip
            multiply(
                values, SLOTS + PADDING, 1, scores, SLOTS, SLOTS, totals[panel], head_dim, rescale, False
            )


@serial
def attend_rows(counter, queries, table, layouts, softcap, saved, first_saved, result, notes):
    """Attend all pages, in parts: what one thread does, taking items from the counter until none is left.

    queries: coded, raw of `lay_out_panels`; first_visible (num_bh, panels, PANEL), the first position of a
    row (base is read only if one is above 0). table: rung, count, index, base (num_bh, entries); num_pages
    (num_bh,). saved (num_bh, quads, saved rows, 64) receives the scores, natural, of query rows from
    first_saved on. result: out (2, num_bh, blocks, parts, rows, head_dim), what coded and raw values add up
    to, zeros before, in units of 2^row_max; row_max, row_sum (num_bh, blocks, parts, rows). Part 2 i is range
    i of the quads with coded values, 2 i + 1 of those with raw ones; rows are those of PANELS panels. notes:
    those of `packed_large`.
    """
    coded, raw, first_visible = queries
    rung, count, index, base, num_pages = table
    out, row_max, row_sum = result
    number, slots, noted = notes
    _, num_bh, blocks, parts, _, head_dim = out.shape
    panels = coded.shape[1]
    scratch = (
        np.ones(SLOTS * (head_dim + PADDING), np.float32),  # the last channel of all keys is 1
        np.empty(head_dim * (SLOTS + PADDING), np.float32),
        np.empty(SLOTS * PANEL, np.float32),
        np.empty(PAGE, np.float32),
        np.empty(PAGE, np.float32),
        np.empty(PANEL, np.float32),
        np.empty(PANEL, np.float32),
        np.empty(LANES * LANES, np.float32),
        np.empty(QUAD, np.int64),
        np.empty(QUAD, np.int64),
        np.empty(QUAD, np.int64),
    )
    totals = np.empty((PANELS, head_dim * PANEL), np.float32)
    item = take_number(counter)
    while item < num_bh * blocks * parts:
        bh, block, part = item // (blocks * parts), item // parts % blocks, item % parts
        live, splits = np.int64(num_pages[bh]) // QUAD, parts // 2
        own = slice(block * PANELS, min((block + 1) * PANELS, panels))
        used = totals[: own.stop - own.start]
        _attend_range(
            (coded[bh, own], raw[bh, own], first_visible[bh, own]),
            (rung[bh], count[bh], index[bh], base[bh]),
            layouts,
            live * (part // 2) // splits,
            live * (part // 2 + 1) // splits,
            part % 2 == 1,
            softcap,
            saved[bh],
            first_saved - block * PANELS * PANEL,
            scratch,
            used,
            (
                row_max[bh, block, part],
                row_sum[bh, block, part],
                (number[bh, block, part], slots[bh, block, part], noted[bh, block, part]),
            ),
        )
        _write_out(used, row_sum[bh, block, part], out[part % 2, bh, block, part])
        item = take_number(counter)


@helper
def _write_out(totals, row_sum, out):
    """out (rows, head_dim) = totals (panels, head_dim * PANEL), transposed, where anything was added up."""
    for row in range(totals.shape[0] * PANEL):
        if row_sum[row] != 0:
            panel, lane = totals[row // PANEL], row % PANEL
            for channel in range(out.shape[1]):
                out[row, channel] = panel[channel * PANEL + lane]
