// Attention backward for Hopper (sm_90a): TMA, wgmma, a warp that loads beside two warpgroups that compute.
//
// Threads and data
//   CTA    BLOCK_N = 128 keys of one (sequence, KV head), all rows that see them: attention_backward.cuh.
//          blockIdx as in attention_backward.cu.
//   warps 0-3   the first lane of warp 0 loads: K and V once, then Q and dout, two stages of each. They give
//          their registers away.
//   warps 4-7, 8-11   a warpgroup each has 64 keys, all rows: scores have keys as rows and query rows as
//          columns, 16 keys a warp, so P and dS stay in registers as the first operands of dV and dK. Of dQ,
//          which sums over all keys, each has 64 rows by 64 channels, and takes dS from shared memory.
//
// A tile of BLOCK_M rows is a step of a warpgroup:
//          S = K Q^T and, behind it, dP = V dout^T;  P = exp2(S - peak) while dP runs;  dV += P dout begins;
//          dS = P (dP - delta) while that runs, to shared memory;  dQ = dS^T K and dK += dS Q begin;  dQ goes
//          to shared memory, and from there a bulk addition brings it to the workspace, while dK runs
// With turns the addition waits until the CTAs before it in the order of keys have made theirs.
//
// Memory: shared, from a multiple of 1024 on, in blocks of 64 columns: K and V, 2 stages of Q and of dout, 2
// of dS (BLOCK_N x BLOCK_M), dQ (2 x 64 x 64 floats); 2 stages of peaks and deltas; mbarriers. Registers at
// HEAD_DIM 128, BLOCK_M 64: 64 of dK, 64 of dV, 32 of S, 32 of dP or dQ, 16 of P, 16 of dS.
//
// Macros: HEAD_DIM, 64 or 128, that the channels are filled up to with zeros; BF16; CAPPED as in
// attention.cu.
//
// clang-format off
// gate: HEAD_DIM=64,128 BF16=1,0 CAPPED=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=1 CAPPED=1 registers<=168 arch=sm_90a
// clang-format on
#include "pairs.cuh"

constexpr int BLOCK_M = 8192 / HEAD_DIM, BLOCK_N = 128, THREADS = 384, STAGES = 2;
constexpr int D_BLOCKS = HEAD_DIM / 64, M_BLOCKS = BLOCK_M / 64;     // blocks of 64 columns
constexpr int KEY_BLOCK = BLOCK_N * 128, ROW_BLOCK = BLOCK_M * 128;  // bytes of such a block
constexpr int KEY_BYTES = KEY_BLOCK * D_BLOCKS, ROW_BYTES = ROW_BLOCK * D_BLOCKS;
constexpr int SCORE_BYTES = KEY_BLOCK * M_BLOCKS, SUM_BYTES = 64 * 64 * 4, STAT_BYTES = 4 * BLOCK_M;
constexpr int SCORES = BLOCK_M / 2, SUMS = HEAD_DIM / 2;  // a thread's
static_assert(M_BLOCKS * D_BLOCKS == 2, "a warpgroup has one block of dQ");

#include "attention_call.cuh"
#include "attention_backward.cuh"
#include "hopper.cuh"

// Shared memory addresses.
struct Memory {
    u32 k, v, q, dout, ds, dq, peaks, deltas;
    u32 full_keys, full_q, full_dout, empty_q, empty_dout;  // barriers: one, then STAGES each
};

// Where a warpgroup or the loader is in the stages.
struct Turn {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

__device__ __forceinline__ void load_tiles(const Memory& m, const Maps& maps, const Call& call, const Span& s,
                                           const Rows& rows, int kv_head, int first_key) {
    expect_bytes(m.full_keys, 2 * KEY_BYTES);
#pragma unroll
    for (int block = 0; block < D_BLOCKS; ++block) {
        copy_box(m.k + block * KEY_BLOCK, maps.k, m.full_keys, 64 * block, s.map_k + first_key, kv_head,
                 s.map_k_row);
        copy_box(m.v + block * KEY_BLOCK, maps.v, m.full_keys, 64 * block, s.map_k + first_key, kv_head,
                 s.map_k_row);
    }
    Turn turn = {0, 1};  // a stage is empty before the first phase of its barrier
    const int last_head = (kv_head + 1) * call.group;
    for (Tile at = first_tile(call, rows, kv_head); at.head < last_head; at = next_tile(at, rows)) {
        const i64 stored = at.head * call.rows + s.stored + at.row;
        const u32 full_q = m.full_q + 8 * turn.stage, full_dout = m.full_dout + 8 * turn.stage;
        wait_barrier(m.empty_q + 8 * turn.stage, turn.parity);
        expect_bytes(full_q, ROW_BYTES + STAT_BYTES);
#pragma unroll
        for (int block = 0; block < D_BLOCKS; ++block)
            copy_box(m.q + turn.stage * ROW_BYTES + block * ROW_BLOCK, maps.q, full_q, 64 * block,
                     s.map_q + at.row, at.head, s.map_q_row);
        copy_bytes(m.peaks + turn.stage * STAT_BYTES, call.peaks + stored, STAT_BYTES, full_q);
        wait_barrier(m.empty_dout + 8 * turn.stage, turn.parity);
        expect_bytes(full_dout, ROW_BYTES + STAT_BYTES);
#pragma unroll
        for (int block = 0; block < D_BLOCKS; ++block)
            copy_box(m.dout + turn.stage * ROW_BYTES + block * ROW_BLOCK, maps.dout, full_dout, 64 * block,
                     s.map_q + at.row, at.head, s.map_q_row);
        copy_bytes(m.deltas + turn.stage * STAT_BYTES, call.deltas + stored, STAT_BYTES, full_dout);
        turn.next();
    }
}

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
__device__ __forceinline__ void multiply_all_keys(float (&c)[32], u64 rows, u64 keys) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        multiply_columns(c, rows + step * 2048 / 16, keys + step * 2048 / 16, step > 0);
    commit_products();
}

__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();  // all lanes have waited for the products that read the stage
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ __forceinline__ float2 read_pair(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}
__device__ __forceinline__ void write_pair(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Hides from `key` and key + 8 the rows of the tile at `row` that do not see them.
__device__ __forceinline__ void hide(float (&scores)[SCORES], const Call& call, const Span& s, int key,
                                     int row) {
    asm volatile("" : "+r"(key));  // what follows from it shall not take registers while no tile is masked
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = key + 8 * half, position = own - s.behind - row;
        const int first = own < s.keys ? position - call.right : BLOCK_M, last = position + call.left;
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) {
            const int column = 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2;
            if (column < first || column > last) scores[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

__device__ __forceinline__ void subtract(float (&dp)[SCORES], u32 deltas) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 4) {
        const float2 delta = read_pair(deltas + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) dp[n + i] -= i % 2 ? delta.y : delta.x;
    }
}

// Scores to weights exp2(unit * s - peak).
__device__ __forceinline__ void weigh(float (&scores)[SCORES], u32 peaks, float unit) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 4) {
        const float2 peak = read_pair(peaks + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            scores[n + i] = power_of_2(fmaf(scores[n + i], unit, i % 2 ? -peak.y : -peak.x));
    }
}

// Adds a block of dQ to the workspace; `sums` is its place in shared memory, which the previous has left.
__device__ __forceinline__ void add_block(float* to, const float (&dq)[32], u32 sums, int group, u32* turn,
                                          u32 mine) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, u = threadIdx.x % 4;
    if (threadIdx.x % 128 == 0) wait_additions_read();
    sync_threads(2 + group, 128);  // the previous block has been read
    const u32 own = sums + (16 * warp + g) * 256 + 8 * u;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        write_pair(own + (n ^ g) * 32, dq[4 * n], dq[4 * n + 1]);
        write_pair(own + 8 * 256 + (n ^ g) * 32, dq[4 * n + 2], dq[4 * n + 3]);
    }
    fence_async();
    sync_threads(2 + group, 128);  // all of the block is in shared memory
    if (threadIdx.x % 128 == 0) {
        if (turn) wait_turn(turn, mine);
        add_floats(to, sums, SUM_BYTES);
        if (turn) {
            wait_additions();
            __threadfence();
            pass_turn(turn);
        }
    }
}

__device__ __forceinline__ void write_keys(const Tensor& t, const Call& call, const Span& s, int head,
                                           const float (&x)[SUMS], int key, float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (key + 8 * half >= s.keys) continue;
        u16* const to = row_of(t, s, s.k0, key + 8 * half, head);
#pragma unroll
        for (int n = 0; n < SUMS; n += 4)
            write_pair(to, 2 * n + 2 * (threadIdx.x % 4), call.dim,
                       pack_pair(x[n + 2 * half] * factor, x[n + 2 * half + 1] * factor));
    }
}

__device__ __forceinline__ void compute(const Memory& m, const Call& call, const Span& s, const Rows& rows,
                                        int kv_head, int block, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first_key = block * BLOCK_N, key = first_key + 64 * group + 16 * warp + lane / 4;
    const float unit = CAPPED ? LOG2E : call.scale * LOG2E;
    const int m_block = group % M_BLOCKS, d_block = group % D_BLOCKS;  // of dQ
    const u64 k = rows_operand(m.k + 64 * 128 * group), v = rows_operand(m.v + 64 * 128 * group);
    const u64 q = rows_operand(m.q), dout = rows_operand(m.dout);
    const u64 q_columns = columns_operand(m.q, ROW_BLOCK), dout_columns = columns_operand(m.dout, ROW_BLOCK);
    const u64 k_columns = columns_operand(m.k + d_block * KEY_BLOCK, KEY_BLOCK);
    const u64 ds_columns = columns_operand(m.ds + m_block * KEY_BLOCK, KEY_BLOCK);
    // Matrix i of stmatrix: keys 8 (i % 2) on, 8 rows from 16 j + 8 (i / 2) on.
    const u32 ds_at = m.ds + (64 * group + 16 * warp + lane % 16) * 128;

    float dk[SUMS], dv[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) dk[i] = dv[i] = 0.f;
    Turn turn = {0, 0};
    const int last_head = (kv_head + 1) * call.group;
    wait_barrier(m.full_keys, 0);
    for (Tile at = first_tile(call, rows, kv_head); at.head < last_head; at = next_tile(at, rows)) {
        const int stage = turn.stage;
        const u64 rows_at = stage * ROW_BYTES / 16;
        const u32 stats = stage * STAT_BYTES + 8 * (lane % 4);
        float scores[SCORES], dp[SCORES], dq[32];
        u32 p[SCORES / 2], ds[SCORES / 2];
        wait_barrier(m.full_q + 8 * stage, turn.parity);
        begin_products();
        multiply_channels(scores, k, q + rows_at);
        wait_barrier(m.full_dout + 8 * stage, turn.parity);
        multiply_channels(dp, v, dout + rows_at);
        wait_products<1>(scores);
        if (CAPPED) {
            wait_products<0>(dp);
            subtract(dp, m.deltas + stats);
#pragma unroll
            for (int i = 0; i < SCORES; ++i) {
                scores[i] = capped_score(call, scores[i]);
                dp[i] *= cap_slope(call, scores[i]);
            }
        }
        if (at.row < rows.low || at.row + BLOCK_M - 1 > rows.high) hide(scores, call, s, key, at.row);
        weigh(scores, m.peaks + stats, unit);
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) p[i] = pack_pair(scores[2 * i], scores[2 * i + 1]);
        begin_products();
        multiply_rows(dv, p, dout_columns + rows_at);
        if (!CAPPED) {
            wait_products<1>(dp);
            subtract(dp, m.deltas + stats);
        }
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) {
            const float2 weights = unpack_pair(p[i]);  // what dV takes; scores need no registers any more
            ds[i] = pack_pair(weights.x * dp[2 * i], weights.y * dp[2 * i + 1]);
        }
#pragma unroll
        for (int j = 0; j < SCORES / 8; ++j)
            store_matrices(
                ds_at + stage * SCORE_BYTES + j / 4 * KEY_BLOCK + ((2 * j + lane / 16) % 8 ^ lane % 8) * 16,
                ds + 4 * j);
        fence_async();
        sync_threads(1, 256);  // dS of all keys is in shared memory
        begin_products();
        multiply_all_keys(dq, ds_columns + stage * SCORE_BYTES / 16, k_columns);
        multiply_rows(dk, ds, q_columns + rows_at);
        wait_products<1>(dq);
        pin(dv);
        release(m.empty_dout + 8 * stage);
        const i64 stored = at.head * call.rows + s.stored + at.row;
        add_block(call.sums + stored * HEAD_DIM + (m_block * D_BLOCKS + d_block) * 4096, dq,
                  m.dq + group * SUM_BYTES, group, call.ordered ? call.turns + stored / 32 + group : nullptr,
                  block - first_turn(call, s, at.row));
        wait_products<0>(dk);
        release(m.empty_q + 8 * stage);
        turn.next();
    }
    write_keys(call.dk, call, s, kv_head, dk, key, call.scale);
    write_keys(call.dv, call, s, kv_head, dv, key, 1.f);
    if (threadIdx.x % 128 == 0) wait_additions();  // shared memory must not go before it is read
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                    const __grid_constant__ Call call) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(16) float stats[2 * STAGES * BLOCK_M];
    __shared__ __align__(8) u64 barriers[1 + 4 * STAGES];
    const Span s = find_span(call, blockIdx.z);
    const int heads = call.ordered ? call.heads_kv : 1;
    const int kv_head = call.ordered ? blockIdx.x % heads : blockIdx.y, block = blockIdx.x / heads;
    if (block * BLOCK_N >= s.keys) return;
    const Rows rows = find_rows(call, s, block * BLOCK_N);
    const u32 start = (shared_address(memory) + 1023) & ~1023u, at = shared_address(barriers);
    Memory m;
    m.k = start, m.v = m.k + KEY_BYTES, m.q = m.v + KEY_BYTES, m.dout = m.q + STAGES * ROW_BYTES;
    m.ds = m.dout + STAGES * ROW_BYTES, m.dq = m.ds + STAGES * SCORE_BYTES;
    m.peaks = shared_address(stats), m.deltas = m.peaks + STAGES * STAT_BYTES;
    m.full_keys = at, m.full_q = at + 8, m.full_dout = m.full_q + 8 * STAGES;
    m.empty_q = m.full_dout + 8 * STAGES, m.empty_dout = m.empty_q + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1 + 2 * STAGES; ++i) init_barrier(m.full_keys + 8 * i, 1);  // the loader's
        for (int i = 0; i < 2 * STAGES; ++i) init_barrier(m.empty_q + 8 * i, 8);  // of the computing warps
        fence_async();
    }
    __syncthreads();  // barriers are initialised
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0)
            load_tiles(m, {&q_map, &k_map, &v_map, &dout_map}, call, s, rows, kv_head, block * BLOCK_N);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;  // uniform, for the compiler
        compute(m, call, s, rows, kv_head, block, group);
    }
}
