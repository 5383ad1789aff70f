// Codes of packed pages as operands of integer products, for up to 4 query rows and widths 2, 4 and 8.
//
// A code that is masked out of its word is a byte, so a register has four where float16 has two, and one
// mma.m16n8k32 replaces two of m16n8k16. What codes are multiplied by has 16 bits of fixed point, in two
// columns of the tile: 2h the upper byte, 2h + 1 the lower byte of row h. So a lane has both of row u in its
// results, and half as many scores as with float16. Accumulators start at the bits of a float whose ulp is
// 1, so they are floats when they are read. Sums stay within its mantissa up to head_dim 128.
//
// k of an operand stands for columns of two tiles i and i + 1. At 2 bits, whose word holds both, bytes are
// columns 2u of i and of i + 1, 2u + 1 of i and of i + 1, and in the second register those 8 higher; at 4 and
// 8 bits 2u, 2u + 8, 2u + 1, 2u + 9 of i, and in the second register of i + 1. Needs packed_state.cuh.
#pragma once

// How many words of a lane hold two tiles, and what codes of rows g (even) and g + 8 (odd) are multiplied by
// for their place in a byte.
template <int BITS>
struct Bytes {
    static constexpr int WORDS = BITS / 2;
    static constexpr int EVEN = BITS == 2 ? 16 : 1, ODD = BITS == 8 ? 1 : EVEN << BITS;
};

// A fragment of two tiles.
template <int BITS>
__device__ __forceinline__ void expand_bytes(const u32* w, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (BITS == 2) {
            const u32 x = i ? w[0] : w[0] << 4;  // to the left, which is a multiplication
            a[2 * i] = x & 0x30303030u, a[2 * i + 1] = x & 0xc0c0c0c0u;
        } else if constexpr (BITS == 4) {
            a[2 * i] = w[i] & 0x0f0f0f0fu, a[2 * i + 1] = w[i] & 0xf0f0f0f0u;
        } else {
            a[2 * i] = __byte_perm(w[2 * i], w[2 * i + 1], 0x6240);
            a[2 * i + 1] = __byte_perm(w[2 * i], w[2 * i + 1], 0x7351);
        }
    }
}

// f(number, fragment) for each two tiles of a region, in the order order(0), order(1), ...
template <int BITS, class Order, class F>
__device__ __forceinline__ void for_each_two(const u8* codes, int lane, Order order, F f) {
    constexpr int WORDS = Bytes<BITS>::WORDS;
#pragma unroll
    for (int i = 0; i < 2 * TILES_D; ++i) {
        u32 w[WORDS], a[4];
#pragma unroll
        for (int v = 0; v < WORDS; ++v) w[v] = ((const u32*)codes)[(order(i) * WORDS + v) * 32 + lane];
        expand_bytes<BITS>(w, a);
        f(order(i), a);
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
