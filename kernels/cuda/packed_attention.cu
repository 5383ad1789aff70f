// Decode attention over packed pages of mixed widths, in one launch.
//
// A sequence is what shares a list of pages and fits the 8 columns of an mma tile: one (row, KV head) and up
// to 8 query rows (query position, head of the group). The pages of all sequences form one list.
//
// Threads and data
//   grid   persistent: CTA b takes the pages [T b / grid, T (b + 1) / grid) of the list. With several rungs
//          a sequence's list runs down the columns of a matrix whose rows are its table, page by page, so
//          every CTA sees the same mixture, however the table is sorted.
//   warp   pages begin + warp, + WARPS, ... through a ring of slots of its own in shared memory, filled by
//          bulk copies that lane 0 issues; warps meet only where a sequence begins or ends. A page is one
//          item of the ring, or, if it is large, K and V are, in two halves each at width 16.
//   lane   g = lane / 4, u = lane % 4 of mma.m16n8k16: A = K tile (tokens x channels) or V^T tile (channels x
//          tokens), B = q^T or P, C = scores (tokens x rows) or out^T (channels x rows), columns 2u, 2u + 1.
//          Lane group g owns slots 8 g to 8 g + 7 of a page.
//
// Scores are base 2. K and V below width 16 are rotated; so q is rotated where a sequence begins, and out
// where it ends. Pages of raw V turn the accumulators into their frame and back: the rotation is its own
// inverse. Partial results meet twice: those of warps in shared memory, those of CTAs in `partial`, where the
// last one to arrive at a sequence adds all in a fixed order.
//
// Memory: shared WARPS * stages * slot_bytes (ring) + WARPS * min(rows, 4) * (HEAD_DIM + 2) * 4 (merge);
// registers at head_dim 128: 32 out, 16 q, 16 scores, 8 steps, and what is being expanded.
//
// Macros: HEAD_DIM; BF16; WIDTHS_K, WIDTHS_V: which widths occur, as a sum of 1 (2 bits), 2 (3 bits), 4 (4
// bits), 8 (8 bits), 16 (16 bits); WARPS; SOFTCAP; KEEP_SCORES.
//
// clang-format off
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=31 WIDTHS_V=31 WARPS=12 SOFTCAP=0 KEEP_SCORES=0 registers<=168 arch=sm_90a,sm_100a,sm_120a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=1,4 WIDTHS_V=1,4 WARPS=12 SOFTCAP=0 KEEP_SCORES=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=80,96 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=12 SOFTCAP=1 KEEP_SCORES=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 KEEP_SCORES=0 registers<=255 arch=sm_90a
// clang-format on
#include <cuda_fp16.h>
#include "packed_codes.cuh"
#include "packed_join.cuh"

constexpr int MAX_STAGES = 8, MAX_RUNGS = 16;
constexpr int CODED = 15, RAW = 16;  // which bits of WIDTHS_K and WIDTHS_V
constexpr bool MAY_BE_ONE = (WIDTHS_K & 7) && (WIDTHS_V & 7), ALL_ARE_ONE = (WIDTHS_K | WIDTHS_V) <= 7;
constexpr float LN2 = 0.69314718056f, LOG2E = 1.44269504089f;
#define INFINITE __int_as_float(0x7f800000)
constexpr float SLACK = BF16 ? 8.f : 0.f;  // how far the running maximum may lag; float16 has no room for it

struct Rung {
    const u8* pool;
    u32 record;
    u16 bits_k, bits_v;
};

struct Call {
    Rung rungs[MAX_RUNGS];
    const u8* rung;        // [pairs, entries]
    const u8* count;       // [pairs, entries]
    const u32* index;      // [pairs, entries]
    const int* num_pages;  // [pairs]
    const __half* k_mean;  // [pairs, HEAD_DIM]
    const u16* q;          // [batch, seqlen_q, heads_q, HEAD_DIM] by strides
    u16* out;              // [batch, seqlen_q, heads_q, HEAD_DIM]
    float* lse;            // [batch, heads_q, seqlen_q]
    float* partial;        // [grid + sequences, 8, ROW_FLOATS]: sum of p v, maximum, sum of p
    u32* arrivals;         // [sequences], zero between calls
    float* scores;         // [pairs, entries, kept, 64]
    long long q_batch, q_position, q_head;    // strides of q in elements
    int pairs, heads_kv, entries, num_rungs;  // pair = (batch row, KV head)
    int rows, group, kept;  // rows = seqlen_q * group; the last `kept` of them have their scores kept
    int slot_bytes, stages;
    float scale, softcap;
};

struct Sequence {
    int number, pair, first_row, rows;  // of all sequences; its (row, KV head); its query rows
};

__device__ __forceinline__ Sequence sequence_at(const Call& call, u32 number) {
    const u32 blocks = (call.rows + 7u) / 8u, pair = blocks == 1 ? number : number / blocks;
    const int first = 8 * (number - pair * blocks);
    return {(int)number, (int)pair, first, min(8, call.rows - first)};
}

// Where a query row of a sequence is, in elements: of `q` by strides, else of contiguous arrays.
struct Place {
    u32 batch, position, head;
};

__device__ __forceinline__ Place place_of(const Call& call, const Sequence& s, u32 row) {
    const u32 r = s.first_row + row, position = r / (u32)call.group, batch = s.pair / (u32)call.heads_kv;
    return {batch, position, (s.pair - batch * call.heads_kv) * call.group + r - position * call.group};
}

__device__ __forceinline__ const u16* q_row(const Call& call, const Sequence& s, int row) {
    const Place p = place_of(call, s, row);
    return call.q + p.batch * call.q_batch + p.position * call.q_position + p.head * call.q_head;
}

// ---- Queries

// Brings the query rows of a sequence into the frame of coded keys, scaled: rows [8][ROW_FLOATS] of q, and
// behind each the sum of its elements in 16 bits and what the mean of the keys adds to its scores. One warp a
// row.
__device__ __forceinline__ void rotate_queries(const Call& call, const Sequence& s, float* rows, int lane) {
    for (int row = threadIdx.x / 32; row < s.rows; row += WARPS) {
        const u32* q = (const u32*)q_row(call, s, row);
        const __half2* mean = (const __half2*)(call.k_mean + (u64)s.pair * HEAD_DIM);
        float* x = rows + row * ROW_FLOATS;
        float bias = 0.f, sum = 0.f;
        for (int i = lane; i < HEAD_DIM / 2; i += 32) {
            const float2 pair = unpack_pair(q[i]), m = __half22float2(mean[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
            bias += pair.x * m.x + pair.y * m.y;
        }
        __syncwarp();  // the row is in shared memory
        hadamard_row(x, lane);
        const float unit = call.scale * LOG2E;
        for (int i = lane; i < HEAD_DIM / 2; i += 32) {
            const float2 rounded =
                unpack_pair(pack_pair(x[2 * i] * (NORM * unit), x[2 * i + 1] * (NORM * unit)));
            x[2 * i] = rounded.x;
            x[2 * i + 1] = rounded.y;
            sum += rounded.x + rounded.y;
        }
#pragma unroll 1
        for (int bit = 1; bit < 32; bit *= 2) {
            bias += __shfl_xor_sync(ALL_LANES, bias, bit);
            sum += __shfl_xor_sync(ALL_LANES, sum, bit);
        }
        if (lane == 0) {
            x[HEAD_DIM] = sum;
            x[HEAD_DIM + 1] = bias * unit;
        }
    }
}

struct Query {
    u32 rotated[TILES_D][2];         // B fragments
    float sum0, sum1, bias0, bias1;  // of rows 2u, 2u + 1
};

// Rows beyond the last repeat it; their results go nowhere.
__device__ __forceinline__ void load_query(const float* rows, int row_count, int lane, Query& query) {
    const int u = lane % 4;
    const float* x = rows + min(lane / 4, row_count - 1) * ROW_FLOATS + 2 * u;
#pragma unroll
    for (int i = 0; i < 2 * TILES_D; ++i) query.rotated[i / 2][i % 2] = pack_pair(x[8 * i], x[8 * i + 1]);
    const float* row0 = rows + min(2 * u, row_count - 1) * ROW_FLOATS + HEAD_DIM;
    const float* row1 = rows + min(2 * u + 1, row_count - 1) * ROW_FLOATS + HEAD_DIM;
    query.sum0 = row0[0], query.sum1 = row1[0];
    query.bias0 = row0[1], query.bias1 = row1[1];
}

// ---- One page

// Scores of coded keys: slot 8 g + i of rows 2u, 2u + 1 at s[i / 2][2 (i % 2)] and the one after it.
template <int BITS>
__device__ __forceinline__ void coded_scores(const u8* codes, const u8* steps, const Query& query,
                                             float (&s)[4][4], int lane) {
    constexpr bool FOLD = BF16 && BITS < 8;  // the magic number of unshifted codes is taken out of the sum
    constexpr float LOW = FOLD ? 128.f + (1 << Fields<BITS>::LOW) * ((1 << BITS) - 1) * .5f : 0.f;
    constexpr float HIGH = FOLD ? 128.f + (1 << Fields<BITS>::HIGH) * ((1 << BITS) - 1) * .5f : 0.f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        s[b][0] = -LOW * query.sum0;
        s[b][1] = -LOW * query.sum1;
        s[b][2] = -HIGH * query.sum0;
        s[b][3] = -HIGH * query.sum1;
    }
    constexpr int PER_BLOCK = TILES_D % Fields<BITS>::TILES ? 0 : TILES_D / Fields<BITS>::TILES;
    for_each_tile<BITS, FOLD, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return PER_BLOCK ? i % 4 * PER_BLOCK + i / 4 : i; },
        [&](int tile, const u32(&a)[4]) {
            mma(s[tile / TILES_D], a, query.rotated[tile % TILES_D][0], query.rotated[tile % TILES_D][1]);
        });
    float step[8];
    load_steps(steps, lane / 4, step);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float factor =
            FOLD && i % 2 ? step[i] * (1.f / (1 << (Fields<BITS>::HIGH - Fields<BITS>::LOW))) : step[i];
        s[i / 2][2 * (i % 2)] = fmaf(s[i / 2][2 * (i % 2)], factor, query.bias0);
        s[i / 2][2 * (i % 2) + 1] = fmaf(s[i / 2][2 * (i % 2) + 1], factor, query.bias1);
    }
}

// Scores of token blocks 2 HALF and 2 HALF + 1 of raw keys; q comes from the first-level cache.
template <int HALF>
__device__ __forceinline__ void raw_scores(const u8* keys, const u16* row, float unit, float (&s)[4][4],
                                           int lane) {
#pragma unroll
    for (int b = 2 * HALF; b < 2 * HALF + 2; ++b) s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
    for_each_tile<16, false, 2 * HALF * TILES_D, 2 * TILES_D>(
        keys, lane, [](int i) { return i % 2 * TILES_D + i / 2; },
        [&](int tile, const u32(&a)[4]) {
            const int at = 8 * (tile % TILES_D) + lane % 4;
            mma(s[tile / TILES_D], a, __ldg((const u32*)row + at), __ldg((const u32*)row + at + 4));
        });
#pragma unroll
    for (int b = 2 * HALF; b < 2 * HALF + 2; ++b) {
#pragma unroll
        for (int r = 0; r < 4; ++r) s[b][r] *= unit;
    }
}

// Softmax: scores become probabilities relative to the running maximum, and the state's sums follow.
__device__ __forceinline__ void probabilities(float (&s)[4][4], State& state) {
    float max0 = s[0][0], max1 = s[0][1];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        max0 = fmaxf(max0, s[i / 2][2 * (i % 2)]);
        max1 = fmaxf(max1, s[i / 2][2 * (i % 2) + 1]);
    }
    if (__any_sync(ALL_LANES, max0 > state.max0 + SLACK || max1 > state.max1 + SLACK)) {
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
            max0 = fmaxf(max0, __shfl_xor_sync(ALL_LANES, max0, bit));
            max1 = fmaxf(max1, __shfl_xor_sync(ALL_LANES, max1, bit));
        }
        max0 = fmaxf(max0, state.max0);
        max1 = fmaxf(max1, state.max1);
        const float f0 = power_of_2(state.max0 - max0), f1 = power_of_2(state.max1 - max1);
        state.max0 = max0;
        state.max1 = max1;
        state.sum0 *= f0;
        state.sum1 *= f1;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            state.out[i][0] *= f0;
            state.out[i][1] *= f1;
            state.out[i][2] *= f0;
            state.out[i][3] *= f1;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float &p0 = s[i / 2][2 * (i % 2)], &p1 = s[i / 2][2 * (i % 2) + 1];
        p0 = power_of_2(p0 - state.max0);
        p1 = power_of_2(p1 - state.max1);
        state.sum0 += p0;
        state.sum1 += p1;
    }
}

// Probabilities, times the steps of V if there are any, as B fragments.
template <bool STEPS>
__device__ __forceinline__ void fragments_of(const float (&s)[4][4], const u8* steps, int count,
                                             u32 (&p)[4][2], int lane) {
    float step[8];
    if (STEPS) {
        load_steps(steps, lane / 4, step);
        if (count < 64) {  // a step of an unused slot may be NaN
#pragma unroll
            for (int i = 0; i < 8; ++i) step[i] = 8 * (lane / 4) + i < count ? step[i] : 0.f;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float f = STEPS ? step[i] : 1.f;
        p[i / 2][i % 2] = transposed(pack_pair(s[i / 2][2 * (i % 2)] * f, s[i / 2][2 * (i % 2) + 1] * f));
    }
}

template <int BITS>
__device__ __forceinline__ void add_coded_values(const u8* codes, const u32 (&p)[4][2], State& state,
                                                 int lane) {
    constexpr int PER_BLOCK = 4 / Fields<BITS>::TILES;  // groups of tiles in a block of channels
    for_each_tile<BITS, false, 0, 4 * TILES_D>(
        codes, lane, [](int i) { return i % TILES_D * PER_BLOCK + i / TILES_D; },
        [&](int tile, const u32(&a)[4]) { mma(state.out[tile / 4], a, p[tile % 4][0], p[tile % 4][1]); });
}

// Half of the channels of raw values. Elements of unused slots may be NaN and are cleared.
template <int HALF>
__device__ __forceinline__ void add_raw_values(const u8* values, const u32 (&p)[4][2], int count,
                                               State& state, int lane) {
    for_each_tile<16, false, 2 * HALF * TILES_D, 2 * TILES_D>(
        values, lane, [](int i) { return i; },
        [&](int tile, const u32(&a)[4]) {
            u32 live[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int slot =
                    16 * (lane % 4) + 2 * (tile % 4) + r / 2;  // of the lower half; the upper is 8 later
                live[r] = a[r] & ((slot < count ? 0xffffu : 0u) | (slot + 8 < count ? 0xffff0000u : 0u));
            }
            mma(state.out[tile / 4], live, p[tile % 4][0], p[tile % 4][1]);
        });
}

__host__ __device__ constexpr int only_width(int flag) {
    return flag == 1 ? 2 : flag == 2 ? 3 : flag;
}

__device__ __forceinline__ void cap_scores(float cap, float (&s)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = cap * tanhf(s[i / 4][i % 4] / cap);
}

__device__ __forceinline__ void clear_unused(int count, float (&s)[4][4], int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (8 * (lane / 4) + i >= count) s[i / 2][2 * (i % 2)] = s[i / 2][2 * (i % 2) + 1] = -INFINITE;
    }
}

// Natural scores of the last rows of the queries.
__device__ __forceinline__ void keep_scores(const Call& call, const Sequence& sequence, u32 entry,
                                            const float (&s)[4][4], int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int row = 2 * (lane % 4) + j, kept = sequence.first_row + row - (call.rows - call.kept);
        if (row >= sequence.rows || kept < 0) continue;
        float4* to =
            (float4*)(call.scores + (((u64)sequence.pair * call.entries + entry) * call.kept + kept) * 64);
        to[lane / 4 * 2] = {s[0][j] * LN2, s[0][2 + j] * LN2, s[1][j] * LN2, s[1][2 + j] * LN2};
        to[lane / 4 * 2 + 1] = {s[2][j] * LN2, s[2][2 + j] * LN2, s[3][j] * LN2, s[3][2 + j] * LN2};
    }
}

// ---- The ring

// A page is one item if it is no larger than 4 bits make it; else K and V are items of their own, in two
// halves each at width 16.
__device__ __forceinline__ bool is_one_item(const Rung& rung) {
    return ALL_ARE_ONE || (MAY_BE_ONE && rung.bits_k + rung.bits_v <= 8);
}

__device__ __forceinline__ void copy_bulk(u8* to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Asks for part `part` of a page and says whether it is the last; lane 0 copies.
__device__ __forceinline__ bool copy_part(const Rung& rung, u32 index, int part, u8* slot, u32 barrier,
                                          int lane) {
    const u8* page = rung.pool + (u64)index * rung.record;
    const u32 k_bytes = 8 * HEAD_DIM * rung.bits_k, v_bytes = 8 * HEAD_DIM * rung.bits_v;
    const u32 k_steps = rung.bits_k < 16 ? 64 : 0, v_steps = rung.bits_v < 16 ? 64 : 0;
    u32 bytes = k_bytes + v_bytes + k_steps + v_steps, from = 0, steps = 0, steps_from = 0;
    bool last = true;
    if (!is_one_item(rung)) {
        const int k_parts = k_steps ? 1 : 2, v_parts = v_steps ? 1 : 2;
        if (part < k_parts) {
            bytes = k_bytes / k_parts;
            from = part * bytes;
            steps = k_steps;
            steps_from = k_bytes + v_bytes;
        } else {
            bytes = v_bytes / v_parts;
            from = k_bytes + (part - k_parts) * bytes;
            steps = v_steps;
            steps_from = k_bytes + v_bytes + k_steps;
        }
        last = part + 1 == k_parts + v_parts;
    }
    if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes + steps)
                     : "memory");
        copy_bulk(slot, page + from, bytes, barrier);
        if (!ALL_ARE_ONE && steps) copy_bulk(slot + bytes, page + steps_from, steps, barrier);
    }
    return last;
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// ---- The list of pages

// A position in the list as one lane sees it: its sequence, and where that begins.
struct Cursor {
    int number, start;
};

// Which page of a sequence is the p-th of its list: down the columns of a matrix with `columns` columns.
__device__ __forceinline__ u32 page_at(u32 p, u32 pages, u32 columns) {
    const u32 height = pages / columns, taller = pages - height * columns, upper = taller * (height + 1);
    const bool tall = p < upper;
    const u32 from = tall ? p : p - upper, high = tall ? height + 1 : height, column = from / high;
    return (from - column * high) * columns + column + (tall ? 0 : taller);
}

// Finds the sequence of a position of the list; one warp.
__device__ __forceinline__ Cursor find(const int* num_pages, int pairs, int blocks, int position) {
    const int lane = threadIdx.x % 32;
    int start = 0;
#pragma unroll 1
    for (int base = 0;; base += 32) {
        const int own = base + lane < pairs ? num_pages[base + lane] : 0;
        int sum = own * blocks;
#pragma unroll 1
        for (int bit = 1; bit < 32; bit *= 2) {
            const int before = __shfl_up_sync(ALL_LANES, sum, bit);
            sum += lane >= bit ? before : 0;
        }
        const u32 beyond = __ballot_sync(ALL_LANES, start + sum > position);
        if (beyond) {
            const int found = __ffs(beyond) - 1, pages = __shfl_sync(ALL_LANES, own, found);
            start += __shfl_sync(ALL_LANES, sum, found) - pages * blocks;
            const int block = (u32)(position - start) / (u32)pages;
            return {(base + found) * blocks + block, start + block * pages};
        }
        start += __shfl_sync(ALL_LANES, sum, 31);
    }
}

// The table entry of a position at or after the cursor: its index in the pool, rung | count << 8, its place
// in the table of its pair. Each lane its own; once in 32 pages, and not worth its instructions elsewhere.
__device__ __noinline__ uint4 read_entry(const Call& call, int position, int each, int number, int start) {
    u32 pair = sequence_at(call, number).pair;
    int pages = call.num_pages[pair];
    while (position >= start + pages) {
        start += pages;
        pair = sequence_at(call, ++number).pair;
        pages = call.num_pages[pair];
    }
    u32 entry = position - start;
    if (call.num_rungs > 1) entry = page_at(entry, pages, min(pages, max(4, 2 * pages / each)));
    const u64 at = (u64)pair * call.entries + entry;
    return {call.index[at], call.rung[at] | (u32)call.count[at] << 8, entry, 0};
}

// ---- Results

// One row of a sequence in shared memory, summed over all its pages: rotated back, normalised, written; one
// warp.
__device__ __forceinline__ void write_row(const Call& call, const Sequence& s, int row, float* x, int lane) {
    const float top = x[HEAD_DIM], sum = x[HEAD_DIM + 1];
    if (WIDTHS_V & CODED) hadamard_row(x, lane);
    const Place p = place_of(call, s, row);
    const u64 heads = call.heads_kv * call.group, seqlen_q = (u32)call.rows / (u32)call.group;
    const float factor = sum == 0.f ? 0.f : (WIDTHS_V & CODED ? NORM : 1.f) / sum;
    u32* out = (u32*)(call.out + ((p.batch * seqlen_q + p.position) * heads + p.head) * HEAD_DIM);
    for (int i = lane; i < HEAD_DIM / 2; i += 32)
        out[i] = pack_pair(x[2 * i] * factor, x[2 * i + 1] * factor);
    if (lane == 0)
        call.lse[(p.batch * heads + p.head) * seqlen_q + p.position] =
            sum == 0.f ? -INFINITE : (top + log2f(sum)) * LN2;
}

// The thread block that owns a position of the list.
__device__ __forceinline__ int owner(int position, int total, int ctas) {
    return (int)(((u64)(position + 1) * ctas - 1) / total);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend_pages(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 barriers[WARPS * MAX_STAGES];
    __shared__ uint2 notes[WARPS * MAX_STAGES];  // of the page in a slot: entry, rung | count << 8
    __shared__ float rows[8 * ROW_FLOATS];
    __shared__ int arrived;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* const ring = shared + warp * call.stages * call.slot_bytes;
    float* const merge = (float*)(shared + WARPS * call.stages * call.slot_bytes);
    const u32 barrier = shared_address(barriers + warp * MAX_STAGES);
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < call.stages; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * i));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();  // the barriers of this warp are ready

    // The part of the list that is this CTA's, and the sequence in which it begins.
    const int blocks = (call.rows + 7) / 8;
    int total = 0;
#pragma unroll 4
    for (int i = lane; i < call.pairs; i += 32) total += call.num_pages[i];
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) total += __shfl_xor_sync(ALL_LANES, total, bit);
    total *= blocks;
    const int ctas = min((int)gridDim.x, total), b = blockIdx.x;
    const int begin = b < ctas ? (int)((u64)total * b / ctas) : 0;
    const int end = b < ctas ? (int)((u64)total * (b + 1) / ctas) : 0;
    Cursor cursor = {0, 0};
    if (begin < end) cursor = find(call.num_pages, call.pairs, blocks, begin);
    int number = cursor.number, start = cursor.start;

    // Producing: the warp's pages 32 at a time, one a lane; the list position of page n is begin + warp + n *
    // WARPS.
    const int each = ctas ? (total + ctas - 1) / ctas : 1;
    const int page_count = begin + warp < end ? (end - begin - warp + WARPS - 1) / WARPS : 0;
    int next_page = 0, next_part = 0;
    uint4 own = {0, 0, 0, 0};
    auto produce = [&](int slot) {
        if (next_page == page_count) return;
        if (next_page % 32 == 0 && next_part == 0) {
            const int position = begin + warp + (next_page + lane) * WARPS;
            if (position < end) own = read_entry(call, position, each, cursor.number, cursor.start);
        }
        const u32 index = __shfl_sync(ALL_LANES, own.x, next_page % 32);
        const u32 note = __shfl_sync(ALL_LANES, own.y, next_page % 32);
        const u32 entry = KEEP_SCORES ? __shfl_sync(ALL_LANES, own.z, next_page % 32) : 0;
        if (lane == 0) notes[warp * MAX_STAGES + slot] = {entry, note};
        ++next_part;
        if (copy_part(call.rungs[note & 255], index, next_part - 1, ring + slot * call.slot_bytes,
                      barrier + 8 * slot, lane))
            next_part = 0, ++next_page;
    };
#pragma unroll 1
    for (int i = 0; i < call.stages; ++i) produce(i);

    // Consuming
    int slot = 0, n = 0;
    u32 parity = 0;
    auto wait = [&]() {
        wait_for(barrier + 8 * slot, parity);
        return (const u8*)(ring + slot * call.slot_bytes);
    };
    auto release = [&]() {
        __syncwarp();  // every lane has read the slot before it is filled again
        produce(slot);
        if (++slot == call.stages) slot = 0, parity ^= 1;
    };
#pragma unroll 1
    for (int position = begin; position < end; ++number) {
        const Sequence sequence = sequence_at(call, number);
        const int pages = call.num_pages[sequence.pair], stop = min(start + pages, end);
        if (pages == 0) continue;
        Query query;
        if (WIDTHS_K & CODED) {
            rotate_queries(call, sequence, rows, lane);
            __syncthreads();  // all query rows are rotated
            load_query(rows, sequence.rows, lane, query);
        }
        const u16* row = WIDTHS_K & RAW ? q_row(call, sequence, min(lane / 4, sequence.rows - 1)) : nullptr;
        State state;
        state.max0 = state.max1 = LOWEST;
        state.sum0 = state.sum1 = 0.f;
        state.raw = !(WIDTHS_V & CODED);
#pragma unroll
        for (int i = 0; i < TILES_D; ++i)
            state.out[i][0] = state.out[i][1] = state.out[i][2] = state.out[i][3] = 0.f;

#pragma unroll 1
        for (; begin + warp + n * WARPS < stop; ++n) {
            const u8* item = wait();
            const uint2 note = notes[warp * MAX_STAGES + slot];
            const int count = note.y >> 8;
            const Rung& rung = call.rungs[note.y & 255];
            const int bits_k = WIDTHS_K & (WIDTHS_K - 1) ? rung.bits_k : only_width(WIDTHS_K);
            const int bits_v = WIDTHS_V & (WIDTHS_V - 1) ? rung.bits_v : only_width(WIDTHS_V);
            const bool one = is_one_item(rung);
            const int k_bytes = 8 * HEAD_DIM * bits_k, v_bytes = 8 * HEAD_DIM * bits_v;
            const u8* k_steps = item + k_bytes + (one ? v_bytes : 0);
            float s[4][4];
            if ((WIDTHS_K & 1) && bits_k == 2) coded_scores<2>(item, k_steps, query, s, lane);
            if ((WIDTHS_K & 2) && bits_k == 3) coded_scores<3>(item, k_steps, query, s, lane);
            if ((WIDTHS_K & 4) && bits_k == 4) coded_scores<4>(item, k_steps, query, s, lane);
            if ((WIDTHS_K & 8) && bits_k == 8) coded_scores<8>(item, k_steps, query, s, lane);
            if ((WIDTHS_K & RAW) && bits_k == 16) {
                const float unit = call.scale * LOG2E;
                raw_scores<0>(item, row, unit, s, lane);
                release();
                raw_scores<1>(wait(), row, unit, s, lane);
            }
            const u8 *values = item + k_bytes, *v_steps = k_steps + 64;
            if (!one) {
                release();
                values = wait();
                v_steps = values + v_bytes;
            }
            if (SOFTCAP) cap_scores(call.softcap * LOG2E, s);
            if (count < 64) clear_unused(count, s, lane);
            if (KEEP_SCORES) keep_scores(call, sequence, note.x, s, lane);
            probabilities(s, state);
            u32 p[4][2];
            if ((WIDTHS_V & RAW) && (WIDTHS_V & CODED) && (bits_v == 16) != state.raw)
                change_frame(state, lane);
            if ((WIDTHS_V & RAW) && bits_v == 16) {
                fragments_of<false>(s, nullptr, count, p, lane);
                add_raw_values<0>(values, p, count, state, lane);
                release();
                add_raw_values<1>(wait(), p, count, state, lane);
            } else {
                fragments_of<true>(s, v_steps, count, p, lane);
                if ((WIDTHS_V & 1) && bits_v == 2) add_coded_values<2>(values, p, state, lane);
                if ((WIDTHS_V & 2) && bits_v == 3) add_coded_values<3>(values, p, state, lane);
                if ((WIDTHS_V & 4) && bits_v == 4) add_coded_values<4>(values, p, state, lane);
                if ((WIDTHS_V & 8) && bits_v == 8) add_coded_values<8>(values, p, state, lane);
            }
            release();
        }
        if ((WIDTHS_V & RAW) && (WIDTHS_V & CODED) && state.raw) change_frame(state, lane);
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
            state.sum0 += __shfl_xor_sync(ALL_LANES, state.sum0, bit);
            state.sum1 += __shfl_xor_sync(ALL_LANES, state.sum1, bit);
        }
        join_warps(state, sequence.rows, merge, rows);
        bool last = true;
        const int first = owner(start, total, ctas),
                  parts = owner(start + pages - 1, total, ctas) - first + 1;
        if (parts > 1) {
            float* to = call.partial + (u64)(b + number) * 8 * ROW_FLOATS;
            for (int i = threadIdx.x; i < sequence.rows * ROW_FLOATS; i += WARPS * 32)
                __stcg(to + i, rows[i]);
            __threadfence();  // this CTA's part is seen before its arrival is
            __syncthreads();  // by all threads
            if (threadIdx.x == 0) arrived = atomicAdd(call.arrivals + number, 1u);
            __syncthreads();  // the count is known
            last = arrived == parts - 1;
            if (last) {
                __threadfence();  // the others' parts are read after their arrivals
                if (threadIdx.x == 0) call.arrivals[number] = 0;
                join_parts(call.partial + (u64)(first + number) * 8 * ROW_FLOATS, parts, sequence.rows, merge,
                           rows);
            }
        }
        if (last)
            for (int r = warp; r < sequence.rows; r += WARPS)
                write_row(call, sequence, r, rows + r * ROW_FLOATS, lane);
        __syncthreads();  // `rows` may be written again
        position = stop;
        start += pages;
    }
    // Sequences without pages
#pragma unroll 1
    for (int i = b; i < call.pairs * blocks; i += gridDim.x) {
        const Sequence sequence = sequence_at(call, i);
        if (call.num_pages[sequence.pair]) continue;
        for (int c = threadIdx.x; c < 8 * ROW_FLOATS; c += WARPS * 32) rows[c] = 0.f;
        __syncthreads();  // `rows` is zero
        for (int r = warp; r < sequence.rows; r += WARPS)
            write_row(call, sequence, r, rows + r * ROW_FLOATS, lane);
        __syncthreads();  // `rows` may be written again
    }
}
