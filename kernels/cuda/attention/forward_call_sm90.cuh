// Attention forward for Hopper: what a call is, its sizes, and what a warpgroup has of a tile.
//
// Needs HEAD_DIM, BLOCK_N, GROUPS, Q_SLOTS; QUERY_GROUPS if calls have more than one group of queries; MERGE
// = 1 if results are merged into those over other keys; GATHERED = 1 if keys lie in runs.
#pragma once
#ifndef MERGE
#define MERGE 0
#endif
#ifndef GATHERED
#define GATHERED 0
#endif
#ifndef QUERY_GROUPS
#define QUERY_GROUPS 1
#endif
// Whether the warpgroups that compute write out themselves, from registers: they merge, or Q has one slot
// only, which then takes the next Q as soon as the last scores are there. Else out goes through the slot of
// Q.
#define WRITES_OUT (MERGE || Q_SLOTS == 1)
#include "common/hopper.cuh"
#if QUERY_GROUPS == 1
#include "attention/tiles.cuh"
using Tile = TileInfo;  // of all warpgroups
#else
#include "attention/grouped_tiles.cuh"
using Tile = GroupedTile;  // a warpgroup's part of a tile
#endif

constexpr int COLUMN_BLOCKS = (HEAD_DIM + 63) / 64;  // of 64 channels, as they lie in shared memory
constexpr int Q_BLOCK = 64 * 128, Q_BYTES = COLUMN_BLOCKS * Q_BLOCK;            // of a warpgroup
constexpr int KV_BLOCK = BLOCK_N * 128, TILE_BYTES = COLUMN_BLOCKS * KV_BLOCK;  // of a tile of K or V
constexpr int STAGES = 2, INFO_STAGES = 2, SLOTS = Q_SLOTS * GROUPS;
constexpr bool GROUPED = QUERY_GROUPS > 1;
constexpr bool SPLIT = HEAD_DIM <= 128;  // whether tiles may be split over keys: registers are there for it
constexpr int ENTRIES = GROUPED ? GROUPS : 1;    // of a tile
constexpr int OUT_READERS = WRITES_OUT ? 4 : 1;  // of a warpgroup's Q and tile: its warps, or what stores out
constexpr int BARRIERS = 4 * STAGES + 3 * SLOTS + 2 * INFO_STAGES + 1;
static_assert(KV_BLOCK % 1024 == 0, "swizzled blocks begin at multiples of 1024");

// Where results are.
struct Results {
    float* lse;  // [batch, heads_q, seqlen_q], or [heads_q, total_q]; null: not wanted
    i64 lse_batch, lse_head;
    void* out;  // [batch, seqlen_q, heads_q, dim], or [total_q, heads_q, dim]; float32 where it is merged
    i64 out_batch, out_position, out_head;
};

struct Call {
    Results results[MERGE ? QUERY_GROUPS : 1];  // where they are merged, each group has arrays of its own
#if QUERY_GROUPS > 1
    float* parts;   // workspace of tiles split over keys
    int* arrivals;  // 0 between launches
#if GATHERED
    const int2* runs;    // see attention/forward_gathered.cuh
    const u32* arrived;  // [ranks], pieces that have come from each
    int first_arrival;   // how many there are when the first piece of this call has come
    int heads_of_piece;  // KV heads that come together
    int last_piece;      // of this call, counted from 0
#else
    const int* segments;  // [sequences, num_segments], null where the keys of a sequence lie in a row
    int num_segments, segment_len, box;
#endif
    int first_row[QUERY_GROUPS];  // of a group in its out and lse
    int unused;
#endif
    const TileList* list;
    int* semaphore;                   // 0 between launches
    int variable;                     // whether sequences have lengths of their own
    int pack, positions, reciprocal;  // query heads of a tile, positions of a warpgroup, 65536 / pack, up
    int dim, left, right;             // left, right: keys a row sees before and after its own position
    float scale, softcap;
};

constexpr int KEY_MAPS = GATHERED ? 6 : 1;  // of K, and of V

struct Arguments {
    TensorMap q[QUERY_GROUPS], k[KEY_MAPS], v[KEY_MAPS];
#if !MERGE
    TensorMap out;
#endif
    Call call;
};

// Keys up to which a tile is loaded: those of the warpgroup that sees most.
__device__ __forceinline__ int loaded_keys(const Tile& t) {
#if QUERY_GROUPS > 1
    return t.loaded_keys;
#else
    return t.last_key;
#endif
}
