// Carries out what a plan says: new tokens are encoded into pages, stored ones re-encoded at fewer bits or
// moved bit for bit, whole pages copied.
//
// Threads and data
//   write_tokens  grid (any, layers, 2): a warp takes the keys, or the values, of every so many destination
//                 page (pages/vectors.cuh), and needs no other. Sources are copied into rows of shared
//                 memory.
//   copy_pages    grid (any, layers): a warp takes every so many copy.
//   merge_rows    a warp one query row: attention over stored and over new tokens, when these are many.
// Memory: shared a WarpSpace for each warp, 11.4 KiB at head_dim 128, most of it rows of this page and the
// next; 128 registers for four blocks a multiprocessor, 168 for three with profiles at head_dim 128, up to
// 255 for two from compute capability 10.0 on, where 128 are too few.
//
// Macros: HEAD_DIM; BF16; PROFILES, if keys are in blocks (pages/profiles.cuh).
#include "pages/copies.cuh"
#include "pages/sources.cuh"

constexpr int THREADS = 256;  // of the other kernels
constexpr u32 ALL_SLOTS = (1u << PAGE) - 1;
constexpr int WRITE_THREADS = 128, WRITE_WARPS = WRITE_THREADS / 32;
constexpr int BLOCKS = HEAD_DIM > 128 || __CUDA_ARCH__ >= 1000 ? 2
                       : IN_BLOCKS && HEAD_DIM == 128          ? 3
                                                               : 4;  // of a multiprocessor

constexpr int LANES = 4, PER_LANE = HEAD_DIM / LANES;  // of a vector that has not been asked for

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

#if IN_BLOCKS
// Words of a lane with the codes of its slot's tiles of a block, the first of them tile `tile` of its run.
template <int BITS>
__device__ __forceinline__ void ask_for_block(const u32* run, int tile, u32 (&words)[BLOCK_TILES][2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_TILES; ++i) {
        const int t = tile + i, word = BITS == 8 ? 2 * t : t / Fields<BITS>::TILES;
        words[i][0] = run[32 * word];
        if (BITS == 8) words[i][1] = run[32 * word + 32];
    }
}

// Puts these codes, of four channels each, into a row, a byte each; `odd`: the slot is.
template <int BITS>
__device__ __forceinline__ void put_block(const u32 (&words)[BLOCK_TILES][2], int tile, u32 odd, u8* row) {
#pragma unroll
    for (int i = 0; i < BLOCK_TILES; ++i) {
        u32 codes;
        if constexpr (BITS == 8)
            codes = __byte_perm(words[i][0] >> 8 * odd, words[i][1] >> 8 * odd, 0x6420);
        else
            codes = __byte_perm(words[i][0] >> (BITS == 2 ? 4 * ((tile + i) % 2) + 2 * odd : 4 * odd) &
                                    ((1u << BITS) - 1u) * 0x01010101u,
                                0, 0x3120);
        *(u16*)(row + 16 * i) = (u16)codes, *(u16*)(row + 16 * i + 8) = (u16)(codes >> 16);
    }
}

// Codes of a stored key, AT_ONCE blocks at a time; a lane has channels 2 lane, the next, and those 8 further
// on of every 16, which share words.
__device__ __forceinline__ void take_key(const Region& from, u32 slot, u8* row, u32 lane) {
    constexpr int AT_ONCE = HEAD_DIM < 128 ? KEY_BLOCKS : 2;
#pragma unroll 1
    for (int first = 0; first < KEY_BLOCKS; first += AT_ONCE) {
        u32 words[AT_ONCE][BLOCK_TILES][2];
        int tiles[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Run run = run_of_block(from.bits, first + i);
            const u32* const codes = (const u32*)from.codes + 32 * run.word + 4 * (slot / 2) + lane;
            tiles[i] = BLOCK_TILES * (first + i - run.first);
            KVLAB_FOR_WIDTH(width_of_block(from.bits, first + i),
                            ask_for_block<BITS>(codes, tiles[i], words[i]));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            u8* const to = row + 16 * BLOCK_TILES * (first + i) + 2 * lane;
            KVLAB_FOR_WIDTH(width_of_block(from.bits, first + i),
                            put_block<BITS>(words[i], tiles[i], slot % 2, to));
        }
    }
}
static_assert(!IN_BLOCKS || LANES == 4, "a lane for each pair of channels of eight");
#endif

__device__ __forceinline__ void take_stored(Side side, const Region& from, int slot, u8* row, int lane) {
#if IN_BLOCKS
    if (side == KEYS && from.bits != 16) return take_key(from, slot, row, lane);
#endif
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

__device__ __forceinline__ bool is_stored(const Move& move) {
    return move.from_rung != NO_MOVE && !is_new(move);
}

// Where the stored vector of a move lies; for others the bits of raw ones.
__device__ __forceinline__ Region source_of(Side side, const LayerState& s, const Move& move) {
    if (!is_stored(move)) return {nullptr, nullptr, 16};
    return region_of(side, s.arena + (u64)move.from * UNIT, s.rungs[move.from_rung]);
}

// Which rows are filled.
enum Kinds { RAW_ROWS = 1, CODED_ROWS = 2 };

// Puts vectors that have not been asked for into their rows, of the kinds that are named: raw ones, and
// codes, a byte each. No move goes from codes to raw elements: lower rungs are narrower on both sides, or as
// wide.
__device__ __forceinline__ void fill_rows(Side side, int kinds, const LayerState& s,
                                          const NewTokens& new_tokens, const Shared& shared, PageState& page,
                                          u8* rows) {
    const u32 lane = lane_again() % LANES;
#pragma unroll 1
    for (u32 at = lane_again() / LANES; at < PAGE; at += 32 / LANES) {
        const Move move = (const Move&)page.moves[at];
        const Region from = source_of(side, s, move);
        if (!(kinds & (from.bits == 16 ? RAW_ROWS : CODED_ROWS))) continue;
        u8* const row = row_for(rows, move);
        if (is_stored(move)) {
            const u8 step = from.bits != 16 ? from.steps[move.from_slot] : 0;  // asked for before codes
            take_stored(side, from, move.from_slot, row, lane);
            if (lane == 0) page.steps[move.to_slot] = step;
        } else if (move.from_rung != NO_MOVE && !shared.in_units) {
            const u16* vector = new_vector(side, new_tokens, index_of(new_tokens, move, shared));
#pragma unroll 4
            for (int i = lane; i < HEAD_DIM; i += LANES) ((u16*)row)[i] = vector[i];
        }
    }
}

// What a row of the 16 of a warp holds.
struct Row {
    int slot, bits;  // bits: 16 where there is no vector
    u32 step;
};

__device__ __forceinline__ Row row_at(const PageState& page, int slot) {
    if (!(page.mask >> slot & 1)) return {slot, 16, 0};
    return {slot, page.bits[slot], page.steps[slot]};
}

// A pair of codes of a row of them, in the lowest bits of both halves.
__device__ __forceinline__ u32 pair_of_codes(const u8* row, int channel) {
    return __byte_perm(*(const u16*)(row + channel), 0, 0x4140);
}

// Puts the numbers of stored codes, which are rotated already, in place of what rows of codes gave as raw
// ones.
__device__ __forceinline__ void take_numbers(const u8* rows, const Row (&row)[2], Vectors& x, Loaded& loaded,
                                             int lane) {
    const int g = lane / 4, u = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (row[i].bits == 16) continue;
        // 2 code + 1 - 2^bits, which count 2^-24 as codes do.
        const bool finite = row[i].step <= HIGHEST_STEP;
        const u32 two = finite ? 0x40004000u : 0,
                  first = finite ? (0x7fffu + (1u << row[i].bits)) * 0x10001u : 0;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u8* codes = rows + (g + 8 * i) * Rows::BYTES;
                x[t][i + 2 * half] = pair_fused(pair_of_codes(codes, 16 * t + 8 * half + 2 * u), two, first);
            }
        if (u % 2 == i)
            loaded.factor = finite ? step_value(row[i].step) : 0.f, loaded.finite = finite,
            loaded.decoded = true;
    }
}

// Puts the codes of rows that go as they are in their place.
template <int BITS>
__device__ __forceinline__ void keep_codes(const u8* rows, const Row (&row)[2], Vectors& x, int lane) {
    const int g = lane / 4, u = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (row[i].bits != BITS) continue;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u8* codes = rows + (g + 8 * i) * Rows::BYTES;
                x[t][i + 2 * half] =
                    pair_of_codes(codes, 16 * t + 8 * half + 2 * u) + (BITS < 8 ? LIFTED * 0x10001u : 0);
            }
    }
}

// Stores the steps of a page: of this lane's row this byte, if it counts.
__device__ __forceinline__ void store_steps(u32 byte, bool finite, int bits, const Row (&row)[2],
                                            const PageState& page, u32 lane) {
    const Row mine = lane % 2 ? row[1] : row[0];
    if (lane % 4 < 2 && page.mask >> mine.slot & 1)
        page.to.steps[mine.slot] = (u8)(mine.bits == bits ? mine.step : finite ? byte : NAN_STEP);
}

// Stores the codes of a page and its steps.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_side(Vectors& x, u32 byte, bool finite, const u8* rows,
                                           const Row (&row)[2], const PageState& page, u32 lane) {
    if (page.others) keep_codes<BITS>(rows, row, x, lane);
    store_steps(byte, finite, BITS, row, page, lane);
    u32* const to = (u32*)page.to.codes;
    if (page.mask == ALL_SLOTS)
        store_codes<SIDE, BITS, true>(to, x, page.mask, lane);
    else
        store_codes<SIDE, BITS, false>(to, x, page.mask, lane);
}

template <int BITS>
__device__ __forceinline__ void encode_page(Side side, Vectors& x, const Loaded& loaded, const u8* rows,
                                            const Row (&row)[2], const PageState& page, u32 lane) {
    const u32 byte = encode<BITS, true>(x, loaded, lane);
    if (!IN_BLOCKS && side == KEYS)
        store_side<KEYS, BITS>(x, byte, loaded.finite, rows, row, page, lane);
    else
        store_side<VALUES, BITS>(x, byte, loaded.finite, rows, row, page, lane);
}

#if IN_BLOCKS
// A number in both halves.
__device__ __forceinline__ u32 of_width(int width, u32 two, u32 four, u32 eight) {
    return (width == 2 ? two : width == 4 ? four : width == 8 ? eight : 0) * 0x10001u;
}

// What take_numbers and keep_codes do, for keys of profiles: numbers are whole steps.
__device__ __forceinline__ void take_key_numbers(const u8* rows, const Row (&row)[2], Vectors& x,
                                                 Loaded& loaded, int lane) {
    const int g = lane / 4, u = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (row[i].bits == 16) continue;
        const bool finite = row[i].step <= HIGHEST_STEP;
        const u8* const codes = rows + (g + 8 * i) * Rows::BYTES;
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            const int width = finite ? width_of_block(row[i].bits, block) : 0;
            const u32 two = of_width(width, 0x5400, 0x4e00, 0x4000),  // 2 F
                first = of_width(width, 0x8000 + 3 * 32, 0x8000 + 15 * 12, 0x8000 + 255);
#pragma unroll
            for (int t = BLOCK_TILES * block; t < BLOCK_TILES * (block + 1); ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    x[t][i + 2 * half] =
                        pair_fused(pair_of_codes(codes, 16 * t + 8 * half + 2 * u), two, first);
        }
        if (u % 2 == i)
            loaded.factor = finite ? step_value(row[i].step) : 0.f, loaded.finite = finite,
            loaded.decoded = true;
    }
}

__device__ __forceinline__ void keep_key_codes(int profile, const u8* rows, const Row (&row)[2], Vectors& x,
                                               int lane) {
    const int g = lane / 4, u = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (row[i].bits != profile) continue;
        const u8* const codes = rows + (g + 8 * i) * Rows::BYTES;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const u32 lifted = width_of_block(profile, t / BLOCK_TILES) < 8 ? LIFTED * 0x10001u : 0;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                x[t][i + 2 * half] = pair_of_codes(codes, 16 * t + 8 * half + 2 * u) + lifted;
        }
    }
}

struct EncodeKeys {
    Vectors& x;
    const Loaded& loaded;
    const Frame& frame;
    const u8* rows;
    const Row (&row)[2];
    const PageState& page;
    u32 lane;

    template <u32 PROFILE>
    __device__ __forceinline__ void of() const {
        const u32 byte = encode_keys<PROFILE, true>(x, loaded, frame, lane);
        if (page.others) keep_key_codes(PROFILE, rows, row, x, lane);
        store_steps(byte, loaded.finite, PROFILE, row, page, lane);
        u32* const to = (u32*)page.to.codes;
        if (page.mask == ALL_SLOTS)
            store_profile<true>(to, x, PROFILE, page.mask, lane);
        else
            store_profile<false>(to, x, PROFILE, page.mask, lane);
    }
};
#endif

// Position, importance and slot of a move's token, from the lowest bits on: one register from a page's
// beginning to its end.
constexpr u32 NO_TAIL = ~0u;

__device__ __forceinline__ u32 tail_of(const LayerState& s, const NewTokens& new_tokens, const Shared& shared,
                                       const PageState& page, u32 lane) {
    if (lane >= PAGE) return NO_TAIL;
    const Move move = (const Move&)page.moves[lane];
    if (move.from_rung == NO_MOVE) return NO_TAIL;
    const u32 slot = (u32)move.to_slot << 24;
    if (is_new(move)) {
        const u32 step = index_of(new_tokens, move, shared).step;
        const u64 at = (u64)new_tokens.importance + (u64)move.from * new_tokens.num_new + step;
        const u32 position =
            new_tokens.positions ? new_tokens.positions[move.token] : new_tokens.first + (int)step;
        return slot | (page.importance_words[lane] >> at % 4 * 8 & 0xffu) << 16 | (position & 0xffffu);
    }
    const u8* from = s.arena + (u64)move.from * UNIT + s.rungs[move.from_rung].tail;
    return slot | (u32)from[2 * PAGE + move.from_slot] << 16 | ((const u16*)from)[move.from_slot];
}

// Whether a row holds raw elements; where keys are kept in blocks, pages without them skip what is for these.
__device__ __forceinline__ bool any_raw(const PageState& page) {
#if IN_BLOCKS
    return page.any_raw;
#else
    return true;
#endif
}

__device__ __forceinline__ void clear(Vectors& x) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[t][i] = 0;
}

// The frame of the keys of a page from its mean and shifts, which are there.
__device__ __forceinline__ void take_frame(const PageState& page, Frame& frame, u32 lane) {
    if (lane < HEAD_DIM / 16) ((uint4*)frame.shifts)[lane] = ((const uint4*)page.shifts)[lane];
#if IN_BLOCKS
    if (lane < HEAD_DIM / 16) ((uint4*)&frame.order)[lane] = ((const uint4*)page.order)[lane];
    if (lane < KEY_BLOCKS) frame.gain[lane] = page.gain[lane];
#endif
    __syncwarp();  // the shifts are there
    complete_frame((const __half*)page.halves, frame, lane);
    __syncwarp();  // the frame is there
}

extern "C" __global__ void __launch_bounds__(WRITE_THREADS, BLOCKS)
    write_tokens(const LayerState* layers, const MoveList* lists,
                 const __grid_constant__ NewTokens new_tokens) {
    extern __shared__ __align__(16) u8 spaces[];  // WarpSpace of each warp
    __shared__ Shared shared;
    const LayerState& s = layers[blockIdx.y];
    const MoveList& list = lists[blockIdx.y];
    const Side side = (Side)blockIdx.z;
#if IN_BLOCKS  // neighbours of the list, whose code its warps share
    const u64 all = *list.num_groups;
    const int pages = (int)(all * (blockIdx.x + 1) / gridDim.x), stride = WRITE_WARPS;
#else
    const int pages = *list.num_groups, stride = gridDim.x * WRITE_WARPS;
#endif
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        shared.heads = s.heads;
        shared.per_head = ~0u / s.heads;
        shared.in_units = are_in_units(s, new_tokens);
    }
    if (warp == 0) shared.signs[lane] = Signs::of(lane);
    __syncthreads();  // what warps share is there
    WarpSpace& space = ((WarpSpace*)spaces)[warp];
#if IN_BLOCKS
    const int begin = (int)(all * blockIdx.x / gridDim.x) + warp;
#else
    const int begin = blockIdx.x + gridDim.x * warp;  // CTAs share the last pages
#endif
    if (begin < pages) {
        ask_for_moves(list, begin, space.pages[0].moves);
        wait_copies();
        __syncwarp();  // the first moves are there
        ask_for_page(side, s, new_tokens, space.rows[0], shared, space.pages[0]);
        if (begin + stride < pages) ask_for_moves(list, begin + stride, space.pages[1].moves);
    }
    u32 now = 0, half = 0;
#pragma unroll 1
    for (int number = begin; number < pages; number += stride) {
        PageState &page = space.pages[now], &next = space.pages[now == 2 ? 0 : now + 1],
                  &then = space.pages[now == 0 ? 2 : now - 1];
        u8* const rows = space.rows[half];
        wait_copies();
        __syncwarp();  // rows, means and moves are there; the page before is stored
        if (side == KEYS && any_raw(page)) take_frame(page, space.frame, lane);
        if (number + stride < pages) ask_for_page(side, s, new_tokens, space.rows[half ^ 1], shared, next);
        if (number + 2 * stride < pages) ask_for_moves(list, number + 2 * stride, then.moves);
        const u32 tail = side == KEYS ? tail_of(s, new_tokens, shared, page, lane) : NO_TAIL;
        if (page.others) {
            // Raw keys are put in order of their blocks before codes take their rows.
            const int kinds = IN_BLOCKS && side == KEYS ? any_raw(page) * RAW_ROWS : RAW_ROWS | CODED_ROWS;
            if (kinds) fill_rows(side, kinds, s, new_tokens, shared, page, rows);
            __syncwarp();  // raw rows are whole, or all are and all sources of this page have been read
        }
        if (page.to.bits == 16) {
            if (side == KEYS)
                store_raw<KEYS, Rows, false>((u32*)page.to.codes, rows, page.mask, lane);
            else
                store_raw<VALUES, Rows, false>((u32*)page.to.codes, rows, page.mask, lane);
        } else {
            const int slot = lane / 4 * 2;
            Row row[2] = {{slot, 16, 0}, {slot + 1, 16, 0}};
            Vectors x;
            const Frame* const frame = side == KEYS ? &space.frame : nullptr;
            Loaded loaded = {{0, 0}, 0.f, true, false};
            if (any_raw(page)) {
                loaded = load_raw<Rows>(rows, frame, exponent_of(side, s, page), x, lane);
                rotate_integers(x, shared.signs[lane], frame, loaded, lane);
            } else {
                clear(x);
            }
#if IN_BLOCKS
            if (side == KEYS) {
                if (page.others) {
                    __syncwarp();  // all lanes have read raw rows
                    fill_rows(KEYS, CODED_ROWS, s, new_tokens, shared, page, rows);
                    __syncwarp();  // codes are there, and all sources of this page have been read
#pragma unroll
                    for (int i = 0; i < 2; ++i) row[i] = row_at(page, slot + i);
                    take_key_numbers(rows, row, x, loaded, lane);
                }
                with_profile(page.to.bits, EncodeKeys{x, loaded, *frame, rows, row, page, lane});
            } else
#endif
            {
                if (page.others) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) row[i] = row_at(page, slot + i);
                    take_numbers(rows, row, x, loaded, lane);
                }
                KVLAB_FOR_WIDTH(page.to.bits, encode_page<BITS>(side, x, loaded, rows, row, page, lane));
            }
        }
        if (tail != NO_TAIL) {
            ((u16*)page.tail)[tail >> 24] = (u16)tail;
            page.tail[2 * PAGE + (tail >> 24)] = (u8)(tail >> 16);
        }
        now = now == 2 ? 0 : now + 1, half ^= 1;
    }
    if (new_tokens.num_new && blockIdx.x == 0 && side == KEYS)
        for (int i = threadIdx.x; i < s.batch * s.heads; i += WRITE_THREADS)
            s.seqlen[i] = new_tokens.first + new_tokens.num_new;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_pages(const LayerState* layers, const MoveList* lists) {
    const MoveList list = lists[blockIdx.y];
    copy_listed<THREADS>(layers[blockIdx.y].arena, list.copies, *list.num_copies);
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

// gate: HEAD_DIM=128,64,80,96 BF16=1,0 registers<=255
// gate: HEAD_DIM=256 BF16=1,0 registers<=255
// gate: HEAD_DIM=128,64,256 BF16=1,0 PROFILES=k4220k4422k8422k8444k8888 registers<=255
// arch=sm_90a,sm_100a,sm_120a
