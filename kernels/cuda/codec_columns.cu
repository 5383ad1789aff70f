// Quantisation of groups across rows (one scale a column, "per channel"), and back, in one pass: affine and
// symmetric codecs, x (outer, length, columns), groups of up to 128 along `length`.
//
// Threads and data
//   chunk  16 bytes of neighbouring columns of all rows of a group; chunks of all groups follow each other.
//   lane   one chunk: PER_LOAD columns.
//   warp   8 rows of 32 chunks, in registers (8 x 16 bytes a lane); warp y of a block takes rows 8 y to
//          8 y + 7 of the groups, so a block has whole groups and x is read once.
// Lowest and highest values of columns meet in shared memory; there a thread finds the scale of a column for
// all. Codes of 1, 2, 4 and 8 bits are packed by the lane that makes them. Others stand one a byte in shared
// memory, where 32 of a row are packed by one lane: so `columns` and the length of a row of the stream are
// multiples of 32.
//
// Memory: dynamic shared memory, per warp 256 PER_LOAD bytes: 1 KiB of extremes, whose place the codes take
// afterwards; static 16 bytes a column.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric; CODE_BITS.
//
// clang-format off
// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 registers<=128
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 registers<=128 arch=sm_90a
// clang-format on
#include "codec_codes.cuh"

constexpr int ROWS = 8;                      // of a warp
constexpr int PITCH = 33;                    // what belongs to column k of a lane stands at k * PITCH + lane
constexpr int COLUMNS = 32 * PER_LOAD;       // of a block
constexpr int QUADS = PER_LOAD * ROWS / 32;  // 32 codes of a row that a lane packs
constexpr int WARP_BYTES = ROWS * COLUMNS;   // of dynamic shared memory
constexpr int WIDTH = PACKS_LOADS<CODE_BITS> ? CODE_BITS : 8;  // of a code that a lane has made
constexpr float TOP = (1 << CODE_BITS) - 1;
constexpr float HALF_LEVELS = CODE_BITS <= 4 ? 1 << (CODE_BITS - 1) : TOP * .5f;

constexpr int PART = DTYPE == BFLOAT16 ? 2 : 4;  // rows whose codes go together: registers are short

// Of 64 registers four blocks of 8 warps fit a multiprocessor. The compiler finds a way within 64 for float32
// and for affine float16; of 80 three blocks fit.
#if DTYPE == 2 || DTYPE == 0 && CODEC == 0
#define KVLAB_BOUNDS __launch_bounds__(512, 2)
#else
#define KVLAB_BOUNDS __maxnreg__(80)
#endif

struct Shape {
    i64 chunks;  // of all groups
    i64 length, columns;
    i64 group, groups;  // rows of a group, of which the last of `length` may have fewer; groups of `length`
};

// A chunk: row 0 of its group, its first column, the rows that its group has; 0 rows beyond the last chunk.
struct Chunk {
    i64 row, column;
    i64 rows;
};

__device__ __forceinline__ Chunk chunk_at(const Shape& shape, i64 index) {
    const i64 in_row = shape.columns / PER_LOAD;
    const i64 of_all = quotient(index, in_row), outer = quotient(of_all, shape.groups);
    const i64 start = (of_all - outer * shape.groups) * shape.group;
    return {outer * shape.length + start, (index - of_all * in_row) * PER_LOAD,
            index < shape.chunks ? min(shape.group, shape.length - start) : 0};
}

// The chunk of another lane.
__device__ __forceinline__ Chunk of_lane(const Chunk& mine, int lane) {
    return {__shfl_sync(ALL_LANES, mine.row, lane), __shfl_sync(ALL_LANES, mine.column, lane),
            __shfl_sync(ALL_LANES, mine.rows, lane)};
}

// Column k of a load, of which k is known when compiling.
__device__ __forceinline__ float column_of(const uint4& raw, int k) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    if (DTYPE == FLOAT32) return __uint_as_float(words[k % 4]);
    const float2 pair = pair_values(words[k / 2]);
    return k % 2 ? pair.y : pair.x;
}

constexpr u32 INFINITY_BITS = DTYPE == FLOAT16 ? 0x7c007c00u : DTYPE == BFLOAT16 ? 0x7f807f80u : 0x7f800000u;
constexpr u32 SIGN_BITS = DTYPE == FLOAT32 ? 0x80000000u : 0x80008000u;

// The lower, or the higher, of elements in the bits of two words: two of 16 bits or one float.
__device__ __forceinline__ u32 lower_bits(u32 a, u32 b) {
    if constexpr (DTYPE != FLOAT32) return lower_pair(a, b);
    return __float_as_uint(lower(__uint_as_float(a), __uint_as_float(b)));
}
__device__ __forceinline__ u32 higher_bits(u32 a, u32 b) {
    if constexpr (DTYPE != FLOAT32) return higher_pair(a, b);
    return __float_as_uint(higher(__uint_as_float(a), __uint_as_float(b)));
}

// The lowest and the highest values of the columns of a lane, to shared memory: those of all lanes lie side
// by side, first the lowest.
__device__ __forceinline__ void put_extremes(const uint4 (&raw)[ROWS], bool any, uint4* extremes, int lane) {
    uint4 low = raw[0], high = raw[0];
#pragma unroll
    for (int i = 1; i < ROWS; ++i) {
        low = {lower_bits(low.x, raw[i].x), lower_bits(low.y, raw[i].y), lower_bits(low.z, raw[i].z),
               lower_bits(low.w, raw[i].w)};
        high = {higher_bits(high.x, raw[i].x), higher_bits(high.y, raw[i].y), higher_bits(high.z, raw[i].z),
                higher_bits(high.w, raw[i].w)};
    }
    constexpr u32 LEAST = INFINITY_BITS | SIGN_BITS;
    extremes[lane] = any ? low : make_uint4(INFINITY_BITS, INFINITY_BITS, INFINITY_BITS, INFINITY_BITS);
    extremes[32 + lane] = any ? high : make_uint4(LEAST, LEAST, LEAST, LEAST);
}

// The scale of column c of a block, from the extremes of all warps.
__device__ __forceinline__ Scale scale_of_column(const u8* extremes, int c) {
    using Element = typename Unsigned<ELEMENT_BYTES>::type;
    const Element* lows = (const Element*)extremes + c;
    u32 low = lows[0], high = lows[COLUMNS];
#pragma unroll 1
    for (int y = 1; y < blockDim.y; ++y) {
        lows += WARP_BYTES / ELEMENT_BYTES;
        low = lower_bits(low, lows[0]), high = higher_bits(high, lows[COLUMNS]);
    }
    const float least = element(&low, 0), most = element(&high, 0);
    return find_scale(least, CODEC == AFFINE ? most : higher(-least, most), TOP, HALF_LEVELS);
}

extern "C" __global__ void KVLAB_BOUNDS quantize_columns(const void* __restrict__ x, const Shape shape,
                                                         u8* __restrict__ packed, u16* __restrict__ scale,
                                                         u16* __restrict__ offset, i32* bad) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Spacing spacings[PER_LOAD * PITCH];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const i64 first = (i64)blockIdx.x * 32;
    const Chunk chunk = chunk_at(shape, first + lane);
    const int rows = (int)min(chunk.rows - ROWS * warp, (i64)ROWS);  // of this warp; 0 or less: none
    const i64 start = (chunk.row + ROWS * warp) * shape.columns + chunk.column;
    uint4 raw[ROWS];
    raw[0] = make_uint4(0, 0, 0, 0);
    const u8* from = (const u8*)x + start * ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i < rows) {
            raw[i] = *(const uint4*)from;
        } else {
            raw[i] = raw[0];
        }
        from += shape.columns * ELEMENT_BYTES;
    }
    put_extremes(raw, rows > 0, (uint4*)(dynamic + warp * WARP_BYTES), lane);
    __syncthreads();  // the extremes of all rows are there
#pragma unroll 1
    for (int c = 32 * warp + lane; c < COLUMNS; c += 32 * blockDim.y) {
        const Scale found = scale_of_column(dynamic, c);
        spacings[c % PER_LOAD * PITCH + c / PER_LOAD] = spacing_of(found.s, found.o, found.known);
        if (first + c / PER_LOAD < shape.chunks) {
            scale[first * PER_LOAD + c] = (u16)found.scale_word;
            if (CODEC == AFFINE) offset[first * PER_LOAD + c] = (u16)found.offset_word;
            if (!found.known && bad) *bad = 1;
        }
    }
    __syncthreads();  // the scales are there, the extremes are read
    using Codes = Packing<WIDTH>;
    u8 *tile = dynamic + warp * WARP_BYTES + lane * PER_LOAD, *to = packed + (u64)start * CODE_BITS / 8;
#pragma unroll
    for (int part = 0; part < ROWS; part += PART) {
        u32 codes[PART][Codes::WORDS] = {};
#pragma unroll
        for (int k = 0; k < PER_LOAD / 2; ++k) {
            const int low = Codes::first(k), high = low + Codes::IN_HALF;
            const Spacing of_low = spacings[low * PITCH + lane], of_high = spacings[high * PITCH + lane];
            const u32 highest = highest_codes(of_low, of_high, (u32)TOP);
#pragma unroll
            for (int i = 0; i < PART; ++i) {
                const u32 pair = pair_of_codes(spaced_code(column_of(raw[part + i], low), of_low),
                                               spaced_code(column_of(raw[part + i], high), of_high), highest);
                codes[i][Codes::word(k)] += pair << Codes::bit(k);
            }
        }
#pragma unroll
        for (int i = part; i < part + PART; ++i) {
            if (!PACKS_LOADS<CODE_BITS>) Codes::store(codes[i - part], tile + i * COLUMNS);
            if (PACKS_LOADS<CODE_BITS> && i < rows) Codes::store(codes[i - part], to);
            to += (u64)shape.columns * CODE_BITS / 8;
        }
        __syncwarp();  // the codes of all lanes are there
    }
    if constexpr (PACKS_LOADS<CODE_BITS>) return;
    tile = dynamic + warp * WARP_BYTES;
    const int first_of_quad = lane % PER_LOAD * (32 / PER_LOAD);
    const i64 at = __shfl_sync(ALL_LANES, start, first_of_quad);
    const int rows_there = __shfl_sync(ALL_LANES, rows, first_of_quad);
#pragma unroll
    for (int part = 0; part < QUADS; ++part) {
        const int index = 32 * part + lane, row = index / PER_LOAD;
        if (row >= rows_there) continue;
        u32 bytes[8], words[CODE_BITS];
        copy_words<8>((const u32*)(tile + 32 * index), bytes);
        pack_32<CODE_BITS>(bytes, words);
        copy_words<CODE_BITS>(words, (u32*)(packed + (at + row * shape.columns) / 8 * CODE_BITS));
    }
}

// Reverse of quantize_columns, for groups of any size: warp y of block b takes the rows from 8 (blockDim.y (b
// % row_blocks) + y) on of the groups of 32 chunks.
extern "C" __global__ void __launch_bounds__(256)
    dequantize_columns(const u8* __restrict__ packed, const Shape shape, i64 row_blocks,
                       const u16* __restrict__ scale, const u16* __restrict__ offset,
                       void* __restrict__ out) {
    __shared__ __align__(16) u8 tiles[8][ROWS * COLUMNS];
    const i64 block = quotient(blockIdx.x, row_blocks), first = block * 32;
    const i64 first_row = (((i64)blockIdx.x - block * row_blocks) * blockDim.y + threadIdx.y) * ROWS;
    const int lane = threadIdx.x;
    u8* tile = tiles[threadIdx.y];
    const Chunk chunk = chunk_at(shape, first + lane);
    const Chunk quad = of_lane(chunk, lane % PER_LOAD * (32 / PER_LOAD));
#pragma unroll
    for (int part = 0; part < QUADS; ++part) {
        const int index = 32 * part + lane;
        const i64 row = first_row + index / PER_LOAD;
        if (row >= quad.rows) continue;
        const i64 at = (quad.row + row) * shape.columns + quad.column;
        u32 bytes[8], words[CODE_BITS];
        copy_words<CODE_BITS>((const u32*)(packed + at / 8 * CODE_BITS), words);
        unpack_32<CODE_BITS>(words, bytes);
        copy_words<8>(bytes, (u32*)(tile + 32 * index));
    }
    __syncwarp();  // the codes of all lanes are there
    if (first_row >= chunk.rows) return;
    u32 words[2][PER_LOAD / 2] = {};
    copy_words<PER_LOAD / 2>((const u32*)(scale + (first + lane) * PER_LOAD), words[0]);
    if (CODEC == AFFINE) copy_words<PER_LOAD / 2>((const u32*)(offset + (first + lane) * PER_LOAD), words[1]);
    Scale found[PER_LOAD];
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) {
        const int shift = 16 * (k % 2);
        found[k] = read_scale(words[0][k / 2] >> shift & 0xffff, words[1][k / 2] >> shift & 0xffff, TOP);
    }
    u8* to = (u8*)out + ((chunk.row + first_row) * shape.columns + chunk.column) * ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first_row + i >= chunk.rows) break;
        u32 codes[PER_LOAD / 4];
        copy_words<PER_LOAD / 4>((const u32*)(tile + i * COLUMNS + lane * PER_LOAD), codes);
        float v[PER_LOAD];
#pragma unroll
        for (int k = 0; k < PER_LOAD; ++k) v[k] = spaced_value(codes[k / 4], k % 4, found[k]);
        *(uint4*)(to + i * (shape.columns * ELEMENT_BYTES)) = raw_elements(v);
    }
}
