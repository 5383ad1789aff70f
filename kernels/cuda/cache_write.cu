// Carries out what a plan says: new tokens are encoded into pages, stored ones re-encoded at fewer bits or
// moved bit for bit, whole pages copied.
//
// Threads and data
//   write_tokens  grid (any, layers): a CTA takes destination pages blockIdx.x, + gridDim.x, ..., first their
//                 K, then their V. LANES lanes have one vector, lane q elements q + LANES j, so a sum of all
//                 elements takes two shuffles; the 256 threads have the 64 slots of a page at once. A vector
//                 has a row of shared memory of its own: what it comes from is put there, and its codes, a
//                 byte each, take the place of that. Then a warp a group of tiles: all words of the page are
//                 made from the rows, and stored 128 bytes at a time.
//   copy_pages    grid (any, layers): a CTA takes copies blockIdx.x, + gridDim.x, ..., 16 bytes a thread.
//   mean_of_keys  a CTA one (row, KV head), a thread one channel.
//   merge_rows    a warp one query row: attention over stored and over new tokens, when these are many.
// Memory: shared 64 rows of 2 HEAD_DIM + 16 bytes, dynamic (17.4 KB at head_dim 128); registers PER_LANE for
// a vector, and as many again for what a sum is made of.
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
#if __CUDA_ARCH__ >= 900
constexpr int MOST_BLOCKS = 4;  // their 64 registers are enough there
#else
constexpr int MOST_BLOCKS = 3;
#endif
constexpr int BLOCKS = HEAD_DIM == 64 || HEAD_DIM == 128 ? MOST_BLOCKS : 2;  // of a multiprocessor
#include "cache_words.cuh"

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
    uint4 mean[HEAD_DIM / 8];     // of the keys of its pair, float16
    u32 named[2][2];              // which slots are written
    u32 importance_words[SLOTS];  // by move: what a new token's importance is a byte of
    u16 positions[SLOTS];
    u8 importance[SLOTS], steps[SLOTS];
    float2 grids[HIGHEST_STEP + 1];  // of every step: Grid::cell and up
};

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

// The move of a thread's LANES; dealt such that rows of a warp share no banks.
__device__ __forceinline__ Move my_move(const uint4* moves) {
    return (const Move&)moves[threadIdx.x % 32 / LANES * (THREADS / 32) + threadIdx.x / 32];
}

__device__ __forceinline__ u8* row_for(u8* rows, const Move& move) {
    return rows + row_of(move.to_slot) * ROW_BYTES;
}

// Asks for the moves of a page; threads without one get NO_MOVE.
__device__ __forceinline__ void ask_for_moves(const MoveList& list, int group, uint4* moves) {
    if (threadIdx.x >= SLOTS) return;
    const u32 begin = list.begins[group], moved = list.begins[group + 1] - begin;
    if (threadIdx.x < moved)
        copy_later(moves + threadIdx.x, list.moves + begin + threadIdx.x);
    else
        moves[threadIdx.x] = {0, 0, (u32)NO_MOVE << 16, 0};
}

// ---- Vectors into rows

__device__ __forceinline__ const u16* new_vector(Side side, const LayerState& s, const NewTokens& fresh,
                                                 const Move& move) {
    const int batch = move.token / fresh.steps, step = move.token - batch * fresh.steps;
    const int head = move.from - batch * s.heads;
    return side == KEYS ? fresh.k + batch * fresh.k_batch + step * fresh.k_step + head * fresh.k_head
                        : fresh.v + batch * fresh.v_batch + step * fresh.v_step + head * fresh.v_head;
}

// Asks for keys or values of new tokens, raw, as far as they begin at multiples of 16 bytes.
__device__ __forceinline__ void ask_for_rows(Side side, const LayerState& s, const NewTokens& fresh,
                                             const uint4* moves, u8* rows) {
    const Move move = my_move(moves);
    if (!is_new(move)) return;
    const u16* from = new_vector(side, s, fresh, move);
    if ((u64)from % 16) return;
#pragma unroll
    for (int i = threadIdx.x % LANES; i < HEAD_DIM / 8; i += LANES)
        copy_later(row_for(rows, move) + 16 * i, from + 8 * i);
}

// Asks for all that the first side of a page needs.
__device__ __forceinline__ void ask_for_page(const LayerState& s, const NewTokens& fresh, const uint4* moves,
                                             u8* rows, Details& page) {
    ask_for_rows(KEYS, s, fresh, moves, rows);
    const Move first = (const Move&)moves[0];
    const uint4* mean = (const uint4*)(s.k_mean + (u64)(is_new(first) ? first.from : first.token) * HEAD_DIM);
    if (threadIdx.x < HEAD_DIM / 8) copy_later(page.mean + threadIdx.x, mean + threadIdx.x);
    if (threadIdx.x >= SLOTS) return;
    const Move move = (const Move&)moves[threadIdx.x];
    if (!is_new(move)) return;
    const u64 at = (u64)(fresh.importance + (u64)move.from * fresh.steps + move.token % fresh.steps);
    copy_word_later(page.importance_words + threadIdx.x, (const void*)(at & ~3ull));
}

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
                row[first + LANES * j] = (u8)code[j];
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

__device__ __forceinline__ float2 unpack_halves(u32 x) {
    return {half_bits_to_float(x & 0xffffu), half_bits_to_float(x >> 16)};
}

// The step of the candidates with the least error, the first of equals. All steps are tried with sums in any
// order, whose rounding changes an error by no more than 45 parts of 2^24; only if two come as near as that
// does the order of reference.pages.tree_sum decide.
__device__ __forceinline__ u32 best_step(const float (&x)[PER_LANE], const StepRange& range, int bits,
                                         const float2* grids, int lane) {
    const auto grid = [&](int i) {
        const float2 known = grids[range.candidate(i)];
        return Grid{known.x, known.y, (float)(1 << (bits - 1))};
    };
    float least = INFINITE, second = INFINITE;
    int best = 0;
#pragma unroll 1
    for (int i = 0; i < CANDIDATES; ++i) {
        const Grid g = grid(i);
        float sums[2] = {};
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const float d = grid_distance(x[j], g);
            sums[j % 2] = fmaf(d, d, sums[j % 2]);
        }
        float error = sums[0] + sums[1];
#pragma unroll
        for (int h = LANES / 2; h > 0; h /= 2) error += __shfl_xor_sync(ALL_LANES, error, h);
        second = fminf(second, fmaxf(error, least));
        if (error < least) least = error, best = i;
    }
    if (__any_sync(ALL_LANES, !(second > least * (1.f + 1.f / (1 << 17))))) {
#pragma unroll 1
        for (int i = 0; i < CANDIDATES; ++i) {
            const float error = grid_error(x, grid(i), lane);
            if (i == 0 || error < least) least = error, best = i;
        }
    }
    return range.candidate(best);
}
static_assert(HEAD_DIM % (LANES * RUN) == 0, "lanes without gaps, as best_step");

// One side of a token, from where it is into its row: codes of `to_bits` bits, a byte each, or raw. Lanes
// without a move go along.
__device__ __forceinline__ void fill_row(Side side, const LayerState& s, const NewTokens& fresh,
                                         const uint4* of_page, int to_bits, Details& page, u8* rows,
                                         int lane) {
    const Move move = my_move(of_page);
    const bool moves = move.from_rung != NO_MOVE;
    u8* const row = row_for(rows, move);
    u32* const pairs = (u32*)row + lane;
    const u32* const means = (const u32*)page.mean + lane;
    Region from = {nullptr, nullptr, 16};
    if (moves && !is_new(move)) {
        from = region_of(side, s.arena + (u64)move.from * UNIT, s.rungs[move.from_rung]);
        take_stored(side, from, move.from_slot, row, lane);
    } else if (moves) {
        const u16* vector = new_vector(side, s, fresh, move);
        if ((u64)vector % 16) {  // nobody has asked for it yet
#pragma unroll 4
            for (int i = lane; i < HEAD_DIM; i += LANES) ((u16*)row)[i] = vector[i];
        }
    }
    const bool changes = moves && from.bits != to_bits;  // else it goes as it is, bit for bit
    const u32 old_step = moves && from.bits < 16 ? from.steps[move.from_slot] : 0;
    if (lane == 0 && moves) page.steps[move.to_slot] = (u8)old_step;
    __syncwarp();  // rows are whole
    if (!__any_sync(ALL_LANES, changes)) return;
    // Lanes whose vector does not change compute something that goes nowhere.
    float x[PER_LANE] = {};
    if (__any_sync(ALL_LANES, changes && from.bits == 16)) {
        if (changes)  // else the row is somebody else's, or codes
#pragma unroll
            for (int j = 0; j < PER_LANE; j += 2) {
                const float2 pair = unpack_pair(pairs[j / 2 * LANES]);
                x[j] = pair.x, x[j + 1] = pair.y;
            }
        if (side == KEYS) {
#pragma unroll
            for (int j = 0; j < PER_LANE; j += 2) {
                const float2 mean = unpack_halves(means[j / 2 * LANES]);
                x[j] = __fsub_rn(x[j], mean.x), x[j + 1] = __fsub_rn(x[j + 1], mean.y);
            }
        }
        rotate(x, lane);
    }
    if (from.bits < 16) {
        const float step = step_value(old_step);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = grid_value(row[element_of(lane, j)], step, from.bits);
    }
    if (to_bits == 16) {  // a rung of fewer bits in all may have raw keys or values
        rotate(x, lane);
        __syncwarp();  // likewise
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 2) {
            const float2 mean = side == KEYS ? unpack_halves(means[j / 2 * LANES]) : float2{0.f, 0.f};
            if (changes) pairs[j / 2 * LANES] = pack_pair(x[j] + mean.x, x[j + 1] + mean.y);
        }
        return;
    }
    const StepRange range = steps_near(x, to_bits, lane);
    u32 byte = best_step(x, range, to_bits, page.grids, lane);
    __syncwarp();  // all lanes have read their rows before codes take their place
    if (!changes) return;
    const Grid grid = {page.grids[byte].x, page.grids[byte].y, (float)(1 << (to_bits - 1))};
    if (range.known >= 0) byte = range.known;
    if (lane == 0) page.steps[move.to_slot] = (u8)byte;
#pragma unroll
    for (int j = 0; j < PER_LANE; j += 2)
        ((u16*)row)[element_of(lane, j) / 2] =
            (u16)__byte_perm(grid_code(x[j], grid), grid_code(x[j + 1], grid), 0x0040);
    if (range.known < 0) return;
#pragma unroll 1
    for (int j = 0; j < PER_LANE; ++j) row[element_of(lane, j)] = (u8)(1 << (to_bits - 1));
}

// Position and importance of a move; `word` has the importance of a new token.
__device__ __forceinline__ void take_details(const LayerState& s, const NewTokens& fresh, const Move& move,
                                             u32 word, u32* named, Details& page) {
    atomicOr(named + move.to_slot / 32, 1u << move.to_slot % 32);
    if (is_new(move)) {
        const u32 step = move.token % fresh.steps;
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    write_tokens(const LayerState* layers, const MoveList* lists, const __grid_constant__ NewTokens fresh) {
    extern __shared__ __align__(16) u8 keys[];  // [SLOTS][ROW_BYTES], and as many behind them
    u8* const values = keys + SLOTS * ROW_BYTES;
    __shared__ Details page;
    const LayerState& s = layers[blockIdx.y];
    const MoveList& list = lists[blockIdx.y];
    const int lane = threadIdx.x % LANES;
    if (threadIdx.x <= HIGHEST_STEP) {
        const Grid grid = grid_of(max(threadIdx.x, 1), 2);
        page.grids[threadIdx.x] = {grid.cell, grid.up};
    }
    if (blockIdx.x < *list.num_groups) {
        ask_for_moves(list, blockIdx.x, page.moves[0]);
        if (threadIdx.x < 2) page.named[0][threadIdx.x] = 0;
        wait_copies();
        __syncthreads();  // the first moves are there
        ask_for_page(s, fresh, page.moves[0], keys, page);
    }
    // One copy of the code for keys (even n) and values: what warps wait for is the way of the instructions.
#pragma unroll 1
    for (u32 n = 0; blockIdx.x + n / 2 * gridDim.x < *list.num_groups; ++n) {
        const Side side = n % 2 ? VALUES : KEYS;
        const u32 turn = n / 2 % 2;  // whose moves and named slots are those of this page
        const int next = blockIdx.x + (n / 2 + 1) * gridDim.x;
        const bool goes_on = next < *list.num_groups;
        const uint4* moves = page.moves[turn];
        u8* const rows = side == KEYS ? keys : values;
        wait_copies();
        __syncthreads();  // rows, moves and grids are there; what was made of the side before is stored
        if (side == KEYS) {
            ask_for_rows(VALUES, s, fresh, moves, values);
            if (goes_on) ask_for_moves(list, next, page.moves[turn ^ 1]);
            if (threadIdx.x < 2) page.named[turn ^ 1][threadIdx.x] = 0;
        } else if (goes_on) {
            ask_for_page(s, fresh, page.moves[turn ^ 1], keys, page);
        }
        const Move first = (const Move&)moves[0];
        const CacheRung& rung = s.rungs[first.to_rung];
        fill_row(side, s, fresh, moves, side == KEYS ? rung.bits_k : rung.bits_v, page, rows, lane);
        if (side == KEYS && threadIdx.x < SLOTS) {
            const Move move = (const Move&)moves[threadIdx.x];
            if (move.from_rung != NO_MOVE)
                take_details(s, fresh, move, page.importance_words[threadIdx.x], page.named[turn], page);
        }
        __syncthreads();  // all rows and details are whole, and all sources of this side have been read
        u8* const to = s.arena + (u64)first.to * UNIT;
        const Region region = region_of(side, to, rung);
        if (side == KEYS)
            finish_side<KEYS>(region, to + rung.tail, rows, page, page.named[turn]);
        else
            finish_side<VALUES>(region, nullptr, rows, page, page.named[turn]);
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
