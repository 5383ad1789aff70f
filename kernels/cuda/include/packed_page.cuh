// One page against the query rows of a sequence: scores of its keys, softmax, sum of its values.
//
// Scores and probabilities of a page lie as in C of mma.m16n8k16: slot 8 g + i, rows 2u and 2u + 1, at
// s[i / 2][2 (i % 2)] and the element after it. Needs HEAD_DIM and the headers packed_codes.cuh,
// packed_join.cuh.
#pragma once

constexpr float SLACK = BF16 ? 8.f : 0.f;  // how far the running maximum may lag; float16 has no room for it
#define INFINITE __int_as_float(0x7f800000)

struct Query {
    u32 rotated[TILES_D][2];         // B fragments
    float sum0, sum1, bias0, bias1;  // of rows 2u, 2u + 1
};

// Rows beyond the last repeat it; their results go nowhere.
__device__ __forceinline__ void load_query(const float* rows, int row_count, int lane, Query& query) {
    const int u = lane % 4;
    const float2* x = (const float2*)(rows + min(lane / 4, row_count - 1) * ROW_FLOATS) + u;
#pragma unroll
    for (int i = 0; i < 2 * TILES_D; ++i) query.rotated[i / 2][i % 2] = pack_pair(x[4 * i].x, x[4 * i].y);
    const float* row0 = rows + min(2 * u, row_count - 1) * ROW_FLOATS + HEAD_DIM;
    const float* row1 = rows + min(2 * u + 1, row_count - 1) * ROW_FLOATS + HEAD_DIM;
    query.sum0 = row0[0], query.sum1 = row1[0];
    query.bias0 = row0[1], query.bias1 = row1[1];
}

// Scores of coded keys: slot 8 g + i of rows 2u, 2u + 1 at s[i / 2][2 (i % 2)] and the one after it.
template <int BITS>
__device__ __forceinline__ void coded_scores(const u8* codes, const u8* steps, const Query& query,
                                             float (&s)[4][4], int lane) {
    constexpr bool FOLD = BF16 && BITS < 8;  // the magic number of unshifted codes is taken out of the sum
    constexpr float LOW = FOLD ? 128.f + (1 << Fields<BITS>::LOW) * ((1 << BITS) - 1) * .5f : 0.f;
    constexpr float HIGH = FOLD ? 128.f + (1 << Fields<BITS>::HIGH) * ((1 << BITS) - 1) * .5f : 0.f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        s[b][0] = -LOW * query.sum0;
        s[b][1] = -LOW * query.sum1;
        s[b][2] = -HIGH * query.sum0;
        s[b][3] = -HIGH * query.sum1;
    }
    constexpr int PER_BLOCK = TILES_D % Fields<BITS>::TILES ? 0 : TILES_D / Fields<BITS>::TILES;
    for_each_tile<BITS, FOLD, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return PER_BLOCK ? i % 4 * PER_BLOCK + i / 4 : i; },
        [&](int tile, const u32(&a)[4]) {
            mma(s[tile / TILES_D], a, query.rotated[tile % TILES_D][0], query.rotated[tile % TILES_D][1]);
        });
    float step[8];
    load_steps(steps, lane / 4, step);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        constexpr float EVEN = FOLD ? 2.f / (1 << Fields<BITS>::LOW) : 1.f,
                        ODD = FOLD ? 2.f / (1 << Fields<BITS>::HIGH) : 1.f;
        const float factor = step[i] * (i % 2 ? ODD : EVEN);
        s[i / 2][2 * (i % 2)] = fmaf(s[i / 2][2 * (i % 2)], factor, query.bias0);
        s[i / 2][2 * (i % 2) + 1] = fmaf(s[i / 2][2 * (i % 2) + 1], factor, query.bias1);
    }
}

// Scores of token blocks 2 HALF and 2 HALF + 1 of raw keys; q comes from the first-level cache.
template <int HALF>
__device__ __forceinline__ void raw_scores(const u8* keys, const u16* row, float unit, float (&s)[4][4],
                                           int lane) {
#pragma unroll
    for (int b = 2 * HALF; b < 2 * HALF + 2; ++b) s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
    for_each_tile<16, false, 2 * HALF * TILES_D, 2 * TILES_D>(
        keys, lane, [](int i) { return i % 2 * TILES_D + i / 2; },
        [&](int tile, const u32(&a)[4]) {
            const int at = 8 * (tile % TILES_D) + lane % 4;
            mma(s[tile / TILES_D], a, __ldg((const u32*)row + at), __ldg((const u32*)row + at + 4));
        });
#pragma unroll
    for (int b = 2 * HALF; b < 2 * HALF + 2; ++b) {
#pragma unroll
        for (int r = 0; r < 4; ++r) s[b][r] *= unit;
    }
}

// Softmax: scores become probabilities relative to the running maximum, and the state's sums follow.
__device__ __forceinline__ void probabilities(float (&s)[4][4], State& state) {
    float max0 = s[0][0], max1 = s[0][1];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        max0 = fmaxf(max0, s[i / 2][2 * (i % 2)]);
        max1 = fmaxf(max1, s[i / 2][2 * (i % 2) + 1]);
    }
    if (__any_sync(ALL_LANES, max0 > state.max0 + SLACK || max1 > state.max1 + SLACK)) {
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
            max0 = fmaxf(max0, __shfl_xor_sync(ALL_LANES, max0, bit));
            max1 = fmaxf(max1, __shfl_xor_sync(ALL_LANES, max1, bit));
        }
        max0 = fmaxf(max0, state.max0);
        max1 = fmaxf(max1, state.max1);
        const float f0 = power_of_2(state.max0 - max0), f1 = power_of_2(state.max1 - max1);
        state.max0 = max0;
        state.max1 = max1;
        state.sum0 *= f0;
        state.sum1 *= f1;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            state.out[i][0] *= f0;
            state.out[i][1] *= f1;
            state.out[i][2] *= f0;
            state.out[i][3] *= f1;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float &p0 = s[i / 2][2 * (i % 2)], &p1 = s[i / 2][2 * (i % 2) + 1];
        p0 = power_of_2(p0 - state.max0);
        p1 = power_of_2(p1 - state.max1);
        state.sum0 += p0;
        state.sum1 += p1;
    }
}

// Probabilities, times the steps of V if there are any, as B fragments.
template <bool STEPS>
__device__ __forceinline__ void fragments_of(const float (&s)[4][4], const u8* steps, int count,
                                             u32 (&p)[4][2], int lane) {
    float step[8];
    if (STEPS) {
        load_steps(steps, lane / 4, step);
        if (count < 64) {  // a step of an unused slot may be NaN
#pragma unroll
            for (int i = 0; i < 8; ++i) step[i] = 8 * (lane / 4) + i < count ? step[i] : 0.f;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float f = STEPS ? step[i] : 1.f;
        p[i / 2][i % 2] = transposed(pack_pair(s[i / 2][2 * (i % 2)] * f, s[i / 2][2 * (i % 2) + 1] * f));
    }
}

template <int BITS>
__device__ __forceinline__ void add_coded_values(const u8* codes, const u32 (&p)[4][2], State& state,
                                                 int lane) {
    constexpr int PER_BLOCK = 4 / Fields<BITS>::TILES;  // groups of tiles in a block of channels
    for_each_tile<BITS, false, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return i % TILES_D * PER_BLOCK + i / TILES_D; },
        [&](int tile, const u32(&a)[4]) { mma(state.out[tile / 4], a, p[tile % 4][0], p[tile % 4][1]); });
}

// Half of the channels of raw values. Elements of unused slots may be NaN and are cleared.
template <int HALF>
__device__ __forceinline__ void add_raw_values(const u8* values, const u32 (&p)[4][2], int count,
                                               State& state, int lane) {
    for_each_tile<16, false, 2 * HALF * TILES_D, 2 * TILES_D>(
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

__device__ __forceinline__ void cap_scores(float cap, float (&s)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = cap * tanhf(s[i / 4][i % 4] / cap);
}

__device__ __forceinline__ void clear_unused(int count, float (&s)[4][4], int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (8 * (lane / 4) + i >= count) s[i / 2][2 * (i % 2)] = s[i / 2][2 * (i % 2) + 1] = -INFINITE;
    }
}
