// Codes of a side of a page into its words: fields of the four registers of a tile in a word of a lane (two
// words at 8 bits), then those of the tiles that share words into these, by way of shared memory if these
// have slots of several warps.
//
// Raw elements go from their rows to words as they are. Rows of slots lie in shared memory, ROW_BYTES apart,
// in the order of the rows of tiles. Needs HEAD_DIM, ROW_BYTES, SIDE_THREADS, packed_codes.cuh,
// packed_places.cuh and cache_encode.cuh.
#pragma once

__device__ __forceinline__ int row_of(int slot) {
    return slot % 8 * 8 + slot / 8;
}

// Whether the tiles that share words have slots of one warp alone.
template <Side SIDE, int BITS>
constexpr bool IN_ONE_WARP = SIDE == KEYS ? TILES % Fields<BITS>::TILES == 0 : Fields<BITS>::TILES == 1;

__device__ __forceinline__ bool is_in_one_warp(Side side, int bits) {
    if (bits >= 4) return true;
    if (bits == 3) return side == KEYS ? IN_ONE_WARP<KEYS, 3> : IN_ONE_WARP<VALUES, 3>;
    return side == KEYS ? IN_ONE_WARP<KEYS, 2> : IN_ONE_WARP<VALUES, 2>;
}

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
__device__ __forceinline__ void named_fields(u64 named, int tile, int lane, u32* x) {
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
__device__ __forceinline__ void store_group(u32* to, int group, const u32* x, u64 named, int lane) {
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

// Stores the words of a warp's codes, those of tokens of block `block`. If their words have codes of other
// warps, too, they are put down in the warp's rows instead. Values are turned, for their tiles have tokens as
// columns.
template <Side SIDE, int BITS>
__device__ __forceinline__ void put_codes(u32* to, u8* rows, const Vectors& x, u64 named, int block,
                                          int lane) {
    constexpr int PER_TILE = BITS == 8 ? 2 : 1, OF_GROUP = Fields<BITS>::TILES;
    constexpr u32 FIELDS = (1u << 3 * BITS) + (1u << 2 * BITS) + (1u << BITS) + 1u;
    u32 word[TILES * PER_TILE];
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
    if constexpr (IN_ONE_WARP<SIDE, BITS>) {
        const auto group = [=](int t) {
            return (SIDE == KEYS ? block * TILES + t : t * 4 + block) / OF_GROUP;
        };
        if (named == ~0ull) {
#pragma unroll
            for (int t = 0; t < TILES; t += OF_GROUP)
                store_group<SIDE, BITS, true>(to, group(t), word + t * PER_TILE, named, lane);
        } else {
#pragma unroll
            for (int t = 0; t < TILES; t += OF_GROUP)
                store_group<SIDE, BITS, false>(to, group(t), word + t * PER_TILE, named, lane);
        }
    } else {
        __syncwarp();  // all lanes have read the rows
#pragma unroll
        for (int t = 0; t < TILES; ++t) ((u32*)rows)[t * 32 + lane] = word[t];
    }
}

// Stores the words of a side from what warps have put down.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_codes(u32* to, const u8* rows, u64 named) {
    constexpr int OF_GROUP = Fields<BITS>::TILES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int group = warp; group < HEAD_DIM / 4 / OF_GROUP; group += SIDE_THREADS / 32) {
        u32 x[OF_GROUP];
#pragma unroll
        for (int i = 0; i < OF_GROUP; ++i) {
            const int tile = group * OF_GROUP + i;
            const int block = SIDE == KEYS ? tile / TILES : tile % 4,
                      t = SIDE == KEYS ? tile % TILES : tile / 4;
            x[i] = ((const u32*)(rows + block * 16 * ROW_BYTES))[t * 32 + lane];
        }
        if (named == ~0ull)
            store_group<SIDE, BITS, true>(to, group, x, named, lane);
        else
            store_group<SIDE, BITS, false>(to, group, x, named, lane);
    }
}

// Stores the words of a side of raw rows, by a warp of SIDE_THREADS.
template <Side SIDE>
__device__ __forceinline__ void store_raw(u32* to, const u8* rows, u64 named, int warp, int lane) {
    const int g = lane / 4, u = lane % 4;
#pragma unroll 1
    for (int word = warp; word < HEAD_DIM; word += SIDE_THREADS / 32) {
        const int tile = word / 4, reg = word % 4, block = SIDE == KEYS ? tile / TILES : tile % 4;
        const int channels = 16 * (SIDE == KEYS ? tile % TILES : tile / 4);
        const int low = 2 * block + (SIDE == KEYS ? reg % 2 : reg / 2);
        const int slot = SIDE == KEYS ? 8 * g + low : 16 * u + low, other = SIDE == KEYS ? slot : slot + 8;
        const int channel = channels + (SIDE == KEYS ? 2 * u + 8 * (reg / 2) : g + 8 * (reg % 2));
        const u16* const row = (const u16*)(rows + row_of(slot) * ROW_BYTES) + channel;
        const u32 pair = SIDE == KEYS ? *(const u32*)row : row[0] | (u32)row[ROW_BYTES / 2] << 16;
        const u32 live = (named >> slot & 1 ? 0xffffu : 0) | (named >> other & 1 ? 0xffff0000u : 0);
        u32* const at = to + word * 32 + lane;
        *at = live == ~0u ? pair : (*at & ~live) | (pair & live);
    }
}
