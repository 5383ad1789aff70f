// Sixteen rotated vectors into codes, a warp, bit for bit as kvlab/reference/pages.py: whole numbers of parts
// of a step, the errors of all steps that are tried, codes. Threads and data are those of cache_vectors.cuh.
// A sum of squares is a diagonal of a matrix times its transpose, exact on tensor cores.
#pragma once

// Sums of squares of the rows: adds those of 16 channels. Of what the products are, the diagonals matter.
struct Squares {
    float low[4] = {}, high[4] = {};

    __device__ __forceinline__ void add(const u32 (&r)[4]) {
        mma_half(low, r, r[0], r[2]);
        mma_half(high, r, r[1], r[3]);
    }
    // In lanes of which u is half of g.
    __device__ __forceinline__ Two<float> sums(int lane) const {
        return lane & 4 ? Two<float>{low[1], high[3]} : Two<float>{low[0], high[2]};
    }
};

// The lane of a row's sums of squares.
__device__ __forceinline__ int lane_of_sums(int lane) {
    return (lane & ~3) + lane / 8;
}

// The largest number of this lane's row.
__device__ __forceinline__ float largest_of(const Vectors& x, int lane) {
    u32 most[2] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) most[i % 2] = pair_larger(most[i % 2], pair_size(x[t][i]));
    u32 both = pair_larger(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
#pragma unroll
    for (int h = 1; h <= 2; h *= 2) both = pair_larger(both, __shfl_xor_sync(ALL_LANES, both, h));
    return half_bits_to_float(lane % 2 ? both >> 16 : both & 0xffffu);
}

// The sum of squares of this lane's row, of numbers times `factor` rounded to whole ones.
__device__ __forceinline__ float squares_of(const Vectors& x, float factor, int lane) {
    const Two<u32> factors = of_both(half_of(factor), lane);
    const u32 by[2] = {twice(factors.low), twice(factors.high)};
    Squares squares;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = pair_product(x[t][i], by[i % 2]);
        squares.add(r);
    }
    const Two<float> sums = squares.sums(lane);
    const float low = __shfl_sync(ALL_LANES, sums.low, lane_of_sums(lane)),
                high = __shfl_sync(ALL_LANES, sums.high, lane_of_sums(lane));
    return (lane % 2 ? high : low) * (float)(1ull << 48);
}

// The lowest step that is tried for each row, 0 for a row of zeros.
struct Tried {
    Two<u32> lowest;

    // Candidate i of a row in parts of the lowest, times 2^-24.
    static __device__ __forceinline__ float step(u32 lowest, int i) {
        const u32 first = max(lowest, 1u);
        return step_value(first + i) * power_of_two(-24 - part_of_step(first));
    }
};

// Makes numbers times `factor` whole numbers of parts of the lowest step that is tried.
__device__ __forceinline__ Tried to_parts(Vectors& x, float factor, int bits, int lane) {
    const float largest = largest_of(x, lane) * (float)(1 << 24) * factor;
    const bool any = largest > 0.f;
    const int exponent = exponent_of(largest), unit = unit_of(exponent, bits);
    const float per_unit = any ? factor * power_of_two(6 - exponent) : 0.f;
    const float squares = bits < 4 ? squares_of(x, per_unit, lane) : 0.f;
    const u32 lowest = any ? lowest_step(largest * power_of_two(6 - exponent), squares, unit, bits) : 0u;
    const float whole = lowest ? factor * power_of_two(unit + 6 - exponent - part_of_step(lowest)) : 0.f;
    const Two<u32> found = of_both(half_of(whole) | lowest << 16, lane);
    const u32 by[2] = {twice(found.low), twice(found.high)};
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[t][i] = pair_product(x[t][i], by[i % 2]);
    return {{found.low >> 16, found.high >> 16}};
}

// The candidate of least error of both rows, from 0 on, the first of equals. The distance of a number to the
// grid is what is left of it when it is folded in the middle of what is left of the grid, time after time.
template <int BITS>
__device__ __forceinline__ Two<u32> best_of(const Vectors& x, const Tried& tried, int lane) {
    Two<float> least;
    u32 best = 0;
#pragma unroll 1
    for (int c = 0; c < candidates_of(BITS); ++c) {
        const float low = Tried::step(tried.lowest.low, c), high = Tried::step(tried.lowest.high, c);
        u32 less[BITS][2];  // 1, 2, 4, ... steps, negative
        less[0][0] = pack_halves(-low, -low), less[0][1] = pack_halves(-high, -high);
#pragma unroll
        for (int k = 1; k < BITS; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) less[k][i] = pair_sum(less[k - 1][i], less[k - 1][i]);
        Squares squares;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                r[i] = x[t][i];
#pragma unroll
                for (int k = BITS - 1; k >= 0; --k) r[i] = pair_sum(pair_size(r[i]), less[k][i % 2]);
            }
            squares.add(r);
        }
        const Two<float> sums = squares.sums(lane);
        if (c == 0 || sums.low < least.low) least.low = sums.low, best = (best & 0xff00u) | c;
        if (c == 0 || sums.high < least.high) least.high = sums.high, best = (best & 0xffu) | c << 8;
    }
    best = __shfl_sync(ALL_LANES, best, lane_of_sums(lane));
    return {best & 255, best >> 8};
}

// The codes of numbers for a candidate, each in the lowest bits of its half; below 8 bits LIFTED is added.
constexpr u32 LIFTED = 0x6600;  // 1536: code n is the float16 1536 + n

template <int BITS>
__device__ __forceinline__ void to_codes(Vectors& x, const Tried& tried, Two<u32> best) {
    float step[2] = {Tried::step(tried.lowest.low, best.low), Tried::step(tried.lowest.high, best.high)};
    if constexpr (BITS == 8) {
        // In float32, where half a number more keeps quotients away from whole numbers.
        constexpr float ORIGIN = 1.5f * (1 << 23), HALF = .5f / (1 << 24);
        float first[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            step[i] = __frcp_rn(2.f * step[i]);
            first[i] = fmaf(HALF, step[i], 127.5f);
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const auto code = [&](u32 half) {
                    return __float_as_uint(fmaf(half_bits_to_float(half), step[i % 2], first[i % 2]) +
                                           ORIGIN);
                };
                // The largest element may lie at the very end of the grid.
                x[t][i] =
                    __vminu2(__byte_perm(code(x[t][i] & 0xffffu), code(x[t][i] >> 16), 0x5410), 0x00ff00ffu);
            }
    } else {
        // (y + 1/2) / cell + 2^(BITS - 1) - 1/2 is cut to 0 ... LAST and rounded to a whole number: half of
        // the unit of y keeps it away from halves (tests/kernels/test_grid_codes.py tries all numbers).
        constexpr u32 LIFT = BITS < 4 ? 0x44004400u : 0;  // 4: factors have to be less than 2^16
        constexpr float LAST = (1 << BITS) - 1;
        constexpr u32 LAST_HALF = BITS == 2 ? 0x4200 : BITS == 3 ? 0x4700 : 0x4b80;
        u32 up[2], first[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float part = __frcp_rn(step[i]) * (.5f / LAST);
            up[i] = twice(half_of(part * (LIFT ? .25f : 1.f)));
            first[i] = twice(half_of(__fadd_rn(((1 << (BITS - 1)) - .5f) / LAST, part * (.5f / (1 << 24)))));
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 y = LIFT ? pair_product(x[t][i], LIFT) : x[t][i];
                x[t][i] = pair_fused(pair_fused_cut(y, up[i % 2], first[i % 2]), LAST_HALF * 0x10001u,
                                     LIFTED * 0x10001u);
            }
    }
}
