// Attention of the new tokens: a CTA reads keys of a KV head, each by LANES lanes of a warp.
//
// A lane has 8 channels, 16 bytes of every key and value; KEYS keys are side by side in a warp, and warps
// take KEYS of them in turns (head_dim 80: 10 lanes a key, 3 keys, 30 lanes at work). Each key's lanes keep
// maximum, sum and weighted values of what they saw (online softmax); they are merged in the warp, then in
// shared memory. TOGETHER query heads meet a key while it is in registers.
//
// Long contexts are split: `used` of KV_SPLITS items have a part of the keys, at least MIN_KEYS each. They
// leave their sums in memory, and the CTA that comes last merges them, in their order.
#pragma once

#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/norm.cuh"

constexpr int LANES = HEAD_DIM / 8, KEYS = 32 / LANES;
constexpr int STEPS = BATCH > 8 ? 1 : TOGETHER == 1 ? 3 : 2;  // whose loads are under way together
constexpr int MIN_KEYS = 128;
constexpr float LOWEST = -1e30f;
static_assert(HEAD_DIM % 16 == 0 && KEYS >= 1, "a key has up to 32 lanes");

// Sum over the lanes of a key, to all of them; `first` is the lane of its first channels, j this lane's own.
__device__ __forceinline__ float sum_of_key(float x, int first, int j) {
#pragma unroll
    for (int width = LANES; width > 1; width = (width + 1) / 2) {
        const int half = (width + 1) / 2;
        const float other = __shfl_down_sync(ALL_LANES, x, half);
        if (j + half < width) x += other;
    }
    return __shfl_sync(ALL_LANES, x, first);
}

struct Running {
    float maximum, total, values[8];
    __device__ __forceinline__ void merge(float other_maximum, float other_total, const float* other) {
        const float highest = fmaxf(maximum, other_maximum);
        const float mine = exp2f(maximum - highest), theirs = exp2f(other_maximum - highest);
        maximum = highest, total = total * mine + other_total * theirs;
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] = values[c] * mine + other[c] * theirs;
    }
};

__device__ __forceinline__ void unpack_eight(const uint4& packed, float* x) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

struct Merged {
    float value, maximum, total;
};

// One channel of `count` rows, merged in their order. Row r is where at(r) points.
template <class At>
__device__ __forceinline__ Merged merge_rows(int count, int channel, const At& at) {
    Merged m = {0.f, LOWEST, 0.f};
    for (int r = 0; r < count; ++r) m.maximum = fmaxf(m.maximum, at(r, HEAD_DIM));
    for (int r = 0; r < count; ++r) {
        const float factor = exp2f(at(r, HEAD_DIM) - m.maximum);
        m.value += factor * at(r, channel), m.total += factor * at(r, HEAD_DIM + 1);
    }
    return m;
}

// Item: token, KV head, part of its group, part of the keys. `merged` has room for WARPS * TOGETHER rows.
__device__ __forceinline__ void attend(const Call& call, int layer, float* merged, int item) {
    const int split = item % KV_SPLITS, owner = item / KV_SPLITS, part = owner % PARTS_OF_GROUP;
    const int kv_head = owner / PARTS_OF_GROUP % HEADS_KV, n = owner / PARTS_OF_GROUP / HEADS_KV;
    const int keys = __ldg(call.positions + n) + 1;
    const int used = max(1, min(KV_SPLITS, keys / MIN_KEYS));
    if (split >= used) return;
    const int begin = (i64)keys * split / used, end = (i64)keys * (split + 1) / used;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, j = lane % LANES, first = lane - j;
    const bool idle = lane >= KEYS * LANES;
    const int q_head = kv_head * GROUP + part * TOGETHER;
    const float scale = LOG2E * rsqrtf((float)HEAD_DIM);

    uint4 q[TOGETHER];
    Running running[TOGETHER];
#pragma unroll
    for (int g = 0; g < TOGETHER; ++g) {
        q[g] = __ldcg((const uint4*)(call.q + (n * HEADS_Q + q_head + g) * HEAD_DIM) + j);
        running[g] = {LOWEST, 0.f, {}};
    }
    const i64 base = layer * call.kv_layer + n * call.kv_batch + kv_head * call.kv_head + 8 * j;
    for (int step = begin + warp * KEYS; step < end; step += STEPS * WARPS * KEYS) {
        uint4 key[STEPS], value[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {  // what is behind the end is read at the end and not counted
            const i64 at = base + min(step + s * WARPS * KEYS + lane / LANES, end - 1) * call.kv_position;
            key[s] = __ldcg((const uint4*)(call.k + at)), value[s] = __ldcg((const uint4*)(call.v + at));
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const bool counts = !idle && step + s * WARPS * KEYS + lane / LANES < end;
            float k[8], v[8];
            unpack_eight(key[s], k), unpack_eight(value[s], v);
#pragma unroll
            for (int g = 0; g < TOGETHER; ++g) {
                float channels[8], score = 0.f;
                unpack_eight(q[g], channels);
#pragma unroll
                for (int c = 0; c < 8; ++c) score += channels[c] * k[c];
                score = sum_of_key(score, first, j) * scale;
                if (!counts) score = LOWEST;
                Running& r = running[g];
                const float highest = fmaxf(r.maximum, score), rescale = exp2f(r.maximum - highest);
                const float p = counts ? exp2f(score - highest) : 0.f;
                r.maximum = highest, r.total = r.total * rescale + p;
#pragma unroll
                for (int c = 0; c < 8; ++c) r.values[c] = r.values[c] * rescale + p * v[c];
            }
        }
    }

#pragma unroll
    for (int g = 0; g < TOGETHER; ++g) {
        Running& r = running[g];
#pragma unroll
        for (int k = 1; k < KEYS; ++k) {
            const int from = j + k * LANES;
            const float maximum = __shfl_sync(ALL_LANES, r.maximum, from);
            const float total = __shfl_sync(ALL_LANES, r.total, from);
            float values[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) values[c] = __shfl_sync(ALL_LANES, r.values[c], from);
            if (lane < LANES) r.merge(maximum, total, values);
        }
        float* mine = merged + (warp * TOGETHER + g) * MERGED_ROW;
        if (lane < LANES)
#pragma unroll
            for (int c = 0; c < 8; ++c) mine[8 * j + c] = r.values[c];
        if (lane == 0) mine[HEAD_DIM] = r.maximum, mine[HEAD_DIM + 1] = r.total;
    }
    sync_threads(OF_MMA, MMA_THREADS);  // all warps' sums are there
    float* const parts = call.kv_parts + (i64)owner * KV_SPLITS * TOGETHER * MERGED_ROW;
    u16* const out = call.activation + n * (Q_COLS + FFN) + q_head * HEAD_DIM;
    for (int i = threadIdx.x; i < TOGETHER * HEAD_DIM; i += MMA_THREADS) {
        const int g = i / HEAD_DIM, channel = i % HEAD_DIM;
        const Merged m = merge_rows(
            WARPS, channel, [&](int w, int at) { return merged[(w * TOGETHER + g) * MERGED_ROW + at]; });
        if (used == 1) {
            out[i] = round_element(m.value / m.total);
        } else {
            float* row = parts + (split * TOGETHER + g) * MERGED_ROW;
            row[channel] = m.value;
            if (channel == 0) row[HEAD_DIM] = m.maximum, row[HEAD_DIM + 1] = m.total;
        }
    }
    sync_threads(OF_MMA, MMA_THREADS);  // the sums of warps have been read, all is written
    if (used == 1) return;
    u32* const last = (u32*)merged;
    if (threadIdx.x == 0) {
        __threadfence();
        *last = atomicAdd(call.kv_arrivals + owner, 1u) == used - 1;
        if (*last) call.kv_arrivals[owner] = 0;
        __threadfence();
    }
    sync_threads(OF_MMA, MMA_THREADS);  // whether all parts are there is known
    if (*last)
        for (int i = threadIdx.x; i < TOGETHER * HEAD_DIM; i += MMA_THREADS) {
            const Merged m = merge_rows(used, i % HEAD_DIM, [&](int s, int at) {
                return __ldcg(parts + (s * TOGETHER + i / HEAD_DIM) * MERGED_ROW + at);
            });
            out[i] = round_element(m.value / m.total);
        }
    sync_threads(OF_MMA, MMA_THREADS);  // `last` has been read, all is written
}
