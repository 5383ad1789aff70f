// Attention backward for sm_80 and later: mma.sync, cp.async, dk and dv in registers, dq added in memory.
//
// Threads and data
//   A CTA has BLOCK_N keys of one (sequence, KV head) and goes through all rows that see them, BLOCK_M at a
//   time (attention/backward.cuh).
//   Scores have keys as rows and query rows as columns. KEY_WARPS warps divide the keys; PARTS warps that
//   have the same keys divide the rest:
//     of scores    BLOCK_N / KEY_WARPS keys by BLOCK_M / PARTS rows a warp
//     of dk, dv    the same keys by HEAD_DIM / PARTS channels
//     of dq        BLOCK_M / ROW_WARPS rows by HEAD_DIM * ROW_WARPS / WARPS channels
//   A lane has g = lane / 4 and u = lane % 4 of mma.m16n8k16: rows g and g + 8 of each 16, columns 2u and
//   2u + 1 of each 8.
//
// Memory
//   Shared memory holds BLOCK_N rows of K and of V, Q_STAGES * BLOCK_M of Q and BLOCK_M of dout, of PITCH
//   elements each; BLOCK_N rows of P and of dS, of P_PITCH; 2 stages of BLOCK_M lse_log2 and dpsum. Rows are
//   8 elements longer than they need, so that the 8 rows that ldmatrix reads at once lie in different banks.
//   At HEAD_DIM 128, BLOCK_M 64, BLOCK_N 128 a thread has 64 registers of dK, 64 of dV, 32 of S and 32 of dP,
//   then of dQ.
//
// Steps, one for each tile of BLOCK_M rows
//   1. S = K Q^T and dP = V dout^T, while the next Q is copied.
//   2. P = exp2(S - lse) and dS = P (dP - dpsum) go to shared memory.
//   3. dV += P dout.
//   4. dQ = dS^T K is added to the workspace by atomic additions, while the next dout is copied. In a
//      deterministic call a CTA first waits for those before it in the order of keys.
//   5. dK += dS Q.
//
// Macros
//   HEAD_DIM, a multiple of 32: channels are filled up to it with zeros. BF16. BLOCK_M, BLOCK_N, WARPS,
//   KEY_WARPS, ROW_WARPS, Q_STAGES. SOFTCAP, ALIGNED: as in attention/forward.cu.
#include "common/pairs.cuh"

constexpr int THREADS = WARPS * 32, PITCH = HEAD_DIM + 8, P_PITCH = BLOCK_M + 8;
constexpr int KEYS = BLOCK_N / KEY_WARPS, PARTS = WARPS / KEY_WARPS;  // of a warp; warps that share keys
constexpr int KEY_TILES = KEYS / 16, S_ROWS = BLOCK_M / PARTS, S_TILES = S_ROWS / 8;
constexpr int D_COLUMNS = HEAD_DIM / PARTS, D_TILES = D_COLUMNS / 8;  // of dk and dv, a warp
constexpr int Q_ROWS = BLOCK_M / ROW_WARPS, Q_TILES = Q_ROWS / 16;    // of dq, a warp
constexpr int Q_COLUMNS = HEAD_DIM / (WARPS / ROW_WARPS), Q_COLUMN_TILES = Q_COLUMNS / 8;
static_assert(S_TILES % 2 == 0 && D_TILES % 2 == 0 && Q_COLUMN_TILES % 2 == 0, "ldmatrix brings two tiles");

#include "attention/call.cuh"
#include "common/ampere.cuh"
#include "attention/backward.cuh"

using RowCopier = Copier<THREADS, PITCH>;

// c += a b; a is [16 M_COUNT, 16 K_COUNT] in shared memory, or the transposed; b is [16 K_COUNT, 8 N_COUNT],
// or the transposed. Addresses are those of `across` for a and transposed b, of `along` for the other two.
template <int M_COUNT, int N_COUNT, int K_COUNT, bool A_TRANSPOSED, bool B_TRANSPOSED, int A_PITCH,
          int B_PITCH>
__device__ __forceinline__ void multiply(float (&c)[M_COUNT][4 * N_COUNT], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < K_COUNT; ++step) {
        u32 x[M_COUNT][4];
#pragma unroll
        for (int m = 0; m < M_COUNT; ++m) {
            if (A_TRANSPOSED)
                load_transposed(x[m], a + (16 * step * A_PITCH + 16 * m) * 2);
            else
                load_matrices(x[m], a + (16 * m * A_PITCH + 16 * step) * 2);
        }
#pragma unroll
        for (int n = 0; n < N_COUNT; n += 2) {
            u32 y[4];
            if (B_TRANSPOSED)
                load_matrices(y, b + (8 * n * B_PITCH + 16 * step) * 2);
            else
                load_transposed(y, b + (16 * step * B_PITCH + 8 * n) * 2);
#pragma unroll
            for (int m = 0; m < M_COUNT; ++m) {
                mma(sums_of(c[m] + 4 * n), x[m], y[0], y[1]);
                mma(sums_of(c[m] + 4 * n + 4), x[m], y[2], y[3]);
            }
        }
    }
}

template <int M_COUNT, int COUNT>
__device__ __forceinline__ void clear(float (&c)[M_COUNT][COUNT]) {
#pragma unroll
    for (int m = 0; m < M_COUNT; ++m)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) c[m][i] = 0.f;
}

__device__ __forceinline__ void add_pair(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
    atomicAdd(to, x);
    atomicAdd(to + 1, y);
#endif
}

struct Memory {
    u16 *k, *v, *q, *dout, *p, *ds;
    float* stats;  // 2 stages of lse_log2 and dpsum, BLOCK_M each
};

__device__ __forceinline__ void copy_tile(u16* to, const Tensor& t, const Call& call, const SeqInfo& s,
                                          const Tile& at, const RowCopier& c) {
    copy_rows<BLOCK_M>(to, row_of(t, s, s.q0, at.row + ALIGNED * c.row, at.head) + ALIGNED * c.channel,
                       t.position, s.rows - at.row, c, call.dim);
}

__device__ __forceinline__ void copy_stats(float* to, const Call& call, const SeqInfo& s, const Tile& at) {
    const int i = threadIdx.x * 4;
    if (i >= 2 * BLOCK_M) return;
    const float* from = i < BLOCK_M ? call.lse_log2 : call.dpsum;
    copy_async_if(shared_address(to + i), from + at.head * call.rows + s.workspace_row + at.row + i % BLOCK_M,
                  true);
}

// Scores to P and dS, in shared memory as [keys, rows]; the CTA's part of the warp begins at key and row.
__device__ __forceinline__ void compute_p_ds(const Call& call, const SeqInfo& s, const Memory& m,
                                             const float* stats,
                                             const float (&scores)[KEY_TILES][4 * S_TILES],
                                             const float (&dp)[KEY_TILES][4 * S_TILES], int first_key,
                                             int first_row, int key, int row, bool masked, float scale_log2) {
    const int g = threadIdx.x % 32 / 4, u = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
        const int r = row + 8 * n + 2 * u;
        const float2 row_lse = *(const float2*)(stats + stat_offset(r)),
                     row_dpsum = *(const float2*)(stats + BLOCK_M + stat_offset(r));
#pragma unroll
        for (int i = 0; i < 2 * KEY_TILES; ++i) {
            const int own = key + 8 * i + g;
            float p[2], ds[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float x = scores[i / 2][4 * n + 2 * (i % 2) + j];
                const float y = dp[i / 2][4 * n + 2 * (i % 2) + j];
                if (SOFTCAP) x = softcap_score(call, x);
                p[j] = power_of_2(fmaf(x, scale_log2, j ? -row_lse.y : -row_lse.x));
                ds[j] = p[j] * (y - (j ? row_dpsum.y : row_dpsum.x));
                if (SOFTCAP) ds[j] *= softcap_slope(call, x);
                if (masked && !sees(call, s, first_row + r + j, first_key + own)) p[j] = ds[j] = 0.f;
            }
            *(u32*)(m.p + own * P_PITCH + r) = pack_pair(p[0], p[1]);
            *(u32*)(m.ds + own * P_PITCH + r) = pack_pair(ds[0], ds[1]);
        }
    }
}

// Adds a warp's part of dq; `to` is the tile in the workspace.
__device__ __forceinline__ void add_dq(float* to, const float (&dq)[Q_TILES][4 * Q_COLUMN_TILES], int row,
                                       int column) {
#pragma unroll
    for (int m = 0; m < Q_TILES; ++m)
#pragma unroll
        for (int n = 0; n < Q_COLUMN_TILES; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                add_pair(to + accum_offset(row + 16 * m + 8 * half, column + 8 * n), dq[m][4 * n + 2 * half],
                         dq[m][4 * n + 2 * half + 1]);
}

// Writes a warp's part of dk or dv; `key` is its first in the sequence.
__device__ __forceinline__ void write_keys(const Tensor& t, const Call& call, const SeqInfo& s, int head,
                                           const float (&x)[KEY_TILES][4 * D_TILES], int key, int column,
                                           float factor) {
#pragma unroll
    for (int i = 0; i < 2 * KEY_TILES; ++i) {
        if (key + 8 * i >= s.keys) return;
        u16* const to = row_of(t, s, s.k0, key + 8 * i, head);
#pragma unroll
        for (int n = 0; n < D_TILES; ++n) {
            const float* const c = x[i / 2] + 4 * n + 2 * (i % 2);
            write_sums(t, call, to, column + 8 * n, c[0] * factor, c[1] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_backward(const __grid_constant__ Call call) {
    extern __shared__ __align__(16) u16 memory[];
    __shared__ SeqInfo s;  // here, as they would take a tenth of the registers
    __shared__ RowRange rows;
    const TileInfo* const t = find_tile(call, blockIdx.x);
    if (!t) return;
    const int kv_head = t->head_kv, first_key = t->position;
    if (threadIdx.x == 0) {
        s = sequence_of(call, *t);
        rows = find_row_range(call, s, first_key);
    }
    __syncthreads();  // the sequence and its rows are there for all
    Memory m;
    m.k = memory, m.v = m.k + BLOCK_N * PITCH, m.q = m.v + BLOCK_N * PITCH;
    m.dout = m.q + Q_STAGES * BLOCK_M * PITCH, m.p = m.dout + BLOCK_M * PITCH;
    m.ds = m.p + BLOCK_N * P_PITCH, m.stats = (float*)(m.ds + BLOCK_N * P_PITCH);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, u = lane % 4;
    const int key = warp / PARTS * KEYS, part = warp % PARTS;
    const int q_row = warp % ROW_WARPS * Q_ROWS, q_column = warp / ROW_WARPS * Q_COLUMNS;
    const RowCopier c = RowCopier::of(call.dim);
    const int last_head = (kv_head + 1) * call.group;
    Tile at = first_tile(call, rows, kv_head);
    {
        const int own = first_key + ALIGNED * c.row, channel = ALIGNED * c.channel;
        copy_rows<BLOCK_N>(m.k, row_of(call.k, s, s.k0, own, kv_head) + channel, call.k.position,
                           s.keys - first_key, c, call.dim);
        copy_rows<BLOCK_N>(m.v, row_of(call.v, s, s.k0, own, kv_head) + channel, call.v.position,
                           s.keys - first_key, c, call.dim);
    }
    if (at.head < last_head) {
        copy_tile(m.q, call.q, call, s, at, c);
        copy_tile(m.dout, call.dout, call, s, at, c);
        copy_stats(m.stats, call, s, at);
    }
    commit_copies();

    float dk[KEY_TILES][4 * D_TILES], dv[KEY_TILES][4 * D_TILES];
    clear(dk), clear(dv);
    const float scale_log2 = SOFTCAP ? LOG2E : call.scale * LOG2E;
    // Offsets of a lane in a matrix that ldmatrix reads: see multiply.
    const auto across = [&](const u16* x, int pitch) {
        return shared_address(x + lane % 16 * pitch + lane / 16 * 8);
    };
    const auto along = [&](const u16* x, int pitch) {
        return shared_address(x + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8);
    };
    constexpr u32 KEY_BYTES = BLOCK_N * PITCH * 2, SCORE_BYTES = BLOCK_N * P_PITCH * 2,
                  ROW_BYTES = BLOCK_M * PITCH * 2;
    const u32 k_at = across(m.k + key * PITCH, PITCH), v_at = k_at + KEY_BYTES;
    const u32 p_at = across(m.p + key * P_PITCH, P_PITCH), ds_at = p_at + SCORE_BYTES;
    const u32 dst_at = along(m.ds + q_row, P_PITCH), kt_at = across(m.k + q_column, PITCH);
    const u32 dout_at = along(m.dout + part * S_ROWS * PITCH, PITCH);
    const u32 doutt_at = across(m.dout + part * D_COLUMNS, PITCH);

    for (int stage = 0; at.head < last_head; stage ^= 1) {
        wait_copies<0>();
        __syncthreads();  // Q, dout and what goes with them are there for all; all are done with the others
        const Tile next = next_tile(at, rows);
        const bool more = next.head < last_head;
        const u32 q_before =
            (Q_STAGES == 2 ? 2 - stage : 1) * ROW_BYTES;  // this stage of Q lies so far before dout
        const float* const stats = m.stats + stage * 2 * BLOCK_M;
        if (more) {
            if (Q_STAGES == 2) copy_tile(m.q + (stage ^ 1) * BLOCK_M * PITCH, call.q, call, s, next, c);
            copy_stats(m.stats + (stage ^ 1) * 2 * BLOCK_M, call, s, next);
        }
        commit_copies();
        {
            float scores[KEY_TILES][4 * S_TILES], dp[KEY_TILES][4 * S_TILES];
            clear(scores), clear(dp);
            multiply<KEY_TILES, S_TILES, HEAD_DIM / 16, false, true, PITCH, PITCH>(scores, k_at,
                                                                                   dout_at - q_before);
            multiply<KEY_TILES, S_TILES, HEAD_DIM / 16, false, true, PITCH, PITCH>(dp, v_at, dout_at);
            const bool masked = at.row < rows.low || at.row + BLOCK_M - 1 > rows.high;
            compute_p_ds(call, s, m, stats, scores, dp, first_key, at.row, key, part * S_ROWS, masked,
                         scale_log2);
        }
        __syncthreads();  // P and dS are there for all
        multiply<KEY_TILES, D_TILES, BLOCK_M / 16, false, false, P_PITCH, PITCH>(dv, p_at, doutt_at);
        __syncthreads();  // all are done with dout
        if (more) copy_tile(m.dout, call.dout, call, s, next, c);
        commit_copies();
        {
            float dq[Q_TILES][4 * Q_COLUMN_TILES];
            clear(dq);
            multiply<Q_TILES, Q_COLUMN_TILES, BLOCK_N / 16, true, false, P_PITCH, PITCH>(dq, dst_at, kt_at);
            const i64 workspace_row = at.head * call.rows + s.workspace_row + at.row;
            float* const to = call.dq_accum + workspace_row / 64 * (64 * HEAD_DIM);
            u32* const semaphore = call.dq_semaphore + workspace_row / 16;
            if (call.deterministic) {
                if (threadIdx.x == 0)
                    wait_semaphore(semaphore, first_key / BLOCK_N - first_key_block(call, s, at.row));
                __syncthreads();  // earlier additions happen before those of all threads
            }
            add_dq(to, dq, (int)(workspace_row % 64) + q_row + g, q_column + 2 * u);
            if (call.deterministic) {
                __threadfence();
                __syncthreads();  // additions of all threads happen before the semaphore is released
                if (threadIdx.x == 0) release_semaphore(semaphore);
            }
        }
        multiply<KEY_TILES, D_TILES, BLOCK_M / 16, false, false, P_PITCH, PITCH>(dk, ds_at,
                                                                                 doutt_at - q_before);
        if (Q_STAGES == 1) {
            __syncthreads();  // all are done with Q
            if (more) copy_tile(m.q, call.q, call, s, next, c);
            commit_copies();
        }
        at = next;
    }
    write_keys(call.dk, call, s, kv_head, dk, first_key + key + g, part * D_COLUMNS + 2 * u, call.scale);
    write_keys(call.dv, call, s, kv_head, dv, first_key + key + g, part * D_COLUMNS + 2 * u, 1.f);
}

// clang-format off
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_M=64 BLOCK_N=128 WARPS=8 KEY_WARPS=4 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=0,1 ALIGNED=1 registers<=255
// gate: HEAD_DIM=128 BF16=1 BLOCK_M=64 BLOCK_N=128 WARPS=8 KEY_WARPS=4 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=0 ALIGNED=0 registers<=255
// gate: HEAD_DIM=32 BF16=1 BLOCK_M=128 BLOCK_N=128 WARPS=8 KEY_WARPS=4 ROW_WARPS=4 Q_STAGES=2 SOFTCAP=0,1 ALIGNED=1 registers<=255
// gate: HEAD_DIM=64,96 BF16=1 BLOCK_M=64 BLOCK_N=128 WARPS=8 KEY_WARPS=4 ROW_WARPS=4 Q_STAGES=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=192,256 BF16=1 BLOCK_M=64 BLOCK_N=64 WARPS=8 KEY_WARPS=2 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=256 BF16=1 BLOCK_M=64 BLOCK_N=64 WARPS=8 KEY_WARPS=2 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=1 ALIGNED=0 registers<=255
// gate: HEAD_DIM=256 BF16=1 BLOCK_M=64 BLOCK_N=64 WARPS=8 KEY_WARPS=2 ROW_WARPS=2 Q_STAGES=1 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=32,64 BF16=1 BLOCK_M=64 BLOCK_N=64 WARPS=8 KEY_WARPS=4 ROW_WARPS=4 Q_STAGES=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=96 BF16=1 BLOCK_M=32 BLOCK_N=64 WARPS=4 KEY_WARPS=4 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=128 BF16=1 BLOCK_M=32 BLOCK_N=64 WARPS=8 KEY_WARPS=4 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=192 BF16=1 BLOCK_M=32 BLOCK_N=32 WARPS=4 KEY_WARPS=2 ROW_WARPS=2 Q_STAGES=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=256 BF16=1 BLOCK_M=32 BLOCK_N=32 WARPS=4 KEY_WARPS=2 ROW_WARPS=2 Q_STAGES=1 SOFTCAP=0 ALIGNED=1 registers<=255
// clang-format on
