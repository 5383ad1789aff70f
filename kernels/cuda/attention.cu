// Attention forward for sm_80 and later: mma.sync, cp.async, a running softmax over tiles of keys.
//
// Threads and data
//   CTA    BLOCK_M = WARPS * 16 * M_TILES rows of one (sequence, KV head); a row is (query position, head of
//          the group), heads fastest, so the heads that share K and V share its tiles. blockIdx: x block of
//          rows, the last (under a causal mask the longest) first, y KV head, z sequence.
//   warp   16 * M_TILES rows, all keys, all channels; warps meet only to hand over tiles.
//   lane   g = lane / 4, u = lane % 4 of mma.m16n8k16: rows g and g + 8 of each 16, columns 2u and 2u + 1 of
//          each 8. Scores leave the first product in the registers where the second one wants them.
//
// A tile of BLOCK_N keys is a step:
//          S = Q K^T, while V is copied;  P = exp2(S - peak);  O = O * shrink + P V, while the next K is
//          copied
// A peak follows its row's maximum only when that is more than SLACK above it, so O is seldom rescaled.
// Tiles that every row sees whole are computed without a mask.
//
// Memory: shared (BLOCK_M + 2 BLOCK_N) * PITCH elements, Q (later O), K, V; a row has 8 elements more than
// channels, so that the 8 rows that ldmatrix reads at once lie in different banks. Registers at HEAD_DIM 128,
// M_TILES 2, BLOCK_N 64: 128 of O, 64 of S (then 32 of P), 8 of Q, 4 of K or V, 8 of the softmax.
//
// Macros: HEAD_DIM, a multiple of 16 that the channels are filled up to with zeros; BF16; M_TILES; WARPS;
// BLOCK_N; BLOCKS, how many CTAs a multiprocessor shall hold; CAPPED: 0 scores are scaled inside the
// exponential, which takes scale > 0, 1 scaled, and capped if softcap > 0, before; ALIGNED: 1 rows can be
// copied 16 bytes at a time, 0 element by element.
//
// clang-format off
// gate: HEAD_DIM=128 BF16=1,0 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 CAPPED=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=128 BF16=1 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 CAPPED=1 ALIGNED=0 registers<=255
// gate: HEAD_DIM=64 BF16=1,0 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=3 CAPPED=0 ALIGNED=1 registers<=168
// gate: HEAD_DIM=64 BF16=1 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 CAPPED=1 ALIGNED=0 registers<=255
// gate: HEAD_DIM=32,80,96 BF16=1 M_TILES=2 WARPS=4 BLOCK_N=64 BLOCKS=2 CAPPED=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=192,256 BF16=1 M_TILES=1 WARPS=4 BLOCK_N=64 BLOCKS=2 CAPPED=0 ALIGNED=1 registers<=255
// gate: HEAD_DIM=256 BF16=0 M_TILES=1 WARPS=4 BLOCK_N=64 BLOCKS=2 CAPPED=1 ALIGNED=0 registers<=255
// clang-format on
#include "packed_codes.cuh"

constexpr int BLOCK_M = WARPS * 16 * M_TILES, THREADS = WARPS * 32;
constexpr int PITCH = HEAD_DIM + 8;                           // elements of a row in shared memory
constexpr int CHUNKS = HEAD_DIM / 8;                          // 16-byte pieces of a row
constexpr int K_STEPS = HEAD_DIM / 16;                        // of S = Q K^T
constexpr int N_TILES = BLOCK_N / 8, D_TILES = HEAD_DIM / 8;  // 8 columns of S and of O
constexpr float SLACK = 8.f;                                  // base 2; what P may exceed 1 by
constexpr float LOWEST = -1e30f;                              // a peak before any key
constexpr float LN2 = 0.69314718056f, LOG2E = 1.44269504089f;
#define INFINITE __int_as_float(0x7f800000)

using i64 = long long;

struct Tensor {
    u16* data;
    i64 batch, position, head;  // strides in elements
};

struct Call {
    Tensor q, k, v, out;  // [batch, seqlen, heads, dim], or with cu_* [total, heads, dim]
    float* lse;           // [batch, heads_q, seqlen_q], or [heads_q, total_q]
    i64 lse_batch, lse_head;
    const int* cu_q;  // [sequences + 1], null for sequences of one length
    const int* cu_k;
    int seqlen_q, seqlen_k, group, dim;
    int left, right;  // keys a row sees before and after its own position
    float scale, softcap;
};

// The part of a call that a CTA works on.
struct Work {
    const u16 *k, *v;  // first key
    int row0, rows;    // first of its rows, and all rows of the sequence
    int keys, behind;  // behind: key at which query position 0 stands
    int first, last;   // keys [first, last) are seen by some row
};

__device__ __forceinline__ void copy_16(u32 to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// How threads copy rows: CHUNKS of them side by side a row, PASS rows at a time.
constexpr int PASS = THREADS / CHUNKS;

struct Copier {
    int row, channel;      // of the first row and of the 16 bytes that this thread copies
    bool takes_part, any;  // any: there are such channels
};

__device__ __forceinline__ Copier make_copier(int dim) {
    const int row = threadIdx.x / CHUNKS, channel = threadIdx.x % CHUNKS * 8;
    return {row, channel, row < PASS, channel < dim};
}

// Copies the first `present` of BLOCK_N rows to shared memory, zeros for the others; `from` is this thread's
// part of the first row.
__device__ __forceinline__ void copy_keys(u16* to, const u16* from, i64 stride, int present, const Copier& c,
                                          int dim) {
    if constexpr (ALIGNED) {
        if (THREADS % CHUNKS && !c.takes_part) return;
        const u32 at = shared_address(to + c.row * PITCH + c.channel);
#pragma unroll
        for (int i = 0; i < BLOCK_N; i += PASS) {
            if (BLOCK_N % PASS && i + PASS > BLOCK_N && c.row + i >= BLOCK_N) break;
            copy_16(at + i * PITCH * 2, from, c.any && c.row + i < present);
            from += PASS * stride;
            asm volatile("" : "+l"(from));  // step by step: the multiples of stride shall not take registers
        }
    } else {
#pragma unroll 2
        for (int at = threadIdx.x; at < BLOCK_N * HEAD_DIM; at += THREADS) {
            const int r = at / HEAD_DIM, channel = at % HEAD_DIM;
            to[r * PITCH + channel] = r < present && channel < dim ? from[r * stride + channel] : (u16)0;
        }
    }
}

// Copies the rows of q of this CTA, zeros beyond the last.
__device__ __forceinline__ void copy_queries(u16* to, const u16* from, const Tensor& q, const Work& w,
                                             int group, const Copier& c, int dim) {
    const auto row_of = [&](int r) {
        const int row = min(w.row0 + r, w.rows - 1), position = row / group;
        return from + position * q.position + (row - position * group) * q.head;
    };
    if constexpr (ALIGNED) {
        if (THREADS % CHUNKS && !c.takes_part) return;
#pragma unroll 2
        for (int r = c.row; r < BLOCK_M; r += PASS)
            copy_16(shared_address(to + r * PITCH + c.channel), row_of(r) + c.channel,
                    c.any && w.row0 + r < w.rows);
    } else {
        for (int at = threadIdx.x; at < BLOCK_M * HEAD_DIM; at += THREADS) {
            const int r = at / HEAD_DIM, channel = at % HEAD_DIM;
            to[r * PITCH + channel] = w.row0 + r < w.rows && channel < dim ? row_of(r)[channel] : (u16)0;
        }
    }
}

__device__ __forceinline__ Work find_work(const Call& call) {
    const int z = blockIdx.z;
    Work w;
    const int q0 = call.cu_q ? call.cu_q[z] : 0, k0 = call.cu_k ? call.cu_k[z] : 0;
    const int positions = call.cu_q ? call.cu_q[z + 1] - q0 : call.seqlen_q;
    w.keys = call.cu_k ? call.cu_k[z + 1] - k0 : call.seqlen_k;
    w.rows = positions * call.group;
    w.row0 = (gridDim.x - 1 - blockIdx.x) * BLOCK_M;
    w.behind = w.keys - positions;
    const i64 batch = call.cu_q ? 0 : z;
    w.k = call.k.data + batch * call.k.batch + k0 * call.k.position + blockIdx.y * call.k.head;
    w.v = call.v.data + batch * call.v.batch + k0 * call.v.position + blockIdx.y * call.v.head;
    const int low = w.row0 / call.group + w.behind;
    const int high = (min(w.row0 + BLOCK_M, w.rows) - 1) / call.group + w.behind;
    w.first = max(0, low - call.left) / BLOCK_N * BLOCK_N;
    w.last = min(w.keys, high + call.right + 1);
    return w;
}

// One warp's rows: what is summed up, and the softmax.
struct Rows {
    float o[M_TILES][D_TILES][4];
    float peak[M_TILES][2], sum[M_TILES][2];  // of rows g and g + 8; a lane has its part of the sum
};

__device__ __forceinline__ void multiply_keys(float (&s)[M_TILES][N_TILES][4], u32 q, u32 k) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
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
                mma(s[m][n], a[m], b[0], b[1]);
                mma(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ void multiply_values(Rows& x, const u32 (&p)[M_TILES][N_TILES][2], u32 v) {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
#pragma unroll
        for (int d = 0; d < D_TILES; d += 2) {
            u32 b[4];
            load_transposed(b, v + (8 * n * PITCH + 8 * d) * 2);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const u32 a[4] = {p[m][n][0], p[m][n][1], p[m][n + 1][0], p[m][n + 1][1]};
                mma(x.o[m][d], a, b[0], b[1]);
                mma(x.o[m][d + 1], a, b[2], b[3]);
            }
        }
    }
}

// Scales and caps scores (CAPPED), and hides what the rows must not see (MASKED).
template <bool MASKED>
__device__ __forceinline__ void prepare_scores(float (&s)[M_TILES][N_TILES][4], const Call& call,
                                               const Work& w, int key, int row) {
    asm volatile("" : "+r"(row));  // what follows from it shall not take registers while no tile is masked
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int position = (row + 16 * m + 8 * half) / call.group + w.behind;
            const int first = position - call.left - key;
            const int last = min(position + call.right, w.keys - 1) - key;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[m][n][2 * half + i];
                    const int column = 8 * n + 2 * (threadIdx.x % 4) + i;
                    if (CAPPED) {
                        x *= call.scale;
                        if (call.softcap > 0.f) {  // tanh(y) = 1 - 2 / (1 + exp(2 y))
                            const float growth = power_of_2(x * (2.f * LOG2E / call.softcap));
                            x = call.softcap * (1.f - __fdividef(2.f, 1.f + growth));
                        }
                    }
                    if (MASKED && (column < first || column > last)) x = -INFINITE;
                }
        }
}

// P = exp2(unit * (S - peak)), packed; raises peaks and shrinks what was added up under lower ones.
__device__ __forceinline__ void weigh(Rows& x, float (&s)[M_TILES][N_TILES][4], u32 (&p)[M_TILES][N_TILES][2],
                                      float unit) {
    float best[M_TILES][2];
    bool higher = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float b = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < N_TILES; ++n) b = fmaxf(b, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            b = fmaxf(b, __shfl_xor_sync(ALL_LANES, b, 1));
            b = fmaxf(b, __shfl_xor_sync(ALL_LANES, b, 2));
            best[m][half] = b;
            higher |= (b - x.peak[m][half]) * unit > SLACK;
        }
    if (__any_sync(ALL_LANES, higher)) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float peak = fmaxf(x.peak[m][half], best[m][half]);
                const float shrink = power_of_2((x.peak[m][half] - peak) * unit);
                x.peak[m][half] = peak;
                x.sum[m][half] *= shrink;
#pragma unroll
                for (int d = 0; d < D_TILES; ++d) {
                    x.o[m][d][2 * half] *= shrink;
                    x.o[m][d][2 * half + 1] *= shrink;
                }
            }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const float below[2] = {-x.peak[m][0] * unit, -x.peak[m][1] * unit};
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float low = power_of_2(fmaf(s[m][n][2 * half], unit, below[half]));
                const float high = power_of_2(fmaf(s[m][n][2 * half + 1], unit, below[half]));
                x.sum[m][half] += low + high;
                p[m][n][half] = pack_pair(low, high);
            }
    }
}

// out and lse of one warp's rows; `rows` is their part of the memory of Q.
__device__ __forceinline__ void write_rows(const Call& call, const Work& w, Rows& x, u16* rows, int row,
                                           float unit, i64 q0) {
    const int lane = threadIdx.x % 32, g = lane / 4, u = lane % 4, first_head = blockIdx.y * call.group;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = x.sum[m][half];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const float factor = sum == 0.f ? 0.f : 1.f / sum;
            const int own = 16 * m + 8 * half + g;
#pragma unroll
            for (int d = 0; d < D_TILES; ++d)
                *(u32*)(rows + own * PITCH + 8 * d + 2 * u) =
                    pack_pair(x.o[m][d][2 * half] * factor, x.o[m][d][2 * half + 1] * factor);
            if (u == 0 && row + own < w.rows) {
                const int position = (row + own) / call.group, head = first_head + (row + own) % call.group;
                const i64 at =
                    (call.cu_q ? 0 : blockIdx.z) * call.lse_batch + head * call.lse_head + q0 + position;
                call.lse[at] = sum == 0.f ? -INFINITE : (x.peak[m][half] * unit + log2f(sum)) * LN2;
            }
        }
    __syncwarp();  // the warp's rows of O are in shared memory
    u16* out = call.out.data + (call.cu_q ? 0 : blockIdx.z) * call.out.batch + q0 * call.out.position;
    constexpr int PIECE = ALIGNED ? 8 : 1, PIECES = HEAD_DIM / PIECE;
    for (int at = lane; at < 16 * M_TILES * PIECES; at += 32) {
        const int own = at / PIECES, channel = at % PIECES * PIECE;
        if (row + own >= w.rows || channel >= call.dim) continue;
        u16* to = out + (row + own) / call.group * call.out.position +
                  (first_head + (row + own) % call.group) * call.out.head + channel;
        if constexpr (ALIGNED)
            *(uint4*)to = *(const uint4*)(rows + own * PITCH + channel);
        else
            *to = rows[own * PITCH + channel];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ Call call) {
    extern __shared__ __align__(16) u16 memory[];
    u16 *const q = memory, *const k = q + BLOCK_M * PITCH, *const v = k + BLOCK_N * PITCH;
    const Work w = find_work(call);
    if (w.row0 >= w.rows) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 q0 = call.cu_q ? call.cu_q[blockIdx.z] : 0;
    const Copier c = make_copier(call.dim);
    const i64 k_stride = call.k.position, v_stride = call.v.position;

    const u16* queries = call.q.data + (call.cu_q ? 0 : blockIdx.z) * call.q.batch + q0 * call.q.position +
                         blockIdx.y * call.group * call.q.head;
    copy_queries(q, queries, call.q, w, call.group, c, call.dim);
    const u16* next_k = w.k + (w.first + ALIGNED * c.row) * k_stride + ALIGNED * c.channel;
    const u16* next_v = w.v + (w.first + ALIGNED * c.row) * v_stride + ALIGNED * c.channel;
    if (w.first < w.last) copy_keys(k, next_k, k_stride, w.keys - w.first, c, call.dim);
    commit_copies();

    Rows x;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        x.peak[m][0] = x.peak[m][1] = LOWEST;
        x.sum[m][0] = x.sum[m][1] = 0.f;
#pragma unroll
        for (int d = 0; d < D_TILES; ++d) x.o[m][d][0] = x.o[m][d][1] = x.o[m][d][2] = x.o[m][d][3] = 0.f;
    }
    const float unit = CAPPED ? LOG2E : call.scale * LOG2E;
    // Matrix i of an ldmatrix is addressed by lanes 8 i to 8 i + 7. Q: rows 0-7 and 8-15, then the next 8
    // channels. K: the next 8 channels, then the next 8 keys. V: the next 8 keys, then the next 8 channels.
    const u32 q_at = shared_address(q + (warp * 16 * M_TILES + lane % 16) * PITCH + lane / 16 * 8);
    const u32 k_at = shared_address(k + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
    const u32 v_at = shared_address(v + lane % 16 * PITCH + lane / 16 * 8);
    const int row = w.row0 + warp * 16 * M_TILES, own_row = row + lane / 4;
    // Keys that all rows of the CTA see: a tile within is not masked.
    const int low = (min(w.row0 + BLOCK_M, w.rows) - 1) / call.group + w.behind - call.left;
    const int high = min(w.row0 / call.group + w.behind + call.right, w.keys - 1);

    for (int key = w.first; key < w.last; key += BLOCK_N) {
        wait_copies<0>();
        __syncthreads();  // K (at first Q) is there for all; all are done with the previous V
        copy_keys(v, next_v, v_stride, w.keys - key, c, call.dim);
        next_v += BLOCK_N * v_stride;
        commit_copies();
        float s[M_TILES][N_TILES][4];
        multiply_keys(s, q_at, k_at);
        if (key < low || key + BLOCK_N - 1 > high)
            prepare_scores<true>(s, call, w, key, own_row);
        else if (CAPPED)
            prepare_scores<false>(s, call, w, key, own_row);
        u32 p[M_TILES][N_TILES][2];
        weigh(x, s, p, unit);
        wait_copies<0>();
        __syncthreads();  // V is there for all; all are done with K
        next_k += BLOCK_N * k_stride;
        if (key + BLOCK_N < w.last) copy_keys(k, next_k, k_stride, w.keys - key - BLOCK_N, c, call.dim);
        commit_copies();
        multiply_values(x, p, v_at);
    }
    wait_copies<0>();
    __syncthreads();  // Q was copied by other warps, and there may have been no key
    write_rows(call, w, x, q + warp * 16 * M_TILES * PITCH, row, unit, q0);
}
