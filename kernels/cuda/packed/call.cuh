// What a call of packed attention gets, and what it calls a sequence.
#pragma once

#include "common/pairs.cuh"

constexpr int MAX_RUNGS = 16;
constexpr int CODED = 15, RAW = 16;  // which bits of the macros WIDTHS_K and WIDTHS_V

struct Rung {
    const u8* pool;
    u32 record;
    u16 bits_k, bits_v;  // bits_k may be a profile (pages/profiles.cuh)
};

struct Call {
    Rung rungs[MAX_RUNGS];
    const u8* rung;               // [num_bh, entries]; entries 4 n to 4 n + 3, a quad, have one rung
    const u8* count;              // [num_bh, entries]
    const u32* index;             // [num_bh, entries]
    const int* num_pages;         // [num_bh], entries that are used: multiples of 4
    const __half* k_mean;         // [num_bh, HEAD_DIM]
    const u8* k_shift;            // [num_bh, HEAD_DIM / 2], of rotary pairs
    const signed char* exponent;  // [num_bh, 2]: packed keys, and values, are divided by 2 to that
    const u16* q;                 // [batch, seqlen_q, heads_q, HEAD_DIM] by strides
    u16* out;                     // [batch, seqlen_q, heads_q, HEAD_DIM]
    float* lse;                   // [batch, heads_q, seqlen_q]
    float* partial;               // [grid + sequences, 8, ROW_FLOATS]: sum of p v, maximum, sum of p
    u32* semaphores;              // [sequences], zero between calls
    void* scores;                 // [num_bh, entries / 4]: see packed/saved_scores.cuh
    long long q_batch, q_position, q_head;     // strides of q in elements
    int num_bh, heads_kv, entries, num_rungs;  // bh = (batch row, KV head)
    int rows, group, saved;  // rows = seqlen_q * group; scores of the last `saved` of them are saved
    int slot_bytes, stages, merge_rows;  // of the ring; rows that the merge area has room for
    float scale, softcap;
    // With a window only:
    const u16* base;   // [num_bh, entries]: the upper 16 bits of positions
    const int* first;  // [batch]: the position of the first query token of a row
    int left;          // query token s of row b sees tokens at positions from first[b] + s - left on
    // With PROFILES only:
    const u8* k_order;    // [num_bh, HEAD_DIM / 2]: rotary pairs in order (pages/profiles.cuh)
    const float* k_gain;  // [num_bh, 4]: what blocks of keys are multiplied by
};

struct Sequence {
    int number, bh, first_row, rows;  // of all sequences; its (row, KV head); its query rows
};

// The bh of a sequence; a bh has a sequence for each block of 8 query rows.
__device__ __forceinline__ u32 bh_of(u32 number, u32 blocks) {
    return blocks == 1 ? number : number / blocks;
}

__device__ __forceinline__ Sequence sequence_at(const Call& call, u32 number) {
    const u32 blocks = (call.rows + 7u) / 8u, bh = bh_of(number, blocks);
    const int first = 8 * (number - bh * blocks);
    return {(int)number, (int)bh, first, min(8, call.rows - first)};
}

// Where a query row of a sequence is, in elements: of `q` by strides, else of contiguous arrays.
struct RowCoord {
    u32 batch, position, head;
};

__device__ __forceinline__ RowCoord row_coord(const Call& call, const Sequence& s, u32 row) {
    const u32 r = s.first_row + row, position = r / (u32)call.group, batch = s.bh / (u32)call.heads_kv;
    return {batch, position, (s.bh - batch * call.heads_kv) * call.group + r - position * call.group};
}

__device__ __forceinline__ const u16* q_row(const Call& call, const Sequence& s, int row) {
    const RowCoord p = row_coord(call, s, row);
    return call.q + p.batch * call.q_batch + p.position * call.q_position + p.head * call.q_head;
}
