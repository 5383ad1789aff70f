// Attention backward on Hopper: in which order a CTA takes the rows of its tile, or of a part of it. Needs
// HEAD_DIM, CLUSTER_SPLIT, DETERMINISTIC.
#pragma once
#include "attention/backward_cluster.cuh"

// Steps of a run: so many runs to a head; at least; at most, in a deterministic call.
constexpr int RUNS = 8, SHORTEST_RUN = !DETERMINISTIC ? 8 : HEAD_DIM == 64 ? 2 : 4;
constexpr int LONGEST_RUN = !DETERMINISTIC ? 1 << 30 : HEAD_DIM == 64 ? 2 : 8;

// The steps of a CTA in a tile: a run of rows of every query head of the group, then the next run. Q, dout
// and dq of a run are in L2 while the CTAs that share a KV head work on it. A deterministic call walks from
// the last rows to the first: all CTAs that add to a head begin with the same rows, and runs are short, so
// that one whose keys fewer rows see need not wait for the others at every head. Otherwise CTAs begin with
// the first rows that see their keys, since those that add to the same rows of dq at the same time slow each
// other down.
// What follows from the tile is found anew at each step.
struct Steps {
    int head, index, begin;  // of the next step, counted among the tile's; of its run
    int left;                // where CTAs share a tile
    __device__ __forceinline__ bool more(const TileInfo& t) const {
        return CLUSTER_SPLIT > 1 ? left > 0 : begin < t.num_tiles_of_keys;
    }
    __device__ __forceinline__ int row(const TileInfo& t) const {
        return t.first_key + BLOCK_M * (DETERMINISTIC ? t.num_tiles_of_keys - 1 - index : index);
    }
    __device__ __forceinline__ void next(const Call& call, const TileInfo& t) {
        if (CLUSTER_SPLIT > 1) --left;
        const int count = t.num_tiles_of_keys, run = length_of_run(t);
        if (++index == min(begin + run, count)) {
            if (++head == (t.head_kv + 1) * call.group) head -= call.group, begin += run;
            index = begin;
        }
    }
    static __device__ __forceinline__ int length_of_run(const TileInfo& t) {
        if (CLUSTER_SPLIT > 1) return t.num_tiles_of_keys;
        return min(max(SHORTEST_RUN, t.k_length / (RUNS * BLOCK_M)), LONGEST_RUN);
    }
};

__device__ __forceinline__ Steps find_steps(const Call& call, const TileInfo& t) {
    Steps s = {t.head_kv * call.group, 0, 0, t.num_tiles_of_keys * call.group};
    if (CLUSTER_SPLIT > 1 && s.left) {
        const int split = blockIdx.x % CLUSTER, from = split * s.left / CLUSTER_SPLIT;
        s.left = (split + 1) * s.left / CLUSTER_SPLIT - from;
        s.head += from / t.num_tiles_of_keys, s.index = from % t.num_tiles_of_keys;
    }
    return s;
}
