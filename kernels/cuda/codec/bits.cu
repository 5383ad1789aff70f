// Packing of codes of CODE_BITS bits, one a byte, to the interchange stream, and unpacking.
//
// Flat kernels: rows that end on byte borders follow each other in the stream without gaps, so they are one
// run of codes. A warp takes a tile of 1,024 codes: two 16-byte accesses a lane on the side of the codes,
// CODE_BITS accesses of one word on the side of the stream. Memory: 1,152 bytes of shared memory a warp; no
// barrier but those among the lanes of a warp.
//
// Row kernels: any row length, any alignment. A thread takes 8 codes of a row and their CODE_BITS bytes, one
// access a byte.
//
// `bad`, if it is not null, is set to 1 if a code is 2^CODE_BITS or more.
//
// Macros: CODE_BITS.
#include "codec/bit_stream.cuh"

constexpr int WARPS = 8, PIECES = TILE / 16 / 32;  // of 16 codes, a lane
constexpr u32 TOO_LARGE = ~low_bits(CODE_BITS, 8);

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pack_flat(const u8* __restrict__ codes, i64 count, u8* __restrict__ packed, i32* bad) {
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    u32 large = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int at = 16 * (32 * i + lane);
        if (at + 16 <= here) {
            const uint4 piece = *(const uint4*)(codes + first + at);
            large |= (piece.x | piece.y | piece.z | piece.w) & TOO_LARGE;
            *(uint4*)tile.at(at) = piece;
        } else {
            for (int k = at; k < at + 16; ++k) {
                const u8 code = k < here ? codes[first + k] : 0;
                large |= code & TOO_LARGE & 0xff;
                *tile.at(k) = code;
            }
        }
    }
    if (large && bad) *bad = 1;
    store_tile<CODE_BITS>(tile, here, packed + first / 8 * CODE_BITS, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_flat(const u8* __restrict__ packed, i64 count, u8* __restrict__ codes) {
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    load_tile<CODE_BITS>(packed + first / 8 * CODE_BITS, here, tile, lane);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int at = 16 * (32 * i + lane);
        if (at + 16 <= here) {
            *(uint4*)(codes + first + at) = *(const uint4*)tile.at(at);
        } else {
            for (int k = at; k < here; ++k) codes[first + k] = *tile.at(k);
        }
    }
}

// Where a thread works: the 8 codes from `code` on, of which the row has `codes`, and `bytes`
// bytes from `byte` on.
struct Part {
    i64 code, byte;
    int codes, bytes;
};

__device__ __forceinline__ bool part_of(i64 rows, i64 n, Part& part) {
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x, parts = (n + 7) / 8;
    if (index >= rows * parts) return false;
    const i64 row = quotient(index, parts), in_row = index - row * parts;
    part.codes = (int)min((i64)8, n - 8 * in_row);
    part.bytes = (part.codes * CODE_BITS + 7) / 8;
    part.code = row * n + 8 * in_row;
    part.byte = row * ((n * CODE_BITS + 7) / 8) + CODE_BITS * in_row;
    return true;
}

extern "C" __global__ void __launch_bounds__(256)
    pack_rows(const u8* __restrict__ codes, i64 rows, i64 n, u8* __restrict__ packed, i32* bad) {
    Part part;
    if (!part_of(rows, n, part)) return;
    u64 stream = 0;
    u32 large = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i >= part.codes) break;
        const u32 code = codes[part.code + i];
        large |= code & TOO_LARGE;
        stream |= (u64)code << (CODE_BITS * i);
    }
    if ((large & 0xff) && bad) *bad = 1;
#pragma unroll
    for (int i = 0; i < CODE_BITS; ++i) {
        if (i < part.bytes) packed[part.byte + i] = (u8)(stream >> (8 * i));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    unpack_rows(const u8* __restrict__ packed, i64 rows, i64 n, u8* __restrict__ codes) {
    Part part;
    if (!part_of(rows, n, part)) return;
    u64 stream = 0;
#pragma unroll
    for (int i = 0; i < CODE_BITS; ++i) {
        if (i < part.bytes) stream |= (u64)packed[part.byte + i] << (8 * i);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < part.codes) codes[part.code + i] = (u8)(stream >> (CODE_BITS * i) & low_bits(CODE_BITS, 32));
    }
}

// gate: CODE_BITS=1,2,3,4,5,6,8 registers<=64
