// Sums over the values of a quad, in float16 if they are coded.
#pragma once

#include "packed/quad_ring.cuh"

// Probabilities, times the scales of coded values, as B fragments: of float16 for those, else of the cache's
// type.
struct ScaledP {
    u32 b[4][2];
};

__device__ __forceinline__ ScaledP scale_probabilities(const float (&p)[8][2], const Scales& scales, int) {
    ScaledP r;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        r.b[i / 2][i % 2] = transposed(pack_halves(p[i][0] * scales.at(i), p[i][1] * scales.at(i)));
    return r;
}

__device__ __forceinline__ ScaledP scale_probabilities(const float (&p)[8][2]) {
    ScaledP r;
#pragma unroll
    for (int i = 0; i < 8; ++i) r.b[i / 2][i % 2] = transposed(pack_pair(p[i][0], p[i][1]));
    return r;
}

// Values of codes, but for the unit of `state.out`. They are `from` bytes behind the beginning of pages.
template <int BITS>
__device__ __forceinline__ void add_coded_values(const Item& item, u32 from, const ScaledP& scaled_p,
                                                 State& state, int lane) {
    constexpr u32 ZERO_POINT = zero_point_pair<BITS>();
    const u32 zero_point[4] = {ZERO_POINT, ZERO_POINT, ZERO_POINT, ZERO_POINT};
#pragma unroll
    for (int b = 0; b < 4; ++b)
        mma_half(state.zero_point_sum, zero_point, scaled_p.b[b][0], scaled_p.b[b][1]);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int group = 0; group < groups_of<BITS>(TILES_D); ++group)
            for_each_tile<BITS, TILES_D>(item.page[b] + from, lane, group, [&](int i, const u32(&a)[4]) {
                mma_half(state.out[i], a, scaled_p.b[b][0], scaled_p.b[b][1]);
            });
    }
}

// Raw values of pages FIRST and FIRST + 1. Elements of unused slots may be NaN and are cleared.
template <int FIRST>
__device__ __forceinline__ void add_raw_values(const Item& item, const ScaledP& scaled_p,
                                               const PageWords& words, State& state, int lane) {
#pragma unroll
    for (int b = FIRST; b < FIRST + 2; ++b) {
        u32 live[2];  // of slots 4 u and 4 u + 2; of 4 u + 1 and 4 u + 3
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int slot = lane % 4 * 4 + r, count = tokens_of(words.of[b]);
            live[r] = (slot < count ? 0xffffu : 0u) | (slot + 2 < count ? 0xffff0000u : 0u);
        }
#pragma unroll
        for (int group = 0; group < TILES_D; ++group)
            for_each_tile<16, TILES_D>(item.page[b], lane, group, [&](int i, const u32(&a)[4]) {
                const u32 x[4] = {a[0] & live[0], a[1] & live[0], a[2] & live[1], a[3] & live[1]};
                mma(state.out[i], x, scaled_p.b[b][0], scaled_p.b[b][1]);
            });
    }
}
