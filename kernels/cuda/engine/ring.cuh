// The ring of weights and what is multiplied from it.
#pragma once

#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/model.cuh"

struct Ring {
    u32 slots, full, empty;
    int slot;
    u32 parity;
    __device__ __forceinline__ void advance(int count = 1) {
        slot += count;
        if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
    }
};

// Copies are started as slots become free, but only so many are under way: whatever else an SM asks of
// memory, and what it waits for before it tells others, queues behind them. With the whole ring under way a
// release took 4 us.
struct Copies {
    Ring ring, landing;             // the next slot to fill; the oldest that is under way
    int under_way, most_under_way;  // slots
    // Waits until the next slot may be filled; it will have so many bytes.
    __device__ __forceinline__ void open(u32 bytes) {
        wait_barrier(ring.empty + 8 * ring.slot, ring.parity ^ 1);
        if (under_way == most_under_way) {
            wait_barrier(landing.full + 8 * landing.slot, landing.parity);
            landing.advance();
        } else {
            ++under_way;
        }
        expect_bytes(ring.full + 8 * ring.slot, bytes);
    }
    __device__ __forceinline__ u32 to() const { return ring.slots + ring.slot * SLOT_BYTES; }
    __device__ __forceinline__ u32 full() const { return ring.full + 8 * ring.slot; }
};

// Bytes that nobody reads again: first to go from L2.
__device__ __forceinline__ void copy_bytes_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(0x12F0000000000000ull)
        : "memory");
}

// An arrival for `count` of those that a barrier waits for.
__device__ __forceinline__ void arrive_for(u32 count, u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// The tiles of a product that a CTA has: every `ctas`-th one. With SPLITS > 1 CTAs are a multiple of SPLITS,
// so all of a CTA's tiles have the same columns of x.
struct Deal {
    int first, ctas, tiles;
};

template <Kind KIND>
__device__ __forceinline__ void produce(Copies& copies, const char* weights, const Deal& deal) {
    using S = Shape<KIND>;
    for (int tile = deal.first; tile < deal.tiles; tile += deal.ctas) {
        const char* from = weights + (i64)tile * S::STAGES * SLOT_BYTES;
        for (int s = 0; s < S::STAGES; ++s) {
            copies.open(SLOT_BYTES);
            copy_bytes_once(copies.to(), from, SLOT_BYTES, copies.full());
            from += SLOT_BYTES;
            copies.ring.advance();
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

constexpr int CHAINS = N_TILES == 2 ? 2 : 4;  // of products that wait for each other, in a warp

// A tile's sums of this warp to shared memory.
__device__ __forceinline__ void leave_sums(float* sums, const float (&c)[CHAINS][N_TILES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = sums + threadIdx.x / 32 * (BATCH * SUM_PITCH);
#pragma unroll
    for (int i = 0; i < N_TILES; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int n = 8 * i + 2 * t + k % 2;
            float sum = c[0][i][k] + c[1][i][k];
#pragma unroll
            for (int pair = 2; pair < CHAINS; pair += 2) sum += c[pair][i][k] + c[pair + 1][i][k];
            if (n < BATCH) mine[n * SUM_PITCH + g + 8 * (k / 2)] = sum;
        }
}

// Blocks of a slot: every SIDE_WARPS-th from `first` on; load_weights(block, half) and load_x(block, n) give
// a lane's 16 bytes of either. Loads of a few are under way together, and the halves of a few blocks have
// sums of their own, so products wait less for each other.
template <int SIDE_WARPS, class LoadWeights, class LoadX>
__device__ __forceinline__ void multiply_slot(float (&c)[CHAINS][N_TILES][4], int first,
                                              const LoadWeights& load_weights, const LoadX& load_x) {
    constexpr int MINE = (SLOT_BLOCKS + SIDE_WARPS - 1) / SIDE_WARPS, AT_ONCE = CHAINS / 2;
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
                mma(c[2 * i][n], upper, b[i][n].x, b[i][n].y);
                mma(c[2 * i + 1][n], lower, b[i][n].z, b[i][n].w);
            }
        }
    }
}

template <Kind KIND>
__device__ __forceinline__ void multiply(Ring& ring, Sums& sums, const char* x, const Deal& deal) {
    using S = Shape<KIND>;
    constexpr int SIDES = S::SIDES, SIDE_WARPS = WARPS / SIDES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, side = warp / SIDE_WARPS;
    const u32 x_lane = shared_address(x) + min(lane / 4, BATCH - 1) * S::PITCH + lane % 4 * 16;
    const u32 x_upper = shared_address(x) + min(lane / 4 + 8, BATCH - 1) * S::PITCH + lane % 4 * 16;
    for (int tile = deal.first; tile < deal.tiles; tile += deal.ctas, ++sums.tile) {
        float c[CHAINS][N_TILES][4] = {};
#pragma unroll 1
        for (int s = side; s < S::STAGES; s += SIDES) {
            Ring own = ring;
            own.advance(side);
            wait_barrier(own.full + 8 * own.slot, own.parity);
            const u32 weights = own.slots + own.slot * SLOT_BYTES + lane * 16, at = s * SLOT_BLOCKS * 64;
            multiply_slot<SIDE_WARPS>(
                c, warp % SIDE_WARPS,
                [&](int block, int half) { return load_shared(weights + block * BLOCK_BYTES + half * 512); },
                [&](int block, int n) { return load_shared((n ? x_upper : x_lane) + at + block * 64); });
            __syncwarp();  // all lanes have read
            if (lane == 0) arrive_for(SIDES, own.empty + 8 * own.slot);
            ring.advance(SIDES);
        }
        const int group = sums.tile % ADDER_GROUPS;
        wait_barrier(sums.read + 8 * group, sums.parity() ^ 1);
        leave_sums(sums.floats + group * SUMS, c);
        __syncwarp();
        if (lane == 0) arrive(sums.there + 8 * group);
    }
}
