// The list of tiles of an attention call, from lengths alone.
//
// A tile is `positions` query positions of `pack` query heads that read one KV head. Tiles of a section, a
// number of (sequence, KV head) pairs in a row whose K and V fit into L2 together, come longest first, in any
// order where they are equally long, or on request in the order of positions; sections in order.
//
// With QUERY_GROUPS, most groups of queries of a call, it is a list of tiles of keys for the backward: each
// has a part of every group (attention/grouped_tiles.cuh), and all its rows count as its length.
//
// Threads and data
//   CTA    a section: blockIdx.x. 1024 threads count the tiles of all earlier pairs, then the tiles of the
//          section by length, then write each to where the shorter ones of its section begin; a thread with a
//          single tile keeps it in between.
//   sequences are taken 1024 at a time, a thread each; then tiles are, found by bisection of the sequences'.
//
// Memory: shared, 1024 counters by length (rounded down where keys make more than 1023 tiles), 1025 first
// tiles of sequences, 33 words of sums.
#ifndef QUERY_GROUPS
#define QUERY_GROUPS 1
#endif
#include "attention/list_items.cuh"
#include "common/early_launch.cuh"
#if QUERY_GROUPS > 1
#include "attention/grouped_tiles.cuh"
#endif

struct Call {
    TileList* list;
    const int* cu_q;  // [sequences + 1], null for sequences of one length
    const int* cu_k;
#if QUERY_GROUPS > 1
    const int* cu_rows[QUERY_GROUPS];      // [sequences + 1]; cu_q is of keys, cu_k null
    const int* prefix_lens[QUERY_GROUPS];  // [sequences]
#endif
    int capacity;  // tiles that the list has memory for
    int sequences, seqlen_q, seqlen_k, heads_kv, group;
    int pack;
    Divisor positions, block_n, packs;  // packs: of the query heads of a KV head
    int left, right, longest;           // longest: tiles of keys
    int in_order;                       // tiles come in the order of positions, not the longest first
    int num_groups;                     // of queries
};

__device__ __forceinline__ int blocks_of(const Call& call, int sequence) {
    const int length = length_of(call.cu_q, sequence, call.seqlen_q);
    return (max(length, 0) + call.positions - 1) / call.positions;
}

#if QUERY_GROUPS > 1
__device__ __forceinline__ int prefix_of(const Call& call, int group, int sequence) {
    return max(0, min(call.prefix_lens[group][sequence], length_of(call.cu_q, sequence, 0)));
}

// The rows of a group that see keys of a tile.
__device__ __forceinline__ void find_rows(const Call& call, TileInfo& t, int group) {
    t.k_start = start_of(call.cu_rows[group], t.sequence);
    t.k_length = max(0, length_of(call.cu_rows[group], t.sequence, 0));
    t.q_length = prefix_of(call, group, t.sequence);
    find_keys(t, call.positions, call.block_n, call.left, call.right);
    if (t.position >= t.q_length) t.first_key = t.last_key = t.num_tiles_of_keys = 0;
}

// Writes the parts of a tile, those of the groups that see most keys first.
__device__ __forceinline__ void write_parts(const Call& call, GroupedKeys* to, const TileInfo& t) {
    GroupedKeys part;
    (TileInfo&)part = t;
    part.num_keys = t.q_length;
    part.unused[0] = part.unused[1] = 0;
    for (int g = 0; g < call.num_groups; ++g) {
        const int keys = prefix_of(call, g, t.sequence);
        int before = 0;
        for (int other = 0; other < call.num_groups; ++other) {
            const int others = prefix_of(call, other, t.sequence);
            before += others > keys || (others == keys && other < g);
        }
        part.group = g;
        find_rows(call, part, g);
        to[before] = part;
    }
}
#endif

// KV heads [first, last) of a sequence that pairs [begin, end) hold.
__device__ __forceinline__ int2 heads_of(const Call& call, int sequence, int begin, int end) {
    const int base = sequence * call.heads_kv;
    return {max(begin - base, 0), min(end - base, call.heads_kv)};
}

// Calls visit(tile, counter) for every tile of pairs [begin, end), in any order.
template <typename Visit>
__device__ __forceinline__ void for_tiles(const Call& call, Shared& m, int begin, int end, Visit visit) {
    const auto count = [&](int sequence) {
        const int2 heads = heads_of(call, sequence, begin, end);
        return blocks_of(call, sequence) * (heads.y - heads.x) * call.packs;
    };
    const int first = (u32)begin / (u32)call.heads_kv, last = (u32)(end - 1) / (u32)call.heads_kv;
    for_items(m, first, last, count, [&](int sequence, int local) {
        TileInfo t;
        t.sequence = sequence;
        const int2 heads = heads_of(call, sequence, begin, end);
        const int across = (heads.y - heads.x) * call.packs, block = (u32)local / (u32)across;
        const int rest = local - block * across, head = rest / call.packs;
        t.head_kv = heads.x + head;
        t.head_q = t.head_kv * call.group + rest % call.packs * call.pack;
        t.position = block * call.positions;
        t.q_start = start_of(call.cu_q, sequence);
        t.k_start = start_of(call.cu_k, sequence);
        t.q_length = length_of(call.cu_q, sequence, call.seqlen_q);
        t.k_length = max(0, length_of(call.cu_k, sequence, call.seqlen_k));
#if QUERY_GROUPS > 1
        t.num_tiles_of_keys = 0;  // of rows here, of all groups
        for (int g = 0; g < call.num_groups; ++g) {
            TileInfo part = t;
            find_rows(call, part, g);
            t.num_tiles_of_keys += part.num_tiles_of_keys;
        }
#else
        find_keys(t, call.positions, call.block_n, call.left, call.right);
#endif
        visit(t, call.in_order ? block : counter_of(t.num_tiles_of_keys, call.longest));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) make_tile_list(const __grid_constant__ Call call) {
    __shared__ Shared m;
    begin_early();  // what reads the list may come to the device now, and waits for it
    const int num_bh = call.sequences * call.heads_kv;
    const int begin = begin_of_section(blockIdx.x, num_bh), end = begin_of_section(blockIdx.x + 1, num_bh);
    m.counters[threadIdx.x] = 0;

    // Tiles of earlier pairs.
    int earlier = 0;
    const int first = (u32)begin / (u32)call.heads_kv;
    for (int i = threadIdx.x; i <= first; i += THREADS) {
        const int heads = i < first ? call.heads_kv : begin - first * call.heads_kv;
        if (heads) earlier += blocks_of(call, i) * heads * call.packs;
    }
    int base = 0;
    if (begin > 0) scan(earlier, m.sums), base = m.sums[32];
    __syncthreads();  // counters are 0

    const auto write = [&](const TileInfo& t, int at) {
        if (at >= call.capacity) return;
#if QUERY_GROUPS > 1
        write_parts(call, (GroupedKeys*)(call.list + 1) + (i64)at * call.num_groups, t);
#else
        ((TileInfo*)(call.list + 1))[at] = t;
#endif
    };
    // Tiles of lower counters come first; a list in order takes THREADS counters at a time.
    const int counters = call.in_order ? (call.seqlen_q + call.positions - 1) / call.positions : THREADS;
    for (int from = 0; from < counters; from += THREADS) {
        const auto is_here = [&](int counter) { return counter >= from && counter < from + THREADS; };
        TileInfo own;
        int own_counter = 0, own_rank = 0, visits = 0;
        for_tiles(call, m, begin, end, [&](const TileInfo& t, int counter) {
            if (!is_here(counter)) return;
            own = t, own_counter = counter - from, own_rank = count_one(m.counters, counter - from);
            ++visits;
        });
        const int before = scan(m.counters[threadIdx.x], m.sums);
        m.counters[threadIdx.x] = base + before;
        base += m.sums[32];
        if (!__syncthreads_or(visits > 1)) {  // counters say where tiles go
            if (visits) write(own, m.counters[own_counter] + own_rank);
        } else {
            for_tiles(call, m, begin, end, [&](const TileInfo& t, int counter) {
                if (is_here(counter)) write(t, count_one(m.counters, counter - from));
            });
        }
        __syncthreads();  // counters have been read
        m.counters[threadIdx.x] = 0;
        __syncthreads();  // they are 0 again
    }
    if (threadIdx.x == 0 && blockIdx.x + 1 == gridDim.x) {
        call.list->num_tiles = min(base, call.capacity);
        call.list->semaphore = 0;
    }
}

// gate: registers<=64
// gate: QUERY_GROUPS=16 registers<=64 arch=sm_90a
