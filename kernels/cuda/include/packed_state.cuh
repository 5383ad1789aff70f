// What a warp keeps while it attends pages, and the frames and units in which it keeps it.
//
// Needs HEAD_DIM, WIDTHS_V, CODED, RAW, WINDOW and packed_codes.cuh.
#pragma once

constexpr int TILES_D = HEAD_DIM / 16, ROW_FLOATS = HEAD_DIM + 2, MERGE_ROWS = 4;
constexpr int HADAMARD_BLOCK = HEAD_DIM & -HEAD_DIM;
constexpr float LOWEST = -1e30f;
#define INFINITE __int_as_float(0x7f800000)

__host__ __device__ constexpr float inverse_root(int power_of_4_or_half) {
    float r = 1.f;
    for (; power_of_4_or_half >= 4; power_of_4_or_half /= 4) r *= .5f;
    return power_of_4_or_half == 2 ? r * .70710678118654752f : r;
}
constexpr float NORM = inverse_root(HADAMARD_BLOCK);

// Sums over tokens of p v, in the unit and frame of the page that came last: of codes of `bits`, which lack
// `centre`; of raw values at 16; of rotated values at 0. p = 2^(score - reference), where the reference is
// the running maximum less the lift: a power of 2 that brings p times the largest step near the top of
// float16.
struct State {
    float out[TILES_D][4];  // channels g, g + 8 of a tile x rows 2u, 2u + 1
    float centre[4];        // rows 2u, 2u + 1 at 0, 1, again at 2, 3
    float reference[2], sum[2];
    float reach;  // by how much scores may exceed the reference: the lift + SLACK; -infinite before the first
    u32 limit;    // the largest step for which the lift is right, as a pair of float16
    u32 seen;     // bit j: row 2u + j has met a token; kept with a window only, else all rows meet the same
    int bits;
};

constexpr float SLACK = 8.f;           // by how much scores may exceed the running maximum
constexpr u32 NO_LIMIT = 0xbc00bc00u;  // below every step, so the next coded page sets a lift

__device__ __forceinline__ void clear(State& state, int bits) {
#pragma unroll
    for (int i = 0; i < TILES_D; ++i)
        state.out[i][0] = state.out[i][1] = state.out[i][2] = state.out[i][3] = 0.f;
    state.centre[0] = state.centre[1] = state.centre[2] = state.centre[3] = 0.f;
    state.reference[0] = state.reference[1] = 0.f;
    state.sum[0] = state.sum[1] = 0.f;
    state.reach = -INFINITE;
    state.limit = NO_LIMIT;
    state.seen = 0;
    state.bits = bits;
}

// Whether row 2u + j has not met a token.
__device__ __forceinline__ bool is_fresh(const State& state, int j) {
    return WINDOW ? !(state.seen >> j & 1) : state.reach == -INFINITE;
}

// What codes of `bits` are multiplied by in `out`, as a power of 2: rows g (even) and g + 8 (odd) of a tile.
__device__ __forceinline__ int unit_of(int bits, int odd) {
    if (bits == 0 || bits == 16) return 0;
    const int bit = odd ? (bits == 2 ? 2 : bits == 8 ? 0 : 4) : bits == 3;
    return bit - 25;
}

__device__ __forceinline__ float power_of_2_exactly(int x) {
    return __int_as_float((127 + x) << 23);
}

// Brings `out` into the unit and frame of `bits`. The frames are each other's block Hadamard transform, of
// channels 16 i + 8 (r / 2) + g.
__device__ __forceinline__ void change_frame(State& state, int bits, int lane) {
    const float even = power_of_2_exactly(-unit_of(state.bits, 0)),
                odd = power_of_2_exactly(-unit_of(state.bits, 1));
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
            state.out[i][r] = fmaf(state.out[i][r], r < 2 ? even : odd, state.centre[r]);
    }
    state.centre[0] = state.centre[1] = state.centre[2] = state.centre[3] = 0.f;
    if ((WIDTHS_V & RAW) && (WIDTHS_V & CODED) && (state.bits == 16) != (bits == 16)) {
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
    }
    const float even_unit = power_of_2_exactly(unit_of(bits, 0)),
                odd_unit = power_of_2_exactly(unit_of(bits, 1));
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) state.out[i][r] *= r < 2 ? even_unit : odd_unit;
    }
    state.bits = bits;
}
