// The likeliest token of a row, of equals the first, by one maximum.
#pragma once

#include "common/words.cuh"

// One number of 64 bits: a logit in an order that integers have, then the token, turned round so that lower
// ones win. The largest does not depend on the order in which they come; 0 is none.
__device__ __forceinline__ u64 candidate(float logit, int token) {
    const u32 bits = __float_as_uint(logit);
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (0xffffffffu - token);
}
__device__ __forceinline__ int token_of(u64 candidate) {
    return 0xffffffffu - (u32)candidate;
}
