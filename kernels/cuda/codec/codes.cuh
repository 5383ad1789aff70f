// Codecs: from values to codes and from codes to values, bit for bit as kvlab/reference/codec.py.
#pragma once
#include "codec/words.cuh"

constexpr float MAGIC = 12582912.f;  // 3 2^22: adding it rounds to an integer,
                                     // which then is the low byte
constexpr u32 MAGIC_BITS = 0x4b400000u;

// What codes of equally spaced values are made with: scale and offset, and values, are multiplied by
// `factor`, a power of two that keeps inverse and remainders from overflow and underflow. `inverse` is about
// 1 / s, or 0 for a group without a scale, which makes all its codes 0.
struct __align__(16) Spacing {
    float s, o, factor, inverse;
};

__device__ __forceinline__ float rough_inverse(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ Spacing spacing_of(float s, float o, bool known) {
    // Scales of float16 elements need no factor.
    const float factor = DTYPE == FLOAT16        ? 1.f
                         : s > 1e20f             ? 1.f / (1ll << 60)
                         : s < 1e-20f && s > 0.f ? (float)(1ll << 60)
                                                 : 1.f;
    s = __fmul_rn(s, factor);
    return {s, __fmul_rn(o, factor), factor, known && s > 0.f ? rough_inverse(s) : 0.f};
}

// The code of x above MAGIC_BITS: (x - o) / s, rounded to nearest and then to nearest even; it may exceed the
// highest code by one. The quotient is that of `divided`, since scales have at most 11 significant bits.
__device__ __forceinline__ u32 spaced_code(float x, const Spacing& spacing) {
    const float d = DTYPE == FLOAT16 ? __fsub_rn(x, spacing.o) : __fmaf_rn(x, spacing.factor, -spacing.o);
    const float first = __fmul_rn(d, spacing.inverse);
    const float code = __fmaf_rn(__fmaf_rn(-first, spacing.s, d), spacing.inverse, first);
    return __float_as_uint(__fadd_rn(code, MAGIC));
}

// The highest codes of two groups, in halves; 0 for a group without a scale, of which codes may be NaN.
__device__ __forceinline__ u32 highest_codes(const Spacing& low, const Spacing& high, u32 top) {
    return (low.inverse > 0.f ? top : 0) | (high.inverse > 0.f ? top << 16 : 0);
}

// Two codes that stand in the low halves of words, none above `highest`.
__device__ __forceinline__ u32 pair_of_codes(u32 low, u32 high, u32 highest) {
    return __vminu2(__byte_perm(low, high, 0x5410), highest);
}

// Whether the codes of one load are packed in registers: then they are whole bytes that a store can write.
template <int BITS>
constexpr bool PACKS_LOADS = CODEC != TERNARY && is_power_of_2(BITS) && BITS * PER_LOAD >= 8;

// How the codes of a load are packed in registers, WIDTH bits each: words of 2 IN_HALF codes. Code i of a
// word and code i + IN_HALF come together, as halves; so shifts and additions fill both halves of a word at a
// time.
template <int WIDTH>
struct Packing {
    static constexpr int IN_HALF = 16 / WIDTH < PER_LOAD / 2 ? 16 / WIDTH : PER_LOAD / 2;
    static constexpr int WORDS = PER_LOAD / (2 * IN_HALF),
                         USED = IN_HALF * WIDTH;  // bits of a half

    // The first code of pair i of a load, i < PER_LOAD / 2; its word; its bit there.
    static __device__ constexpr int first(int i) { return i / IN_HALF * 2 * IN_HALF + i % IN_HALF; }
    static __device__ constexpr int word(int i) { return i / IN_HALF; }
    static __device__ constexpr int bit(int i) { return i % IN_HALF * WIDTH; }

    // Closes the gap between the halves of the words, and writes them.
    static __device__ __forceinline__ void store(const u32 (&words)[WORDS], u8* to) {
        if constexpr (USED == 16) {
            copy_words<WORDS>(words, (u32*)to);
        } else {
            const u32 word = (words[0] & low_bits(USED, 32)) | words[0] >> (16 - USED);
            if (USED == 8) *(u16*)to = (u16)word;
            if (USED == 4) *to = (u8)word;
        }
    }
};

// Byte k of a word as a number: the low byte of 2^23 and it.
__device__ __forceinline__ float byte_number(u32 word, int k) {
    return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + k)), 8388608.f);
}

// The value of the code in byte k of a word. The product is exact: it has at most 19 significant bits.
__device__ __forceinline__ float spaced_value(u32 codes, int k, const Scale& scale) {
    return __fmaf_rn(byte_number(codes, k), scale.s, scale.o);
}

// The digit of x: 0, 1, 2 for -1, 0, 1.
__device__ __forceinline__ u32 ternary_digit(float x, float s) {
    const float border = __fmul_rn(s, .5f);
    return 1u + (x > border) - (x < -border);
}

// The bits of the largest 16-bit element that is not above `border`, which is not negative.
__device__ __forceinline__ u32 border_bits(float border) {
    return DTYPE == BFLOAT16 ? __float_as_uint(border) >> 16 : __half_as_ushort(__float2half_rd(border));
}

// The digits of two 16-bit elements, in halves: magnitudes compare as their bits do. The halves of `borders`
// are minus those bits.
__device__ __forceinline__ u32 digits_of_pair(u32 raw, u32 borders) {
    const u32 beyond = __viaddmin_s16x2_relu(raw & 0x7fff7fffu, borders, 0x00010001u);
    const u32 negative = select_bytes(raw, 0, 0xbb99) & beyond;
    return 0x00010001u + beyond - 2 * negative;
}
