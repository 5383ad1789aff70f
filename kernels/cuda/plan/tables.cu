// What a cache's pages become, third part: page tables and pools are made anew.
//
// After plan/moves.cu; the algorithm stands in kvlab/reference/cache_plan.py.
//
// make_tables  grid (1, layers): a warp takes the pairs warp, warp + 32, ... and brings their tables to the
//              final state, 32 entries at a time; then the block closes the gaps in the numbers of each
//              rung's pages. Shared: 2 KB of counters.
//
// gate: BF16=0 registers<=64
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "plan/plan.cuh"
#include "common/early_launch.cuh"

constexpr int TABLE_THREADS = 1024;

// Entries of a pair's table: dropped pages make room for the last entries and for the pages that are born;
// one warp.
__device__ void make_table(const Plan& p, int pair, int* next_dead) {
    const LayerState& s = p.s;
    if (s.waits[pair / s.heads]) return;  // its pages stay as they are
    const int lane = threadIdx.x % 32, n = s.num_pages[pair], top = s.num_rungs - 1;
    const u64 table = (u64)pair * s.entries, row = p.pair(pair) * s.entries;
    u32* const places = p.call.places + row;
    u32* const dead = p.call.dead + (u64)p.layer * p.call.most_dropped;
    int gone = 0, born = 0;
    for (int i = lane; i < p.call.segments * s.num_rungs; i += 32)
        born += p.call.births[p.at_rung(pair * p.call.segments, 0) + i];
    born = __reduce_add_sync(ALL_LANES, born);
    for (int e = lane; e < n; e += 32) gone += p.call.after[row + e] == DROPPED;
    gone = __reduce_add_sync(ALL_LANES, gone);
    const int after = n - gone + born;
    if (after > s.entries) {
        if (lane == 0) atomicOr(s.status, NO_ENTRY);
        return;
    }
    int filled = 0;
#pragma unroll 1
    for (int first = 0; first < n; first += 32) {
        const int e = first + lane;
        const u8 count = e < n ? p.call.after[row + e] : 0;
        const bool drop = count == DROPPED;
        const int r = e < n ? s.rung[table + e] : 0;
        const u32 same = __match_any_sync(ALL_LANES, drop ? r : 255);
        if (drop) dead[next_dead[r] + __popc(same & lanes_below(lane))] = p.number_of(r, s.index[table + e]);
        __syncwarp();  // the rungs' counters have been read
        if (drop && (same & lanes_below(lane)) == 0) next_dead[r] += __popc(same);
        __syncwarp();  // and are raised
        if (e < n && !drop) s.count[table + e] = count;
        const u32 holes = __ballot_sync(ALL_LANES, drop && e < after);
        if (drop && e < after) places[filled + __popc(holes & lanes_below(lane))] = e;
        filled += __popc(holes);
    }
    for (int e = n + lane; e < after; e += 32) places[filled + e - n] = e;
    __syncwarp();  // places and counts are known
    int taken = 0;
#pragma unroll 1
    for (int first = after; first < n; first += 32) {
        const int e = first + lane;
        const bool move = e < n && p.call.after[row + e] != DROPPED;
        const u32 moving = __ballot_sync(ALL_LANES, move);
        if (move) {
            const int to = places[taken + __popc(moving & lanes_below(lane))], r = s.rung[table + e];
            const u32 address = s.index[table + e];
            s.rung[table + to] = r;
            s.count[table + to] = s.count[table + e];
            s.base[table + to] = s.base[table + e];
            s.index[table + to] = address;
            s.owner[(u64)r * s.max_pages + p.number_of(r, address)] = table + to;
            int* role = p.call.role + p.group(pair * p.call.segments) * 2;
            if (r == top)
                for (int i = 0; i < 2 * p.call.segments; ++i)
                    if (role[i] == e) role[i] = to;
        }
        taken += __popc(moving);
    }
    __syncwarp();  // the last entries are at their new places
#pragma unroll 1
    for (int i = 0; i < p.call.segments * s.num_rungs; ++i) {
        const int g = pair * p.call.segments + i / s.num_rungs, r = i % s.num_rungs;
        const int births = p.call.births[p.at_rung(g, r)];
        const int left = r == top ? p.tokens(g)[s.num_rungs] % PAGE : 0;
        const int pages = births - (r == top && p.extra_is_born(g));
        for (int j = lane; j < births; j += 32) {
            const int to = places[taken + j];
            const u32 number = p.call.first[p.at_rung(g, r)] + j;
            s.rung[table + to] = r;
            s.base[table + to] = g % p.call.segments;
            s.index[table + to] = page_address(s, r, number);
            s.count[table + to] = j >= pages ? 0 : j == pages - 1 && left ? left : PAGE;
            s.owner[(u64)r * s.max_pages + number] = table + to;
            if (j >= pages) p.call.role[p.group(g) * 2 + 1] = to;
            if (j == pages - 1 && left) p.call.role[p.group(g) * 2] = to;
        }
        taken += births;
    }
    __syncwarp();  // the groups' roles are known
    if (lane == 0) {
        const int current = p.seqlen >> 16, g = pair * p.call.segments + current;
        const int* role = p.call.role + p.group(g) * 2;
        const int started = p.room_of(g) ? role[0] : -1, ready = role[1];
        const int beyond = current + 1 < p.call.segments ? role[3] : -1;
        const int first = beyond >= 0 && ready >= 0 ? ready : started;
        const int second = beyond >= 0 ? beyond : ready;
        s.open[pair * OPEN_PAGES] = first >= 0 ? first : second;
        s.open[pair * OPEN_PAGES + 1] = first >= 0 ? second : -1;
        s.num_pages[pair] = after;
    }
}

// Brings the last pages of rung r to the places of its dropped ones, listed in `dead`, and gives back the
// slabs that become empty; returns the copies so far. All threads.
__device__ int close_pool(const Plan& p, int r, int first_dead, int dropped, int copies) {
    const LayerState& s = p.s;
    const u64 lists = (u64)p.layer * p.call.most_dropped + first_dead;
    const u32* dead = p.call.dead + lists;
    u32* const gaps = p.call.gaps + lists;
    u8* const above = p.call.above + lists;
    PageCopy* const copy = p.call.copies + (u64)p.layer * p.call.most_dropped;
    const int used = s.used[r], after = used - dropped;
    for (int i = threadIdx.x; i < dropped; i += TABLE_THREADS) above[i] = 0;
    __syncthreads();  // marks are clear
    int done = 0, all;
    for (int first = 0; first < dropped; first += TABLE_THREADS) {
        const int i = first + threadIdx.x, number = i < dropped ? dead[i] : 0;
        const bool gap = i < dropped && number < after;
        if (i < dropped && !gap) above[number - after] = 1;
        const int at = done + block_scan<TABLE_THREADS, int>(gap, all);
        if (gap) gaps[at] = number;
        done += all;
    }
    __syncthreads();  // gaps are listed and dropped pages beyond the end marked
    done = 0;
    for (int first = 0; first < dropped; first += TABLE_THREADS) {
        const int i = first + threadIdx.x;
        const bool live = i < dropped && !above[i];
        const int at = done + block_scan<TABLE_THREADS, int>(live, all);
        if (live) {
            const u32 to = gaps[at], owner = s.owner[(u64)r * s.max_pages + after + i];
            const u32 address = page_address(s, r, to);
            copy[copies + at] = {page_address(s, r, after + i), address, s.rungs[r].record, 0};
            s.index[owner] = address;
            s.owner[(u64)r * s.max_pages + to] = owner;
        }
        done += all;
    }
    __syncthreads();  // slabs have been read
    const int per_slab = s.rungs[r].per_slab, held = s.slab_count[r],
              slabs = (after + per_slab - 1) / per_slab;
    const int num_free = s.num_free[0];
    for (int i = slabs + threadIdx.x; i < held; i += TABLE_THREADS)
        s.free_slabs[num_free + i - slabs] = s.slabs[r * s.max_slabs + i];
    __syncthreads();  // counts have been read
    if (threadIdx.x == 0) {
        s.used[r] = after;
        s.slab_count[r] = slabs;
        s.num_free[0] = num_free + held - slabs;
    }
    return copies + done;
}

extern "C" __global__ void __launch_bounds__(TABLE_THREADS)
    make_tables(const __grid_constant__ PlanCall call) {
    __shared__ int next_dead[TABLE_THREADS / 32][CACHE_RUNGS], dropped[CACHE_RUNGS];
    begin_early();
    const Plan p(call, blockIdx.y);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rungs = p.s.num_rungs, top = rungs - 1;
    int total = 0;
    for (int r = 0; r < rungs; ++r) {
        int of_rung = 0, all;
        for (int first = 0; first < p.pairs; first += TABLE_THREADS) {
            const int pair = first + threadIdx.x;
            int own = 0;
            for (int g = pair * call.segments; pair < p.pairs && g < (pair + 1) * call.segments; ++g) {
                const int kept = p.needed(g, r) + (r == top && call.extra[p.group(g)]);
                own += max(0, p.pages(g, r) - kept);
            }
            const int before = block_scan<TABLE_THREADS, int>(own, all);
            if (pair < p.pairs) call.dead_first[p.pair(pair) * rungs + r] = total + of_rung + before;
            of_rung += all;
        }
        if (threadIdx.x == 0) dropped[r] = of_rung;
        total += of_rung;
    }
    PlanHead* const head = call.head + p.layer;
    if (total > call.most_dropped) {
        if (threadIdx.x == 0) atomicOr(p.s.status, NO_ENTRY);
        return;
    }
    __syncthreads();  // every pair's place in the list of dropped pages is known
#pragma unroll 1
    for (int pair = warp; pair < p.pairs; pair += TABLE_THREADS / 32) {
        if (lane < rungs) next_dead[warp][lane] = call.dead_first[p.pair(pair) * rungs + lane];
        __syncwarp();  // the counters of this pair are set
        make_table(p, pair, next_dead[warp]);
        __syncwarp();  // and may be set again
    }
    __syncthreads();  // all tables name the pages where they are now
    int copies = 0, first = 0;
    for (int r = 0; r < rungs; ++r) {
        copies = close_pool(p, r, first, dropped[r], copies);
        first += dropped[r];
        __syncthreads();  // the count of free slabs is written
    }
    if (threadIdx.x == 0) {
        const u64 reserved = head->reserved;
        head->num_groups[1] = (int)(reserved >> 32);
        head->num_copies = copies;
        call.begins[1][(u64)p.layer * (call.most_dropped * PAGE + 1) + (reserved >> 32)] = (u32)reserved;
    }
}
