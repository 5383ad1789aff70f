// Writes new tokens into the pages of an empty cache, as a plan says: what write_tokens does, for many
// pages, where no token is stored yet and vectors begin at multiples of 16 bytes.
//
// Threads and data
//   write_prefill  grid (any, layers): a warp takes every so many destination page, its keys, then its
//                  values, 16 slots at a time (pages/vectors.cuh), and needs no other.
// Memory: shared a WarpSpace for each warp, 9.25 KiB at head_dim 128; registers such that 20 warps fill a
// multiprocessor on Hopper, 16 where the compiler needs more than 96, 8 above head_dim 128. They form one
// CTA: its warps start together, so the instruction cache holds what most of them need next. The code for a
// page has 13 KiB; if it outgrew that cache, fetching it would take longer than running it.
//
// Macros: HEAD_DIM; BF16.
#include "common/async_copies.cuh"
#include "pages/state.cuh"
#include "pages/words.cuh"

using Rows = RawRows<true>;
constexpr int ROW_BYTES = Rows::BYTES;
constexpr int WARPS = HEAD_DIM > 128          ? 8
                      : __CUDA_ARCH__ == 900  ? 20
                      : __CUDA_ARCH__ >= 1200 ? 12                   // which fill shared memory
                                              : 16;                  // fewer where shared memory is less
constexpr int SLOTS = 64, ROWS = 16, LAST_BLOCK = SLOTS / ROWS - 1;  // a block is what a warp encodes at once

// A page that a warp writes.
struct alignas(16) Page {
    int steps[SLOTS];  // by block and row: which of the new tokens it is, or any
    u32* codes[2];     // of keys and of values
    u8 *to_steps[2], *tail;
    const u16* from[2];  // key and value of step 0 of its pair
    u64 mask;            // slots that are written
    u32 moved;
    u8 bits[2];
};

struct alignas(128) WarpSpace {
    u32 words[LAST_BLOCK * TILES * 32];  // of codes that share words with those of other blocks
    u8 rows[ROWS * ROW_BYTES];           // raw, of the next block
    Frame frame;                         // its mean as float16 where it is of the next page
    uint4 moves[SLOTS];                  // and its moves, then its Details
    u32 ahead[2];                        // where the moves of the page after that begin and end
    int number, pages;                   // of this page; how many there are
    Page pages_of[2];                    // this one and the next, by stages
};
static_assert(sizeof(WarpSpace) == (29 * HEAD_DIM + ROWS * ROW_BYTES + 1728 + 127) / 128 * 128,
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

// Asks where the moves of page `number` begin and end.
__device__ __forceinline__ void look_ahead(const MoveList& list, int number, WarpSpace& space, u32 lane) {
    if (lane < 2) copy_word_async(space.ahead + lane, list.begins + number + lane);
}

// Asks for the moves of a page, of which space.ahead says where they are.
__device__ __forceinline__ void ask_for_moves(const MoveList& list, WarpSpace& space, Page& page, u32 lane) {
    const u32 begin = space.ahead[0], moved = space.ahead[1] - begin;
#pragma unroll
    for (int i = 0; i < SLOTS; i += 32)
        if (lane + i < moved) copy_async(space.moves + lane + i, list.moves + begin + lane + i);
    if (lane == 0) page.moved = moved;
}

// Position and importance of a move's slot: a Detail takes the place of the move until it is stored.
struct Detail {
    u16 slot;
    u8 unused, importance_shift;
    u32 position, importance;
};

// Makes a page of its moves, which are there, and asks for the mean of its keys and for details.
__device__ __forceinline__ void prepare(const LayerState& s, const NewTokens& new_tokens, WarpSpace& space,
                                        Page& page, u32 lane) {
    const int moved = page.moved;
    Move move[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) (uint4&)move[i] = space.moves[min(lane + 32 * i, moved - 1)];
    const u32 pair = move[0].from, batch = pair / s.heads;
    const int first = (int)batch * new_tokens.steps;
    page.steps[lane] = page.steps[lane + 32] = (int)move[0].token - first;
    const CacheRung& rung = s.rungs[move[0].to_rung];
    if (lane < HEAD_DIM / 8)
        copy_async((uint4*)space.frame.sums + lane, s.k_mean + (u64)pair * HEAD_DIM + 8 * lane);
    if (lane < HEAD_DIM / 16)
        copy_async((uint4*)space.frame.shifts + lane, s.k_shift + (u64)pair * HEAD_DIM + 16 * lane);
    __syncwarp();  // no step is set but by what follows; moves have been read
    u32 mask[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (lane + 32 * i >= moved) continue;
        const int slot = move[i].to_slot, step = (int)move[i].token - first;
        page.steps[slot % 8 / 2 * ROWS + slot % 2 * 8 + slot / 8] = step;
        mask[0] |= slot < 32 ? 1u << slot : 0u, mask[1] |= slot < 32 ? 0u : 1u << (slot - 32);
        Detail& detail = (Detail&)space.moves[lane + 32 * i];
        detail.slot = (u16)slot;
        detail.position = new_tokens.first + step;
        const u64 at = (u64)new_tokens.importance + (u64)pair * new_tokens.steps + step;
        detail.importance_shift = (u8)(at % 4 * 8);
        copy_word_async(&detail.importance, (const void*)(at & ~3ull));
    }
    mask[0] = __reduce_or_sync(ALL_LANES, mask[0]), mask[1] = __reduce_or_sync(ALL_LANES, mask[1]);
    if (lane == 0) {
        const u32 bits_k = rung.bits_k, bits_v = rung.bits_v;
        u8* const record = s.arena + (u64)move[0].to * UNIT;
        u8* const to_steps = record + 8 * HEAD_DIM * (bits_k + bits_v);
        page.codes[KEYS] = (u32*)record, page.codes[VALUES] = (u32*)(record + 8 * HEAD_DIM * bits_k);
        page.to_steps[KEYS] = to_steps, page.to_steps[VALUES] = to_steps + (bits_k < 16 ? SLOTS : 0);
        page.tail = record + rung.tail;
        page.bits[KEYS] = (u8)bits_k, page.bits[VALUES] = (u8)bits_v;
        const u32 head = pair - batch * s.heads;
        page.from[KEYS] = new_tokens.k + batch * new_tokens.k_batch + head * new_tokens.k_head;
        page.from[VALUES] = new_tokens.v + batch * new_tokens.v_batch + head * new_tokens.v_head;
        page.mask = (u64)mask[1] << 32 | mask[0];
    }
    __syncwarp();
}

// Stores the details of a page, which are there.
__device__ __forceinline__ void store_details(const WarpSpace& space, const Page& page, u32 lane) {
    u8* const tail = page.tail;
#pragma unroll
    for (int i = 0; i < SLOTS; i += 32) {
        if (lane + i >= page.moved) continue;
        const Detail& detail = (const Detail&)space.moves[lane + i];
        ((u16*)tail)[detail.slot] = (u16)detail.position;
        tail[2 * SLOTS + detail.slot] = (u8)(detail.importance >> detail.importance_shift);
    }
}

// Asks for this lane's parts of rows TURN to TURNS - 1, of 16 bytes, given that of step 0; `apart`: bytes
// from one step to the next.
template <int TURN, int TURNS>
__device__ __forceinline__ void ask_for_parts(u32 to, const u8* from, u32 apart, const int* steps) {
    if constexpr (TURN < TURNS) {
        u64 at;  // asked for like this, or the compiler multiplies by the upper half of `apart` as well
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(at) : "r"(steps[TURN]), "r"(apart));
        copy_async<TURN * ROW_BYTES>(to ^ 16 * (TURN % 8), from + at);
        ask_for_parts<TURN + 1, TURNS>(to, from, apart, steps);
    }
}

// Asks for the raw vectors of a block, given its steps.
__device__ __forceinline__ void ask_for_rows(const u16* of_step_0, u32 apart, const int* steps,
                                             WarpSpace& space, u32 lane) {
    constexpr int PARTS = HEAD_DIM / 8, OF_ROW = PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32, TURNS = OF_ROW / 2;
    const int first = lane / OF_ROW * TURNS, part = lane % OF_ROW;
    if (PARTS < OF_ROW && part >= PARTS) return;
    int step[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; i += 4) (int4&)step[i] = *(const int4*)(steps + first + i);
    ask_for_parts<0, TURNS>(shared_address(space.rows) + Rows::at(first, 8 * part),
                            (const u8*)of_step_0 + 16 * part, apart, step);
}

// Stores the codes of a block. If their words have codes of other blocks, too, they are staged by all
// blocks but the last, which stores all.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_or_stage(u32* to, u32* staged, const Vectors& x, u64 mask, int block,
                                               u32 lane) {
    constexpr int OF_BLOCK = TILES * 32;
    u32* const mine = staged + lane;
    TileWords<BITS> word;
    words_of_tiles<SIDE, BITS>(x, word);
    if constexpr (IN_ONE_BLOCK<SIDE, BITS>) {
        KVLAB_IF_WHOLE(mask, (store_block_words<SIDE, BITS, WHOLE>(to, word, mask, block, lane)));
    } else {
        if (block < LAST_BLOCK) {
#pragma unroll
            for (int i = 0; i < (int)(sizeof(word) / sizeof(u32)); ++i)
                mine[block * OF_BLOCK + i * 32] = word[i];
            return;
        }
        const auto word_of = [&](int from, int i) {
            return from == LAST_BLOCK ? word[i] : mine[from * OF_BLOCK + i * 32];
        };
        KVLAB_IF_WHOLE(mask, (store_gathered<SIDE, BITS, WHOLE>(to, 0, 1, word_of, mask, lane)));
    }
}

template <int BITS>
__device__ __forceinline__ void store_block(int side, const Page& page, WarpSpace& space, Vectors& x,
                                            const Loaded& loaded, int block, u32 lane) {
    const u32 byte = encode<BITS, false>(x, loaded, lane);
    const u32 slot = lane / 4 * 8 + 2 * block + lane % 2;  // slot_of, in fewer steps
    const u64 mask = page.mask;
    if (lane % 4 < 2 && ((const u32*)&page.mask)[lane / 16] >> slot % 32 & 1)
        page.to_steps[side][slot] = (u8)(loaded.finite ? byte : NAN_STEP);
    if (side == KEYS)
        store_or_stage<KEYS, BITS>(page.codes[KEYS], space.words, x, mask, block, lane);
    else
        store_or_stage<VALUES, BITS>(page.codes[VALUES], space.words, x, mask, block, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    write_prefill(const LayerState* __restrict__ layers, const MoveList* __restrict__ lists,
                  const __grid_constant__ NewTokens new_tokens) {
    extern __shared__ __align__(128) u8 shared[];  // WarpSpace of each warp
    __shared__ uint4 signs[2][32];                 // by parts of Signs
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
        const Signs of_lane = Signs::of(threadIdx.x);
        for (int i = 0; i < 2; ++i) signs[i][threadIdx.x] = ((const uint4*)&of_lane)[i];
    }
    __syncthreads();
    WarpSpace& space = ((WarpSpace*)shared)[warp];
    const int stride = gridDim.x * (blockDim.x / 32);
    const auto ask = [&](const Page& page, int side, const int* steps, u32 lane) {
        __syncwarp();  // all lanes have read the rows before
        ask_for_rows(page.from[side], 2 * (u32)(side == KEYS ? new_tokens.k_step : new_tokens.v_step), steps,
                     space, lane);
    };
    {
        const u32 lane = lane_again();
        const LayerState& s = layers[blockIdx.y];
        const MoveList& list = lists[blockIdx.y];
        if (blockIdx.x == 0)
            for (int i = threadIdx.x; i < s.batch * s.heads; i += blockDim.x)
                s.seqlen[i] = new_tokens.first + new_tokens.steps;
        const int number = blockIdx.x + gridDim.x * warp;  // CTAs share the last pages
        const int pages = *list.num_groups;
        if (number >= pages) return;
        if (lane == 0) space.number = number, space.pages = pages;
        look_ahead(list, number, space, lane);
        wait_own_copies();
        ask_for_moves(list, space, space.pages_of[0], lane);
        wait_own_copies();
        if (number + stride < pages) look_ahead(list, number + stride, space, lane);
        prepare(s, new_tokens, space, space.pages_of[0], lane);
        ask(space.pages_of[0], KEYS, space.pages_of[0].steps, lane);
    }
    int stage = 0;  // of pages_of
#pragma unroll 1
    while (true) {
        const Page& page = space.pages_of[stage];
        Page& after = space.pages_of[stage ^ 1];
        // Asked for again where it is needed, or it is kept in registers.
        const auto then = [&](int pages) { return space.number + pages * stride; };
        const auto more = [&](int pages) { return then(pages) < space.pages; };
#pragma unroll 1
        for (int side = KEYS; side <= VALUES; ++side) {
            const int bits = page.bits[side];
#pragma unroll 1
            for (int block = 0; block <= LAST_BLOCK; ++block) {
                const u32 lane = lane_again();
                wait_own_copies();
                if (block == 0) {
                    const u32 layer = layer_again();
                    if (side == KEYS) {
                        complete_frame((const __half*)space.frame.sums, space.frame, lane);
                        store_details(space, page, lane);
                        __syncwarp();  // details have been read, the frame is there
                        if (more(1)) ask_for_moves(lists[layer], space, after, lane);
                    } else if (more(1)) {
                        prepare(layers[layer], new_tokens, space, after, lane);
                        if (more(2)) look_ahead(lists[layer], then(2), space, lane);
                    }
                }
                const auto ask_for_next = [&]() {
                    if (block < LAST_BLOCK)
                        ask(page, side, page.steps + ROWS * (block + 1), lane);
                    else if (side == KEYS)
                        ask(page, VALUES, page.steps, lane);
                    else if (more(1))
                        ask(after, KEYS, after.steps, lane);
                };
                if (bits == 16) {
                    if (side == KEYS)
                        store_raw<KEYS, Rows>(page.codes[KEYS], space.rows, page.mask, block, lane);
                    else
                        store_raw<VALUES, Rows>(page.codes[VALUES], space.rows, page.mask, block, lane);
                    ask_for_next();
                    continue;
                }
                Vectors x;
                const Frame* const frame = side == KEYS ? &space.frame : nullptr;
                const Loaded loaded = load_raw<Rows>(space.rows, frame, x, lane);
                ask_for_next();
                Signs mine;
#pragma unroll
                for (int i = 0; i < 2; ++i) ((uint4*)&mine)[i] = signs[i][lane];
                if (side == KEYS)
                    rotate_integers(x, mine, &space.frame, loaded, lane);
                else
                    rotate_integers(x, mine, nullptr, loaded, lane);
                KVLAB_FOR_WIDTH(bits, store_block<BITS>(side, page, space, x, loaded, block, lane));
            }
        }
        if (!more(1)) break;
        __syncwarp();  // all lanes have read the number
        if (threadIdx.x % 32 == 0) space.number = then(1);
        __syncwarp();
        stage ^= 1;
    }
}

// gate: HEAD_DIM=128,64,80,96 BF16=1,0 registers<=128
// gate: HEAD_DIM=256 BF16=1,0 registers<=255
