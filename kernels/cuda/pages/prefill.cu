// Writes new tokens into the pages of an empty cache, as a plan says: what write_tokens does, for many
// pages, which are new and so written whole, where vectors begin at multiples of 16 bytes.
//
// Threads and data
//   write_prefill  grid (any, layers): a warp takes every so many four destination pages, their keys, then
//                  their values, a page at a time (pages/vectors.cuh), and needs no other.
// Memory: shared a WarpSpace for each warp, 6.6 KiB at head_dim 128; registers such that 20 warps fill a
// multiprocessor on Hopper, 28 at head_dim 64, 16 where the compiler needs more than 96, 8 above head_dim
// 128. They form one CTA: its warps start together, so the instruction cache holds what most of them need
// next. The code for a page has 13 KiB; if it outgrew that cache, fetching it would take longer than running
// it. Each profile has code of its own: plans make lists rung by rung, and a CTA takes neighbours of a short
// list.
//
// Macros: HEAD_DIM; BF16; PROFILES, if keys are in blocks (pages/profiles.cuh).
#include "common/async_copies.cuh"
#include "pages/state.cuh"
#include "pages/words.cuh"

using Rows = RawRows<true>;
constexpr int ROW_BYTES = Rows::BYTES;
constexpr int ON_HOPPER = HEAD_DIM == 64 ? 28 : 20;
constexpr int WARPS = HEAD_DIM > 128          ? 8
                      : __CUDA_ARCH__ == 900  ? ON_HOPPER
                      : __CUDA_ARCH__ >= 1200 ? 12   // which fill shared memory
                                              : 16;  // fewer where shared memory is less
constexpr int PAGES = 4, SLOTS = PAGES * PAGE;       // of pages that a warp takes together
constexpr int LONG = 4;  // rounds of all warps from which on CTAs share a list page by page; else by parts

struct alignas(16) Pages {
    int new_token[SLOTS];       // by page and row: which of the new tokens it is
    u8* codes[2][PAGES];        // of keys and of values; their scales are behind them
    const u16* from[2][PAGES];  // key and value of step 0 of their bh
    u8* tails[PAGES];           // positions and importance
    u64 importance[PAGES];      // the address of that of step 0 of their bh
    u32 tokens[PAGES];          // step 0 of their row as a move has it
    u32 bh[PAGES];
#if IN_BLOCKS
    u16 bits[2][PAGES];
#else
    u8 bits[2][PAGES];
#endif
    signed char exponents[2][PAGES];
    int count;  // of these pages: fewer than PAGES at the end of a list
};

struct alignas(128) WarpSpace {
    u8 rows[PAGE * ROW_BYTES];  // raw, of the next page
    Frame frame;                // its mean as float16 where it is of the next pages
    uint4 moves[SLOTS];         // of these, PAGE each, then their Details
    int number, pages;          // of the first of these pages; where those of the CTA end
    int stride;                 // from these pages to the next
    int full, rest;             // where the last round begins, in which a warp takes `rest` pages
    // Behind what warps read 16 bytes at once: copies write it meanwhile, and racecheck sees no difference.
    u32 ahead[PAGES + 1];  // where the moves of the pages after that begin and end
    Pages pages_of[2];     // these and the next, by stages

    // The first of the pages from `number` on, and how many they are: in the last round all warps have as
    // many.
    __device__ __forceinline__ int first(int number) const {
        return number < full ? number : full + (number - full) / PAGES * rest;
    }
    __device__ __forceinline__ int count(int number) const {
        return min(number < full ? PAGES : rest, pages - first(number));
    }
};
static_assert(sizeof(WarpSpace) ==
                  ((IN_BLOCKS ? 13 * HEAD_DIM + 2144 : 5 * HEAD_DIM + 2112) + PAGE * ROW_BYTES + 127) / 128 *
                      128,
              "as the host reserves");

// Waits for the copies of all lanes.
__device__ __forceinline__ void wait_own_copies() {
    wait_copies();
    __syncwarp();
}

// The lane, asked for again: what follows from it is not kept in registers from block to block.
__device__ __forceinline__ u32 lane_again() {
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The layer, likewise.
__device__ __forceinline__ u32 layer_again() {
    u32 layer;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(layer));
    return layer;
}

// Asks where the moves of the pages from `number` on begin and end.
__device__ __forceinline__ void look_ahead(const MoveList& list, int number, WarpSpace& space, u32 lane) {
    if (lane <= PAGES)
        copy_word_async(space.ahead + lane,
                        list.begins + space.first(number) + min((int)lane, space.count(number)));
}

// The index of move i of this lane among all moves, or none: the i-th page of a half of the warp.
__device__ __forceinline__ bool find_move(const WarpSpace& space, int i, u32 lane, u32& index) {
    const u32 page = 2 * i + lane / PAGE;
    index = space.ahead[page] + lane % PAGE;
    return index < space.ahead[page + 1];
}

// Asks for the moves of pages, of which space.ahead says where they are.
__device__ __forceinline__ void ask_for_moves(const MoveList& list, WarpSpace& space, u32 lane) {
#pragma unroll
    for (int i = 0; i < SLOTS / 32; ++i) {
        u32 index;
        if (find_move(space, i, lane, index)) copy_async(space.moves + lane + 32 * i, list.moves + index);
    }
}

// Asks for the frame of the keys of a bh: its mean goes where the sums go, its order where that of turned
// rows goes.
__device__ __forceinline__ void ask_for_frame(const LayerState& s, u32 bh, Frame& frame, u32 lane) {
    if (lane < HEAD_DIM / 8) copy_async((uint4*)frame.sums + lane, s.k_mean + (u64)bh * HEAD_DIM + 8 * lane);
    ask_for_pairs<false>(frame.shifts, s.k_shift, bh, lane);
#if IN_BLOCKS
    ask_for_pairs<true>((u8*)&frame.order, s.k_order, bh, lane);
    if (lane == 0) copy_async(frame.gain, s.k_gain + KEY_BLOCKS * bh);
#endif
}

// Position and importance of a move's slot: a Detail takes the place of the move until it is stored.
struct alignas(8) Detail {
    u32 importance;  // a word that has it
    u16 position;
    u8 slot, importance_shift;
};
constexpr u8 NO_SLOT = 255;

// Makes pages of their moves, which are there, and asks for the frame of the first ones' keys and for
// details.
__device__ __forceinline__ void prepare(const LayerState& s, const NewTokens& new_tokens, WarpSpace& space,
                                        Pages& pages, int number, u32 lane) {
    const int count = space.count(number);
    Move move[SLOTS / 32];
#pragma unroll
    for (int i = 0; i < SLOTS / 32; ++i) {
        (uint4&)move[i] = space.moves[lane + 32 * i];
        pages.new_token[lane + 32 * i] = 0;  // where there is no move
    }
    ask_for_frame(s, ((const Move&)space.moves[0]).from, space.frame, lane);
    if (lane < count) {
        const Move first = (const Move&)space.moves[PAGE * lane];
        const CacheRung& rung = s.rungs[first.to_rung];
        const u32 bh = first.from, batch = bh / s.heads, head = bh - batch * s.heads;
        u8* const record = s.arena + (u64)first.to * UNIT;
        pages.codes[KEYS][lane] = record;
        pages.codes[VALUES][lane] = record + key_code_bytes(rung.bits_k) + scale_bytes(rung.bits_k);
        pages.from[KEYS][lane] = new_tokens.k + batch * new_tokens.k_batch + head * new_tokens.k_head;
        pages.from[VALUES][lane] = new_tokens.v + batch * new_tokens.v_batch + head * new_tokens.v_head;
        pages.tails[lane] = record + rung.tail;
        pages.importance[lane] = (u64)new_tokens.importance + (u64)bh * new_tokens.num_new;
        pages.tokens[lane] = batch * new_tokens.num_new;
        pages.bh[lane] = bh;
        pages.bits[KEYS][lane] = rung.bits_k, pages.bits[VALUES][lane] = rung.bits_v;
        for (int side = KEYS; side <= VALUES; ++side) pages.exponents[side][lane] = s.exponent[2 * bh + side];
    }
    if (lane == 0) pages.count = count;
    __syncwarp();  // no step is set but by what follows; moves have been read
#pragma unroll
    for (int i = 0; i < SLOTS / 32; ++i) {
        Detail& detail = (Detail&)space.moves[lane + 32 * i];
        u32 index;
        detail.slot = NO_SLOT;
        if (!find_move(space, i, lane, index)) continue;
        const int page = 2 * i + lane / PAGE, slot = move[i].to_slot,
                  step = move[i].token - pages.tokens[page];
        pages.new_token[page * PAGE + row_of(slot)] = step;
        const u64 at = pages.importance[page] + step;
        detail.position = (u16)(new_tokens.first + step);
        detail.slot = (u8)slot, detail.importance_shift = (u8)(at % 4 * 8);
        copy_word_async(&detail.importance, (const void*)(at & ~3ull));
    }
    __syncwarp();
}

// Stores the details of pages, which are there.
__device__ __forceinline__ void store_details(const WarpSpace& space, const Pages& pages, u32 lane) {
#pragma unroll
    for (int i = 0; i < SLOTS / 32; ++i) {
        const Detail detail = (const Detail&)space.moves[lane + 32 * i];
        if (detail.slot == NO_SLOT) continue;
        u8* const tail = pages.tails[2 * i + lane / PAGE];
        ((u16*)tail)[detail.slot] = detail.position;
        tail[2 * PAGE + detail.slot] = (u8)(detail.importance >> detail.importance_shift);
    }
}

// Asks for this lane's parts of rows ROUND to ROUNDS - 1, of 16 bytes, given that of step 0; `apart`: bytes
// from one step to the next.
template <int ROUND, int ROUNDS>
__device__ __forceinline__ void ask_for_parts(u32 to, const u8* from, u32 apart, const int* new_token) {
    if constexpr (ROUND < ROUNDS) {
        u64 at;  // asked for like this, or the compiler multiplies by the upper half of `apart` as well
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(at) : "r"(new_token[ROUND]), "r"(apart));
        copy_async<ROUND * ROW_BYTES>(to ^ 16 * (ROUND % 8), from + at);
        ask_for_parts<ROUND + 1, ROUNDS>(to, from, apart, new_token);
    }
}

// Asks for the raw vectors of a page, given which new tokens it has.
__device__ __forceinline__ void ask_for_rows(const u16* of_step_0, u32 apart, const int* new_token,
                                             WarpSpace& space, u32 lane) {
    constexpr int PARTS = HEAD_DIM / 8, OF_ROW = PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32, ROUNDS = OF_ROW / 2;
    const int first = lane / OF_ROW * ROUNDS, part = lane % OF_ROW;
    if (PARTS < OF_ROW && part >= PARTS) return;
    int step[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i += 4) (int4&)step[i] = *(const int4*)(new_token + first + i);
    ask_for_parts<0, ROUNDS>(shared_address(space.rows) + Rows::at(first, 8 * part),
                             (const u8*)of_step_0 + 16 * part, apart, step);
}

// What lies in memory, read here and not kept in registers until here.
__device__ __forceinline__ u8* read_again(u8* const& from) {
    asm volatile("" ::: "memory");
    return from;
}

// Stores the scales of a page, of this lane's row the one with that byte, behind codes of so many bytes.
__device__ __forceinline__ void store_scales(u8* codes, int bytes, u32 byte, const Loaded& loaded, u32 lane) {
    if (lane % 4 < 2)  // of slot 2 g or 2 g + 1
        codes[bytes + lane / 4 * 2 + lane % 4] = (u8)(loaded.finite ? byte : NAN_SCALE);
}

template <int BITS>
__device__ __forceinline__ void store_page(int side, u8* const& to, Vectors& x, const Loaded& loaded,
                                           u32 lane) {
    const u32 byte = encode<BITS, false>(x, loaded, lane);
    u8* const codes = read_again(to);
    store_scales(codes, code_bytes(BITS), byte, loaded, lane);
    if (!IN_BLOCKS && side == KEYS)
        store_codes<KEYS, BITS, true>((u32*)codes, x, 0, lane);
    else
        store_codes<VALUES, BITS, true>((u32*)codes, x, 0, lane);
}

#if IN_BLOCKS
struct StoreKeys {
    u8* const& to;
    Vectors& x;
    const Loaded& loaded;
    const Frame& frame;
    u32 lane;

    template <u32 PROFILE>
    __device__ __forceinline__ void of() const {
        const u32 byte = encode_keys<PROFILE, false>(x, loaded, frame, lane);
        u8* const codes = read_again(to);
        store_scales(codes, key_code_bytes(PROFILE), byte, loaded, lane);
        store_profile<true>((u32*)codes, x, PROFILE, 0, lane);
    }
};
#endif

// What a warp does after the keys or values of a page of `count`, in one register: the page, above it whether
// it is its keys or its values, above that the stage of pages_of.
__device__ __forceinline__ u32 page_after(u32 at, int count) {
    return (int)(at % PAGES) + 1 < count ? at + 1 : (at / PAGES + 1) * PAGES % (4 * PAGES);
}

#if IN_BLOCKS && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
#define BOUNDS __launch_bounds__(WARPS * 32, 1)  // else the compiler spills to have two CTAs at head_dim 64
#else
#define BOUNDS __launch_bounds__(WARPS * 32)
#endif

extern "C" __global__ void BOUNDS write_prefill(const LayerState* __restrict__ layers,
                                                const MoveList* __restrict__ lists,
                                                const __grid_constant__ NewTokens new_tokens) {
    extern __shared__ __align__(128) u8 shared[];  // WarpSpace of each warp
    __shared__ uint4 signs[2][2][32];              // of keys and of values, by parts of Signs
    const int warp = threadIdx.x / 32;
    for (int side = warp; side <= VALUES; side += blockDim.x / 32) {
        const u32 lane = threadIdx.x % 32;
        const Signs of_lane = Signs::of(lane, side == VALUES);
        for (int i = 0; i < 2; ++i) signs[side][i][lane] = ((const uint4*)&of_lane)[i];
    }
    __syncthreads();
    WarpSpace& space = ((WarpSpace*)shared)[warp];
    const auto ask = [&](const Pages& pages, int side, int page, u32 lane) {
        __syncwarp();  // all lanes have read the rows before
        ask_for_rows(pages.from[side][page], 2 * (u32)(side == KEYS ? new_tokens.k_step : new_tokens.v_step),
                     pages.new_token + PAGE * page, space, lane);
    };
    {
        const u32 lane = lane_again();
        const LayerState& s = layers[blockIdx.y];
        const MoveList& list = lists[blockIdx.y];
        if (blockIdx.x == 0)
            for (int i = threadIdx.x; i < s.batch * s.heads; i += blockDim.x)
                s.seqlen[i] = new_tokens.first + new_tokens.num_new;
        // CTAs share a list round by round; where each profile has code of its own, parts of a short one.
        const int groups = *list.num_groups, warps = blockDim.x / 32;
        const u32 all = (groups + PAGES - 1) / PAGES;
        const bool in_parts = IN_BLOCKS && all <= LONG * gridDim.x * warps;
        const int stride = PAGES * warps * (in_parts ? 1 : gridDim.x);
        const u32 each = all / gridDim.x, others = all % gridDim.x;  // of which the first CTAs take one more
        const int begin = in_parts ? PAGES * (each * blockIdx.x + min(blockIdx.x, others)) : 0;
        const int pages =
            in_parts ? min(begin + PAGES * (int)(each + (blockIdx.x < others)), groups) : groups;
        const int number = begin + PAGES * (in_parts ? warp : blockIdx.x + gridDim.x * warp);
        if (lane == 0) {
            space.number = number, space.pages = pages, space.stride = stride;
            space.full = begin + (pages - begin) / stride * stride;
            space.rest = (PAGES * (pages - space.full) + stride - 1) / stride;
        }
        __syncwarp();  // the number of pages is there
        if (space.first(number) >= pages) return;
        look_ahead(list, number, space, lane);
        wait_own_copies();
        ask_for_moves(list, space, lane);
        wait_own_copies();
        prepare(s, new_tokens, space, space.pages_of[0], number, lane);
        if (space.first(number + stride) < pages) look_ahead(list, number + stride, space, lane);
        ask(space.pages_of[0], KEYS, 0, lane);
    }
    u32 at = 0;  // as page_after has it
#pragma unroll 1
    while (true) {
        asm volatile("" : "+r"(at));  // taken apart again, page by page
        const int page = at % PAGES, side = at / PAGES % 2;
        const Pages& pages = space.pages_of[at / (2 * PAGES)];
        // Asked for again where it is needed, or it is kept in registers.
        const auto then = [&](int turns) { return space.number + turns * space.stride; };
        const auto more = [&](int turns) { return space.first(then(turns)) < space.pages; };
        const u32 lane = lane_again();
        wait_own_copies();
        if (side == KEYS && (page == 0 || pages.bh[page] != pages.bh[page - 1])) {
            if (page) {
                ask_for_frame(layers[layer_again()], pages.bh[page], space.frame, lane);
                wait_own_copies();
            }
            complete_frame((const __half*)space.frame.sums, space.frame, lane);
            __syncwarp();  // the frame is there
        }
        if (page == 0) {
            const u32 layer = layer_again();
            if (side == KEYS) {
                store_details(space, pages, lane);
                __syncwarp();  // details have been read
                if (more(1)) ask_for_moves(lists[layer], space, lane);
            } else if (more(1)) {
                Pages& after = space.pages_of[at / (2 * PAGES) ^ 1];
                prepare(layers[layer], new_tokens, space, after, then(1), lane);
                if (more(2)) look_ahead(lists[layer], then(2), space, lane);
            }
        }
        const auto ask_for_next = [&]() {
            const u32 next = page_after(at, pages.count);
            if (next % (2 * PAGES) || more(1))
                ask(space.pages_of[next / (2 * PAGES)], next / PAGES % 2, next % PAGES, lane);
        };
        u8* const& to = pages.codes[side][page];
        const int bits = pages.bits[side][page];
        if (bits == 16) {
            if (side == KEYS)
                store_raw<KEYS, Rows, true>((u32*)to, space.rows, 0, lane);
            else
                store_raw<VALUES, Rows, true>((u32*)to, space.rows, 0, lane);
            ask_for_next();
        } else {
            Vectors x;
            const Frame* const frame = side == KEYS ? &space.frame : nullptr;
            const Loaded loaded = load_raw<Rows>(space.rows, frame, pages.exponents[side][page], x, lane);
            ask_for_next();
            Signs mine;
#pragma unroll
            for (int i = 0; i < 2; ++i) ((uint4*)&mine)[i] = signs[side][i][lane];
            if (side == KEYS)
                rotate_integers(x, mine, &space.frame, loaded, lane);
            else
                rotate_integers(x, mine, nullptr, loaded, lane);
#if IN_BLOCKS
            if (side == KEYS)
                with_profile(bits, StoreKeys{to, x, loaded, space.frame, lane});
            else
#endif
                KVLAB_FOR_WIDTH(bits, store_page<BITS>(side, to, x, loaded, lane));
        }
        asm volatile("" : "+r"(at));  // or the next is kept as well
        at = page_after(at, space.pages_of[at / (2 * PAGES)].count);
        if (at % (2 * PAGES)) continue;
        if (!more(1)) break;
        __syncwarp();  // all lanes have read the number
        if (threadIdx.x % 32 == 0) space.number = then(1);
        __syncwarp();
    }
}

// gate: HEAD_DIM=128,64,80,96 BF16=1,0 registers<=128
// gate: HEAD_DIM=256 BF16=1,0 registers<=255
// gate: HEAD_DIM=128,64 BF16=1,0 PROFILES=k4220k4422k8422k8444k8888 registers<=128 arch=sm_80,sm_90a,sm_100a
// gate: HEAD_DIM=128,64 BF16=1,0 PROFILES=k4220k4422k8422k8444k8888 registers<=168 arch=sm_120a
// gate: HEAD_DIM=256 BF16=1,0 PROFILES=k4220k4422k8422k8444k8888 registers<=255
