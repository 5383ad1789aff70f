// Elements of three types in memory, to and from float32.
//
// Macro: DTYPE 0 float16, 1 bfloat16, 2 float32.
#pragma once
#include "codec/bit_stream.cuh"
#include <cuda_fp16.h>

constexpr int FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2;

constexpr int ELEMENT_BYTES = DTYPE == FLOAT32 ? 4 : 2;
constexpr int PER_LOAD = 16 / ELEMENT_BYTES;  // elements of a 16-byte access

template <int BYTES>
struct Unsigned {
    using type = u16;
};
template <>
struct Unsigned<4> {
    using type = u32;
};

// NaN if either is.
__device__ __forceinline__ float lower(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float higher(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float half_value(u32 bits) {
    return __half2float(__ushort_as_half((u16)bits));
}

__device__ __forceinline__ float element(const void* x, i64 i) {
    if (DTYPE == FLOAT32) return ((const float*)x)[i];
    const u32 bits = ((const u16*)x)[i];
    return DTYPE == FLOAT16 ? half_value(bits) : __uint_as_float(bits << 16);
}

// Two 16-bit elements: NaN where either is.
#if DTYPE == 1
#define KVLAB_PAIR_TYPE "bf16x2"
#else
#define KVLAB_PAIR_TYPE "f16x2"
#endif

__device__ __forceinline__ u32 lower_pair(u32 a, u32 b) {
    u32 r;
    asm("min.NaN." KVLAB_PAIR_TYPE " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 higher_pair(u32 a, u32 b) {
    u32 r;
    asm("max.NaN." KVLAB_PAIR_TYPE " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 absolute_pair(u32 a) {
    u32 r;
    asm("abs." KVLAB_PAIR_TYPE " %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

__device__ __forceinline__ float2 pair_values(u32 x) {
    if (DTYPE == BFLOAT16) return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
    return {half_value(x & 0xffff), half_value(x >> 16)};
}

__device__ __forceinline__ void elements(const uint4& raw, float* v) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (DTYPE == FLOAT32) {
            v[i] = __uint_as_float(words[i]);
        } else {
            const float2 pair = pair_values(words[i]);
            v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
        }
    }
}

// To nearest; beyond the range of float16 its largest number; NaN stays NaN.
#if DTYPE == 1
#define KVLAB_TO_PAIR "cvt.rn.bf16x2.f32"
#else
#define KVLAB_TO_PAIR "cvt.rn.satfinite.f16x2.f32"
#endif

__device__ __forceinline__ u32 pair_bits(float low, float high) {
    u32 r;
    asm(KVLAB_TO_PAIR " %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ uint4 raw_elements(const float* v) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = DTYPE == FLOAT32 ? __float_as_uint(v[i]) : pair_bits(v[2 * i], v[2 * i + 1]);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_element(void* out, i64 i, float x) {
    if (DTYPE == FLOAT32) {
        ((float*)out)[i] = x;
    } else {
        ((u16*)out)[i] = (u16)pair_bits(x, 0.f);
    }
}
