// Decode attention over packed pages of mixed widths, in one launch.
//
// A sequence is what shares a list of pages and fits the 8 columns of an mma tile: one (row, KV head) and up
// to 8 query rows (query position, head of the group). The pages of all sequences form one list.
//
// Threads and data
//   grid   persistent. If it costs little balance, a CTA has pages of one sequence only, every n-th of its
//          table; else CTA b takes the pages [T b / grid, T (b + 1) / grid) of the list, in which a
//          sequence's table is read down the columns of a matrix. So with several rungs every CTA sees the
//          same mixture, however the table is sorted.
//   warp   pages begin + warp, + WARPS, ... through a ring of slots of its own in shared memory, filled by
//          bulk copies that lane 0 issues; warps meet only where a sequence begins or ends. A page is one
//          item of the ring, or, if it is large, K and V are, in two halves each at width 16.
//   lane   g = lane / 4, u = lane % 4 of an mma tile: A = K tile (tokens x channels) or V^T tile (channels x
//          tokens), B = q^T or P, C = scores (tokens x rows) or out^T (channels x rows), columns 2u, 2u + 1.
//          Lane group g owns slots 8 g to 8 g + 7 of a page.
//
// Scores are base 2. K and V below width 16 are rotated; so q is rotated where a sequence begins, and out
// where it ends. Pages of raw V turn the accumulators into their basis and back: the rotation is its own
// inverse. Partial results are combined twice: those of warps in shared memory, those of CTAs in `partial`,
// where the last CTA of a sequence adds all splits in a fixed order.
//
// Widths below 16 are multiplied as 8-bit integers (packed/int8_mma.cuh; INT8_MMA is 1 for up to 4 query
// rows, 2 for 8); columns of a lane are then the two bytes of a row. Where width 16 occurs, and at head_dim
// 80 and 256, INT8_MMA is 0 and coded tiles are float16 whatever the cache is (pages/codes.cuh). The range of
// float16 is narrow, so q, and p times the scale of V, each have a factor, a power of 2, that brings the
// largest near the top of it: for q from the rows of a sequence (packed/scores.cuh), for p from the largest
// scale met so far (packed/online_softmax.cuh).
//
// Memory: shared WARPS * stages * slot_bytes (ring) + WARPS * min(rows, 4) * (HEAD_DIM + 2) * 4 (merge);
// registers at head_dim 128: 32 out, 16 q, 16 scores (half of each with INT8_MMA = 1), 8 scales, and what is
// being expanded. With INT8_MMA = 2, and of float16 the part of q that its rounding takes off, q is read from
// `rows`.
//
// Macros: HEAD_DIM; BF16; WIDTHS_K, WIDTHS_V: which widths occur, as a sum of 1 (2 bits), 2 (3 bits), 4 (4
// bits), 8 (8 bits), 16 (16 bits); INT8_MMA; WARPS; SOFTCAP; WINDOW; KEEP_SCORES: bytes of a
// saved score, 1 (packed/saved_scores.cuh) or 4, or 0.
#include "common/early_launch.cuh"
#include "packed/split_kv.cuh"
#include "packed/combine.cuh"
#include "packed/saved_scores.cuh"
#include "packed/page_ring.cuh"
#include "packed/online_softmax.cuh"
#include "packed/window.cuh"
#if INT8_MMA
#include "packed/int8_mma.cuh"
#include "packed/int8_query.cuh"
#include "packed/int8_scores.cuh"
#include "packed/int8_values.cuh"
#else
#include "packed/basis.cuh"
#include "packed/scores.cuh"
#include "packed/values.cuh"
#endif

constexpr int MAX_STAGES = 8;

// ---- Queries

static_assert(WARPS >= 8, "a warp for each query row");

// A query row of a sequence and the frame of its keys, as they are in memory: pairs lane, lane + 32, ... of
// row `warp`.
struct RawQuery {
    u32 q[PAIRS_OF_LANE];
    __half2 mean[PAIRS_OF_LANE];
    u16 shifts[PAIRS_OF_LANE];
};

__device__ __forceinline__ void read_query(const Call& call, const Sequence& s, int warp, int lane,
                                           RawQuery& raw) {
    if (warp >= s.rows) return;
    const u32* q = (const u32*)q_row(call, s, warp);
    const __half2* mean = (const __half2*)(call.k_mean + (u64)s.pair * HEAD_DIM);
    const u16* shifts = (const u16*)(call.k_shift + (u64)s.pair * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        raw.q[i] = q[lane + 32 * i];
        raw.mean[i] = mean[lane + 32 * i];
        raw.shifts[i] = shifts[lane + 32 * i];
    }
}

// Brings a query row into the frame and basis of coded keys, scaled: `x` [ROW_FLOATS], behind the row its
// largest magnitude and what the mean of the keys adds to its scores.
__device__ __forceinline__ void rotate_query(const RawQuery& raw, float scale_log2, float* x, int lane) {
    float bias = 0.f, amax = 0.f;
    float2 pairs[PAIRS_OF_LANE];
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        pairs[i] = {0.f, 0.f};
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        const float2 pair = unpack_pair(raw.q[i]), m = __half22float2(raw.mean[i]);
        const float low = exp2_exact(raw.shifts[i] & 255), high = exp2_exact(raw.shifts[i] >> 8);
        pairs[i] = {pair.x * low * (NORM * scale_log2), pair.y * high * (NORM * scale_log2)};
        bias += pair.x * m.x + pair.y * m.y;
    }
    hadamard_row(pairs, lane);
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        ((float2*)x)[lane + 32 * i] = pairs[i];
        amax = fmaxf(amax, fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)));
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
        bias += __shfl_xor_sync(ALL_LANES, bias, bit);
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, bit));
    }
    if (lane == 0) {
        x[HEAD_DIM] = amax;
        x[HEAD_DIM + 1] = bias * scale_log2;
    }
}

// ---- Results

// One row of a sequence in shared memory, summed over all its pages: rotated back, normalised, written; one
// warp.
__device__ __forceinline__ void write_row(const Call& call, const Sequence& s, int row, const float* x,
                                          int lane) {
    const float row_max = x[HEAD_DIM], sum = x[HEAD_DIM + 1];
    float2 pairs[PAIRS_OF_LANE];
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i)
        pairs[i] = lane + 32 * i < HEAD_DIM / 2 ? ((const float2*)x)[lane + 32 * i] : float2{0.f, 0.f};
    if (WIDTHS_V & CODED) hadamard_row(pairs, lane);
    const RowCoord p = row_coord(call, s, row);
    const u64 heads = call.heads_kv * call.group, seqlen_q = (u32)call.rows / (u32)call.group;
    const float factor = sum == 0.f ? 0.f : (WIDTHS_V & CODED ? NORM : 1.f) / sum;
    u32* out = (u32*)(call.out + ((p.batch * seqlen_q + p.position) * heads + p.head) * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (lane + 32 * i < HEAD_DIM / 2)
            out[lane + 32 * i] = pack_pair(pairs[i].x * factor, pairs[i].y * factor);
    }
    if (lane == 0)
        call.lse[(p.batch * heads + p.head) * seqlen_q + p.position] =
            sum == 0.f ? -INFINITY_F : (row_max + log2f(sum)) * LN2;
}

// The CTA that has a position of an undivided list.
__device__ __forceinline__ int owner(u32 position, u32 total, u32 ctas) {
    return ((position + 1) * ctas - 1) / total;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend_pages(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 barriers[WARPS * MAX_STAGES];
    __shared__ __align__(8) uint2 page_words[WARPS * MAX_STAGES];  // see write_page
    __shared__ u32 indices[WINDOW ? WARPS * MAX_STAGES : 1];       // of the same, in its pool
    __shared__ __align__(8) float rows[8 * ROW_FLOATS];
    __shared__ int arrived;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* const ring = shared + warp * call.stages * call.slot_bytes;
    float* const merge = (float*)(shared + WARPS * call.stages * call.slot_bytes);
    const u32 barrier = shared_address(barriers + warp * MAX_STAGES);
    const u32 page_words_address = shared_address(page_words + warp * MAX_STAGES);
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < call.stages; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * i));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();  // the barriers of this warp are ready
    begin_early();

    // The lane's entry among the first 32 pages of the warp, read together with the lengths.
    const int blocks = (call.rows + 7) / 8, b = blockIdx.x;
    const WorkRange estimate = estimate_split(call, blocks);
    Entry own = {};
    if (estimate.num_splits) {
        const u32 column = b - estimate.first_cta + estimate.num_splits * (warp + lane * WARPS);
        if (column < call.entries)
            own = entry_at(call.index, call.rung, call.count, (u64)estimate.number * call.entries, column,
                           estimate.number);
    }
    int total, ctas;
    const WorkRange range = split_kv(call, estimate, blocks, lane, total, ctas);
    const int begin = range.begin, end = range.end;
    const bool known = range.num_splits && range.number == estimate.number &&
                       range.first_cta == estimate.first_cta &&
                       (end <= 1 || range.num_splits == estimate.num_splits);
    int number = range.number, start = range.start;
    RawQuery raw;
    if ((WIDTHS_K & CODED) && begin < end) read_query(call, sequence_at(call, number), warp, lane, raw);

    // Producing: the warp's pages 32 at a time, one a lane; page n is at position begin + warp + n * WARPS.
    const int each = call.num_rungs > 1 && ctas ? (total + ctas - 1) / ctas : 0;
    const u32 page_count = begin + warp < end ? (end - begin - warp + WARPS - 1) / WARPS : 0;
    u32 next_page = 0;
    int next_part = 0;
    auto produce = [&](int slot) {
        if (next_page == page_count) return;
        if (next_page % 32 == 0 && next_part == 0 && (WINDOW || next_page || !known)) {
            const int position = begin + warp + (next_page + lane) * WARPS;
            if (position < end && (next_page || !known))
                own = range.num_splits
                          ? entry_at(call.index, call.rung, call.count, (u64)range.number * call.entries,
                                     b - range.first_cta + range.num_splits * position, range.number)
                          : find_entry(call.index, call.rung, call.count, call.num_pages, call.entries,
                                       blocks, each, position, range.number, range.start, range.pages);
            if (WINDOW && position < end) own.word = page_word_in_window(call, own);
        }
        const u32 index = __shfl_sync(ALL_LANES, own.index, next_page % 32);
        const u32 word = __shfl_sync(ALL_LANES, own.word, next_page % 32);
        const u32 entry = KEEP_SCORES ? __shfl_sync(ALL_LANES, own.column, next_page % 32) : 0;
        const Rung& rung = call.rungs[word & RUNG];
        const u8* page = rung.pool + (u64)index * rung.record;
        u8* const to = ring + slot * call.slot_bytes;
        const u32 shift = shift_of(page, to);
        if (lane == 0) write_page(page_words_address + 8 * slot, entry, word | shift);
        if (WINDOW) {
            if (lane == 0) indices[warp * MAX_STAGES + slot] = index;
            if (tokens_of(word) == 0) {
                if (lane == 0) arrive(barrier + 8 * slot);
                ++next_page;
                return;
            }
        }
        ++next_part;
        if (copy_part(rung, page, next_part - 1, to + shift, barrier + 8 * slot, lane))
            next_part = 0, ++next_page;
    };
    int filled = 0;  // slots: the first page of all warps goes before their second
    do {
        produce(filled);
    } while (++filled < call.stages && next_part);

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

    // Consuming
    int slot = 0, n = 0;
    u32 parity = 0;
    auto wait = [&]() {
        wait_for(barrier + 8 * slot, parity);
        const uint2 word = read_page(page_words_address + 8 * slot);
        return Item{ring + slot * call.slot_bytes + (word.y & SHIFT), word};
    };
    auto release = [&]() {
        __syncwarp();  // every lane has read the slot before it is filled again
        produce(slot);
        if (++slot == call.stages) slot = 0, parity ^= 1;
    };
#pragma unroll 1
    for (int position = begin; position < end; ++number) {
        const Sequence sequence = sequence_at(call, number);
        const int pages = number == range.number ? range.pages : call.num_pages[sequence.pair];
        const int stop = min(start + pages, end);
        if (pages == 0) continue;
        Query query;
        if (WIDTHS_K & CODED) {
            if (number != range.number) read_query(call, sequence, warp, lane, raw);
            if (warp < sequence.rows) rotate_query(raw, call.scale * LOG2E, rows + warp * ROW_FLOATS, lane);
            __syncthreads();  // all query rows are rotated
            load_query(rows, sequence.rows, lane, query);
        }
#pragma unroll 1
        for (; filled < call.stages; ++filled) produce(filled);
        const SavedRows saved = KEEP_SCORES ? saved_rows(call, sequence, lane) : SavedRows{};
        const u16* row = WIDTHS_K & RAW ? q_row(call, sequence, min(lane / 4, sequence.rows - 1)) : nullptr;
        const FirstVisible visible = WINDOW ? first_visible_of_lane(call, sequence, lane) : FirstVisible{};
        State state;
        clear(state, bits_of<WIDTHS_V>(0));

#pragma unroll 1
        for (; begin + warp + n * WARPS < stop; ++n) {
            const auto [item, word] = wait();
            const int count = tokens_of(word.y);
            const Rung& rung = call.rungs[word.y & RUNG];
            float s[8][LANE_ROWS];
            if (WINDOW && count == 0) {  // no query row sees a token of the page, or it has none
                mask_page(s);
                if (KEEP_SCORES) save_scores(saved, word.x, state, s);
                release();
                continue;
            }
            const bool masked = WINDOW && (word.y & MASKED);
            const uint4 offsets =
                masked ? offsets_of(rung, indices[warp * MAX_STAGES + slot], lane / 4) : uint4{};
            const int bits_k = bits_of<WIDTHS_K>(rung.bits_k), bits_v = bits_of<WIDTHS_V>(rung.bits_v);
            const bool one = is_one_item(rung);
            const int k_bytes = 8 * HEAD_DIM * bits_k, v_bytes = 8 * HEAD_DIM * bits_v;
            const u8* k_scales = item + k_bytes + (one ? v_bytes : 0);
            float base[LANE_ROWS];
#pragma unroll
            for (int j = 0; j < LANE_ROWS; ++j) base[j] = SOFTCAP ? 0.f : state.row_max[j];
            if ((WIDTHS_K & 1) && bits_k == 2) coded_scores<2>(item, k_scales, query, base, s, lane);
            if ((WIDTHS_K & 2) && bits_k == 3) coded_scores<3>(item, k_scales, query, base, s, lane);
            if ((WIDTHS_K & 4) && bits_k == 4) coded_scores<4>(item, k_scales, query, base, s, lane);
            if ((WIDTHS_K & 8) && bits_k == 8) coded_scores<8>(item, k_scales, query, base, s, lane);
#if !INT8_MMA
            if ((WIDTHS_K & RAW) && bits_k == 16) {
                const float scale_log2 = call.scale * LOG2E;
                raw_scores<0>(item, row, scale_log2, base, s, lane);
                release();
                raw_scores<1>(wait().data, row, scale_log2, base, s, lane);
            }
#endif
            const u8 *values = item + k_bytes, *v_scales = k_scales + 64;
            if (!one) {
                release();
                values = wait().data;
                v_scales = values + v_bytes;
            }
            if (SOFTCAP) cap_scores(call.softcap * LOG2E, state.row_max, s);
            if (count < 64) mask_unused(count, s, lane);
            if (masked) mask_before_window(offsets, word.y >> 16 << 16, visible, s);
#if !INT8_MMA
            if (state.bits != bits_v) change_basis(state, bits_v, lane);
            if ((WIDTHS_V & RAW) && bits_v == 16) {
                update_row_max<false>(s, {}, state);
                if (KEEP_SCORES) save_scores(saved, word.x, state, s);
                probabilities(s, state);
                const ScaledP scaled_p = scale_probabilities(s);
                add_raw_values<0>(values, scaled_p, count, state, lane);
                release();
                add_raw_values<1>(wait().data, scaled_p, count, state, lane);
                release();
                continue;
            }
#endif
            const Scales scales =
                load_scales(v_scales, lane / 4, count);  // that of an unused slot may be NaN
            update_row_max<!INT8_MMA>(s, scales, state);
            if (KEEP_SCORES) save_scores(saved, word.x, state, s);
            probabilities(s, state);
            const ScaledP scaled_p = scale_probabilities(s, scales, bits_v);
            if ((WIDTHS_V & 1) && bits_v == 2) add_coded_values<2>(values, scaled_p, state, lane);
            if ((WIDTHS_V & 2) && bits_v == 3) add_coded_values<3>(values, scaled_p, state, lane);
            if ((WIDTHS_V & 4) && bits_v == 4) add_coded_values<4>(values, scaled_p, state, lane);
            if ((WIDTHS_V & 8) && bits_v == 8) add_coded_values<8>(values, scaled_p, state, lane);
            release();
        }
#if INT8_MMA
        finish(state);
#else
        if (WIDTHS_V & CODED) change_basis(state, 0, lane);
#endif
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) {
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2)
                state.sum[j] += __shfl_xor_sync(ALL_LANES, state.sum[j], bit);
        }
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j)
            if (has_no_token(state, j)) state.row_max[j] = MIN_ROW_MAX;
        combine_warps(state, sequence.rows, merge, rows);
        bool last = true;
        const int first = range.num_splits ? range.first_cta : owner(start, total, ctas);
        const int num_splits =
            range.num_splits ? range.num_splits : owner(start + pages - 1, total, ctas) - first + 1;
        if (num_splits > 1) {
            float* to = call.partial + (u64)(b + number) * 8 * ROW_FLOATS;
            for (int i = threadIdx.x; i < sequence.rows * ROW_FLOATS; i += WARPS * 32)
                __stcg(to + i, rows[i]);
            __syncthreads();  // the split is written
            if (threadIdx.x == 0) {
                // This CTA's split is seen before its semaphore is, the others' splits are read after theirs.
                u32 before;
                asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                             : "=r"(before)
                             : "l"(call.semaphores + number)
                             : "memory");
                arrived = before;
            }
            __syncthreads();  // the count is known
            last = arrived == num_splits - 1;
            if (last) {
                if (threadIdx.x == 0) call.semaphores[number] = 0;
                combine_splits(call.partial + (u64)(first + number) * 8 * ROW_FLOATS, num_splits,
                               sequence.rows, rows);
            }
        }
        if (last)
            for (int r = warp; r < sequence.rows; r += WARPS)
                write_row(call, sequence, r, rows + r * ROW_FLOATS, lane);
        __syncthreads();  // `rows` may be written again
        position = stop;
        start += pages;
    }
}

// clang-format off
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=31 WIDTHS_V=31 WARPS=12 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=0 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=64,96,128 BF16=0,1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=1 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=1 WIDTHS_V=1 WARPS=12 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=8 WIDTHS_V=8 WARPS=12 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=1 WINDOW=0 KEEP_SCORES=1,4 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=1 KEEP_SCORES=4 INT8_MMA=1 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=16 WIDTHS_V=16 WARPS=8 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=0 registers<=255 arch=sm_90a,sm_120a
// gate: HEAD_DIM=64,96,128 BF16=0,1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=2 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=1 WINDOW=0 KEEP_SCORES=1,4 INT8_MMA=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 KEEP_SCORES=1 INT8_MMA=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=1 KEEP_SCORES=4 INT8_MMA=2 registers<=255 arch=sm_90a
// gate: HEAD_DIM=80,96 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=12 SOFTCAP=1 WINDOW=0 KEEP_SCORES=1,4 INT8_MMA=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=0 KEEP_SCORES=0 INT8_MMA=0 registers<=255 arch=sm_90a
// gate: HEAD_DIM=80,256 BF16=0 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=1 KEEP_SCORES=0 INT8_MMA=0 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=1 WINDOW=1 KEEP_SCORES=4 INT8_MMA=0 registers<=255 arch=sm_90a,sm_100a,sm_120a
// clang-format on
