// Sums over the values of a page, in float16 if they are coded.
#pragma once

#include "packed/state.cuh"

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

// Values of codes, but for the unit of `state.out`.
template <int BITS>
__device__ __forceinline__ void add_coded_values(const u8* codes, const ScaledP& scaled_p, State& state,
                                                 int lane) {
    constexpr int PER_BLOCK = 4 / Fields<BITS>::TILES;  // groups of tiles in a block of channels
    constexpr u32 LEFT = zero_point_pair<BITS>(), RIGHT = LEFT + Fields<BITS>::RIGHT * 0x04000400u;
    const u32 zero_point[4] = {LEFT, LEFT, RIGHT, RIGHT};
    u32 right[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        right[b] = lowered<Fields<BITS>::RIGHT>(scaled_p.b[b][1]);
        mma_half(state.zero_point_sum, zero_point, scaled_p.b[b][0], right[b]);
    }
    for_each_tile<BITS, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return i % TILES_D * PER_BLOCK + i / TILES_D; },
        [&](int tile, const u32(&a)[4]) {
            mma_half(state.out[tile / 4], a, scaled_p.b[tile % 4][0], right[tile % 4]);
        });
}

// Half of the channels of raw values. Elements of unused slots may be NaN and are cleared.
template <int HALF>
__device__ __forceinline__ void add_raw_values(const u8* values, const ScaledP& scaled_p, int count,
                                               State& state, int lane) {
    for_each_tile<16, 2 * HALF * TILES_D, 2 * TILES_D>(
        values, lane, [](int i) { return i; },
        [&](int tile, const u32(&a)[4]) {
            u32 live[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int slot =
                    16 * (lane % 4) + 2 * (tile % 4) + r / 2;  // of the lower half; the upper is 8 later
                live[r] = a[r] & ((slot < count ? 0xffffu : 0u) | (slot + 8 < count ? 0xffff0000u : 0u));
            }
            mma(state.out[tile / 4], live, scaled_p.b[tile % 4][0], scaled_p.b[tile % 4][1]);
        });
}
