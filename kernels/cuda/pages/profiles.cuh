// Profiles: the widths of the four blocks of a key as one number, 0x8422, the first block uppermost; and
// where the codes of a block lie, those of neighbours of one width, a run, together
// (kvlab/reference/blocks.py `runs_of`).
//
// In ladders with profiles bits_k of a rung is a profile, or 16. The macro PROFILES names those of a ladder,
// each as `k8422`, where kernels are compiled for them; IN_BLOCKS alone says that there are some.
#pragma once

#include "pages/codes.cuh"

#ifndef IN_BLOCKS  // whether the ladder has profiles
#ifdef PROFILES
#define IN_BLOCKS 1
#else
#define IN_BLOCKS 0
#endif
#endif

constexpr int BLOCK_TILES = HEAD_DIM / 64;  // tiles of a block

// Positions of keys in blocks: of two neighbouring parts of HEAD_DIM / 8 positions the first has the channels
// i of rotary pairs, the second their channels i + HEAD_DIM / 2. Where in k_order the pair of a position is,
// and its channel there.
__host__ __device__ constexpr int pair_of_position(int position) {
    return position - HEAD_DIM / 8 * ((position / (HEAD_DIM / 8) + 1) / 2);
}
__host__ __device__ constexpr int channel_of_position(int pair, int position) {
    return pair + (position / (HEAD_DIM / 8) % 2 ? HEAD_DIM / 2 : 0);
}

// The width of a block; 0 behind the last one.
__host__ __device__ constexpr int width_of_block(u32 profile, int block) {
    return profile << 4 * block >> 12 & 15;
}

#ifdef PROFILES
#define KVLAB_TEXT(x) #x
#define KVLAB_NAMES(x) KVLAB_TEXT(x)
constexpr char PROFILE_NAMES[] = KVLAB_NAMES(PROFILES);
constexpr int NUM_PROFILES = sizeof(PROFILE_NAMES) / 5;

// Profile `i` of the ladder.
__host__ __device__ constexpr u32 profile_at(int i) {
    const char* const digits = PROFILE_NAMES + 5 * i;
    return (digits[1] - '0') << 12 | (digits[2] - '0') << 8 | (digits[3] - '0') << 4 | (digits[4] - '0');
}

// f.of<profile>(); the profile is one of the ladder.
template <int I = 0, class F>
__device__ __forceinline__ void with_profile(u32 profile, const F& f) {
    if constexpr (I + 1 == NUM_PROFILES) {
        f.template of<profile_at(I)>();
    } else {
        if (profile == profile_at(I))
            f.template of<profile_at(I)>();
        else
            with_profile<I + 1>(profile, f);
    }
}
#endif

// Half a cell in scales: `FACTORS`.
__host__ __device__ constexpr int factor_of_width(int width) {
    return width == 2 ? 32 : width == 4 ? 12 : width == 8 ? 1 : 0;
}

// What elements of a profile lack where only codes are multiplied: the sum over blocks of what each lacks
// times the block's sum of the query.
template <u32 PROFILE>
__device__ __forceinline__ float zero_point_of(const float4& sums) {
    const auto lacks = [](int block) {
        const int width = width_of_block(PROFILE, block);
        return (float)(-factor_of_width(width) * ((1 << width) - 1));
    };
    return fmaf(lacks(3), sums.w, fmaf(lacks(2), sums.z, fmaf(lacks(1), sums.y, lacks(0) * sums.x)));
}

// The sum of the widths of the blocks before a block; 4: of all. No loop, which compilers may keep.
__host__ __device__ constexpr int widths_before(u32 profile, int block) {
    const u32 digits = profile >> (16 - 4 * block);
    return (digits & 15) + (digits >> 4 & 15) + (digits >> 8 & 15) + (digits >> 12);
}

// Words that a lane has of the keys of a page: no run but the last leaves a tile without another.
__host__ __device__ constexpr int words_of_profile(u32 profile) {
    return profile == 16 ? words_of(16, HEAD_DIM / 16) : words_of(widths_before(profile, 4), BLOCK_TILES);
}

// The first block of the run of a block, and the word where that run begins.
struct Run {
    int first, word;
};

__host__ __device__ constexpr Run run_of_block(u32 profile, int block) {
    int first = block;
    while (first && width_of_block(profile, first - 1) == width_of_block(profile, block)) --first;
    return {first, widths_before(profile, first) * BLOCK_TILES / 4};
}

// The block behind the run of a block.
__host__ __device__ constexpr int end_of_run(u32 profile, int block) {
    int end = block;
    while (end < KEY_BLOCKS && width_of_block(profile, end) == width_of_block(profile, block)) ++end;
    return end;
}
