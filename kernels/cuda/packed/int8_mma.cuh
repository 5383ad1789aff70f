// Codes of packed pages as operands of integer products, for widths below 16 and INT8_MMA times up to 4 query
// rows.
//
// A code that is masked out of its word is a byte, so a register has four where float16 has two, and one
// mma.m16n8k32 replaces two of m16n8k16. What codes are multiplied by has 16 bits of fixed point, in two
// columns of the tile: of product j of INT8_MMA, 2h the upper byte, 2h + 1 the lower byte of row INT8_MMA h +
// j. So a lane has both of rows INT8_MMA u + j in its results. Accumulators start at the bits of a float
// whose ulp is 1, so they are floats when they are read. Sums stay within its mantissa up to head_dim 128.
//
// k of an operand stands for columns of two tiles i and i + 1. At 2 bits, whose word holds both, bytes are
// columns 2u of i and of i + 1, 2u + 1 of i and of i + 1, and in the second register those 8 higher; at other
// widths 2u, 2u + 8, 2u + 1, 2u + 9 of i, and in the second register of i + 1.
#pragma once

#include "packed/state.cuh"

// TWOS fragments of two tiles share WORDS words of a lane. A masked code keeps its bit position in the byte,
// so it is multiplied by EVEN (row g) or ODD (row g + 8). At 3 bits two fields 6 bits apart become the two
// bytes of a half if the first is shifted by 2 more bits. So codes of columns 0 to 7 are 4 times larger, and
// the query or probability of these columns is divided by 4.
template <int BITS>
struct Bytes {
    static constexpr int TWOS = BITS == 3 ? 2 : 1, WORDS = BITS * TWOS / 2;
    static constexpr int EVEN = BITS == 2 ? 16 : 1, ODD = BITS == 8 ? 1 : EVEN << BITS;
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
__device__ __forceinline__ void expand_3(const u32* w, u32* a) {
    a[0] = pair_of_3<4 * TILE, 2>(w) | pair_of_3<4 * TILE + 2, 8>(w);
    a[1] = pair_of_3<4 * TILE + 1, 5>(w) | pair_of_3<4 * TILE + 3, 11>(w);
}

// A fragments of two tiles each.
template <int BITS>
__device__ __forceinline__ void expand_bytes(const u32* w, u32 (&a)[Bytes<BITS>::TWOS][4]) {
    if constexpr (BITS == 3) {
        expand_3<0>(w, a[0]), expand_3<1>(w, a[0] + 2), expand_3<2>(w, a[1]), expand_3<3>(w, a[1] + 2);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32* const r = a[0] + 2 * i;
            if constexpr (BITS == 2) {
                const u32 x = i ? w[0] : w[0] << 4;  // to the left, which is a multiplication
                r[0] = x & 0x30303030u, r[1] = x & 0xc0c0c0c0u;
            } else if constexpr (BITS == 4) {
                r[0] = w[i] & 0x0f0f0f0fu, r[1] = w[i] & 0xf0f0f0f0u;
            } else {
                r[0] = __byte_perm(w[2 * i], w[2 * i + 1], 0x6240);
                r[1] = __byte_perm(w[2 * i], w[2 * i + 1], 0x7351);
            }
        }
    }
}

// f(number, fragment) for each two tiles of a region; those that range words in the order order(0), ...
template <int BITS, class Order, class F>
__device__ __forceinline__ void for_each_two(const u8* codes, int lane, Order order, F f) {
    constexpr int WORDS = Bytes<BITS>::WORDS, TWOS = Bytes<BITS>::TWOS;
#pragma unroll
    for (int i = 0; i < 2 * TILES_D / TWOS; ++i) {
        u32 w[WORDS], a[TWOS][4];
#pragma unroll
        for (int v = 0; v < WORDS; ++v) w[v] = ((const u32*)codes)[(order(i) * WORDS + v) * 32 + lane];
        expand_bytes<BITS>(w, a);
#pragma unroll
        for (int j = 0; j < TWOS; ++j) f(order(i) * TWOS + j, a[j]);
    }
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
