// Attention backward in float32 for sm_80 and later: plain multiply-adds.
//
// Threads and data
//   A CTA of BLOCK * 4 threads has BLOCK keys of one (sequence, KV head) and goes through all rows that see
//   them, BLOCK at a time (attention/backward.cuh).
//   A thread has y = thread / 8 and x = thread % 8. Of scores it has rows 2y and 2y + 1 by the keys x + 8 j.
//   Of dK and dV it has keys 2y and 2y + 1, of dQ those rows, by channels 4 x + 32 j to 4 x + 32 j + 3.
//
// Memory
//   Shared memory holds 4 BLOCK rows of PITCH floats, K, V, Q and dout, and 2 BLOCK rows of P_PITCH floats, P
//   and dS. At HEAD_DIM 256 a thread has 64 registers of dK and 64 of dV.
//
// Steps, one for each tile of BLOCK rows
//   1. Q and dout go to shared memory; S = Q K^T and dP = dout V^T.
//   2. P = exp(S - lse) and dS = P (dP - dpsum) go to shared memory.
//   3. dV += P^T dout and dK += dS^T Q.
//   4. dQ = dS K is added to the workspace, as in attention/backward.cu.
//   Sums over a tile are made apart and then added, which rounds less.
//
// Macros
//   HEAD_DIM, a multiple of 32: channels are filled up to it with zeros. BLOCK, 16 or 32.
#define BF16 0
#define FLOAT32 1
#include "common/pairs.cuh"

constexpr int BLOCK_M = BLOCK, BLOCK_N = BLOCK, THREADS = BLOCK * 4, COLUMNS = BLOCK / 8;
constexpr int PITCH = HEAD_DIM + 4, P_PITCH = BLOCK + 4, PIECES = HEAD_DIM / 32;

#include "attention/call.cuh"
#include "attention/backward.cuh"

// Copies BLOCK rows, zeros for those and for channels that are not there.
__device__ __forceinline__ void copy_rows(float* to, const float* from, i64 stride, int present, int dim) {
    for (int at = threadIdx.x; at < BLOCK * HEAD_DIM; at += THREADS) {
        const int row = at / HEAD_DIM, channel = at % HEAD_DIM;
        to[row * PITCH + channel] = row < present && channel < dim ? from[row * stride + channel] : 0.f;
    }
}

// Products of two rows of a with COLUMNS rows of b.
__device__ __forceinline__ void multiply_rows(float (&c)[2][COLUMNS], const float* a, const float* b) {
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; ++i) c[i / COLUMNS][i % COLUMNS] = 0.f;
#pragma unroll 2
    for (int start = 0; start < HEAD_DIM; start += 16) {
        float part[2][COLUMNS] = {};
#pragma unroll
        for (int channel = start; channel < start + 16; channel += 4)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const float4 y = *(const float4*)(b + 8 * j * PITCH + channel);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float4 z = *(const float4*)(a + r * PITCH + channel);
                    part[r][j] = fmaf(z.x, y.x, fmaf(z.y, y.y, fmaf(z.z, y.z, fmaf(z.w, y.w, part[r][j]))));
                }
            }
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) c[i / COLUMNS][i % COLUMNS] += part[i / COLUMNS][i % COLUMNS];
    }
}

// Sums over BLOCK rows of b, a piece of 4 channels, for two weights each, `step` floats from row to row.
__device__ __forceinline__ void sum_rows(float (&c)[2][4], const float* weights, int step, int second,
                                         const float* b) {
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = 0.f;
#pragma unroll 4
    for (int n = 0; n < BLOCK; ++n) {
        const float4 y = *(const float4*)(b + n * PITCH);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float weight = weights[n * step + r * second];
            c[r][0] = fmaf(weight, y.x, c[r][0]), c[r][1] = fmaf(weight, y.y, c[r][1]);
            c[r][2] = fmaf(weight, y.z, c[r][2]), c[r][3] = fmaf(weight, y.w, c[r][3]);
        }
    }
}

__device__ __forceinline__ void write_keys(const Tensor& t, const Call& call, const SeqInfo& s, int head,
                                           const float (&sums)[2][4 * PIECES], int key, int x, float factor) {
    for (int r = 0; r < 2 && key + r < s.keys; ++r) {
        float* const to = row_of(t, s, s.k0, key + r, head);
#pragma unroll
        for (int i = 0; i < 4 * PIECES; ++i) {
            const int channel = 4 * x + 32 * (i / 4) + i % 4;
            if (channel < call.dim) to[channel] = (r ? sums[1][i] : sums[0][i]) * factor;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_backward(const __grid_constant__ Call call) {
    extern __shared__ __align__(16) float memory[];
    float *const k = memory, *const v = k + BLOCK * PITCH, *const q = v + BLOCK * PITCH;
    float *const dout = q + BLOCK * PITCH, *const p = dout + BLOCK * PITCH, *const ds = p + BLOCK * P_PITCH;
    const TileInfo* const t = find_tile(call, blockIdx.x);
    if (!t) return;
    const SeqInfo s = sequence_of(call, *t);
    const int kv_head = t->head_kv, first_key = t->position, x = threadIdx.x % 8, own = threadIdx.x / 8 * 2;
    const RowRange rows = find_row_range(call, s, first_key);
    copy_rows(k, row_of(call.k, s, s.k0, first_key, kv_head), call.k.position, s.keys - first_key, call.dim);
    copy_rows(v, row_of(call.v, s, s.k0, first_key, kv_head), call.v.position, s.keys - first_key, call.dim);
    float dk[2][4 * PIECES] = {}, dv[2][4 * PIECES] = {};
    const int last_head = (kv_head + 1) * call.group;
    for (Tile at = first_tile(call, rows, kv_head); at.head < last_head; at = next_tile(at, rows)) {
        const i64 workspace_row = at.head * call.rows + s.workspace_row + at.row;
        __syncthreads();  // all are done with the previous rows, P and dS
        copy_rows(q, row_of(call.q, s, s.q0, at.row, at.head), call.q.position, s.rows - at.row, call.dim);
        copy_rows(dout, row_of(call.dout, s, s.q0, at.row, at.head), call.dout.position, s.rows - at.row,
                  call.dim);
        __syncthreads();  // rows, and at first keys, are there for all
        float scores[2][COLUMNS], dp[2][COLUMNS];
        multiply_rows(scores, q + own * PITCH, k + x * PITCH);
        multiply_rows(dp, dout + own * PITCH, v + x * PITCH);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float row_lse = call.lse_log2[workspace_row + stat_offset(own + r)],
                        row_dpsum = call.dpsum[workspace_row + stat_offset(own + r)];
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                float score = scores[r][j] * call.scale, slope = 1.f;
                if (call.softcap > 0.f) {
                    const float bent = tanhf(score / call.softcap);
                    score = call.softcap * bent, slope = 1.f - bent * bent;
                }
                const bool seen = sees(call, s, at.row + own + r, first_key + x + 8 * j);
                const float weight = seen ? expf(score - row_lse) : 0.f;
                p[(own + r) * P_PITCH + x + 8 * j] = weight;
                ds[(own + r) * P_PITCH + x + 8 * j] = seen ? weight * (dp[r][j] - row_dpsum) * slope : 0.f;
            }
        }
        __syncthreads();  // P and dS are there for all
        float* const accum = call.dq_accum + workspace_row / 64 * (64 * HEAD_DIM);
        u32* const semaphore = call.dq_semaphore + workspace_row / 16;
        if (call.deterministic) {
            if (threadIdx.x == 0)
                wait_semaphore(semaphore, first_key / BLOCK - first_key_block(call, s, at.row));
            __syncthreads();  // earlier additions happen before those of all threads
        }
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            float part[2][4];
            const int channel = 4 * x + 32 * j;
            sum_rows(part, p + own, P_PITCH, 1, dout + channel);
#pragma unroll
            for (int i = 0; i < 8; ++i) dv[i / 4][4 * j + i % 4] += part[i / 4][i % 4];
            sum_rows(part, ds + own, P_PITCH, 1, q + channel);
#pragma unroll
            for (int i = 0; i < 8; ++i) dk[i / 4][4 * j + i % 4] += part[i / 4][i % 4];
            sum_rows(part, ds + own * P_PITCH, 1, P_PITCH, k + channel);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                atomicAdd(accum + accum_offset((int)(workspace_row % 64) + own + i / 4, channel + i % 4),
                          part[i / 4][i % 4]);
        }
        if (call.deterministic) {
            __threadfence();
            __syncthreads();  // additions of all threads happen before the semaphore is released
            if (threadIdx.x == 0) release_semaphore(semaphore);
        }
    }
    write_keys(call.dk, call, s, kv_head, dk, first_key + own, x, call.scale);
    write_keys(call.dv, call, s, kv_head, dv, first_key + own, x, 1.f);
}

// gate: HEAD_DIM=32,64,96,128 BLOCK=32 registers<=255
// gate: HEAD_DIM=192,256 BLOCK=16 registers<=255
