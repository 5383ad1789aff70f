// Attention backward for Hopper (sm_90a): TMA, wgmma, a warp that loads beside two warpgroups that compute.
//
// Threads and data
//   cluster  BLOCK_N = 128 keys of one (sequence, KV head), all rows that see them: attention/backward.cuh.
//   CTA    one of CLUSTER_SPLIT that share these steps evenly; dK and dV are added up at the end, below.
//   warps 0-3   the first lane of warp 0 loads: K and V once, then Q and dout, two stages of each. They give
//          their registers away.
//   warps 4-7, 8-11   a warpgroup each has 64 keys, all rows: scores have keys as rows and query rows as
//          columns, 16 keys a warp, so P and dS stay in registers as the first operands of dV and dK. Of dQ,
//          which sums over all keys, each has 64 rows by 64 channels, and takes dS from shared memory.
//
// A tile of BLOCK_M rows is a step of a warpgroup:
//          S = K Q^T and, behind it, dP = V dout^T;  P = exp2(S - lse) while dP runs;  dV += P dout begins;
//          dS = P (dP - dpsum) while that runs, to shared memory;  dQ = dS^T K and dK += dS Q begin;  dQ goes
//          to shared memory, and from there a bulk addition brings it to the workspace, while dK runs
// If deterministic, the addition waits until the CTAs before it in the order of keys have made theirs. At the
// end of a cluster of several CTAs each leaves its dK and dV in shared memory, reads those of all others for
// its share of the keys, and writes their sum.
//
// Memory: shared, from a multiple of 1024 on, in blocks of 64 columns: K and V, 2 stages of Q and of dout, 2
// of dS (BLOCK_N x BLOCK_M), dQ (2 x 64 x 64 floats); 2 stages of lse_log2 and dpsum; mbarriers. Sums of dK
// and dV for the cluster lie where K, V, Q and dout were. Registers at HEAD_DIM 128, BLOCK_M 64: 64 of dK, 64
// of dV, 32 of S, 32 of dP or dQ, 16 of P, 16 of dS.
//
// Macros: HEAD_DIM, 64 or 128, that the channels are filled up to with zeros; BF16; SOFTCAP as in
// attention/forward.cu; CLUSTER_SPLIT, 1, 2, 4 or 8.
#include "common/pairs.cuh"

constexpr int BLOCK_M = 8192 / HEAD_DIM, BLOCK_N = 128, Q_STAGES = 2, DOUT_STAGES = 2, SCORE_STAGES = 2;
constexpr int CLUSTER = CLUSTER_SPLIT, SCORES = BLOCK_M / 2, SUMS = HEAD_DIM / 2;  // a thread's

#include "attention/call.cuh"
#include "attention/backward.cuh"
#include "common/hopper.cuh"
#include "attention/backward_cluster.cuh"
#include "attention/backward_sm90.cuh"

static_assert(M_BLOCKS * D_BLOCKS == 2, "a warpgroup has one block of dQ");

// Operands count 16 bytes. Scores: 64 keys by BLOCK_M rows, contracted over channels.
__device__ __forceinline__ void multiply_channels(float (&c)[SCORES], u64 keys, u64 rows) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
        multiply_async(c, keys + (step / 4 * KEY_BLOCK + step % 4 * 32) / 16,
                       rows + (step / 4 * ROW_BLOCK + step % 4 * 32) / 16, step > 0);
    commit_products();
}
// dK or dV: 64 keys by HEAD_DIM, contracted over rows.
__device__ __forceinline__ void multiply_rows(float (&c)[SUMS], const u32 (&keys)[SCORES / 2], u64 rows) {
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        multiply_async(c, keys + 4 * step, rows + step * 2048 / 16);
    commit_products();
}
// A block of dQ: 64 rows by 64 channels, contracted over keys.
__device__ __forceinline__ void multiply_keys(float (&c)[32], u64 rows, u64 keys) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        multiply_columns(c, rows + step * 2048 / 16, keys + step * 2048 / 16, step > 0);
    commit_products();
}

// dK and dV of CTAs that share keys. K, V, Q and dout are not needed any more: the sums take their place.
__device__ __forceinline__ void reduce_dk_dv(const Memory& m, const Call& call, const SeqInfo& s,
                                             const KeyBlock& keys, const float (&dk)[SUMS],
                                             const float (&dv)[SUMS], int group) {
    constexpr u32 BYTES = BLOCK_N * HEAD_DIM * 4;
    static_assert(2 * BYTES <= 2 * KEY_BYTES + (Q_STAGES + DOUT_STAGES) * ROW_BYTES, "room for the sums");
    sync_threads(1, 256);  // both warpgroups' products have read what lay there
    store_sums(m.k + group * D_BLOCKS * SUM_BYTES, dk);
    store_sums(m.k + BYTES + group * D_BLOCKS * SUM_BYTES, dv);
    sync_cluster();  // sums of all CTAs are in their shared memory
    cluster_reduce(call.dk, call, s, keys, m.k, call.scale);
    cluster_reduce(call.dv, call, s, keys, m.k + BYTES, 1.f);
    sync_cluster();  // which must not go before the others have read it
}

__device__ __forceinline__ void compute(const Memory& m, const Call& call, const SeqInfo& s,
                                        const RowRange& rows, const KeyBlock& keys, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int own_keys = 64 * group + 16 * warp, key = keys.block * BLOCK_N + own_keys + lane / 4;
    const float scale_log2 = SOFTCAP ? LOG2E : call.scale * LOG2E;
    const int m_block = group % M_BLOCKS, d_block = group % D_BLOCKS;  // of dQ
    const u64 k = rows_operand(m.k + 64 * 128 * group), v = rows_operand(m.v + 64 * 128 * group);
    const u64 q = rows_operand(m.q), dout = rows_operand(m.dout);
    const u64 q_columns = columns_operand(m.q, ROW_BLOCK), dout_columns = columns_operand(m.dout, ROW_BLOCK);
    const u64 k_columns = columns_operand(m.k + d_block * KEY_BLOCK, KEY_BLOCK);
    const u64 ds_columns = columns_operand(m.scores + m_block * KEY_BLOCK, KEY_BLOCK);

    float dk[SUMS], dv[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) dk[i] = dv[i] = 0.f;
    PipelineState<Q_STAGES> state = {0, 0};
    u32* pending = nullptr;  // a semaphore that is still to be released
    wait_barrier(m.full_keys, 0);
    for (TileRange range = find_tile_range(call, rows, keys.head); range.more(); range.next(rows)) {
        const Tile at = range.at;
        const int stage = state.stage;
        const u64 rows_at = stage * ROW_BYTES / 16;
        const u32 stats = stage * STAT_BYTES + 8 * (lane % 4);
        float scores[SCORES], dp[SCORES], dq[32];
        u32 p[SCORES / 2], ds[SCORES / 2];
        wait_barrier(m.full_q + 8 * stage, state.parity);
        begin_products();
        multiply_channels(scores, k, q + rows_at);
        wait_barrier(m.full_dout + 8 * stage, state.parity);
        multiply_channels(dp, v, dout + rows_at);
        wait_products<1>(scores);
        if (SOFTCAP) {
            wait_products<0>(dp);
            subtract_dpsum(dp, m.dpsum + stats);
            apply_softcap(scores, dp, call);
        }
        if (at.row < rows.low || at.row + BLOCK_M - 1 > rows.high) apply_mask(scores, call, s, key, at.row);
        exponentiate(scores, p, m.lse_log2 + stats, scale_log2);
        begin_products();
        multiply_rows(dv, p, dout_columns + rows_at);
        if (!SOFTCAP) {
            wait_products<1>(dp);
            subtract_dpsum(dp, m.dpsum + stats);
        }
        compute_ds(ds, p, dp);
        store_scores(m.scores + stage * SCORE_BYTES + (own_keys + lane % 16) * 128, ds, 0);
        fence_async();
        sync_threads(1, 256);  // dS of all keys is in shared memory
        begin_products();
        multiply_keys(dq, ds_columns + stage * SCORE_BYTES / 16, k_columns);
        multiply_rows(dk, ds, q_columns + rows_at);
        wait_products<1>(dq);
        pin(dv);
        release(m.empty_dout + 8 * stage);
        const i64 workspace_row = at.head * call.rows + s.workspace_row + at.row;
        u32* const semaphore = call.dq_semaphore + workspace_row / 16 + group;
        if (call.deterministic && threadIdx.x % 128 == 0) {
            if (pending) finish_additions(pending);  // of the step before, which have had a step's time
            wait_semaphore(semaphore, keys.block - first_key_block(call, s, at.row));
            pending = semaphore;
        }
        add_dq_block(call.dq_accum + workspace_row * HEAD_DIM + (m_block * D_BLOCKS + d_block) * 4096, dq,
                     m.dq + group * SUM_BYTES, group);
        wait_products<0>(dk);
        release(m.empty_q + 8 * stage);
        state.next();
    }
    if (pending) finish_additions(pending);
    if (CLUSTER_SPLIT > 1) {
        reduce_dk_dv(m, call, s, keys, dk, dv, group);
    } else {
        write_keys(call.dk, call, s, keys.head, dk, key, 0, call.scale);
        write_keys(call.dv, call, s, keys.head, dv, key, 0, 1.f);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    attend_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                    const __grid_constant__ Call call) {
    specialise_warps({&q_map, &k_map, &v_map, &dout_map}, call,
                     [&](const Memory& m, const SeqInfo& s, const RowRange& rows, const KeyBlock& keys,
                         int group) { compute(m, call, s, rows, keys, group); });
}

// gate: HEAD_DIM=64,128 BF16=1,0 SOFTCAP=0 CLUSTER_SPLIT=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=2,4,8 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=1 SOFTCAP=1 CLUSTER_SPLIT=1,8 registers<=168 arch=sm_90a
