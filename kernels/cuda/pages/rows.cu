// Rows of a cache take over the pages of other rows: beam search, other batches, copies, growth, files.
//
// Row i of the layers `to` becomes row rows[i] of the layers `from`. In place, `from` are the same layers
// with copies of their tables, and a row that is wanted keeps its pages: origins[i] is -1 then. Other rows
// get a copy of the pages of row origins[i] of the layers `sources`, where nobody holds pages.
//
// take_rows     grid (1, layers): a block counts the pages of each rung that are wanted. Kept pages beyond
//               that number move to free numbers below it (move_kept carries it out), so that numbers have no
//               gaps; then slabs are given back and taken, and a warp writes the table of a (row, KV head),
//               or a part of it where there are fewer than warps. Shared: 5 KB.
// move_kept     grid (blocks, layers): a warp copies a page.
// gather_pages  grid (blocks, layers): a warp copies 16 pages, and those of tokens that wait, which have
//               fixed pages, from `from`. Two rows that get the same pages have them read once.
// clear_free    grid (blocks, layers): a block writes zeros over a slab without pages, or over the rest of
// one.
#include "common/pairs.cuh"
#include "pages/codes.cuh"
#include "pages/copies.cuh"

constexpr int TABLE_THREADS = 1024, TABLE_WARPS = TABLE_THREADS / 32, THREADS = 256;
constexpr int RUN = 16;  // pages that a warp copies, one after the other

struct Rows {
    const LayerState *from, *to, *sources;
    const int* rows;         // [batch of `to`]
    const int* origins;      // [batch of `to`]
    const int* kept;         // [batch of `from`]: whether a row keeps its pages
    u32* free_numbers;       // [layers][capacity]: numbers that are free, rung by rung
    PageCopy* copies;        // [layers][capacity]: kept pages that move
    int* num_copies;         // [layers]
    const int* copied_rows;  // [num_copied_rows]: 2 * row, and 1 more if the next row gets the same pages
    int capacity, head_dim, num_copied_rows;
};

// The exclusive number of threads before this one for which `mine` holds, and of all; all threads.
__device__ __forceinline__ int count_before(bool mine, int& all) {
    __shared__ int counts[TABLE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 votes = __ballot_sync(ALL_LANES, mine);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();  // the counts of all warps are there
    const int count = counts[lane], before = __reduce_add_sync(ALL_LANES, lane < warp ? count : 0);
    all = __reduce_add_sync(ALL_LANES, count);
    __syncthreads();  // they may be written again
    return before + __popc(votes & ((1u << lane) - 1));
}

// What a lane sees of AT_ONCE entries of a table, 32 apart: those behind the end, and fillers, have no page.
constexpr int AT_ONCE = 4;  // loads on their way
struct Entries {
    int first, end;
    u32 address[AT_ONCE];
    int rung[AT_ONCE], rank[AT_ONCE];  // rank: the number of its page among those of its rung

    __device__ __forceinline__ bool exists(int j) const { return first + 32 * j < end; }
    __device__ __forceinline__ bool has_page(int j) const { return address[j] != NO_PAGE; }
};

// Calls on_entries for all entries of a part of a table, one warp: ranks count on from counts[rung].
template <class OnEntries>
__device__ __forceinline__ void visit_table(const LayerState& s, int bh, int part, int parts, int* counts,
                                            OnEntries on_entries) {
    const int lane = threadIdx.x % 32, entries = s.num_pages[bh];
    const int each = (entries + 32 * parts - 1) / (32 * parts) * 32, begin = part * each;
    const u64 table = (u64)bh * s.entries;
    Entries of;
    of.end = min(entries, begin + each);
#pragma unroll 1
    for (of.first = begin + lane; of.first - lane < of.end; of.first += 32 * AT_ONCE) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const u64 at = table + of.first + 32 * j;
            of.address[j] = of.exists(j) ? s.index[at] : NO_PAGE;
            of.rung[j] = of.exists(j) ? s.rung[at] : 255;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int r = of.has_page(j) ? of.rung[j] : 255;
            const u32 same = __match_any_sync(ALL_LANES, r), below = same & ((1u << lane) - 1);
            of.rank[j] = of.has_page(j) ? counts[r] + __popc(below) : 0;
            __syncwarp();  // all lanes have read the counters
            if (of.has_page(j) && below == 0) counts[r] += __popc(same);
            __syncwarp();  // and the next 32 entries find them raised
        }
        on_entries(of);
    }
}

// Finds the free numbers of a rung below `want`, and moves kept pages with numbers beyond to the first of
// them; returns how many pages move. All threads.
__device__ int close_rung(const Rows& call, const LayerState& f, const LayerState& s, int r, int want,
                          u32* free_numbers, PageCopy* copies) {
    const u32 row_entries = (u32)(f.heads * f.entries);
    const u32* const entry_of = s.entry_of + (u64)r * s.max_pages;
    const int used = s.used[r];
    const auto is_kept = [&](int number) {
        return number < used && call.kept[entry_of[number] / row_entries];
    };
    int found = 0, moved = 0, all;
    for (int first = 0; first < want; first += TABLE_THREADS) {
        const int number = first + threadIdx.x;
        const bool free = number < want && !is_kept(number);
        const int at = found + count_before(free, all);
        if (free) free_numbers[at] = number;
        found += all;
    }
    for (int first = want; first < used; first += TABLE_THREADS) {
        const int number = first + threadIdx.x;
        const bool moves = is_kept(number);
        const int at = moved + count_before(moves, all);
        if (moves) {
            const u32 address = page_address(s, r, free_numbers[at]);
            copies[at] = {page_address(s, r, number), address, s.rungs[r].record, 0};
            f.index[entry_of[number]] = address;
        }
        moved += all;
    }
    return moved;
}

// Gives back the slabs that rungs do not need any more and takes those they do; all threads.
__device__ void exchange_slabs(const LayerState& s, const int* want) {
    int num_free = s.num_free[0];
    const auto slabs_of = [&](int r) {
        const int per_slab = s.rungs[r].per_slab;
        return (want[r] + per_slab - 1) / per_slab;
    };
    __syncthreads();  // addresses of pages that move are known, and the count of free slabs
    for (int r = 0; r < s.num_rungs; ++r) {
        const int held = s.slab_count[r], slabs = slabs_of(r);
        for (int i = slabs + threadIdx.x; i < held; i += TABLE_THREADS)
            s.free_slabs[num_free + i - slabs] = s.slabs[r * s.max_slabs + i];
        num_free += max(0, held - slabs);
    }
    __syncthreads();  // all free slabs are on the stack
    for (int r = 0; r < s.num_rungs; ++r) {
        const int held = s.slab_count[r], slabs = slabs_of(r);
        for (int i = held + threadIdx.x; i < slabs; i += TABLE_THREADS) {
            const int slab = s.free_slabs[num_free - 1 - (i - held)];
            s.slabs[r * s.max_slabs + i] = slab;
            s.slab_slot[slab] = i;
        }
        num_free -= max(0, slabs - held);
    }
    __syncthreads();  // counts of slabs have been read
    for (int r = threadIdx.x; r < s.num_rungs; r += TABLE_THREADS) {
        s.slab_count[r] = slabs_of(r);
        s.used[r] = want[r];
    }
    if (threadIdx.x == 0) s.num_free[0] = num_free;
}

extern "C" __global__ void __launch_bounds__(TABLE_THREADS, 1) take_rows(const __grid_constant__ Rows call) {
    __shared__ int counts[TABLE_WARPS][CACHE_RUNGS + 1], want[CACHE_RUNGS], next[CACHE_RUNGS];
    const LayerState &f = call.from[blockIdx.y], &s = call.to[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all_bh = s.batch * s.heads;
    const int parts = max(1, TABLE_WARPS / max(1, all_bh));  // of a table, a warp each
    u32* const free_numbers = call.free_numbers + (u64)blockIdx.y * call.capacity;
    PageCopy* const copies = call.copies + (u64)blockIdx.y * call.capacity;
    const auto source_of = [&](int bh) { return call.rows[bh / s.heads] * s.heads + bh % s.heads; };
    const auto nothing = [](const Entries&) {};

    if (threadIdx.x < CACHE_RUNGS) want[threadIdx.x] = 0;
    if (lane <= CACHE_RUNGS) counts[warp][lane] = 0;
    __syncthreads();  // counters are zero
    for (int n = warp; n < all_bh * parts; n += TABLE_WARPS) {
        const int bh = n / parts;
        if (!f.waits[call.rows[bh / s.heads]])
            visit_table(f, source_of(bh), n % parts, parts, counts[warp], nothing);
    }
    if (lane < s.num_rungs) atomicAdd(&want[lane], counts[warp][lane]);
    __syncthreads();  // all pages are counted

    int moved = 0, first_free = 0;
    for (int r = 0; r < s.num_rungs; ++r) {
        const int own = close_rung(call, f, s, r, want[r], free_numbers + first_free, copies + moved);
        if (threadIdx.x == 0) next[r] = first_free + own;
        first_free += want[r];
        moved += own;
    }
    if (threadIdx.x == 0) call.num_copies[blockIdx.y] = moved;
    exchange_slabs(s, want);

#pragma unroll 1
    for (int first = 0; first < all_bh * parts; first += TABLE_WARPS) {
        const int n = first + warp, bh = n / parts, part = n % parts, row = bh / s.heads;
        const bool there = bh < all_bh, waits = there && f.waits[call.rows[row]];
        const bool copied = there && !waits && call.origins[row] >= 0;
        __syncthreads();  // numbers of the tables before are taken, slabs known, and counters free
        if (lane <= CACHE_RUNGS) counts[warp][lane] = 0;
        __syncwarp();  // the counters are zero
        if (copied) visit_table(f, source_of(bh), part, parts, counts[warp], nothing);
        __syncthreads();  // the pages of all warps are counted
        if (threadIdx.x < s.num_rungs) {
            int position = next[threadIdx.x];
            for (int w = 0; w < TABLE_WARPS; ++w) {
                const int own = counts[w][threadIdx.x];
                counts[w][threadIdx.x] = position;
                position += own;
            }
            next[threadIdx.x] = position;
        }
        __syncthreads();  // every warp has its numbers
        if (!there) continue;
        const int source = source_of(bh);
        const u64 from = (u64)source * f.entries, to = (u64)bh * s.entries;
        visit_table(f, source, part, parts, counts[warp], [&](const Entries& of) {
            u32 address[AT_ONCE], slot[AT_ONCE];
            u16 base[AT_ONCE];
            u8 count[AT_ONCE];
            // Loads of all entries first: stores between them would make each wait.
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int entry = of.first + 32 * j;
                address[j] = of.address[j];
                count[j] = of.exists(j) ? f.count[from + entry] : 0;
                base[j] = of.exists(j) ? f.base[from + entry] : 0;
                if (!of.has_page(j)) continue;
                if (waits) {
                    const u64 page = (u64)(bh * WAITING_PAGES + entry) * s.rungs[of.rung[j]].record;
                    address[j] = (u32)((s.waiting - s.arena) / UNIT + page);
                } else if (copied) {
                    address[j] = page_address(s, of.rung[j], free_numbers[of.rank[j]]);
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                slot[j] = of.has_page(j) && !waits ? s.slab_slot[address[j] / (u32)s.slab_units] : 0;
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (!of.exists(j)) continue;
                const u64 at = to + of.first + 32 * j;
                const int r = of.rung[j];
                s.rung[at] = (u8)r, s.count[at] = count[j], s.base[at] = base[j], s.index[at] = address[j];
                if (waits || !of.has_page(j)) continue;
                const u32 number =
                    slot[j] * s.rungs[r].per_slab + address[j] % (u32)s.slab_units / s.rungs[r].record;
                s.entry_of[(u64)r * s.max_pages + number] = (u32)at;
            }
        });
        if (part) continue;
        for (int i = lane; i < call.head_dim; i += 32) {
            const u64 to = (u64)bh * call.head_dim + i, from = (u64)source * call.head_dim + i;
            s.k_mean[to] = f.k_mean[from], s.query_sums[to] = f.query_sums[from];
        }
        for (int i = lane; i < call.head_dim / 2; i += 32) {
            const u64 to = (u64)bh * call.head_dim / 2 + i, from = (u64)source * call.head_dim / 2 + i;
            s.k_shift[to] = f.k_shift[from];
#if IN_BLOCKS
            s.k_order[to] = f.k_order[from], s.k_ratio[to] = f.k_ratio[from];
#endif
        }
#if IN_BLOCKS
        if (lane < KEY_BLOCKS) s.k_gain[KEY_BLOCKS * bh + lane] = f.k_gain[KEY_BLOCKS * source + lane];
#endif
        if (lane < 2) s.exponent[2 * bh + lane] = f.exponent[2 * source + lane];
        if (lane < OPEN_PAGES) s.open[bh * OPEN_PAGES + lane] = f.open[source * OPEN_PAGES + lane];
        if (lane == 0) {
            s.num_pages[bh] = f.num_pages[source];
            s.seqlen[bh] = f.seqlen[source];
            if (bh % s.heads == 0) s.waits[row] = waits;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) move_kept(const __grid_constant__ Rows call) {
    copy_listed<THREADS>(call.to[blockIdx.y].arena, call.copies + (u64)blockIdx.y * call.capacity,
                         call.num_copies[blockIdx.y]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) gather_pages(const __grid_constant__ Rows call) {
    const LayerState &f = call.from[blockIdx.y], &s = call.to[blockIdx.y], &o = call.sources[blockIdx.y];
    const int warps = gridDim.x * (THREADS / 32), lane = threadIdx.x % 32;
    const u32 copied = call.num_copied_rows, of_head = (s.entries + RUN - 1) / RUN * copied,
              all = s.heads * of_head;
#pragma unroll 1
    for (u32 n = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; n < all; n += warps) {
        // Rows go fastest: those that get the same pages read them at about the same time, from L2 but once.
        const int head = n / of_head, entry = (n - head * of_head) / copied * RUN + lane;
        const int copied_row = call.copied_rows[n % copied], row = copied_row >> 1;
        const int bh = row * s.heads + head, origin = s.waits[row] ? call.rows[row] : call.origins[row];
        const u64 i = (u64)bh * s.entries + entry;
        const bool waits = s.waits[row], is_page = lane < RUN && origin >= 0 && entry < s.num_pages[bh];
        u32 units = 0, from = 0, to = 0, second = NO_PAGE;
        if (is_page && (waits ? s.index[i] != NO_PAGE : s.count[i] > 0)) {
            const int source = origin * s.heads + head;
            units = s.rungs[s.rung[i]].record;
            from =
                waits ? (source * WAITING_PAGES + entry) * units : o.index[(u64)source * o.entries + entry];
            to = s.index[i];
            if (copied_row & 1) second = s.index[i + (u64)s.heads * s.entries];
        }
        const u8* const sources = waits ? f.waiting : o.arena;
        for (int page = 0; page < RUN; ++page) {
            const u32 record = __shfl_sync(ALL_LANES, units, page);
            const u64 here = __shfl_sync(ALL_LANES, to, page), there = __shfl_sync(ALL_LANES, from, page);
            const u32 again = __shfl_sync(ALL_LANES, second, page);
            u8* const twice = again == NO_PAGE ? nullptr : s.arena + (u64)again * UNIT;
            // 64 registers hold 7 units.
            copy_page<7>(s.arena + here * UNIT, sources + there * UNIT, record, twice);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) clear_free(const __grid_constant__ Rows call) {
    const LayerState& s = call.to[blockIdx.y];
    const int num_free = s.num_free[0];
#pragma unroll 1
    for (int i = blockIdx.x; i < num_free + s.num_rungs; i += gridDim.x) {
        u32 slab = 0, begin = 0;
        if (i < num_free) {
            slab = s.free_slabs[i];
        } else {
            const int r = i - num_free, per_slab = s.rungs[r].per_slab, used = s.used[r];
            if (used == 0) continue;
            slab = s.slabs[r * s.max_slabs + (used - 1) / per_slab];
            begin = ((used - 1) % per_slab + 1) * s.rungs[r].record;
        }
        uint4* const to = (uint4*)(s.arena + (u64)slab * s.slab_units * UNIT);
        for (u32 unit = begin + threadIdx.x; unit < s.slab_units; unit += THREADS) to[unit] = uint4{};
    }
}

// gate: BF16=0 registers<=64
// gate: BF16=0 IN_BLOCKS=1 registers<=64 arch=sm_90a,sm_100a,sm_120a
