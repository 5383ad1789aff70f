// Codes of a side of a page into its words: fields of the four registers of a tile in a word of a lane (two
// words at 8 bits), then those of the tiles that share words into these.
//
// Needs HEAD_DIM, packed_codes.cuh, packed_places.cuh and cache_encode.cuh.
#pragma once

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

// The fields of a tile that has the last code in named slots and 0 in others.
template <Side SIDE, int BITS>
__device__ __forceinline__ void named_fields(u64 named, int tile, u32 lane, u32* x) {
    constexpr u32 MASK = (1u << BITS) - 1u;
    const int g = lane / 4, u = lane % 4, block = SIDE == KEYS ? tile / TILES : tile % 4;
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
        const int low = 2 * block + (SIDE == KEYS ? reg % 2 : reg / 2);
        const int slot = SIDE == KEYS ? 8 * g + low : 16 * u + low, other = SIDE == KEYS ? slot : slot + 8;
        const u32 fields = (named >> slot & 1 ? MASK : 0) | (named >> other & 1 ? MASK << 16 : 0);
        u32& word = x[BITS == 8 ? reg / 2 : 0];
        word = (BITS == 8 ? reg % 2 : reg) ? word | fields << BITS * (BITS == 8 ? 1 : reg) : fields;
    }
}

// Stores the words of a group of tiles; slots that are not named keep their bits. WHOLE: all are named.
template <Side SIDE, int BITS, bool WHOLE>
__device__ __forceinline__ void store_group(u32* to, int group, const u32* x, u64 named, u32 lane) {
    constexpr int OF_GROUP = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS;
    constexpr int PARTS = BITS == 8 ? 2 : OF_GROUP;
    u32 word[WORDS];
    join_tiles<BITS>(x, word);
    u32* const at = to + group * WORDS * 32 + lane;
    if constexpr (!WHOLE) {
        u32 fields[PARTS], written[WORDS];
#pragma unroll
        for (int tile = 0; tile < OF_GROUP; ++tile)
            named_fields<SIDE, BITS>(named, group * OF_GROUP + tile, lane, fields + tile);
        join_tiles<BITS>(fields, written);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) word[w] = (at[32 * w] & ~written[w]) | (word[w] & written[w]);
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w) at[32 * w] = word[w];
}

// The words of the tiles of 16 vectors, two a tile at 8 bits. Values are turned, for their tiles have tokens
// as columns.
template <int BITS>
using TileWords = u32[TILES * (BITS == 8 ? 2 : 1)];

template <Side SIDE, int BITS>
__device__ __forceinline__ void words_of_tiles(const Vectors& x, TileWords<BITS>& word) {
    constexpr int PER_TILE = BITS == 8 ? 2 : 1;
    constexpr u32 FIELDS = (1u << 3 * BITS) + (1u << 2 * BITS) + (1u << BITS) + 1u;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const u32 second = x[t][SIDE == KEYS ? 1 : 2], third = x[t][SIDE == KEYS ? 2 : 1];
        u32* const of_tile = word + t * PER_TILE;
        if constexpr (BITS == 8) {
            of_tile[0] = x[t][0] + (second << 8), of_tile[1] = third + (x[t][3] << 8);
        } else {
            const u32 upper = (((x[t][3] << BITS) + third) << BITS) + second;
            of_tile[0] = (upper << BITS) + x[t][0] - LIFTED * 0x10001u * FIELDS;
        }
        if (SIDE == VALUES)
#pragma unroll
            for (int w = 0; w < PER_TILE; ++w) of_tile[w] = transposed(of_tile[w]);
    }
}

// Stores the words of block `block` of a side, if they have codes of this block alone.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_block_words(u32* to, const TileWords<BITS>& word, u64 named, int block,
                                                  u32 lane) {
    constexpr int PER_TILE = BITS == 8 ? 2 : 1, OF_GROUP = Fields<BITS>::TILES;
    const auto group = [=](int t) { return (SIDE == KEYS ? block * TILES + t : t * 4 + block) / OF_GROUP; };
    if (named == ~0ull) {
#pragma unroll
        for (int t = 0; t < TILES; t += OF_GROUP)
            store_group<SIDE, BITS, true>(to, group(t), word + t * PER_TILE, named, lane);
    } else {
#pragma unroll
        for (int t = 0; t < TILES; t += OF_GROUP)
            store_group<SIDE, BITS, false>(to, group(t), word + t * PER_TILE, named, lane);
    }
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
