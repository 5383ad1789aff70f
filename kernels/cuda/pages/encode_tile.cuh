// Sixteen rotated vectors into codes, a warp, bit for bit as kvlab/reference/pages.py: magnitudes and errors
// of scales in bytes, then codes, in float16 below 8 bits. Threads and data are those of pages/vectors.cuh.
#pragma once

#include "pages/vectors.cuh"

// Sums over the lanes of a row, of this lane's row; `low` and `high` are what a lane has of rows g and g + 8.
__device__ __forceinline__ u32 sum_of_row(u32 low, u32 high, u32 lane) {
    const bool odd = lane & 1;
    const u32 sum = (odd ? high : low) + __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 2);
}

// The same of two sums: lanes u = 0 and 1 have the first, lanes 2 and 3 the second.
__device__ __forceinline__ u32 sums_of_row(const u32 (&first)[2], const u32 (&second)[2], u32 lane) {
    const bool odd = lane & 1, upper = lane & 2;
    u32 mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        mine[i] =
            (upper ? second[i] : first[i]) + __shfl_xor_sync(ALL_LANES, upper ? first[i] : second[i], 2);
    return (odd ? mine[1] : mine[0]) + __shfl_xor_sync(ALL_LANES, odd ? mine[0] : mine[1], 1);
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

// Magnitudes of 16 vectors on the channels that are compared, four to a word: those of rows g and g + 8 of a
// tile.
using Magnitudes = u32[COMPARED][2];

// Magnitudes of numbers times factors, of float16 in both halves.
__device__ __forceinline__ void to_magnitudes(const Vectors& x, Two<u32> factors, Magnitudes& magnitudes) {
    const u32 by[2] = {factors.low, factors.high};
#pragma unroll
    for (int t = 0; t < COMPARED; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            magnitudes[t][i] =
                __byte_perm(pair_product(x[t][i], by[i]), pair_product(x[t][i + 2], by[i]), 0x6420);
}

// What this lane adds to the errors of a scale of rows g and g + 8, given four times a word. A distance to
// the grid is what is left of a size when it is folded in the middle of what is left of the grid, BITS times:
// four an instruction. A square of the last, (a - s)^2, is one of the fold before, a, and a itself; so are
// those before it. At 2 and 3 bits sums of folded magnitudes are all there is to add up, the last at once.
template <int BITS>
__device__ __forceinline__ void add_up(const Magnitudes& magnitudes, const u32 (&scale)[2], u32 (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 outer = 0, inner = 0;
#pragma unroll
        for (int t = 0; t < COMPARED; ++t) {
            u32 left = magnitudes[t][i];
            if constexpr (BITS == 4) {
#pragma unroll
                for (int k = BITS - 1; k >= 0; --k) left = distances(left, scale[i] << k);
                inner = __dp4a(left, left, inner);
            } else {
                if constexpr (BITS == 3) {
                    outer = add_distances(left, scale[i] << 2, outer);
                    left = distances(left, scale[i] << 2);
                }
                inner = add_distances(left, scale[i] << 1, inner);
            }
        }
        sums[i] = 2 * outer + inner;
    }
}

// The squared error of a scale of this lane's row, less the sum of squares of magnitudes below 4 bits, where
// `all` is the sum of magnitudes.
template <int BITS>
__device__ __forceinline__ int error_of(u32 sum, int scale, int all) {
    if constexpr (BITS == 4) return (int)sum;
    constexpr int OF_SQUARES = ((1 << 2 * BITS) - 1) / 3 * 16 * COMPARED;  // squares of 1, 2, 4 ... scales
    return scale * (OF_SQUARES * scale - (all << BITS) - 2 * (int)sum);
}

// Four times the i-th of the bytes of a word.
__device__ __forceinline__ u32 byte_of(u32 word, int i) {
    return __byte_perm(word, 0, 0x1111 * i);
}

// The better of the two bytes next to a guess, or below 4 bits the next one on its side.
template <int BITS>
__device__ __forceinline__ u32 best_byte(const Magnitudes& magnitudes, u32 below, int unit, int all,
                                         u32 lane) {
    constexpr bool WALKS = BITS < 4;
    const u32 middle = integer_scales(below, unit, BITS);
    u32 mine = __byte_perm(middle, 0, 0x4420);  // scales, a byte each
    if (WALKS) {
        const u32 low = integer_scales(below - 1, unit, BITS), high = integer_scales(below + 2, unit, BITS);
        mine |= low << 16 | high << 24;
    }
    const Two<u32> scales = of_both(mine);
    const auto add = [&](int low, int high, u32(&sums)[2]) {
        const u32 scale[2] = {byte_of(scales.low, low), byte_of(scales.high, high)};
        add_up<BITS>(magnitudes, scale, sums);
    };
    u32 first[2], second[2];
    add(0, 0, first), add(1, 1, second);
    const int error = error_of<BITS>(sums_of_row(first, second, lane), mine >> (lane & 2 ? 8 : 0) & 255, all);
    const int other = __shfl_xor_sync(ALL_LANES, error, 2);
    const bool up = lane & 2 ? error < other : other < error;
    if constexpr (WALKS) {
        const u32 ups = __ballot_sync(ALL_LANES, up) >> (lane & ~3u);
        add(2 + (ups & 1), 2 + (ups >> 1 & 1), first);
        const int beyond =
            error_of<BITS>(sum_of_row(first[0], first[1], lane), mine >> (up ? 24 : 16) & 255, all);
        if (beyond < min(error, other)) return up ? below + 2 : below - 1;
    }
    return below + up;
}

// Finds the byte of the scale of this lane's row, of numbers times `factor`, or 0. What it finds for zeros on
// the way means nothing. STORED: some rows may come from codes, as `decoded` says.
template <int BITS, bool STORED>
__device__ __forceinline__ u32 search_scale(const Vectors& x, float factor, const Range& range, bool decoded,
                                            u32 lane) {
    if constexpr (BITS == 8) {
        return guess_of(range.counted, 0.f, 0.f, false, range.unit, 8);
    } else {
        Magnitudes magnitudes;
        const float by = factor * power_of_two(7 - range.exponent);
        to_magnitudes(x, of_both(pack_halves(by, by)), magnitudes);
        u32 all = 0, squares = 0;
        if constexpr (BITS < 4) {
            u32 sum[2] = {}, square[2] = {};
#pragma unroll
            for (int t = 0; t < COMPARED; ++t)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sum[i] = __dp4a(magnitudes[t][i], 0x01010101u, sum[i]);
                    square[i] = __dp4a(magnitudes[t][i], magnitudes[t][i], square[i]);
                }
            all = sum_of_row(sum[0], sum[1], lane), squares = sum_of_row(square[0], square[1], lane);
        }
        const u32 guess =
            guess_of(range.counted, (float)all, (float)squares, STORED && decoded, range.unit, BITS);
        if (takes_nearest(BITS) && (!STORED || !__any_sync(ALL_LANES, decoded))) return nearest_byte(guess);
        const u32 best = best_byte<BITS>(magnitudes, below_guess(guess), range.unit, (int)all, lane);
        if (takes_nearest(BITS) && !decoded) return nearest_byte(guess);
        return guess >= MIN_GUESS ? best : 0u;
    }
}

// Codes, each in the lowest bits of its half; below 8 bits LIFTED is added.
constexpr u32 LIFTED = 0x6600;  // 1536: code n is the float16 1536 + n

// Half a code above the lowest one and half a number, as parts of the grid, of a number that is so large a
// part of it.
__device__ __forceinline__ u32 first_of(u32 part) {
    return pair_fused(pair_product(part, 0x0c000c00u), 0x08000800u, 0x38003800u);  // part 2^-12 2^-13 + 1/2
}

// What makes numbers in units of half a cell codes, given the reciprocal of half a cell: a row's.
template <int BITS>
struct Grid {
    // (y + 1/2) / cell + 2^(BITS - 1) - 1/2 is cut to 0 ... LAST and rounded to an integer: half of the unit
    // of y keeps it away from halves (tests/kernels/test_grid_codes.py tries all numbers).
    static constexpr float LAST = (1 << BITS) - 1;
    static constexpr u32 LAST_HALF = BITS == 2 ? 0x4200 : BITS == 3 ? 0x4700 : 0x4b80;
    u32 up, first;

    __device__ __forceinline__ static float of_unit(float reciprocal) { return reciprocal * (.5f / LAST); }
    __device__ __forceinline__ static Grid of(u32 up) { return {up, first_of(up)}; }
    __device__ __forceinline__ u32 code(u32 y) const {
        return pair_fused(pair_fused_cut(y, up, first), LAST_HALF * 0x10001u, LIFTED * 0x10001u);
    }
};

// The same in float32, as pages/search.cuh has it: numbers may lie beyond the grid.
template <>
struct Grid<8> {
    float up, first;

    __device__ __forceinline__ static float of_unit(float reciprocal) { return reciprocal * (1.f / 512); }
    __device__ __forceinline__ static Grid of(float up) { return {up, fmaf(up, .5f / (1 << 24), .5f)}; }
    __device__ __forceinline__ u32 code_of(u32 half) const {  // in the lowest bits, and 0 above in 16
        const float part = __saturatef(fmaf(half_bits_to_float(half), up, first));
        return __float_as_uint(__fmaf_rd(part, 256 * (1.f - 1.f / 65536), (float)(1 << 23)));
    }
    __device__ __forceinline__ u32 code(u32 y) const {
        return __byte_perm(code_of(y & 0xffffu), code_of(y >> 16), 0x5410);
    }
};

// The reciprocal, nearly.
__device__ __forceinline__ float reciprocal_of(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Makes numbers times `factor` codes for the scale of this lane's row.
template <int BITS>
__device__ __forceinline__ void to_codes(Vectors& x, float factor, const Range& range, u32 byte) {
    const float value = scale_of_byte(max(byte, 1u));
    const int unit = exponent_of(value) - 3 - code_parts(BITS);
    factor *= power_of_two(range.unit + 7 - range.exponent - unit);
    if (BITS == 8 && LOG_BLOCK % 2) {
        // The factor would be subnormal and lose bits. Numbers lose them instead, less than 1/40 of a
        // unit.
        const int down = min(max(-17 - exponent_of(factor), 0), 14);
        if (__any_sync(ALL_LANES, down > 0)) {
            const Two<u32> downs = of_both(half_of(power_of_two(-down)));
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[t][i] = pair_product(x[t][i], twice(i % 2 ? downs.high : downs.low));
            factor *= power_of_two(down);
        }
    }
    if (byte == 0) factor = 0.f;
    const float reciprocal = reciprocal_of(value * power_of_two(-24 - unit));
    if constexpr (BITS == 8) {
        const Two<u32> factors = of_both(pack_halves(factor, factor)),
                       ups = of_both(__float_as_uint(Grid<8>::of_unit(reciprocal)));
        const u32 by[2] = {factors.low, factors.high};
        const Grid<8> grid[2] = {Grid<8>::of(__uint_as_float(ups.low)),
                                 Grid<8>::of(__uint_as_float(ups.high))};
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[t][i] = grid[i % 2].code(pair_product(x[t][i], by[i % 2]));
    } else {
        const Two<u32> rows = of_both(pack_halves(factor, Grid<BITS>::of_unit(reciprocal)));
        const u32 by[2] = {__byte_perm(rows.low, 0, 0x1010), __byte_perm(rows.high, 0, 0x1010)};
        const Grid<BITS> grid[2] = {Grid<BITS>::of(__byte_perm(rows.low, 0, 0x3232)),
                                    Grid<BITS>::of(__byte_perm(rows.high, 0, 0x3232))};
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[t][i] = grid[i % 2].code(pair_product(x[t][i], by[i % 2]));
    }
}

// Makes numbers codes; returns the byte of the scale of this lane's row. STORED: rows may come from codes.
template <int BITS, bool STORED>
__device__ __forceinline__ u32 encode(Vectors& x, const Loaded& loaded, u32 lane) {
    const Range range = range_of(largest_of(x, lane) * (float)(1 << 24) * loaded.factor, BITS);
    const u32 byte = search_scale<BITS, STORED>(x, loaded.factor, range, loaded.decoded, lane);
    to_codes<BITS>(x, loaded.factor, range, byte);
    return byte;
}
