// One token of a decoder in one launch (PACKED: in one a layer): every weight is read once, by a stream that
// no dependency stops.
//
// A CTA on every SM stays for all phases (QKV and UP, attention, OUT of parallel layers; QKV, attention, O,
// GATED or UP, DOWN of others; the head). One of its warps has the copy engine bring the CTA's weights, of
// all phases one after the other, into a ring in shared memory; it waits for nothing but a free slot of the
// ring. So memory stays busy while the other warps wait for the other CTAs, norm the hidden state or attend.
// They must multiply several times as fast as memory brings weights: what the ring took in during a wait must
// be gone before the next wait, or the ring is full when that begins and covers nothing of it.
//
// Threads and data
//   CTA    tiles of 16 rows, every so many-th one. With SPLITS > 1 a tile of OUT, O and DOWN has COLS =
//          columns / SPLITS, and the CTA of the first columns adds the others' sums to its own, in their
//          order.
//   warp   of WARPS, which multiply SIDES slots at a time: of every SIDES-th slot of a tile every WARPS /
//          SIDES-th block, 16 rows by 32 columns, multiplied by mma.m16n8k16: weights are A, in the order of
//          kvlab/engine/packing.py, x is B, a token a column of it.
//   warp   of ADDERS in each of ADDER_GROUPS: adds the sums of the warps in their order for every
//          ADDER_GROUPS-th tile; lane has rows 2 j and 2 j + 1 of token n, j = lane % 8,
//          n = 4 adder + lane / 8. What follows (bias, rotation, GELU, residual) is its work, and as many
//          tiles are under way as there are groups.
//   warp   the last: one lane of it starts the copies.
//   CTA    at attention: an even share of all tokens' keys, which come through the ring, too; see
//          engine/attend.cuh. The longer contexts are, the more CTAs have QKV, keys and values, and the fewer
//          UP.
//   CTA    behind the head, if the call says so (`chooses`): adders have kept the likeliest of their rows.
//          The CTA that leaves last embeds what is chosen, so the next launch can begin with it.
// The order of every sum follows from WARPS, SPLITS, positions and the number of CTAs, so GPUs of one kind
// give the same bits.
//
// Shared memory, at most 227 KiB: x, BATCH * pitch bytes (attention has its queries and sums there, too);
// sums of ADDER_GROUPS tiles, 80 * WARPS * BATCH bytes each; SLOTS slots of SLOT_BLOCKS KiB for weights; 16
// bytes of barriers a slot. kvlab/engine/token_kernel.py computes the same sizes.
//
// Keys and values of a packed cache (PACKED) are attended and stored by the cache's own launches. Then a
// launch has the phases from one layer's attention to the next: OUT, or O, the MLP, and QKV of the next
// layer.
//
// CTAs wait for each other: all must be on the device, which a cooperative launch guarantees or refuses.
#include "engine/attend.cuh"
#include "engine/epilogue.cuh"
#include "engine/grid.cuh"

constexpr int SUM_BYTES = (ADDER_GROUPS * SUMS * 4 + 127) / 128 * 128;
static_assert(X_BYTES + SUM_BYTES + SLOTS * SLOT_BYTES == SHARED_BYTES,
              "sizes of kvlab/engine/token_kernel.py");

// ---- the order of phases, the same for all three kinds of warps

// `visit.product<KIND>(matrix, deal, embedded)`, `visit.attention(layer)`, and
// `visit.expect(all, of_qkv)`: so many arrivals at the two counters are the end of the phase.
template <class Visit>
__device__ __forceinline__ void visit_all(const Call& call, const Chunks& chunks, Visit& visit) {
    const int ctas = gridDim.x, cta = blockIdx.x;
    const auto split = [&] {
        return Deal{cta < call.split_ctas ? cta : 1 << 30, call.split_ctas, HIDDEN / 16 * SPLITS};
    };
    const u32 arrivals = ctas * ADDERS * ADDER_GROUPS;
    const int of_qkv = chunks.qkv_ctas;  // CTAs
    for (int phase = call.first_phase; phase < call.end_phase; ++phase) {
        const int layer = phase / PHASES, kind = phase % PHASES;
        const Matrix* m = call.matrices + layer * PRODUCTS;
        if (layer == call.layers) {
            visit.template product<HEAD>(*m, {cta, ctas, call.vocabulary / 16}, false);
        } else if (kind == 0) {
            if (cta < of_qkv)
                visit.template product<QKV>(m[0], {cta, of_qkv, QKV_ROWS / 16}, is_embedded(layer, 0));
#if PARALLEL
            else
                visit.template product<UP>(m[1], {cta - of_qkv, ctas - of_qkv, FFN / 16},
                                           is_embedded(layer, 1));
#endif
            visit.expect((ctas - of_qkv) * ADDERS * ADDER_GROUPS, of_qkv * ADDERS * ADDER_GROUPS);
#if HEAD_NORMS
            visit.head_norms(layer, of_qkv);
            visit.expect(0, of_qkv);
#endif
        } else if (kind == 1) {
#if !PACKED  // a launch ends before it
            visit.attention(layer);
            visit.expect(chunks.attending, 0);
#endif
#if PARALLEL
        } else {
            visit.template product<OUT>(m[2], split(), is_embedded(layer, 2));
#else
        } else if (kind == 2) {
            visit.template product<O>(m[1], split(), is_embedded(layer, 1));
            visit.expect(arrivals, 0);
        } else if (kind == 3) {
            visit.template product<MLP_KIND>(m[2], {cta, ctas, MLP_ROWS / 16}, false);
            visit.expect(arrivals, 0);
        } else {
            visit.template product<DOWN>(m[3], split(), false);
#endif
            visit.expect(arrivals, 0);
        }
    }
}

struct Producer {
    const Call& call;
    const Chunks& chunks;
    Copies copies;
    template <Kind KIND>
    __device__ __forceinline__ void product(const Matrix m, const Deal& deal, bool) {
        produce<KIND>(copies, m.weights, deal);
    }
    __device__ __forceinline__ void head_norms(int, int) {}
    __device__ __forceinline__ void attention(int layer) { produce_keys(call, layer, chunks, copies); }
    __device__ __forceinline__ void expect(u32, u32) {}
};

struct Adder {
    const Call& call;
    Sums sums;
    u32 opened, parity;  // a barrier that completes when the CTA may read what the phase before has written
    template <Kind KIND>
    __device__ __forceinline__ void product(const Matrix m, const Deal& deal, bool embedded) {
        wait_barrier(opened, parity);
        parity ^= 1;
        add_up<KIND>(call, embedded, m, sums, deal);
        __syncwarp();
        if (KIND != HEAD && threadIdx.x % 32 == 0) arrive_grid(call.barrier + (KIND == QKV ? OF_QKV : 0));
    }
    __device__ __forceinline__ void head_norms(int, int) {}
    __device__ __forceinline__ void attention(int) {}
    __device__ __forceinline__ void expect(u32, u32) {}
};

struct Multiplier {
    const Call& call;
    const Chunks& chunks;
    Ring ring;
    char* x;
    Sums sums;
    float2* moments;
    u32 opened;
    u32 arrivals, of_qkv;  // expected so far

    __device__ __forceinline__ void expect(u32 all, u32 qkv) { arrivals += all, of_qkv += qkv; }

    // Waits for what the phases before have to leave in memory.
    __device__ __forceinline__ void open(bool attends) const {
        if (threadIdx.x == 0) {
            if (attends)
                wait_grid(call.barrier + OF_QKV, of_qkv);
            else
                wait_grid(call.barrier, arrivals);
        }
        sync_threads(OF_MMA, MMA_THREADS);
    }
    template <Kind KIND>
    __device__ __forceinline__ void product(const Matrix m, const Deal& deal, bool embedded) {
        NormWeights held;
        if constexpr (!adds_to_hidden(KIND)) held = load_norm_weights(m);
        open(false);
        if (threadIdx.x == 0) arrive(opened);
        if constexpr (adds_to_hidden(KIND))
            copy_x<KIND>(call, x);
        else
            norm_x(call, embedded, m, held, x, moments);
        sync_threads(OF_MMA, MMA_THREADS);  // x is there
        multiply<KIND>(ring, sums, x, deal);
    }
    __device__ __forceinline__ void head_norms(int layer, int ctas) {
        if (blockIdx.x >= ctas) return;
        open(true);
        for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < BATCH * (HEADS_Q + HEADS_KV);
             i += ctas * WARPS)
            norm_head(call, layer, i / (HEADS_Q + HEADS_KV), i % (HEADS_Q + HEADS_KV));
        sync_threads(OF_MMA, MMA_THREADS);  // all warps have written
        if (threadIdx.x == 0) arrive_grid(call.barrier + OF_QKV);
    }
    __device__ __forceinline__ void attention(int layer) {
        if ((int)blockIdx.x >= chunks.attending) return;
        open(true);
        attend(call, chunks, ring, x);
        if (threadIdx.x == 0) arrive_grid(call.barrier);
        keep_newest(call, layer, chunks);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) token(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) char memory[];
    __shared__ float2 moments[BATCH];
    __shared__ Chunks chunks;
    __shared__ u64 barriers[2 * SLOTS + 2 * ADDER_GROUPS + 1];
    char* const x = memory;
    const u32 full = shared_address(barriers), there = full + 16 * SLOTS, opened = there + 16 * ADDER_GROUPS;
    const Ring ring = {shared_address(memory + X_BYTES + SUM_BYTES), full, full + 8 * SLOTS, 0, 0};
    const Sums sums = {(float*)(memory + X_BYTES), there, there + 8 * ADDER_GROUPS, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i)
            init_barrier(ring.full + 8 * i, 1), init_barrier(ring.empty + 8 * i, WARPS);
        for (int i = 0; i < ADDER_GROUPS; ++i)
            init_barrier(sums.there + 8 * i, WARPS), init_barrier(sums.read + 8 * i, ADDERS);
        init_barrier(opened, 1);
        fence_async();
    }
    if (threadIdx.x < 32) count_chunks(call, chunks);
    __syncthreads();
    if (threadIdx.x < MMA_THREADS) {
        Multiplier multiplier = {call, chunks, ring, x, sums, moments, opened, 0, 0};
        visit_all(call, chunks, multiplier);
    } else if (threadIdx.x < MMA_THREADS + ADD_THREADS) {
        Adder adder = {call, sums, opened, 0};
        visit_all(call, chunks, adder);
    } else {
        if (threadIdx.x == MMA_THREADS + ADD_THREADS) {
            Producer producer = {call, chunks, {ring, ring, 0, call.most_under_way}};
            visit_all(call, chunks, producer);
        }
        __syncwarp();
    }
    __shared__ bool is_last;  // of all CTAs, to come here: it leaves counters at 0
    __syncthreads();          // all of this CTA have passed the last barrier
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(call.barrier + EXITS, 1u) == gridDim.x - 1;
        __threadfence();
        if (is_last) call.barrier[0] = call.barrier[OF_QKV] = call.barrier[EXITS] = 0;
    }
    if (!call.chooses) return;
    __syncthreads();  // it is known who is last
    if (is_last) begin_next(call);
}

// clang-format off
// gate: BATCH=1 BF16=0,1 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=0 SPLITS=4 WARPS=8 ADDER_GROUPS=4 SLOTS=20 SLOT_BLOCKS=10 SHARED_BYTES=213888 registers<=128 arch=sm_90a
// gate: BATCH=8 BF16=0 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=0 SPLITS=4 WARPS=8 ADDER_GROUPS=3 SLOTS=16 SLOT_BLOCKS=10 SHARED_BYTES=230912 registers<=128 arch=sm_90a
// gate: BATCH=1 BF16=0,1 HIDDEN=2048 HEADS_Q=32 HEADS_KV=8 HEAD_DIM=64 ROTARY_DIM=64 FFN=8192 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=215680 registers<=128 arch=sm_90a
// gate: BATCH=16 BF16=1,0 HIDDEN=2048 HEADS_Q=32 HEADS_KV=8 HEAD_DIM=64 ROTARY_DIM=64 FFN=8192 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=0 SPLITS=4 WARPS=8 ADDER_GROUPS=2 SLOTS=16 SLOT_BLOCKS=8 SHARED_BYTES=218112 registers<=96 arch=sm_90a
// gate: BATCH=1 BF16=0,1 HIDDEN=1024 HEADS_Q=16 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=3072 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=1 PACKED=0 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=208512 registers<=128 arch=sm_90a
// gate: BATCH=1 BF16=0,1 HIDDEN=4096 HEADS_Q=32 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=14336 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=1 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=227968 registers<=128 arch=sm_90a
// gate: BATCH=16 BF16=0 HIDDEN=4096 HEADS_Q=32 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=14336 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=0 PACKED=1 SPLITS=4 WARPS=8 ADDER_GROUPS=2 SLOTS=8 SLOT_BLOCKS=8 SHARED_BYTES=218112 registers<=96 arch=sm_90a
// gate: BATCH=1 BF16=0 HIDDEN=2560 HEADS_Q=32 HEADS_KV=32 HEAD_DIM=80 ROTARY_DIM=20 FFN=10240 PARALLEL=1 LAYER_NORM=1 GATED_MLP=0 HEAD_NORMS=0 PACKED=1 SPLITS=4 WARPS=8 ADDER_GROUPS=4 SLOTS=20 SLOT_BLOCKS=10 SHARED_BYTES=213888 registers<=128 arch=sm_90a
// gate: BATCH=2 BF16=0 HIDDEN=1024 HEADS_Q=16 HEADS_KV=8 HEAD_DIM=128 ROTARY_DIM=128 FFN=3072 PARALLEL=0 LAYER_NORM=0 GATED_MLP=1 HEAD_NORMS=1 PACKED=1 SPLITS=1 WARPS=8 ADDER_GROUPS=4 SLOTS=24 SLOT_BLOCKS=8 SHARED_BYTES=214144 registers<=128 arch=sm_90a
// clang-format on
