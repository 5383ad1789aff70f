// Arithmetic of pairs of float16, and of four bytes, in 32-bit registers.
#pragma once

#include "common/pairs.cuh"

__device__ __forceinline__ u32 half_of(float x) {
    return pack_halves(x, 0.f);
}

__device__ __forceinline__ u32 twice(u32 half) {
    return __byte_perm(half, 0, 0x1010);
}

__device__ __forceinline__ u32 pair_product(u32 x, u32 y) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

__device__ __forceinline__ u32 pair_fused(u32 x, u32 y, u32 z) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}

__device__ __forceinline__ u32 pair_fused_cut(u32 x, u32 y, u32 z) {  // to 0 ... 1
    u32 r;
    asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}

__device__ __forceinline__ u32 pair_size(u32 x) {
    u32 r;
    asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

__device__ __forceinline__ u32 pair_larger(u32 x, u32 y) {
    u32 r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// Distances of four bytes.
__device__ __forceinline__ u32 distances(u32 x, u32 y) {
    u32 r;
    asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(0));
    return r;
}

// The sum of these distances and z.
__device__ __forceinline__ u32 add_distances(u32 x, u32 y, u32 z) {
    u32 r;
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}
