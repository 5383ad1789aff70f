// Codes of packed pages as operands of integer products, for widths below 16 and INT8_MMA times up to 4 query
// rows.
//
// A code that is masked out of its word is a byte, so a register has four where float16 has two, and one
// mma.m16n8k32 replaces two of m16n8k16. What codes are multiplied by has 16 bits of fixed point, in two
// columns of the tile: of product j of INT8_MMA, 2h the upper byte, 2h + 1 the lower byte of row INT8_MMA h +
// j. So a lane has both of rows INT8_MMA u + j in its results. Accumulators start at the bits of a float
// whose ulp is 1, so they are floats when they are read. Sums stay within its mantissa up to head_dim 128.
//
// k of an operand stands for columns of two tiles: of keys, of neighbours in a page; of values, of the same
// tile in neighbouring pages. Bytes of a register are columns 2u, 2u + 8, 2u + 1, 2u + 9 of one of them.
#pragma once

#include "packed/quad_ring.cuh"

// TILES tiles are loaded at once. A masked code keeps its bit position in the byte, so it is multiplied by
// EVEN (row g) or ODD (row g + 8). At 2 bits the second of two tiles stands SECOND bits higher; of keys,
// whose tiles are added, the first is lifted as far. At 3 bits two fields 6 bits apart become the two bytes
// of a half if the first is shifted by 2 more bits. So codes of columns 0 to 7 are 4 times larger, and the
// query or probability of these columns is divided by 4.
template <int BITS>
struct Bytes {
    static constexpr int TILES = BITS == 3 ? 4 : 2, WORDS = words_of(BITS, TILES);
    static constexpr int EVEN = 1, ODD = BITS == 8 ? 1 : 1 << BITS, SECOND = Fields<BITS>::SECOND;
};

// Pair p of the 16 that three words of 3-bit codes hold, in both halves of a register from bit TO on.
template <int P, int TO>
__device__ __forceinline__ u32 pair_of_3(const u32* w) {
    if constexpr (P < 15) {
        constexpr int FROM = 1 + 3 * (P % 5);
        const u32 x = FROM < TO ? w[P / 5] << (TO - FROM) : w[P / 5] >> (FROM - TO);
        return field<3, TO>(x);
    } else {
        return field<1, TO>(w[0] << TO) | field<1, TO + 1>(w[1] << (TO + 1)) |
               field<1, TO + 2>(w[2] << (TO + 2));
    }
}

template <int TILE>
__device__ __forceinline__ uint2 rows_of_3(const u32* w) {
    return {pair_of_3<4 * TILE, 2>(w) | pair_of_3<4 * TILE + 2, 8>(w),
            pair_of_3<4 * TILE + 1, 5>(w) | pair_of_3<4 * TILE + 3, 11>(w)};
}

// Rows g and g + 8 of tile `i` of those whose words are `w`; at 3 bits they may have a word each (`alone`).
template <int BITS, bool LIFTED>
__device__ __forceinline__ uint2 rows_of_tile(const u32* w, int i, bool alone) {
    if constexpr (BITS == 2) {
        const u32 x = LIFTED && i == 0 ? w[0] << 4 : w[0];  // to the left, which is a multiplication
        return i || LIFTED ? uint2{x & 0x30303030u, x & 0xc0c0c0c0u}
                           : uint2{x & 0x03030303u, x & 0x0c0c0c0cu};
    } else if constexpr (BITS == 3) {
        if (alone)
            return {(w[i] & 0x00070007u) << 2 | (w[i] & 0x07000700u),
                    (w[i] & 0x00700070u) << 1 | (w[i] >> 1 & 0x38003800u)};
        return i == 0   ? rows_of_3<0>(w)
               : i == 1 ? rows_of_3<1>(w)
               : i == 2 ? rows_of_3<2>(w)
                        : rows_of_3<3>(w);
    } else if constexpr (BITS == 4) {
        return {w[i] & 0x0f0f0f0fu, w[i] & 0xf0f0f0f0u};
    } else {
        return {__byte_perm(w[2 * i], w[2 * i + 1], 0x6240), __byte_perm(w[2 * i], w[2 * i + 1], 0x7351)};
    }
}

// The words of tiles from `first` on that are loaded at once, of codes of OF tiles.
template <int BITS, int OF = TILES_D>
__device__ __forceinline__ void load_words(const u8* codes, int first, int lane,
                                           u32 (&w)[Bytes<BITS>::WORDS]) {
    const u32* const from = (const u32*)codes + words_of(BITS, first) * 32 + lane;
#pragma unroll
    for (int v = 0; v < Bytes<BITS>::WORDS; ++v)
        w[v] = words_of(BITS, first) + v < words_of(BITS, OF) ? from[v * 32] : 0;
}

#define KVLAB_MMA_BYTES(TYPE, c, a, b0, b1)                       \
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8." TYPE          \
        ".s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

constexpr u32 SIGNED_ZERO = 0x4b400000u, UNSIGNED_ZERO = 0x4b000000u;  // for sums below 2^22, below 2^23

// 256 upper + lower of accumulators that began at the bits of ZERO, a power of 2 or 1.5 times it: rounded
// once, if it takes more than 24 bits.
template <u32 ZERO>
__device__ __forceinline__ float joined(u32 upper, u32 lower) {
    constexpr float zero = ZERO == UNSIGNED_ZERO ? 8388608.f : 12582912.f;
    return fmaf(__uint_as_float(upper) - (zero + zero / 256), 256.f, __uint_as_float(lower));
}
