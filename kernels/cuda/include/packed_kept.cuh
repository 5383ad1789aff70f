// Scores that a call keeps: where they go, and how.
//
// Needs KEEP_SCORES, packed_call.cuh and packed_codes.cuh.
#pragma once

constexpr float LN2 = 0.69314718056f;

// Where the scores of the last query rows of a sequence go, of the rows and slots of a lane: those of row 2u
// of entry 0 at `to`, those of row 2u + 1 behind them.
struct KeptRows {
    u8* to;
    u32 has;  // bit j: row 2u + j is kept
};

__device__ __forceinline__ KeptRows kept_rows(const Call& call, const Sequence& s, int lane) {
    const int row = 2 * (lane % 4), first = s.first_row + row - (call.rows - call.kept);
    const u64 rows_before = (u64)s.pair * call.entries * call.kept;
    KeptRows r = {(u8*)call.scores + ((rows_before + first) * 64 + lane / 4 * 8) * KEEP_SCORES,
                  (row < s.rows && first >= 0) | (row + 1 < s.rows && first >= -1) << 1};
    asm volatile("" : "+l"(r.to), "+r"(r.has));  // or it would be computed again for every page
    return r;
}

// Scores are read right after a call and written again by the next one, so they stay in the second-level
// cache: the policy is what createpolicy.fractional.L2::evict_last gives for all of an access.
__device__ __forceinline__ void store_kept(void* to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x), "r"(y),
                 "r"(z), "r"(w), "l"(0x14f0000000000000ull)
                 : "memory");
}

// Natural scores of a page, of scores less `reference`.
__device__ __forceinline__ void keep_scores(const Call& call, const KeptRows& rows, u32 entry,
                                            const float (&reference)[2], const float (&s)[4][4]) {
    u8* const page = rows.to + (u64)entry * (64 * KEEP_SCORES * (u32)call.kept);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float base = reference[j] * LN2;
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = fmaf(s[i / 2][2 * (i % 2) + j], LN2, base);
        u8* const to = page + j * 64 * KEEP_SCORES;
        if (!(rows.has >> j & 1)) continue;
        if (KEEP_SCORES == 2) {
            store_kept(to, pack_halves(x[0], x[1]), pack_halves(x[2], x[3]), pack_halves(x[4], x[5]),
                       pack_halves(x[6], x[7]));
        } else {
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                store_kept(to + 4 * i, __float_as_uint(x[i]), __float_as_uint(x[i + 1]),
                           __float_as_uint(x[i + 2]), __float_as_uint(x[i + 3]));
        }
    }
}
