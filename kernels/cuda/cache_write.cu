// Carries out what a plan says: new tokens are encoded into pages, stored ones re-encoded at fewer bits or
// moved bit for bit, whole pages copied.
//
// Threads and data
//   write_tokens  grid (any, layers): a CTA takes destination pages blockIdx.x, + gridDim.x, ...; 8 warps.
//                 The page is staged in shared memory and stored when all its moves are done, so sources
//                 may lie in the same page. A warp takes one side (K or V) of one move at a time; lane
//                 holds elements lane + 32 j.
//   copy_pages    grid (any, layers): a CTA takes copies blockIdx.x, + gridDim.x, ..., 16 bytes a thread.
//   mean_of_keys  a CTA one (row, KV head), a thread one channel.
//   merge_rows    a warp one query row: attention over stored and over new tokens, when these are many.
// Memory: shared one page of the widest rung, dynamic (16.9 KB at 8 bits and head_dim 128).
//
// Macros: HEAD_DIM; BF16.
//
// clang-format off
// gate: HEAD_DIM=128,64,80,96,256 BF16=1,0 registers<=128
// clang-format on
#include <cuda_fp16.h>
#include "packed_codes.cuh"
constexpr int AT_ONCE = 5;  // sums over lanes are chains of shuffles; those of all candidates overlap
#include "packed_encode.cuh"
#include "cache_state.cuh"

constexpr int THREADS = 256;

// One side (K or V) of a page.
struct Region {
    u8 *codes, *steps;
    int bits;
};

template <Side SIDE>
__device__ __forceinline__ Region region_of(u8* page, const CacheRung& rung) {
    const int k_bytes = 8 * HEAD_DIM * rung.bits_k, v_bytes = 8 * HEAD_DIM * rung.bits_v;
    u8* steps = page + k_bytes + v_bytes;
    if (SIDE == KEYS) return {page, steps, rung.bits_k};
    return {page + k_bytes, steps + (rung.bits_k < 16 ? 64 : 0), rung.bits_v};
}

// Values of a slot as the page keeps them: raw at width 16, else rotated.
template <Side SIDE>
__device__ __forceinline__ void read_values(const Region& r, int slot, float (&x)[PER_LANE], int lane) {
    u32 code[PER_LANE];
    read_codes<SIDE>(r.bits, r.codes, slot, lane, code);
    const float step = r.bits < 16 ? step_value(r.steps[slot]) : 0.f, lowest = 1.f - (1 << r.bits);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const bool there = HEAD_DIM % 32 == 0 || lane + 32 * j < HEAD_DIM;
        x[j] = r.bits == 16 ? raw_value(code[j]) : __fmul_rn(fmaf(2.f, (float)code[j], lowest), step);
        x[j] = there ? x[j] : 0.f;
    }
}

// The mean of the keys of a pair, by lanes; 0 for values.
template <Side SIDE>
__device__ __forceinline__ void read_mean(const LayerState& s, u32 pair, float (&mean)[PER_LANE], int lane) {
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const bool there = HEAD_DIM % 32 == 0 || lane + 32 * j < HEAD_DIM;
        mean[j] = SIDE == KEYS && there ? __half2float(s.k_mean[(u64)pair * HEAD_DIM + lane + 32 * j]) : 0.f;
    }
}

// One side of a token, from where it is into a slot of the staged page.
template <Side SIDE>
__device__ __forceinline__ void move_side(const LayerState& s, const NewTokens& fresh, const Move& move,
                                          u32 pair, u8* staged, int lane) {
    const Region to = region_of<SIDE>(staged, s.rungs[move.to_rung]);
    float x[PER_LANE];
    int bits = 16;
    if (move.from_rung == NEW_TOKEN) {
        const int row = move.token / fresh.steps, step = move.token - row * fresh.steps;
        const int head = pair - row * s.heads;
        const u16* from = SIDE == KEYS
                              ? fresh.k + row * fresh.k_batch + step * fresh.k_step + head * fresh.k_head
                              : fresh.v + row * fresh.v_batch + step * fresh.v_step + head * fresh.v_head;
        u32 raw[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const bool there = HEAD_DIM % 32 == 0 || lane + 32 * j < HEAD_DIM;
            raw[j] = there ? from[lane + 32 * j] : 0;
            x[j] = raw_value(raw[j]);
        }
        if (to.bits == 16) return write_codes<SIDE, 16>(to.codes, move.to_slot, lane, raw);
    } else {
        const Region from = region_of<SIDE>(s.arena + (u64)move.from * UNIT, s.rungs[move.from_rung]);
        bits = from.bits;
        if (bits == to.bits) {  // as it is, bit for bit
            u32 code[PER_LANE];
            read_codes<SIDE>(bits, from.codes, move.from_slot, lane, code);
            write_codes<SIDE>(bits, to.codes, move.to_slot, lane, code);
            if (bits < 16 && lane == 0) to.steps[move.to_slot] = from.steps[move.from_slot];
            return;
        }
        read_values<SIDE>(from, move.from_slot, x, lane);
    }
    float mean[PER_LANE];
    if (bits == 16) {
        read_mean<SIDE>(s, pair, mean, lane);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = SIDE == KEYS ? __fsub_rn(x[j], mean[j]) : x[j];
        rotate(x, lane);
    }
    if (to.bits == 16) {  // a rung of fewer bits in all may have raw keys or values
        rotate(x, lane);
        read_mean<SIDE>(s, pair, mean, lane);
        u32 raw[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) raw[j] = raw_bits(x[j] + mean[j]);
        return write_codes<SIDE, 16>(to.codes, move.to_slot, lane, raw);
    }
    encode_vector<SIDE>(to.bits, x, to.codes, to.steps, move.to_slot, lane);
}

// Position and importance.
__device__ __forceinline__ void move_tail(const LayerState& s, const NewTokens& fresh, const Move& move,
                                          u8* staged) {
    u8* to = staged + s.rungs[move.to_rung].tail;
    u16 position;
    u8 importance;
    if (move.from_rung == NEW_TOKEN) {
        const int step = move.token % fresh.steps;
        position = (u16)(fresh.first + step);
        importance = fresh.importance[(u64)move.from * fresh.steps + step];
    } else {
        const u8* from = s.arena + (u64)move.from * UNIT + s.rungs[move.from_rung].tail;
        position = ((const u16*)from)[move.from_slot];
        importance = from[128 + move.from_slot];
    }
    ((u16*)to)[move.to_slot] = position;
    to[128 + move.to_slot] = importance;
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM <= 128 ? 3 : 2)
    write_tokens(const LayerState* layers, const MoveList* lists, const __grid_constant__ NewTokens fresh) {
    extern __shared__ __align__(16) u8 staged[];
    const LayerState& s = layers[blockIdx.y];
    const MoveList list = lists[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = *list.num_groups;
#pragma unroll 1
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const u32 begin = list.begins[group], end = list.begins[group + 1];
        const Move first = list.moves[begin];
        const u32 chunks = s.rungs[first.to_rung].record * (UNIT / 16);
        uint4* page = (uint4*)(s.arena + (u64)first.to * UNIT);
        for (u32 i = threadIdx.x; i < chunks; i += THREADS) ((uint4*)staged)[i] = page[i];
        __syncthreads();  // the page is staged
#pragma unroll 1
        for (u32 task = warp; task < 2 * (end - begin); task += THREADS / 32) {
            const Move move = list.moves[begin + task / 2];
            const u32 pair = move.from_rung == NEW_TOKEN ? move.from : move.token;
            if (task % 2) {
                move_side<VALUES>(s, fresh, move, pair, staged, lane);
            } else {
                move_side<KEYS>(s, fresh, move, pair, staged, lane);
                if (lane == 0) move_tail(s, fresh, move, staged);
            }
        }
        __syncthreads();  // all moves are done
        for (u32 i = threadIdx.x; i < chunks; i += THREADS) page[i] = ((uint4*)staged)[i];
        __syncthreads();  // the stage may be filled again
    }
    if (fresh.steps && blockIdx.x == 0)
        for (int i = threadIdx.x; i < s.batch * s.heads; i += THREADS)
            s.seqlen[i] = fresh.first + fresh.steps;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_pages(const LayerState* layers, const MoveList* lists) {
    const MoveList list = lists[blockIdx.y];
    const int copies = *list.num_copies;
    u8* const arena = layers[blockIdx.y].arena;
#pragma unroll 1
    for (int n = blockIdx.x; n < copies; n += gridDim.x) {
        const PageCopy copy = list.copies[n];
        const uint4* from = (const uint4*)(arena + (u64)copy.from * UNIT);
        uint4* to = (uint4*)(arena + (u64)copy.to * UNIT);
        for (u32 i = threadIdx.x; i < copy.units * (UNIT / 16); i += THREADS) to[i] = from[i];
    }
}

// The mean of the keys of each pair over tokens FIRST to LAST - 1 that are no padding: what is taken off keys
// before they are packed. 0 if there are fewer than FEWEST; a channel that float16 cannot hold is left as it
// is. As kvlab.cache.frame; a sum of 64 float16 numbers is exact in double.
extern "C" __global__ void mean_of_keys(const __grid_constant__ NewTokens fresh, int heads, __half* k_mean) {
    constexpr int FIRST = 4, LAST = 68, FEWEST = 16;
    const int pair = blockIdx.x, row = pair / heads, head = pair - row * heads, channel = threadIdx.x;
    const u16* k = fresh.k + row * fresh.k_batch + head * fresh.k_head + channel;
    double sum = 0.;
    int seen = 0;
    for (int step = 0; step < fresh.steps && seen < LAST; ++step) {
        if (fresh.valid && !fresh.valid[row * fresh.steps + step]) continue;
        if (seen >= FIRST) sum += (double)raw_value(k[step * fresh.k_step]);
        ++seen;
    }
    const double mean = seen - FIRST >= FEWEST ? sum / (seen - FIRST) : 0.;
    k_mean[(u64)pair * HEAD_DIM + channel] = __double2half(fabs(mean) <= 65504. ? mean : 0.);
}

// Attention over two disjoint sets of keys, merged into the first: a warp one row of [rows][HEAD_DIM], whose
// lse lies at [row / (steps heads)][head][step]. A row that sees nothing has lse -inf and out 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_rows(u16* out, float* lse, const u16* other, const float* other_lse, int rows, int steps,
               int heads) {
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const int head = row % heads, step = row / heads % steps, batch = row / heads / steps;
    const u64 at = ((u64)batch * heads + head) * steps + step;
    const float a = lse[at], b = other_lse[at], top = fmaxf(a, b);
    __syncwarp();  // all lanes have read the lse before lane 0 writes it
    const bool none = top == -__int_as_float(0x7f800000);
    const float from = none ? 0.f : expf(a - top), to = none ? 0.f : expf(b - top), sum = from + to;
    const float keep = none ? 0.f : from / sum, take = none ? 0.f : to / sum;
    u32* x = (u32*)(out + (u64)row * HEAD_DIM);
    const u32* y = (const u32*)(other + (u64)row * HEAD_DIM);
    for (int i = lane; i < HEAD_DIM / 2; i += 32) {
        const float2 p = unpack_pair(x[i]), q = unpack_pair(y[i]);
        x[i] = pack_pair(p.x * keep + q.x * take, p.y * keep + q.y * take);
    }
    if (lane == 0) lse[at] = none ? top : top + logf(sum);
}
