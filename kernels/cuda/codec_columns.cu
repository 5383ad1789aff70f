// Quantisation of groups across rows (one scale a column, "per channel"), and back, in one pass: affine and
// symmetric codecs, x (outer, length, columns), groups of up to 128 along `length`.
//
// Threads and data
//   chunk  16 bytes of neighbouring columns of all rows of a group; chunks of all groups follow each other.
//   lane   one chunk: PER_LOAD columns.
//   warp   8 rows of 32 chunks, in registers (8 x 16 bytes a lane); warp y of a block takes rows 8 y to 8 y +
//   7 of
//          the groups, so a block has whole groups and x is read once.
// Lowest and highest values of columns meet in shared memory; there a thread finds the scale of a column for
// all. Codes of a warp stand one a byte in shared memory, 32 of a row are packed by one lane: so `columns`
// and the length of a row of the stream are multiples of 32.
//
// Memory: dynamic shared memory, per warp 2 PER_LOAD (32 + 32 / PER_LOAD) floats for the extremes, whose
// place the codes take afterwards (256 PER_LOAD bytes); static 2 floats and a byte a column.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric; CODE_BITS.
//
// clang-format off
// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 registers<=128
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 registers<=128 arch=sm_90a
// clang-format on
#include "codec_codes.cuh"

constexpr int ROWS = 8;                      // of a warp
constexpr int PITCH = 32 + 32 / PER_LOAD;    // columns k of all lanes stand at k * PITCH + lane
constexpr int COLUMNS = 32 * PER_LOAD;       // of a block
constexpr int QUADS = PER_LOAD * ROWS / 32;  // 32 codes of a row that a lane packs
constexpr float TOP = (1 << CODE_BITS) - 1;
constexpr float HALF_LEVELS = CODE_BITS <= 4 ? 1 << (CODE_BITS - 1) : TOP * .5f;

// Blocks that shall fit a multiprocessor; the compiler does not find a way within 64 registers for sm_120.
#if __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = 1;
#else
constexpr int BLOCKS = 2;
#endif

struct Shape {
    i64 chunks;  // of all groups
    i64 length, columns;
    i64 group;  // rows of a group; the last of `length` may have fewer
};

// A chunk: row 0 of its group, its first column, the rows that its group has; 0 rows beyond the last chunk.
struct Chunk {
    i64 row, column;
    i64 rows;
};

__device__ __forceinline__ Chunk chunk_at(const Shape& shape, i64 index) {
    const i64 in_row = shape.columns / PER_LOAD, groups = (shape.length + shape.group - 1) / shape.group;
    const i64 of_all = quotient(index, in_row), outer = quotient(of_all, groups);
    const i64 start = (of_all - outer * groups) * shape.group;
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

// The lowest and highest values of the columns of a lane, to their places in shared memory.
__device__ __forceinline__ void put_extremes(const uint4 (&raw)[ROWS], bool any, float* lows, int lane) {
    uint4 low = raw[0], high = raw[0];
#pragma unroll
    for (int i = 1; i < ROWS; ++i) {
        if constexpr (DTYPE != FLOAT32) {
            low = {lower_pair(low.x, raw[i].x), lower_pair(low.y, raw[i].y), lower_pair(low.z, raw[i].z),
                   lower_pair(low.w, raw[i].w)};
            high = {higher_pair(high.x, raw[i].x), higher_pair(high.y, raw[i].y),
                    higher_pair(high.z, raw[i].z), higher_pair(high.w, raw[i].w)};
        } else {
            float l[4], h[4], v[4];
            elements(low, l), elements(high, h), elements(raw[i], v);
#pragma unroll
            for (int k = 0; k < 4; ++k) l[k] = lower(l[k], v[k]), h[k] = higher(h[k], v[k]);
            low = raw_elements(l), high = raw_elements(h);
        }
    }
    const float infinity = __uint_as_float(0x7f800000u);
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) {
        lows[k * PITCH + lane] = any ? column_of(low, k) : infinity;
        lows[(PER_LOAD + k) * PITCH + lane] = any ? column_of(high, k) : -infinity;
    }
}

extern "C" __global__ void __launch_bounds__(512, BLOCKS)
    quantize_columns(const void* __restrict__ x, const Shape shape, u8* __restrict__ packed,
                     u16* __restrict__ scale, u16* __restrict__ offset, i32* bad) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Spacing spacings[PER_LOAD * PITCH];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const i64 first = (i64)blockIdx.x * 32;
    const Chunk chunk = chunk_at(shape, first + lane);
    const int rows = (int)chunk.rows - ROWS * warp;
    uint4 raw[ROWS];
    raw[0] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const i64 at = (chunk.row + ROWS * warp + i) * shape.columns + chunk.column;
        if (i < rows) {
            raw[i] = *(const uint4*)((const u8*)x + at * ELEMENT_BYTES);
        } else {
            raw[i] = raw[0];
        }
    }
    put_extremes(raw, rows > 0, (float*)dynamic + warp * 2 * PER_LOAD * PITCH, lane);
    __syncthreads();  // the extremes of all rows are there
    for (int c = 32 * warp + lane; c < COLUMNS; c += 32 * blockDim.y) {
        const int at = c % PER_LOAD * PITCH + c / PER_LOAD;
        const float* extremes = (const float*)dynamic + at;
        float low = extremes[0], high = extremes[PER_LOAD * PITCH];
        for (int y = 1; y < blockDim.y; ++y) {
            extremes += 2 * PER_LOAD * PITCH;
            low = lower(low, extremes[0]), high = higher(high, extremes[PER_LOAD * PITCH]);
        }
        const Scale found = find_scale(low, CODEC == AFFINE ? high : higher(-low, high), TOP, HALF_LEVELS);
        spacings[at] = spacing_of(found.s, found.o, found.known);
        if (first + c / PER_LOAD < shape.chunks) {
            scale[first * PER_LOAD + c] = (u16)found.scale_word;
            if (CODEC == AFFINE) offset[first * PER_LOAD + c] = (u16)found.offset_word;
            if (!found.known && bad) *bad = 1;
        }
    }
    __syncthreads();  // the scales are there, the extremes are read
    u32 codes[ROWS][PER_LOAD / 4];
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) {
        const Spacing spacing = spacings[k * PITCH + lane];
        float values[ROWS];
        u32 column[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) values[i] = column_of(raw[i], k);
        spaced_codes<ROWS>(values, spacing, TOP, column);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (k % 4 == 0) codes[i][k / 4] = 0u - MAGIC_BITS * low_bits(1, 8);
            codes[i][k / 4] += column[i] << 8 * (k % 4);
        }
    }
    u8* tile = dynamic + warp * ROWS * COLUMNS;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        copy_words<PER_LOAD / 4>(codes[i], (u32*)(tile + i * COLUMNS + lane * PER_LOAD));
    __syncwarp();  // the codes of all lanes are there
    const Chunk quad = of_lane(chunk, lane % PER_LOAD * (32 / PER_LOAD));
#pragma unroll
    for (int part = 0; part < QUADS; ++part) {
        const int index = 32 * part + lane, row = ROWS * warp + index / PER_LOAD;
        if (row >= quad.rows) continue;
        u32 bytes[8], words[CODE_BITS];
        copy_words<8>((const u32*)(tile + 32 * index), bytes);
        pack_32<CODE_BITS>(bytes, words);
        const i64 at = (quad.row + row) * shape.columns + quad.column;
        copy_words<CODE_BITS>(words, (u32*)(packed + at / 8 * CODE_BITS));
    }
}

// Reverse of quantize_columns, for groups of any size: warp y of block b takes the rows from
// 8 (blockDim.y (b % row_blocks) + y) on of the groups of 32 chunks.
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
    float s[PER_LOAD], o[PER_LOAD];
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) {
        const i64 at = (first + lane) * PER_LOAD + k;
        const Scale found = read_scale(scale[at], CODEC == AFFINE ? offset[at] : 0, TOP);
        s[k] = found.s, o[k] = found.o;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first_row + i >= chunk.rows) break;
        float v[PER_LOAD];
#pragma unroll
        for (int k = 0; k < PER_LOAD; ++k) {
            const u32 code = tile[i * COLUMNS + lane * PER_LOAD + k];
            const float number = __fsub_rn(__uint_as_float(code | 0x4b000000u), 8388608.f);  // 2^23 + code
            v[k] = __fadd_rn(__fmul_rn(number, s[k]), o[k]);
        }
        const i64 at = (chunk.row + first_row + i) * shape.columns + chunk.column;
        *(uint4*)((u8*)out + at * ELEMENT_BYTES) = raw_elements(v);
    }
}
