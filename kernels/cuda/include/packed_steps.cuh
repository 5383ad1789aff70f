// Which steps are tried for a rotated vector, from its largest element and its sum of squares, as
// kvlab/reference/pages.py says (guess_step, candidate_steps), bit for bit.
//
// A number of a vector is counted in units of 2^unit, such that the largest is 64 or more and below 128.
// Needs packed_codes.cuh.
#pragma once

constexpr u32 HIGHEST_STEP = 0xf7, NAN_STEP = 0xff;  // the highest is the last finite one
constexpr int LEAST_EXPONENT = -40;                  // of the whole numbers that are rotated
constexpr int TOO_LARGE = 100;                       // the exponent from which on a number counts as infinite

__host__ __device__ constexpr int candidates_of(int bits) {
    return bits < 4 ? 5 : bits == 4 ? 3 : 1;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
    return __uint_as_float((u32)(exponent + 127) << 23);
}

// floor(log2(x)) of a normal number above 0.
__device__ __forceinline__ int exponent_of(float x) {
    return (int)(__float_as_uint(x) >> 23) - 127;
}

__device__ __forceinline__ float step_value(u32 byte) {
    return half_bits_to_float(byte << 7);
}

// The unit of a vector of which the largest element has `exponent`. What is too large for the highest steps
// is halved until it is not: elements count in units of 2^(exponent - 6) all the same.
__device__ __forceinline__ int unit_of(int exponent, int bits) {
    return min(exponent, bits + 13) - 6;
}

// The lowest of the bytes that are tried, or 0 if the vector is nearer to 0 than to any step. `squares`, of
// numbers rounded to whole ones, matters at 2 and 3 bits.
__device__ __forceinline__ u32 lowest_step(float largest, float squares, int unit, int bits) {
    if (bits == 8)
        return max((__half_as_ushort(__float2half_ru(largest * power_of_two(unit - 8))) + 127u) >> 7, 1u);
    if (bits < 4) {
        constexpr bool IS_POWER = (HEAD_DIM & (HEAD_DIM - 1)) == 0;
        const float mean = IS_POWER ? squares * (1.f / HEAD_DIM) : __fdiv_rn(squares, (float)HEAD_DIM);
        const float root = __fsqrt_rn(mean);
        largest = __fsqrt_rn(__fmul_rn(largest, root));
        if (bits == 2) largest = __fsqrt_rn(__fmul_rn(largest, root));
    }
    const float part = bits == 2 ? .4f : bits == 3 ? .185f : .0584f;
    const u32 guess = __half_as_ushort(__float2half_rn(__fmul_rn(largest, part) * power_of_two(unit)));
    const u32 near = (guess + 63 + (guess >> 7 & 1)) >> 7;
    const u32 below = candidates_of(bits) / 2;
    return near ? max(near, below + 1u) - below : 0u;
}

// The exponent of the part of a step in which elements are counted while steps are tried, from the lowest of
// these: a step is 16 to 80 of them.
__device__ __forceinline__ int part_of_step(u32 lowest) {
    return exponent_of(step_value(lowest)) - 4;
}
