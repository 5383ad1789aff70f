// Scores that a call saves: where they go, and how.
//
// As float32, natural, [saved rows][16 slots of each page] a quad: what callers get. As bytes: what a cache
// needs for the importance of tokens: eighths of a binary order below the base of the (quad, row), which
// follows the codes of all rows as a float. score * log2(e) = (code - 255) / 8 + base, code 0 means nothing:
// 2^-24 of the largest probability so far, the least that the importance of a token can be. Slot s of page q
// is at 8 (s / 2) + 2 q + s % 2 of a row's 64 bytes.
#pragma once

#include "packed/call.cuh"
#include "packed/state.cuh"

// Where the scores of the last query rows of a sequence go, of the rows and slots of a lane: those of its
// first row of quad 0 at `to`, those of its second behind them.
struct SavedRows {
    u8* to;
    u32 quad_bytes, has;  // bit j: row j of the lane is saved; bit 2 + j: and it writes the base
    u32 base;             // of its first row, of bytes: how far behind `to`
};

__device__ __forceinline__ SavedRows saved_rows(const Call& call, const Sequence& s, int lane) {
    const int row = LANE_ROWS * (lane % 4), first = s.first_row + row - (call.rows - call.saved);
    const int slot = lane / 4 * (SAVED_SCORE_BYTES == 1 ? 8 : 2);
    const u32 quad_bytes =
        SAVED_SCORE_BYTES == 1 ? (68u * call.saved + 15u) & ~15u : 64u * SAVED_SCORE_BYTES * call.saved;
    u8* const quads = (u8*)call.scores + (u64)s.bh * (call.entries / 4) * quad_bytes;
    const u32 has = (row < s.rows && first >= 0) + 2 * (row + 1 < s.rows && first >= -1);
    SavedRows r = {quads + (first * 64 + slot) * SAVED_SCORE_BYTES, quad_bytes, has * (lane < 4 ? 5 : 1),
                   (u32)(64 * call.saved + 4 * first - (first * 64 + slot))};
    // Or all is computed for every quad.
    asm volatile("" : "+l"(r.to), "+r"(r.quad_bytes), "+r"(r.has), "+r"(r.base));
    return r;
}

// Scores are read right after a call and written again by the next one, so they stay in the second-level
// cache: the policy is what createpolicy.fractional.L2::evict_last gives for all of an access. Stores depend
// on a bit, without a branch, and nothing in the kernel reads them, so loads may pass them.
constexpr u64 EVICT_LAST = 0x14f0000000000000ull;

#define KVLAB_STORE_SAVED(TYPE, VALUES, ...)                                                                 \
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.L2::cache_hint." TYPE " [%1], " VALUES \
                 ", %2;}" ::"r"(bit),                                                                        \
                 "l"(to), "l"(EVICT_LAST), __VA_ARGS__)

__device__ __forceinline__ void store_saved(u32 bit, void* to, u32 x, u32 y) {
    KVLAB_STORE_SAVED("v2.b32", "{%3, %4}", "r"(x), "r"(y));
}

__device__ __forceinline__ void store_saved(u32 bit, void* to, float x) {
    KVLAB_STORE_SAVED("f32", "%3", "f"(x));
}

#undef KVLAB_STORE_SAVED

// Two codes, each in the lower byte of a half: scores of float16 at most `max_excess`, a whole number, become
// 255 / 256 + (score - max_excess) / 32, cut at 0, and then whole numbers in the mantissa of 1024 and more.
__device__ __forceinline__ u32 code_pair(u32 scores, u32 top) {
    u32 range, code;
    constexpr u32 BY_32 = 0x28002800u, TIMES_256 = 0x5c005c00u, FROM_1024 = 0x64006400u;
    asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(range) : "r"(scores), "r"(BY_32), "r"(top));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(code) : "r"(range), "r"(TIMES_256), "r"(FROM_1024));
    return code;
}

// Saves the scores of a quad; `s` is relative to row_max, which it exceeds by max_excess at most.
__device__ __forceinline__ void save_scores(const SavedRows& rows, u32 column, const State& state,
                                            const float (&s)[8][LANE_ROWS]) {
    u8* const quad = rows.to + (u64)column * rows.quad_bytes;
    const float range = fmaf(state.max_excess, -1.f / 32, 255.f / 256);
    const u32 top = pack_halves(range, range);
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const u32 saved = rows.has & 1 << j;
        if (SAVED_SCORE_BYTES == 1) {
            u32 codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = code_pair(pack_halves(s[2 * i][j], s[2 * i + 1][j]), top);
            store_saved(saved, quad + 64 * j, __byte_perm(codes[0], codes[1], 0x6420),
                        __byte_perm(codes[2], codes[3], 0x6420));
            store_saved(rows.has & 4 << j, quad + rows.base + 4 * j, state.row_max[j] + state.max_excess);
        } else {
            const float base = state.row_max[j] * LN2;
#pragma unroll
            for (int i = 0; i < 8; i += 2)
                store_saved(saved, quad + 256 * j + 32 * i, __float_as_uint(fmaf(s[i][j], LN2, base)),
                            __float_as_uint(fmaf(s[i + 1][j], LN2, base)));
        }
    }
}
