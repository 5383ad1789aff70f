// Attention backward for Hopper (sm_90a) at head dimensions above 128: as attention_backward_sm90.cu, but dk
// and dv of 64 keys fill the registers of both computing warpgroups.
//
// Threads and data
//   CTA    64 keys of one (sequence, KV head), all rows that see them, 64 at a time: attention_backward.cuh.
//   warps 0-3   load, as attention_backward_sm90.cuh says.
//   warps 4-7, 8-11   a warpgroup each has, of scores, all keys by 32 rows; of dK, dV and dQ all keys or rows
//          by 128 channels. P and dS go to shared memory, as each needs the other's.
//
// A step of a warpgroup:
//          S = K Q^T and, behind it, dP = V dout^T;  P and dS, to shared memory;  dV += P dout, dQ = dS^T K
//          and dK += dS Q begin;  the next dout is loaded when dV is there; dQ goes to the workspace, 64
//          channels at a time, while dK runs
//
// Memory: shared, from a multiple of 1024 on: K, V, dout and 2 stages of Q of 32 KiB each, 2 stages of P and
// of dS of 8 KiB, 2 x 64 x 64 floats of dQ; stats and mbarriers. Registers: 64 of dK, 64 of dV, 64 of dQ or
// 16 of S and 16 of dP.
//
// Macros: HEAD_DIM, 256, that the channels are filled up to with zeros; BF16; CAPPED as in attention.cu.
//
// clang-format off
// gate: HEAD_DIM=256 BF16=1,0 CAPPED=0,1 registers<=168 arch=sm_90a
// clang-format on
#include "pairs.cuh"

constexpr int BLOCK_M = 64, BLOCK_N = 64, Q_STAGES = 2, DOUT_STAGES = 1, SCORE_STAGES = 4;
constexpr int SCORES = 16, SUMS = 64;  // a thread's

#include "attention_call.cuh"
#include "attention_backward.cuh"
#include "hopper.cuh"
#include "attention_backward_sm90.cuh"

static_assert(HEAD_DIM == 256, "a warpgroup has two of four blocks of 64 channels");

// Operands count 16 bytes. Scores: 64 keys by 32 rows, contracted over channels.
__device__ __forceinline__ void multiply_channels(float (&c)[SCORES], u64 keys, u64 rows) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
        multiply_async(c, keys + (step / 4 * KEY_BLOCK + step % 4 * 32) / 16,
                       rows + (step / 4 * ROW_BLOCK + step % 4 * 32) / 16, step > 0);
    commit_products();
}
// dK or dV: 64 keys by 128 channels, contracted over rows.
__device__ __forceinline__ void multiply_rows(float (&c)[SUMS], u64 keys, u64 rows) {
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        multiply_mixed(c, keys + step * 32 / 16, rows + step * 2048 / 16, true);
    commit_products();
}
// dQ: 64 rows by 128 channels, contracted over keys.
__device__ __forceinline__ void multiply_keys(float (&c)[SUMS], u64 rows, u64 keys) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        multiply_columns(c, rows + step * 2048 / 16, keys + step * 2048 / 16, step > 0);
    commit_products();
}

__device__ __forceinline__ void compute(const Memory& m, const Call& call, const Span& s, const Rows& rows,
                                        const Keys& keys, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int key = keys.block * BLOCK_N + 16 * warp + lane / 4, first_row = 32 * group;
    const float unit = CAPPED ? LOG2E : call.scale * LOG2E;
    const u64 k = rows_operand(m.k), v = rows_operand(m.v);
    const u64 q = rows_operand(m.q + first_row * 128), dout = rows_operand(m.dout + first_row * 128);
    const u64 q_columns = columns_operand(m.q + 2 * group * ROW_BLOCK, ROW_BLOCK);
    const u64 dout_columns = columns_operand(m.dout + 2 * group * ROW_BLOCK, ROW_BLOCK);
    const u64 k_columns = columns_operand(m.k + 2 * group * KEY_BLOCK, KEY_BLOCK);

    float dk[SUMS], dv[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) dk[i] = dv[i] = 0.f;
    Turn<Q_STAGES> turn = {0, 0};
    u32 dout_parity = 0;
    const int last_head = (keys.head + 1) * call.group;
    u32* held = nullptr;  // a turn that is still to be passed on
    wait_barrier(m.full_keys, 0);
    for (Tile at = first_tile(call, rows, keys.head); at.head < last_head; at = next_tile(at, rows)) {
        const int stage = turn.stage;
        const u64 rows_at = stage * ROW_BYTES / 16;
        const u32 stats = 4 * first_row + 8 * (lane % 4);
        const u32 p_at = m.scores + 2 * stage * SCORE_BYTES, ds_at = p_at + SCORE_BYTES;
        float dq[SUMS];
        {
            float scores[SCORES], dp[SCORES];
            u32 p[SCORES / 2], ds[SCORES / 2];
            wait_barrier(m.full_q + 8 * stage, turn.parity);
            begin_products();
            multiply_channels(scores, k, q + rows_at);
            wait_barrier(m.full_dout, dout_parity);
            multiply_channels(dp, v, dout);
            wait_products<1>(scores);
            if (CAPPED) {
                wait_products<0>(dp);
                subtract(dp, m.deltas + stats);
                cap(scores, dp, call);
            }
            if (at.row < rows.low || at.row + BLOCK_M - 1 > rows.high)
                hide(scores, call, s, key, at.row + first_row);
            weigh(scores, p, m.peaks + stage * STAT_BYTES + stats, unit);
            const u32 own = (16 * warp + lane % 16) * 128;
            store_scores(p_at + own, p, first_row / 8);
            if (!CAPPED) {
                wait_products<0>(dp);
                subtract(dp, m.deltas + stats);
            }
            slope(ds, p, dp);
            store_scores(ds_at + own, ds, first_row / 8);
        }
        fence_async();
        sync_threads(1, 256);  // P and dS of all rows are in shared memory
        begin_products();
        multiply_rows(dv, rows_operand(p_at), dout_columns);
        multiply_keys(dq, columns_operand(ds_at, KEY_BLOCK), k_columns);
        multiply_rows(dk, rows_operand(ds_at), q_columns + rows_at);
        wait_products<2>(dv);
        release(m.empty_dout);
        wait_products<1>(dq);
        const i64 stored = at.head * call.rows + s.stored + at.row;
        u32* const own_turn = call.turns + stored / 16 + group;
        if (call.ordered && threadIdx.x % 128 == 0) {
            if (held) end_additions(held);  // of the step before, which have had a step's time
            wait_turn(own_turn, keys.block - first_turn(call, s, at.row));
            held = own_turn;
        }
        float* const to = call.sums + stored * HEAD_DIM + 2 * group * 4096;
        add_block(to, dq, m.dq + group * SUM_BYTES, group);
        add_block(to + 4096, dq + 32, m.dq + group * SUM_BYTES, group);
        wait_products<0>(dk);
        release(m.empty_q + 8 * stage);
        turn.next(), dout_parity ^= 1;
    }
    if (held) end_additions(held);
    write_keys(call.dk, call, s, keys.head, dk, key, 128 * group, call.scale);
    write_keys(call.dv, call, s, keys.head, dv, key, 128 * group, 1.f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                    const __grid_constant__ Call call) {
    divide_work({&q_map, &k_map, &v_map, &dout_map}, call,
                [&](const Memory& m, const Span& s, const Rows& rows, const Keys& keys, int group) {
                    compute(m, call, s, rows, keys, group);
                });
}
