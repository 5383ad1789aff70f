// Quantisation of groups across rows (one scale a column, "per channel"), and back, in one pass: affine and
// symmetric codecs, x (outer, length, columns), groups of up to 128 along `length`, columns a multiple of 32.
//
// Quantisation. A chunk is WIDTH neighbouring columns of all rows of a group, 4 or, of 3 bits, 8; chunks of
// all groups follow each other. A warp takes 64 columns: it copies them to shared memory, 16 bytes a lane,
// all rows at once, and from then on is on its own. WIDTH / 2 lanes have a chunk; each takes every n-th row.
// A lane reads its rows for the extremes, finds the scales of two columns, exchanges scales with the other
// lanes, and reads its rows again for the codes. Codes of 2, 4 and 8 bits of a chunk and row are whole bytes,
// which the lane writes; so are those of 3 bits, which go through shared memory to lanes that write
// neighbouring words; others stand one a byte there, where 32 of a row are packed by one lane. Memory:
// dynamic shared memory of 64 elements and, of 3 bits 24, of those one a byte 68 bytes a row and warp; no
// barrier but those among the lanes of a warp.
//
// Dequantisation. A chunk is the columns of 16 bytes of elements; a warp takes 8 rows of 32 chunks, one a
// lane. Codes stand one a byte in shared memory, 2 or 1 KiB a warp, where one lane unpacks 32 of a row.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric; CODE_BITS.
#include "codec/codes.cuh"
#include "common/async_copies.cuh"

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
constexpr int WIDTH = CODE_BITS == 3 ? 8 : 4;            // columns of a chunk
constexpr int CHUNKS = 64 / WIDTH, PARTS = 32 / CHUNKS;  // chunks of a warp; lanes of a chunk
constexpr int PIECES = 64 / PER_LOAD;                    // of the 16 bytes of a copy, of a row
constexpr int CHUNK_BYTES = WIDTH * ELEMENT_BYTES, ROW_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int WORDS = CHUNK_BYTES / 4;  // of the elements of a row of a chunk
constexpr int CODE_PITCH =
    CODE_BITS == 3 ? 6 : CHUNKS + 1;  // words of a row of codes: of 3 bits, or one a byte
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
    const int column = lane % PIECES * PER_LOAD;
    const Chunk piece = chunk_at<WIDTH>(shape, first + column / WIDTH);
    const i64 row_bytes = shape.columns * ELEMENT_BYTES;
    const int start = lane / PIECES;
    const u8* from =
        (const u8*)x + (piece.row + start) * row_bytes + (piece.column + column % WIDTH) * ELEMENT_BYTES;
    u8* to = tile + 16 * lane;
#pragma unroll 4
    for (int row = start; row < (int)piece.rows; row += 32 / PIECES) {
        copy_async(to, from);
        from += 32 / PIECES * row_bytes, to += 32 * 16;
    }
    wait_copies();
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
    for (int row = start; row < rows; row += PARTS) {
        u32 words[WORDS];
        copy_words<WORDS>((const u32*)(chunk + row * ROW_BYTES), words);
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            r.low[i] = lower_bits(r.low[i], words[i]), r.high[i] = higher_bits(r.high[i], words[i]);
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
#pragma unroll
        for (int mask = 16; mask >= CHUNKS; mask /= 2) {
            r.low[i] = lower_bits(r.low[i], __shfl_xor_sync(ALL_LANES, r.low[i], mask));
            r.high[i] = higher_bits(r.high[i], __shfl_xor_sync(ALL_LANES, r.high[i], mask));
        }
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

// Codes of 4 columns of a row: packed, or one a byte.
__device__ __forceinline__ u32 codes_of(const u32* words, const Spacing* spacing, const u32* highest) {
    constexpr int BITS = WHOLE_BYTES || CODE_BITS == 3 ? CODE_BITS : 8;
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

// Writes codes of 3 bits, which stand as in the stream, 24 bytes a row: a lane has every 32nd word, so every
// third one is 16 rows further in the same place of a row.
__device__ __forceinline__ void give_words(const u32* words, const Shape& shape, const Chunk& chunk,
                                           u8* packed, int lane) {
    const i64 pitch = shape.columns / 32 * 3;
    const i64 at = (chunk.row * shape.columns + chunk.column) / 32 * 3;
    __syncwarp();  // the codes of all lanes are there
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int from = 32 * i + lane, start = from / CODE_PITCH, word = from % CODE_PITCH;
        const int first = word / 3 * (CHUNKS / 2);  // the lane that has the first chunk of these 32 columns
        const int rows = __shfl_sync(ALL_LANES, (int)chunk.rows, first);
        u32* to = (u32*)packed + __shfl_sync(ALL_LANES, at, first) + start * pitch + word % 3;
#pragma unroll 4
        for (int k = 0; start + 16 * k < rows; ++k, to += 16 * pitch) *to = words[from + 16 * CODE_PITCH * k];
    }
}

// Packs the codes, one a byte, 32 of a row a lane. The odd pitch of their rows keeps lanes in different
// banks.
__device__ __forceinline__ void give_codes(const u32* codes, const Shape& shape, i64 first, u8* packed,
                                           int lane) {
    const Chunk quad = chunk_at<WIDTH>(shape, first + lane % 2 * 8);
    __syncwarp();  // the codes of all lanes are there
#pragma unroll 1
    for (int row = lane / 2; row < (int)quad.rows; row += 16) {
        u32 bytes[8], words[CODE_BITS];
#pragma unroll
        for (int k = 0; k < 8; ++k) bytes[k] = codes[row * CODE_PITCH + lane % 2 * 8 + k];
        pack_32<CODE_BITS>(bytes, words);
        const i64 at = (quad.row + row) * shape.columns + quad.column;
        copy_words<CODE_BITS>(words, (u32*)(packed + at / 8 * CODE_BITS));
    }
}

extern "C" __global__ void __launch_bounds__(32 * QUANTIZE_WARPS)
    quantize_columns(const void* __restrict__ x, const Shape shape, u8* __restrict__ packed,
                     u16* __restrict__ scale, u16* __restrict__ offset, i32* bad) {
    extern __shared__ __align__(16) u8 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane / CHUNKS;
    const i64 first = ((i64)blockIdx.x * QUANTIZE_WARPS + warp) * CHUNKS;
    if (first >= shape.chunks) return;
    const int group = (int)shape.group;
    u8* tile = dynamic + warp * group * ROW_BYTES;
    u32* bytes = (u32*)(dynamic + QUANTIZE_WARPS * group * ROW_BYTES) + warp * group * CODE_PITCH;
    take_chunks(x, shape, first, tile, lane);
    const Chunk chunk = chunk_at<WIDTH>(shape, first + lane % CHUNKS);
    const int rows = (int)chunk.rows;
    u8* own = tile + lane % CHUNKS * CHUNK_BYTES;
    const Extremes found = extremes_of(own, rows, part);
    Spacing mine[2], spacing[WIDTH];
    u32 scale_words = 0, offset_words = 0;
    bool known = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float low = element_of(found.low, i), high = element_of(found.high, i);
#pragma unroll
        for (int k = 1; k < PARTS; ++k) {
            if (part == k) low = element_of(found.low, 2 * k + i), high = element_of(found.high, 2 * k + i);
        }
        const Scale of_column = scale_of(low, high);
        mine[i] = spacing_of(of_column.s, of_column.o, of_column.known);
        scale_words |= of_column.scale_word << 16 * i, offset_words |= of_column.offset_word << 16 * i;
        known = known && of_column.known;
    }
    if (rows) {
        const i64 at = (first + lane % CHUNKS) * WIDTH + 2 * part;
        *(u32*)(scale + at) = scale_words;
        if (CODEC == AFFINE) *(u32*)(offset + at) = offset_words;
        if (!known && bad) *bad = 1;
    }
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) spacing[k] = of_lane(mine[k % 2], lane % CHUNKS + k / 2 * CHUNKS);
    u32 highest[WIDTH / 2];
#pragma unroll
    for (int k = 0; k < WIDTH / 2; ++k) {
        const int low = k / 2 * 4 + k % 2;
        highest[k] = highest_codes(spacing[low], spacing[low + 2], (u32)TOP);
    }
    if constexpr (CODE_BITS == 3) {
        u8* to = (u8*)bytes + lane % CHUNKS * 3;
#pragma unroll 4
        for (int row = part; row < rows; row += PARTS) {
            u32 words[WORDS];
            copy_words<WORDS>((const u32*)(own + row * ROW_BYTES), words);
            const u32 codes = codes_of(words, spacing, highest) |
                              codes_of(words + WORDS / 2, spacing + WIDTH / 2, highest + WIDTH / 4) << 12;
            u8* at = to + row * (4 * CODE_PITCH);
            at[0] = (u8)codes, at[1] = (u8)(codes >> 8), at[2] = (u8)(codes >> 16);
        }
        give_words(bytes, shape, chunk, packed, lane);
    } else {
        u8* to = packed + ((chunk.row + part) * shape.columns + chunk.column) * CODE_BITS / 8;
#pragma unroll 4
        for (int row = part; row < rows; row += PARTS) {
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

// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 registers<=80
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 registers<=80 arch=sm_90a
