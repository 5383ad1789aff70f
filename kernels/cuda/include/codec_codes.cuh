// Codecs: from values to codes and from codes to values, bit for bit as kvlab/reference/codec.py.
#pragma once
#include "codec_words.cuh"

constexpr float MAGIC = 12582912.f;  // 3 2^22: adding it rounds to an integer, which then is the low byte

// The code of x as the low byte: (x - o) / s rounded to nearest even, from 0 to top. Exact, and slow.
__device__ __forceinline__ u32 divided_code(float x, const Scale& scale, float top) {
    const float code = __fdiv_rn(__fsub_rn(x, scale.o), scale.s);
    return __float_as_uint(__fadd_rn(fminf(fmaxf(code, 0.f), top), MAGIC));
}

// The same for N elements, mostly without a division: the quotient lies between the products with a number
// just below and one just above 1 / s. If both round to the same integer, so does the quotient; else it is
// divided.
template <int N>
__device__ __forceinline__ void spaced_codes(const float* x, const Scale& scale, float top, u32 (&codes)[N]) {
    const bool plain = scale.s > 7.888609e-31f && scale.s < 1.2676506e30f;  // 2^-100, 2^100
    const float inverse = plain ? __fdiv_rn(1.f, scale.s) : 0.f;
    const float below = __fmul_rn(inverse, 1.f - 4.76837158e-7f),
                above = __fmul_rn(inverse, 1.f + 4.76837158e-7f);
    u32 doubt = !plain;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float d = __fsub_rn(x[i], scale.o), code = __fmaf_rn(d, below, MAGIC);
        doubt |= __float_as_uint(code) ^ __float_as_uint(__fmaf_rn(d, above, MAGIC));
        codes[i] = __float_as_uint(fminf(fmaxf(code, MAGIC), __fadd_rn(MAGIC, top)));
    }
    if (doubt) {
#pragma unroll
        for (int i = 0; i < N; ++i) codes[i] = divided_code(x[i], scale, top);
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
