// The block Hadamard transform that vectors are stored by, and raw elements as numbers.
//
// What decides a byte of a page is rounded operation by operation and must not be contracted: hence the
// intrinsics here and in what includes this.
#pragma once

#include "pages/profiles.cuh"

constexpr int ROTATION_BLOCK = HEAD_DIM & -HEAD_DIM;

__host__ __device__ constexpr int log_of(int power_of_two) {
    return power_of_two > 1 ? 1 + log_of(power_of_two / 2) : 0;
}

constexpr int LOG_BLOCK = log_of(ROTATION_BLOCK);
// The same of keys: where they are kept in blocks, within each.
constexpr int KEY_ROTATION = IN_BLOCKS ? HEAD_DIM / KEY_BLOCKS & -(HEAD_DIM / KEY_BLOCKS) : ROTATION_BLOCK;
constexpr int LOG_KEYS = log_of(KEY_ROTATION);
// The transform's factor without its power of 2: 1, or the square root of 2 as float16.
constexpr float FACTOR = LOG_BLOCK % 2 ? 1.4140625f : 1.f;

__device__ __forceinline__ float raw_value(u32 bits) {
#if BF16
    return __uint_as_float(bits << 16);
#else
    return half_bits_to_float(bits);
#endif
}
