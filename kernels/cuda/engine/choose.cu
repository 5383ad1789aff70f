// The likeliest token of each row, of equals the first, becomes the next one: positions move on by one.
//
// A thread has four logits of a row. The last CTA writes the largest candidate (engine/candidate.cuh), to the
// device and to the host's list, and leaves the cells of the row at 0. Shared memory: one candidate a warp.
// Where engine/token.cu makes logits of greedy tokens it chooses, too, without this launch.
#include "engine/candidate.cuh"

constexpr int THREADS = 512;

struct Choose {
    const float* logits;  // [batch][pitch]
    int vocabulary, pitch;
    u64* best;             // [batch], 0 between launches
    u32* arrivals;         // [batch], 0 between launches
    int *ids, *positions;  // [batch]
    int* history;          // [positions][batch], memory of the host: the token of each position
};

extern "C" __global__ void __launch_bounds__(THREADS) choose(const __grid_constant__ Choose call) {
    __shared__ u64 of_warps[THREADS / 32];
    const int n = blockIdx.y;
    const int first = 4 * (blockIdx.x * THREADS + threadIdx.x);
    u64 best = 0;
    if (first < call.vocabulary) {  // rows are padded to multiples of 16
        const float4 four = __ldcg((const float4*)(call.logits + (i64)n * call.pitch + first));
        const float logits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i < call.vocabulary) best = max(best, candidate(logits[i], first + i));
    }
#pragma unroll
    for (int i = 16; i; i /= 2) best = max(best, __shfl_xor_sync(~0u, best, i));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();  // every warp's candidate is there
    if (threadIdx.x >= THREADS / 32) return;
    best = of_warps[threadIdx.x];
#pragma unroll
    for (int i = THREADS / 64; i; i /= 2)
        best = max(best, __shfl_xor_sync((1u << THREADS / 32) - 1, best, i));
    if (threadIdx.x) return;
    atomicMax(call.best + n, best);
    __threadfence();
    if (atomicAdd(call.arrivals + n, 1u) != gridDim.x - 1) return;
    __threadfence();
    const int token = token_of(atomicExch(call.best + n, 0ull));
    call.arrivals[n] = 0;
    const int position = ++call.positions[n];
    call.ids[n] = token;
    *(volatile int*)(call.history + (i64)position * gridDim.y + n) = token;
}

// clang-format off
// gate: registers<=40 arch=sm_80,sm_90a,sm_100a,sm_120a
// clang-format on
