// Attention backward on Hopper: what its two kernels share. Loading, the softmax of a product of keys by rows
// as wgmma leaves it, dq to the workspace, dk and dv out.
//
// A CTA has THREADS = 384: warps 0-3 load and give their registers away, two warpgroups compute. Matrices lie
// in shared memory as common/hopper.cuh says, in blocks of 64 columns. Needs HEAD_DIM and CLUSTER_SPLIT.
#pragma once
#include "common/hopper.cuh"
#include "attention/backward_cluster.cuh"

constexpr int THREADS = 128 + COMPUTING;
constexpr int D_BLOCKS = (HEAD_DIM + 63) / 64, M_BLOCKS = BLOCK_M / 64;  // blocks of 64 columns
constexpr int KEY_BLOCK = BLOCK_N * 128, ROW_BLOCK = BLOCK_M * 128;      // bytes of such a block
constexpr int KEY_BYTES = KEY_BLOCK * D_BLOCKS, ROW_BYTES = ROW_BLOCK * D_BLOCKS;
constexpr int SCORE_BYTES = 2 * BLOCK_N * BLOCK_M, STAT_BYTES = 4 * BLOCK_M;
constexpr int SUMS_DQ = TURNED ? SCORES : 32, SUM_BYTES = 512 * SUMS_DQ;  // a thread's, a warpgroup's
constexpr int BARRIERS = 1 + 2 * (Q_STAGES + DOUT_STAGES), STATS = (Q_STAGES + DOUT_STAGES) * BLOCK_M;

// Shared memory addresses. Scores: P, if it is there, and dS, [BLOCK_N, BLOCK_M] a stage.
struct Memory {
    u32 k, v, q, dout, scores, dq, lse_log2, dpsum;
    u32 full_keys, full_q, full_dout, empty_q, empty_dout;  // barriers: one, then one a stage
};

__device__ __forceinline__ Memory layout_memory(u32 start, u32 stats, u32 barriers) {
    Memory m;
    m.k = start, m.v = m.k + KEY_BYTES, m.q = m.v + KEY_BYTES, m.dout = m.q + Q_STAGES * ROW_BYTES;
    m.scores = m.dout + DOUT_STAGES * ROW_BYTES, m.dq = m.scores + SCORE_STAGES * SCORE_BYTES;
    m.lse_log2 = stats, m.dpsum = stats + Q_STAGES * STAT_BYTES;
    m.full_keys = barriers, m.full_q = barriers + 8, m.full_dout = m.full_q + 8 * Q_STAGES;
    m.empty_q = m.full_dout + 8 * DOUT_STAGES, m.empty_dout = m.empty_q + 8 * Q_STAGES;
    return m;
}

// Where a warpgroup or the loader is in the stages.
template <int STAGES>
struct PipelineState {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The same in one register, for threads that load and have few: `count` stages are done. A stage is empty
// before the first phase of its barrier.
template <int STAGES>
struct LoaderState {
    u32 count;
    __device__ __forceinline__ u32 stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 parity() const { return count / STAGES % 2 ^ 1; }
};

// Where tensor copies find the rows, or the keys, of a sequence.
__device__ __forceinline__ TmaCoord row_coord_of(const Call& call, const SeqInfo& s) {
    return coord_of(call.cu_q, s.sequence, s.q0, s.rows);
}
__device__ __forceinline__ TmaCoord key_coord_of(const Call& call, const SeqInfo& s) {
    return coord_of(call.cu_k, s.sequence, s.k0, s.keys);
}

struct RowMaps {
    TensorMap of_group[QUERY_GROUPS];
};
struct Maps {
    const TensorMap *q, *k, *v, *dout;  // q, dout: of the first group
};

// The keys of the sequence of a tile, which no group may see.
__device__ __forceinline__ SeqInfo all_keys_of(const Call& call, const KeyTile& t) {
    SeqInfo s = sequence_of(call, t);
#if QUERY_GROUPS > 1
    s.keys = t.num_keys;
#endif
    return s;
}

// Loads a tile of rows of q or dout, and their lse_log2 or dpsum, to a stage that is empty.
template <typename Source>
__device__ __forceinline__ void load_rows(const Call& call, const Source& of, u32 to, const TensorMap* map,
                                          u32 stats_to, const float* stats, u32 full, const Tile& at) {
    expect_bytes(full, ROW_BYTES + STAT_BYTES);
    copy_bytes(stats_to, stats + at.head * call.rows + of.sequence().workspace_row + at.row, STAT_BYTES,
               full);
    const TmaCoord coord = row_coord_of(call, of.sequence());
#pragma unroll
    for (int block = 0; block < D_BLOCKS; ++block)
        copy_box(to + block * ROW_BLOCK, map, full, coord, 64 * block, at.row, at.head);
}

__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();  // all lanes have waited for the products that read the stage
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// FIRST_STORES: 1 where the first CTA that has a part of dq stores it, so that no zeros are needed (0 if it
// is not given). In a deterministic call that is the first in the order of keys; in others a semaphore says
// how far the first part is.
#ifndef FIRST_STORES
#define FIRST_STORES 0
#endif
constexpr u32 STORING = 1, STORED = 2;

__device__ __forceinline__ bool is_stored(const u32* semaphore) {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(semaphore) : "memory");
    return now == STORED;
}
// Whether the caller has the first part, and has to store it. If another is about to, waits for that.
__device__ __forceinline__ bool is_first(u32* semaphore) {
    u32 before;
    do
        asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, %2;"
                     : "=r"(before)
                     : "l"(semaphore), "n"(STORING)
                     : "memory");
    while (before == STORING);
    return before == 0;
}

// Brings a part of dq to the workspace: adds it or, if it is the first, stores it.
__device__ __forceinline__ void bring_floats(float* to, u32 from, u32 bytes, bool first) {
    if (!first) return add_floats(to, from, bytes);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// What a lane needs of lse_log2 or dpsum for 16 columns.
__device__ __forceinline__ float4 read_stats(u32 address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
    return x;
}
// Of these, the one for the lane's sum i of 8.
__device__ __forceinline__ float stat_of(const float4& x, int i) {
    return i < 4 ? (i % 2 ? x.y : x.x) : (i % 2 ? x.w : x.z);
}

// Masks for `key` and key + 8 the rows, from `row` on, that do not see them.
template <int COUNT>
__device__ __forceinline__ void apply_mask(float (&scores)[COUNT], const Call& call, const SeqInfo& s,
                                           int key, int row) {
    asm volatile("" : "+r"(key));  // what follows from it shall not take registers while no tile is masked
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = key + 8 * half, position = own - s.behind - row - 2 * (threadIdx.x % 4);
        const int first = own < s.keys ? position - call.right : 2 * BLOCK_M, last = position + call.left;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const int column = 8 * (i / 2) + i % 2;  // beside the lane's first
            if (column < first || column > last) scores[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

// Caps scores of a chunk of 16 columns, and lets dp lose what the cap takes from the slope.
template <int COUNT>
__device__ __forceinline__ void apply_softcap(float (&scores)[COUNT], float (&dp)[COUNT], int chunk,
                                              const Call& call) {
#pragma unroll
    for (int i = 8 * chunk; i < 8 * chunk + 8; ++i) {
        scores[i] = softcap_score(call, scores[i]);
        dp[i] *= softcap_slope(call, scores[i]);
    }
}

// Scores of columns 16 chunk to 16 chunk + 15 to weights exp2(scale_log2 * s - lse).
template <int COUNT>
__device__ __forceinline__ void exponentiate(float (&scores)[COUNT], int chunk, const float4& lse_log2,
                                             float scale_log2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float& x = scores[8 * chunk + i];
        x = power_of_2(fmaf(x, scale_log2, -stat_of(lse_log2, i)));
    }
}
template <int COUNT>
__device__ __forceinline__ void pack_pairs(u32 (&packed)[COUNT], const float (&x)[2 * COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) packed[i] = pack_pair(x[2 * i], x[2 * i + 1]);
}

template <int COUNT>
__device__ __forceinline__ void subtract_dpsum(float (&dp)[COUNT], int chunk, const float4& dpsum) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dp[8 * chunk + i] -= stat_of(dpsum, i);
}

// dS from weights, in pairs as dV takes them or as they are, and dP.
template <int COUNT>
__device__ __forceinline__ void compute_ds(u32 (&ds)[COUNT], const u32 (&p)[COUNT],
                                           const float (&dp)[2 * COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float2 weights = unpack_pair(p[i]);  // scores need no registers any more
        ds[i] = pack_pair(weights.x * dp[2 * i], weights.y * dp[2 * i + 1]);
    }
}
template <int COUNT>
__device__ __forceinline__ void compute_ds(u32 (&ds)[COUNT], const float (&weights)[2 * COUNT],
                                           const float (&dp)[2 * COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        ds[i] = pack_pair(weights[2 * i] * dp[2 * i], weights[2 * i + 1] * dp[2 * i + 1]);
}

// Stores a warpgroup's sums, 64 rows by tiles of 8 columns, as the workspace has them.
template <int COUNT>
__device__ __forceinline__ void store_sums(u32 to, const float (&sums)[COUNT]) {
    to += threadIdx.x % 128 * 16;
#pragma unroll
    for (int n = 0; n < COUNT / 4; ++n)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + n * 2048), "f"(sums[4 * n]),
                     "f"(sums[4 * n + 1]), "f"(sums[4 * n + 2]), "f"(sums[4 * n + 3])
                     : "memory");
}

// Writes a lane's sums of `key` and key + 8, from `channel` on; dim is a multiple of 8, as copies ask for.
template <int COUNT>
__device__ __forceinline__ void write_keys(const Tensor& t, const Call& call, const SeqInfo& s, int head,
                                           const float (&x)[COUNT], int key, int channel, float factor) {
    channel += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (key + 8 * half >= s.keys) continue;
        u16* const to = row_of(t, s, s.k0, key + 8 * half, head) + channel;
        float* const wide = (float*)t.data + (to - t.data);
#pragma unroll
        for (int n = 0; n < COUNT; n += 4) {
            if (channel + 2 * n >= call.dim) break;
            const float x0 = x[n + 2 * half] * factor, x1 = x[n + 2 * half + 1] * factor;
            if (call.float32_dk_dv)
                *(float2*)(wide + 2 * n) = make_float2(x0, x1);
            else
                *(u32*)(to + 2 * n) = pack_pair(x0, x1);
        }
    }
}
