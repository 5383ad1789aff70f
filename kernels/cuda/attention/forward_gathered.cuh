// Attention over keys that lie in runs, some of which other ranks write while the kernel is at work.
//
// A row of `runs` says where the keys of a group of queries in a sequence lie: {their number in a run, 0},
// then for each run its first row and the rank that it comes from (0 to 31), -1 for a run of the call's own
// arrays. A tile's k_start is where its row begins. The maps of K and of V are those of the call's own array
// and of what comes, of each three that copy BLOCK_N rows, 32 and 8: a run has a multiple of 8.
//
// A rank sends the KV heads of a piece together, and then counts in `arrived`. Runs are read from the last to
// the first, so what a rank has itself comes last in a row.
#pragma once
#include "attention/forward_call_sm90.cuh"

constexpr int LONG_BOX = 32, SHORT_BOX = 8;

// Waits until a counter has reached a number, modulo 2^32; what was written before can then be copied. What
// it has reached.
__device__ __forceinline__ u32 wait_arrival(const u32* counter, u32 number) {
    u32 found;
    for (;;) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if ((int)(found - number) >= 0) break;
        __nanosleep(50);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return found;
}

// The run that keys [begin, end) lie in, how far its rows are from these, and whether another rank sends it.
struct Run {
    int begin, end, offset;
    bool comes;
};

// Finds the run of a key, and waits until it is there. `here` has a bit for each rank all of whose pieces
// have come: a block that has seen them asks no more, as the load of a counter delays copies that are due.
__device__ __forceinline__ Run find_run(const Tile& t, const Call& call, int key, u32& here) {
    const int2* const runs = call.runs + t.k_start;
    const int length = __ldg(&runs->x), number = (u32)key / (u32)length;
    const int2 source = __ldg(runs + 1 + number);
    if (source.y >= 0 && !(here >> source.y & 1)) {
        const u32 piece = (u32)t.head_kv / (u32)call.heads_of_piece;
        const u32 found = wait_arrival(call.arrived + source.y, call.first_arrival + piece);
        if ((int)(found - call.first_arrival) >= call.last_piece) here |= 1u << source.y;
    }
    const int begin = number * length;
    return {begin, begin + length, source.x - begin, source.y >= 0};
}

// Where tensor copies find `rows` rows of a run from `key` on; they fill up with zeros.
__device__ __forceinline__ TmaCoord coord_of(const Run& run, int key, int rows) {
    constexpr int END = 1 << 30;
    return {END - rows, run.offset + key + rows, END};
}

// The maps of the arrays that a run lies in.
__device__ __forceinline__ const TensorMap* maps_of(const TensorMap* maps, const Run& run) {
    return run.comes ? maps + KEY_MAPS / 2 : maps;
}

// A tile of K or V that lies in several runs, box by box; keys from `last` on are zeros.
__device__ __forceinline__ void load_runs(u32 to, const TensorMap* maps, u32 barrier, const Tile& t,
                                          const Call& call, int key, u32& here) {
    const u32 end = to + BLOCK_N * 128;
    Run run = {0, key, 0, false};
#pragma unroll 1
    while (to < end) {
        if (key == run.end && key < loaded_keys(t)) run = find_run(t, call, key, here);
        const int rows = max(0, min(run.end, loaded_keys(t)) - key);
        const bool is_long = (rows >= LONG_BOX || rows == 0) && to + LONG_BOX * 128 <= end;
        const TmaCoord from = coord_of(run, key, rows);
        const TensorMap* const map = maps_of(maps, run) + (is_long ? 1 : 2);
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; ++block)
            copy_box(to + block * KV_BLOCK, map, barrier, from, 64 * block, 0, t.head_kv);
        const int step = is_long ? LONG_BOX : SHORT_BOX;
        key += step, to += 128 * step;
    }
}
