// What comes before a product: x to shared memory, normed or as another phase left it.
//
// Whoever writes 16 channels of the hidden state leaves their mean and squared deviations beside it. Merged
// (Chan, Golub and LeVeque, 1979) they are as good as a second pass over the deviations, and nobody reads the
// hidden state twice.
#pragma once

#include "common/async_copies.cuh"
#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/model.cuh"

__device__ __forceinline__ u16 round_element(float x) {
    return (u16)pack_pair(x, 0.f);
}
template <int LANES>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
    for (int i = 1; i < LANES; i *= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
    return x;
}

// Mean (0 for an RMS norm) and reciprocal deviation of every token; warps take tokens in turns.
__device__ __forceinline__ void merge_statistics(const float2* statistics, float eps, float2* moments) {
    const int lane = threadIdx.x % 32;
    constexpr int PER_LANE = (GROUPS + 31) / 32;
    for (int n = threadIdx.x / 32; n < BATCH; n += WARPS) {
        float2 group[PER_LANE];
        float mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int g = lane + 32 * i;
            group[i] = g < GROUPS ? __ldcg(statistics + n * GROUPS + g) : make_float2(0.f, 0.f);
            mean += group[i].x;
        }
        mean = LAYER_NORM ? sum_over<32>(mean) * (1.f / GROUPS) : 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const float off = group[i].x - mean;
            if (lane + 32 * i < GROUPS) squares += group[i].y + 16.f * off * off;
        }
        squares = sum_over<32>(squares);
        if (lane == 0) moments[n] = {mean, 1.f / sqrtf(squares * (1.f / HIDDEN) + eps)};
    }
}

constexpr int QUADS = HIDDEN / 4, PER_THREAD = (QUADS + MMA_THREADS - 1) / MMA_THREADS;
constexpr int LOADS = BATCH * PER_THREAD;  // of 16 bytes, to norm all tokens
constexpr int MAX_AHEAD = BATCH > 8 ? 5 : BATCH > 4 ? 8 : 4, AHEAD = LOADS < MAX_AHEAD ? LOADS : MAX_AHEAD;
constexpr int HELD = BATCH > 4 ? 1 : PER_THREAD;  // quads whose weights a thread holds

struct NormWeights {
    uint2 weight[HELD], bias[HELD];
};

// Of this thread's quads from `first` on.
__device__ __forceinline__ NormWeights load_norm_weights(const Matrix& m, int first = 0) {
    NormWeights held = {};
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int quad = threadIdx.x + (first + i) * MMA_THREADS;
        if (QUADS % MMA_THREADS && quad >= QUADS) break;
        held.weight[i] = ((const uint2*)m.norm_weight)[quad];
        if (LAYER_NORM) held.bias[i] = ((const uint2*)m.norm_bias)[quad];
    }
    return held;
}

__device__ __forceinline__ u32 normed_pair(float x, float y, float2 moments, u32 weight, u32 bias) {
    const float2 w = unpack_pair(weight);
    float2 r = {(x - moments.x) * moments.y * w.x, (y - moments.x) * moments.y * w.y};
    if (LAYER_NORM) {
        const float2 b = unpack_pair(bias);
        r.x += b.x, r.y += b.y;
    }
    return pack_pair(r.x, r.y);
}

// `embedded`: of the embedding; `held`: the weights of the first quads, loaded before whatever this waited
// for.
__device__ __forceinline__ void norm_x(const Call& call, bool embedded, const Matrix& m, NormWeights held,
                                       char* x, float2* moments) {
    const float* const hidden = embedded ? call.embed.hidden : call.hidden;
    constexpr int PITCH = pitch_of(HIDDEN);
    float4 ahead[AHEAD];
    const auto load = [&](int n, int i) {
        const int quad = threadIdx.x + i * MMA_THREADS;
        return QUADS % MMA_THREADS && quad >= QUADS ? make_float4(0.f, 0.f, 0.f, 0.f)
                                                    : __ldcg((const float4*)(hidden + n * HIDDEN) + quad);
    };
    const auto store = [&](int n, int i, const float4& h) {
        const int quad = threadIdx.x + i * MMA_THREADS;
        if (QUADS % MMA_THREADS && quad >= QUADS) return;
        const float2 own = moments[n];
        uint2 pair;
        pair.x = normed_pair(h.x, h.y, own, held.weight[i % HELD].x, held.bias[i % HELD].x);
        pair.y = normed_pair(h.z, h.w, own, held.weight[i % HELD].y, held.bias[i % HELD].y);
        *(uint2*)(x + n * PITCH + quad * 8) = pair;
    };
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) ahead[a] = load(a % BATCH, a / BATCH);
    merge_statistics(embedded ? call.embed.statistics : call.statistics, call.eps, moments);
    sync_threads(OF_MMA, MMA_THREADS);  // moments are there
#pragma unroll
    for (int a = 0; a < LOADS; ++a) {
        if (a && a % (BATCH * HELD) == 0) held = load_norm_weights(m, a / BATCH);
        store(a % BATCH, a / BATCH, ahead[a % AHEAD]);
        if (a + AHEAD < LOADS) ahead[a % AHEAD] = load((a + AHEAD) % BATCH, (a + AHEAD) / BATCH);
    }
}

// What OUT, O and DOWN multiply of token n, from a column on, 8 of which lie together.
template <Kind KIND>
__device__ __forceinline__ const u16* columns_from(const Call& call, int n, int column) {
    if (KIND == OUT && column >= Q_COLS) return call.activation + n * FFN + column - Q_COLS;
    return KIND == DOWN ? call.activation + n * FFN + column : call.attended + n * Q_COLS + column;
}

template <Kind KIND>
__device__ __forceinline__ void copy_x(const Call& call, char* x) {
    using S = Shape<KIND>;
    constexpr int PIECES = S::COLS / 8;  // of 16 bytes
    const int first = blockIdx.x % SPLITS * S::COLS;
#pragma unroll 2
    for (int i = threadIdx.x; i < BATCH * PIECES; i += MMA_THREADS) {
        const int n = i / PIECES, piece = i % PIECES;
        copy_async(x + n * S::PITCH + piece * 16, columns_from<KIND>(call, n, first + 8 * piece));
    }
    wait_copies();
}
