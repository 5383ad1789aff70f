// Decode attention over packed pages of mixed widths, in one launch.
//
// A sequence is what shares a list of pages and fits the 8 columns of an mma tile: one (row, KV head) and up
// to 8 query rows (query position, head of the group). Pages are taken in quads: four of one rung, entries 4
// n to 4 n + 3 of a table, 64 slots. The quads of all sequences form one list.
//
// Threads and data
//   grid   persistent. If it costs little balance, a CTA has quads of one sequence only, every n-th of its
//          table; else CTA b takes the quads [T b / grid, T (b + 1) / grid) of the list, in which a
//          sequence's table is read down the columns of a matrix. So with several rungs every CTA sees the
//          same mixture, however the table is sorted.
//   warp   quads begin + warp, + WARPS, ... through a ring of slots of its own in shared memory, filled by
//          bulk copies (packed/quad_ring.cuh); warps meet only where a sequence begins or ends.
//   lane   g = lane / 4, u = lane % 4 of an mma tile: A = K tile (tokens x channels) or V^T tile (channels x
//          tokens), B = q^T or P, C = scores (tokens x rows) or out^T (channels x rows), columns 2u, 2u + 1.
//          Tiles of page b of a quad have rows (of K) or columns (of V) of its own, and lane group g has its
//          slots 2 g and 2 g + 1, rows g and g + 8 of a tile of K.
//
// Scores are base 2. K and V below width 16 are divided by powers of 2 and rotated; so q is rotated where a
// sequence begins, and out where it ends. With PROFILES K is rotated in blocks of its channels in an order of
// their own. Pages of raw V turn the accumulators into their basis and back (packed/basis.cuh).
// Partial results are combined twice: those of warps in shared memory, those of CTAs in `partial`, where the
// last CTA of a sequence adds all splits in a fixed order.
//
// Widths below 16 are multiplied as 8-bit integers (packed/int8_mma.cuh; INT8_MMA is 1 for up to 4 query
// rows, 2 for 8); columns of a lane are then the two bytes of a row. Where width 16 occurs, and at head_dim
// 256, INT8_MMA is 0 and coded tiles are float16 whatever the cache is (pages/codes.cuh). The range of
// float16 is narrow, so q, and p times the scale of V, each have a factor, a power of 2, that brings the
// largest near the top of it: for q from the rows of a sequence (packed/scores.cuh), for p from the largest
// scale met so far (packed/online_softmax.cuh).
//
// Memory: shared WARPS * stages * slot_bytes (ring) + WARPS * merge_rows * (HEAD_DIM + 2) * 4 (merge);
// registers at head_dim 128: 32 out, 16 q, 16 scores (half of each with INT8_MMA = 1), 8 scales, and what is
// being expanded. With INT8_MMA = 2, and of float16 the part of q that its rounding takes off, q is read from
// `rows`.
//
// Macros: HEAD_DIM; BF16; WIDTHS_K, WIDTHS_V: which widths occur, as a sum of 1 (2 bits), 2 (3 bits), 4 (4
// bits), 8 (8 bits), 16 (16 bits); PROFILES, if keys are in blocks (pages/profiles.cuh); INT8_MMA; WARPS;
// SOFTCAP; WINDOW; SAVED_SCORE_BYTES: of a saved score, 1 (packed/saved_scores.cuh) or 4, or 0.
#include "common/early_launch.cuh"
#include "packed/split_kv.cuh"
#include "packed/combine.cuh"
#include "packed/saved_scores.cuh"
#include "packed/quad_ring.cuh"
#include "packed/online_softmax.cuh"
#include "packed/window.cuh"
#if INT8_MMA
#include "packed/int8_mma.cuh"
#include "packed/int8_query.cuh"
#if IN_BLOCKS
#include "packed/int8_block_scores.cuh"
#else
#include "packed/int8_scores.cuh"
#endif
#include "packed/int8_values.cuh"
#else
#include "packed/basis.cuh"
#if IN_BLOCKS
#include "packed/block_scores.cuh"
#else
#include "packed/scores.cuh"
#endif
#include "packed/values.cuh"
#endif

// ---- Queries

static_assert(WARPS >= 8, "a warp for each query row");

// A query row of a sequence and the frame of its keys, as they are in memory: pairs lane, lane + 32, ... of
// row `warp`.
struct RawQuery {
    u32 q[PAIRS_OF_LANE];
    __half2 mean[PAIRS_OF_LANE];
    u16 shifts[PAIRS_OF_LANE];
    // With PROFILES: the rotary pairs at these positions, the gain of their block.
    u16 order[PAIRS_OF_LANE];
    float gain[PAIRS_OF_LANE];
    u16 exponents;  // of keys and values
};

constexpr int KEY_BLOCK = IN_BLOCKS ? HEAD_DIM / 4 & -(HEAD_DIM / 4) : HADAMARD_BLOCK;
constexpr float KEY_NORM = !IN_BLOCKS ? NORM : KEY_BLOCK == 64 ? 1.f / 8 : 1.f / 4;  // 2^-(t // 2) of 2^t

__device__ __forceinline__ void read_query(const Call& call, const Sequence& s, int warp, int lane,
                                           RawQuery& raw) {
    if (warp >= s.rows) return;
    const u32* q = (const u32*)q_row(call, s, warp);
    const __half2* mean = (const __half2*)(call.k_mean + (u64)s.bh * HEAD_DIM);
    const u16* shifts = (const u16*)(call.k_shift + (u64)s.bh * (HEAD_DIM / 2));
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        raw.q[i] = q[lane + 32 * i];
        raw.mean[i] = mean[lane + 32 * i];
        raw.shifts[i] = shifts[(lane + 32 * i) % (HEAD_DIM / 4)];
        if (IN_BLOCKS) {
            const u8* const order = call.k_order + (u64)s.bh * (HEAD_DIM / 2);
            raw.order[i] = *(const u16*)(order + pair_of_position(2 * lane + 64 * i));
            raw.gain[i] = call.k_gain[4 * (u64)s.bh + (lane + 32 * i) / (HEAD_DIM / 8)];
        }
    }
    raw.exponents = ((const u16*)call.exponent)[s.bh];
}

__device__ __forceinline__ int key_exponent(const RawQuery& raw) {
    return (signed char)(raw.exponents & 255);
}

__device__ __forceinline__ int value_exponent(const RawQuery& raw) {
    return (signed char)(raw.exponents >> 8);
}

// Brings a query row into the frame and basis of coded keys, scaled: `x` [ROW_FLOATS], behind the row its
// largest magnitude and what the mean of the keys adds to its scores.
__device__ __forceinline__ void rotate_query(const RawQuery& raw, float scale_log2, float* x, int lane) {
    float bias = 0.f, amax = 0.f;
    scale_log2 = times_exp2(scale_log2, key_exponent(raw));
    float2 channel_pairs[PAIRS_OF_LANE];
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        channel_pairs[i] = {0.f, 0.f};
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        const float2 pair = unpack_pair(raw.q[i]), m = __half22float2(raw.mean[i]);
        const float low = exp2_exact(raw.shifts[i] & 255), high = exp2_exact(raw.shifts[i] >> 8);
        channel_pairs[i] = {pair.x * low * (KEY_NORM * scale_log2), pair.y * high * (KEY_NORM * scale_log2)};
        bias += pair.x * m.x + pair.y * m.y;
    }
    if (IN_BLOCKS) {
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) ((float2*)x)[lane + 32 * i] = channel_pairs[i];
        __syncwarp();  // the row is written
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) {
            const float* const half = x + channel_of_position(0, 2 * lane + 64 * i);
            channel_pairs[i] = {half[raw.order[i] & 255], half[raw.order[i] >> 8]};
        }
        __syncwarp();  // every lane has its channels
    }
    hadamard_row<KEY_BLOCK>(channel_pairs, lane);
    if (IN_BLOCKS) {
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) {
            const float inverse = __fdividef(1.f, raw.gain[i]);
            channel_pairs[i] = {channel_pairs[i].x * inverse, channel_pairs[i].y * inverse};
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        ((float2*)x)[lane + 32 * i] = channel_pairs[i];
        amax = fmaxf(amax, fmaxf(fabsf(channel_pairs[i].x), fabsf(channel_pairs[i].y)));
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
// warp. `exponent` is that of values.
__device__ __forceinline__ void write_row(const Call& call, const Sequence& s, int row, const float* x,
                                          int exponent, int lane) {
    const float row_max = x[HEAD_DIM], sum = x[HEAD_DIM + 1];
    float2 channel_pairs[PAIRS_OF_LANE];
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i)
        channel_pairs[i] =
            lane + 32 * i < HEAD_DIM / 2 ? ((const float2*)x)[lane + 32 * i] : float2{0.f, 0.f};
    if (WIDTHS_V & CODED) hadamard_row<HADAMARD_BLOCK>(channel_pairs, lane);
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        const int channel = 2 * (lane + 32 * i);
        if ((WIDTHS_V & CODED) && turns_sign(channel)) channel_pairs[i].x = -channel_pairs[i].x;
        if ((WIDTHS_V & CODED) && turns_sign(channel + 1)) channel_pairs[i].y = -channel_pairs[i].y;
    }
    const RowCoord p = row_coord(call, s, row);
    const u64 heads = call.heads_kv * call.group, seqlen_q = (u32)call.rows / (u32)call.group;
    const float factor = sum == 0.f ? 0.f : (WIDTHS_V & CODED ? NORM : 1.f) / sum;
    u32* out = (u32*)(call.out + ((p.batch * seqlen_q + p.position) * heads + p.head) * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (lane + 32 * i < HEAD_DIM / 2) {
            float2 y = {channel_pairs[i].x * factor, channel_pairs[i].y * factor};
            if (WIDTHS_V & CODED) y = {times_exp2(y.x, exponent), times_exp2(y.y, exponent)};
            out[lane + 32 * i] = pack_pair(y.x, y.y);
        }
    }
    if (lane == 0)
        call.lse[(p.batch * heads + p.head) * seqlen_q + p.position] =
            sum == 0.f ? -INFINITY_F : (row_max + log2f(sum)) * LN2;
}

#if IN_BLOCKS
// Scores of keys of a profile of the list from number I on, less `base`.
template <int I>
__device__ __forceinline__ void scores_of_profile(int profile, const Item& item, const Query& query,
                                                  const float (&base)[LANE_ROWS], float (&s)[8][LANE_ROWS],
                                                  int lane) {
    if constexpr (I < NUM_PROFILES) {
        if (profile == profile_at(I))
            block_scores<profile_at(I)>(item, query, base, s, lane);
        else
            scores_of_profile<I + 1>(profile, item, query, base, s, lane);
    }
}
#endif

// The CTA that has a position of an undivided list.
__device__ __forceinline__ int cta_of(u32 position, u32 total, u32 ctas) {
    return ((position + 1) * ctas - 1) / total;
}

// What a CTA knows of the division of the list but rarely needs, so not worth registers.
struct Schedule {
    int begin, first_cta, num_splits;  // of its range
    int total, ctas, each;             // quads in all, CTAs that have any, quads of each or 0 (`find_quad`)
    int queried;                       // the sequence whose query has been read, or -1
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend_pages(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(16) u8 labels[WARPS][MAX_STAGES][LABEL_BYTES];  // of slots
    __shared__ __align__(IN_BLOCKS ? 16 : 8) float rows[ROWS_FLOATS];    // or what load_query makes of them
    __shared__ int exponent_of_values;
    __shared__ int arrived;
    __shared__ Schedule schedules[WARPS];
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 first_label = shared_address(labels[warp]);
    Schedule& schedule = schedules[warp];
    if (lane < MAX_STAGES) {
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 4;" ::"r"(first_label + lane * LABEL_BYTES + BARRIER));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();  // the barriers of this warp are ready
    begin_early();

    // Lengths, the lane's page among the first 8 quads of the warp and the query are read together.
    const int blocks = (call.rows + 7) / 8, b = blockIdx.x;
    const WorkRange estimate = estimate_split(call, blocks);
    const int length = lane < call.num_bh ? call.num_pages[lane] : 0;
    Entry own = {};
    RawQuery raw;
    if (estimate.num_splits) {
        const u32 column = b - estimate.first_cta + estimate.num_splits * (warp + lane / 4 * WARPS);
        if (4 * column < call.entries)
            own = entry_at(call, {estimate.number, estimate.number, (int)column}, lane % 4);
        if (WIDTHS_K & CODED) read_query(call, sequence_at(call, estimate.number), warp, lane, raw);
    }
    int total, ctas;
    const WorkRange range = split_kv(call, estimate, blocks, length, lane, total, ctas);
    const int begin = range.begin, end = range.end;
    const bool estimated = range.num_splits && range.number == estimate.number;
    const bool known = estimated && range.first_cta == estimate.first_cta &&
                       (end <= 1 || range.num_splits == estimate.num_splits);
    const int each = call.num_rungs > 1 && !range.num_splits && ctas ? (total + ctas - 1) / ctas : 0;
    if (lane == 0)
        schedule = {
            begin, range.first_cta, range.num_splits, total, ctas, each, estimated ? range.number : -1};
    __syncwarp();                                                         // it is written
    int number = range.number, start = range.start, quads = range.quads;  // of the sequence at hand

    const int stages = call.stages;  // of the ring of a warp
    const u32 ring = shared_address(shared) + warp * stages * call.slot_bytes;

    // Producing: a lane has a page of the warp's quads 8 n to 8 n + 7, which are read when the quad before
    // them has been asked for, a quad's time before they are needed. Quad n is at position begin + warp + n
    // WARPS.
    const int quad_count = begin + warp < end ? (u32)(end - begin - warp + WARPS - 1) / WARPS : 0;
    int next_quad = 0, next_item = 0;  // to load: a quad, an item of it
    auto read_entries = [&]() {
        const int nth = next_quad + lane / 4;
        if (nth >= quad_count) return;
        const Schedule of = schedule;
        const int position = of.begin + warp + nth * WARPS;
        const QuadCoord quad =
            of.num_splits ? QuadCoord{number, number, b - of.first_cta + of.num_splits * position}
                          : find_quad(call.num_pages, blocks, of.each, position, number, start, quads);
        own = entry_at(call, quad, lane % 4);
        if (WINDOW) look_through_window(call, own, lane % 4);
    };
    if (!known) read_entries();
    if (WINDOW && known && lane / 4 < quad_count) look_through_window(call, own, lane % 4);
    auto produce = [&](int slot) {
        if (next_quad == quad_count) return;
        const u32 label = first_label + slot * LABEL_BYTES;
        const int holder = next_quad % 8;
        const Rung& rung = call.rungs[__shfl_sync(ALL_LANES, own.word, 4 * holder) & RUNG];
        const Part part = part_of(rung, next_item);
        if (lane / 4 == holder) {
            if (SAVED_SCORE_BYTES) store_shared(label + COLUMN, own.column);
            if (WINDOW) store_shared(label + INDICES + 4 * (lane % 4), own.index);
            ask_for_page(part, rung.pool + (u64)own.index * rung.record, own.word | own.count << 8, label,
                         ring + slot * call.slot_bytes, lane % 4);
        }
        // A quad that no query row sees is one item without bytes.
        const bool hidden = WINDOW && !__any_sync(ALL_LANES, lane / 4 == holder && own.count);
        ++next_item;
        if (!part.last && !hidden) return;
        next_item = 0;
        if (++next_quad % 8 == 0) read_entries();
    };
    int filled = 0;  // slots: the first quad of all warps goes before their second
    do {
        produce(filled);
    } while (++filled < stages && next_item);

    // Sequences without pages
#pragma unroll 1
    for (int i = b; i < call.num_bh * blocks; i += gridDim.x) {
        const Sequence sequence = sequence_at(call, i);
        if (call.num_pages[sequence.bh]) continue;
        for (int c = threadIdx.x; c < 8 * ROW_FLOATS; c += WARPS * 32) rows[c] = 0.f;
        __syncthreads();  // `rows` is zero
        for (int r = warp; r < sequence.rows; r += WARPS)
            write_row(call, sequence, r, rows + r * ROW_FLOATS, 0, lane);
        __syncthreads();  // `rows` may be written again
    }

    // Consuming
    int slot = 0, at = begin + warp;  // the position of the warp's next quad
    u32 parity = 0;
    auto wait = [&]() { return wait_for(first_label + slot * LABEL_BYTES, parity); };
    auto release = [&]() {
        __syncwarp();  // every lane has read the slot before it is filled again
        produce(slot);
        if (++slot == stages) slot = 0, parity ^= 1;
    };
#pragma unroll 1
    for (int position = begin; position < end; ++number) {
        const Sequence sequence = sequence_at(call, number);
        const bool is_first = position == schedule.begin;
        if (!is_first) quads = quads_of(call.num_pages, sequence.bh);
        const int stop = min(start + quads, end);
        if (quads == 0) continue;
        Query query;
        if (WIDTHS_K & CODED) {
            if (number != schedule.queried) read_query(call, sequence, warp, lane, raw);
            if (warp < sequence.rows) rotate_query(raw, call.scale * LOG2E, rows + warp * ROW_FLOATS, lane);
            if (threadIdx.x == 0) exponent_of_values = value_exponent(raw);
            raw = {};         // or it takes registers until the next sequence
            __syncthreads();  // all query rows are rotated
            load_query(rows, sequence.rows, lane, query);
        } else if (WIDTHS_V & CODED) {
            if (threadIdx.x == 0) exponent_of_values = call.exponent[2 * sequence.bh + 1];
            __syncthreads();  // it is there
        }
#pragma unroll 1
        for (; filled < stages; ++filled) produce(filled);
        State state;
        clear(state, bits_of<WIDTHS_V>(0));
        constexpr bool KNOWN =
            LANE_ROWS == 1 || SAVED_SCORE_BYTES == 4;  // else registers have no room for them
        const SavedRows known_rows =
            SAVED_SCORE_BYTES && KNOWN ? saved_rows(call, sequence, lane) : SavedRows{};
        const auto save = [&](const float (&s)[8][LANE_ROWS]) {
            if (!SAVED_SCORE_BYTES) return;
            const u32 column = load_shared(first_label + slot * LABEL_BYTES + COLUMN);
            int own = lane;
            asm volatile("" : "+r"(own));  // or they are found before
            save_scores(KNOWN ? known_rows : saved_rows(call, sequence, own), column, state, s);
        };
        const u16* row = WIDTHS_K & RAW ? q_row(call, sequence, min(lane / 4, sequence.rows - 1)) : nullptr;
        const FirstVisible visible = WINDOW ? first_visible_of_lane(call, sequence, lane) : FirstVisible{};

#pragma unroll 1
        for (; at < stop; at += WARPS) {
            Item item = wait();
            const PageWords words = item.words;
            const Rung& rung = call.rungs[words.of[0] & RUNG];
            const u32 label = first_label + slot * LABEL_BYTES;
            float s[8][LANE_ROWS];
            if (WINDOW && !words.have(31 << 8)) {  // no query row sees a token of the quad, or it has none
                mask_quad(s);
                save(s);
                release();
                continue;
            }
            const bool masked = WINDOW && words.have(MASKED);
            u32 offsets[4];
#pragma unroll
            for (int b = 0; b < 4; ++b)
                if (WINDOW && words.of[b] & MASKED)
                    offsets[b] =
                        ((const u32*)offsets_of(rung, load_shared(label + INDICES + 4 * b)))[lane / 4];
            const int bits_k = key_bits_of(rung.bits_k), bits_v = bits_of<WIDTHS_V>(rung.bits_v);
            const bool one = is_one_item(bits_k, bits_v);
            float base[LANE_ROWS];
#pragma unroll
            for (int j = 0; j < LANE_ROWS; ++j) base[j] = SOFTCAP ? 0.f : state.row_max[j];
#if IN_BLOCKS
            scores_of_profile<0>(bits_k, item, query, base, s, lane);
#else
            if ((WIDTHS_K & 1) && bits_k == 2) coded_scores<2>(item, query, base, s, lane);
            if ((WIDTHS_K & 2) && bits_k == 3) coded_scores<3>(item, query, base, s, lane);
            if ((WIDTHS_K & 4) && bits_k == 4) coded_scores<4>(item, query, base, s, lane);
            if ((WIDTHS_K & 8) && bits_k == 8) coded_scores<8>(item, query, base, s, lane);
#endif
#if !INT8_MMA
            if ((WIDTHS_K & RAW) && bits_k == 16) {
                raw_scores<0>(item, row, call.scale * LOG2E, base, s, lane);
                release();
                item = wait();
                raw_scores<2>(item, row, call.scale * LOG2E, base, s, lane);
            }
#endif
            const u32 from = one ? key_side_bytes(bits_k) : 0;  // where values begin in an item
            if (!one) {
                release();
                item = wait();
            }
            if (SOFTCAP) cap_scores(call.softcap * LOG2E, state.row_max, s);
            if (!words.are_full()) mask_unused(words, s, lane);
            if (masked) mask_before_window(offsets, words, visible, s);
#if !INT8_MMA
            if (state.bits != bits_v) change_basis(state, bits_v, exponent_of_values, lane);
            if ((WIDTHS_V & RAW) && bits_v == 16) {
                update_row_max<false>(s, {}, state);
                save(s);
                probabilities(s, state);
                const ScaledP scaled_p = scale_probabilities(s);
                add_raw_values<0>(item, scaled_p, words, state, lane);
                release();
                add_raw_values<2>(wait(), scaled_p, words, state, lane);
                release();
                continue;
            }
#endif
            const Scales scales = load_live_scales(item, from + code_bytes(bits_v), words, lane);
            update_row_max<!INT8_MMA>(s, scales, state);
            save(s);
            probabilities(s, state);
            const ScaledP scaled_p = scale_probabilities(s, scales, bits_v);
            if ((WIDTHS_V & 1) && bits_v == 2) add_coded_values<2>(item, from, scaled_p, state, lane);
            if ((WIDTHS_V & 2) && bits_v == 3) add_coded_values<3>(item, from, scaled_p, state, lane);
            if ((WIDTHS_V & 4) && bits_v == 4) add_coded_values<4>(item, from, scaled_p, state, lane);
            if ((WIDTHS_V & 8) && bits_v == 8) add_coded_values<8>(item, from, scaled_p, state, lane);
            release();
        }
#if INT8_MMA
        finish(state);
#else
        if (WIDTHS_V & CODED) change_basis(state, 0, exponent_of_values, lane);
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
        // Warps leave the rows of a CTA's only sequence in their rings, which nothing fills any more.
        const Schedule divided = schedule;
        const bool only = divided.num_splits;
        const int max_rows = only ? 8 : call.merge_rows;
        combine_warps(state, sequence.rows, max_rows,
                      (float*)(shared + (only ? 0 : WARPS * stages * call.slot_bytes)),
                      only ? stages * call.slot_bytes / 4 : max_rows * ROW_FLOATS,
                      only ? min(WARPS, end - divided.begin) : WARPS, rows);
        bool last = true;
        const int first = only ? divided.first_cta : cta_of(start, divided.total, divided.ctas);
        const int num_splits =
            only ? divided.num_splits : cta_of(start + quads - 1, divided.total, divided.ctas) - first + 1;
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
                write_row(call, sequence, r, rows + r * ROW_FLOATS, exponent_of_values, lane);
        __syncthreads();  // `rows` may be written again
        position = stop;
        start += quads;
    }
}

// clang-format off
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=31 WIDTHS_V=31 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=0 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=64,80,96,128 BF16=0,1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=1 WIDTHS_V=1 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=8 WIDTHS_V=8 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=1 WINDOW=0 SAVED_SCORE_BYTES=1,4 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=1 SAVED_SCORE_BYTES=1,4 INT8_MMA=1 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=16 WIDTHS_V=16 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=0 registers<=255 arch=sm_90a,sm_120a
// gate: HEAD_DIM=64,80,96,128 BF16=0,1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=2 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=1 WINDOW=0 SAVED_SCORE_BYTES=1 INT8_MMA=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=0 SAVED_SCORE_BYTES=4 INT8_MMA=2 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=1 INT8_MMA=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=15 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=1 SAVED_SCORE_BYTES=1,4 INT8_MMA=2 registers<=255 arch=sm_90a
// gate: HEAD_DIM=80,96 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=12 SOFTCAP=1 WINDOW=0 SAVED_SCORE_BYTES=1,4 INT8_MMA=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=192,256 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=0 registers<=255 arch=sm_90a
// gate: HEAD_DIM=80,256 BF16=0 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=1 SAVED_SCORE_BYTES=0,1 INT8_MMA=0 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=31 WIDTHS_V=31 WARPS=8 SOFTCAP=1 WINDOW=1 SAVED_SCORE_BYTES=4 INT8_MMA=0 registers<=255 arch=sm_90a,sm_100a,sm_120a
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=29 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=31 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=0,1 WIDTHS_K=13 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1,2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=13 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=15 WARPS=12 SOFTCAP=1 WINDOW=0 SAVED_SCORE_BYTES=1,4 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=13 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=15 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=1 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=13 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=0,1 SAVED_SCORE_BYTES=1,4 INT8_MMA=2 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=13 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=15 WARPS=8 SOFTCAP=1 WINDOW=1 SAVED_SCORE_BYTES=1,4 INT8_MMA=1 registers<=255 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=13 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=15 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1,2 registers<=255 arch=sm_100a,sm_120a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=5 PROFILES=k4220 WIDTHS_V=1 WARPS=12 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=1 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=29 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=31 WARPS=12 SOFTCAP=1 WINDOW=0 SAVED_SCORE_BYTES=1,4 INT8_MMA=0 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 WIDTHS_K=29 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=31 WARPS=8 SOFTCAP=1 WINDOW=1 SAVED_SCORE_BYTES=4 INT8_MMA=0 registers<=255 arch=sm_90a,sm_100a,sm_120a
// gate: HEAD_DIM=192,256 BF16=0,1 WIDTHS_K=29 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=31 WARPS=8 SOFTCAP=0 WINDOW=0 SAVED_SCORE_BYTES=0 INT8_MMA=0 registers<=255 arch=sm_90a
// gate: HEAD_DIM=256 BF16=0 WIDTHS_K=29 PROFILES=k4220k4422k8422k8444k8888 WIDTHS_V=31 WARPS=8 SOFTCAP=1 WINDOW=1 SAVED_SCORE_BYTES=1 INT8_MMA=0 registers<=255 arch=sm_90a
// clang-format on
