// Attention backward, before and after the kernel that goes through keys and rows.
//
//   preprocess   for every query row lse_log2 and dpsum of the workspace, and zeros for its dq_accum
//   postprocess  dq from dq_accum
//
// Threads and data
//   CTA    8 warps, ROWS_OF_CTA query rows of one (sequence, query head): blockIdx x, z, y.
//   row    LANES lanes of a warp, each 8 channels: ROWS_AT_ONCE rows a step.
//
// With QUERY_GROUPS > 1 blockIdx.z counts the sequences of every group, one group after the other.
//
// Memory: no shared memory; dout, out and the workspace are read or written once.
//
// Macros: HEAD_DIM, a multiple of 16; FLOAT32: 1 elements are float32, lse_log2 base e, 0 of the 16-bit type
// that BF16 says; QUERY_GROUPS, most groups of queries of a call (1 if it is not given); ALIGNED: 1 rows of
// dout and out can be read, and those of dq written, 16 bytes at a time, 0 element by element; BLOCK_M, as
// the kernel between them has it; FIRST_STORES: 1 where the first CTA of that kernel that has a part
// of dq stores it, so that no zeros are needed (0 if it is not given).
#include "common/pairs.cuh"

#ifndef BLOCK_M
constexpr int BLOCK_M = 64;
#endif
#ifndef FIRST_STORES
#define FIRST_STORES 0
#endif
constexpr int BLOCK_N = 64;  // unused here
constexpr int ROWS_OF_CTA = 32, THREADS = 256;
constexpr int LANES = HEAD_DIM > 128 ? 32 : HEAD_DIM > 64 ? 16 : HEAD_DIM > 32 ? 8 : 4;
constexpr int ROWS_AT_ONCE = THREADS / LANES;

#include "attention/call.cuh"
#include "attention/backward.cuh"

// Reads 8 channels of a row, 0 for those that are not there.
__device__ __forceinline__ void read_channels(float (&x)[8], const Element* row, int channel, int dim) {
#if FLOAT32
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = channel + i < dim ? row[channel + i] : 0.f;
#else
    u32 words[4];
    if (ALIGNED) {
        const uint4 piece = *(const uint4*)(row + channel);
        words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = channel + 2 * i < dim ? row[channel + 2 * i] : 0;
            if (channel + 2 * i + 1 < dim) words[i] |= (u32)row[channel + 2 * i + 1] << 16;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
#endif
}

__device__ __forceinline__ void write_channels(Element* row, const float (&x)[8], int channel, int dim) {
#if FLOAT32
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (channel + i < dim) row[channel + i] = x[i];
#else
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_pair(x[2 * i], x[2 * i + 1]);
    if (ALIGNED) {
        *(uint4*)(row + channel) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) write_pair(row, channel + 2 * i, dim, words[i]);
    }
#endif
}

// Whether a row sees a key, and some CTA has a part of its dq.
__device__ __forceinline__ bool sees_keys(const Call& call, const SeqInfo& s, int row) {
    const int position = row + s.behind;
    return max(0, position - call.left) <= min(s.keys - 1, position + call.right);
}

// The sequence of a CTA, and the arrays of its group.
struct Part {
    SeqInfo s;
    Tensor dout, out, dq;
    const float* lse;
    i64 lse_batch, lse_head;
};

__device__ __forceinline__ Part find_part(const Call& call) {
#if QUERY_GROUPS > 1
    const int g = blockIdx.z / call.sequences, sequence = blockIdx.z % call.sequences;
    const QueryGroup& group = call.groups[g];
    SeqInfo s = {sequence};
    s.q0 = group.cu_q[sequence], s.rows = max(0, group.cu_q[sequence + 1] - s.q0);
    s.workspace_row = group.workspace_row + find_workspace_row(call, sequence, s.q0, s.rows);
    Tensor dq = call.dq;
    dq.data += group.first_row * dq.position;
    return {s, group.dout, group.out, dq, group.lse, 0, group.lse_head};
#else
    return {find_sequence(call, blockIdx.z),
            call.dout,
            call.out,
            call.dq,
            call.lse,
            call.lse_batch,
            call.lse_head};
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) preprocess(const __grid_constant__ Call call) {
    const Part part = find_part(call);
    const SeqInfo& s = part.s;
    const int head = blockIdx.y, lane = threadIdx.x % LANES, channel = 8 * lane;
    const int last = (s.rows + ALIGNED_ROWS - 1) / ALIGNED_ROWS * ALIGNED_ROWS;
    const i64 workspace_row = head * call.rows + s.workspace_row;
    for (int i = threadIdx.x / LANES; i < ROWS_OF_CTA; i += ROWS_AT_ONCE) {
        const int row = blockIdx.x * ROWS_OF_CTA + i;
        if (row >= last) return;  // all rows of the warp: `last` is a multiple of ROWS_OF_CTA
        float row_dpsum = 0.f;
        if (row < s.rows && channel < call.dim) {
            float x[8], y[8];
            read_channels(x, row_of(part.dout, s, s.q0, row, head), channel, call.dim);
            read_channels(y, row_of(part.out, s, s.q0, row, head), channel, call.dim);
#pragma unroll
            for (int j = 0; j < 8; ++j) row_dpsum = fmaf(x[j], y[j], row_dpsum);
        }
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2)
            row_dpsum += __shfl_xor_sync(ALL_LANES, row_dpsum, distance);
        if (lane == 0) {
            float row_lse = INFINITE;
            if (row < s.rows)
                row_lse = part.lse[s.batch * part.lse_batch + head * part.lse_head + s.q0 + row] *
                          (FLOAT32 ? 1.f : LOG2E);
            const bool empty = row_lse == -INFINITE;
            call.lse_log2[workspace_row + stat_offset(row)] = empty ? INFINITE : row_lse;
            call.dpsum[workspace_row + stat_offset(row)] = empty ? 0.f : row_dpsum;
            if ((FIRST_STORES || call.deterministic) && row % 16 == 0)
                call.dq_semaphore[(workspace_row + row) / 16] = 0;
        }
        if (channel < HEAD_DIM && !(FIRST_STORES && sees_keys(call, s, row))) {
            float4* const accum = (float4*)(call.dq_accum + (workspace_row + row) * HEAD_DIM + channel);
            accum[0] = accum[1] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
}

// A thread has 8 channels of rows r and r + 8, as they lie beside each other; where TURNED 16 channels of
// rows r and r + 1.
extern "C" __global__ void __launch_bounds__(THREADS) postprocess(const __grid_constant__ Call call) {
    const Part part = find_part(call);
    const SeqInfo& s = part.s;
    const int head = blockIdx.y;
    const float* const accum = call.dq_accum + (head * call.rows + s.workspace_row) * HEAD_DIM;
    const float f = call.scale;
#if !FLOAT32
    if constexpr (TURNED) {
        for (int i = threadIdx.x; i < ROWS_OF_CTA * HEAD_DIM / 32; i += THREADS) {
            const int row = blockIdx.x * ROWS_OF_CTA + i / (HEAD_DIM / 4) * 8 + i % 4 * 2;
            const int channel = i % (HEAD_DIM / 4) / 4 * 16;
            if (row >= s.rows) continue;
            const float4* const from = (const float4*)(accum + turned_offset(row, channel));
            float x[2][2][8];  // of a row 8 channels, then 8 more
#pragma unroll
            for (int g = 0; g < 8; ++g) {
                const float4 piece = from[4 * g];
                x[0][0][g] = piece.x * f, x[1][0][g] = piece.y * f;
                x[0][1][g] = piece.z * f, x[1][1][g] = piece.w * f;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row + j / 2 < s.rows && channel + j % 2 * 8 < call.dim)
                    write_channels(row_of(part.dq, s, s.q0, row + j / 2, head), x[j / 2][j % 2],
                                   channel + j % 2 * 8, call.dim);
        }
        return;
    }
#endif
    for (int i = threadIdx.x; i < ROWS_OF_CTA * HEAD_DIM / 16; i += THREADS) {
        const int row = blockIdx.x * ROWS_OF_CTA + i / HEAD_DIM * 16 + i % 8, channel = i % HEAD_DIM / 8 * 8;
        if (row >= s.rows || channel >= call.dim) continue;
        const float4* const from =
            (const float4*)(accum + row / 64 * (i64)(64 * HEAD_DIM) + accum_offset(row % 64, channel));
        float x[2][8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 piece = from[j];
            x[0][2 * j] = piece.x * f, x[0][2 * j + 1] = piece.y * f;
            x[1][2 * j] = piece.z * f, x[1][2 * j + 1] = piece.w * f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (row + 8 * half < s.rows)
                write_channels(row_of(part.dq, s, s.q0, row + 8 * half, head), x[half], channel, call.dim);
    }
}

// gate: HEAD_DIM=128 FLOAT32=0 BF16=1,0 ALIGNED=1 registers<=64
// gate: HEAD_DIM=32,64,256 FLOAT32=0 BF16=1 ALIGNED=1,0 registers<=64
// gate: HEAD_DIM=96,192 FLOAT32=0 BF16=1 ALIGNED=1 registers<=64
// gate: HEAD_DIM=64,96,128 FLOAT32=0 BF16=1,0 ALIGNED=1 QUERY_GROUPS=16 registers<=64
// gate: HEAD_DIM=128 FLOAT32=0 BF16=1,0 ALIGNED=1 BLOCK_M=80 registers<=64
// gate: HEAD_DIM=128 FLOAT32=0 BF16=1,0 ALIGNED=1 BLOCK_M=80 QUERY_GROUPS=2 registers<=64
// gate: HEAD_DIM=64,96,128,256 FLOAT32=0 BF16=1,0 ALIGNED=1 FIRST_STORES=1 registers<=64 arch=sm_90a
// gate: HEAD_DIM=64,256 FLOAT32=1 BF16=0 ALIGNED=0 registers<=64
