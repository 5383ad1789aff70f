// Words of a side of a page by four warps, each with the slots of a block: stored from registers, or by way
// of shared memory if they have codes of several blocks.
//
// Rows of slots lie in shared memory in the order of the rows of tiles.
#pragma once

#include "pages/words.cuh"

using Rows = RawRows<false>;
constexpr int SLOTS = 64, SIDE_THREADS = 128;
static_assert(SIDE_THREADS == SLOTS / 16 * 32, "a side of a page at once");

__device__ __forceinline__ int row_of(int slot) {
    return slot % 8 * 8 + slot / 8;
}

__device__ __forceinline__ bool is_in_one_block(Side side, int bits) {
    if (bits >= 4) return true;
    if (bits == 3) return side == KEYS ? IN_ONE_BLOCK<KEYS, 3> : IN_ONE_BLOCK<VALUES, 3>;
    return side == KEYS ? IN_ONE_BLOCK<KEYS, 2> : IN_ONE_BLOCK<VALUES, 2>;
}

// Stores the words of a warp's codes, or puts them down in the warp's rows.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_or_stage(u32* to, u8* rows, const Vectors& x, u64 mask, int block,
                                               u32 lane) {
    TileWords<BITS> word;
    words_of_tiles<SIDE, BITS>(x, word);
    if constexpr (IN_ONE_BLOCK<SIDE, BITS>) {
        KVLAB_IF_WHOLE(mask, (store_block_words<SIDE, BITS, WHOLE>(to, word, mask, block, lane)));
    } else {
        __syncwarp();  // all lanes have read the rows
#pragma unroll
        for (int i = 0; i < (int)(sizeof(word) / sizeof(u32)); ++i) ((u32*)rows)[i * 32 + lane] = word[i];
    }
}

// Stores the words of a side from what warps have staged.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_codes(u32* to, const u8* rows, u64 mask) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto word_of = [&](int block, int i) {
        return ((const u32*)(rows + block * 16 * Rows::BYTES))[i * 32 + lane];
    };
    KVLAB_IF_WHOLE(mask,
                   (store_gathered<SIDE, BITS, WHOLE>(to, warp, SIDE_THREADS / 32, word_of, mask, lane)));
}
