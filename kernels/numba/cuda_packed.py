"""Decode attention over packed pages, for reading: one warp takes one page at a time, in float32.

A *sequence* is what shares a list of pages: one (batch row, KV head) and up to 4 query rows (position, head
of the group). The warps of all its blocks are its *parts*: part i of n takes the pages i, i + n, ... of the
list, so that every part sees the same mixture of widths, however the table is sorted.

    grid (row blocks * shares of a sequence, KV heads, batch), block 2 warps. A page takes these steps:
      scores    K q. Lane 4 g + u adds up its 4 columns of every block of channels for its tokens, slots
                8 g to 8 g + 7, in two halves: sums[4 tokens][rows] in registers
      softmax   through shared memory, lane 4 g + u gets the whole scores of slots 8 g + 2 u and the next,
                multiplies them by the steps of K, and takes the softmax against the running maximum
      values    V^T p. Lane 4 g + u adds up its 16 tokens for channels g and g + 8 of every block of
                channels, page after page: out[head_dim / 8][rows] in registers
    `cuda_packed_merge.py` then merges the parts; `cuda_packed_steps.py` has what stands between.

Coded keys and values are rotated, so q is rotated, once a block, and later the sum of coded values, once a
row. Raw values are not: a part attends its pages in two rounds, those of coded values first, and writes a
result for each. Lanes exchange within their warp only, so pages need no barrier of the block.

Shared memory of a block: q, twice (rotated and raw), 8 rows head_dim bytes; of a warp: 32 (head_dim / 8 + 1)
rows floats for exchange, 64 rows for probabilities. Registers at head_dim 128 and 4 rows: 64 out, 16 sums,
16 of q or p, 16 words being expanded.
"""

import numpy as np
from numba import cuda, types

from .cuda_packed_steps import (
    QUERY_FACTOR,
    WEIGHT_FACTOR,
    make_page_words,
    make_queries,
    make_raise,
    make_result,
    make_weights,
    make_whole_scores,
)
from .cuda_page import (
    ALIGNED,
    TILES_THAT_SHARE,
    UNIT,
    device,
    element_of,
    step_of,
    stored_bits,
    words_of_tiles,
)

uint8, uint32, float32, int64 = np.uint8, np.uint32, np.float32, np.int64

# Indices of shared arrays are unsigned where it counts: Numba lets negative ones count from the end, which
# takes instructions and hides that neighbours can be loaded together.

WARPS = 2
MAX_RUNGS = 16
LOWEST = float32(-1e30)
SCORE_UNIT = float32(1 / (UNIT * QUERY_FACTOR))
VALUE_UNIT = float32(1 / (UNIT * WEIGHT_FACTOR))


def rounds_of(widths_v):
    """Return which kinds of values occur: rotated (False), raw (True)."""
    return [raw for raw in (False, True) if widths_v & (16 if raw else 15)]


# ---- Parts of the kernel, made for one specialisation


def _nothing(*_):
    """Stand for a width that does not occur."""


def make_scores(bits, dtype, head_dim, rows):
    """Make the device function that writes K q, over a lane's columns, of its 8 tokens to [8 tokens][rows].

    Tokens go in two halves, which leaves more registers for what is being loaded. Tiles that share words are
    side by side in memory: of the next blocks of channels or, where those do not divide, of the next tokens
    too, and then where they are is known at run time only.
    """
    element = element_of(bits, dtype)
    blocks, per_q, half_sums = head_dim // 16, 4 * rows, 4 * rows
    tiles, words = TILES_THAT_SHARE.get(bits, 1), words_of_tiles(stored_bits(bits, dtype))
    aligned = blocks % tiles == 0
    together = tiles if aligned else 1

    @device
    def add_channels(memory, at, lane, queries, queries_at, sums, first_b, group, j):
        """Add block c = group * together + j of the channels."""
        q = cuda.local.array(per_q, float32)
        start = uint32(queries_at + (4 * (group * together + j) + (lane & 3)) * per_q)
        for i in range(per_q):
            q[i] = queries[start + uint32(i)]
        group_at = at + 32 * words * (first_b * blocks // tiles + group)
        for b in range(2):
            for register in range(4):
                for half in range(2):
                    if aligned:
                        k = element(memory, group_at, b * blocks, j, register, half)
                    else:
                        tile = (first_b + b) * blocks + group
                        inside = tile & (tiles - 1)
                        k = element(memory, at, tile - inside, inside, register, half)
                    for row in range(rows):
                        token = 2 * b + (register & 1)
                        sums[token * rows + row] += k * q[4 * row + 2 * (register >> 1) + half]

    @device
    def write_scores(memory, at, lane, queries, queries_at, exchange, exchange_at):
        sums = cuda.local.array(half_sums, float32)
        for first_b in range(0, 4, 2):
            for i in range(half_sums):
                sums[i] = float32(0)
            for group in range(blocks // together):
                add_channels(memory, at, lane, queries, queries_at, sums, first_b, group, 0)
                if together > 1:
                    add_channels(memory, at, lane, queries, queries_at, sums, first_b, group, 1)
                if together > 2:
                    add_channels(memory, at, lane, queries, queries_at, sums, first_b, group, 2)
                    add_channels(memory, at, lane, queries, queries_at, sums, first_b, group, 3)
            start = uint32(exchange_at + 2 * first_b * rows)
            for i in range(half_sums):
                exchange[start + uint32(i)] = sums[i]

    return write_scores


def make_values(bits, dtype, head_dim, rows):
    """Make the device function that adds V^T p of a lane's elements to out[head_dim / 8][rows]."""
    alike = 3 if bits == 3 else 4  # blocks of tokens; at 3 bits the last has a pair that is spread over words
    tiles, words = TILES_THAT_SHARE.get(bits, 1), words_of_tiles(stored_bits(bits, dtype))
    add_block = make_block_of_values(element_of(bits, dtype, spread=False), bits == 16, head_dim, rows)
    add_last = make_block_of_values(element_of(bits, dtype), bits == 16, head_dim, rows)

    @device
    def add_values(memory, at, lane, weights, weights_at, count, out):
        for b in range(alike):
            inside = b & (tiles - 1)
            block_at = at + 32 * words * ((b - inside) // tiles)
            add_block(memory, block_at, lane, weights, weights_at, count, out, b, inside)
        if alike == 3:
            add_last(memory, at, lane, weights, weights_at, count, out, 3, 3)

    return add_values


def make_block_of_values(element, raw, head_dim, rows):
    """Make the part of `make_values` that takes the 16 tokens of block b."""
    blocks, per_p = head_dim // 16, 4 * rows

    @device
    def add_tiles(memory, at, p, slot, count, out, inside, first):
        """Add four blocks of channels: as many as are sure to be unrolled."""
        for c in range(first, min(first + 4, blocks)):
            for register in range(4):
                for half in range(2):
                    v = element(memory, at, 4 * c, inside, register, half)
                    if raw and slot + 8 * half + (register >> 1) >= count:
                        v = float32(0)  # an unused slot may hold NaN
                    for row in range(rows):
                        channel = 2 * c + (register & 1)
                        out[channel * rows + row] += v * p[4 * row + 2 * (register >> 1) + half]

    @device
    def add_block(memory, at, lane, weights, weights_at, count, out, b, inside):
        p = cuda.local.array(per_p, float32)
        start = uint32(weights_at + (4 * b + (lane & 3)) * per_p)
        for i in range(per_p):
            p[i] = weights[start + uint32(i)]
        slot = 16 * (lane & 3) + 2 * b  # of half 0 and registers 0, 1; half 1 is 8 later, registers 2, 3 one
        add_tiles(memory, at, p, slot, count, out, inside, 0)
        add_tiles(memory, at, p, slot, count, out, inside, 4)
        add_tiles(memory, at, p, slot, count, out, inside, 8)
        add_tiles(memory, at, p, slot, count, out, inside, 12)

    return add_block


def make_by_width(make, widths, *common):
    """Make a device function for each width that occurs, and one that does nothing for each that does not."""
    skip = device(_nothing)
    flags = {2: 1, 3: 2, 4: 4, 8: 8, 16: 16}
    return tuple(make(bits, *common) if widths & flag else skip for bits, flag in flags.items())


# ---- Attention of the parts


def attend_pages(head_dim, dtype, widths_k, widths_v, rows, softcap=0, kept=0, blocks=6):
    """Make the kernel that attends the pages of each part; `kvlab.numba_cuda.build_numba` compiles it.

    Parameters
    ----------
    head_dim : int
    dtype : str
        Of q and of the cache.
    widths_k, widths_v : int
        Which widths occur: a sum of 1 (2 bits), 2 (3 bits), 4, 8 and 16.
    rows : int
        Query rows that one expansion of a page serves: 1, 2 or 4.
    softcap, kept : int
        1 if scores are capped, or some of them kept; else 0.
    blocks : int
        Of a multiprocessor at a time: 6 leave 168 registers a thread, 4 leave 255.
    """
    # gate: head_dim=128 dtype=float16 widths_k=4 widths_v=4 rows=4 registers<=168 arch=sm_90a,sm_100a,sm_120a
    # gate: head_dim=128 dtype=bfloat16 widths_k=13 widths_v=13 rows=4 registers<=168 arch=sm_90a
    # gate: head_dim=128 dtype=bfloat16 widths_k=1 widths_v=1 rows=4 softcap=1 kept=1 blocks=4 registers<=255
    # gate: head_dim=256 dtype=float16 widths_k=31 widths_v=31 rows=2 blocks=4 registers<=255 arch=sm_90a
    # gate: head_dim=80 dtype=float32 widths_k=31 widths_v=31 rows=4 blocks=4 registers<=255 arch=sm_80
    common = (dtype, head_dim, rows)
    scores_2, scores_3, scores_4, scores_8, scores_16 = make_by_width(make_scores, widths_k, *common)
    values_2, values_3, values_4, values_8, values_16 = make_by_width(make_values, widths_v, *common)
    coded_k, both_rounds = widths_k & 15 != 0, len(rounds_of(widths_v)) == 2
    first_round, end_round = (int(raw) for raw in (rounds_of(widths_v)[0], rounds_of(widths_v)[-1]))
    end_round += 1
    rounds = end_round - first_round

    channels, tokens = head_dim // 8, 8  # that a lane adds up
    score_stride, out_stride = tokens * rows + 4, channels * rows + rows + 1
    exchange_floats = 32 * max(score_stride, out_stride)
    queries_floats, weights_floats = 2 * rows * head_dim, 64 * rows
    all_exchange, all_weights = WARPS * exchange_floats, WARPS * weights_floats
    sums_floats, out_floats = 2 * rows, channels * rows
    weight_factor = float32(WEIGHT_FACTOR)
    bring_row, page_words = make_queries(head_dim, dtype, rows), make_page_words(head_dim, dtype)
    whole_scores = make_whole_scores(rows, score_stride, softcap)
    raise_peaks = make_raise(rows, score_stride, out_floats)
    write_weights, write_result = make_weights(rows), make_result(head_dim, rows, out_stride)

    def kernel(
        memory, pools, unit, bits_k, bits_v, rung, count, index, num_pages, k_mean, q, q_batch, q_position,
        q_head, partial, scores, shares, entries, query_rows, group, keep, scale, cap,
    ):  # fmt: skip
        queries = cuda.shared.array(queries_floats, float32, alignment=ALIGNED)  # [2][c][u][rows][4 columns]
        exchange = cuda.shared.array(all_exchange, float32, alignment=ALIGNED)
        weights = cuda.shared.array(all_weights, float32, alignment=ALIGNED)  # [warp][b][u][rows][4 tokens]
        bias = cuda.shared.array(4, float32)
        pool_at = cuda.shared.array(MAX_RUNGS, int64)
        raised = cuda.shared.array(WARPS, uint32)
        thread = cuda.threadIdx.x
        warp, lane, warps = thread >> 5, thread & 31, cuda.blockDim.x >> 5
        g, u = lane >> 2, lane & 3
        own, own_weights = warp * exchange_floats, warp * weights_floats
        row_block = int64(uint32(cuda.blockIdx.x) // uint32(shares))
        share = cuda.blockIdx.x - row_block * shares
        head_kv, batch = cuda.blockIdx.y, cuda.blockIdx.z
        pair = batch * cuda.gridDim.y + head_kv
        first_row = row_block * rows
        row = warp
        while row < rows:
            at = uint32(min(first_row + row, query_rows - 1))  # one too many repeats the last row
            position = at // uint32(group)
            head = head_kv * group + int64(at) - position * group
            source = batch * q_batch + position * q_position + head * q_head
            bring_row(
                q, source, k_mean, int64(pair) * head_dim, scale, row, lane, queries, exchange, own, bias
            )
            row += warps
        if thread < MAX_RUNGS:
            pool_at[thread] = pools[thread]
        if lane == 0:
            raised[warp] = uint32(0)
        cuda.syncthreads()  # all query rows, biases and addresses are there

        part, parts = share * warps + warp, shares * warps
        pages = num_pages[pair]
        first_entry = int64(pair) * entries
        sequence = int64(pair) * ((query_rows + rows - 1) // rows) + row_block
        sums = cuda.local.array(sums_floats, float32)  # whole scores of two tokens
        out = cuda.local.array(out_floats, float32)
        peak = cuda.local.array(rows, float32)
        total_weight = cuda.local.array(rows, float32)
        turn = uint32(0)
        for values_are_raw in range(first_round, end_round):
            for i in range(out_floats):
                out[i] = float32(0)
            for row in range(rows):
                peak[row] = LOWEST
                total_weight[row] = float32(0)
            page = part - parts
            while page + parts < pages:
                page += parts
                entry = first_entry + page
                place = int64(rung[entry])
                width_k, width_v = (bits_k >> (4 * place)) & 15, (bits_v >> (4 * place)) & 15  # 0 is 16
                if both_rounds and (width_v == 0) != (values_are_raw == 1):
                    continue
                tokens_here = int64(count[entry])
                k_words, v_words, k_steps, v_steps = page_words(width_k, width_v)
                record = k_words + v_words + k_steps + v_steps + 48
                k_at = pool_at[place] + int64(index[entry]) * (unit if unit else record)
                v_at = k_at + k_words
                steps_at = v_at + v_words

                # Scores: every lane its columns of its 8 tokens.
                mine = own + lane * score_stride
                if width_k == 2:
                    scores_2(memory, k_at + lane, lane, queries, 0, exchange, mine)
                elif width_k == 3:
                    scores_3(memory, k_at + lane, lane, queries, 0, exchange, mine)
                elif width_k == 4:
                    scores_4(memory, k_at + lane, lane, queries, 0, exchange, mine)
                elif width_k == 8:
                    scores_8(memory, k_at + lane, lane, queries, 0, exchange, mine)
                else:
                    scores_16(memory, k_at + lane, lane, queries, rows * head_dim, exchange, mine)
                cuda.syncwarp()  # all columns of all tokens are in shared memory

                # Lane 4 g + u takes tokens 2 u and 2 u + 1 of its group: slots 8 g + 2 u and the next.
                turn += uint32(1)
                start = uint32(own + 4 * g * score_stride + 2 * u * rows)
                coded = coded_k and width_k != 0
                for t in range(2):
                    slot = 8 * g + 2 * u + t
                    factor = float32(1)
                    if coded:
                        factor = step_of(memory, steps_at, slot) * SCORE_UNIT
                    unused = slot >= tokens_here
                    if whole_scores(exchange, start, t, factor, bias, coded, cap, unused, peak, sums):
                        raised[warp] = turn
                    if kept:
                        for row in range(rows):
                            kept_row = first_row + row - (query_rows - keep)
                            if kept_row >= 0 and first_row + row < query_rows:
                                scores[(entry * keep + kept_row) * 64 + slot] = sums[t * rows + row]
                cuda.syncwarp()  # whether a maximum rises is known, and the columns are read
                if raised[warp] == turn:
                    raise_peaks(exchange, own, mine, sums, peak, total_weight, out)

                # Probabilities relative to the running maximum, times the steps of V.
                for t in range(2):
                    slot = 8 * g + 2 * u + t
                    factor = float32(1)
                    if width_v:
                        factor = step_of(memory, steps_at + k_steps, slot) * weight_factor
                    # In V's tile of block u this token is column g, in registers 2 and 3 if t is 1.
                    to = own_weights + (4 * u + g // 2) * rows * 4 + 2 * t + g % 2
                    write_weights(sums, t, peak, total_weight, factor, slot >= tokens_here, weights, to)
                cuda.syncwarp()  # all probabilities are there, and the largest scores are read

                if width_v == 2:
                    values_2(memory, v_at + lane, lane, weights, own_weights, tokens_here, out)
                elif width_v == 3:
                    values_3(memory, v_at + lane, lane, weights, own_weights, tokens_here, out)
                elif width_v == 4:
                    values_4(memory, v_at + lane, lane, weights, own_weights, tokens_here, out)
                elif width_v == 8:
                    values_8(memory, v_at + lane, lane, weights, own_weights, tokens_here, out)
                else:
                    values_16(memory, v_at + lane, lane, weights, own_weights, tokens_here, out)

            result = ((sequence * parts + part) * rounds + values_are_raw - first_round) * rows
            unit_of_out = float32(1) if values_are_raw else VALUE_UNIT
            write_result(exchange, own, lane, out, total_weight, peak, unit_of_out, partial, result)

    pointer, whole = types.CPointer, types.int32
    element = pointer(types.uint32 if dtype == "float32" else types.uint16)
    arguments = (
        pointer(types.uint32), types.UniTuple(types.int64, MAX_RUNGS), whole, types.int64, types.int64,
        pointer(types.uint8), pointer(types.uint8), pointer(types.uint32), pointer(types.int32),
        pointer(types.uint16), element, types.int64, types.int64, types.int64,
        pointer(types.float32), pointer(types.float32), whole, whole, whole, whole, whole,
        types.float32, types.float32,
    )  # fmt: skip
    return kernel, arguments, (32 * WARPS, blocks)
