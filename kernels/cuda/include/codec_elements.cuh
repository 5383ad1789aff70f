// Elements of three types in memory, to and from float32.
//
// Macro: DTYPE 0 float16, 1 bfloat16, 2 float32.
#pragma once
#include <cuda_fp16.h>
#include "bit_stream.cuh"

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

__device__ __forceinline__ float element(const void* x, i64 i) {
    if (DTYPE == FLOAT32) return ((const float*)x)[i];
    const u32 bits = ((const u16*)x)[i];
    return DTYPE == FLOAT16 ? half_value(bits) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ void elements(const uint4& raw, float* v) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (DTYPE == FLOAT32) {
            v[i] = __uint_as_float(words[i]);
        } else {
            v[2 * i] = DTYPE == FLOAT16 ? half_value(words[i] & 0xffff) : __uint_as_float(words[i] << 16);
            v[2 * i + 1] =
                DTYPE == FLOAT16 ? half_value(words[i] >> 16) : __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

// To nearest; beyond the range of float16 its largest number; NaN stays NaN.
__device__ __forceinline__ u32 element_bits(float x) {
    if (DTYPE == FLOAT32) return __float_as_uint(x);
    if (DTYPE == FLOAT16) return __half_as_ushort(__float2half_rn(lower(higher(x, -65504.f), 65504.f)));
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ uint4 raw_elements(const float* v) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (DTYPE == FLOAT32) {
            words[i] = element_bits(v[i]);
        } else {
            words[i] = element_bits(v[2 * i]) | element_bits(v[2 * i + 1]) << 16;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_element(void* out, i64 i, float x) {
    if (DTYPE == FLOAT32) {
        ((float*)out)[i] = x;
    } else {
        ((u16*)out)[i] = (u16)element_bits(x);
    }
}
