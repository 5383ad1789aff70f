// Packing of ternary values, one a byte, five to a byte, and unpacking.
//
// A warp takes some whole rows, about 2,000 values, through shared memory: values cross global memory in
// words of neighbouring lanes, and so do bytes, where they begin on a word. Rows longer than the tile, and
// one long row, are cut at multiples of 80 values, which are 16 bytes. Memory: 2.4 KiB of shared memory a
// warp; no barrier but those among the lanes of a warp.
//
// `bad`, if it is not null, is set to 1 if a value is none of -1, 0, 1, or a byte is above 242.
//
// gate: registers<=64
#include "ternary_bytes.cuh"

constexpr int WARPS = 8;
constexpr int TERNARY_TILE = 2000;                // values, a multiple of 80
constexpr int TILE_WORDS = TERNARY_TILE / 4 + 4;  // a word to spare, and a multiple of 4
constexpr int BYTE_WORDS = 500 / 4 + 1;           // of 500 bytes, which a tile of many short rows may have

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

// Values to digits in shared memory, WORDS words an access; returns how many of `count` these are.
template <int WORDS>
__device__ __forceinline__ int take_words(const u8* from, u32* digits, int count, int lane, u32& wrong) {
    const int pieces = count / (4 * WORDS);
#pragma unroll 4
    for (int i = lane; i < pieces; i += 32) {
        u32 words[WORDS];
        copy_words<WORDS>((const u32*)from + WORDS * i, words);
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            words[k] = digits_of_values(words[k]), wrong |= wrong_digits(words[k]);
        copy_words<WORDS>(words, digits + WORDS * i);
    }
    return pieces * 4 * WORDS;
}

// The reverse.
template <int WORDS>
__device__ __forceinline__ int give_words(const u32* digits, u8* to, int count, int lane) {
    const int pieces = count / (4 * WORDS);
#pragma unroll 4
    for (int i = lane; i < pieces; i += 32) {
        u32 words[WORDS];
        copy_words<WORDS>(digits + WORDS * i, words);
#pragma unroll
        for (int k = 0; k < WORDS; ++k) words[k] = values_of_digits(words[k]);
        copy_words<WORDS>(words, (u32*)to + WORDS * i);
    }
    return pieces * 4 * WORDS;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pack_ternary(const u8* __restrict__ values, i64 rows, i64 n, int rows_a_tile, u8* __restrict__ packed,
                 i32* bad) {
    __shared__ __align__(16) u32 tiles[WARPS][TILE_WORDS];
    __shared__ u32 bytes[WARPS][BYTE_WORDS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile tile;
    if (!tile_of(rows, n, rows_a_tile, tile)) return;
    const u8* from = values + tile.value;
    const int count = tile.rows * tile.n, aligned = (u64)from % 16;
    u32 wrong = 0;
    const int done = aligned == 0       ? take_words<4>(from, tiles[warp], count, lane, wrong)
                     : aligned % 4 == 0 ? take_words<1>(from, tiles[warp], count, lane, wrong)
                                        : 0;
    for (int i = done + lane; i < count; i += 32) {
        const u32 digit = digits_of_values(from[i]) & 0xff;
        wrong |= wrong_digits(digit);
        ((u8*)tiles[warp])[i] = (u8)digit;
    }
    if (wrong && bad) *bad = 1;
    u8 *digits = (u8*)tiles[warp], *memory = (u8*)bytes[warp];
    if (tile.n % 4) {
        TernaryTile<false>{digits, memory, tile.rows, tile.n}.store(packed + tile.byte, lane);
    } else {
        TernaryTile<true>{digits, memory, tile.rows, tile.n}.store(packed + tile.byte, lane);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_ternary(const u8* __restrict__ packed, i64 rows, i64 n, int rows_a_tile, u8* __restrict__ values,
                   i32* bad) {
    __shared__ __align__(16) u32 tiles[WARPS][TILE_WORDS];
    __shared__ u32 bytes[WARPS][BYTE_WORDS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile tile;
    if (!tile_of(rows, n, rows_a_tile, tile)) return;
    u8* to = values + tile.value;
    const int count = tile.rows * tile.n, aligned = (u64)to % 16;
    u8 *digits = (u8*)tiles[warp], *memory = (u8*)bytes[warp];
    const bool wrong =
        tile.n % 4 ? TernaryTile<false>{digits, memory, tile.rows, tile.n}.load(packed + tile.byte, lane)
                   : TernaryTile<true>{digits, memory, tile.rows, tile.n}.load(packed + tile.byte, lane);
    if (wrong && bad) *bad = 1;
    const int done = aligned == 0       ? give_words<4>(tiles[warp], to, count, lane)
                     : aligned % 4 == 0 ? give_words<1>(tiles[warp], to, count, lane)
                                        : 0;
    for (int i = done + lane; i < count; i += 32) to[i] = (u8)values_of_digits(((const u8*)tiles[warp])[i]);
}
