// 16-bit pairs in 32-bit registers: conversions and the tensor-core products of mma.m16n8k16 on them.
//
// Needs the macro BF16: whether the 16-bit type of the cache is bfloat16 or float16.
#pragma once

#include <cuda_fp16.h>
#include "common/words.cuh"

#if BF16
#define KVLAB_PAIR "bf16"
#else
#define KVLAB_PAIR "f16"
#endif

#define KVLAB_MMA(TYPE, c, a, b0, b1)                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE    \
        ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// c += a b for operands of the 16-bit type, and for float16 whatever that type is.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    KVLAB_MMA(KVLAB_PAIR, c, a, b0, b1);
}

__device__ __forceinline__ void mma_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    KVLAB_MMA("f16", c, a, b0, b1);
}

// Four 8 x 8 matrices from shared memory; each lane gives the address of one of their rows.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ u32 transposed(u32 x) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

__device__ __forceinline__ float power_of_2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 r;
    asm("cvt.rn." KVLAB_PAIR "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float2 unpack_pair(u32 x) {
#if BF16
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
#else
    return {half_bits_to_float(x & 0xffffu), half_bits_to_float(x >> 16)};
#endif
}
