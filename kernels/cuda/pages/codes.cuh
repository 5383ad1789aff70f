// Codes of packed pages as operands of mma.m16n8k16: expansion of every width, and scales.
//
// A code region is a sequence of 16 x 16 tiles in the order of A fragments. Fields<BITS>::TILES tiles share
// Fields<BITS>::WORDS 32-bit words a lane, word after word, 32 lanes each; every word holds fields of both
// halves of its pairs. Coded tiles are multiplied in float16 in every cache, because a code that is masked
// out of its word already is one: a subnormal number, which tensor cores take at full speed. What is left to
// do, the power of 2 and the constant between a code and its value, is the same for a row of tiles and is
// done once there.
#pragma once

#include "common/pairs.cuh"

// -(2^BITS - 1) as float16 in both halves: what has to be added to 2 code to make it the value of a code.
template <int BITS>
__host__ __device__ constexpr u32 zero_point_pair() {
    constexpr u32 exponent = BITS - 1, mantissa = (((1u << BITS) - 1u) << (11 - BITS)) & 0x3ffu;
    return (0x8000u | (exponent + 15u) << 10 | mantissa) * 0x00010001u;
}

// Two numbers of float16 divided by 2^BY.
template <int BY>
__device__ __forceinline__ u32 lowered(u32 x) {
    constexpr u32 factor = (15u - BY) << 10;
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(factor * 0x00010001u));
    return BY ? r : x;
}

// A code at bit b of 16 is read as the subnormal float16 code * 2^(b - 24): one logical operation a pair.
template <int BITS>
struct Fields {
    static constexpr int TILES = BITS == 2 ? 2 : BITS == 3 ? 4 : 1;  // that share words
    static constexpr int WORDS = BITS == 2 ? 1 : BITS * TILES / 4;   // of a lane for these tiles
    // Bit of a code in the registers of rows g (even) and rows g + 8 (odd) of a tile, and how much higher it
    // stands in those of columns 8 to 15, whose factors have to be smaller by as much.
    static constexpr int EVEN = BITS == 3, ODD = BITS == 2 ? 2 : BITS == 3 || BITS == 4 ? 4 : 0;
    static constexpr int RIGHT = BITS == 2 ? 4 : 0;
};

template <int BITS, int BIT>
__device__ __forceinline__ u32 field(u32 x) {
    return x & (((1u << BITS) - 1u) << BIT) * 0x00010001u;
}

// A fragments of the tiles that share `w`. Pair p = 4 tile + register.
template <int BITS>
__device__ __forceinline__ void expand(const u32* w, u32 (&a)[Fields<BITS>::TILES][4]) {
    constexpr int EVEN = Fields<BITS>::EVEN, ODD = Fields<BITS>::ODD, RIGHT = Fields<BITS>::RIGHT;
    if constexpr (BITS == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 x = w[0] >> (8 * i);
            a[i][0] = field<2, EVEN>(x), a[i][1] = field<2, ODD>(x);
            a[i][2] = field<2, EVEN + RIGHT>(x), a[i][3] = field<2, ODD + RIGHT>(x);
        }
    } else if constexpr (BITS == 3) {
#pragma unroll
        for (int p = 0; p < 15; ++p) {
            const int from = 1 + 3 * (p % 5), to = p % 2 ? ODD : EVEN;  // bits of the field
            const u32 x = from < to ? w[p / 5] << (to - from) : w[p / 5] >> (from - to);
            a[p / 4][p % 4] = p % 2 ? field<3, ODD>(x) : field<3, EVEN>(x);
        }
        a[3][3] = field<1, ODD>(w[0] << ODD) | field<1, ODD + 1>(w[1] << (ODD + 1)) |
                  field<1, ODD + 2>(w[2] << (ODD + 2));
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[0][2 * i] = field<4, EVEN>(w[0] >> (8 * i));
            a[0][2 * i + 1] = field<4, ODD>(w[0] >> (8 * i));
        }
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[0][2 * i] = field<8, EVEN>(w[i]);
            a[0][2 * i + 1] = __byte_perm(w[i], 0, 0x4341);  // the upper bytes of both halves
        }
    } else {
#pragma unroll
        for (int p = 0; p < 4; ++p) a[0][p] = w[p];
    }
}

// Tiles FIRST to FIRST + COUNT - 1 of a region, of which `codes` is the part from tile FIRST on: f(tile,
// fragment), the groups of tiles that share words in the order order(0), order(1), ...
template <int BITS, int FIRST, int COUNT, class Order, class F>
__device__ __forceinline__ void for_each_tile(const u8* codes, int lane, Order order, F f) {
    constexpr int TILES = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS;
#pragma unroll
    for (int i = 0; i < COUNT / TILES; ++i) {
        const int group = order(i);
        u32 w[WORDS], a[TILES][4];
#pragma unroll
        for (int v = 0; v < WORDS; ++v) w[v] = ((const u32*)codes)[(group * WORDS + v) * 32 + lane];
        expand<BITS>(w, a);
#pragma unroll
        for (int j = 0; j < TILES; ++j) f(FIRST + group * TILES + j, a[j]);
    }
}

// Scales of slots 8 g to 8 g + 7 as float16, of which a byte is the bits without sign and without the lower 7
// of the mantissa: two at a time, slots (0, 2), (1, 3), (4, 6), (5, 7). Those of slots from `count` on are 0.
struct Scales {
    __half2 pairs[4];

    __device__ __forceinline__ float at(int i) const {
        const __half2 pair = pairs[i / 4 * 2 + i % 2];
        return i / 2 % 2 ? __high2float(pair) : __low2float(pair);
    }
};

__device__ __forceinline__ Scales load_scales(const u8* scales, int g, int count = 64) {
    uint2 x = ((const uint2*)scales)[g];
    if (count < 64) {
        const int live = min(max(count - 8 * g, 0), 8);
        x.x &= live >= 4 ? ~0u : (1u << (8 * live)) - 1u;
        x.y &= live == 8 ? ~0u : live <= 4 ? 0u : (1u << (8 * live - 32)) - 1u;
    }
    Scales r;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 w = i ? x.y : x.x, even = (w & 0x00ff00ffu) << 7, odd = (w >> 1) & 0x7f807f80u;
        r.pairs[2 * i] = *(const __half2*)&even;
        r.pairs[2 * i + 1] = *(const __half2*)&odd;
    }
    return r;
}
