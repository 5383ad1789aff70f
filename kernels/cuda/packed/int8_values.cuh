// Sums over coded values by integer products: see packed/int8_mma.cuh.
//
// p times scale is relative to the largest of its row in the quad, never to a maximum over quads: many small
// ones would vanish. Sums over quads are float32, of values but for their zero point.
#pragma once

#include "packed/int8_mma.cuh"

// Probabilities times the scales of values in 16 bits of fixed point, of the rows of a lane.
struct ScaledP {
    u32 x[LANE_ROWS][8];    // the lower 16 bits
    float unit[LANE_ROWS];  // what 1 stands for
    float sum[LANE_ROWS];
};

__device__ __forceinline__ ScaledP scale_probabilities(const float (&p)[8][LANE_ROWS], const Scales& scales,
                                                       int bits) {
    ScaledP r;
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        float x[8], top = 7.8886091e-31f;  // 2^-100
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = p[i][j] * scales.at(i);
            r.sum[j] = i ? r.sum[j] + x[i] : x[i];
            top = fmaxf(top, x[i]);
        }
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, bit));
        // 65535 / 65536 of the power of 2 that brings the largest below 2^16, and its inverse
        const u32 exponent = __float_as_uint(top) & 0x7f800000u;
        const float factor = __uint_as_float(0x867fff00u - exponent);
        const float left = bits == 3 ? .25f * factor : factor;  // of columns 0 to 7
        r.unit[j] = __uint_as_float(exponent - 0x077fff80u);
#pragma unroll
        for (int i = 0; i < 8; ++i) r.x[j][i] = __float_as_uint(fmaf(x[i], i % 2 ? factor : left, 8388608.f));
    }
    return r;
}

// The values are `from` bytes behind the beginning of pages.
template <int BITS>
__device__ __forceinline__ void add_coded_values(const Item& item, u32 from, const ScaledP& scaled_p,
                                                 State& state, int lane) {
    constexpr bool LIFTED = LANE_ROWS > 1;  // so that first and second tiles have the same units
    u32 p[LANE_ROWS][4];
    float units[LANE_ROWS][2][2];  // of first and second tiles, rows g and g + 8
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
#pragma unroll
        for (int b = 0; b < 4; ++b)
            p[j][b] = transposed(__byte_perm(scaled_p.x[j][2 * b], scaled_p.x[j][2 * b + 1], 0x4051));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int unit = i || LIFTED ? 1 << Bytes<BITS>::SECOND : 1;
            units[j][i][0] = 2.f / (Bytes<BITS>::EVEN * unit) * scaled_p.unit[j];
            units[j][i][1] = 2.f / (Bytes<BITS>::ODD * unit) * scaled_p.unit[j];
        }
        state.zero_point_sum[j] = fmaf(scaled_p.sum[j], 1.f - (1 << BITS), state.zero_point_sum[j]);
    }
#pragma unroll
    for (int first = 0; first < TILES_D; first += Bytes<BITS>::TILES) {
        u32 w[4][Bytes<BITS>::WORDS];
#pragma unroll
        for (int b = 0; b < 4; ++b) load_words<BITS>(item.page[b] + from, first, lane, w[b]);
#pragma unroll
        for (int i = 0; i < Bytes<BITS>::TILES; ++i) {
            if (first + i >= TILES_D) break;
            const bool alone = first + Bytes<BITS>::TILES > TILES_D;
            u32 sums[LANE_ROWS][4];
#pragma unroll
            for (int b = 0; b < 4; b += 2) {
                const uint2 left = rows_of_tile<BITS, LIFTED>(w[b], i, alone);
                const uint2 right = rows_of_tile<BITS, LIFTED>(w[b + 1], i, alone);
                const u32 a[4] = {left.x, left.y, right.x, right.y};
#pragma unroll
                for (int j = 0; j < LANE_ROWS; ++j) {
                    if (b == 0) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = UNSIGNED_ZERO;
                    KVLAB_MMA_BYTES("u8", sums[j], a, p[j][b], p[j][b + 1]);
                }
            }
#pragma unroll
            for (int r = 0; r < 2 * LANE_ROWS; ++r) {
                const u32* const parts = sums[r % LANE_ROWS] + r / LANE_ROWS * 2;
                float& out = state.out[first + i][r];
                out = fmaf(joined<UNSIGNED_ZERO>(parts[0], parts[1]),
                           units[r % LANE_ROWS][i % 2][r / LANE_ROWS], out);
            }
        }
    }
}

// The sums of values are complete.
__device__ __forceinline__ void finish(State& state) {
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        float& zero_point = state.zero_point_sum[j];
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) zero_point += __shfl_xor_sync(ALL_LANES, zero_point, bit);
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            state.out[i][j] += zero_point;
            state.out[i][LANE_ROWS + j] += zero_point;
        }
    }
}
