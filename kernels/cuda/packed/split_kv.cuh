// Split-KV schedule: how the list of the quads of all sequences is divided among CTAs, and where its entries
// are.
#pragma once

#include "packed/call.cuh"

// The part of the list that a CTA takes. If it has quads of one sequence only, `num_splits` CTAs from
// `first_cta` on share that sequence, and positions count its own quads: position p is column
// b - first_cta + p num_splits of its table.
struct WorkRange {
    int begin, end;             // positions
    int number, start;          // the sequence of `begin` and the position of its first quad
    int quads;                  // of that sequence
    int first_cta, num_splits;  // 0, 0 if positions are those of the whole list
};

__device__ __forceinline__ int quads_of(const int* num_pages, int bh) {
    return (u32)num_pages[bh] / 4u;
}

// Which quad of a sequence is the p-th of its list: down the columns of a matrix with `columns` columns.
__device__ __forceinline__ u32 quad_at(u32 p, u32 quads, u32 columns) {
    const u32 height = quads / columns, taller = quads - height * columns, upper = taller * (height + 1);
    const bool tall = p < upper;
    const u32 from = tall ? p : p - upper, high = tall ? height + 1 : height, column = from / high;
    return (from - column * high) * columns + column + (tall ? 0 : taller);
}

// x / d rounded down, exactly for x < 2^18 and d < 2^9: x + 1/2 over d is never nearer to a whole number than
// 1/2 over d, and that is more than the quotient is off.
__device__ __forceinline__ int quotient(int x, int d) {
    return (int)__fdividef((float)x + .5f, (float)d);
}

// The CTAs of one sequence if all are about equally long: what `split_kv` finds then, but without reading a
// length. Sequence n of N has the CTAs from n grid / N to (n + 1) grid / N - 1, both rounded down, so CTA b
// belongs to
// ((b + 1) N - 1) / grid. Every CTA has to find the same bounds, or one of them waits for a split that nobody
// writes, so the bounds are computed in integers.
__device__ __forceinline__ WorkRange estimate_split(const Call& call, int blocks) {
    const int b = blockIdx.x, grid = gridDim.x, num_bh = call.num_bh;
    if (blocks > 1 || num_bh > grid) return {};
    WorkRange r = {};
    r.number = quotient((b + 1) * num_bh - 1, grid);
    r.first_cta = quotient(r.number * grid, num_bh);
    r.num_splits = quotient((r.number + 1) * grid, num_bh) - r.first_cta;
    return r;
}

// Divides the list; one warp. If it costs little balance, every CTA gets quads of one sequence only: as
// estimate, or else the sequence whose quads begin at position c of T gets the CTAs from round(c ctas / T)
// on. Else CTA b gets T b / ctas and the following. `length` is the lane's of the first 32 of `num_pages`.
__device__ __forceinline__ WorkRange split_kv(const Call& call, const WorkRange& estimate, int blocks,
                                              int length, int lane, int& total, int& ctas) {
    const int grid = gridDim.x, fewest = estimate.num_splits ? quotient(grid, call.num_bh) : 0;
    total = (u32)length / 4u;
    int longest = total, quads = lane == estimate.number ? total : 0;
#pragma unroll 4
    for (int i = lane + 32; i < call.num_bh; i += 32) {
        const int own = quads_of(call.num_pages, i);
        total += own;
        longest = max(longest, own);
        if (i == estimate.number) quads = own;
    }
    quads = __reduce_add_sync(ALL_LANES, quads);
    total = __reduce_add_sync(ALL_LANES, total);
    longest = __reduce_max_sync(ALL_LANES, longest);
    if (estimate.num_splits && longest &&
        (float)longest * grid <= 1.07f * ((float)total * fewest)) {  // the usual case
        ctas = grid;
        WorkRange range = estimate;
        range.quads = quads;
        range.num_splits = min(range.num_splits, quads);
        range.end = max(quads - (int)(blockIdx.x - range.first_cta) + range.num_splits - 1, 0) /
                    max(range.num_splits, 1);
        return range;
    }
    total *= blocks;
    ctas = min((int)gridDim.x, total);
    const int b = blockIdx.x;
    if (b >= ctas) return {};
    WorkRange whole = {}, split = {};
    whole.begin = (u32)total * b / ctas;
    whole.end = (u32)total * (b + 1) / ctas;
    const float per_quad = (float)ctas / (float)total;
    bool balanced = blocks == 1;
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < call.num_bh; base += 32) {
        const int own = base + lane < call.num_bh ? quads_of(call.num_pages, base + lane) : 0;
        int sum = own * blocks;
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const int lower = __shfl_up_sync(ALL_LANES, sum, bit);
            sum += lane >= bit ? lower : 0;
        }
        sum += before;
        const int start = sum - own * blocks;
        const int first = __float2int_rn(start * per_quad), beyond = __float2int_rn(sum * per_quad);
        balanced = balanced && __all_sync(ALL_LANES, own * per_quad <= 1.07f * (beyond - first));
        const u32 holds = __ballot_sync(ALL_LANES, start <= whole.begin && whole.begin < sum);
        if (holds) {
            const int from = __ffs(holds) - 1, quads = __shfl_sync(ALL_LANES, own, from);
            whole.start = __shfl_sync(ALL_LANES, start, from);
            const int block = (u32)(whole.begin - whole.start) / (u32)quads;
            whole.number = (base + from) * blocks + block;
            whole.start += block * quads;
            whole.quads = quads;
        }
        const u32 mine = __ballot_sync(ALL_LANES, first <= b && b < beyond);
        if (mine) {
            const int from = __ffs(mine) - 1, quads = __shfl_sync(ALL_LANES, own, from);
            split.first_cta = __shfl_sync(ALL_LANES, first, from);
            split.num_splits = min(__shfl_sync(ALL_LANES, beyond, from) - split.first_cta, quads);
            split.number = base + from;
            split.quads = quads;
            split.end = (quads - (b - split.first_cta) + split.num_splits - 1) / split.num_splits;
        }
        before = __shfl_sync(ALL_LANES, sum, 31);
    }
    return balanced ? split : whole;
}

// Where a quad of the list is: its sequence, the (row, KV head) of that, its column in the table.
struct QuadCoord {
    int number, bh, column;
};

// A page of a quad: its index in the pool, its page word but for the count, its count; where the quad is. The
// word is put together where it is needed, so that nobody waits for the tables before.
struct Entry {
    u32 index, word, count;
    int column, number;
};

__device__ __forceinline__ Entry entry_at(const Call& call, const QuadCoord& quad, int page) {
    const u64 at = (u64)quad.bh * call.entries + 4 * quad.column + page;
    return {call.index[at], call.rung[at], call.count[at], quad.column, quad.number};
}

// The quad at a position of the whole list, at or after the cursor (number, start, quads). Each lane finds
// its own; once in 8 quads, and not worth its instructions elsewhere. `each` is how many a CTA has, or 0 if
// there is one rung. What it needs of the call comes in registers: through a reference it would come from
// memory.
__device__ __noinline__ QuadCoord find_quad(const int* num_pages, int blocks, int each, int position,
                                            int number, int start, int quads) {
    while (position >= start + quads) {
        start += quads;
        quads = quads_of(num_pages, bh_of(++number, blocks));
    }
    const int bh = bh_of(number, blocks), p = position - start;
    if (each == 0) return {number, bh, p};
    return {number, bh, (int)quad_at(p, quads, min(quads, max(4, 2 * quads / each)))};
}
