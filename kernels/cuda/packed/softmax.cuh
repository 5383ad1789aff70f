// Softmax over the scores of a page: of slots 8 g + i and rows of the lane at s[i]. Needs packed/state.cuh.
#pragma once

// Caps scores and takes `base` off them.
__device__ __forceinline__ void cap_scores(float cap, const float (&base)[LANE_ROWS],
                                           float (&s)[8][LANE_ROWS]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) s[i][j] = cap * tanhf(s[i][j] / cap) - base[j];
    }
}

__device__ __forceinline__ void clear_unused(int count, float (&s)[8][LANE_ROWS], int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) s[i][j] = 8 * (lane / 4) + i < count ? s[i][j] : -INFINITE;
    }
}

// Raises the state's reference, and all that is relative to it, where a score of a page would exceed its
// reach. `steps` of the values, if they are coded. What raw values of float16 are multiplied by must have no
// lift.
template <bool STEPS>
__device__ __forceinline__ void raise_reference(float (&s)[8][LANE_ROWS], const Steps& steps, State& state) {
    float top[LANE_ROWS];
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        top[j] = s[0][j];
#pragma unroll
        for (int i = 1; i < 8; ++i) top[j] = fmaxf(top[j], s[i][j]);
    }
    u32 largest = 0;
    bool lift_changes = !STEPS && !BF16 && (WIDTHS_V & CODED) && state.limit != NO_LIMIT;
    if (STEPS) {
        const __half2* pairs = (const __half2*)steps.pairs;
        const __half2 pair = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
        largest = *(const u32*)&pair;
        lift_changes = !__hble2(pair, *(const __half2*)&state.limit);
    }
    bool raise = false;
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const bool live = top[j] > -INFINITE;
        raise =
            raise || top[j] > state.reach || (live && lift_changes) || (WINDOW && live && is_fresh(state, j));
    }
    if (__any_sync(ALL_LANES, raise)) {
        const bool empty = state.reach == -INFINITE;
        const float lift_before = empty ? 0.f : state.reach - SLACK;
        if (empty) state.reach = SLACK;
        if (__any_sync(ALL_LANES, lift_changes)) {
            state.reach = SLACK;
            state.limit = NO_LIMIT;
            if (STEPS) {  // steps below 2^(exponent - 13) times p up to 2^(lift + 8) stay below 2^15
                const u32 exponent =
                    __reduce_max_sync(ALL_LANES, max(largest & 0xffffu, largest >> 16)) >> 10;
                state.reach += 20.f - exponent;
                state.limit = min(exponent * 0x400u + 0x7ffu, 0x7c00u) * 0x00010001u;
            }
        }
        float factor[LANE_ROWS];
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) {
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2)
                top[j] = fmaxf(top[j], __shfl_xor_sync(ALL_LANES, top[j], bit));
            const bool fresh = WINDOW ? is_fresh(state, j) : empty;
            if (!fresh) top[j] = fmaxf(top[j], lift_before);
            const bool waits = WINDOW && fresh && !(top[j] > -INFINITE);  // all of the page is hidden
            if (WINDOW && !waits) state.seen |= 1u << j;
            const float rise = waits ? 0.f : top[j] - (state.reach - SLACK);
            state.reference[j] += rise;
            factor[j] = fresh ? 0.f : power_of_2(-rise);
            state.sum[j] *= factor[j];
#pragma unroll
            for (int i = 0; i < 8; ++i) s[i][j] -= rise;
        }
#pragma unroll
        for (int r = 0; r < 2 * LANE_ROWS; ++r) {
            state.centre[r] *= factor[r % LANE_ROWS];
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) state.out[i][r] *= factor[r % LANE_ROWS];
        }
    }
}

// Scores less the state's reference become probabilities, and the state's sums follow.
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
