// The list of tiles of a call with groups of queries, from lengths alone.
//
// A chunk is `positions` query positions of one group in one sequence, which a warpgroup computes for `pack`
// query heads; a tile is `entries` chunks and KV head. Listed, the chunks of a tile are neighbours in one
// group; paired, those of a sequence that see most keys come first, whatever their groups, so that tiles of K
// and V are loaded for as many rows as they can be. Sections and their order are those of
// attention/tile_list.cu. Where there are fewer tiles than blocks could take, long ones are split over keys
// into parts. Where K and V of a pair do not fit into L2, the last tiles of a section are: so blocks come to
// the next section one after the other and follow each other closely, each over keys that L2 still has.
//
// Threads and data
//   CTA    a section: blockIdx.x. 1024 threads find the chunks of every tile of a sequence (once for all
//          heads, in `order`), then count parts by length, which gives each its rank, then write each. Where
//          tiles may be split, their lengths are added up, or counted, before.
//
// Memory: shared, that of attention/list_items.cuh, and `order` and `tile_parts` of short sections, 22 KB;
// those of long ones and `bases` in memory are written and read by a CTA alone, or by several with the same
// values.
#include "attention/grouped_tiles.cuh"
#include "attention/list_items.cuh"
#include "common/early_launch.cuh"

constexpr int MAX_GROUPS = 16, MAX_ENTRIES = 3, GROUP_BIT = 27;
constexpr int MIN_KEYS = 8;    // tiles of keys of a part, at least
constexpr int LAST_PARTS = 3;  // of one of the last tiles of a section, at most

constexpr int SHORT =
    512;  // tiles of a KV head in a section whose `order` and `tile_parts` are shared memory

// Where the parts of a tile go, for all heads of a section.
struct TileParts {
    int keys, full, parts;                             // full: tiles of keys of a part but the last
    int counter, rank, full_counter, full_rank, slot;  // of the last part; of the others
};

struct Call {
    const int* cu_q[MAX_GROUPS];         // [sequences + 1]
    const int* prefix_lens[MAX_GROUPS];  // [sequences]
    const int* cu_k;
    TileList* list;
    int* arrivals;          // [parts, entries]
    int* bases;             // [sequences], tiles of a KV head of all sequences before
    int* order;             // [tiles of a KV head, entries], group and chunk, -1: none
    TileParts* tile_parts;  // [capacity], for each section those of its tiles of a KV head
    int capacity, sequences, groups, heads_kv, group, pack;
    Divisor positions, entries, block_n, packs;  // packs: of the query heads of a KV head
    int longest;                                 // tiles of keys, at least as many as a tile has
    int causal, paired, blocks;                  // blocks: 0: not all tiles may be split
    int last;                                    // tiles at the end of a section that are split, at most
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
    int count = 0;
    for (int g = 0; g < call.groups; ++g) {
        const int chunks = chunks_of(call, g, b);
        count += call.paired ? chunks : (chunks + more) / call.entries;
    }
    return call.paired ? (count + more) / call.entries : count;
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
// Which of the chunks of its sequence, in the order of tiles, a chunk is.
__device__ __forceinline__ int index_of(const Call& call, int g, int b, int chunk) {
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

// What a section has of a sequence: KV heads from `first` on, and KV heads times packs of query heads.
struct Units {
    int first_head, count;
};

__device__ __forceinline__ Units units_of(const Call& call, int b, int begin, int end) {
    const int base = b * call.heads_kv, first = max(begin - base, 0);
    return {first, (min(end - base, call.heads_kv) - first) * call.packs};
}

// Keys of a tile, rounded up to tiles of keys.
__device__ __forceinline__ int max_keys_of(const Call& call, int b, const int* entries) {
    int keys = 0;
    for (int i = 0; i < call.entries; ++i)
        if (entries[i] >= 0)
            keys =
                max(keys, last_key_of(call, entries[i] >> GROUP_BIT, b, entries[i] & ((1 << GROUP_BIT) - 1)));
    return keys;
}

// An entry of a part of a tile.
__device__ __forceinline__ GroupedTile make_entry(const Call& call, int b, int unit, int first_head,
                                                  int entry, bool present) {
    const int g = entry >> GROUP_BIT, chunk = entry & ((1 << GROUP_BIT) - 1);
    GroupedTile t;
    t.sequence = b, t.group = g;
    t.head_kv = first_head + unit / call.packs;
    t.head_q = t.head_kv * call.group + unit % call.packs * call.pack;
    t.position = present ? chunk * call.positions : 0;
    t.q_start = call.cu_q[g][b], t.q_length = present ? rows_of(call, g, b) : 0;
    t.k_start = call.cu_k[b], t.k_length = keys_of(call, g, b), t.diagonal = t.k_length - t.q_length;
    t.last_key = present ? last_key_of(call, g, b, chunk) : 0;
    return t;
}

extern "C" __global__ void __launch_bounds__(THREADS) make_grouped_list(const __grid_constant__ Call call) {
    begin_early();  // what reads the list may come to the device now, and waits for it
    __shared__ Shared m;
    __shared__ int keys_of_all, parts_of_all, short_order[SHORT * MAX_ENTRIES];
    __shared__ TileParts short_tile_parts[SHORT];
    const int num_bh = call.sequences * call.heads_kv;
    const int begin = begin_of_section(blockIdx.x, num_bh), end = begin_of_section(blockIdx.x + 1, num_bh);
    const int first = (u32)begin / (u32)call.heads_kv, last = (u32)(end - 1) / (u32)call.heads_kv;
    if (threadIdx.x < call.groups) {  // all that a section of one sequence reads comes at once
        prefetch(call.cu_q[threadIdx.x] + first);
        prefetch(call.prefix_lens[threadIdx.x] + first);
    }
    m.counters[threadIdx.x] = 0;
    if (threadIdx.x == 0) keys_of_all = parts_of_all = 0;

    // Tiles of a KV head of earlier sequences, then of each of the section's.
    int base = 0;
    if (first > 0) {
        int earlier = 0;
        for (int b = threadIdx.x; b < first; b += THREADS) earlier += tiles_of(call, b);
        scan(earlier, m.sums);
        base = m.sums[32];
    }
    const bool is_one = first == last;
    int in_section = 0;
    for (int from = first; from <= last; from += THREADS) {
        const int b = is_one ? first : from + threadIdx.x, count = b <= last ? tiles_of(call, b) : 0;
        const int at = base + in_section + (is_one ? 0 : scan(count, m.sums));
        if (!is_one && b <= last) call.bases[b] = at;
        in_section += is_one ? count : m.sums[32];
    }
    __syncthreads();  // bases are written
    const auto base_of = [&](int b) { return b == first ? base : call.bases[b]; };
    const auto tiles = [&](int b) { return (b == last ? base + in_section : base_of(b + 1)) - base_of(b); };
    const bool is_short = in_section <= SHORT;
    int* const order = is_short ? short_order : call.order + (i64)base * call.entries;
    const auto entries_of = [&](int b, int tile) {
        return order + (i64)(base_of(b) - base + tile) * call.entries;
    };
    for_items(
        m, first, last, [&](int b) { return all_chunks_of(call, b); },
        [&](int b, int chunk) {
            int g = 0;
            for (int count; (count = chunks_of(call, g, b)) <= chunk; ++g) chunk -= count;
            int at = index_of(call, g, b, chunk);
            const bool is_last =
                call.paired ? at + 1 == all_chunks_of(call, b) : chunk + 1 == chunks_of(call, g, b);
            int* const entries = entries_of(b, 0);
            entries[at] = g << GROUP_BIT | chunk;
            if (is_last)
                while (++at % call.entries) entries[at] = -1;  // no rows are left for these
        });

    const int skipped = units_of(call, first, 0, begin).count;  // of the first sequence, in earlier sections
    const int units = call.heads_kv * call.packs;
    const int whole_before = base * units + (begin > first * call.heads_kv ? tiles(first) * skipped : 0);
    const int tiles_before = whole_before + blockIdx.x * call.last * (LAST_PARTS - 1);
    TileParts* const tile_parts = is_short ? short_tile_parts : call.tile_parts + whole_before;
    const auto parts_of_tile = [&](int b, int tile) -> TileParts& {
        return tile_parts[base_of(b) - base + tile];
    };

    // Full parts are what a block has to do on average; what is left of tiles, of many lengths, evens out.
    int full = 1 << 30;
    if (call.blocks) {
        int own_keys = 0, own_tiles = 0;
        for_items(m, first, last, tiles, [&](int b, int tile) {
            const int count = units_of(call, b, begin, end).count;
            const int keys = max_keys_of(call, b, entries_of(b, tile));
            own_keys += (keys + call.block_n - 1) / call.block_n * count, own_tiles += count;
        });
        own_keys = __reduce_add_sync(ALL_LANES, own_keys);
        if (threadIdx.x % 32 == 0) atomicAdd(&keys_of_all, own_keys);
        scan(own_tiles, m.sums);
        if (2 * m.sums[32] < 3 * call.blocks)
            full = max(MIN_KEYS, (keys_of_all + call.blocks - 1) / call.blocks);
    }

    // The first counter behind which there are no more than the last tiles.
    int split_from = THREADS, max_tiles = 0;  // of the section in the list
    if (call.last) {
        for_items(m, first, last, tiles, [&](int b, int tile) {
            const int keys = max_keys_of(call, b, entries_of(b, tile));
            const int counter = counter_of((keys + call.block_n - 1) / call.block_n, call.longest);
            atomicAdd(&m.counters[counter], units_of(call, b, begin, end).count);
        });
        const int longer = scan(m.counters[threadIdx.x], m.sums);
        split_from -= __syncthreads_count(m.sums[32] - longer <= call.last);
        max_tiles = m.sums[32] + call.last * (LAST_PARTS - 1);
        m.counters[threadIdx.x] = 0;
        __syncthreads();  // counters are 0 again
    }

    for_items(m, first, last, tiles, [&](int b, int tile) {
        const int keys = max_keys_of(call, b, entries_of(b, tile));
        const int num_tiles = (keys + call.block_n - 1) / call.block_n;
        const bool is_last = counter_of(num_tiles, call.longest) >= split_from;
        TileParts split = {keys, is_last ? max(MIN_KEYS, (num_tiles + LAST_PARTS - 1) / LAST_PARTS) : full};
        const int before_last = (u32)max(0, num_tiles - MIN_KEYS) / (u32)split.full;
        const int count = units_of(call, b, begin, end).count;
        split.parts = before_last + 1;
        split.counter = counter_of(num_tiles - before_last * split.full, call.longest);
        split.rank = atomicAdd(&m.counters[split.counter], count);
        if (before_last) {
            split.full_counter = counter_of(split.full, call.longest);
            split.full_rank = atomicAdd(&m.counters[split.full_counter], before_last * count);
            split.slot = blockIdx.x * call.last * LAST_PARTS + atomicAdd(&parts_of_all, split.parts * count);
        }
        parts_of_tile(b, tile) = split;
    });

    const int longer = scan(m.counters[threadIdx.x], m.sums);
    const int written = tiles_before + m.sums[32], behind = max(written, tiles_before + max_tiles);
    if (threadIdx.x == 0 && blockIdx.x + 1 == gridDim.x) {
        call.list->num_tiles = min(behind, call.capacity);
        call.list->semaphore = 0;
    }
    m.counters[threadIdx.x] = tiles_before + longer;
    __syncthreads();  // counters say where tiles go

    // A thread writes an entry; for all heads the same tile comes one after the other. Places of parts that
    // there are not hold tiles without rows and keys.
    GroupedTile* const list = (GroupedTile*)(call.list + 1);
    for (int i = written * call.entries + threadIdx.x; i < min(behind, call.capacity) * call.entries;
         i += THREADS) {
        GroupedTile t = make_entry(call, first, 0, 0, 0, false);
        t.first_key = t.loaded_keys = t.part = t.slot = 0, t.num_parts = 1;
        list[i] = t;
    }
    const auto all_entries = [&](int b) {
        return tiles(b) * units_of(call, b, begin, end).count * call.entries;
    };
    for_items(m, first, last, all_entries, [&](int b, int item) {
        const Units own = units_of(call, b, begin, end);
        const int i = item % call.entries, tile = (u32)(item / call.entries) / (u32)own.count;
        const int unit = item / call.entries - tile * own.count;
        const int* const entries = entries_of(b, tile);
        const TileParts split = parts_of_tile(b, tile);
        const int last_at = m.counters[split.counter] + split.rank;
        const int full_at = m.counters[split.full_counter] + split.full_rank;
        const bool present = entries[i] >= 0;
        GroupedTile t = make_entry(call, b, unit, own.first_head, present ? entries[i] : entries[0], present);
        const int last_key = t.last_key;
        t.num_parts = split.parts, t.slot = split.slot + unit * split.parts;
        if (split.parts > 1) call.arrivals[t.slot * call.entries + i] = 0;
        for (int part = 0; part < split.parts; ++part) {
            const bool is_last = part == split.parts - 1;
            const int at = is_last ? last_at + unit : full_at + unit * (split.parts - 1) + part;
            if (at >= call.capacity) return;
            t.part = part;
            t.first_key = part * split.full * call.block_n;
            t.loaded_keys = is_last ? split.keys : (part + 1) * split.full * call.block_n;
            t.last_key = present ? min(last_key, t.loaded_keys) : t.first_key;
            list[(i64)at * call.entries + i] = t;
        }
    });
}

// gate: registers<=64 arch=sm_90a
