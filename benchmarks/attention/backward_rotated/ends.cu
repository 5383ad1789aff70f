// Before and after the backward kernel: peaks, negated deltas, zeros; dq from its sums. Experiment.
#include "common/pairs.cuh"
#include "call.cuh"
constexpr int THREADS = 256, ROWS_OF_CTA = 32;
constexpr int LANES = HEAD_DIM > 64 ? 16 : 8, ROWS_AT_ONCE = THREADS / LANES;
struct Span {
    int batch, q0, rows;
    i64 stored;
};
__device__ __forceinline__ Span find_span(const Call& call, int z) {
    Span s;
    s.batch = call.cu_q ? 0 : z, s.q0 = call.cu_q ? call.cu_q[z] : 0;
    s.rows = call.cu_q ? call.cu_q[z + 1] - s.q0 : call.q_length;
    s.stored = (i64)ALIGNED_ROWS *
               (call.cu_q ? s.q0 / ALIGNED_ROWS + z : z * ((s.rows + ALIGNED_ROWS - 1) / ALIGNED_ROWS));
    return s;
}
__device__ __forceinline__ u16* row_of(const Tensor& t, const Span& s, int row, int head) {
    return t.data + s.batch * t.batch + (i64)(s.q0 + row) * t.position + head * t.head;
}
__device__ __forceinline__ void read_channels(float (&x)[8], const u16* from) {
    const uint4 piece = *(const uint4*)from;
    const u32 pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 p = unpack_pair(pairs[i]);
        x[2 * i] = p.x, x[2 * i + 1] = p.y;
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const __grid_constant__ Call call) {
    const Span s = find_span(call, blockIdx.z);
    const int head = blockIdx.y, lane = threadIdx.x % LANES, channel = 8 * lane;
    const int last = (s.rows + ALIGNED_ROWS - 1) / ALIGNED_ROWS * ALIGNED_ROWS;
    const i64 stored = head * call.rows + s.stored;
#pragma unroll
    for (int i = threadIdx.x / LANES; i < ROWS_OF_CTA; i += ROWS_AT_ONCE) {
        const int row = blockIdx.x * ROWS_OF_CTA + i;
        if (row >= last) return;
        float delta = 0.f;
        if (row < s.rows && channel < call.dim) {
            float x[8], y[8];
            read_channels(x, row_of(call.dout, s, row, head) + channel);
            read_channels(y, row_of(call.out, s, row, head) + channel);
#pragma unroll
            for (int j = 0; j < 8; ++j) delta = fmaf(x[j], y[j], delta);
        }
#pragma unroll
        for (int d = LANES / 2; d; d /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, d);
        if (lane == 0) {
            float peak = INFINITE;
            if (row < s.rows)
                peak = call.lse[s.batch * call.lse_batch + head * call.lse_head + s.q0 + row] * LOG2E;
            const bool empty = peak == -INFINITE;
            call.peaks[stored + stat_place(row)] = empty ? INFINITE : peak;
            call.deltas[stored + stat_place(row)] = empty ? 0.f : -delta;
            if (call.ordered && row % 32 == 0) call.turns[(stored + row) / 32] = 0;
        }
        if (channel < HEAD_DIM) {
            float4* const sums = (float4*)(call.sums + (stored + row) * HEAD_DIM + channel);
            sums[0] = sums[1] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
}
// A thread has 8 channels of rows r and r + 8; a warp 8 such pairs by 32 channels.
extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Call call) {
    const Span s = find_span(call, blockIdx.z);
    const int head = blockIdx.y;
    constexpr int PARTS = HEAD_DIM / 32;
    const float* const sums = call.sums + (head * call.rows + s.stored) * HEAD_DIM;
    for (int j = threadIdx.x / 32; j < 2 * PARTS; j += THREADS / 32) {
        const int row = blockIdx.x * 32 + j / PARTS * 16 + threadIdx.x % 8;
        if (row >= s.rows) continue;
        const int channel = j % PARTS * 32 + threadIdx.x % 32 / 8 * 8;
        const float4* const from =
            (const float4*)(sums + row / 64 * (i64)(64 * HEAD_DIM) + channel / 64 * 4096 +
                            channel % 64 / 8 * 512 + (row % 64 / 16 * 32 + row % 8 * 4) * 4);
        const float f = call.scale;
        u32 x[2][4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const float4 v = from[u];
            x[0][u] = pack_pair(v.x * f, v.y * f), x[1][u] = pack_pair(v.z * f, v.w * f);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (row + 8 * half < s.rows && channel < call.dim)
                *(uint4*)(row_of(call.dq, s, row + 8 * half, head) + channel) =
                    make_uint4(x[half][0], x[half][1], x[half][2], x[half][3]);
    }
}
