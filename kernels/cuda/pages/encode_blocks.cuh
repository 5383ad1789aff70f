// Sixteen rotated keys in blocks into codes of a profile, a warp, bit for bit as kvlab/reference/blocks.py.
// Threads and data are those of pages/vectors.cuh; tiles of a block stand side by side.
//
// An element is a number times the gain of its block, both of 11 bits, so one product of float16 rounds it to
// a whole number, as in pages/encode_tile.cuh. Only where the factor of a block is subnormal in float16, and
// would lose bits, products are made in float32: a key whose largest elements are in a block of much smaller
// numbers.
#pragma once

#include "pages/encode_tile.cuh"

// Factors of the numbers of each block of this lane's row.
struct Factors {
    float of[KEY_BLOCKS];

    // Whether the factor of a block that has codes would lose bits as float16, in any lane.
    __device__ __forceinline__ bool lose_bits(u32 profile) const {
        float least = 1.f;
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b)
            if (width_of_block(profile, b) && of[b] > 0.f) least = fminf(least, of[b]);
        return __any_sync(ALL_LANES, least < power_of_two(-14));
    }
};

// Gains of blocks times a factor. A block of zeros may have any; others have no larger one than this.
__device__ __forceinline__ Factors factors_of(const float (&gains)[KEY_BLOCKS], float factor) {
    Factors r;
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) r.of[b] = fminf(gains[b] * factor, 8192.f);
    return r;
}

// The largest numbers of a block of rows g and g + 8, of this lane's row.
__device__ __forceinline__ float largest_of_block(const Vectors& x, int block, u32 lane) {
    u32 most[2] = {};
#pragma unroll
    for (int t = BLOCK_TILES * block; t < BLOCK_TILES * (block + 1); ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) most[i % 2] = pair_larger(most[i % 2], pair_size(x[t][i]));
    u32 both = pair_larger(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
#pragma unroll
    for (int h = 1; h <= 2; h *= 2) both = pair_larger(both, __shfl_xor_sync(ALL_LANES, both, h));
    return half_bits_to_float(lane % 2 ? both >> 16 : both & 0xffffu);
}

// A pair of numbers times a factor, rounded to float16 once.
__device__ __forceinline__ u32 exact_product(u32 pair, float factor) {
    return pack_halves(half_bits_to_float(pair & 0xffffu) * factor, half_bits_to_float(pair >> 16) * factor);
}

// Factors of both rows, block by block.
template <class F>
__device__ __forceinline__ void for_each_block(const Factors& factors, u32 profile, u32 lane, F f) {
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        if (!width_of_block(profile, b)) continue;
        const Two<u32> rows = of_both(__float_as_uint(factors.of[b]), lane);
        const float of_rows[2] = {__uint_as_float(rows.low), __uint_as_float(rows.high)};
#pragma unroll
        for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) f(t, i, of_rows[i]);
    }
}

// Sizes of elements, whole numbers of 8 bits, of the blocks that have codes: four a word, of rows g and g
// + 8.
struct Sizes {
    u32 words[TILES][2];

    __device__ __forceinline__ Sizes(const Vectors& x, const Factors& factors, u32 profile, u32 lane) {
        const auto add = [&](int t, int i, u32 low, u32 high) {
            words[t][i] = __byte_perm(low, high, 0x6420);
        };
        if (factors.lose_bits(profile))
            for_each_block(factors, profile, lane, [&](int t, int i, float factor) {
                add(t, i, exact_product(x[t][i], factor), exact_product(x[t][i + 2], factor));
            });
        else
            for_each_block(factors, profile, lane, [&](int t, int i, float factor) {
                const u32 by = pack_halves(factor, factor);
                add(t, i, pair_product(x[t][i], by), pair_product(x[t][i + 2], by));
            });
    }
};

// The error of a step of this lane's row, less what all steps have in common: see
// kvlab/reference/blocks.py `search_block_step`. Distances to the grid of 4 bits are what is left of sizes
// when they are folded at the middles of what is left of the grid (pages/encode_tile.cuh), squared. The last
// two folds of 2 bits, of size a and step s, come to a^2 - 4 s a - 2 s |a - 2 s| + 5 s^2, so sums of folded
// sizes do; and what is beyond 8 bits is half of a sum of distances and one of sizes less that many grids.
__device__ __forceinline__ int error_of(const Sizes& sizes, u32 profile, float step, u32 lane) {
    constexpr int EACH = 4 * BLOCK_TILES;  // elements of a block, row and lane
    const u32 mine = (u32)fminf(step * 32.f, 127.f) | (u32)fminf(step * 12.f, 31.f) << 8 |
                     (u32)fminf(step * 256.f, 255.f) << 16;
    const Two<u32> both = of_both(mine, lane);
    u32 error[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 steps = i ? both.high : both.low;
        u32 sum = 0;
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) {
            sum *= b == 1 ? 4 : b == 2 ? 2 : 1;  // blocks count 8, 2, 1, 1
            const int width = width_of_block(profile, b);
            if (!width) continue;
            if (width == 4) {
                const u32 s = byte_of(steps, 1);
#pragma unroll
                for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t) {
                    u32 left = sizes.words[t][i];
#pragma unroll
                    for (int k = 3; k >= 0; --k) left = distances(left, s << k);
                    sum = __dp4a(left, left, sum);
                }
                continue;
            }
            const u32 s = steps & 255, reach = steps >> 16;
            const u32 middle = width == 2 ? byte_of(steps, 0) << 1 : byte_of(steps, 2);
            u32 all = 0, apart = 0;
#pragma unroll
            for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t) {
                all = __dp4a(sizes.words[t][i], 0x01010101u, all);
                apart = add_distances(sizes.words[t][i], middle, apart);
            }
            sum += width == 2 ? s * (5 * EACH * s - 4 * all - 2 * apart) : 8 * (apart + all - EACH * reach);
        }
        error[i] = sum;
    }
    return (int)sum_of_row(error[0], error[1], lane);
}

// Finds the byte of the step of this lane's row.
__device__ __forceinline__ u32 search_step(const Vectors& x, u32 profile, const float (&gains)[KEY_BLOCKS],
                                           const float (&counted)[KEY_BLOCKS], float factor,
                                           const Range& range, bool decoded, u32 lane) {
    if (!(profile & 0x6666u)) return guess_of(range.counted, 0.f, 0.f, false, range.unit, 8);
    const Sizes sizes(x, factors_of(gains, factor * power_of_two(7 - range.exponent)), profile, lane);
    const u32 guess = guess_of_blocks(counted, profile, decoded, range.unit), below = below_guess(guess);
    const bool walks = HEAD_DIM < 128 || decoded;
    const int tries = __any_sync(ALL_LANES, walks) ? 3 : 2;
    u32 byte = below, best = below;
    int least = 0x7fffffff;
#pragma unroll 1
    for (int i = 0; i < tries; ++i) {
        const int error = error_of(sizes, profile, step_value(byte) * power_of_two(-range.unit), lane);
        const bool better = error < least && (i < 2 || walks);
        if (better) least = error, best = byte;
        byte = better ? byte + 1 : below - 1;
    }
    return guess >= LEAST_GUESS ? best : 0u;
}

// Makes the numbers of a block codes for the step of this lane's row.
template <int BLOCK>
__device__ __forceinline__ void to_codes(Vectors& x, int width, float factor, float half_cell, u32 lane) {
    constexpr int FIRST = BLOCK_TILES * BLOCK;
    const float reciprocal = reciprocal_of(half_cell);
    if (width == 8)
        to_many_codes<FIRST, BLOCK_TILES>(x, factor, reciprocal, lane);
    else
        to_few_codes<FIRST, BLOCK_TILES>(x, factor, reciprocal, width, lane);
}

// Makes keys in blocks codes of a profile; returns the byte of the step of this lane's row.
__device__ __forceinline__ u32 encode_keys(u32 profile, Vectors& x, const Loaded& loaded, const Frame& frame,
                                           u32 lane) {
    float gains[KEY_BLOCKS], counted[KEY_BLOCKS], largest = 0.f, largest_coded = 0.f;
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        gains[b] = loaded.decoded ? 1.f : frame.gain[b];
        counted[b] = largest_of_block(x, b, lane) * gains[b];
        largest = fmaxf(largest, counted[b]);
        if (width_of_block(profile, b)) largest_coded = fmaxf(largest_coded, counted[b]);
    }
    const float by = (float)(1 << 24) * loaded.factor;
    const bool finite = largest * by < __int_as_float(0x7f800000);
    const Range range = range_of(largest_coded * by, 4);  // that of 4 bits is that of all profiles
    const float to_unit = by * power_of_two(7 - range.exponent);
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) counted[b] *= to_unit;
    u32 byte = search_step(x, profile, gains, counted, loaded.factor, range, loaded.decoded, lane);
    if (!finite || largest_coded == 0.f) byte = 0;
    const float value = step_value(max(byte, 1u)),
                factor = byte ? loaded.factor * power_of_two(range.unit + 7 - range.exponent) : 0.f;
    Factors factors;
    float half_cells[KEY_BLOCKS];
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        const int width = width_of_block(profile, b);
        const float half_cell = value * (float)factor_of_width(width);
        const int unit = exponent_of(half_cell) - 3 - code_parts(width);
        factors.of[b] = fminf(gains[b] * (factor * power_of_two(-unit)), 8192.f);
        half_cells[b] = half_cell * power_of_two(-24 - unit);
    }
    if (factors.lose_bits(profile)) {
        for_each_block(factors, profile, lane, [&](int t, int i, float factor) {
            x[t][i] = exact_product(x[t][i], factor), x[t][i + 2] = exact_product(x[t][i + 2], factor);
        });
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) factors.of[b] = 1.f;
    }
    if (width_of_block(profile, 0))
        to_codes<0>(x, width_of_block(profile, 0), factors.of[0], half_cells[0], lane);
    if (width_of_block(profile, 1))
        to_codes<1>(x, width_of_block(profile, 1), factors.of[1], half_cells[1], lane);
    if (width_of_block(profile, 2))
        to_codes<2>(x, width_of_block(profile, 2), factors.of[2], half_cells[2], lane);
    if (width_of_block(profile, 3))
        to_codes<3>(x, width_of_block(profile, 3), factors.of[3], half_cells[3], lane);
    return finite ? byte : NAN_STEP;
}
