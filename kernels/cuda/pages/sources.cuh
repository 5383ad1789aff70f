// Where a page's vectors come from: moves, raw rows, means and importance are asked for (cp.async) while the
// page before is encoded. All of this is of one warp, which takes a side of a page.
//
// Rows of slots lie in shared memory in the order of the rows of tiles.
#pragma once

#include "common/async_copies.cuh"
#include "pages/state.cuh"
#include "pages/words.cuh"

using Rows = RawRows<false>;
#if IN_BLOCKS
using Width = u16;  // of a side of a rung: of keys a profile
#else
using Width = u8;
#endif

// One side (K or V) of a page.
struct Region {
    u8 *codes, *steps;
    int bits;
};

__device__ __forceinline__ Region region_of(Side side, u8* record, const CacheRung& rung) {
    const int bits = side == KEYS ? rung.bits_k : rung.bits_v;
    if (side == VALUES) record += key_code_bytes(rung.bits_k) + step_bytes(rung.bits_k);
    return {record, record + (side == KEYS ? key_code_bytes(bits) : code_bytes(bits)), bits};
}

constexpr u8 NO_MOVE = 254;  // Move::from_rung of lanes that have none
constexpr int NO_ROW = -1;   // of vectors that are not fetched

__device__ __forceinline__ bool is_new(const Move& move) {
    return move.from_rung == NEW_TOKEN;
}

// A side of a destination page: its moves, what its rows hold, and its positions and importance.
struct PageState {
    uint4 moves[PAGE];           // Move
    uint4 halves[HEAD_DIM / 8];  // the mean of the keys of its pair, float16
    u8 shifts[HEAD_DIM];         // and their shifts
    u32 importance_words[PAGE];  // by move: what a new token's importance is a byte of
    Width bits[PAGE];            // by slot: what its row holds, raw elements (16) or codes
    u8 steps[PAGE];              // by slot: of the codes that a row holds
#if IN_BLOCKS
    u8 order[HEAD_DIM];  // k_order of its pair
    float gain[4];
    u32 exponents;  // a word with that of this side of its pair
    u32 any_raw;    // whether a row holds raw elements
#endif
    Region to;
    u8* tail;
    u32 mask;    // slots that are written
    u32 others;  // whether a row comes from elsewhere than by a copy that was asked for
};

// Rows of this page and of the next, which are on their way; states of these and of the one after, whose
// moves are.
struct alignas(16) WarpSpace {
    u8 rows[2][PAGE * Rows::BYTES];
    Frame frame;  // of keys
    PageState pages[3];
};
static_assert(sizeof(WarpSpace) == (IN_BLOCKS ? 89 * HEAD_DIM + 1856 : 78 * HEAD_DIM + 1728),
              "as the host reserves");

// What the warps of a CTA share.
struct Shared {
    Signs signs[32];      // by lane
    u32 heads, per_head;  // 2^32 / heads, rounded down
    bool in_units;        // are_in_units
};

// The lane, asked for again: what follows from it is computed again, too, and takes no registers meanwhile.
__device__ __forceinline__ u32 lane_again() {
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ __forceinline__ u8* row_for(u8* rows, const Move& move) {
    return rows + row_of(move.to_slot) * Rows::BYTES;
}

// Asks for the moves of a page; NO_MOVE where there is none.
__device__ __forceinline__ void ask_for_moves(const MoveList& list, int number, uint4* moves) {
    const u32 lane = lane_again();
    if (lane >= PAGE) return;
    const u32 begin = list.begins[number];
    if (begin + lane < list.begins[number + 1])
        copy_async(moves + lane, list.moves + begin + lane);
    else
        moves[lane] = {0, 0, (u32)NO_MOVE << 16, 0};
}

// Row, head and step of a new token.
struct TokenPlace {
    int batch, head, step;
};

__device__ __forceinline__ TokenPlace place_of(const NewTokens& new_tokens, const Move& move,
                                               const Shared& shared) {
    u32 batch = __umulhi(move.from, shared.per_head);  // or one less
    u32 head = move.from - batch * shared.heads;
    if (head >= shared.heads) head -= shared.heads, ++batch;
    return {(int)batch, (int)head, (int)(move.token - batch * new_tokens.num_new)};
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
        return s.batch * llabs(batch) + n.num_new * llabs(step) + s.heads * llabs(head);
    };
    const u64 odd =
        (u64)n.k | (u64)n.v | 2 * (n.k_batch | n.k_step | n.k_head | n.v_batch | n.v_step | n.v_head);
    return odd % 16 == 0 &&
           max(extent(n.k_batch, n.k_step, n.k_head), extent(n.v_batch, n.v_step, n.v_head)) >> 34 == 0;
}

// Asks for raw vectors of new tokens if they are in units of 16 bytes; says what rows hold.
__device__ __forceinline__ void ask_for_rows(Side side, const LayerState& s, const NewTokens& new_tokens,
                                             u8* rows, const Shared& shared, PageState& page) {
    constexpr int PARTS = HEAD_DIM / 8, LANES_OF_ROW = PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32;
    constexpr int AT_ONCE = 32 / LANES_OF_ROW;
    const u32 lane = lane_again();
    const Move move = (const Move&)page.moves[lane % PAGE];
    const bool moves = move.from_rung != NO_MOVE, fetched = moves && is_new(move) && shared.in_units;
#if IN_BLOCKS
    bool raw = false;
#endif
    if (moves) {
        u32 bits = 16;
        if (!is_new(move)) {
            const CacheRung& rung = s.rungs[move.from_rung];
            bits = side == KEYS ? rung.bits_k : rung.bits_v;
        }
        page.bits[move.to_slot] = (Width)bits;
#if IN_BLOCKS
        raw = bits == 16;
#endif
    }
    const u32 mask = __reduce_or_sync(ALL_LANES, moves ? 1u << move.to_slot : 0u);
    const u32 others = __any_sync(ALL_LANES, moves && !fetched);
    if (lane == 0) page.mask = mask, page.others = others;
#if IN_BLOCKS
    const u32 any_raw = __any_sync(ALL_LANES, raw);
    if (lane == 0) page.any_raw = any_raw;
#endif
    const TokenPlace place = place_of(new_tokens, move, shared);
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
    for (int i = 0; i < PAGE; i += AT_ONCE) {
        const int vector = i + lane / LANES_OF_ROW, its_row = __shfl_sync(ALL_LANES, row, vector),
                  its_unit = __shfl_sync(ALL_LANES, unit, vector);
        if (its_row != NO_ROW && (PARTS == LANES_OF_ROW || part < PARTS))
            copy_async(rows + its_row * Rows::BYTES + 16 * part, from + its_unit);
    }
}

// The pair that a move to one of its pages is of.
__device__ __forceinline__ u32 pair_of(const Move& move) {
    return is_new(move) ? move.from : move.token;
}

#if IN_BLOCKS
__device__ __forceinline__ const signed char* place_of_exponent(Side side, const LayerState& s,
                                                                const Move& move) {
    return s.exponent + 2 * pair_of(move) + side;
}

#endif

// The exponent of a side of a page, which is there.
__device__ __forceinline__ int exponent_of(Side side, const LayerState& s, const PageState& page) {
#if IN_BLOCKS
    const u64 at = (u64)place_of_exponent(side, s, (const Move&)page.moves[0]);
    return (signed char)(page.exponents >> at % 4 * 8);
#else
    return 0;
#endif
}

// Asks for all that a side of a page needs.
__device__ __forceinline__ void ask_for_page(Side side, const LayerState& s, const NewTokens& new_tokens,
                                             u8* rows, const Shared& shared, PageState& page) {
    const u32 lane = lane_again();
    ask_for_rows(side, s, new_tokens, rows, shared, page);
    const Move first = (const Move&)page.moves[0];
    if (lane == 0) {
        const CacheRung& rung = s.rungs[first.to_rung];
        u8* const record = s.arena + (u64)first.to * UNIT;
        page.to = region_of(side, record, rung);
        page.tail = record + rung.tail;
    }
#if IN_BLOCKS
    if (lane == 0)
        copy_word_async(&page.exponents, (const void*)((u64)place_of_exponent(side, s, first) & ~3ull));
#endif
    if (side == VALUES) return;
    const u64 channels = (u64)pair_of(first) * HEAD_DIM;
    if (lane < HEAD_DIM / 8) copy_async(page.halves + lane, s.k_mean + channels + 8 * lane);
    if (lane < HEAD_DIM / 16) copy_async((uint4*)page.shifts + lane, s.k_shift + channels + 16 * lane);
#if IN_BLOCKS
    if (lane < HEAD_DIM / 16) copy_async((uint4*)page.order + lane, s.k_order + channels + 16 * lane);
    if (lane == 0) copy_async(page.gain, s.k_gain + 4 * pair_of(first));
#endif
    if (lane >= PAGE) return;
    const Move move = (const Move&)page.moves[lane];
    if (!is_new(move)) return;
    const u32 step = place_of(new_tokens, move, shared).step;
    const u64 at = (u64)(new_tokens.importance + (u64)move.from * new_tokens.num_new + step);
    copy_word_async(page.importance_words + lane, (const void*)(at & ~3ull));
}
