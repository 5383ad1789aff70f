// Attention over all keys from attention over disjoint parts of them: out = sum_i exp(lse_i - lse) out_i.
//
// Threads and data
//   CTA    4 warps, a row each: position 4 blockIdx.x + warp, query head blockIdx.y, batch blockIdx.z.
//   lane   channels lane, lane + 32, ...; of log-sum-exps every one of the row's, up to MAX_PARTS.
//
// Memory: no shared memory; each part is read once, the result written once. A part in which the row saw no
// key (lse_i = -inf) is not read: whatever it holds, it adds nothing.
//
// Macros: FLOAT32: 1 elements are float32, 0 of the 16-bit type that BF16 says.
#include "common/pairs.cuh"

#include "attention/call.cuh"

constexpr int WARPS = 4, MAX_PARTS = 32;

struct Part {
    Tensor out;
    const float* lse;
    i64 batch, position, head;  // strides of lse
};

struct Call {
    Element* out;  // [batch, positions, heads, dim]
    float* lse;    // [batch, heads, positions]
    i64 positions;
    int dim, count;
    Part parts[MAX_PARTS];
};

__device__ __forceinline__ float read(const Element* at) {
#if FLOAT32
    return *at;
#else
    return unpack_pair(*at).x;
#endif
}

__device__ __forceinline__ void write(Element* at, float x) {
#if FLOAT32
    *at = x;
#else
    *at = (u16)pack_pair(x, 0.f);
#endif
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) merge(const __grid_constant__ Call call) {
    const i64 position = (i64)blockIdx.x * WARPS + threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z;
    if (position >= call.positions) return;
    const i64 heads = gridDim.y, row = (batch * call.positions + position) * heads + head;
    const int lane = threadIdx.x % 32;
    const auto lse_of = [&](const Part& part) {
        return part.lse[batch * part.batch + position * part.position + head * part.head];
    };
    float highest = -INFINITE, total = 0.f;
    for (int i = 0; i < call.count; ++i) highest = fmaxf(highest, lse_of(call.parts[i]));
    if (highest > -INFINITE)
        for (int i = 0; i < call.count; ++i) total += expf(lse_of(call.parts[i]) - highest);
    const float factor = total == 0.f ? 0.f : 1.f / total;
    for (int channel = lane; channel < call.dim; channel += 32) {
        float sum = 0.f;
        for (int i = 0; i < call.count; ++i) {
            const Part& part = call.parts[i];
            const float weight = total == 0.f ? 0.f : expf(lse_of(part) - highest) * factor;
            if (weight == 0.f) continue;
            const Tensor& t = part.out;
            const i64 at = batch * t.batch + position * t.position + head * t.head;
            sum = fmaf(weight, read(t.data + at + channel), sum);
        }
        write(call.out + row * call.dim + channel, sum);
    }
    if (lane == 0)
        call.lse[(batch * heads + head) * call.positions + position] =
            total == 0.f ? -INFINITE : highest + logf(total);
}

// gate: FLOAT32=0 BF16=0,1 registers<=64
// gate: FLOAT32=1 BF16=0 registers<=64
