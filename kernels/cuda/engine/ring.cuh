// The ring of weights and what is multiplied from it.
#pragma once

#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/model.cuh"

struct Ring {
    u32 slots, full, empty;
    int slot;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// Bytes that nobody reads again: first to go from L2.
__device__ __forceinline__ void copy_bytes_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(0x12F0000000000000ull)
        : "memory");
}

template <Kind KIND>
__device__ __forceinline__ void produce(Ring& ring, const char* weights, int tiles, int ctas, int cta) {
    using S = Shape<KIND>;
    for (int first = 0; first + cta < tiles; first += ctas) {
        const char* from = weights + (i64)(first + cta) * S::STAGES * SLOT_BYTES;
        for (int s = 0; s < S::STAGES; ++s) {
            wait_barrier(ring.empty + 8 * ring.slot, ring.parity ^ 1);
            expect_bytes(ring.full + 8 * ring.slot, SLOT_BYTES);
            copy_bytes_once(ring.slots + ring.slot * SLOT_BYTES, from, SLOT_BYTES, ring.full + 8 * ring.slot);
            from += SLOT_BYTES;
            ring.advance();
        }
    }
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

// Sums of tiles on their way from multiplying warps to adders: a pair of barriers a group of adders.
struct Sums {
    float* floats;
    u32 there, read;
    int tile;  // of this CTA, over all phases
    __device__ __forceinline__ u32 parity() const { return tile / ADDER_GROUPS % 2; }
};

// A tile's sums of this warp to shared memory.
__device__ __forceinline__ void leave_sums(float* sums, const float (&c)[N_TILES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = sums + threadIdx.x / 32 * (BATCH * SUM_PITCH);
#pragma unroll
    for (int i = 0; i < N_TILES; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int n = 8 * i + 2 * t + k % 2;
            if (n < BATCH) mine[n * SUM_PITCH + g + 8 * (k / 2)] = c[i][k];
        }
}

template <Kind KIND>
__device__ __forceinline__ void multiply(Ring& ring, Sums& sums, const char* x, int tiles, int ctas,
                                         int cta) {
    using S = Shape<KIND>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 x_lane = shared_address(x) + min(lane / 4, BATCH - 1) * S::PITCH + lane % 4 * 16;
    const u32 x_upper = shared_address(x) + min(lane / 4 + 8, BATCH - 1) * S::PITCH + lane % 4 * 16;
    float c[N_TILES][4] = {};
    for (int tile = cta; tile < tiles; tile += ctas) {
        int block = warp;  // of the tile
        for (int end = SLOT_BLOCKS; end <= S::BLOCKS; end += SLOT_BLOCKS) {
            wait_barrier(ring.full + 8 * ring.slot, ring.parity);
            const u32 weights =
                ring.slots + ring.slot * SLOT_BYTES + lane * 16 - (end - SLOT_BLOCKS) * BLOCK_BYTES;
            for (; block < end; block += WARPS) {
                const uint4 a0 = load_shared(weights + block * BLOCK_BYTES),
                            a1 = load_shared(weights + block * BLOCK_BYTES + 512);
                const uint4 b = load_shared(x_lane + block * 64);
                const u32 first[4] = {a0.x, a0.y, a0.z, a0.w}, second[4] = {a1.x, a1.y, a1.z, a1.w};
                mma(c[0], first, b.x, b.y);
                mma(c[0], second, b.z, b.w);
                if constexpr (N_TILES == 2) {
                    const uint4 upper = load_shared(x_upper + block * 64);
                    mma(c[1], first, upper.x, upper.y);
                    mma(c[1], second, upper.z, upper.w);
                }
            }
            __syncwarp();  // all lanes have read
            if (lane == 0) arrive(ring.empty + 8 * ring.slot);
            ring.advance();
        }
        const int group = sums.tile % ADDER_GROUPS;
        wait_barrier(sums.read + 8 * group, sums.parity() ^ 1);
        leave_sums(sums.floats + group * SUMS, c);
        __syncwarp();
        if (lane == 0) arrive(sums.there + 8 * group);
        ++sums.tile;
#pragma unroll
        for (int i = 0; i < N_TILES; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
    }
}
