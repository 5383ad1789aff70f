// Vectors into slots of pages and back, LANES lanes a vector; of every LANES RUN elements a lane has RUN in a
// row.
//
// The codes are those of kvlab/reference/pages.py bit for bit. So every operation is rounded on its own, sums
// go by halves, and nothing may be contracted: hence the intrinsics. A code is the floor of a quotient; here
// it is that of a product with a reciprocal that is rounded up for positive numbers and lies one float32
// lower for negative ones: a step has 4 significant bits and a code 8, so no float32 number lies between a
// multiple of a cell and where the product meets the integer (tests/kernels/test_grid_codes.py tries all).
// The floor itself is an addition of 2^23, rounded down.
//
// All lanes of a warp call what is here together. Needs HEAD_DIM, BF16, packed_codes.cuh, LANES and RUN,
// powers of 2 up to 32 and 2.
#pragma once

constexpr int PER_LANE = (HEAD_DIM + LANES - 1) / LANES;
constexpr int SUM_WIDTH = (HEAD_DIM > 128 ? 256 : HEAD_DIM > 64 ? 128 : 64) / LANES;
constexpr int ROTATION_BLOCK = HEAD_DIM & -HEAD_DIM, CANDIDATES = 5;
constexpr u32 HIGHEST_STEP = 0xf7, NAN_STEP = 0xff;
constexpr float TWO_23 = 8388608.f, LARGEST = 3.402823466e38f;

__host__ __device__ constexpr float rotation_factor(int block) {
    return block >= 4 ? .5f * rotation_factor(block / 4) : block == 2 ? .70710678118654752f : 1.f;
}

__device__ __forceinline__ float half_cell(int bits) {
    return bits == 2 ? .4978f : bits == 3 ? .2930f : bits == 4 ? .1676f : .0135f;
}

__device__ __forceinline__ float step_value(u32 byte) {
    return half_bits_to_float(byte << 7);
}

// Element j of a lane.
__device__ __forceinline__ int element_of(int lane, int j) {
    return j / RUN * (RUN * LANES) + lane * RUN + j % RUN;
}

__device__ __forceinline__ bool is_there(int lane, int j) {
    return HEAD_DIM % (LANES * RUN) == 0 || element_of(lane, j) < HEAD_DIM;
}

// The orthonormal block Hadamard transform, its own inverse up to rounding.
__device__ __forceinline__ void rotate(float (&x)[PER_LANE], int lane) {
#pragma unroll
    for (int h = 1; h < ROTATION_BLOCK; h *= 2) {
        const bool across = h >= RUN && h < RUN * LANES;  // partners are in two lanes
        const float sign = lane & h / RUN ? -1.f : 1.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int to = h < RUN ? h : h / LANES;
            if (across) x[j] = fmaf(x[j], sign, __shfl_xor_sync(ALL_LANES, x[j], h / RUN));
            if (across || j & to) continue;
            const float a = x[j], b = x[j + to];
            x[j] = __fadd_rn(a, b);
            x[j + to] = __fsub_rn(a, b);
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = __fmul_rn(x[j], rotation_factor(ROTATION_BLOCK));
}

// The sum of term(J), term(J + STRIDE), ... of a lane by halves; what is beyond PER_LANE counts as 0.
template <int J, int STRIDE, class Term>
__device__ __forceinline__ float sum_of_lane(const Term& term) {
    if constexpr (STRIDE >= SUM_WIDTH) {
        return term(J);
    } else if constexpr (J + STRIDE >= PER_LANE) {
        return sum_of_lane<J, 2 * STRIDE>(term);
    } else {
        const float first = sum_of_lane<J, 2 * STRIDE>(term);
        return __fadd_rn(first, sum_of_lane<J + STRIDE, 2 * STRIDE>(term));
    }
}

// The sum of all elements, none negative, in the order of reference.pages.tree_sum; every lane gets it.
template <class Term>
__device__ __forceinline__ float tree_sum(const Term& term) {
    float sums[RUN];
    sums[0] = sum_of_lane<0, RUN>(term);
    if (RUN > 1) sums[RUN - 1] = sum_of_lane<RUN - 1, RUN>(term);
#pragma unroll
    for (int h = LANES / 2; h > 0; h /= 2)
#pragma unroll
        for (int i = 0; i < RUN; ++i) sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(ALL_LANES, sums[i], h));
    return RUN > 1 ? __fadd_rn(sums[0], sums[RUN - 1]) : sums[0];
}
static_assert(RUN <= 2, "as tree_sum");

// How numbers become codes of a step.
struct Grid {
    float cell, up;  // 2 steps; 1 / cell rounded up
    float middle;    // 2^(bits - 1)
};

__device__ __forceinline__ Grid grid_of(u32 byte, int bits) {
    Grid g;
    g.cell = 2.f * step_value(byte);
    const float nearest = __frcp_rn(g.cell), rest = fmaf(-g.cell, nearest, 1.f);
    g.up = rest > 0.f ? __uint_as_float(__float_as_uint(nearest) + 1) : nearest;
    g.middle = 1 << (bits - 1);
    return g;
}

// The lowest byte is the code.
__device__ __forceinline__ u32 grid_code(float x, const Grid& g) {
    constexpr float ORIGIN = 1.5f * TWO_23;
    const int sign = (int)__float_as_uint(x) >> 31;  // -1 for negative numbers
    const float code = __fmaf_rd(x, __uint_as_float(__float_as_uint(g.up) + sign), ORIGIN + g.middle);
    return __float_as_uint(fminf(fmaxf(code, ORIGIN), ORIGIN + (2.f * g.middle - 1.f)));
}

__device__ __forceinline__ float grid_value(u32 code, float step, int bits) {
    return __fmul_rn(fmaf(2.f, (float)code, 1.f - (1 << bits)), step);
}

// How far an element is from the middle of its cell. The grid is symmetric, so magnitudes do.
__device__ __forceinline__ float grid_distance(float x, const Grid& g) {
    const float size = fabsf(x), last = TWO_23 + (g.middle - 1.f);
    const float cells = fminf(__fmaf_rd(size, g.up, TWO_23), last);
    return fmaf(-__fsub_rn(cells, TWO_23 - .5f), g.cell, size);
}

// The squared error of a vector for a step.
__device__ __forceinline__ float grid_error(const float (&x)[PER_LANE], const Grid& g, int lane) {
    return tree_sum([&](int j) {
        const float d = grid_distance(x[j], g);
        return is_there(lane, j) ? __fmul_rn(d, d) : 0.f;
    });
}

// Which steps are tried for a rotated vector whose elements beyond HEAD_DIM are 0: `nearest` - 2 to + 2
// within bounds, unless `known` is the answer.
struct StepRange {
    int nearest, known;

    __device__ __forceinline__ u32 candidate(int i) const {
        return min(max(nearest - CANDIDATES / 2 + i, 1), (int)HIGHEST_STEP);
    }
};

__device__ __forceinline__ StepRange steps_near(const float (&x)[PER_LANE], int bits, int lane) {
    const float sum = tree_sum([&](int j) { return __fmul_rn(x[j], x[j]); });
    constexpr bool IS_POWER = (HEAD_DIM & (HEAD_DIM - 1)) == 0;
    const float mean = IS_POWER ? __fmul_rn(sum, 1.f / HEAD_DIM) : __fdiv_rn(sum, (float)HEAD_DIM);
    const float root = __fsqrt_rn(mean);
    const u32 guess = __half_as_ushort(__float2half_rn(__fmul_rn(root, half_cell(bits))));
    StepRange range = {(int)min(max((guess + 63 + (guess >> 7 & 1)) >> 7, 1u), HIGHEST_STEP), -1};
    if (root == 0.f) range.known = 0;
    if (__any_sync(ALL_LANES, !(sum <= LARGEST))) {  // an element is not finite, or the sum alone
        bool finite = true;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) finite = finite && fabsf(x[j]) <= LARGEST;
        int all = finite;
#pragma unroll
        for (int h = LANES / 2; h > 0; h /= 2) all &= __shfl_xor_sync(ALL_LANES, all, h);
        if (!all) range.known = NAN_STEP;
    }
    return range;
}

__device__ __forceinline__ float raw_value(u32 bits) {
#if BF16
    return __uint_as_float(bits << 16);
#else
    return half_bits_to_float(bits);
#endif
}
