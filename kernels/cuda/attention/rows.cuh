// Attention forward: what a call is, which part of it a CTA has, masks and results of 16 rows of a warp, laid
// out as attention/softmax.cuh says. Needs BLOCK_M, BLOCK_N, HEAD_DIM, PITCH, SOFTCAP, ALIGNED and
// common/pairs.cuh, attention/call.cuh.
#pragma once

#include "attention/softmax.cuh"

struct Call {
    Tensor q, k, v, out;  // [batch, seqlen, heads, dim], or with cu_* [total, heads, dim]
    float* lse;           // [batch, heads_q, seqlen_q], or [heads_q, total_q]
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

__device__ __forceinline__ Work find_work(const Call& call) {
    const int z = blockIdx.z;
    Work w;
    w.batch = call.cu_q ? 0 : z;
    w.q0 = call.cu_q ? call.cu_q[z] : 0, w.k0 = call.cu_k ? call.cu_k[z] : 0;
    const int positions = call.cu_q ? call.cu_q[z + 1] - w.q0 : call.seqlen_q;
    w.keys = call.cu_k ? call.cu_k[z + 1] - w.k0 : call.seqlen_k;
    w.rows = positions * call.group;
    w.row0 = (gridDim.x - 1 - blockIdx.x) * BLOCK_M;
    w.behind = w.keys - positions;
    const int top = w.row0 / call.group + w.behind;
    const int bottom = (min(w.row0 + BLOCK_M, w.rows) - 1) / call.group + w.behind;
    w.first = max(0, top - call.left) / BLOCK_N * BLOCK_N, w.last = min(w.keys, bottom + call.right + 1);
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

// Masks for row `row` and row + 8 the keys of the tile at `key` that they must not see.
template <int COUNT>
__device__ __forceinline__ void apply_mask(float (&s)[COUNT], const Call& call, const Work& w, int key,
                                           int row) {
    asm volatile("" : "+r"(row));  // what follows from it shall not take registers while no tile is masked
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int position = (row + 8 * half) / call.group + w.behind;
        const int first = position - call.left - key, last = min(position + call.right, w.keys - 1) - key;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const int column = 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2;
            if (column < first || column > last) s[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

// Writes lse, and out as rows of PITCH elements to shared memory; `row` is the first of the 16.
template <int COUNT>
__device__ __forceinline__ void finish_rows(const Call& call, const Work& w, const Softmax& x,
                                            float (&o)[COUNT], u16* to, int row, float scale_log2) {
    const int lane = threadIdx.x % 32, g = lane / 4, u = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = x.row_sum[half] + __shfl_xor_sync(ALL_LANES, x.row_sum[half], 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
        for (int n = 0; n < COUNT; n += 4)
            *(u32*)(to + (g + 8 * half) * PITCH + 2 * n + 2 * u) =
                pack_pair(o[n + 2 * half] * factor, o[n + 2 * half + 1] * factor);
        const int own = row + g + 8 * half, position = own / call.group;
        if (u == 0 && own < w.rows) {
            const int head = blockIdx.y * call.group + own - position * call.group;
            call.lse[w.batch * call.lse_batch + head * call.lse_head + w.q0 + position] =
                sum == 0.f ? -INFINITE : (x.row_max[half] * scale_log2 + log2f(sum)) * LN2;
        }
    }
}

// Copies ROWS rows of out from shared memory, one warp; `row` is the first.
template <int ROWS>
__device__ __forceinline__ void copy_out(const Call& call, const Work& w, const u16* from, int row) {
    constexpr int PIECE = ALIGNED ? 8 : 1, PIECES = HEAD_DIM / PIECE;
    Element* out = base_of(call.out, w, w.q0, blockIdx.y * call.group);
    for (int at = threadIdx.x % 32; at < ROWS * PIECES; at += 32) {
        const int own = at / PIECES, channel = at % PIECES * PIECE;
        if (row + own >= w.rows || channel >= call.dim) continue;
        u16* to = out + row_offset(call.out, row + own, call.group) + channel;
        if constexpr (ALIGNED)
            *(uint4*)to = *(const uint4*)(from + own * PITCH + channel);
        else
            *to = from[own * PITCH + channel];
    }
}
