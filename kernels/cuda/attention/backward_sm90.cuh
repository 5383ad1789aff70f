// Attention backward on Hopper: what its two kernels share. Loading, the softmax of a product of keys by rows
// as wgmma leaves it, dq to the workspace, dk and dv out.
//
// A CTA has THREADS = 384: warps 0-3 load and give their registers away, two warpgroups compute. Matrices lie
// in shared memory as common/hopper.cuh says, in blocks of 64 columns. Needs HEAD_DIM, BLOCK_M, BLOCK_N,
// Q_STAGES, DOUT_STAGES, SCORE_STAGES, CLUSTER, common/pairs.cuh, attention/call.cuh, attention/backward.cuh,
// common/hopper.cuh and attention/backward_cluster.cuh.
#pragma once

constexpr int THREADS = 128 + COMPUTING;
constexpr int D_BLOCKS = HEAD_DIM / 64, M_BLOCKS = BLOCK_M / 64;     // blocks of 64 columns
constexpr int KEY_BLOCK = BLOCK_N * 128, ROW_BLOCK = BLOCK_M * 128;  // bytes of such a block
constexpr int KEY_BYTES = KEY_BLOCK * D_BLOCKS, ROW_BYTES = ROW_BLOCK * D_BLOCKS;
constexpr int SCORE_BYTES = KEY_BLOCK * M_BLOCKS, SUM_BYTES = 64 * 64 * 4, STAT_BYTES = 4 * BLOCK_M;
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

__device__ __forceinline__ void init_barriers(const Memory& m) {
    for (int i = 0; i < 1 + Q_STAGES + DOUT_STAGES; ++i)
        init_barrier(m.full_keys + 8 * i, 1);                                             // the loader's
    for (int i = 0; i < Q_STAGES + DOUT_STAGES; ++i) init_barrier(m.empty_q + 8 * i, 8);  // computing warps'
    fence_async();
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

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

// Loads a tile of rows of q or dout, and their lse_log2 or dpsum, when the stage is empty.
__device__ __forceinline__ void load_rows(u32 to, const TensorMap* map, u32 stats_to, const float* stats,
                                          u32 full, u32 empty, u32 parity, const TmaCoord& coord,
                                          const Tile& at) {
    wait_barrier(empty, parity);
    expect_bytes(full, ROW_BYTES + STAT_BYTES);
#pragma unroll
    for (int block = 0; block < D_BLOCKS; ++block)
        copy_box(to + block * ROW_BLOCK, map, full, coord, 64 * block, at.row, at.head);
    copy_bytes(stats_to, stats, STAT_BYTES, full);
}

__device__ __forceinline__ void load_tiles(const Memory& m, const Maps& maps, const Call& call,
                                           const SeqInfo& s, const RowRange& rows, int kv_head,
                                           int first_key) {
    const TmaCoord of_rows = find_coord(call.cu_q, blockIdx.z), of_keys = find_coord(call.cu_k, blockIdx.z);
    expect_bytes(m.full_keys, 2 * KEY_BYTES);
#pragma unroll
    for (int block = 0; block < D_BLOCKS; ++block) {
        const u32 at = block * KEY_BLOCK;
        copy_box(m.k + at, maps.k, m.full_keys, of_keys, 64 * block, first_key, kv_head);
        copy_box(m.v + at, maps.v, m.full_keys, of_keys, 64 * block, first_key, kv_head);
    }
    PipelineState<Q_STAGES> q = {0, 1};  // a stage is empty before the first phase of its barrier
    PipelineState<DOUT_STAGES> dout = {0, 1};
    for (TileRange range = find_tile_range(call, rows, kv_head); range.more(); range.next(rows)) {
        const Tile at = range.at;
        const i64 workspace_row = at.head * call.rows + s.workspace_row + at.row;
        load_rows(m.q + q.stage * ROW_BYTES, maps.q, m.lse_log2 + q.stage * STAT_BYTES,
                  call.lse_log2 + workspace_row, m.full_q + 8 * q.stage, m.empty_q + 8 * q.stage, q.parity,
                  of_rows, at);
        load_rows(m.dout + dout.stage * ROW_BYTES, maps.dout, m.dpsum + dout.stage * STAT_BYTES,
                  call.dpsum + workspace_row, m.full_dout + 8 * dout.stage, m.empty_dout + 8 * dout.stage,
                  dout.parity, of_rows, at);
        q.next(), dout.next();
    }
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
__device__ __forceinline__ void store_pair(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Masks for `key` and key + 8 the rows, from `row` on, that do not see them.
template <int COUNT>
__device__ __forceinline__ void apply_mask(float (&scores)[COUNT], const Call& call, const SeqInfo& s,
                                           int key, int row) {
    asm volatile("" : "+r"(key));  // what follows from it shall not take registers while no tile is masked
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = key + 8 * half, position = own - s.behind - row;
        const int first = own < s.keys ? position - call.right : BLOCK_M, last = position + call.left;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const int column = 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2;
            if (column < first || column > last) scores[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

template <int COUNT>
__device__ __forceinline__ void subtract_dpsum(float (&dp)[COUNT], u32 dpsum) {
#pragma unroll
    for (int n = 0; n < COUNT; n += 4) {
        const float2 row_dpsum = read_pair(dpsum + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) dp[n + i] -= i % 2 ? row_dpsum.y : row_dpsum.x;
    }
}

// Caps scores, and lets dp lose what the cap takes from the slope.
template <int COUNT>
__device__ __forceinline__ void apply_softcap(float (&scores)[COUNT], float (&dp)[COUNT], const Call& call) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        scores[i] = softcap_score(call, scores[i]);
        dp[i] *= softcap_slope(call, scores[i]);
    }
}

// Scores to weights exp2(scale_log2 * s - lse), in pairs.
template <int COUNT>
__device__ __forceinline__ void exponentiate(float (&scores)[COUNT], u32 (&p)[COUNT / 2], u32 lse_log2,
                                             float scale_log2) {
#pragma unroll
    for (int n = 0; n < COUNT; n += 4) {
        const float2 row_lse = read_pair(lse_log2 + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            scores[n + i] = power_of_2(fmaf(scores[n + i], scale_log2, i % 2 ? -row_lse.y : -row_lse.x));
        p[n / 2] = pack_pair(scores[n], scores[n + 1]),
              p[n / 2 + 1] = pack_pair(scores[n + 2], scores[n + 3]);
    }
}

template <int COUNT>
__device__ __forceinline__ void compute_ds(u32 (&ds)[COUNT], const u32 (&p)[COUNT],
                                           const float (&dp)[2 * COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float2 weights = unpack_pair(p[i]);  // what dV takes; scores need no registers any more
        ds[i] = pack_pair(weights.x * dp[2 * i], weights.y * dp[2 * i + 1]);
    }
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

// Stores a warpgroup's sums, 64 rows by blocks of 64 columns, as the workspace has them.
template <int COUNT>
__device__ __forceinline__ void store_sums(u32 to, const float (&sums)[COUNT]) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, u = threadIdx.x % 4;
    const u32 own = to + (16 * warp + g) * 256 + 8 * u;
#pragma unroll
    for (int n = 0; n < COUNT / 4; ++n) {
        const u32 piece = own + n / 8 * SUM_BYTES + (n % 8 ^ g) * 32;
        store_pair(piece, sums[4 * n], sums[4 * n + 1]);
        store_pair(piece + 8 * 256, sums[4 * n + 2], sums[4 * n + 3]);
    }
}

// Adds a block of 64 rows by 64 columns of dQ to the workspace, from the warpgroup's place in shared memory.
__device__ __forceinline__ void add_dq_block(float* to, const float (&dq)[32], u32 sums, int group) {
    if (threadIdx.x % 128 == 0) wait_additions_read();
    sync_threads(2 + group, 128);  // the previous block has been read
    store_sums(sums, dq);
    fence_async();
    sync_threads(2 + group, 128);  // all of the block is in shared memory
    if (threadIdx.x % 128 == 0) add_floats(to, sums, SUM_BYTES);
}

// Lets the next CTA in the order of keys add, when this one's additions are made.
__device__ __forceinline__ void finish_additions(u32* semaphore) {
    wait_additions();
    __threadfence();
    release_semaphore(semaphore);
}

template <int COUNT>
__device__ __forceinline__ void write_keys(const Tensor& t, const Call& call, const SeqInfo& s, int head,
                                           const float (&x)[COUNT], int key, int channel, float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (key + 8 * half >= s.keys) continue;
        u16* const to = row_of(t, s, s.k0, key + 8 * half, head);
#pragma unroll
        for (int n = 0; n < COUNT; n += 4)
            write_pair(to, channel + 2 * n + 2 * (threadIdx.x % 4), call.dim,
                       pack_pair(x[n + 2 * half] * factor, x[n + 2 * half + 1] * factor));
    }
}

// The kernel: its warpgroups to their work. `compute` is what each of the two computing ones does.
template <typename Compute>
__device__ __forceinline__ void specialise_warps(const Maps& maps, const Call& call, const Compute& compute) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(16) float stats[STATS];
    __shared__ __align__(8) u64 barriers[BARRIERS];
    const SeqInfo s = find_sequence(call, blockIdx.z);
    const KeyBlock keys = find_key_block(call, blockIdx.x / CLUSTER);
    if (keys.block * BLOCK_N >= s.keys) return;
    const RowRange rows = find_row_range(call, s, keys.block * BLOCK_N);
    const Memory m = layout_memory((shared_address(memory) + 1023) & ~1023u, shared_address(stats),
                                   shared_address(barriers));
    if (threadIdx.x == 0) init_barriers(m);
    __syncthreads();  // barriers are initialised
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) load_tiles(m, maps, call, s, rows, keys.head, keys.block * BLOCK_N);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;  // uniform, for the compiler
        compute(m, s, rows, keys, group);
        if (threadIdx.x % 128 == 0) wait_additions();  // shared memory must not go before it is read
    }
}
