// The attention block of a layer in one kernel, a thread-block cluster for each KV head: norm, QKV, rotation,
// attention and its part of the output product. For comparison with the plans that go through memory; one
// token.
//
// CTAs of a cluster, CLUSTER of them, divide the rows of QKV by tiles, the keys by runs of chunks and the
// rows of the output by tiles. Queries, keys and values of the token, then what each has attended, lie in
// shared memory of all: they are written and read there by the others. The output's columns are those of the
// cluster's heads; `add_rows` of engine/ops.cu adds the sums of clusters in the order of heads, so nothing
// depends on who is first.
//
// Threads and data: MMA_THREADS threads a CTA. QKV: warps share a tile as in engine/ops.cu; output: a warp
// has a tile. Columns come in blocks of 32, so where a head has no whole blocks (80), neighbours both read
// those at its edges and multiply the other's by 0.
//
// Shared memory: the normed token and later what was attended; queries, keys, values; sums of warps; a part.
//
// Macros: those of engine/model.cuh, and CLUSTER.
#include "engine/operation.cuh"

static_assert(BATCH == 1 && PASSES == 1 && !HEAD_NORMS, "one token, all heads of a group at once");
constexpr int HEAD_ROWS = (GROUP + 2) * HEAD_DIM, HEAD_TILES = HEAD_ROWS / 16, OWN_COLS = GROUP * HEAD_DIM;
constexpr int OUT_BLOCKS =
    OWN_COLS / 32 + (OWN_COLS % 32 ? 2 : 1);  // that a cluster's columns touch, at most
constexpr int X_SHORTS = larger(pitch_of(HIDDEN), OUT_BLOCKS * 64) / 2;
constexpr Kind OUTPUT = PARALLEL ? OUT : O;

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
__device__ __forceinline__ u32 address_of(const void* at, int cta) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(cta));
    return address;
}
__device__ __forceinline__ float load_of(const float* at, int cta) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address_of(at, cta)) : "memory");
    return x;
}
// An element of the 16-bit type to the shared memory of all CTAs of the cluster.
__device__ __forceinline__ void store_to_all(u16* to, float x) {
    for (int cta = 0; cta < CLUSTER; ++cta)
        asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(address_of(to, cta)), "h"(round_element(x))
                     : "memory");
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS, 2)
    attend_block(const __grid_constant__ Operation op) {
    constexpr int WARP_ROWS = HEADS_OF_WARP * MERGED_ROW;
    __shared__ __align__(16) u16 x[X_SHORTS];
    __shared__ __align__(16) u16 newest[HEAD_ROWS];
    __shared__ __align__(16) float sums[SUMS];
    __shared__ float rows[WARPS * WARP_ROWS], part[HEADS * MERGED_ROW];
    __shared__ float2 moments[BATCH];
    __shared__ Chunks chunks;
    const Call& call = op.call;
    const int rank = blockIdx.x % CLUSTER, head = blockIdx.x / CLUSTER, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const Matrix& qkv = call.matrices[op.layer * PRODUCTS];

    norm_x(call, qkv, load_norm_weights(qkv), (char*)x, moments);
    if (warp == 0) count_chunks(call, chunks);
    sync_cluster();  // x is there, and all CTAs of the cluster have begun
    for (int own = rank; own < HEAD_TILES; own += CLUSTER) {
        const int local = own * 16;  // row of the group: its queries, its key, its value
        const int first = local < OWN_COLS
                              ? head * OWN_COLS + local
                              : (HEADS_Q + head + (local - OWN_COLS) / HEAD_DIM * HEADS_KV) * HEAD_DIM +
                                    (local - OWN_COLS) % HEAD_DIM;
        using S = Shape<QKV>;
        float c[CHAINS][N_TILES][4] = {};
        const char* const weights = qkv.weights + (i64)(first / 16) * (S::STAGES * SLOT_BYTES) + lane * 16;
        multiply_part<QKV>(c, weights, [&](int column, int) { return *(const uint4*)(x + column); });
        leave_sums(sums, c);
        __syncthreads();  // all warps' sums are there
        if (threadIdx.x < 8) {
            const Element at = {0, (int)threadIdx.x, 0};
            float2 y = add_sums(sums, at);
            const int row = first + at.row();
            const float2 bias = qkv.bias ? *(const float2*)(qkv.bias + row) : make_float2(0.f, 0.f);
            int one = row % HEAD_DIM, other = one + 1;
            y.x += bias.x, y.y += bias.y;
            if (local < OWN_COLS + HEAD_DIM) y = turned(call, 0, one, other, y);
            u16* const to = newest + local / HEAD_DIM * HEAD_DIM;
            store_to_all(to + one, y.x), store_to_all(to + other, y.y);
        }
        __syncthreads();  // they have been read
    }
    sync_cluster();  // all queries, keys and values are there; x is free

    const int count = chunks.before[1];
    const Segment segment = {0, head, count * rank / CLUSTER, count * (rank + 1) / CLUSTER, count};
    const i64 from = keys_of(call, op.layer, segment) + segment.begin * (CHUNK * HEAD_DIM) + lane % LANES * 8;
    attend_segment(call, chunks, segment, newest,
                   MemoryKeys{(const uint4*)(call.k + from), (const uint4*)(call.v + from)},
                   rows + warp * WARP_ROWS);
    __syncthreads();  // all warps' sums are there
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += MMA_THREADS) {
        const int of = i / HEAD_DIM, channel = i % HEAD_DIM;
        const Merged m =
            merge_warps(rows + of / HEADS_OF_WARP * TEAM_WARPS * WARP_ROWS + of % HEADS_OF_WARP * MERGED_ROW,
                        WARP_ROWS, channel);
        part[of * MERGED_ROW + channel] = m.value;
        if (channel == 0)
            part[of * MERGED_ROW + HEAD_DIM] = m.maximum, part[of * MERGED_ROW + HEAD_DIM + 1] = m.total;
    }
    if (rank == 0 && warp == 0) {
        const i64 at = keys_of(call, op.layer, segment) + (i64)call.positions[0] * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM; i += 32)
            call.k[at + i] = newest[OWN_COLS + i], call.v[at + i] = newest[OWN_COLS + HEAD_DIM + i];
    }
    const int block = head * OWN_COLS / 32,
              before = head * OWN_COLS % 32;  // first block, columns of others in it
    for (int i = threadIdx.x; i < OUT_BLOCKS * 32; i += MMA_THREADS) x[i] = 0;
    sync_cluster();  // all parts are there
    for (int i = threadIdx.x; i < OWN_COLS; i += MMA_THREADS) {
        const float* const own = part + i / HEAD_DIM * MERGED_ROW;
        float highest = LOWEST, value = 0.f, total = 0.f;
        for (int cta = 0; cta < CLUSTER; ++cta) highest = fmaxf(highest, load_of(own + HEAD_DIM, cta));
        for (int cta = 0; cta < CLUSTER; ++cta) {
            const float weight = exp2f(load_of(own + HEAD_DIM, cta) - highest);
            value += weight * load_of(own + i % HEAD_DIM, cta),
                total += weight * load_of(own + HEAD_DIM + 1, cta);
        }
        x[before + i] = round_element(value / total);
    }
    sync_cluster();  // x is there, and all have read
    const int blocks = (before + OWN_COLS + 31) / 32,
              tile_bytes = Shape<OUTPUT>::PARTS * Shape<OUTPUT>::STAGES * SLOT_BYTES;
    const Matrix& output = call.matrices[op.layer * PRODUCTS + op.product];
    for (int tile = rank * WARPS + warp; tile < HIDDEN / 16; tile += CLUSTER * WARPS) {
        float c[2][N_TILES][4] = {};
        const char* const weights = output.weights + (i64)tile * tile_bytes + block * BLOCK_BYTES + lane * 16;
#pragma unroll 4
        for (int b = 0; b < blocks; ++b) {
            const uint4 upper = __ldcg((const uint4*)(weights + b * BLOCK_BYTES));
            const uint4 lower = __ldcg((const uint4*)(weights + b * BLOCK_BYTES + 512));
            const uint4 column = *(const uint4*)(x + b * 32 + lane % 4 * 8);
            const u32 first[4] = {upper.x, upper.y, upper.z, upper.w},
                      second[4] = {lower.x, lower.y, lower.z, lower.w};
            mma(c[0][0], first, column.x, column.y), mma(c[1][0], second, column.z, column.w);
        }
        float* const to = op.head_sums + (i64)head * HIDDEN + tile * 16 + lane / 4;
        if (lane % 4 == 0) to[0] = c[0][0][0] + c[1][0][0], to[8] = c[0][0][2] + c[1][0][2];
    }
}

// clang-format off
// gate: BATCH=1 BF16=0,1 HIDDEN=4096 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=128 ROTARY_DIM=128 FFN=11008 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=221312 CLUSTER=4,16 registers<=128 arch=sm_90a
// gate: BATCH=1 BF16=0 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=0 SPLITS=2 WARPS=8 ADDER_GROUPS=4 SLOTS=20 SLOT_BLOCKS=10 SHARED_BYTES=220288 CLUSTER=1,8 registers<=128 arch=sm_90a
// gate: BATCH=1 BF16=1 HIDDEN=4096 HEADS_Q=32 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=14336 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=12 SLOT_BLOCKS=16 SHARED_BYTES=227968 CLUSTER=2 registers<=128 arch=sm_90a,sm_120a
// clang-format on
