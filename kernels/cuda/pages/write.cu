// Carries out what a plan says: new tokens are encoded into pages, stored ones re-encoded at fewer bits or
// moved bit for bit, whole pages copied.
//
// Threads and data
//   write_tokens  grid (any, layers, 2): a warp takes the keys, or the values, of every so many destination
//                 page (pages/vectors.cuh), and needs no other. Sources go into rows of shared memory: raw
//                 vectors as they are, stored ones as the numbers of their elements, so that both are read as
//                 fragments of tiles.
//   copy_pages    grid (any, layers): a warp takes every so many copy.
//   merge_rows    a warp one query row: attention over stored and over new tokens, when these are many.
// Memory: shared a WarpSpace for each warp, 11.4 KiB at head_dim 128, most of it rows of this page and the
// next; 80 registers for six blocks a multiprocessor at head_dim 64, 128 for four above it, 168 for three
// with profiles at head_dim 128, up to 255 for two from compute capability 10.0 on, where 128 are too few.
//
// Macros: HEAD_DIM; BF16; PROFILES, if keys are in blocks (pages/profiles.cuh).
#include "pages/copies.cuh"
#include "pages/sources.cuh"

constexpr int THREADS = 256;  // of the other kernels
constexpr u32 ALL_SLOTS = (1u << PAGE) - 1;
constexpr int WRITE_THREADS = 128, WRITE_WARPS = WRITE_THREADS / 32;
constexpr int BLOCKS = HEAD_DIM > 128 || __CUDA_ARCH__ >= 1000 ? 2
                       : HEAD_DIM > 64 || __CUDA_ARCH__ < 900  ? 4
                                                               : 6;  // of a multiprocessor

// A stored vector is read by two lanes: of every eight channels a lane has four side by side.
constexpr int LANES = 2;
constexpr int AT_ONCE = 4;  // tiles that a lane asks for before it waits for the first

// What makes codes, which count 2^-24, the numbers of elements, or with `kept` leaves them as they are.
struct ToNumbers {
    u32 two, first;

    // Codes of this width; an element is this often 2 code + 1 - 2^bits.
    __device__ __forceinline__ static ToNumbers of(int bits, u32 factor, bool kept) {
        const u32 two = bits == 2 && factor > 1 ? 0x5400u : bits == 4 && factor > 1 ? 0x4e00u : 0x4000u;
        return {twice(kept ? 0x3c00u : two), kept ? 0u : twice(0x8000u + ((1u << bits) - 1u) * factor)};
    }
    // A pair of them at bit `bit` of halves.
    __device__ __forceinline__ u32 pair(u32 codes, u32 bit) const {
        return pair_fused(codes, two - bit * 0x04000400u, first);
    }
};

// Asks for the words of a lane with the codes of a slot in tiles from `tile` on of a run that begins at
// `run`: of keys two words side by side, of values four.
template <Side SIDE, int BITS, int COUNT>
__device__ __forceinline__ void ask_for_tiles(const u8* run, u32 slot, int tile, u32 (&words)[COUNT][4],
                                              u32 lane) {
    const u32* const from =
        (const u32*)run +
        (SIDE == KEYS ? 4 * (slot / 2) + 2 * lane : 16 * lane + slot / 4 + (BITS == 8 ? 32 * (slot % 2) : 0));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int t = tile + i;
        const u32* const at = from + 32 * (BITS == 8 ? 2 * t : t / Fields<BITS>::TILES);
        if (SIDE == VALUES) {
#pragma unroll
            for (int j = 0; j < 4; ++j) words[i][j] = at[4 * j];
        } else {
            (uint2&)words[i][0] = *(const uint2*)at;
            if (BITS == 8) (uint2&)words[i][2] = *(const uint2*)(at + 32);
        }
    }
}

// Puts the numbers of these codes into a row; `tile`: the first in its run, `row`: where its channels begin.
template <Side SIDE, int BITS, int COUNT>
__device__ __forceinline__ void put_tiles(const u32 (&words)[COUNT][4], u32 slot, int tile,
                                          const ToNumbers& to, u8* row, u32 lane) {
    constexpr u32 MASK = ((1u << BITS) - 1u) * 0x10001u;
    const u32 byte = SIDE == KEYS ? slot % 2
                     : BITS == 8  ? slot / 2 % 2 * 2
                                  : slot % 2 + slot / 2 % 2 * 2;  // where a word has codes of the slot
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        u32 numbers[2][2];  // of the first eight channels and of the others
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if constexpr (SIDE == KEYS && BITS == 8) {
                numbers[0][j] = to.pair(words[i][j] >> 8 * byte & MASK, 0);
                numbers[1][j] = to.pair(words[i][2 + j] >> 8 * byte & MASK, 0);
            } else if constexpr (BITS == 8) {
                const u32 both = __byte_perm(words[i][2 * j], words[i][2 * j + 1], 0x5410 + 0x1111 * byte);
                numbers[0][j] = to.pair(both & MASK, 0), numbers[1][j] = to.pair(both >> 8 & MASK, 0);
            } else {
                const u32 bit = BITS == 2 ? 4 * ((tile + i) % 2) : 0;
                const u32 both =
                    SIDE == KEYS ? words[i][j] >> BITS * byte
                                 : __byte_perm(words[i][2 * j], words[i][2 * j + 1], 0x4400 + 0x1111 * byte);
                numbers[0][j] = to.pair(both & MASK << bit, bit);
                numbers[1][j] = SIDE == KEYS ? to.pair(both >> 8 & MASK << bit, bit)
                                             : to.pair(both & MASK << (bit + BITS), bit + BITS);
            }
        }
        *(uint2*)(row + 32 * i + 8 * lane) = {numbers[0][0], numbers[0][1]};
        *(uint2*)(row + 32 * i + 8 * lane + 16) = {numbers[1][0], numbers[1][1]};
    }
}

// Numbers of the codes of a stored vector, or raw elements, into a row.
template <Side SIDE, int BITS>
__device__ __forceinline__ void take_codes(const u8* codes, u32 slot, bool kept, u8* row, u32 lane) {
    const ToNumbers to = ToNumbers::of(BITS, 1, kept);
    if constexpr (BITS == 3 || BITS == 16) {
#pragma unroll 1
        for (int first = 4 * lane; first < HEAD_DIM; first += 16) {
            u32 code[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                code[j] = read_code<BITS>(codes, element_at(SIDE, slot, first + j / 4 * 8 + j % 4));
#pragma unroll
            for (int j = 0; j < 8; ++j)
                ((u16*)row)[first + j / 4 * 8 + j % 4] = (u16)(BITS == 16 ? code[j] : to.pair(code[j], 0));
        }
    } else {
        constexpr int COUNT = TILES % AT_ONCE ? 1 : AT_ONCE;
#pragma unroll 1
        for (int t = 0; t < TILES; t += COUNT) {
            u32 words[COUNT][4];
            ask_for_tiles<SIDE, BITS>(codes, slot, t, words, lane);
            put_tiles<SIDE, BITS>(words, slot, t, to, row + 32 * t, lane);
        }
    }
}

#if IN_BLOCKS
// The same of a key of a profile.
struct TakeKey {
    const u8* codes;
    u32 slot;
    bool kept;
    u8* row;
    u32 lane;

    template <u32 PROFILE>
    __device__ __forceinline__ void of() const {
        constexpr int BLOCKS = AT_ONCE / BLOCK_TILES > 0 ? AT_ONCE / BLOCK_TILES : 1;
#pragma unroll
        for (int first = 0; first < KEY_BLOCKS; first += BLOCKS) {
            u32 words[BLOCKS][BLOCK_TILES][4];
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                const Run run = run_of_block(PROFILE, first + i);
                KVLAB_FOR_WIDTH(
                    width_of_block(PROFILE, first + i),
                    (ask_for_tiles<KEYS, BITS>(codes + 128 * run.word, slot,
                                               BLOCK_TILES * (first + i - run.first), words[i], lane)));
            }
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                const Run run = run_of_block(PROFILE, first + i);
                const int width = width_of_block(PROFILE, first + i);
                const ToNumbers to = ToNumbers::of(width, factor_of_width(width), kept);
                u8* const at = row + 32 * BLOCK_TILES * (first + i);
                KVLAB_FOR_WIDTH(
                    width, (put_tiles<KEYS, BITS>(words[i], slot, BLOCK_TILES * (first + i - run.first), to,
                                                  at, lane)));
                if (!width)
#pragma unroll
                    for (int t = 0; t < 2 * BLOCK_TILES; ++t) *(uint2*)(at + 16 * t + 8 * lane) = {0, 0};
            }
        }
    }
};
#endif

template <Side SIDE>
__device__ __forceinline__ void take_stored(const Region& from, u32 slot, bool kept, u8* row, u32 lane) {
#if IN_BLOCKS
    if (SIDE == KEYS && from.bits != 16)
        return with_profile(from.bits, TakeKey{from.codes, slot, kept, row, lane});
#endif
    switch (from.bits) {
        case 2:
            return take_codes<SIDE, 2>(from.codes, slot, kept, row, lane);
        case 3:
            return take_codes<SIDE, 3>(from.codes, slot, kept, row, lane);
        case 4:
            return take_codes<SIDE, 4>(from.codes, slot, kept, row, lane);
        case 8:
            return take_codes<SIDE, 8>(from.codes, slot, kept, row, lane);
        case 16:
            return take_codes<SIDE, 16>(from.codes, slot, kept, row, lane);
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

// Puts vectors that have not been asked for into their rows, of the kinds that are named: raw ones, and the
// numbers of codes, or codes that go as they are. No move goes from codes to raw elements: lower rungs are
// narrower on both sides, or as wide.
template <Side SIDE>
__device__ __forceinline__ void fill_rows(int kinds, const LayerState& s, const NewTokens& new_tokens,
                                          const Shared& shared, PageState& page, u8* rows) {
    const u32 lane = lane_again() % LANES;
    const Move move = (const Move&)page.moves[lane_again() / LANES];
    const Region from = source_of(SIDE, s, move);
    if (!(kinds & (from.bits == 16 ? RAW_ROWS : CODED_ROWS))) return;
    u8* const row = row_for(rows, move);
    if (is_stored(move)) {
        const u8 scale = from.bits != 16 ? from.scales[move.from_slot] : 0;  // asked for before codes
        const bool kept = from.bits == page.to.bits;
        take_stored<SIDE>(from, move.from_slot, kept, row, lane);
        if (scale > HIGHEST_SCALE && !kept)
            for (int i = lane; i < HEAD_DIM / 4; i += LANES) ((uint2*)row)[i] = {0, 0};  // its own
        if (lane == 0) page.scales[move.to_slot] = scale;
    } else if (move.from_rung != NO_MOVE && !shared.in_units) {
        const u16* vector = new_vector(SIDE, new_tokens, index_of(new_tokens, move, shared));
#pragma unroll 4
        for (int i = lane; i < HEAD_DIM; i += LANES) ((u16*)row)[i] = vector[i];
    }
}
static_assert(LANES * PAGE == 32, "lanes for all rows");

// What a row holds: raw elements (16), as do those where there is no vector, or what was of so many bits.
__device__ __forceinline__ int bits_of_row(const PageState& page, u32 slot) {
    return page.mask >> slot & 1 ? page.bits[slot] : 16;
}

// Puts the numbers of stored codes, which are rotated already, in place of what their rows gave as raw ones.
__device__ __forceinline__ void take_numbers(u8* rows, const PageState& page, Vectors& x, Loaded& loaded,
                                             u32 lane) {
    const u32 slot = lane / 4 * 2, from = shared_address(rows) + Rows::at(lane % 16, lane / 16 * 8);
    const bool coded[2] = {bits_of_row(page, slot) != 16, bits_of_row(page, slot + 1) != 16};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        u32 numbers[4];
        load_matrices(numbers, from + 32 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (coded[i % 2]) x[t][i] = numbers[i];
    }
    if (!(lane % 2 ? coded[1] : coded[0])) return;
    const u32 scale = page.scales[slot + lane % 2];
    const bool finite = scale <= HIGHEST_SCALE;
    loaded.factor = finite ? scale_of_byte(scale) : 0.f, loaded.finite = finite, loaded.decoded = true;
}

// Puts the codes of rows that go as they are in their place. What `lifted` says of a tile is added.
template <class F>
__device__ __forceinline__ void keep_codes(int bits, const u8* rows, const PageState& page, Vectors& x,
                                           u32 lane, F lifted) {
    const u32 g = lane / 4, u = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (bits_of_row(page, 2 * g + i) != bits) continue;
        const u8* const row = rows + (g + 8 * i) * Rows::BYTES + 4 * u;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                x[t][i + 2 * half] = *(const u32*)(row + 32 * t + 16 * half) + lifted(t);
    }
}

// Stores the scales of a page: of this lane's row this byte, or the one that its codes kept.
__device__ __forceinline__ void store_scales(u32 byte, bool finite, int bits, const PageState& page,
                                             u32 lane) {
    const u32 slot = lane / 4 * 2 + lane % 2;
    if (lane % 4 < 2 && page.mask >> slot & 1)
        page.to.scales[slot] = (u8)(page.bits[slot] == bits ? page.scales[slot] : finite ? byte : NAN_SCALE);
}

template <int BITS, bool WHOLE>
__device__ __forceinline__ void store_side(Side side, u32* to, Vectors& x, u32 mask, u32 lane) {
    if (!IN_BLOCKS && side == KEYS)
        store_codes<KEYS, BITS, WHOLE>(to, x, mask, lane);
    else
        store_codes<VALUES, BITS, WHOLE>(to, x, mask, lane);
}

template <int BITS>
__device__ __forceinline__ void encode_page(Side side, Vectors& x, const Loaded& loaded, const u8* rows,
                                            const PageState& page, u32 lane) {
    const u32 byte = encode<BITS, true>(x, loaded, lane);
    if (page.others)
        keep_codes(BITS, rows, page, x, lane, [](int) { return BITS < 8 ? LIFTED * 0x10001u : 0u; });
    store_scales(byte, loaded.finite, BITS, page, lane);
    u32* const to = (u32*)page.to.codes;
    if (page.mask == ALL_SLOTS)
        store_side<BITS, true>(side, to, x, page.mask, lane);
    else
        store_side<BITS, false>(side, to, x, page.mask, lane);
}

#if IN_BLOCKS
struct EncodeKeys {
    Vectors& x;
    const Loaded& loaded;
    const Frame& frame;
    const u8* rows;
    const PageState& page;
    u32 lane;

    template <u32 PROFILE>
    __device__ __forceinline__ void of() const {
        const u32 byte = encode_keys<PROFILE, true>(x, loaded, frame, lane);
        if (page.others)
            keep_codes(PROFILE, rows, page, x, lane, [](int t) {
                return width_of_block(PROFILE, t / BLOCK_TILES) < 8 ? LIFTED * 0x10001u : 0u;
            });
        store_scales(byte, loaded.finite, PROFILE, page, lane);
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

// Stores positions and importance of this lane's move.
__device__ __forceinline__ void store_tail(const PageState& page, u32 tail) {
    if (tail == NO_TAIL) return;
    ((u16*)page.tail)[tail >> 24] = (u16)tail;
    page.tail[2 * PAGE + (tail >> 24)] = (u8)(tail >> 16);
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
    const u32 all = *list.num_groups, each = all / gridDim.x, more = all % gridDim.x;
    const int first = each * blockIdx.x + min(blockIdx.x, more), stride = WRITE_WARPS;
    const int pages = first + each + (blockIdx.x < more);
#else
    const int pages = *list.num_groups, stride = gridDim.x * WRITE_WARPS;
#endif
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        shared.heads = s.heads;
        shared.per_head = ~0u / s.heads;
        shared.in_units = are_in_units(s, new_tokens);
        shared.pages = pages;
    }
    if (warp == 0) shared.signs[lane] = Signs::of(lane, side == VALUES);
    __syncthreads();  // what warps share is there
    WarpSpace& space = ((WarpSpace*)spaces)[warp];
#if IN_BLOCKS
    const int begin = first + warp;
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
    for (int number = begin; number < shared.pages; number += stride) {
        const u32 lane = lane_again();
        PageState &page = space.pages[now], &next = space.pages[now == 2 ? 0 : now + 1],
                  &then = space.pages[now == 0 ? 2 : now - 1];
        u8* const rows = space.rows[half];
        wait_copies();
        __syncwarp();  // rows, means and moves are there; the page before is stored
        if (side == KEYS && page.any_raw) take_frame(page, space.frame, lane);
        if (number + stride < shared.pages)
            ask_for_page(side, s, new_tokens, space.rows[half ^ 1], shared, next);
        if (number + 2 * stride < shared.pages) ask_for_moves(list, number + 2 * stride, then.moves);
        const u32 tail = side == KEYS ? tail_of(s, new_tokens, shared, page, lane) : NO_TAIL;
        if (page.others) {
            // Raw keys are put in order of their blocks before codes take their rows.
            if (side == VALUES)
                fill_rows<VALUES>(RAW_ROWS | CODED_ROWS, s, new_tokens, shared, page, rows);
            else if (!IN_BLOCKS || page.any_raw)
                fill_rows<KEYS>(RAW_ROWS | !IN_BLOCKS * CODED_ROWS, s, new_tokens, shared, page, rows);
            __syncwarp();  // raw rows are whole, or all are and all sources of this page have been read
        }
        if (page.to.bits == 16) {
            if (side == KEYS)
                store_raw<KEYS, Rows, false>((u32*)page.to.codes, rows, page.mask, lane);
            else
                store_raw<VALUES, Rows, false>((u32*)page.to.codes, rows, page.mask, lane);
            store_tail(page, tail);
        } else {
            Vectors x;
            const Frame* const frame = side == KEYS ? &space.frame : nullptr;
            Loaded loaded = {{0, 0}, 0.f, true, false};
            if (page.any_raw) {
                loaded = load_raw<Rows>(rows, frame, exponent_of(side, s, page), x, lane);
                rotate_integers(x, shared.signs[lane], frame, loaded, lane);
            } else {
                clear(x);
            }
            if (page.others) {
                if (IN_BLOCKS && side == KEYS) {
                    __syncwarp();  // all lanes have read raw rows
                    fill_rows<KEYS>(CODED_ROWS, s, new_tokens, shared, page, rows);
                    __syncwarp();  // codes are there, and all sources of this page have been read
                }
                take_numbers(rows, page, x, loaded, lane);
            }
            store_tail(page, tail);
#if IN_BLOCKS
            if (side == KEYS)
                with_profile(page.to.bits, EncodeKeys{x, loaded, *frame, rows, page, lane});
            else
#endif
                KVLAB_FOR_WIDTH(page.to.bits, encode_page<BITS>(side, x, loaded, rows, page, lane));
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
    merge_rows(u16* out, float* lse, const u16* other, const float* other_lse, int rows, int num_new,
               int heads) {
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const int head = row % heads, step = row / heads % num_new, batch = row / heads / num_new;
    const u64 at = ((u64)batch * heads + head) * num_new + step;
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
