// Scores of coded keys by integer products: see packed/int8_mma.cuh.
#pragma once

#include "packed/int8_query.cuh"

// Scores of coded keys, less `base`.
template <int BITS>
__device__ __forceinline__ void coded_scores(const u8* codes, const u8* scales, const Query& query,
                                             const float (&base)[LANE_ROWS], float (&s)[8][LANE_ROWS],
                                             int lane) {
    constexpr float EVEN = Bytes<BITS>::EVEN, ODD = Bytes<BITS>::ODD;
    constexpr int TWOS = Bytes<BITS>::TWOS, PER_BLOCK = TWOS_D % TWOS ? 0 : TWOS_D / TWOS;
    u32 sums[LANE_ROWS][4][4];
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        u32 start[4] = {query.start[j][0], query.start[j][1], query.start[j][2], query.start[j][3]};
        if (!ONE_KEY_WIDTH) start_scores<BITS>(BITS == 3 ? query.sum_of_3[j] : query.sum[j], start);
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[j][i / 4][i % 4] = start[i % 4];
    }
    for_each_two<BITS>(
        codes, lane, [](int i) { return PER_BLOCK ? i % 4 * PER_BLOCK + i / 4 : i; },
        [&](int two, const u32(&a)[4]) {
            constexpr bool OTHER = BITS == 2 && !TWO_BITS_ALONE;
#pragma unroll
            for (int j = 0; j < LANE_ROWS; ++j) {
                const uint2 q = fragment_of<BITS == 3>(query, j, two % TWOS_D);
                KVLAB_MMA_BYTES("s8", sums[j][two / TWOS_D], a, OTHER ? __byte_perm(q.x, q.y, 0x6240) : q.x,
                                OTHER ? __byte_perm(q.x, q.y, 0x7351) : q.y);
            }
        });
    const Scales scale = load_scales(scales, lane / 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) {
            const u32* const parts = sums[j][i / 2] + i % 2 * 2;
            s[i][j] =
                fmaf(joined<SIGNED_ZERO>(parts[0], parts[1]),
                     scale.at(i) * (query.unit[j] * (1.f / (i % 2 ? ODD : EVEN))), query.bias[j] - base[j]);
        }
    }
}
