// A plan of a cache, first third: importance is counted, rungs are chosen, new pages are allocated.
//
// The algorithm stands in kvlab/reference/cache_plan.py; plan/moves.cu and plan/tables.cu follow. A launch
// serves layers blockIdx.y = 0, 1, ... All numbers that decide are integers or rounded once, and sums are
// exact, so neither the order of threads nor the device changes a result.
//
// count_keys    grid (groups, layers): a block counts the keys of its (bh, segment), a warp eight pages at
//               a time, then gives every chunk of 16 tokens its weight. Shared: classes * 1 KB + 2 KB.
// choose_rungs  grid (batch, layers): a block searches the price of its row's bytes, over the bits of
//               a price, then over the number of the first chunk that goes without; it tries NUM_PROBES of
//               them at a time, with an eighth of the block each. Chunks of a class have rising weights, so
//               those that take a step are found by halving: a thread has a step, and begins between what it
//               found for the two prices that are left. Shared: the weights, if all of a row fit.
// allocate_pages    grid (1, layers): a block numbers the new pages and takes slabs for them.
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "plan/chunks.cuh"
#include "plan/plan.cuh"
#include "common/early_launch.cuh"

constexpr int COUNT_THREADS = 256, ALLOCATE_THREADS = 256;
constexpr int NUM_PROBES = 8,
              PROBE_THREADS = ROW_THREADS / NUM_PROBES;  // prices that choose_rungs tries at once
__constant__ u64 MANTISSA[8] = {4294967296ull, 4683695048ull, 5107605667ull, 5569883475ull,
                                6074001000ull, 6623745059ull, 7223245206ull, 7877004752ull};

// What an error of a token costs, in units of 2^-32: its importance; 1e4 recent, 2^24 sinks.
__device__ __forceinline__ u64 token_weight(int key) {
    if (key >= RECENT) return key == RECENT ? 10000ull << 32 : 1ull << 56;
    const int power = (key - 192) >> 3;
    const u64 mantissa = MANTISSA[(key - 192) & 7];
    return key == 0 ? 128 : power >= 0 ? mantissa << power : mantissa >> -power;
}

// The weight of the `rank` least important tokens of a class; each has `floor` more than its importance.
__device__ __forceinline__ u64 weight_below(const u32* starts, const u64* weights, u64 floor, int rank) {
    int low = 0, high = KEYS;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= (u32)rank)
            low = middle;
        else
            high = middle;
    }
    return weights[low] + (u64)(rank - starts[low]) * (token_weight(low) + floor);
}

// The weight of a chunk of a class of `movable` tokens: an exact sum, rounded once. That of fewer than
// PAGE tokens is as if it had so many, and no less than that of the chunk before in spite of rounding.
__device__ __forceinline__ float chunk_weight(const u32* starts, const u64* weights, u64 floor, int chunk,
                                              int movable) {
    const int first = chunk * PAGE, n = min(PAGE, movable - first);
    const u64 from = weight_below(starts, weights, floor, first);
    const u64 to = weight_below(starts, weights, floor, first + n);
    const float weight = __ull2float_rn(to - from);
    if (n == PAGE) return weight;
    const float scaled = __fmul_rn(weight, __fdiv_rn((float)PAGE, (float)n));
    if (chunk == 0) return scaled;
    return fmaxf(scaled, __ull2float_rn(from - weight_below(starts, weights, floor, first - PAGE)));
}

// Counts the tokens of `entries` entries at most, entry `entry` of a lane, and lists their keys: four lanes a
// page, a lane four slots.
template <bool PLAIN>
__device__ __forceinline__ void count_pages(const Plan& p, int bh, int segment, int entry, int end,
                                            int entries, u32* counts, int (*kinds)[3], int lane) {
    constexpr int LANES = PAGE / 4, PAGES = 32 / LANES, AT_ONCE = 32 / PAGES;
    const PageOfLane page = page_at(p, bh, segment, entry, end);
    const u32 mine = __ballot_sync(ALL_LANES, page.there), part = lane % LANES;
    if (page.there) atomicAdd(&kinds[page.rung][page.count == PAGE ? 0 : page.count ? 1 : 2], 1);
    u32 codes[AT_ONCE];
    uint2 positions[AT_ONCE];  // of two slots each word
    int held[AT_ONCE];         // tokens among this lane's slots
    int rung[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int source = PAGES * i + lane / LANES;
        held[i] = __shfl_sync(ALL_LANES, page.count, source) - 4 * (int)part;
        rung[i] = __shfl_sync(ALL_LANES, page.rung, source);
        const u8* tail =
            p.s.arena + (u64)__shfl_sync(ALL_LANES, page.address, source) * UNIT + p.s.rungs[rung[i]].tail;
        codes[i] = 0;
        positions[i] = {0, 0};
        if (held[i] <= 0) continue;
        codes[i] = ((const u32*)(tail + 2 * PAGE))[part];
        positions[i] = ((const uint2*)tail)[part];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        if (PAGES * i >= entries) break;
        const int window = PLAIN ? 0 : p.window_of(rung[i]), source = PAGES * i + lane / LANES;
        u32 keys = 0, slots = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 word = j < 2 ? positions[i].x : positions[i].y;
            const int position = segment << 16 | (word >> 16 * (j % 2) & 0xffff);
            if (j >= held[i]) continue;
            const int key = p.key<PLAIN>(codes[i] >> 8 * j & 0xff, position, window);
            if (!PLAIN && key < 0) continue;
            atomicAdd(counts + rung[i] * KEYS + key, 1u);
            keys |= (u32)key << 8 * j, slots |= 1u << (4 * part + j);
        }
        slots |= __shfl_xor_sync(ALL_LANES, slots, 1);
        slots |= __shfl_xor_sync(ALL_LANES, slots, 2);
        if (!(mine >> source & 1)) continue;
        const u64 at = p.bh(bh) * p.s.entries + entry - lane + source;
        ((u32*)(p.call.keys + at * PAGE))[part] = keys;
        if (part == 0) p.call.stay[at] = (u16)slots;
    }
}

// Counts the tokens of all pages of a bh and segment; all threads.
template <bool PLAIN>
__device__ __forceinline__ void count_all(const Plan& p, int bh, int segment, u32* counts, int (*kinds)[3]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int end = p.num_pages(bh);
    const int each = end <= COUNT_THREADS / 4 ? 8 : end <= COUNT_THREADS / 2 ? 16 : 32;  // for all warps
#pragma unroll 1
    for (int first = each * warp; first < end; first += each * (COUNT_THREADS / 32))
        count_pages<PLAIN>(p, bh, segment, first + lane, min(end, first + each), each, counts, kinds, lane);
}

extern "C" __global__ void __launch_bounds__(COUNT_THREADS, 4)
    count_keys(const __grid_constant__ PlanCall call) {
    extern __shared__ u32 counts[];  // [classes][KEYS]
    __shared__ u64 weights[KEYS];
    __shared__ int kinds[CACHE_RUNGS][3];
    begin_early();
    const Plan p(call, blockIdx.y);
    const int g = blockIdx.x, bh = g / call.segments, segment = g % call.segments;
    for (int i = threadIdx.x; i < p.classes * KEYS; i += COUNT_THREADS) counts[i] = 0;
    if (threadIdx.x < CACHE_RUNGS * 3) (&kinds[0][0])[threadIdx.x] = 0;
    __syncthreads();  // counters are zero
    if (p.is_plain())
        count_all<true>(p, bh, segment, counts, kinds);
    else
        count_all<false>(p, bh, segment, counts, kinds);
#pragma unroll 4
    for (int i = threadIdx.x; i < call.num_new; i += COUNT_THREADS) {
        const int key = new_key(p, bh, segment, i);
        if (key >= 0) atomicAdd(counts + (p.classes - 1) * KEYS + key, 1u);
    }
    __syncthreads();  // all tokens are counted
    for (int i = threadIdx.x; i < p.s.num_rungs * 3; i += COUNT_THREADS) p.kinds(g, 0)[i] = (&kinds[0][0])[i];
    const u64 floor = call.floor / max(p.seqlen - max(p.oldest, 0), 1);
    int before = 0;
    for (int c = 0; c < p.classes; ++c) {
        u32 total;
        u64 ignored;
        const u32 count = counts[c * KEYS + threadIdx.x];
        const u32 start = block_scan<COUNT_THREADS, u32>(count, total);
        const u64 weight = token_weight(threadIdx.x) + floor;
        weights[threadIdx.x] = block_scan<COUNT_THREADS, u64>(count * weight, ignored);
        counts[c * KEYS + threadIdx.x] = start;
        call.starts[(p.group(g) * p.classes + c) * KEYS + threadIdx.x] = start;
        __syncthreads();  // sums over the keys of this class are whole
        const int movable = counts[c * KEYS + WINDOW];
        for (int chunk = threadIdx.x; chunk < pages_of(movable); chunk += COUNT_THREADS)
            call.weight[p.group(g) * call.chunks + before + chunk] =
                chunk_weight(counts + c * KEYS, weights, floor, chunk, movable);
        before += pages_of(movable);
        if (threadIdx.x == 0) p.tokens(g)[c] = total;
        if (threadIdx.x < p.levels) p.chosen(g, c)[threadIdx.x] = 0;
        __syncthreads();  // they may be written again
    }
}

// ---- Choosing

// Chooses one level for all chunks of a row, or their ceiling where that is lower: the highest that fits; all
// threads. `bytes_left` is what they may take beyond the lowest level.
__device__ void choose_uniform(const Plan& p, int row, const int* cost, long long bytes_left) {
    const int own = p.s.heads * p.call.segments, runs = own * p.classes;
    const int4* const run = &p.run(row * own, 0);
    int level = p.levels;
    bool fits;
    do {
        --level;
        long long bytes = 0, all;
        for (int n = threadIdx.x; n < runs; n += ROW_THREADS)
            bytes += (long long)run[n].x * (cost[min(p.ceiling(n % p.classes), level)] - cost[0]);
        block_scan<ROW_THREADS, long long>(bytes, all);
        fits = all <= bytes_left;
    } while (!fits && cost[level] > cost[0]);
    if (!fits && threadIdx.x == 0) atomicOr(p.s.status, OVER_BUDGET);
    for (int n = threadIdx.x; n < runs; n += ROW_THREADS)
        p.chosen(row * own + n / p.classes, n % p.classes)[min(p.ceiling(n % p.classes), level)] = run[n].x;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    choose_rungs(const __grid_constant__ PlanCall call) {
    extern __shared__ float held[];  // [call.held]
    __shared__ long long sums[2][ROW_THREADS / 32];
    __shared__ u16 found[2][NUM_PROBES][PROBE_THREADS];  // first chunks beyond the probed prices
    __shared__ Hull hulls[MAX_LEVELS];
    __shared__ int cost[MAX_LEVELS];
    begin_early();
    const Plan p(call, blockIdx.y);
    const int row = blockIdx.x, own = p.s.heads * call.segments, top = p.levels - 1;
    const int4* const runs = &p.run(row * own, 0);
    for (int i = threadIdx.x; i < MAX_LEVELS * (int)(sizeof(Hull) / 4); i += ROW_THREADS)
        ((u32*)hulls)[i] = ((const u32*)call.hulls)[i];
    if (threadIdx.x < MAX_LEVELS) cost[threadIdx.x] = call.cost[threadIdx.x];
    __syncthreads();  // the tables are in shared memory

    const long long available = p.s.budget[row] - call.fixed_bytes;
    long long other_bytes;
    int total = make_chunks(p, row, false, cost, other_bytes);
    if (other_bytes + (long long)total * cost[0] > available)
        total = make_chunks(p, row, true, cost, other_bytes);
    if (call.choice == ON_HOST) {
        if (threadIdx.x) return;
        call.bytes_left[p.layer * p.s.batch + row] = available - other_bytes;
        if (other_bytes + (long long)total * cost[0] > available) atomicOr(p.s.status, OVER_BUDGET);
        return;
    }
    const long long bytes_left = available - other_bytes - (long long)total * cost[0];
    if (call.choice == UNIFORM) {
        choose_uniform(p, row, cost, bytes_left);
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool holds = total <= call.held;
    auto weights_of = [&](int n) {
        return call.weight + p.group(row * own + n / p.classes) * call.chunks + runs[n].z;
    };
    if (holds) {
        for (int n = warp; n < own * p.classes; n += ROW_THREADS / 32) {
            const int4 run = runs[n];
            const float* weights = weights_of(n);
            for (int i = lane; i < run.x; i += 32) held[run.y + i] = weights[i];
        }
        __syncthreads();  // the weights are in shared memory
    }
    auto run_at = [&](int n) {
        const int4 run = runs[n];
        return Run{holds ? held + run.y : weights_of(n), run.x, run.y};
    };
    const int tasks = own * p.classes * top;
    const int probe = threadIdx.x / PROBE_THREADS;
    auto edge_at = [&](int task) {
        const int n = task / top, i = task - n * top;
        const Hull& hull = hulls[p.ceiling(n % p.classes)];
        if (i >= hull.edges) return Edge{};
        return Edge{run_at(n), hull.rate[i], cost[hull.level[i]] - cost[i ? hull.level[i - 1] : 0]};
    };
    const int first_task = threadIdx.x % PROBE_THREADS;
    const Edge mine = first_task < tasks ? edge_at(first_task) : Edge{};
    Bounds bounds = {0, mine.run.chunks};  // for `mine` and all prices that are left
    int buffer = 0;
    // Whether the row fits, for all probes: bits 4 i to 4 i + 3 are for price and ties of the i-th eighth of
    // the block.
    auto fits = [&](float price, int ties) {
        long long bytes = 0;
        for (int task = first_task; task - lane < tasks; task += PROBE_THREADS) {  // whole warps
            const Edge edge = task == first_task ? mine : task < tasks ? edge_at(task) : Edge{};
            const Bounds within = task == first_task ? bounds : Bounds{0, edge.run.chunks};
            int above;
            const u32 more = edge.bytes * taking(edge.run, edge.rate, price, within, ties, above);
            if (task == first_task) found[buffer][probe][first_task] = (u16)above;
            bytes += __reduce_add_sync(ALL_LANES, more);  // a run has 4,096 chunks at most
        }
        if (lane == 0) sums[buffer][warp] = bytes;
        __syncthreads();  // the sums of this round are whole, and those of the round before have been read
        long long all = sums[buffer][lane];
#pragma unroll
        for (int bit = 1; bit < PROBE_THREADS / 32; bit *= 2) all += __shfl_xor_sync(ALL_LANES, all, bit);
        buffer ^= 1;
        return __ballot_sync(ALL_LANES, all <= bytes_left);
    };
    auto first_probe = [](u32 bits) { return bits ? (__ffs(bits) - 1) / (PROBE_THREADS / 32) : NUM_PROBES; };
    auto between = [&](int low, int high, int i) {
        return low + (int)((u64)(u32)(high - low) * (u32)(i + 1) / (u32)(NUM_PROBES + 1));
    };
    int low = -1, high = 0x7f7fffff;
    while (high - low > 1) {
        const int price = between(low, high, probe), before = low;
        // What is known not to fit does not, whatever its sum is.
        const u32 known = __ballot_sync(ALL_LANES, between(low, high, lane / (PROBE_THREADS / 32)) == low);
        const int cheapest = first_probe(fits(__int_as_float(price), 0) & ~known);
        if (cheapest > 0) low = between(before, high, cheapest - 1);
        if (cheapest < NUM_PROBES) high = between(before, high, cheapest);
        // Dearer prices have later first chunks, so searches begin between those of the two that are left.
        if (cheapest > 0) bounds.low = found[buffer ^ 1][cheapest - 1][first_task];
        if (cheapest < NUM_PROBES) bounds.high = found[buffer ^ 1][cheapest][first_task];
    }
    const float price = __int_as_float(high);
    int ties = 0, beyond = total + 1;
    while (beyond - ties > 1) {
        const int fitting = first_probe(~fits(price, between(ties, beyond, probe))), before = ties;
        if (fitting > 0) ties = between(before, beyond, fitting - 1);
        if (fitting < NUM_PROBES) beyond = between(before, beyond, fitting);
    }
    if (!(fits(price, ties) & 1) && threadIdx.x == 0) atomicOr(p.s.status, OVER_BUDGET);
    for (int n = threadIdx.x; n < own * p.classes; n += ROW_THREADS) {
        const Hull& hull = hulls[p.ceiling(n % p.classes)];
        int* chosen = p.chosen(row * own + n / p.classes, n % p.classes);
        const Run run = run_at(n);
        int rising = run.chunks, level = 0;
        for (int i = 0; i < hull.edges && rising; ++i) {
            int above;
            const int further = taking(run, hull.rate[i], price, {0, run.chunks}, ties, above);
            chosen[level] = rising - further;
            rising = further;
            level = hull.level[i];
        }
        chosen[level] = rising;
    }
}

// ---- Allocating

// Pages of rung r that a group needs fresh: all, and those that get tokens.
__device__ __forceinline__ int new_pages_of(const Plan& p, int g, int r, int& filled) {
    filled = 0;
    for (int c = 0; c < p.classes; ++c)
        if (c != r) filled += p.chosen(g, c)[r + p.s.evicts];
    if (r < p.s.num_rungs - 1) return filled;
    filled += pages_of(p.left_over(g, p.s.num_rungs));
    return filled + p.extra_is_new(g);
}

__device__ __forceinline__ int slabs_for(const Plan& p, int r, int new_pages) {
    return (p.s.used[r] + new_pages + p.s.rungs[r].per_slab - 1) / p.s.rungs[r].per_slab - p.s.slab_count[r];
}

// Takes back what does not fit: the new tokens, and demotions beyond `slabs` slabs a rung; all threads.
__device__ void cut_down(const Plan& p, int slabs) {
    const int rungs = p.s.num_rungs;
    for (int g = threadIdx.x; g < p.groups; g += ALLOCATE_THREADS) {
        p.tokens(g)[rungs] = 0;
        p.run(g, rungs) = {};
        p.call.extra[p.group(g)] &= ~EXTRA;
        for (int level = 0; level < p.levels; ++level) p.chosen(g, rungs)[level] = 0;
    }
    for (int r = 0; r < rungs; ++r) {
        const int of_slabs = (p.s.slab_count[r] + slabs) * (int)p.s.rungs[r].per_slab - p.s.used[r];
        int left = min(of_slabs, p.call.max_new_pages / rungs), all;
        for (int first = 0; first < p.groups; first += ALLOCATE_THREADS) {
            const int g = first + threadIdx.x, level = r + p.s.evicts;
            int wanted = 0;
            for (int c = r + 1; c < rungs && g < p.groups; ++c) wanted += p.chosen(g, c)[level];
            int mine = max(0, left - block_scan<ALLOCATE_THREADS, int>(wanted, all));
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

extern "C" __global__ void __launch_bounds__(ALLOCATE_THREADS)
    allocate_pages(const __grid_constant__ PlanCall call) {
    begin_early();
    const Plan p(call, blockIdx.y);
    const int rungs = p.s.num_rungs, num_free = p.s.num_free[0];
    int new_pages = 0, slabs = 0;
    for (int r = 0; r < rungs; ++r) {
        int own = 0, all, filled;
        for (int g = threadIdx.x; g < p.groups; g += ALLOCATE_THREADS) own += new_pages_of(p, g, r, filled);
        block_scan<ALLOCATE_THREADS, int>(own, all);
        new_pages += all;
        slabs += slabs_for(p, r, all);
    }
    if (new_pages > call.max_new_pages || slabs > num_free) {
        if (threadIdx.x == 0) atomicOr(p.s.status, RETRY);
        cut_down(p, num_free / rungs);
    }
    int listed = 0, moves = 0, slabs_taken = 0;
    for (int r = 0; r < rungs; ++r) {
        const int used = p.s.used[r], held = p.s.slab_count[r];
        int added = 0;
        for (int first = 0; first < p.groups; first += ALLOCATE_THREADS) {
            const int g = first + threadIdx.x;
            int own = 0, filled = 0, tokens = 0, all_added, all_filled, all_tokens;
            if (g < p.groups) {
                own = new_pages_of(p, g, r, filled);
                const int left = r == rungs - 1 ? p.left_over(g, rungs) % PAGE : 0;
                tokens = filled * PAGE - (left ? PAGE - left : 0);
                if (p.is_compact(g)) {
                    tokens = 0;
#pragma unroll 1
                    for (int c = 0; c < p.classes; ++c) tokens += c == r ? 0 : p.moved(g, c, r);
                }
            }
            const int before = block_scan<ALLOCATE_THREADS, int>(own, all_added);
            const int index = block_scan<ALLOCATE_THREADS, int>(filled, all_filled);
            const int sequence = block_scan<ALLOCATE_THREADS, int>(tokens, all_tokens);
            if (g < p.groups) {
                call.new_pages[p.at_rung(g, r)] = own;
                call.first[p.at_rung(g, r)] = used + added + before;
                call.list[p.at_rung(g, r)] = listed + index;
                call.sequence[p.at_rung(g, r)] = moves + sequence;
            }
            added += all_added;
            listed += all_filled;
            moves += all_tokens;
        }
        const int more = slabs_for(p, r, added);
        __syncthreads();  // the rung's old counts have been read
        for (int i = threadIdx.x; i < more; i += ALLOCATE_THREADS) {
            const int slab = p.s.free_slabs[num_free - 1 - slabs_taken - i];
            p.s.slabs[r * p.s.max_slabs + held + i] = slab;
            p.s.slab_slot[slab] = held + i;
        }
        if (threadIdx.x == 0) {
            p.s.used[r] = used + added;
            p.s.slab_count[r] = held + more;
        }
        slabs_taken += more;
    }
    if (threadIdx.x == 0) {
        PlanHead* head = call.head + p.layer;
        p.s.num_free[0] = num_free - slabs_taken;
        head->num_groups[0] = listed;
        head->reserved = 0, head->tables = 0;
        call.begins[0][(u64)p.layer * (call.max_new_pages + 1) + listed] = moves;
    }
}

// gate: BF16=0 registers<=64
