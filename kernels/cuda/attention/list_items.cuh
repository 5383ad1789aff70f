// What the kernels that make lists of tiles share: sums over threads, and items of sequences dealt out to
// them.
#pragma once
#include "attention/tiles.cuh"

constexpr int THREADS = 1024;

struct Shared {
    int counters[THREADS], starts[THREADS + 1], sums[33];
};

__device__ __forceinline__ int start_of(const int* bounds, int sequence) {
    return bounds ? bounds[sequence] : 0;
}
__device__ __forceinline__ int length_of(const int* bounds, int sequence, int all) {
    return bounds ? bounds[sequence + 1] - bounds[sequence] : all;
}

// Sum of x over the threads before this one; `sums[32]` is that over all. A kernel has it once.
__device__ __noinline__ int scan(int x, int* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int inclusive = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    __syncthreads();  // sums of the scan before have been read
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
        int total = sums[lane];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, total, step);
            if (lane >= step) total += other;
        }
        __syncwarp();
        const int before = __shfl_up_sync(ALL_LANES, total, 1);
        sums[lane] = lane ? before : 0;
        if (lane == 31) sums[32] = total;
    }
    __syncthreads();
    return sums[warp] + inclusive - x;
}

// Adds 1 to a counter of shared memory and returns what it was before. Lanes that come together add at once:
// additions to one counter take turns, and there are few counters.
__device__ __forceinline__ int count_one(int* counters, int counter) {
    const u32 lanes = __match_any_sync(__activemask(), counter), lane = threadIdx.x % 32;
    const int first = __ffs(lanes) - 1;
    int before = 0;
    if (lane == first) before = atomicAdd(&counters[counter], __popc(lanes));
    return __shfl_sync(lanes, before, first) + __popc(lanes & ((1u << lane) - 1));
}

// First of the pairs of a section: as many to each as can be, to the last no fewer than to others.
__device__ __forceinline__ int begin_of_section(int section, int num_bh) {
    if (num_bh < 1 << 16) return (u32)section * (u32)num_bh / gridDim.x;  // no more sections than pairs
    return (int)((i64)section * num_bh / gridDim.x);
}

// A number that the host has prepared as a divisor: a division takes 25 instructions, this one 3.
struct Divisor {
    int value;
    u32 factor;  // 2^(31 + shift) / value, up
    int shift;   // 2^shift is at least value
    __device__ __forceinline__ operator int() const { return value; }
};
__device__ __forceinline__ int operator/(int x, const Divisor& y) {  // x not negative
    return __umulhi(2u * x, y.factor) >> y.shift;
}
__device__ __forceinline__ int operator%(int x, const Divisor& y) {
    return x - x / y * y.value;
}

// Brings a word to the first cache.
__device__ __forceinline__ void prefetch(const int* word) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(word) : "memory");
}

// Calls visit(sequence, i) for each i < count(sequence) of sequences [from, last], in any order. Behind it
// all threads see what all visits wrote. `visit` stands in it once: a list is made in the time that its
// instructions take to come.
template <typename Count, typename Visit>
__device__ __forceinline__ void for_items(Shared& m, int from, int last, Count count, Visit visit) {
    const bool is_one = from == last;
#pragma unroll 1
    for (; from <= last; from += THREADS) {
        const int first_step = is_one ? 0 : 1 << (31 - __clz(min(last - from, THREADS - 1) | 1));
        const int own = is_one ? from : from + threadIdx.x;
        int items = own <= last ? count(own) : 0;
        if (!is_one) {
            m.starts[threadIdx.x] = scan(items, m.sums);
            if (threadIdx.x == 0) m.starts[THREADS] = m.sums[32];
            __syncthreads();
            items = m.starts[THREADS];
        }
#pragma unroll 1
        for (int at = threadIdx.x; at < items; at += THREADS) {
            int low = 0;  // the last sequence that begins at or before `at`
#pragma unroll 1
            for (int step = first_step; step; step /= 2)  // powers of 2, of sequences
                if (m.starts[low + step] <= at) low += step;
            visit(from + low, is_one ? at : at - m.starts[low]);
        }
        __syncthreads();  // starts have been read, and what visits wrote is there
    }
}

// Where tiles of so many tiles of keys are counted, the longest first; rounded down where there are more
// lengths than counters.
__device__ __forceinline__ int counter_of(int num_tiles_of_keys, int longest) {
    const int shorter = longest - num_tiles_of_keys;
    if (longest < THREADS) return max(0, min(shorter, THREADS - 1));
    return max(0, min((int)((i64)shorter * THREADS / (longest + 1)), THREADS - 1));
}
