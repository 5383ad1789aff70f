// Sixteen rotated keys in blocks into codes of a profile, a warp, bit for bit as kvlab/reference/blocks.py.
// Threads and data are those of pages/vectors.cuh; tiles of a block stand side by side.
//
// An element is a number times the gain of its block, both of 11 bits, so one product of float16 rounds it to
// a whole number, as in pages/encode_tile.cuh. Only where the factor of a block is subnormal in float16, and
// would lose bits, products are made in float32: for a key whose largest elements are in a block of much
// smaller numbers. The profile is known when this is compiled: a block may be one tile, so that branches
// would take longer than what is between them.
#pragma once

#include "pages/encode_tile.cuh"

template <u32 PROFILE>
__host__ __device__ constexpr bool has_width(int width) {
    for (int b = 0; b < KEY_BLOCKS; ++b)
        if (width_of_block(PROFILE, b) == width) return true;
    return false;
}

// What numbers of rows g and g + 8 are multiplied by, block by block.
using Factors = float[KEY_BLOCKS][2];

// Numbers of the float of both rows.
struct Rows2 {
    float of[2];

    __device__ __forceinline__ Rows2(float mine, u32 lane) {
        const Two<u32> both = of_both(__float_as_uint(mine), lane);
        of[0] = __uint_as_float(both.low), of[1] = __uint_as_float(both.high);
    }
};

// The largest numbers of blocks B and B + 1 of this lane's row.
template <int B>
__device__ __forceinline__ float2 largest_of_blocks(const Vectors& x, u32 lane) {
    u32 most[2][2] = {};  // of blocks, of rows
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                most[b][i % 2] = pair_larger(most[b][i % 2], pair_size(x[BLOCK_TILES * (B + b) + t][i]));
    u32 rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        rows[i] = pair_larger(__byte_perm(most[0][i], most[1][i], 0x5410),
                              __byte_perm(most[0][i], most[1][i], 0x7632));
    const bool odd = lane & 1;
    u32 both = pair_larger(odd ? rows[1] : rows[0], __shfl_xor_sync(ALL_LANES, odd ? rows[0] : rows[1], 1));
    both = pair_larger(both, __shfl_xor_sync(ALL_LANES, both, 2));
    return {half_bits_to_float(both & 0xffffu), half_bits_to_float(both >> 16)};
}

// A pair of numbers times a factor, rounded to float16 once.
__device__ __forceinline__ u32 exact_product(u32 pair, float factor) {
    return pack_halves(half_bits_to_float(pair & 0xffffu) * factor, half_bits_to_float(pair >> 16) * factor);
}

// f(tile, row, factor) of the tiles of all blocks that have codes.
template <u32 PROFILE, class F>
__device__ __forceinline__ void for_each_tile_of(const Factors& factors, F f) {
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!width_of_block(PROFILE, b)) continue;
#pragma unroll
            for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t) f(t, i, factors[b][i]);
        }
}

// Whether a factor would lose bits as float16, in any lane; none is below this one of the lane's row.
__device__ __forceinline__ bool loses_bits(float least) {
    return __any_sync(ALL_LANES, least < power_of_two(-14) && least > 0.f);
}

// Sizes of elements, whole numbers of 8 bits: four a word, of rows g and g + 8. A profile has few words.
template <u32 PROFILE>
struct Sizes {
    u32 words[TILES][2];
    u32 all[2];  // of this lane and both rows: sums in blocks of 2 bits, weighted

    __device__ __forceinline__ Sizes(const Vectors& x, const Factors& factors, bool exact) {
        const auto add = [&](int t, int i, u32 low, u32 high) {
            words[t][i] = __byte_perm(low, high, 0x6420);
        };
        if (exact)
            for_each_tile_of<PROFILE>(factors, [&](int t, int i, float factor) {
                add(t, i, exact_product(x[t][i], factor), exact_product(x[t][i + 2], factor));
            });
        else
            for_each_tile_of<PROFILE>(factors, [&](int t, int i, float factor) {
                const u32 by = pack_halves(factor, factor);
                add(t, i, pair_product(x[t][i], by), pair_product(x[t][i + 2], by));
            });
#pragma unroll
        for (int i = 0; i < 2; ++i)
            all[i] = weighted<2>(i, 0, [](u32 word, u32 sum) { return __dp4a(word, 0x01010101u, sum); });
    }

    // The sum of f(word, sum) of a row in blocks of a width, which count by their weights.
    template <int WIDTH, class F>
    __device__ __forceinline__ u32 weighted(int row, u32 sum, F f) const {
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) {
            if (b == 1) sum *= weight_of_block(0) / weight_of_block(1);
            if (b == 2) sum *= weight_of_block(1) / weight_of_block(2);
            if (width_of_block(PROFILE, b) != WIDTH) continue;
#pragma unroll
            for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t) sum = f(words[t][row], sum);
        }
        return sum;
    }

    // What this lane adds to the errors of both rows, given their steps of 2 and of 4 bits in bytes 2 `pair`
    // and 2 `pair` + 1. Distances to the grid are what is left of sizes when they are folded at the middles
    // of what is left of the grid (pages/encode_tile.cuh), squared. The folds of 2 bits, of size a and step
    // s, come to a^2 - 4 s a - 2 s |a - 2 s| + 5 s^2, of which a^2 is the same for all steps.
    __device__ __forceinline__ void add_up(const Two<u32>& steps, int pair, u32 (&sums)[2]) const {
        constexpr u32 TWOS = 5 * 4 * BLOCK_TILES *
                             ((width_of_block(PROFILE, 0) == 2) * weight_of_block(0) +
                              (width_of_block(PROFILE, 1) == 2) * weight_of_block(1) +
                              (width_of_block(PROFILE, 2) == 2) * weight_of_block(2) +
                              (width_of_block(PROFILE, 3) == 2) * weight_of_block(3));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 of_row = i ? steps.high : steps.low;
            sums[i] = 0;
            if (has_width<PROFILE>(4)) {
                const u32 s = byte_of(of_row, 2 * pair + 1);
                sums[i] = weighted<4>(i, 0, [&](u32 word, u32 sum) {
#pragma unroll
                    for (int k = 3; k >= 0; --k) word = distances(word, s << k);
                    return __dp4a(word, word, sum);
                });
            }
            if (has_width<PROFILE>(2)) {
                const u32 four = byte_of(of_row, 2 * pair), s = four & 255, middle = four << 1;
                const u32 apart =
                    weighted<2>(i, 0, [&](u32 word, u32 sum) { return add_distances(word, middle, sum); });
                sums[i] += s * (TWOS * s - 4 * all[i] - 2 * apart);
            }
        }
    }
};

// Steps of two bytes as `Sizes::add_up` takes them, rounded down to whole units.
__device__ __forceinline__ u32 steps_of(u32 low, u32 high, float in_units) {
    const float as_half = in_units * power_of_two(-24), first = step_value(low) * as_half,
                second = step_value(high) * as_half;
    const auto whole = [&](float times, u32 most) {
        u32 r;
        asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second * times), "f"(first * times));
        return __vminu2(r, most * 0x10001u);
    };
    return whole(32.f, 127) | whole(12.f, 31) << 8;
}

// Finds the byte of the step of this lane's row. STORED: rows may come from codes.
template <u32 PROFILE, bool STORED>
__device__ __forceinline__ u32 search_step(const Sizes<PROFILE>& sizes, const float (&counted)[KEY_BLOCKS],
                                           int unit, bool decoded, u32 lane) {
    const u32 guess = guess_of_blocks(counted, PROFILE, STORED && decoded, unit), below = below_guess(guess);
    const float in_units = power_of_two(-unit);
    Two<u32> steps = of_both(steps_of(below, below + 1, in_units), lane);
    u32 first[2], second[2];
    sizes.add_up(steps, 0, first), sizes.add_up(steps, 1, second);
    const int error = (int)sums_of_row(first, second, lane) +
                      error_beyond<PROFILE>(counted, below + (lane >> 1 & 1), in_units),
              other = __shfl_xor_sync(ALL_LANES, error, 2);
    const bool up = lane & 2 ? error < other : other < error;
    u32 best = below + up;
    if (HEAD_DIM < 128 || (STORED && __any_sync(ALL_LANES, decoded))) {
        const u32 beyond = up ? below + 2 : below - 1;
        steps = of_both(steps_of(beyond, beyond, in_units), lane);
        sizes.add_up(steps, 0, first);
        const int third =
            (int)sum_of_row(first[0], first[1], lane) + error_beyond<PROFILE>(counted, beyond, in_units);
        if (third < min(error, other) && (HEAD_DIM < 128 || decoded)) best = beyond;
    }
    return guess >= LEAST_GUESS ? best : 0u;
}

// Codes of numbers in units of a row's half cells; keys may lie beyond the grid of 8 bits.
template <int WIDTH>
__device__ __forceinline__ u32 code_of(const Grid<WIDTH>& grid, u32 y) {
    if constexpr (WIDTH == 8)
        return __vimin_s16x2_relu(grid.codes(y), 0x00ff00ffu);
    else
        return grid.code(y);
}

template <int WIDTH>
__device__ __forceinline__ Grid<WIDTH> grid_of(float reciprocal) {
    if constexpr (WIDTH == 8) {
        return Grid<8>::of(.5f * reciprocal);
    } else {
        const float up = Grid<WIDTH>::of_unit(reciprocal);
        return Grid<WIDTH>::of(pack_halves(up, up));
    }
}

// Makes the numbers of the blocks of a width codes of the steps of both rows; `exact`: they have been
// multiplied by their factors.
template <u32 PROFILE, int WIDTH>
__device__ __forceinline__ void to_codes(Vectors& x, const Factors& factors, const float (&values)[2],
                                         bool exact) {
    if constexpr (has_width<PROFILE>(WIDTH)) {
        Grid<WIDTH> grid[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float half_cell = values[i] * (float)factor_of_width(WIDTH);
            const int unit = exponent_of(half_cell) - 3 - code_parts(WIDTH);
            grid[i] = grid_of<WIDTH>(reciprocal_of(half_cell * power_of_two(-24 - unit)));
        }
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) {
            if (width_of_block(PROFILE, b) != WIDTH) continue;
            const u32 by[2] = {exact ? twice(0x3c00u) : pack_halves(factors[b][0], factors[b][0]),
                               exact ? twice(0x3c00u) : pack_halves(factors[b][1], factors[b][1])};
#pragma unroll
            for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[t][i] = code_of<WIDTH>(grid[i % 2], pair_product(x[t][i], by[i % 2]));
        }
    }
}

// Makes keys in blocks codes of a profile; returns the byte of the step of this lane's row.
template <u32 PROFILE, bool STORED>
__device__ __forceinline__ u32 encode_keys(Vectors& x, const Loaded& loaded, const Frame& frame, u32 lane) {
    constexpr bool SEARCHED = has_width<PROFILE>(2) || has_width<PROFILE>(4);
    const float4 of_frame = *(const float4*)frame.gain;
    const float gains[KEY_BLOCKS] = {of_frame.x, of_frame.y, of_frame.z, of_frame.w};
    // A row that comes from codes has no gains, and a factor with a sign here.
    const bool decoded = STORED && loaded.decoded;
    const auto gain = [&](int b) { return decoded ? 1.f : gains[b]; };
    const auto fill = [&](Factors& factors, const Rows2& rows, int b, float up_low, float up_high) {
        const float up[2] = {up_low, up_high};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float by = rows.of[i] * up[i];
            factors[b][i] = fminf(STORED && by < 0.f ? -by : gains[b] * by, 8192.f);  // zeros may have any
        }
    };
    float counted[KEY_BLOCKS], largest = 0.f;
    {
        const float2 first = largest_of_blocks<0>(x, lane);
        const float2 second = PROFILE & 0xff ? largest_of_blocks<2>(x, lane) : float2{0.f, 0.f};
        counted[0] = first.x, counted[1] = first.y, counted[2] = second.x, counted[3] = second.y;
    }
    float least = 8192.f;  // of the gains
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        if (!width_of_block(PROFILE, b)) continue;
        counted[b] *= gain(b);
        largest = fmaxf(largest, counted[b]);
        least = fminf(least, gain(b));
    }
    const float by = (float)(1 << 24) * loaded.factor;
    const bool finite = largest * by < __int_as_float(0x7f800000);
    const Range range = range_of(largest * by, 4);  // that of 4 bits is that of all profiles
    const float sign = decoded ? -1.f : 1.f, down = power_of_two(7 - range.exponent);
    Factors factors;
    u32 byte;
    if constexpr (SEARCHED) {
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) counted[b] *= by * down;
        const float scale = loaded.factor * down;
        const Rows2 scales(sign * scale, lane);
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) fill(factors, scales, b, 1.f, 1.f);
        const Sizes<PROFILE> sizes(x, factors, loses_bits(least * scale));
        byte = search_step<PROFILE, STORED>(sizes, counted, range.unit, decoded, lane);
    } else {
        byte = guess_of(range.counted, 0.f, 0.f, false, range.unit, 8);
    }
    if (!finite || largest == 0.f) byte = 0;
    const float value = step_value(max(byte, 1u)),
                scale = byte ? loaded.factor * down * power_of_two(range.unit) : 0.f;
    const Rows2 scales(sign * scale, lane), values(value, lane);
    float least_factor = 8192.f;
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        const int width = width_of_block(PROFILE, b);
        if (!width) continue;
        const auto up = [&](float value) {  // from units of steps to those of codes
            return power_of_two(3 + code_parts(width) - exponent_of(value * (float)factor_of_width(width)));
        };
        fill(factors, scales, b, up(values.of[0]), up(values.of[1]));
        least_factor = fminf(least_factor, gain(b) * (scale * up(value)));
    }
    const bool exact = loses_bits(least_factor);
    if (exact)
        for_each_tile_of<PROFILE>(factors, [&](int t, int i, float factor) {
            x[t][i] = exact_product(x[t][i], factor), x[t][i + 2] = exact_product(x[t][i + 2], factor);
        });
    to_codes<PROFILE, 2>(x, factors, values.of, exact);
    to_codes<PROFILE, 4>(x, factors, values.of, exact);
    to_codes<PROFILE, 8>(x, factors, values.of, exact);
    return finite ? byte : NAN_STEP;
}
