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

// A read that the compiler may not put off until its result is needed.
template <class T>
__device__ __forceinline__ T read_now(const T* from) {
    return *(const volatile T*)from;
}

// Four scores of neighbouring slots as they are kept: of float16, of float32.
struct Halves {
    u64 words;

    __device__ __forceinline__ void read(const void* scores, u64 at) {
        words = read_now((const u64*)scores + at);
    }

    __device__ __forceinline__ float4 floats() const {
        const u32 low = (u32)words, high = (u32)(words >> 32);
        return {half_bits_to_float(low & 0xffffu), half_bits_to_float(low >> 16),
                half_bits_to_float(high & 0xffffu), half_bits_to_float(high >> 16)};
    }
};

struct Floats {
    float4 x;

    __device__ __forceinline__ void read(const void* scores, u64 at) { x = ((const float4*)scores)[at]; }

    __device__ __forceinline__ float4 floats() const { return x; }
};

// The sum over kept rows first, ... first + AT_ONCE - 1 of the probabilities of four slots of a page; what is
// read is on its way from where this is made.
template <class Four>
struct Rows {
    static constexpr int AT_ONCE = 4;
    Four x[AT_ONCE];
    float whole[AT_ONCE];

    // at: of the first row, in fours of scores; lse: of the first row of the pair.
    __device__ __forceinline__ Rows(const Kept& kept, u64 at, const float* lse, int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) x[i].read(kept.scores, at + min(first + i, rows(kept) - 1) * LANES);
        int position = first / kept.group, head = first - position * kept.group;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool there = first + i < rows(kept);
            whole[i] = lse[there ? head * kept.seqlen + position : 0];
            if (!there) whole[i] = __int_as_float(0x7f800000);
            head = head + 1 == kept.group ? 0 : head + 1;
            position += head == 0;
        }
    }

    static __device__ __forceinline__ int rows(const Kept& kept) { return kept.positions * kept.group; }

    __device__ __forceinline__ void add_to(float4& sum) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float base = whole[i] == -__int_as_float(0x7f800000) ? 0.f : whole[i] * -LOG2E;
            const float4 score = x[i].floats();
            sum.x += power_of_2(fmaf(score.x, LOG2E, base));
            sum.y += power_of_2(fmaf(score.y, LOG2E, base));
            sum.z += power_of_2(fmaf(score.z, LOG2E, base));
            sum.w += power_of_2(fmaf(score.w, LOG2E, base));
        }
    }
};

// Their mean over all kept rows, of which `begun` are the first.
template <class Four>
__device__ __forceinline__ float4 mean_of_rows(const Kept& kept, u64 at, const float* lse,
                                               const Rows<Four>& begun) {
    const int rows = Rows<Four>::rows(kept);
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    begun.add_to(sum);
#pragma unroll 1
    for (int first = Rows<Four>::AT_ONCE; first < rows; first += Rows<Four>::AT_ONCE)
        Rows<Four>(kept, at, lse, first).add_to(sum);
    const float share = __fdividef(1.f, (float)rows);
    return {sum.x * share, sum.y * share, sum.z * share, sum.w * share};
}

// Where the lse of a pair's first kept row is, and the scores of four slots of a page's first.
__device__ __forceinline__ const float* lse_of(const Kept& kept, int pair) {
    return kept.lse + (u64)pair * kept.group * kept.seqlen + kept.seqlen - kept.positions;
}

__device__ __forceinline__ u64 scores_at(const Kept& kept, u64 page, int slot) {
    return page * (kept.positions * kept.group * LANES) + slot / 4;
}

// How scores follow what tokens receive, as in kvlab.cache.importance: what is new weighs 1 / (1 + age /
// span), and `take` from age `old` on, where that is more.
struct Following {
    float take;
    int span, old, forecast;
    int counted;  // tokens of this call that LayerState::seqlen counts already
};

// Integers up to 2^23 as floats and back by the float that has them as its lowest bits: the conversions
// proper share their unit with powers and logarithms, of which there are enough here.
constexpr float TWO_23 = 8388608.f;

__device__ __forceinline__ float small_integer(u32 n) {
    return __uint_as_float(__float_as_uint(TWO_23) | n) - TWO_23;
}

// The code of a score after its token received `mass`. Codes are eighths of a binary order, so the special
// function unit's powers and logarithms are exact enough.
__device__ __forceinline__ u32 updated(u32 code, float mass, int age, const Following& f) {
    const float power = power_of_2((small_integer(code) - 192.f) * .125f);
    const float previous = code ? power : 0.f, change = mass - previous;
    float take = f.take;
    if (age < f.old) take = __fdividef(1.f, 1.f + (float)(age / f.span));  // few tokens are young
    float level = fmaf(take, change, previous);
    if (f.forecast) level = fmaxf(fmaf(f.take, change, level), 0.f);
    const float eighths = fminf(fmaxf(fmaf(8.f, __log2f(level), 192.f), 1.f), 255.f);
    return level > 0.f ? __float_as_uint(eighths + TWO_23) & 255 : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    score_stored(const LayerState* layers, const __grid_constant__ Kept kept,
                 const __grid_constant__ Following following) {
    const LayerState& s = layers[blockIdx.z];
    const int pair = blockIdx.y, kept_pair = blockIdx.z * gridDim.y + pair;
    const int entry = blockIdx.x * PAGES + threadIdx.x / LANES, slot = threadIdx.x % LANES * 4;
    if (entry >= kept.entries) return;
    // Most pages are live, so all that is needed of one is asked for before anybody knows which are.
    const u64 scores = scores_at(kept, (u64)kept_pair * kept.entries + entry, slot);
    const Rows<Halves> first_rows(kept, scores, lse_of(kept, kept_pair), 0);
    const u64 at = (u64)pair * kept.entries + entry;
    const u32 address = read_now(s.index + at), rung = read_now(s.rung + at) % CACHE_RUNGS;
    const int count = read_now(s.count + at), base = read_now(s.base + at) << 16;
    const int live = s.num_pages[pair], length = s.seqlen[pair] - following.counted;
    if (entry >= live || slot >= count) return;
    u8* const tail = s.arena + (u64)address * UNIT + s.rungs[rung].tail;
    u32* const codes = (u32*)(tail + 2 * PAGE + slot);
    const u64 positions = *(const u64*)(tail + 2 * slot);
    const u32 before = *codes;
    const float4 mass = mean_of_rows(kept, scores, lse_of(kept, kept_pair), first_rows);
    u32 after = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 code = before >> 8 * i & 255;
        const int age = length - (base | (int)(positions >> 16 * i & 0xffff));
        const bool received = slot + i < count && age > 0;  // not this call's own tokens
        const float x = i == 0 ? mass.x : i == 1 ? mass.y : i == 2 ? mass.z : mass.w;
        after |= (received ? updated(code, finite(x), age, following) : code) << 8 * i;
    }
    *codes = after;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mass_of_scores(const u8* count, const int* num_pages, float* mass, const __grid_constant__ Kept kept) {
    const int pair = blockIdx.y, entry = blockIdx.x * PAGES + threadIdx.x / LANES;
    const int slot = threadIdx.x % LANES * 4;
    if (entry >= kept.entries) return;
    const u64 at = (u64)pair * kept.entries + entry;
    const int tokens = entry < num_pages[pair] ? count[at] : 0;
    float4 found = {0.f, 0.f, 0.f, 0.f};
    if (slot < tokens) {
        const u64 scores = scores_at(kept, at, slot);
        const float* lse = lse_of(kept, pair);
        found = mean_of_rows(kept, scores, lse, Rows<Floats>(kept, scores, lse, 0));
    }
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
