// How important tokens are: attention mass, from saved scores or from queries and keys, and norms of keys.
//
// Threads and data
//   score_stored    grid (blocks of quads, num_bh, layers): 8 lanes have a quad. Reads the saved
//                   scores, a byte each, and brings the importance bytes of its pages up to date.
//   mass_of_scores  from scores in float32, and writes the mass: what kvlab.ops.packed.mass_from_scores is on
//                   a GPU.
//   score_new       grid (tiles of keys, num_bh): a warp holds KEYS keys as B operands of mma.m16n8k16 in
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
#include <cuda_fp16.h>
#include "pages/codes.cuh"
#include "pages/state.cuh"
#include "common/early_launch.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, SLOTS = QUAD * PAGE;  // of a quad
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float finite(float x) {
    return x != x ? 0.f : x;
}

// ---- From saved scores

struct SavedScores {
    const void* scores;                   // [num_bh][quads] blocks, or float [num_bh][quads][rows][SLOTS]
    const float* lse;                     // [batch][heads * group][seqlen]
    int group, positions, seqlen, quads;  // positions: the last query rows, whose scores were saved

    __device__ __forceinline__ int rows() const { return positions * group; }
};

// What a score times log2(e) has added to be the exponent of a probability; row = position * group + head.
// Rows of nothing have lse -inf, and those that give nobody anything +inf.
__device__ __forceinline__ float base_of(const SavedScores& saved, int bh, int row) {
    int head = row, position = saved.seqlen - saved.positions;
    for (; head >= saved.group; head -= saved.group) ++position;
    const float lse = saved.lse[((u64)bh * saved.group + head) * saved.seqlen + position];
    return lse == -INFINITE ? 0.f : lse * -LOG2E;
}

// How scores follow what tokens receive, as in kvlab.cache.importance: what is new weighs 1 / (1 + age /
// span), and `take` from age `old` on, where that is more.
struct Following {
    float take;
    int span, old, forecast;
    int counted;  // tokens of this call that LayerState::seqlen counts already
};

// The layers of score_stored. The block of a quad has a byte for each slot, row after row, and then for each
// row a float, its reference: the score, base 2, is (code - 255) / 8 + reference, and code 0 is nothing.
// Bytes 8 g + 2 q and the next are of slots 2 g and 2 g + 1 of page q.
struct Scoring {
    const LayerState* layers;
    SavedScores saved;
    Following following;
};

constexpr int SCORE_THREADS = 64;  // few, so that the last blocks of a launch end together
constexpr int LANES = 8, QUADS = SCORE_THREADS / LANES, OWN = SLOTS / LANES;  // of a quad, a block, a lane
constexpr int AT_ONCE = 4;                                                    // rows
constexpr float MIN_MASS = 3.7252903e-9f;  // 2^-28: less has no importance code, nor do sums of code 0

// Byte i of x as 128 + x / 256, and the exponent of 2 that it is as eighths.
constexpr float EIGHTHS = 32.f, ZERO_EIGHTHS = -4096.f;

__device__ __forceinline__ float byte_as_float(u32 x, int i) {
    return __uint_as_float(__byte_perm(x, 0x43000000u, 0x7404 | i << 4));
}

// A read that the compiler may not put off until its result is needed.
template <class T>
__device__ __forceinline__ T read_now(const T* from) {
    return *(const volatile T*)from;
}

__device__ __forceinline__ u64 read_words(const void* from) {
    return read_now((const u64*)from);
}

// Rows first to first + AT_ONCE - 1 of a quad, of the slots of a lane; on their way from where this is made.
struct Rows {
    u64 codes[AT_ONCE];
    float base;  // of row first + lane

    __device__ __forceinline__ Rows(const SavedScores& saved, const u8* block, int bh, int first, int lane) {
        const int rows = saved.rows(), row = first + lane;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            codes[i] = read_words(block + SLOTS * min(first + i, rows - 1) + OWN * lane);
        base = -INFINITE;
        if (lane < AT_ONCE && row < rows) {
            const float reference = read_now((const float*)(block + SLOTS * rows) + row);
            base = base_of(saved, bh, row);
            if (base != -INFINITE) base += reference;  // or a query of NaN, if it is padding, would count
        }
    }

    // All lanes of a warp.
    __device__ __forceinline__ void add_to(float (&sum)[OWN]) const {
        const float lowest = base + (ZERO_EIGHTHS - 255.f / 8.f);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float from = __shfl_sync(ALL_LANES, lowest, i, LANES);
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const u32 word = j < 4 ? (u32)codes[i] : (u32)(codes[i] >> 32);
                sum[j] += power_of_2(fmaf(byte_as_float(word, j % 4), EIGHTHS, from));
            }
        }
    }
};

// Codes and scores, by tables in shared memory: the fractions of 2^(j / 8), and for every sixteenth of a
// binary order how many codes end below it and where one ends in it. So codes are those of encode_importance.
struct CodeTables {
    u32 fraction[8];
    uint2 edge[16];

    // All threads; they wait for each other.
    __device__ __forceinline__ void fill() {
        constexpr u32 EDGES[8] = {0x05aac4u, 0x11c3d4u, 0x1ef533u, 0x2d583fu,
                                  0x3d08a4u, 0x4e248du, 0x60ccdfu, 0x75257eu};
        const u32 i = threadIdx.x;
        if (i < 8) fraction[i] = __float_as_uint(decode_importance(192 + i)) & 0x7fffffu;
        if (i < 16) {
            uint2 found = {0, 0xffffffffu};
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                found.x += EDGES[k] >> 19 < i;
                found.y = EDGES[k] >> 19 == i ? EDGES[k] : found.y;
            }
            edge[i] = found;
        }
        __syncthreads();  // the tables are whole
    }
    __device__ __forceinline__ float score_of(u32 code) const {
        return code ? __uint_as_float(((code >> 3) + 103 << 23) | fraction[code & 7]) : 0.f;
    }
    __device__ __forceinline__ u32 code_of(float score) const {
        const u32 bits = __float_as_uint(score), m = bits & 0x7fffffu;
        const uint2 found = edge[m >> 19];
        const int code = 8 * (int)(bits >> 23) - 824 + (int)(found.x + (m >= found.y));
        return score > 0.f ? min(max(code, 1), 255) : 0;
    }
};

// The code of a score after its token received `mass`: equal to what follow_mass of
// kernels/numba/cpu/cache_write.py finds, bit for bit.
template <bool YOUNG>
__device__ __forceinline__ u32 updated(const CodeTables& tables, u32 codes, int i, float mass, int age,
                                       const Following& f) {
    const float previous = tables.score_of(codes >> 8 * i & 255), change = __fsub_rn(mass, previous);
    float take = f.take;
    if (YOUNG && age < f.old) {  // age / span, rounded down
        const float spans = floorf(((float)age + .5f) * __fdividef(1.f, (float)f.span));
        take = fmaxf(take, __frcp_rn(1.f + spans));
    }
    const float level = __fadd_rn(previous, __fmul_rn(f.forecast ? __fadd_rn(take, f.take) : take, change));
    return tables.code_of(level);
}

// New codes of four slots, of which the first `live` hold tokens.
template <bool YOUNG>
__device__ __forceinline__ u32 four_updated(const CodeTables& tables, u32 codes, u64 positions,
                                            const float* mass, int live, int length, const Following& f) {
    u32 result = codes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int age = length - (int)(positions >> 16 * i & 0xffff);
        const u32 code = updated<YOUNG>(tables, codes, i, mass[i], age, f);
        if (i < live && (!YOUNG || age > 0))  // not this call's own tokens
            result = __byte_perm(result, code, 0x3210 ^ (i ^ 4) << 4 * i);
    }
    return result;
}

// Whether one of four tokens is younger than `old`.
__device__ __forceinline__ bool any_young(u64 positions, int length, int old) {
    bool young = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) young |= length - (int)(positions >> 16 * i & 0xffff) < old;
    return young;
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 20)
    score_stored(const __grid_constant__ Scoring call) {
    __shared__ CodeTables tables;
    __shared__ __align__(16) float shared_mass[QUADS][SLOTS + 8];  // by page and slot
    begin_early();
    const SavedScores& saved = call.saved;
    const Following& following = call.following;
    const LayerState& s = call.layers[blockIdx.z];
    const int bh = blockIdx.y, saved_bh = blockIdx.z * gridDim.y + bh, lane = threadIdx.x % LANES;
    const int number = blockIdx.x * QUADS + threadIdx.x / LANES, quad = min(number, saved.quads - 1);
    // Most pages are live, so all that is needed of them is asked for before anybody knows which are.
    const int rows = saved.rows(), block_bytes = SLOTS * rows + 16 * ((rows + 3) / 4);
    const u8* block = (const u8*)saved.scores + ((u64)saved_bh * saved.quads + quad) * (u32)block_bytes;
    const Rows first_rows(saved, block, saved_bh, 0, lane);
    // Of scores a lane has two slots of every page, of importance eight of one.
    const int page = lane / 2, first_slot = lane % 2 * OWN;
    const u64 at = ((u64)bh * saved.quads + quad) * QUAD + page;
    const u32 address = read_now(s.index + at), rung = read_now(s.rung + at) % CACHE_RUNGS;
    const int count = read_now(s.count + at), base = read_now(s.base + at) << 16;
    const int live = QUAD * number < s.num_pages[bh] ? count - first_slot : 0;
    const int length = s.seqlen[bh] - following.counted - base;
    tables.fill();
    if (!__any_sync(ALL_LANES, live > 0)) return;
    u8* const tail = s.arena + (u64)address * UNIT + s.rungs[rung].tail;
    uint2* const codes = (uint2*)(tail + 2 * PAGE + first_slot);
    ulonglong2 positions = {};
    uint2 before = {};
    if (live > 0) positions = *(const ulonglong2*)(tail + 2 * first_slot), before = *codes;
    float mass[OWN] = {};
    first_rows.add_to(mass);
#pragma unroll 1
    for (int first = AT_ONCE; first < rows; first += AT_ONCE)
        Rows(saved, block, saved_bh, first, lane).add_to(mass);
    const float per_row = __fdividef(1.f, (float)rows);
#pragma unroll
    for (int i = 0; i < OWN; ++i) mass[i] = mass[i] * per_row > MIN_MASS ? mass[i] * per_row : 0.f;
    float* const of_quad = shared_mass[threadIdx.x / LANES];
#pragma unroll
    for (int q = 0; q < QUAD; ++q) *(float2*)(of_quad + PAGE * q + 2 * lane) = {mass[2 * q], mass[2 * q + 1]};
    __syncwarp();  // the mass of all slots is there
#pragma unroll
    for (int i = 0; i < OWN; i += 4)
        *(float4*)(mass + i) = *(const float4*)(of_quad + PAGE * page + first_slot + i);
    if (live <= 0) return;
    uint2 after;
    if (any_young(positions.x, length, following.old) || any_young(positions.y, length, following.old)) {
        after.x = four_updated<true>(tables, before.x, positions.x, mass, live, length, following);
        after.y = four_updated<true>(tables, before.y, positions.y, mass + 4, live - 4, length, following);
    } else {
        after.x = four_updated<false>(tables, before.x, positions.x, mass, live, length, following);
        after.y = four_updated<false>(tables, before.y, positions.y, mass + 4, live - 4, length, following);
    }
    *codes = after;
}

// A thread four slots of a quad.
extern "C" __global__ void __launch_bounds__(THREADS)
    mass_of_scores(const u8* count, const int* num_pages, float* mass,
                   const __grid_constant__ SavedScores saved) {
    constexpr int FOURS = SLOTS / 4;
    const int bh = blockIdx.y, quad = blockIdx.x * (THREADS / FOURS) + threadIdx.x / FOURS;
    const int slot = threadIdx.x % FOURS * 4, rows = saved.rows();
    if (quad >= saved.quads) return;
    const u64 at = (u64)bh * saved.quads + quad;
    const int tokens = QUAD * quad < num_pages[bh] ? count[QUAD * at + slot / PAGE] - slot % PAGE : 0;
    const float4* scores = (const float4*)saved.scores + at * rows * FOURS + slot / 4;
    float found[4] = {};
    if (tokens > 0)
#pragma unroll 4
        for (int row = 0; row < rows; ++row) {
            const float4 score = scores[row * FOURS];
            const float base = base_of(saved, bh, row);
            if (base == -INFINITE) continue;  // even if its query is NaN
            found[0] += power_of_2(fmaf(score.x, LOG2E, base));
            found[1] += power_of_2(fmaf(score.y, LOG2E, base));
            found[2] += power_of_2(fmaf(score.z, LOG2E, base));
            found[3] += power_of_2(fmaf(score.w, LOG2E, base));
        }
    const float per_row = __fdividef(1.f, (float)rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) found[i] = i < tokens ? found[i] * per_row : 0.f;
    *(float4*)(mass + at * SLOTS + slot) = {found[0], found[1], found[2], found[3]};
}

// ---- From queries and keys

struct ScoreNew {
    const u16 *q, *k;  // [batch][seqlen][heads_q][HEAD_DIM], [batch][seqlen][heads][HEAD_DIM] by strides
    const float* lse;  // [batch][heads_q][seqlen]: over all keys; rows that are not finite count nothing
    u8* codes;         // [num_bh][seqlen]
    long long q_batch, q_step, q_head, k_batch, k_step, k_head;
    int heads, group, seqlen, window;  // window: the last query rows that count
    float scale, softcap;
};

constexpr int KEYS = HEAD_DIM <= 128 ? 32 : 16, TILES = KEYS / 8, ROWS = 64;
constexpr int STEP_PAIRS = HEAD_DIM / 32, K_STEPS = HEAD_DIM / 16;  // k-steps come in pairs, but a last one
constexpr int STRIDE = (2 * HEAD_DIM + 63) / 128 * 128 + 64;        // bytes of a row in shared memory
static_assert(STRIDE >= 2 * HEAD_DIM && STRIDE % 128 == 64, "rows of four lanes each meet no bank twice");

// The operands of one row (of queries or keys) for all k-steps: 4 words a pair of steps, 2 for a last one.
__device__ __forceinline__ void load_row(const u8* row, int u, u32 (&x)[2 * K_STEPS]) {
#pragma unroll
    for (int i = 0; i < STEP_PAIRS; ++i) {
        const uint4 words = *(const uint4*)(row + 64 * i + 16 * u);
        x[4 * i] = words.x, x[4 * i + 1] = words.y, x[4 * i + 2] = words.z, x[4 * i + 3] = words.w;
    }
    if (HEAD_DIM % 32) {
        const uint2 words = *(const uint2*)(row + 64 * STEP_PAIRS + 8 * u);
        x[4 * STEP_PAIRS] = words.x, x[4 * STEP_PAIRS + 1] = words.y;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) score_new(const __grid_constant__ ScoreNew call) {
    __shared__ __align__(16) u8 queries[ROWS * STRIDE];
    __shared__ float base[ROWS];  // lse, base 2; +infinity: the row counts nothing
    __shared__ int last[ROWS];    // the last key that the row sees
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, u = lane % 4;
    const int bh = blockIdx.y, batch = bh / call.heads, head = bh % call.heads;
    const int first_key = (blockIdx.x * WARPS + warp) * KEYS, rows = call.window * call.group;
    u32 keys[TILES][2 * K_STEPS];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int key = min(first_key + 8 * t + g, call.seqlen - 1);
        load_row((const u8*)(call.k + batch * call.k_batch + key * call.k_step + head * call.k_head), u,
                 keys[t]);
    }
    float sum[TILES][2] = {};
    const float unit = call.softcap > 0.f ? call.scale / call.softcap : call.scale * LOG2E;
#pragma unroll 1
    for (int first = 0; first < rows; first += ROWS) {
        __syncthreads();  // the rows before have been used
        for (int i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += THREADS) {
            const int row = i / (HEAD_DIM / 8), part = i % (HEAD_DIM / 8), r = min(first + row, rows - 1);
            const int step = call.seqlen - call.window + r % call.window;
            const int query = head * call.group + r / call.window;
            const u16* from =
                call.q + batch * call.q_batch + step * call.q_step + query * call.q_head + 8 * part;
            const float whole = call.lse[((u64)batch * call.heads * call.group + query) * call.seqlen + step];
            const bool counts = first + row < rows && fabsf(whole) < INFINITE;
            *(uint4*)(queries + row * STRIDE + 16 * part) = counts ? *(const uint4*)from : uint4{};
            if (part) continue;
            base[row] = counts ? whole * LOG2E : INFINITE;
            last[row] = step;
        }
        __syncthreads();  // a chunk of rows is in shared memory
#pragma unroll 1
        for (int tile = 0; tile < ROWS && first + tile < rows; tile += 16) {
            float c[TILES][4] = {};
            u32 low[2 * K_STEPS], high[2 * K_STEPS];
            load_row(queries + (tile + g) * STRIDE, u, low);
            load_row(queries + (tile + 8 + g) * STRIDE, u, high);
#pragma unroll
            for (int i = 0; i < K_STEPS; ++i) {
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
                        if (call.softcap > 0.f) x = call.softcap * LOG2E * tanhf(x);
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
            if (g == 0 && key < call.seqlen)
                call.codes[(u64)bh * call.seqlen + key] = encode_importance(finite(sum[t][j] / (float)rows));
        }
}

// ---- From keys alone

// kind 0: 1 / norm, as keys of small norm collect attention; 1: 1 / age; 2: 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    score_norms(const u16* k, u8* codes, long long k_batch, long long k_step, long long k_head, int heads,
                int seqlen, int kind) {
    const int bh = blockIdx.y, batch = bh / heads, head = bh % heads, lane = threadIdx.x % 32;
    const int step = blockIdx.x * WARPS + threadIdx.x / 32;
    if (step >= seqlen) return;
    double sum = 0.;  // so the code is that of a CPU, whatever the order
    if (kind == 0) {
        const u32* row = (const u32*)(k + batch * k_batch + step * k_step + head * k_head);
#pragma unroll
        for (int i = lane; i < HEAD_DIM / 2; i += 32) {
            const float2 x = unpack_pair(row[i]);
            sum += (double)x.x * x.x + (double)x.y * x.y;
        }
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bit);
    }
    if (lane) return;
    const float norm = kind == 0 ? fmaxf((float)sqrt(sum), 1e-6f) : kind == 1 ? (float)(seqlen - step) : 1.f;
    codes[(u64)bh * seqlen + step] = encode_importance(finite(__fdiv_rn(1.f, norm)));
}

// gate: HEAD_DIM=128,64,80,96,256 BF16=1,0 registers<=128
