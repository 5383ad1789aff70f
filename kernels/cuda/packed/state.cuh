// What a warp keeps while it attends quads: four pages of one rung, 64 slots, are taken at once.
//
// A lane has the scores and probabilities of slots 2 g and 2 g + 1 of the four pages of a quad for LANE_ROWS
// query rows, from LANE_ROWS u on: of slot 2 g + i % 2 of page i / 2 at [i].
#pragma once

#include "packed/call.cuh"
#include "pages/profiles.cuh"
#include "pages/codes.cuh"

constexpr int TILES_D = HEAD_DIM / 16, ROW_FLOATS = HEAD_DIM + 2;
// Eight rows in shared memory become fragments of two tiles each, sums and units (packed/int8_query.cuh).
constexpr int TWOS_D = (TILES_D + 1) / 2, FRAGMENT_FLOATS = 256 * TWOS_D;
constexpr int ROWS_FLOATS = FRAGMENT_FLOATS + (IN_BLOCKS ? 48 : 32);
constexpr int LANE_ROWS = INT8_MMA == 1 ? 1 : 2;
constexpr int HADAMARD_BLOCK = HEAD_DIM & -HEAD_DIM;
constexpr float MIN_ROW_MAX = -1e30f;
#define INFINITY_F __int_as_float(0x7f800000)

__host__ __device__ constexpr float inverse_root(int power_of_4_or_half) {
    float r = 1.f;
    for (; power_of_4_or_half >= 4; power_of_4_or_half /= 4) r *= .5f;
    return power_of_4_or_half == 2 ? r * .70710678118654752f : r;
}
constexpr float NORM = inverse_root(HADAMARD_BLOCK);

// Sums over tokens of p v, in the unit and basis of the quad that came last: of codes of `bits`, which lack
// `zero_point_sum`; of raw values at 16; of rotated values, divided by 2 to their exponent, at 0. p =
// 2^(score - row_max), where row_max is the running maximum less p_exponent: 2^p_exponent brings p times the
// largest scale near the top of float16.
struct State {
    float out[TILES_D][2 * LANE_ROWS];    // channels g, g + 8 of a tile x rows of the lane
    float zero_point_sum[2 * LANE_ROWS];  // of rows of the lane, again in the second half
    float row_max[LANE_ROWS], sum[LANE_ROWS];
    float max_excess;  // of scores over row_max: p_exponent + SLACK; -infinite before the first quad
    u32 scale_limit;   // the largest scale for which p_exponent is right, as a pair of float16
    u32 seen;  // bit j: row j of the lane has met a token; with a window only, else all rows meet the same
    int bits;
};

constexpr float SLACK = 8.f;           // by how much scores may exceed the running maximum
constexpr u32 NO_SCALE = 0xbc00bc00u;  // below every scale, so the next coded quad sets p_exponent

__device__ __forceinline__ void clear(State& state, int bits) {
#pragma unroll
    for (int r = 0; r < 2 * LANE_ROWS; ++r) {
        state.zero_point_sum[r] = state.row_max[r / 2] = state.sum[r / 2] = 0.f;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) state.out[i][r] = 0.f;
    }
    state.max_excess = -INFINITY_F;
    state.scale_limit = NO_SCALE;
    state.seen = 0;
    state.bits = bits;
}

// Whether row j of the lane has not met a token.
__device__ __forceinline__ bool has_no_token(const State& state, int j) {
    return WINDOW ? !(state.seen >> j & 1) : state.max_excess == -INFINITY_F;
}

__device__ __forceinline__ float exp2_exact(int x) {
    return __int_as_float((127 + x) << 23);
}

// x times 2^e for -254 < e < 255.
__device__ __forceinline__ float times_exp2(float x, int e) {
    return x * exp2_exact(e >> 1) * exp2_exact(e - (e >> 1));
}
