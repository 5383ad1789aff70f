// A plan of a cache, second third: every token that moves is told where it goes.
//
// Before it plan/plan.cu has counted the tokens of each class by key, has chosen how many chunks of a class
// change to which level, and has numbered the new pages. After it plan/tables.cu writes the page tables. This
// kernel writes two lists of moves, and for every page how many tokens it will hold. The algorithm stands in
// kvlab/reference/cache_plan.py, in the same words.
//
// Lists of moves
//   phase 0   Tokens that leave their class, and all new tokens, go to new pages. The rank of a token is its
//             position in a counting sort of its class: by key, then by table entry and slot. The rank gives
//             page, slot and position in the list, so that no warp waits for another's moves.
//   phase 1   Tokens that stay fill the holes that others leave. The n-th token of a class that stands beyond
//             what its page will hold goes to the n-th hole. A block reserves a part of this list once it has
//             counted its holes; in which order blocks do so changes the list and no page.
// Threads
//   plan_moves   grid (groups * classes, layers), 8 warps: a block has one class of one (bh, segment). Each
//                warp has an equal part of the table entries of the class, or of the new tokens. Where pages
//                are counted a lane has an entry; where tokens are, half a warp has a page and a lane a slot.
// Memory: shared 8.4 KB a block, of which 8 KB are a counter for each warp and key: it counts the tokens of
// the warp, then it holds the rank of the next of them. At most 80 registers, for three blocks a
// multiprocessor.
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "plan/plan.cuh"
#include "common/early_launch.cuh"

constexpr int MOVE_THREADS = 256, MOVE_WARPS = MOVE_THREADS / 32;

// Where the chunks of a class go.
struct Targets {
    int end[MAX_LEVELS];     // of its chunks, how many go to this level or a lower one
    u32 number[MAX_LEVELS];  // by level: the number of the page of its first chunk
    u32 move[MAX_LEVELS];    // where the moves of that chunk begin in the list
    int in_chunks, skipped;  // tokens in chunks, and how many more there would be if all chunks were full
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

// What the warps of a block share.
struct Scratch {
    u32 counters[MOVE_WARPS][KEYS];
    int kinds[MOVE_WARPS][3];                   // pages of a warp that are full, partly filled, empty
    int holes[MOVE_WARPS], filled[MOVE_WARPS];  // holes of a warp, pages that have some
    int movers[MOVE_WARPS];                     // tokens of a warp that fill holes
    Targets targets;
    u64 reserved;  // what PlanHead::reserved was: where this block's part of the list of phase 1 begins
    int last;      // the last key that may leave
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

// How many of `all` a warp has, whole runs of 32.
__device__ __forceinline__ int part_of_warp(int all) {
    return (all + 32 * MOVE_WARPS - 1) / (32 * MOVE_WARPS) * 32;
}

__device__ void move_new(const Plan& p, int g, int bh, int segment, Move* moves, Scratch& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rungs = p.s.num_rungs;
    const u32 token = bh / p.s.heads * p.call.num_new;
    const int each = part_of_warp(p.call.num_new);
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

// The pages of a class of stored tokens, rung r of a (bh, segment), as the warps of a block share them: each
// has entries [begin, end).
struct StoredClass {
    const Plan& p;
    int g, bh, segment, r, begin, end;
    u64 row;  // where the entries of the bh begin in the workspace

    // `start`, `entries`: those of the whole class.
    __device__ __forceinline__ StoredClass(const Plan& plan, int group, int of_bh, int of_segment, int rung,
                                           int start, int entries)
        : p(plan), g(group), bh(of_bh), segment(of_segment), r(rung), row(plan.bh(of_bh) * plan.s.entries) {
        const int warp = threadIdx.x / 32, each = part_of_warp(entries);
        begin = start + min(entries, warp * each), end = start + min(entries, (warp + 1) * each);
    }
    __device__ __forceinline__ bool is_top() const { return r == p.s.num_rungs - 1; }

    // Calls on_page(entry, mine, count) for 32 entries at once.
    template <class OnPage>
    __device__ __forceinline__ void visit(OnPage on_page) const {
        visit_pages(p, bh, segment, begin, end, false, on_page, [](const PairOfPages&) {});
    }
    // The same, then on_quad for every four pages, if any token leaves.
    template <class OnPage, class OnQuad>
    __device__ __forceinline__ void visit(bool any_leaves, OnPage on_page, OnQuad on_quad) const {
        visit_pages(p, bh, segment, begin, end, any_leaves, on_page, on_quad);
    }

    // Bits of the slots of a page that will be filled; those that hold tokens that stay.
    __device__ __forceinline__ u32 slots_after(int entry) const {
        return (1u << (p.call.after[row + entry] & 0x7f)) - 1;
    }
    __device__ __forceinline__ u32 slots_that_stay(int entry) const { return p.call.stay[row + entry]; }
};

// The kind of a page, as Scratch::kinds counts them.
__device__ __forceinline__ int kind_of(int count) {
    return count == PAGE ? 0 : count ? 1 : 2;
}

// Counts the pages of this warp by kind, and those of its tokens that may leave by key.
__device__ __forceinline__ void count_pages(const StoredClass& of, int leaving, int last, Scratch& shared) {
    const int warp = threadIdx.x / 32;
    of.visit(
        leaving > 0,
        [&](int, bool mine, int count) {
            if (mine) atomicAdd(&shared.kinds[warp][kind_of(count)], 1);
        },
        [&](const PairOfPages& pages) {
            for (const int key : pages.key)
                if (key >= 0 && key <= last) atomicAdd(&shared.counters[warp][key], 1u);
        });
}

// Says of each page of this warp how many tokens it will hold, and of each of its tokens whether it leaves;
// writes the moves of those that do. Full pages stay first, then partly filled ones, then empty ones.
// `partly`: receives how many pages of the class are partly filled.
__device__ __forceinline__ void settle_pages(const StoredClass& of, int leaving, int last, Move* moves,
                                             Scratch& shared, int& partly) {
    const Plan& p = of.p;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int needed = p.needed(of.g, of.r), kept = needed + (of.is_top() && p.has_extra(of.g));
    const int left = p.tokens(of.g)[of.r] - leaving - PAGE * (needed - 1);  // tokens of the last page
    int next[3] = {0, 0, 0}, all[3] = {0, 0, 0};  // the order of this warp's next page of each kind
#pragma unroll
    for (int kind = 0; kind < 3; ++kind)
        for (int w = 0; w < MOVE_WARPS; ++w) {
            next[kind] += w < warp ? shared.kinds[w][kind] : 0;
            all[kind] += shared.kinds[w][kind];
        }
    next[1] += all[0];
    next[2] += all[0] + all[1];
    partly = all[1];
    __syncthreads();  // every warp knows its ranks

    of.visit(
        leaving > 0,
        [&](int entry, bool mine, int count) {
            const int kind = kind_of(count);
            int order = 0;
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                const u32 same = __ballot_sync(ALL_LANES, mine && kind == k);
                if (kind == k) order = next[k] + __popc(same & lanes_below(lane));
                next[k] += __popc(same);
            }
            if (!mine) return;
            const bool drop = order >= kept;
            p.call.after[of.row + entry] = drop                  ? DROPPED
                                           : order < needed - 1  ? PAGE
                                           : order == needed - 1 ? left
                                                                 : 0;
            if (of.is_top() && !drop && order >= needed - 1)
                p.call.role[p.group(of.g) * 2 + (order >= needed)] = entry;
        },
        [&](const PairOfPages& pages) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int key = pages.key[j], slot = lane % PAGE;
                const int rank = take_rank(shared.counters[warp], key <= last ? key : -1, lane);
                const bool goes = rank >= 0 && rank < leaving;
                if (goes) emit(p, shared.targets, moves, rank, pages.address[j], slot, of.r, of.bh);
                const u32 stay = __ballot_sync(ALL_LANES, key >= 0 && !goes);
                if (slot == 0 && pages.entry[j] >= 0)
                    p.call.stay[of.row + pages.entry[j]] = (u16)(stay >> (lane & PAGE));
            }
        });
}

// Where a warp's moves of phase 1 begin in the part of its block: its first hole, the first page with holes,
// the first token that fills one.
struct Closing {
    int hole, page, mover;
};

// Sums over the lanes up to this one.
__device__ __forceinline__ void sum_to_lane(int& first, int& second, int lane) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
        const int a = __shfl_up_sync(ALL_LANES, first, bit);
        const int b = __shfl_up_sync(ALL_LANES, second, bit);
        first += lane >= bit ? a : 0;
        second += lane >= bit ? b : 0;
    }
}

// Writes the moves of phase 1 of this warp, the destinations and the sources of which it knows, each to where
// its number says; 32 pages at a time, one a lane.
__device__ __forceinline__ void list_closing_moves(const StoredClass& of, Closing at, u32 reserved,
                                                   Move* list, u32* begins) {
    const int lane = threadIdx.x % 32;
    of.visit([&](int entry, bool mine, int) {
        u32 empty = 0, moved = 0, address = 0;
        if (mine) {
            const u32 stays = of.slots_that_stay(entry), slots = of.slots_after(entry);
            empty = ~stays & slots;
            moved = stays & ~slots;
            address = of.p.s.index[(u64)of.bh * of.p.s.entries + entry];
        }
        const u32 filled = __ballot_sync(ALL_LANES, empty != 0);
        const int own_hole = __popc(empty), own_mover = __popc(moved);
        int sum_hole = own_hole, sum_mover = own_mover;
        sum_to_lane(sum_hole, sum_mover, lane);
        int i = at.hole + sum_hole - own_hole;
        if (empty) begins[at.page + __popc(filled & lanes_below(lane))] = reserved + i;
        for (; empty; empty &= empty - 1, ++i) {
            list[i].to = address;
            list[i].to_slot = __ffs(empty) - 1;
            list[i].to_rung = of.r;
        }
        i = at.mover + sum_mover - own_mover;
        for (; moved; moved &= moved - 1, ++i) {
            list[i].from = address;
            list[i].from_slot = __ffs(moved) - 1;
            list[i].from_rung = of.r;
            list[i].token = of.bh;
        }
        at.hole += __shfl_sync(ALL_LANES, sum_hole, 31);
        at.mover += __shfl_sync(ALL_LANES, sum_mover, 31);
        at.page += __popc(filled);
    });
}

// Fills the holes of pages that stay with tokens beyond their ends; all threads.
__device__ __forceinline__ void close_up(const StoredClass& of, Scratch& shared) {
    const Plan& p = of.p;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int holes = 0, filled = 0, movers = 0;
    of.visit([&](int entry, bool mine, int) {
        if (!mine) return;
        const u32 stays = of.slots_that_stay(entry), slots = of.slots_after(entry);
        const int own = __popc(~stays & slots);
        holes += own;
        filled += own > 0;
        movers += __popc(stays & ~slots);
    });
    holes = __reduce_add_sync(ALL_LANES, holes);
    filled = __reduce_add_sync(ALL_LANES, filled);
    movers = __reduce_add_sync(ALL_LANES, movers);
    if (lane == 0) shared.holes[warp] = holes, shared.filled[warp] = filled, shared.movers[warp] = movers;
    __syncthreads();  // holes and tokens of all warps are counted
    Closing at = {0, 0, 0};
    int total = 0, total_filled = 0;
    for (int w = 0; w < MOVE_WARPS; ++w) {
        at.hole += w < warp ? shared.holes[w] : 0;
        at.page += w < warp ? shared.filled[w] : 0;
        at.mover += w < warp ? shared.movers[w] : 0;
        total += shared.holes[w];
        total_filled += shared.filled[w];
    }
    if (threadIdx.x == 0)
        shared.reserved = atomicAdd(&p.call.head[p.layer].reserved, (u64)total | (u64)total_filled << 32);
    __syncthreads();  // the list has room for them
    const u32 reserved = (u32)shared.reserved;
    if (reserved + (u64)total > (u64)p.call.max_dropped * PAGE) {
        if (threadIdx.x == 0) atomicOr(p.s.status, TABLE_FULL);
        return;
    }
    Move* const list = p.call.moves[1] + (u64)p.layer * p.call.max_dropped * PAGE + reserved;
    u32* const begins =
        p.call.begins[1] + (u64)p.layer * (p.call.max_dropped * PAGE + 1) + (u32)(shared.reserved >> 32);
    list_closing_moves(of, at, reserved, list, begins);
}

// Moves tokens of a class of stored ones: those that leave it, then those that stay and fill holes.
__device__ void move_stored(const StoredClass& of, Move* moves, Scratch& shared) {
    const Plan& p = of.p;
    const int leaving = p.leaving(of.g, of.r);
    const u32* const starts = p.call.starts + (p.group(of.g) * p.classes + of.r) * KEYS;
    for (int w = 0; w < MOVE_WARPS; ++w) shared.counters[w][threadIdx.x] = 0;
    if (threadIdx.x < 3 * MOVE_WARPS) (&shared.kinds[0][0])[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        find_targets(p, of.g, of.r, shared.targets);
        shared.last = leaving ? last_key(starts, leaving) : -1;
    }
    __syncthreads();  // counters are zero, targets known
    const int last = shared.last;
    count_pages(of, leaving, last, shared);
    __syncthreads();  // all pages and tokens are counted
    if (leaving) start_ranks(starts, shared);
    int partly;
    settle_pages(of, leaving, last, moves, shared, partly);
    if (!leaving && !p.drops() && partly <= 1) return;  // no hole is left
    __syncwarp();                                       // the warp's pages have their masks
    close_up(of, shared);
}

// Whether the pages of class r stay as they are, but for an empty one: no token leaves it, and all are full
// but for one and an empty one at most.
__device__ __forceinline__ bool is_quiet(const Plan& p, int g, int r) {
    const int* kinds = p.kinds(g, r);
    return kinds[1] <= 1 && kinds[2] <= 1 && p.leaving(g, r) == 0 && !p.drops();
}

// Says of each page of a quiet class what it will hold: what it holds.
__device__ void keep_quiet(const StoredClass& of) {
    const Plan& p = of.p;
    const bool extra = p.has_extra(of.g);
    of.visit([&](int entry, bool mine, int count) {
        if (!mine) return;
        const bool drop = count == 0 && !(of.is_top() && extra);
        p.call.after[of.row + entry] = drop ? DROPPED : count;
        if (of.is_top() && count < PAGE && !drop) p.call.role[p.group(of.g) * 2 + (count == 0)] = entry;
    });
}

extern "C" __global__ void __launch_bounds__(MOVE_THREADS, 3)
    plan_moves(const __grid_constant__ PlanCall call) {
    __shared__ Scratch shared;
    begin_early();
    const Plan p(call, blockIdx.y);
    const int g = blockIdx.x % p.groups, r = blockIdx.x / p.groups, rungs = p.s.num_rungs;
    if (r > rungs) return;  // the grid is that of the layer with most rungs
    const int bh = g / call.segments, segment = g % call.segments;
    Move* const moves = call.moves[0] + (u64)p.layer * call.max_new_pages * PAGE;
    if (r == rungs) {
        if (p.tokens(g)[r]) move_new(p, g, bh, segment, moves, shared);
        return;
    }
    u32* const begins = call.begins[0] + (u64)p.layer * (call.max_new_pages + 1);
    const int pages = call.new_pages[p.at_rung(g, r)] - (r == rungs - 1 && p.extra_is_new(g));
    const u32 first = call.sequence[p.at_rung(g, r)];
    for (int i = threadIdx.x; i < pages; i += MOVE_THREADS)
        begins[call.list[p.at_rung(g, r)] + i] = first + new_page(p, g, r, i, pages).before;
    if (r == rungs - 1 && threadIdx.x < 2) call.role[p.group(g) * 2 + threadIdx.x] = -1;
    __syncthreads();  // no role is set before it is cleared
    if (!p.pages(g, r)) return;
    int start = 0, entries = 0;
    for (int c = 0; c <= r; ++c) start += entries, entries = p.entries_before(bh, c);
    const StoredClass of(p, g, bh, segment, r, start, entries);
    if (is_quiet(p, g, r))
        keep_quiet(of);
    else
        move_stored(of, moves, shared);
}

// gate: BF16=0 registers<=80
