// Copies from global to shared memory that go on while the thread works (cp.async, sm_80 and later).
//
// A thread waits for its own copies; other threads see them behind the next barrier.
#pragma once
#include "common/words.cuh"

__device__ __forceinline__ void copy_async(void* to, const void* from) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// 16 bytes to `to` + OFFSET, in one instruction.
template <int OFFSET>
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1], 16;" ::"r"(to), "l"(from), "n"(OFFSET)
                 : "memory");
}

__device__ __forceinline__ void copy_half_async(void* to, const void* from) {  // 8 bytes
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_word_async(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// 16 bytes, or zeros in their place; no fence to the compiler, so `to` is written by nothing else meanwhile.
__device__ __forceinline__ void copy_async_if(u32 to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0));
}

__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of the groups that were committed are on their way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
