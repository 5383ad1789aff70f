// The running softmax of 16 rows of a warp, for the forward kernels of 16-bit types.
//
// Scores are laid out as the sums of mma.m16n8k16: lane g = lane / 4, u = lane % 4 has columns 8 n + 2u + i
// of row g + 8 half at s[4 n + 2 half + i]. `scale_log2` is the scale of the scores times log2(e).
#pragma once
#include "attention/call.cuh"

constexpr float SLACK = 8.f;      // base 2; what P may exceed 1 by
constexpr float LOWEST = -1e30f;  // a row_max before any key

struct Softmax {
    float row_max[2], row_sum[2];  // of rows g and g + 8; a lane has its part of the sum
};

// Scales scores and caps them: softcap * tanh(y), tanh(y) = 1 - 2 / (1 + exp(2 y)).
template <int COUNT>
__device__ __forceinline__ void cap_scores(float (&s)[COUNT], float scale, float softcap) {
    if (softcap > 0.f) {
        const float rate = __fdividef(scale * (2.f * LOG2E), softcap);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            s[i] = softcap - __fdividef(2.f * softcap, 1.f + power_of_2(s[i] * rate));
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) s[i] *= scale;
    }
}

// Lets row_max follow the maxima of scores that are more than SLACK above it; whether one of the warp's did,
// and then `rescale` is the factor of older sums.
template <int COUNT>
__device__ __forceinline__ bool update_max(Softmax& x, const float (&s)[COUNT], float scale_log2,
                                           float (&rescale)[2]) {
    float best[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float b = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
        for (int n = 4; n < COUNT; n += 4) b = fmaxf(b, fmaxf(s[n + 2 * half], s[n + 2 * half + 1]));
        b = fmaxf(b, __shfl_xor_sync(ALL_LANES, b, 1));
        best[half] = fmaxf(b, __shfl_xor_sync(ALL_LANES, b, 2));
    }
    const bool higher =
        (best[0] - x.row_max[0]) * scale_log2 > SLACK || (best[1] - x.row_max[1]) * scale_log2 > SLACK;
    if (!__any_sync(ALL_LANES, higher)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float row_max = fmaxf(x.row_max[half], best[half]);
        rescale[half] = power_of_2((x.row_max[half] - row_max) * scale_log2);
        x.row_max[half] = row_max;
        x.row_sum[half] *= rescale[half];
    }
    return true;
}

// Scores to P = exp2(scale_log2 * (s - row_max)).
template <int COUNT>
__device__ __forceinline__ void exponentiate(Softmax& x, float (&s)[COUNT], float scale_log2) {
    const float offset[2] = {-x.row_max[0] * scale_log2, -x.row_max[1] * scale_log2};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        s[i] = power_of_2(fmaf(s[i], scale_log2, offset[i / 2 % 2]));
        x.row_sum[i / 2 % 2] += s[i];
    }
}

template <int COUNT>
__device__ __forceinline__ void scale_rows(float (&o)[COUNT], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) o[i] *= factor[i / 2 % 2];
}
