// What a decode step adds to attention over pages: its own tokens, attended exactly, then stored.
//
// `append_tokens` takes the result of packed attention over the stored tokens and finishes it with the new
// ones, causally, by their log-sum-exp; finds what attention the new tokens got; rotates, quantises and packs
// them into the open pages of the top rung. Position and place come from the device, so that a captured graph
// goes on where it is.
//
// Threads and data
//   CTA   one (row, KV head) = pair; 8 warps
//   warp  tasks w, w + 8, ...: tasks 0 to 2 steps - 1 are K and V of a new token, each into its slot; the
//         others are query rows (step, head of the group)
//   lane  of a vector to be stored: elements lane + 32 j; of a query row: pairs of elements lane + 32 i, and
//         the score of new token `lane`
// Memory: shared 64 steps group bytes for probabilities, at most 16 KiB.
//
// Macros: HEAD_DIM; BF16; TOP_K, TOP_V: widths of the top rung.
//
// clang-format off
// gate: HEAD_DIM=128,64 BF16=1,0 TOP_K=8 TOP_V=8 registers<=96
// gate: HEAD_DIM=80,256 BF16=1 TOP_K=3 TOP_V=16 registers<=128
// gate: HEAD_DIM=96 BF16=0 TOP_K=2 TOP_V=4 registers<=96 arch=sm_90a
// clang-format on
#include <cuda_fp16.h>
#include "packed_codes.cuh"
constexpr int AT_ONCE = 1;  // a warp encodes one vector, so what it waits for is code it has not met yet
#include "packed_encode.cuh"
#include "cache_state.cuh"

constexpr int WARPS = 8, MAX_STEPS = 16, MAX_GROUP = 16;
constexpr int PAIRS_OF_LANE = (HEAD_DIM / 2 + 31) / 32;
constexpr float LN2 = 0.69314718056f, LOG2E = 1.44269504089f;
#define INFINITE __int_as_float(0x7f800000)

// Byte offsets in a record of the top rung.
constexpr int K_BYTES = 8 * HEAD_DIM * TOP_K, V_BYTES = 8 * HEAD_DIM * TOP_V;
constexpr int V_STEPS = K_BYTES + V_BYTES + (TOP_K < 16) * 64, TAIL = V_STEPS + (TOP_V < 16) * 64;

enum Observed { MASS, INVERSE_NORM, ONE };  // what the importance of a new token is

struct Append {
    LayerState layer;
    NewTokens fresh;
    const u16* q;  // [batch, steps, heads * group, HEAD_DIM] by strides, or null: no queries
    u16* out;      // [batch, steps, heads * group, HEAD_DIM]: attention over stored tokens
    float* lse;    // [batch, heads * group, steps], of `out`; both are finished in place
    long long q_batch, q_step, q_head;
    int group, has_stored, observed;  // has_stored 0: out and lse hold nothing yet
    float scale, softcap;
};

// The place of a new token: a record of the arena and a slot in it; no record if there is no room.
struct Slot {
    u8* page;
    int entry, number, position;
};

__device__ __forceinline__ bool is_valid(const NewTokens& fresh, int row, int step) {
    return !fresh.valid || fresh.valid[row * fresh.steps + step];
}

struct OpenPage {
    int entry, count, base;
    u32 index;
};

__device__ __forceinline__ OpenPage open_page(const LayerState& s, int pair, int i) {
    const int entry = s.open[pair * OPEN_PAGES + i];
    const u64 at = (u64)pair * s.entries + max(entry, 0);
    return {entry, s.count[at], s.base[at], s.index[at]};
}

// Tokens fill the open pages in order; a page takes positions of its own segment only.
__device__ __forceinline__ Slot slot_of(const Append& call, int pair, int row, int step) {
    OpenPage page = open_page(call.layer, pair, 0);
    const OpenPage second = open_page(call.layer, pair, 1);
    const int start = call.layer.seqlen[pair];
    bool in_second = false;
#pragma unroll 1
    for (int t = 0; t <= step; ++t) {
        if (!is_valid(call.fresh, row, t)) continue;
        const int segment = (start + t) >> 16;
        if (!in_second && (page.entry < 0 || page.base != segment || page.count == 64))
            page = second, in_second = true;
        if (page.entry < 0 || page.base != segment || page.count == 64) return {nullptr, -1, 0, 0};
        ++page.count;
    }
    return {call.layer.arena + (u64)page.index * UNIT, page.entry, page.count - 1, start + step};
}
static_assert(OPEN_PAGES == 2, "a first and a second page");

template <Side SIDE>
__device__ __forceinline__ void store_token(const Append& call, int pair, int row, int head, int step,
                                            Slot& taken, int lane) {
    constexpr int BITS = SIDE == KEYS ? TOP_K : TOP_V;
    const NewTokens& n = call.fresh;
    const u16* from = SIDE == KEYS ? n.k + row * n.k_batch + step * n.k_step + head * n.k_head
                                   : n.v + row * n.v_batch + step * n.v_step + head * n.v_head;
    u32 raw[PER_LANE];
    float x[PER_LANE], mean[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int channel = lane + 32 * j;
        const bool there = HEAD_DIM % 32 == 0 || channel < HEAD_DIM;
        raw[j] = there ? from[channel] : 0;
        x[j] = raw_value(raw[j]);
        mean[j] =
            SIDE == KEYS && there ? __half2float(call.layer.k_mean[(u64)pair * HEAD_DIM + channel]) : 0.f;
    }
    const Slot slot = slot_of(call, pair, row, step);
    if (lane == 0) taken = slot;
    if (slot.entry < 0) {
        if (lane == 0) atomicOr(call.layer.status, NO_ROOM);
        return;
    }
    u8* codes = slot.page + (SIDE == KEYS ? 0 : K_BYTES);
    u8* tail = slot.page + TAIL;
    if constexpr (SIDE == KEYS) {
        if (lane == 0) ((u16*)tail)[slot.number] = (u16)slot.position;
        if (call.observed != MASS) {
            double squares = 0.;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) squares += (double)x[j] * x[j];
#pragma unroll
            for (int h = 16; h > 0; h /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, h);
            const float norm = (float)sqrt(squares);
            if (lane == 0)
                tail[128 + slot.number] =
                    encode_importance(call.observed == ONE ? 1.f : __fdiv_rn(1.f, fmaxf(norm, 1e-6f)));
        }
    }
    if constexpr (BITS == 16) {
        write_codes<SIDE, 16>(codes, slot.number, lane, raw);
    } else {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = SIDE == KEYS ? __fsub_rn(x[j], mean[j]) : x[j];
        rotate(x, lane);
        u8* steps = slot.page + (SIDE == KEYS ? K_BYTES + V_BYTES : V_STEPS);
        encode_vector<SIDE, BITS>(x, codes, steps, slot.number, lane);
    }
}

// Finishes one query row and leaves the probabilities of the new tokens, [MAX_STEPS].
__device__ __forceinline__ void finish_row(const Append& call, int row, int head, int step, int g,
                                           float* probabilities, int lane) {
    const NewTokens& n = call.fresh;
    const int heads_q = call.layer.heads * call.group, head_q = head * call.group + g;
    const u32* q = (const u32*)(call.q + row * call.q_batch + step * call.q_step + head_q * call.q_head);
    u32* out = (u32*)(call.out + (((u64)row * n.steps + step) * heads_q + head_q) * HEAD_DIM);
    float* lse = call.lse + ((u64)row * heads_q + head_q) * n.steps + step;
    const float stored = call.has_stored ? *lse * LOG2E : -INFINITE;
    float2 x[PAIRS_OF_LANE], sum[PAIRS_OF_LANE];
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        const bool there = HEAD_DIM % 64 == 0 || lane + 32 * i < HEAD_DIM / 2;
        x[i] = there ? unpack_pair(q[lane + 32 * i]) : float2{0.f, 0.f};
        sum[i] = there && call.has_stored ? unpack_pair(out[lane + 32 * i]) : float2{0.f, 0.f};
    }
    float score = -INFINITE;  // of new token `lane`
#pragma unroll 1
    for (int t = 0; t <= step; ++t) {
        if (!is_valid(n, row, t)) continue;
        const u32* k = (const u32*)(n.k + row * n.k_batch + t * n.k_step + head * n.k_head);
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) {
            if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
            const float2 y = unpack_pair(k[lane + 32 * i]);
            dot += x[i].x * y.x + x[i].y * y.y;
        }
#pragma unroll
        for (int h = 16; h > 0; h /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, h);
        dot *= call.scale;
        if (call.softcap > 0.f) dot = call.softcap * tanhf(dot / call.softcap);
        if (lane == t) score = dot * LOG2E;
    }
    float top = fmaxf(score, stored);
#pragma unroll
    for (int h = 16; h > 0; h /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, h));
    const float origin = top == -INFINITE ? 0.f : top;
    float weight = exp2f(score - origin), total = weight;
#pragma unroll
    for (int h = 16; h > 0; h /= 2) total += __shfl_xor_sync(ALL_LANES, total, h);
    const float before = exp2f(stored - origin);
    total += before;
    const float unit = total == 0.f ? 0.f : 1.f / total;
    weight *= unit;
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) sum[i].x *= before * unit, sum[i].y *= before * unit;
#pragma unroll 1
    for (int t = 0; t <= step; ++t) {
        if (!is_valid(n, row, t)) continue;
        const u32* v = (const u32*)(n.v + row * n.v_batch + t * n.v_step + head * n.v_head);
        const float p = __shfl_sync(ALL_LANES, weight, t);
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) {
            if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
            const float2 y = unpack_pair(v[lane + 32 * i]);
            sum[i].x += p * y.x, sum[i].y += p * y.y;
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        if (HEAD_DIM % 64 && lane + 32 * i >= HEAD_DIM / 2) break;
        out[lane + 32 * i] = pack_pair(sum[i].x, sum[i].y);
    }
    if (lane == 0) *lse = total == 0.f ? -INFINITE : (origin + log2f(total)) * LN2;
    if (lane < MAX_STEPS) probabilities[lane] = weight;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    append_tokens(const __grid_constant__ Append call) {
    __shared__ float probabilities[MAX_STEPS * MAX_GROUP][MAX_STEPS];
    __shared__ Slot slots[MAX_STEPS];
    const LayerState& layer = call.layer;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = call.fresh.steps;
    const int pair = blockIdx.x, row = pair / layer.heads, head = pair - row * layer.heads;
    const int stores = 2 * steps, rows = call.q ? steps * call.group : 0;
#pragma unroll 1
    for (int task = warp; task < stores + rows; task += WARPS) {
        if (task >= stores) {
            const int r = task - stores, step = r / call.group;
            finish_row(call, row, head, step, r - step * call.group, probabilities[r], lane);
        } else if (!is_valid(call.fresh, row, task / 2)) {
            if (lane == 0) slots[task / 2].entry = -1;
        } else if (task % 2 == 0) {
            store_token<KEYS>(call, pair, row, head, task / 2, slots[task / 2], lane);
        } else {
            Slot same;
            store_token<VALUES>(call, pair, row, head, task / 2, same, lane);
        }
    }
    __syncthreads();  // slots and probabilities are whole; nobody looks at counts and length any more
    if (call.observed == MASS) {
#pragma unroll 1
        for (int t = warp; t < steps; t += WARPS) {
            float mass = 0.f;
            for (int r = lane; r < rows; r += 32) mass += probabilities[r][t];
#pragma unroll
            for (int h = 16; h > 0; h /= 2) mass += __shfl_xor_sync(ALL_LANES, mass, h);
            if (lane == 0 && slots[t].entry >= 0)
                slots[t].page[TAIL + 128 + slots[t].number] = encode_importance(mass / rows);
        }
    }
    if (threadIdx.x == 0) {
        for (int t = 0; t < steps; ++t)
            if (slots[t].entry >= 0)
                layer.count[(u64)pair * layer.entries + slots[t].entry] = (u8)(slots[t].number + 1);
        layer.seqlen[pair] += steps;
    }
}
