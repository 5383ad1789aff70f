// Quantisation of groups across rows (one scale a column, "per channel"), and back, in one pass: affine and
// symmetric codecs, x (outer, length, columns), groups of up to 128 along `length`, columns a multiple of 32.
//
// Quantisation. A chunk is 4 neighbouring columns of all rows of a group; chunks of all groups follow each
// other. A warp takes 16 chunks: it copies them to shared memory, 16 bytes a lane, all rows at once, and from
// then on is on its own. Two lanes have a chunk, one its even and one its odd rows: they read them for the
// extremes, find the scales of two columns each, tell them each other, and read them again for the codes.
// Codes of 2, 4 and 8 bits of a chunk and row are whole bytes, which the lane writes; others stand one a byte
// in shared memory, where 32 of a row are packed by one lane. Memory: dynamic shared memory of 64 elements
// and, for those codes, 68 bytes a row and warp; no barrier but those among the lanes of a warp.
//
// Dequantisation. A chunk is the columns of 16 bytes of elements; a warp takes 8 rows of 32 chunks, one a
// lane. Codes stand one a byte in shared memory, 2 or 1 KiB a warp, where one lane unpacks 32 of a row.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric; CODE_BITS.
//
// clang-format off
// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 registers<=80
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 registers<=80 arch=sm_90a
// clang-format on
#include "codec_codes.cuh"
#include "async_copies.cuh"

constexpr float TOP = (1 << CODE_BITS) - 1;
constexpr float HALF_LEVELS = CODE_BITS <= 4 ? 1 << (CODE_BITS - 1) : TOP * .5f;

struct Shape {
    i64 chunks;  // of all groups
    i64 length, columns;
    i64 group, groups;  // rows of a group, of which the last of `length` may have fewer; groups of `length`
};

// A chunk of WIDTH columns: row 0 of its group, its first column, the rows that its group has; 0 rows beyond
// the last chunk.
struct Chunk {
    i64 row, column;
    i64 rows;
};

template <int WIDTH>
__device__ __forceinline__ Chunk chunk_at(const Shape& shape, i64 index) {
    const i64 in_row = shape.columns / WIDTH;
    const i64 of_all = quotient(index, in_row), outer = quotient(of_all, shape.groups);
    const i64 start = (of_all - outer * shape.groups) * shape.group;
    return {outer * shape.length + start, (index - of_all * in_row) * WIDTH,
            index < shape.chunks ? min(shape.group, shape.length - start) : 0};
}

// ---- Quantisation

constexpr int QUANTIZE_WARPS = 2;
constexpr int CHUNKS = 16, WIDTH = 4;  // of a warp; columns of a chunk
constexpr int PIECE_CHUNKS = PER_LOAD / WIDTH,
              PIECES = CHUNKS / PIECE_CHUNKS;  // of the 16 bytes of a copy; of a row
constexpr int CHUNK_BYTES = WIDTH * ELEMENT_BYTES, ROW_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int WORDS = CHUNK_BYTES / 4;  // of the elements of a row of a chunk
constexpr int CODE_PITCH = CHUNKS + 1;  // words of a row of codes, one a byte
constexpr bool WHOLE_BYTES = CODE_BITS == 2 || CODE_BITS == 4 || CODE_BITS == 8;

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

// Copies all rows of 16 chunks to shared memory and waits for them.
__device__ __forceinline__ void take_chunks(const void* x, const Shape& shape, i64 first, u8* tile,
                                            int lane) {
    const Chunk piece = chunk_at<WIDTH>(shape, first + lane % PIECES * PIECE_CHUNKS);
    const i64 row_bytes = shape.columns * ELEMENT_BYTES;
    const int start = lane / PIECES;
    const u8* from = (const u8*)x + (piece.row + start) * row_bytes + piece.column * ELEMENT_BYTES;
    u8* to = tile + 16 * lane;
#pragma unroll 4
    for (int row = start; row < (int)piece.rows; row += 32 / PIECES) {
        copy_async(to, from);
        from += 32 / PIECES * row_bytes, to += 32 * 16;
    }
    wait_for_copies();
    __syncwarp();  // the copies of all lanes are there
}

// The lowest and the highest elements of the columns of a chunk.
struct Extremes {
    u32 low[WORDS], high[WORDS];
};

__device__ __forceinline__ Extremes extremes_of(const u8* chunk, int rows, int start) {
    Extremes r;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) r.low[i] = INFINITY_BITS, r.high[i] = INFINITY_BITS | SIGN_BITS;
#pragma unroll 8
    for (int row = start; row < rows; row += 2) {
        u32 words[WORDS];
        copy_words<WORDS>((const u32*)(chunk + row * ROW_BYTES), words);
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            r.low[i] = lower_bits(r.low[i], words[i]), r.high[i] = higher_bits(r.high[i], words[i]);
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        r.low[i] = lower_bits(r.low[i], __shfl_xor_sync(ALL_LANES, r.low[i], 16));
        r.high[i] = higher_bits(r.high[i], __shfl_xor_sync(ALL_LANES, r.high[i], 16));
    }
    return r;
}

// Element k of words, of which k is known when compiling.
__device__ __forceinline__ float element_of(const u32* words, int k) {
    if (DTYPE == FLOAT32) return __uint_as_float(words[k]);
    const float2 pair = pair_values(words[k / 2]);
    return k % 2 ? pair.y : pair.x;
}

__device__ __forceinline__ Scale scale_of(float low, float high) {
    return find_scale(low, CODEC == AFFINE ? high : higher(-low, high), TOP, HALF_LEVELS);
}

__device__ __forceinline__ Spacing of_lane(const Spacing& mine, int lane) {
    return {__shfl_sync(ALL_LANES, mine.s, lane), __shfl_sync(ALL_LANES, mine.o, lane),
            DTYPE == FLOAT16 ? 1.f : __shfl_sync(ALL_LANES, mine.factor, lane),
            __shfl_sync(ALL_LANES, mine.inverse, lane)};
}

// Codes of a row of a chunk: packed, or one a byte.
__device__ __forceinline__ u32 codes_of(const u32* words, const Spacing (&spacing)[WIDTH],
                                        const u32 (&highest)[2]) {
    constexpr int BITS = WHOLE_BYTES ? CODE_BITS : 8;
    const u32 even = pair_of_codes(spaced_code(element_of(words, 0), spacing[0]),
                                   spaced_code(element_of(words, 2), spacing[2]), highest[0]);
    const u32 odd = pair_of_codes(spaced_code(element_of(words, 1), spacing[1]),
                                  spaced_code(element_of(words, 3), spacing[3]), highest[1]);
    const u32 halves = even + (odd << BITS);  // two codes in each
    return BITS == 8 ? halves : (halves & low_bits(2 * BITS, 32)) | halves >> (16 - 2 * BITS);
}

__device__ __forceinline__ void put_whole_bytes(u32 codes, u8* to) {
    if constexpr (CODE_BITS == 8) *(u32*)to = codes;
    if constexpr (CODE_BITS == 4) *(u16*)to = (u16)codes;
    if constexpr (CODE_BITS == 2) *to = (u8)codes;
}

// Packs the codes, one a byte, 32 of a row a lane, in place, and writes them, neighbouring words by
// neighbouring lanes. The odd pitch of their rows keeps lanes in different banks.
__device__ __forceinline__ void give_codes(u32* codes, const Shape& shape, i64 first, u8* packed, int lane) {
    constexpr int QUAD = 8, STEP = 2 * CODE_BITS;  // words of 32 codes, one a byte; packed words of a row
    const Chunk quad = chunk_at<WIDTH>(shape, first + lane % 2 * QUAD);
    const int rows = (int)quad.rows;
    __syncwarp();  // the codes of all lanes are there
#pragma unroll 1
    for (int row = lane / 2; row < rows; row += 16) {
        u32 bytes[QUAD], words[CODE_BITS];
        u32* own = codes + row * CODE_PITCH + lane % 2 * QUAD;
#pragma unroll
        for (int k = 0; k < QUAD; ++k) bytes[k] = own[k];
        pack_32<CODE_BITS>(bytes, words);
#pragma unroll
        for (int k = 0; k < CODE_BITS; ++k) own[k] = words[k];
    }
    __syncwarp();  // the words of all lanes are there
    // Where the words of the two quads go, of which one may have fewer rows than the other, or none.
    const i64 at = (quad.row * shape.columns + quad.column) / 32 * CODE_BITS,
              pitch = shape.columns / 32 * CODE_BITS;
    const i64 starts[2] = {__shfl_sync(ALL_LANES, at, 0), __shfl_sync(ALL_LANES, at, 1)};
    const int ends[2] = {__shfl_sync(ALL_LANES, rows, 0), __shfl_sync(ALL_LANES, rows, 1)};
    int row = lane / STEP, word = lane % STEP;
#pragma unroll 4
    while (row < max(ends[0], ends[1])) {
        const bool second = word >= CODE_BITS;
        const int k = second ? word - CODE_BITS : word;
        if (row < (second ? ends[1] : ends[0]))
            ((u32*)packed)[(second ? starts[1] : starts[0]) + row * pitch + k] =
                codes[row * CODE_PITCH + (second ? QUAD : 0) + k];
        row += 32 / STEP, word += 32 % STEP;
        if (word >= STEP) ++row, word -= STEP;
    }
}

extern "C" __global__ void __launch_bounds__(32 * QUANTIZE_WARPS)
    quantize_columns(const void* __restrict__ x, const Shape shape, u8* __restrict__ packed,
                     u16* __restrict__ scale, u16* __restrict__ offset, i32* bad) {
    extern __shared__ __align__(16) u8 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / 16;
    const i64 first = ((i64)blockIdx.x * QUANTIZE_WARPS + warp) * CHUNKS;
    if (first >= shape.chunks) return;
    const int group = (int)shape.group;
    u8* tile = dynamic + warp * group * ROW_BYTES;
    u32* bytes = (u32*)(dynamic + QUANTIZE_WARPS * group * ROW_BYTES) + warp * group * CODE_PITCH;
    take_chunks(x, shape, first, tile, lane);
    const Chunk chunk = chunk_at<WIDTH>(shape, first + lane % CHUNKS);
    const int rows = (int)chunk.rows;
    u8* own = tile + lane % CHUNKS * CHUNK_BYTES;
    const Extremes found = extremes_of(own, rows, half);
    Spacing mine[2], spacing[WIDTH];
    u32 scale_words = 0, offset_words = 0;
    bool known = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float low = half ? element_of(found.low, 2 + i) : element_of(found.low, i);
        const float high = half ? element_of(found.high, 2 + i) : element_of(found.high, i);
        const Scale of_column = scale_of(low, high);
        mine[i] = spacing_of(of_column.s, of_column.o, of_column.known);
        scale_words |= of_column.scale_word << 16 * i, offset_words |= of_column.offset_word << 16 * i;
        known = known && of_column.known;
    }
    if (rows) {
        const i64 at = (first + lane % CHUNKS) * WIDTH + 2 * half;
        *(u32*)(scale + at) = scale_words;
        if (CODEC == AFFINE) *(u32*)(offset + at) = offset_words;
        if (!known && bad) *bad = 1;
    }
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) spacing[k] = of_lane(mine[k % 2], lane % 16 + k / 2 * 16);
    const u32 highest[2] = {highest_codes(spacing[0], spacing[2], (u32)TOP),
                            highest_codes(spacing[1], spacing[3], (u32)TOP)};
    u8* to = packed + ((chunk.row + half) * shape.columns + chunk.column) * CODE_BITS / 8;
#pragma unroll 4
    for (int row = half; row < rows; row += 2) {
        u32 words[WORDS];
        copy_words<WORDS>((const u32*)(own + row * ROW_BYTES), words);
        const u32 codes = codes_of(words, spacing, highest);
        if constexpr (WHOLE_BYTES) {
            put_whole_bytes(codes, to);
            to += shape.columns * CODE_BITS / 4;
        } else {
            bytes[row * CODE_PITCH + lane % CHUNKS] = codes;
        }
    }
    if constexpr (!WHOLE_BYTES) give_codes(bytes, shape, first, packed, lane);
}

// ---- Dequantisation

constexpr int ROWS = 8;                      // of a warp
constexpr int COLUMNS = 32 * PER_LOAD;       // of a block
constexpr int QUADS = PER_LOAD * ROWS / 32;  // 32 codes of a row that a lane unpacks

// The chunk of another lane.
__device__ __forceinline__ Chunk of_lane(const Chunk& mine, int lane) {
    return {__shfl_sync(ALL_LANES, mine.row, lane), __shfl_sync(ALL_LANES, mine.column, lane),
            __shfl_sync(ALL_LANES, mine.rows, lane)};
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
    const Chunk chunk = chunk_at<PER_LOAD>(shape, first + lane);
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
