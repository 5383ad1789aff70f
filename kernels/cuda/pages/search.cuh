// Raw vectors into scales and codes of pages, a warp a vector, bit for bit as kvlab/reference/pages.py says.
//
// From the rounding to integers on all that decides a code is exact: sums are of integers and come
// out the same in any order. Those of the rotation are 32-bit integers, which have bits to spare for a vector
// in the finer unit of the mean: the difference is rotated at once, and rounded once. A rotated vector is
// numbers of float16, whole multiples of 2^-24, two to a word. Where its scale is looked for, elements and
// scales are bytes, four to a word.
//
// A lane has elements lane + 32 j. All lanes of a warp call what is here together.
#pragma once

#include "common/half_pairs.cuh"
#include "pages/scales.cuh"

constexpr int PER_LANE = (HEAD_DIM + 31) / 32;
constexpr int NUM_HALF2 = (PER_LANE + 1) / 2, MAGNITUDE_WORDS = (PER_LANE + 3) / 4;
constexpr float TWO_23 = 8388608.f, ROUNDER = 1.5f * TWO_23;
constexpr u32 ZERO = 0x4b400000;  // the bits of ROUNDER

__device__ __forceinline__ bool is_there(int lane, int j) {
    return HEAD_DIM % 32 == 0 || lane + 32 * j < HEAD_DIM;
}

// How many warps look for the scale of a vector, one for each that is tried.
__host__ __device__ constexpr int tries_of(int bits) {
    return bits >= 8 || takes_nearest(bits) ? 1 : bits == 4 ? 2 : 4;
}

// A number divided by 2^down: in two products, for such a power may be no normal number.
__device__ __forceinline__ float divided(float x, int down) {
    const int half = down / 2;
    return x * power_of_two(-half) * power_of_two(half - down);
}

// The largest size of a number, as bits: an infinite one is above all others, and NaN above that.
__device__ __forceinline__ u32 largest_of(const float (&x)[PER_LANE]) {
    float most = fabsf(x[0]);
#pragma unroll
    for (int j = 1; j < PER_LANE; ++j)
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(most), "f"(fabsf(x[j])));
    return __reduce_max_sync(ALL_LANES, __float_as_uint(most));
}

// The product rounded to an integer, half to even, and ZERO more.
__device__ __forceinline__ u32 integer_product(float x, float factor) {
    return __float_as_uint(fmaf(x, factor, ROUNDER));
}

// The Hadamard transform of integers in blocks of BLOCK without its factor, modulo 2^32. What all numbers
// have too much is taken off where a lane's part of the transform has brought it together.
template <int BLOCK>
__device__ __forceinline__ void add_and_subtract(u32 (&x)[PER_LANE], u32 too_much, int lane) {
    constexpr int OF_LANE = BLOCK > 32 ? BLOCK / 32 : 1;  // elements of a block
#pragma unroll
    for (int to = 1; to < OF_LANE; to *= 2) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            if (j & to) continue;
            const u32 a = x[j], b = x[j + to];
            x[j] = a + b, x[j + to] = a - b;
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j += OF_LANE) x[j] -= OF_LANE * too_much;
#pragma unroll
    for (int h = 1; h < 32 && h < BLOCK; h *= 2) {
        const u32 sign = lane & h ? ~0u : 1u;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = x[j] * sign + __shfl_xor_sync(ALL_LANES, x[j], h);
    }
}

// A rotated vector: numbers times 2^24 `factor` are its elements. Unless it is finite, the rest means
// nothing.
struct Rotated {
    u32 numbers[NUM_HALF2];  // of elements j = 2 i, 2 i + 1
    float factor, largest;
    bool finite;
};

// Rotates a raw vector as pages keep it, less its mean; where there is none that is zeros. BLOCK: 2^LOG
// channels that are rotated together. `arrange` puts sums where their blocks are; `root`: the factor without
// its power of 2.
template <int BLOCK, int LOG, class Arrange>
__device__ __forceinline__ Rotated rotate_integers(const float (&raw)[PER_LANE],
                                                   const float (&mean)[PER_LANE], float root,
                                                   Arrange arrange) {
    // Sums of each are 2^24 at most, so the vector's may count 2^6 times as much. If the mean's unit is finer
    // than that, which is rare, both are rotated, one after the other: a number is rounded once all the same.
    // Where it is 2^50 times finer the mean changes nothing, and no power of 2 needs to be smaller.
    constexpr int SPARE_BITS = 6, MAX_FINER = 50;
    int lane;  // asked for here, or the compiler works out what follows from it before it asks for vectors
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const u32 most = largest_of(raw), most_of_mean = largest_of(mean);
    const bool finite = most < __float_as_uint(power_of_two(TOO_LARGE));
    const int exponent = rotation_exponent(__uint_as_float(max(finite ? most : 0u, most_of_mean)), LOG);
    const int of_mean = rotation_exponent(__uint_as_float(most_of_mean), LOG);
    int finer = most_of_mean ? min(exponent - of_mean, MAX_FINER) : 0;
    const float by = power_of_two(-exponent), by_mean = -power_of_two(-of_mean);
    const u32 times = finer > SPARE_BITS ? 0u : 1u << finer;
    u32 whole[PER_LANE], sums[PER_LANE];
    float x[PER_LANE] = {};
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        whole[j] = integer_product(raw[j], by);
        sums[j] = whole[j] * times + integer_product(mean[j], by_mean);
    }
#pragma unroll 1
    for (;; finer = 0) {
        arrange(sums);
        add_and_subtract<BLOCK>(sums, ZERO * (times + 1), lane);
        const float unit = power_of_two(-26 - finer);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = fmaf(__int2float_rn((int)sums[j]), unit, x[j]);
        if (finer <= SPARE_BITS) break;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) sums[j] = whole[j];
    }
    Rotated r;
    float larger = fabsf(x[0]);
#pragma unroll
    for (int j = 1; j < PER_LANE; ++j) larger = fmaxf(larger, fabsf(x[j]));
#pragma unroll
    for (int i = 0; i < NUM_HALF2; ++i)
        r.numbers[i] = pack_halves(x[2 * i], 2 * i + 1 < PER_LANE ? x[2 * i + 1] : 0.f);
    larger = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(larger)));
    r.largest = half_bits_to_float(half_of(larger));
    r.factor = root * power_of_two(exponent + 2 - (LOG + 1) / 2);
    r.finite = finite;
    return r;
}

__device__ __forceinline__ Rotated rotate_vector(const float (&raw)[PER_LANE],
                                                 const float (&mean)[PER_LANE]) {
    return rotate_integers<ROTATION_BLOCK, LOG_BLOCK>(raw, mean, FACTOR, [](u32(&)[PER_LANE]) {});
}

__device__ __forceinline__ Range range_of(const Rotated& x, int bits) {
    return range_of(x.largest * (float)(1 << 24) * x.factor, bits);
}

// Magnitudes of elements, bytes; those that are not compared are 0.
using Magnitudes = u32[MAGNITUDE_WORDS];

// The bytes of a word of magnitudes that are of channels that are compared.
__device__ __forceinline__ u32 compared_bytes(int word, int lane) {
    u32 bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int channel = 32 * (4 * word + j);  // of lane 0
        if (channel + 32 <= 16 * COMPARED || (channel < 16 * COMPARED && channel + lane < 16 * COMPARED))
            bytes |= 255u << 8 * j;
    }
    return bytes;
}

__device__ __forceinline__ void to_magnitudes(const Rotated& x, const Range& range, Magnitudes& magnitudes,
                                              int lane) {
    const float factor = x.factor * power_of_two(7 - range.exponent);
    const u32 by = pack_halves(factor, factor);
#pragma unroll
    for (int i = 0; i < MAGNITUDE_WORDS; ++i) {
        const u32 upper = 2 * i + 1 < NUM_HALF2 ? pair_product(x.numbers[2 * i + 1], by) : 0u;
        magnitudes[i] =
            __byte_perm(pair_product(x.numbers[2 * i], by), upper, 0x6420) & compared_bytes(i, lane);
    }
}

__device__ __forceinline__ u32 sum_of(const Magnitudes& magnitudes) {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < MAGNITUDE_WORDS; ++i) sum = __dp4a(magnitudes[i], 0x01010101u, sum);
    return __reduce_add_sync(ALL_LANES, sum);
}

__device__ __forceinline__ u32 sum_of_squares(const Magnitudes& magnitudes) {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < MAGNITUDE_WORDS; ++i) sum = __dp4a(magnitudes[i], magnitudes[i], sum);
    return __reduce_add_sync(ALL_LANES, sum);
}

// What the search for a scale begins with: a guess as `guess_of` gives it, and whether there is a scale at
// all.
struct Guess {
    u32 bits;
    bool counts;
};

template <int BITS>
__device__ __forceinline__ Guess guess_scale(const Rotated& x, const Range& range,
                                             const Magnitudes& magnitudes) {
    const float sum = BITS < 4 ? (float)sum_of(magnitudes) : 0.f,
                squares = BITS < 4 ? (float)sum_of_squares(magnitudes) : 0.f;
    const u32 guess = guess_of(range.counted, sum, squares, false, range.unit, BITS);
    return {guess, x.finite && (BITS == 8 ? guess > 0 : guess >= MIN_GUESS)};
}

// The squared error of the i-th scale from `lowest` on: distances to the grid are what is left of magnitudes
// when they are folded in the middle of what is left of the grid, BITS times.
template <int BITS>
__device__ __forceinline__ u32 error_of(const Magnitudes& magnitudes, const Range& range, u32 lowest, int i,
                                        int lane) {
    const u32 scales = (integer_scales(lowest + i, range.unit, BITS) & 255) * 0x01010101u;
    Magnitudes left;
#pragma unroll
    for (int w = 0; w < MAGNITUDE_WORDS; ++w) {
        left[w] = magnitudes[w];
#pragma unroll
        for (int k = BITS - 1; k >= 0; --k) left[w] = distances(left[w], scales << k);
        left[w] &= compared_bytes(w, lane);
    }
    return sum_of_squares(left);
}

// Codes for a scale, or the middle code for each element if it does not count.
template <int BITS>
__device__ __forceinline__ void to_codes(const Rotated& x, const Range& range, u32 byte, bool counts,
                                         u32 (&codes)[PER_LANE]) {
    constexpr int CELLS = 1 << BITS;
    // Nothing of a code is lost in this product: quotients are not as near to integers.
    constexpr float NEARLY_ALL = CELLS * (1.f - 1.f / 65536);
    const float value = scale_of_byte(byte);
    const int unit = exponent_of(value) - 3 - code_parts(BITS);
    float factor = x.factor * power_of_two(range.unit + 7 - range.exponent - unit);
    if (!counts) factor = 0.f;
    u32 numbers[NUM_HALF2];
#pragma unroll
    for (int i = 0; i < NUM_HALF2; ++i) numbers[i] = x.numbers[i];
    if (BITS == 8 && LOG_BLOCK % 2 && factor < power_of_two(-17)) {
        // The factor would be subnormal and lose bits. Numbers lose them instead, less than 1/40 of a
        // unit.
        const int down = min(-17 - exponent_of(factor), 14);
        const u32 by = pack_halves(power_of_two(-down), power_of_two(-down));
#pragma unroll
        for (int i = 0; i < NUM_HALF2; ++i) numbers[i] = pair_product(numbers[i], by);
        factor *= power_of_two(down);
    }
    const u32 by = pack_halves(factor, factor);
    // A scale in units is this mantissa times a power of 2; cells are two of them, and numbers count 2^-24.
    const float cells = __uint_as_float((__float_as_uint(value) & 0x7fffffu) |
                                        __float_as_uint(power_of_two(3 + code_parts(BITS) + 1 + BITS - 24)));
    float per_unit;  // nearly; of the whole grid
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(per_unit) : "f"(cells));
    // Half a unit more keeps quotients away from integers (tests/kernels/test_grid_codes.py).
    const float first = fmaf(per_unit, .5f / (1 << 24), .5f);
#pragma unroll
    for (int i = 0; i < NUM_HALF2; ++i) {
        const u32 pair = pair_product(numbers[i], by);
#pragma unroll
        for (int j = 2 * i; j < PER_LANE && j < 2 * i + 2; ++j) {
            const float x = half_bits_to_float(j % 2 ? pair >> 16 : pair & 0xffffu);
            const float part = __saturatef(fmaf(x, per_unit, first));
            codes[j] = __float_as_uint(__fmaf_rd(part, NEARLY_ALL, TWO_23)) & (CELLS - 1);
        }
    }
}
