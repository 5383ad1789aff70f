// Reduce the values of the neighbouring lanes of a group to one.
#pragma once
#include "codec/bit_stream.cuh"

__host__ __device__ constexpr int log2_of(int x) {
    return x > 1 ? 1 + log2_of(x / 2) : 0;
}

// Combines x of COUNT lanes, a power of two, by halves.
template <int COUNT>
__device__ __forceinline__ float of_lanes(float x, float (*combine)(float, float)) {
#pragma unroll
    for (int mask = COUNT / 2; mask; mask /= 2) x = combine(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
}

__device__ __forceinline__ float sum(float a, float b) {
    return __fadd_rn(a, b);
}
