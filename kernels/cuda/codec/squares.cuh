// The scale of a group from the sum of its squares (codecs HADAMARD, TERNARY), added in any order.
#pragma once
#include "codec/words.cuh"

__device__ __forceinline__ float rough_root(float x) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// What the root of a sum and that of the reference's differ by, at most: each of the `additions` that a term
// passes through here, its square among them, and of the 11 there, rounds by 2^-24 of what it has; the root
// halves that; the roots and products, of which the rough root counts twice, are 7 more.
__host__ __device__ constexpr float doubt_of(int additions) {
    return ((additions + 11) * .5f + 8) / (1 << 24);
}

// The scale of a group with `squares` as the sum, to be multiplied by `inverse_count`. Returns whether it is
// the reference's: whether both ends of the doubt round to the same word, and that of the narrow kind. Else,
// and so if there is a NaN or nothing but zeros, the caller must add as the reference does.
template <int ADDITIONS>
__device__ __forceinline__ bool scale_of_squares(float squares, float inverse_count, Scale& found) {
    const float root = rough_root(__fmul_rn(squares, inverse_count));
    const float step = CODEC == TERNARY ? __fmul_rn(root, TERNARY_LEVEL) : root;
    const float low = __fmul_rn(step, 1.f - doubt_of(ADDITIONS)),
                high = __fmul_rn(step, 1.f + doubt_of(ADDITIONS));
    const u32 ends = pack_halves(low, high), word = ends & 0xffff;
    found = {half_value(word), 0.f, word, 0, true};
    return low > 6.2e-5f && high < 32752.f && word == ends >> 16;
}
