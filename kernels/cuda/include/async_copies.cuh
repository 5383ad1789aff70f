// Copies of 16 bytes from global to shared memory that go on while the thread works (sm_80 and later).
#pragma once
#include "bit_stream.cuh"

__device__ __forceinline__ u32 shared_address(const void* shared) {
    return (u32)__cvta_generic_to_shared(shared);
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
                 : "memory");
}

// Waits for the copies of this thread; other threads see them behind the next barrier.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
