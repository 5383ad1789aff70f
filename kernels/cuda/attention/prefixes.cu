// Sequences of separate calls of grouped attention: every prefix, and behind it a gap without queries.
//
// Threads and data
//   grid   x: 128 sequences, a thread each, and one thread for the ends of all; y: group.
#include "common/words.cuh"

constexpr int MAX_GROUPS = 16;

struct Call {
    const int* cu_q[MAX_GROUPS];         // [sequences + 1]
    const int* prefix_lens[MAX_GROUPS];  // [sequences]
    const int* cu_k;
    int* bounds;  // [groups, 2, 2 * sequences + 1], of queries and of keys
    int sequences, unused;
};

extern "C" __global__ void __launch_bounds__(128) cut_prefixes(const __grid_constant__ Call call) {
    const int b = blockIdx.x * 128 + threadIdx.x, g = blockIdx.y, count = 2 * call.sequences + 1;
    if (b > call.sequences) return;
    const int* const cu_q = call.cu_q[g];
    int* const of_q = call.bounds + 2 * g * count;
    int* const of_k = of_q + count;
    of_q[2 * b] = cu_q[b];
    of_k[2 * b] = call.cu_k[b];
    if (b == call.sequences) return;
    of_q[2 * b + 1] = cu_q[b + 1];
    of_k[2 * b + 1] = call.cu_k[b] + max(0, min(call.prefix_lens[g][b], call.cu_k[b + 1] - call.cu_k[b]));
}

// gate: registers<=32
