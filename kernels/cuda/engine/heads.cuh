// Query, key and value heads on their way to attention: normed (HEAD_NORMS), rotated, stored.
#pragma once

#include "common/pairs.cuh"

#include "engine/norm.cuh"

// A pair of channels, as packed, rotated; they become the channels that it has.
__device__ __forceinline__ float2 turned(const Call& call, int n, int& first, int& second, float2 y) {
    if (first >= ROTARY_DIM) return y;
    first /= 2, second = first + ROTARY_DIM / 2;
    const float2 turn = __ldg(call.rotation + n * (ROTARY_DIM / 2) + first);
    return {y.x * turn.x - y.y * turn.y, y.y * turn.x + y.x * turn.y};
}

// Channels `channel` and the next, as packed, of a query, key or value head of token n, rotated.
__device__ __forceinline__ void store_head(const Call& call, int n, int head, int channel, float2 y) {
    int first = channel, second = channel + 1;
    if (head < HEADS_Q + HEADS_KV) y = turned(call, n, first, second, y);
    u16* const to = head_of(call, n, head);
    to[first] = round_element(y.x), to[second] = round_element(y.y);
}

// HEAD_NORMS: an RMS norm of a query or key head as the product left it; a warp.
__device__ __forceinline__ void norm_head(const Call& call, int layer, int n, int head) {
    constexpr int HEAD_PAIRS = HEAD_DIM / 2, PER_LANE = (HEAD_PAIRS + 31) / 32;
    const int lane = threadIdx.x % 32;
    const float2* raw = (const float2*)(call.raw_heads + (n * (HEADS_Q + HEADS_KV) + head) * HEAD_DIM);
    const u32* weights = (const u32*)(call.head_norms + (layer * 2 + (head >= HEADS_Q)) * HEAD_DIM);
    float2 y[PER_LANE];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        y[i] = lane + 32 * i < HEAD_PAIRS ? __ldcg(raw + lane + 32 * i) : make_float2(0.f, 0.f);
        squares += y[i].x * y[i].x + y[i].y * y[i].y;
    }
    const float scale = 1.f / sqrtf(sum_over<32>(squares) * (1.f / HEAD_DIM) + call.eps);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int pair = lane + 32 * i;
        if (pair >= HEAD_PAIRS) break;
        const float2 w = unpack_pair(__ldg(weights + pair));
        store_head(call, n, head, 2 * pair, {y[i].x * scale * w.x, y[i].y * scale * w.y});
    }
}
