// Codes of a side of a page into its words: fields of the four registers of a tile in a word of a lane (two
// words at 8 bits), then those of the tiles that share words into these. Raw elements go into words as they
// are.
#pragma once

#include "pages/encode_tile.cuh"
#include "pages/places.cuh"

// Whether the tiles that share words have slots of one block of 16 alone.
template <Side SIDE, int BITS>
constexpr bool IN_ONE_BLOCK = SIDE == KEYS ? TILES % Fields<BITS>::TILES == 0 : Fields<BITS>::TILES == 1;

// Words of a group of tiles from the fields of each of them.
template <int BITS>
__device__ __forceinline__ void join_tiles(const u32* x, u32* word) {
    if constexpr (BITS == 2) word[0] = x[0] | x[1] << 8;
    if constexpr (BITS == 3) {
        word[0] = x[0] << 1 | (x[1] & 0x00070007u) << 13 | (x[3] >> 9 & 0x00010001u);
        word[1] = (x[1] >> 2 & 0x03fe03feu) | (x[2] & 0x003f003fu) << 10 | (x[3] >> 10 & 0x00010001u);
        word[2] = (x[2] >> 5 & 0x007e007eu) | (x[3] & 0x01ff01ffu) << 7 | (x[3] >> 11 & 0x00010001u);
    }
    if constexpr (BITS == 4) word[0] = x[0];
    if constexpr (BITS == 8) word[0] = x[0], word[1] = x[1];
}

// The fields of a tile that has the last code in slots of the mask and 0 in others.
template <Side SIDE, int BITS>
__device__ __forceinline__ void masked_fields(u64 mask, int tile, u32 lane, u32* x) {
    constexpr u32 MASK = (1u << BITS) - 1u;
    const int g = lane / 4, u = lane % 4, block = SIDE == KEYS ? tile / TILES : tile % 4;
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
        const int low = 2 * block + (SIDE == KEYS ? reg % 2 : reg / 2);
        const int slot = SIDE == KEYS ? 8 * g + low : 16 * u + low, other = SIDE == KEYS ? slot : slot + 8;
        const u32 fields = (mask >> slot & 1 ? MASK : 0) | (mask >> other & 1 ? MASK << 16 : 0);
        u32& word = x[BITS == 8 ? reg / 2 : 0];
        word = (BITS == 8 ? reg % 2 : reg) ? word | fields << BITS * (BITS == 8 ? 1 : reg) : fields;
    }
}

// Stores the words of a group of tiles; slots that are not named keep their bits. WHOLE: all are in the mask.
template <Side SIDE, int BITS, bool WHOLE>
__device__ __forceinline__ void store_words(u32* to, int group, const u32* word, u64 mask, u32 lane) {
    constexpr int OF_GROUP = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS;
    u32* const at = to + group * WORDS * 32 + lane;
    if constexpr (WHOLE) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) at[32 * w] = word[w];
    } else {
        u32 fields[BITS == 8 ? 2 : OF_GROUP], written[WORDS];
#pragma unroll
        for (int tile = 0; tile < OF_GROUP; ++tile)
            masked_fields<SIDE, BITS>(mask, group * OF_GROUP + tile, lane, fields + tile);
        join_tiles<BITS>(fields, written);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) at[32 * w] = (at[32 * w] & ~written[w]) | (word[w] & written[w]);
    }
}

// The words of the tiles of 16 vectors: two a tile at 8 bits, one for two tiles at 2 bits if there are such
// pairs. Values are turned, for their tiles have tokens as columns.
template <int BITS>
constexpr bool PAIRED = BITS == 2 && TILES % 2 == 0;
template <int BITS>
using TileWords = u32[PAIRED<BITS> ? TILES / 2 : TILES * (BITS == 8 ? 2 : 1)];

// Lower bytes of the halves of one word and, above them, of another; or the upper ones.
__device__ __forceinline__ u32 both_bytes(u32 low, u32 high, bool upper = false) {
    return __byte_perm(low, high, upper ? 0x7351 : 0x6240);
}

template <Side SIDE, int BITS>
__device__ __forceinline__ void words_of_tiles(const Vectors& x, TileWords<BITS>& word) {
    constexpr u32 FIELDS = (1u << 3 * BITS) + (1u << 2 * BITS) + (1u << BITS) + 1u;
    constexpr int SECOND = SIDE == KEYS ? 1 : 2, THIRD = SIDE == KEYS ? 2 : 1;
#pragma unroll
    for (int t = 0; t < TILES; t += PAIRED<BITS> ? 2 : 1) {
        const u32(&a)[4] = x[t];
        u32* const of_tile = word + (PAIRED<BITS> ? t / 2 : BITS == 8 ? 2 * t : t);
        if constexpr (BITS == 8) {
            of_tile[0] = a[0] + (a[SECOND] << 8), of_tile[1] = a[THIRD] + (a[3] << 8);
        } else if constexpr (BITS == 4) {
            of_tile[0] = both_bytes(a[0], a[THIRD]) + (both_bytes(a[SECOND], a[3]) << 4);
        } else if constexpr (PAIRED<BITS>) {
            const u32(&b)[4] = x[t + 1];
            const u32 upper = both_bytes(a[THIRD], b[THIRD]) + (both_bytes(a[3], b[3]) << 2);
            of_tile[0] = both_bytes(a[0], b[0]) + (both_bytes(a[SECOND], b[SECOND]) << 2) + (upper << 4);
        } else {
            const u32 upper = (((a[3] << BITS) + a[THIRD]) << BITS) + a[SECOND];
            of_tile[0] = (upper << BITS) + a[0] - LIFTED * 0x10001u * FIELDS;
        }
        if (SIDE == VALUES)
#pragma unroll
            for (int w = 0; w < (BITS == 8 ? 2 : 1); ++w) of_tile[w] = transposed(of_tile[w]);
    }
}

// Stores the words of block `block` of a side, if they have codes of this block alone.
template <Side SIDE, int BITS, bool WHOLE>
__device__ __forceinline__ void store_block_words(u32* to, const TileWords<BITS>& word, u64 mask, int block,
                                                  u32 lane) {
    constexpr int OF_GROUP = Fields<BITS>::TILES;
#pragma unroll
    for (int t = 0; t < TILES; t += OF_GROUP) {
        const int group = (SIDE == KEYS ? block * TILES + t : t * 4 + block) / OF_GROUP;
        if constexpr (PAIRED<BITS>) {
            store_words<SIDE, BITS, WHOLE>(to, group, word + t / 2, mask, lane);
        } else {
            u32 joined[Fields<BITS>::WORDS];
            join_tiles<BITS>(word + t * (BITS == 8 ? 2 : 1), joined);
            store_words<SIDE, BITS, WHOLE>(to, group, joined, mask, lane);
        }
    }
}

// Stores the words of groups `first`, `first` + `apart` ... of a side, which have codes of several blocks;
// `word_of(block, i)` is the i-th word of a block.
template <Side SIDE, int BITS, bool WHOLE, class WordOf>
__device__ __forceinline__ void store_gathered(u32* to, int first, int apart, const WordOf& word_of, u64 mask,
                                               u32 lane) {
    constexpr int OF_GROUP = Fields<BITS>::TILES;
#pragma unroll
    for (int group = first; group < HEAD_DIM / 4 / OF_GROUP; group += apart) {
        u32 of_tile[OF_GROUP], word[Fields<BITS>::WORDS];
        bool upper = false;  // of two channel tiles in a word
#pragma unroll
        for (int i = 0; i < OF_GROUP; ++i) {
            const int tile = group * OF_GROUP + i, block = SIDE == KEYS ? tile / TILES : tile % 4,
                      t = SIDE == KEYS ? tile % TILES : tile / 4;
            of_tile[i] = word_of(block, PAIRED<BITS> ? t / 2 : t);
            upper = t % 2;
        }
        if constexpr (PAIRED<BITS>)
            word[0] = both_bytes(of_tile[0], of_tile[1], upper);
        else
            join_tiles<BITS>(of_tile, word);
        store_words<SIDE, BITS, WHOLE>(to, group, word, mask, lane);
    }
}

// Block b of a page has the slots 8 i + 2 b, rows 0 to 7 of it, and 8 i + 2 b + 1, rows 8 to 15.
__device__ __forceinline__ u32 slot_of(u32 block, u32 row) {
    return row % 8 * 8 + 2 * block + row / 8;
}

// Stores the words of a block of raw rows.
template <Side SIDE, class Rows>
__device__ __forceinline__ void store_raw(u32* to, const u8* rows, u64 mask, int block, u32 lane) {
    const u32 g = lane / 4, u = lane % 4;
#pragma unroll 1
    for (u32 word = 0; word < HEAD_DIM / 4; ++word) {
        const u32 t = word / 4, reg = word % 4, tile = SIDE == KEYS ? block * TILES + t : t * 4 + block;
        const u32 row = SIDE == KEYS ? g + 8 * (reg % 2) : 2 * u + 8 * (reg / 2);
        const u32 other = SIDE == KEYS ? row : row + 1;
        const u32 channel = 16 * t + (SIDE == KEYS ? 2 * u + 8 * (reg / 2) : g + 8 * (reg % 2));
        const u32 pair = SIDE == KEYS ? *(const u32*)(rows + Rows::at(row, channel))
                                      : *(const u16*)(rows + Rows::at(row, channel)) |
                                            (u32) * (const u16*)(rows + Rows::at(other, channel)) << 16;
        const u32 live = (mask >> slot_of(block, row) & 1 ? 0xffffu : 0) |
                         (mask >> slot_of(block, other) & 1 ? 0xffff0000u : 0);
        u32* const at = to + (tile * 4 + reg) * 32 + lane;
        *at = live == ~0u ? pair : (*at & ~live) | (pair & live);
    }
}

// `call`, in which WHOLE is whether all slots are in the mask.
#define KVLAB_IF_WHOLE(mask, call)    \
    if (mask == ~0ull) {              \
        constexpr bool WHOLE = true;  \
        call;                         \
    } else {                          \
        constexpr bool WHOLE = false; \
        call;                         \
    }

// `call`, in which BITS is the width of codes.
#define KVLAB_FOR_WIDTH(bits, call) \
    switch (bits) {                 \
        case 2: {                   \
            constexpr int BITS = 2; \
            call;                   \
        } break;                    \
        case 3: {                   \
            constexpr int BITS = 3; \
            call;                   \
        } break;                    \
        case 4: {                   \
            constexpr int BITS = 4; \
            call;                   \
        } break;                    \
        case 8: {                   \
            constexpr int BITS = 8; \
            call;                   \
        } break;                    \
    }
