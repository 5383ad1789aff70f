// Scores of coded keys by integer products: see packed/int8_mma.cuh.
#pragma once

#include "packed/int8_query.cuh"

// Scores of coded keys, less `base`.
template <int BITS>
__device__ __forceinline__ void coded_scores(const Item& item, const Query& query,
                                             const float (&base)[LANE_ROWS], float (&s)[8][LANE_ROWS],
                                             int lane) {
    constexpr float EVEN = Bytes<BITS>::EVEN << Bytes<BITS>::SECOND,
                    ODD = Bytes<BITS>::ODD << Bytes<BITS>::SECOND;
    u32 sums[LANE_ROWS][4][4];
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        u32 start[4] = {query.start[j][0], query.start[j][1], query.start[j][2], query.start[j][3]};
        if (!ONE_KEY_WIDTH) start_scores<BITS>(BITS == 3 ? sums_of(query, j).y : sums_of(query, j).x, start);
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[j][i / 4][i % 4] = start[i % 4];
    }
#pragma unroll
    for (int first = 0; first < TILES_D; first += Bytes<BITS>::TILES) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            u32 w[Bytes<BITS>::WORDS];
            load_words<BITS>(item.page[b], first, lane, w);
#pragma unroll
            for (int i = 0; i < Bytes<BITS>::TILES; i += 2) {
                if (first + i >= TILES_D) break;
                const bool alone = first + Bytes<BITS>::TILES > TILES_D;
                const uint2 left = rows_of_tile<BITS, true>(w, i, alone);
                const uint2 right = rows_of_tile<BITS, true>(w, i + 1, alone);
                const u32 a[4] = {left.x, left.y, right.x, right.y};
#pragma unroll
                for (int j = 0; j < LANE_ROWS; ++j) {
                    const uint2 q = fragment_of<BITS == 3>(query, j, (first + i) / 2);
                    KVLAB_MMA_BYTES("s8", sums[j][b], a, q.x, q.y);
                }
            }
        }
    }
    const Scales scale = load_scales(item, code_bytes(BITS), lane);
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const float2 of = unit_and_bias(query, j);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32* const parts = sums[j][i / 2] + i % 2 * 2;
            s[i][j] = fmaf(joined<SIGNED_ZERO>(parts[0], parts[1]),
                           scale.at(i) * (of.x * (1.f / (i % 2 ? ODD : EVEN))), of.y - base[j]);
        }
    }
}
