// Attention backward: what a call is, which part of it a CTA has, and the workspace its kernels share.
//
// A CTA owns BLOCK_N keys of one (sequence, KV head), a tile of a list, and goes through the query rows that
// see any of them, BLOCK_M at a time, one query head of the group after the other. The list is that of the
// forward with rows and keys exchanged: what it calls query positions are keys here.
//
// The workspace has, for every query head, each sequence's rows rounded up to ALIGNED_ROWS: lse_log2 (lse,
// base 2, +inf where there is no row or it sees no key, so that its probabilities are 0), dpsum (the sum of
// dout * out) and sums of dq. lse_log2 and dpsum lie as `stat_offset` says: what a lane needs for 16 columns
// of a product of keys by rows is 16 bytes. Sums lie as `accum_offset` says: in tiles of 64 rows by 8
// channels, and of these first the warp's and then the lane's that has them in a product as mma and wgmma
// leave it. If a step has a number of rows that no product can have as its rows (TURNED), they are its
// columns: `turned_offset`.
//
// With QUERY_GROUPS, most groups of queries of a call, a tile has a part of every group: the rows of the
// group that see its keys. Groups lie in the workspace one after the other.
//
// Needs HEAD_DIM, BLOCK_M, BLOCK_N; QUERY_GROUPS if calls have more than one group of queries.
#pragma once
#ifndef QUERY_GROUPS
#define QUERY_GROUPS 1
#endif
#include "attention/call.cuh"
#if QUERY_GROUPS == 1
#include "attention/tiles.cuh"
using KeyTile = TileInfo;
#else
#include "attention/grouped_tiles.cuh"
using KeyTile = GroupedKeys;
#endif

constexpr bool TURNED = BLOCK_M % 64 != 0 && BLOCK_M > 64;  // sums of dq have channels as rows
constexpr int ALIGNED_ROWS = TURNED ? 2 * BLOCK_M : 128;    // a multiple of BLOCK_M and of 32

#if QUERY_GROUPS > 1
struct QueryGroup {
    Tensor dout, out;
    const float* lse;
    i64 lse_head;
    const int* cu_q;
    i64 first_row, workspace_row;  // of dq, and of the workspace of a head
};
#endif

struct Call {
    Tensor q, k, v, dout, out, dq, dk, dv;  // [batch, seqlen, heads, dim], or with cu_* [total, heads, dim]
    const float* lse;                       // [batch, heads_q, seqlen_q], or [heads_q, total_q]
    float *lse_log2, *dpsum, *dq_accum;     // workspace: [heads_q, rows], and [heads_q, rows, HEAD_DIM]
    u32* dq_semaphore;  // [heads_q, rows / 16], how many CTAs have added to the tile of dq that begins here
    const int* cu_q;    // [sequences + 1], null for sequences of one length
    const int* cu_k;
    i64 lse_batch, lse_head, rows;
    int seqlen_q, seqlen_k, group, dim;  // lengths: the longest
    int left, right;                     // keys a row sees before and after its own position
    float scale, softcap;
    int deterministic;     // CTAs add to dq one after the other, in the order of keys
    int float32_dk_dv;     // dk and dv are float32 whatever q is
    const TileList* list;  // of tiles of keys
    int* semaphore;        // 0 between launches
#if QUERY_GROUPS > 1
    QueryGroup groups[QUERY_GROUPS];  // instead of dout, out and lse; cu_q is any, as lengths are variable
    int num_groups, sequences;
#endif
};

__device__ __forceinline__ int num_groups(const Call& call) {
#if QUERY_GROUPS > 1
    return call.num_groups;
#else
    return 1;
#endif
}

// A sequence of the call.
struct SeqInfo {
    int sequence, batch, q0, k0;  // batch: row of it, 0 with cu_*; first query and key
    int rows, keys;
    int behind;         // key at which query row 0 stands
    i64 workspace_row;  // its first row in the workspace of a head
};

// First row of a sequence in the workspace of a head.
__device__ __forceinline__ i64 find_workspace_row(const Call& call, int sequence, int start, int rows) {
    const int blocks =
        call.cu_q ? start / ALIGNED_ROWS + sequence : sequence * ((rows + ALIGNED_ROWS - 1) / ALIGNED_ROWS);
    return (i64)blocks * ALIGNED_ROWS;
}

#if QUERY_GROUPS == 1
__device__ __forceinline__ SeqInfo find_sequence(const Call& call, int z) {
    SeqInfo s;
    s.sequence = z, s.batch = call.cu_q ? 0 : z;
    s.q0 = call.cu_q ? call.cu_q[z] : 0, s.k0 = call.cu_k ? call.cu_k[z] : 0;
    s.rows = call.cu_q ? call.cu_q[z + 1] - s.q0 : call.seqlen_q;
    s.keys = call.cu_k ? call.cu_k[z + 1] - s.k0 : call.seqlen_k;
    s.behind = s.keys - s.rows;
    s.workspace_row = find_workspace_row(call, z, s.q0, s.rows);
    return s;
}
#endif

// Tile `index` of the list, null behind the last.
__device__ __forceinline__ const TileInfo* find_tile(const Call& call, int index) {
    return index < call.list->num_tiles ? (const TileInfo*)(call.list + 1) + index : nullptr;
}
__device__ __forceinline__ int group_of(const KeyTile& t) {
#if QUERY_GROUPS > 1
    return t.group;
#else
    return 0;
#endif
}
__device__ __forceinline__ i64 find_workspace_row(const Call& call, const KeyTile& t) {
    i64 first = 0;
#if QUERY_GROUPS > 1
    first = call.groups[t.group].workspace_row;
#endif
    return first + find_workspace_row(call, t.sequence, t.k_start, t.k_length);
}
__device__ __forceinline__ SeqInfo sequence_of(const Call& call, const KeyTile& t) {
    return {t.sequence,  call.cu_q ? 0 : t.sequence, t.k_start, t.q_start, t.k_length, t.q_length,
            -t.diagonal, find_workspace_row(call, t)};
}

__device__ __forceinline__ Element* row_of(const Tensor& t, const SeqInfo& s, int first, int row, int head) {
    return t.data + s.batch * t.batch + (i64)(first + row) * t.position + head * t.head;
}

// The rows that see a key of the CTA: [first, last), first a multiple of BLOCK_M.
struct RowRange {
    int first, last;
    int low, high;  // tiles of rows within [low, high] see all keys of the CTA: no mask
};

__device__ __forceinline__ RowRange find_row_range(const Call& call, const SeqInfo& s, int key) {
    const int last_key = key + BLOCK_N - 1;
    RowRange r;
    r.first = max(0, key - s.behind - call.right) / BLOCK_M * BLOCK_M;
    r.last = min(s.rows, last_key - s.behind + call.left + 1);
    r.low = last_key < s.keys ? last_key - s.behind - call.right : s.rows;
    r.high = key - s.behind + call.left;
    return r;
}

// Whether a row sees a key.
__device__ __forceinline__ bool sees(const Call& call, const SeqInfo& s, int row, int key) {
    const int position = row + s.behind;
    return key < s.keys && key >= position - call.left && key <= position + call.right;
}

// Which CTA in the order of keys is the first that has keys seen by a row of the tile at `row`.
__device__ __forceinline__ int first_key_block(const Call& call, const SeqInfo& s, int row) {
    return max(0, row + s.behind - call.left) / BLOCK_N;
}

// Where the lse_log2 or dpsum of a row is: beside each other columns 2 u, 2 u + 1, 8 + 2 u, 9 + 2 u of 16.
__device__ __forceinline__ int stat_offset(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Where an element of dq is, counted from the tiles of 64 rows that the row is in: of 16 rows by 8 channels a
// lane has rows g, g + 8 and channels 2 u, 2 u + 1.
__device__ __forceinline__ int accum_offset(int row, int column) {
    const int lane = row % 8 * 4 + column % 8 / 2;
    return row / 64 * (64 * HEAD_DIM) + column / 8 * 512 + row % 64 / 16 * 128 + lane * 4 + row / 8 % 2 * 2 +
           column % 2;
}

// The same where TURNED: 64 channels by BLOCK_M rows, of 16 channels by 8 rows a lane has channels g, g + 8
// and rows 2 u, 2 u + 1.
__device__ __forceinline__ i64 turned_offset(int row, int column) {
    const int lane = column % 8 * 4 + row % 8 / 2;
    return row / BLOCK_M * (i64)(BLOCK_M * HEAD_DIM) + column / 64 * (BLOCK_M * 64) +
           row % BLOCK_M / 8 * 512 + column % 64 / 16 * 128 + lane * 4 + column / 8 % 2 * 2 + row % 2;
}

// A score from a product q k: capped, softcap * tanh(y) with tanh(y) = 1 - 2 / (1 + exp(2 y)), or scaled.
__device__ __forceinline__ float softcap_score(const Call& call, float s) {
    const float scaled = s * call.scale;
    if (!(call.softcap > 0.f)) return scaled;
    const float rate = __fdividef(2.f * LOG2E, call.softcap);
    return call.softcap - __fdividef(2.f * call.softcap, 1.f + power_of_2(scaled * rate));
}

// How a capped score grows with the scaled one.
__device__ __forceinline__ float softcap_slope(const Call& call, float s) {
    if (!(call.softcap > 0.f)) return 1.f;
    const float part = __fdividef(s, call.softcap);
    return 1.f - part * part;
}

// One step's tile of rows of one query head.
struct Tile {
    int head, row;
};

// The tiles of the heads from kv_head * group to (kv_head + 1) * group - 1; a later head ends them.
__device__ __forceinline__ Tile first_tile(const Call& call, const RowRange& rows, int kv_head) {
    return {(kv_head + (rows.first >= rows.last)) * call.group, rows.first};
}

__device__ __forceinline__ Tile next_tile(const Tile& at, const RowRange& rows) {
    if (at.row + BLOCK_M < rows.last) return {at.head, at.row + BLOCK_M};
    return {at.head + 1, rows.first};
}

// Waits until all earlier CTAs have added to a tile of dq; one thread.
__device__ __forceinline__ void wait_semaphore(const u32* semaphore, u32 value) {
    u32 now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(semaphore) : "memory");
    while (now != value);
}
__device__ __forceinline__ void release_semaphore(u32* semaphore) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// Writes two channels of a row of dq, dk or dv.
__device__ __forceinline__ void write_pair(u16* row, int channel, int dim, u32 pair) {
    if (channel >= dim) return;
    if (dim % 2 == 0) {
        *(u32*)(row + channel) = pair;
    } else {
        row[channel] = (u16)pair;
        if (channel + 1 < dim) row[channel + 1] = (u16)(pair >> 16);
    }
}

#if !FLOAT32
// Writes two channels of a row of dk or dv.
__device__ __forceinline__ void write_sums(const Tensor& t, const Call& call, u16* row, int channel, float x,
                                           float y) {
    if (!call.float32_dk_dv) return write_pair(row, channel, call.dim, pack_pair(x, y));
    float* const to = (float*)t.data + (row - t.data) + channel;
    if (channel < call.dim) to[0] = x;
    if (channel + 1 < call.dim) to[1] = y;
}
#endif
