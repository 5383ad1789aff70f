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

// The run that keys [begin, end) lie in, its first row and the rank that it comes from.
struct Run {
    int begin, end, row, source;
};

// Finds the run of a key, and waits until it is there. `seen` is the last rank that was waited for.
__device__ __forceinline__ Run find_run(const int2* runs, const Call& call, int key, int head, int& seen) {
    const int length = runs->x, number = key / length;
    const int2 place = runs[1 + number];
    if (place.y >= 0 && place.y != seen) {
        seen = place.y;
        wait_arrival(call.arrived + seen, call.first_arrival + head / call.heads_of_piece);
    }
    return {number * length, (number + 1) * length, place.x, place.y};
}

// Where tensor copies find `rows` rows of a run from `key` on; they fill up with zeros.
__device__ __forceinline__ TmaCoord coord_of(const Run& run, int key, int rows) {
    constexpr int END = 1 << 30;
    return {END - rows, run.row + key - run.begin + rows, END};
}

// The maps of the arrays that a run lies in.
__device__ __forceinline__ const TensorMap* maps_of(const TensorMap* maps, const Run& run) {
    return run.source >= 0 ? maps + 2 : maps;
}

// A tile of K or V that lies in several runs, eight keys at a time; keys from `last` on are zeros.
__device__ __forceinline__ void load_runs(u32 to, const TensorMap* maps, u32 barrier, const int2* runs,
                                          const Call& call, int key, int last, int head) {
    int seen = -1;
    Run run = {0, key, 0, 0};
#pragma unroll 1
    for (int i = 0; i < BLOCK_N; i += SHORT_BOX, key += SHORT_BOX) {
        if (key == run.end && key < last) run = find_run(runs, call, key, head, seen);
        const TmaCoord from = coord_of(run, key, max(0, min(run.end, last) - key));
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; ++block)
            copy_box(to + block * KV_BLOCK + i * 128, maps_of(maps, run) + 1, barrier, from, 64 * block, 0,
                     head);
    }
}
