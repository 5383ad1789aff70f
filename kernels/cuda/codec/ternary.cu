// Packing of ternary values, one a byte, five to a byte, and unpacking.
//
// Threads and data: a warp takes some whole rows of together up to 1,024 values or, of rows longer than that,
// 1,020 values. They go as digits 0, 1, 2 through shared memory, where a lane makes a byte of five, or five
// of a byte (codec/bit_stream.cuh). Memory: 1,152 bytes of shared memory a warp; no barrier but those among
// the lanes of a warp.
//
// `bad`, if it is not null, is set to 1 if a value is none of -1, 0, 1, or a byte is above 242.
#include "codec/bit_stream.cuh"

constexpr int WARPS = 8, PART = TILE / 20 * 20;  // values of a long row: whole words of whole bytes

// What a warp has: `rows` rows of n values, or a part of one row, and where they begin; 0 rows: nothing.
struct Piece {
    i64 value, byte;
    int rows, n;
};

__device__ __forceinline__ Piece piece_of(i64 rows, i64 n) {
    const i64 warp = (i64)blockIdx.x * WARPS + threadIdx.x / 32, row_bytes = (n + 4) / 5;
    if (n <= TILE) {
        const int each = TILE / (int)n;
        const i64 row = warp * each;
        return {row * n, row * row_bytes, (int)max((i64)0, min((i64)each, rows - row)), (int)n};
    }
    const i64 parts = (n + PART - 1) / PART, row = quotient(warp, parts), first = (warp - row * parts) * PART;
    return {row * n + first, row * row_bytes + first / 5, row < rows, (int)min((i64)PART, n - first)};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pack_ternary(const u8* __restrict__ values, i64 rows, i64 n, u8* __restrict__ packed, i32* bad) {
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const Piece piece = piece_of(rows, n);
    const u8* from = values + piece.value;
    const int count = piece.rows * piece.n, words = (u64)from % 4 ? 0 : count / 4;
    u32 wrong = 0;
#pragma unroll 8
    for (int i = lane; i < words; i += 32) {
        const u32 digits = __vadd4(((const u32*)from)[i], 0x01010101);
        wrong |= __vcmpgtu4(digits, 0x02020202);
        *(u32*)tile.at(4 * i) = digits;
    }
    for (int i = 4 * words + lane; i < count; i += 32) {
        const u8 digit = (u8)(from[i] + 1);
        wrong |= digit > 2;
        *tile.at(i) = digit;
    }
    if (wrong && bad) *bad = 1;
    store_digits(tile, piece.rows, piece.n, packed + piece.byte, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_ternary(const u8* __restrict__ packed, i64 rows, i64 n, u8* __restrict__ values, i32* bad) {
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const Piece piece = piece_of(rows, n);
    if (load_digits(packed + piece.byte, piece.rows, piece.n, tile, lane) && bad) *bad = 1;
    u8* to = values + piece.value;
    const int count = piece.rows * piece.n, words = (u64)to % 4 ? 0 : count / 4;
#pragma unroll 8
    for (int i = lane; i < words; i += 32) ((u32*)to)[i] = __vsub4(*(const u32*)tile.at(4 * i), 0x01010101);
    for (int i = 4 * words + lane; i < count; i += 32) to[i] = (u8)(*tile.at(i) - 1);
}

// gate: registers<=80
