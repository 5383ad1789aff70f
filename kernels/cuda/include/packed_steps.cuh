// Which steps are tried for a rotated vector, from its largest element and its sum of squares, as
// kvlab/reference/pages.py says (guess_step, search_step), bit for bit.
//
// A number of a vector is counted in units of 2^unit, such that the largest rounds to a whole number of 8
// bits. Needs packed_codes.cuh and packed_encode.cuh.
#pragma once

constexpr u32 HIGHEST_STEP = 0xf7, NAN_STEP = 0xff;  // the highest is the last finite one
constexpr int LEAST_EXPONENT = -39;                  // of the whole numbers that are rotated
constexpr int TOO_LARGE = 100;                       // the exponent from which on a number counts as infinite

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

// The exponent of the largest element of a vector and 2^-7 of it: sizes in units of 2^(exponent - 7) are
// below 256.
__device__ __forceinline__ int exponent_above(float largest) {
    return exponent_of(__fmul_rn(largest, 1.f + 1.f / 128));
}

// The unit of a vector for which this is `exponent`: 2^unit. What is too large for the highest
// steps is halved until it is not: elements count in units of 2^(exponent - 7) all the same.
__device__ __forceinline__ int unit_of(int exponent, int bits) {
    return min(exponent, bits + 13) - 7;
}

// The exponent of the unit in which a vector is rotated, of its largest element or that of its mean: no sum
// is more than 2^24.
__device__ __forceinline__ int rotation_exponent(float largest) {
    return max(exponent_of(largest) - (23 - LOG_BLOCK), LEAST_EXPONENT);
}

// What is known of a vector whose step is looked for: the largest element counts `counted` in units of
// 2^(exponent - 7), 2^unit once elements have been halved so that there are steps for them. Zeros count as
// something far below all steps.
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

// Where the search for a step begins, the bits of a float16; at 8 bits it is the step's byte. `squares`, of
// sizes, matters at 2 and 3 bits.
__device__ __forceinline__ u32 guess_of(float largest, float squares, int unit, int bits) {
    if (bits == 8)
        return max((__half_as_ushort(__float2half_ru(largest * power_of_two(unit - 8))) + 127u) >> 7, 1u);
    if (bits < 4) {
        constexpr bool IS_POWER = (HEAD_DIM & (HEAD_DIM - 1)) == 0;
        const float mean = IS_POWER ? squares * (1.f / HEAD_DIM) : __fdiv_rn(squares, (float)HEAD_DIM);
        const float root = root_of(mean);
        largest = root_of(__fmul_rn(largest, root));
        if (bits == 2) largest = root_of(__fmul_rn(largest, root));
    }
    const float part = bits == 2 ? .4f : bits == 3 ? .185f : .0592f;
    return pack_halves(__fmul_rn(largest, part) * power_of_two(unit), 0.f);
}

constexpr u32 LEAST_GUESS = 64;  // below, a vector is nearer to 0 than to any step

// The byte below a guess.
__device__ __forceinline__ u32 below_guess(u32 guess) {
    return max(guess >> 7, 3u);
}

// A step and those that follow, whole numbers times a power of 2.
struct StepsFrom {
    u32 base;      // of the first
    int exponent;  // of 2

    __device__ __forceinline__ explicit StepsFrom(u32 byte)
        : base(byte < 8 ? byte : byte % 8 + 8), exponent((int)max(byte >> 3, 1u) - 18) {}
};

// The i-th step behind one of this base.
__device__ __forceinline__ u32 step_behind(u32 base, u32 i) {
    const u32 k = base + i;
    return (u32)max((int)k, 2 * (int)k - 16);
}

// The i-th step from `from` on in whole units of sizes, of which half a grid does not exceed 255.
__device__ __forceinline__ u32 size_of_step(const StepsFrom& from, u32 i, int unit, int bits) {
    return min(step_behind(from.base, i) << (from.exponent - unit + 4) >> 4, 255u >> (bits - 1));
}

// What steps have where codes are made: 8 ... 15 times 2^this.
__host__ __device__ constexpr int code_parts(int bits) {
    return bits == 2 ? 3 : bits == 3 ? 2 : 1;
}

// On how many tiles of 16 channels errors are compared: rotated channels are alike.
__host__ __device__ constexpr int compared_tiles(int bits) {
    constexpr int TILES = HEAD_DIM / 16;
    return bits == 4 && HEAD_DIM >= 128 ? TILES * 3 / 4 : TILES;
}
