// A plan of a cache, last third: page tables and pools are made anew.
//
// After plan/moves.cu; the algorithm stands in kvlab/reference/cache_plan.py.
//
// make_tables  grid (num_bh, layers): a block brings the table of a bh to its final state: of each rung the
//              pages that stay, new ones, then entries without a page up to a whole quad. Tables are sorted
//              by rung before, too, so the index of a page follows from how many stay before it. The last
//              block of a layer closes the holes in the numbers of each rung's pages.
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "plan/plan.cuh"
#include "common/early_launch.cuh"

constexpr int TABLE_THREADS = 512;

// Of the rungs of a bh.
struct TableLayout {
    int staying[CACHE_RUNGS];    // pages that stay
    int begin[CACHE_RUNGS + 1];  // entries
    int shift[CACHE_RUNGS];      // of a page that stays: its entry less the number of those before it
    int freed[CACHE_RUNGS];      // the same of a dropped one: its place in the list of all
};

// Finds where the pages of a bh go, and how many pages of each rung are dropped; all threads. Returns the
// sum of these.
__device__ int find_layout(const Plan& p, int bh, TableLayout& layout, int* dropped) {
    const int rungs = p.s.num_rungs, segments = p.call.segments, i = threadIdx.x;
    if (i < rungs) {
        int staying = 0, before = 0, added = 0;
        for (int g = bh * segments; g < (bh + 1) * segments; ++g) {
            staying += p.pages_kept(g, i), before += p.pages(g, i);
            added += p.call.new_pages[p.at_rung(g, i)];
        }
        dropped[i] = layout.freed[i] = 0;
        layout.staying[i] = staying, layout.shift[i] = before, layout.begin[i] = added;
    }
    __syncthreads();  // sums of this bh are there, others are cleared
    for (int at = i; at < p.groups * rungs; at += TABLE_THREADS) {
        const int g = at / rungs, r = at - g * rungs, gone = p.pages(g, r) - p.pages_kept(g, r);
        if (gone) atomicAdd(dropped + r, gone);
        if (gone && g / segments < bh) atomicAdd(layout.freed + r, gone);
    }
    __syncthreads();  // all dropped pages are counted
    int total = 0;
    for (int r = 0; r < rungs; ++r) total += dropped[r];
    if (i == 0) {
        int entry = 0, staying = 0, gone = 0, first = 0;
        for (int r = 0; r < rungs; ++r) {
            const int own = layout.staying[r], before = layout.shift[r], added = layout.begin[r];
            layout.begin[r] = entry, layout.shift[r] = entry - staying;
            layout.freed[r] += first - gone;
            entry += whole_quads(own + added);
            staying += own, gone += before - own, first += dropped[r];
        }
        layout.begin[rungs] = entry;
    }
    __syncthreads();  // the layout is known
    return total;
}

// Lists what stays in a bh's table, and the numbers of pages that are dropped; all threads.
__device__ void list_pages(const Plan& p, int bh, const TableLayout& layout, Entry* table) {
    const LayerState& s = p.s;
    const u64 row = (u64)bh * s.entries;
    const u8* const after = p.call.after + p.bh(bh) * s.entries;
    u32* const freed = p.call.freed + (u64)p.layer * p.call.max_dropped;
    const int roles = 2 * p.call.segments, n = s.num_pages[bh];
    const int* const role = p.call.role + p.group(bh * p.call.segments) * 2;
    int* const role_after = p.call.role_after + p.group(bh * p.call.segments) * 2;
    u32 seen = 0, all;  // pages that stay, and dropped ones in the upper half
#pragma unroll 1
    for (int first = 0; first < n; first += TABLE_THREADS) {
        const int e = first + threadIdx.x;
        const u32 address = e < n ? s.index[row + e] : NO_PAGE;
        const bool there = address != NO_PAGE;
        const int r = there ? s.rung[row + e] : 0, count = there ? after[e] : 0;
        const bool drops = count == DROPPED, stays = there && !drops;
        const u32 before = seen + block_scan<TABLE_THREADS, u32>((u32)stays | (u32)drops << 16, all);
        seen += all;
        if (drops) freed[layout.freed[r] + (before >> 16)] = p.number_of(r, address);
        if (!stays) continue;
        const int to = layout.shift[r] + (int)(before & 0xffffu);
        table[to] = {address, s.base[row + e], (u8)r, (u8)count};
        if (r != s.num_rungs - 1) continue;
        for (int i = 0; i < roles; ++i)
            if (role[i] == e) role_after[i] = to;
    }
}

// Lists the new pages of a bh, and the entries without a page; all threads.
__device__ void list_new(const Plan& p, int bh, const TableLayout& layout, Entry* table) {
    const LayerState& s = p.s;
    const int top = s.num_rungs - 1;
    for (int r = 0; r <= top; ++r) {
        int at = layout.begin[r] + layout.staying[r];
        for (int segment = 0; segment < p.call.segments; ++segment) {
            const int g = bh * p.call.segments + segment, new_pages = p.call.new_pages[p.at_rung(g, r)];
            const bool started = r == top && p.left_over(g, s.num_rungs) % PAGE;
            const int pages = new_pages - (r == top && p.extra_is_new(g));
            for (int j = threadIdx.x; j < new_pages; j += TABLE_THREADS) {
                table[at + j] = {page_address(s, r, p.call.first[p.at_rung(g, r)] + j), (u16)segment, (u8)r,
                                 (u8)new_page(p, g, r, j, pages).tokens};
                if (j >= pages) p.call.role_after[p.group(g) * 2 + 1] = at + j;
                if (j == pages - 1 && started) p.call.role_after[p.group(g) * 2] = at + j;
            }
            at += new_pages;
        }
        for (int e = at + threadIdx.x; e < layout.begin[r + 1]; e += TABLE_THREADS)
            table[e] = {NO_PAGE, 0, (u8)r, 0};
    }
}

// The table of a bh as it is listed; all threads.
__device__ void store_table(const Plan& p, int bh, int entries, const Entry* table) {
    const LayerState& s = p.s;
    const u64 row = (u64)bh * s.entries;
#pragma unroll 2
    for (int e = threadIdx.x; e < entries; e += TABLE_THREADS) {
        const Entry entry = table[e];
        s.count[row + e] = entry.count;
        if (e < s.num_pages[bh] && s.index[row + e] == entry.index && s.rung[row + e] == entry.rung) continue;
        s.rung[row + e] = entry.rung, s.base[row + e] = entry.base, s.index[row + e] = entry.index;
        if (entry.index == NO_PAGE) continue;
        const u64 number = p.number_of(entry.rung, entry.index);
        s.entry_of[(u64)entry.rung * s.max_pages + number] = (u32)(row + e);
    }
}

// Which pages take the next tokens of a bh.
__device__ void set_open(const Plan& p, int bh) {
    const int current = p.seqlen >> 16, g = bh * p.call.segments + current;
    const int* role = p.call.role_after + p.group(g) * 2;
    const int started = p.slots_left(g) ? role[0] : -1, ready = role[1];
    const int beyond = current + 1 < p.call.segments ? role[3] : -1;
    const int first = beyond >= 0 && ready >= 0 ? ready : started;
    const int second = beyond >= 0 ? beyond : ready;
    p.s.open[bh * OPEN_PAGES] = first >= 0 ? first : second;
    p.s.open[bh * OPEN_PAGES + 1] = first >= 0 ? second : -1;
}

// Makes the table of a bh; all threads.
__device__ void make_table(const Plan& p, int bh, const TableLayout& layout) {
    const int entries = layout.begin[p.s.num_rungs];
    if (p.s.waits[bh / p.s.heads]) return;  // its pages stay as they are
    if (entries > p.s.entries) {
        if (threadIdx.x == 0) atomicOr(p.s.status, TABLE_FULL);
        return;
    }
    Entry* const table = p.call.table + p.bh(bh) * p.s.entries;
    for (int i = threadIdx.x; i < 2 * p.call.segments; i += TABLE_THREADS)
        p.call.role_after[p.group(bh * p.call.segments) * 2 + i] = -1;
    __syncthreads();  // no role is set before it is cleared
    list_pages(p, bh, layout, table);
    __syncthreads();  // a new page with what is left over comes before one that stays
    list_new(p, bh, layout, table);
    __syncthreads();  // the list is whole, and roles are known
    store_table(p, bh, entries, table);
    __syncthreads();  // the old number of entries has been read
    if (threadIdx.x == 0) set_open(p, bh), p.s.num_pages[bh] = entries;
}

// Brings the last pages of rung r to the places of its dropped ones, listed in `freed`, and gives back the
// slabs that become empty; returns the copies so far. All threads.
__device__ int close_pool(const Plan& p, int r, int first_dead, int dropped, int copies) {
    const LayerState& s = p.s;
    const u64 lists = (u64)p.layer * p.call.max_dropped + first_dead;
    const u32* freed = p.call.freed + lists;
    u32* const holes = p.call.holes + lists;
    u8* const beyond_end = p.call.beyond_end + lists;
    PageCopy* const copy = p.call.copies + (u64)p.layer * p.call.max_dropped;
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
    __shared__ TableLayout layout;
    __shared__ int dropped[CACHE_RUNGS], is_last;
    begin_early();
    const Plan p(call, blockIdx.y);
    PlanHead* const head = call.head + p.layer;
    if (find_layout(p, blockIdx.x, layout, dropped) > call.max_dropped) {
        if (threadIdx.x == 0) atomicOr(p.s.status, TABLE_FULL);
        return;
    }
    make_table(p, blockIdx.x, layout);
    __threadfence();  // the table and the list of dropped pages are there for the last block
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&head->tables, 1) == p.num_bh - 1;
    __syncthreads();  // all threads know whether this is the last block
    if (!is_last) return;
    __threadfence();  // what other blocks wrote is seen from here on
    int copies = 0, first = 0;
    for (int r = 0; r < p.s.num_rungs; ++r) {
        copies = close_pool(p, r, first, dropped[r], copies);
        first += dropped[r];
        __syncthreads();  // the count of free slabs is written
    }
    if (threadIdx.x == 0) {
        const u64 reserved = head->reserved;
        head->num_groups[1] = (int)(reserved >> 32);
        head->num_copies = copies;
        call.begins[1][(u64)p.layer * (call.max_dropped * PAGE + 1) + (reserved >> 32)] = (u32)reserved;
    }
}

// gate: BF16=0 registers<=64
