// The tokens of a batch become hidden states: what engine/token.cu starts from.
//
// A CTA has one token, a thread 16 channels of it at a time: the row of the embedding in float32, and the
// mean and squared deviations that norms merge (engine/norm.cuh). Cosines and sines of the token's position
// come from a table. No shared memory.
//
// Macros: BATCH, BF16, HIDDEN, ROTARY_DIM as in engine/token.cu.
#include "common/pairs.cuh"

constexpr int GROUPS = HIDDEN / 16, THREADS = 256;

struct Embed {
    const u16* embedding;        // [vocabulary][HIDDEN]
    const int *ids, *positions;  // [BATCH]
    const float2* angles;        // [positions][ROTARY_DIM / 2] cosine, sine
    float* hidden;               // [BATCH][HIDDEN]
    float2* statistics;          // [BATCH][GROUPS]
    float2* rotation;            // [BATCH][ROTARY_DIM / 2]
};

extern "C" __global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ Embed call) {
    const int n = blockIdx.x;
    const u16* row = call.embedding + (i64)call.ids[n] * HIDDEN;
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) {
        float x[16], mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 packed = __ldg((const uint4*)(row + 16 * g) + i);
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
    for (int i = threadIdx.x; i < ROTARY_DIM / 2; i += THREADS)
        call.rotation[n * (ROTARY_DIM / 2) + i] = call.angles[(i64)call.positions[n] * (ROTARY_DIM / 2) + i];
}

// clang-format off
// gate: BATCH=1,16 BF16=0,1 HIDDEN=2560 ROTARY_DIM=20 registers<=64 arch=sm_80,sm_90a,sm_120a
// clang-format on
