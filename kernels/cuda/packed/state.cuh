// What a warp keeps while it attends pages.
//
// A lane has the scores and probabilities of slots 8 g to 8 g + 7 of a page for LANE_ROWS query rows, from
// LANE_ROWS u on. Needs HEAD_DIM, SPLIT, WINDOW and pages/codes.cuh.
#pragma once

constexpr int TILES_D = HEAD_DIM / 16, ROW_FLOATS = HEAD_DIM + 2, MERGE_ROWS = 4;
constexpr int LANE_ROWS = SPLIT == 1 ? 1 : 2;
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
    float out[TILES_D][2 * LANE_ROWS];  // channels g, g + 8 of a tile x rows of the lane
    float centre[2 * LANE_ROWS];        // of rows of the lane, again in the second half
    float reference[LANE_ROWS], sum[LANE_ROWS];
    float reach;  // by how much scores may exceed the reference: the lift + SLACK; -infinite before the first
    u32 limit;    // the largest step for which the lift is right, as a pair of float16
    u32 seen;     // bit j: row j of the lane has met a token; with a window only, else all rows meet the same
    int bits;
};

constexpr float SLACK = 8.f;           // by how much scores may exceed the running maximum
constexpr u32 NO_LIMIT = 0xbc00bc00u;  // below every step, so the next coded page sets a lift

__device__ __forceinline__ void clear(State& state, int bits) {
#pragma unroll
    for (int r = 0; r < 2 * LANE_ROWS; ++r) {
        state.centre[r] = state.reference[r / 2] = state.sum[r / 2] = 0.f;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) state.out[i][r] = 0.f;
    }
    state.reach = -INFINITE;
    state.limit = NO_LIMIT;
    state.seen = 0;
    state.bits = bits;
}

// Whether row j of the lane has not met a token.
__device__ __forceinline__ bool is_fresh(const State& state, int j) {
    return WINDOW ? !(state.seen >> j & 1) : state.reach == -INFINITE;
}

__device__ __forceinline__ float power_of_2_exactly(int x) {
    return __int_as_float((127 + x) << 23);
}
