// Attention forward for Hopper (sm_90a): TMA, wgmma, a warpgroup that loads beside two or three that compute.
//
// Threads and data
//   CTA    BLOCK_M = 64 * GROUPS rows of one (sequence, KV head), as in attention/rows.cuh.
//   warps 0-3   the first lane of warp 0 loads: tiles of BLOCK_N keys and values, two stages of each. They
//          give their registers away.
//   warps 4-7, 8-11 ...   a warpgroup each has 64 rows, all keys, all channels; 16 rows a warp, laid out as
//          attention/rows.cuh says. Q is in shared memory; P goes from registers into the product with V.
//
// A step of a warpgroup begins S of tile j and, behind it, O += P V of tile j - 1, and computes the weights
// of tile j while that product runs, and while those of other warpgroups do.
//
// Memory: shared, from a multiple of 1024 on: Q in GROUPS parts of 64 * PITCH elements (later O), then K and
// V, 2 stages of BLOCK_N * HEAD_DIM each; mbarriers. Registers: HEAD_DIM / 2 of O, BLOCK_N / 2 of S, half as
// many of P; three warpgroups fit where these are 128 or fewer, but for those of a cap.
//
// Macros: HEAD_DIM, 64, 128 or 256, that the channels are filled up to with zeros; BF16; BLOCK_N; CAPPED as
// in attention/forward.cu; GROUPS, warpgroups that compute.
//
// clang-format off
// gate: HEAD_DIM=64 BF16=1,0 BLOCK_N=128 CAPPED=0 GROUPS=3 registers<=128 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_N=128 CAPPED=0 GROUPS=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=128 BF16=1,0 BLOCK_N=64 CAPPED=0 GROUPS=3 registers<=128 arch=sm_90a
// gate: HEAD_DIM=64,128 BF16=1 BLOCK_N=128 CAPPED=1 GROUPS=2 registers<=168 arch=sm_90a
// gate: HEAD_DIM=256 BF16=1 BLOCK_N=64 CAPPED=0,1 GROUPS=2 registers<=168 arch=sm_90a
// clang-format on
#include "common/pairs.cuh"

constexpr int BLOCK_M = 64 * GROUPS, THREADS = 128 + 128 * GROUPS, ALIGNED = 1;
constexpr int REGISTERS = GROUPS == 2 ? 240 : 160;  // of a thread that computes
constexpr int PITCH = HEAD_DIM + 8;                 // elements of a row of out in shared memory
constexpr int GROUP_BYTES = 64 * PITCH * 2, TILE_BYTES = BLOCK_N * HEAD_DIM * 2, STAGES = 2;
constexpr int BLOCK_BYTES = BLOCK_N * 128;  // of 64 columns of a tile
constexpr int SUMS_S = BLOCK_N / 2, SUMS_O = HEAD_DIM / 2;
static_assert(GROUP_BYTES % 1024 == 0 && TILE_BYTES % 1024 == 0,
              "swizzled blocks begin at multiples of 1024");

#include "attention/call.cuh"
#include "attention/rows.cuh"
#include "common/hopper.cuh"

// Shared memory addresses.
struct Memory {
    u32 q, k, v, full_k, full_v, empty_k, empty_v;  // barriers: STAGES each
};

__device__ __forceinline__ void load_tiles(const Memory& m, const TensorMap* k, const TensorMap* v,
                                           const Call& call, const Work& w) {
    const Origin keys = find_origin(call.cu_k, blockIdx.z);
    int stage = 0;
    u32 parity = 1;  // a stage is empty before the first phase of its barrier
    for (int key = w.first; key < w.last; key += BLOCK_N) {
        wait_barrier(m.empty_k + 8 * stage, parity);
        expect_bytes(m.full_k + 8 * stage, TILE_BYTES);
#pragma unroll
        for (int block = 0; block < HEAD_DIM / 64; ++block)
            copy_box(m.k + stage * TILE_BYTES + block * BLOCK_BYTES, k, m.full_k + 8 * stage, keys,
                     64 * block, key, blockIdx.y);
        wait_barrier(m.empty_v + 8 * stage, parity);
        expect_bytes(m.full_v + 8 * stage, TILE_BYTES);
#pragma unroll
        for (int block = 0; block < HEAD_DIM / 64; ++block)
            copy_box(m.v + stage * TILE_BYTES + block * BLOCK_BYTES, v, m.full_v + 8 * stage, keys,
                     64 * block, key, blockIdx.y);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Copies the 64 rows of q of a warpgroup to shared memory, swizzled, zeros beyond the last row and channel.
__device__ __forceinline__ void load_queries(unsigned char* to, const Call& call, const Work& w, int first) {
    const u16* from = base_of(call.q, w, w.q0, blockIdx.y * call.group);
    const int thread = threadIdx.x % 128;
    constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll 8
    for (int at = thread; at < 64 * PIECES; at += 128) {
        const int own = at / PIECES, piece = at % PIECES, row = first + own;
        uint4 x = {0, 0, 0, 0};
        if (row < w.rows && 8 * piece < call.dim)
            x = *(const uint4*)(from + row_offset(call.q, row, call.group) + 8 * piece);
        *(uint4*)(to + piece / 8 * (64 * 128) + own * 128 + (piece % 8 ^ own % 8) * 16) = x;
    }
}

// Operands count 16 bytes.
__device__ __forceinline__ void multiply_keys(float (&s)[SUMS_S], u64 q, u64 k) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
        multiply_async(s, q + (step / 4 * (64 * 128) + step % 4 * 32) / 16,
                       k + (step / 4 * BLOCK_BYTES + step % 4 * 32) / 16, step > 0);
    commit_products();
}

__device__ __forceinline__ void multiply_values(float (&o)[SUMS_O], const u32 (&p)[SUMS_S / 2], u64 v) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) multiply_async(o, p + 4 * step, v + step * 2048 / 16);
    commit_products();
}

// Where a warpgroup is in the stages of K or V.
struct Turn {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();  // all lanes have waited for the product that read the stage
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ __forceinline__ void compute(const Memory& m, unsigned char* rows, const Call& call, const Work& w,
                                        int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = w.row0 + 64 * group + 16 * warp, own_row = row + lane / 4;
    const float unit = CAPPED ? LOG2E : call.scale * LOG2E;
    load_queries(rows, call, w, w.row0 + 64 * group);
    fence_async();
    sync_threads(1 + group, 128);  // the warpgroup's Q is in shared memory

    const u64 q_operand = rows_operand(m.q + group * GROUP_BYTES), k_operand = rows_operand(m.k);
    const u64 v_operand = columns_operand(m.v, BLOCK_BYTES);

    float o[SUMS_O], s[SUMS_S];
    u32 p[SUMS_S / 2];
    Softmax softmax = {{LOWEST, LOWEST}, {0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < SUMS_O; ++i) o[i] = 0.f;
    const auto prepare = [&](int key) {
        if (CAPPED) cap(s, call);
        if (key < w.low || key + BLOCK_N - 1 > w.high) hide(s, call, w, key, own_row);
    };
    const auto pack = [&] {
#pragma unroll
        for (int i = 0; i < SUMS_S / 2; ++i) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);
    };

    Turn k = {0, 0}, v = {0, 0};
    float shrink[2];
    if (w.first < w.last) {
        wait_barrier(m.full_k, 0);
        begin_products();
        multiply_keys(s, q_operand, k_operand);
        wait_products<0>(s);
        release(m.empty_k);
        k.next();
        prepare(w.first);
        raise_peaks(softmax, s, unit, shrink);
        weigh(softmax, s, unit);
        pack();
    }
    for (int key = w.first + BLOCK_N; key < w.last; key += BLOCK_N) {
        wait_barrier(m.full_k + 8 * k.stage, k.parity);
        begin_products();
        multiply_keys(s, q_operand, k_operand + k.stage * TILE_BYTES / 16);
        wait_barrier(m.full_v + 8 * v.stage, v.parity);
        multiply_values(o, p, v_operand + v.stage * TILE_BYTES / 16);
        wait_products<1>(s);
        release(m.empty_k + 8 * k.stage);
        k.next();
        prepare(key);
        const bool raised = raise_peaks(softmax, s, unit, shrink);
        weigh(softmax, s, unit);
        pin(s);
        wait_products<0>(o);
        release(m.empty_v + 8 * v.stage);
        v.next();
        pack();
        if (raised) scale_rows(o, shrink);
    }
    if (w.first < w.last) {
        wait_barrier(m.full_v + 8 * v.stage, v.parity);
        begin_products();
        multiply_values(o, p, v_operand + v.stage * TILE_BYTES / 16);
        wait_products<0>(o);
    }
    sync_threads(1 + group, 128);  // all products have read Q
    u16* const own = (u16*)rows + 16 * warp * PITCH;
    finish_rows(call, w, softmax, o, own, row, unit);
    __syncwarp();  // the warp's rows of out are in shared memory
    copy_out<16>(call, w, own, row);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
           const __grid_constant__ Call call) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(8) u64 barriers[4 * STAGES];
    unsigned char* const aligned = memory + (-shared_address(memory) & 1023);
    const u32 start = shared_address(aligned), tiles = start + GROUPS * GROUP_BYTES,
              at = shared_address(barriers);
    const Memory m = {
        start, tiles, tiles + STAGES * TILE_BYTES, at, at + 8 * STAGES, at + 16 * STAGES, at + 24 * STAGES};
    const Work w = find_work(call);
    if (w.row0 >= w.rows) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; ++i) init_barrier(m.full_k + 8 * i, 1);  // the loader's
        // The computing warps'.
        for (int i = 0; i < 2 * STAGES; ++i) init_barrier(m.empty_k + 8 * i, 4 * GROUPS);
        fence_async();
    }
    __syncthreads();  // barriers are initialised
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) load_tiles(m, &k_map, &v_map, call, w);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;  // uniform, for the compiler
        compute(m, aligned + group * GROUP_BYTES, call, w, group);
    }
}
