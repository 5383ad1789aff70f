// Attention backward for Hopper (sm_90a) at head dimensions above 128.
//
// It is attention/backward_sm90.cu but for this: dk and dv of 64 keys fill the registers of both computing
// warpgroups, and with 64 keys a CTA would add dq to memory twice as often. So a pair of CTAs has 128 keys
// between them: the two exchange dS, and each adds up half of dQ.
//
// Threads and data
//   A cluster has a tile of the list: 128 keys of one (sequence, KV head) and all rows that see any of them,
//   64 at a time. It is CLUSTER_SPLIT pairs of CTAs, which share the steps evenly, the two of a pair in step;
//   dK and dV of the pairs are added up at the end. With PERSISTENT a pair takes tiles one after another.
//   A CTA has 64 of the keys and, of dQ, half of the channels, summed over 128 keys.
//   Warps 0 to 3: warp 0 loads (attention/backward_sm90.cuh); one thread each of warps 1 and 2 adds dQ of a
//   warpgroup to the workspace; in a deterministic call one of warp 3 passes turns on.
//   Warps 4 to 7 compute S = K Q^T and P, warps 8 to 11 dP = V dout^T and dS, all keys by all rows. Then each
//   of the two warpgroups has 128 channels of dK and dV by all keys, and 64 channels of dQ by all rows.
//
// Memory
//   Shared memory holds, from a multiple of 1024 on: K, V, dout and 2 stages of Q, 32 KiB each; 128 channels
//   of the other CTA's K, those that this one has of dQ, 16 KiB; P, dS, the other's dS and, with a cap, P
//   times the cap's slope, 8 KiB each; lse_log2 and dpsum, barriers and the tile.
//   A computing thread has 64 registers of dK, 64 of dV, 32 of dQ, 32 of S or dP.
//
// Steps, one for each 64 rows
//   1. S, which warps 4 to 7 begin a step ahead, beside dP.
//   2. P goes to shared memory. dV += P dout begins.
//   3. dS goes to shared memory, and from there to the other CTA.
//   4. dQ = dS^T K of own keys, dK += dS Q, dQ += dS^T K of the other's keys.
//   5. dQ goes to where the CTA's half of Q was, and from there by a bulk addition to the workspace.
//
// Macros
//   HEAD_DIM, 256: channels are filled up to it with zeros. BF16, SOFTCAP: as in attention/forward.cu.
//   CLUSTER_SPLIT, 1, 2 or 4. DETERMINISTIC, 0 if it is not given; 1: the same bits every time.
//   PERSISTENT, 0 if it is not given; 1, with a CLUSTER_SPLIT of 1: there may be fewer pairs than tiles. It
//   takes a sixth longer.
#ifndef PERSISTENT
#define PERSISTENT 0
#endif
#include "attention/backward_sm90.cuh"
#include "attention/backward_steps_sm90.cuh"

static_assert(!PERSISTENT || CLUSTER_SPLIT == 1, "pairs that share keys have one tile");
static_assert(HEAD_DIM == 256, "a warpgroup has one of four blocks of 64 channels of dQ");

// What a CTA of a pair has beside Memory.
struct Pair {
    int rank;                      // of the two; the CTA's keys are those of block 2 i + rank
    u32 p, ds, other_ds, weights;  // [BLOCK_N, BLOCK_M]
    u32 other_k;                   // [BLOCK_N, 128], from channel 128 * rank on
    u32 full_k, full_p, own_ds;    // barriers: the other's K, P and dS of the CTA are here,
    u32 full_ds, empty_ds;         // the other's dS is; it has read the CTA's
    u32 full_dq;                   // and for each warpgroup and stage: dQ is in shared memory
    u32 added, passed;             // for each stage: both parts of dQ are added; their turn is passed on
    __device__ __forceinline__ u32 staged(int group, int stage) const {
        return full_dq + 8 * (group * Q_STAGES + stage);
    }
};
constexpr int PAIR_BARRIERS = 5 + (DETERMINISTIC ? 4 : 2) * Q_STAGES;

__device__ __forceinline__ Pair layout_pair(const Memory& m, u32 barriers) {
    Pair pair;
    pair.rank = blockIdx.x % 2;
    pair.p = m.scores, pair.ds = m.scores + SCORE_BYTES, pair.other_ds = m.scores + 2 * SCORE_BYTES;
    pair.weights = SOFTCAP ? m.scores + 3 * SCORE_BYTES : pair.p, pair.other_k = m.dq;
    pair.full_k = barriers, pair.full_p = barriers + 8, pair.own_ds = barriers + 16;
    pair.full_ds = barriers + 24, pair.empty_ds = barriers + 32, pair.full_dq = barriers + 40;
    pair.added = pair.full_dq + 16 * Q_STAGES, pair.passed = pair.added + 8 * Q_STAGES;
    return pair;
}

__device__ __forceinline__ void init_barriers(const Memory& m, const Pair& pair) {
    for (int i = 0; i < 1 + Q_STAGES + DOUT_STAGES; ++i)
        init_barrier(m.full_keys + 8 * i, 1);                               // the loader's
    for (int i = 0; i < Q_STAGES; ++i) init_barrier(m.empty_q + 8 * i, 2);  // of threads that add dQ
    init_barrier(m.empty_dout, 8);                                          // computing warps'
    init_barrier(pair.full_k, 1), init_barrier(pair.full_ds, 1);
    init_barrier(pair.full_p, 4), init_barrier(pair.own_ds, 4);                    // a warpgroup's warps'
    init_barrier(pair.empty_ds, 2);                                                // the other's warpgroups'
    for (int i = 0; i < 2 * Q_STAGES; ++i) init_barrier(pair.full_dq + 8 * i, 4);  // a warpgroup's warps'
    for (int i = 0; DETERMINISTIC && i < Q_STAGES; ++i)
        init_barrier(pair.added + 8 * i, 2), init_barrier(pair.passed + 8 * i, 1);
    fence_async();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The same address in the other CTA's shared memory.
__device__ __forceinline__ u32 remote_address(u32 address) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(blockIdx.x % CLUSTER ^ 1));
    return mapped;
}
__device__ __forceinline__ void arrive_remote(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier)) : "memory");
}
// Copies shared memory to the same place of the other CTA.
__device__ __forceinline__ void copy_remote(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            remote_address(to)),
        "r"(from), "r"(bytes), "r"(remote_address(barrier))
        : "memory");
}

// Operands count 16 bytes. Scores: 64 keys by 64 rows, contracted over channels.
__device__ __forceinline__ void multiply_channels(float (&c)[SCORES], u64 keys, u64 rows) {
    asm volatile("" : "+l"(keys));  // operands of the steps shall not wait in registers
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
__device__ __forceinline__ void multiply_rows(float (&c)[SUMS], const u32 (&keys)[SCORES / 2], u64 rows) {
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        multiply_async(c, keys + 4 * step, rows + step * 2048 / 16);
    commit_products();
}
// dQ: 64 rows by 64 channels, contracted over a CTA's keys.
__device__ __forceinline__ void multiply_keys(float (&c)[32], u64 rows, u64 keys, bool keep) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        multiply_columns(c, rows + step * 2048 / 16, keys + step * 2048 / 16, keep || step > 0);
    commit_products();
}

// Stores a warpgroup's keys by rows; `to` is the lane's key lane % 16 of the warp's, `chunk` the first 8
// rows.
template <int COUNT>
__device__ __forceinline__ void store_scores(u32 to, const u32 (&x)[COUNT], int chunk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
        const int own = chunk + 2 * j + lane / 16;  // matrix i: keys 8 (i % 2) on, rows 8 (i / 2) on
        store_matrices(to + own / 8 * KEY_BLOCK + (own % 8 ^ lane % 8) * 16, x + 4 * j);
    }
}

// Reads what store_scores has stored.
template <int COUNT>
__device__ __forceinline__ void load_scores(u32 (&x)[COUNT], u32 from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[4 * j]), "=r"(x[4 * j + 1]), "=r"(x[4 * j + 2]), "=r"(x[4 * j + 3])
                     : "r"(from + ((2 * j + lane / 16) ^ lane % 8) * 16)
                     : "memory");
}

// As exponentiate; scores become their weights times the cap's slope.
__device__ __forceinline__ void exponentiate_capped(float (&scores)[SCORES], u32 (&p)[SCORES / 2],
                                                    u32 lse_log2, const Call& call) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 8) {
        const float4 row_lse = read_stats(lse_log2 + 8 * n);
        float weights[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float score = scores[n + i];
            weights[i] = power_of_2(fmaf(score, LOG2E, -stat_of(row_lse, i)));
            scores[n + i] =
                weights[i] * softcap_slope(call, fmaxf(score, -call.softcap));  // masked ones: -inf
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) p[(n + i) / 2] = pack_pair(weights[i], weights[i + 1]);
    }
}

// What a CTA has to do. Found anew by each role that needs it, so that nothing of it takes registers from one
// to the other.
struct WorkTileInfo {
    SeqInfo s;
    int head, first_key;
    __device__ __forceinline__ SeqInfo sequence() const { return s; }
};

__device__ __forceinline__ WorkTileInfo find_work_tile(const Call& call, const TileInfo& t, int rank) {
    return {sequence_of(call, t), t.head_kv, t.position + rank * BLOCK_N};
}

__device__ __forceinline__ void finish_keys(const Call& call, const TileInfo& t, const float (&dk)[SUMS],
                                            const float (&dv)[SUMS], int rank, int channel) {
    const WorkTileInfo w = find_work_tile(call, t, rank);
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int key = w.first_key + thread / 32 * 16 + thread % 32 / 4;
    write_keys(call.dk, call, w.s, w.head, dk, key, channel, call.scale);
    write_keys(call.dv, call, w.s, w.head, dv, key, channel, 1.f);
}

// dK and dV of pairs that share keys, one after the other: the sums take the place of K and V, which are not
// needed any more.
__device__ __forceinline__ void reduce_dk_dv(const Memory& m, const Call& call, const TileInfo& t,
                                             const float (&dk)[SUMS], const float (&dv)[SUMS], int rank,
                                             int group) {
    static_assert(BLOCK_N * HEAD_DIM * 4 == 2 * KEY_BYTES, "sums of dK or dV fill K and V");
    const WorkTileInfo w = find_work_tile(call, t, rank);
    sync_threads(1, 256);  // both warpgroups' products have read K and V
    store_sums(m.k + 2 * group * SUM_BYTES, dk);
    sync_cluster();  // dK of all CTAs is in their shared memory
    cluster_reduce(call.dk, call, w.s, w.head, w.first_key, m.k, call.scale);
    sync_cluster();  // all have read it
    store_sums(m.k + 2 * group * SUM_BYTES, dv);
    sync_cluster();  // dV of all CTAs is in their shared memory
    cluster_reduce(call.dv, call, w.s, w.head, w.first_key, m.k, 1.f);
}

// The work of warps 4-7 (GROUP 0) or 8-11 (1) on a tile. `state` is that of Q, `parity` of what has one
// stage.
template <int GROUP>
__device__ __forceinline__ void compute(const Memory& m, const Pair& pair, const Call& call,
                                        const TileInfo& t, u32 keys_parity, PipelineState<Q_STAGES>& state,
                                        u32& parity, float (&dk)[SUMS], float (&dv)[SUMS]) {
    const WorkTileInfo work = find_work_tile(call, t, pair.rank);
    const SeqInfo& s = work.s;
    const RowRange rows = find_row_range(call, s, work.first_key);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int key = work.first_key + 16 * warp + lane / 4;
    const u32 own = (16 * warp + lane % 16) * 128;  // a lane's place in P and dS
    const u64 k = rows_operand(m.k), v = rows_operand(m.v), q = rows_operand(m.q),
              dout = rows_operand(m.dout);
    const u64 q_columns = columns_operand(m.q + 2 * GROUP * ROW_BLOCK, ROW_BLOCK);
    const u64 dout_columns = columns_operand(m.dout + 2 * GROUP * ROW_BLOCK, ROW_BLOCK);
    const u64 k_columns = columns_operand(m.k + (2 * pair.rank + GROUP) * KEY_BLOCK, KEY_BLOCK);
    const u64 other_k_columns = columns_operand(pair.other_k + GROUP * KEY_BLOCK, KEY_BLOCK);

    float dq[32], scores[SCORES];  // scores: S, or dP
#pragma unroll
    for (int i = 0; i < SUMS; ++i) dk[i] = dv[i] = 0.f;
    StepIterator at = find_steps(call, t);
    wait_barrier(m.full_keys, keys_parity);
    wait_barrier(pair.full_k, keys_parity);
    if (GROUP == 0) {
        if (at.more(t)) wait_barrier(m.full_q + 8 * state.stage, state.parity);
        begin_products();
        multiply_channels(scores, k, q + state.stage * ROW_BYTES / 16);
    }
    while (at.more(t)) {
        const int stage = state.stage, row = at.row(t);
        const u64 rows_at = stage * ROW_BYTES / 16;
        const u32 stats = 16 * (lane % 4);
        u32 p[SCORES / 2], ds[SCORES / 2];
        if (GROUP == 0) {
            wait_products<0>(scores);
            if (SOFTCAP) {
#pragma unroll
                for (int i = 0; i < SCORES; ++i) scores[i] = softcap_score(call, scores[i]);
            }
            if (row < rows.low || row + BLOCK_M - 1 > rows.high) apply_mask(scores, call, s, key, row);
            if (SOFTCAP)
                exponentiate_capped(scores, p, m.lse_log2 + stage * STAT_BYTES + stats, call);
            else {
#pragma unroll
                for (int chunk = 0; chunk < SCORES / 8; ++chunk)
                    exponentiate(scores, chunk,
                                 read_stats(m.lse_log2 + stage * STAT_BYTES + stats + 64 * chunk),
                                 call.scale * LOG2E);
                pack_pairs(p, scores);
            }
            wait_barrier(m.full_dout, parity);
            store_scores(pair.p + own, p, 0);
            if (SOFTCAP) {
#pragma unroll
                for (int i = 0; i < SCORES / 2; ++i) ds[i] = pack_pair(scores[2 * i], scores[2 * i + 1]);
                store_scores(pair.weights + own, ds, 0);
            }
            fence_async();
            release(pair.full_p);  // which says as well that the warp has read dS of the step before
        } else {
            wait_barrier(m.full_dout, parity);
            begin_products();
            multiply_channels(scores, v, dout);
            wait_products<0>(scores);
#pragma unroll
            for (int chunk = 0; chunk < SCORES / 8; ++chunk)
                subtract_dpsum(scores, chunk, read_stats(m.dpsum + stats + 64 * chunk));
        }
        wait_barrier(pair.full_p, parity);
        if (GROUP == 1) load_scores(p, pair.p + own);
        begin_products();
        multiply_rows(dv, p, dout_columns);
        if (GROUP == 1) {
            if (SOFTCAP) {
                u32 weights[SCORES / 2];
                load_scores(weights, pair.weights + own);
                compute_ds(ds, weights, scores);
            } else {
                compute_ds(ds, p, scores);
            }
            wait_barrier(pair.empty_ds, parity ^ 1);  // the other has dS of the step before, and read it
            store_scores(pair.ds + own, ds, 0);
            fence_async();
            release(pair.own_ds);
        }
        wait_barrier(pair.own_ds, parity);
        if (GROUP == 1 && threadIdx.x % 128 == 0) {
            expect_bytes(pair.full_ds, SCORE_BYTES);
            copy_remote(pair.other_ds, pair.ds, SCORE_BYTES, pair.full_ds);
        }
        if (GROUP == 1) wait_barrier(m.full_q + 8 * stage, state.parity);
        begin_products();
        multiply_keys(dq, columns_operand(pair.ds, KEY_BLOCK), k_columns, false);
        if (GROUP == 1)
            multiply_rows(dk, ds, q_columns + rows_at);
        else
            multiply_rows(dk, rows_operand(pair.ds), q_columns + rows_at);
        wait_products<2>(dv);
        release(m.empty_dout);
        wait_barrier(pair.full_ds, parity);
        begin_products();
        multiply_keys(dq, columns_operand(pair.other_ds, KEY_BLOCK), other_k_columns, true);
        at.next(call, t), state.next(), parity ^= 1;
        if (GROUP == 0) {  // S of the next step; of nothing, if there is none
            if (at.more(t)) wait_barrier(m.full_q + 8 * state.stage, state.parity);
            multiply_channels(scores, k, q + state.stage * ROW_BYTES / 16);
            wait_products<1>(dq);
        } else {
            wait_products<0>(dq);
        }
        pin(dk);
        sync_threads(2 + GROUP, 128);  // all of the warpgroup's products have read Q and the other's dS
        if (threadIdx.x % 128 == 0) arrive_remote(pair.empty_ds);
        store_sums(m.q + stage * ROW_BYTES + GROUP * SUM_BYTES, dq);
        fence_async();
        release(pair.staged(GROUP, stage));
    }
    if (GROUP == 0) wait_products<0>(scores);
}

// Loads all that the CTA reads for a tile; one thread.
__device__ __forceinline__ void load(const Memory& m, const Pair& pair, const Maps& maps, const Call& call,
                                     const TileInfo& t, PipelineState<Q_STAGES>& q,
                                     PipelineState<DOUT_STAGES>& dout) {
    const WorkTileInfo work = find_work_tile(call, t, pair.rank);
    const TmaCoord of_keys = key_coord_of(call, work.s);
    expect_bytes(pair.full_k, 2 * KEY_BLOCK);
    for (int i = 0; i < 2; ++i)
        copy_box(pair.other_k + i * KEY_BLOCK, maps.k, pair.full_k, of_keys, 128 * pair.rank + 64 * i,
                 t.position + (pair.rank ^ 1) * BLOCK_N, work.head);
    expect_bytes(m.full_keys, 2 * KEY_BYTES);
#pragma unroll
    for (int block = 0; block < D_BLOCKS; ++block) {
        const u32 at = block * KEY_BLOCK;
        copy_box(m.k + at, maps.k, m.full_keys, of_keys, 64 * block, work.first_key, work.head);
        copy_box(m.v + at, maps.v, m.full_keys, of_keys, 64 * block, work.first_key, work.head);
    }
    for (StepIterator at = find_steps(call, t); at.more(t); at.next(call, t)) {
        const Tile rows = {at.head, at.row(t)};
        wait_barrier(m.empty_q + 8 * q.stage, q.parity);
        load_rows(call, work, m.q + q.stage * ROW_BYTES, maps.q, m.lse_log2 + q.stage * STAT_BYTES,
                  call.lse_log2, m.full_q + 8 * q.stage, rows);
        wait_barrier(m.empty_dout + 8 * dout.stage, dout.parity);
        load_rows(call, work, m.dout + dout.stage * ROW_BYTES, maps.dout, m.dpsum + dout.stage * STAT_BYTES,
                  call.dpsum, m.full_dout + 8 * dout.stage, rows);
        q.next(), dout.next();
    }
}

// Where a step's part of dQ lies in the workspace, and who comes before. A turn is that of both of a CTA's
// parts.
struct DqPart {
    float* to;
    u32* semaphore;
    u32 before;
};
__device__ __forceinline__ DqPart dq_part_of(const Call& call, const TileInfo& t, const StepIterator& at,
                                             int block) {
    const int row = at.row(t);
    const i64 workspace_row = at.head * call.rows + find_workspace_row(call, t) + row;
    return {call.dq_accum + workspace_row * HEAD_DIM + block * (SUM_BYTES / 4),
            call.dq_semaphore + workspace_row / 16 + (DETERMINISTIC ? block & ~1 : block),
            (u32)count_tiles_before(call, t, row)};
}

// Adds a warpgroup's dQ of a tile to the workspace, step after step; one thread. In a deterministic call it
// waits for its turn before dQ is there, and says when the addition is complete.
__device__ __forceinline__ void add_dq(const Memory& m, const Pair& pair, const Call& call, const TileInfo& t,
                                       int group, PipelineState<Q_STAGES>& state) {
    StepIterator at = find_steps(call, t);
#pragma unroll 1
    while (at.more(t)) {
        const DqPart part = dq_part_of(call, t, at, 2 * pair.rank + group);
        bool first = false;
        if (DETERMINISTIC) {
            wait_semaphore(part.semaphore, part.before);
            first = FIRST_STORES && part.before == 0;
        }
        const bool stored = DETERMINISTIC || !FIRST_STORES || is_stored(part.semaphore);
        wait_barrier(pair.staged(group, state.stage), state.parity);
        if (!stored) first = is_first(part.semaphore);
        bring_floats(part.to, m.q + state.stage * ROW_BYTES + group * SUM_BYTES, SUM_BYTES, first);
        wait_additions_read();
        arrive(m.empty_q + 8 * state.stage);
        if (DETERMINISTIC) {
            wait_barrier(pair.passed + 8 * state.stage, state.parity ^ 1);
            wait_additions();
            arrive(pair.added + 8 * state.stage);
        }
        at.next(call, t), state.next();
        if (!DETERMINISTIC && first) {
            wait_additions();
            release_semaphore(part.semaphore);
        }
    }
    wait_additions();  // shared memory must not go before it is read
}

// Passes on the turns of a tile's steps, each when both parts of dQ are added; one thread. Its fence is the
// only one of a step, and no addition waits for it: it adds nothing itself, and what it has seen to be added,
// by a barrier, its release covers, too.
__device__ __forceinline__ void pass_turns(const Pair& pair, const Call& call, const TileInfo& t,
                                           PipelineState<Q_STAGES>& state) {
#pragma unroll 1
    for (StepIterator at = find_steps(call, t); at.more(t); at.next(call, t), state.next()) {
        u32* const semaphore = dq_part_of(call, t, at, 2 * pair.rank).semaphore;
        wait_barrier(pair.added + 8 * state.stage, state.parity);
        release_semaphore(semaphore);
        arrive(pair.passed + 8 * state.stage);
    }
}

// Takes a tile from the list for both CTAs; one thread. A cluster also makes a fetch that gives it none, so
// the last fetch of all, which sets the semaphore to 0 again, is known by its number.
__device__ __forceinline__ void take_tile(const Call& call, TileInfo& to) {
    const int index = atomicAdd(call.semaphore, 1), count = call.list->num_tiles;
    if (index == count + (int)gridDim.x / CLUSTER - 1) *call.semaphore = 0;
    const TileInfo* const found = find_tile(call, index);
    if (found)
        to = *found;
    else
        to.sequence = -1;
    const int* const words = (const int*)&to;
    const u32 remote = remote_address(shared_address(&to));
#pragma unroll
    for (int i = 0; i < (int)sizeof(TileInfo) / 4; ++i)
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote + 4 * i), "r"(words[i]) : "memory");
}

// Whether the cluster has a tile of this number.
__device__ __forceinline__ bool has_tile(const TileInfo* tiles, u32 number) {
    return (PERSISTENT || number == 0) && tiles[number % 2].sequence >= 0;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    attend_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                    const __grid_constant__ Call call) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(16) float stats[STATS];
    __shared__ __align__(8) u64 barriers[BARRIERS + PAIR_BARRIERS];
    __shared__ TileInfo tiles[2];  // this and the next
    const Maps maps = {&q_map, &k_map, &v_map, &dout_map};
    const Memory m = layout_memory((shared_address(memory) + 1023) & ~1023u, shared_address(stats),
                                   shared_address(barriers));
    const Pair pair = layout_pair(m, shared_address(barriers + BARRIERS));
    if (threadIdx.x == 0) {
        init_barriers(m, pair);
        const TileInfo* const first = find_tile(call, blockIdx.x / CLUSTER);
        tiles[0].sequence = -1;
        if (!PERSISTENT && first) tiles[0] = *first;
    }
    sync_cluster();  // barriers of both CTAs of a pair are initialised
    if (PERSISTENT) {
        if (threadIdx.x == 0 && pair.rank == 0) take_tile(call, tiles[0]);
        sync_cluster();  // the tile is here
    }
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        PipelineState<Q_STAGES> q = {0, 1}, dq = {0, 0};  // a stage is empty before the first phase of its
        PipelineState<DOUT_STAGES> dout = {0, 1};         // barrier
#pragma unroll 1
        for (u32 number = 0; has_tile(tiles, number); ++number) {
            const TileInfo& tile = tiles[number % 2];
            if (threadIdx.x == 0) {
                load(m, pair, maps, call, tile, q, dout);
                if (PERSISTENT && pair.rank == 0) take_tile(call, tiles[number % 2 ^ 1]);
            } else if (threadIdx.x == 32 || threadIdx.x == 64) {
                add_dq(m, pair, call, tile, threadIdx.x / 32 - 1, dq);
            } else if (DETERMINISTIC && threadIdx.x == 96) {
                pass_turns(pair, call, tile, dq);
            }
            if (CLUSTER_SPLIT > 1) sync_cluster(), sync_cluster(), sync_cluster();  // of reduce_dk_dv
            sync_cluster();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;  // uniform, for the compiler
        PipelineState<Q_STAGES> q = {0, 0};
        u32 parity = 0;
#pragma unroll 1
        for (u32 number = 0; has_tile(tiles, number); ++number) {
            const TileInfo& tile = tiles[number % 2];
            float dk[SUMS], dv[SUMS];
            if (group == 0)
                compute<0>(m, pair, call, tile, number % 2, q, parity, dk, dv);
            else
                compute<1>(m, pair, call, tile, number % 2, q, parity, dk, dv);
            if (CLUSTER_SPLIT > 1)
                reduce_dk_dv(m, call, tile, dk, dv, pair.rank, group);
            else
                finish_keys(call, tile, dk, dv, pair.rank, 128 * group);
            // The next tile is here; shared memory must not be loaded anew, nor go, before the other has read
            // it, and written and signalled to it.
            sync_cluster();
        }
    }
}

// clang-format off
// gate: HEAD_DIM=256 BF16=1,0 SOFTCAP=0,1 CLUSTER_SPLIT=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 SOFTCAP=0,1 CLUSTER_SPLIT=2,4 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=1,2,4 FIRST_STORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 SOFTCAP=0 CLUSTER_SPLIT=1,2,4 DETERMINISTIC=1 FIRST_STORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 SOFTCAP=1 CLUSTER_SPLIT=1 DETERMINISTIC=1 FIRST_STORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 SOFTCAP=0,1 CLUSTER_SPLIT=1 PERSISTENT=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 SOFTCAP=0,1 CLUSTER_SPLIT=1 DETERMINISTIC=1 FIRST_STORES=1 PERSISTENT=1 registers<=168 arch=sm_90a
// clang-format on
