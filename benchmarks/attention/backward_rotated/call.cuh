// What a call of attention backward is. Experiment.
#pragma once
#define INFINITE __int_as_float(0x7f800000)
constexpr int ALIGNED_ROWS = 128;  // rows of a sequence in the workspace are a multiple
struct Tensor {
    u16* data;
    i64 batch, position, head;
};
struct alignas(16) TileInfo {
    int sequence;           // row of the batch; -1: no tile is left
    int head_kv, key;       // KV head, first key
    int q_start, q_length;  // tokens of the sequence
    int k_start, k_length;
    int stored;            // first row of the sequence in the workspace of a head
    int first_row, tiles;  // rows that see a key: first, a multiple of BLOCK_M, and tiles of BLOCK_M
    int diagonal;          // key at which query position 0 stands
    int unused;
};
struct Call {
    Tensor dout, out, dq;
    const float* lse;
    float *peaks, *deltas, *sums;
    u32* turns;
    const TileInfo* tiles;
    int* semaphore;
    const int* cu_q;
    i64 lse_batch, lse_head, rows;
    int num_tiles, group, dim, left, right;
    int ordered;     // parts of dq are added in the order of keys
    int descending;  // rows are walked from the last to the first
    int q_length;    // of sequences of one length
    float scale;
    int unused;
    int* records;  // where waits stand that do not end (debug)
};
// Where the peak or delta of a row lies: a lane's two pairs of columns of a product lie side by side.
__device__ __forceinline__ int stat_place(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}
