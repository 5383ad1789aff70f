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
struct Steps {
    int head, row, left;        // of the next step; steps that are left
    int index, begin, end;      // of its row among the tile's, in steps; of its run
    int count, run, stride;     // steps of a head, and of a run; rows from one step to the next
    int first_head, first_row;  // of the tile
    __device__ __forceinline__ void next(const Call& call) {
        --left;
        if (++index == end) {
            if (++head == first_head + call.group)
                head = first_head, begin = end, end = min(end + run, count);
            index = begin;
        }
        row = first_row + stride * index;
    }
};

__device__ __forceinline__ Steps find_steps(const Call& call, const TileInfo& t) {
    Steps s;
    s.count = t.num_tiles_of_keys, s.left = s.count * call.group;
    s.head = s.first_head = t.head_kv * call.group;
    s.stride = DETERMINISTIC ? -BLOCK_M : BLOCK_M;
    s.first_row = t.first_key + (DETERMINISTIC ? (s.count - 1) * BLOCK_M : 0);
    s.run = min(max(SHORTEST_RUN, t.k_length / (RUNS * BLOCK_M)), LONGEST_RUN);
    if (CLUSTER_SPLIT > 1) s.run = s.count;
    s.index = s.begin = 0, s.end = min(s.run, s.count);
    if (CLUSTER_SPLIT > 1 && s.count) {
        const int split = blockIdx.x % CLUSTER, from = split * s.left / CLUSTER_SPLIT;
        s.left = (split + 1) * s.left / CLUSTER_SPLIT - from;
        s.head += from / s.count, s.index = from % s.count;
    }
    s.row = s.first_row + s.stride * s.index;
    return s;
}
