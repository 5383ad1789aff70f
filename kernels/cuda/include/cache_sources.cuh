// Where a page's vectors come from: moves, raw rows, means and importance are asked for (cp.async) while the
// side of a page before is encoded.
//
// Needs cache_state.cuh, cache_encode.cuh and cache_words.cuh with LANES lanes a vector, SLOTS slots and
// THREADS threads.
#pragma once

// One side (K or V) of a page.
struct Region {
    u8 *codes, *steps;
    int bits;
};

__device__ __forceinline__ Region region_of(Side side, u8* page, const CacheRung& rung) {
    const int k_bytes = 8 * HEAD_DIM * rung.bits_k, v_bytes = 8 * HEAD_DIM * rung.bits_v;
    u8* steps = page + k_bytes + v_bytes;
    if (side == KEYS) return {page, steps, rung.bits_k};
    return {page + k_bytes, steps + (rung.bits_k < 16 ? 64 : 0), rung.bits_v};
}

constexpr u8 NO_MOVE = 254;  // Move::from_rung of threads that have none

__device__ __forceinline__ bool is_new(const Move& move) {
    return move.from_rung == NEW_TOKEN;
}

// What all threads know of a destination page, and what it gets besides codes.
struct Details {
    uint4 moves[2][SLOTS];        // Move, of this page and of the next
    uint4 halves[HEAD_DIM / 8];   // the mean of the keys of its pair, float16
    float4 mean[HEAD_DIM / 4];    // and float32
    u32 named[2][2];              // which slots are written
    u32 importance_words[SLOTS];  // by move: what a new token's importance is a byte of
    u16 positions[SLOTS];
    u8 importance[SLOTS], steps[SLOTS];
    float2 grids[HIGHEST_STEP + 1];  // of every step: scaled_grid
    int pages;                       // to be written, of this layer
    u32 heads, per_head;             // 2^32 / heads, rounded down
    bool in_units;                   // are_in_units
};

// threadIdx.x, asked for again: what follows from it is computed again, too, and takes no registers
// meanwhile.
__device__ __forceinline__ u32 thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// What follows from `x` is computed again from here on: registers are scarce.
__device__ __forceinline__ void forget(u32& x) {
    asm volatile("" : "+r"(x));
}

// ---- Copies that nobody waits for until wait_copies

__device__ __forceinline__ void copy_later(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_word_later(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The move of a thread's LANES; dealt such that neither rows of a warp nor 16 bytes of rows of eight lanes
// share banks.
__device__ __forceinline__ Move my_move(const uint4* moves, u32 thread) {
    const u32 vector = thread % 32 / LANES, of_warp = vector / 2 + vector % 2 * 4;
    return (const Move&)moves[of_warp * (THREADS / 32) + thread / 32];
}

__device__ __forceinline__ u8* row_for(u8* rows, const Move& move) {
    return rows + row_of(move.to_slot) * ROW_BYTES;
}

// Asks for the moves of a page; threads without one get NO_MOVE.
__device__ __forceinline__ void ask_for_moves(const MoveList& list, int group, uint4* moves) {
    const u32 thread = thread_again();
    if (thread >= SLOTS) return;
    const u32 begin = list.begins[group], moved = list.begins[group + 1] - begin;
    if (thread < moved)
        copy_later(moves + thread, list.moves + begin + thread);
    else
        moves[thread] = {0, 0, (u32)NO_MOVE << 16, 0};
}

// Row, head and step of a new token.
struct TokenPlace {
    int batch, head, step;
};

__device__ __forceinline__ TokenPlace place_of(const NewTokens& fresh, const Move& move,
                                               const Details& page) {
    u32 batch = __umulhi(move.from, page.per_head);  // or one less
    u32 head = move.from - batch * page.heads;
    if (head >= page.heads) head -= page.heads, ++batch;
    return {(int)batch, (int)head, (int)(move.token - batch * fresh.steps)};
}

__device__ __forceinline__ const u16* new_vector(Side side, const NewTokens& fresh, const TokenPlace& at) {
    return side == KEYS
               ? fresh.k + at.batch * fresh.k_batch + at.step * fresh.k_step + at.head * fresh.k_head
               : fresh.v + at.batch * fresh.v_batch + at.step * fresh.v_step + at.head * fresh.v_head;
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

// Asks for keys or values of new tokens, raw, if they are in units of 16 bytes.
__device__ __forceinline__ void ask_for_rows(Side side, const NewTokens& fresh, const uint4* moves, u8* rows,
                                             const Details& page) {
    const u32 thread = thread_again(), lane = thread % LANES;
    const Move move = my_move(moves, thread);
    if (!is_new(move) || !page.in_units) return;
    const TokenPlace at = place_of(fresh, move, page);
    const int unit = side == KEYS
                         ? at.batch * (int)(fresh.k_batch >> 3) + at.step * (int)(fresh.k_step >> 3) +
                               at.head * (int)(fresh.k_head >> 3)
                         : at.batch * (int)(fresh.v_batch >> 3) + at.step * (int)(fresh.v_step >> 3) +
                               at.head * (int)(fresh.v_head >> 3);
    const uint4* const from = (const uint4*)(side == KEYS ? fresh.k : fresh.v) + unit + lane;
    uint4* const to = (uint4*)row_for(rows, move) + lane;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i += LANES)
        if (HEAD_DIM % (8 * LANES) == 0 || i + lane < HEAD_DIM / 8) copy_later(to + i, from + i);
}

// Asks for all that the first side of a page needs.
__device__ __forceinline__ void ask_for_page(const LayerState& s, const NewTokens& fresh, const uint4* moves,
                                             u8* rows, Details& page) {
    const u32 thread = thread_again();
    ask_for_rows(KEYS, fresh, moves, rows, page);
    const Move first = (const Move&)moves[0];
    const uint4* mean = (const uint4*)(s.k_mean + (u64)(is_new(first) ? first.from : first.token) * HEAD_DIM);
    if (thread < HEAD_DIM / 8) copy_later(page.halves + thread, mean + thread);
    if (thread >= SLOTS) return;
    const Move move = (const Move&)moves[thread];
    if (!is_new(move)) return;
    const u32 step = place_of(fresh, move, page).step;
    const u64 at = (u64)(fresh.importance + (u64)move.from * fresh.steps + step);
    copy_word_later(page.importance_words + thread, (const void*)(at & ~3ull));
}

__device__ __forceinline__ float2 unpack_halves(u32 x) {
    return {half_bits_to_float(x & 0xffffu), half_bits_to_float(x >> 16)};
}

// Makes the mean of keys float32, by the threads that asked for it.
__device__ __forceinline__ void unpack_mean(Details& page) {
    const u32 thread = thread_again();
    if (thread >= HEAD_DIM / 8) return;
    const uint4 x = page.halves[thread];
    const float2 a = unpack_halves(x.x), b = unpack_halves(x.y), c = unpack_halves(x.z),
                 d = unpack_halves(x.w);
    page.mean[2 * thread] = {a.x, a.y, b.x, b.y};
    page.mean[2 * thread + 1] = {c.x, c.y, d.x, d.y};
}
