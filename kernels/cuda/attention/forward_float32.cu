// Attention forward in float32 for sm_80 and later: multiply-adds, a running softmax over tiles of keys.
//
// Threads and data
//   A CTA of 128 threads has one tile of a list, up to BLOCK_M = 32 rows (attention/rows.cuh).
//   A thread has y = thread / 8 and x = thread % 8. It has rows 2y and 2y + 1; of scores it has the keys
//   x + 8 j of a tile, of out the channels 4 x + 32 j to 4 x + 32 j + 3. The 8 threads of two rows are
//   neighbours in a warp.
//
// Memory
//   Shared memory holds 64 rows of PITCH floats, Q and then K or V, and 32 rows of 36 floats of P. Rows are 4
//   floats longer than channels, so that threads that read 16 bytes of neighbouring rows meet different
//   banks. At HEAD_DIM 256 a thread has 64 registers of O and 64 of what a tile adds to it.
//
// Steps, one for each tile of BLOCK_N = 32 keys
//   1. K goes to shared memory; S = Q K^T.
//   2. P = exp(S - row_max) goes to shared memory.
//   3. V goes to where K was; O = O * rescale + P V.
//
// Macros
//   HEAD_DIM, a multiple of 32: channels are filled up to it with zeros.
#define BF16 0
#define FLOAT32 1
#include "attention/rows.cuh"
#include "attention/softmax.cuh"

constexpr int BLOCK_M = 32, BLOCK_N = 32, THREADS = 128;
constexpr int PITCH = HEAD_DIM + 4, P_PITCH = BLOCK_N + 4, PIECES = HEAD_DIM / 32;

// Copies rows of K or V, zeros for keys and channels that are not there.
__device__ __forceinline__ void copy_keys(float* to, const Tensor& t, const Call& call, const TileRows& tile,
                                          int key) {
    const float* from = base_of(t, tile, tile.k0 + key, tile.head_kv);
    for (int at = threadIdx.x; at < BLOCK_N * HEAD_DIM; at += THREADS) {
        const int row = at / HEAD_DIM, channel = at % HEAD_DIM;
        const bool present = key + row < tile.keys && channel < call.dim;
        to[row * PITCH + channel] = present ? from[row * t.position + channel] : 0.f;
    }
}

__device__ __forceinline__ void copy_queries(float* to, const Call& call, const TileRows& tile) {
    const float* from = base_of(call.q, tile, tile.q0, tile.head_q);
    for (int at = threadIdx.x; at < BLOCK_M * HEAD_DIM; at += THREADS) {
        const int row = tile.row0 + at / HEAD_DIM, channel = at % HEAD_DIM;
        const bool present = row < tile.rows && channel < call.dim;
        to[at / HEAD_DIM * PITCH + channel] =
            present ? from[row_offset(call.q, row, call.pack) + channel] : 0.f;
    }
}

__device__ __forceinline__ float multiply(const float4& a, const float4& b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float over_keys(float x, bool largest) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, distance);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}

// A score from a product q k: scaled and capped, softcap * tanh(score / softcap).
__device__ __forceinline__ float score_of(const Call& call, float product) {
    const float score = product * call.scale;
    return call.softcap > 0.f ? call.softcap * tanhf(score / call.softcap) : score;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(const __grid_constant__ Call call) {
    extern __shared__ __align__(16) float memory[];
    float *const q = memory, *const kv = q + BLOCK_M * PITCH, *const p = kv + BLOCK_N * PITCH;
    const TileInfo* const info = find_tile(call);
    if (!info) return;
    const TileRows tile = find_rows(call, *info);
    const int x = threadIdx.x % 8, own = threadIdx.x / 8 * 2;
    float o[2][4 * PIECES], row_max[2] = {LOWEST, LOWEST}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4 * PIECES; ++i) o[0][i] = o[1][i] = 0.f;
    copy_queries(q, call, tile);
    for (int key = tile.first; key < tile.last; key += BLOCK_N) {
        __syncthreads();  // all are done with the previous V
        copy_keys(kv, call.k, call, tile, key);
        __syncthreads();  // K, at first Q too, is there for all
        float s[2][4] = {};
#pragma unroll 2
        for (int start = 0; start < HEAD_DIM; start += 16) {  // sums of sums round less
            float part[2][4] = {};
#pragma unroll
            for (int channel = start; channel < start + 16; channel += 4) {
                float4 a[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) a[r] = *(const float4*)(q + (own + r) * PITCH + channel);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4 b = *(const float4*)(kv + (x + 8 * j) * PITCH + channel);
#pragma unroll
                    for (int r = 0; r < 2; ++r) part[r][j] = multiply(a[r], b, part[r][j]);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) s[i / 4][i % 4] += part[i / 4][i % 4];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int position = (tile.row0 + own + r) / call.pack + tile.behind;
            const int first = position - call.left - key;
            const int last = min(position + call.right, tile.keys - 1) - key;
            float best = row_max[r];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool seen = x + 8 * j >= first && x + 8 * j <= last;
                s[r][j] = seen ? score_of(call, s[r][j]) : -INFINITE;
                best = fmaxf(best, s[r][j]);
            }
            best = over_keys(best, true);
            const float rescale = expf(row_max[r] - best);
            row_max[r] = best, sum[r] *= rescale;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float weight = expf(s[r][j] - best);
                sum[r] += weight;
                p[(own + r) * P_PITCH + x + 8 * j] = weight;
            }
#pragma unroll
            for (int i = 0; i < 4 * PIECES; ++i) o[r][i] *= rescale;
        }
        __syncthreads();  // P is there for all, and all are done with K
        copy_keys(kv, call.v, call, tile, key);
        __syncthreads();  // V is there for all
        float part[2][4 * PIECES] = {};
#pragma unroll 2
        for (int n = 0; n < BLOCK_N; ++n) {
            const float weights[2] = {p[own * P_PITCH + n], p[(own + 1) * P_PITCH + n]};
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                const float4 b = *(const float4*)(kv + n * PITCH + 4 * x + 32 * j);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float* const c = part[r] + 4 * j;
                    c[0] = fmaf(weights[r], b.x, c[0]), c[1] = fmaf(weights[r], b.y, c[1]);
                    c[2] = fmaf(weights[r], b.z, c[2]), c[3] = fmaf(weights[r], b.w, c[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * PIECES; ++i) o[0][i] += part[0][i], o[1][i] += part[1][i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = over_keys(sum[r], false), factor = total == 0.f ? 0.f : 1.f / total;
        const int row = tile.row0 + own + r;
        if (row >= tile.rows) continue;
        const int position = row / call.pack, head = tile.head_q + row - position * call.pack;
        float* const out = base_of(call.out, tile, tile.q0 + position, head);
#pragma unroll
        for (int i = 0; i < 4 * PIECES; ++i) {
            const int channel = 4 * x + 32 * (i / 4) + i % 4;
            if (channel < call.dim) out[channel] = o[r][i] * factor;
        }
        if (x == 0 && call.lse)
            call.lse[tile.batch * call.lse_batch + head * call.lse_head + tile.q0 + position] =
                total == 0.f ? -INFINITE : row_max[r] + logf(total);
    }
}

// gate: HEAD_DIM=32,64,96,128,192,256 registers<=255
