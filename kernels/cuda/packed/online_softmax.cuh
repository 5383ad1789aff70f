// Softmax over the scores of a quad.
#pragma once

#include "packed/quad_ring.cuh"
#include "packed/state.cuh"

// Caps scores and takes `base` off them.
__device__ __forceinline__ void cap_scores(float cap, const float (&base)[LANE_ROWS],
                                           float (&s)[8][LANE_ROWS]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) s[i][j] = cap * tanhf(s[i][j] / cap) - base[j];
    }
}

// Hides the slots of the lane that hold no token.
__device__ __forceinline__ void mask_unused(const PageWords& words, float (&s)[8][LANE_ROWS], int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j)
            s[i][j] = lane / 4 * 2 + i % 2 < tokens_of(words.of[i / 2]) ? s[i][j] : -INFINITY_F;
    }
}

// Updates row_max, and rescales all that is relative to it, where a score of a quad exceeds it by more than
// max_excess. `scales` are those of the values, if they are coded. What raw values of float16 are multiplied
// by must have a p_exponent of 0.
template <bool HAS_SCALES>
__device__ __forceinline__ void update_row_max(float (&s)[8][LANE_ROWS], const Scales& scales, State& state) {
    float top[LANE_ROWS];
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        top[j] = s[0][j];
#pragma unroll
        for (int i = 1; i < 8; ++i) top[j] = fmaxf(top[j], s[i][j]);
    }
    u32 largest = 0;
    bool exponent_changes = !HAS_SCALES && !BF16 && (WIDTHS_V & CODED) && state.scale_limit != NO_SCALE;
    if (HAS_SCALES) {
        const __half2* x = (const __half2*)scales.half2s;
        const __half2 pair = __hmax2(__hmax2(x[0], x[1]), __hmax2(x[2], x[3]));
        largest = *(const u32*)&pair;
        exponent_changes = !__hble2(pair, *(const __half2*)&state.scale_limit);
    }
    bool raise = false;
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const bool live = top[j] > -INFINITY_F;
        raise = raise || top[j] > state.max_excess || (live && exponent_changes) ||
                (WINDOW && live && has_no_token(state, j));
    }
    if (__any_sync(ALL_LANES, raise)) {
        const bool empty = state.max_excess == -INFINITY_F;
        const float exponent_before = empty ? 0.f : state.max_excess - SLACK;
        if (empty) state.max_excess = SLACK;
        if (__any_sync(ALL_LANES, exponent_changes)) {
            state.max_excess = SLACK;
            state.scale_limit = NO_SCALE;
            if (HAS_SCALES) {  // scales below 2^(exponent - 13) times p up to 2^(p_exponent + 8) stay below
                               // 2^15
                const u32 exponent =
                    __reduce_max_sync(ALL_LANES, max(largest & 0xffffu, largest >> 16)) >> 10;
                state.max_excess += 20.f - exponent;
                state.scale_limit = min(exponent * 0x400u + 0x7ffu, 0x7c00u) * 0x00010001u;
            }
        }
        float factor[LANE_ROWS];
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) {
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2)
                top[j] = fmaxf(top[j], __shfl_xor_sync(ALL_LANES, top[j], bit));
            const bool empty_row = WINDOW ? has_no_token(state, j) : empty;
            if (!empty_row) top[j] = fmaxf(top[j], exponent_before);
            const bool waits = WINDOW && empty_row && !(top[j] > -INFINITY_F);  // all of the quad is hidden
            if (WINDOW && !waits) state.seen |= 1u << j;
            const float rise = waits ? 0.f : top[j] - (state.max_excess - SLACK);
            state.row_max[j] += rise;
            factor[j] = empty_row ? 0.f : power_of_2(-rise);
            state.sum[j] *= factor[j];
#pragma unroll
            for (int i = 0; i < 8; ++i) s[i][j] -= rise;
        }
#pragma unroll
        for (int r = 0; r < 2 * LANE_ROWS; ++r) {
            state.zero_point_sum[r] *= factor[r % LANE_ROWS];
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) state.out[i][r] *= factor[r % LANE_ROWS];
        }
    }
}

// Scores relative to row_max become probabilities, and the sums of the state follow.
__device__ __forceinline__ void probabilities(float (&s)[8][LANE_ROWS], State& state) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) {
            s[i][j] = power_of_2(s[i][j]);
            state.sum[j] += s[i][j];
        }
    }
}
