// Codes of a side of a page as operands of mma.m16n8k16: expansion of every width, and scales.
//
// A side is HEAD_DIM / 16 tiles of 16 x 16 in the order of A fragments: K as it is, V transposed; slot s is
// row (of K) or column (of V) s / 2 + 8 (s % 2). Fields<BITS>::TILES tiles share Fields<BITS>::WORDS 32-bit
// words a lane, word after word, 32 lanes each; every word holds fields of both halves of its pairs. Tiles
// left over at the end have a word each. Coded tiles are multiplied in float16 in every cache, because a code
// that is masked out of its word already is one: a subnormal number, which tensor cores take at full speed.
// What is left to do, the power of 2 and the constant between a code and its value, is the same for a row of
// tiles and is done once there.
#pragma once

#include "common/pairs.cuh"

constexpr int KEY_BLOCKS = 4;  // of channels of keys, in ladders with profiles

// Words that a lane has of a side of `tiles` tiles.
__host__ __device__ constexpr int words_of(int bits, int tiles) {
    return (bits * tiles + 3) / 4;
}

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
    static constexpr int WORDS = BITS * TILES / 4;                   // of a lane for these tiles
    // Bit of a code in the registers of rows g (even) and g + 8 (odd) of a tile, and how much higher it
    // stands in those of the second of two tiles, whose factors have to be smaller by as much.
    static constexpr int EVEN = BITS == 3, ODD = BITS == 2 ? 2 : BITS == 3 || BITS == 4 ? 4 : 0;
    static constexpr int SECOND = BITS == 2 ? 4 : 0;
};

// Groups of tiles that share words, in a side of `tiles` tiles; and the first word of one of them.
template <int BITS>
__host__ __device__ constexpr int groups_of(int tiles) {
    return tiles / Fields<BITS>::TILES + tiles % Fields<BITS>::TILES;
}

template <int BITS>
__host__ __device__ constexpr int word_of_group(int group, int tiles) {
    const int whole = tiles / Fields<BITS>::TILES;
    return group < whole ? group * Fields<BITS>::WORDS : whole * (Fields<BITS>::WORDS - 1) + group;
}

template <int BITS, int BIT>
__device__ __forceinline__ u32 field(u32 x) {
    return x & (((1u << BITS) - 1u) << BIT) * 0x00010001u;
}

// A fragments of the tiles that share `w`. Pair p = 4 tile + register.
template <int BITS>
__device__ __forceinline__ void expand(const u32* w, u32 (&a)[Fields<BITS>::TILES][4]) {
    constexpr int EVEN = Fields<BITS>::EVEN, ODD = Fields<BITS>::ODD, SECOND = Fields<BITS>::SECOND;
    if constexpr (BITS == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 x = w[0] >> (8 * i);
            a[0][2 * i] = field<2, EVEN>(x), a[0][2 * i + 1] = field<2, ODD>(x);
            a[1][2 * i] = field<2, EVEN + SECOND>(x), a[1][2 * i + 1] = field<2, ODD + SECOND>(x);
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

// The A fragment of a tile of 3 bits that has a word of its own: codes stand as those of 4 bits.
__device__ __forceinline__ void expand_alone(u32 w, u32 (&a)[4]) {
    a[0] = field<3, 1>(w << 1), a[1] = field<3, 4>(w), a[2] = field<3, 1>(w >> 7), a[3] = field<3, 4>(w >> 8);
}

// The tiles of group `group` of a side of TILES tiles: f(tile, fragment). `group` is a constant.
template <int BITS, int TILES, class F>
__device__ __forceinline__ void for_each_tile(const u8* codes, int lane, int group, F f) {
    constexpr int OF_GROUP = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS, WHOLE = TILES / OF_GROUP;
    const u32* const from = (const u32*)codes + word_of_group<BITS>(group, TILES) * 32 + lane;
    const int first = group < WHOLE ? group * OF_GROUP : WHOLE * (OF_GROUP - 1) + group;
    u32 w[WORDS], a[OF_GROUP][4];
#pragma unroll
    for (int v = 0; v < WORDS; ++v) w[v] = group < WHOLE || v == 0 ? from[v * 32] : 0;
    if (BITS == 3 && group >= WHOLE)
        expand_alone(w[0], a[0]);
    else
        expand<BITS>(w, a);
#pragma unroll
    for (int j = 0; j < OF_GROUP; ++j)
        if (group < WHOLE || j == 0) f(first + j, a[j]);
}

// Whether a channel of values changes its sign before values are rotated: kvlab/reference/pages.py
// `value_signs`.
__host__ __device__ constexpr bool turns_sign(u32 channel) {
    const u32 both = channel & channel >> 1 & 0x55u;
    return ((both ^ both >> 2 ^ both >> 4 ^ both >> 6) & 1u) != ((channel & 0x7cu) == 0x7cu);
}

// Scales of slots 2 g and 2 g + 1 of four pages as float16, of which a byte is the bits without sign and
// without the lower 7 of the mantissa: two pages at a time, slot 2 g, then slot 2 g + 1.
struct Scales {
    __half2 half2s[4];

    __device__ __forceinline__ float at(int i) const {  // slot 2 g + i % 2 of page i / 2
        const __half2 pair = half2s[i / 4 * 2 + i % 2];
        return i / 2 % 2 ? __high2float(pair) : __low2float(pair);
    }
};

// `bytes` are those of slots 2 g (lower byte) and 2 g + 1 of two pages each (halves).
__device__ __forceinline__ Scales scales_of(const u32 (&bytes)[2]) {
    Scales r;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 even = (bytes[i] & 0x00ff00ffu) << 7, odd = (bytes[i] >> 1) & 0x7f807f80u;
        r.half2s[2 * i] = *(const __half2*)&even;
        r.half2s[2 * i + 1] = *(const __half2*)&odd;
    }
    return r;
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
