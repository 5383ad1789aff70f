// Attention of several groups of queries on a list of tiles: what a warpgroup has of a tile.
//
// A tile is GROUPS entries that read keys of one KV head of one sequence; their rows may be those of
// different groups. An entry without rows has a q_length of 0. Lists are made by attention/grouped_list.cu.
#pragma once
#include "attention/tiles.cuh"

struct alignas(16) GroupedTile {
    int sequence;           // -1 in shared memory: no tile is left
    int head_q, head_kv;    // first query head, KV head
    int position;           // of the first row, in its sequence
    int q_start, q_length;  // the sequence's rows of the group
    int k_start, k_length;  // its keys, as many as the group sees
    int first_key,
        last_key;  // keys [first, last) that some row sees; first, the tile's, a multiple of BLOCK_N
    int diagonal;  // key at which query position 0 stands
    int group;
    int loaded_keys;      // last_key of the entry of the tile that has most
    int part, num_parts;  // of the tile's keys
    int slot;             // of the first part in the workspace
};
static_assert(sizeof(GroupedTile) == 64, "ENTRY_BYTES in kvlab/ops/cuda/grouped.py");

// A group's part of a tile of keys in the backward, where keys and rows change places: q_* are the prefix
// that the group sees, k_* its rows. A tile has a part of every group, those that see most keys first.
struct alignas(16) GroupedKeys : TileInfo {
    int group;
    int num_keys;  // of the sequence
    int unused[2];
};
static_assert(sizeof(GroupedKeys) == 64, "PART_BYTES in kvlab/ops/cuda/tile_list.py");
