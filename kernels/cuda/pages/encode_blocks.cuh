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

// What numbers of rows g and g + 8 are multiplied by, block by block, but for powers of 2: float16 in both
// halves, its exponent modulo 64.
struct Mantissas {
    u32 gains[KEY_BLOCKS];
    Two<u32> scales;  // in place of gains, in rows that come from codes; else 0

    __device__ __forceinline__ static Mantissas ones() {
        constexpr u32 ONE = 0x3c003c00u;
        return {{ONE, ONE, ONE, ONE}, {0u, 0u}};
    }

    // That of a block and a row, raised by a power of 2 (`raised_by`); zeros may have any, up to `most`.
    template <bool STORED>
    __device__ __forceinline__ u32 raised(int block, int row, u32 by, u32 most) const {
        const u32 scale = row ? scales.high : scales.low;
        return __viaddmin_u16x2(STORED && scale ? scale : gains[block], by, most);
    }
};
constexpr u32 MAX_RAISED = 0x7000;  // 8192: no number has more

// An exponent as a byte, and such a byte of a word as what a pair of float16 is raised by.
__device__ __forceinline__ u32 exponent_byte(int exponent) {
    return exponent << 2 & 255;
}
__device__ __forceinline__ u32 raised_by(u32 word, int byte) {
    return __byte_perm(word, 0, 0x0404 | byte << 4 | byte << 12);
}

// Numbers of the float of both rows.
struct Rows2 {
    float of[2];

    __device__ __forceinline__ Rows2(float mine) {
        const Two<u32> both = of_both(__float_as_uint(mine));
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
__device__ __forceinline__ u32 pair_times(u32 pair, u32 factors) {
    return pair_product(pair, factors);
}
__device__ __forceinline__ u32 pair_times(u32 pair, float factor) {
    return pack_halves(half_bits_to_float(pair & 0xffffu) * factor, half_bits_to_float(pair >> 16) * factor);
}

// f(tile, row, block) of the tiles of all blocks that have codes.
template <u32 PROFILE, class F>
__device__ __forceinline__ void for_each_tile_of(F f) {
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!width_of_block(PROFILE, b)) continue;
#pragma unroll
            for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t) f(t, i, b);
        }
}

// Whether a factor would lose bits as float16, in any lane; none of the lane's row has a lower exponent.
__device__ __forceinline__ bool loses_bits(int least_exponent) {
    return __any_sync(ALL_LANES, least_exponent < -14);
}

// Blocks of one width lie side by side: their tiles, and how many channels count, weighted.
template <u32 PROFILE, int WIDTH>
struct TilesOf {
    __host__ __device__ static constexpr int first() {
        int tile = 0;
        while (tile < TILES && width_of_block(PROFILE, tile / BLOCK_TILES) != WIDTH) ++tile;
        return tile;
    }
    __host__ __device__ static constexpr int end() {
        int tile = first();
        while (tile < TILES && width_of_block(PROFILE, tile / BLOCK_TILES) == WIDTH) ++tile;
        return tile;
    }
    __host__ __device__ static constexpr int channels() {
        int sum = 0;
        for (int t = first(); t < end(); ++t) sum += 16 * weight_of_block(t / BLOCK_TILES);
        return sum;
    }
};

// Adds up bytes of words of rows g and g + 8 over the lanes of a row, times a weight: of row g in sums[0], of
// row g + 8 in sums[2], in all lanes. Tensor cores have nothing else to do.
struct ByteSums {
    u32 sums[4] = {};

    __device__ __forceinline__ void add(const u32 (&words)[2], u32 weight) {
        asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(words[0]), "r"(words[1]), "r"(weight * 0x01010101u));
    }
    __device__ __forceinline__ void add(const u32 (&words)[2], u32 weight, const u32 (&others)[2],
                                        u32 of_others) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 "
            "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(words[0]), "r"(words[1]), "r"(others[0]), "r"(others[1]), "r"(weight * 0x01010101u),
              "r"(of_others * 0x01010101u));
    }
    __device__ __forceinline__ u32 of_row(u32 lane) const { return lane & 1 ? sums[2] : sums[0]; }
};

// Sizes of elements, whole numbers of 8 bits: four a word, of rows g and g + 8.
template <u32 PROFILE>
struct Sizes {
    u32 words[TILES][2];
    int all[2];  // of this lane's row: sums in blocks of 2 and of 4 bits, weighted

    // `factor_of(row, block)`: float16 in both halves, or a float.
    template <class F>
    __device__ __forceinline__ void take(const Vectors& x, F factor_of) {
        for_each_tile_of<PROFILE>([&](int t, int i, int b) {
            const auto by = factor_of(i, b);
            words[t][i] = __byte_perm(pair_times(x[t][i], by), pair_times(x[t][i + 2], by), 0x6420);
        });
    }

    // Adds up the sizes of a width, or with FOLDED what is left of them after every fold, given the scales of
    // both rows four times a word.
    template <int WIDTH, bool FOLDED>
    __device__ __forceinline__ void add_up(ByteSums& sums, u32 low, u32 high) const {
        constexpr int FIRST = TilesOf<PROFILE, WIDTH>::first(), END = TilesOf<PROFILE, WIDTH>::end();
#pragma unroll
        for (int t = FIRST; t < END; t += 2) {
            const bool alone = t + 1 == END;
            const int next = alone ? t : t + 1;
            u32 left[2] = {words[t][0], words[t][1]}, right[2] = {words[next][0], words[next][1]};
#pragma unroll
            for (int k = FOLDED ? WIDTH - 1 : 1; k > 0; --k) {
                if (FOLDED) {
                    left[0] = distances(left[0], low << k), left[1] = distances(left[1], high << k);
                    right[0] = distances(right[0], low << k), right[1] = distances(right[1], high << k);
                }
                const u32 weight = weight_of_block(t / BLOCK_TILES) << (k - 1);
                if (alone)
                    sums.add(left, weight);
                else
                    sums.add(left, weight, right, weight_of_block(next / BLOCK_TILES) << (k - 1));
            }
        }
    }

    __device__ __forceinline__ void sum_up(u32 lane) {
        ByteSums of_2, of_4;
        add_up<2, false>(of_2, 0, 0), add_up<4, false>(of_4, 0, 0);
        all[0] = of_2.of_row(lane), all[1] = of_4.of_row(lane);
    }

    // The error of a scale of this lane's row in blocks of a width, but for the sum of squares of sizes,
    // given words of bytes with the scales of both rows, and of its own: bytes 0 and 1, or with TWO in lanes
    // u = 2 and 3 two further on. Distances to the grid are what is left of sizes when they are folded at the
    // middles of what is left of the grid, and the last square is one of the fold before, and so on
    // (pages/encode_tile.cuh).
    template <int WIDTH, bool TWO>
    __device__ __forceinline__ int error_of(const Two<u32>& scales, u32 mine, u32 lane) const {
        if constexpr (!has_width<PROFILE>(WIDTH)) return 0;
        constexpr int BYTE = WIDTH == 4,
                      OF_SQUARES = ((1 << 2 * WIDTH) - 1) / 3 * TilesOf<PROFILE, WIDTH>::channels();
        ByteSums sums[2];
#pragma unroll
        for (int i = 0; i <= TWO; ++i)
            add_up<WIDTH, true>(sums[i], byte_of(scales.low, BYTE + 2 * i),
                                byte_of(scales.high, BYTE + 2 * i));
        const bool upper = TWO && lane & 2;
        const int scale = mine >> (upper ? 16 + 8 * BYTE : 8 * BYTE) & 255,
                  sum = upper ? sums[1].of_row(lane) : sums[0].of_row(lane);
        return scale * (OF_SQUARES * scale - (all[BYTE] << WIDTH) - 2 * sum);
    }

    // The same in all of them, given the scales of this lane's row.
    template <bool TWO>
    __device__ __forceinline__ int error_of(u32 mine, u32 lane) const {
        const Two<u32> scales = of_both(mine);
        return error_of<2, TWO>(scales, mine, lane) + error_of<4, TWO>(scales, mine, lane);
    }
};

// Scales of two bytes of 2 and of 4 bits, rounded down to whole units: bytes of a word.
__device__ __forceinline__ u32 scales_of_widths(u32 low, u32 high, float in_units) {
    const float as_half = in_units * power_of_two(-24), first = scale_of_byte(low) * as_half,
                second = scale_of_byte(high) * as_half;
    const auto whole = [&](float times, u32 most) {
        u32 r;
        asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second * times), "f"(first * times));
        return __vminu2(r, most * 0x10001u);
    };
    return whole(32.f, 127) | whole(12.f, 31) << 8;
}

// Finds the byte of the scale of this lane's row. STORED: rows may come from codes.
template <u32 PROFILE, bool STORED>
__device__ __forceinline__ u32 search_scale(const Sizes<PROFILE>& sizes, const float (&counted)[KEY_BLOCKS],
                                            int unit, bool decoded, u32 lane) {
    const u32 guess = guess_of_blocks(counted, PROFILE, STORED && decoded, unit), below = below_guess(guess);
    const float in_units = power_of_two(-unit);
    const int error = sizes.template error_of<true>(scales_of_widths(below, below + 1, in_units), lane) +
                      error_beyond<PROFILE>(counted, below + (lane >> 1 & 1), in_units),
              other = __shfl_xor_sync(ALL_LANES, error, 2);
    const bool up = (lane & 2 ? error : other) < (lane & 2 ? other : error);
    u32 best = below + up;
    if (HEAD_DIM < 128 || (STORED && __any_sync(ALL_LANES, decoded))) {
        const u32 beyond = up ? below + 2 : below - 1;
        const int third = sizes.template error_of<false>(scales_of_widths(beyond, beyond, in_units), lane) +
                          error_beyond<PROFILE>(counted, beyond, in_units);
        if (third < min(error, other) && (HEAD_DIM < 128 || decoded)) best = beyond;
    }
    return guess >= MIN_GUESS ? best : 0u;
}

// From units of sizes to those of codes of a width, given the scale: binary orders.
__device__ __forceinline__ int raised_for_codes(int width, float scale, int unit) {
    return unit + 3 + code_parts(width) - exponent_of(scale * (float)factor_of_width(width));
}

// Makes the numbers of the blocks of a width codes for the scale of this lane's row, or those of zeros for
// byte 0. `exponent`: what numbers are multiplied by besides mantissas.
template <u32 PROFILE, int WIDTH, bool STORED>
__device__ __forceinline__ void to_codes(Vectors& x, const Mantissas& mantissas, int exponent, u32 byte) {
    if constexpr (has_width<PROFILE>(WIDTH)) {
        // Half a cell in units of codes: its mantissa, and an exponent that all have.
        const float half_cell = scale_of_byte(max(byte, 1u)) * (float)factor_of_width(WIDTH);
        const float up = Grid<WIDTH>::of_unit(
            reciprocal_of(__uint_as_float((__float_as_uint(half_cell) & 0x7fffffu) |
                                          __float_as_uint(power_of_two(3 + code_parts(WIDTH) - 24)))));
        const u32 word = (byte ? MAX_RAISED << 16 : 0u) | exponent_byte(exponent) << 16;
        Two<u32> words;
        Grid<WIDTH> grid[2];
        if constexpr (WIDTH == 8) {
            words = of_both(word);
            const Rows2 ups(up);
            grid[0] = Grid<8>::of(ups.of[0]), grid[1] = Grid<8>::of(ups.of[1]);
        } else {
            words = of_both(word | half_of(up));
            grid[0] = Grid<WIDTH>::of(twice(words.low)), grid[1] = Grid<WIDTH>::of(twice(words.high));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 of_row = i ? words.high : words.low, most = raised_by(of_row, 3);
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; ++b) {
                if (width_of_block(PROFILE, b) != WIDTH) continue;
                const u32 by = mantissas.raised<STORED>(b, i, raised_by(of_row, 2), most);
#pragma unroll
                for (int t = BLOCK_TILES * b; t < BLOCK_TILES * (b + 1); ++t)
#pragma unroll
                    for (int j = i; j < 4; j += 2) x[t][j] = grid[i].code(pair_product(x[t][j], by));
            }
        }
    }
}

// Makes keys in blocks codes of a profile; returns the byte of the scale of this lane's row.
template <u32 PROFILE, bool STORED>
__device__ __forceinline__ u32 encode_keys(Vectors& x, const Loaded& loaded, const Frame& frame, u32 lane) {
    constexpr bool SEARCHED = has_width<PROFILE>(2) || has_width<PROFILE>(4);
    const float4 of_frame = *(const float4*)frame.gain;
    const float gains[KEY_BLOCKS] = {of_frame.x, of_frame.y, of_frame.z, of_frame.w};
    Mantissas mantissas;
    (uint4&)mantissas.gains = *(const uint4*)frame.mantissas;
    // A row that comes from codes has no gains, but its scale has a mantissa.
    const bool decoded = STORED && loaded.decoded;
    const auto gain = [&](int b) { return decoded ? 1.f : gains[b]; };
    if (STORED) {
        const u32 mine = decoded ? 0x3c00u | (__float_as_uint(loaded.factor) >> 13 & 0x3ffu) : 0u;
        mantissas.scales = of_both(twice(mine));
    }
    float counted[KEY_BLOCKS], largest = 0.f;
    {
        const float2 first = largest_of_blocks<0>(x, lane);
        const float2 second = PROFILE & 0xff ? largest_of_blocks<2>(x, lane) : float2{0.f, 0.f};
        counted[0] = first.x, counted[1] = first.y, counted[2] = second.x, counted[3] = second.y;
    }
    float least = gain(0);
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
    const float down = power_of_two(7 - range.exponent), scale = loaded.factor * down;
    const int exponent = exponent_of(scale);
    // Factors of both rows in float32, this lane's row times a power of 2.
    const auto exact_factors = [&](float times) {
        const Rows2 rows((decoded ? -scale : scale) * times);
        asm volatile("" ::: "memory");  // gains are read again: such keys are rare
        return [rows, &frame](int i, int b) {
            const float by = rows.of[i];
            return fminf(STORED && by < 0.f ? -by : frame.gain[b] * by, 8192.f);
        };
    };
    u32 byte;
    if constexpr (SEARCHED) {
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) counted[b] *= by * down;
        Sizes<PROFILE> sizes;
        if (loses_bits(exponent_of(least) + exponent)) {
            sizes.take(x, exact_factors(1.f));
        } else {
            const Two<u32> words = of_both(exponent_byte(exponent));
            const u32 raised[2] = {raised_by(words.low, 0), raised_by(words.high, 0)};
            sizes.take(x, [&](int i, int b) {
                return mantissas.raised<STORED>(b, i, raised[i], twice(MAX_RAISED));
            });
        }
        sizes.sum_up(lane);
        byte = search_scale<PROFILE, STORED>(sizes, counted, range.unit, decoded, lane);
    } else {
        byte = guess_of(range.counted, 0.f, 0.f, false, range.unit, 8);
    }
    if (!finite || largest == 0.f) byte = 0;
    // What numbers are multiplied by for codes, as powers of 2 by width.
    constexpr int WIDTHS[3] = {2, 4, 8};
    int raised[3], least_raised = 127;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        raised[i] = raised_for_codes(WIDTHS[i], scale_of_byte(max(byte, 1u)), range.unit);
        if (has_width<PROFILE>(WIDTHS[i])) least_raised = min(least_raised, raised[i]);
    }
    const bool exact = loses_bits(exponent_of(least) + exponent + least_raised);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (exact) {
            const auto factor_of = exact_factors(byte ? power_of_two(raised[i]) : 0.f);
            for_each_tile_of<PROFILE>([&](int t, int row, int b) {
                if (width_of_block(PROFILE, b) != WIDTHS[i]) return;
                const float by = factor_of(row, b);
                x[t][row] = pair_times(x[t][row], by), x[t][row + 2] = pair_times(x[t][row + 2], by);
            });
        }
        raised[i] = exact ? 0 : exponent + raised[i];
    }
    if (exact) mantissas = Mantissas::ones();
    to_codes<PROFILE, 2, STORED>(x, mantissas, raised[0], byte);
    to_codes<PROFILE, 4, STORED>(x, mantissas, raised[1], byte);
    to_codes<PROFILE, 8, STORED>(x, mantissas, raised[2], byte);
    return finite ? byte : NAN_SCALE;
}
