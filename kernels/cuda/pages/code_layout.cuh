// Where the codes of a token lie in a page, and single codes read and written there.
//
// Several warps may write slots of one page at the same time: codes below 8 bits share words and are changed
// by exclusive or with what differs.
#pragma once

#include "pages/profiles.cuh"

enum Side { KEYS, VALUES };

// Bytes of the codes of a side of a page, and of its scales.
__host__ __device__ constexpr int code_bytes(int bits) {
    return 128 * words_of(bits, HEAD_DIM / 16);
}
__host__ __device__ constexpr int scale_bytes(int bits) {
    return bits != 16 ? 16 : 0;
}
// The same of keys, whose bits may be a profile.
__host__ __device__ constexpr int key_code_bytes(int bits) {
    return IN_BLOCKS ? 128 * words_of_profile(bits) : code_bytes(bits);
}

// Of a channel of a slot: its tile, its lane and register there, and which half of the register.
struct Element {
    u32 tile, lane, reg, half;
};

__device__ __forceinline__ Element element_at(Side side, u32 slot, u32 channel) {
    const u32 token = slot / 2 + 8 * (slot % 2);
    const u32 row = side == KEYS ? token : channel % 16, column = side == KEYS ? channel % 16 : token;
    return {channel / 16, 4 * (row % 8) + column % 8 / 2, row / 8 + 2 * (column / 8), column % 2};
}

// Of a code below 8 bits: its word, its lowest bit there, and whether bit j of it lies in word j instead.
struct Field {
    u32 word, shift;
    bool spread;
};

template <int BITS>
__device__ __forceinline__ Field field_of(const Element& e) {
    constexpr u32 TOGETHER = Fields<BITS>::TILES, TILES = HEAD_DIM / 16;
    u32 word = e.tile / TOGETHER, bit = 4 * e.reg;
    bool spread = false;
    if (BITS == 2) bit = 8 * (e.reg / 2) + 4 * (e.tile % 2) + 2 * (e.reg % 2);
    if (BITS == 3 && (TILES % 4 == 0 || e.tile < TILES / 4 * 4)) {
        const u32 pair = 4 * (e.tile % 4) + e.reg;
        spread = pair == 15;
        word = e.tile / 4 * 3 + (spread ? 0 : pair / 5), bit = spread ? 0 : pair % 5 * 3 + 1;
    } else if (BITS == 3) {
        word = TILES / 4 * 3 + e.tile % 4;
    }
    return {32 * word + e.lane, bit + 16 * e.half, spread};
}

// Byte of a code of 8 bits, or the first one of 16.
template <int BITS>
__device__ __forceinline__ u32 byte_of(const Element& e) {
    if (BITS == 16) return 4 * (32 * (4 * e.tile + e.reg) + e.lane) + 2 * e.half;
    return 4 * (32 * (2 * e.tile + e.reg / 2) + e.lane) + e.reg % 2 + 2 * e.half;
}

template <int BITS>
__device__ __forceinline__ u32 read_code(const u8* codes, const Element& e) {
    if constexpr (BITS == 16) return *(const u16*)(codes + byte_of<16>(e));
    if constexpr (BITS == 8) return codes[byte_of<8>(e)];
    if constexpr (BITS < 8) {
        const Field f = field_of<BITS>(e);
        const u32* word = (const u32*)codes + f.word;
        u32 code = word[0] >> f.shift;
        if (BITS == 3 && f.spread)
            code = (code & 1u) | (word[32] >> f.shift & 1u) << 1 | (word[64] >> f.shift & 1u) << 2;
        return code & ((1u << BITS) - 1u);
    }
}

template <int BITS>
__device__ __forceinline__ void write_code(u8* codes, const Element& e, u32 code) {
    if constexpr (BITS == 16) *(u16*)(codes + byte_of<16>(e)) = (u16)code;
    if constexpr (BITS == 8) codes[byte_of<8>(e)] = (u8)code;
    if constexpr (BITS < 8) {
        const Field f = field_of<BITS>(e);
        u32* word = (u32*)codes + f.word;
        const u32 change = read_code<BITS>(codes, e) ^ code;
        if (BITS == 3 && f.spread) {
#pragma unroll
            for (int j = 0; j < 3; ++j) atomicXor(word + 32 * j, (change >> j & 1u) << f.shift);
        } else {
            atomicXor(word, change << f.shift);
        }
    }
}
