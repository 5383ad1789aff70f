// One page against the query rows of a sequence: scores of its keys, softmax, sum of its values.
//
// Scores and probabilities of a page lie as in C of mma.m16n8k16: slot 8 g + i, rows 2u and 2u + 1, at
// s[i / 2][2 (i % 2)] and the element after it. Needs HEAD_DIM and the headers packed_codes.cuh,
// packed_join.cuh.
#pragma once

// With one width of coded keys the factor of columns 8 to 15 is in the query, else it is put there for each
// page.
constexpr bool ONE_KEY_WIDTH = ((WIDTHS_K & CODED) & ((WIDTHS_K & CODED) - 1)) == 0;
constexpr int RIGHT_OF_KEYS = (WIDTHS_K & CODED) == 1 ? Fields<2>::RIGHT : 0;

struct Query {
    u32 rotated[TILES_D][2];  // B fragments of float16: the rows times 2^e
    float sum[2], bias[2];    // of rows 2u, 2u + 1: the sum of the above, the part of the mean key in a score
    float unit;               // 2^(25 - e)
};

// Takes the rows, each with its largest magnitude and its bias behind it. All are scaled by one power of 2,
// which brings the largest near the top of float16. Rows beyond the last repeat it; their results go nowhere.
__device__ __forceinline__ void load_query(const float* rows, int row_count, int lane, Query& query) {
    const int u = lane % 4;
    const float peak = rows[min(lane / 4, row_count - 1) * ROW_FLOATS + HEAD_DIM];
    const int exponent =
        __reduce_max_sync(ALL_LANES, __float_as_uint(peak)) >> 23;  // peak < 2^(exponent - 126)
    const int e = max(min(141 - exponent, 100), -100);
    const float factor = power_of_2_exactly(e);
    const float2* x = (const float2*)(rows + min(lane / 4, row_count - 1) * ROW_FLOATS) + u;
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 pair = x[8 * i + 4 * j];
            query.rotated[i][j] = pack_halves(pair.x * factor, pair.y * factor);
        }
        mma_half(sums, ones, query.rotated[i][0], query.rotated[i][1]);
        if (ONE_KEY_WIDTH) query.rotated[i][1] = lowered<RIGHT_OF_KEYS>(query.rotated[i][1]);
    }
    query.unit = power_of_2_exactly(25 - e);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        query.sum[j] = sums[j];
        query.bias[j] = rows[min(2 * u + j, row_count - 1) * ROW_FLOATS + HEAD_DIM + 1];
    }
}

// Scores of coded keys, less `base`: slot 8 g + i of rows 2u, 2u + 1 at s[i / 2][2 (i % 2)] and the one after
// it.
template <int BITS>
__device__ __forceinline__ void coded_scores(const u8* codes, const u8* steps, const Query& query,
                                             const float (&base)[2], float (&s)[4][4], int lane) {
    constexpr float MIDDLE = -((1 << BITS) - 1) * .5f / (1 << 24);
    constexpr float EVEN = 1 << Fields<BITS>::EVEN, ODD = 1 << Fields<BITS>::ODD;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int r = 0; r < 4; ++r) s[b][r] = query.sum[r % 2] * (MIDDLE * (r < 2 ? EVEN : ODD));
    }
    u32 right[TILES_D];
#pragma unroll
    for (int i = 0; i < TILES_D; ++i)
        right[i] = ONE_KEY_WIDTH ? query.rotated[i][1] : lowered<Fields<BITS>::RIGHT>(query.rotated[i][1]);
    constexpr int PER_BLOCK = TILES_D % Fields<BITS>::TILES ? 0 : TILES_D / Fields<BITS>::TILES;
    for_each_tile<BITS, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return PER_BLOCK ? i % 4 * PER_BLOCK + i / 4 : i; },
        [&](int tile, const u32(&a)[4]) {
            mma_half(s[tile / TILES_D], a, query.rotated[tile % TILES_D][0], right[tile % TILES_D]);
        });
    const Steps step = load_steps(steps, lane / 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float factor = step.at(i) * (query.unit * (1.f / (i % 2 ? ODD : EVEN)));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float& score = s[i / 2][2 * (i % 2) + j];
            score = fmaf(score, factor, query.bias[j] - base[j]);
        }
    }
}

// Scores of token blocks 2 HALF and 2 HALF + 1 of raw keys, less `base`; q comes from the first-level cache.
template <int HALF>
__device__ __forceinline__ void raw_scores(const u8* keys, const u16* row, float unit, const float (&base)[2],
                                           float (&s)[4][4], int lane) {
#pragma unroll
    for (int b = 2 * HALF; b < 2 * HALF + 2; ++b) s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
    for_each_tile<16, 2 * HALF * TILES_D, 2 * TILES_D>(
        keys, lane, [](int i) { return i % 2 * TILES_D + i / 2; },
        [&](int tile, const u32(&a)[4]) {
            const int at = 8 * (tile % TILES_D) + lane % 4;
            mma(s[tile / TILES_D], a, __ldg((const u32*)row + at), __ldg((const u32*)row + at + 4));
        });
#pragma unroll
    for (int b = 2 * HALF; b < 2 * HALF + 2; ++b) {
#pragma unroll
        for (int r = 0; r < 4; ++r) s[b][r] = fmaf(s[b][r], unit, -base[r % 2]);
    }
}

// Softmax: scores less the state's reference become probabilities, and the state's sums follow.
// `steps` of the values, if they are coded. What raw values of float16 are multiplied by must have no lift.
template <bool STEPS>
__device__ __forceinline__ void probabilities(float (&s)[4][4], const Steps& steps, State& state) {
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
    if (__any_sync(ALL_LANES, top[0] > state.reach || top[1] > state.reach || (live && lift_changes))) {
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
            if (!empty) top[j] = fmaxf(top[j], lift_before);
            const float rise = top[j] - (state.reach - SLACK);
            state.reference[j] += rise;
            factor[j] = empty ? 0.f : power_of_2(-rise);
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

// Caps scores and takes `base` off them.
__device__ __forceinline__ void cap_scores(float cap, const float (&base)[2], float (&s)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = cap * tanhf(s[i / 4][i % 4] / cap) - base[i % 2];
}

__device__ __forceinline__ void clear_unused(int count, float (&s)[4][4], int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (8 * (lane / 4) + i >= count) s[i / 2][2 * (i % 2)] = s[i / 2][2 * (i % 2) + 1] = -INFINITE;
    }
}
