// From values to codes and from codes to values, bit for bit as kvlab/reference/codec.py.
//
// Hadamard codes: the integer below a value in units, its cell, has one code (kvlab/reference/codebooks.py).
// Blocks keep the codes of all cells up to the last border as a table of bytes in shared memory.
#pragma once
#include "codec/scales.cuh"

constexpr float MAGIC = 12582912.f;  // 3 2^22: adding it rounds to an integer, which then is the low byte
constexpr i32 MAGIC_BITS = 0x4b400000;
constexpr float SMALL = 0x1p-66f, RAISED = 0x1p60f, LOWERED = 0x1p-60f;

// The codebook of the Hadamard codec: cells from -reach to below it, units of a scale, 2^CODE_BITS - 1
// borders in units, and levels, both ascending.
struct Codebook {
    i32 reach;
    float units;
    i32 borders[255];
    float levels[256];
};

// 1 / sqrt(block), correctly rounded; block is a power of two.
__device__ __forceinline__ float rotation_of(int block) {
    float r = __clz(block) % 2 ? 1.f : .70710678118654752440f;
    for (; block >= 4; block /= 4) r *= .5f;
    return r;
}

// What makes codes of the values of a group. Scale, offset and values are multiplied by `factor`, a power of
// two that keeps inverse and remainders from overflow and underflow; scales of float16 elements need none.
struct Encoder {
    float s, o, factor;
    float inverse;  // about 1 / s; of HADAMARD units, 0 where s is 0; of TERNARY the border s / 2
    u32 highest;    // code; 0 for a group that cannot be represented, all of whose codes are 0
};

__device__ __forceinline__ float rough_inverse(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// `whole`: the units of a scale times the rotation; HADAMARD.
__device__ __forceinline__ Encoder encoder_of(const Scale& scale, float whole = 0.f) {
    Encoder r;
    r.factor = DTYPE == FLOAT16                        ? 1.f
               : scale.s < SMALL                       ? RAISED
               : scale.s > 1e20f && CODEC <= SYMMETRIC ? LOWERED
                                                       : 1.f;
    r.s = __fmul_rn(scale.s, r.factor), r.o = __fmul_rn(scale.o, r.factor);
    r.highest = scale.known ? TOP_CODE : 0;
    if (CODEC == TERNARY) {
        r.inverse = scale.known ? __fmul_rn(scale.s, .5f) : __uint_as_float(0x7f800000u);
    } else if (CODEC == HADAMARD) {
        r.inverse = scale.known && r.s > 0.f ? __fdiv_rn(whole, r.s) : 0.f;
    } else {
        // A scale of 0: all values are equal, or multiples up to 127 of 2^-149, the least float32, above o.
        r.inverse = r.s == 0.f ? TOP * 0x1p89f : rough_inverse(r.s);
    }
    return r;
}

// The code of x above MAGIC_BITS: (x - o) / s, rounded to nearest and then to nearest even; it may exceed the
// highest code by one. Scales have at most 11 significant bits: with an inverse that is good to two units in
// the last place the corrected quotient is as near to the true one as 2^-21 of a unit of its own last place,
// and no true one is nearer than 2^-12 of that unit to the middle between two numbers (nor at it).
__device__ __forceinline__ u32 spaced_code(float x, const Encoder& to) {
    const float d = DTYPE == FLOAT16 ? __fsub_rn(x, to.o) : __fmaf_rn(x, to.factor, -to.o);
    const float first = __fmul_rn(d, to.inverse);
    float code = __fmaf_rn(__fmaf_rn(-first, to.s, d), to.inverse, first);
    if (DTYPE == FLOAT32 && CODEC == SYMMETRIC) code = fmaxf(code, 0.f);  // negative where s is 0
    return __float_as_uint(__fadd_rn(code, MAGIC));
}

// The code of a rotated value: `cells` is the table, of 2 `reach` cells. A product that is rounded down has
// its cell in the low bits; far from the borders another cell serves as well; NaN has that of 0.
__device__ __forceinline__ u32 rotated_code(float y, const Encoder& to, const u8* cells, int reach) {
    float cell = __fmaf_rd(DTYPE == FLOAT16 ? y : __fmul_rn(y, to.factor), to.inverse, MAGIC);
    if (DTYPE != FLOAT16) cell = cell == cell ? fmaxf(cell, 0.f) : MAGIC;  // those of float16 are in range
    return cells[__viaddmin_s32_relu(__float_as_int(cell), reach - MAGIC_BITS, 2 * reach - 1)];
}

// The digit of x: 0, 1, 2 for -1, 0, 1.
__device__ __forceinline__ u32 digit(float x, const Encoder& to) {
    return 1u + (x > to.inverse) - (x < -to.inverse);
}

// Codes of two values, of HADAMARD rotated ones, in the halves of a word.
__device__ __forceinline__ u32 pair_of_codes(float a, float b, const Encoder& of_a, const Encoder& of_b,
                                             const u8* cells, int reach) {
    if (CODEC == TERNARY) return digit(a, of_a) | digit(b, of_b) << 16;
    const u32 highest = of_a.highest | of_b.highest << 16;
    if (CODEC == HADAMARD)
        return (rotated_code(a, of_a, cells, reach) | rotated_code(b, of_b, cells, reach) << 16) & highest;
    return __vminu2(__byte_perm(spaced_code(a, of_a), spaced_code(b, of_b), 0x5410), highest);
}

// Fills the table of codes by all threads of the block; it is there behind the next barrier of the block.
__device__ __forceinline__ void fill_cells(const Codebook& book, u8* cells) {
    for (int code = threadIdx.x; code <= TOP_CODE; code += blockDim.x) {
        const int first = code ? book.borders[code - 1] : -book.reach;
        const int end = code < TOP_CODE ? book.borders[code] : book.reach;
        for (int cell = first; cell < end; ++cell) cells[book.reach + cell] = (u8)code;
    }
}

// ---- From codes to values

__device__ __forceinline__ void fill_levels(const Codebook& book, float* levels) {
    for (int code = threadIdx.x; code <= TOP_CODE; code += blockDim.x) levels[code] = book.levels[code];
}

// What a code stands for, of HADAMARD before the rotation; ternary codes are digits. The products of codes
// and scales are exact: they have at most 19 significant bits.
__device__ __forceinline__ float value_of(u32 code, const Scale& scale, const float* levels) {
    if (CODEC == HADAMARD) return __fmul_rn(levels[code], scale.s);
    const float number = __fsub_rn(__uint_as_float(0x4b000000u | code), 8388608.f);  // 2^23 + code
    if (CODEC == TERNARY) return __fmul_rn(__fsub_rn(number, 1.f), scale.s);
    return __fmaf_rn(number, scale.s, scale.o);
}
