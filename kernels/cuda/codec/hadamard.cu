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
// Scale: codec/squares.cuh; where its answer is not sure, one group in a few hundred, the warp adds the
// squares of that group as the reference does.
//
// Codes: a fused operation that is rounded down gives the cell of a value (codec/codebook.cuh), and its low
// bits the address of the code in a table of bytes in shared memory. A byte of codes is the sum of codes from
// one table for each place in it.
//
// Memory of a block: dynamic shared memory of `Memory` for each of its 2 warps (to quantize from 5 bits on
// 8), and the tables. Registers: VALUES elements a lane.
//
// Barriers of the block: borders, cells or levels are there. Else only lanes of a warp wait for each other.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODE_BITS; GROUP; VALUES, min(GROUP, 64), to dequantize to
// float32 min(GROUP, 32).
#define CODEC 2
#include "codec/codebook.cuh"
#include "codec/reduce.cuh"
#include "codec/squares.cuh"
#include "codec/tiles.cuh"

// Blocks of a multiprocessor, as many as do not spill registers. From 5 bits on more warps share the cells.
#if __CUDA_ARCH__ == 900
constexpr int FEW_BITS_BLOCKS = DTYPE != FLOAT32 && GROUP <= 128 ? 10 : 8;
constexpr int DEQUANTIZE_BLOCKS = VALUES == 32 ? 12 : DTYPE == FLOAT32 ? 8 : 10;
#else
constexpr int FEW_BITS_BLOCKS = 8, DEQUANTIZE_BLOCKS = 8;
#endif
constexpr int QUANTIZE_WARPS = CODE_BITS <= 4 ? WARPS : 8;
constexpr int QUANTIZE_BLOCKS = CODE_BITS <= 4 ? FEW_BITS_BLOCKS : 2;
constexpr int LANES = GROUP / VALUES;  // of a group
constexpr int HALF = 1 << (CODE_BITS - 1);
constexpr u32 TOP = (1 << CODE_BITS) - 1;
constexpr bool OWN_LEVELS = CODE_BITS <= 4;  // levels times scale, a column a lane
constexpr int TABLE = OWN_LEVELS ? (1 << CODE_BITS) * THREADS : 1 << CODE_BITS;
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

// The same, of groups of more than one lane in another order (see put_words): of the last butterflies both
// results stay with one lane, so only half of the values cross lanes. For that the upper of two lanes has its
// halves changed, which costs nothing: with the sign of the butterflies before. The upper half of its values,
// differences, then has the wrong sign.
__device__ __forceinline__ void rotate_in_order(float (&v)[VALUES], int lane) {
    constexpr int H = VALUES / 2;
    if constexpr (LANES == 1) {
        rotate(v, lane);
        return;
    }
    const float sign = lane & LANES / 2 ? -1.f : 1.f;
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
        v[i] = __fadd_rn(own, other), v[i + H] = __fsub_rn(own, other);
    }
}

// x, with which the upper half of the values of a lane is multiplied, with the sign that makes up for that.
__device__ __forceinline__ float for_upper_half(float x, int lane) {
    return LANES > 1 && lane & LANES / 2 ? -x : x;
}

// ---- Scales

// The group of the elements of a lane.
__device__ __forceinline__ i64 group_of(const Tiles& tile, int lane) {
    return tile.start / GROUP + (tile.at + lane * VALUES) / GROUP;
}

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

constexpr float UNITS = units_of(CODE_BITS) * ROTATION;                           // of sums of butterflies
constexpr int PER_BYTE = CODE_BITS > 4 ? 1 : CODE_BITS == 3 ? 2 : 8 / CODE_BITS;  // whole codes of a byte

// Cells from -REACH to below REACH have an entry. No value of a group is above its root mean square times the
// root of GROUP, and the scale is that but for 2^-9 of it. From 5 bits on such a table would be too long, so
// cells are saturated behind the last border.
constexpr bool SATURATES = CODE_BITS > 4;
constexpr int REACH = SATURATES ? (CODE_BITS == 5   ? 320
                                   : CODE_BITS == 6 ? 784
                                                    : 4424)
                                : ((int)(units_of(CODE_BITS) / ROTATION * 1.01f) + 4) / 4 * 4;

__device__ __forceinline__ u32 shared_byte(u32 address) {
    u32 r;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

// Fills the tables of codes by cells, one for each place of a byte, [PER_BYTE][2 REACH], with all threads of
// the block: each takes some words in a row.
__device__ __forceinline__ void fill_cells(const i32* borders, u32* words) {
    constexpr int COUNT = REACH / 2, THREADS = 32 * QUANTIZE_WARPS, EACH = (COUNT + THREADS - 1) / THREADS;
    const int first = threadIdx.x * EACH;
    u32 code = code_of_cell(borders, 4 * first - REACH, TOP);
    i32 next = borders[code];
#pragma unroll 1
    for (int i = first; i < min(first + EACH, COUNT); ++i) {
        u32 word = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (next <= 4 * i + k - REACH) next = borders[++code];  // no cell has two
            word |= code << (8 * k);
        }
#pragma unroll
        for (int place = 0; place < PER_BYTE; ++place) words[place * COUNT + i] = word << (place * CODE_BITS);
    }
}

// What a value is multiplied by to be in units, in the lower and in the upper half of a lane.
struct Units {
    float lower, upper;
};

// Adds codes K and after of a lane to its words; `cells`: where the entry of cell 0 would stand if the bits
// of a cell were not above MAGIC_BITS.
template <int K>
__device__ __forceinline__ void put_codes(const float (&v)[VALUES], const Units& units, u32 cells,
                                          u32 (&words)[WORDS]) {
    if constexpr (K < VALUES) {
        constexpr int WORD = K * CODE_BITS / 32, BIT = K * CODE_BITS % 32;
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < PER_BYTE; ++i) {
            const float to_units = K + i < VALUES / 2 ? units.lower : units.upper;
            u32 cell = __float_as_uint(__fmaf_rd(v[K + i], to_units, MAGIC));
            if (SATURATES) {
                constexpr i32 OWN = REACH - (i32)MAGIC_BITS;
                cell = __viaddmin_s32_relu((i32)cell, OWN, 2 * REACH - 1) - OWN;
            }
            codes += shared_byte(cells + cell + i * (2 * REACH));
        }
        words[WORD] += codes << BIT;
        if constexpr (BIT + PER_BYTE * CODE_BITS > 32) words[WORD + 1] += codes >> (32 - BIT);
        put_codes<K + PER_BYTE>(v, units, cells, words);
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

// Groups of scales so small that their inverse overflows, or so large that sums do, or that cannot be
// represented: the middles of their cells in place of values.
__device__ __forceinline__ void tame(float (&v)[VALUES], float s, int lane, Units& units) {
    const float up = s < LEAST_SCALE ? RAISED : 1.f, to = to_units(UNITS, __fmul_rn(s, up));
    const float upper = for_upper_half(up, lane);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const i32 cell = saturated_cell(__fmul_rn(v[i], i < VALUES / 2 ? up : upper), to);
        v[i] = __fadd_rn((float)min(max(cell, -REACH), REACH - 1), .5f);
    }
    units = {1.f, 1.f};
}

// x: `count` elements, a multiple of GROUP, 16-byte aligned; packed: 16-byte aligned; bad: null, or set to 1
// if a group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * QUANTIZE_WARPS, QUANTIZE_BLOCKS)
    quantize_hadamard(const void* __restrict__ x, i64 count, int turns, u8* __restrict__ packed,
                      u16* __restrict__ scale, i32* bad, const __grid_constant__ Borders borders) {
    extern __shared__ __align__(128) u8 dynamic[];
    __shared__ __align__(16) u8 cells[PER_BYTE * 2 * REACH];
    __shared__ i32 own_borders[TOP + 1];
    const int lane = threadIdx.x % 32;
    Memory& own = ((Memory*)dynamic)[threadIdx.x / 32];
    Tiles tile(count, turns, QUANTIZE_WARPS);
    if (tile.here()) fetch_elements(x, tile, own.elements, lane);
    for (int i = threadIdx.x; i <= TOP; i += blockDim.x) own_borders[i] = i < TOP ? borders.at[i] : REACH;
    __syncthreads();  // the borders are there
    fill_cells(own_borders, (u32*)cells);
    __syncthreads();  // the cells are there
    const u32 cell_0 = shared_address(cells) + REACH - MAGIC_BITS;
    for (; tile.here(); tile = tile.next()) {
        const bool inside = lane * VALUES < tile.here();
        const i64 group = group_of(tile, lane);
        float v[VALUES];
        wait_copies();
        __syncwarp();  // the copies of all lanes are there, the codes of the tile before are read
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            elements(*(const uint4*)(own.elements + lane * PITCH + 16 * j), v + PER_LOAD * j);
        if (DTYPE == BFLOAT16) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) asm("" : "+f"(v[i]));  // else it is converted twice
        }
        const Scale found = measure(v, own.elements, inside, lane);
        __syncwarp();  // all elements are read
        if (tile.next().here()) fetch_elements(x, tile.next(), own.elements, lane);
        if (inside && lane % LANES == 0) {
            scale[group] = (u16)found.scale_word;
            if (!found.known && bad) *bad = 1;
        }
        const float to = to_units(UNITS, found.s);
        Units units = {to, for_upper_half(to, lane)};
        rotate_in_order(v, lane);
        const bool usual = found.s == 0.f || (found.s > LEAST_SCALE && found.s < LARGEST_SCALE);
        if (!(inside && found.known && usual)) tame(v, found.s, lane, units);
        u32 words[WORDS] = {};
        put_codes<0>(v, units, cell_0, words);
        put_words(words, found.known ? 0xffffffffu : 0, own.stream, lane);
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
    __shared__ float levels[TABLE];
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
    if (lane * VALUES < tile.here()) word = scale[group_of(tile, lane)];
    for (; tile.here(); tile = tile.next()) {
        const Tiles next = tile.next();
        const float s = read_scale(word, 0, 0.f).s;
        if constexpr (OWN_LEVELS) {
#pragma unroll
            for (int i = 0; i < 2 * HALF; ++i)
                levels[i * THREADS + threadIdx.x] = __fmul_rn(level(book, i, HALF), s);
        }
        u32 words[WORDS];
        wait_copies();
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
        if (lane * VALUES < next.here()) word = scale[group_of(next, lane)];
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
            const float factor = for_upper_half(ROTATION, lane);
#pragma unroll
            for (int i = 0; i < VALUES; ++i)  // -0 becomes 0
                v[i] = __fmaf_rn(v[i], i < VALUES / 2 ? ROTATION : factor, 0.f);
            u8* place = own.elements + (lane & ~(LANES / 2)) * PITCH + (lane & LANES / 2 ? 8 * PIECES : 0);
            halves[0] = place, halves[1] = place + LANES / 2 * PITCH;
        }
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            *(uint4*)(halves[2 * j / PIECES] + 16 * (j % (PIECES / 2))) = raw_elements(v + PER_LOAD * j);
        give_elements(own.elements, out, tile, lane);
    }
}

// gate: DTYPE=0 CODE_BITS=4 GROUP=128 VALUES=64 registers<=128
// gate: DTYPE=1 CODE_BITS=4 GROUP=128 VALUES=64 registers<=128 arch=sm_90a
// gate: DTYPE=2 CODE_BITS=4 GROUP=128 VALUES=32,64 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODE_BITS=1,2,3,5,6,8 GROUP=128 VALUES=64 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODE_BITS=4 GROUP=32 VALUES=32 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODE_BITS=4 GROUP=1024 VALUES=64 registers<=128 arch=sm_90a
