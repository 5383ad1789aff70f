// Which scales are tried for a rotated vector, or taken untried, from its largest element and the sums of
// magnitudes and of their squares, as kvlab/reference/pages.py says (guess_scale, search_scale), bit for bit.
//
// A number of a vector is counted in units of 2^unit, such that the largest rounds to an integer of 8
// bits.
#pragma once

#include "pages/encode.cuh"

constexpr u32 HIGHEST_SCALE = 0xf7, NAN_SCALE = 0xff;  // the highest is the last finite one
constexpr int LEAST_ABOVE = -16;                       // exponent_above of what has a scale at 8 bits
constexpr int MIN_ROTATION_EXPONENT = -39;             // of the integers that are rotated
constexpr int TOO_LARGE = 100;  // the exponent from which on a number counts as infinite

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
    return __uint_as_float((u32)(exponent + 127) << 23);
}

// floor(log2(x)) of a normal number above 0.
__device__ __forceinline__ int exponent_of(float x) {
    return (int)(__float_as_uint(x) >> 23) - 127;
}

__device__ __forceinline__ float scale_of_byte(u32 byte) {
    return half_bits_to_float(byte << 7);
}

// The exponent of the largest element of a vector and 2^-7 of it: magnitudes in units of 2^(exponent - 7) are
// below 256.
__device__ __forceinline__ int exponent_above(float largest) {
    return exponent_of(__fmul_rn(largest, 1.f + 1.f / 128));
}

// The unit of a vector for which this is `exponent`: 2^unit. What is too large for the highest
// scales is halved until it is not: elements count in units of 2^(exponent - 7) all the same.
__device__ __forceinline__ int unit_of(int exponent, int bits) {
    return min(exponent, bits + 13) - 7;
}

// The exponent of the unit in which a vector is rotated, of its largest element or that of its mean: no sum
// is more than 2^24.
__device__ __forceinline__ int rotation_exponent(float largest, int log = LOG_BLOCK) {
    return max(exponent_of(largest) - (23 - log), MIN_ROTATION_EXPONENT);
}

// What is known of a vector whose scale is looked for: the largest element counts `counted` in units of
// 2^(exponent - 7), 2^unit once elements have been halved so that there are scales for them. Zeros count as
// something far below all scales.
struct Range {
    float counted;
    int exponent, unit;
};

__device__ __forceinline__ Range range_of(float largest, int bits) {
    largest = fmaxf(largest, power_of_two(-60));
    const int exponent = exponent_above(largest);
    return {largest * power_of_two(7 - exponent), exponent, unit_of(exponent, bits)};
}

// The root of a number that is neither zero, subnormal nor near the end of the range, rounded to the nearest.
__device__ __forceinline__ float root_of(float x) {
    float rough;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(x));
    const float root = x * rough;
    return fmaf(fmaf(-root, root, x), .5f * rough, root);
}

// The quotient of two numbers that are neither zero, subnormal nor near the ends of the range, rounded to the
// nearest.
__device__ __forceinline__ float quotient_of(float x, float y) {
    float rough;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(y));
    rough = fmaf(fmaf(-y, rough, 1.f), rough, rough);
    float quotient = x * rough;
    quotient = fmaf(fmaf(-quotient, y, x), rough, quotient);
    return fmaf(fmaf(-quotient, y, x), rough, quotient);
}

// Where the search for a scale begins, the bits of a float16; at 8 bits it is the scale's byte, 0 for a
// vector that is nearer to 0 than to the least scale. `sum` and `squares`, of magnitudes, matter at 2 and 3
// bits, and so does whether the vector comes from codes.
__device__ __forceinline__ u32 guess_of(float largest, float sum, float squares, bool decoded, int unit,
                                        int bits) {
    if (bits == 8) {
        const u32 scale = __half_as_ushort(__float2half_ru(largest * power_of_two(unit - 8)));
        return unit < LEAST_ABOVE - 7 ? 0u : (scale + 127u) >> 7;
    }
    float part = bits == 2 ? .386f : bits == 3 ? .155f : .0592f;
    if (bits < 4) {
        const float ratio =
            quotient_of(__fadd_rn(squares, __fmul_rn(largest, largest)), __fadd_rn(sum, largest));
        largest = bits == 3 ? root_of(__fmul_rn(largest, ratio)) : ratio;
        if (decoded) part *= 17.f / 16;
    }
    return pack_halves(__fmul_rn(largest, part) * power_of_two(unit), 0.f);
}

constexpr u32 MIN_GUESS = 64;  // below, a vector is nearer to 0 than to any scale

// The byte below a guess.
__device__ __forceinline__ u32 below_guess(u32 guess) {
    return max(guess >> 7, 3u);
}

// The byte nearest to a guess, and whether a raw vector has that without a search.
__device__ __forceinline__ u32 nearest_byte(u32 guess) {
    return guess >= MIN_GUESS ? (guess + 64) >> 7 : 0u;
}
__host__ __device__ constexpr bool takes_nearest(int bits) {
    return bits < 4 && HEAD_DIM >= 128;
}

// The scales of a byte and of the next, rounded down to whole units of magnitudes, in halves; half a grid
// does not exceed 255.
__device__ __forceinline__ u32 integer_scales(u32 byte, int unit, int bits) {
    const float in_units = power_of_two(-24 - unit);
    u32 scales;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;"
        : "=r"(scales)
        : "f"(scale_of_byte(byte + 1) * in_units), "f"(scale_of_byte(byte) * in_units));
    return __vminu2(scales, (255u >> (bits - 1)) * 0x10001u);
}

// What scales have where codes are made: 8 ... 15 times 2^this.
__host__ __device__ constexpr int code_parts(int bits) {
    return bits == 2 ? 3 : bits == 3 ? 2 : 1;
}

// How many tiles of 16 channels say which scale is best: rotated channels are alike.
constexpr int COMPARED = HEAD_DIM >= 128 ? HEAD_DIM / 16 * 3 / 4 : HEAD_DIM / 16;

#if IN_BLOCKS
// How often the square of the first block counts at least, in place of all.
constexpr float FIRST_BLOCK = 2.5f, FIRST_BLOCK_DECODED = 1.77f;

// The same of a key in blocks, as kvlab/reference/blocks.py `guess_block_scale` says; `counted`: the largest
// element of each block in units of 2^unit.
__device__ __forceinline__ u32 guess_of_blocks(const float (&counted)[KEY_BLOCKS], u32 profile, bool decoded,
                                               int unit) {
    constexpr float MORE = HEAD_DIM == 64 ? 1.f : HEAD_DIM == 128 ? .82f : HEAD_DIM == 192 ? .73f : .68f;
    float squares = 0.f, first = 0.f;
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b) {
        const int width = width_of_block(profile, b);
        const float part = width == 2 ? .07f * MORE : width == 4 ? .052f * MORE : .036f * MORE;
        const float square = __fmul_rn(__fmul_rn(counted[b], counted[b]), part);
        if (width) squares = __fadd_rn(squares, square);
        if (b == 0) first = __fmul_rn(square, decoded ? FIRST_BLOCK_DECODED : FIRST_BLOCK);
    }
    float guess = root_of(fmaxf(fmaxf(squares, first), 1.f));  // zeros have no scale
    if (decoded) guess = __fmul_rn(guess, 19.f / 16);
    return pack_halves(guess * power_of_two(unit - 6), 0.f);
}

// What an error in each block counts.
__host__ __device__ constexpr int weight_of_block(int block) {
    return block == 0 ? 8 : block == 1 ? 2 : 1;
}

// What blocks of 8 bits add to the error of a scale.
template <u32 PROFILE>
__device__ __forceinline__ int error_beyond(const float (&counted)[KEY_BLOCKS], u32 byte, float in_units) {
    const float reach = truncf(fminf(scale_of_byte(byte) * in_units * 256.f, 255.f));
    float beyond = 0.f;
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; ++b)
        if (width_of_block(PROFILE, b) == 8)
            beyond += (float)(16 * weight_of_block(b)) * fmaxf(rintf(counted[b]) - reach, 0.f);
    return (int)beyond;
}
#endif
