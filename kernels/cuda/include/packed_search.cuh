// Raw vectors into codes of pages, a warp a vector, bit for bit as kvlab/reference/pages.py says.
//
// From the rounding to whole numbers on all that decides a code is exact: sums are of whole numbers and come
// out the same in any order. A number is rounded to a whole one, half to even, by the addition of 1.5 2^23.
// The floor of a quotient is that of a product with a rounded reciprocal: the numerator is a half more than a
// whole number, so no quotient comes near to an integer (tests/kernels/test_grid_codes.py).
//
// All lanes of a warp call what is here together. Needs HEAD_DIM, packed_codes.cuh and packed_encode.cuh with
// LANES = 32 and RUN = 1.
#pragma once

#include "packed_steps.cuh"

static_assert(LANES == 32 && RUN == 1, "reductions are of a warp");
constexpr float TWO_23 = 8388608.f, ROUNDER = 1.5f * TWO_23;

// The largest size of a number, as bits: an infinite one is above all others, and NaN above that.
__device__ __forceinline__ u32 largest_of(const float (&x)[PER_LANE]) {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) most = max(most, __float_as_uint(fabsf(x[j])));
    return __reduce_max_sync(ALL_LANES, most);
}

// The sum of squares of whole numbers, below 2^23 in a lane.
__device__ __forceinline__ u32 sum_of_squares(const float (&x)[PER_LANE]) {
    float sum = TWO_23;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) sum = fmaf(x[j], x[j], sum);
    return __reduce_add_sync(ALL_LANES, __float_as_uint(sum) - __float_as_uint(TWO_23));
}

// The product rounded to a whole number of units, a power of 2.
__device__ __forceinline__ float rounded_product(float x, float factor, float unit = 1.f) {
    return __fsub_rn(fmaf(x, factor, ROUNDER * unit), ROUNDER * unit);
}

// Of a rotated vector: elements are numbers times 2^exponent, the largest number has the bits `largest`. If
// it is not finite the rest means nothing.
struct Scale {
    int exponent;
    u32 largest;
    bool finite;
};

// Rotates a raw vector as pages keep it. The numbers are float16 ones, whole multiples of 2^-24.
__device__ __forceinline__ Scale rotate_whole(float (&x)[PER_LANE], int lane) {
    constexpr float UNIT = 1.f / (1 << 24);
#pragma unroll
    for (int j = 0; j < PER_LANE && LOG_BLOCK % 2; ++j) x[j] = __fmul_rn(x[j], STRETCH);
    const int top = exponent_of(__uint_as_float(largest_of(x))), exponent = max(top - 10, LEAST_EXPONENT);
    const float factor = power_of_two(-24 - exponent);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = rounded_product(x[j], factor, UNIT);
    add_and_subtract(x, lane);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = __half2float(__float2half_rn(x[j]));
    return {exponent - (LOG_BLOCK + 1) / 2 + 24, largest_of(x), top < TOO_LARGE};
}

// How the step of a vector is looked for. Zero, what is too small for a step and what is not finite have a
// byte at once, and the middle code for each element.
struct Search {
    u32 lowest;  // the first byte that is tried, or the byte that the vector has
    int part;    // exponent of what its numbers are counted in: a step is 16 to 80 of it
    bool held;   // whether bytes are tried at all
};

// Makes the numbers of a rotated vector whole ones, in parts of a step.
__device__ __forceinline__ Search begin_search(float (&x)[PER_LANE], const Scale& scale, int bits) {
    const int top = exponent_of(__uint_as_float(scale.largest)), unit = unit_of(top + scale.exponent, bits);
    const float largest = __uint_as_float((scale.largest & 0x7fffffu) | __float_as_uint(64.f));
    u32 squares = 0;
    if (bits < 4) {
        float rough[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) rough[j] = rounded_product(x[j], power_of_two(6 - top));
        squares = sum_of_squares(rough);
    }
    const u32 lowest = lowest_step(largest, __uint2float_rn(squares), unit, bits);
    const int part = part_of_step(lowest);
    const float factor = power_of_two(unit + 6 - top - part);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = rounded_product(x[j], factor);
    if (!scale.finite) return {NAN_STEP, 0, false};
    if (!scale.largest || !lowest) return {0, 0, false};
    return {lowest, part, true};
}

// Codes for a step, in their lowest bytes, and how far the numbers are from what these stand for.
__device__ __forceinline__ void try_step(const float (&x)[PER_LANE], u32 byte, int part, int bits, int lane,
                                         u32 (&codes)[PER_LANE], float (&errors)[PER_LANE]) {
    const float step = step_value(byte) * power_of_two(-part), per_cell = __fdividef(.5f, step);
    const float middle = ROUNDER + (1 << (bits - 1)), last = ROUNDER + ((1 << bits) - 1);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const float code = fminf(fmaxf(__fmaf_rd(x[j] + .5f, per_cell, middle), ROUNDER), last);
        codes[j] = __float_as_uint(code);
        errors[j] = is_there(lane, j) ? fmaf(middle - code, 2.f * step, x[j] - step) : 0.f;
    }
}
