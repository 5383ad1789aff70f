// Counters in memory that the CTAs of a launch wait for; all must be on the device.
#pragma once

#include "common/words.cuh"

constexpr int OF_QKV = 32, EXITS = 64;  // counters after the first, each in a line of 128 bytes

__device__ __forceinline__ void arrive_grid(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait_grid(const u32* counter, u32 target) {
    u32 seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while ((int)(seen - target) < 0);
}
