// Attention forward for Hopper (sm_90a): persistent CTAs walk a list of tiles, TMA copies, wgmma multiplies.
//
// Threads and data
//   A CTA takes tiles from the list until none is left; there is one CTA a multiprocessor.
//   A tile is GROUPS times `positions` query positions of `pack` query heads that read one KV head.
//   A row is a pair (position, head), heads fastest. A warpgroup has up to 64 rows of the tile.
//   Warp 0 loads: one thread copies tiles of BLOCK_N keys and of BLOCK_N values, two stages of each.
//   Warp 1 takes the tiles: one thread reads the next tile from the list and copies its Q.
//   Warps 2 and 3 store: one thread each copies out to memory from where Q was. With WRITES_OUT they rest.
//   Warps 4 to 7, 8 to 11 and so on compute. A warpgroup has its 64 rows, all keys and all channels; a warp
//   has 16 rows, laid out as attention/softmax.cuh says.
//
// Memory
//   Shared memory holds, from a multiple of 1024 on: Q_SLOTS * GROUPS slots of 64 rows of Q, 2 stages of
//   BLOCK_N rows of K, 2 of V; channels are filled up to a multiple of 64. Barriers and two tiles follow.
//   A computing thread has HEAD_DIM / 2 registers of O, BLOCK_N / 2 of S and half as many of P; in all it has
//   240, 160 or 112 registers where 2, 3 or 4 warpgroups compute. Warps 0 to 3 give theirs away.
//
// Steps of a warpgroup, from the last tile of keys to the first
//   1. It begins S = Q K^T of a tile of keys, and behind it O += P V of the tile before.
//   2. It computes the softmax P of S in registers while that product runs.
//   3. It hands the stages back, and scales O if a row's peak has risen.
//   Warpgroups begin their products in turns, so the exponentials of one run beside the products of another.
//   The order of keys is this one since all tiles of a list see the first keys, which L2 then got last.
//   At the end O leaves through the slot of Q. With WRITES_OUT (one slot of Q, or MERGE) O is written from
//   registers instead, and the next Q arrives as soon as the last S of the tile is there.
//
// A row without a query has a row_max of infinity. Shared memory may hold anything there, and such a row must
// not make the rows of its warp rescale. There are some where a warpgroup has fewer than 64 rows, and behind
// the end of a sequence.
//
// Macros
//   HEAD_DIM, 64, 96, 128 or 256: channels are filled up to it with zeros. BF16, SOFTCAP: as in
//   attention/forward.cu. BLOCK_N: keys of a tile. GROUPS: warpgroups that compute. Q_SLOTS, 1 or 2.
//   QUERY_GROUPS: most groups of queries of a call, 1 if it is not given. With more, each warpgroup has an
//   entry of its own in a tile, tiles may be split over keys, and keys may lie in segments.
//   MERGE, 0 if it is not given; 1: results are merged into out, in float32, and lse over other keys.
//   GATHERED, 0 if it is not given; 1: keys lie in runs, some of which other ranks send meanwhile.
#include "attention/softmax.cuh"
#include "attention/products_sm90.cuh"
#include "attention/forward_sm90.cuh"
#include "common/early_launch.cuh"

constexpr int THREADS = 128 + 128 * GROUPS;
// Registers of a thread that computes, and of one that loads.
constexpr int REGISTERS = GROUPS == 2 ? (GROUPED ? 232 : 240) : GROUPS == 3 ? 160 : 112;
constexpr int LOADER_REGISTERS = GROUPS == 2 && GROUPED ? 40 : GROUPS == 3 ? 32 : 24;
constexpr int SUMS_S = BLOCK_N / 2, SUMS_O = HEAD_DIM / 2;

// Operands count 16 bytes.
__device__ __forceinline__ void multiply_keys(float (&s)[SUMS_S], u64 q, u64 k) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
        multiply_async(s, q + (step / 4 * Q_BLOCK + step % 4 * 32) / 16,
                       k + (step / 4 * KV_BLOCK + step % 4 * 32) / 16, step > 0);
    commit_products();
}

__device__ __forceinline__ void multiply_values(float (&o)[SUMS_O], const u32 (&p)[SUMS_S / 2], u64 v) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) multiply_async(o, p + 4 * step, v + step * 2048 / 16);
    commit_products();
}

__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();  // all lanes are done with what the barrier guards
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// The turns of warpgroups: barrier 1 + group lets it begin its products.
__device__ __forceinline__ void wait_turn(int group) {
    sync_threads(1 + group, 256);
}
__device__ __forceinline__ void pass_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory");
}

// The rows of a warpgroup in a tile.
struct Rows {
    int position;   // of the first row, in its sequence
    int first_key;  // key at which it stands
    int low, high;  // keys [low, high] are seen by all rows: a tile of keys within is not masked
};

__device__ __forceinline__ Rows find_rows(const Tile& t, const Call& call, int group) {
    Rows rows;
    rows.position = position_of(t, call, group);
    rows.first_key = rows.position + t.diagonal;
    rows.low = min(rows.first_key + call.positions - 1, t.k_length - 1) - call.left;
    rows.high = min(rows.first_key + call.right, t.k_length - 1);
    return rows;
}

// Masks for row `row` and row + 8 the keys of the tile of keys at `key` that they must not see.
__device__ __forceinline__ void apply_mask(float (&s)[SUMS_S], const Tile& t, const Rows& rows,
                                           const Call& call, int key, int row) {
    if (key >= rows.low && key + BLOCK_N - 1 <= rows.high) return;
    asm volatile("" : "+r"(row));  // else what follows from it takes registers in tiles without a mask
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = rows.first_key + ((row + 8 * half) * call.reciprocal >> 16);
        const int column = key + 2 * (threadIdx.x % 4);
        const int begin = own - call.left - column, end = min(own + call.right, t.k_length - 1) - column;
        if (key + BLOCK_N - 1 > rows.high) {
#pragma unroll
            for (int i = 0; i < SUMS_S / 2; ++i)
                if (8 * (i / 2) + i % 2 > end) s[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
        if (key < rows.low) {
#pragma unroll
            for (int i = 0; i < SUMS_S / 2; ++i)
                if (8 * (i / 2) + i % 2 < begin) s[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

// Whether a row has a query, and then the position of it among the warpgroup's.
__device__ __forceinline__ bool has_query(const Tile& t, const Rows& rows, const Call& call, int row,
                                          int& own) {
    own = row * call.reciprocal >> 16;
    return own < call.positions && rows.position + own < t.q_length;
}

// Where the results of a row of the warpgroup are, if it has a query.
struct ResultRow {
    bool present;
    int head;      // query head
    i64 position;  // row of out and lse, counted from the first of the sequence's row of the batch
};

__device__ __forceinline__ ResultRow find_result(const Tile& t, const Rows& rows, const Call& call, int row) {
    ResultRow found;
    int own;
    found.present = has_query(t, rows, call, row, own);
    found.head = t.head_q + row - own * call.pack;
    found.position = out_start(t, call) + rows.position + own;
    return found;
}

// The sum of a row over the 4 lanes that have parts of it.
__device__ __forceinline__ float sum_of_row(float part) {
    part += __shfl_xor_sync(ALL_LANES, part, 1);
    return part + __shfl_xor_sync(ALL_LANES, part, 2);
}

// Merges what these keys give into out and lse of other keys, in place. What out holds where lse is -inf is
// not read; it becomes 0 where these keys are not seen either.
__device__ __forceinline__ void merge_rows(const Softmax& softmax, const float (&o)[SUMS_O], const Tile& t,
                                           const Rows& rows, const Call& call, int row, float scale_log2) {
    const int lane = threadIdx.x % 32;
    const Results& results = call.results[group_of(t)];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(softmax.row_sum[half]);
        const bool seen = sum != 0.f;
        const ResultRow to = find_result(t, rows, call, row + 8 * half);
        float* const lse = results.lse + to.head * results.lse_head + to.position;
        float* const out = (float*)results.out + to.position * results.out_position +
                           to.head * results.out_head + 2 * (lane % 4);
        const float there = to.present ? *lse * LOG2E : -INFINITE;
        const bool merges = seen && there != -INFINITE, writes = to.present && (seen || there == -INFINITE);
        float2 old[HEAD_DIM / 8];
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
            old[n] = merges && 8 * n < call.dim ? *(const float2*)(out + 8 * n) : make_float2(0.f, 0.f);
        const float here = softmax.row_max[half] * scale_log2 + __log2f(sum);
        const float highest = fmaxf(here, there);
        const float own_weight = power_of_2(here - highest), old_weight = power_of_2(there - highest);
        const float total = own_weight + old_weight;
        const float own_factor = seen ? own_weight / (total * sum) : 0.f;
        const float old_factor = merges ? old_weight / total : 0.f;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
            if (writes && 8 * n < call.dim)
                *(float2*)(out + 8 * n) =
                    make_float2(fmaf(old[n].x, old_factor, o[4 * n + 2 * half] * own_factor),
                                fmaf(old[n].y, old_factor, o[4 * n + 2 * half + 1] * own_factor));
        __syncwarp();  // all lanes of a row have read its lse
        if (writes && seen && lane % 4 == 0) *lse = (highest + __log2f(total)) * LN2;
    }
}

// Makes out of O, by the sums of its rows, and writes lse, if it is wanted.
__device__ __forceinline__ void finish_rows(const Softmax& softmax, float (&o)[SUMS_O], const Tile& t,
                                            const Rows& rows, const Call& call, int row, float scale_log2) {
    const Results& results = *call.results;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(softmax.row_sum[half]);
        factor[half] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
        const ResultRow to = find_result(t, rows, call, row + 8 * half);
        if (results.lse && to.present && threadIdx.x % 4 == 0)
            results.lse[t.sequence * results.lse_batch + to.head * results.lse_head + to.position] =
                sum == 0.f ? -INFINITE : (softmax.row_max[half] * scale_log2 + __log2f(sum)) * LN2;
    }
    scale_rows(o, factor);
}

// Leaves out in shared memory.
__device__ __forceinline__ void stage_out(const float (&o)[SUMS_O], u32 to) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = pack_pair(o[4 * n + 2 * i], o[4 * n + 2 * i + 1]);
        store_matrices(to + n / 8 * Q_BLOCK + ((n % 8 + lane / 16) ^ lane % 8) * 16, x);
    }
}

// Transposes 4 times 4 words of 4 lanes in a row: lane i gets word i of each.
__device__ __forceinline__ void transpose_words(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(ALL_LANES, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? other : x[i], x[i + 1] = odd ? x[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(ALL_LANES, high ? x[i] : x[i + 2], 2);
        x[i] = high ? other : x[i], x[i + 2] = high ? x[i + 2] : other;
    }
}

// Writes out to memory. The 4 lanes of a row exchange words until each has 8 channels in a row, so that they
// write 64 bytes at a time.
__device__ __forceinline__ void write_out(const float (&o)[SUMS_O], const Tile& t, const Rows& rows,
                                          const Call& call, int row) {
    const Results& results = *call.results;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const ResultRow to = find_result(t, rows, call, row + 8 * half);
        u16* const out = (u16*)results.out + t.sequence * results.out_batch +
                         to.position * results.out_position + to.head * results.out_head;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n += 4) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = pack_pair(o[4 * (n + i) + 2 * half], o[4 * (n + i) + 2 * half + 1]);
            transpose_words(x);
            const int channel = 8 * (n + threadIdx.x % 4);
            if (to.present && channel < call.dim) store_piece(out + channel, x);
        }
    }
}

__device__ __forceinline__ void compute(const Shared& m, const Call& call, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
    const float scale_log2 = SOFTCAP ? LOG2E : call.scale * LOG2E;
    const u64 k_operand = rows_operand(m.k), v_operand = columns_operand(m.v, KV_BLOCK);
    PipelineState q = {0, 0}, k = {0, 0}, v = {0, 0}, info = {0, 0};
    float o[SUMS_O], s[SUMS_S];
    u32 p[SUMS_S / 2];
    if (group == 0) pass_turn(0);
    for (;;) {
        const int slot = q.stage * GROUPS + group;
        wait_barrier(m.full_q + 8 * slot, q.parity);
        const Tile& t = tile_of(m, info.stage, group);
        if (t.sequence < 0) break;
        const u64 q_operand = rows_operand(m.q + slot * Q_BYTES);
        const int first = t.first_key, last = t.last_key;
        const Rows rows = find_rows(t, call, group);
        Softmax softmax;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int own;
            softmax.row_max[half] = has_query(t, rows, call, row + 8 * half, own) ? LOWEST : INFINITE;
            softmax.row_sum[half] = 0.f;
        }
        const auto multiply_v = [&] {
            wait_barrier(m.full_v + 8 * v.stage, v.parity);
            multiply_values(o, p, v_operand + v.stage * (TILE_BYTES / 16));
        };
        const auto release_k = [&] {
            release(m.empty_k + 8 * k.stage);
            k.next<STAGES>();
        };
        const auto release_q = [&] {  // where out goes through its slot, what stores it does so
            if (WRITES_OUT) release(m.empty_q + 8 * slot);
        };
        const auto release_v = [&] {
            release(m.empty_v + 8 * v.stage);
            v.next<STAGES>();
        };
        const auto pack = [&] {
#pragma unroll
            for (int i = 0; i < SUMS_S / 2; ++i) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);
        };
        float rescale[2];
        const auto softmax_of = [&](int key) {  // whether older sums are to be rescaled
            if (SOFTCAP) cap_scores(s, call.scale, call.softcap);
            apply_mask(s, t, rows, call, key, row);
            const bool raised = update_max(softmax, s, scale_log2, rescale);
            exponentiate(softmax, s, scale_log2);
            return raised;
        };
#pragma unroll
        for (int i = 0; i < SUMS_O; ++i) o[i] = 0.f;
        const int num_tiles = (max(last - first, 0) + BLOCK_N - 1) / BLOCK_N;
#if QUERY_GROUPS > 1
        // Keys that only other warpgroups see.
        const int num_loaded = (max(t.loaded_keys - first, 0) + BLOCK_N - 1) / BLOCK_N;
        for (int i = num_loaded - 1; i >= num_tiles; --i) {
            wait_barrier(m.full_k + 8 * k.stage, k.parity);
            if (i > 0) {
                wait_turn(group);
                pass_turn((group + 1) % GROUPS);
            }
            release_k();
            wait_barrier(m.full_v + 8 * v.stage, v.parity);
            release_v();
        }
#endif
        if (num_tiles > 0) {
            int key = first + (num_tiles - 1) * BLOCK_N;
            wait_barrier(m.full_k + 8 * k.stage, k.parity);
            begin_products();
            multiply_keys(s, q_operand, k_operand + k.stage * (TILE_BYTES / 16));
            wait_products<0>(s);
            release_k();
            softmax_of(key);
            pack();
            for (key -= BLOCK_N; key >= first; key -= BLOCK_N) {
                wait_barrier(m.full_k + 8 * k.stage, k.parity);
                wait_turn(group);
                begin_products();
                multiply_keys(s, q_operand, k_operand + k.stage * (TILE_BYTES / 16));
                multiply_v();
                pass_turn((group + 1) % GROUPS);
                wait_products<1>(s);
                release_k();
                const bool raised = softmax_of(key);
                pin(s);
                wait_products<0>(o);
                release_v();
                pack();
                if (raised) scale_rows(o, rescale);
            }
            release_q();
            begin_products();
            multiply_v();
            wait_products<0>(o);
            release_v();
        } else {
            release_q();
        }
        bool complete = true;
#if QUERY_GROUPS > 1
        if (SPLIT && t.num_parts > 1)
            complete = merge_parts(call, t, softmax, o, m.complete + slot, group, scale_log2);
        else if (!WRITES_OUT && threadIdx.x % 128 == 0)
            m.complete[slot] = 1;
#endif
        if (complete && MERGE) merge_rows(softmax, o, t, rows, call, row, scale_log2);
        if (complete && !MERGE) finish_rows(softmax, o, t, rows, call, row, scale_log2);
        if (WRITES_OUT) {
            if (complete && !MERGE) write_out(o, t, rows, call, row);
            release(m.empty_info + 8 * info.stage);
        } else {
            sync_threads(1 + GROUPS + group, 128);  // all products have read Q
            if (complete) stage_out(o, m.q + slot * Q_BYTES + (16 * warp + lane % 16) * 128);
            fence_async();
            release(m.full_out + 8 * slot);
        }
        q.next<Q_SLOTS>();
        info.next<INFO_STAGES>();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(8) u64 barriers[BARRIERS];
    __shared__ Tile info[INFO_STAGES * ENTRIES];
    __shared__ int complete[SLOTS];
    const Shared m = make_shared(memory, barriers, info, complete);
    if (threadIdx.x == 0) {
        prefetch_map(a.q);
        for (int i = 0; i < KEY_MAPS; ++i) prefetch_map(a.k + i), prefetch_map(a.v + i);
#if !WRITES_OUT
        prefetch_map(&a.out);
#endif
        init_barriers(m);
    }
    __syncthreads();  // barriers are initialised
    begin_early();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        if (threadIdx.x == 0) load_keys(m, a.k, a.v, a.call);
        if (threadIdx.x == 32) load_queries(m, a.q, a.call);
#if !WRITES_OUT
        if (threadIdx.x >= 64 && threadIdx.x % 32 == 0) store_tiles(m, &a.out, a.call, threadIdx.x / 32 - 2);
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;  // uniform, for the compiler
        compute(m, a.call, group);
    }
}

// clang-format off
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 registers<=128 arch=sm_90a
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=64 SOFTCAP=0 GROUPS=4 Q_SLOTS=2 registers<=96 arch=sm_90a
// gate: HEAD_DIM=96 BF16=1,0 BLOCK_N=112 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 registers<=128 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=2 Q_SLOTS=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1,0 BLOCK_N=128 SOFTCAP=1 GROUPS=2 Q_SLOTS=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 BLOCK_N=80 SOFTCAP=0,1 GROUPS=2 Q_SLOTS=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 QUERY_GROUPS=16 registers<=128 arch=sm_90a
// gate: HEAD_DIM=96 BF16=1,0 BLOCK_N=112 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 QUERY_GROUPS=16 registers<=128 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=2 Q_SLOTS=2 QUERY_GROUPS=16 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 BLOCK_N=80 SOFTCAP=0 GROUPS=2 Q_SLOTS=1 QUERY_GROUPS=16 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 MERGE=1 registers<=128 arch=sm_90a
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=64 SOFTCAP=0 GROUPS=4 Q_SLOTS=2 MERGE=1 registers<=96 arch=sm_90a
// gate: HEAD_DIM=96 BF16=1,0 BLOCK_N=112 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 MERGE=1 registers<=128 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=2 Q_SLOTS=2 MERGE=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 BLOCK_N=80 SOFTCAP=0 GROUPS=2 Q_SLOTS=1 MERGE=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,96,128 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=2 Q_SLOTS=2 QUERY_GROUPS=16 GATHERED=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 BLOCK_N=80 SOFTCAP=0 GROUPS=2 Q_SLOTS=1 QUERY_GROUPS=16 GATHERED=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 QUERY_GROUPS=16 MERGE=1 registers<=128 arch=sm_90a
// gate: HEAD_DIM=96 BF16=1,0 BLOCK_N=112 SOFTCAP=0 GROUPS=3 Q_SLOTS=2 QUERY_GROUPS=16 MERGE=1 registers<=128 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_N=128 SOFTCAP=0 GROUPS=2 Q_SLOTS=2 QUERY_GROUPS=16 MERGE=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1,0 BLOCK_N=80 SOFTCAP=0 GROUPS=2 Q_SLOTS=1 QUERY_GROUPS=16 MERGE=1 registers<=168 arch=sm_90a
// clang-format on
