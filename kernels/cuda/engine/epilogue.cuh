// What comes after a product: sums of warps and splits, bias, rotation, activation, residual.
#pragma once

#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/candidate.cuh"
#include "engine/grid.cuh"
#include "engine/heads.cuh"
#include "engine/norm.cuh"
#include "engine/ring.cuh"

struct Element {
    int tile, j, n;
    __device__ __forceinline__ int row() const { return tile * 16 + 2 * j; }
};

__device__ __forceinline__ float2 add_sums(const float* sums, const Element& at) {
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float2 part = *(const float2*)(sums + (w * BATCH + at.n) * SUM_PITCH + 2 * at.j);
        sum.x += part.x, sum.y += part.y;
    }
    return sum;
}

__device__ __forceinline__ float gelu(float x) {  // erfc loses no digits where x is far below 0
    return 0.5f * x * erfcf(-0.70710678f * x);
}
__device__ __forceinline__ float silu(float x) {
    return x / (1.f + expf(-x));
}
__device__ __forceinline__ float2 load_pair(const float* from) {
    return __ldcg((const float2*)from);
}

__device__ __forceinline__ void store_qkv(const Call& call, const Element& at, float2 y) {
    const int head = at.row() / HEAD_DIM, channel = at.row() % HEAD_DIM;
    if (HEAD_NORMS && head < HEADS_Q + HEADS_KV)
        *(float2*)(call.raw_heads + (at.n * (HEADS_Q + HEADS_KV) + head) * HEAD_DIM + channel) = y;
    else
        store_head(call, at.n, head, channel, y);
}

// Adds the COUNT pairs, `apart` words from one to the next, that other CTAs leave.
template <int COUNT>
__device__ __forceinline__ void add_pairs(u64* from, i64 apart, float2& y) {
    float2 first[COUNT], second[COUNT];
    take_numbers<COUNT>(first, second, COUNT, [&](int s) { return from + s * apart; });
#pragma unroll
    for (int s = 0; s < COUNT; ++s) y.x += first[s].x, y.y += second[s].x;
}

// 8 neighbouring lanes have the 16 rows of a tile and a token. All lanes of a warp.
__device__ __forceinline__ void store_hidden(const Call& call, const Element& at, float2 y, bool takes_part) {
    const float mean = sum_over<8>(y.x + y.y) * (1.f / 16);
    const float a = y.x - mean, b = y.y - mean, squares = sum_over<8>(a * a + b * b);
    if (!takes_part) return;
    *(float2*)(call.hidden + at.n * HIDDEN + at.row()) = y;
    if (at.j == 0) call.statistics[at.n * GROUPS + at.tile] = {mean, squares};
}

// The best of the lanes that have a token becomes the row's, if it is.
__device__ __forceinline__ void leave_best(const Call& call, u64 best) {
    const int thread = (threadIdx.x - MMA_THREADS) % (32 * ADDERS);
#pragma unroll
    for (int i = 1; i < 8; i *= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, i));
    if (thread < 8 * BATCH && thread % 8 == 0) atomicMax(call.best + thread / 8, best);
}

// The adders' part of a phase: every ADDER_GROUPS-th tile of this CTA.
template <Kind KIND>
__device__ __forceinline__ void add_up(const Call& call, bool embedded, const Matrix m, Sums& sums,
                                       const Deal& deal) {
    using S = Shape<KIND>;
    const int thread = (threadIdx.x - MMA_THREADS) % (32 * ADDERS), lane = thread % 32;
    const int group = (threadIdx.x - MMA_THREADS) / (32 * ADDERS);
    const bool takes_part = thread < 8 * BATCH;
    Element at = {0, lane % 8, min(thread / 8, BATCH - 1)};
    u64 best = 0;  // HEAD: this lane's likeliest token
    for (int split_tile = deal.first; split_tile < deal.tiles; split_tile += deal.ctas, ++sums.tile) {
        if (sums.tile % ADDER_GROUPS != group) continue;
        at.tile = split_tile / S::PARTS;
        const int part = split_tile % S::PARTS;
        float2 offset = m.bias ? *(const float2*)(m.bias + at.row()) : make_float2(0.f, 0.f);
        if (adds_to_hidden(KIND) && part == 0) {
            const float* const before = embedded ? call.embed.hidden : call.hidden;
            const float2 h = load_pair(before + at.n * HIDDEN + at.row());
            offset.x += h.x, offset.y += h.y;
        }
        wait_barrier(sums.there + 8 * group, sums.parity());
        float2 y = add_sums(sums.floats + group * SUMS, at);
        __syncwarp();
        if (lane == 0) arrive(sums.read + 8 * group);
        if constexpr (S::PARTS > 1) {
            u64* const first = call.partials + ((i64)at.tile * BATCH + at.n) * 16 + 2 * at.j;  // of part 1
            constexpr i64 PART = HIDDEN * BATCH;
            if (part && takes_part) leave_numbers(first + (part - 1) * PART, {y.x, FLAG}, {y.y, FLAG});
            if (part) continue;
            if (takes_part) add_pairs<S::PARTS - 1>(first, PART, y);
            __syncwarp();
        }
        y.x += offset.x, y.y += offset.y;
        if constexpr (adds_to_hidden(KIND)) {
            store_hidden(call, at, y, takes_part);
        } else if (takes_part) {
            if constexpr (KIND == HEAD) {
                const int row = at.row();
                *(float2*)(call.logits + (i64)at.n * call.vocabulary + row) = y;
                if (row < call.tokens) best = max(best, candidate(y.x, row));
                if (row + 1 < call.tokens) best = max(best, candidate(y.y, row + 1));
            }
            if constexpr (KIND == QKV) store_qkv(call, at, y);
            u16* const to = call.activation + at.n * FFN;
            if constexpr (KIND == UP) *(u32*)(to + at.row()) = pack_pair(gelu(y.x), gelu(y.y));
            if constexpr (KIND == GATED) to[at.row() / 2] = round_element(silu(y.x) * y.y);
        }
    }
    if (KIND == HEAD && call.chooses) leave_best(call, best);
}

// The best of all, when every CTA has left its own, becomes the next token of each row; all threads of a CTA.
// Not inlined, for then the rest of a kernel would have fewer registers.
__device__ __noinline__ void begin_next(const Call& call) {
    __shared__ int2 next[BATCH];  // token, position
    const Embed& embed = call.embed;
    if (threadIdx.x < BATCH) {
        const int n = threadIdx.x, position = embed.positions[n] + 1;
        const int token = token_of(atomicExch(call.best + n, 0ull));
        next[n] = {token, position};
        embed.ids[n] = token, embed.positions[n] = position;
        *(volatile int*)(call.history + (i64)position * BATCH + n) = token;
    }
    __syncthreads();  // the next tokens are known
    for (int i = threadIdx.x; i < BATCH * GROUPS; i += THREADS)
        embed_group(embed, i / GROUPS, next[i / GROUPS].x, i % GROUPS);
    constexpr int ROTARY_PAIRS = ROTARY_DIM / 2;
    for (int i = threadIdx.x; i < BATCH * ROTARY_PAIRS; i += THREADS)
        turn_pair(embed, i / ROTARY_PAIRS, next[i / ROTARY_PAIRS].y, i % ROTARY_PAIRS);
}
