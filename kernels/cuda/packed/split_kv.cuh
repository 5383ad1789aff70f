// Split-KV schedule: how the list of the pages of all sequences is divided among CTAs, and where its entries
// are.
#pragma once

#include "packed/call.cuh"

// The part of the list that a CTA takes. If it has pages of one sequence only, `num_splits` CTAs from
// `first_cta` on share that sequence, and positions count its own pages: position p is column
// b - first_cta + p num_splits of its page table.
struct WorkRange {
    int begin, end;             // positions
    int number, start;          // the sequence of `begin` and the position of its first page
    int pages;                  // of that sequence
    int first_cta, num_splits;  // 0, 0 if positions are those of the whole list
};

// Which page of a sequence is the p-th of its list: down the columns of a matrix with `columns` columns.
__device__ __forceinline__ u32 page_at(u32 p, u32 pages, u32 columns) {
    const u32 height = pages / columns, taller = pages - height * columns, upper = taller * (height + 1);
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
    const int b = blockIdx.x, grid = gridDim.x, pairs = call.pairs;
    if (blocks > 1 || pairs > grid) return {};
    WorkRange r = {};
    r.number = quotient((b + 1) * pairs - 1, grid);
    r.first_cta = quotient(r.number * grid, pairs);
    r.num_splits = quotient((r.number + 1) * grid, pairs) - r.first_cta;
    return r;
}

// Divides the list; one warp. If it costs little balance, every CTA gets pages of one sequence only: as
// estimate, or else the sequence whose pages begin at position c of T gets the CTAs from round(c ctas / T)
// on. Else CTA b gets T b / ctas and the following.
__device__ __forceinline__ WorkRange split_kv(const Call& call, const WorkRange& estimate, int blocks,
                                              int lane, int& total, int& ctas) {
    total = 0;
    int longest = 0;
    const int grid = gridDim.x, pages = estimate.num_splits ? call.num_pages[estimate.number] : 0;
#pragma unroll 4
    for (int i = lane; i < call.pairs; i += 32) {
        const int own = call.num_pages[i];
        total += own;
        longest = max(longest, own);
    }
    total = __reduce_add_sync(ALL_LANES, total);
    longest = __reduce_max_sync(ALL_LANES, longest);
    if (estimate.num_splits && longest &&
        (float)longest * grid <= 1.07f * ((float)total * (grid / call.pairs))) {  // the usual case
        ctas = grid;
        WorkRange range = estimate;
        range.pages = pages;
        range.num_splits = min(range.num_splits, pages);
        range.end = max(pages - (int)(blockIdx.x - range.first_cta) + range.num_splits - 1, 0) /
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
    const float per_page = (float)ctas / (float)total;
    bool balanced = blocks == 1;
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < call.pairs; base += 32) {
        const int own = base + lane < call.pairs ? call.num_pages[base + lane] : 0;
        int sum = own * blocks;
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const int lower = __shfl_up_sync(ALL_LANES, sum, bit);
            sum += lane >= bit ? lower : 0;
        }
        sum += before;
        const int start = sum - own * blocks;
        const int first = __float2int_rn(start * per_page), beyond = __float2int_rn(sum * per_page);
        balanced = balanced && __all_sync(ALL_LANES, own * per_page <= 1.07f * (beyond - first));
        const u32 holds = __ballot_sync(ALL_LANES, start <= whole.begin && whole.begin < sum);
        if (holds) {
            const int from = __ffs(holds) - 1, pages = __shfl_sync(ALL_LANES, own, from);
            whole.start = __shfl_sync(ALL_LANES, start, from);
            const int block = (u32)(whole.begin - whole.start) / (u32)pages;
            whole.number = (base + from) * blocks + block;
            whole.start += block * pages;
            whole.pages = pages;
        }
        const u32 mine = __ballot_sync(ALL_LANES, first <= b && b < beyond);
        if (mine) {
            const int from = __ffs(mine) - 1, pages = __shfl_sync(ALL_LANES, own, from);
            split.first_cta = __shfl_sync(ALL_LANES, first, from);
            split.num_splits = min(__shfl_sync(ALL_LANES, beyond, from) - split.first_cta, pages);
            split.number = base + from;
            split.pages = pages;
            split.end = (pages - (b - split.first_cta) + split.num_splits - 1) / split.num_splits;
        }
        before = __shfl_sync(ALL_LANES, sum, 31);
    }
    return balanced ? split : whole;
}

// A page of the list: its index in the pool, its page word (rung | count << 8), its column in the page table
// of its (row, KV head), the sequence.
struct Entry {
    u32 index, word, column, number;
};

__device__ __forceinline__ Entry entry_at(const u32* index, const u8* rung, const u8* count, u64 row,
                                          u32 column, u32 number) {
    return {index[row + column], rung[row + column] | (u32)count[row + column] << 8, column, number};
}

// The entry of a position of the whole list, at or after the cursor (number, start, pages). Each lane its
// own; once in 32 pages, and not worth its instructions elsewhere. What it needs of the call comes in
// registers: through a reference it would come from memory.
__device__ __noinline__ Entry find_entry(const u32* index, const u8* rung, const u8* count,
                                         const int* num_pages, int entries, int blocks, int each,
                                         int position, int number, int start, int pages) {
    while (position >= start + pages) {
        start += pages;
        pages = num_pages[(u32)++number / (u32)blocks];
    }
    const u64 row = (u64)((u32)number / (u32)blocks) * entries;
    const u32 columns = each ? min(pages, max(4, 2 * pages / each)) : 1;
    return entry_at(index, rung, count, row, page_at(position - start, pages, columns), number);
}
