// Attention forward: what a call is, and which part of it a CTA has.
#pragma once

#include "attention/call.cuh"

struct Call {
    Tensor q, k, v, out;  // [batch, seqlen, heads, dim], or with cu_* [total, heads, dim]
    float* lse;           // [batch, heads_q, seqlen_q], or [heads_q, total_q]; null: not wanted
    i64 lse_batch, lse_head;
    const int* cu_q;  // [sequences + 1], null for sequences of one length
    const int* cu_k;
    int seqlen_q, seqlen_k, group, dim;  // lengths: the longest
    int left, right;                     // keys a row sees before and after its own position
    float scale, softcap;
};

// The part of a call that a CTA works on: rows of one (sequence, KV head). A row is (query position, head of
// the group), heads fastest. blockIdx: x block of rows, the last first, y KV head, z sequence.
struct Work {
    int q0, k0;        // first query and key of the sequence
    int batch;         // row of the batch
    int row0, rows;    // first row of the CTA, and all rows of the sequence
    int keys, behind;  // behind: key at which query position 0 stands
    int first, last;   // keys [first, last) are seen by some row
    int low, high;     // keys [low, high] are seen by all: a tile within is not masked
};

// ROWS of a CTA, KEYS of a tile.
template <int ROWS, int KEYS>
__device__ __forceinline__ Work find_work(const Call& call) {
    const int z = blockIdx.z;
    Work w;
    w.batch = call.cu_q ? 0 : z;
    w.q0 = call.cu_q ? call.cu_q[z] : 0, w.k0 = call.cu_k ? call.cu_k[z] : 0;
    const int positions = call.cu_q ? call.cu_q[z + 1] - w.q0 : call.seqlen_q;
    w.keys = call.cu_k ? call.cu_k[z + 1] - w.k0 : call.seqlen_k;
    w.rows = positions * call.group;
    w.row0 = (gridDim.x - 1 - blockIdx.x) * ROWS;
    w.behind = w.keys - positions;
    const int top = w.row0 / call.group + w.behind;
    const int bottom = (min(w.row0 + ROWS, w.rows) - 1) / call.group + w.behind;
    w.first = max(0, top - call.left) / KEYS * KEYS, w.last = min(w.keys, bottom + call.right + 1);
    w.low = bottom - call.left, w.high = min(top + call.right, w.keys - 1);
    return w;
}

// Where a row is in a tensor: `base` is its first position and the first head of the group.
__device__ __forceinline__ i64 row_offset(const Tensor& t, int row, int group) {
    const int position = row / group;
    return position * t.position + (row - position * group) * t.head;
}
__device__ __forceinline__ Element* base_of(const Tensor& t, const Work& w, int first, int head) {
    return t.data + w.batch * t.batch + first * t.position + head * t.head;
}
