// The attention block of a layer in one kernel, a thread-block cluster for each KV head: norm, QKV, rotation,
// attention and its part of the output product. For comparison with the plans that go through memory; one
// token.
//
// CTAs of a cluster, CLUSTER of them, divide the rows of QKV by tiles, the keys by runs of chunks and the
// rows of the output by tiles. Queries, keys and values of the token, then what each has attended, lie in
// shared memory of all: they are written and read there by the others. The output's columns are those of the
// cluster's heads; `add_rows` of engine/ops.cu adds the sums of clusters in a fixed order, so nothing depends
// on who is first.
//
// A launch comes early (`wait_for_launches`), so its CTAs are there when the launch before ends. A ring that
// copies fill, as in engine/token.cu, was slower here than loads.
//
// Threads and data: MMA_THREADS threads a CTA. QKV: warps have the blocks of a tile in turns; output: a warp
// has a tile. Columns come in blocks of 32, so where a head has no whole blocks (80), neighbours both read
// those at its edges and multiply the other's by 0.
//
// Shared memory: the normed token and later what was attended; queries, keys, values; sums of warps, of two
// tiles; a part.
//
// Macros: those of engine/model.cuh, and CLUSTER.
#include "engine/operation.cuh"

static_assert(BATCH == 1 && PASSES == 1 && !HEAD_NORMS, "one token, all heads of a group at once");
constexpr int HEAD_ROWS = (GROUP + 2) * HEAD_DIM, HEAD_TILES = HEAD_ROWS / 16, OWN_COLS = GROUP * HEAD_DIM;
constexpr int OUT_BLOCKS = (OWN_COLS + 31) / 32;  // that a cluster's columns touch
constexpr int X_SHORTS = larger(pitch_of(HIDDEN), OUT_BLOCKS * 64) / 2;
constexpr Kind OUTPUT = PARALLEL ? OUT : O;

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
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The multiplying threads of the cluster meet at a barrier of each CTA, for which all CTAs arrive. In front
// of `arrive_at_all` the threads of this CTA meet.
__device__ __forceinline__ void arrive_at_all(const u64* barrier) {
    if (threadIdx.x < CLUSTER)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                         address_of(barrier, threadIdx.x))
                     : "memory");
}
__device__ __forceinline__ void wait_for_all(const u64* barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @!p bra "
        "again;}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// First row of a tile of the group, among those of QKV; `local` is its first row of the group's: queries, the
// key, the value.
__device__ __forceinline__ int qkv_row(int head, int local) {
    if (local < OWN_COLS) return head * OWN_COLS + local;
    const int of_values = (local - OWN_COLS) / HEAD_DIM;
    return (HEADS_Q + head + of_values * HEADS_KV) * HEAD_DIM + (local - OWN_COLS) % HEAD_DIM;
}

// The first blocks of 32 columns of a tile, loaded before what they are multiplied by is there.
constexpr int LOADED = 4;
struct Blocks {
    uint4 upper[LOADED], lower[LOADED];
};
__device__ __forceinline__ void load_block(uint4& upper, uint4& lower, const char* weights, int block) {
    const uint4* const from = (const uint4*)(weights + block * BLOCK_BYTES) + threadIdx.x % 32;
    upper = __ldcg(from), lower = __ldcg(from + 32);
}
__device__ __forceinline__ void load_blocks(Blocks& blocks, const char* weights, int count) {
#pragma unroll
    for (int b = 0; b < LOADED; ++b)
        if (b < count) load_block(blocks.upper[b], blocks.lower[b], weights, b);
}

// Adds a block of a tile to two of the chains.
__device__ __forceinline__ void multiply_block(float (&c)[CHAINS][N_TILES][4], const uint4& upper,
                                               const uint4& lower, const u16* x, int block) {
    const uint4 column = *(const uint4*)(x + block * 32 + threadIdx.x % 4 * 8);
    const u32 one[4] = {upper.x, upper.y, upper.z, upper.w};
    const u32 other[4] = {lower.x, lower.y, lower.z, lower.w};
    mma(c[0][0], one, column.x, column.y), mma(c[1][0], other, column.z, column.w);
}
__device__ __forceinline__ void multiply_loaded(float (&c)[CHAINS][N_TILES][4], const Blocks& blocks,
                                                const u16* x, int count) {
#pragma unroll
    for (int b = 0; b < LOADED; ++b)
        if (b < count) multiply_block(c, blocks.upper[b], blocks.lower[b], x, b);
}
// Every `step`-th block from `first` on.
__device__ __forceinline__ void multiply_blocks(float (&c)[CHAINS][N_TILES][4], const char* weights,
                                                const u16* x, int first, int count, int step) {
#pragma unroll 4
    for (int b = first; b < count; b += step) {
        uint4 upper, lower;
        load_block(upper, lower, weights, b);
        multiply_block(c, upper, lower, x, b);
    }
}

// Three CTAs on an SM: half of the next launch's have come when this one's end. Where KV heads have groups,
// clusters are so few that two are enough.
extern "C" __global__ void __launch_bounds__(MMA_THREADS, CLUSTER > 1 && GROUP == 1 ? 3 : 2)
    attend_block(const __grid_constant__ Operation op) {
    constexpr int WARP_ROWS = HEADS_OF_WARP * MERGED_ROW;
    __shared__ __align__(16) u16 x[X_SHORTS];
    __shared__ __align__(16) u16 newest[HEAD_ROWS];
    __shared__ __align__(16) float sums[2][SUMS];
    __shared__ float rows[WARPS * WARP_ROWS], part[HEADS * MERGED_ROW];
    __shared__ float2 moments[BATCH];
    __shared__ u64 met;
    const Call& call = op.call;
    const int rank = blockIdx.x % CLUSTER, head = blockIdx.x / CLUSTER, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const Matrix& qkv = call.matrices[op.layer * PRODUCTS];
    if (threadIdx.x == 0) init_barrier(shared_address(&met), CLUSTER);
    sync_cluster();  // all CTAs of the cluster have begun, their barriers are there

    const NormWeights held = load_norm_weights(qkv);
    wait_for_launches();
    launch_dependents();
    norm_x(call, is_embedded(op.layer, 0), qkv, held, (char*)x, moments);
    sync_threads(OF_MMA, MMA_THREADS);  // x is there
    int count = 0;                      // tiles of this CTA
    for (int own = rank; own < HEAD_TILES; own += CLUSTER, ++count) {
        const int local = own * 16, first = qkv_row(head, local);
        float c[CHAINS][N_TILES][4] = {};
        multiply_blocks(c, qkv.weights + (i64)first * (HIDDEN * 2), x, warp, HIDDEN / 32, WARPS);
        leave_sums(sums[count % 2], c);
        sync_threads(OF_MMA, MMA_THREADS);  // all warps' sums are there; those of the tile before are read
        if (warp == count % WARPS && lane < 8) {
            const Element at = {0, lane, 0};
            float2 y = add_sums(sums[count % 2], at);
            const int row = first + at.row();
            const float2 bias = qkv.bias ? *(const float2*)(qkv.bias + row) : make_float2(0.f, 0.f);
            int one = row % HEAD_DIM, other = one + 1;
            y.x += bias.x, y.y += bias.y;
            if (local < OWN_COLS + HEAD_DIM) y = turned(call, 0, one, other, y);
            u16* const to = newest + local / HEAD_DIM * HEAD_DIM;
            store_to_all(to + one, y.x), store_to_all(to + other, y.y);
        }
        __syncwarp();
    }
    sync_threads(OF_MMA, MMA_THREADS);
    arrive_at_all(&met);
    wait_for_all(&met, 0);  // all queries, keys and values are there; x is free

    Chunks chunks;  // of one token; only the number of its keys is used
    chunks.old[0] = __ldg(call.positions);
    const int all = max(1, (chunks.old[0] + CHUNK - 1) / CHUNK);
    const Segment segment = {0, head, all * rank / CLUSTER, all * (rank + 1) / CLUSTER, all};
    const i64 from = keys_of(call, op.layer, segment) + segment.begin * (CHUNK * HEAD_DIM) + lane % LANES * 8;
    attend_segment(call, chunks, segment, newest,
                   MemoryKeys<true>{(const uint4*)(call.k + from), (const uint4*)(call.v + from)},
                   rows + warp * WARP_ROWS);
    constexpr int TILE_BYTES = Shape<OUTPUT>::PARTS * Shape<OUTPUT>::STAGES * SLOT_BYTES;
    constexpr int TILES_APART = CLUSTER * WARPS;                            // of a warp, of the output
    const int block = head * OWN_COLS / 32, before = head * OWN_COLS % 32;  // of the output: first; others'
    int tile = rank * WARPS + warp;
    const char* output = call.matrices[op.layer * PRODUCTS + op.product].weights + (i64)tile * TILE_BYTES +
                         block * BLOCK_BYTES;
    Blocks blocks;
    if (tile < HIDDEN / 16) load_blocks(blocks, output, OUT_BLOCKS);
    sync_threads(OF_MMA, MMA_THREADS);  // all warps' sums are there
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += MMA_THREADS) {
        const int of = i / HEAD_DIM, channel = i % HEAD_DIM;
        const Merged m =
            merge_warps(rows + of / HEADS_OF_WARP * TEAM_WARPS * WARP_ROWS + of % HEADS_OF_WARP * MERGED_ROW,
                        WARP_ROWS, channel);
        part[of * MERGED_ROW + channel] = m.value;
        if (channel == 0)
            part[of * MERGED_ROW + HEAD_DIM] = m.maximum, part[of * MERGED_ROW + HEAD_DIM + 1] = m.total;
    }
    for (int i = threadIdx.x; i < OUT_BLOCKS * 32; i += MMA_THREADS) x[i] = 0;
    sync_threads(OF_MMA, MMA_THREADS);
    arrive_at_all(&met);
    if (rank == 0 && warp == 0) {
        const i64 at = keys_of(call, op.layer, segment) + (i64)chunks.old[0] * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM; i += 32)
            call.k[at + i] = newest[OWN_COLS + i], call.v[at + i] = newest[OWN_COLS + HEAD_DIM + i];
    }
    wait_for_all(&met, 1);  // all parts are there
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
    sync_threads(OF_MMA, MMA_THREADS);  // x is there
    arrive_at_all(&met);
    for (; tile < HIDDEN / 16; tile += TILES_APART, output += (i64)TILES_APART * TILE_BYTES) {
        float c[CHAINS][N_TILES][4] = {};
        multiply_loaded(c, blocks, x, OUT_BLOCKS);
        if (tile + TILES_APART < HIDDEN / 16)
            load_blocks(blocks, output + (i64)TILES_APART * TILE_BYTES, OUT_BLOCKS);
        multiply_blocks(c, output, x, LOADED, OUT_BLOCKS, 1);
        float* const to = op.head_sums + (i64)head * HIDDEN + tile * 16 + lane / 4;
        if (lane % 4 == 0) to[0] = c[0][0][0] + c[1][0][0], to[8] = c[0][0][2] + c[1][0][2];
    }
    wait_for_all(&met, 0);  // all have read this CTA's part
}

// clang-format off
// gate: BATCH=1 BF16=0,1 HIDDEN=4096 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=128 ROTARY_DIM=128 FFN=11008 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=221312 CLUSTER=4,16 registers<=80 arch=sm_90a
// gate: BATCH=1 BF16=0 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=0 SPLITS=4 WARPS=8 ADDER_GROUPS=4 SLOTS=20 SLOT_BLOCKS=10 SHARED_BYTES=213888 CLUSTER=8 registers<=80 arch=sm_90a
// gate: BATCH=1 BF16=0 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=0 SPLITS=4 WARPS=8 ADDER_GROUPS=4 SLOTS=20 SLOT_BLOCKS=10 SHARED_BYTES=213888 CLUSTER=1 registers<=96 arch=sm_90a
// gate: BATCH=1 BF16=1 HIDDEN=4096 HEADS_Q=32 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=14336 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=227968 CLUSTER=2 registers<=128 arch=sm_90a,sm_100a,sm_120a
// clang-format on
