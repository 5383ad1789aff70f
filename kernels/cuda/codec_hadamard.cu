// Hadamard codec: quantisation of groups along rows, and back, in one pass. Groups have 32 to 1,024 elements,
// a power of two, and rows are whole groups, so the array is one run of groups and one run of codes.
//
// Threads and data: a lane takes VALUES elements that follow each other; a warp 32 VALUES, its tile. Most
// butterflies run in registers; across lanes go those of the last levels of groups of more than VALUES
// elements. A warp takes some tiles, and as soon as one is in registers the copy of the next one begins. The
// elements of a tile pass through shared memory, where those of neighbouring lanes lie an odd number of 16
// bytes apart, and so do codes, in the order of place<4>. All code is written out for VALUES elements: with
// 128 that of quantisation exceeds the instruction cache and takes a third longer than with 64.
//
// Scale: codec_squares.cuh; where its answer is not sure, one group in a few hundred, the warp adds the
// squares of that group as the reference does.
//
// Codes of 3 and 4 bits: signed values in units of the scale are cut into cells, one for each threshold;
// thresholds times scale stand in shared memory, a column a lane, so that one look-up without bank conflicts
// and one comparison give a code. From 5 bits on see `Cells`.
//
// Memory of a block: dynamic shared memory of `Memory` for each of its 2 warps (to quantize from 5 bits on 6
// to 10, which share up to 19 KB of cells), and tables. Registers: VALUES elements a lane.
//
// One barrier of the block: thresholds, cells or levels are there. Else only lanes of a warp wait for each
// other.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODE_BITS; GROUP; VALUES, min(GROUP, 64).
//
// clang-format off
// gate: DTYPE=0 CODE_BITS=4 GROUP=128 VALUES=64 registers<=128
// gate: DTYPE=1 CODE_BITS=4 GROUP=128 VALUES=64 registers<=128 arch=sm_90a
// gate: DTYPE=2 CODE_BITS=4 GROUP=128 VALUES=64 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODE_BITS=1,2,3,5,6,8 GROUP=128 VALUES=64 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODE_BITS=4 GROUP=32 VALUES=32 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODE_BITS=4 GROUP=1024 VALUES=64 registers<=128 arch=sm_90a
// clang-format on
#define CODEC 2
#include "codec_reduce.cuh"
#include "codec_squares.cuh"
#include "codec_tiles.cuh"

#if __CUDA_ARCH__ == 900
constexpr int DEQUANTIZE_BLOCKS = DTYPE == FLOAT32 ? 8 : 10;
#else
constexpr int DEQUANTIZE_BLOCKS = 8;
#endif
// From 5 bits on the warps of a block share the cells; resident blocks are as many as do not spill registers.
constexpr int QUANTIZE_WARPS = CODE_BITS <= 4 ? WARPS : DTYPE == FLOAT32 ? 6 : CODE_BITS == 6 ? 8 : 10;
constexpr int QUANTIZE_BLOCKS = CODE_BITS > 4 ? 2 : DTYPE == FLOAT16 && GROUP <= 128 ? 10 : 8;
constexpr int QUANTIZE_TURNS = CODE_BITS > 4 && DTYPE != FLOAT32 ? 4 : 8;  // tiles of a warp
constexpr int LANES = GROUP / VALUES;                                      // of a group
constexpr int HALF = 1 << (CODE_BITS - 1);
constexpr u32 TOP = (1 << CODE_BITS) - 1;
constexpr bool SIGNED_CELLS = CODE_BITS == 3 || CODE_BITS == 4;
constexpr bool OWN_LEVELS = CODE_BITS <= 4;  // levels times scale, a column a lane
constexpr int TABLE = CODE_BITS <= 4 ? 1 << CODE_BITS : 1;
constexpr float ROTATION = root_of_power(log2_of(GROUP));

// ---- The transform

// Butterflies of distances from H up to below END.
template <int H, int END>
__device__ __forceinline__ void butterflies(float (&v)[VALUES]) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        if (i & H) continue;
        const float a = v[i], b = v[i + H];
        v[i] = __fadd_rn(a, b), v[i + H] = __fsub_rn(a, b);
    }
    if constexpr (2 * H < END) butterflies<2 * H, END>(v);
}

template <int MASKS>
__device__ __forceinline__ void butterflies_of_lanes(float (&v)[VALUES], int lane) {
#pragma unroll
    for (int mask = 1; mask < MASKS; mask *= 2) {
        const float sign = lane & mask ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(ALL_LANES, v[i], mask));
    }
}

// The Hadamard transform of every group, to be multiplied by ROTATION.
__device__ __forceinline__ void rotate(float (&v)[VALUES], int lane) {
    butterflies<1, VALUES>(v);
    butterflies_of_lanes<LANES>(v, lane);
}

// The same times ROTATION, of groups of more than one lane in another order (see put_words): of the last
// butterflies both results stay with one lane, so only half of the values cross lanes. For that the upper of
// two lanes has its halves changed, which costs nothing: with the sign of the butterflies before. The signs
// of its differences are turned with the last product, where -0 becomes 0.
__device__ __forceinline__ void rotate_in_order(float (&v)[VALUES], int lane) {
    constexpr int H = VALUES / 2;
    const bool upper = lane & LANES / 2;
    const float sign = upper ? -1.f : 1.f, factor = upper ? -ROTATION : ROTATION;
    if constexpr (LANES == 1) {
        rotate(v, lane);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = __fmaf_rn(v[i], ROTATION, 0.f);
        return;
    }
    butterflies<1, H>(v);
#pragma unroll
    for (int i = 0; i < H; ++i) {
        const float a = v[i], b = v[i + H];
        v[i] = __fmaf_rn(b, sign, a), v[i + H] = __fmaf_rn(b, -sign, a);
    }
    butterflies_of_lanes<LANES / 2>(v, lane);
#pragma unroll
    for (int i = 0; i < H; ++i) {
        const float own = v[i], other = __shfl_xor_sync(ALL_LANES, v[i + H], LANES / 2);
        v[i] = __fmaf_rn(__fadd_rn(own, other), ROTATION, 0.f);
        v[i + H] = __fmaf_rn(__fsub_rn(own, other), factor, 0.f);
    }
}

// ---- Scales

// Element 32 j + lane of the group whose first element stands in row `row` of the elements.
__device__ __forceinline__ float element_of(const u8* elements, int row, int j, int lane) {
    const int at = 32 * j + lane;
    return element(elements + (row + at / VALUES) * PITCH, at % VALUES);
}

// The sum of squares of elements j of a lane times `down`, as the reference adds: the second half to the
// first until one is left. Of j those count that are FIRST modulo EACH.
template <int FIRST, int EACH>
__device__ __forceinline__ float squares(const u8* elements, int row, int lane, float down) {
    if constexpr (EACH == GROUP / 32) {
        const float x = __fmul_rn(element_of(elements, row, FIRST, lane), down);
        return __fmul_rn(x, x);
    } else {
        return __fadd_rn(squares<FIRST, 2 * EACH>(elements, row, lane, down),
                         squares<FIRST + EACH, 2 * EACH>(elements, row, lane, down));
    }
}

// The scale of such a group in the order of the reference, by all lanes.
__device__ __forceinline__ Scale exact_scale(const u8* elements, int row, int lane) {
    float high = 0.f, up, down;
#pragma unroll 1
    for (int j = 0; j < GROUP / 32; ++j) high = higher(high, fabsf(element_of(elements, row, j, lane)));
#pragma unroll
    for (int mask = 16; mask; mask /= 2) high = higher(high, __shfl_xor_sync(ALL_LANES, high, mask));
    powers_near(high, up, down);
    float sum = squares<0, 1>(elements, row, lane, down);
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, mask));
    const float mean = __fmul_rn(sum, 1.f / GROUP);  // GROUP is a power of two
    return find_scale(__fmul_rn(__fsqrt_rn(mean), up), high, 0.f, 0.f);
}

// The scale of the group of this lane, whose elements are v and stand in `elements`.
__device__ __forceinline__ Scale measure(const float (&v)[VALUES], const u8* elements, bool inside,
                                         int lane) {
    float part[8];
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        part[i % 8] = i < 8 ? __fmul_rn(v[i], v[i]) : __fmaf_rn(v[i], v[i], part[i % 8]);
#pragma unroll
    for (int k = 4; k; k /= 2) {
#pragma unroll
        for (int i = 0; i < k; ++i) part[i] = __fadd_rn(part[i], part[i + k]);
    }
    Scale found;
    const bool sure =
        scale_of_squares<VALUES / 8 + 3 + log2_of(LANES)>(of_lanes<LANES>(part[0], sum), 1.f / GROUP, found);
    u32 unsure = __ballot_sync(ALL_LANES, !sure && inside && lane % LANES == 0);
#pragma unroll 1
    for (; unsure; unsure &= unsure - 1) {
        const int row = __ffs(unsure) - 1;
        const Scale exact = exact_scale(elements, row, lane);
        if (lane / LANES == row / LANES) found = exact;
    }
    return found;
}

// ---- Codes

// What codes of a group are made with. Values are multiplied by `factor` before, where that is not 1.
struct Coder {
    float s, factor, to_cells, threshold;
    u32 mask;  // 0 for a group that cannot be represented, of which codes are 0
};

__device__ __forceinline__ Coder coder_of(const Scale& found) {
    float units = 0.f;  // cells of one unit of the scale, as a part of all
    if constexpr (SIGNED_CELLS) units = 1.f / (TOP * CELL_WIDTH<CODE_BITS>);
    if constexpr (CODE_BITS > 4) units = 1.f / Cells<CODE_BITS>::END;
    Coder r;
    r.factor = DTYPE != FLOAT16 && found.s < 1e-20f ? (float)(1ll << 60) : 1.f;
    r.s = __fmul_rn(found.s, r.factor);
    // The inverse of scales beyond 2^126 would be flushed to 0.
    const bool large = r.s > 1e20f;
    const float inverse = rough_inverse(large ? r.s * (1.f / (1 << 20)) : r.s);
    r.to_cells = r.s > 0.f ? inverse * (large ? units / (1 << 20) : units) : 3e38f;
    r.mask = found.known ? 0xffffffffu : 0;
    return r;
}

// t times the scale, as a value times the factor is compared with it.
__device__ __forceinline__ float scaled(float t, float s, float factor) {
    return DTYPE == FLOAT16 ? __fmul_rn(t, s) : __fmul_rn(__fmul_rn(t, s), factor);
}

// The thresholds of a lane, ascending, from those in units of the scale. A value is counted above one below 0
// already if it is equal to it, and above 0 if it is 0: so these are the numbers next below.
__device__ __forceinline__ void put_thresholds(const float* units, float s, float factor, float* table) {
    table[(HALF - 1) * THREADS] = __uint_as_float(0x80000001u);
#pragma unroll
    for (int i = 0; i < HALF - 1; ++i) {
        const float t = scaled(units[i], s, factor);
        table[(HALF + i) * THREADS] = t;
        table[(HALF - 2 - i) * THREADS] = __uint_as_float((__float_as_uint(t) | 0x80000000u) + 1);
    }
}

// The code of y above BASE, as the width of codes has it. `zero`: where the threshold or cell 0 of this lane
// would stand if they were counted from -MAGIC_BITS.
constexpr u32 BASE = SIGNED_CELLS ? MAGIC_BITS : 0;

__device__ __forceinline__ u32 code_of(float y, const Coder& coder, u32 zero) {
    if constexpr (CODE_BITS == 1) {
        return 1 - (__float_as_uint(y) >> 31);
    } else if constexpr (CODE_BITS == 2) {
        const u32 above = __float_as_uint(__fsub_rn(coder.threshold, fabsf(y))) >> 31;
        return (2 + above) ^ ((u32)((i32)__float_as_uint(y) >> 31) & TOP);
    } else if constexpr (SIGNED_CELLS) {
        const float part = __saturatef(__fmaf_rn(y, coder.to_cells, .5f));
        const u32 cell = __float_as_uint(__fmaf_rd(part, TOP * (1.f - 1e-6f), MAGIC));
        // Negative where y is above the threshold.
        const float above = __fsub_rn(shared_float(zero + cell * (4 * THREADS)), y);
        return cell + (__float_as_uint(above) >> 31);
    } else {
        const u32 code = code_of_magnitude<CODE_BITS>(y, coder.s, coder.to_cells, zero);
        return code ^ ((u32)((i32)__float_as_uint(y) >> 31) & TOP);
    }
}

// Adds code K of a lane to its words, and all after it.
template <int K>
__device__ __forceinline__ void put_codes(const float (&v)[VALUES], const Coder& coder, u32 zero,
                                          u32 (&words)[WORDS]) {
    if constexpr (K < VALUES) {
        constexpr int WORD = K * CODE_BITS / 32, BIT = K * CODE_BITS % 32;
        u32 code = code_of(v[K], coder, zero);
        if constexpr (BIT + CODE_BITS > 32) {
            code &= TOP;
            words[WORD + 1] += code >> (32 - BIT);
            words[WORD] += code << BIT;
        } else {
            words[WORD] += (code << BIT) - (BASE << BIT);
        }
        put_codes<K + 1>(v, coder, zero, words);
    }
}

// The codes of a lane, to the stream of the tile: of groups of more than one lane as two halves, that of a
// row of the lower and that of the same place in the row of the upper lane (rotate_in_order).
__device__ __forceinline__ void put_words(const u32 (&words)[WORDS], u32 mask, u8* stream, int lane) {
    constexpr int HALVES = LANES > 1 ? 2 : 1, COUNT = WORDS / HALVES;
    constexpr int SIZE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;  // of an access
    const int start = HALVES > 1 && lane & LANES / 2 ? COUNT : 0;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int row = half ? lane | LANES / 2 : lane & ~(LANES / 2);
        const int first = row * WORDS + start;
#pragma unroll
        for (int i = 0; i < COUNT; i += SIZE) {
            u32 part[SIZE];
#pragma unroll
            for (int k = 0; k < SIZE; ++k) part[k] = words[half * COUNT + i + k] & mask;
            copy_words<SIZE>(part, (u32*)(stream + place<4>(4 * (first + i))));
        }
    }
}

// Groups of scales so small that products with them underflow, or so large that sums overflow: values are
// multiplied, and NaN, which has the code of 0, becomes 0.
__device__ __forceinline__ void tame(float (&v)[VALUES], float factor) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const float y = __fmul_rn(v[i], factor);
        v[i] = y == y ? y : 0.f;
    }
}

// x: `count` elements, a multiple of GROUP, 16-byte aligned; packed: 16-byte aligned; bad: null, or set to 1
// if a group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * QUANTIZE_WARPS, QUANTIZE_BLOCKS)
    quantize_hadamard(const void* __restrict__ x, i64 count, u8* __restrict__ packed, u16* __restrict__ scale,
                      i32* bad, const __grid_constant__ Codebook book) {
    extern __shared__ __align__(128) u8 dynamic[];
    __shared__ float thresholds[SIGNED_CELLS ? TABLE * THREADS : 1];
    __shared__ __align__(16) float units[SIGNED_CELLS ? HALF : 1];
    __shared__ __align__(128) Cell cells[CODE_BITS > 4 ? Cells<CODE_BITS>::COUNT * COPIES : 1];
    if constexpr (SIGNED_CELLS) {
        if (threadIdx.x < HALF - 1) units[threadIdx.x] = threshold(book, threadIdx.x);
        __syncthreads();  // the thresholds are there
    }
    if constexpr (CODE_BITS > 4) {
        fill_cells<CODE_BITS>(book, cells);
        __syncthreads();  // the cells are there
    }
    const int lane = threadIdx.x % 32;
    Memory& own = ((Memory*)dynamic)[threadIdx.x / 32];
    float* table = thresholds + threadIdx.x;
    const u32 zero = CODE_BITS > 4 ? shared_address(cells + lane % COPIES) - MAGIC_BITS * CELL_BYTES
                                   : shared_address(table) - BASE * (4 * THREADS);
    Tiles tile(count, QUANTIZE_TURNS, QUANTIZE_WARPS);
    if (tile.here()) fetch_elements(x, tile, own.elements, lane);
    for (; tile.here(); tile = tile.next()) {
        const bool inside = lane * VALUES < tile.here();
        const i64 group = (tile.first() + lane * VALUES) / GROUP;
        float v[VALUES];
        wait_for_copies();
        __syncwarp();  // the copies of all lanes are there, the codes of the tile before are read
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            elements(*(const uint4*)(own.elements + lane * PITCH + 16 * j), v + PER_LOAD * j);
        const Scale found = measure(v, own.elements, inside, lane);
        __syncwarp();  // all elements are read
        if (tile.next().here()) fetch_elements(x, tile.next(), own.elements, lane);
        if (inside && lane % LANES == 0) {
            scale[group] = (u16)found.scale_word;
            if (!found.known && bad) *bad = 1;
        }
        Coder coder = coder_of(found);
        if constexpr (CODE_BITS == 2) coder.threshold = scaled(threshold(book, 0), found.s, coder.factor);
        if constexpr (SIGNED_CELLS) put_thresholds(units, found.s, coder.factor, table);
        rotate_in_order(v, lane);
        if constexpr (!SIGNED_CELLS && DTYPE != FLOAT16) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = __fadd_rn(v[i], 0.f);  // -0 of a product that underflows
        }
        if constexpr (DTYPE != FLOAT16) {
            const bool usual = coder.factor == 1.f && found.s < 1e20f;
            if (!__all_sync(ALL_LANES, usual)) tame(v, coder.factor);
        }
        u32 words[WORDS] = {};
        put_codes<0>(v, coder, zero, words);
        put_words(words, coder.mask, own.stream, lane);
        give_stream(own.stream, packed, tile, lane);
    }
}

// Code i of the words of a lane, times 2^SHIFT.
template <int SHIFT>
__device__ __forceinline__ u32 code_at(const u32 (&words)[WORDS], int i) {
    const int at = i * CODE_BITS / 32, bit = i * CODE_BITS % 32;
    u32 x = bit < SHIFT ? words[at] << (SHIFT - bit) : words[at] >> (bit - SHIFT);
    if (bit + CODE_BITS > 32)
        x = __funnelshift_r(words[at], words[at + 1 < WORDS ? at + 1 : at], bit) << SHIFT;
    return x & TOP << SHIFT;
}

// Levels times smaller scales may be -0, whose sign rotate_in_order loses.
constexpr float LEAST_LEVELS = 1e-36f;

// Reverse of quantize_hadamard.
extern "C" __global__ void __launch_bounds__(THREADS, DEQUANTIZE_BLOCKS)
    dequantize_hadamard(const u8* __restrict__ packed, i64 count, const u16* __restrict__ scale,
                        void* __restrict__ out, const __grid_constant__ Codebook book) {
    extern __shared__ __align__(128) u8 dynamic[];
    __shared__ float levels[OWN_LEVELS ? TABLE * THREADS : 2 * HALF];
    if constexpr (!OWN_LEVELS) {
        for (int i = threadIdx.x; i < 2 * HALF; i += THREADS) levels[i] = level(book, i, HALF);
        __syncthreads();  // the levels are there
    }
    const int lane = threadIdx.x % 32;
    Memory& own = ((Memory*)dynamic)[threadIdx.x / 32];
    Tiles tile(count, 4, WARPS);
    static_assert(4 * THREADS == 1 << 8, "code_at<8> is a row of levels");
    const u32 column = 4 * threadIdx.x;  // of levels, in bytes
    u32 word = 0;                        // the scale of the group of this lane
    if (tile.here()) fetch_stream(packed, tile, own.stream, lane);
    if (lane * VALUES < tile.here()) word = scale[(tile.first() + lane * VALUES) / GROUP];
    for (; tile.here(); tile = tile.next()) {
        const Tiles next = tile.next();
        const float s = read_scale(word, 0, 0.f).s;
        if constexpr (OWN_LEVELS) {
#pragma unroll
            for (int i = 0; i < 2 * HALF; ++i)
                levels[i * THREADS + threadIdx.x] = __fmul_rn(level(book, i, HALF), s);
        }
        u32 words[WORDS];
        wait_for_copies();
        __syncwarp();  // the copies of all lanes are there, the elements of the tile before are read
#pragma unroll
        for (int i = 0; i < WORDS; i += STEP) {
            u32 part[STEP];
            copy_words<STEP>((const u32*)(own.stream + place<4>(4 * (lane * WORDS + i))), part);
#pragma unroll
            for (int k = 0; k < STEP; ++k) words[i + k] = part[k];
        }
        __syncwarp();  // all codes are read
        if (next.here()) fetch_stream(packed, next, own.stream, lane);
        if (lane * VALUES < next.here()) word = scale[(next.first() + lane * VALUES) / GROUP];
        float v[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            v[i] = OWN_LEVELS ? *(const float*)((const u8*)levels + (code_at<8>(words, i) | column))
                              : __fmul_rn(levels[code_at<0>(words, i)], s);
        }
        // Where the two halves of the elements of this lane stand.
        u8* halves[2] = {own.elements + lane * PITCH, own.elements + lane * PITCH + 8 * PIECES};
        if (LANES == 1 || __any_sync(ALL_LANES, s < LEAST_LEVELS)) {
            rotate(v, lane);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = __fmul_rn(v[i], ROTATION);
        } else {
            rotate_in_order(v, lane);
            u8* place = own.elements + (lane & ~(LANES / 2)) * PITCH + (lane & LANES / 2 ? 8 * PIECES : 0);
            halves[0] = place, halves[1] = place + LANES / 2 * PITCH;
        }
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            *(uint4*)(halves[2 * j / PIECES] + 16 * (j % (PIECES / 2))) = raw_elements(v + PER_LOAD * j);
        give_elements(own.elements, out, tile, lane);
    }
}
