// Codecs: from values to codes and from codes to values, bit for bit as kvlab/reference/codec.py.
#pragma once
#include "codec_words.cuh"

constexpr float MAGIC = 12582912.f;  // 3 2^22: adding it rounds to an integer, which then is the low byte
constexpr u32 MAGIC_BITS = 0x4b400000u;

// What codes of equally spaced values are made with: scale and offset, and values, are multiplied by
// `factor`, a power of two that keeps inverse and remainders from overflow and underflow. `inverse` is about
// 1 / s, or 0 for a group without a scale, which makes all its codes 0.
struct Spacing {
    float s, o, factor, inverse;
};

__device__ __forceinline__ float rough_inverse(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ Spacing spacing_of(float s, float o, bool known) {
    const float factor = s > 1e20f ? 1.f / (1ll << 60) : s < 1e-20f && s > 0.f ? (float)(1ll << 60) : 1.f;
    s = __fmul_rn(s, factor);
    return {s, __fmul_rn(o, factor), factor, known && s > 0.f ? rough_inverse(s) : 0.f};
}

// Codes above MAGIC_BITS: (x - o) / s rounded to nearest, from 0 to top, rounded to nearest even. The
// quotient is that of `divided`, since scales have at most 11 significant bits. NaN gives 0.
template <int N>
__device__ __forceinline__ void spaced_codes(const float* x, const Spacing& spacing, float top,
                                             u32 (&codes)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float d = __fmaf_rn(x[i], spacing.factor, -spacing.o), first = __fmul_rn(d, spacing.inverse);
        const float code = __fmaf_rn(__fmaf_rn(-first, spacing.s, d), spacing.inverse, first);
        codes[i] = __float_as_uint(__fadd_rn(fminf(fmaxf(code, 0.f), top), MAGIC));
    }
}

// How many of 2^(bits-1) - 1 thresholds, in units of the scale, lie below |y|; then up or down by the sign.
__device__ __forceinline__ u32 codebook_code(float y, float s, const float* thresholds, int half) {
    u32 above = 0;
    for (u32 step = half / 2; step; step /= 2) {
        if (fabsf(y) > __fmul_rn(thresholds[above + step - 1], s)) above += step;
    }
    return y < 0.f ? half - 1 - above : half + above;
}

// The digit of x: 0, 1, 2 for -1, 0, 1.
__device__ __forceinline__ u32 ternary_digit(float x, float s) {
    const float border = __fmul_rn(s, .5f);
    return 1u + (x > border) - (x < -border);
}

// The positive levels of a codebook, ascending.
struct Codebook {
    float levels[128];
};

__device__ __forceinline__ float threshold(const Codebook& book, int i) {
    return __fmul_rn(__fadd_rn(book.levels[i], book.levels[i + 1]), .5f);
}

__device__ __forceinline__ float level(const Codebook& book, int code, int half) {
    return code < half ? -book.levels[half - 1 - code] : book.levels[code - half];
}

// 1 / sqrt(2^k), correctly rounded.
__host__ __device__ constexpr float root_of_power(int k) {
    float r = k % 2 ? 0.70710678118654752440f : 1.f;
    for (int i = 0; i < k / 2; ++i) r *= .5f;
    return r;
}
