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

constexpr int NONE = -1;

// The tiles of a product that a CTA has. The first is dealt; the next ones its producer claims, so CTAs that
// memory serves faster have more. Claims are in the order of tiles, among the CTAs with the same columns of
// x.
template <Kind KIND>
struct Share {
    static constexpr int PARTS = Shape<KIND>::PARTS;
    u32* claims;
    int tiles, ctas, cta;
    __device__ __forceinline__ Share(const Call& call, int phase, int tiles, int ctas, int cta)
        : claims(call.claims + phase * CLASSES + (PARALLEL && KIND == UP ? 1 : cta % PARTS)),
          tiles(tiles),
          ctas(ctas),
          cta(cta) {}
    __device__ __forceinline__ int first() const { return cta < tiles ? cta : NONE; }
    __device__ __forceinline__ u32 claim() const {
        if (ctas >= tiles) return 0;
        u32 before;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(claims) : "memory");
        return before;
    }
    __device__ __forceinline__ int claimed(u32 before) const {
        const int tile = (ctas / PARTS + (int)before) * PARTS + cta % PARTS;
        return tile < tiles ? tile : NONE;
    }
};

// From the producer to the other warps: what comes after tile number `index` of this CTA, over all phases.
// A word has the lower bits of its index, so who sees them has the tile.
struct Queue {
    u32 words;
    __device__ __forceinline__ void put(int index, int tile) const {
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(words + index % QUEUE * 4),
                     "r"((u32)index << 20 | (u32)(tile + 1))
                     : "memory");
    }
    __device__ __forceinline__ int after(int index) const {  // all lanes of a warp
        u32 word;
        for (;;) {
            asm volatile("ld.volatile.shared.u32 %0, [%1];"
                         : "=r"(word)
                         : "r"(words + index % QUEUE * 4)
                         : "memory");
            if (word >> 20 == (index & 0xfff)) break;
            __nanosleep(32);
        }
        __syncwarp();
        return (int)(word & 0xfffff) - 1;
    }
};

template <Kind KIND>
__device__ __forceinline__ void produce(Ring& ring, const Queue& queue, int& index, const char* weights,
                                        const Share<KIND>& share) {
    using S = Shape<KIND>;
    constexpr int CLAIM_AT = S::STAGES > 3 ? S::STAGES - 3 : 0;  // it comes back while the last slots go
    for (int tile = share.first(); tile != NONE;) {
        const char* from = weights + (i64)tile * S::STAGES * SLOT_BYTES;
        u32 before = 0;
        for (int s = 0; s < S::STAGES; ++s) {
            if (s == CLAIM_AT) before = share.claim();
            wait_barrier(ring.empty + 8 * ring.slot, ring.parity ^ 1);
            expect_bytes(ring.full + 8 * ring.slot, SLOT_BYTES);
            copy_bytes_once(ring.slots + ring.slot * SLOT_BYTES, from, SLOT_BYTES, ring.full + 8 * ring.slot);
            from += SLOT_BYTES;
            ring.advance();
        }
        tile = share.claimed(before);
        queue.put(index++, tile);
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
__device__ __forceinline__ void leave_sums(float* sums, const float (&c)[2][N_TILES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = sums + threadIdx.x / 32 * (BATCH * SUM_PITCH);
#pragma unroll
    for (int i = 0; i < N_TILES; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int n = 8 * i + 2 * t + k % 2;
            if (n < BATCH) mine[n * SUM_PITCH + g + 8 * (k / 2)] = c[0][i][k] + c[1][i][k];
        }
}

// Blocks of a slot: every SIDE_WARPS-th from `first` on; load_weights(block, half) and load_x(block, n) give
// a lane's 16 bytes of either. Loads of a few are under way together, and the two halves of a block have sums
// of their own, so products wait less for each other.
template <int SIDE_WARPS, class LoadWeights, class LoadX>
__device__ __forceinline__ void multiply_slot(float (&c)[2][N_TILES][4], int first,
                                              const LoadWeights& load_weights, const LoadX& load_x) {
    constexpr int MINE = (SLOT_BLOCKS + SIDE_WARPS - 1) / SIDE_WARPS, AT_ONCE = N_TILES == 2 ? 1 : 2;
#pragma unroll(N_TILES == 2 ? 2 : MINE)
    for (int begin = 0; begin < MINE; begin += AT_ONCE) {
        uint4 a[AT_ONCE][2], b[AT_ONCE][N_TILES];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int block = first + (begin + i) * SIDE_WARPS;
            if (begin + i >= MINE || block >= SLOT_BLOCKS) continue;
            a[i][0] = load_weights(block, 0), a[i][1] = load_weights(block, 1);
            b[i][0] = load_x(block, 0);
            if constexpr (N_TILES == 2) b[i][1] = load_x(block, 1);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (begin + i >= MINE || first + (begin + i) * SIDE_WARPS >= SLOT_BLOCKS) continue;
            const u32 upper[4] = {a[i][0].x, a[i][0].y, a[i][0].z, a[i][0].w};
            const u32 lower[4] = {a[i][1].x, a[i][1].y, a[i][1].z, a[i][1].w};
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                mma(c[0][n], upper, b[i][n].x, b[i][n].y);
                mma(c[1][n], lower, b[i][n].z, b[i][n].w);
            }
        }
    }
}

template <Kind KIND>
__device__ __forceinline__ void multiply(Ring& ring, Sums& sums, const Queue& queue, const char* x,
                                         bool takes_part) {
    using S = Shape<KIND>;
    constexpr int SIDES = S::SIDES, SIDE_WARPS = WARPS / SIDES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 x_lane = shared_address(x) + min(lane / 4, BATCH - 1) * S::PITCH + lane % 4 * 16;
    const u32 x_upper = shared_address(x) + min(lane / 4 + 8, BATCH - 1) * S::PITCH + lane % 4 * 16;
    float c[2][N_TILES][4] = {};
    while (takes_part) {
#pragma unroll 1
        for (int s = 0; s < S::STAGES; ++s) {
            wait_barrier(ring.full + 8 * ring.slot, ring.parity);
            if (s % SIDES == warp / SIDE_WARPS) {
                const u32 weights = ring.slots + ring.slot * SLOT_BYTES + lane * 16,
                          at = s * SLOT_BLOCKS * 64;
                multiply_slot<SIDE_WARPS>(
                    c, warp % SIDE_WARPS,
                    [&](int block, int half) {
                        return load_shared(weights + block * BLOCK_BYTES + half * 512);
                    },
                    [&](int block, int n) { return load_shared((n ? x_upper : x_lane) + at + block * 64); });
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
        takes_part = queue.after(sums.tile++) != NONE;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < N_TILES; ++i) c[h][i][0] = c[h][i][1] = c[h][i][2] = c[h][i][3] = 0.f;
    }
}
