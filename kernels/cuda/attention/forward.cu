// Attention forward for sm_80 and later: mma.sync, cp.async, a running softmax over tiles of keys.
//
// Threads and data
//   A CTA has one tile of a list, up to BLOCK_M = WARPS * 16 * M_TILES rows (attention/rows.cuh). The query
//   heads that share K and V share its tiles of keys.
//   A warp has 16 * M_TILES rows, all keys and all channels. Warps meet only to hand over tiles of keys.
//   A lane has g = lane / 4 and u = lane % 4 of mma.m16n8k16: rows g and g + 8 of each 16 rows, columns 2u
//   and 2u + 1 of each 8. Scores leave the first product in the registers where the second wants them.
//
// Memory
//   Shared memory holds BLOCK_M rows of Q (later of O), then BLOCK_N rows of K and of V. A row has PITCH
//   elements, 8 more than channels, so that the 8 rows that ldmatrix reads at once lie in different banks.
//   At HEAD_DIM 128, M_TILES 2 and BLOCK_N 64 a thread has 128 registers of O, 64 of S (then 32 of P), 8 of
//   Q, 4 of K or V and 8 of the softmax.
//
// Steps, one for each tile of BLOCK_N keys
//   1. S = Q K^T, while V is copied.
//   2. P = exp2(S - row_max). row_max follows a row's maximum only where that is more than SLACK above it, so
//      O is seldom rescaled. Where all rows see all keys of the tile there is no mask.
//   3. O = O * rescale + P V, while the next K is copied.
//
// Macros
//   HEAD_DIM, a multiple of 16: channels are filled up to it with zeros. BF16. M_TILES, WARPS, BLOCK_N.
//   BLOCKS: CTAs of a multiprocessor.
//   SOFTCAP: 0, scores are scaled inside the exponential, so the scale must be positive; 1, they are scaled
//   before it, and capped if softcap > 0.
//   ALIGNED: 1, rows can be copied 16 bytes at a time; 0, element by element.
#include "attention/rows.cuh"
#include "attention/softmax.cuh"
#include "common/ampere.cuh"

constexpr int BLOCK_M = WARPS * 16 * M_TILES, THREADS = WARPS * 32;
constexpr int PITCH = HEAD_DIM + 8;                           // elements of a row in shared memory
constexpr int K_STEPS = HEAD_DIM / 16;                        // of S = Q K^T
constexpr int N_TILES = BLOCK_N / 8, D_TILES = HEAD_DIM / 8;  // 8 columns of S and of O

using RowCopier = Copier<THREADS, PITCH>;

// Masks for row `row` and row + 8 the keys of the tile at `key` that they must not see.
template <int COUNT>
__device__ __forceinline__ void apply_mask(float (&s)[COUNT], const Call& call, const TileRows& tile, int key,
                                           int row) {
    asm volatile("" : "+r"(row));  // else what follows from it takes registers in tiles without a mask
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int position = (row + 8 * half) / call.pack + tile.behind;
        const int first = position - call.left - key, last = min(position + call.right, tile.keys - 1) - key;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const int column = 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2;
            if (column < first || column > last) s[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

// Writes lse, and out as rows of PITCH elements to shared memory; `row` is the first of the 16.
// The first head is read from the list again: it would take a register meanwhile.
template <int COUNT>
__device__ __forceinline__ void finish_rows(const Call& call, const TileRows& tile, const Softmax& x,
                                            float (&o)[COUNT], u16* to, int row, float scale_log2) {
    const int lane = threadIdx.x % 32, g = lane / 4, u = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = x.row_sum[half] + __shfl_xor_sync(ALL_LANES, x.row_sum[half], 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
        for (int n = 0; n < COUNT; n += 4)
            *(u32*)(to + (g + 8 * half) * PITCH + 2 * n + 2 * u) =
                pack_pair(o[n + 2 * half] * factor, o[n + 2 * half + 1] * factor);
        const int own = row + g + 8 * half, position = own / call.pack;
        if (call.lse && u == 0 && own < tile.rows) {
            const int head = find_tile(call)->head_q + own - position * call.pack;
            call.lse[tile.batch * call.lse_batch + head * call.lse_head + tile.q0 + position] =
                sum == 0.f ? -INFINITE : (x.row_max[half] * scale_log2 + log2f(sum)) * LN2;
        }
    }
}

// Copies ROWS rows of out from shared memory, one warp; `row` is the first.
template <int ROWS>
__device__ __forceinline__ void copy_out(const Call& call, const TileRows& tile, const u16* from, int row) {
    constexpr int PIECE = ALIGNED ? 8 : 1, PIECES = HEAD_DIM / PIECE;
    Element* out = base_of(call.out, tile, tile.q0, find_tile(call)->head_q);
    for (int at = threadIdx.x % 32; at < ROWS * PIECES; at += 32) {
        const int own = at / PIECES, channel = at % PIECES * PIECE;
        if (row + own >= tile.rows || channel >= call.dim) continue;
        u16* to = out + row_offset(call.out, row + own, call.pack) + channel;
        if constexpr (ALIGNED)
            *(uint4*)to = *(const uint4*)(from + own * PITCH + channel);
        else
            *to = from[own * PITCH + channel];
    }
}

// Copies the rows of q of this CTA, zeros beyond the last.
__device__ __forceinline__ void copy_queries(u16* to, const Call& call, const TileRows& tile,
                                             const RowCopier& c) {
    const u16* from = base_of(call.q, tile, tile.q0, tile.head_q);
    if constexpr (ALIGNED) {
        if (THREADS % RowCopier::CHUNKS && !c.takes_part) return;
#pragma unroll 2
        for (int r = c.row; r < BLOCK_M; r += RowCopier::PASS)
            copy_async_if(shared_address(to + r * PITCH + c.channel),
                          from + row_offset(call.q, min(tile.row0 + r, tile.rows - 1), call.pack) + c.channel,
                          c.any && tile.row0 + r < tile.rows);
    } else {
        for (int at = threadIdx.x; at < BLOCK_M * HEAD_DIM; at += THREADS) {
            const int r = at / HEAD_DIM, channel = at % HEAD_DIM, row = tile.row0 + r;
            to[r * PITCH + channel] = row < tile.rows && channel < call.dim
                                          ? from[row_offset(call.q, row, call.pack) + channel]
                                          : (u16)0;
        }
    }
}

__device__ __forceinline__ void multiply_keys(float (&s)[M_TILES][4 * N_TILES], u32 q, u32 k) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4 * N_TILES; ++i) s[m][i] = 0.f;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) load_matrices(a[m], q + (16 * m * PITCH + 16 * step) * 2);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            u32 b[4];
            load_matrices(b, k + (8 * n * PITCH + 16 * step) * 2);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma(sums_of(s[m] + 4 * n), a[m], b[0], b[1]);
                mma(sums_of(s[m] + 4 * n + 4), a[m], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ void multiply_values(float (&o)[M_TILES][4 * D_TILES],
                                                const u32 (&p)[M_TILES][2 * N_TILES], u32 v) {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
#pragma unroll
        for (int d = 0; d < D_TILES; d += 2) {
            u32 b[4];
            load_transposed(b, v + (8 * n * PITCH + 8 * d) * 2);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const u32 a[4] = {p[m][2 * n], p[m][2 * n + 1], p[m][2 * n + 2], p[m][2 * n + 3]};
                mma(sums_of(o[m] + 4 * d), a, b[0], b[1]);
                mma(sums_of(o[m] + 4 * d + 4), a, b[2], b[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ Call call) {
    extern __shared__ __align__(16) u16 memory[];
    u16 *const q = memory, *const k = q + BLOCK_M * PITCH, *const v = k + BLOCK_N * PITCH;
    const TileInfo* const info = find_tile(call);
    if (!info) return;
    const TileRows tile = find_rows(call, *info);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const RowCopier c = RowCopier::of(call.dim);
    const i64 k_stride = call.k.position, v_stride = call.v.position;
    const u16* next_k =
        base_of(call.k, tile, tile.k0 + tile.first + ALIGNED * c.row, tile.head_kv) + ALIGNED * c.channel;
    const u16* next_v =
        base_of(call.v, tile, tile.k0 + tile.first + ALIGNED * c.row, tile.head_kv) + ALIGNED * c.channel;
    copy_queries(q, call, tile, c);
    if (tile.first < tile.last) copy_rows<BLOCK_N>(k, next_k, k_stride, tile.keys - tile.first, c, call.dim);
    commit_copies();

    float o[M_TILES][4 * D_TILES];
    Softmax softmax[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        softmax[m] = {{LOWEST, LOWEST}, {0.f, 0.f}};
#pragma unroll
        for (int i = 0; i < 4 * D_TILES; ++i) o[m][i] = 0.f;
    }
    const float scale_log2 = SOFTCAP ? LOG2E : call.scale * LOG2E;
    // Matrix i of an ldmatrix is addressed by lanes 8 i to 8 i + 7. Q: rows 0-7 and 8-15, then the next 8
    // channels. K: the next 8 channels, then the next 8 keys. V: the next 8 keys, then the next 8 channels.
    u16* const own_rows = q + warp * 16 * M_TILES * PITCH;
    const u32 q_at = shared_address(own_rows + lane % 16 * PITCH + lane / 16 * 8);
    const u32 k_at = shared_address(k + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
    const u32 v_at = shared_address(v + lane % 16 * PITCH + lane / 16 * 8);
    const int row = tile.row0 + warp * 16 * M_TILES;

    for (int key = tile.first; key < tile.last; key += BLOCK_N) {
        wait_copies<0>();
        __syncthreads();  // K (at first Q) is there for all; all are done with the previous V
        copy_rows<BLOCK_N>(v, next_v, v_stride, tile.keys - key, c, call.dim);
        commit_copies();
        next_v += BLOCK_N * v_stride;
        float s[M_TILES][4 * N_TILES];
        u32 p[M_TILES][2 * N_TILES];
        multiply_keys(s, q_at, k_at);
        const bool masked = key < tile.low || key + BLOCK_N - 1 > tile.high;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            if (SOFTCAP) cap_scores(s[m], call.scale, call.softcap);
            if (masked) apply_mask(s[m], call, tile, key, row + 16 * m + lane / 4);
            float rescale[2];
            if (update_max(softmax[m], s[m], scale_log2, rescale)) scale_rows(o[m], rescale);
            exponentiate(softmax[m], s[m], scale_log2);
#pragma unroll
            for (int i = 0; i < 2 * N_TILES; ++i) p[m][i] = pack_pair(s[m][2 * i], s[m][2 * i + 1]);
        }
        wait_copies<0>();
        __syncthreads();  // V is there for all; all are done with K
        next_k += BLOCK_N * k_stride;
        if (key + BLOCK_N < tile.last)
            copy_rows<BLOCK_N>(k, next_k, k_stride, tile.keys - key - BLOCK_N, c, call.dim);
        commit_copies();
        multiply_values(o, p, v_at);
    }
    wait_copies<0>();
    __syncthreads();  // Q was copied by other warps, and there may have been no key
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        finish_rows(call, tile, softmax[m], o[m], own_rows + 16 * m * PITCH, row + 16 * m, scale_log2);
    __syncwarp();  // the warp's rows of out are in shared memory
    copy_out<16 * M_TILES>(call, tile, own_rows, row);
}

// gate: HEAD_DIM=128 BF16=1,0 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=128 BF16=1 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 SOFTCAP=1 ALIGNED=0 registers<=255
// gate: HEAD_DIM=32,64 BF16=1 M_TILES=2 WARPS=4 BLOCK_N=32 BLOCKS=3 SOFTCAP=0 ALIGNED=1 registers<=168
// gate: HEAD_DIM=64 BF16=0 M_TILES=2 WARPS=4 BLOCK_N=32 BLOCKS=3 SOFTCAP=1 ALIGNED=0 registers<=168
// gate: HEAD_DIM=80,96 BF16=1 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 SOFTCAP=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=192,256 BF16=1 M_TILES=1 WARPS=4 BLOCK_N=64 BLOCKS=2 SOFTCAP=0 ALIGNED=1 registers<=255
