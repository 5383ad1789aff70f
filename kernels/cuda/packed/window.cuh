// A window: which pages have a token that a query row sees, and which of their slots are hidden.
//
// Query token s of row b stands at first[b] + s and sees stored tokens from first[b] + s - left on, so later
// rows of a sequence see no more than earlier ones. Pages without a token that its first row sees are not
// read: they pass through the ring as items without bytes. The lane that has an entry reads the positions of
// its page, 32 bytes once in 8 quads of a warp, unless the upper 16 bits already tell. Rows whose token is
// hidden get a score of -infinity.
#pragma once

#include "packed/quad_ring.cuh"
#include "packed/split_kv.cuh"

// The first position that a row of a sequence sees.
__device__ __forceinline__ int first_visible(const Call& call, const Sequence& s, int row) {
    return call.first[s.bh / call.heads_kv] + (s.first_row + row) / call.group - call.left;
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

// The positions of a page's 16 slots, but for their upper 16 bits.
__device__ __forceinline__ const uint4* offsets_of(const Rung& rung, u32 index) {
    return (const uint4*)(rung.pool + (u64)index * rung.record + key_side_bytes(rung.bits_k) +
                          side_bytes(rung.bits_v));
}

// Brings what a window changes into the entry of a page, which has no tokens if none is seen.
__device__ __forceinline__ void look_through_window(const Call& call, Entry& entry, int page) {
    const Sequence s = sequence_at(call, entry.number);
    const int first = first_visible(call, s, 0), last = first_visible(call, s, s.rows - 1);
    const u32 base = (u32)call.base[(u64)s.bh * call.entries + 4 * entry.column + page] << 16;
    const int count = entry.count, above = first - (int)base;
    if (above > 0xffff) entry.count = 0;
    if (entry.count == 0) return;
    const Rung& rung = call.rungs[entry.word];
    entry.word |= base;
    if ((int)base >= last) return;
    int newest = -1, oldest = 0x10000;
    const uint4* const from = offsets_of(rung, entry.index);
    const uint4 words[2] = {from[0], from[1]};
#pragma unroll
    for (int slot = 0; slot < 16; ++slot) {
        const uint4& x = words[slot / 8];
        const u32 pair = slot / 2 % 4 < 2 ? (slot / 2 % 2 ? x.y : x.x) : (slot / 2 % 2 ? x.w : x.z);
        const int offset = slot % 2 ? pair >> 16 : pair & 0xffffu;
        newest = slot < count ? max(newest, offset) : newest;
        oldest = slot < count ? min(oldest, offset) : oldest;
    }
    if (newest < above)
        entry.count = 0;
    else if (oldest < last - (int)base)
        entry.word |= MASKED;
}

__device__ __forceinline__ void mask_quad(float (&s)[8][LANE_ROWS]) {
#pragma unroll
    for (int i = 0; i < 8 * LANE_ROWS; ++i) s[i / LANE_ROWS][i % LANE_ROWS] = -INFINITY_F;
}

// Hides what lies before `visible` from the rows of the lane; `offsets` are of its slots of pages that are
// MASKED.
__device__ __forceinline__ void mask_before_window(const u32 (&offsets)[4], const PageWords& words,
                                                   const FirstVisible& visible, float (&s)[8][LANE_ROWS]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 word = words.of[i / 2], offset = i % 2 ? offsets[i / 2] >> 16 : offsets[i / 2] & 0xffffu;
        const int position = (int)((word & 0xffff0000u) + offset);
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j)
            s[i][j] = word & MASKED && position < visible.of[j] ? -INFINITY_F : s[i][j];
    }
}
