// Attention forward for Hopper: shared memory, and the warps that load and store.
//
// Needs the macros of attention/forward_call_sm90.cuh.
#pragma once
#include "attention/forward_call_sm90.cuh"
#include "common/async_copies.cuh"
#if QUERY_GROUPS > 1
#include "attention/forward_grouped.cuh"
#endif
#if GATHERED
#include "attention/forward_gathered.cuh"
#endif

// Addresses of shared memory, and the tiles that the block has taken.
struct Shared {
    u32 q, k, v;                           // SLOTS of Q_BYTES, then STAGES of TILE_BYTES each
    u32 full_k, full_v, empty_k, empty_v;  // barriers: STAGES each
    u32 full_q, empty_q, full_out;         // SLOTS each: Q is there, the slot is free, out is there
    u32 full_info, empty_info;             // INFO_STAGES each
    u32 nearly_loaded;                     // few keys of the block's newest tile are to be loaded
    Tile* info;                            // INFO_STAGES of ENTRIES
    int* complete;                         // SLOTS: whether out is that of all parts
};

// What a warpgroup has of the tile in a stage.
__device__ __forceinline__ const Tile& tile_of(const Shared& m, int stage, int group) {
    return m.info[GROUPED ? stage * ENTRIES + group : stage];
}

// Stage and parity of a warp in a ring of stages.
struct PipelineState {
    int stage;
    u32 parity;
    template <int COUNT>
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ Shared make_shared(unsigned char* memory, u64* barriers, Tile* info,
                                              int* complete) {
    Shared m;
    m.q = (shared_address(memory) + 1023) & ~1023u;
    m.k = m.q + SLOTS * Q_BYTES, m.v = m.k + STAGES * TILE_BYTES;
    m.full_k = shared_address(barriers), m.full_v = m.full_k + 8 * STAGES;
    m.empty_k = m.full_v + 8 * STAGES, m.empty_v = m.empty_k + 8 * STAGES;
    m.full_q = m.empty_v + 8 * STAGES, m.empty_q = m.full_q + 8 * SLOTS, m.full_out = m.empty_q + 8 * SLOTS;
    m.full_info = m.full_out + 8 * SLOTS, m.empty_info = m.full_info + 8 * INFO_STAGES;
    m.nearly_loaded = m.empty_info + 8 * INFO_STAGES;
    m.info = info, m.complete = complete;
    return m;
}

// Arrivals: of a loading thread; of every computing warp; of the storing thread of a slot; of the warps of a
// warpgroup; of a tile's readers, which are the storing threads, one a warpgroup, and the loader of keys.
// Where warpgroups write out themselves, each of their warps arrives instead of a storing thread.
__device__ __forceinline__ void init_barriers(const Shared& m) {
    for (int i = 0; i < 2 * STAGES; ++i) init_barrier(m.full_k + 8 * i, 1);
    for (int i = 0; i < 2 * STAGES; ++i) init_barrier(m.empty_k + 8 * i, 4 * GROUPS);
    for (int i = 0; i < SLOTS; ++i) {
        init_barrier(m.full_q + 8 * i, 1);
        init_barrier(m.empty_q + 8 * i, OUT_READERS);
        init_barrier(m.full_out + 8 * i, 4);
    }
    for (int i = 0; i < INFO_STAGES; ++i) {
        init_barrier(m.full_info + 8 * i, 1);
        init_barrier(m.empty_info + 8 * i, OUT_READERS * GROUPS + 1);
    }
    init_barrier(m.nearly_loaded, 1);
    fence_async();
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ TmaCoord coord_of(const Call& call, int sequence, int start, int length) {
    return coord_of((bool)call.variable, sequence, start, length);
}

// What createpolicy.fractional.L2 gives for all of a copy: of a call with groups, Q and out leave L2 first.
// Its tiles see most keys together, and K and V of a head may fill L2.
constexpr u64 ROWS_POLICY = GROUPED && !GATHERED ? 0x12f0000000000000ull : 0x1000000000000000ull;

// Rows (position, head), heads fastest, of 64 channels to or from shared memory: a box of a [batch, position,
// head, channel] tensor. Rows beyond the end of the sequence are zeros, or not written.
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, u32 barrier, const TmaCoord& from,
                                          int channel, int position, int head) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(head), "r"(from.position + position), "r"(from.row),
        "r"(from.back), "l"(ROWS_POLICY)
        : "memory");
}
__device__ __forceinline__ void store_rows(const TensorMap* map, u32 from, const TmaCoord& to, int channel,
                                           int position, int head) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5, %6}], "
        "[%1], %7;" ::"l"(map),
        "r"(from), "r"(channel), "r"(head), "r"(to.position + position), "r"(to.row), "r"(to.back),
        "l"(ROWS_POLICY)
        : "memory");
}

// 16 bytes of out, in the same way.
__device__ __forceinline__ void store_piece(u16* to, const u32 (&x)[4]) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(ROWS_POLICY)
                 : "memory");
}

// Query group of a tile, and row of out at which the rows of its sequence begin.
__device__ __forceinline__ int group_of(const Tile& t) {
#if QUERY_GROUPS > 1
    return t.group;
#else
    return 0;
#endif
}
__device__ __forceinline__ int out_start(const Tile& t, const Call& call) {
#if QUERY_GROUPS > 1
    return call.first_row[t.group] + t.q_start;
#else
    return t.q_start;
#endif
}

// Position of the first row that a warpgroup has of a tile.
__device__ __forceinline__ int position_of(const Tile& t, const Call& call, int group) {
    return GROUPED ? t.position : t.position + group * call.positions;
}

// Copies a tile from the list to shared memory without registers, of which the thread has few.
__device__ __forceinline__ void copy_info(Tile* to, const Tile* from) {
#pragma unroll
    for (int i = 0; i < sizeof(Tile) * ENTRIES; i += 16) copy_async((char*)to + i, (const char*)from + i);
    wait_copies();
}

// The scheduler, a thread: takes tiles from the list and loads their queries. It takes a tile when the keys
// of the one before are nearly loaded: blocks that held tiles for longer would not end together. A tile makes
// one fetch from the semaphore, so the fetch that returns num_tiles - 1 is the last, and sets it to 0 again.
__device__ __forceinline__ void load_queries(const Shared& m, const TensorMap* maps, const Call& call) {
    const Tile* tiles = (const Tile*)(call.list + 1);
    const int num_tiles = call.list->num_tiles;
    PipelineState q = {0, 1}, info = {0, 1};  // a stage is empty before the first phase of its barrier
    static_assert(INFO_STAGES == 2);          // so a stage says the parity of nearly_loaded, too
    for (int index = blockIdx.x;;) {
        wait_barrier(m.empty_info + 8 * info.stage, info.parity);
        if (index < 0) {
            wait_barrier(m.nearly_loaded, info.stage ^ 1);
            index = atomicAdd(call.semaphore, 1);
            if (index == num_tiles - 1) *call.semaphore = 0;
            index += gridDim.x;
        }
        const bool done = index >= num_tiles;
        Tile& first = m.info[info.stage * ENTRIES];
        if (done) {
#pragma unroll
            for (int i = 0; i < ENTRIES; ++i) (&first)[i].sequence = -1;
        } else {
            copy_info(&first, tiles + index * ENTRIES);
            index = -1;
        }
        arrive(m.full_info + 8 * info.stage);
        const TmaCoord first_rows = coord_of(call, first.sequence, first.q_start, first.q_length);
#pragma unroll 1
        for (int group = 0; group < GROUPS; ++group) {
            const Tile& t = tile_of(m, info.stage, group);
            const TmaCoord rows = GROUPED ? coord_of(call, t.sequence, t.q_start, t.q_length) : first_rows;
            const TensorMap* const map = GROUPED ? maps + group_of(t) : maps;
            const int slot = q.stage * GROUPS + group;
            const u32 full = m.full_q + 8 * slot;
            wait_barrier(m.empty_q + 8 * slot, q.parity);
            if (done) {
                arrive(full);
                continue;
            }
            expect_bytes(full, COLUMN_BLOCKS * 128 * call.positions * call.pack);
#pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; ++block)
                copy_rows(m.q + slot * Q_BYTES + block * Q_BLOCK, map, full, rows, 64 * block,
                          position_of(t, call, group), t.head_q);
        }
        if (done) break;
        q.next<Q_SLOTS>();
        info.next<INFO_STAGES>();
    }
}

// A thread that loads the keys and values of every tile.
__device__ __forceinline__ void load_keys(const Shared& m, const TensorMap* k_map, const TensorMap* v_map,
                                          const Call& call) {
    PipelineState info = {0, 0}, kv = {0, 1};
#if GATHERED
    __shared__ u32 here;  // see find_run; the thread has no register for it
    here = 0;
#endif
    for (;;) {
        wait_barrier(m.full_info + 8 * info.stage, info.parity);
        const Tile& t = tile_of(m, info.stage, 0);
        if (t.sequence < 0) break;
        const TmaCoord keys = coord_of(call, t.sequence, t.k_start, GROUPED ? loaded_keys(t) : t.k_length);
        const int first = t.first_key, last = loaded_keys(t), head = t.head_kv;
#if GATHERED
        Run run = {1 << 30, 0, 0, false};
#elif QUERY_GROUPS > 1
        const int* const segments = call.segments ? call.segments + t.sequence * call.num_segments : nullptr;
#endif
        const auto load = [&](u32 full, u32 empty, u32 to, const TensorMap* map, int key) {
#if GATHERED
            const int rows = min(run.end, last) - key;
            const TmaCoord from = coord_of(run, key, rows);
            wait_barrier(empty + 8 * kv.stage, kv.parity);
            expect_bytes(full + 8 * kv.stage, TILE_BYTES);
            if (rows < min(BLOCK_N, last - key)) {
                load_runs(to + kv.stage * TILE_BYTES, map, full + 8 * kv.stage, t, call, key, here);
                return;
            }
#pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; ++block)
                copy_box(to + kv.stage * TILE_BYTES + block * KV_BLOCK, maps_of(map, run),
                         full + 8 * kv.stage, from, 64 * block, 0, head);
#else
            wait_barrier(empty + 8 * kv.stage, kv.parity);
            expect_bytes(full + 8 * kv.stage, TILE_BYTES);
#if QUERY_GROUPS > 1
            if (segments) {
                load_segments(to + kv.stage * TILE_BYTES, map, full + 8 * kv.stage, segments, call, key, last,
                              head);
                return;
            }
#endif
#pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; ++block)
                copy_box(to + kv.stage * TILE_BYTES + block * KV_BLOCK, map, full + 8 * kv.stage, keys,
                         64 * block, key, head);
#endif
        };
        if (first >= last) arrive(m.nearly_loaded);
        const int num_tiles = (max(last - first, 0) + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
        for (int i = num_tiles - 1; i >= 0; --i) {
            if (i == min(num_tiles - 1, 3)) arrive(m.nearly_loaded);
            const int key = first + i * BLOCK_N;
#if GATHERED
            if (key < run.begin) run = find_run(t, call, key, here);
#endif
            load(m.full_k, m.empty_k, m.k, k_map, key);
            load(m.full_v, m.empty_v, m.v, v_map, key);
            kv.next<STAGES>();
        }
        arrive(m.empty_info + 8 * info.stage);
        info.next<INFO_STAGES>();
    }
}

#if !WRITES_OUT
// Two threads that store out, of every other warpgroup from `first` on, from where Q was.
__device__ __forceinline__ void store_tiles(const Shared& m, const TensorMap* map, const Call& call,
                                            int first) {
    PipelineState q = {0, 0}, info = {0, 0};
    if (first >= GROUPS) return;
    for (;;) {
        for (int group = first; group < GROUPS; group += 2) {
            const int slot = q.stage * GROUPS + group;
            wait_barrier(m.full_q + 8 * slot, q.parity);
            const Tile& t = tile_of(m, info.stage, group);
            if (t.sequence < 0) return;
            const TmaCoord rows = coord_of(call, t.sequence, out_start(t, call), t.q_length);
            const int position = position_of(t, call, group), head = t.head_q;
            wait_barrier(m.full_out + 8 * slot, q.parity);
            const bool complete = !GROUPED || m.complete[slot];
#pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; ++block)
                if (complete && 64 * block < call.dim)
                    store_rows(map, m.q + slot * Q_BYTES + block * Q_BLOCK, rows, 64 * block, position, head);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            arrive(m.empty_info + 8 * info.stage);
            wait_additions_read();
            arrive(m.empty_q + 8 * slot);
        }
        q.next<Q_SLOTS>();
        info.next<INFO_STAGES>();
    }
}
#endif
