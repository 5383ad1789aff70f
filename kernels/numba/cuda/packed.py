"""Decode attention over packed pages, for reading: one warp takes a quad at a time, on the ordinary cores.

A *sequence* is what shares a list of pages: one (batch row, KV head) and up to 4 query rows (position, head
of the group). A *quad* is four pages of the list, of one rung: up to 64 tokens. The warps of all its blocks
are its *parts*: part i of n takes the quads i, i + n, ... of the list, so that every part sees the same
mixture of widths, however the table is sorted.

    grid (row blocks * splits of a sequence, KV heads, batch), block 2 warps. A quad takes these steps:
      scores    K q. Lane 4 g + u adds up its 4 columns of every block of channels for its tokens, slots
                2 g and 2 g + 1 of the pages, two pages at a time: sums[4 tokens][rows] in registers
      softmax   through shared memory, lane 4 g + b gets the whole scores of slots 2 g and 2 g + 1 of page b,
                multiplies them by the scales of K, takes the softmax against the running maximum, multiplies
                by the scales of V, and makes integers of a unit that 16 tokens have in common
      values    V^T p. Lane 4 g + u adds up its 16 tokens, four of each page, for channels g and g + 8 of
                every block of channels, as integers, then quad after quad: out[head_dim / 8][rows] in
                registers
    `cuda/packed_products.py` has scores and values of coded pages, `cuda/packed_blocks.py` scores of keys in
    blocks of channels, `cuda/packed_raw.py` both of raw pages,
    `cuda/packed_softmax.py` what stands between; `cuda/packed_merge.py` then merges the parts.

A page of a quad may hold no token, and then may not exist. In its place the first one that does is read, the
tokens of which count as unused there.

Coded keys and values are rotated, so q is rotated, once a block, and later the sum of coded values, once a
row. Raw values are not: a part attends its quads in two rounds, those of coded values first, and writes a
result for each. Lanes exchange within their warp only, so quads need no barrier of the block. With a window,
a warp looks at the positions of a quad first; a page of which no row sees a token counts as empty. Without
one, it asks for its next quad while it computes with this one.

Shared memory of a block: q, 2 rows head_dim bytes, and 4 for raw keys; of a warp: 32 (head_dim / 8 + 1) rows
floats for exchange, 32 rows words for probabilities, and 64 for raw values; twice the integers for float32.
Registers at head_dim 128 and 4 rows: 64 out; 16 sums, 8 of q and 8 words, or 32 of p and 8 to 16 words.
"""

import functools
import math

import numpy as np
from numba import cuda, types

from .integers import pieces_of
from .packed_blocks import make_block_scores, profiles_of
from .packed_products import make_by_width, make_scores, make_values
from .packed_query import make_queries
from .packed_raw import make_raw_scores, make_raw_values
from .packed_softmax import (
    first_page,
    make_keep,
    make_result,
    make_row_max,
    make_weights,
    make_whole_scores,
    make_widths,
    position_of,
)
from .page import ALIGNED, BLOCKS, ask_for, count_of, field_shift, power_of_two, scale_of

uint8, int32, uint32, float32, int64 = np.uint8, np.int32, np.uint32, np.float32, np.int64

# Indices of shared arrays are unsigned where it counts: Numba lets negative ones count from the end, which
# takes instructions and hides that neighbours can be loaded together.

WARPS = 2
MAX_RUNGS = 16
LINE = 32  # words of memory that one request for the second-level cache brings
LOWEST = float32(-1e30)
NO_PAGE = uint32(0xFFFFFFFF)


def rounds_of(widths_v):
    """Return which kinds of values occur: rotated (False), raw (True)."""
    return [raw for raw in (False, True) if widths_v & (16 if raw else 15)]


def attend_pages(
    head_dim, dtype, widths_k, widths_v, rows, profiles="", softcap=0, kept=0, window=0, blocks=6
):
    """Make the kernel that attends the quads of each part; `kvlab.jit.numba.build_numba` compiles it.

    Parameters
    ----------
    head_dim : int
    dtype : str
        Of q and of the cache.
    widths_k, widths_v : int
        Which widths occur, of K in any block: a sum of 1 (2 bits), 2 (3 bits), 4, 8 and 16.
    rows : int
        Query rows that one expansion of a quad serves: 1, 2 or 4.
    profiles : str
        Where keys are kept in blocks of channels: the widths of blocks that occur, such as k8422k4220.
    softcap, kept, window : int
        1 if scores are capped, some of them kept, or old tokens hidden; else 0.
    blocks : int
        Of a multiprocessor at a time: 6 leave 168 registers a thread, 4 leave 255.
    """
    common = (dtype, head_dim, rows)
    make_coded_scores, make_coded_values = (
        functools.partial(make, few_registers=blocks > 4) for make in (make_scores, make_values)
    )
    profiles_of_k = profiles_of(profiles)
    block_scores, in_blocks = make_block_scores(profiles_of_k, *common, blocks > 4), len(profiles_of_k) > 0
    scores_2, scores_3, scores_4, scores_8, scores_16 = make_by_width(
        make_coded_scores, make_raw_scores, widths_k & 16 if in_blocks else widths_k, *common
    )
    values_2, values_3, values_4, values_8, values_16 = make_by_width(
        make_coded_values, make_raw_values, widths_v, *common
    )
    coded_k, coded_v, both_rounds = widths_k & 15 != 0, widths_v & 15 != 0, len(rounds_of(widths_v)) == 2
    first_round, end_round = (int(raw) for raw in (rounds_of(widths_v)[0], rounds_of(widths_v)[-1]))
    end_round += 1
    rounds = end_round - first_round

    channels, tokens = head_dim // 8, 8  # that a lane adds up
    score_stride, out_stride = tokens * rows + 4, (channels + 1) * rows + 1
    exchange_floats = 32 * max(score_stride, out_stride)
    pieces, raw_k, raw_v = pieces_of(dtype), widths_k & 16 != 0, widths_v & 16 != 0
    raw_floats, weights_floats = raw_k * rows * head_dim or 1, raw_v * 64 * rows
    query_words, pair_words = coded_k * pieces * rows * head_dim // 2 or 1, coded_v * pieces * 32 * rows
    all_exchange, all_weights = WARPS * exchange_floats, WARPS * weights_floats or 1
    all_pairs, all_units, query_sums = WARPS * pair_words or 1, WARPS * 4 * rows, 4 * pieces * rows
    if in_blocks:
        query_sums *= BLOCKS
    all_pages = 4 * WARPS
    sums_floats, out_floats = 2 * rows, channels * rows
    bring_row = make_queries(head_dim, dtype, rows, widths_k, in_blocks)
    widths_of = make_widths(head_dim, dtype, widths_k, widths_v, profiles_of_k)
    whole_scores = make_whole_scores(rows, score_stride, softcap, window)
    update_row_max = make_row_max(rows, score_stride, out_floats)
    exp_scores, write_floats, write_largest, write_pairs = make_weights(rows, dtype)
    keep_scores = make_keep(rows)
    write_result = make_result(head_dim, rows, out_stride)

    def kernel(
        memory, pools, unit, bits_k, bits_v, rung, count, index, num_pages, k_mean, k_shift, q, q_batch,
        q_position, q_head, partial, scores, num_splits, quads, query_rows, group, keep, scale, cap,
        base, first, left, exponent, k_order, k_gain,
    ):  # fmt: skip
        exchange = cuda.shared.array(all_exchange, float32, alignment=ALIGNED)
        # Of q and p: floats for raw pages, [c][later] and [warp][b][later] of `place_of`; pairs of integers
        # for coded ones, by `make_scores` and [warp] by `make_values`, with units[warp][u][rows].
        raw_queries = cuda.shared.array(raw_floats, float32, alignment=ALIGNED)
        weights = cuda.shared.array(all_weights, float32, alignment=ALIGNED)
        query_pairs = cuda.shared.array(query_words, uint32, alignment=ALIGNED)
        weight_pairs = cuda.shared.array(all_pairs, uint32, alignment=ALIGNED)
        sums_of_h = cuda.shared.array(query_sums, int32, alignment=ALIGNED)
        units = cuda.shared.array(all_units, float32, alignment=ALIGNED)
        terms = cuda.shared.array(sums_floats, float32)  # of q: product with the mean of the keys, unit
        pool_at = cuda.shared.array(MAX_RUNGS, int64)
        page_at = cuda.shared.array(all_pages, uint32, alignment=ALIGNED)  # [warp][page], 16 bytes each
        raised = cuda.shared.array(WARPS, int32)  # the last quad at which maxima rose
        seen = cuda.shared.array(
            all_pages, int32
        )  # [warp][page]: the last quad in which a row sees its tokens
        result_at = cuda.shared.array(WARPS, int64)
        first_visible = cuda.shared.array(rows, int64)  # position that a row sees
        thread = cuda.threadIdx.x
        warp, lane = thread >> 5, thread & 31
        g, u = lane >> 2, lane & 3
        own, own_weights = warp * exchange_floats, warp * weights_floats
        own_pairs, own_units, own_pages = warp * pair_words, warp * 4 * rows, uint32(4 * warp)
        mine = own + lane * score_stride  # [8 tokens][rows]
        row_block = int64(uint32(cuda.blockIdx.x) // uint32(num_splits))
        split = cuda.blockIdx.x - row_block * num_splits
        head_kv, batch = cuda.blockIdx.y, cuda.blockIdx.z
        bh = batch * cuda.gridDim.y + head_kv
        first_row = row_block * rows
        row = warp
        while row < rows:
            at = uint32(min(first_row + row, query_rows - 1))  # one too many repeats the last row
            position = at // uint32(group)
            head = head_kv * group + int64(at) - position * group
            source = batch * q_batch + position * q_position + head * q_head
            bring_row(
                q, source, k_mean, k_shift, int64(bh) * head_dim, scale, row, lane, raw_queries,
                query_pairs, sums_of_h, exchange, own, terms, exponent, k_order, k_gain,
            )  # fmt: skip
            if window and lane == 0:
                first_visible[row] = int64(first[batch]) + int64(position) - left
            row += WARPS
        if thread < MAX_RUNGS:
            pool_at[thread] = pools[thread]
        if thread < all_pages:
            seen[thread] = -1
        part, parts = int32(split * WARPS + warp), int32(num_splits * WARPS)
        if lane == 0:
            raised[warp] = -1
            sequence = int64(bh) * ((query_rows + rows - 1) // rows) + row_block
            result_at[warp] = (sequence * parts + part) * rounds * rows
        cuda.syncthreads()  # all query rows, their terms and addresses are there

        first_kept = int32(first_row - (query_rows - keep))
        first_quad = int32(bh * quads)
        end = int32(first_quad + num_pages[bh] // 4)
        sums = cuda.local.array(sums_floats, float32)  # whole scores of two tokens
        out = cuda.local.array(out_floats, float32)
        row_max = cuda.local.array(rows, float32)
        total_weight = cuda.local.array(rows, float32)
        for values_are_raw in range(first_round, end_round):
            for i in range(out_floats):
                out[i] = float32(0)
            for row in range(rows):
                row_max[row] = LOWEST
                total_weight[row] = float32(0)
            quad = int32(first_quad + part - parts)
            while quad + parts < end:
                quad = int32(quad + parts)
                entry = 4 * int64(quad)
                rung_here = int64(rung[entry])
                width_k, width_v, k_scales, v_codes, v_scales, positions, record = widths_of(
                    bits_k, bits_v, rung_here
                )
                if both_rounds and (width_v == 0) != (values_are_raw == 1):
                    continue
                counts, number = count[quad], index[entry + u]
                next_quad = min(quad + parts, end - 1)
                next_rung, next_number = int64(rung[4 * int64(next_quad)]), index[4 * int64(next_quad) + u]
                if count_of(count[next_quad], u) == 0:
                    next_number = NO_PAGE

                # Lane 4 g + b takes slots 2 g and 2 g + 1 of page b. Pages that no row sees count as empty.
                pool, stride = pool_at[rung_here], unit if unit else record >> 2
                pair_of_positions = uint32(0)
                if window:
                    if count_of(counts, u):
                        at = pool + 4 * int64(uint32(stride * number))
                        pair_of_positions = memory[at + positions + g]
                    for t in range(2):
                        position = position_of(base[entry + u], pair_of_positions, t)
                        if 2 * g + t < count_of(counts, u) and position >= first_visible[0]:
                            seen[own_pages + uint32(u)] = quad
                    cuda.syncwarp()  # which pages have a token that a row sees is known
                    for page in range(4):
                        if seen[own_pages + uint32(page)] != quad:
                            counts = uint32(counts & ~uint32(0xFF << 8 * page))
                if counts == 0:
                    if kept:
                        for i in range(sums_floats):
                            sums[i] = float32(-math.inf)
                        keep_scores(scores, quad, lane, keep, first_kept, sums)
                    continue
                tokens_here = count_of(counts, u)
                if tokens_here == 0:
                    number = index[entry + first_page(counts)]
                number = uint32(stride * number)
                if g == 0:
                    page_at[own_pages + uint32(u)] = number
                at = pool + 4 * int64(number)
                # Scales are asked for now; raw tiles have none.
                k_words = memory[at + k_scales + (g >> 1)] if width_k else uint32(0)
                v_words = memory[at + v_scales + (g >> 1)] if width_v else uint32(0)
                pool += lane
                cuda.syncwarp()  # where the pages are is known

                # Scores: every lane its columns of its 8 tokens.
                if in_blocks and width_k:
                    block_scores(
                        memory, pool, page_at, own_pages, lane, query_pairs, sums_of_h, exchange, mine,
                        width_k - 1,
                    )  # fmt: skip
                elif width_k == 2:
                    scores_2(memory, pool, page_at, own_pages, lane, query_pairs, sums_of_h, exchange, mine)
                elif width_k == 3:
                    scores_3(memory, pool, page_at, own_pages, lane, query_pairs, sums_of_h, exchange, mine)
                elif width_k == 4:
                    scores_4(memory, pool, page_at, own_pages, lane, query_pairs, sums_of_h, exchange, mine)
                elif width_k == 8:
                    scores_8(memory, pool, page_at, own_pages, lane, query_pairs, sums_of_h, exchange, mine)
                else:
                    scores_16(memory, pool, page_at, own_pages, lane, raw_queries, exchange, mine)
                cuda.syncwarp()  # all columns of all tokens are in shared memory

                # The next quad is asked for while this one is computed with; the last one, once more itself.
                if not window:
                    next_k, next_v, _, _, _, words, next_record = widths_of(bits_k, bits_v, next_rung)
                    # Raw pages of all warps would not fit the second-level cache.
                    if next_k and next_v and next_number != NO_PAGE:
                        stride = unit if unit else next_record >> 2
                        next_at = pool_at[next_rung] + 4 * int64(uint32(stride * next_number))
                        for i in range(g, words // LINE + 1, 8):
                            ask_for(memory, next_at + LINE * i)

                start = uint32(own + 4 * g * score_stride + 2 * u * rows)
                coded = coded_k and width_k != 0
                for t in range(2):
                    slot = 2 * g + t
                    position = position_of(base[entry + u], pair_of_positions, t) if window else 0
                    factor = scale_of(k_words, slot)
                    if not in_blocks:
                        factor *= power_of_two(-field_shift(width_k, t))
                    unused = slot >= tokens_here
                    if whole_scores(
                        exchange, start, t, factor, terms, coded, cap, unused, position, first_visible,
                        row_max, sums,
                    ):  # fmt: skip
                        raised[warp] = quad
                if kept:
                    keep_scores(scores, quad, lane, keep, first_kept, sums)
                cuda.syncwarp()  # whether a maximum rises is known, and the columns are read
                if raised[warp] == quad:
                    update_row_max(exchange, own, mine, sums, row_max, total_weight, out)

                # Probabilities relative to the running maximum, times the scales of V.
                for t in range(2):
                    v_scale = scale_of(v_words, 2 * g + t) if width_v else float32(1)
                    if 2 * g + t >= tokens_here:
                        v_scale = float32(0)  # the scale of an unused slot may be NaN
                    exp_scores(sums, t, row_max, total_weight, v_scale)
                if coded_v and width_v:
                    write_largest(sums, lane, exchange, own)
                    cuda.syncwarp()  # the largest weights of all lanes are there
                    write_pairs(sums, lane, exchange, own, units, own_units, weight_pairs, own_pairs)
                else:
                    write_floats(sums, lane, weights, own_weights)
                cuda.syncwarp()  # all probabilities are there, and the largest weights are read

                pool += v_codes
                if width_v == 2:
                    values_2(
                        memory, pool, page_at, own_pages, lane, weight_pairs, own_pairs, units, own_units, out
                    )
                elif width_v == 3:
                    values_3(
                        memory, pool, page_at, own_pages, lane, weight_pairs, own_pairs, units, own_units, out
                    )
                elif width_v == 4:
                    values_4(
                        memory, pool, page_at, own_pages, lane, weight_pairs, own_pairs, units, own_units, out
                    )
                elif width_v == 8:
                    values_8(
                        memory, pool, page_at, own_pages, lane, weight_pairs, own_pairs, units, own_units, out
                    )
                else:
                    values_16(memory, pool, page_at, own_pages, lane, weights, own_weights, counts, out)
                cuda.syncwarp()  # where the pages are is read

            result = result_at[warp] + (values_are_raw - first_round) * rows
            write_result(exchange, own, lane, out, total_weight, row_max, partial, result)

    pointer, whole = types.CPointer, types.int32
    element = pointer(types.uint32 if dtype == "float32" else types.uint16)
    arguments = (
        pointer(types.uint32), types.UniTuple(types.int64, MAX_RUNGS), whole, types.int64, types.int64,
        pointer(types.uint8), pointer(types.uint32), pointer(types.uint32), pointer(types.int32),
        pointer(types.uint16), pointer(types.uint8), element, types.int64, types.int64, types.int64,
        pointer(types.float32), pointer(types.float32), whole, whole, whole, whole, whole,
        types.float32, types.float32, pointer(types.uint16), pointer(types.int32), whole,
        pointer(types.int8), pointer(types.uint8), pointer(types.float32),
    )  # fmt: skip
    return kernel, arguments, (32 * WARPS, blocks)


# gate: attend_pages head_dim=128 dtype=float16 widths_k=4 widths_v=4 rows=4 registers<=168 arch=sm_90a
# gate: attend_pages head_dim=128 dtype=bfloat16 widths_k=13 widths_v=13 rows=4 registers<=168 arch=sm_90a
# gate: attend_pages head_dim=128 dtype=bfloat16 widths_k=2 widths_v=2 rows=4 registers<=168 arch=sm_90a
# gate: attend_pages head_dim=128 dtype=bfloat16 widths_k=1 widths_v=1 rows=4 softcap=1 kept=1 blocks=4 registers<=255
# gate: attend_pages head_dim=64 dtype=float16 widths_k=4 widths_v=8 rows=4 window=1 blocks=4 registers<=255 arch=sm_80
# gate: attend_pages head_dim=256 dtype=float16 widths_k=31 widths_v=31 rows=2 blocks=4 registers<=255 arch=sm_90a
# gate: attend_pages head_dim=128 dtype=bfloat16 widths_k=13 widths_v=15 rows=4 profiles=k4220k4422k8422k8444k8888 blocks=4 registers<=255
# gate: attend_pages head_dim=64,128 dtype=float16 widths_k=8 widths_v=8 rows=4 profiles=k8888 registers<=168 arch=sm_90a
# gate: attend_pages head_dim=128 dtype=bfloat16 widths_k=13 widths_v=2 rows=4 profiles=k8422 registers<=168 arch=sm_90a
# gate: attend_pages head_dim=64 dtype=float16 widths_k=5 widths_v=1 rows=4 profiles=k4220k4422 registers<=168 arch=sm_90a
# gate: attend_pages head_dim=192 dtype=float32 widths_k=29 widths_v=31 rows=2 profiles=k8420k8800k4422 blocks=4 registers<=255 arch=sm_80
# gate: attend_pages head_dim=80 dtype=float32 widths_k=31 widths_v=31 rows=4 blocks=4 registers<=255 arch=sm_80
