// Carries out what a plan says: new tokens are encoded into pages, stored ones re-encoded at fewer bits or
// moved bit for bit, whole pages copied.
//
// Threads and data
//   write_tokens  grid (any, layers, 2): a CTA takes the keys, or the values, of destination pages
//                 blockIdx.x, + gridDim.x, ...: a warp 16 slots (pages/vectors.cuh). Sources are copied
//                 into rows of shared memory.
//   copy_pages    grid (any, layers): a CTA takes copies blockIdx.x, + gridDim.x, ..., 16 bytes a thread.
//   merge_rows    a warp one query row: attention over stored and over new tokens, when these are many.
// Memory: shared 64 rows of 2 HEAD_DIM + 16 bytes twice (35 KB at head_dim 128), for this page and the next,
// and 7 KB of Pipeline; 128 registers for four blocks a multiprocessor, up to 255 for two from compute
// capability 10.0 on, where 128 are too few.
//
// Macros: HEAD_DIM; BF16.
#include "pages/sources.cuh"

constexpr int THREADS = 256;                                             // of the other kernels
constexpr int BLOCKS = HEAD_DIM > 128 || __CUDA_ARCH__ >= 1000 ? 2 : 4;  // of a multiprocessor

// LANES lanes have a stored vector that becomes raw again: of every LANES RUN elements each has RUN in a row.
constexpr int LANES = 4, RUN = 2, PER_LANE = HEAD_DIM / LANES;
static_assert(HEAD_DIM % (LANES * RUN) == 0, "lanes without gaps");

__device__ __forceinline__ int element_of(int lane, int j) {
    return j / RUN * (RUN * LANES) + lane * RUN + j % RUN;
}

__host__ __device__ constexpr float rotation_factor(int block) {
    return block >= 4 ? .5f * rotation_factor(block / 4) : block == 2 ? .70710678118654752f : 1.f;
}

__device__ __forceinline__ float grid_value(u32 code, float step, int bits) {
    return __fmul_rn(fmaf(2.f, (float)code, 1.f - (1 << bits)), step);
}

// The block Hadamard transform without its factor.
__device__ __forceinline__ void add_and_subtract(float (&x)[PER_LANE], int lane) {
#pragma unroll
    for (int h = 1; h < ROTATION_BLOCK; h *= 2) {
        const bool across = h >= RUN && h < RUN * LANES;  // partners are in two lanes
        const float sign = lane & h / RUN ? -1.f : 1.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int to = h < RUN ? h : h / LANES;
            if (across) x[j] = fmaf(x[j], sign, __shfl_xor_sync(ALL_LANES, x[j], h / RUN));
            if (across || j & to) continue;
            const float a = x[j], b = x[j + to];
            x[j] = __fadd_rn(a, b);
            x[j + to] = __fsub_rn(a, b);
        }
    }
}

// The orthonormal block Hadamard transform of float32, its own inverse up to rounding.
__device__ __forceinline__ void rotate(float (&x)[PER_LANE], int lane) {
    add_and_subtract(x, lane);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = __fmul_rn(x[j], rotation_factor(ROTATION_BLOCK));
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

// Puts vectors that have not been asked for into their rows, LANES lanes a vector: codes, a byte each, or
// raw. What goes to raw elements from fewer bits is rotated back.
__device__ __forceinline__ void fill_rows(Side side, const LayerState& s, const NewTokens& new_tokens,
                                          const Pipeline& pipeline, PageState& page, u8* rows) {
    const u32 thread = thread_again(), lane = thread % LANES;
#pragma unroll 1
    for (u32 at = thread / LANES; at < SLOTS; at += SIDE_THREADS / LANES) {
        const Move move = (const Move&)page.moves[at];
        const bool stored = move.from_rung != NO_MOVE && !is_new(move);
        u8* const row = row_for(rows, move);
        Region from = {nullptr, nullptr, 16};
        u32 step = 0;
        if (stored) {
            from = region_of(side, s.arena + (u64)move.from * UNIT, s.rungs[move.from_rung]);
            take_stored(side, from, move.from_slot, row, lane);
            if (from.bits < 16) step = from.steps[move.from_slot];
            if (lane == 0) page.steps[move.to_slot] = (u8)step;
        } else if (move.from_rung != NO_MOVE && !pipeline.in_units) {
            const u16* vector = new_vector(side, new_tokens, place_of(new_tokens, move, pipeline));
#pragma unroll 4
            for (int i = lane; i < HEAD_DIM; i += LANES) ((u16*)row)[i] = vector[i];
        }
        const bool turns_raw = from.bits < 16 && page.to.bits == 16;
        if (!__any_sync(ALL_LANES, turns_raw)) continue;
        __syncwarp();  // rows are whole
        float x[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            x[j] = turns_raw ? grid_value(row[element_of(lane, j)], step_value(step), from.bits) : 0.f;
        rotate(x, lane);
        __syncwarp();  // all lanes have read their rows before raw elements take their place
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 2) {
            const int pair = element_of(lane, j) / 2;
            const float2 mean =
                side == KEYS ? __half22float2(((const __half2*)page.halves)[pair]) : float2{0.f, 0.f};
            const u8* const shifts = page.frame.shifts + 2 * pair;
            const auto raw = [&](float y, float m, int i) {
                return side == KEYS ? __fadd_rn(y * power_of_two(shifts[i]), m) : y;
            };
            if (turns_raw) ((u32*)row)[pair] = pack_pair(raw(x[j], mean.x, 0), raw(x[j + 1], mean.y, 1));
        }
    }
}

// What a row of the 16 of a warp holds.
struct Row {
    int slot, bits;  // bits: 16 where there is no vector
    u32 step;
};

__device__ __forceinline__ Row row_at(const PageState& page, int slot) {
    if (!(page.mask_of_slots() >> slot & 1)) return {slot, 16, 0};
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

// Stores the codes of 16 slots and their steps, or puts down codes that share words with those of other
// warps.
template <int BITS>
__device__ __forceinline__ void encode_rows(Side side, Vectors& x, const Loaded& loaded, u8* rows,
                                            const Row (&row)[2], PageState& page, u64 mask, int block,
                                            int lane) {
    const u32 byte = encode<BITS, true>(x, loaded, lane);
    if (page.others) keep_codes<BITS>(rows, row, x, lane);
    const Row mine = lane % 2 ? row[1] : row[0];
    if (lane % 4 < 2 && mask >> mine.slot & 1)
        page.to.steps[mine.slot] = (u8)(mine.bits == BITS ? mine.step : loaded.finite ? byte : NAN_STEP);
    if (side == KEYS)
        store_or_stage<KEYS, BITS>((u32*)page.to.codes, rows, x, mask, block, lane);
    else
        store_or_stage<VALUES, BITS>((u32*)page.to.codes, rows, x, mask, block, lane);
}

// Stores what encode_rows has staged for other warps.
template <int BITS>
__device__ __forceinline__ void store_side(Side side, const PageState& page, const u8* rows, u64 mask) {
    if (!IN_ONE_BLOCK<KEYS, BITS> && side == KEYS) store_codes<KEYS, BITS>((u32*)page.to.codes, rows, mask);
    if (!IN_ONE_BLOCK<VALUES, BITS> && side == VALUES)
        store_codes<VALUES, BITS>((u32*)page.to.codes, rows, mask);
}

// Position and importance of a move's token.
struct Tail {
    int slot;  // or -1
    u16 position;
    u8 importance;
};

__device__ __forceinline__ Tail tail_of(const LayerState& s, const NewTokens& new_tokens,
                                        const Pipeline& pipeline, const PageState& page) {
    if (threadIdx.x >= SLOTS) return {-1, 0, 0};
    const Move move = (const Move&)page.moves[threadIdx.x];
    if (move.from_rung == NO_MOVE) return {-1, 0, 0};
    if (is_new(move)) {
        const u32 step = place_of(new_tokens, move, pipeline).step;
        const u64 at = (u64)new_tokens.importance + (u64)move.from * new_tokens.steps + step;
        const u16 position =
            (u16)(new_tokens.positions ? new_tokens.positions[move.token] : new_tokens.first + (int)step);
        return {move.to_slot, position, (u8)(page.importance_words[threadIdx.x] >> at % 4 * 8)};
    }
    const u8* from = s.arena + (u64)move.from * UNIT + s.rungs[move.from_rung].tail;
    return {move.to_slot, ((const u16*)from)[move.from_slot], from[128 + move.from_slot]};
}

extern "C" __global__ void __launch_bounds__(SIDE_THREADS, BLOCKS)
    write_tokens(const LayerState* layers, const MoveList* lists,
                 const __grid_constant__ NewTokens new_tokens) {
    extern __shared__ __align__(16) u8 both_rows[];  // [2][SLOTS][Rows::BYTES]
    __shared__ Pipeline pipeline;
    const LayerState& s = layers[blockIdx.y];
    const MoveList& list = lists[blockIdx.y];
    const Side side = (Side)blockIdx.z;
    const int pages = *list.num_groups;
    if (threadIdx.x == 0) {
        pipeline.heads = s.heads;
        pipeline.per_head = ~0u / s.heads;
        pipeline.in_units = are_in_units(s, new_tokens);
    }
    const auto forget_page = [&](PageState& page) {
        if (threadIdx.x == 0) page.mask[0] = page.mask[1] = page.others = 0;
    };
    const int block = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    if (block == 0) pipeline.signs[lane] = Signs::of(lane);
    if (blockIdx.x < pages) {
        ask_for_moves(list, blockIdx.x, pipeline.pages[0].moves);
        forget_page(pipeline.pages[0]), forget_page(pipeline.pages[1]);
        wait_copies();
        __syncthreads();  // the first moves are there
        ask_for_page(side, s, new_tokens, both_rows, pipeline, pipeline.pages[0]);
        if (blockIdx.x + gridDim.x < pages)
            ask_for_moves(list, blockIdx.x + gridDim.x, pipeline.pages[1].moves);
    }
    u32 now = 0, half = 0;
#pragma unroll 1
    for (int number = blockIdx.x; number < pages; number += gridDim.x) {
        PageState &page = pipeline.pages[now], &next = pipeline.pages[now == 2 ? 0 : now + 1],
                  &then = pipeline.pages[now == 0 ? 2 : now - 1];
        u8* const rows = both_rows + half * SLOTS * Rows::BYTES;
        wait_copies();
        if (side == KEYS && threadIdx.x >= SIDE_THREADS - 32) {
            __syncwarp();  // the warp's own copies of the frame are there
            complete_frame((const __half*)page.halves, page.frame, threadIdx.x % 32);
        }
        __syncthreads();  // rows, means and moves are there; the page before is stored
        if (number + gridDim.x < pages)
            ask_for_page(side, s, new_tokens, both_rows + (half ^ 1) * SLOTS * Rows::BYTES, pipeline, next);
        if (number + 2 * gridDim.x < pages) ask_for_moves(list, number + 2 * gridDim.x, then.moves);
        forget_page(then);
        const Tail tail = side == KEYS ? tail_of(s, new_tokens, pipeline, page) : Tail{-1, 0, 0};
        if (page.others) {
            fill_rows(side, s, new_tokens, pipeline, page, rows);
            __syncthreads();  // all rows are whole, and all sources of this page have been read
        }
        const u64 mask = page.mask_of_slots();
        u8* const my_rows = rows + block * 16 * Rows::BYTES;
        if (page.to.bits == 16) {
            if (side == KEYS)
                store_raw<KEYS, Rows>((u32*)page.to.codes, my_rows, mask, block, lane);
            else
                store_raw<VALUES, Rows>((u32*)page.to.codes, my_rows, mask, block, lane);
        } else {
            const int slot = lane / 4 * 8 + 2 * block;
            Row row[2] = {{slot, 16, 0}, {slot + 1, 16, 0}};
            Vectors x;
            const Frame* const frame = side == KEYS ? &page.frame : nullptr;
            Loaded loaded = load_raw<Rows>(my_rows, frame, x, lane);
            rotate_integers(x, pipeline.signs[lane], frame, loaded, lane);
            if (page.others) {
#pragma unroll
                for (int i = 0; i < 2; ++i) row[i] = row_at(page, slot + i);
                take_numbers(my_rows, row, x, loaded, lane);
            }
            KVLAB_FOR_WIDTH(page.to.bits,
                            encode_rows<BITS>(side, x, loaded, my_rows, row, page, mask, block, lane));
        }
        if (tail.slot >= 0) {
            ((u16*)page.tail)[tail.slot] = tail.position;
            page.tail[2 * SLOTS + tail.slot] = tail.importance;
        }
        if (!is_in_one_block(side, page.to.bits)) {
            __syncthreads();  // all codes have been staged
            KVLAB_FOR_WIDTH(page.to.bits, store_side<BITS>(side, page, rows, mask));
        }
        now = now == 2 ? 0 : now + 1, half ^= 1;
    }
    if (new_tokens.steps && blockIdx.x == 0 && side == KEYS)
        for (int i = threadIdx.x; i < s.batch * s.heads; i += SIDE_THREADS)
            s.seqlen[i] = new_tokens.first + new_tokens.steps;
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
