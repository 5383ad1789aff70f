// Keys in blocks into scales and codes of a profile, a warp a vector, bit for bit as
// kvlab/reference/blocks.py.
//
// A lane has positions lane + 32 j. Elements are numbers times what their block is multiplied by, in float32,
// where they are exact.
#pragma once

#include "pages/search.cuh"
#include "pages/state.cuh"

constexpr u32 ALL_OF_8 = 0x8888;

// Whether scales are compared, and not only large enough.
__host__ __device__ constexpr bool is_searched(u32 profile) {
    return profile & 0x6666u;
}

// How many warps look for the scale of a key, one for each byte that is tried.
__host__ __device__ constexpr int tries_of_profile(u32 profile) {
    return !is_searched(profile) ? 1 : HEAD_DIM < 128 ? 4 : 2;
}

#if IN_BLOCKS
__device__ __forceinline__ int block_of(int lane, int j) {
    return (lane + 32 * j) / (HEAD_DIM / KEY_BLOCKS);
}

// The channel at each position, and what its block is multiplied by.
struct ChannelOrder {
    u32 channels[PER_LANE];
    float gains[PER_LANE];
};

// What is read is read by all at once, before anything is done with it.
__device__ __forceinline__ ChannelOrder channel_order(const LayerState& s, int bh, int lane) {
    ChannelOrder r;
    u32 rotary_pairs[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        rotary_pairs[j] = s.k_order[(u64)bh * HEAD_DIM / 2 + pair_of_position(lane + 32 * j)];
        r.gains[j] = s.k_gain[KEY_BLOCKS * bh + block_of(lane, j)];
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) r.channels[j] = channel_of_position(rotary_pairs[j], lane + 32 * j);
    return r;
}

// Rotated elements: `of` times `unit`.
struct Elements {
    float of[PER_LANE];
    float unit;
    bool finite;  // so far
};

__device__ __forceinline__ float largest_of_lanes(float x) {
    return __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(x)));
}

__device__ __forceinline__ Elements rotate_in_blocks(const float (&raw)[PER_LANE],
                                                     const float (&mean)[PER_LANE], const ChannelOrder& order,
                                                     u32* scratch, int lane) {
    const auto arrange = [&](u32(&x)[PER_LANE]) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) scratch[lane + 32 * j] = x[j];
        __syncwarp();  // all are there
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = scratch[order.channels[j]];
        __syncwarp();  // all have been read
    };
    const Rotated rotated = rotate_integers<KEY_ROTATION, LOG_KEYS>(raw, mean, 1.f, arrange);
    Elements r;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const u32 pair = rotated.numbers[j / 2];
        r.of[j] = half_bits_to_float(j % 2 ? pair >> 16 : pair & 0xffffu) * order.gains[j];
    }
    r.unit = (float)(1 << 24) * rotated.factor;
    r.finite = rotated.finite;
    return r;
}

__device__ __forceinline__ int width_at(u32 profile, int lane, int j) {
    return profile == ALL_OF_8 ? 8 : width_of_block(profile, block_of(lane, j));
}

// The largest element of each block that has codes, in units.
template <u32 PROFILE>
__device__ __forceinline__ void largest_of_blocks(const Elements& x, float (&largest)[KEY_BLOCKS], int lane) {
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        float most = 0.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (block_of(lane, j) == b) most = fmaxf(most, fabsf(x.of[j]));
        largest[b] = width_of_block(PROFILE, b) ? largest_of_lanes(most) : 0.f;
    }
}

// The error of a scale, as kvlab/reference/blocks.py `search_block_scale` has it.
template <u32 PROFILE>
__device__ __forceinline__ u32 error_of(const Elements& x, float to_sizes, float scale, int lane) {
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int block = block_of(lane, j), width = width_of_block(PROFILE, block);
        const int size = (int)(integer_product(fabsf(x.of[j]), to_sizes) - ZERO);
        u32 error = 0;
        if (width == 2 || width == 4) {
            const int s = (int)fminf(scale * (float)factor_of_width(width), (float)(255 >> (width - 1)));
            int left = size;
            if (width == 4) left = abs(abs(left - 8 * s) - 4 * s);
            left = abs(left - 2 * s) - s;
            error = left * left;
        }
        sum += block == 0 ? 8 * error : block == 1 ? 2 * error : error;
    }
    return __reduce_add_sync(ALL_LANES, sum);
}

// Makes a vector codes and returns the byte of its scale. Warp `rank` tries one byte, and `agree` says which
// of them is the one, given its error; codes are those of that warp.
template <u32 PROFILE, class Agree>
__device__ __forceinline__ u32 encode_key(const Elements& x, int rank, Agree agree, u32 (&codes)[PER_LANE],
                                          int lane) {
    float largest[KEY_BLOCKS], most = 0.f;
    if (PROFILE == ALL_OF_8) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) most = fmaxf(most, fabsf(x.of[j]));
        most = largest_of_lanes(most);
    } else {
        largest_of_blocks<PROFILE>(x, largest, lane);
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) most = fmaxf(most, largest[b]);
    }
    const Range range = range_of(most * x.unit, 4);  // that of 4 bits is that of all profiles
    u32 found, best = 0;
    const bool finite = x.finite && most * x.unit < __int_as_float(0x7f800000);
    bool counts = finite && most > 0.f;
    if constexpr (!is_searched(PROFILE)) {
        found = guess_of(range.counted, 0.f, 0.f, false, range.unit, 8);
        counts &= found > 0;
    } else {
        const float to_sizes = x.unit * power_of_two(7 - range.exponent);
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b) largest[b] *= to_sizes;
        const u32 guess = guess_of_blocks(largest, PROFILE, false, range.unit);
        counts &= guess >= MIN_GUESS;
        const u32 lowest = below_guess(guess) - (HEAD_DIM < 128);
        const float in_units = power_of_two(-range.unit);
        const u32 byte = lowest + rank;
        best = agree(error_of<PROFILE>(x, to_sizes, scale_of_byte(byte) * in_units, lane) +
                     error_beyond<PROFILE>(largest, byte, in_units));
        found = lowest + best;
    }
    if (rank == best) {
        const float value = scale_of_byte(max(found, 1u)),
                    to_scale = counts ? x.unit * power_of_two(range.unit + 7 - range.exponent) : 0.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int width = width_at(PROFILE, lane, j);
            const float half_cell = value * (float)factor_of_width(width);
            const int unit = exponent_of(half_cell) - 3 - code_parts(width);
            const float whole = half_bits_to_float(half_of(x.of[j] * (to_scale * power_of_two(-24 - unit))));
            float per_grid;  // nearly
            asm("rcp.approx.ftz.f32 %0, %1;"
                : "=f"(per_grid)
                : "f"(half_cell * power_of_two(-24 - unit) * (float)(2 << width)));
            // As in pages/search.cuh `to_codes`.
            const float part = __saturatef(fmaf(whole, per_grid, fmaf(per_grid, .5f / (1 << 24), .5f)));
            const u32 cells = 1u << width;
            codes[j] =
                __float_as_uint(__fmaf_rd(part, (float)cells * (1.f - 1.f / 65536), TWO_23)) & (cells - 1);
        }
    }
    return counts ? found : finite ? 0 : NAN_SCALE;
}

// Writes the codes of a key whose blocks have several widths.
template <u32 PROFILE>
__device__ __forceinline__ void write_key(u8* region, int slot, const u32 (&codes)[PER_LANE], int lane) {
    constexpr int EACH = HEAD_DIM / KEY_BLOCKS;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int block = block_of(lane, j);
        const Run run = run_of_block(PROFILE, block);
        u8* const to = region + 128 * run.word;
        const Element element = element_at(KEYS, slot, lane + 32 * j - EACH * run.first);
        KVLAB_FOR_WIDTH(width_of_block(PROFILE, block), write_code<BITS>(to, element, codes[j]));
    }
}
#endif
