// Scores of keys in blocks of channels, in float16: see packed/scores.cuh and pages/profiles.cuh.
//
// A quad has accumulators for all runs of blocks; they are brought into the units of the next run behind
// each.
#pragma once

#include "packed/scores.cuh"

// Elements that products of a run's codes stand for, of rows g (even) and g + 8 (odd) of a tile.
template <int BITS>
__host__ __device__ constexpr float unit_of_codes(bool odd) {
    return (float)factor_of_width(BITS) / (1 << (odd ? Fields<BITS>::ODD : Fields<BITS>::EVEN));
}

// Adds the products of the runs from BLOCK on, whose words begin at WORD. The sums come and go in units of
// the first run of the profile and of the last.
template <int PROFILE, int BLOCK, int WORD>
__device__ __forceinline__ void add_runs(const Item& item, const Query& query, float (&sums)[4][4],
                                         int lane) {
    constexpr int BITS = width_of_block(PROFILE, BLOCK);
    constexpr int END = end_of_run(PROFILE, BLOCK), FIRST = BLOCK * BLOCK_TILES;
    constexpr int TILES = (END - BLOCK) * BLOCK_TILES, NEXT = width_of_block(PROFILE, END);
#pragma unroll
    for (int group = 0; group < groups_of<BITS>(TILES); ++group) {
#pragma unroll
        for (int b = 0; b < 4; ++b)
            for_each_tile<BITS, TILES>(item.page[b] + 128 * WORD, lane, group, [&](int i, const u32(&a)[4]) {
                const u32* const q = query.rotated[FIRST + i];
                const bool second = i % 2;
                constexpr int SECOND = Fields<BITS>::SECOND;
                mma_half(sums[b], a, second ? lowered<SECOND>(q[0]) : q[0],
                         second ? lowered<SECOND>(q[1]) : q[1]);
                if (WITH_RESIDUAL) {
                    const uint2 x = query.residual[32 * (FIRST + i)];
                    mma_half(sums[b], a, second ? lowered<SECOND>(x.x) : x.x,
                             second ? lowered<SECOND>(x.y) : x.y);
                }
            });
    }
    if constexpr (NEXT > 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            sums[i / 4][i % 4] *= unit_of_codes<BITS>(i % 4 > 1) / unit_of_codes<NEXT>(i % 4 > 1);
        add_runs<PROFILE, END, WORD + words_of(BITS, TILES)>(item, query, sums, lane);
    }
}

__host__ __device__ constexpr int last_width(int profile) {
    int block = 3;
    while (width_of_block(profile, block) == 0) --block;
    return width_of_block(profile, block);
}

// Scores of keys of a profile, less `base`.
template <int PROFILE>
__device__ __forceinline__ void block_scores(const Item& item, const Query& query, const float (&base)[2],
                                             float (&s)[8][2], int lane) {
    constexpr int FIRST = width_of_block(PROFILE, 0), LAST = last_width(PROFILE);
    float sums[4][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float zero_point = zero_point_of<PROFILE>(query.sums_of_blocks[j]) * (.5f / (1 << 24));
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sums[i / 2][2 * (i % 2) + j] = zero_point * (1.f / unit_of_codes<FIRST>(i % 2));
    }
    add_runs<PROFILE, 0, 0>(item, query, sums, lane);
    const Scales scale = load_scales(item, key_side_bytes(PROFILE) - 16, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float factor = scale.at(i) * (query.unit * unit_of_codes<LAST>(i % 2));
#pragma unroll
        for (int j = 0; j < 2; ++j)
            s[i][j] = fmaf(sums[i / 2][2 * (i % 2) + j], factor, query.bias[j] - base[j]);
    }
}
