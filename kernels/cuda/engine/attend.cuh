// Attention of the new tokens: a CTA reads all keys of a KV head, its warps take keys in turns.
//
// A lane has channels 2 lane + 64 i and the next of every key; scores and sums of a warp's keys stay in its
// registers (online softmax), and warps are merged in shared memory.
#pragma once

#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/norm.cuh"

constexpr int TWOS = (HEAD_DIM + 63) / 64;  // of channels a lane
constexpr float LOWEST = -1e30f;

__device__ __forceinline__ float2 load_two(const u16* row, int channel) {
    return channel < HEAD_DIM ? unpack_pair(__ldcg((const u32*)(row + channel))) : make_float2(0.f, 0.f);
}

__device__ __forceinline__ void attend(const Call& call, int layer, float* merged, int kv_head, int n,
                                       int keys) {
    constexpr int ROW = HEAD_DIM + 2;  // channels, maximum, sum
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float2 q[GROUP][TWOS], sums[GROUP][TWOS] = {};
    float maximum[GROUP], total[GROUP] = {};
    const float scale = LOG2E * rsqrtf((float)HEAD_DIM);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        maximum[g] = LOWEST;
#pragma unroll
        for (int i = 0; i < TWOS; ++i) {
            q[g][i] = load_two(call.q + (n * HEADS_Q + kv_head * GROUP + g) * HEAD_DIM, 2 * lane + 64 * i);
            q[g][i].x *= scale, q[g][i].y *= scale;
        }
    }
    const i64 base = layer * call.kv_layer + n * call.kv_batch + kv_head * call.kv_head;
#pragma unroll 2
    for (int key = warp; key < keys; key += WARPS) {
        const u16 *k = call.k + base + key * call.kv_position, *v = call.v + base + key * call.kv_position;
        float2 keys_at[TWOS], values_at[TWOS];
#pragma unroll
        for (int i = 0; i < TWOS; ++i)
            keys_at[i] = load_two(k, 2 * lane + 64 * i), values_at[i] = load_two(v, 2 * lane + 64 * i);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float score = 0.f;
#pragma unroll
            for (int i = 0; i < TWOS; ++i) score += q[g][i].x * keys_at[i].x + q[g][i].y * keys_at[i].y;
            score = sum_over<32>(score);
            const float higher = fmaxf(maximum[g], score), rescale = exp2f(maximum[g] - higher);
            const float p = exp2f(score - higher);
            maximum[g] = higher, total[g] = total[g] * rescale + p;
#pragma unroll
            for (int i = 0; i < TWOS; ++i) {
                sums[g][i].x = sums[g][i].x * rescale + p * values_at[i].x;
                sums[g][i].y = sums[g][i].y * rescale + p * values_at[i].y;
            }
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        float* mine = merged + (warp * GROUP + g) * ROW;
#pragma unroll
        for (int i = 0; i < TWOS; ++i)
            if (2 * lane + 64 * i < HEAD_DIM)
                mine[2 * lane + 64 * i] = sums[g][i].x, mine[2 * lane + 64 * i + 1] = sums[g][i].y;
        if (lane == 0) mine[HEAD_DIM] = maximum[g], mine[HEAD_DIM + 1] = total[g];
    }
    sync_threads(OF_MMA, MMA_THREADS);  // all warps' sums are there
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += MMA_THREADS) {
        const int g = i / HEAD_DIM, channel = i % HEAD_DIM;
        float highest = LOWEST, sum = 0.f, weight = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, merged[(w * GROUP + g) * ROW + HEAD_DIM]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float* row = merged + (w * GROUP + g) * ROW;
            const float factor = exp2f(row[HEAD_DIM] - highest);
            sum += factor * row[channel], weight += factor * row[HEAD_DIM + 1];
        }
        call.activation[n * (Q_COLS + FFN) + (kv_head * GROUP + g) * HEAD_DIM + channel] =
            round_element(sum / weight);
    }
}
