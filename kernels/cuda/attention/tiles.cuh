// Attention on a list of tiles: what a tile is, and which keys its rows see.
//
// A list is made by attention/tile_list.cu on the device, from lengths alone. Persistent blocks take its
// tiles in order, by a semaphore. Lists know nothing of where tensors lie.
#pragma once
#include "common/words.cuh"

struct alignas(16) TileInfo {
    int sequence;             // -1 in shared memory: no tile is left
    int head_q, head_kv;      // first query head, KV head
    int position;             // of the first row, in its sequence
    int q_start, q_length;    // the sequence's rows of q; q_start is 0 for sequences of one length
    int k_start, k_length;    // and of k
    int first_key, last_key;  // keys [first, last) that some row sees; first is a multiple of BLOCK_N
    int diagonal;             // key at which query position 0 stands
    int num_tiles_of_keys;
};
static_assert(sizeof(TileInfo) == 48, "TILE_BYTES in kvlab/ops/cuda/tile_list.py");

// The head of a list in memory; TileInfo follow.
struct alignas(16) TileList {
    int num_tiles;
    int semaphore;  // of a launch that has no other; 0 between launches
    int unused[2];
};

// Keys that rows [position, position + rows) of a sequence see: columns of the scores from `diagonal` - left
// to `diagonal` + right around their own.
template <typename Divisor>
__device__ __forceinline__ void find_keys(TileInfo& t, int rows, const Divisor& block_n, int left,
                                          int right) {
    t.diagonal = t.k_length - t.q_length;
    const int bottom = min(t.position + rows, t.q_length) - 1 + t.diagonal;
    t.last_key = max(0, min(t.k_length, bottom + right + 1));
    t.first_key = min(t.last_key, max(0, t.position + t.diagonal - left) / block_n * block_n);
    t.num_tiles_of_keys = (t.last_key - t.first_key + block_n - 1) / block_n;
}
