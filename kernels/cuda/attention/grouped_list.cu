// The list of tiles of a call with groups of queries, from lengths alone.
//
// A chunk is `positions` query positions of one group in one sequence, which a warpgroup computes for `pack`
// query heads; a tile is `entries` chunks and KV head. Listed, the chunks of a tile are neighbours in one
// group; paired, those of a sequence that see most keys come first, whatever their groups, so that tiles of K
// and V are loaded for as many rows as they can be. Sections and their order are those of
// attention/tile_list.cu. Where there are fewer tiles than blocks could take, long ones are split over keys
// into parts.
//
// Threads and data
//   CTA    a section: blockIdx.x. 1024 threads find the chunks of every tile of a sequence (once for all
//   heads,
//          in `order`), then the tiles' lengths, then count parts by length, then write each.
//
// Memory: shared, that of attention/list_items.cuh; `bases` and `order` in memory are written and read by a
// CTA alone, or by several with the same values.
#include "attention/grouped_tiles.cuh"
#include "attention/list_items.cuh"

constexpr int MOST_GROUPS = 16, GROUP_BIT = 27;
constexpr int FEWEST_KEYS = 8;  // tiles of keys of a part

struct Call {
    const int* cu_q[MOST_GROUPS];         // [sequences + 1]
    const int* prefix_lens[MOST_GROUPS];  // [sequences]
    const int* cu_k;
    TileList* list;
    int* arrivals;  // [most_parts, entries]
    int* bases;     // [sequences], tiles of a KV head of all sequences before
    int* order;     // [tiles of a KV head, entries], group and chunk, -1: none
    int capacity, sequences, groups, heads_kv, group, pack, positions, entries, block_n, pairs;
    int causal, paired, blocks, most_parts;  // blocks: 0: tiles are not split
};

__device__ __forceinline__ int rows_of(const Call& call, int g, int b) {
    return max(0, call.cu_q[g][b + 1] - call.cu_q[g][b]);
}
__device__ __forceinline__ int keys_of(const Call& call, int g, int b) {
    return max(0, min(call.prefix_lens[g][b], call.cu_k[b + 1] - call.cu_k[b]));
}
__device__ __forceinline__ int chunks_of(const Call& call, int g, int b) {
    return (rows_of(call, g, b) + call.positions - 1) / call.positions;
}
__device__ __forceinline__ int all_chunks_of(const Call& call, int b) {
    int count = 0;
    for (int g = 0; g < call.groups; ++g) count += chunks_of(call, g, b);
    return count;
}
// Tiles of a KV head.
__device__ __forceinline__ int tiles_of(const Call& call, int b) {
    const int more = call.entries - 1;
    if (call.paired) return (all_chunks_of(call, b) + more) / call.entries;
    int count = 0;
    for (int g = 0; g < call.groups; ++g) count += (chunks_of(call, g, b) + more) / call.entries;
    return count;
}
// The key behind the last that a chunk sees.
__device__ __forceinline__ int last_key_of(const Call& call, int g, int b, int chunk) {
    const int rows = rows_of(call, g, b), keys = keys_of(call, g, b);
    if (!call.causal) return keys;
    return max(0, keys - rows + min((chunk + 1) * call.positions, rows));
}
// Chunks of a group that see a key from `key` - 1 on.
__device__ __forceinline__ int chunks_behind(const Call& call, int g, int b, int key) {
    const int rows = rows_of(call, g, b), keys = keys_of(call, g, b), chunks = chunks_of(call, g, b);
    if (key <= 0) return chunks;
    if (keys < key) return 0;
    if (!call.causal) return chunks;
    const int first_row = key - keys + rows;  // rows before it are fewer
    return chunks - (max(first_row, 1) + call.positions - 1) / call.positions + 1;
}
// Where in the tiles of its sequence a chunk is.
__device__ __forceinline__ int place_of(const Call& call, int g, int b, int chunk) {
    int before = 0;
    if (!call.paired) {
        for (int other = 0; other < g; ++other)
            before += (chunks_of(call, other, b) + call.entries - 1) / call.entries;
        return before * call.entries + chunk;
    }
    const int key = last_key_of(call, g, b, chunk);
    for (int other = 0; other < call.groups; ++other)
        before +=
            other == g ? chunks_of(call, g, b) - 1 - chunk : chunks_behind(call, other, b, key + (other > g));
    return before;
}

// KV heads [first, last) of a sequence that pairs [begin, end) hold.
__device__ __forceinline__ int2 heads_of(const Call& call, int sequence, int begin, int end) {
    const int base = sequence * call.heads_kv;
    return {max(begin - base, 0), min(end - base, call.heads_kv)};
}

// Calls visit(sequence, KV head, first query head, chunks of the tile, its keys) for the tiles of a section.
template <typename Visit>
__device__ __forceinline__ void for_tiles(const Call& call, Shared& m, int begin, int end, Visit visit) {
    const int chunks = call.group / call.pack;
    const auto count = [&](int b) {
        const int2 heads = heads_of(call, b, begin, end);
        return tiles_of(call, b) * (heads.y - heads.x) * chunks;
    };
    for_items(m, begin / call.heads_kv, (end - 1) / call.heads_kv, count, [&](int b, int local) {
        const int2 heads = heads_of(call, b, begin, end);
        const int across = (heads.y - heads.x) * chunks, tile = local / across, rest = local - tile * across;
        const int* const entries = call.order + (i64)(call.bases[b] + tile) * call.entries;
        int keys = 0;
        for (int i = 0; i < call.entries; ++i) {
            const int entry = entries[i];
            if (entry >= 0)
                keys = max(keys, last_key_of(call, entry >> GROUP_BIT, b, entry & ((1 << GROUP_BIT) - 1)));
        }
        const int head_kv = heads.x + rest / chunks;
        visit(b, head_kv, head_kv * call.group + rest % chunks * call.pack, entries, keys);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) make_grouped_list(const __grid_constant__ Call call) {
    __shared__ Shared m;
    __shared__ int longest, keys_of_all, parts_of_all;
    const int pairs = call.sequences * call.heads_kv, chunks = call.group / call.pack;
    const int begin = blockIdx.x * call.pairs, end = min(begin + call.pairs, pairs);
    const int first = begin / call.heads_kv, last = (end - 1) / call.heads_kv;
    m.counters[threadIdx.x] = 0;
    if (threadIdx.x == 0) longest = keys_of_all = parts_of_all = 0;

    // Tiles of earlier sequences, then of each of the section's.
    int earlier = 0;
    for (int b = threadIdx.x; b < first; b += THREADS) earlier += tiles_of(call, b);
    scan(earlier, m.sums);
    const int base = m.sums[32];
    for (int from = first, before = base; from <= last; from += THREADS) {
        const int b = from + threadIdx.x, count = b <= last ? tiles_of(call, b) : 0;
        const int at = before + scan(count, m.sums);
        before += m.sums[32];
        if (b > last) continue;
        call.bases[b] = at;
        for (int i = 0; i < count; ++i)
            for (int entry = 0; entry < call.entries; ++entry)
                call.order[(i64)(at + i) * call.entries + entry] = -1;
    }
    __syncthreads();  // order is empty
    for_items(
        m, first, last, [&](int b) { return all_chunks_of(call, b); },
        [&](int b, int chunk) {
            int g = 0;
            for (int count; (count = chunks_of(call, g, b)) <= chunk; ++g) chunk -= count;
            call.order[(i64)call.bases[b] * call.entries + place_of(call, g, b, chunk)] =
                g << GROUP_BIT | chunk;
        });

    const auto keys_tiles = [&](int keys) { return (keys + call.block_n - 1) / call.block_n; };
    for_tiles(call, m, begin, end, [&](int, int, int, const int*, int keys) {
        atomicMax(&longest, keys_tiles(keys));
        atomicAdd(&keys_of_all, keys_tiles(keys));
    });
    const int tiles_before =
        base * call.heads_kv * chunks + tiles_of(call, first) * (begin - first * call.heads_kv) * chunks;
    int count = 0;
    for (int b = first + threadIdx.x; b <= last; b += THREADS) {
        const int2 heads = heads_of(call, b, begin, end);
        count += tiles_of(call, b) * (heads.y - heads.x) * chunks;
    }
    scan(count, m.sums);
    // Parts of two thirds of what a block has to do on average: then the last to end wait least.
    int most_keys = 1 << 30;
    if (call.blocks && 2 * m.sums[32] < 3 * call.blocks)
        most_keys = max(FEWEST_KEYS, (2 * keys_of_all + 3 * call.blocks - 1) / (3 * call.blocks));
    const auto parts_of = [&](int tiles) { return max(1, (tiles + most_keys - 1) / most_keys); };
    for_tiles(call, m, begin, end, [&](int, int, int, const int*, int keys) {
        const int tiles = keys_tiles(keys), parts = parts_of(tiles);
        atomicAdd(&m.counters[counter_of((tiles + parts - 1) / parts, longest)], parts);
    });
    const int longer = scan(m.counters[threadIdx.x], m.sums);
    if (threadIdx.x == 0 && blockIdx.x + 1 == gridDim.x) {
        call.list->num_tiles = min(tiles_before + m.sums[32], call.capacity);
        call.list->semaphore = 0;
    }
    m.counters[threadIdx.x] = tiles_before + longer;
    __syncthreads();  // counters say where tiles go
    GroupedTile* const list = (GroupedTile*)(call.list + 1);
    for_tiles(call, m, begin, end, [&](int b, int head_kv, int head_q, const int* entries, int keys) {
        const int tiles = keys_tiles(keys), parts = parts_of(tiles);
        const int slot = parts > 1 ? atomicAdd(&parts_of_all, parts) : 0;
        int at = atomicAdd(&m.counters[counter_of((tiles + parts - 1) / parts, longest)], parts);
        if (parts > 1)
            for (int i = 0; i < call.entries; ++i) call.arrivals[slot * call.entries + i] = 0;
        for (int part = 0; part < parts; ++part, ++at) {
            if (at >= call.capacity) return;
            GroupedTile t;
            t.sequence = b, t.head_q = head_q, t.head_kv = head_kv, t.k_start = call.cu_k[b];
            t.first_key = part * tiles / parts * call.block_n;
            t.loaded_keys = min(keys, (part + 1) * tiles / parts * call.block_n);
            t.part = part, t.num_parts = parts, t.slot = slot;
            for (int i = 0; i < call.entries; ++i) {
                const bool present = entries[i] >= 0;
                const int entry = present ? entries[i] : entries[0];
                const int g = entry >> GROUP_BIT, chunk = entry & ((1 << GROUP_BIT) - 1);
                t.group = g;
                t.position = present ? chunk * call.positions : 0;
                t.q_start = call.cu_q[g][b], t.q_length = present ? rows_of(call, g, b) : 0;
                t.k_length = keys_of(call, g, b), t.diagonal = t.k_length - t.q_length;
                t.last_key = present ? min(last_key_of(call, g, b, chunk), t.loaded_keys) : t.first_key;
                list[(i64)at * call.entries + i] = t;
            }
        }
    });
}

// gate: registers<=64
