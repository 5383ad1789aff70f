// Profiles: widths of the four blocks of channels in which a ladder may keep its keys.
//
// The macro PROFILES names those of a ladder, each as `k8422`, in the place of widths of K; WIDTHS_K then
// says which widths occur in blocks, and RAW. Keys lie in the order of their blocks, so block b has channels
// from b HEAD_DIM / 4 on, and a rung's bits_k are four widths of 4 bits each, the first on top. Neighbouring
// blocks of one width are a run. Elements are (2 code + 1 - 2^width) half_cell(width) times the step of the
// token.
#pragma once

#include "common/words.cuh"

#ifdef PROFILES
#define KVLAB_TEXT(x) #x
#define KVLAB_NAMES(x) KVLAB_TEXT(x)
constexpr bool KEYS_IN_BLOCKS = true;
constexpr char PROFILE_NAMES[] = KVLAB_NAMES(PROFILES);
constexpr int NUM_PROFILES = sizeof(PROFILE_NAMES) / 5;

// Profile `i` of the list, as bits_k has it.
__host__ __device__ constexpr int profile_at(int i) {
    const char* const digits = PROFILE_NAMES + 5 * i;
    return (digits[1] - '0') << 12 | (digits[2] - '0') << 8 | (digits[3] - '0') << 4 | (digits[4] - '0');
}
#else
constexpr bool KEYS_IN_BLOCKS = false;
constexpr int NUM_PROFILES = 0;

__host__ __device__ constexpr int profile_at(int) {
    return 0;
}
#endif

__host__ __device__ constexpr int width_of_block(int profile, int block) {
    return block < 4 ? profile >> (12 - 4 * block) & 15 : -1;
}

// The block behind the run that begins with `block`.
__host__ __device__ constexpr int end_of_run(int profile, int block) {
    int end = block;
    while (width_of_block(profile, end) == width_of_block(profile, block)) ++end;
    return end;
}

__host__ __device__ constexpr int sum_of_widths(int profile) {
    return (profile & 15) + (profile >> 4 & 15) + (profile >> 8 & 15) + (profile >> 12);
}

// Half a cell of a width, in steps.
__host__ __device__ constexpr float half_cell(int bits) {
    return bits == 2 ? 32.f : bits == 4 ? 12.f : bits == 8 ? 1.f : 0.f;
}

// What elements of a profile lack where only codes are multiplied: the sum over blocks of what each lacks
// times the block's sum of the query.
template <int PROFILE>
__device__ __forceinline__ float zero_point_of(const float4& sums) {
    const auto lacks = [](int block) {
        const int bits = width_of_block(PROFILE, block);
        return -half_cell(bits) * ((1 << bits) - 1);
    };
    return fmaf(lacks(3), sums.w, fmaf(lacks(2), sums.z, fmaf(lacks(1), sums.y, lacks(0) * sums.x)));
}
