// Packing of codes of CODE_BITS bits, one a byte, to the interchange stream, and unpacking.
//
// Flat kernels: rows that end on byte borders follow each other in the stream without gaps, so they are one
// run of codes. A warp takes a tile of 1,024 codes: two 16-byte accesses a lane on the side of the codes,
// and on the side of the stream one access of CODE_BITS words a lane, or CODE_BITS accesses of one word where
// CODE_BITS is no power of two. Memory: 1 KiB of shared memory a warp; no barrier but those among the lanes
// of a warp.
//
// Row kernels: any row length, any alignment. A thread takes 8 codes of a row and their CODE_BITS bytes, one
// access a byte.
//
// `bad`, if it is not null, is set to 1 if a code is 2^CODE_BITS or more.
//
// Macros: CODE_BITS.
#include "codec/bit_stream.cuh"

constexpr int WARPS = 8;
constexpr u32 TOO_LARGE = ~low_bits(CODE_BITS, 8);

__device__ __forceinline__ void report(bool wrong, i32* bad) {
    if (wrong && bad) *bad = 1;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pack_flat(const u8* __restrict__ codes, i64 count, u8* __restrict__ packed, i32* bad) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 first = ((i64)blockIdx.x * WARPS + warp) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    uint4* tile = (uint4*)tiles[warp];
    u32 large = 0;
    if (here == TILE) {
        uint4 part[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) part[i] = ((const uint4*)(codes + first))[32 * i + lane];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            large |= (part[i].x | part[i].y | part[i].z | part[i].w) & TOO_LARGE;
            tile[32 * i + lane] = part[i];
        }
    } else {
        for (int i = lane; i < TILE; i += 32) {
            const u8 code = i < here ? codes[first + i] : 0;
            large |= code & TOO_LARGE;
            tiles[warp][i] = code;
        }
    }
    report(large != 0, bad);
    store_tile<CODE_BITS>(tiles[warp], here, packed + first / 8 * CODE_BITS, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_flat(const u8* __restrict__ packed, i64 count, u8* __restrict__ codes) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 first = ((i64)blockIdx.x * WARPS + warp) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    load_tile<CODE_BITS>(packed + first / 8 * CODE_BITS, here, tiles[warp], lane);
    if (here == TILE) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ((uint4*)(codes + first))[32 * i + lane] = ((const uint4*)tiles[warp])[32 * i + lane];
        }
    } else {
        for (int i = lane; i < here; i += 32) codes[first + i] = tiles[warp][i];
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
    report((large & 0xff) != 0, bad);
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
