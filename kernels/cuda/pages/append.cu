// What a decode step adds to attention over pages: its own tokens, attended exactly, then stored.
//
// `append_tokens` takes the result of packed attention over the stored tokens and finishes it with the new
// ones, causally, by their log-sum-exp; finds what attention the new tokens got; rotates, quantises and packs
// them into the open pages of the top rung. Position and slot come from the device, so that a captured graph
// goes on where it is.
//
// What a step waits for here is latency, so work that depends on nothing is done side by side: each of the
// scales that may be tried for a vector has a warp, the one of the scale that is found stores its codes, and
// addresses are asked for while vectors are rotated. Where nothing is tried, as at 8 bits, a vector has
// one warp.
//
// Where keys are kept in blocks, the frame is fitted to the new tokens, too (pages/refit.cuh): HEAD_DIM / 2
// threads see beside all else whether a rotary pair has become large. If so, which is rare, all pages of the
// head are changed, and the new tokens stored once more.
//
// Threads and data
//   CTA   one (KV head, row) = bh; 16 warps; a vector has VECTOR_WARPS, one for each scale that is tried
//   vector  0: keys of the new tokens, one after another; 1: values. The first query rows (step, head of the
//         group) go to the other warps, those that are left to all warps one after another.
//   lane  of a vector to be stored: elements lane + 32 j; of a query row: pairs of elements lane + 32 i, and
//         the score of new token `lane`
// Memory: shared 16.4 KiB, probabilities of 16 new tokens of 16 heads for the most part.
//
// Macros: HEAD_DIM; BF16; BITS_K, BITS_V: widths of the top rung; IN_BLOCKS: whether the ladder has profiles,
// of which BITS_K is then one, or 16.
#include "common/early_launch.cuh"
#include "pages/code_layout.cuh"
#include "pages/refit.cuh"
#include "pages/search_blocks.cuh"
#include "pages/state.cuh"

constexpr int KEY_TRIES = IN_BLOCKS && BITS_K != 16 ? tries_of_profile(BITS_K) : tries_of(BITS_K);
constexpr int VECTOR_WARPS = KEY_TRIES > tries_of(BITS_V) ? KEY_TRIES : tries_of(BITS_V);  // of a vector
constexpr int WARPS = 16, FIRST_ROWS = WARPS - 2 * VECTOR_WARPS;
constexpr int MAX_NEW = 16, MAX_GROUP = 16;
constexpr int HALF2_OF_LANE = (HEAD_DIM / 2 + 31) / 32;
#define INFINITE __int_as_float(0x7f800000)

// Byte offsets in a record of the top rung.
constexpr int K_SCALES = key_code_bytes(BITS_K), V_CODES = K_SCALES + scale_bytes(BITS_K);
constexpr int V_SCALES = V_CODES + code_bytes(BITS_V), TAIL = V_SCALES + scale_bytes(BITS_V);

enum Observed { MASS, INVERSE_NORM, ONE };  // what the importance of a new token is

// Which rows a launch serves: while tokens of some rows wait, those of the others go to pages of other
// widths.
enum Rows { ALL_ROWS, WAITING_ROWS, OTHER_ROWS };

struct Append {
    LayerState layer;
    NewTokens new_tokens;
    const u16* q;  // [batch, num_new, heads * group, HEAD_DIM] by strides, or null: no queries
    u16* out;      // [batch, num_new, heads * group, HEAD_DIM]: attention over stored tokens
    float* lse;    // [batch, heads * group, num_new], of `out`; both are finished in place
    long long q_batch, q_step, q_head;
    int group, has_stored, observed;  // has_stored 0: out and lse hold nothing yet
    float scale, softcap;
    int rows;  // one of Rows
};

// The slot of a new token: a record of the arena and a slot in it; no record if there is no room.
struct Slot {
    u8* page;
    int entry, number, position;
};

__device__ __forceinline__ bool is_valid(const NewTokens& new_tokens, int row, int step) {
    return !new_tokens.valid || new_tokens.valid[row * new_tokens.num_new + step];
}

struct NewToken {
    int bh, row, head, step, start;  // start: the position of step 0
};

struct OpenPage {
    int entry, count, base;
    u32 index;
};

__device__ __forceinline__ OpenPage open_page(const LayerState& s, int bh, int entry) {
    const u64 at = (u64)bh * s.entries + max(entry, 0);
    return {entry, s.count[at], s.base[at], s.index[at]};
}

// Tokens fill the open pages in order; a page takes positions of its own segment only. What the pages hold is
// not changed on the way: the compiler would bring copies of it forward and wait for them.
__device__ __forceinline__ Slot slot_of(const Append& call, const OpenPage& first, const OpenPage& second,
                                        const NewToken& at) {
    bool in_second = false;
    int before = 0;  // new tokens that the page takes
#pragma unroll 1
    for (int t = 0; t <= at.step; ++t) {
        if (!is_valid(call.new_tokens, at.row, t)) continue;
        const int segment = (at.start + t) >> 16;
        const auto takes = [&](const OpenPage& page) {
            return page.entry >= 0 && page.base == segment && page.count + before < PAGE;
        };
        if (!in_second && !takes(first)) in_second = true, before = 0;
        if (in_second && !takes(second)) return {nullptr, -1, 0, 0};
        ++before;
    }
    const OpenPage& page = in_second ? second : first;
    return {call.layer.arena + (u64)page.index * UNIT, page.entry, page.count + before - 1,
            at.start + at.step};
}
static_assert(OPEN_PAGES == 2 && MAX_NEW <= PAGE, "a first and a second page");

// What the warps of a vector tell each other.
struct alignas(16) Scratch {
    u32 errors[2][4];  // by stages
#if IN_BLOCKS
    u32 arranged[VECTOR_WARPS][HEAD_DIM];  // of a warp, which puts channels in order
#endif
};

// Which of the scales that are tried is the one; all warps of a vector meet. The two in the middle are those
// next to the guess; the one beyond the better of them counts if it is better still.
template <int TRIES>
__device__ __forceinline__ u32 best_of(Scratch& scratch, u32 error, int vector, int rank, int stage,
                                       int lane) {
    u32* errors = scratch.errors[stage];
    if (lane == 0) errors[rank] = error;
    // Errors are there behind it; those of the stage before have been read.
    __barrier_sync_count(1 + vector, TRIES * 32);
    const uint4 e = *(const uint4*)errors;
    if constexpr (TRIES == 2) return e.y < e.x;
    const bool up = e.z < e.y;
    return (up ? e.w : e.x) < min(e.y, e.z) ? 3 * up : 1 + up;
}

// Position and importance of a new token that queries do not say anything about.
__device__ __forceinline__ void store_details(const Append& call, const Slot& slot,
                                              const float (&x)[PER_LANE], int lane) {
    u8* tail = slot.page + TAIL;
    if (lane == 0) ((u16*)tail)[slot.number] = (u16)slot.position;
    if (call.observed == MASS) return;
    double squares = 0.;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) squares += (double)x[j] * x[j];
#pragma unroll
    for (int h = 16; h > 0; h /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, h);
    const float norm = (float)sqrt(squares);
    if (lane == 0)
        tail[2 * PAGE + slot.number] =
            encode_importance(call.observed == ONE ? 1.f : __fdiv_rn(1.f, fmaxf(norm, 1e-6f)));
}

// Stores one side of a new token; warp `rank` of the vector tries one scale. Where there is nothing to try,
// the first warp does all. BITS of keys may be a profile.
template <int BITS>
__device__ __forceinline__ void store_token(const Append& call, bool is_key, const NewToken& at,
                                            Slot& slot_out, Scratch& scratch, int rank, int stage, int lane) {
    constexpr bool IS_PROFILE = BITS > 16, IS_CODED = BITS != 16;
    constexpr int TRIES = IS_PROFILE ? tries_of_profile(BITS) : tries_of(BITS);
    if (rank >= TRIES) return;
    const NewTokens& n = call.new_tokens;
    const u16* from = is_key ? n.k + at.row * n.k_batch + at.step * n.k_step + at.head * n.k_head
                             : n.v + at.row * n.v_batch + at.step * n.v_step + at.head * n.v_head;
    const int2 open = ((const int2*)call.layer.open)[at.bh];
#if IN_BLOCKS
    ChannelOrder order;
    if constexpr (IS_PROFILE) order = channel_order(call.layer, at.bh, lane);
#endif
    const int down = IS_CODED ? call.layer.exponent[2 * at.bh + !is_key] : 0;
    u32 raw[PER_LANE];
    int shift[PER_LANE];
    float mean[PER_LANE], x[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int channel = lane + 32 * j;
        raw[j] = is_there(lane, j) ? from[channel] : 0;
        const bool framed = is_key && IS_CODED && is_there(lane, j);
        const u64 of_bh = (u64)at.bh * HEAD_DIM + channel;
        mean[j] = framed ? __half2float(call.layer.k_mean[of_bh]) : 0.f;
        shift[j] = framed ? call.layer.k_shift[(u64)at.bh * (HEAD_DIM / 2) + channel % (HEAD_DIM / 2)] : 0;
    }
    const OpenPage first = open_page(call.layer, at.bh, open.x);
    const OpenPage second = open_page(call.layer, at.bh, open.y);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = raw_value(raw[j]);
    u32 best = 0, byte = 0, codes[PER_LANE];
    if constexpr (IS_CODED) {
        float scaled[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const float power = power_of_two(-shift[j]);
            mean[j] *= power;
            scaled[j] = BF16 ? x[j] * power : __half2float(__float2half(x[j] * power));
            if (!is_key && turns_sign(lane + 32 * j)) scaled[j] = -scaled[j];
            scaled[j] = divided(scaled[j], down);
        }
#if IN_BLOCKS
        if constexpr (IS_PROFILE) {
            const Elements elements = rotate_in_blocks(scaled, mean, order, scratch.arranged[rank], lane);
            const auto agree = [&](u32 error) {
                best = best_of<TRIES>(scratch, error, 0, rank, stage, lane);
                return best;
            };
            byte = encode_key<BITS>(elements, rank, agree, codes, lane);
        } else
#endif
        {
            const Rotated rotated = rotate_vector(scaled, mean);
            const Range range = range_of(rotated, BITS);
            Magnitudes magnitudes;
            if constexpr (BITS < 8) to_magnitudes(rotated, range, magnitudes, lane);
            const Guess guess = guess_scale<BITS>(rotated, range, magnitudes);
            u32 found = guess.bits;
            if constexpr (takes_nearest(BITS)) {
                found = nearest_byte(found);
            } else if constexpr (BITS < 8) {
                const u32 lowest = below_guess(guess.bits) - (BITS < 4);
                const u32 error = error_of<BITS>(magnitudes, range, lowest, rank, lane);
                best = best_of<tries_of(BITS)>(scratch, error, is_key ? 0 : 1, rank, stage, lane);
                found = lowest + best;
            }
            byte = guess.counts ? found : rotated.finite ? 0 : NAN_SCALE;
            if (rank == best) to_codes<BITS>(rotated, range, found, guess.counts, codes);
        }
    }
    if (rank != best && rank != 0) return;
    const Slot slot = slot_of(call, first, second, at);
    if (rank == 0 && is_key) {
        if (lane == 0) slot_out = slot;
        if (slot.entry < 0 && lane == 0) atomicOr(call.layer.status, OVER_BUDGET);
    }
    if (slot.entry < 0) return;
    if (rank == 0 && is_key) store_details(call, slot, x, lane);
    if (rank != best) return;
    if (IS_CODED && lane == 0) slot.page[(is_key ? K_SCALES : V_SCALES) + slot.number] = (u8)byte;
    u8* const region = slot.page + (is_key ? 0 : V_CODES);
#if IN_BLOCKS
    if constexpr (IS_PROFILE && BITS != ALL_OF_8) return write_key<BITS>(region, slot.number, codes, lane);
#endif
    constexpr int WIDTH = IS_PROFILE ? 8 : BITS;
    const Element first_element = element_at(is_key ? KEYS : VALUES, slot.number, lane);
    constexpr bool IN_SAME_WORDS = WIDTH == 3;  // those of a channel and of that 32 further on, two tiles
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        if (!is_there(lane, j)) break;
        Element element = first_element;
        element.tile += IN_SAME_WORDS ? 2 * j : 0;
        write_code<WIDTH>(region + (IN_SAME_WORDS ? 0 : 64 * WIDTH * j), element,
                          WIDTH == 16 ? raw[j] : codes[j]);
    }
}

// Adds queries of tokens that wait to what the frame of their keys is made of, as freeze_means does; a thread
// has a channel.
__device__ __forceinline__ void note_queries(const Append& call, int bh, const Slot* slots) {
    const int row = bh / call.layer.heads, head = bh - row * call.layer.heads;
    float* const sums = call.layer.query_sums + (u64)bh * HEAD_DIM + threadIdx.x;
    float sum = *sums;
#pragma unroll 1
    for (int t = 0; t < call.new_tokens.num_new; ++t) {
        const int token = PAGE * slots[t].entry + slots[t].number;  // of those that wait; none has a negative
        if (token < ASKING || token >= LAST) continue;
        const u16* q = call.q + row * call.q_batch + t * call.q_step + head * call.group * call.q_head;
#pragma unroll 1
        for (int g = 0; g < call.group; ++g) sum += fabsf(raw_value(q[g * call.q_head + threadIdx.x]));
    }
    *sums = sum;
}

// Finishes one query row and leaves the probabilities of the new tokens, [MAX_NEW]. Padding gets 0, and
// gives no token any: the log-sum-exp that it leaves is infinite.
__device__ __forceinline__ void finish_row(const Append& call, int row, int head, int step, int g,
                                           float* probabilities, int lane) {
    const NewTokens& n = call.new_tokens;
    const int heads_q = call.layer.heads * call.group, head_q = head * call.group + g;
    const u32* q = (const u32*)(call.q + row * call.q_batch + step * call.q_step + head_q * call.q_head);
    u32* out = (u32*)(call.out + (((u64)row * n.num_new + step) * heads_q + head_q) * HEAD_DIM);
    float* lse = call.lse + ((u64)row * heads_q + head_q) * n.num_new + step;
    auto load = [&](const u32* from, u32(&words)[HALF2_OF_LANE]) {
#pragma unroll
        for (int i = 0; i < HALF2_OF_LANE; ++i) {
            const bool there = HEAD_DIM % 64 == 0 || lane + 32 * i < HEAD_DIM / 2;
            words[i] = there ? from[lane + 32 * i] : 0;
        }
    };
    auto key_of = [&](int t) { return (const u32*)(n.k + row * n.k_batch + t * n.k_step + head * n.k_head); };
    auto value_of = [&](int t) {
        return (const u32*)(n.v + row * n.v_batch + t * n.v_step + head * n.v_head);
    };
    u32 query[HALF2_OF_LANE], stored[HALF2_OF_LANE] = {}, key[HALF2_OF_LANE], value[HALF2_OF_LANE];
    load(q, query), load(key_of(0), key), load(value_of(0), value);  // all on their way at once
    if (call.has_stored) load(out, stored);
    float top = call.has_stored ? *lse * LOG2E : -INFINITE, origin = top == -INFINITE ? 0.f : top;
    float total = top == -INFINITE ? 0.f : 1.f, score = -INFINITE;  // score: of new token `lane`
    float2 sum[HALF2_OF_LANE];
#pragma unroll
    for (int i = 0; i < HALF2_OF_LANE; ++i) sum[i] = unpack_pair(stored[i]);
#pragma unroll 1
    for (int t = 0; t <= step; ++t) {
        if (t) load(key_of(t), key), load(value_of(t), value);
        if (!is_valid(n, row, t)) continue;
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < HALF2_OF_LANE; ++i) {
            const float2 x = unpack_pair(query[i]), y = unpack_pair(key[i]);
            dot += x.x * y.x + x.y * y.y;
        }
#pragma unroll
        for (int h = 16; h > 0; h /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, h);
        dot *= call.scale;
        if (call.softcap > 0.f) dot = call.softcap * tanhf(dot / call.softcap);
        dot *= LOG2E;
        if (lane == t) score = dot;
        const float higher = fmaxf(top, dot);
        origin = higher == -INFINITE ? 0.f : higher;
        const float keep = power_of_2(top - origin), p = power_of_2(dot - origin);
        top = higher;
        total = total * keep + p;
#pragma unroll
        for (int i = 0; i < HALF2_OF_LANE; ++i) {
            const float2 y = unpack_pair(value[i]);
            sum[i].x = sum[i].x * keep + p * y.x;
            sum[i].y = sum[i].y * keep + p * y.y;
        }
    }
    const bool counts = is_valid(n, row, step);
    const float unit = total == 0.f ? 0.f : __fdividef(1.f, total);  // a finite total is 1 or more
    const float weight = power_of_2(score - origin) * unit;
#pragma unroll
    for (int i = 0; i < HALF2_OF_LANE; ++i) {
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        out[lane + 32 * i] = counts ? pack_pair(sum[i].x * unit, sum[i].y * unit) : 0;
    }
    if (lane == 0) *lse = !counts ? INFINITE : total == 0.f ? -INFINITE : (origin + __log2f(total)) * LN2;
    if (lane < MAX_NEW) probabilities[lane] = counts ? weight : 0.f;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    append_tokens(const __grid_constant__ Append call) {
    __shared__ float probabilities[MAX_NEW * MAX_GROUP][MAX_NEW];
    __shared__ Slot slots[MAX_NEW];
    __shared__ Scratch scratches[2];
    const LayerState& layer = call.layer;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_new = call.new_tokens.num_new;
    const int head = blockIdx.x, row = blockIdx.y, bh = row * layer.heads + head;
    const int rows = call.q ? num_new * call.group : 0, vector = warp / VECTOR_WARPS,
              rank = warp % VECTOR_WARPS;
    begin_early();
    if (call.rows != ALL_ROWS && (call.rows == WAITING_ROWS) != (layer.waits[row] != 0)) return;
    const int start = layer.seqlen[bh];
    const auto store = [&] {
        if (vector >= 2) return;
        int stage = 0;
#pragma unroll 1
        for (int step = 0; step < num_new; ++step) {
            if (!is_valid(call.new_tokens, row, step)) {
                if (threadIdx.x == 0) slots[step].entry = -1;
                continue;
            }
            const NewToken at = {bh, row, head, step, start};
            Scratch& scratch = scratches[vector];
            // A copy of the code for each: a branch that both take costs more than what only one of them
            // meets.
            if (vector == 0)
                store_token<BITS_K>(call, true, at, slots[step], scratch, rank, stage, lane);
            else
                store_token<BITS_V>(call, false, at, slots[step], scratch, rank, stage, lane);
            stage ^= 1;
        }
    };
    store();
#if IN_BLOCKS
    int rises = 0;
    const int pair = threadIdx.x - (WARPS * 32 - HEAD_DIM / 2);
    if (pair >= 0 && call.q) {
        const int shift = layer.k_shift[(u64)bh * (HEAD_DIM / 2) + pair];
        const Queries queries = {call.q, call.q_batch, call.q_step, call.q_head, call.group};
        const int ratio = follow_ratio(layer, call.new_tokens, queries, row, head, 0, pair);
        const int further = further_shift(ratio, shift, pair, [] { __barrier_sync_count(3, HEAD_DIM / 2); });
        if (further && !layer.waits[row]) rises = further;
    }
#endif
#pragma unroll 1
    for (int r = (warp + FIRST_ROWS) % WARPS; r < rows; r += WARPS) {
        int step = 0, g = r;
#pragma unroll 1
        for (; g >= call.group; g -= call.group) ++step;
        finish_row(call, row, head, step, g, probabilities[r], lane);
    }
    __syncthreads();  // slots and probabilities are whole; nobody looks at counts and length any more
    // Nothing more: racecheck misses the one before where only one vector's warps met at its own.
#if IN_BLOCKS
    if (__syncthreads_or(rises)) {  // rare, so it has a copy of the code that stores
        raise_shifts(layer, bh, pair, rises);
        store();
        __syncthreads();  // slots are whole
    }
#else
    __syncthreads();
#endif
    if (BITS_K == 16 && call.q && layer.waits[row] && threadIdx.x < HEAD_DIM) note_queries(call, bh, slots);
    if (call.observed == MASS) {
#pragma unroll 1
        for (int t = warp; t < num_new; t += WARPS) {
            float mass = 0.f;
#pragma unroll 1
            for (int r = lane; r < rows; r += 32) mass += probabilities[r][t];
#pragma unroll 1
            for (int h = rows > 4 ? 16 : 2; h > 0; h /= 2) mass += __shfl_xor_sync(ALL_LANES, mass, h);
            if (lane == 0 && slots[t].entry >= 0)
                slots[t].page[TAIL + 2 * PAGE + slots[t].number] =
                    encode_importance(__fdividef(mass, (float)rows));
        }
    }
    if (threadIdx.x == 32) {
#pragma unroll 1
        for (int t = 0; t < num_new; ++t)
            if (slots[t].entry >= 0)
                layer.count[(u64)bh * layer.entries + slots[t].entry] = (u8)(slots[t].number + 1);
        layer.seqlen[bh] = start + num_new;
    }
}

// gate: HEAD_DIM=128,64 BF16=1,0 BITS_K=8 BITS_V=8 registers<=96
// gate: HEAD_DIM=80,256 BF16=1 BITS_K=3 BITS_V=16 registers<=128
// gate: HEAD_DIM=96 BF16=0 BITS_K=2 BITS_V=4 registers<=96 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1 BITS_K=16 BITS_V=16 registers<=96
// gate: HEAD_DIM=128,64 BF16=1 IN_BLOCKS=1 BITS_K=0x8888 BITS_V=8 registers<=96 arch=sm_90a
// gate: HEAD_DIM=128,64 BF16=1 IN_BLOCKS=1 BITS_K=0x8888 BITS_V=8 registers<=112 arch=sm_100a,sm_120a
// gate: HEAD_DIM=256 BF16=0 IN_BLOCKS=1 BITS_K=0x4422 BITS_V=2 registers<=128 arch=sm_90a
