// How important tokens are: attention mass, from kept scores or from queries and keys, and norms of keys.
//
// Threads and data
//   score_stored    grid z = layers; half a warp one page, a lane four slots of it. Reads the scores of the
//   kept rows in
//                   float16 (128 bytes a row), and brings the importance bytes of the page up to date.
//   mass_of_scores  the same from scores in float32, but writes the mass: what
//                   kvlab.ops.packed.mass_from_scores is on a GPU.
//   score_new       grid (tiles of keys, pairs): a warp holds KEYS keys as B operands of mma.m16n8k16 in
//                   registers and multiplies them with all query rows, 16 at a time, which lie in shared
//                   memory in chunks of ROWS. Only the sum over rows of exp(score - lse) remains.
//   score_norms     a warp one key.
//
// Channels are dealt to operands such that a lane's 16 bytes are contiguous: lane group u has channels
// 32 i + 8 u to + 7, the same for queries and keys, and the order of a sum does not matter to its value.
// Memory: shared ROWS * (2 * HEAD_DIM + padding) + 12 * ROWS bytes; registers HEAD_DIM / 16 * KEYS / 4 for
// keys.
//
// Macros: HEAD_DIM, BF16 (score_new and score_norms; the others do not depend on them).
//
// clang-format off
// gate: HEAD_DIM=128,64,80,96,256 BF16=1,0 registers<=128
// clang-format on
#include <cuda_fp16.h>
#include "packed_codes.cuh"
#include "cache_state.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, PAGE = 64;
constexpr int LANES = PAGE / 4, PAGES = THREADS / LANES;  // of a page, of a block
constexpr float LOG2E = 1.44269504089f;

__device__ __forceinline__ float finite(float x) {
    return x != x ? 0.f : x;
}

// ---- From kept scores

struct Kept {
    const void* scores;                     // [pairs][entries][positions * group][PAGE]
    const float* lse;                       // [batch][heads * group][seqlen]
    int group, positions, seqlen, entries;  // positions: the last query rows, whose scores were kept
};

__device__ __forceinline__ float4 four_scores(const float* x) {
    return *(const float4*)x;
}

__device__ __forceinline__ float4 four_scores(const u16* x) {
    const uint2 words = *(const uint2*)x;
    return {half_bits_to_float(words.x & 0xffffu), half_bits_to_float(words.x >> 16),
            half_bits_to_float(words.y & 0xffffu), half_bits_to_float(words.y >> 16)};
}

// The mean over the kept rows of the probabilities of slots `slot` to slot + 3 of a page.
template <class T>
__device__ __forceinline__ float4 mass_of_page(const Kept& kept, int pair, u64 page, int slot) {
    constexpr int AT_ONCE = 4;
    const int rows = kept.positions * kept.group;
    const T* from = (const T*)kept.scores + page * rows * PAGE + slot;
    const float* lse = kept.lse + (u64)pair * kept.group * kept.seqlen + kept.seqlen - kept.positions;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    int head = 0, position = 0;
#pragma unroll 1
    for (int first = 0; first < rows; first += AT_ONCE) {
        float4 x[AT_ONCE];
        float whole[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool there = first + i < rows;
            x[i] = four_scores(from + min(first + i, rows - 1) * PAGE);
            whole[i] = there ? lse[head * kept.seqlen + position] : __int_as_float(0x7f800000);
            head = head + 1 == kept.group ? 0 : head + 1;
            position += head == 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float base = whole[i] == -__int_as_float(0x7f800000) ? 0.f : whole[i] * -LOG2E;
            sum.x += power_of_2(fmaf(x[i].x, LOG2E, base));
            sum.y += power_of_2(fmaf(x[i].y, LOG2E, base));
            sum.z += power_of_2(fmaf(x[i].z, LOG2E, base));
            sum.w += power_of_2(fmaf(x[i].w, LOG2E, base));
        }
    }
    const float share = __fdividef(1.f, (float)rows);
    return {sum.x * share, sum.y * share, sum.z * share, sum.w * share};
}

// How scores follow what tokens receive, as in kvlab.cache.importance: what is new weighs 1 / (1 + age /
// span), and `take` from age `old` on, where that is more.
struct Following {
    float take;
    int span, old, forecast;
    int counted;  // tokens of this call that LayerState::seqlen counts already
};

// The code of a score after its token received `mass`. Codes are eighths of a binary order, so the special
// function unit's powers and logarithms are exact enough.
__device__ __forceinline__ u32 updated(u32 code, float mass, int age, const Following& f) {
    const float previous = code ? power_of_2(((int)code - 192) * .125f) : 0.f, change = mass - previous;
    const float take = age < f.old ? __fdividef(1.f, 1.f + (float)(age / f.span)) : f.take;
    float level = fmaf(take, change, previous);
    if (f.forecast) level = fmaxf(fmaf(f.take, change, level), 0.f);
    return level > 0.f ? min(max(__float2int_rn(8.f * __log2f(level)) + 192, 1), 255) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    score_stored(const LayerState* layers, const __grid_constant__ Kept kept,
                 const __grid_constant__ Following following) {
    const LayerState& s = layers[blockIdx.z];
    const int pair = blockIdx.y, entry = blockIdx.x * PAGES + threadIdx.x / LANES;
    const int slot = threadIdx.x % LANES * 4;
    if (entry >= kept.entries) return;
    const u64 at = (u64)pair * kept.entries + entry;
    const int pages = s.num_pages[pair], count = s.count[at], rung = s.rung[at], base = s.base[at] << 16;
    const int length = s.seqlen[pair] - following.counted;
    const u32 address = s.index[at];
    if (entry >= pages || slot >= count) return;
    u8* const tail = s.arena + (u64)address * UNIT + s.rungs[rung].tail;
    u32* const codes = (u32*)(tail + 2 * PAGE + slot);
    uint2 positions = *(const uint2*)(tail + 2 * slot);
    u32 word = *codes;
    const int kept_pair = blockIdx.z * gridDim.y + pair;
    float4 mass = mass_of_page<u16>(kept, kept_pair, (u64)kept_pair * kept.entries + entry, slot);
    // Not unrolled: between calls of attention the instructions of this kernel have to be fetched anew.
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {  // the slot at hand is the lowest, and moves on to the top
        const u32 code = word & 255;
        const int age = length - (base | (int)(positions.x & 0xffff));
        const bool counts = slot + i < count && age > 0;  // not this call's own tokens
        word = word >> 8 | (counts ? updated(code, finite(mass.x), age, following) : code) << 24;
        positions = {positions.x >> 16 | positions.y << 16, positions.y >> 16};
        mass = {mass.y, mass.z, mass.w, 0.f};
    }
    *codes = word;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mass_of_scores(const u8* count, const int* num_pages, float* mass, const __grid_constant__ Kept kept) {
    const int pair = blockIdx.y, entry = blockIdx.x * PAGES + threadIdx.x / LANES;
    const int slot = threadIdx.x % LANES * 4;
    if (entry >= kept.entries) return;
    const u64 at = (u64)pair * kept.entries + entry;
    const int tokens = entry < num_pages[pair] ? count[at] : 0;
    float4 found = {0.f, 0.f, 0.f, 0.f};
    if (slot < tokens) found = mass_of_page<float>(kept, pair, at, slot);
    if (slot + 1 >= tokens) found.y = 0.f;
    if (slot + 2 >= tokens) found.z = 0.f;
    if (slot + 3 >= tokens) found.w = 0.f;
    *(float4*)(mass + at * PAGE + slot) = found;
}

// ---- From queries and keys

struct Sight {
    const u16 *q, *k;  // [batch][seqlen][heads_q][HEAD_DIM], [batch][seqlen][heads][HEAD_DIM] by strides
    const float* lse;  // [batch][heads_q][seqlen]: over all keys; rows that are not finite count nothing
    u8* codes;         // [pairs][seqlen]
    long long q_batch, q_step, q_head, k_batch, k_step, k_head;
    int heads, group, seqlen, window;  // window: the last query rows that count
    float scale, softcap;
};

constexpr int KEYS = HEAD_DIM <= 128 ? 32 : 16, TILES = KEYS / 8, ROWS = 64;
constexpr int PAIRS = HEAD_DIM / 32, STEPS = HEAD_DIM / 16;   // k-steps come in pairs, but a last one
constexpr int STRIDE = (2 * HEAD_DIM + 63) / 128 * 128 + 64;  // bytes of a row in shared memory
static_assert(STRIDE >= 2 * HEAD_DIM && STRIDE % 128 == 64, "rows of four lanes each meet no bank twice");

// The operands of one row (of queries or keys) for all k-steps: 4 words a pair of steps, 2 for a last one.
__device__ __forceinline__ void load_row(const u8* row, int u, u32 (&x)[2 * STEPS]) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const uint4 words = *(const uint4*)(row + 64 * i + 16 * u);
        x[4 * i] = words.x, x[4 * i + 1] = words.y, x[4 * i + 2] = words.z, x[4 * i + 3] = words.w;
    }
    if (HEAD_DIM % 32) {
        const uint2 words = *(const uint2*)(row + 64 * PAIRS + 8 * u);
        x[4 * PAIRS] = words.x, x[4 * PAIRS + 1] = words.y;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) score_new(const __grid_constant__ Sight sight) {
    __shared__ __align__(16) u8 queries[ROWS * STRIDE];
    __shared__ float base[ROWS];  // lse, base 2; +infinity: the row counts nothing
    __shared__ int last[ROWS];    // the last key that the row sees
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, u = lane % 4;
    const int pair = blockIdx.y, batch = pair / sight.heads, head = pair % sight.heads;
    const int first_key = (blockIdx.x * WARPS + warp) * KEYS, rows = sight.window * sight.group;
    u32 keys[TILES][2 * STEPS];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int key = min(first_key + 8 * t + g, sight.seqlen - 1);
        load_row((const u8*)(sight.k + batch * sight.k_batch + key * sight.k_step + head * sight.k_head), u,
                 keys[t]);
    }
    float sum[TILES][2] = {};
    const float unit = sight.softcap > 0.f ? sight.scale / sight.softcap : sight.scale * LOG2E;
#pragma unroll 1
    for (int first = 0; first < rows; first += ROWS) {
        __syncthreads();  // the rows before have been used
        for (int i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += THREADS) {
            const int row = i / (HEAD_DIM / 8), part = i % (HEAD_DIM / 8), r = min(first + row, rows - 1);
            const int step = sight.seqlen - sight.window + r % sight.window;
            const int query = head * sight.group + r / sight.window;
            const u16* from =
                sight.q + batch * sight.q_batch + step * sight.q_step + query * sight.q_head + 8 * part;
            *(uint4*)(queries + row * STRIDE + 16 * part) = *(const uint4*)from;
            if (part) continue;
            const float whole =
                sight.lse[((u64)batch * sight.heads * sight.group + query) * sight.seqlen + step];
            const bool counts = first + row < rows && fabsf(whole) < __int_as_float(0x7f800000);
            base[row] = counts ? whole * LOG2E : __int_as_float(0x7f800000);
            last[row] = step;
        }
        __syncthreads();  // a chunk of rows is in shared memory
#pragma unroll 1
        for (int tile = 0; tile < ROWS && first + tile < rows; tile += 16) {
            float c[TILES][4] = {};
            u32 low[2 * STEPS], high[2 * STEPS];
            load_row(queries + (tile + g) * STRIDE, u, low);
            load_row(queries + (tile + 8 + g) * STRIDE, u, high);
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const u32 a[4] = {low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
#pragma unroll
                for (int t = 0; t < TILES; ++t) mma(c[t], a, keys[t][2 * i], keys[t][2 * i + 1]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = tile + 8 * half + g, end = last[row];
                const float whole = base[row];
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float x = c[t][2 * half + j] * unit;
                        if (sight.softcap > 0.f) x = sight.softcap * LOG2E * tanhf(x);
                        const bool sees = first_key + 8 * t + 2 * u + j <= end;
                        sum[t][j] += sees ? power_of_2(x - whole) : 0.f;
                    }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2) sum[t][j] += __shfl_xor_sync(ALL_LANES, sum[t][j], bit);
            const int key = first_key + 8 * t + 2 * u + j;
            if (g == 0 && key < sight.seqlen)
                sight.codes[(u64)pair * sight.seqlen + key] =
                    encode_importance(finite(sum[t][j] / (float)rows));
        }
}

// ---- From keys alone

// kind 0: 1 / norm, as keys of small norm collect attention; 1: 1 / age; 2: 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    score_norms(const u16* k, u8* codes, long long k_batch, long long k_step, long long k_head, int heads,
                int seqlen, int kind) {
    const int pair = blockIdx.y, batch = pair / heads, head = pair % heads, lane = threadIdx.x % 32;
    const int step = blockIdx.x * WARPS + threadIdx.x / 32;
    if (step >= seqlen) return;
    float sum = 0.f;
    if (kind == 0) {
        const u32* row = (const u32*)(k + batch * k_batch + step * k_step + head * k_head);
#pragma unroll
        for (int i = lane; i < HEAD_DIM / 2; i += 32) {
            const float2 x = unpack_pair(row[i]);
            sum += x.x * x.x + x.y * x.y;
        }
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bit);
    }
    if (lane) return;
    const float norm = kind == 0 ? fmaxf(sqrtf(sum), 1e-6f) : kind == 1 ? (float)(seqlen - step) : 1.f;
    codes[(u64)pair * seqlen + step] = encode_importance(finite(__fdiv_rn(1.f, norm)));
}
