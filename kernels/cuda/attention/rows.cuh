// Attention forward but on Hopper: what a call is, and which part of it a CTA has.
#pragma once

#include "attention/call.cuh"
#include "attention/tiles.cuh"

struct Call {
    Tensor q, k, v, out;  // [batch, seqlen, heads, dim], or with variable [total, heads, dim]
    float* lse;           // [batch, heads_q, seqlen_q], or [heads_q, total_q]; null: not wanted
    i64 lse_batch, lse_head;
    const TileList* list;
    int variable;          // whether sequences have lengths of their own
    int pack, positions;   // query heads and positions of a tile
    int dim, left, right;  // left, right: keys a row sees before and after its own position
    float scale, softcap;
};

// The tile of a CTA. A row is (query position, head of the tile), heads fastest.
struct TileRows {
    int q0, k0;           // first query and key of the sequence
    int batch;            // row of the batch
    int head_q, head_kv;  // first query head
    int row0, rows;       // first row of the tile, and the one behind its last
    int keys, behind;     // behind: key at which query position 0 stands
    int first, last;      // keys [first, last) are seen by some row
    int low, high;        // keys [low, high] are seen by all: a tile of keys within is not masked
};

// The CTA's tile, null behind the last.
__device__ __forceinline__ const TileInfo* find_tile(const Call& call) {
    return blockIdx.x < call.list->num_tiles ? (const TileInfo*)(call.list + 1) + blockIdx.x : nullptr;
}
__device__ __forceinline__ TileRows find_rows(const Call& call, const TileInfo& t) {
    TileRows tile;
    tile.q0 = t.q_start, tile.k0 = t.k_start, tile.batch = call.variable ? 0 : t.sequence;
    tile.head_q = t.head_q, tile.head_kv = t.head_kv;
    const int end = min(t.position + call.positions, t.q_length);
    tile.row0 = t.position * call.pack, tile.rows = end * call.pack;
    tile.keys = t.k_length, tile.behind = t.diagonal;
    tile.first = t.first_key, tile.last = t.last_key;
    tile.low = end - 1 + t.diagonal - call.left,
    tile.high = min(t.position + t.diagonal + call.right, tile.keys - 1);
    return tile;
}

// Where a row is in a tensor: `base` is its first position and the first head of the tile.
__device__ __forceinline__ i64 row_offset(const Tensor& t, int row, int pack) {
    const int position = row / pack;
    return position * t.position + (row - position * pack) * t.head;
}
__device__ __forceinline__ Element* base_of(const Tensor& t, const TileRows& tile, int first, int head) {
    return t.data + tile.batch * t.batch + first * t.position + head * t.head;
}
