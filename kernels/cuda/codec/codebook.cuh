// The Hadamard codec: its levels, and the borders between codes, bit for bit as kvlab/reference/codebooks.py
// and codec.py. A code is the number of borders at or below a value in units. Borders are integers, so a
// value is rounded down to an integer, its cell, and every cell has one code.
#pragma once
#include "codec/codes.cuh"

// The positive levels of a codebook, ascending.
struct Codebook {
    float levels[128];
};

// The borders of a codebook, 2^bits - 1, ascending.
struct Borders {
    i32 at[256];
};

__device__ __forceinline__ float level(const Codebook& book, int code, int half) {
    return code < half ? -book.levels[half - 1 - code] : book.levels[code - half];
}

// Units of one scale.
__host__ __device__ constexpr float units_of(int bits) {
    return bits == 1   ? 1.f
           : bits == 2 ? 1.01875f
           : bits == 3 ? 20.f
           : bits == 4 ? 50.f
           : bits == 5 ? 106.f
           : bits == 6 ? 223.f
                       : 1006.f;
}

// 1 / sqrt(2^k), correctly rounded.
__host__ __device__ constexpr float root_of_power(int k) {
    float r = k % 2 ? 0.70710678118654752440f : 1.f;
    for (int i = 0; i < k / 2; ++i) r *= .5f;
    return r;
}

constexpr float LEAST_SCALE = 1e-20f, LARGEST_SCALE = 1e20f;  // whose inverses and sums do not overflow
constexpr float RAISED = (float)(1ll << 60);  // what values and a smaller scale are multiplied by first

// What the sums of the butterflies are multiplied by to be in units: `whole`, the units of a scale over the
// root of the block, over s, to nearest. Exact as `divided` is; s is 0 or from LEAST_SCALE to LARGEST.
__device__ __forceinline__ float to_units(float whole, float s) {
    const float rough = rough_inverse(s), first = __fmul_rn(whole, rough);
    return s > 0.f ? __fmaf_rn(__fmaf_rn(-first, s, whole), rough, first) : 0.f;
}

// The cell of a sum y; far from the borders another one as far from them, cell 0 for NaN.
__device__ __forceinline__ i32 saturated_cell(float y, float units) {
    const i32 cell = (i32)(__float_as_uint(fmaxf(__fmaf_rd(y, units, MAGIC), 0.f)) - MAGIC_BITS);
    return y == y ? cell : 0;
}

// How many of `top` borders are not above `cell`.
__device__ __forceinline__ u32 code_of_cell(const i32* borders, i32 cell, int top) {
    int code = 0;
    for (int step = (top + 1) / 2; step; step /= 2) {
        if (borders[code + step - 1] <= cell) code += step;
    }
    return code;
}
