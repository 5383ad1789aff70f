// A window: which pages have a token that a query row sees, and which of their slots are hidden.
//
// Query token s of row b stands at first[b] + s and sees stored tokens from first[b] + s - left on, so later
// rows of a sequence see no more than earlier ones. Pages without a token that its first row sees are not
// read: they pass through the ring as items without bytes. The lane that has an entry reads the positions of
// its page, 128 bytes once in 32 pages of a warp, unless the upper 16 bits already tell. Rows whose token is
// hidden get a score of -infinity.
#pragma once

#include "packed/split_kv.cuh"
#include "packed/state.cuh"

constexpr u32 MASKED = 1 << 15;  // of a word: some row does not see some token of the page

// A word is rung | count << 8, with a window | MASKED | the upper 16 bits of positions << 16.
__device__ __forceinline__ int tokens_of(u32 word) {
    return WINDOW ? word >> 8 & 127 : word >> 8;
}

// The first position that a row of a sequence sees.
__device__ __forceinline__ int first_visible(const Call& call, const Sequence& s, int row) {
    return call.first[s.pair / call.heads_kv] + (s.first_row + row) / call.group - call.left;
}

// The same of the rows of a lane.
struct FirstVisible {
    int of[LANE_ROWS];
};

__device__ __forceinline__ FirstVisible first_visible_of_lane(const Call& call, const Sequence& s, int lane) {
    FirstVisible r;
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j)
        r.of[j] = first_visible(call, s, min(LANE_ROWS * (lane % 4) + j, s.rows - 1));
    return r;
}

// The lower 16 bits of the positions of slots 8 g to 8 g + 7 of a page.
__device__ __forceinline__ uint4 offsets_of(const Rung& rung, u32 index, int g) {
    const u32 scales = 64 * ((rung.bits_k < 16) + (rung.bits_v < 16));
    const u8* page = rung.pool + (u64)index * rung.record;
    return *(const uint4*)(page + 8 * HEAD_DIM * (rung.bits_k + rung.bits_v) + scales + 16 * g);
}

__device__ __forceinline__ int offset_at(const uint4& offsets, int i) {
    const u32 word = i < 2 ? offsets.x : i < 4 ? offsets.y : i < 6 ? offsets.z : offsets.w;
    return i % 2 ? word >> 16 : word & 0xffffu;
}

// The word of an entry: without tokens if none is seen.
__device__ __forceinline__ u32 page_word_in_window(const Call& call, const Entry& entry) {
    const Sequence s = sequence_at(call, entry.number);
    const int first = first_visible(call, s, 0), last = first_visible(call, s, s.rows - 1);
    const u32 base = (u32)call.base[(u64)s.pair * call.entries + entry.column] << 16;
    const int count = entry.word >> 8, above = first - (int)base;
    if ((int)base >= last) return entry.word | base;
    if (above > 0xffff) return entry.word & 0xff;
    int newest = -1, oldest = 0x10000;
    uint4 offsets[8];
#pragma unroll
    for (int g = 0; g < 8; ++g) offsets[g] = offsets_of(call.rungs[entry.word & 0xff], entry.index, g);
#pragma unroll
    for (int g = 0; g < 8; ++g) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int offset = offset_at(offsets[g], i);
            newest = 8 * g + i < count ? max(newest, offset) : newest;
            oldest = 8 * g + i < count ? min(oldest, offset) : oldest;
        }
    }
    if (newest < above) return entry.word & 0xff;
    return entry.word | base | (oldest < last - (int)base ? MASKED : 0);
}

__device__ __forceinline__ void mask_page(float (&s)[8][LANE_ROWS]) {
#pragma unroll
    for (int i = 0; i < 8 * LANE_ROWS; ++i) s[i / LANE_ROWS][i % LANE_ROWS] = -INFINITY_F;
}

// Hides what lies before `visible` from the rows of the lane.
__device__ __forceinline__ void mask_before_window(const uint4& offsets, u32 base,
                                                   const FirstVisible& visible, float (&s)[8][LANE_ROWS]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int position = (int)base + offset_at(offsets, i);
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) s[i][j] = position < visible.of[j] ? -INFINITY_F : s[i][j];
    }
}
