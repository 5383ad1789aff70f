// What vectors need to become codes of pages and to come back, LANES lanes a vector; of every LANES RUN
// elements a lane has RUN in a row.
//
// `rotate` is the transform of float32 by which stored vectors become raw again; raw ones are rotated in
// whole numbers, as pages/search.cuh does. What decides a byte is rounded operation by operation and must
// not be contracted: hence the intrinsics.
//
// All lanes of a warp call what is here together. Needs HEAD_DIM, BF16, pages/codes.cuh, LANES and RUN,
// powers of 2 up to 32 and 2.
#pragma once

constexpr int PER_LANE = (HEAD_DIM + LANES - 1) / LANES;
constexpr int ROTATION_BLOCK = HEAD_DIM & -HEAD_DIM;

__host__ __device__ constexpr int log_of(int power_of_two) {
    return power_of_two > 1 ? 1 + log_of(power_of_two / 2) : 0;
}

constexpr int LOG_BLOCK = log_of(ROTATION_BLOCK);
// What is left of the factor of the transform besides a power of 2: the square root of 2 as float16.
constexpr float FACTOR = LOG_BLOCK % 2 ? 1.4140625f : 1.f;

__host__ __device__ constexpr float rotation_factor(int block) {
    return block >= 4 ? .5f * rotation_factor(block / 4) : block == 2 ? .70710678118654752f : 1.f;
}

// Element j of a lane.
__device__ __forceinline__ int element_of(int lane, int j) {
    return j / RUN * (RUN * LANES) + lane * RUN + j % RUN;
}

__device__ __forceinline__ bool is_there(int lane, int j) {
    return HEAD_DIM % (LANES * RUN) == 0 || element_of(lane, j) < HEAD_DIM;
}

__device__ __forceinline__ float raw_value(u32 bits) {
#if BF16
    return __uint_as_float(bits << 16);
#else
    return half_bits_to_float(bits);
#endif
}

__device__ __forceinline__ float grid_value(u32 code, float step, int bits) {
    return __fmul_rn(fmaf(2.f, (float)code, 1.f - (1 << bits)), step);
}

// The block Hadamard transform without its factor.
__device__ __forceinline__ void add_and_subtract(float (&x)[PER_LANE], int lane) {
#pragma unroll
    for (int h = 1; h < ROTATION_BLOCK; h *= 2) {
        const bool across = h >= RUN && h < RUN * LANES;  // partners are in two lanes
        const float sign = lane & h / RUN ? -1.f : 1.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int to = h < RUN ? h : h / LANES;
            if (across) x[j] = fmaf(x[j], sign, __shfl_xor_sync(ALL_LANES, x[j], h / RUN));
            if (across || j & to) continue;
            const float a = x[j], b = x[j + to];
            x[j] = __fadd_rn(a, b);
            x[j + to] = __fsub_rn(a, b);
        }
    }
}

// The orthonormal block Hadamard transform of float32, its own inverse up to rounding.
__device__ __forceinline__ void rotate(float (&x)[PER_LANE], int lane) {
    add_and_subtract(x, lane);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = __fmul_rn(x[j], rotation_factor(ROTATION_BLOCK));
}
