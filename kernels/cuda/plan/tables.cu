// What a cache's pages become, third part: page tables and pools are made anew.
//
// After plan/moves.cu; the algorithm stands in kvlab/reference/cache_plan.py.
//
// make_tables  grid (1, layers): a warp takes the num_bh warp, warp + 32, ... and brings their tables to the
//              final state, 32 entries at a time; then the block closes the holes in the numbers of each
//              rung's pages. Shared: 2 KB of counters.
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "plan/plan.cuh"
#include "common/early_launch.cuh"

constexpr int TABLE_THREADS = 1024;

// Entries of a bh's table: dropped pages make room for the last entries and for new pages;
// one warp.
__device__ void make_table(const Plan& p, int bh, int* next_freed) {
    const LayerState& s = p.s;
    if (s.waits[bh / s.heads]) return;  // its pages stay as they are
    const int lane = threadIdx.x % 32, n = s.num_pages[bh], top = s.num_rungs - 1;
    const u64 table = (u64)bh * s.entries, row = p.bh(bh) * s.entries;
    u32* const vacant = p.call.vacant + row;
    u32* const freed = p.call.freed + (u64)p.layer * p.call.most_dropped;
    int gone = 0, added = 0;
    for (int i = lane; i < p.call.segments * s.num_rungs; i += 32)
        added += p.call.new_pages[p.at_rung(bh * p.call.segments, 0) + i];
    added = __reduce_add_sync(ALL_LANES, added);
    for (int e = lane; e < n; e += 32) gone += p.call.after[row + e] == DROPPED;
    gone = __reduce_add_sync(ALL_LANES, gone);
    const int after = n - gone + added;
    if (after > s.entries) {
        if (lane == 0) atomicOr(s.status, TABLE_FULL);
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
        if (drop)
            freed[next_freed[r] + __popc(same & lanes_below(lane))] = p.number_of(r, s.index[table + e]);
        __syncwarp();  // the rungs' counters have been read
        if (drop && (same & lanes_below(lane)) == 0) next_freed[r] += __popc(same);
        __syncwarp();  // and are raised
        if (e < n && !drop) s.count[table + e] = count;
        const u32 holes = __ballot_sync(ALL_LANES, drop && e < after);
        if (drop && e < after) vacant[filled + __popc(holes & lanes_below(lane))] = e;
        filled += __popc(holes);
    }
    for (int e = n + lane; e < after; e += 32) vacant[filled + e - n] = e;
    __syncwarp();  // places and counts are known
    int taken = 0;
#pragma unroll 1
    for (int first = after; first < n; first += 32) {
        const int e = first + lane;
        const bool move = e < n && p.call.after[row + e] != DROPPED;
        const u32 moving = __ballot_sync(ALL_LANES, move);
        if (move) {
            const int to = vacant[taken + __popc(moving & lanes_below(lane))], r = s.rung[table + e];
            const u32 address = s.index[table + e];
            s.rung[table + to] = r;
            s.count[table + to] = s.count[table + e];
            s.base[table + to] = s.base[table + e];
            s.index[table + to] = address;
            s.entry_of[(u64)r * s.max_pages + p.number_of(r, address)] = table + to;
            int* role = p.call.role + p.group(bh * p.call.segments) * 2;
            if (r == top)
                for (int i = 0; i < 2 * p.call.segments; ++i)
                    if (role[i] == e) role[i] = to;
        }
        taken += __popc(moving);
    }
    __syncwarp();  // the last entries are at their new places
#pragma unroll 1
    for (int i = 0; i < p.call.segments * s.num_rungs; ++i) {
        const int g = bh * p.call.segments + i / s.num_rungs, r = i % s.num_rungs;
        const int new_pages = p.call.new_pages[p.at_rung(g, r)];
        const bool started = r == top && p.left_over(g, s.num_rungs) % PAGE;
        const int pages = new_pages - (r == top && p.extra_is_new(g));
        for (int j = lane; j < new_pages; j += 32) {
            const int to = vacant[taken + j];
            const u32 number = p.call.first[p.at_rung(g, r)] + j;
            s.rung[table + to] = r;
            s.base[table + to] = g % p.call.segments;
            s.index[table + to] = page_address(s, r, number);
            s.count[table + to] = new_page(p, g, r, j, pages).tokens;
            s.entry_of[(u64)r * s.max_pages + number] = table + to;
            if (j >= pages) p.call.role[p.group(g) * 2 + 1] = to;
            if (j == pages - 1 && started) p.call.role[p.group(g) * 2] = to;
        }
        taken += new_pages;
    }
    __syncwarp();  // the groups' roles are known
    if (lane == 0) {
        const int current = p.seqlen >> 16, g = bh * p.call.segments + current;
        const int* role = p.call.role + p.group(g) * 2;
        const int started = p.slots_left(g) ? role[0] : -1, ready = role[1];
        const int beyond = current + 1 < p.call.segments ? role[3] : -1;
        const int first = beyond >= 0 && ready >= 0 ? ready : started;
        const int second = beyond >= 0 ? beyond : ready;
        s.open[bh * OPEN_PAGES] = first >= 0 ? first : second;
        s.open[bh * OPEN_PAGES + 1] = first >= 0 ? second : -1;
        s.num_pages[bh] = after;
    }
}

// Brings the last pages of rung r to the places of its dropped ones, listed in `freed`, and gives back the
// slabs that become empty; returns the copies so far. All threads.
__device__ int close_pool(const Plan& p, int r, int first_dead, int dropped, int copies) {
    const LayerState& s = p.s;
    const u64 lists = (u64)p.layer * p.call.most_dropped + first_dead;
    const u32* freed = p.call.freed + lists;
    u32* const holes = p.call.holes + lists;
    u8* const beyond_end = p.call.beyond_end + lists;
    PageCopy* const copy = p.call.copies + (u64)p.layer * p.call.most_dropped;
    const int used = s.used[r], after = used - dropped;
    for (int i = threadIdx.x; i < dropped; i += TABLE_THREADS) beyond_end[i] = 0;
    __syncthreads();  // marks are clear
    int done = 0, all;
    for (int first = 0; first < dropped; first += TABLE_THREADS) {
        const int i = first + threadIdx.x, number = i < dropped ? freed[i] : 0;
        const bool hole = i < dropped && number < after;
        if (i < dropped && !hole) beyond_end[number - after] = 1;
        const int at = done + block_scan<TABLE_THREADS, int>(hole, all);
        if (hole) holes[at] = number;
        done += all;
    }
    __syncthreads();  // holes are listed and dropped pages beyond the end marked
    done = 0;
    for (int first = 0; first < dropped; first += TABLE_THREADS) {
        const int i = first + threadIdx.x;
        const bool live = i < dropped && !beyond_end[i];
        const int at = done + block_scan<TABLE_THREADS, int>(live, all);
        if (live) {
            const u32 to = holes[at], entry = s.entry_of[(u64)r * s.max_pages + after + i];
            const u32 address = page_address(s, r, to);
            copy[copies + at] = {page_address(s, r, after + i), address, s.rungs[r].record, 0};
            s.index[entry] = address;
            s.entry_of[(u64)r * s.max_pages + to] = entry;
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
    __shared__ int next_freed[TABLE_THREADS / 32][CACHE_RUNGS], dropped[CACHE_RUNGS];
    begin_early();
    const Plan p(call, blockIdx.y);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rungs = p.s.num_rungs, top = rungs - 1;
    int total = 0;
    for (int r = 0; r < rungs; ++r) {
        int of_rung = 0, all;
        for (int first = 0; first < p.num_bh; first += TABLE_THREADS) {
            const int bh = first + threadIdx.x;
            int own = 0;
            for (int g = bh * call.segments; bh < p.num_bh && g < (bh + 1) * call.segments; ++g) {
                const int kept = p.needed(g, r) + (r == top && p.has_extra(g));
                own += max(0, p.pages(g, r) - kept);
            }
            const int before = block_scan<TABLE_THREADS, int>(own, all);
            if (bh < p.num_bh) call.freed_first[p.bh(bh) * rungs + r] = total + of_rung + before;
            of_rung += all;
        }
        if (threadIdx.x == 0) dropped[r] = of_rung;
        total += of_rung;
    }
    PlanHead* const head = call.head + p.layer;
    if (total > call.most_dropped) {
        if (threadIdx.x == 0) atomicOr(p.s.status, TABLE_FULL);
        return;
    }
    __syncthreads();  // every bh's place in the list of dropped pages is known
#pragma unroll 1
    for (int bh = warp; bh < p.num_bh; bh += TABLE_THREADS / 32) {
        if (lane < rungs) next_freed[warp][lane] = call.freed_first[p.bh(bh) * rungs + lane];
        __syncwarp();  // the counters of this bh are set
        make_table(p, bh, next_freed[warp]);
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

// gate: BF16=0 registers<=64
