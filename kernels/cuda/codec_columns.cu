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
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 registers<=128
// clang-format on
#include "codec_codes.cuh"

constexpr int ROWS = 8;                      // of a warp
constexpr int PITCH = 32 + 32 / PER_LOAD;    // columns k of all lanes stand at k * PITCH + lane
constexpr int COLUMNS = 32 * PER_LOAD;       // of a block
constexpr int QUADS = PER_LOAD * ROWS / 32;  // 32 codes of a row that a lane packs
constexpr float TOP = (1 << CODE_BITS) - 1;
constexpr float HALF_LEVELS = CODE_BITS <= 4 ? 1 << (CODE_BITS - 1) : TOP * .5f;

struct Shape {
    i64 chunks;  // of all groups
    i64 length, columns;
    i64 group;  // rows of a group; the last of `length` may have fewer
};

// A chunk: row 0 of its group, its first column, the rows that its group has.
struct Chunk {
    i64 row, column;
    int rows;
};

__device__ __forceinline__ Chunk chunk_at(const Shape& shape, i64 index) {
    const i64 in_row = shape.columns / PER_LOAD, groups = (shape.length + shape.group - 1) / shape.group;
    const i64 of_all = quotient(index, in_row), outer = quotient(of_all, groups);
    const i64 start = (of_all - outer * groups) * shape.group;
    return {outer * shape.length + start, (index - of_all * in_row) * PER_LOAD,
            (int)min(shape.group, shape.length - start)};
}

// Column k of a load, of which k is known when compiling.
__device__ __forceinline__ float column_of(const uint4& raw, int k) {
    float v[PER_LOAD];
    elements(raw, v);
    return v[k];
}

extern "C" __global__ void __launch_bounds__(512)
    quantize_columns(const void* __restrict__ x, const Shape shape, u8* __restrict__ packed,
                     u16* __restrict__ scale, u16* __restrict__ offset, i32* bad) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ float scales[PER_LOAD * PITCH], offsets[PER_LOAD * PITCH];
    __shared__ u8 known[PER_LOAD * PITCH];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const i64 first = (i64)blockIdx.x * 32;
    const bool inside = first + lane < shape.chunks;
    const Chunk chunk = chunk_at(shape, inside ? first + lane : 0);
    const int rows = inside ? chunk.rows - ROWS * warp : 0;
    uint4 raw[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const i64 at = (chunk.row + ROWS * warp + i) * shape.columns + chunk.column;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (i < rows) raw[i] = *(const uint4*)((const u8*)x + at * ELEMENT_BYTES);
    }
    float* lows = (float*)dynamic + warp * 2 * PER_LOAD * PITCH;
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) {
        float low = __uint_as_float(0x7f800000u), high = -low;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float value = column_of(raw[i], k);
            if (i < rows) low = lower(low, value), high = higher(high, value);
        }
        lows[k * PITCH + lane] = low;
        lows[(PER_LOAD + k) * PITCH + lane] = high;
    }
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
        scales[at] = found.s, offsets[at] = found.o, known[at] = found.known;
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
        Scale of_column;
        of_column.s = scales[k * PITCH + lane], of_column.o = offsets[k * PITCH + lane];
        float values[ROWS];
        u32 column[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) values[i] = column_of(raw[i], k);
        spaced_codes<ROWS>(values, of_column, TOP, column);
        const u32 mask = known[k * PITCH + lane] ? 0xffu : 0u;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const u32 code = (column[i] & mask) << 8 * (k % 4);
            codes[i][k / 4] = k % 4 ? codes[i][k / 4] | code : code;
        }
    }
    u8* tile = dynamic + warp * ROWS * COLUMNS;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        copy_words<PER_LOAD / 4>(codes[i], (u32*)(tile + i * COLUMNS + lane * PER_LOAD));
    __syncwarp();  // the codes of all lanes are there
#pragma unroll
    for (int part = 0; part < QUADS; ++part) {
        const int index = 32 * part + lane, row = index / PER_LOAD;
        const i64 of_quad = first + index % PER_LOAD * (32 / PER_LOAD);
        if (of_quad >= shape.chunks) continue;
        const Chunk quad = chunk_at(shape, of_quad);
        if (ROWS * warp + row >= quad.rows) continue;
        u32 bytes[8], words[CODE_BITS];
        copy_words<8>((const u32*)(tile + 32 * index), bytes);
        pack_32<CODE_BITS>(bytes, words);
        const i64 at = (quad.row + ROWS * warp + row) * shape.columns + quad.column;
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
#pragma unroll
    for (int part = 0; part < QUADS; ++part) {
        const int index = 32 * part + lane, row = index / PER_LOAD;
        const i64 of_quad = first + index % PER_LOAD * (32 / PER_LOAD);
        if (of_quad >= shape.chunks) continue;
        const Chunk quad = chunk_at(shape, of_quad);
        if (first_row + row >= quad.rows) continue;
        const i64 at = (quad.row + first_row + row) * shape.columns + quad.column;
        u32 bytes[8], words[CODE_BITS];
        copy_words<CODE_BITS>((const u32*)(packed + at / 8 * CODE_BITS), words);
        unpack_32<CODE_BITS>(words, bytes);
        copy_words<8>(bytes, (u32*)(tile + 32 * index));
    }
    __syncwarp();  // the codes of all lanes are there
    if (first + lane >= shape.chunks) return;
    const Chunk chunk = chunk_at(shape, first + lane);
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
