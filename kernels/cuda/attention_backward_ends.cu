// Attention backward, before and after the kernel that goes through keys and rows.
//
//   prepare   for every query row peaks and deltas of the workspace, and zeros for its sums of dq
//   finish    dq from its sums
//
// Threads and data
//   CTA    4 warps, ROWS_OF_CTA query rows of one (sequence, query head): blockIdx x, z, y.
//   warp   a row at a time; a lane has channels 8 lane to 8 lane + 7.
//
// Memory: no shared memory; dout, out and the workspace are read or written once.
//
// Macros: HEAD_DIM, a multiple of 16; BF16; ALIGNED: 1 rows of dout and out can be read, and those of dq
// written, 16 bytes at a time, 0 element by element.
//
// clang-format off
// gate: HEAD_DIM=128 BF16=1,0 ALIGNED=1 registers<=64
// gate: HEAD_DIM=32,64,256 BF16=1 ALIGNED=1,0 registers<=64
// gate: HEAD_DIM=96,192 BF16=1 ALIGNED=1 registers<=64
// clang-format on
#include "pairs.cuh"

constexpr int BLOCK_M = 64, BLOCK_N = 64;  // unused here
constexpr int ROWS_OF_CTA = 32;

#include "attention_call.cuh"
#include "attention_backward.cuh"

__device__ __forceinline__ void read_channels(u32 (&x)[4], const u16* row, int channel, int dim) {
    if (ALIGNED) {
        const uint4 piece = *(const uint4*)(row + channel);
        x[0] = piece.x, x[1] = piece.y, x[2] = piece.z, x[3] = piece.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = row[channel + 2 * i < dim ? channel + 2 * i : channel];
            if (channel + 2 * i >= dim) x[i] = 0;
            if (channel + 2 * i + 1 < dim) x[i] |= (u32)row[channel + 2 * i + 1] << 16;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ Call call) {
    const Span s = find_span(call, blockIdx.z);
    const int head = blockIdx.y, lane = threadIdx.x % 32, channel = 8 * lane;
    const int last = (s.rows + ALIGNED_ROWS - 1) / ALIGNED_ROWS * ALIGNED_ROWS;
    const i64 stored = head * call.rows + s.stored;
    for (int i = threadIdx.x / 32; i < ROWS_OF_CTA; i += 4) {
        const int row = blockIdx.x * ROWS_OF_CTA + i;
        if (row >= last) return;
        float delta = 0.f;
        if (row < s.rows && channel < call.dim) {
            u32 x[4], y[4];
            read_channels(x, row_of(call.dout, s, s.q0, row, head), channel, call.dim);
            read_channels(y, row_of(call.out, s, s.q0, row, head), channel, call.dim);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 a = unpack_pair(x[j]), b = unpack_pair(y[j]);
                delta = fmaf(a.x, b.x, fmaf(a.y, b.y, delta));
            }
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, distance);
        if (lane == 0) {
            float peak = INFINITE;
            if (row < s.rows)
                peak = call.lse[s.batch * call.lse_batch + head * call.lse_head + s.q0 + row] * LOG2E;
            const bool empty = peak == -INFINITE;
            call.peaks[stored + row] = empty ? INFINITE : peak;
            call.deltas[stored + row] = empty ? 0.f : delta;
            if (call.ordered && row % 32 == 0) call.turns[(stored + row) / 32] = 0;
        }
        if (channel < HEAD_DIM) {
            float4* const sums = (float4*)(call.sums + (stored + row) * HEAD_DIM + channel);
            sums[0] = sums[1] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) finish(const __grid_constant__ Call call) {
    const Span s = find_span(call, blockIdx.z);
    const int head = blockIdx.y, channel = threadIdx.x % 32 * 8;
    const float* const sums = call.sums + (head * call.rows + s.stored) * HEAD_DIM;
    for (int i = threadIdx.x / 32; i < ROWS_OF_CTA; i += 4) {
        const int row = blockIdx.x * ROWS_OF_CTA + i;
        if (row >= s.rows || channel >= call.dim) return;
        const float4* const from =
            (const float4*)(sums + row / 64 * (i64)(64 * HEAD_DIM) + place_of(row % 64, channel));
        const float4 a = from[0], b = from[1];
        const float f = call.scale;
        const u32 x[4] = {pack_pair(a.x * f, a.y * f), pack_pair(a.z * f, a.w * f),
                          pack_pair(b.x * f, b.y * f), pack_pair(b.z * f, b.w * f)};
        u16* const to = row_of(call.dq, s, s.q0, row, head);
        if (ALIGNED) {
            *(uint4*)(to + channel) = make_uint4(x[0], x[1], x[2], x[3]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) write_pair(to, channel + 2 * j, call.dim, x[j]);
        }
    }
}
