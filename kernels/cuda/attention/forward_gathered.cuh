// Attention over keys that lie in runs, some of which other ranks write while the kernel is at work.
//
// A row of `runs` says where the keys of a group of queries in a sequence lie: {their number in a run, 0},
// then for each run its first row and the rank that it comes from, -1 for a run of the call's own arrays. A
// tile's k_start is where its row begins. The maps of K and of V are those of the call's own array and of
// what comes, of each one that copies BLOCK_N rows and one that copies 8: a run has a multiple of 8.
//
// A rank sends the KV heads of a piece together, and then counts in `arrived`. Runs are read from the last to
// the first, so what a rank has itself comes last in a row.
#pragma once
#include "attention/forward_call_sm90.cuh"

constexpr int SHORT_BOX = 8;

// Waits until a counter has reached a number, modulo 2^32; what was written before can then be copied.
__device__ __forceinline__ void wait_arrival(const u32* counter, u32 number) {
    u32 found;
    for (;;) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if ((int)(found - number) >= 0) break;
        __nanosleep(50);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// A tile of K or V out of runs; keys from `last` on are zeros. `seen` is the last rank that was waited for.
__device__ __forceinline__ void load_runs(u32 to, const TensorMap* maps, u32 barrier, const int2* runs,
                                          const Call& call, int key, int last, int head, int& seen) {
    constexpr int END = 1 << 30;
    const int length = runs->x;
    int run = key / length, offset = key - run * length;
    const bool is_one = offset + min(BLOCK_N, last - key) <= length;
    const int step = is_one ? BLOCK_N : SHORT_BOX;
#pragma unroll 1
    for (int i = 0; i < BLOCK_N; i += step) {
        TmaCoord from = {END, 0, END};
        const TensorMap* map = is_one ? maps : maps + 1;
        if (key + i < last) {
            const int2 place = runs[1 + run];
            if (place.y >= 0) {
                map += 2;
                if (place.y != seen) {
                    seen = place.y;
                    wait_arrival(call.arrived + seen, call.first_arrival + head / call.heads_of_piece);
                }
            }
            const int rows = min(length - offset, last - key - i);
            from.position -= rows, from.row = place.x + offset + rows;
        }
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; ++block)
            copy_box(to + block * KV_BLOCK + i * 128, map, barrier, from, 64 * block, 0, head);
        offset += step;
        if (offset >= length) offset -= length, ++run;
    }
}
