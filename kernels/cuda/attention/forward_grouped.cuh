// Attention of several groups of queries on Hopper: keys out of segments, tiles that are split over keys.
//
// Needs the macros of attention/forward_call_sm90.cuh, QUERY_GROUPS among them.
#pragma once
#include "attention/forward_call_sm90.cuh"
#include "attention/softmax.cuh"

#if !GATHERED
// A tile of K or V out of segments, box by box; keys from `last` on are zeros.
__device__ __forceinline__ void load_segments(u32 to, const TensorMap* map, u32 barrier, const int* segments,
                                              const Call& call, int key, int last, int head) {
    constexpr int END = 1 << 30;
#pragma unroll 1
    for (int i = 0; i < BLOCK_N; i += call.box) {
        const int at = key + i, length = min(call.box, last - at);
        TmaCoord from = {END, 0, END};
        if (length > 0) {
            const int segment = at / call.segment_len;
            from.position -= length;
            from.row = segments[segment] * call.segment_len + at % call.segment_len + length;
        }
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; ++block)
            copy_box(to + block * KV_BLOCK + i * 128, map, barrier, from, 64 * block, 0, head);
    }
}
#endif

// Leaves a part's O, row_max and row_sum in the workspace; the last part of a tile to come adds all, in their
// order, so that bits do not depend on which it is. Whether this is that part; `*complete` is shared memory.
//
// The workspace has for each part and warpgroup COUNT / 4 + 1 pieces of 16 bytes of each of 128 threads.
template <int COUNT>
__device__ __forceinline__ bool merge_parts(const Call& call, const Tile& t, Softmax& softmax,
                                            float (&o)[COUNT], int* complete, int group, float scale_log2) {
    constexpr int PIECES = COUNT / 4 + 1;
    const int thread = threadIdx.x % 128;
    const auto piece_of = [&](int part, int piece) {
        return (float4*)call.parts + (((i64)(t.slot + part) * GROUPS + group) * PIECES + piece) * 128 +
               thread;
    };
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i)
        *piece_of(t.part, i) = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    *piece_of(t.part, COUNT / 4) =
        make_float4(softmax.row_max[0], softmax.row_max[1], softmax.row_sum[0], softmax.row_sum[1]);
    __threadfence();
    sync_threads(1 + GROUPS + group, 128);  // the whole part is written
    if (thread == 0) {
        int* const arrivals = call.arrivals + t.slot * GROUPS + group;
        const bool last = atomicAdd(arrivals, 1) == t.num_parts - 1;
        if (last) *arrivals = 0;
        __threadfence();
        *complete = last;
    }
    sync_threads(1 + GROUPS + group, 128);  // complete is written
    if (!*complete) return false;
    float row_max[2] = {softmax.row_max[0], softmax.row_max[1]};
#pragma unroll 1
    for (int part = 0; part < t.num_parts; ++part) {
        const float4 x = __ldcg(piece_of(part, COUNT / 4));
        row_max[0] = fmaxf(row_max[0], x.x), row_max[1] = fmaxf(row_max[1], x.y);
    }
    softmax.row_sum[0] = softmax.row_sum[1] = 0.f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) o[i] = 0.f;
#pragma unroll 1
    for (int part = 0; part < t.num_parts; ++part) {
        const float4 x = __ldcg(piece_of(part, COUNT / 4));
        const float weight[2] = {x.x == row_max[0] ? 1.f : power_of_2((x.x - row_max[0]) * scale_log2),
                                 x.y == row_max[1] ? 1.f : power_of_2((x.y - row_max[1]) * scale_log2)};
        softmax.row_sum[0] = fmaf(x.z, weight[0], softmax.row_sum[0]);
        softmax.row_sum[1] = fmaf(x.w, weight[1], softmax.row_sum[1]);
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i) {
            const float4 y = __ldcg(piece_of(part, i));
            o[4 * i] = fmaf(y.x, weight[0], o[4 * i]), o[4 * i + 1] = fmaf(y.y, weight[0], o[4 * i + 1]);
            o[4 * i + 2] = fmaf(y.z, weight[1], o[4 * i + 2]),
                      o[4 * i + 3] = fmaf(y.w, weight[1], o[4 * i + 3]);
        }
    }
    softmax.row_max[0] = row_max[0], softmax.row_max[1] = row_max[1];
    return true;
}
