// Where a page's vectors come from: moves, raw rows, means and importance are asked for (cp.async) while the
// page before is encoded.
#pragma once

#include "common/async_copies.cuh"
#include "pages/side_words.cuh"
#include "pages/state.cuh"

// One side (K or V) of a page.
struct Region {
    u8 *codes, *steps;
    int bits;
};

__device__ __forceinline__ Region region_of(Side side, u8* record, const CacheRung& rung) {
    const int k_bytes = 8 * HEAD_DIM * rung.bits_k, v_bytes = 8 * HEAD_DIM * rung.bits_v;
    u8* steps = record + k_bytes + v_bytes;
    if (side == KEYS) return {record, steps, rung.bits_k};
    return {record + k_bytes, steps + (rung.bits_k < 16 ? 64 : 0), rung.bits_v};
}

constexpr u8 NO_MOVE = 254;  // Move::from_rung of threads that have none
constexpr int NO_ROW = -1;   // of vectors that are not fetched

__device__ __forceinline__ bool is_new(const Move& move) {
    return move.from_rung == NEW_TOKEN;
}

// A side of a destination page: its moves, what its rows hold, and its positions and importance.
struct PageState {
    uint4 moves[SLOTS];           // Move
    uint4 halves[HEAD_DIM / 8];   // the mean of the keys of its pair, float16
    Frame frame;                  // of these keys
    u32 importance_words[SLOTS];  // by move: what a new token's importance is a byte of
    u32 mask[2];                  // slots that are written
    u32 others;                   // whether a row comes from elsewhere than by a copy that was asked for
    u8 bits[SLOTS];               // by slot: what its row holds, raw elements (16) or codes
    u8 steps[SLOTS];              // by slot: of the codes that a row holds
    Region to;
    u8* tail;

    __device__ __forceinline__ u64 mask_of_slots() const { return (u64)mask[1] << 32 | mask[0]; }
};

// Of this page, of the next, whose rows are on their way, and of the one after, whose moves are.
struct Pipeline {
    PageState pages[3];
    Signs signs[32];      // by lane
    u32 heads, per_head;  // 2^32 / heads, rounded down
    bool in_units;        // are_in_units
};

// threadIdx.x, asked for again: what follows from it is computed again, too, and takes no registers
// meanwhile.
__device__ __forceinline__ u32 thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

__device__ __forceinline__ u8* row_for(u8* rows, const Move& move) {
    return rows + row_of(move.to_slot) * Rows::BYTES;
}

// Asks for the moves of a page, by the threads without a tail; NO_MOVE where there is none.
__device__ __forceinline__ void ask_for_moves(const MoveList& list, int group, uint4* moves) {
    const int thread = (int)thread_again() - SLOTS;
    if (thread < 0) return;
    const int begin = list.begins[group], moved = list.begins[group + 1] - begin;
    if (thread < moved)
        copy_async(moves + thread, list.moves + begin + thread);
    else
        moves[thread] = {0, 0, (u32)NO_MOVE << 16, 0};
}
static_assert(SIDE_THREADS == 2 * SLOTS, "a thread a move");

// The 8 channels of the mean of keys that a thread of the last warp asks for, or none: HEAD_DIM / 8 or more.
__device__ __forceinline__ u32 eight_of_mean() {
    return thread_again() - (SIDE_THREADS - 32);
}

// Row, head and step of a new token.
struct TokenPlace {
    int batch, head, step;
};

__device__ __forceinline__ TokenPlace place_of(const NewTokens& new_tokens, const Move& move,
                                               const Pipeline& pipeline) {
    u32 batch = __umulhi(move.from, pipeline.per_head);  // or one less
    u32 head = move.from - batch * pipeline.heads;
    if (head >= pipeline.heads) head -= pipeline.heads, ++batch;
    return {(int)batch, (int)head, (int)(move.token - batch * new_tokens.steps)};
}

__device__ __forceinline__ const u16* new_vector(Side side, const NewTokens& new_tokens,
                                                 const TokenPlace& at) {
    return side == KEYS ? new_tokens.k + at.batch * new_tokens.k_batch + at.step * new_tokens.k_step +
                              at.head * new_tokens.k_head
                        : new_tokens.v + at.batch * new_tokens.v_batch + at.step * new_tokens.v_step +
                              at.head * new_tokens.v_head;
}

// Whether all vectors begin at multiples of 16 bytes, less than 2^31 of them from the first.
__device__ __forceinline__ bool are_in_units(const LayerState& s, const NewTokens& n) {
    const auto extent = [&](long long batch, long long step, long long head) {
        return s.batch * llabs(batch) + n.steps * llabs(step) + s.heads * llabs(head);
    };
    const u64 odd =
        (u64)n.k | (u64)n.v | 2 * (n.k_batch | n.k_step | n.k_head | n.v_batch | n.v_step | n.v_head);
    return odd % 16 == 0 &&
           max(extent(n.k_batch, n.k_step, n.k_head), extent(n.v_batch, n.v_step, n.v_head)) >> 34 == 0;
}

// Asks for raw vectors of new tokens if they are in units of 16 bytes, 16 of them a warp; says what rows
// hold.
__device__ __forceinline__ void ask_for_rows(Side side, const LayerState& s, const NewTokens& new_tokens,
                                             u8* rows, const Pipeline& pipeline, PageState& page) {
    constexpr int PARTS = HEAD_DIM / 8, LANES_OF_ROW = PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32;
    constexpr int AT_ONCE = 32 / LANES_OF_ROW, VECTORS = SLOTS / (SIDE_THREADS / 32);
    const u32 thread = thread_again(), lane = thread % 32;
    const Move move = (const Move&)page.moves[thread / 32 * VECTORS + lane % VECTORS];
    const bool moves = move.from_rung != NO_MOVE, fetched = moves && is_new(move) && pipeline.in_units;
    if (moves && lane < VECTORS) {
        atomicOr(page.mask + move.to_slot / 32, 1u << move.to_slot % 32);
        u32 bits = 16;
        if (!is_new(move)) {
            const CacheRung& rung = s.rungs[move.from_rung];
            bits = side == KEYS ? rung.bits_k : rung.bits_v;
        }
        page.bits[move.to_slot] = (u8)bits;
        if (!fetched) page.others = 1;
    }
    const TokenPlace place = place_of(new_tokens, move, pipeline);
    const int unit =
        side == KEYS
            ? place.batch * (int)(new_tokens.k_batch >> 3) + place.step * (int)(new_tokens.k_step >> 3) +
                  place.head * (int)(new_tokens.k_head >> 3)
            : place.batch * (int)(new_tokens.v_batch >> 3) + place.step * (int)(new_tokens.v_step >> 3) +
                  place.head * (int)(new_tokens.v_head >> 3);
    // Lanes side by side have parts of one vector, so that few lines are touched at once.
    const int part = lane % LANES_OF_ROW, row = fetched ? row_of(move.to_slot) : NO_ROW;
    const uint4* const from = (const uint4*)(side == KEYS ? new_tokens.k : new_tokens.v) + part;
#pragma unroll
    for (int i = 0; i < VECTORS; i += AT_ONCE) {
        const int vector = i + lane / LANES_OF_ROW, its_row = __shfl_sync(ALL_LANES, row, vector),
                  its_unit = __shfl_sync(ALL_LANES, unit, vector);
        if (its_row != NO_ROW && (PARTS == LANES_OF_ROW || part < PARTS))
            copy_async(rows + its_row * Rows::BYTES + 16 * part, from + its_unit);
    }
}

// Asks for all that a side of a page needs.
__device__ __forceinline__ void ask_for_page(Side side, const LayerState& s, const NewTokens& new_tokens,
                                             u8* rows, const Pipeline& pipeline, PageState& page) {
    const u32 thread = thread_again();
    ask_for_rows(side, s, new_tokens, rows, pipeline, page);
    const Move first = (const Move&)page.moves[0];
    if (thread == SLOTS) {
        const CacheRung& rung = s.rungs[first.to_rung];
        u8* const record = s.arena + (u64)first.to * UNIT;
        page.to = region_of(side, record, rung);
        page.tail = record + rung.tail;
    }
    if (side == VALUES) return;
    const u32 eight = eight_of_mean();
    if (eight < HEAD_DIM / 8) {
        const u32 pair = is_new(first) ? first.from : first.token;
        copy_async(page.halves + eight, s.k_mean + (u64)pair * HEAD_DIM + 8 * eight);
        if (eight < HEAD_DIM / 16)
            copy_async((uint4*)page.frame.shifts + eight, s.k_shift + (u64)pair * HEAD_DIM + 16 * eight);
    }
    if (thread >= SLOTS) return;
    const Move move = (const Move&)page.moves[thread];
    if (!is_new(move)) return;
    const u32 step = place_of(new_tokens, move, pipeline).step;
    const u64 at = (u64)(new_tokens.importance + (u64)move.from * new_tokens.steps + step);
    copy_word_async(page.importance_words + thread, (const void*)(at & ~3ull));
}
