// Attention backward for Hopper (sm_90a): persistent CTAs walk a list of tiles, TMA copies, wgmma multiplies.
//
// Threads and data
//   A CTA takes tiles from the list until none is left; there is one CTA a multiprocessor.
//   A tile is BLOCK_N = 128 keys of one (sequence, KV head) and all rows that see them, those of one group of
//   queries after those of another (attention/backward.cuh). In a short call a cluster of CLUSTER_SPLIT CTAs
//   has one tile and shares its rows evenly; their dK and dV are added up at the end.
//   Warp 0: one thread takes the tiles and loads Q with its lse_log2, BLOCK_M rows at a time.
//   Warp 1: one thread loads K, V, and dout with its dpsum.
//   Warps 2 and 3: one thread each adds dQ to the workspace, that of a warpgroup or, in a deterministic call,
//   that of every other step.
//   Warps 4 to 7 and 8 to 11 compute. A warpgroup has 64 keys and all rows. Scores have keys as rows and
//   query rows as columns, 16 keys a warp, so P and dS stay in registers as first operands of dV and dK.
//   dQ sums over all keys, so a warpgroup takes dS of both from shared memory: it has 64 rows by 64 channels
//   of dQ (of 96 channels the second has 32), or 64 channels by 80 rows where a step has 80 (TURNED).
//
// Memory
//   Shared memory holds, from a multiple of 1024 on, in blocks of 64 columns: K and V, 2 stages of Q and of
//   dout, 2 of dS (BLOCK_N by BLOCK_M), dQ (2 by 64 by 64 floats), 2 stages of lse_log2 and dpsum; barriers
//   and two tiles follow. Sums of dK and dV for a cluster lie where K, V, Q and dout were.
//   At HEAD_DIM 128 and BLOCK_M 64 a computing thread has 64 registers of dK, 64 of dV, 32 of S, 32 of dP or
//   dQ, 16 of P, 16 of dS and 16 of lse_log2 or dpsum; at BLOCK_M 80 it has 64, 64, 40, 40, 20, 20 and 4.
//   Warps 0 to 3 give their registers away.
//
// Steps of a warpgroup, one for each BLOCK_M rows
//   1. It begins S = K Q^T and, behind it, dP = V dout^T.
//   2. P = exp2(S - lse) while dP runs. dV += P dout begins.
//   3. dS = P (dP - dpsum) goes to shared memory.
//   4. It begins dQ = dS^T K and dK += dS Q. dQ goes to shared memory while dK runs.
//   S and dP read shared memory as fast as it is, so nothing else that anyone waits for is read or stored
//   beside them: lse_log2 is read while dK of the step before runs.
//   With LAG a warpgroup takes dQ of the step before, so that it need not wait for dS of the other; the
//   exponentials of one then run beside the products of the other. With HOLD_V it has its part of V in
//   registers, so that dP reads half as much from shared memory.
//   A DETERMINISTIC call has its tiles in the order of keys. The addition of dQ waits until the CTAs before
//   it in that order have made theirs; the first of them stores what the others add to.
//
// Macros
//   HEAD_DIM, 64, 96 or 128: channels are filled up to it with zeros. BF16, SOFTCAP: as in
//   attention/forward.cu. CLUSTER_SPLIT, 1, 2, 4 or 8. BLOCK_M, 80 for long steps at 128 channels.
//   QUERY_GROUPS: most groups of queries of a call, 1 if it is not given.
//   DETERMINISTIC, 0 if it is not given; 1: the same bits every time.
constexpr int INFO_STAGES = 2;

#include "attention/products_sm90.cuh"
#include "attention/backward_sm90.cuh"
#include "attention/backward_steps_sm90.cuh"

static_assert(TURNED ? HEAD_DIM == 128 : M_BLOCKS * D_BLOCKS == 2, "a warpgroup has one block of dQ");

constexpr bool LAG = HEAD_DIM == 128, LATE_DV = !LAG && !SOFTCAP;  // dV begins behind dS
// With FEW, threads that load do with the least registers, so that those that compute have most.
constexpr bool FEW = TURNED || (HEAD_DIM == 64 && !SOFTCAP && CLUSTER_SPLIT == 1 && QUERY_GROUPS == 1);
constexpr bool HOLD_V = (HEAD_DIM == 96 && !SOFTCAP) || (HEAD_DIM == 64 && FEW);
constexpr int V_STEPS = HOLD_V ? HEAD_DIM / 16 : 1;
constexpr int REGISTERS = FEW ? 240 : QUERY_GROUPS == 1 ? 232 : 224;
constexpr int LOADER_REGISTERS = FEW ? 24 : QUERY_GROUPS == 1 ? 40 : 56;
static_assert(128 * LOADER_REGISTERS + COMPUTING * REGISTERS <= THREADS * 168,
              "setmaxnreg waits for registers that the CTA was not started with");

// Barriers beside those of Memory, and the tiles that the CTA has taken.
struct Signals {
    u32 empty_keys;             // products have read K and V
    u32 full_info, empty_info;  // INFO_STAGES each
    u32 full_ds, empty_ds;      // LAG: SCORE_STAGES each
    u32 full_dq, empty_dq;      // for each warpgroup DQ_BARRIERS, and one
    KeyTile* info;              // INFO_STAGES of QUERY_GROUPS
};
constexpr int DQ_BARRIERS = DETERMINISTIC ? 2 : 1;  // steps take turns, as do the threads that add
constexpr int SIGNALS = 1 + 2 * INFO_STAGES + 2 * SCORE_STAGES + 2 * DQ_BARRIERS + 2;

__device__ __forceinline__ Signals make_signals(u32 barriers, KeyTile* info) {
    Signals b;
    b.empty_keys = barriers, b.full_info = barriers + 8, b.empty_info = b.full_info + 8 * INFO_STAGES;
    b.full_ds = b.empty_info + 8 * INFO_STAGES, b.empty_ds = b.full_ds + 8 * SCORE_STAGES;
    b.full_dq = b.empty_ds + 8 * SCORE_STAGES, b.empty_dq = b.full_dq + 16 * DQ_BARRIERS, b.info = info;
    return b;
}

// Arrivals: of a loading thread; of every computing warp; of a tile's readers, which are those, warp 1 and
// the two that add dQ; of the warps of a warpgroup; of a thread that adds.
__device__ __forceinline__ void init_barriers(const Memory& m, const Signals& b) {
    for (int i = 0; i < 1 + Q_STAGES + DOUT_STAGES; ++i) init_barrier(m.full_keys + 8 * i, 1);
    for (int i = 0; i < Q_STAGES + DOUT_STAGES; ++i) init_barrier(m.empty_q + 8 * i, 8);
    init_barrier(b.empty_keys, 8);
    for (int i = 0; i < INFO_STAGES; ++i) {
        init_barrier(b.full_info + 8 * i, 1);
        init_barrier(b.empty_info + 8 * i, 8 + 3);
    }
    for (int i = 0; i < 2 * SCORE_STAGES; ++i) init_barrier(b.full_ds + 8 * i, 8);
    for (int i = 0; i < 2 * DQ_BARRIERS; ++i) init_barrier(b.full_dq + 8 * i, 4);
    for (int i = 0; i < 2; ++i) init_barrier(b.empty_dq + 8 * i, 1);
    fence_async();
}

// A part of a tile, in registers (HELD) or, where these are few, read anew at every use.
template <bool HELD>
class TilePart {
  public:
    __device__ __forceinline__ TilePart(const Call& call, const KeyTile& t)
        : call_(call), shared_(t), tile_(t), sequence_(sequence_of(call, t)) {}
    __device__ __forceinline__ const KeyTile& tile() const { return HELD ? tile_ : shared_; }
    __device__ __forceinline__ SeqInfo sequence() const {
        return HELD ? sequence_ : sequence_of(call_, shared_);
    }

  private:
    const Call& call_;
    const KeyTile& shared_;
    KeyTile tile_;
    SeqInfo sequence_;
};
using LoaderTile = TilePart<!FEW>;
using ComputingTile = TilePart<HEAD_DIM != 64 || !SOFTCAP>;

// Calls visit(tile) for every tile that the CTA has taken; `tile` has num_groups parts.
template <int READER, typename Visit>
__device__ __forceinline__ void for_tiles(const Signals& b, Visit visit) {
    for (u32 count = 0;; ++count) {
        const u32 stage = count % INFO_STAGES;
        wait_barrier(b.full_info + 8 * stage, count / INFO_STAGES % 2);
        const KeyTile* const tile = b.info + stage * QUERY_GROUPS;
        if (tile->sequence < 0) return;
        visit(tile);
        if (READER == 32) __syncwarp();
        if (READER == 1 || threadIdx.x % 32 == 0) arrive(b.empty_info + 8 * stage);
    }
}

// Takes tiles from the list and loads Q. The next tile is taken behind the last load of a tile, a step or two
// before its products end: a CTA that took it earlier would keep it from one that is idle. A tile makes one
// fetch from the semaphore, so the fetch that returns num_tiles - 1 is the last, and sets it to 0 again.
__device__ __forceinline__ void load_q(const Memory& m, const Signals& b, const Maps& maps,
                                       const Call& call) {
    const int groups = num_groups(call);
    LoaderState<Q_STAGES> q = {0};
    LoaderState<INFO_STAGES> info = {0};
    for (int index = blockIdx.x / CLUSTER;;) {
        const u32 full = b.full_info + 8 * info.stage();
        wait_barrier(b.empty_info + 8 * info.stage(), info.parity());
        KeyTile* const tile = b.info + info.stage() * QUERY_GROUPS;
        if (index >= call.list->num_tiles) {
            tile->sequence = -1;
            arrive(full);
            return;
        }
        const TileList* list = call.list;
        asm volatile("" : "+l"(list));  // shall not take registers from one tile to the next
        expect_bytes(full, groups * sizeof(KeyTile));
        copy_bytes(shared_address(tile), (const KeyTile*)(list + 1) + index * groups,
                   groups * sizeof(KeyTile), full);
        wait_barrier(full, info.parity() ^ 1);
#pragma unroll 1
        for (int i = 0; i < groups; ++i) {
            const KeyTile& t = tile[i];
            const LoaderTile of(call, t);
#pragma unroll 1
            for (StepIterator at = find_steps(call, t); at.more(of.tile());
                 at.next(call, of.tile()), ++q.count) {
                wait_barrier(m.empty_q + 8 * q.stage(), q.parity());
                load_rows(call, of, m.q + q.stage() * ROW_BYTES, maps.q + group_of(t),
                          m.lse_log2 + q.stage() * STAT_BYTES, call.lse_log2, m.full_q + 8 * q.stage(),
                          {at.head, at.row(of.tile())});
            }
        }
        ++info.count;
        if (CLUSTER_SPLIT > 1) {
            index = call.list->num_tiles;  // a cluster has one tile
        } else {
            index = atomicAdd(call.semaphore, 1);
            if (index == call.list->num_tiles - 1) *call.semaphore = 0;
            index += gridDim.x;
        }
    }
}

// Loads K, V and dout.
__device__ __forceinline__ void load_keys_and_dout(const Memory& m, const Signals& b, const Maps& maps,
                                                   const Call& call) {
    LoaderState<DOUT_STAGES> dout = {0};
    u32 keys_parity = 1;
    for_tiles<1>(b, [&](const KeyTile* tile) {
        bool any = false;
        for (int i = 0; i < num_groups(call); ++i) any |= find_steps(call, tile[i]).more(tile[i]);
        if (any) {
            wait_barrier(b.empty_keys, keys_parity);
            keys_parity ^= 1;
            const TmaCoord keys = key_coord_of(call, sequence_of(call, *tile));  // that some group sees
            expect_bytes(m.full_keys, 2 * KEY_BYTES);
#pragma unroll
            for (int block = 0; block < D_BLOCKS; ++block) {
                copy_box(m.k + block * KEY_BLOCK, maps.k, m.full_keys, keys, 64 * block, tile->position,
                         tile->head_kv);
                copy_box(m.v + block * KEY_BLOCK, maps.v, m.full_keys, keys, 64 * block, tile->position,
                         tile->head_kv);
            }
        }
#pragma unroll 1
        for (int i = 0; i < num_groups(call); ++i) {
            const KeyTile& t = tile[i];
            const LoaderTile of(call, t);
#pragma unroll 1
            for (StepIterator at = find_steps(call, t); at.more(of.tile());
                 at.next(call, of.tile()), ++dout.count) {
                wait_barrier(m.empty_dout + 8 * dout.stage(), dout.parity());
                load_rows(call, of, m.dout + dout.stage() * ROW_BYTES, maps.dout + group_of(t),
                          m.dpsum + dout.stage() * STAT_BYTES, call.dpsum, m.full_dout + 8 * dout.stage(),
                          {at.head, at.row(of.tile())});
            }
        }
    });
}

// The barrier of dQ of a warpgroup, in a step that has this stage of dS.
__device__ __forceinline__ u32 full_dq_of(const Signals& b, int group, int stage) {
    return b.full_dq + 8 * (DQ_BARRIERS * group + (DETERMINISTIC ? stage : 0));
}

// Adds dQ to the workspace, step after step; two threads. Ordinarily each has a warpgroup. In a deterministic
// call a thread waits for its turn before dQ is there, and passes it on when the addition is complete. That
// takes longer than a step, so each has every other step, of both warpgroups.
__device__ __forceinline__ void add_dq(const Memory& m, const Signals& b, const Call& call, int thread) {
    u32 step = 0;
    for_tiles<1>(b, [&](const KeyTile* tile) {
#pragma unroll 1
        for (int i = 0; i < num_groups(call); ++i) {
            const LoaderTile of(call, tile[i]);
            const i64 first_row = find_workspace_row(call, tile[i]);
#pragma unroll 1
            for (StepIterator at = find_steps(call, tile[i]); at.more(of.tile());
                 at.next(call, of.tile()), ++step) {
                if (DETERMINISTIC && step % 2 != thread) continue;
                const KeyTile& t = of.tile();
                const int row = at.row(t);
                const i64 workspace_row = at.head * call.rows + first_row + row;
                const int before = DETERMINISTIC ? count_tiles_before(call, t, row) : 1;
                u32* const semaphore = call.dq_semaphore + workspace_row / 16;
                const auto add = [&](int group, bool first) {
                    bring_floats(call.dq_accum + workspace_row * HEAD_DIM + group * (SUM_BYTES / 4),
                                 m.dq + group * SUM_BYTES,
                                 HEAD_DIM == 96 && group ? SUM_BYTES / 2 : SUM_BYTES, first);
                    wait_additions_read();
                    arrive(b.empty_dq + 8 * group);
                };
                if (DETERMINISTIC) {
                    wait_semaphore(semaphore, before);
                    for (int group = 0; group < 2; ++group) {
                        wait_barrier(full_dq_of(b, group, step % 2), step / 2 % 2);
                        add(group, FIRST_STORES && before == 0);
                    }
                    wait_additions();
                    release_semaphore(semaphore);
                } else {
                    const bool stored = !FIRST_STORES || is_stored(semaphore + thread);
                    wait_barrier(full_dq_of(b, thread, 0), step % 2);
                    const bool first = !stored && is_first(semaphore + thread);
                    add(thread, first);
                    if (first) {
                        wait_additions();
                        release_semaphore(semaphore + thread);
                    }
                }
            }
        }
    });
    wait_additions();  // shared memory must not go before it is read
}

// Operands count 16 bytes. Scores: 64 keys by BLOCK_M rows, contracted over channels.
__device__ __forceinline__ void multiply_channels(float (&c)[SCORES], u64 keys, u64 rows) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
        multiply_async(c, keys + (step / 4 * KEY_BLOCK + step % 4 * 32) / 16,
                       rows + (step / 4 * ROW_BLOCK + step % 4 * 32) / 16, step > 0);
    commit_products();
}
// c[64 x 64] += a[64 x 16] b[16 x 64] (without keep: =), a in registers, b an operand of rows.
__device__ __forceinline__ void multiply_held(float (&c)[32], const u32 (&a)[4], u64 b, bool keep) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; " KVLAB_WGMMA(
                     64) " {" KVLAB_NUMBERS0 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : KVLAB_SUMS32(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}
__device__ __forceinline__ void multiply_held(float (&c)[64], const u32 (&a)[4], u64 b, bool keep) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; " KVLAB_WGMMA(
                     128) " {" KVLAB_NUMBERS0 KVLAB_NUMBERS1 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
                 : KVLAB_SUMS32(c, 0), KVLAB_SUMS32(c, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}
// Scores with keys in registers, as load_held has left them.
template <int COUNT>
__device__ __forceinline__ void multiply_channels(float (&c)[COUNT], const u32 (&keys)[V_STEPS][4],
                                                  u64 rows) {
#pragma unroll
    for (int step = 0; step < V_STEPS; ++step)
        multiply_held(c, keys[step], rows + (step / 4 * ROW_BLOCK + step % 4 * 32) / 16, step > 0);
    commit_products();
}
// A warp's 16 keys, from `key` on, as the first operand.
__device__ __forceinline__ void load_held(u32 (&keys)[V_STEPS][4], u32 from, int key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < V_STEPS; ++step)
        load_matrices(keys[step], from + step / 4 * KEY_BLOCK + (key + lane % 16) * 128 +
                                      ((step % 4 * 2 + lane / 16) ^ lane % 8) * 16);
}
// dK or dV: 64 keys by HEAD_DIM, contracted over rows.
__device__ __forceinline__ void multiply_rows(float (&c)[SUMS], const u32 (&keys)[SCORES / 2], u64 rows) {
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        multiply_async(c, keys + 4 * step, rows + step * 2048 / 16);
    commit_products();
}
// A block of dQ: 64 rows by 64 channels, contracted over keys; where TURNED 64 channels by BLOCK_M rows.
template <int COUNT>
__device__ __forceinline__ void multiply_keys(float (&c)[COUNT], u64 rows, u64 keys) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
        const u64 own_rows = rows + (step / 4 * ROW_BLOCK + step % 4 * 32) / 16,
                  own_keys = keys + step * 2048 / 16;
        if constexpr (TURNED)
            multiply_turned(c, own_keys, own_rows, step > 0);
        else
            multiply_mixed(c, own_rows, own_keys, step > 0);
    }
    commit_products();
}

// Stores dS as rows by keys, in blocks of 64 keys.
__device__ __forceinline__ void store_ds(u32 to, const u32 (&ds)[SCORES / 2], int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, i = lane / 8;  // matrix of 8 keys, 8 rows
    to += group * ROW_BLOCK + (i / 2 * 8 + lane % 8) * 128 + ((2 * warp + i % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < SCORES / 8; ++j) store_transposed(to + j * 2048, ds + 4 * j);
}

// dK and dV of CTAs that share keys. K, V, Q and dout are not needed any more: the sums take their place.
__device__ __forceinline__ void reduce_dk_dv(const Memory& m, const Call& call, const KeyTile& t,
                                             const float (&dk)[SUMS], const float (&dv)[SUMS], int group) {
    constexpr u32 BYTES = BLOCK_N * HEAD_DIM * 4;
    static_assert(2 * BYTES <= 2 * KEY_BYTES + (Q_STAGES + DOUT_STAGES) * ROW_BYTES, "room for the sums");
    sync_threads(1, COMPUTING);  // both warpgroups' products have read what lay there
    store_sums(m.k + group * BYTES / 2, dk);
    store_sums(m.k + BYTES + group * BYTES / 2, dv);
    sync_cluster();  // sums of all CTAs are in their shared memory
    const SeqInfo s = all_keys_of(call, t);
    cluster_reduce(call.dk, call, s, t.head_kv, t.position, m.k, call.scale);
    cluster_reduce(call.dv, call, s, t.head_kv, t.position, m.k + BYTES, 1.f);
    sync_cluster();  // which must not go before the others have read it
}

__device__ __forceinline__ void compute(const Memory& m, const Signals& b, const Call& call, int group) {
    // Chunks of lse_log2 or dpsum, for 16 rows each, that are read ahead, in registers.
    constexpr int CHUNKS = BLOCK_M / 16, AHEAD = FEW || (HEAD_DIM == 64 && SOFTCAP) ? 1 : 4;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, own_keys = 64 * group + 16 * warp;
    const float scale_log2 = SOFTCAP ? LOG2E : call.scale * LOG2E;
    const int m_block = TURNED ? 0 : group % M_BLOCKS, d_block = group % D_BLOCKS;  // of dQ
    const u64 k = rows_operand(m.k + 64 * 128 * group), v = rows_operand(m.v + 64 * 128 * group);
    const u64 q = rows_operand(m.q), dout = rows_operand(m.dout);
    const u64 q_columns = columns_operand(m.q, ROW_BLOCK), dout_columns = columns_operand(m.dout, ROW_BLOCK);
    const u64 k_columns = columns_operand(m.k + d_block * KEY_BLOCK, KEY_BLOCK);
    const u64 ds_rows = rows_operand(m.scores + m_block * 64 * 128);
    const u32 own_dq = m.dq + group * SUM_BYTES, lane_stats = 16 * (lane % 4);

    PipelineState<2> state = {0, 0};
    u32 keys_parity = 0;
    for_tiles<32>(b, [&](const KeyTile* tile) {
        float dk[SUMS], dv[SUMS], dq[SUMS_DQ];
        float4 stats[AHEAD];
        u32 values[V_STEPS][4];  // with HOLD_V
        PipelineState<2> before = state;
        bool has_dq = !LAG;
        int parts = 0;  // of the tile that have had steps
#pragma unroll
        for (int i = 0; i < SUMS; ++i) dk[i] = dv[i] = 0.f;

        const auto read_lse = [&] {
            wait_barrier(m.full_q + 8 * state.stage, state.parity);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                stats[i] = read_stats(m.lse_log2 + state.stage * STAT_BYTES + lane_stats + 64 * i);
        };
        const auto store_dq = [&](const PipelineState<2>& of) {
            wait_barrier(b.empty_dq + 8 * group, of.stage ^ 1);
            if (HEAD_DIM == 96 && group)
                store_sums(own_dq, (const float (&)[16])dq);
            else
                store_sums(own_dq, dq);
        };
        const auto begin_dq = [&](const PipelineState<2>& of) {
            if (LAG && has_dq) wait_barrier(b.full_ds + 8 * of.stage, of.parity);
            begin_products();
            multiply_keys(dq, ds_rows + of.stage * (SCORE_BYTES / 16), k_columns);
        };

#pragma unroll 1
        for (int i = 0; i < num_groups(call); ++i) {
            const ComputingTile of(call, tile[i]);
            const KeyTile& t = of.tile();
            const RowRange rows = find_row_range(call, sequence_of(call, t), t.position);
            StepIterator at = find_steps(call, t);
            if (at.more(t)) {
                if (parts++ == 0) {
                    wait_barrier(m.full_keys, keys_parity);
                    keys_parity ^= 1;
                    if (HOLD_V) load_held(values, m.v, 16 * (threadIdx.x / 32 - 4));
                }
                read_lse();
            }
#pragma unroll 1
            while (at.more(t)) {
                const int stage = state.stage, row = at.row(t);
                const u64 rows_at = stage * ROW_BYTES / 16;
                const u32 lse_log2 = m.lse_log2 + stage * STAT_BYTES + lane_stats;
                const u32 dpsum = m.dpsum + stage * STAT_BYTES + lane_stats;
                float scores[SCORES], dp[SCORES];
                u32 p[SCORES / 2], ds[SCORES / 2];
                at.next(call, t);
                begin_products();
                multiply_channels(scores, k, q + rows_at);
                wait_barrier(m.full_dout + 8 * stage, state.parity);
                begin_products();
                if constexpr (HOLD_V)
                    multiply_channels(dp, values, dout + rows_at);
                else
                    multiply_channels(dp, v, dout + rows_at);
                wait_products<1>(scores);
                if (SOFTCAP) {
                    wait_products<0>(dp);
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) {
                        subtract_dpsum(dp, c, read_stats(dpsum + 64 * c));
                        apply_softcap(scores, dp, c, call);
                        __syncwarp();  // the next reads shall not take registers before
                    }
                }
                if (row < rows.low || row + BLOCK_M - 1 > rows.high)
                    apply_mask(scores, call, sequence_of(call, t), t.position + own_keys + lane / 4, row);
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const float4 now = stats[c % AHEAD];
                    if (c + AHEAD < CHUNKS)
                        stats[c % AHEAD] = read_stats(lse_log2 + 64 * (c + AHEAD));
                    else if (!SOFTCAP)
                        stats[c % AHEAD] = read_stats(dpsum + 64 * (c + AHEAD - CHUNKS));
                    exponentiate(scores, c, now, scale_log2);
                }
                const auto begin_dv = [&] {
                    pack_pairs(p, scores);
                    begin_products();
                    multiply_rows(dv, p, dout_columns + rows_at);
                };
                if (!LATE_DV) begin_dv();
                if (!SOFTCAP) {
                    wait_products<LATE_DV ? 0 : 1>(dp);
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) {
                        float4& now = stats[(c + CHUNKS) % AHEAD];
                        subtract_dpsum(dp, c, now);
                        if (c + AHEAD < CHUNKS) now = read_stats(dpsum + 64 * (c + AHEAD));
                    }
                }
                if (LATE_DV)
                    compute_ds(ds, scores, dp);
                else
                    compute_ds(ds, p, dp);
                if (LAG) wait_barrier(b.empty_ds + 8 * stage, state.parity ^ 1);
                store_ds(m.scores + stage * SCORE_BYTES, ds, group);
                if (LATE_DV) begin_dv();
                fence_async();
                if (LAG)
                    release(b.full_ds + 8 * stage);
                else
                    sync_threads(1, COMPUTING);  // dS of all keys is in shared memory
                begin_dq(LAG ? before : state);  // in the first step with LAG, of nothing
                multiply_rows(dk, ds, q_columns + rows_at);
                wait_products<1>(dq);
                pin(dv);
                release(m.empty_dout + 8 * stage);
                if (has_dq) {
                    if (LAG) release(b.empty_ds + 8 * before.stage);
                    store_dq(LAG ? before : state);
                }
                before = state, state.next();
                if (at.more(t)) read_lse();
                if (has_dq) {
                    fence_async();
                    release(b.full_dq + 8 * DQ_BARRIERS * group +
                            (DETERMINISTIC ? 8 * (LAG ? stage ^ 1 : stage) : 0));
                }
                has_dq = true;
                wait_products<0>(dk);
                release(m.empty_q + 8 * stage);
            }
        }
        if (parts) {
            if (LAG) {
                begin_dq(before);
                wait_products<0>(dq);
                store_dq(before);
                fence_async();
                release(full_dq_of(b, group, before.stage));
                release(b.empty_ds + 8 * before.stage);
            }
            pin(dv);
            release(b.empty_keys);
        }
        if (CLUSTER_SPLIT > 1) {
            reduce_dk_dv(m, call, *tile, dk, dv, group);
        } else {
            const SeqInfo s = all_keys_of(call, *tile);
            const int key = tile->position + own_keys + lane / 4;
            write_keys(call.dk, call, s, tile->head_kv, dk, key, 0, call.scale);
            write_keys(call.dv, call, s, tile->head_kv, dv, key, 0, 1.f);
        }
    });
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    attend_backward(const __grid_constant__ RowMaps q_maps, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, const __grid_constant__ RowMaps dout_maps,
                    const __grid_constant__ Call call) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(16) float stats[STATS];
    __shared__ __align__(8) u64 barriers[BARRIERS + SIGNALS];
    __shared__ KeyTile info[INFO_STAGES * QUERY_GROUPS];
    const Maps maps = {q_maps.of_group, &k_map, &v_map, dout_maps.of_group};
    const Memory m = layout_memory((shared_address(memory) + 1023) & ~1023u, shared_address(stats),
                                   shared_address(barriers));
    const Signals b = make_signals(shared_address(barriers + BARRIERS), info);
    if (threadIdx.x == 0) init_barriers(m, b);
    __syncthreads();  // barriers are initialised
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        if (threadIdx.x == 0)
            load_q(m, b, maps, call);
        else if (threadIdx.x == 32)
            load_keys_and_dout(m, b, maps, call);
        else if (threadIdx.x == 64 || threadIdx.x == 96)
            add_dq(m, b, call, threadIdx.x / 32 - 2);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;  // uniform, for the compiler
        compute(m, b, call, group);
    }
}

// clang-format off
// gate: HEAD_DIM=64,96,128 BF16=1,0 SOFTCAP=0 CLUSTER_SPLIT=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 SOFTCAP=0 CLUSTER_SPLIT=1 BLOCK_M=80 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=2,4,8 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=1,2,4,8 FIRST_STORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=1 CLUSTER_SPLIT=1,8 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1,0 SOFTCAP=0 CLUSTER_SPLIT=1 QUERY_GROUPS=16 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=2,4,8 QUERY_GROUPS=16 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=1,2,4,8 DETERMINISTIC=1 FIRST_STORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=1 CLUSTER_SPLIT=1 DETERMINISTIC=1 FIRST_STORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1 SOFTCAP=0 CLUSTER_SPLIT=1,8 QUERY_GROUPS=16 DETERMINISTIC=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 SOFTCAP=0 CLUSTER_SPLIT=1 BLOCK_M=80 QUERY_GROUPS=2 registers<=168 arch=sm_90a
// clang-format on
