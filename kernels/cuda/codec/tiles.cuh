// Tiles of elements and their codes between global and shared memory, for kernels in which a lane has whole
// stretches of VALUES elements (codec/hadamard.cu): pieces of 16 bytes cross global memory side by side, and
// stand in shared memory where a lane finds its own.
//
// Macros: VALUES, CODE_BITS, DTYPE.
#pragma once
#include "common/async_copies.cuh"
#include "codec/codes.cuh"

constexpr int WARPS = 2, THREADS = 32 * WARPS;
constexpr int TILE_ELEMENTS = 32 * VALUES;
constexpr int PIECES = VALUES / PER_LOAD;  // 16-byte pieces of the elements of a lane
constexpr int PITCH = 16 * (PIECES + 1);
constexpr int WORDS = VALUES * CODE_BITS / 32;                     // of the codes of a lane
constexpr int STEP = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;  // words of an access to them

struct Memory {
    __align__(128) u8 elements[32 * PITCH];
    __align__(128) u8 stream[4 * 32 * WORDS];
};

// The tiles that a warp takes: `turns`, each of them as many behind the one before as the block has warps.
// Elements are counted from `start`, the first one of the block, so that 32 bits are enough.
struct Tiles {
    i64 start;
    int at, end, step;

    __device__ __forceinline__ Tiles(i64 elements, int turns, int warps)
        : start((i64)blockIdx.x * (turns * warps * TILE_ELEMENTS)),
          at(threadIdx.x / 32 * TILE_ELEMENTS),
          end((int)min(elements - start, (i64)(turns * warps * TILE_ELEMENTS))),
          step(warps * TILE_ELEMENTS) {}

    // Elements of this tile, 0 behind the last.
    __device__ __forceinline__ int here() const { return max(min(TILE_ELEMENTS, end - at), 0); }
    __device__ __forceinline__ Tiles next() const {
        Tiles r = *this;
        r.at += step;
        return r;
    }
};

// Calls move(shared, offset in global memory) for the pieces of this lane, of a whole tile without a question
// at each.
template <class Move>
__device__ __forceinline__ void each_element_piece(u8* elements, const Tiles& tile, int lane,
                                                   const Move& move) {
    constexpr int ROWS = 32 / PIECES;  // of lanes, that one step covers
    const int pieces = tile.here() / PER_LOAD;
    u8* own = elements + lane / PIECES * PITCH + lane % PIECES * 16;
    if (pieces == 32 * PIECES) {
#pragma unroll
        for (int q = 0; q < PIECES; ++q) move(own + q * (ROWS * PITCH), 512 * q);
    } else {
#pragma unroll 1
        for (int q = 0; 32 * q + lane < pieces; ++q) move(own + q * (ROWS * PITCH), 512 * q);
    }
}

__device__ __forceinline__ void fetch_elements(const void* x, const Tiles& tile, u8* elements, int lane) {
    const u8* from = (const u8*)x + tile.start * ELEMENT_BYTES + (tile.at * ELEMENT_BYTES + 16 * lane);
    each_element_piece(elements, tile, lane, [=](u8* piece, int at) { copy_async(piece, from + at); });
}

__device__ __forceinline__ void give_elements(u8* elements, void* out, const Tiles& tile, int lane) {
    u8* to = (u8*)out + tile.start * ELEMENT_BYTES + (tile.at * ELEMENT_BYTES + 16 * lane);
    __syncwarp();  // the elements of all lanes are there
    each_element_piece(elements, tile, lane,
                       [=](u8* piece, int at) { *(uint4*)(to + at) = *(const uint4*)piece; });
}

// Calls move(shared, offset in global memory) for the pieces of this lane of the stream of a tile: of 16
// bytes or, if the tile is not whole, single words, since groups are of 32 elements and more.
template <class Move16, class Move4>
__device__ __forceinline__ void each_stream_piece(u8* stream, const Tiles& tile, int lane,
                                                  const Move16& whole, const Move4& word) {
    constexpr int COUNT = 8 * WORDS;
    const int words = tile.here() / 32 * CODE_BITS;
    if (words == 4 * COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 32) {
            if (i + 32 <= COUNT || i + lane < COUNT)
                whole(stream + place<4>(16 * (i + lane)), 16 * lane + 16 * i);
        }
    } else {
#pragma unroll 1
        for (int i = lane; i < words; i += 32) word(stream + place<4>(4 * i), 4 * i);
    }
}

__device__ __forceinline__ void fetch_stream(const u8* packed, const Tiles& tile, u8* stream, int lane) {
    const u8* from = packed + tile.start / 8 * CODE_BITS + tile.at / 8 * CODE_BITS;
    each_stream_piece(
        stream, tile, lane, [=](u8* piece, int at) { copy_async(piece, from + at); },
        [=](u8* piece, int at) { *(u32*)piece = *(const u32*)(from + at); });
}

__device__ __forceinline__ void give_stream(u8* stream, u8* packed, const Tiles& tile, int lane) {
    u8* to = packed + tile.start / 8 * CODE_BITS + tile.at / 8 * CODE_BITS;
    __syncwarp();  // the codes of all lanes are there
    each_stream_piece(
        stream, tile, lane, [=](u8* piece, int at) { *(uint4*)(to + at) = *(const uint4*)piece; },
        [=](u8* piece, int at) { *(u32*)(to + at) = *(const u32*)piece; });
}
