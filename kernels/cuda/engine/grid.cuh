// How the CTAs of a launch wait for each other; all must be on the device.
//
// Counters in memory say that all have done something. Numbers on their way from a CTA to another one come
// with a second number that is not 0, in the same 8 bytes: who sees that has both, and no fence or counter is
// between them. Who took them leaves zeros, for the next to come.
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

constexpr float FLAG = 1.f;

__device__ __forceinline__ void store_words(u64* to, u64 first, u64 second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
                 : "memory");
}
__device__ __forceinline__ u64 word_of(float2 x) {
    return (u64)__float_as_uint(x.y) << 32 | __float_as_uint(x.x);
}
__device__ __forceinline__ float2 numbers_of(u64 word) {
    return {__uint_as_float((u32)word), __uint_as_float((u32)(word >> 32))};
}
__device__ __forceinline__ void leave_numbers(u64* to, float2 first, float2 second) {
    store_words(to, word_of(first), word_of(second));
}
// The numbers at at(0), ..., at(count - 1), up to MAX_COUNT of them, when all are there.
template <int MAX_COUNT, class At>
__device__ __forceinline__ void take_numbers(float2 (&first)[MAX_COUNT], float2 (&second)[MAX_COUNT],
                                             int count, const At& at) {
    bool there;
    do {
        there = true;
#pragma unroll
        for (int i = 0; i < MAX_COUNT; ++i) {
            u64 one, other;
            asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(one), "=l"(other)
                         : "l"(at(min(i, count - 1)))
                         : "memory");
            there = there && one >> 32 && other >> 32;
            first[i] = numbers_of(one), second[i] = numbers_of(other);
        }
    } while (!there);
#pragma unroll
    for (int i = 0; i < MAX_COUNT; ++i)
        if (i < count) store_words(at(i), 0, 0);
}
