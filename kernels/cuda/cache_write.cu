// Carries out what a plan says: new tokens are encoded into pages, stored ones re-encoded at fewer bits or
// moved bit for bit, whole pages copied.
//
// Threads and data
//   write_tokens  grid (any, layers): a CTA takes destination pages blockIdx.x, + gridDim.x, ..., first their
//                 K, then their V. Four lanes have one vector: runs of 8 elements until it is rotated, pairs
//                 then (element_of); the 256 threads have the 64 slots of a page at once. A vector has a row
//                 of shared memory of its own: what it comes from is put there, and its codes, a byte each,
//                 take the place of that. Then a warp a group of tiles: all words of the page are made from
//                 the rows, and stored 128 bytes at a time.
//   copy_pages    grid (any, layers): a CTA takes copies blockIdx.x, + gridDim.x, ..., 16 bytes a thread.
//   mean_of_keys  a CTA one (row, KV head), a thread one channel.
//   merge_rows    a warp one query row: attention over stored and over new tokens, when these are many.
// Memory: shared 64 rows of 2 HEAD_DIM + 16 bytes for keys and as many for values, dynamic (34.8 KB at
// head_dim 128), and 5 KB of Details; registers PER_LANE for a vector and as many again: 64 at head_dim 128,
// for four blocks a multiprocessor.
//
// Macros: HEAD_DIM; BF16.
//
// clang-format off
// gate: HEAD_DIM=128,64,80,96,256 BF16=1,0 registers<=128
// clang-format on
#include <cuda_fp16.h>
#include "packed_codes.cuh"
constexpr int LANES = 4, RUN = 2;
#include "packed_encode.cuh"
#include "packed_places.cuh"
#include "cache_state.cuh"

#define INFINITE __int_as_float(0x7f800000)

constexpr int THREADS = 256, SLOTS = 64, ROW_BYTES = 2 * HEAD_DIM + 16;
static_assert(THREADS == SLOTS * LANES, "a page at once");
#if __CUDA_ARCH__ == 900
constexpr int MOST_BLOCKS = 4;  // their 64 registers are enough there
#else
constexpr int MOST_BLOCKS = 3;
#endif
constexpr int BLOCKS = HEAD_DIM == 64 || HEAD_DIM == 128 ? MOST_BLOCKS : 2;  // of a multiprocessor
#include "cache_rotate.cuh"
#include "cache_encode.cuh"
#include "cache_words.cuh"
#include "cache_sources.cuh"

// Codes of a stored token; each lane asks for AT_ONCE of them before it waits for the first.
template <int BITS>
__device__ __forceinline__ void take_codes(Side side, const u8* codes, int slot, u8* row, int lane) {
    constexpr int AT_ONCE = PER_LANE % 16 == 0 ? 16 : PER_LANE % 8 == 0 ? 8 : 4;
#pragma unroll 1
    for (int first = lane; first < HEAD_DIM; first += AT_ONCE * LANES) {
        u32 code[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            code[j] = read_code<BITS>(codes, element_at(side, slot, first + LANES * j));
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (BITS == 16)
                ((u16*)row)[first + LANES * j] = (u16)code[j];
            else
                row[first - lane + code_byte(lane) + code_byte(LANES * j)] = (u8)code[j];
        }
    }
}

__device__ __forceinline__ void take_stored(Side side, const Region& from, int slot, u8* row, int lane) {
    switch (from.bits) {
        case 2:
            return take_codes<2>(side, from.codes, slot, row, lane);
        case 3:
            return take_codes<3>(side, from.codes, slot, row, lane);
        case 4:
            return take_codes<4>(side, from.codes, slot, row, lane);
        case 8:
            return take_codes<8>(side, from.codes, slot, row, lane);
        case 16:
            return take_codes<16>(side, from.codes, slot, row, lane);
    }
}

// A number where none matters, so that none is kept in a register for it.
__device__ __forceinline__ float anything() {
    float x;
    asm volatile("mov.b32 %0, 0;" : "=f"(x));
    return x;
}

// The step of the candidates with the least error, the first of equals, as kvlab.reference.pages finds it.
__device__ __forceinline__ u32 best_step(const float (&x)[PER_LANE], const StepRange& range, int bits,
                                         const float2* grids, int lane) {
    float least = INFINITE;
    int best = 0;
#pragma unroll 1
    for (int i = 0; i < CANDIDATES; ++i) {
        const float error = grid_error(x, unscaled_grid(grids[range.candidate(i)], bits), lane);
        if (i == 0 || error < least) least = error, best = i;
    }
    return range.candidate(best);
}
static_assert(HEAD_DIM % (LANES * RUN) == 0, "lanes without gaps");

// One side of a token, from where it is into its row: codes of `to_bits` bits, a byte each, or raw. Lanes
// without a move go along.
__device__ __forceinline__ void fill_row(Side side, const LayerState& s, const NewTokens& fresh,
                                         const uint4* of_page, int to_bits, Details& page, u8* rows) {
    u32 thread = thread_again();
    const Move move = my_move(of_page, thread);
    const bool moves = move.from_rung != NO_MOVE;
    u8* const row = row_for(rows, move);
    Region from = {nullptr, nullptr, 16};
    if (moves && !is_new(move)) {
        from = region_of(side, s.arena + (u64)move.from * UNIT, s.rungs[move.from_rung]);
        take_stored(side, from, move.from_slot, row, thread % LANES);
    } else if (moves) {
        if (!page.in_units) {  // nobody has asked for it yet
            const u16* vector = new_vector(side, fresh, place_of(fresh, move, page));
#pragma unroll 4
            for (int i = thread % LANES; i < HEAD_DIM; i += LANES) ((u16*)row)[i] = vector[i];
        }
    }
    const bool changes = moves && from.bits != to_bits;  // else it goes as it is, bit for bit
    const u32 old_step = moves && from.bits < 16 ? from.steps[move.from_slot] : 0;
    if (thread % LANES == 0 && moves) page.steps[move.to_slot] = (u8)old_step;
    __syncwarp();  // rows are whole
    if (!__any_sync(ALL_LANES, changes)) return;
    // Lanes whose vector does not change compute something that goes nowhere, from rows of their warp.
    const u32 having = __ballot_sync(ALL_LANES, moves);
    const u32 source = __shfl_sync(ALL_LANES, (u32)(row - rows), moves ? thread % 32 : __ffs(having) - 1);
    // With scaled numbers at first, and once more if one of the warp's vectors is too hard for them.
#pragma unroll 1
    for (float scale = to_bits == 16 ? 1.f : SCALE;; scale = 1.f) {
        forget(thread);
        const u32 lane = thread % LANES;
        float x[PER_LANE];
        bool usual = true;
        if (__any_sync(ALL_LANES, changes && from.bits == 16))
            usual = take_raw(side, rows + source, page.mean, scale, x, lane);
        else
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) x[j] = anything();
        if (from.bits < 16) {
            const float step = step_value(old_step) * scale;
            usual = old_step <= HIGHEST_STEP;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                x[j] = grid_value(rows[source + code_byte(element_of(lane, j))], step, from.bits);
        }
        if (to_bits == 16) {  // a rung of fewer bits in all may have raw keys or values
            rotate(x, lane);
            __syncwarp();  // likewise
#pragma unroll
            for (int j = 0; j < PER_LANE; j += 2) {
                const int at = lane + j / 2 * LANES;
                const float2 mean = side == KEYS ? ((const float2*)page.mean)[at] : float2{0.f, 0.f};
                if (changes) ((u32*)(rows + source))[at] = pack_pair(x[j] + mean.x, x[j + 1] + mean.y);
            }
            return;
        }
        if (scale == 1.f) {
            const StepRange range = steps_near(x, to_bits, lane);
            const u32 byte = best_step(x, range, to_bits, page.grids, lane);
            __syncwarp();  // all lanes have read their rows before codes take their place
            if (!changes) return;
            if (lane == 0)
                page.steps[my_move(of_page, thread).to_slot] = (u8)(range.known < 0 ? byte : range.known);
            const Grid grid = unscaled_grid(page.grids[byte], to_bits);
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                rows[source + code_byte(element_of(lane, j))] =
                    (u8)(range.known < 0 ? grid_code(x[j], grid) : 1u << (to_bits - 1));
            return;
        }
        const Found middle = find_middle(x, to_bits);
        const Found found = find_step(x, middle.byte, to_bits, page.grids);
        if (__any_sync(ALL_LANES, changes && !(usual && middle.safe && found.safe))) continue;
        __syncwarp();  // likewise
        if (!changes) return;
        if (lane == 0) page.steps[my_move(of_page, thread).to_slot] = (u8)found.byte;
        const Coder coder = coder_of(page.grids[found.byte], to_bits);
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 4)
            ((u32*)(rows + source))[lane + j] =
                coder.pair(x[j], x[j + 1]) + (coder.pair(x[j + 2], x[j + 3]) << 8);
        return;
    }
}

// Position and importance of a move; `word` has the importance of a new token.
__device__ __forceinline__ void take_details(const LayerState& s, const NewTokens& fresh, const Move& move,
                                             u32 word, u32* named, Details& page) {
    atomicOr(named + move.to_slot / 32, 1u << move.to_slot % 32);
    if (is_new(move)) {
        const u32 step = place_of(fresh, move, page).step;
        const u64 at = (u64)fresh.importance + (u64)move.from * fresh.steps + step;
        page.positions[move.to_slot] = (u16)(fresh.first + step);
        page.importance[move.to_slot] = (u8)(word >> at % 4 * 8);
    } else {
        const u8* from = s.arena + (u64)move.from * UNIT + s.rungs[move.from_rung].tail;
        page.positions[move.to_slot] = ((const u16*)from)[move.from_slot];
        page.importance[move.to_slot] = from[128 + move.from_slot];
    }
}

// ---- Rows into words

template <Side SIDE, bool FULL>
__device__ __forceinline__ void store_side(const Region& to, const u8* rows, const Details& page, u64 named) {
    const u32 thread = thread_again(), warp = thread / 32, lane = thread % 32;
    u32* words = (u32*)to.codes;
    if (to.bits < 16 && threadIdx.x < SLOTS && (FULL || named >> threadIdx.x & 1))
        to.steps[threadIdx.x] = page.steps[threadIdx.x];
    switch (to.bits) {
        case 2:
            return store_words<SIDE, 2, FULL>(words, rows, named, warp, lane);
        case 3:
            return store_words<SIDE, 3, FULL>(words, rows, named, warp, lane);
        case 4:
            return store_words<SIDE, 4, FULL>(words, rows, named, warp, lane);
        case 8:
            return store_words<SIDE, 8, FULL>(words, rows, named, warp, lane);
        case 16:
            return store_words<SIDE, 16, FULL>(words, rows, named, warp, lane);
    }
}

// Stores a side of a page from its rows.
template <Side SIDE>
__device__ __forceinline__ void finish_side(const Region& to, u8* tail, const u8* rows, const Details& page,
                                            const u32* which) {
    const u64 named = (u64)which[1] << 32 | which[0];
    if (named == ~0ull)
        store_side<SIDE, true>(to, rows, page, named);
    else
        store_side<SIDE, false>(to, rows, page, named);
    if (SIDE == KEYS && threadIdx.x < SLOTS && named >> threadIdx.x & 1) {
        ((u16*)tail)[threadIdx.x] = page.positions[threadIdx.x];
        tail[2 * SLOTS + threadIdx.x] = page.importance[threadIdx.x];
    }
}

// ---- Turns: keys of a page in the even ones, its values in the odd ones

__device__ __forceinline__ Side side_of(u32 n) {
    return n % 2 ? VALUES : KEYS;
}

// Whose moves and named slots are those of this page.
__device__ __forceinline__ u32 turn_of(u32 n) {
    return n / 2 % 2;
}

__device__ __forceinline__ const uint4* moves_of(u32 n, const Details& page) {
    return page.moves[turn_of(n)];
}

__device__ __forceinline__ u8* rows_of(u32 n, u8* keys) {
    return keys + n % 2 * (SLOTS * ROW_BYTES);
}

__device__ __forceinline__ void ask_for_next(u32 n, const LayerState& s, const NewTokens& fresh,
                                             const MoveList& list, u8* keys, Details& page) {
    const int next = blockIdx.x + (n / 2 + 1) * gridDim.x;
    const bool goes_on = next < page.pages;
    const u32 turn = turn_of(n) ^ 1;
    if (side_of(n) == KEYS) {
        ask_for_rows(VALUES, fresh, moves_of(n, page), rows_of(n + 1, keys), page);
        if (goes_on) ask_for_moves(list, next, page.moves[turn]);
        if (threadIdx.x < 2) page.named[turn][threadIdx.x] = 0;
    } else if (goes_on) {
        ask_for_page(s, fresh, page.moves[turn], keys, page);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    write_tokens(const LayerState* layers, const MoveList* lists, const __grid_constant__ NewTokens fresh) {
    extern __shared__ __align__(16) u8 keys[];  // [SLOTS][ROW_BYTES], and as many behind them
    __shared__ Details page;
    const LayerState& s = layers[blockIdx.y];
    const MoveList& list = lists[blockIdx.y];
    if (threadIdx.x <= HIGHEST_STEP) page.grids[threadIdx.x] = scaled_grid(max(threadIdx.x, 1));
    const int pages = *list.num_groups;
    if (threadIdx.x == 0) {
        page.pages = pages;
        page.heads = s.heads;
        page.per_head = ~0u / s.heads;
        page.in_units = are_in_units(s, fresh);
    }
    if (blockIdx.x < pages) {
        ask_for_moves(list, blockIdx.x, page.moves[0]);
        if (threadIdx.x < 2) page.named[0][threadIdx.x] = 0;
        wait_copies();
        __syncthreads();  // the first moves are there
        ask_for_page(s, fresh, page.moves[0], keys, page);
    }
    // One copy of the code for keys (even n) and values: what warps wait for is the way of the instructions.
#pragma unroll 1
    for (u32 n = 0; blockIdx.x + n / 2 * gridDim.x < (n ? page.pages : pages); ++n) {
        wait_copies();
        if (side_of(n) == KEYS) unpack_mean(page);
        __syncthreads();  // rows, means, moves and grids are there; what was made of the side before is
                          // stored
        ask_for_next(n, s, fresh, list, keys, page);
        forget(n);
        {
            const CacheRung& rung = s.rungs[((const Move&)moves_of(n, page)[0]).to_rung];
            fill_row(side_of(n), s, fresh, moves_of(n, page), side_of(n) == KEYS ? rung.bits_k : rung.bits_v,
                     page, rows_of(n, keys));
        }
        forget(n);
        if (side_of(n) == KEYS && threadIdx.x < SLOTS) {
            const Move move = (const Move&)moves_of(n, page)[threadIdx.x];
            if (move.from_rung != NO_MOVE)
                take_details(s, fresh, move, page.importance_words[threadIdx.x], page.named[turn_of(n)],
                             page);
        }
        __syncthreads();  // all rows and details are whole, and all sources of this side have been read
        const Move first = (const Move&)moves_of(n, page)[0];
        const CacheRung& rung = s.rungs[first.to_rung];
        u8* const to = s.arena + (u64)first.to * UNIT;
        const Region region = region_of(side_of(n), to, rung);
        if (side_of(n) == KEYS)
            finish_side<KEYS>(region, to + rung.tail, rows_of(n, keys), page, page.named[turn_of(n)]);
        else
            finish_side<VALUES>(region, nullptr, rows_of(n, keys), page, page.named[turn_of(n)]);
    }
    if (fresh.steps && blockIdx.x == 0)
        for (int i = threadIdx.x; i < s.batch * s.heads; i += THREADS)
            s.seqlen[i] = fresh.first + fresh.steps;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_pages(const LayerState* layers, const MoveList* lists) {
    const MoveList list = lists[blockIdx.y];
    const int copies = *list.num_copies;
    u8* const arena = layers[blockIdx.y].arena;
#pragma unroll 1
    for (int n = blockIdx.x; n < copies; n += gridDim.x) {
        const PageCopy copy = list.copies[n];
        const uint4* from = (const uint4*)(arena + (u64)copy.from * UNIT);
        uint4* to = (uint4*)(arena + (u64)copy.to * UNIT);
        for (u32 i = threadIdx.x; i < copy.units * (UNIT / 16); i += THREADS) to[i] = from[i];
    }
}

// The mean of the keys of each pair over tokens FIRST to LAST - 1 that are no padding: what is taken off keys
// before they are packed. 0 if there are fewer than FEWEST; a channel that float16 cannot hold is left as it
// is. As kvlab.cache.frame; a sum of 64 float16 numbers is exact in double.
extern "C" __global__ void mean_of_keys(const __grid_constant__ NewTokens fresh, int heads, __half* k_mean) {
    constexpr int FIRST = 4, LAST = 68, FEWEST = 16;
    const int pair = blockIdx.x, row = pair / heads, head = pair - row * heads, channel = threadIdx.x;
    const u16* k = fresh.k + row * fresh.k_batch + head * fresh.k_head + channel;
    double sum = 0.;
    int seen = 0;
    for (int step = 0; step < fresh.steps && seen < LAST; ++step) {
        if (fresh.valid && !fresh.valid[row * fresh.steps + step]) continue;
        if (seen >= FIRST) sum += (double)raw_value(k[step * fresh.k_step]);
        ++seen;
    }
    const double mean = seen - FIRST >= FEWEST ? sum / (seen - FIRST) : 0.;
    k_mean[(u64)pair * HEAD_DIM + channel] = __double2half(fabs(mean) <= 65504. ? mean : 0.);
}

// Attention over two disjoint sets of keys, merged into the first: a warp one row of [rows][HEAD_DIM], whose
// lse lies at [row / (steps heads)][head][step]. A row that sees nothing has lse -inf and out 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_rows(u16* out, float* lse, const u16* other, const float* other_lse, int rows, int steps,
               int heads) {
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const int head = row % heads, step = row / heads % steps, batch = row / heads / steps;
    const u64 at = ((u64)batch * heads + head) * steps + step;
    const float a = lse[at], b = other_lse[at], top = fmaxf(a, b);
    __syncwarp();  // all lanes have read the lse before lane 0 writes it
    const bool none = top == -__int_as_float(0x7f800000);
    const float from = none ? 0.f : expf(a - top), to = none ? 0.f : expf(b - top), sum = from + to;
    const float keep = none ? 0.f : from / sum, take = none ? 0.f : to / sum;
    u32* x = (u32*)(out + (u64)row * HEAD_DIM);
    const u32* y = (const u32*)(other + (u64)row * HEAD_DIM);
    for (int i = lane; i < HEAD_DIM / 2; i += 32) {
        const float2 p = unpack_pair(x[i]), q = unpack_pair(y[i]);
        x[i] = pack_pair(p.x * keep + q.x * take, p.y * keep + q.y * take);
    }
    if (lane == 0) lse[at] = none ? top : top + logf(sum);
}
