// Packing of ternary values, one a byte, five to a byte, and unpacking.
//
// A warp takes some whole rows, about 2,000 values, through shared memory: values cross global memory in
// words of neighbouring lanes where the rows begin on a word, bytes one a lane. Rows longer than the tile,
// and one long row, are cut at multiples of 80 values, which are 16 bytes. Memory: 2 KiB and a word of shared
// memory a warp; no barrier but those among the lanes of a warp.
//
// `bad`, if it is not null, is set to 1 if a value is none of -1, 0, 1, or a byte is above 242.
//
// gate: registers<=64
#include "ternary_bytes.cuh"

constexpr int WARPS = 8;
constexpr int TERNARY_TILE = 2000;  // a multiple of 80

// The rows or the part of a row that this warp takes. With n values a row, a tile is `rows_a_tile` rows or,
// if that is 0, a part of a row, TERNARY_TILE values.
struct Tile {
    i64 value, byte;  // where it begins
    int rows, n;      // what it has
};

__device__ __forceinline__ bool tile_of(i64 rows, i64 n, int rows_a_tile, Tile& tile) {
    const i64 index = (i64)blockIdx.x * WARPS + threadIdx.x / 32, row_bytes = (n + 4) / 5;
    if (rows_a_tile) {
        const i64 row = index * rows_a_tile;
        if (row >= rows) return false;
        tile = {row * n, row * row_bytes, (int)min((i64)rows_a_tile, rows - row), (int)n};
    } else {
        const i64 parts = (n + TERNARY_TILE - 1) / TERNARY_TILE;
        if (index >= rows * parts) return false;
        const i64 row = quotient(index, parts), first = (index - row * parts) * TERNARY_TILE;
        tile = {row * n + first, row * row_bytes + first / 5, 1, (int)min((i64)TERNARY_TILE, n - first)};
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pack_ternary(const u8* __restrict__ values, i64 rows, i64 n, int rows_a_tile, u8* __restrict__ packed,
                 i32* bad) {
    __shared__ __align__(16) u32 tiles[WARPS][TERNARY_TILE / 4 + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile tile;
    if (!tile_of(rows, n, rows_a_tile, tile)) return;
    const u8* from = values + tile.value;
    const int count = tile.rows * tile.n, words = (u64)from % 4 == 0 ? count / 4 : 0;
    u32 wrong = 0;
#pragma unroll 4
    for (int i = lane; i < words; i += 32) {
        const u32 digits = digits_of_values(((const u32*)from)[i]);
        wrong |= wrong_digits(digits);
        tiles[warp][i] = digits;
    }
    for (int i = 4 * words + lane; i < count; i += 32) {
        const u32 digit = digits_of_values(from[i]) & 0xff;
        wrong |= wrong_digits(digit);
        ((u8*)tiles[warp])[i] = (u8)digit;
    }
    if (wrong && bad) *bad = 1;
    store_ternary_rows((const u8*)tiles[warp], tile.rows, tile.n, packed + tile.byte, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_ternary(const u8* __restrict__ packed, i64 rows, i64 n, int rows_a_tile, u8* __restrict__ values,
                   i32* bad) {
    __shared__ __align__(16) u32 tiles[WARPS][TERNARY_TILE / 4 + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile tile;
    if (!tile_of(rows, n, rows_a_tile, tile)) return;
    u8* to = values + tile.value;
    const int count = tile.rows * tile.n, words = (u64)to % 4 == 0 ? count / 4 : 0;
    const bool wrong = load_ternary_rows(packed + tile.byte, tile.rows, tile.n, (u8*)tiles[warp], lane);
    if (wrong && bad) *bad = 1;
#pragma unroll 4
    for (int i = lane; i < words; i += 32) ((u32*)to)[i] = values_of_digits(tiles[warp][i]);
    for (int i = 4 * words + lane; i < count; i += 32) {
        to[i] = (u8)values_of_digits(((const u8*)tiles[warp])[i]);
    }
}
