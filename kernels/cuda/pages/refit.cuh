// Frames of keys that are fitted to the newest tokens (kvlab/ops/frame.py): how much larger keys of a rotary
// pair are than its queries lately, by how much its shift rises, and stored codes in the frame of then.
#pragma once

#include "pages/code_layout.cuh"
#include "pages/encode.cuh"
#include "pages/state.cuh"
#include "pages/scales.cuh"

constexpr int MAX_SHIFT = 14, MAX_FURTHER = 10;
constexpr int MIN_GROWN = 800, MIN_AGAIN = 640;  // in 256ths of an order; where a pair has a shift
static_assert(MIN_AGAIN <= MIN_GROWN);

// Queries by strides, [batch][steps][heads * group][HEAD_DIM].
struct Queries {
    const u16* q;
    long long batch, step, head;
    int group;
};

// Whether a size is neither 0 nor infinite nor NaN.
__device__ __forceinline__ bool is_size(float x) {
    return x > 0.f && x < __int_as_float(0x7f800000);
}

// Lets the ratio of a rotary pair of a head follow new tokens from step `first` on, as `follow_ratios` does,
// and returns it; a thread has a pair. Where tokens of the row wait it stays, which is looked at last.
//
// A warp stops at the first number that it needs. So keys, queries, ratio and frame are asked for side by
// side in a step, before anything is done with one of them, and not before the loop.
__device__ __forceinline__ int follow_ratio(const LayerState& s, const NewTokens& n, const Queries& queries,
                                            int row, int head, int first, int pair) {
    constexpr int HALF = HEAD_DIM / 2, MAX_RATIO = 16 << 8, JUMP = 7 << 8;  // 16 and 7 binary orders
    const u64 bh = (u64)row * s.heads + head;
    const __half* const mean = s.k_mean + bh * HEAD_DIM + pair;
    const u16* q_step =
        queries.q + row * queries.batch + first * queries.step + head * queries.group * queries.head + pair;
    const u16* k = n.k + row * n.k_batch + first * n.k_step + head * n.k_head + pair;
    short* const ratios = s.k_ratio + bh * HALF + pair;
    const int waits = s.waits[row];
    int ratio = 0;
#pragma unroll 1
    for (int step = first; step < n.num_new; ++step, k += n.k_step, q_step += queries.step) {
        asm volatile("" ::: "memory");  // what is read below is not read before the loop
        if (step == first) ratio = *ratios;
        if (n.valid && !n.valid[(u64)row * n.num_new + step]) continue;
        const u32 key[2] = {k[0], k[HALF]};
        const __half mean_of[2] = {mean[0], mean[HALF]};
        const int exponent = s.exponent[2 * bh];
        float of_queries = 0.f;
        const u16* q = q_step;
#pragma unroll 4
        for (int g = 0; g < queries.group; ++g, q += queries.head) {
            of_queries += fabsf(raw_value(q[0]));
            of_queries += fabsf(raw_value(q[HALF]));
        }
        const float power = power_of_two(exponent);
        const float of_keys = fabsf(raw_value(key[0]) - __half2float(mean_of[0]) * power) +
                              fabsf(raw_value(key[1]) - __half2float(mean_of[1]) * power);
        if (!is_size(of_keys) || !is_size(of_queries)) continue;
        const int now = (int)(__float_as_uint(of_keys) >> 15) - (int)(__float_as_uint(of_queries) >> 15);
        const int change = min(max(now, -MAX_RATIO), MAX_RATIO) - ratio;
        ratio += queries.group > 1 && change >= JUMP ? change : change >> 3;
    }
    if (waits || first >= n.num_new) return *ratios;
    *ratios = (short)ratio;
    return ratio;
}

#if IN_BLOCKS
// The binary orders by which the shift of a rotary pair of a head rises: see `further_shift`. HEAD_DIM / 2
// threads call it, and `meet` is a barrier of them.
template <class Meet>
__device__ __forceinline__ int further_shift(int ratio, int shift, int pair, const Meet& meet) {
    constexpr int HALF = HEAD_DIM / 2;
    __shared__ int ratios[HALF], middle, largest[HALF / 32], far[HALF / 32];
    const int own = ratio - (shift << 9), warp = pair / 32;
    // Nearly always the largest is less than MIN_AGAIN above half of them. What a launch meets first takes
    // time, so one warp does without memory.
    int top = __reduce_max_sync(ALL_LANES, own), below = 0;
    if (HALF > 32) {
        largest[warp] = top;
        meet();  // those of all warps are there
#pragma unroll
        for (int i = 0; i < HALF / 32; ++i) top = max(top, largest[i]);
    }
    below = __popc(__ballot_sync(ALL_LANES, own <= top - MIN_AGAIN));
    if (HALF > 32) {
        far[warp] = below, below = 0;
        meet();  // how many are so far below it is there
#pragma unroll
        for (int i = 0; i < HALF / 32; ++i) below += far[i];
    }
    if (below <= (HALF - 1) / 2) return 0;
    ratios[pair] = own;
    meet();  // those of all pairs are there
    below = 0;
#pragma unroll 8
    for (int i = 0; i < HALF; ++i) below += ratios[i] < own || (ratios[i] == own && i < pair);
    if (below == (HALF - 1) / 2) middle = own;
    meet();  // the median is there
    const int grown = own - middle;
    const bool is_large = grown >= (shift ? MIN_AGAIN : MIN_GROWN);
    return is_large ? min((grown + 256) >> 9, min(MAX_SHIFT - shift, MAX_FURTHER)) : 0;
}

// Butterflies of blocks of KEY_ROTATION channels; lane: channels lane + 32 i.
template <int CHANNELS>
__device__ __forceinline__ void add_and_subtract(int (&x)[CHANNELS], int lane) {
#pragma unroll
    for (int h = 1; h < KEY_ROTATION; h *= 2) {
        if (h < 32) {
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                const int other = __shfl_xor_sync(ALL_LANES, x[i], h);
                x[i] = lane & h ? other - x[i] : x[i] + other;
            }
        } else {
            const int first = x[0];
            x[0] = first + x[CHANNELS - 1], x[CHANNELS - 1] = first - x[CHANNELS - 1];
        }
    }
}
static_assert(KEY_ROTATION <= 64, "two channels of a lane");

// Finds the codes of channels first to first + 31 or 63, in order, of a slot again: see `refit_codes` of
// kvlab/reference/blocks.py. By position: `further` orders, and `most` of those of a rotation.
__device__ __forceinline__ void refit_codes(u8* codes, int profile, int slot, int first, const u8* further,
                                            const u8* most, int lane) {
    constexpr int BLOCK = HEAD_DIM / KEY_BLOCKS, CHANNELS = KEY_ROTATION > 32 ? 2 : 1;
    int x[CHANNELS], before[CHANNELS];
    const auto position = [&](int j) {
        const int channel = first + lane + 32 * j, block = channel / BLOCK;
        const Run run = run_of_block(profile, block);
        return make_int3(width_of_block(profile, block), 128 * run.word, channel - BLOCK * run.first);
    };
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        const int3 at = position(j);
        u32 code = 0;
        KVLAB_FOR_WIDTH(at.x, code = read_code<BITS>(codes + at.y, element_at(KEYS, slot, at.z)));
        before[j] = code, x[j] = at.x ? 2 * (int)code + 1 - (1 << at.x) : 0;
    }
    add_and_subtract(x, lane);
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j)
        x[j] *= 1 << (most[first + lane + 32 * j] - further[first + lane + 32 * j]);
    add_and_subtract(x, lane);
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        const int3 at = position(j);
        const int raised = most[first + lane + 32 * j], width = at.x;
        if (!width || !raised) continue;
        const int cell = (x[j] + (KEY_ROTATION << (width + raised))) >> (log_of(KEY_ROTATION) + raised + 1);
        const u32 code = min(max(cell, 0), (1 << width) - 1);
        if (code != before[j])
            KVLAB_FOR_WIDTH(width, write_code<BITS>(codes + at.y, element_at(KEYS, slot, at.z), code));
    }
}

// Raises the shifts of a head, and has its pages hold the keys of then; all threads. `rises` is that of
// rotary pair `pair`, if there is one.
__device__ __noinline__ void raise_shifts(const LayerState& s, int bh, int pair, int rises) {
    constexpr int HALF = HEAD_DIM / 2, TOGETHER = KEY_ROTATION > 32 ? 64 : 32;
    __shared__ u8 orders[HALF], further[HEAD_DIM], most[HEAD_DIM];  // by pair; by position, of a rotation
    const u64 of_bh = (u64)bh * HALF;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (pair >= 0 && pair < HALF) orders[pair] = (u8)rises, s.k_shift[of_bh + pair] += rises;
    __syncthreads();  // orders are there
    if (thread < HEAD_DIM) further[thread] = orders[s.k_order[of_bh + pair_of_position(thread)]];
    __syncthreads();  // those of positions are there
    if (thread < HEAD_DIM) {
        int largest = 0;
        for (int i = 0; i < KEY_ROTATION; ++i)
            largest = max(largest, (int)further[thread / KEY_ROTATION * KEY_ROTATION + i]);
        most[thread] = (u8)largest;
    }
    __syncthreads();  // the largest are there
    const int slots = s.num_pages[bh] * PAGE;
#pragma unroll 1
    for (int i = warp; i < slots; i += blockDim.x / 32) {
        const u64 at = (u64)bh * s.entries + i / PAGE;
        const int slot = i % PAGE, profile = s.rungs[s.rung[at]].bits_k;
        if (s.index[at] == NO_PAGE || slot >= s.count[at] || profile == 16) continue;
#pragma unroll 1
        for (int first = 0; first < HEAD_DIM; first += TOGETHER) {
            const bool changes = most[first + lane] || most[first + TOGETHER - 32 + lane];
            if (__any_sync(ALL_LANES, changes))
                refit_codes(s.arena + (u64)s.index[at] * UNIT, profile, slot, first, further, most, lane);
        }
    }
    __syncthreads();  // pages and shifts are there
}
#endif
