// What the kernels of a plan share: the call, its workspace, and how they go through the tokens of a group.
// The algorithm stands in kvlab/reference/cache_plan.py, in the same words.
#pragma once

#include "pages/state.cuh"

constexpr int KEYS = 256, RECENT = 253, SINK = 254, WINDOW = 255;
constexpr int TOKENS_PER_RECENT = 16;  // at most one in so many tokens is recent
enum Choice { BY_PRICE, UNIFORM, ON_HOST };
constexpr int MAX_LEVELS = CACHE_RUNGS + 1;
constexpr u8 DROPPED = 0x80;           // in PlanCall::after
constexpr int EXTRA = 1, COMPACT = 2;  // in PlanCall::extra

// Corners of the lower hull of (bytes, loss) up to a level: loss saved a byte, and the level of each.
struct Hull {
    float rate[CACHE_RUNGS];
    int level[CACHE_RUNGS];
    int edges;
};

// An entry of a page table.
struct alignas(8) Entry {
    u32 index;
    u16 base;
    u8 rung, count;
};

// Of one layer, between the kernels of a plan.
struct PlanHead {
    int num_groups[2], num_copies, tables;  // tables: of so many bh are made
    u64 reserved;                           // phase 1: moves, and in the upper half pages they go to
};

// Arrays of the workspace have the layer of the launch as their first axis. A group is (bh, segment); class
// c < num_rungs are the tokens stored at rung c, class num_rungs the new ones.
struct PlanCall {
    Hull hulls[MAX_LEVELS];  // of chunks that may rise to each level
    int cost[MAX_LEVELS];    // bytes of a page and its table entry; of level 0 none if it means eviction
    const LayerState* layers;
    const u8* codes;       // [num_bh][num_new]: importance of new tokens
    const u8* valid;       // [batch][num_new], or null
    const int* positions;  // [batch][num_new], or null: first_position, first_position + 1, ...
    u32* starts;           // [groups][classes][KEYS]: tokens of smaller keys
    int* tokens;           // [groups][classes]
    int* kinds;            // [groups][num_rungs][3]: pages that are full, partly filled, empty
    float* weight;         // [groups][chunks]
    int4* runs;  // [groups][classes]: chunks; those of the row before; where weights begin; tokens in chunks
    long long* bytes_left;  // [batch]: what chunks may take
    int* chosen;            // [groups][classes][levels]: chunks
    int* extra;  // [groups]: EXTRA if an empty page is to be held ready, COMPACT if chunks may be short
    int *new_pages, *first;  // [groups][num_rungs]: pages added, number of the first
    int *list,
        *sequence;  // [groups][num_rungs]: index of the first in the list of phase 0, of its first move
    u8* keys;       // [num_bh][entries][PAGE]: of tokens, by slot
    u16* stay;      // [num_bh][entries]: which slots hold tokens, then which of these stay in their rung
    u8* after;      // [num_bh][entries]: tokens that a page will hold, or DROPPED
    int *role, *role_after;  // [groups][2]: entry of the page with the left over, of the empty page; -1: none
    Entry* table;            // [num_bh][entries]: as it will be
    u32 *freed, *holes;  // [max_dropped]: numbers of dropped pages, by rung; those with a live page behind
    u8* beyond_end;      // [max_dropped]: whether a page that is beyond the end after the change is dropped
    PlanHead* head;      // [1]
    Move* moves[2];      // [max_new_pages * PAGE], [max_dropped * PAGE]
    u32* begins[2];      // [max_new_pages + 1], [max_dropped * PAGE + 1]
    PageCopy* copies;    // [max_dropped]
    long long fixed_bytes;
    u64 floor;  // what the weights of all tokens have more than their importance, in units of 2^-32
    int segments, chunks, max_new_pages, max_dropped;
    int num_new, first_position, sink, recent, lookahead, by_position, window, choice;
    int held;     // chunks of a row whose weights fit the shared memory of choose_rungs
    int cropped;  // pages may hold tokens at or beyond the end of their row, which are none
    int rewind;   // tokens that stay beyond those that a sliding window shows
};

// Pages that so many tokens fill; entries that so many pages take; free slots of the page that takes the next
// tokens, behind what is left over of new tokens, or of those at the top rung.
__device__ __forceinline__ int pages_of(int tokens) {
    return (tokens + PAGE - 1) / PAGE;
}
__device__ __forceinline__ int whole_quads(int entries) {
    return (entries + QUAD - 1) / QUAD * QUAD;
}
__device__ __forceinline__ int slots_behind(int of_new, int of_top) {
    const int left = of_new % PAGE ? of_new % PAGE : of_top % PAGE;
    return left ? PAGE - left : 0;
}

// The same, for the layer of this block.
struct Plan {
    const PlanCall& call;
    const LayerState& s;
    int layer, num_bh, groups, classes, levels, seqlen;
    int oldest;  // the first position that stays
    int recent;  // the first of the newest positions, which outweigh others

    __device__ __forceinline__ Plan(const PlanCall& c, int number)
        : call(c), s(c.layers[number]), layer(number) {
        num_bh = s.batch * s.heads;
        groups = num_bh * call.segments;
        classes = s.num_rungs + 1;
        levels = s.num_rungs + s.evicts;
        seqlen = call.num_new ? call.first_position + call.num_new : s.seqlen[0];
        recent = seqlen - min(call.recent, seqlen / TOKENS_PER_RECENT);
        oldest = s.sliding_window ? (int)(seqlen + 1ll - s.sliding_window - call.rewind) : 0;
    }
    __device__ __forceinline__ u64 group(int g) const { return (u64)layer * groups + g; }
    __device__ __forceinline__ u64 bh(int p) const { return (u64)layer * num_bh + p; }
    __device__ __forceinline__ int* tokens(int g) const { return call.tokens + group(g) * classes; }
    __device__ __forceinline__ int* kinds(int g, int r) const {
        return call.kinds + (group(g) * s.num_rungs + r) * 3;
    }
    __device__ __forceinline__ int* chosen(int g, int c) const {
        return call.chosen + (group(g) * classes + c) * levels;
    }
    __device__ __forceinline__ u64 at_rung(int g, int r) const { return group(g) * s.num_rungs + r; }
    // The level of the rung of a class, and the highest that its chunks may have.
    __device__ __forceinline__ int level_of(int c) const { return min(c + s.evicts, levels - 1); }
    __device__ __forceinline__ int ceiling(int c) const {
        return min(c + s.evicts, levels - 1 - (call.window > 0));
    }
    // Tokens of a class outside the window.
    __device__ __forceinline__ int movable(int g, int c) const {
        return call.starts[(group(g) * classes + c) * KEYS + WINDOW];
    }
    __device__ __forceinline__ int4& run(int g, int c) const { return call.runs[group(g) * classes + c]; }
    __device__ __forceinline__ bool is_compact(int g) const { return call.extra[group(g)] & COMPACT; }
    __device__ __forceinline__ bool has_extra(int g) const { return call.extra[group(g)] & EXTRA; }

    // Tokens of a class beside its chunks: those that fill none, and the window.
    __device__ __forceinline__ int left_over(int g, int c) const { return tokens(g)[c] - run(g, c).w; }
    // Tokens of a stored class that change their rung; pages that the others then fill.
    __device__ __forceinline__ int leaving(int g, int c) const {
        const int4 chunks = run(g, c);
        return min(PAGE * (chunks.x - chosen(g, c)[c + s.evicts]), chunks.w);
    }
    __device__ __forceinline__ int needed(int g, int r) const {
        return pages_of(tokens(g)[r] - leaving(g, r));
    }
    // Tokens of class c that go to new pages of rung r.
    __device__ __forceinline__ int moved(int g, int c, int r) const {
        const int* chunks = chosen(g, c);
        const int level = r + s.evicts;
        int found = PAGE * chunks[level];
        if (found && is_compact(g)) {
            int before = 0;
            for (int lower = 0; lower < level; ++lower) before += PAGE * chunks[lower];
            const int movable = run(g, c).w;
            found = min(before + found, movable) - min(before, movable);
        }
        return c == s.num_rungs && r == c - 1 ? found + left_over(g, c) : found;
    }
    __device__ __forceinline__ int pages(int g, int r) const {
        const int* k = kinds(g, r);
        return k[0] + k[1] + k[2];
    }
    // Those that keep their places in the pool; the others are dropped.
    __device__ __forceinline__ int pages_kept(int g, int r) const {
        return min(pages(g, r), needed(g, r) + (r == s.num_rungs - 1 && has_extra(g)));
    }
    // Entries of rung r before a plan, which stand together.
    __device__ __forceinline__ int entries_before(int bh, int r) const {
        int found = 0;
        for (int i = 0; i < call.segments; ++i) found += pages(bh * call.segments + i, r);
        return whole_quads(found);
    }
    // Pages of a bh that plans see: none of a row whose tokens wait.
    __device__ __forceinline__ int num_pages(int bh) const {
        return s.waits[bh / s.heads] ? 0 : s.num_pages[bh];
    }
    // How many of the next tokens lie in a segment; free slots of the page they go to.
    __device__ __forceinline__ int to_come(int segment) const {
        const long long from = (long long)segment << 16, end = from + 65536;
        return (int)max(0ll, min(end, (long long)seqlen + call.lookahead) - max(from, (long long)seqlen));
    }
    __device__ __forceinline__ int slots_left(int g) const {
        return slots_behind(left_over(g, s.num_rungs), left_over(g, s.num_rungs - 1));
    }
    __device__ __forceinline__ bool extra_is_new(int g) const {
        const int top = s.num_rungs - 1;
        return has_extra(g) && pages(g, top) <= needed(g, top);
    }
    // The number of a page, from its address.
    __device__ __forceinline__ u32 number_of(int r, u32 address) const {
        const u32 slab = address / (u32)s.slab_units;
        return s.slab_slot[slab] * s.rungs[r].per_slab + (address - slab * s.slab_units) / s.rungs[r].record;
    }
    // Where the window begins for pages of a rung, and for new tokens.
    __device__ __forceinline__ int window_of(int r) const {
        return seqlen - (r >= s.num_rungs - 1 ? call.window : 0);
    }
    // Whether pages may hold tokens that are none any more.
    __device__ __forceinline__ bool drops() const { return call.cropped || s.sliding_window; }
    // Whether all tokens of pages stay, and there is no residual window.
    __device__ __forceinline__ bool is_plain() const { return !drops() && !call.window; }
    // What tokens are ordered by, those from position `window` on last; -1 for those beyond either end.
    // PLAIN: there are none of either.
    template <bool PLAIN = false>
    __device__ __forceinline__ int key(u32 code, int position, int window) const {
        if (!PLAIN && position < oldest) return -1;
        if (!PLAIN && position >= window) return position < seqlen ? WINDOW : -1;
        if (call.by_position) code = encode_importance(__fdiv_rn(1.f, (float)(seqlen - position)));
        const int k = position >= recent ? RECENT : min((int)code, RECENT - 1);
        return position < call.sink ? SINK : k;
    }
};

__device__ __forceinline__ u32 lanes_below(int lane) {
    return (1u << lane) - 1;
}

// The exclusive sum over the threads of a block, and the total; all threads.
template <int THREADS, class T>
__device__ __forceinline__ T block_scan(T x, T& total) {
    constexpr int WARPS_OF_BLOCK = THREADS / 32;
    __shared__ T sums[WARPS_OF_BLOCK];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto sum_to_lane = [&](T x, int lanes) {
#pragma unroll
        for (int bit = 1; bit < lanes; bit *= 2) {
            const T lower = __shfl_up_sync(ALL_LANES, x, bit);
            x += lane >= bit ? lower : 0;
        }
        return x;
    };
    const T sum = sum_to_lane(x, 32);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();  // the sums of all warps are there
    const T upto = sum_to_lane(lane < WARPS_OF_BLOCK ? sums[lane] : 0, WARPS_OF_BLOCK);
    total = __shfl_sync(ALL_LANES, upto, WARPS_OF_BLOCK - 1);
    const T before = warp ? __shfl_sync(ALL_LANES, upto, warp - 1) : 0;
    __syncthreads();  // they may be written again
    return before + sum - x;
}

// What a lane knows of an entry: whether it has a page, of which rung, how many tokens, where.
struct PageOfLane {
    bool there;
    int rung, count;
    u32 address;
};

__device__ __forceinline__ PageOfLane page_at(const Plan& p, int bh, int segment, int entry, int end) {
    const u64 at = (u64)bh * p.s.entries + min(entry, end - 1);
    const u32 address = p.s.index[at];  // all are asked for at once
    const int base = p.s.base[at], rung = p.s.rung[at], count = p.s.count[at];
    const bool there = entry < end && address != NO_PAGE && base == segment;
    return {there, there ? rung : 0, there ? count : 0, address};
}

// Two of the pages of a quad of entries as half a warp sees them: the key of slot lane % 16 of each, -1 where
// no token is.
struct PairOfPages {
    int entry[2];  // or -1
    u32 address[2];
    int key[2];
};

// Goes through the pages of a bh and segment at entries [begin, end), one warp. on_batch(entry, mine, count)
// is called for 32 entries at once, then on_quad for every four of them with any that are mine: lanes 0 to 15
// see the first and the third, lanes 16 to 31 the others.
template <class OnBatch, class OnQuad>
__device__ __forceinline__ void visit_pages(const Plan& p, int bh, int segment, int begin, int end,
                                            bool with_keys, OnBatch on_batch, OnQuad on_quad) {
    constexpr int AT_ONCE = 2;  // quads
    const int lane = threadIdx.x % 32, slot = lane % PAGE;
    const u16* const stay = p.call.stay + p.bh(bh) * p.s.entries;
    const u8* const keys = p.call.keys + p.bh(bh) * p.s.entries * PAGE + slot;
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
        const PageOfLane page = page_at(p, bh, segment, first + lane, end);
        on_batch(first + lane, page.there, page.count);
        const u32 todo = __ballot_sync(ALL_LANES, page.there && with_keys);
#pragma unroll 1
        for (int start = 0; start < 32; start += QUAD * AT_ONCE) {
            if (!(todo >> start & (1u << QUAD * AT_ONCE) - 1)) continue;
            const auto source_of = [&](int i, int j) { return start + QUAD * i + 2 * j + lane / PAGE; };
            PairOfPages pages[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int source = source_of(i, j);
                    pages[i].key[j] = -1;
                    if (todo >> source & 1 && stay[first + source] >> slot & 1)
                        pages[i].key[j] = keys[(first + source) * PAGE];
                }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int source = source_of(i, j);
                    pages[i].address[j] = __shfl_sync(ALL_LANES, page.address, source);
                    pages[i].entry[j] = todo >> source & 1 ? first + source : -1;
                }
                on_quad(pages[i]);
            }
        }
    }
}

// The key of new token `i` of a bh, or -1 if it is padding, does not exist or is of another segment.
__device__ __forceinline__ int new_key(const Plan& p, int bh, int segment, int i) {
    if (i >= p.call.num_new) return -1;
    const u64 at = (u64)(bh / p.s.heads) * p.call.num_new + i;
    const int position = p.call.positions ? p.call.positions[at] : p.call.first_position + i;
    if (position >> 16 != segment) return -1;
    if (p.call.valid && !p.call.valid[at]) return -1;
    return p.key(p.call.codes[(u64)bh * p.call.num_new + i], position, p.window_of(p.s.num_rungs));
}

// New page `j` of rung r of a group that gets `pages` with tokens: how many, and those of the pages before.
struct NewPage {
    int tokens, before;
};

__device__ __forceinline__ NewPage new_page(const Plan& p, int g, int r, int j, int pages) {
    if (!p.is_compact(g)) {
        const int left = r == p.s.num_rungs - 1 ? p.left_over(g, p.s.num_rungs) % PAGE : 0;
        return {j >= pages ? 0 : j == pages - 1 && left ? left : PAGE, j * PAGE};
    }
    int before = 0;
    for (int c = 0; c < p.classes; ++c) {
        const int tokens = c == r ? 0 : p.moved(g, c, r);
        if (j < pages_of(tokens)) return {min(PAGE, tokens - j * PAGE), before + j * PAGE};
        j -= pages_of(tokens);
        before += tokens;
    }
    return {0, before};
}
