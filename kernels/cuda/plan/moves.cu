// What a cache's pages become, second part: tokens are told where to go.
//
// Between plan/plan.cu and plan/tables.cu; the algorithm stands in kvlab/reference/cache_plan.py.
//
// plan_moves   grid (groups * classes, layers): a block of 8 warps has a class of a (bh, segment); a warp a
//              run of its table entries, or of new tokens. Where tokens leave a class, their rank is their
//              place in a counting sort: by key, then by place. The rank says which page and slot a token
//              goes to. Then those that stay close up: the n-th that has to move goes to the n-th hole.
//              Shared: 8 KB of counters, and some tables.
//
// Moves of phase 0 have places that follow from the counts; those of phase 1 are appended by groups as they
// come, which changes the order of the list and nothing else.
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "plan/plan.cuh"
#include "common/early_launch.cuh"

constexpr int MOVE_THREADS = 256, MOVE_WARPS = MOVE_THREADS / 32;

__device__ __forceinline__ u32 first_slots(int n) {
    return (1u << n) - 1;
}

// Of a class: where chunks of each level end, and where the first goes.
struct Targets {
    int end[MAX_LEVELS];     // chunks at this level and below
    u32 number[MAX_LEVELS];  // page of the first chunk of this level
    u32 move[MAX_LEVELS];    // its slot in the list
    int in_chunks, skipped;  // tokens in chunks, and how many fewer that are than PAGE each
};

// The targets of the chunks of class c; one thread.
__device__ __forceinline__ void find_targets(const Plan& p, int g, int c, Targets& to) {
    const int4 run = p.run(g, c);
    const bool compact = p.is_compact(g);
    to.in_chunks = run.w;
    to.skipped = PAGE * run.x - run.w;
    int end = 0;
    for (int level = 0; level < p.levels; ++level) {
        const int r = level - p.s.evicts;
        to.number[level] = to.move[level] = 0;
        if (r >= 0) {
            u32 pages = 0, tokens = 0;
            for (int other = 0; other < c; ++other) {
                if (other == r) continue;
                const int chunks = p.chosen(g, other)[level];
                pages += chunks;
                tokens += compact ? p.moved(g, other, r) : PAGE * chunks;
            }
            to.number[level] = p.call.first[p.at_rung(g, r)] + pages;
            to.move[level] = p.call.sequence[p.at_rung(g, r)] + tokens;
        }
        if (r != c) end += p.chosen(g, c)[level];
        // What is left over of new tokens goes behind the chunks of the top rung.
        if (c == p.s.num_rungs && level == p.levels - 1) end += pages_of(p.left_over(g, c));
        to.end[level] = end;
    }
}

// The rank of a token in its class, or -1 for lanes without one; one warp, 32 consecutive places.
__device__ __forceinline__ int take_rank(u32* counters, int key, int lane) {
    const u32 equal = __match_any_sync(ALL_LANES, key);
    int rank = key < 0 ? -1 : (int)(counters[key] + __popc(equal & lanes_below(lane)));
    __syncwarp();  // all lanes have read the counters
    if (key >= 0 && (equal & lanes_below(lane)) == 0) counters[key] += __popc(equal);
    __syncwarp();  // and the next 32 places find them raised
    return rank;
}

// Writes the move of a token that leaves.
__device__ __forceinline__ void emit(const Plan& p, const Targets& targets, Move* moves, int rank, u32 from,
                                     int from_slot, int from_rung, u32 token) {
    int level = 0;
    if (rank >= targets.in_chunks) rank += targets.skipped;  // what is left over begins a page
    while (targets.end[level] <= rank / PAGE) ++level;
    const int r = level - p.s.evicts, first = level ? targets.end[level - 1] : 0;
    if (r < 0) return;
    const u32 number = targets.number[level] + rank / PAGE - first;
    const u32 slots = from_slot | rank % PAGE << 8 | from_rung << 16 | (u32)r << 24;
    *(uint4*)(moves + targets.move[level] + rank - first * PAGE) =
        uint4{from, page_address(p.s, r, number), slots, token};
}

// The last key among the `leaving` first ranks of a class.
__device__ __forceinline__ int last_key(const u32* starts, int leaving) {
    int low = 0, high = KEYS;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] < (u32)leaving)
            low = middle;
        else
            high = middle;
    }
    return low;
}

struct Scratch {
    u32 counters[MOVE_WARPS][KEYS];
    int kinds[MOVE_WARPS][3], holes[MOVE_WARPS], pages[MOVE_WARPS];
    Targets targets;
    u64 reserved;
    int last;
};

// Counters of the warps become the ranks from which each counts on; all threads.
__device__ __forceinline__ void start_ranks(const u32* starts, Scratch& shared) {
    u32 rank = starts[threadIdx.x];
#pragma unroll
    for (int w = 0; w < MOVE_WARPS; ++w) {
        const u32 count = shared.counters[w][threadIdx.x];
        shared.counters[w][threadIdx.x] = rank;
        rank += count;
    }
}

__device__ void move_new(const Plan& p, int g, int bh, int segment, Move* moves, Scratch& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rungs = p.s.num_rungs;
    const u32 token = bh / p.s.heads * p.call.num_new;
    const int each = (p.call.num_new + 32 * MOVE_WARPS - 1) / (32 * MOVE_WARPS) * 32;
    const int begin = warp * each, end = min(p.call.num_new, begin + each);
    for (int w = 0; w < MOVE_WARPS; ++w) shared.counters[w][threadIdx.x] = 0;
    if (threadIdx.x == 0) find_targets(p, g, rungs, shared.targets);
    __syncthreads();  // counters are zero, targets known
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) {
        const int key = new_key(p, bh, segment, i);
        if (key >= 0) atomicAdd(&shared.counters[warp][key], 1u);
    }
    __syncthreads();  // all tokens are counted
    start_ranks(p.call.starts + (p.group(g) * p.classes + rungs) * KEYS, shared);
    __syncthreads();  // every warp knows its ranks
#pragma unroll 2
    for (int first = begin; first < end; first += 32) {
        const int key = new_key(p, bh, segment, first + lane);
        const int rank = take_rank(shared.counters[warp], key, lane);
        if (rank >= 0) emit(p, shared.targets, moves, rank, bh, 0, NEW_TOKEN, token + first + lane);
    }
}

// Which tokens of class r, whose pages are at `entries` entries from `start` on, stay, what its pages will
// hold, and the moves of those that leave.
__device__ void move_stored(const Plan& p, int g, int bh, int segment, int r, int start, int entries,
                            Move* moves, Scratch& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top = p.s.num_rungs - 1;
    const int each = (entries + 32 * MOVE_WARPS - 1) / (32 * MOVE_WARPS) * 32;
    const int begin = start + min(entries, warp * each), end = start + min(entries, (warp + 1) * each);
    const int leaving = p.leaving(g, r), needed = p.needed(g, r);
    const int left = p.tokens(g)[r] - leaving - PAGE * (needed - 1);  // tokens of the last page
    const int kept = needed + (r == top && p.has_extra(g));
    const u32* starts = p.call.starts + (p.group(g) * p.classes + r) * KEYS;
    const u64 row = p.bh(bh) * p.s.entries;
    auto no_quad = [](const PairOfPages&) {};

    for (int w = 0; w < MOVE_WARPS; ++w) shared.counters[w][threadIdx.x] = 0;
    if (threadIdx.x < 3 * MOVE_WARPS) (&shared.kinds[0][0])[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        find_targets(p, g, r, shared.targets);
        shared.last = leaving ? last_key(starts, leaving) : -1;
    }
    __syncthreads();  // counters are zero, targets known
    const int last = shared.last;
    visit_pages(
        p, bh, segment, begin, end, leaving > 0,
        [&](int, bool mine, int count) {
            if (mine) atomicAdd(&shared.kinds[warp][count == PAGE ? 0 : count ? 1 : 2], 1);
        },
        [&](const PairOfPages& pages) {
            for (const int key : pages.key)
                if (key >= 0 && key <= last) atomicAdd(&shared.counters[warp][key], 1u);
        });
    __syncthreads();  // all pages and tokens are counted
    if (leaving) start_ranks(starts, shared);
    int next[3] = {0, 0, 0}, all[3] = {0, 0, 0};  // the order of this warp's next page of each kind
#pragma unroll
    for (int kind = 0; kind < 3; ++kind)
        for (int w = 0; w < MOVE_WARPS; ++w) {
            next[kind] += w < warp ? shared.kinds[w][kind] : 0;
            all[kind] += shared.kinds[w][kind];
        }
    next[1] += all[0];
    next[2] += all[0] + all[1];
    __syncthreads();  // every warp knows its ranks

    visit_pages(
        p, bh, segment, begin, end, leaving > 0,
        [&](int entry, bool mine, int count) {
            const int kind = count == PAGE ? 0 : count ? 1 : 2;
            int order = 0;
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                const u32 same = __ballot_sync(ALL_LANES, mine && kind == k);
                if (kind == k) order = next[k] + __popc(same & lanes_below(lane));
                next[k] += __popc(same);
            }
            if (!mine) return;
            const bool drop = order >= kept;
            p.call.after[row + entry] = drop                  ? DROPPED
                                        : order < needed - 1  ? PAGE
                                        : order == needed - 1 ? left
                                                              : 0;
            if (r == top && !drop && order >= needed - 1)
                p.call.role[p.group(g) * 2 + (order >= needed)] = entry;
        },
        [&](const PairOfPages& pages) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int key = pages.key[j], slot = lane % PAGE;
                const int rank = take_rank(shared.counters[warp], key <= last ? key : -1, lane);
                const bool goes = rank >= 0 && rank < leaving;
                if (goes) emit(p, shared.targets, moves, rank, pages.address[j], slot, r, bh);
                const u32 stay = __ballot_sync(ALL_LANES, key >= 0 && !goes);
                if (slot == 0 && pages.entry[j] >= 0)
                    p.call.stay[row + pages.entry[j]] = (u16)(stay >> (lane & PAGE));
            }
        });
    if (!leaving && !p.drops() && all[1] <= 1) return;

    // Closing up: 32 pages at a time, one a lane.
    __syncwarp();  // the warp's pages have their masks
    int holes = 0, destinations = 0;
    visit_pages(
        p, bh, segment, begin, end, false,
        [&](int entry, bool mine, int) {
            if (!mine) return;
            const int own = __popc(~p.call.stay[row + entry] & first_slots(p.call.after[row + entry] & 0x7f));
            holes += own;
            destinations += own > 0;
        },
        no_quad);
    holes = __reduce_add_sync(ALL_LANES, holes);
    destinations = __reduce_add_sync(ALL_LANES, destinations);
    if (lane == 0) shared.holes[warp] = holes, shared.pages[warp] = destinations;
    __syncthreads();  // holes of all warps are counted
    int hole = 0, mover = 0, page = 0, total = 0, total_pages = 0;
    for (int w = 0; w < MOVE_WARPS; ++w) {
        hole += w < warp ? shared.holes[w] : 0;
        page += w < warp ? shared.pages[w] : 0;
        total += shared.holes[w];
        total_pages += shared.pages[w];
    }
    if (threadIdx.x == 0)
        shared.reserved = atomicAdd(&p.call.head[p.layer].reserved, (u64)total | (u64)total_pages << 32);
    int moving = 0;
    visit_pages(
        p, bh, segment, begin, end, false,
        [&](int entry, bool mine, int) {
            if (mine)
                moving += __popc(p.call.stay[row + entry] & ~first_slots(p.call.after[row + entry] & 0x7f));
        },
        no_quad);
    moving = __reduce_add_sync(ALL_LANES, moving);
    if (lane == 0) shared.kinds[warp][0] = moving;
    __syncthreads();  // tokens that move are counted, and the list has room for them
    for (int w = 0; w < warp; ++w) mover += shared.kinds[w][0];
    const u32 reserved = (u32)shared.reserved;
    if (reserved + (u64)total > (u64)p.call.most_dropped * PAGE) {
        if (threadIdx.x == 0) atomicOr(p.s.status, TABLE_FULL);
        return;
    }
    Move* const list = p.call.moves[1] + (u64)p.layer * p.call.most_dropped * PAGE + reserved;
    u32* const begins =
        p.call.begins[1] + (u64)p.layer * (p.call.most_dropped * PAGE + 1) + (u32)(shared.reserved >> 32);
    visit_pages(
        p, bh, segment, begin, end, false,
        [&](int entry, bool mine, int) {
            u32 empty = 0, moved = 0, address = 0;
            if (mine) {
                const u32 stays = p.call.stay[row + entry],
                          slots = first_slots(p.call.after[row + entry] & 0x7f);
                empty = ~stays & slots;
                moved = stays & ~slots;
                address = p.s.index[(u64)bh * p.s.entries + entry];
            }
            const u32 filled = __ballot_sync(ALL_LANES, empty != 0);
            int own_hole = __popc(empty), own_mover = __popc(moved);
            int sum_hole = own_hole, sum_mover = own_mover;
#pragma unroll
            for (int bit = 1; bit < 32; bit *= 2) {
                const int h = __shfl_up_sync(ALL_LANES, sum_hole, bit);
                const int m = __shfl_up_sync(ALL_LANES, sum_mover, bit);
                sum_hole += lane >= bit ? h : 0;
                sum_mover += lane >= bit ? m : 0;
            }
            int at = hole + sum_hole - own_hole;
            if (empty) begins[page + __popc(filled & lanes_below(lane))] = reserved + at;
            for (; empty; empty &= empty - 1, ++at) {
                list[at].to = address;
                list[at].to_slot = __ffs(empty) - 1;
                list[at].to_rung = r;
            }
            at = mover + sum_mover - own_mover;
            for (; moved; moved &= moved - 1, ++at) {
                list[at].from = address;
                list[at].from_slot = __ffs(moved) - 1;
                list[at].from_rung = r;
                list[at].token = bh;
            }
            hole += __shfl_sync(ALL_LANES, sum_hole, 31);
            mover += __shfl_sync(ALL_LANES, sum_mover, 31);
            page += __popc(filled);
        },
        no_quad);
}

// Whether the pages of class r stay as they are, but for an empty one: no token leaves it, and all are full
// but for one and an empty one at most.
__device__ __forceinline__ bool is_quiet(const Plan& p, int g, int r) {
    const int* kinds = p.kinds(g, r);
    return kinds[1] <= 1 && kinds[2] <= 1 && p.leaving(g, r) == 0 && !p.drops();
}

__device__ void keep_quiet(const Plan& p, int g, int bh, int segment, int r, int start, int entries) {
    const bool is_top = r == p.s.num_rungs - 1, extra = p.has_extra(g);
    const u64 row = p.bh(bh) * p.s.entries;
    const int warp = threadIdx.x / 32, each = (entries + 32 * MOVE_WARPS - 1) / (32 * MOVE_WARPS) * 32;
    visit_pages(
        p, bh, segment, start + min(entries, warp * each), start + min(entries, (warp + 1) * each), false,
        [&](int entry, bool mine, int count) {
            if (!mine) return;
            const bool drop = count == 0 && !(is_top && extra);
            p.call.after[row + entry] = drop ? DROPPED : count;
            if (is_top && count < PAGE && !drop) p.call.role[p.group(g) * 2 + (count == 0)] = entry;
        },
        [](const PairOfPages&) {});
}

extern "C" __global__ void __launch_bounds__(MOVE_THREADS, 3)
    plan_moves(const __grid_constant__ PlanCall call) {
    __shared__ Scratch shared;
    begin_early();
    const Plan p(call, blockIdx.y);
    const int g = blockIdx.x % p.groups, r = blockIdx.x / p.groups, rungs = p.s.num_rungs;
    if (r > rungs) return;  // the grid is that of the layer with most rungs
    const int bh = g / call.segments, segment = g % call.segments;
    Move* const moves = call.moves[0] + (u64)p.layer * call.most_new_pages * PAGE;
    if (r == rungs) {
        if (p.tokens(g)[r]) move_new(p, g, bh, segment, moves, shared);
        return;
    }
    u32* const begins = call.begins[0] + (u64)p.layer * (call.most_new_pages + 1);
    const int pages = call.new_pages[p.at_rung(g, r)] - (r == rungs - 1 && p.extra_is_new(g));
    const u32 first = call.sequence[p.at_rung(g, r)];
    for (int i = threadIdx.x; i < pages; i += MOVE_THREADS)
        begins[call.list[p.at_rung(g, r)] + i] = first + new_page(p, g, r, i, pages).before;
    if (r == rungs - 1 && threadIdx.x < 2) call.role[p.group(g) * 2 + threadIdx.x] = -1;
    __syncthreads();  // no role is set before it is cleared
    if (!p.pages(g, r)) return;
    int start = 0, entries = 0;
    for (int c = 0; c <= r; ++c) start += entries, entries = p.entries_before(bh, c);
    if (is_quiet(p, g, r))
        keep_quiet(p, g, bh, segment, r, start, entries);
    else
        move_stored(p, g, bh, segment, r, start, entries, moves, shared);
}

// gate: BF16=0 registers<=80
