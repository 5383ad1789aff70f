// What launches of single operations take, and how they read weights and keys: from memory.
#pragma once

#include "engine/attend.cuh"
#include "engine/epilogue.cuh"

struct Operation {
    Call call;
    int layer, product;            // of PRODUCTS; behind the last layer the head
    char* normed;                  // [BATCH], pitch_of(HIDDEN) apart
    float* sums;                   // [BATCH][rows] of the last product, without its bias
    float* head_sums;              // or null: [HEADS_KV][HIDDEN] of the attention's output, by KV heads
    int first_column, takes_sums;  // OUT: where x begins to be no zeros; `add_rows`: whether it adds `sums`
};
static_assert(sizeof(Operation) == sizeof(Call) + 40, "OPERATION of kvlab/engine/kernels.py");

// Launches that come early (`PreparedLaunch(..., early=True)`): what they do before `wait_for_launches` reads
// nothing that an earlier launch writes, and from `launch_dependents` on the next one may come.
__device__ __forceinline__ void wait_for_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The blocks of a warp, of one part of the columns; load_x(column, n) gives 8 columns of x of this lane's
// token.
template <Kind KIND, class LoadX>
__device__ __forceinline__ void multiply_part(float (&c)[CHAINS][N_TILES][4], const char* weights,
                                              const LoadX& load_x) {
    using S = Shape<KIND>;
    constexpr int SIDE_WARPS = WARPS / S::SIDES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int s = warp / SIDE_WARPS; s < S::STAGES; s += S::SIDES)
        multiply_slot<SIDE_WARPS>(
            c, warp % SIDE_WARPS,
            [&](int block, int half) {
                return __ldcg((const uint4*)(weights + s * SLOT_BYTES + block * BLOCK_BYTES + half * 512));
            },
            [&](int block, int n) { return load_x(32 * (s * SLOT_BLOCKS + block) + lane % 4 * 8, n); });
}

// Keys and values of a segment, from memory.
template <bool TOGETHER>
struct MemoryKeys {
    static constexpr bool IN_RUNS = TOGETHER;
    const uint4 *keys, *values;  // this lane's channels of the first one of a slot, or of the segment
    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ uint4 key(int i) const { return __ldcg(keys + i * (HEAD_DIM / 8)); }
    __device__ __forceinline__ uint4 value(int i) const { return __ldcg(values + i * (HEAD_DIM / 8)); }
    __device__ __forceinline__ void end() {
        keys += CHUNK * (HEAD_DIM / 8), values += CHUNK * (HEAD_DIM / 8);
    }
};
