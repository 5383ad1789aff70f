// A token of a decoder in a launch for each operation: to look between them, and for GPUs before Hopper.
//
// The operations of a layer, in their order: `norm_tokens`, `multiply_qkv`, `rotate_heads` (which norms them
// first where the model does), `attend_tokens` (which stores the newest keys and values, too), `norm_tokens`,
// `multiply_up`, `activate_rows`, `multiply_out`, `add_rows`. Layers that are not parallel have `multiply_o`
// and `add_rows` behind `attend_tokens`, and `multiply_down` for `multiply_out`. Behind the last layer come
// `norm_tokens` and `multiply_head`. They are made of the functions of engine/token.cu and add in its order,
// so all but `attend_tokens` give its bits: there keys of a head are divided among CTAs, here one has them
// all.
//
// Threads and data: MMA_THREADS threads a CTA. `multiply_*`: a CTA has 16 rows, its warps the blocks that
// they have in engine/token.cu, from memory; `attend_tokens`: a pass over a KV head of a token;
// `rotate_heads`: a warp a head; `norm_tokens`: one CTA for all; `activate_rows`: a thread two rows of a
// product; `add_rows`: 64 threads, a warp 16 rows, whose 4 groups of lanes have every fourth head's sums.
// Shared memory: sums of warps.
//
// Macros: those of engine/model.cuh. Nothing here needs more than sm_80.
#include "engine/operation.cuh"

__device__ __forceinline__ const Matrix& matrix_of(const Operation& op) {
    return op.call.matrices[op.layer * PRODUCTS + op.product];
}
__device__ __forceinline__ float2 bias_of(const Operation& op, int row) {
    const Matrix& m = matrix_of(op);
    return m.bias ? *(const float2*)(m.bias + row) : make_float2(0.f, 0.f);
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS) norm_tokens(const __grid_constant__ Operation op) {
    __shared__ float2 moments[BATCH];
    norm_x(op.call, is_embedded(op.layer, op.product), matrix_of(op), load_norm_weights(matrix_of(op)),
           op.normed, moments);
}

// Of `rows` rows; 8 neighbouring threads have 16 of them and a token.
template <Kind KIND>
__device__ __forceinline__ void multiply_tile(const Operation& op, int rows) {
    using S = Shape<KIND>;
    __shared__ __align__(16) float sums[SUMS];
    const int lane = threadIdx.x % 32;
    const Element at = {(int)blockIdx.x, lane % 8, min((int)threadIdx.x / 8, BATCH - 1)};
    const char* weights =
        matrix_of(op).weights + (i64)at.tile * (S::PARTS * S::STAGES * SLOT_BYTES) + lane * 16;
    const auto load_x = [&](int column, int n) {
        const int token = min(lane / 4 + 8 * n, BATCH - 1);
        const void* from = op.normed + token * S::PITCH + 2 * column;
        if constexpr (adds_to_hidden(KIND)) from = columns_from<KIND>(op.call, token, column);
        if (KIND == OUT && column < op.first_column) return make_uint4(0, 0, 0, 0);
        return __ldcg((const uint4*)from);
    };
    float2 y = {0.f, 0.f};
    for (int part = 0; part < S::PARTS; ++part, weights += S::STAGES * SLOT_BYTES) {
        float c[CHAINS][N_TILES][4] = {};
        multiply_part<KIND>(c, weights,
                            [&](int column, int n) { return load_x(part * S::COLS + column, n); });
        leave_sums(sums, c);
        __syncthreads();  // all warps' sums are there
        const float2 sum = add_sums(sums, at);
        y = part ? make_float2(y.x + sum.x, y.y + sum.y) : sum;
        __syncthreads();  // they have been read
    }
    if (threadIdx.x >= 8 * BATCH) return;
    float* const to = KIND == HEAD ? op.call.logits : op.sums;
    if (KIND == HEAD) {
        const float2 bias = bias_of(op, at.row());
        y.x += bias.x, y.y += bias.y;
    }
    *(float2*)(to + (i64)at.n * rows + at.row()) = y;
}

#define KVLAB_MULTIPLY(name, KIND, rows)                                                                   \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS) name(const __grid_constant__ Operation op) { \
        multiply_tile<KIND>(op, rows);                                                                     \
    }
KVLAB_MULTIPLY(multiply_qkv, QKV, QKV_ROWS)
KVLAB_MULTIPLY(multiply_head, HEAD, op.call.vocabulary)
#if PARALLEL
KVLAB_MULTIPLY(multiply_up, UP, FFN)
KVLAB_MULTIPLY(multiply_out, OUT, HIDDEN)
#else
KVLAB_MULTIPLY(multiply_o, O, HIDDEN)
KVLAB_MULTIPLY(multiply_up, MLP_KIND, MLP_ROWS)
KVLAB_MULTIPLY(multiply_down, DOWN, HIDDEN)
#endif

extern "C" __global__ void __launch_bounds__(32) rotate_heads(const __grid_constant__ Operation op) {
    const int head = blockIdx.x, n = blockIdx.y;
    const bool is_normed = HEAD_NORMS && head < HEADS_Q + HEADS_KV;
    for (int channel = 2 * threadIdx.x; channel < HEAD_DIM; channel += 64) {
        const int row = head * HEAD_DIM + channel;
        const float2 bias = bias_of(op, row);
        float2 y = *(const float2*)(op.sums + n * QKV_ROWS + row);
        y.x += bias.x, y.y += bias.y;
        if (is_normed)
            *(float2*)(op.call.raw_heads + (n * (HEADS_Q + HEADS_KV) + head) * HEAD_DIM + channel) = y;
        else
            store_head(op.call, n, head, channel, y);
    }
    __syncwarp();  // what is normed is in memory
    if (is_normed) norm_head(op.call, op.layer, n, head);
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS)
    attend_tokens(const __grid_constant__ Operation op) {
    constexpr int WARP_ROWS = HEADS_OF_WARP * MERGED_ROW;
    __shared__ __align__(16) u16 newest[NEWEST_BYTES / 2];
    __shared__ float rows[WARPS * WARP_ROWS];
    __shared__ Chunks chunks;
    const Call& call = op.call;
    if (threadIdx.x < 32) count_chunks(call, chunks);
    __syncthreads();
    const int n = blockIdx.y, count = chunks.before[n + 1] - chunks.before[n];
    const Segment segment = {n, (int)blockIdx.x, 0, count, count};
    copy_newest(call, segment, newest);
    wait_copies();
    __syncthreads();  // what is new is there
    const i64 from = keys_of(call, op.layer, segment) + threadIdx.x % 32 % LANES * 8;
    attend_segment(call, chunks, segment, newest,
                   MemoryKeys<false>{(const uint4*)(call.k + from), (const uint4*)(call.v + from)},
                   rows + threadIdx.x / 32 * WARP_ROWS);
    __syncthreads();  // all warps' sums are there
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += MMA_THREADS) {
        const int head = i / HEAD_DIM;
        const Merged m = merge_warps(
            rows + head / HEADS_OF_WARP * TEAM_WARPS * WARP_ROWS + head % HEADS_OF_WARP * MERGED_ROW,
            WARP_ROWS, i % HEAD_DIM);
        call.attended[n * Q_COLS + first_head(segment) * HEAD_DIM + i] = round_element(m.value / m.total);
    }
    if (threadIdx.x < 32 && segment.reader % PASSES == 0) keep_segment(call, op.layer, segment);
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS)
    activate_rows(const __grid_constant__ Operation op) {
    constexpr int ROWS = GATED_MLP ? 2 * FFN : FFN;
    const int pair = blockIdx.x * MMA_THREADS + threadIdx.x, n = blockIdx.y, row = 2 * pair;
    if (row >= ROWS) return;
    const float2 sum = *(const float2*)(op.sums + (i64)n * ROWS + row), bias = bias_of(op, row);
    const float2 y = {sum.x + bias.x, sum.y + bias.y};
    u16* const to = op.call.activation + n * FFN;
    if (GATED_MLP)
        to[pair] = round_element(silu(y.x) * y.y);
    else
        *(u32*)(to + row) = pack_pair(gelu(y.x), gelu(y.y));
}

extern "C" __global__ void __launch_bounds__(64) add_rows(const __grid_constant__ Operation op) {
    const int lane = threadIdx.x % 32, tile = blockIdx.x * 2 + threadIdx.x / 32, n = blockIdx.y;
    const Element at = {min(tile, HIDDEN / 16 - 1), lane % 8, n};
    launch_dependents();
    const float2 bias = bias_of(op, at.row());
    wait_for_launches();
    const float* const hidden = is_embedded(op.layer, op.product) ? op.call.embed.hidden : op.call.hidden;
    const float2 before = load_pair(hidden + n * HIDDEN + at.row());
    float2 y = op.takes_sums ? load_pair(op.sums + n * HIDDEN + at.row()) : make_float2(0.f, 0.f);
    if (op.head_sums) {
        float2 sum = {0.f, 0.f};
#pragma unroll 8
        for (int head = lane / 8; head < HEADS_KV; head += 4) {
            const float2 own = load_pair(op.head_sums + head * HIDDEN + at.row());
            sum.x += own.x, sum.y += own.y;
        }
#pragma unroll
        for (int i = 8; i < 32; i *= 2) {
            sum.x += __shfl_xor_sync(ALL_LANES, sum.x, i), sum.y += __shfl_xor_sync(ALL_LANES, sum.y, i);
        }
        y.x += sum.x, y.y += sum.y;
    }
    y.x += bias.x + before.x, y.y += bias.y + before.y;
    store_hidden(op.call, at, y, lane < 8 && tile < HIDDEN / 16);
}

// clang-format off
// gate: BATCH=1 BF16=0,1 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=0 SPLITS=4 WARPS=8 ADDER_GROUPS=4 SLOTS=20 SLOT_BLOCKS=10 SHARED_BYTES=213888 registers<=128 arch=sm_80,sm_90a
// gate: BATCH=16 BF16=0 HIDDEN=1024 HEADS_Q=16 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=3072 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=1 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=2 SLOTS=12 SLOT_BLOCKS=8 SHARED_BYTES=218112 registers<=128 arch=sm_80,sm_90a,sm_100a,sm_120a
// clang-format on
