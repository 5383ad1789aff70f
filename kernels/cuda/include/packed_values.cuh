// Softmax over the scores of a page, and the sum of its values.
//
// Probabilities lie as scores do: see packed_scores.cuh. Needs packed_state.cuh.
#pragma once

// Raises the state's reference, and all that is relative to it, where a score of a page would exceed its
// reach. `steps` of the values, if they are coded. What raw values of float16 are multiplied by must have no
// lift.
template <bool STEPS>
__device__ __forceinline__ void raise_reference(float (&s)[4][4], const Steps& steps, State& state) {
    float top[2] = {s[0][0], s[0][1]};
#pragma unroll
    for (int i = 1; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) top[j] = fmaxf(top[j], s[i / 2][2 * (i % 2) + j]);
    }
    u32 largest = 0;
    bool lift_changes = !STEPS && !BF16 && (WIDTHS_V & CODED) && state.limit != NO_LIMIT;
    if (STEPS) {
        const __half2* pairs = (const __half2*)steps.pairs;
        const __half2 pair = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
        largest = *(const u32*)&pair;
        lift_changes = !__hble2(pair, *(const __half2*)&state.limit);
    }
    const bool live = top[0] > -INFINITE || top[1] > -INFINITE;
    bool raise = top[0] > state.reach || top[1] > state.reach || (live && lift_changes);
    if (WINDOW) {
#pragma unroll
        for (int j = 0; j < 2; ++j) raise = raise || (is_fresh(state, j) && top[j] > -INFINITE);
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
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
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
            for (int i = 0; i < 8; ++i) s[i / 2][2 * (i % 2) + j] -= rise;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            state.centre[r] *= factor[r % 2];
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) state.out[i][r] *= factor[r % 2];
        }
    }
}

// Scores less the state's reference become probabilities, and the state's sums follow.
__device__ __forceinline__ void probabilities(float (&s)[4][4], State& state) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float& p = s[i / 4][i % 4];
        p = power_of_2(p);
        state.sum[i % 2] += p;
    }
}

// Probabilities, times the steps of coded values, as B fragments: of float16 for those, else of the cache's
// type.
template <bool STEPS>
__device__ __forceinline__ void fragments_of(const float (&s)[4][4], const Steps& steps, u32 (&p)[4][2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float p0 = s[i / 2][2 * (i % 2)], p1 = s[i / 2][2 * (i % 2) + 1];
        p[i / 2][i % 2] =
            transposed(STEPS ? pack_halves(p0 * steps.at(i), p1 * steps.at(i)) : pack_pair(p0, p1));
    }
}

// Values of codes, but for the unit of `state.out`.
template <int BITS>
__device__ __forceinline__ void add_coded_values(const u8* codes, const u32 (&p)[4][2], State& state,
                                                 int lane) {
    constexpr int PER_BLOCK = 4 / Fields<BITS>::TILES;  // groups of tiles in a block of channels
    constexpr u32 LEFT = centre_pair<BITS>(), RIGHT = LEFT + Fields<BITS>::RIGHT * 0x04000400u;
    const u32 centre[4] = {LEFT, LEFT, RIGHT, RIGHT};
    u32 right[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        right[b] = lowered<Fields<BITS>::RIGHT>(p[b][1]);
        mma_half(state.centre, centre, p[b][0], right[b]);
    }
    for_each_tile<BITS, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return i % TILES_D * PER_BLOCK + i / TILES_D; },
        [&](int tile, const u32(&a)[4]) {
            mma_half(state.out[tile / 4], a, p[tile % 4][0], right[tile % 4]);
        });
}

// Half of the channels of raw values. Elements of unused slots may be NaN and are cleared.
template <int HALF>
__device__ __forceinline__ void add_raw_values(const u8* values, const u32 (&p)[4][2], int count,
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
            mma(state.out[tile / 4], live, p[tile % 4][0], p[tile % 4][1]);
        });
}
