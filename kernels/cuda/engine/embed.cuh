// The embedding of a token: the hidden state with which its layers begin.
//
// Macros: BATCH, BF16, HIDDEN, ROTARY_DIM as in engine/token.cu.
#pragma once

#include "common/pairs.cuh"

constexpr int GROUPS = HIDDEN / 16;  // of 16 channels

struct Embed {
    const u16* embedding;  // [vocabulary][HIDDEN]
    int *ids, *positions;  // [BATCH]
    const float2* angles;  // [positions][ROTARY_DIM / 2] cosine, sine
    float* hidden;         // [BATCH][HIDDEN]
    float2* statistics;    // [BATCH][GROUPS] mean and squared deviations, which norms merge (engine/norm.cuh)
    float2* rotation;      // [BATCH][ROTARY_DIM / 2]
};

// Channels 16 g to 16 g + 15 of token n, which is `id`, in float32.
__device__ __forceinline__ void embed_group(const Embed& call, int n, int id, int g) {
    const uint4* const row = (const uint4*)(call.embedding + (i64)id * HIDDEN + 16 * g);
    float x[16], mean = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 packed = __ldg(row + i);
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack_pair(words[w]);
            x[8 * i + 2 * w] = pair.x, x[8 * i + 2 * w + 1] = pair.y;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) mean += x[i] * (1.f / 16);
#pragma unroll
    for (int i = 0; i < 16; ++i) squares += (x[i] - mean) * (x[i] - mean);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        ((float4*)(call.hidden + n * HIDDEN + 16 * g))[i] =
            make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    call.statistics[n * GROUPS + g] = {mean, squares};
}

// Cosine and sine of pair i of token n at its position.
__device__ __forceinline__ void turn_pair(const Embed& call, int n, int position, int i) {
    call.rotation[n * (ROTARY_DIM / 2) + i] = __ldg(call.angles + (i64)position * (ROTARY_DIM / 2) + i);
}
