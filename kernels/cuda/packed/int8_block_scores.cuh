// Scores of keys in blocks of channels by integer products: see packed/int8_mma.cuh and pages/profiles.cuh.
//
// A run of blocks has accumulators of its own: codes stand at other bits of their bytes in others. They start
// at zero; what lies between codes and elements is taken off once.
#pragma once

#include "packed/int8_query.cuh"

#define KVLAB_MMA_BYTES_OF_TILE(c, a, b)                                                            \
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};" \
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                            \
        : "r"(a.x), "r"(a.y), "r"(b))

__device__ __forceinline__ u32 fragment_of_tile(const Query& query, int j, int tile) {
    const uint2 both = fragment_of<false>(query, j, tile / 2);
    return tile % 2 ? both.y : both.x;
}

// Adds the products of the runs from BLOCK on, whose words begin at WORD, in half units of the query.
template <int PROFILE, int BLOCK, int WORD>
__device__ __forceinline__ void add_runs(const Item& item, const Query& query, float (&s)[8][LANE_ROWS],
                                         int lane) {
    constexpr int BITS = width_of_block(PROFILE, BLOCK);
    if constexpr (BITS > 0) {
        constexpr int END = end_of_run(PROFILE, BLOCK), FIRST = BLOCK * BLOCK_TILES;
        constexpr int TILES = (END - BLOCK) * BLOCK_TILES;
        u32 sums[LANE_ROWS][4][4];
#pragma unroll
        for (int i = 0; i < 16 * LANE_ROWS; ++i) sums[i / 16][i / 4 % 4][i % 4] = SIGNED_ZERO;
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                u32 w[Bytes<BITS>::WORDS];
                load_words<BITS, TILES>(item.page[b] + 128 * WORD, tile, lane, w);
                const uint2 left = rows_of_tile<BITS, true>(w, 0, false);
                const uint2 right = rows_of_tile<BITS, true>(w, 1, false);
                const u32 a[4] = {left.x, left.y, right.x, right.y};
#pragma unroll
                for (int j = 0; j < LANE_ROWS; ++j) {
                    const u32 q = fragment_of_tile(query, j, FIRST + tile);
                    if (tile + 1 < TILES)
                        KVLAB_MMA_BYTES("s8", sums[j][b], a, q, fragment_of_tile(query, j, FIRST + tile + 1));
                    else
                        KVLAB_MMA_BYTES_OF_TILE(sums[j][b], left, q);
                }
            }
        }
        constexpr float EVEN = Bytes<BITS>::EVEN << Bytes<BITS>::SECOND,
                        ODD = Bytes<BITS>::ODD << Bytes<BITS>::SECOND;
#pragma unroll
        for (int i = 0; i < 8 * LANE_ROWS; ++i) {
            const int j = i % LANE_ROWS, slot = i / LANE_ROWS;
            const u32* const parts = sums[j][slot / 2] + slot % 2 * 2;
            s[slot][j] = fmaf(joined<SIGNED_ZERO>(parts[0], parts[1]),
                              (float)factor_of_width(BITS) / (slot % 2 ? ODD : EVEN), s[slot][j]);
        }
        add_runs<PROFILE, END, WORD + words_of(BITS, TILES)>(item, query, s, lane);
    }
}

// Scores of keys of a profile, less `base`.
template <int PROFILE>
__device__ __forceinline__ void block_scores(const Item& item, const Query& query,
                                             const float (&base)[LANE_ROWS], float (&s)[8][LANE_ROWS],
                                             int lane) {
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const RowSums sums = sums_of(query, j);
        const float zero_point = .5f * zero_point_of<PROFILE>(sums);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i][j] = zero_point;
    }
    add_runs<PROFILE, 0, 0>(item, query, s, lane);
    const Scales scale = load_scales(item, key_side_bytes(PROFILE) - 16, lane);
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const float2 of = unit_and_bias(query, j);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i][j] = fmaf(s[i][j], scale.at(i) * of.x, of.y - base[j]);
    }
}
