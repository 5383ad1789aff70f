// The tokens of a batch become hidden states: what engine/token.cu starts from.
//
// A CTA has one token, a thread 16 channels of it at a time: the row of the embedding in float32, and the
// mean and squared deviations that norms merge. Cosines and sines of the token's position come from a table.
// No shared memory.
//
// Macros: BATCH, BF16, HIDDEN, ROTARY_DIM as in engine/token.cu.
#include "engine/embed.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ Embed call) {
    const int n = blockIdx.x, id = call.ids[n], position = call.positions[n];
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) embed_group(call, n, id, g);
    for (int i = threadIdx.x; i < ROTARY_DIM / 2; i += THREADS) turn_pair(call, n, position, i);
}

// clang-format off
// gate: BATCH=1,16 BF16=0,1 HIDDEN=2560 ROTARY_DIM=20 registers<=64 arch=sm_80,sm_90a,sm_100a,sm_120a
// clang-format on
