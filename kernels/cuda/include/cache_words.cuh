// Rows of codes, a byte each (or 16 raw bits), into the words of a page: a warp a group of tiles.
//
// Codes of 16 channels have 16 bytes of their row in an order of their own (code_byte): channels 2 i, 2 i +
// 8, 2 i + 1, 2 i + 9 make a word, which is what a lane of a fragment takes of a key; of a value it takes two
// bytes side by side, channels i and i + 8. So the words of a whole page are sums of words read.
//
// Rows lie in shared memory, ROW_BYTES apart, in an order in which neither eight slots in a row nor every
// eighth of them share banks. Needs HEAD_DIM, ROW_BYTES, THREADS, packed_codes.cuh, packed_places.cuh.
#pragma once

__device__ __forceinline__ int row_of(int slot) {
    return slot % 8 * 8 + slot / 8;
}

// The byte of a channel in a row of codes; code_byte(a + b) is the sum of both where a and b share no bits.
__host__ __device__ constexpr int code_byte(int channel) {
    return channel / 16 * 16 + channel % 8 / 2 * 4 + channel % 2 * 2 + channel % 16 / 8;
}

// Where a pair of a group of tiles comes from, as in packed_codes.cuh: both codes have a half of the result.
struct Pair {
    u32 codes;
    int slot, other;  // of the lower half, of the upper half
};

template <Side SIDE, int BITS>
__device__ __forceinline__ Pair pair_of(const u8* rows, int group, int pair, int lane) {
    constexpr int TILES = Fields<BITS>::TILES, PER_BLOCK = HEAD_DIM / 16;
    const int tile = group * TILES + pair / 4, reg = pair % 4, g = lane / 4, u = 2 * (lane % 4);
    const int block = SIDE == KEYS ? tile / PER_BLOCK : tile % 4;
    const int channels = 16 * (SIDE == KEYS ? tile % PER_BLOCK : tile / 4);
    const int low = 2 * block + (SIDE == KEYS ? reg % 2 : reg / 2);
    if (SIDE == KEYS) {  // two channels of a token
        const u8* row = rows + row_of(8 * g + low) * ROW_BYTES;
        const int channel = channels + u + 8 * (reg / 2), slot = 8 * g + low;
        if (BITS == 16) return {*(const u32*)(row + 2 * channel), slot, slot};
        return {*(const u32*)(row + channels + 2 * u) >> 8 * (reg / 2) & 0x00ff00ffu, slot, slot};
    }
    const u8* row = rows + row_of(8 * u + low) * ROW_BYTES;  // a channel of two tokens, in the row behind
    const int channel = channels + g + 8 * (reg % 2), slot = 8 * u + low, at = channels + 2 * g + reg % 2;
    if (BITS == 16)
        return {__byte_perm(((const u16*)row)[channel], ((const u16*)(row + ROW_BYTES))[channel], 0x5410),
                slot, slot + 8};
    return {__byte_perm(row[at], row[ROW_BYTES + at], 0x5410), slot, slot + 8};
}

// The codes of a tile that a lane has: those of registers 0 and 2 in the lower and upper bytes of both halves
// of the first word, registers 1 and 3 in the second.
template <Side SIDE>
__device__ __forceinline__ uint2 codes_of(const u8* rows, int tile, int lane) {
    constexpr int PER_BLOCK = HEAD_DIM / 16;
    const int g = lane / 4, u = lane % 4;
    if (SIDE == KEYS) {
        const u8* row = rows + (tile / PER_BLOCK * 16 + g) * ROW_BYTES + tile % PER_BLOCK * 16 + 4 * u;
        return {*(const u32*)row, *(const u32*)(row + 8 * ROW_BYTES)};
    }
    const u8* row = rows + (tile % 4 * 16 + 2 * u) * ROW_BYTES + tile / 4 * 16 + 2 * g;
    const auto two = [&](int of) {  // tokens, one behind the other
        return __byte_perm(*(const u16*)(row + of), *(const u16*)(row + of + ROW_BYTES), 0x5410);
    };
    const u32 a = two(0), b = two(8 * ROW_BYTES);
    return {__byte_perm(a, b, 0x6240), __byte_perm(a, b, 0x7351)};
}

// Stores the words of a side of a whole page of codes.
template <Side SIDE, int BITS>
__device__ __forceinline__ void store_whole(u32* to, const u8* rows, int warp, int lane) {
    constexpr int TILES = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS, GROUPS = HEAD_DIM / 4 / TILES;
    constexpr int WARPS = THREADS / 32;
#pragma unroll
    for (int i = 0; i < (GROUPS + WARPS - 1) / WARPS; ++i) {
        const int group = warp + i * WARPS;
        if (GROUPS % WARPS && group >= GROUPS) break;
        u32 x[TILES], word[WORDS];  // of each tile, pairs 0 and 1 in lower bytes, 2 and 3 in upper ones
        uint2 codes;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            codes = codes_of<SIDE>(rows, group * TILES + tile, lane);
            x[tile] = codes.x + (codes.y << BITS % 8);
        }
        if constexpr (BITS == 2)
            word[0] = __byte_perm(x[0], x[1], 0x6240) + (__byte_perm(x[0], x[1], 0x7351) << 4);
        if constexpr (BITS == 3) {
            const auto low = [&](int tile) { return x[tile] & 0x003f003fu; };
            const auto high = [&](int tile) { return __byte_perm(x[tile], 0, 0x4341); };
            const u32 last = high(3) >> 3;  // of pair 15, a bit a word
            word[0] = (low(0) << 1) + (high(0) << 7) + ((x[1] & 0x00070007u) << 13) + (last & 0x00010001u);
            word[1] = (x[1] >> 2 & 0x000e000eu) + (high(1) << 4) + (low(2) << 10) + (last >> 1 & 0x00010001u);
            word[2] =
                (high(2) << 1) + (low(3) << 7) + ((high(3) & 0x00070007u) << 13) + (last >> 2 & 0x00010001u);
        }
        if constexpr (BITS == 4) word[0] = x[0];
        if constexpr (BITS == 8) {
            word[0] = __byte_perm(codes.x, codes.y, 0x6240);
            word[1] = __byte_perm(codes.x, codes.y, 0x7351);
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) to[(group * WORDS + w) * 32 + lane] = word[w];
    }
}

// Stores the words of a side of a page; slots that are not named keep their bits.
template <Side SIDE, int BITS, bool FULL>
__device__ __forceinline__ void store_words(u32* to, const u8* rows, u64 named, int warp, int lane) {
    if constexpr (FULL && BITS < 16) return store_whole<SIDE, BITS>(to, rows, warp, lane);
    constexpr int TILES = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS, PER_WORD = 16 / BITS;
    constexpr u32 MASK = BITS == 16 ? 0xffffu : (1u << BITS) - 1u;
    // Fields of a pair that are written, at the bottom of both halves.
    const auto live = [&](const Pair& p, u32 field) {
        return FULL ? field * 0x10001u
                    : (named >> p.slot & 1 ? field : 0) | (named >> p.other & 1 ? field << 16 : 0);
    };
#pragma unroll(FULL ? 4 : 1)
    for (int group = warp; group < HEAD_DIM / 4 / TILES; group += THREADS / 32) {
        u32 word[WORDS] = {}, written[WORDS] = {};
#pragma unroll
        for (int pair = 0; pair < WORDS * PER_WORD; ++pair) {
            const int w = pair / PER_WORD, bit = pair % PER_WORD * BITS + (BITS == 3);
            const Pair p = pair_of<SIDE, BITS>(rows, group, pair, lane);
            const u32 fields = live(p, MASK);
            word[w] |= (FULL ? p.codes : p.codes & fields) << bit;  // rows of other slots hold anything
            if (!FULL) written[w] |= fields << bit;
        }
        if constexpr (BITS == 3) {
            const Pair p = pair_of<SIDE, BITS>(rows, group, 15, lane);
            const u32 fields = live(p, 1);
#pragma unroll
            for (int w = 0; w < 3; ++w) {
                word[w] |= p.codes >> w & fields;
                if (!FULL) written[w] |= fields;
            }
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            u32* at = to + (group * WORDS + w) * 32 + lane;
            *at = FULL ? word[w] : (*at & ~written[w]) | (word[w] & written[w]);
        }
    }
}
