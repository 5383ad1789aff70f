// What a cache's pages become, first half: importance is counted, rungs are chosen, pages are born.
//
// The algorithm stands in kvlab/reference/cache_plan.py; cache_moves.cu is the second half. A launch serves
// layers blockIdx.y = 0, 1, ... All numbers that decide are integers or rounded once, and sums are exact, so
// neither the order of threads nor the device changes a result.
//
// count_keys    grid (groups, layers): a block counts the keys of its (pair, segment), a warp a page at a
//               time, then gives every chunk of 64 tokens its weight. Shared: classes * 1 KB + 2 KB.
// choose_rungs  grid (batch, layers): a block searches the price of its row's bytes: 31 halvings over the
// bits
//               of a price, then over the number of the first chunk that goes without; each looks at all
//               chunks of the row, 8 bytes each, from the nearest cache.
// bear_pages    grid (1, layers): a block numbers the pages that are born and takes slabs for them.
//
// gate: BF16=0 registers<=64
#include "packed_codes.cuh"
#include "cache_state.cuh"
#include "cache_plan.cuh"

constexpr int COUNT_THREADS = 256, ROW_THREADS = 1024;
__constant__ u64 MANTISSA[8] = {4294967296ull, 4683695048ull, 5107605667ull, 5569883475ull,
                                6074001000ull, 6623745059ull, 7223245206ull, 7877004752ull};

// What an error of a token costs, in units of 2^-32: its importance; 1e4 recent, 2^24 sinks.
__device__ __forceinline__ u64 token_weight(int key) {
    if (key >= RECENT) return key == RECENT ? 10000ull << 32 : 1ull << 56;
    const int power = (key - 192) >> 3;
    const u64 mantissa = MANTISSA[(key - 192) & 7];
    return key == 0 ? 128 : power >= 0 ? mantissa << power : mantissa >> -power;
}

// The weight of the `rank` least important tokens of a class.
__device__ __forceinline__ u64 weight_below(const u32* starts, const u64* weights, int rank) {
    int low = 0, high = KEYS;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= (u32)rank)
            low = middle;
        else
            high = middle;
    }
    return weights[low] + (u64)(rank - starts[low]) * token_weight(low);
}

extern "C" __global__ void __launch_bounds__(COUNT_THREADS, 4)
    count_keys(const __grid_constant__ PlanCall call) {
    extern __shared__ u32 counts[];  // [classes][KEYS]
    __shared__ u64 weights[KEYS];
    __shared__ int kinds[CACHE_RUNGS][3];
    const Plan p(call, blockIdx.y);
    const int g = blockIdx.x, pair = g / call.segments, segment = g % call.segments;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = COUNT_THREADS / 32;
    for (int i = threadIdx.x; i < p.classes * KEYS; i += COUNT_THREADS) counts[i] = 0;
    if (threadIdx.x < CACHE_RUNGS * 3) (&kinds[0][0])[threadIdx.x] = 0;
    __syncthreads();  // counters are zero
    const int pages = p.s.num_pages[pair], each = (pages + 32 * warps - 1) / (32 * warps) * 32;
    visit_pages(
        p, pair, segment, -1, min(pages, warp * each), min(pages, (warp + 1) * each), true,
        [&](int, bool mine, int r, int count) {
            if (mine) atomicAdd(&kinds[r][count == PAGE ? 0 : count ? 1 : 2], 1);
        },
        [&](int, u32, int r, int key0, int key1) {
            if (key0 >= 0) atomicAdd(counts + r * KEYS + key0, 1u);
            if (key1 >= 0) atomicAdd(counts + r * KEYS + key1, 1u);
        });
#pragma unroll 4
    for (int step = threadIdx.x; step < call.steps; step += COUNT_THREADS) {
        const int key = new_key(p, pair, segment, step);
        if (key >= 0) atomicAdd(counts + (p.classes - 1) * KEYS + key, 1u);
    }
    __syncthreads();  // all tokens are counted
    for (int i = threadIdx.x; i < p.s.num_rungs * 3; i += COUNT_THREADS) p.kinds(g, 0)[i] = (&kinds[0][0])[i];
    int before = 0;
    for (int c = 0; c < p.classes; ++c) {
        u32 total;
        u64 ignored;
        const u32 count = counts[c * KEYS + threadIdx.x];
        const u32 start = block_scan<COUNT_THREADS, u32>(count, total);
        weights[threadIdx.x] = block_scan<COUNT_THREADS, u64>(count * token_weight(threadIdx.x), ignored);
        counts[c * KEYS + threadIdx.x] = start;
        call.starts[(p.group(g) * p.classes + c) * KEYS + threadIdx.x] = start;
        __syncthreads();  // sums over the keys of this class are whole
        for (int chunk = threadIdx.x; chunk < (int)total / PAGE; chunk += COUNT_THREADS) {
            const u64 from = weight_below(counts + c * KEYS, weights, chunk * PAGE);
            const u64 to = weight_below(counts + c * KEYS, weights, (chunk + 1) * PAGE);
            call.weight[p.group(g) * call.chunks + before + chunk] = __ull2float_rn(to - from);
        }
        before += total / PAGE;
        if (threadIdx.x == 0) p.tokens(g)[c] = total;
        if (threadIdx.x < p.levels) p.chosen(g, c)[threadIdx.x] = 0;
        __syncthreads();  // they may be written again
    }
}

// ---- Choosing

// The level that a chunk rises to at a price; at the price itself only where `ties`.
__device__ __forceinline__ int level_at(const Hull& hull, float weight, float price, bool ties) {
    int level = 0;
#pragma unroll 1
    for (int i = 0; i < hull.steps; ++i) {
        const float slope = __fmul_rn(weight, hull.rate[i]);
        if (!(slope > price || (ties && slope == price))) break;
        level = hull.level[i];
    }
    return level;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    choose_rungs(const __grid_constant__ PlanCall call) {
    __shared__ Hull hulls[MAX_LEVELS];
    __shared__ int cost[MAX_LEVELS];
    const Plan p(call, blockIdx.y);
    const int row = blockIdx.x, own = p.s.heads * call.segments, top = p.levels - 1;
    float* const weights = call.row_weight + ((u64)p.layer * p.s.batch + row) * call.row_chunks;
    u32* const tags = call.row_tag + ((u64)p.layer * p.s.batch + row) * call.row_chunks;
    for (int i = threadIdx.x; i < MAX_LEVELS * (int)(sizeof(Hull) / 4); i += ROW_THREADS)
        ((u32*)hulls)[i] = ((const u32*)call.hulls)[i];
    if (threadIdx.x < MAX_LEVELS) cost[threadIdx.x] = call.cost[threadIdx.x];
    __syncthreads();  // the tables are in shared memory

    // The row's chunks in one list, and what its other pages take.
    int total = 0;
    long long taken = 0;
    for (int first = 0; first < own; first += ROW_THREADS) {
        const int g = row * own + first + threadIdx.x;
        int chunks = 0, all;
        if (first + (int)threadIdx.x < own) {
            const int* tokens = p.tokens(g);
            for (int c = 0; c < p.classes; ++c) {
                chunks += tokens[c] / PAGE;
                if (tokens[c] % PAGE) taken += cost[p.ceiling(c)];
            }
            const bool extra = p.room_of(g) < p.to_come(g % call.segments);
            call.extra[p.group(g)] = extra;
            if (extra) taken += cost[top];
        }
        int at = total + block_scan<ROW_THREADS, int>(chunks, all);
        if (first + (int)threadIdx.x < own)
            call.places[p.pair(0) * p.s.entries + g] = at;  // free until the tables are made
        total += all;
    }
    __syncthreads();  // every group's place in the list is there
    for (int i = threadIdx.x / 32; i < own; i += ROW_THREADS / 32) {
        const int g = row * own + i, lane = threadIdx.x % 32;
        int at = call.places[p.pair(0) * p.s.entries + g], before = 0;
        for (int c = 0; c < p.classes; ++c) {
            const int chunks = p.tokens(g)[c] / PAGE;
            for (int j = lane; j < chunks; j += 32) {
                weights[at + before + j] = call.weight[p.group(g) * call.chunks + before + j];
                tags[at + before + j] = i * p.classes + c;
            }
            before += chunks;
        }
    }
    block_scan<ROW_THREADS, long long>(taken, taken);  // and the list is whole
    const long long room = p.s.budget[row] - call.fixed_bytes - taken;

    auto bytes_at = [&](float price, int ties) {
        long long bytes = 0, all;
        for (int i = threadIdx.x; i < total; i += ROW_THREADS)
            bytes += cost[level_at(hulls[p.ceiling(tags[i] % p.classes)], weights[i], price, i < ties)];
        block_scan<ROW_THREADS, long long>(bytes, all);
        return all;
    };
    int low = -1, high = 0x7f7fffff;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (bytes_at(__int_as_float(middle), 0) <= room)
            high = middle;
        else
            low = middle;
    }
    const float price = __int_as_float(high);
    int ties = 0, beyond = total + 1;
    while (beyond - ties > 1) {
        const int middle = (ties + beyond) / 2;
        if (bytes_at(price, middle) <= room)
            ties = middle;
        else
            beyond = middle;
    }
    if (bytes_at(price, ties) > room && threadIdx.x == 0) atomicOr(p.s.status, NO_ROOM);
    for (int i = threadIdx.x; i < total; i += ROW_THREADS) {
        const int c = tags[i] % p.classes, g = row * own + tags[i] / p.classes;
        const int level = level_at(hulls[p.ceiling(c)], weights[i], price, i < ties);
        atomicAdd(p.chosen(g, c) + level, 1);
    }
}

// ---- Births

// Pages of rung r that a group needs fresh: all, and those that get tokens.
__device__ __forceinline__ int births_of(const Plan& p, int g, int r, int& filled) {
    filled = 0;
    for (int c = 0; c < p.classes; ++c)
        if (c != r) filled += p.chosen(g, c)[r + p.s.evicts];
    if (r < p.s.num_rungs - 1) return filled;
    filled += p.tokens(g)[p.s.num_rungs] % PAGE > 0;
    return filled + p.extra_is_born(g);
}

__device__ __forceinline__ int slabs_for(const Plan& p, int r, int births) {
    return (p.s.used[r] + births + p.s.rungs[r].per_slab - 1) / p.s.rungs[r].per_slab - p.s.slab_count[r];
}

// Takes back what does not fit: the new tokens, and demotions beyond `share` slabs a rung; all threads.
__device__ void cut_down(const Plan& p, int share) {
    const int rungs = p.s.num_rungs;
    for (int g = threadIdx.x; g < p.groups; g += ROW_THREADS) {
        p.tokens(g)[rungs] = 0;
        p.call.extra[p.group(g)] = 0;
        for (int level = 0; level < p.levels; ++level) p.chosen(g, rungs)[level] = 0;
    }
    for (int r = 0; r < rungs; ++r) {
        const int of_slabs = (p.s.slab_count[r] + share) * (int)p.s.rungs[r].per_slab - p.s.used[r];
        int left = min(of_slabs, p.call.most_births / rungs), all;
        for (int first = 0; first < p.groups; first += ROW_THREADS) {
            const int g = first + threadIdx.x, level = r + p.s.evicts;
            int wanted = 0;
            for (int c = r + 1; c < rungs && g < p.groups; ++c) wanted += p.chosen(g, c)[level];
            int mine = max(0, left - block_scan<ROW_THREADS, int>(wanted, all));
            for (int c = r + 1; c < rungs && g < p.groups; ++c) {
                const int cut = max(0, p.chosen(g, c)[level] - mine);
                mine -= p.chosen(g, c)[level] - cut;
                p.chosen(g, c)[level] -= cut;
                p.chosen(g, c)[c + p.s.evicts] += cut;
            }
            left -= all;
        }
    }
    __syncthreads();  // the counts of all groups are final
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS) bear_pages(const __grid_constant__ PlanCall call) {
    const Plan p(call, blockIdx.y);
    const int rungs = p.s.num_rungs, num_free = p.s.num_free[0];
    int births = 0, slabs = 0;
    for (int r = 0; r < rungs; ++r) {
        int own = 0, all, filled;
        for (int g = threadIdx.x; g < p.groups; g += ROW_THREADS) own += births_of(p, g, r, filled);
        block_scan<ROW_THREADS, int>(own, all);
        births += all;
        slabs += slabs_for(p, r, all);
    }
    if (births > call.most_births || slabs > num_free) {
        if (threadIdx.x == 0) atomicOr(p.s.status, UNFINISHED);
        cut_down(p, num_free / rungs);
    }
    int listed = 0, moves = 0, taken = 0;
    for (int r = 0; r < rungs; ++r) {
        const int used = p.s.used[r], held = p.s.slab_count[r];
        int born = 0;
        for (int first = 0; first < p.groups; first += ROW_THREADS) {
            const int g = first + threadIdx.x;
            int own = 0, filled = 0, tokens = 0, all_born, all_filled, all_tokens;
            if (g < p.groups) {
                const int left = r == rungs - 1 ? p.tokens(g)[rungs] % PAGE : 0;
                own = births_of(p, g, r, filled);
                tokens = filled * PAGE - (left ? PAGE - left : 0);
            }
            const int before = block_scan<ROW_THREADS, int>(own, all_born);
            const int place = block_scan<ROW_THREADS, int>(filled, all_filled);
            const int sequence = block_scan<ROW_THREADS, int>(tokens, all_tokens);
            if (g < p.groups) {
                call.births[p.at_rung(g, r)] = own;
                call.first[p.at_rung(g, r)] = used + born + before;
                call.list[p.at_rung(g, r)] = listed + place;
                call.sequence[p.at_rung(g, r)] = moves + sequence;
            }
            born += all_born;
            listed += all_filled;
            moves += all_tokens;
        }
        const int more = slabs_for(p, r, born);
        __syncthreads();  // the rung's old counts have been read
        for (int i = threadIdx.x; i < more; i += ROW_THREADS) {
            const int slab = p.s.free_slabs[num_free - 1 - taken - i];
            p.s.slabs[r * p.s.max_slabs + held + i] = slab;
            p.s.place[slab] = held + i;
        }
        if (threadIdx.x == 0) {
            p.s.used[r] = used + born;
            p.s.slab_count[r] = held + more;
        }
        taken += more;
    }
    if (threadIdx.x == 0) {
        PlanHead* head = call.head + p.layer;
        p.s.num_free[0] = num_free - taken;
        head->num_groups[0] = listed;
        head->reserved = 0;
        call.begins[0][(u64)p.layer * (call.most_births + 1) + listed] = moves;
    }
}
