// Elements of three types in memory, to and from float32, one, two or 16 bytes at a time.
//
// Macro: DTYPE 0 float16, 1 bfloat16, 2 float32.
#pragma once
#include "common/words.cuh"
#include <cuda_fp16.h>

constexpr int FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2;

constexpr int ELEMENT_BYTES = DTYPE == FLOAT32 ? 4 : 2;
constexpr int PER_LOAD = 16 / ELEMENT_BYTES;  // elements of a 16-byte access

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

__device__ __forceinline__ float2 pair_values(u32 x) {
    if (DTYPE == BFLOAT16) return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
    return {half_value(x & 0xffff), half_value(x >> 16)};
}

// To nearest; beyond the range of float16 its largest number; NaN stays NaN.
__device__ __forceinline__ u32 pair_bits(float low, float high) {
    u32 r;
    if (DTYPE == BFLOAT16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}

__device__ __forceinline__ float element(const void* x, i64 i) {
    if (DTYPE == FLOAT32) return ((const float*)x)[i];
    return pair_values(((const u16*)x)[i]).x;
}

__device__ __forceinline__ void store_element(void* out, i64 i, float x) {
    if (DTYPE == FLOAT32) {
        ((float*)out)[i] = x;
    } else {
        ((u16*)out)[i] = (u16)pair_bits(x, 0.f);
    }
}

// Elements i and i + 1, i even.
__device__ __forceinline__ float2 two_elements(const void* x, i64 i) {
    return DTYPE == FLOAT32 ? ((const float2*)x)[i / 2] : pair_values(((const u32*)x)[i / 2]);
}

__device__ __forceinline__ void store_two(void* out, i64 i, float2 v) {
    if (DTYPE == FLOAT32) {
        ((float2*)out)[i / 2] = v;
    } else {
        ((u32*)out)[i / 2] = pair_bits(v.x, v.y);
    }
}

// PER_LOAD elements from i on, a multiple of PER_LOAD.
__device__ __forceinline__ void load_elements(const void* x, i64 i, float* v) {
    const uint4 raw = ((const uint4*)x)[i / PER_LOAD];
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (DTYPE == FLOAT32) {
            v[k] = __uint_as_float(words[k]);
        } else {
            const float2 pair = pair_values(words[k]);
            v[2 * k] = pair.x, v[2 * k + 1] = pair.y;
        }
    }
}

__device__ __forceinline__ void store_elements(void* out, i64 i, const float* v) {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        words[k] = DTYPE == FLOAT32 ? __float_as_uint(v[k]) : pair_bits(v[2 * k], v[2 * k + 1]);
    ((uint4*)out)[i / PER_LOAD] = make_uint4(words[0], words[1], words[2], words[3]);
}
