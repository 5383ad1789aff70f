// Codecs: from values to codes and from codes to values, bit for bit as kvlab/reference/codec.py.
#pragma once
#include "codec_words.cuh"

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

// ---- Codebooks

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

// How many of 2^(bits-1) - 1 thresholds, in units of the scale, lie below |y|; then up or down by the sign.
__device__ __forceinline__ u32 codebook_code(float y, float s, const float* thresholds, int half) {
    u32 above = 0;
#pragma unroll 1
    for (u32 step = half / 2; step; step /= 2) {
        if (fabsf(y) > __fmul_rn(thresholds[above + step - 1], s)) above += step;
    }
    return y < 0.f ? half - 1 - above : half + above;
}

// ---- Codes of a codebook at one look-up
//
// Values in units of the scale are cut into cells so narrow that none has two thresholds. A value so near the
// edge of a cell that rounding puts it into the neighbour does not matter: no threshold is nearer to an edge
// than 1e-4 of its size.

// Codes of 3 and 4 bits: signed values, 2^BITS - 1 cells of this width, 0 in the middle of the middle one,
// the first and the last without an end. Cell i has threshold i.
template <int BITS>
constexpr float CELL_WIDTH = BITS == 3 ? .6f : .3f;

// Codes of 5 bits and more: magnitudes, COUNT cells, A_UNIT to a unit, the last one without an end. A cell
// says how many thresholds lie below it, and which one lies in it or comes next.
struct Cell {
    float threshold;
    u32 below;
};

template <int BITS>
struct Cells {
    static constexpr int HALF = 1 << (BITS - 1);
    static constexpr float A_UNIT = BITS == 5 ? 9.f : BITS == 6 ? 16.f : 64.f;
    static constexpr int COUNT = BITS == 5 ? 27 : BITS == 6 ? 56 : 282;
};

// Cell i of COUNT, from the thresholds.
template <int BITS>
__device__ __forceinline__ Cell cell_at(const Codebook& book, int i) {
    using Own = Cells<BITS>;
    u32 below = 0;
    for (u32 step = Own::HALF / 2; step; step /= 2) {
        if (threshold(book, below + step - 1) * Own::A_UNIT < i) below += step;
    }
    return {(int)below < Own::HALF - 1 ? threshold(book, below) : __uint_as_float(0x7f800000u), below};
}

// One more if a > b: one operation beside the comparison, where the compiler makes two.
__device__ __forceinline__ u32 more_if_above(u32 x, float a, float b) {
    asm("{\n.reg .pred above;\nsetp.gt.f32 above, %1, %2;\n@above add.u32 %0, %0, 1;\n}"
        : "+r"(x)
        : "f"(a), "f"(b));
    return x;
}

// How many thresholds lie below the magnitude of y, above HALF. `to_cells` is A_UNIT / COUNT over the scale
// s.
template <int BITS>
__device__ __forceinline__ u32 code_of_magnitude(float y, float s, float to_cells, const Cell* cells) {
    using Own = Cells<BITS>;
    const float part = __saturatef(__fmul_rn(fabsf(y), to_cells));
    const u32 found = __float_as_uint(__fmaf_rd(part, Own::COUNT * (1.f - 1e-6f), MAGIC));
    const Cell cell = (cells - MAGIC_BITS)[found];  // so an address is one operation
    return more_if_above(cell.below + Own::HALF, fabsf(y), __fmul_rn(cell.threshold, s));
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

// 1 / sqrt(2^k), correctly rounded.
__host__ __device__ constexpr float root_of_power(int k) {
    float r = k % 2 ? 0.70710678118654752440f : 1.f;
    for (int i = 0; i < k / 2; ++i) r *= .5f;
    return r;
}
