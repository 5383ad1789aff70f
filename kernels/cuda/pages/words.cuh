// Codes of a side of a page into its words: fields of the four registers of a tile in a word of a lane (two
// words at 8 bits), those of the tiles that share words together. Raw elements go into words as they are.
#pragma once

#include "pages/encode_tile.cuh"
#include "pages/code_layout.cuh"
#if IN_BLOCKS
#include "pages/encode_blocks.cuh"
#endif

// The row of the 16 of a page that has a slot.
__host__ __device__ constexpr int row_of(int slot) {
    return slot / 2 + 8 * (slot % 2);
}

// Slots of a page that are written, as bits of the pairs of a lane: its even slots and its odd ones, which
// are those of rows or columns 0 to 7 and 8 to 15.
struct Written {
    u32 even, odd;
};

template <Side SIDE>
__device__ __forceinline__ Written written_slots(u32 mask, u32 lane) {
    const u32 g = lane / 4, u = lane % 4;
    const auto pair = [&](u32 slot, u32 other) {
        return (mask >> slot & 1 ? 0xffffu : 0u) | (mask >> other & 1 ? 0xffff0000u : 0u);
    };
    if (SIDE == KEYS) return {pair(2 * g, 2 * g), pair(2 * g + 1, 2 * g + 1)};
    return {pair(4 * u, 4 * u + 2), pair(4 * u + 1, 4 * u + 3)};
}

// Bits of a word of SHARED tiles that have codes of even slots; others are of odd ones.
template <Side SIDE, int BITS, int SHARED>
__host__ __device__ constexpr u32 even_slots(int word) {
    if (BITS == 16) return (SIDE == KEYS ? word % 2 : word / 2) ? 0 : ~0u;
    if (BITS == 3 && SHARED == 4)
        return 0x10001u * (SIDE == KEYS ? word == 1 ? 0x1c70u : 0xe38eu
                           : word == 0  ? 0xe07eu
                           : word == 1  ? 0xfc0eu
                                        : 0x1f80u);
    if (SIDE == VALUES && BITS == 8) return word ? 0 : ~0u;
    return SIDE == VALUES || BITS == 8 ? 0x00ff00ffu : BITS == 2 ? 0x33333333u : 0x0f0f0f0fu;
}

// Stores a word; slots that are not written keep their bits. WHOLE: all are written.
template <bool WHOLE>
__device__ __forceinline__ void store_word(u32* to, u32 word, const Written& written, u32 even) {
    const u32 bits = (written.even & even) | (written.odd & ~even);
    *to = WHOLE ? word : (*to & ~bits) | (word & bits);
}

// Lower bytes of the halves of one word and, above them, of another.
__device__ __forceinline__ u32 both_bytes(u32 low, u32 high) {
    return __byte_perm(low, high, 0x6240);
}

// Words of SHARED tiles of 16 vectors. Values are turned, for their tiles have tokens as columns.
template <Side SIDE, int BITS, int SHARED>
__device__ __forceinline__ void words_of_tiles(const u32 (*x)[4], u32* word) {
    constexpr int SECOND = SIDE == KEYS ? 1 : 2, THIRD = SIDE == KEYS ? 2 : 1;
    constexpr int WORDS = words_of(BITS, SHARED);
    const auto fields = [&](const u32(&a)[4], int apart) {  // registers 0 and 1 below 2 and 3
        return both_bytes(a[0], a[THIRD]) + (both_bytes(a[SECOND], a[3]) << apart);
    };
    if constexpr (BITS == 8) {
        word[0] = x[0][0] + (x[0][SECOND] << 8), word[1] = x[0][THIRD] + (x[0][3] << 8);
    } else if constexpr (BITS == 2) {
        word[0] = fields(x[0], 2) + (SHARED == 2 ? fields(x[SHARED - 1], 2) << 4 : 0);
    } else if constexpr (SHARED == 1) {
        word[0] = fields(x[0], 4);
    } else {
        u32 y[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const u32 upper = (((x[t][3] << 3) + x[t][THIRD]) << 3) + x[t][SECOND];
            y[t] = (upper << 3) + x[t][0] - LIFTED * 0x10001u * ((1u << 9) + (1u << 6) + (1u << 3) + 1u);
        }
        word[0] = y[0] << 1 | (y[1] & 0x00070007u) << 13 | (y[3] >> 9 & 0x00010001u);
        word[1] = (y[1] >> 2 & 0x03fe03feu) | (y[2] & 0x003f003fu) << 10 | (y[3] >> 10 & 0x00010001u);
        word[2] = (y[2] >> 5 & 0x007e007eu) | (y[3] & 0x01ff01ffu) << 7 | (y[3] >> 11 & 0x00010001u);
    }
    if (SIDE == VALUES)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) word[w] = transposed(word[w]);
}

// Stores the words of SHARED tiles at `to`, and says where those behind them begin.
template <Side SIDE, int BITS, int SHARED, bool WHOLE>
__device__ __forceinline__ u32* store_tiles(u32* to, const u32 (*x)[4], const Written& written) {
    constexpr int WORDS = words_of(BITS, SHARED);
    u32 word[WORDS];
    words_of_tiles<SIDE, BITS, SHARED>(x, word);
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
        store_word<WHOLE>(to + 32 * w, word[w], written, even_slots<SIDE, BITS, SHARED>(w));
    return to + 32 * WORDS;
}

// Stores the codes of a side of a page; `mask`: slots that are written.
template <Side SIDE, int BITS, bool WHOLE>
__device__ __forceinline__ void store_codes(u32* to, const Vectors& x, u32 mask, u32 lane) {
    constexpr int SHARED = Fields<BITS>::TILES, ALONE = TILES / SHARED * SHARED;
    const Written written = written_slots<SIDE>(mask, lane);
    to += lane;
#pragma unroll
    for (int t = 0; t < ALONE; t += SHARED) to = store_tiles<SIDE, BITS, SHARED, WHOLE>(to, x + t, written);
#pragma unroll
    for (int t = ALONE; t < TILES; ++t) to = store_tiles<SIDE, BITS, 1, WHOLE>(to, x + t, written);
}

#if IN_BLOCKS
// Stores the tiles of a block from `block` on of a profile, whose words begin at `to`. Two tiles of 2 bits
// share a word; where a block is one tile, that of a block is stored with the one before.
template <int BITS, bool WHOLE>
__device__ __forceinline__ void store_block(u32* to, const Vectors& x, u32 profile, int block,
                                            const Written& written) {
    if constexpr (BITS == 2 && BLOCK_TILES == 1) {
        if ((block - run_of_block(profile, block).first) % 2) return;
        if (block + 1 < KEY_BLOCKS && width_of_block(profile, block + 1) == 2)
            store_tiles<KEYS, 2, 2, WHOLE>(to, x + block, written);
        else
            store_tiles<KEYS, 2, 1, WHOLE>(to, x + block, written);
    } else {
        constexpr int SHARED = Fields<BITS>::TILES;
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; t += SHARED)
            to = store_tiles<KEYS, BITS, SHARED, WHOLE>(to, x + BLOCK_TILES * block + t, written);
    }
}

// Stores the codes of the keys of a page; `mask`: slots that are written.
template <bool WHOLE>
__device__ __forceinline__ void store_profile(u32* to, const Vectors& x, u32 profile, u32 mask, u32 lane) {
    const Written written = written_slots<KEYS>(mask, lane);
    to += lane;
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; ++block) {
        u32* const words = to + 32 * (widths_before(profile, block) * BLOCK_TILES / 4);
        KVLAB_FOR_WIDTH(width_of_block(profile, block),
                        (store_block<BITS, WHOLE>(words, x, profile, block, written)));
    }
}
#endif

// Stores a side of a page of raw rows.
template <Side SIDE, class Rows, bool WHOLE>
__device__ __forceinline__ void store_raw(u32* to, const u8* rows, u32 mask, u32 lane) {
    const u32 g = lane / 4, u = lane % 4;
    const Written written = written_slots<SIDE>(mask, lane);
#pragma unroll 1
    for (u32 t = 0; t < TILES; ++t)
#pragma unroll
        for (u32 reg = 0; reg < 4; ++reg) {
            const u32 row = SIDE == KEYS ? g + 8 * (reg % 2) : 2 * u + 8 * (reg / 2);
            const u32 channel = 16 * t + (SIDE == KEYS ? 2 * u + 8 * (reg / 2) : g + 8 * (reg % 2));
            const u32 pair = SIDE == KEYS ? *(const u32*)(rows + Rows::at(row, channel))
                                          : *(const u16*)(rows + Rows::at(row, channel)) |
                                                (u32) * (const u16*)(rows + Rows::at(row + 1, channel)) << 16;
            store_word<WHOLE>(to + (4 * t + reg) * 32 + lane, pair, written, even_slots<SIDE, 16, 1>(reg));
        }
}
