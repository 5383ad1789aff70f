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

// Codes of 5 bits and more: magnitudes, saturated at END units, COUNT cells that widen as the distances of
// thresholds do: the place of part p of END is COUNT (2 p - p^2). A cell has the threshold in it, or the next
// one, and the code of what lies below that.
struct Cell {
    float threshold;
    u32 code;
};

constexpr int COPIES = 16;  // of each cell: one for a lane of a half warp, so that no two meet in a bank
constexpr u32 CELL_BYTES = COPIES * (u32)sizeof(Cell);  // of all copies

template <int BITS>
struct Cells {
    static constexpr int HALF = 1 << (BITS - 1);
    static constexpr int COUNT = BITS == 5 ? 16 : BITS == 6 ? 34 : 149;
    static constexpr float END = BITS == 5 ? 3.5f : BITS == 6 ? 4.f : 4.75f;

    // The cell of a part of END, above MAGIC_BITS.
    static __device__ __forceinline__ u32 at(float part) {
        constexpr float WHOLE = COUNT * (1.f - 1e-6f);
        return __float_as_uint(__fmaf_rd(part, __fmaf_rn(part, -WHOLE, 2.f * WHOLE), MAGIC));
    }
};

// Fills cells, [COUNT][COPIES], with all threads of the block: each has a threshold and the cells from that
// of the one before to its own.
template <int BITS>
__device__ __forceinline__ void fill_cells(const Codebook& book, Cell* cells) {
    using Own = Cells<BITS>;
    const auto cell_of = [&](int i) {
        return (int)(Own::at(__saturatef(threshold(book, i) * (1.f / Own::END))) - MAGIC_BITS);
    };
    for (int i = threadIdx.x; i < Own::HALF; i += blockDim.x) {
        const bool last = i == Own::HALF - 1;
        const Cell cell = {last ? __uint_as_float(0x7f800000u) : threshold(book, i), (u32)(Own::HALF + i)};
        const int end = last ? Own::COUNT : cell_of(i) + 1;
        for (int at = i ? cell_of(i - 1) + 1 : 0; at < end; ++at) {
#pragma unroll
            for (int k = 0; k < COPIES; ++k) cells[at * COPIES + (k + i) % COPIES] = cell;
        }
    }
}

// One more if a > b: one operation beside the comparison, where the compiler makes two.
__device__ __forceinline__ u32 more_if_above(u32 x, float a, float b) {
    asm("{\n.reg .pred above;\nsetp.gt.f32 above, %1, %2;\n@above add.u32 %0, %0, 1;\n}"
        : "+r"(x)
        : "f"(a), "f"(b));
    return x;
}

// The code of the magnitude of y. `to_cells` is 1 / END over the scale s; `zero`: where this lane's copy of
// cell 0 would stand if cells were counted from -MAGIC_BITS.
template <int BITS>
__device__ __forceinline__ u32 code_of_magnitude(float y, float s, float to_cells, u32 zero) {
    const u32 found = Cells<BITS>::at(__saturatef(__fmul_rn(fabsf(y), to_cells)));
    Cell cell;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=f"(cell.threshold), "=r"(cell.code)
                 : "r"(zero + found * CELL_BYTES)
                 : "memory");
    return more_if_above(cell.code, fabsf(y), __fmul_rn(cell.threshold, s));
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
