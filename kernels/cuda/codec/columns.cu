// Quantisation of groups across rows (one scale a column, "per channel"), and back, in one pass: affine and
// symmetric codecs, x (outer, length, columns), groups along `length`, columns a multiple of 32.
//
// Threads and data: a unit is 32 neighbouring columns of the rows of a group; units of all groups follow each
// other. A warp takes two units, half a warp each, a lane two columns. To quantise, a lane keeps in shared
// memory what it reads for the extremes, and reads it there for the codes. Codes stand one a byte in shared
// memory, 16 rows of a unit at a time, where one lane packs or unpacks the 32 of a row. To dequantise, a warp
// takes up to 64 rows of two units. Memory: 1,152 bytes of shared memory a warp and, to quantise, 64 elements
// a row and warp; no barrier but those among the lanes of a warp.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric; CODE_BITS.
#include "codec/bit_stream.cuh"
#include "codec/codes.cuh"

constexpr int WARPS = 2, ROWS = 16, PART = 64;  // rows of a tile; of a warp that dequantises

struct Shape {
    i64 units;  // of all groups
    i64 length, columns;
    i64 group, groups;  // rows of a group, of which the last of `length` may have fewer; groups of `length`
};

// What a lane has: its unit's first element and rows, 0 beyond the last unit; its first column there.
struct Lane {
    i64 element, rows;
    i64 unit;
    int lane, column;

    __device__ __forceinline__ Lane(const Shape& shape, i64 pair) : lane(threadIdx.x % 32) {
        unit = 2 * pair + lane / ROWS, column = lane % ROWS * 2;
        const i64 in_row = shape.columns / 32, of_all = quotient(unit, in_row);
        const i64 outer = quotient(of_all, shape.groups),
                  start = (of_all - outer * shape.groups) * shape.group;
        element = (outer * shape.length + start) * shape.columns + (unit - of_all * in_row) * 32;
        rows = unit < shape.units ? min(shape.group, shape.length - start) : 0;
    }
    // Where its two codes of row r of the tile stand; and, as the lane that packs, those of its row.
    __device__ __forceinline__ u16* codes(Tile& tile, int r) const {
        return (u16*)tile.at(512 * (lane / ROWS) + 32 * r + column);
    }
    __device__ __forceinline__ Words<8>* row_of_codes(Tile& tile) const {
        return (Words<8>*)tile.at(32 * lane);
    }
    // The packed codes of the row that this lane packs, `first` + lane % ROWS of its unit.
    __device__ __forceinline__ i64 packed_row(const Shape& shape, i64 first) const {
        return (element + (first + lane % ROWS) * shape.columns) / 8 * CODE_BITS;
    }
};

// Rows of the longer of the two units of a warp.
__device__ __forceinline__ i64 max_rows(const Lane& me) {
    return max(me.rows, __shfl_xor_sync(ALL_LANES, me.rows, ROWS));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16)
    quantize_columns(const void* __restrict__ x, const Shape shape, u8* __restrict__ packed,
                     u16* __restrict__ scale, u16* __restrict__ offset, i32* bad) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    u8* staged = dynamic + threadIdx.x * 2 * ELEMENT_BYTES;  // rows follow each other for all threads
    constexpr int STAGED_ROW = 32 * WARPS * 2 * ELEMENT_BYTES;
    const i64 pair = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (2 * pair >= shape.units) return;
    const Lane me(shape, pair);
    const float infinity = __uint_as_float(0x7f800000u), lowest = CODEC == AFFINE ? -infinity : 0.f;
    float2 low = {infinity, infinity}, high = {lowest, lowest};
#pragma unroll 8
    for (i64 row = 0; row < me.rows; ++row) {
        const float2 v = two_elements(x, me.element + me.column + row * shape.columns);
        store_two(staged + row * STAGED_ROW, 0, v);
        if (CODEC == AFFINE) low = {lower(low.x, v.x), lower(low.y, v.y)};
        high = {higher(high.x, CODEC == AFFINE ? v.x : fabsf(v.x)),
                higher(high.y, CODEC == AFFINE ? v.y : fabsf(v.y))};
    }
    const Scale first = find_scale(low.x, high.x, 0.f), second = find_scale(low.y, high.y, 0.f);
    const Encoder of_first = encoder_of(first), of_second = encoder_of(second);
    if (me.rows) {
        const i64 at = me.unit * 32 + me.column;
        *(u32*)(scale + at) = first.scale_word | second.scale_word << 16;
        if (CODEC == AFFINE) *(u32*)(offset + at) = first.offset_word | second.offset_word << 16;
        if (!(first.known && second.known) && bad) *bad = 1;
    }
    for (i64 start = 0; start < max_rows(me); start += ROWS) {
        const int here = (int)min((i64)ROWS, me.rows - start);
#pragma unroll 4
        for (int r = 0; r < here; ++r) {
            const float2 v = two_elements(staged + (start + r) * STAGED_ROW, 0);
            const u32 codes = pair_of_codes(v.x, v.y, of_first, of_second, nullptr, 0);
            *me.codes(tile, r) = (u16)(codes | codes >> 8);
        }
        __syncwarp();  // the codes of all lanes are there
        if (start + me.lane % ROWS < me.rows)
            *(Words<CODE_BITS>*)(packed + me.packed_row(shape, start)) =
                pack_32<CODE_BITS>(*me.row_of_codes(tile));
        __syncwarp();  // all codes are read
    }
}

// Reverse of quantize_columns: warp w takes rows PART (w % parts) and on of the groups of two units.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_columns(const u8* __restrict__ packed, const Shape shape, i64 parts,
                       const u16* __restrict__ scale, const u16* __restrict__ offset,
                       void* __restrict__ out) {
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    const i64 warp = (i64)blockIdx.x * WARPS + threadIdx.x / 32, pair = quotient(warp, parts);
    const Lane me(shape, pair);
    const i64 at = me.unit * 32 + me.column;
    const u32 scales = me.rows ? *(const u32*)(scale + at) : 0;
    const u32 offsets = CODEC == AFFINE && me.rows ? *(const u32*)(offset + at) : 0;
    const Scale first = read_scale(scales & 0xffff, offsets & 0xffff);
    const Scale second = read_scale(scales >> 16, offsets >> 16);
    i64 start = (warp - pair * parts) * PART;
    const i64 end = min(start + PART, max_rows(me));
    for (; start < end; start += ROWS) {
        if (start + me.lane % ROWS < me.rows)
            *me.row_of_codes(tile) =
                unpack_32<CODE_BITS>(*(const Words<CODE_BITS>*)(packed + me.packed_row(shape, start)));
        __syncwarp();  // the codes of all lanes are there
        const int here = (int)min((i64)ROWS, me.rows - start);
#pragma unroll 4
        for (int r = 0; r < here; ++r) {
            const u32 codes = *me.codes(tile, r);
            store_two(out, me.element + me.column + (start + r) * shape.columns,
                      {value_of(codes & 0xff, first, nullptr), value_of(codes >> 8, second, nullptr)});
        }
        __syncwarp();  // all codes are read
    }
}

// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 registers<=80
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 registers<=80 arch=sm_90a
