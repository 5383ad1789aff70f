// Attention backward on Hopper: CTAs of a cluster that share the same keys, so that a short call has work for
// all multiprocessors. Each takes a part of the steps; dk and dv are added up through shared memory, always
// in the order of ranks. A cluster has CLUSTER CTAs: CLUSTER_SPLIT, or more if several work on the same
// steps; those that share are CLUSTER / CLUSTER_SPLIT apart. Needs HEAD_DIM and CLUSTER_SPLIT.
#pragma once
#include "attention/backward_sizes_sm90.cuh"
#include "attention/backward.cuh"

constexpr int COMPUTING = 256;  // threads, from 128 on

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Reads an address of the shared memory of a CTA of the cluster.
__device__ __forceinline__ float4 read_remote(u32 address, int rank) {
    float4 x;
    asm volatile(
        "{.reg .b32 remote_address; mapa.shared::cluster.u32 remote_address, %4, %5;\n\t"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote_address];}"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(address), "r"(rank)
        : "memory");
    return x;
}

// Adds dK or dV of the CTAs of a cluster, from their shared memory, in the order of their ranks,
// and writes the sums of the CTA's part of the keys; all computing threads. A thread has what a lane has of a
// product: two channels of keys g and g + 8.
__device__ __forceinline__ void cluster_reduce(const Tensor& t, const Call& call, const SeqInfo& s, int head,
                                               int first_key, u32 sums, float factor) {
    constexpr int OWN_KEYS = BLOCK_N / CLUSTER_SPLIT, STEP = CLUSTER / CLUSTER_SPLIT;
    static_assert(OWN_KEYS % 16 == 0, "a lane has keys g and g + 8");
    const int rank = blockIdx.x % CLUSTER;
    for (int i = threadIdx.x - 128; i < OWN_KEYS * HEAD_DIM / 4; i += COMPUTING) {
        const int own = rank / STEP * OWN_KEYS + i / (4 * HEAD_DIM) * 16 + i % 32 / 4;
        const int channel = i / 32 % (HEAD_DIM / 8) * 8 + i % 4 * 2;
        float4 parts[CLUSTER_SPLIT], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int j = 0; j < CLUSTER_SPLIT; ++j)
            parts[j] = read_remote(sums + 4 * accum_offset(own, channel), rank % STEP + j * STEP);
#pragma unroll
        for (int j = 0; j < CLUSTER_SPLIT; ++j)
            sum.x += parts[j].x, sum.y += parts[j].y, sum.z += parts[j].z, sum.w += parts[j].w;
        const int key = first_key + own;
        if (key < s.keys)
            write_sums(t, call, row_of(t, s, s.k0, key, head), channel, sum.x * factor, sum.y * factor);
        if (key + 8 < s.keys)
            write_sums(t, call, row_of(t, s, s.k0, key + 8, head), channel, sum.z * factor, sum.w * factor);
    }
}
