// The basis and units in which sums over values are kept.
#pragma once

#include "packed/state.cuh"

// What codes of `bits` are multiplied by in `out`, as a power of 2: rows g (even) and g + 8 (odd) of a tile,
// which may be the second that shares words.
__device__ __forceinline__ int unit_of(int bits, int odd, int second) {
    if (bits == 0 || bits == 16) return 0;
    const int bit = odd ? (bits == 2 ? 2 : bits == 8 ? 0 : 4) : bits == 3;
    return bit + (second && bits == 2 ? Fields<2>::SECOND : 0) - 25;
}

// Gives `out` the signs of values: channels 16 i + 8 (r / 2) + g.
__device__ __forceinline__ void turn_signs(State& state, int lane) {
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
            if (turns_sign(16 * i + 8 * (r / 2) + lane / 4)) state.out[i][r] = -state.out[i][r];
    }
}

// Brings `out` into the unit and basis of `bits`. The two bases are each other's block Hadamard transform,
// and signs on the side of raw values, which have no exponent.
__device__ __forceinline__ void change_basis(State& state, int bits, int exponent, int lane) {
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
            state.out[i][r] = fmaf(state.out[i][r], exp2_exact(-unit_of(state.bits, r / 2, i % 2)),
                                   state.zero_point_sum[r]);
    }
    state.zero_point_sum[0] = state.zero_point_sum[1] = state.zero_point_sum[2] = state.zero_point_sum[3] =
        0.f;
    if ((WIDTHS_V & RAW) && (WIDTHS_V & CODED) && (state.bits == 16) != (bits == 16)) {
        if (state.bits == 16) turn_signs(state, lane);
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            float (&x)[4] = state.out[i];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
                for (int bit = 4; bit < 32; bit *= 2) {
                    const float other = __shfl_xor_sync(ALL_LANES, x[r], bit);
                    x[r] = lane & bit ? other - x[r] : x[r] + other;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float a = x[r], b = x[r + 2];
                x[r] = (a + b) * NORM;
                x[r + 2] = (a - b) * NORM;
                x[r] = times_exp2(x[r], bits == 16 ? exponent : -exponent);
                x[r + 2] = times_exp2(x[r + 2], bits == 16 ? exponent : -exponent);
            }
        }
#pragma unroll
        for (int h = 1; h < HADAMARD_BLOCK / 16; h *= 2) {
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) {
                if (i & h) continue;
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float a = state.out[i][r], b = state.out[i + h][r];
                    state.out[i][r] = a + b;
                    state.out[i + h][r] = a - b;
                }
            }
        }
        if (bits == 16) turn_signs(state, lane);
    }
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) state.out[i][r] *= exp2_exact(unit_of(bits, r / 2, i % 2));
    }
    state.bits = bits;
}
