// Experiment: attention backward for Hopper over a list of tiles (128 keys of a (sequence, KV head), all rows
// that see them).
//
// warp 0 fetches tiles from the list and loads; warps 2, 3 add dQ of warpgroup 0, 1 to the workspace and
// store its dK, dV; warps 4-7, 8-11 compute, 64 keys each. Of step j + 1 S is issued before dK of step j, dP
// when dQ of step j is stored.
#include "common/pairs.cuh"
#include "common/hopper.cuh"
#include "products.cuh"
#include "call.cuh"

#ifndef BLOCK_M
#define BLOCK_M (HEAD_DIM == 64 ? 128 : 64)
#endif
#ifndef Q_STAGES
#define Q_STAGES 3
#endif
#ifndef ROTATE
#define ROTATE 1
#endif
#ifndef RED
#define RED 0
#endif
#ifndef UNPACK
#define UNPACK 1
#endif
#ifndef ABLATE
#define ABLATE 0
#endif
#ifndef ORDER
#define ORDER 0
#endif
#ifndef DYNAMIC
#define DYNAMIC 1
#endif
#ifndef LOADER_REGISTERS
#define LOADER_REGISTERS (HEAD_DIM == 128 ? 24 : 40)
#endif
#ifndef DEBUG
#define DEBUG 0
#endif

constexpr int BLOCK_N = 128, DOUT_STAGES = 2, THREADS = 384;
// setmaxnreg.inc waits for registers that the block has: what it was started with, 168 a thread under these
// launch bounds.
constexpr int REGISTERS = LOADER_REGISTERS == 24 ? 240 : 232;
static_assert(128 * LOADER_REGISTERS + (THREADS - 128) * REGISTERS <= THREADS * 168,
              "a warpgroup would wait for ever");
constexpr int D_BLOCKS = (HEAD_DIM + 63) / 64, M_BLOCKS = BLOCK_M / 64;
constexpr int SCORES = BLOCK_M / 2, SUMS = HEAD_DIM / 2;
constexpr int KEY_BLOCK = BLOCK_N * 128, ROW_BLOCK = BLOCK_M * 128;
constexpr int KEY_BYTES = KEY_BLOCK * D_BLOCKS, ROW_BYTES = ROW_BLOCK * D_BLOCKS;
constexpr int SCORE_BYTES = KEY_BLOCK * M_BLOCKS, SUM_BYTES = 64 * 64 * 4, STAT_BYTES = 4 * BLOCK_M;
constexpr int INFO_SLOTS = 2;
constexpr bool UNEVEN = HEAD_DIM == 96;  // warpgroup 1 has 32 channels of dQ
static_assert(M_BLOCKS * D_BLOCKS == 2, "a warpgroup has one block of dQ");

#if DEBUG
// A wait of more than 100 million cycles writes its place to pinned memory and, when others have had time to,
// ends the kernel.
struct Watch {
    int* records;
    u32 base;
};
__device__ __forceinline__ Watch& watch() {
    __shared__ Watch w;
    return w;
}
__device__ __forceinline__ void report(int barrier, u32 parity, u64 state) {
    volatile int* const to = watch().records + (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * 4;
    to[1] = parity, to[2] = (int)state, to[3] = (int)(state >> 32), to[0] = barrier + 1;
    __threadfence_system();
    for (const long long start = clock64(); clock64() - start < 100000000;) __nanosleep(1000);
    __trap();
}
__device__ __forceinline__ void wait_limited(u32 barrier, u32 parity) {
    const long long start = clock64();
    for (;;) {
        u32 done;
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (done) return;
        if (clock64() - start > 100000000) {
            u64 state;
            asm volatile("ld.shared.u64 %0, [%1];" : "=l"(state) : "r"(barrier));
            report((barrier - watch().base) / 8, parity, state);
        }
    }
}
#define wait_barrier wait_limited
#endif

template <int COUNT>
struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

struct Memory {
    u32 k, v, q, dout, scores, dq, peaks, deltas;
    u32 full_k, full_v, empty_kv, full_info, empty_info, full_q, empty_q, full_dout, empty_dout, full_dq,
        empty_dq, full_sums;
    TileInfo* info;
};

struct Maps {
    const TensorMap *q, *k, *v, *dout, *dk, *dv;
};

__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, const Origin& to, int channel,
                                          int position, int head) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(from), "r"(channel), "r"(to.position + position), "r"(head), "r"(to.row), "r"(to.back)
        : "memory");
}
__device__ __forceinline__ Origin origin_of(bool variable, int sequence, int start, int length) {
    constexpr int END = 1 << 30;
    if (!variable) return {0, sequence, 0};
    return {END - length, start + length, END};
}
__device__ __forceinline__ int row_of_step(const Call& call, const TileInfo& t, int i) {
    return t.first_row + (call.descending ? t.tiles - 1 - i : i) * BLOCK_M;
}

__device__ __forceinline__ void load_tiles(const Memory& m, const Maps& maps, const Call& call) {
    Ring<Q_STAGES> q = {0, 1};
    Ring<DOUT_STAGES> d = {0, 1};
    Ring<INFO_SLOTS> i = {0, 1};
    u32 kv = 1;
    for (int index = blockIdx.x;;) {
        wait_barrier(m.empty_info + 8 * i.stage, i.parity);
        TileInfo& t = m.info[i.stage];
        if (index >= call.num_tiles) {
            t.sequence = -1;
            arrive(m.full_info + 8 * i.stage);
            return;
        }
        t = call.tiles[index];
        arrive(m.full_info + 8 * i.stage);
        const bool variable = call.cu_q != nullptr;
        const Origin rows = origin_of(variable, t.sequence, t.q_start, t.q_length);
        const auto load_q = [&](int head, int row) {
            const u32 full = m.full_q + 8 * q.stage;
            wait_barrier(m.empty_q + 8 * q.stage, q.parity);
            expect_bytes(full, ROW_BYTES + STAT_BYTES);
#pragma unroll
            for (int block = 0; block < D_BLOCKS; ++block)
                copy_box(m.q + q.stage * ROW_BYTES + block * ROW_BLOCK, maps.q, full, rows, 64 * block, row,
                         head);
            copy_bytes(m.peaks + q.stage * STAT_BYTES, call.peaks + head * call.rows + t.stored + row,
                       STAT_BYTES, full);
            q.next();
        };
        const auto load_dout = [&](int head, int row) {
            const u32 full = m.full_dout + 8 * d.stage;
            wait_barrier(m.empty_dout + 8 * d.stage, d.parity);
            expect_bytes(full, ROW_BYTES + STAT_BYTES);
#pragma unroll
            for (int block = 0; block < D_BLOCKS; ++block)
                copy_box(m.dout + d.stage * ROW_BYTES + block * ROW_BLOCK, maps.dout, full, rows, 64 * block,
                         row, head);
            copy_bytes(m.deltas + d.stage * STAT_BYTES, call.deltas + head * call.rows + t.stored + row,
                       STAT_BYTES, full);
            d.next();
        };
        const int tiles = t.tiles, first_head = t.head_kv * call.group;
        if (tiles) load_q(first_head, row_of_step(call, t, 0));
        wait_barrier(m.empty_kv, kv);
        kv ^= 1;
        if (tiles) {
            const Origin keys = origin_of(variable, t.sequence, t.k_start, t.k_length);
            expect_bytes(m.full_k, KEY_BYTES);
#pragma unroll
            for (int block = 0; block < D_BLOCKS; ++block)
                copy_box(m.k + block * KEY_BLOCK, maps.k, m.full_k, keys, 64 * block, t.key, t.head_kv);
            expect_bytes(m.full_v, KEY_BYTES);
#pragma unroll
            for (int block = 0; block < D_BLOCKS; ++block)
                copy_box(m.v + block * KEY_BLOCK, maps.v, m.full_v, keys, 64 * block, t.key, t.head_kv);
            for (int head = first_head; head < first_head + call.group; ++head)
                for (int at = 0; at < tiles; ++at) {
                    const int row = row_of_step(call, t, at);
                    if (head > first_head || at) load_q(head, row);
                    load_dout(head, row);
                }
        } else {
            arrive(m.full_k), arrive(m.full_v);
        }
        i.next();
        if (DYNAMIC) {
            const int next = atomicAdd(call.semaphore, 1);
            if (next == call.num_tiles - 1) *call.semaphore = 0;
            index = next + gridDim.x;
        } else
            index += gridDim.x;
    }
}

// Adds dQ of a warpgroup to the workspace, and stores its dK and dV.
__device__ __forceinline__ void store_tiles(const Memory& m, const Maps& maps, const Call& call, int group) {
    Ring<INFO_SLOTS> i = {0, 0};
    u32 dq = 0, sums = 0;
    const u32 bytes = UNEVEN && group ? SUM_BYTES / 2 : SUM_BYTES;
    for (;;) {
        wait_barrier(m.full_info + 8 * i.stage, i.parity);
        const TileInfo& t = m.info[i.stage];
        if (t.sequence < 0) break;
#if !RED
        for (int head = t.head_kv * call.group; head < (t.head_kv + 1) * call.group; ++head)
            for (int at = 0; at < t.tiles; ++at) {
                const int row = row_of_step(call, t, at);
                const i64 stored = head * call.rows + t.stored + row;
                wait_barrier(m.full_dq + 8 * group, dq);
                dq ^= 1;
                u32* const turn = call.turns + stored / 32 + group;
                if (call.ordered) {
                    const u32 mine = t.key / BLOCK_N - max(0, row + t.diagonal - call.left) / BLOCK_N;
                    u32 now;
#if DEBUG
                    const long long start = clock64();
                    do {
                        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                                     : "=r"(now)
                                     : "l"(turn)
                                     : "memory");
                        if (clock64() - start > 100000000) report(99, mine, (u64)row << 32 | now);
                    } while (now != mine);
#else
                    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
                    while (now != mine);
#endif
                }
                if (ABLATE != 1 && ABLATE != 3)
                    add_floats(call.sums + stored * HEAD_DIM + group * 4096, m.dq + group * SUM_BYTES, bytes);
                wait_additions_read();
                arrive(m.empty_dq + 8 * group);
                if (call.ordered) {
                    wait_additions();
                    __threadfence();
                    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
                }
            }
#endif
        const Origin keys = origin_of(call.cu_q != nullptr, t.sequence, t.k_start, t.k_length);
        wait_barrier(m.full_sums + 8 * group, sums);
        sums ^= 1;
#pragma unroll
        for (int block = 0; block < D_BLOCKS; ++block) {
            const u32 at = block * KEY_BLOCK + 64 * 128 * group;
            store_box(maps.dv, m.v + at, keys, 64 * block, t.key + 64 * group, t.head_kv);
            store_box(maps.dk, m.k + at, keys, 64 * block, t.key + 64 * group, t.head_kv);
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        wait_additions_read();
        arrive(m.empty_kv);
        arrive(m.empty_info + 8 * i.stage);
        i.next();
    }
    wait_additions();
}

__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}
__device__ __forceinline__ float4 read_four(u32 address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
    return x;
}

__device__ __forceinline__ void hide(float (&s)[SCORES], const Call& call, int position, int own_key,
                                     int k_length) {
    asm volatile("" : "+r"(position));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = position + 8 * half - 2 * (threadIdx.x % 4);
        const int first = own_key + 8 * half < k_length ? own - call.right : 2 * BLOCK_M,
                  last = own + call.left;
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) {
            const int column = 8 * (i / 2) + i % 2;
            if (column < first || column > last) s[4 * (i / 2) + 2 * half + i % 2] = -INFINITE;
        }
    }
}

__device__ __forceinline__ void weigh(float (&s)[SCORES], u32 (&p)[SCORES / 2], u32 peaks, float unit) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 8) {
        const float4 peak = read_four(peaks + 8 * n);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x =
                fmaf(s[n + i], unit, i < 4 ? (i % 2 ? -peak.y : -peak.x) : (i % 2 ? -peak.w : -peak.z));
            s[n + i] = ABLATE == 2 ? x : power_of_2(x);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n / 2 + i] = pack_pair(s[n + 2 * i], s[n + 2 * i + 1]);
    }
}
// Adds -delta to dP.
__device__ __forceinline__ void subtract(float (&dp)[SCORES], u32 deltas) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 8) {
        const float4 d = read_four(deltas + 8 * n);
#pragma unroll
        for (int i = 0; i < 8; ++i) dp[n + i] += i < 4 ? (i % 2 ? d.y : d.x) : (i % 2 ? d.w : d.z);
    }
}
__device__ __forceinline__ void slope(u32 (&ds)[SCORES / 2], const float (&s)[SCORES],
                                      const u32 (&p)[SCORES / 2], const float (&dp)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; ++i) {
        if (UNPACK) {
            const float2 w = unpack_pair(p[i]);
            ds[i] = pack_pair(w.x * dp[2 * i], w.y * dp[2 * i + 1]);
        } else
            ds[i] = pack_pair(s[2 * i] * dp[2 * i], s[2 * i + 1] * dp[2 * i + 1]);
    }
}
__device__ __forceinline__ void store_scores(u32 to, const u32 (&x)[SCORES / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < SCORES / 8; ++j) {
        const int own = 2 * j + lane / 16;
        store_matrices(to + own / 8 * KEY_BLOCK + (own % 8 ^ lane % 8) * 16, x + 4 * j);
    }
}

__device__ __forceinline__ void multiply_channels(float (&c)[SCORES], u64 keys, u64 rows) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
        multiply_async(c, keys + (step / 4 * KEY_BLOCK + step % 4 * 32) / 16,
                       rows + (step / 4 * ROW_BLOCK + step % 4 * 32) / 16, step > 0);
    commit_products();
}
__device__ __forceinline__ void multiply_rows(float (&c)[SUMS], const u32 (&keys)[SCORES / 2], u64 rows) {
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        multiply_async(c, keys + 4 * step, rows + step * 2048 / 16);
    commit_products();
}
__device__ __forceinline__ void multiply_keys(float (&c)[32], u64 rows, u64 keys) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        multiply_columns(c, rows + step * 2048 / 16, keys + step * 2048 / 16, step > 0);
    commit_products();
}

__device__ __forceinline__ void stage_sums(u32 to, const float (&x)[SUMS], float factor) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    to += (16 * warp + lane % 16) * 128;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        u32 y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            y[i] = pack_pair(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor);
        store_matrices(to + n / 8 * KEY_BLOCK + ((n % 8 + lane / 16) ^ lane % 8) * 16, y);
    }
}

__device__ __forceinline__ void compute(const Memory& m, const Call& call, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, own = 64 * group + 16 * warp;
    const float unit = call.scale * LOG2E;
    const int m_block = group % M_BLOCKS, d_block = group % D_BLOCKS;
    const u64 k = rows_operand(m.k + 64 * 128 * group), v = rows_operand(m.v + 64 * 128 * group);
    const u64 q_rows = rows_operand(m.q), dout_rows = rows_operand(m.dout);
    const u64 q_columns = columns_operand(m.q, ROW_BLOCK), dout_columns = columns_operand(m.dout, ROW_BLOCK);
    const u64 k_columns = columns_operand(m.k + d_block * KEY_BLOCK, KEY_BLOCK);
    const u64 ds_columns = columns_operand(m.scores + m_block * KEY_BLOCK, KEY_BLOCK);
    constexpr u64 ROWS16 = ROW_BYTES / 16;
    Ring<Q_STAGES> q = {0, 0};
    Ring<DOUT_STAGES> d = {0, 0};
    Ring<INFO_SLOTS> info = {0, 0};
    u32 kv = 0, dq_parity = 1, score_stage = 0;
    for (;;) {
        wait_barrier(m.full_info + 8 * info.stage, info.parity);
        const TileInfo& t = m.info[info.stage];
        if (t.sequence < 0) break;
        const int key = t.key, tiles = t.tiles;
        const int behind = key - t.diagonal;  // row that stands at the first key
        const int low = key + BLOCK_N <= t.k_length ? behind + BLOCK_N - 1 - call.right : 1 << 30,
                  high = behind + call.left;
        float dk[SUMS], dv[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) dk[i] = dv[i] = 0.f;
        wait_barrier(m.full_k, kv);
        int at = 0, head = 0;
        u32 ds[SCORES / 2];
        const auto store_dq = [&](float (&dq)[32]) {
            const bool kept = ABLATE != 1 || call.num_tiles < 0;  // an ablation keeps the products
#if RED
            if (kept) {
                float* const to =
                    call.sums +
                    ((t.head_kv * call.group + head) * call.rows + t.stored + row_of_step(call, t, at)) *
                        HEAD_DIM +
                    group * 4096 + threadIdx.x % 128 * 4;
#pragma unroll
                for (int i = 0; i < (UNEVEN ? 4 : 8); ++i)
                    asm volatile(
                        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 512 * i),
                        "f"(dq[4 * i]), "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                        : "memory");
                if (UNEVEN && group == 0)
#pragma unroll
                    for (int i = 4; i < 8; ++i)
                        asm volatile(
                            "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 512 * i),
                            "f"(dq[4 * i]), "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                            : "memory");
            }
#else
            wait_barrier(m.empty_dq + 8 * group, dq_parity);
            dq_parity ^= 1;
            const u32 to = m.dq + group * SUM_BYTES + threadIdx.x % 128 * 16;
            const auto put = [&](int i) {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 2048 * i), "f"(dq[4 * i]),
                             "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                             : "memory");
            };
            if (kept) {
#pragma unroll
                for (int i = 0; i < (UNEVEN ? 4 : 8); ++i) put(i);
                if (UNEVEN && group == 0) {
#pragma unroll
                    for (int i = 4; i < 8; ++i) put(i);
                }
                fence_async();
            }
            release(m.full_dq + 8 * group);
#endif
        };
        const auto next = [&] {
            if (++at == tiles) at = 0, ++head;
        };
        // Scores of the step are issued: P, dV, dS.
        const auto weigh_step = [&](float (&s)[SCORES], float (&dp)[SCORES], int released) {
            u32 p[SCORES / 2];
            const int row = row_of_step(call, t, at);
            if (row < low || row + BLOCK_M - 1 > high)
                hide(s, call, behind + own + lane / 4 - row, key + own + lane / 4, t.k_length);
            weigh(s, p, m.peaks + q.stage * STAT_BYTES + 16 * (lane % 4), unit);
            begin_products();
            multiply_rows(dv, p, dout_columns + d.stage * ROWS16);
            wait_products<1>(dp);
            if (released >= 0) release(m.empty_q + 8 * released);
            subtract(dp, m.deltas + d.stage * STAT_BYTES + 16 * (lane % 4));
            slope(ds, s, p, dp);
            store_scores(m.scores + score_stage + (own + lane % 16) * 128, ds);
            fence_async();
            if (ROTATE) wait_products<0>(dv);  // ptxas wants a place in the loop where no product runs
            sync_threads(1, 256);
        };
        const auto begin_dq = [&](float (&dq)[32]) {
            begin_products();
            multiply_keys(dq, ds_columns + score_stage / 16, k_columns);
            score_stage ^= SCORE_BYTES;
        };
        if (tiles) {
            int left = tiles * call.group;
#if ROTATE
            {
                float s[SCORES], dp[SCORES];
                wait_barrier(m.full_q + 8 * q.stage, q.parity);
                begin_products();
                multiply_channels(s, k, q_rows + q.stage * ROWS16);
                wait_barrier(m.full_v, kv);
                wait_barrier(m.full_dout + 8 * d.stage, d.parity);
                begin_products();
                multiply_channels(dp, v, dout_rows + d.stage * ROWS16);
                wait_products<1>(s);
                weigh_step(s, dp, -1);
            }
            while (--left) {
                float s[SCORES], dp[SCORES], dq[32];
                const int stage = q.stage;
                q.next();
                wait_barrier(m.full_q + 8 * q.stage, q.parity);
                begin_dq(dq);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::
                                 : "memory");  // dV is done: P and dout are free
                release(m.empty_dout + 8 * d.stage);
                if (ORDER == 1) multiply_rows(dk, ds, q_columns + stage * ROWS16);
                multiply_channels(s, k, q_rows + q.stage * ROWS16);
                if (ORDER == 0) multiply_rows(dk, ds, q_columns + stage * ROWS16);
                wait_products<ORDER == 0 ? 2 : 1>(dq);
                if (ORDER == 1) release(m.empty_q + 8 * stage);
                d.next();
                store_dq(dq);
                if (++at == tiles) at = 0, ++head;
                wait_barrier(m.full_dout + 8 * d.stage, d.parity);
                begin_products();
                multiply_channels(dp, v, dout_rows + d.stage * ROWS16);
                wait_products<ORDER == 0 ? 2 : 1>(s);
                weigh_step(s, dp, ORDER == 0 ? stage : -1);
            }
            float dq[32];
            begin_dq(dq);
            multiply_rows(dk, ds, q_columns + q.stage * ROWS16);
            wait_products<1>(dq);
            release(m.empty_dout + 8 * d.stage);
            d.next();
            store_dq(dq);
            wait_products<0>(dk);
            release(m.empty_q + 8 * q.stage);
            q.next();
#else
            wait_barrier(m.full_v, kv);
            for (; left; --left) {
                float s[SCORES], dp[SCORES], dq[32];
                wait_barrier(m.full_q + 8 * q.stage, q.parity);
                begin_products();
                multiply_channels(s, k, q_rows + q.stage * ROWS16);
                wait_barrier(m.full_dout + 8 * d.stage, d.parity);
                begin_products();
                multiply_channels(dp, v, dout_rows + d.stage * ROWS16);
                wait_products<1>(s);
                weigh_step(s, dp, -1);
                begin_dq(dq);
                multiply_rows(dk, ds, q_columns + q.stage * ROWS16);
                wait_products<1>(dq);
                release(m.empty_dout + 8 * d.stage);
                d.next();
                store_dq(dq);
                if (++at == tiles) at = 0, ++head;
                wait_products<0>(dk);
                release(m.empty_q + 8 * q.stage);
                q.next();
            }
#endif
            pin(dv);
        } else {
            wait_barrier(m.full_v, kv);
        }
        kv ^= 1;
        sync_threads(1, 256);  // all products have read K and V
        stage_sums(m.v + 64 * 128 * group, dv, 1.f);
        stage_sums(m.k + 64 * 128 * group, dk, call.scale);
        fence_async();
        release(m.full_sums + 8 * group);
        info.next();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                    const __grid_constant__ Call call) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(16) float stats[(Q_STAGES + DOUT_STAGES) * BLOCK_M];
    __shared__ __align__(8) u64 barriers[3 + 2 * (INFO_SLOTS + Q_STAGES + DOUT_STAGES) + 6];
    __shared__ TileInfo info[INFO_SLOTS];
    Memory m;
    m.k = (shared_address(memory) + 1023) & ~1023u, m.v = m.k + KEY_BYTES, m.q = m.v + KEY_BYTES;
    m.dout = m.q + Q_STAGES * ROW_BYTES, m.scores = m.dout + DOUT_STAGES * ROW_BYTES,
    m.dq = m.scores + 2 * SCORE_BYTES;
    m.peaks = shared_address(stats), m.deltas = m.peaks + Q_STAGES * STAT_BYTES, m.info = info;
    u32 at = shared_address(barriers);
    m.full_k = at, m.full_v = at + 8, m.empty_kv = at + 16;
    m.full_info = at + 24, m.empty_info = m.full_info + 8 * INFO_SLOTS;
    m.full_q = m.empty_info + 8 * INFO_SLOTS, m.empty_q = m.full_q + 8 * Q_STAGES;
    m.full_dout = m.empty_q + 8 * Q_STAGES, m.empty_dout = m.full_dout + 8 * DOUT_STAGES;
    m.full_dq = m.empty_dout + 8 * DOUT_STAGES, m.empty_dq = m.full_dq + 16, m.full_sums = m.empty_dq + 16;
#if DEBUG
    watch() = {call.records, at};
#endif
    if (threadIdx.x == 0) {
        init_barrier(m.full_k, 1), init_barrier(m.full_v, 1), init_barrier(m.empty_kv, 2);
        for (int i = 0; i < INFO_SLOTS; ++i)
            init_barrier(m.full_info + 8 * i, 1), init_barrier(m.empty_info + 8 * i, 2);
        for (int i = 0; i < Q_STAGES; ++i)
            init_barrier(m.full_q + 8 * i, 1), init_barrier(m.empty_q + 8 * i, 8);
        for (int i = 0; i < DOUT_STAGES; ++i)
            init_barrier(m.full_dout + 8 * i, 1), init_barrier(m.empty_dout + 8 * i, 8);
        for (int i = 0; i < 2; ++i)
            init_barrier(m.full_dq + 8 * i, 4), init_barrier(m.empty_dq + 8 * i, 1),
                init_barrier(m.full_sums + 8 * i, 4);
        fence_async();
    }
    __syncthreads();
    const Maps maps = {&q_map, &k_map, &v_map, &dout_map, &dk_map, &dv_map};
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        if (threadIdx.x == 0) load_tiles(m, maps, call);
        if (threadIdx.x == 64 || threadIdx.x == 96) store_tiles(m, maps, call, threadIdx.x / 32 - 2);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;
        compute(m, call, group);
    }
}
