// Rows of codes, a byte each (or 16 raw bits), into the words of a page: a warp a group of tiles.
//
// Rows lie in shared memory, ROW_BYTES apart, in an order in which neither eight slots in a row nor every
// eighth of them share banks. Needs HEAD_DIM, ROW_BYTES, THREADS, packed_codes.cuh, packed_places.cuh.
#pragma once

__device__ __forceinline__ int row_of(int slot) {
    return slot % 8 * 8 + slot / 8;
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
        return {__byte_perm(*(const u16*)(row + channel), 0, 0x4140), slot, slot};
    }
    const u8* row = rows + row_of(8 * u + low) * ROW_BYTES;  // a channel of two tokens, in the row behind
    const int channel = channels + g + 8 * (reg % 2), slot = 8 * u + low;
    if (BITS == 16)
        return {__byte_perm(((const u16*)row)[channel], ((const u16*)(row + ROW_BYTES))[channel], 0x5410),
                slot, slot + 8};
    return {__byte_perm(row[channel], row[ROW_BYTES + channel], 0x5410), slot, slot + 8};
}

// Stores the words of a side of a page; slots that are not named keep their bits.
template <Side SIDE, int BITS, bool FULL>
__device__ __forceinline__ void store_words(u32* to, const u8* rows, u64 named, int warp, int lane) {
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
