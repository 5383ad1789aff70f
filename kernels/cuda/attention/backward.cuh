// Attention backward: what a call is, which part of it a CTA has, and the workspace its kernels share.
//
// A CTA owns BLOCK_N keys of one (sequence, KV head) and goes through the query rows that see any of them,
// BLOCK_M at a time, one query head of the group after the other.
//
// The workspace has, for every query head, each sequence's rows rounded up to ALIGNED_ROWS: lse_log2 (lse,
// base 2, +inf where there is no row or it sees no key, so that its probabilities are 0), dpsum (the sum of
// dout * out) and sums of dq. Sums lie in tiles of 64 rows by TILE_COLUMNS, rows one after the other; in rows
// of 64 columns the pieces of 8 are exchanged by the row modulo 8, so that a warp that writes the sums of a
// product as mma and wgmma leave them meets different banks.
//
// Needs HEAD_DIM, BLOCK_M, BLOCK_N, common/pairs.cuh and attention/call.cuh.
#pragma once

constexpr int ALIGNED_ROWS = 128;  // a multiple of BLOCK_M and 64
constexpr int TILE_COLUMNS = HEAD_DIM % 64 ? HEAD_DIM : 64;

struct Call {
    Tensor q, k, v, dout, out, dq, dk, dv;  // [batch, seqlen, heads, dim], or with cu_* [total, heads, dim]
    const float* lse;                       // [batch, heads_q, seqlen_q], or [heads_q, total_q]
    float *lse_log2, *dpsum, *dq_accum;     // workspace: [heads_q, rows], and [heads_q, rows, HEAD_DIM]
    u32* dq_semaphore;  // [heads_q, rows / 16], how many CTAs have added to the tile of dq that begins here
    const int* cu_q;    // [sequences + 1], null for sequences of one length
    const int* cu_k;
    i64 lse_batch, lse_head, rows;
    int seqlen_q, seqlen_k, heads_kv, group, dim;  // lengths: the longest
    int left, right;                               // keys a row sees before and after its own position
    float scale, softcap;
    int deterministic;  // CTAs add to dq one after the other, in the order of keys
};

// A sequence of the call.
struct SeqInfo {
    int batch, q0, k0;  // row of the batch, first query and key
    int rows, keys;
    int behind;         // key at which query row 0 stands
    i64 workspace_row;  // its first row in the workspace of a head
};

__device__ __forceinline__ SeqInfo find_sequence(const Call& call, int z) {
    SeqInfo s;
    s.batch = call.cu_q ? 0 : z;
    s.q0 = call.cu_q ? call.cu_q[z] : 0, s.k0 = call.cu_k ? call.cu_k[z] : 0;
    s.rows = call.cu_q ? call.cu_q[z + 1] - s.q0 : call.seqlen_q;
    s.keys = call.cu_k ? call.cu_k[z + 1] - s.k0 : call.seqlen_k;
    s.behind = s.keys - s.rows;
    const i64 blocks =
        call.cu_q ? s.q0 / ALIGNED_ROWS + z : (i64)z * ((s.rows + ALIGNED_ROWS - 1) / ALIGNED_ROWS);
    s.workspace_row = blocks * ALIGNED_ROWS;
    return s;
}

__device__ __forceinline__ Element* row_of(const Tensor& t, const SeqInfo& s, int first, int row, int head) {
    return t.data + s.batch * t.batch + (i64)(first + row) * t.position + head * t.head;
}

// Which keys a CTA has: those of a KV head from block * BLOCK_N on. The grid: x block, the first (under a
// causal mask the longest) first, y KV head, z sequence; or without y, x KV head + heads * block, so that of
// all heads the longest come first. Of a cluster, x counts clusters.
struct KeyBlock {
    int head, block;
};

__device__ __forceinline__ KeyBlock find_key_block(const Call& call, int x) {
    if (gridDim.y > 1) return {(int)blockIdx.y, x};
    return {x % call.heads_kv, x / call.heads_kv};
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

// Where an element of dq is, counted from the tiles of 64 rows that the row is in.
__device__ __forceinline__ int accum_offset(int row, int column) {
    const int swizzle = TILE_COLUMNS == 64 ? row % 8 : 0;
    const int inside = (column % TILE_COLUMNS / 8 ^ swizzle) * 8 + column % 8;
    return (row / 64 * (HEAD_DIM / TILE_COLUMNS) + column / TILE_COLUMNS) * (64 * TILE_COLUMNS) +
           row % 64 * TILE_COLUMNS + inside;
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
