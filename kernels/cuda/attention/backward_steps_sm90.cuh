// Attention backward on Hopper: in which order a CTA takes the rows of its tile, or of a part of it. Needs
// HEAD_DIM and CLUSTER_SPLIT.
//
// DETERMINISTIC: 1 for the same bits every time (0 if it is not given).
#pragma once
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#include "attention/backward_cluster.cuh"

// Steps of a run: so many runs to a head; at least; at most, in a deterministic call.
constexpr int RUNS = DETERMINISTIC && HEAD_DIM == 256 ? 16 : 8;
constexpr int SHORTEST_RUN = !DETERMINISTIC ? 8 : HEAD_DIM == 64 ? 2 : 4;
constexpr int LONGEST_RUN = !DETERMINISTIC ? 1 << 30 : HEAD_DIM == 64 ? 2 : 8;

// The steps of a CTA in a tile: a run of rows of every query head of the group, then the next run. Q, dout
// and dq of a run are in L2 while the CTAs that share a KV head work on it. A deterministic call walks from
// the last rows to the first: all CTAs that add to a head begin with the same rows, and runs are short, so
// that one whose keys fewer rows see need not wait for the others at every head. Otherwise CTAs begin with
// the first rows that see their keys, since those that add to the same rows of dq at the same time slow each
// other down.
// CTAs that share a tile take its steps head by head, each a part of them; in a deterministic call row by
// row, in turns. What follows from the tile is found anew at each step.
struct StepIterator {
    int head, index, begin;  // of the next step, counted among the tile's; of its run
    int left;                // where CTAs share a tile
    __device__ __forceinline__ bool more(const TileInfo& t) const {
        return CLUSTER_SPLIT > 1 ? left > 0 : begin < t.num_tiles_of_keys;
    }
    __device__ __forceinline__ int row(const TileInfo& t) const {
        return t.first_key + BLOCK_M * (DETERMINISTIC ? t.num_tiles_of_keys - 1 - index : index);
    }
    __device__ __forceinline__ void next(const Call& call, const TileInfo& t) {
        const int end = (t.head_kv + 1) * call.group, count = t.num_tiles_of_keys;
        if (CLUSTER_SPLIT > 1) {
            --left;
            if (DETERMINISTIC)
                for (head += CLUSTER_SPLIT; head >= end; ++index) head -= call.group;
            else if (++index == count && ++head < end)
                index = 0;
            return;
        }
        const int run = min(max(SHORTEST_RUN, t.k_length / (RUNS * BLOCK_M)), LONGEST_RUN);
        if (++index == min(begin + run, count)) {
            if (++head == end) head -= call.group, begin += run;
            index = begin;
        }
    }
};

// How many tiles of keys before this one are seen by rows of a step.
__device__ __forceinline__ int count_tiles_before(const Call& call, const TileInfo& t, int row) {
    constexpr int KEYS = WIDE ? 2 * BLOCK_N : BLOCK_N;
    return t.position / KEYS - max(0, row - t.diagonal - call.left) / KEYS;
}

__device__ __forceinline__ StepIterator find_steps(const Call& call, const TileInfo& t) {
    StepIterator s = {t.head_kv * call.group, 0, 0, t.num_tiles_of_keys * call.group};
    if (CLUSTER_SPLIT > 1 && s.left) {
        const int split = blockIdx.x % CLUSTER / (CLUSTER / CLUSTER_SPLIT);
        if (DETERMINISTIC) {
            s.left = (s.left - split + CLUSTER_SPLIT - 1) / CLUSTER_SPLIT;
            s.head += split % call.group, s.index = split / call.group;
            return s;
        }
        const int from = split * s.left / CLUSTER_SPLIT;
        s.left = (split + 1) * s.left / CLUSTER_SPLIT - from;
        s.head += from / t.num_tiles_of_keys, s.index = from % t.num_tiles_of_keys;
    }
    return s;
}
