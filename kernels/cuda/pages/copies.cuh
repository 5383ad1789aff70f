// Whole pages copied from place to place in device memory, a warp a page.
#pragma once

#include "pages/state.cuh"

// Copies a page to one place and, if there is a second, to that, too; one warp. AT_ONCE: units that a lane
// holds.
template <int AT_ONCE = 8>
__device__ __forceinline__ void copy_page(u8* to, const u8* from, u32 units, u8* second = nullptr) {
    static_assert(UNIT == sizeof(uint4), "a unit a lane");
    for (u32 first = threadIdx.x % 32; first < units; first += 32 * AT_ONCE) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + 32 * j < units) x[j] = __ldcs((const uint4*)from + first + 32 * j);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + 32 * j < units) __stcs((uint4*)to + first + 32 * j, x[j]);
        if (!second) continue;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + 32 * j < units) __stcs((uint4*)second + first + 32 * j, x[j]);
    }
}

// Carries out a list of copies in an arena; all warps of blocks of THREADS.
template <int THREADS>
__device__ __forceinline__ void copy_listed(u8* arena, const PageCopy* copies, int count) {
#pragma unroll 1
    for (int n = blockIdx.x + gridDim.x * (threadIdx.x / 32); n < count; n += gridDim.x * (THREADS / 32))
        copy_page(arena + (u64)copies[n].to * UNIT, arena + (u64)copies[n].from * UNIT, copies[n].units);
}
