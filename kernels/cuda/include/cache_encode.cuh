// Sixteen rotated vectors into codes, a warp, bit for bit as kvlab/reference/pages.py: the errors of all
// steps that are tried, in bytes, then codes, in float16 below 8 bits. Threads and data are those of
// cache_vectors.cuh.
#pragma once

// Sums of squares of the bytes of rows g and g + 8, diagonals of a matrix times its transpose.
struct Squares {
    int low[2][2], high[2][2];  // by turns, since each waits for the one before

    __device__ __forceinline__ void add(u32 of_low, u32 of_high, int turn) {
        mma_bytes(low[turn % 2], of_low, of_low, turn < 2);
        mma_bytes(high[turn % 2], of_high, of_high, turn < 2);
    }
    // In lanes of which u is half of g.
    __device__ __forceinline__ Two<u32> sums(u32 lane) const {
        const bool odd = lane & 4;
        return {(u32)((odd ? low[0][1] : low[0][0]) + (odd ? low[1][1] : low[1][0])),
                (u32)((odd ? high[0][1] : high[0][0]) + (odd ? high[1][1] : high[1][0]))};
    }
};

// The lane of a row's sums of squares.
__device__ __forceinline__ u32 lane_of_sums(u32 lane) {
    return (lane & ~3u) + lane / 8;
}

// The largest number of this lane's row.
__device__ __forceinline__ float largest_of(const Vectors& x, u32 lane) {
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

// Sizes of 16 vectors, four to a word: those of rows g and g + 8 of a tile.
using Sizes = u32[TILES][2];

// How many tiles errors are compared on.
template <int BITS>
constexpr int COMPARED = compared_tiles(BITS);

// Sizes of numbers of the first tiles times factors, of float16 in the lower halves.
template <int COUNT>
__device__ __forceinline__ void to_sizes(const Vectors& x, Two<u32> factors, Sizes& sizes) {
    const u32 by[2] = {twice(factors.low), twice(factors.high)};
#pragma unroll
    for (int t = 0; t < COUNT; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            sizes[t][i] = __byte_perm(pair_product(x[t][i], by[i]), pair_product(x[t][i + 2], by[i]), 0x6420);
}

// The sums of squares of distances to the grid, which are what is left of sizes when they are folded in the
// middle of what is left of the grid, BITS times: four an instruction. 0 times: of sizes themselves. Steps
// are four times the same byte.
template <int BITS>
__device__ __forceinline__ Two<u32> squares_of(const Sizes& sizes, u32 low, u32 high, u32 lane) {
    const u32 step[2] = {low, high};
    Squares squares;
#pragma unroll
    for (int t = 0; t < COMPARED<BITS>; ++t) {
        u32 r[2] = {sizes[t][0], sizes[t][1]};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int k = BITS - 1; k >= 0; --k) r[i] = distances(r[i], step[i] << k);
        squares.add(r[0], r[1], t);
    }
    return squares.sums(lane);
}

// Finds the byte of the step of this lane's row, of numbers times `factor`, or 0. What it finds for zeros on
// the way means nothing.
template <int BITS>
__device__ __forceinline__ u32 search_step(const Vectors& x, float factor, const Range& range, u32 lane) {
    if constexpr (BITS == 8) {
        return range.exponent > -50 ? guess_of(range.counted, 0.f, range.unit, 8) : 0u;
    } else {
        constexpr bool WALKS = BITS < 4;
        Sizes sizes;
        to_sizes<COMPARED<BITS>>(x, of_both(half_of(factor * power_of_two(7 - range.exponent)), lane), sizes);
        float squares = 0.f;
        if constexpr (WALKS) {
            const Two<u32> sums = squares_of<0>(sizes, 0, 0, lane);
            const u32 low = __shfl_sync(ALL_LANES, sums.low, lane_of_sums(lane)),
                      high = __shfl_sync(ALL_LANES, sums.high, lane_of_sums(lane));
            squares = (float)max(lane % 2 ? high : low, 1u);
        }
        const u32 guess = guess_of(range.counted, squares, range.unit, BITS);
        const u32 lowest = below_guess(guess) - WALKS;
        const StepsFrom from(lowest);
        u32 mine = 0;  // steps, a byte each
#pragma unroll
        for (int i = 0; i < (WALKS ? 4 : 2); ++i) mine |= size_of_step(from, i, range.unit, BITS) << 8 * i;
        const Two<u32> steps = of_both(mine, lane);
        constexpr u32 FIRST = WALKS ? 0x1111 : 0x0000, SECOND = FIRST + 0x1111;
        const Two<u32> below = squares_of<BITS>(sizes, __byte_perm(steps.low, 0, FIRST),
                                                __byte_perm(steps.high, 0, FIRST), lane);
        const Two<u32> above = squares_of<BITS>(sizes, __byte_perm(steps.low, 0, SECOND),
                                                __byte_perm(steps.high, 0, SECOND), lane);
        // Of rows g and g + 8, in bits 0 and 1.
        u32 up = (above.low < below.low ? 1u : 0u) | (above.high < below.high ? 2u : 0u), beyond = 0;
        const u32 up_of_all = __shfl_sync(ALL_LANES, up, lane_of_sums(lane));
        if constexpr (WALKS) {
            const Two<u32> third =
                squares_of<BITS>(sizes, __byte_perm(steps.low, 0, up_of_all & 1 ? 0x3333 : 0x0000),
                                 __byte_perm(steps.high, 0, up_of_all & 2 ? 0x3333 : 0x0000), lane);
            beyond = (third.low < min(below.low, above.low) ? 1u : 0u) |
                     (third.high < min(below.high, above.high) ? 2u : 0u);
            beyond = __shfl_sync(ALL_LANES, beyond, lane_of_sums(lane));
        }
        const u32 ups = up_of_all >> lane % 2 & 1, on = beyond >> lane % 2 & 1;
        return guess >= LEAST_GUESS ? lowest + WALKS + ups + (ups ? on : 0 - on) : 0u;
    }
}

// Codes, each in the lowest bits of its half; below 8 bits LIFTED is added.
constexpr u32 LIFTED = 0x6600;  // 1536: code n is the float16 1536 + n

// Makes numbers times `factor` codes for the step of this lane's row.
template <int BITS>
__device__ __forceinline__ void to_codes(Vectors& x, float factor, const Range& range, u32 byte, u32 lane) {
    const float value = step_value(max(byte, 1u));
    const int unit = exponent_of(value) - 3 - code_parts(BITS);
    factor *= power_of_two(range.unit + 7 - range.exponent - unit);
    if (BITS == 8 && LOG_BLOCK % 2) {
        // It has more bits than float16 has so far down. Numbers that lose some instead are no 1/40 of a
        // unit.
        const int down = min(max(-17 - exponent_of(factor), 0), 14);
        if (__any_sync(ALL_LANES, down > 0)) {
            const Two<u32> downs = of_both(half_of(power_of_two(-down)), lane);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[t][i] = pair_product(x[t][i], twice(i % 2 ? downs.high : downs.low));
            factor *= power_of_two(down);
        }
    }
    const u32 by_row = byte ? half_of(factor) : 0u;
    float reciprocal;  // nearly
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(value * power_of_two(-24 - unit)));
    if constexpr (BITS == 8) {
        // In float32, where half a number more keeps quotients away from whole numbers.
        constexpr float ORIGIN = 1.5f * (1 << 23), HALF = .5f / (1 << 24);
        const Two<u32> factors = of_both(by_row, lane),
                       ups = of_both(__float_as_uint(.5f * reciprocal), lane);
        const u32 by[2] = {twice(factors.low), twice(factors.high)};
        const float up[2] = {__uint_as_float(ups.low), __uint_as_float(ups.high)};
        const float first[2] = {fmaf(HALF, up[0], 127.5f), fmaf(HALF, up[1], 127.5f)};
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 y = pair_product(x[t][i], by[i % 2]);
                const auto code = [&](u32 half) {
                    return __float_as_uint(fmaf(half_bits_to_float(half), up[i % 2], first[i % 2]) + ORIGIN);
                };
                // The largest element may lie at the very end of the grid.
                x[t][i] = __vminu2(__byte_perm(code(y & 0xffffu), code(y >> 16), 0x5410), 0x00ff00ffu);
            }
    } else {
        // (y + 1/2) / cell + 2^(BITS - 1) - 1/2 is cut to 0 ... LAST and rounded to a whole number: half of
        // the unit of y keeps it away from halves (tests/kernels/test_grid_codes.py tries all numbers).
        constexpr float LAST = (1 << BITS) - 1;
        constexpr u32 LAST_HALF = BITS == 2 ? 0x4200 : BITS == 3 ? 0x4700 : 0x4b80;
        const float part = reciprocal * (.5f / LAST);
        const Two<u32> rows = of_both(by_row | half_of(part) << 16, lane);
        const Two<u32> firsts =
            of_both(half_of(__fadd_rn(((1 << (BITS - 1)) - .5f) / LAST, part * (.5f / (1 << 24)))), lane);
        const u32 by[2] = {__byte_perm(rows.low, 0, 0x1010), __byte_perm(rows.high, 0, 0x1010)},
                  up[2] = {__byte_perm(rows.low, 0, 0x3232), __byte_perm(rows.high, 0, 0x3232)},
                  first[2] = {twice(firsts.low), twice(firsts.high)};
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[t][i] =
                    pair_fused(pair_fused_cut(pair_product(x[t][i], by[i % 2]), up[i % 2], first[i % 2]),
                               LAST_HALF * 0x10001u, LIFTED * 0x10001u);
    }
}

// Makes numbers times `factor` codes; returns the byte of the step of this lane's row.
template <int BITS>
__device__ __forceinline__ u32 encode(Vectors& x, float factor, u32 lane) {
    const Range range = range_of(largest_of(x, lane) * (float)(1 << 24) * factor, BITS);
    const u32 byte = search_step<BITS>(x, factor, range, lane);
    to_codes<BITS>(x, factor, range, byte, lane);
    return byte;
}
