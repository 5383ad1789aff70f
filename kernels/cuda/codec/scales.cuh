// Scales and offsets of groups as 16-bit words, bit for bit as kvlab/reference/codec.py makes them.
//
// Everything that decides a code uses the intrinsics that round to nearest and are never fused (__fadd_rn,
// ...), so no compiler option can change it.
//
// Macros: CODEC 0 affine, 1 symmetric, 2 hadamard, 3 ternary; CODE_BITS of a code, 2 of a ternary digit.
#pragma once
#include "codec/elements.cuh"

constexpr int AFFINE = 0, SYMMETRIC = 1, HADAMARD = 2, TERNARY = 3;

constexpr u32 TOP_CODE = (1 << CODE_BITS) - 1;
constexpr float TOP = TOP_CODE;
constexpr float HALF_LEVELS = CODE_BITS <= 4 ? 1 << (CODE_BITS - 1) : TOP * .5f;

constexpr u32 NAN_WORD = 0x7e00, WIDE = 0x8000;
constexpr float LARGEST = 8.507059173023462e37f;  // 2^126
constexpr float TERNARY_LEVEL = 1.2240064f;

struct Scale {
    float s, o;
    u32 scale_word, offset_word;
    bool known;  // whether the group can be represented
};

// ---- Words: float16 or, where its range is too small, `wide`: bfloat16

__device__ __forceinline__ bool is_wide(float size) {
    return size > 32752.f || (size < 6.103515625e-5f && size > 0.f);
}

__device__ __forceinline__ float nearest_word(float x, bool wide) {
    if (!wide) return __half2float(__float2half_rn(x));
    const u32 bits = __float_as_uint(x);
    return __uint_as_float(bits + 0x7fff + (bits >> 16 & 1) & 0xffff0000u);
}

// The least number of the type that is not below x.
__device__ __forceinline__ float word_above(float x, bool wide) {
    if (!wide) return __half2float(__float2half_ru(x));
    const u32 bits = __float_as_uint(x);
    return __uint_as_float((bits & 0xffff0000u) + (x > 0.f && bits << 16 ? 0x10000u : 0u));
}

__device__ __forceinline__ u32 word_bits(float x, bool wide) {
    return wide ? __float_as_uint(x) >> 16 : __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ float word_value(u32 word, bool wide) {
    return wide ? __uint_as_float(word << 16) : half_value(word);
}

// ---- Scales

__device__ __forceinline__ float rounded_scale(float step, bool wide, float reach, float reachable) {
    const float nearest = nearest_word(step, wide);
    return reach > __fmul_rn(reachable, nearest) ? word_above(step, wide) : nearest;
}

// The scale of a group from its lowest and highest value (AFFINE), from its largest magnitude, `high`
// (SYMMETRIC), or from that and its root mean square (HADAMARD, TERNARY). NaN stands for what holds a NaN.
__device__ __forceinline__ Scale find_scale(float low, float high, float root_mean_square) {
    Scale r;
    low = __fadd_rn(low, 0.f), high = __fadd_rn(high, 0.f);  // -0 becomes 0
    const float largest = CODEC == AFFINE ? higher(-low, high) : high;
    float step;
    bool wide;
    r.o = 0.f;
    if (CODEC == AFFINE) {
        wide = is_wide(largest);
        r.o = -word_above(-low, wide);
        const float reach = __fsub_rn(high, r.o);
        r.s = rounded_scale(__fdiv_rn(reach, TOP), wide, reach, TOP + .5f);
    } else if (CODEC == SYMMETRIC) {
        step = __fdiv_rn(high, HALF_LEVELS);
        wide = is_wide(step);
        r.s = rounded_scale(step, wide, high, (TOP + 1.f) * .5f);
        r.o = -__fmul_rn(r.s, TOP * .5f);
    } else {
        step = CODEC == TERNARY ? __fmul_rn(root_mean_square, TERNARY_LEVEL) : root_mean_square;
        wide = is_wide(step);
        r.s = nearest_word(step, wide);
    }
    r.known = largest <= LARGEST;
    r.scale_word = r.known ? word_bits(r.s, wide) | (wide ? WIDE : 0) : NAN_WORD;
    r.offset_word = r.known ? word_bits(r.o, wide) : NAN_WORD;
    return r;
}

// What stored words stand for; the offset word counts for AFFINE alone.
__device__ __forceinline__ Scale read_scale(u32 scale_word, u32 offset_word) {
    Scale r;
    const bool wide = scale_word & WIDE;
    r.s = word_value(scale_word & ~WIDE, wide);
    r.o = CODEC == AFFINE ? word_value(offset_word, wide) : -__fmul_rn(r.s, TOP * .5f);
    return r;
}

// A power of two near `largest`, by which squares neither overflow nor vanish, and its inverse.
__device__ __forceinline__ void powers_near(float largest, float& up, float& down) {
    const u32 exponent = max(__float_as_uint(largest) >> 23, 1u);
    up = __uint_as_float(exponent << 23), down = __uint_as_float((254 - exponent) << 23);
}

__device__ __forceinline__ float root_mean(float squares, int count, float up) {
    return __fmul_rn(__fsqrt_rn(__fdiv_rn(squares, (float)count)), up);
}
