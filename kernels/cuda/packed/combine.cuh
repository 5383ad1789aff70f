// Combine of partial results: of warps in shared memory, of thread blocks through global memory.
//
// A row of a result is ROW_FLOATS floats: the sum of p v, row_max, the sum of p.
#pragma once

#include "packed/state.cuh"

// A row spread over a warp: pairs lane, lane + 32, ...
constexpr int PAIRS_OF_LANE = (HEAD_DIM / 2 + 31) / 32;

// The Hadamard transform of a row in blocks of BLOCK channels, without its factor.
template <int BLOCK>
__device__ __forceinline__ void hadamard_row(float2 (&x)[PAIRS_OF_LANE], int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        x[i] = {x[i].x + x[i].y, x[i].x - x[i].y};
#pragma unroll
        for (int bit = 1; bit < min(32, BLOCK / 2); bit *= 2) {
            const float2 other = {__shfl_xor_sync(ALL_LANES, x[i].x, bit),
                                  __shfl_xor_sync(ALL_LANES, x[i].y, bit)};
            const float sign = lane & bit ? -1.f : 1.f;
            x[i] = {fmaf(sign, x[i].x, other.x), fmaf(sign, x[i].y, other.y)};
        }
    }
#pragma unroll
    for (int h = 1; h < BLOCK / 64; h *= 2) {
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) {
            if (i & h) continue;
            const float2 a = x[i], b = x[i + h];
            x[i] = {a.x + b.x, a.y + b.y};
            x[i + h] = {a.x - b.x, a.y - b.y};
        }
    }
}

// The states of the first `warps` warps become `rows` [row_count][ROW_FLOATS]; the others have met no token.
// All threads. Warps leave up to `max_rows` rows at a time in memory `stride` floats apart.
__device__ __forceinline__ void combine_warps(const State& state, int row_count, int max_rows, float* merge,
                                              int stride, int warps, float* rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll 1
    for (int first = 0; first < row_count; first += max_rows) {
        const int held = min(max_rows, row_count - first);
#pragma unroll
        for (int j = 0; j < LANE_ROWS; ++j) {
            const int row = LANE_ROWS * (lane % 4) + j - first;
            if (row < 0 || row >= held || warp >= warps) continue;
            float* to = merge + warp * stride + row * ROW_FLOATS;
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) {
                to[16 * i + g] = state.out[i][j];
                to[16 * i + 8 + g] = state.out[i][LANE_ROWS + j];
            }
            if (g == 0) {
                to[HEAD_DIM] = state.row_max[j];
                to[HEAD_DIM + 1] = state.sum[j];
            }
        }
        __syncthreads();  // the merge area holds the rows of all warps
#pragma unroll 1
        for (int i = threadIdx.x; i < held * (ROW_FLOATS / 2); i += WARPS * 32) {
            const int row = i / (ROW_FLOATS / 2), c = i - row * (ROW_FLOATS / 2);
            const float *ends = merge + row * ROW_FLOATS + HEAD_DIM, *from = ends - HEAD_DIM + 2 * c;
            float top = MIN_ROW_MAX;
            float2 value = {0.f, 0.f};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, w < warps ? ends[w * stride] : MIN_ROW_MAX);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 x = w < warps ? *(const float2*)(from + w * stride) : float2{0.f, 0.f};
                const float weight = w < warps ? power_of_2(ends[w * stride] - top) : 0.f;
                value.x += x.x * weight;
                value.y += x.y * weight;
            }
            if (2 * c == HEAD_DIM) value.x = top;
            ((float2*)(rows + (first + row) * ROW_FLOATS))[c] = value;
        }
        __syncthreads();  // `rows` is whole, the merge area may be written again
    }
}

// The splits that thread blocks left in `partial`, [num_splits][8][ROW_FLOATS], become `rows`; a thread has
// two channels. All loads of AT_ONCE splits are in flight together, for their latency is what this costs.
__device__ __forceinline__ void combine_splits(const float* partial, int num_splits, int row_count,
                                               float* rows) {
    constexpr int PART = 8 * ROW_FLOATS / 2, ROW_PAIRS = HEAD_DIM / 2, AT_ONCE = 18;
#pragma unroll 1
    for (int i = threadIdx.x; i < row_count * ROW_PAIRS; i += WARPS * 32) {
        const int row = i / ROW_PAIRS, c = i % ROW_PAIRS;
        const float2 *from = (const float2*)(partial + row * ROW_FLOATS) + c, *ends = from - c + ROW_PAIRS;
        float2 value = {0.f, 0.f};
        float top = MIN_ROW_MAX, sum = 0.f;
#pragma unroll 1
        for (int first = 0; first < num_splits; first += AT_ONCE) {
            float2 x[AT_ONCE], end[AT_ONCE];  // of a split: two channels; row_max and sum
            const float before = top;
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const bool there = first + k < num_splits;
                end[k] = there ? __ldcg(ends + (first + k) * PART) : float2{MIN_ROW_MAX, 0.f};
                x[k] = there ? __ldcg(from + (first + k) * PART) : float2{0.f, 0.f};
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) top = fmaxf(top, end[k].x);
            const float factor = power_of_2(before - top);
            value.x *= factor, value.y *= factor, sum *= factor;
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const float weight = power_of_2(end[k].x - top);
                value.x += x[k].x * weight;
                value.y += x[k].y * weight;
                sum += end[k].y * weight;
            }
        }
        ((float2*)(rows + row * ROW_FLOATS))[c] = value;
        if (c == 0) ((float2*)(rows + row * ROW_FLOATS))[ROW_PAIRS] = {top, sum};
    }
    __syncthreads();  // `rows` is whole
}
