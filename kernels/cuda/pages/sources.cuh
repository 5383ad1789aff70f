// Where the vectors of a destination page come from: what write_tokens (pages/write.cu) asks for in advance.
//
// A warp writes one side, keys or values, of one page after another. While it encodes a page, what it needs
// for the next two is on its way by cp.async: of the page after the next its moves (`ask_for_moves`), of the
// next page, whose moves are there, the raw vectors of new tokens, their importance and the frame of the keys
// (`ask_for_page`). Codes of stored tokens are not copied in advance: pages/write.cu reads them when the
// page's turn comes.
//
// Threads: a lane has a move, lanes 0 to 15. For raw vectors a lane has 16 bytes of one: 8 lanes have a
// vector at head_dim 64, 16 up to 128, 32 above. Memory: shared a WarpSpace for each warp: raw vectors of two
// pages, which lie in the order of the rows of tiles, the frame of this page, and a PageState for each of
// three pages. Together 6.6 KiB at head_dim 64 (7.4 with profiles), 11.4 at 128.
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
    u8 *codes, *scales;
    int bits;
};

__device__ __forceinline__ Region region_of(Side side, u8* record, const CacheRung& rung) {
    const int bits = side == KEYS ? rung.bits_k : rung.bits_v;
    if (side == VALUES) record += key_code_bytes(rung.bits_k) + scale_bytes(rung.bits_k);
    return {record, record + (side == KEYS ? key_code_bytes(bits) : code_bytes(bits)), bits};
}

constexpr u8 NO_MOVE = 254;  // Move::from_rung of lanes that have none
constexpr int NO_ROW = -1;   // of vectors that are not fetched

__device__ __forceinline__ bool is_new(const Move& move) {
    return move.from_rung == NEW_TOKEN;
}

// What is known of one side of a destination page.
struct PageState {
    // Copied by cp.async.
    uint4 moves[PAGE];           // Move
    uint4 halves[HEAD_DIM / 8];  // of the pair that the page is of: the mean of keys, float16
    u8 shifts[HEAD_DIM];         // its shifts, by channel
    u32 importance_words[PAGE];  // by move: a word with the importance of its new token
    // Written when the moves are there.
    Width bits[PAGE];  // by slot: what its row holds, raw elements (16) or codes of this width
    u8 scales[PAGE];   // by slot: the scale of the codes of its row
#if IN_BLOCKS
    u8 order[HEAD_DIM];  // copied: k_order of the pair, by position
    float gain[4];       // copied: k_gain of the pair
#endif
    u32 exponents;  // copied: a word with the exponent of this side of the pair
    u32 any_raw;    // whether a row holds raw elements
    Region to;
    u8* tail;    // positions and importance of the page
    u32 mask;    // slots that are written
    u32 others;  // whether pages/write.cu has to fill rows: those of stored tokens, or all out of units
};

struct alignas(16) WarpSpace {
    u8 rows[2][PAGE * Rows::BYTES];  // of this page and of the next
    Frame frame;                     // of the keys of this page
    PageState pages[3];              // of this page, of the next, and of the one after
};
static_assert(sizeof(WarpSpace) == (IN_BLOCKS ? 89 * HEAD_DIM + 1856 : 78 * HEAD_DIM + 1728),
              "as the host reserves");

// What the warps of a block share.
struct Shared {
    Signs signs[32];  // by lane
    u32 heads;
    u32 per_head;   // 2^32 / heads, rounded down
    bool in_units;  // are_in_units
    int pages;      // where those of the CTA end
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
struct TokenIndex {
    int batch, head, step;
};

__device__ __forceinline__ TokenIndex index_of(const NewTokens& new_tokens, const Move& move,
                                               const Shared& shared) {
    u32 batch = __umulhi(move.from, shared.per_head);  // or one less
    u32 head = move.from - batch * shared.heads;
    if (head >= shared.heads) head -= shared.heads, ++batch;
    return {(int)batch, (int)head, (int)(move.token - batch * new_tokens.num_new)};
}

__device__ __forceinline__ const u16* new_vector(Side side, const NewTokens& new_tokens,
                                                 const TokenIndex& at) {
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

// Says what the rows of a page will hold, of which its moves are there; one warp. `fetched`: whether this
// lane's move is of a new token whose vectors are asked for.
__device__ __forceinline__ void describe_rows(Side side, const LayerState& s, const Move& move, bool fetched,
                                              PageState& page, u32 lane) {
    const bool moves = move.from_rung != NO_MOVE;
    u32 bits = 16;
    if (moves) {
        if (!is_new(move)) {
            const CacheRung& rung = s.rungs[move.from_rung];
            bits = side == KEYS ? rung.bits_k : rung.bits_v;
        }
        page.bits[move.to_slot] = (Width)bits;
    }
    const u32 mask = __reduce_or_sync(ALL_LANES, moves ? 1u << move.to_slot : 0u);
    const u32 others = __any_sync(ALL_LANES, moves && !fetched);
    const u32 any_raw = __any_sync(ALL_LANES, moves && bits == 16);
    if (lane == 0) page.mask = mask, page.others = others, page.any_raw = any_raw;
}

// Which unit of 16 bytes a new token's vector begins at, counted from the first key or value.
__device__ __forceinline__ int unit_of_vector(Side side, const NewTokens& new_tokens, const TokenIndex& at) {
    return side == KEYS
               ? at.batch * (int)(new_tokens.k_batch >> 3) + at.step * (int)(new_tokens.k_step >> 3) +
                     at.head * (int)(new_tokens.k_head >> 3)
               : at.batch * (int)(new_tokens.v_batch >> 3) + at.step * (int)(new_tokens.v_step >> 3) +
                     at.head * (int)(new_tokens.v_head >> 3);
}

// Describes the rows of a page, and asks for raw vectors of new tokens if they are in units of 16 bytes.
__device__ __forceinline__ void ask_for_rows(Side side, const LayerState& s, const NewTokens& new_tokens,
                                             u8* rows, const Shared& shared, PageState& page) {
    constexpr int PARTS = HEAD_DIM / 8, LANES_OF_ROW = PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32;
    constexpr int AT_ONCE = 32 / LANES_OF_ROW;
    const u32 lane = lane_again();
    const Move move = (const Move&)page.moves[lane % PAGE];
    const bool fetched = move.from_rung != NO_MOVE && is_new(move) && shared.in_units;
    describe_rows(side, s, move, fetched, page, lane);
    const int unit = unit_of_vector(side, new_tokens, index_of(new_tokens, move, shared));
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

__device__ __forceinline__ const signed char* address_of_exponent(Side side, const LayerState& s,
                                                                  const Move& move) {
    return s.exponent + 2 * pair_of(move) + side;
}

// The exponent of a side of a page, which is there.
__device__ __forceinline__ int exponent_of(Side side, const LayerState& s, const PageState& page) {
    const u64 at = (u64)address_of_exponent(side, s, (const Move&)page.moves[0]);
    return (signed char)(page.exponents >> at % 4 * 8);
}

// Asks for the frame of the keys of a page.
__device__ __forceinline__ void ask_for_frame(const LayerState& s, u32 pair, PageState& page, u32 lane) {
    if (lane < HEAD_DIM / 8) copy_async(page.halves + lane, s.k_mean + (u64)pair * HEAD_DIM + 8 * lane);
    ask_for_pairs<false>(page.shifts, s.k_shift, pair, lane);
#if IN_BLOCKS
    ask_for_pairs<true>(page.order, s.k_order, pair, lane);
    if (lane == 0) copy_async(page.gain, s.k_gain + 4 * pair);
#endif
}

// Asks for the importance of the new tokens of a page.
__device__ __forceinline__ void ask_for_importance(const NewTokens& new_tokens, const Shared& shared,
                                                   PageState& page, u32 lane) {
    if (lane >= PAGE) return;
    const Move move = (const Move&)page.moves[lane];
    if (!is_new(move)) return;
    const u32 step = index_of(new_tokens, move, shared).step;
    const u64 at = (u64)(new_tokens.importance + (u64)move.from * new_tokens.num_new + step);
    copy_word_async(page.importance_words + lane, (const void*)(at & ~3ull));
}

// Asks for all that a side of a page needs, of which its moves are there.
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
        copy_word_async(&page.exponents, (const void*)((u64)address_of_exponent(side, s, first) & ~3ull));
    }
    if (side == VALUES) return;
    ask_for_frame(s, pair_of(first), page, lane);
    ask_for_importance(new_tokens, shared, page, lane);
}
