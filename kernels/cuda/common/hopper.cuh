// Hopper's asynchronous units: mbarriers, tensor copies (TMA), matrix products of a warpgroup (wgmma).
//
// A matrix in shared memory is in blocks of 64 columns: rows of 128 bytes, 16-byte pieces swizzled by the row
// modulo 8, as a tensor copy with 128-byte swizzle leaves them; blocks begin at multiples of 1024 bytes. Sums
// of a warpgroup's product, 64 x N, lie as in attention/softmax.cuh, 16 rows a warp.
#pragma once
#include "common/pairs.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits until the phase of this parity is complete.
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// Where tensor copies find position 0 of a sequence: coordinates on axes 1, 3 and 4 of its map. Those of
// variable length are what `TensorMaps` in kvlab/ops/attention_arguments.py says, so that what lies beyond
// the end of the sequence is beyond the end of axis 1.
struct TmaCoord {
    int position, row, back;
};

// Of a sequence of `length` tokens, from token `start` on where lengths are variable.
__device__ __forceinline__ TmaCoord coord_of(bool variable, int sequence, int start, int length) {
    constexpr int END = 1 << 30;  // size of axis 1
    if (!variable) return {0, sequence, 0};
    return {END - length, start + length, END};
}

// Copies a box of a [batch, head, position, channel] tensor from this position, head and channel on.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, const TmaCoord& from,
                                         int channel, int position, int head) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(from.position + position), "r"(head), "r"(from.row),
        "r"(from.back)
        : "memory");
}

// Copies bytes that lie one after the other, a multiple of 16 at multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Adds floats that lie one after the other in shared memory to those in memory; they must stay until read.
__device__ __forceinline__ void add_floats(float* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_additions_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_additions() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Four 8 x 8 matrices from registers, as sums lie, to rows of 16 bytes; lane 8 i + r has row r of matrix i.
__device__ __forceinline__ void store_matrices(u32 to, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void store_transposed(u32 to, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Orders this thread's ordinary accesses to shared memory before those of the asynchronous units.
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// What x needs is computed before, what uses x after.
template <int COUNT>
__device__ __forceinline__ void pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
// Waits until at most PENDING groups of products run; x are sums that are complete then.
template <int PENDING, int COUNT>
__device__ __forceinline__ void wait_products(float (&x)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    pin(x);
}

// An operand whose columns are contracted (Q, K): 8 rows are 1024 bytes; 16 columns further is 32 bytes.
__device__ __forceinline__ u64 rows_operand(u32 address) {
    return (u64)((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// An operand whose rows are contracted (V): 64 columns further is `block` bytes, 16 rows further 2048 bytes.
__device__ __forceinline__ u64 columns_operand(u32 address, u32 block) {
    return (u64)((address & 0x3ffffu) >> 4) | (u64)(block >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// c[64 x N] += a[64 x 16] b[16 x N]: a and b in shared memory (without keep: =), both operands of rows, both
// of columns (multiply_columns), or b alone (multiply_mixed), or a in registers and b an operand of columns.
// A thread has N / 2 sums.
// clang-format off
#define KVLAB_SUMS8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define KVLAB_SUMS32(c, i) KVLAB_SUMS8(c, i), KVLAB_SUMS8(c, i + 8), KVLAB_SUMS8(c, i + 16), KVLAB_SUMS8(c, i + 24)
#define KVLAB_NUMBERS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KVLAB_NUMBERS0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KVLAB_NUMBERS1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KVLAB_NUMBERS2 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define KVLAB_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." KVLAB_PAIR "." KVLAB_PAIR
#define KVLAB_SHARED(name, n, count, a_columns, b_columns, numbers, a, b, add, ...)                          \
    __device__ __forceinline__ void name(float (&c)[count], u64 x, u64 y, bool keep) {                       \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #add ", 0; " KVLAB_WGMMA(n) " {" numbers "}, %" #a ", %" #b \
                     ", p, 1, 1, " a_columns ", " b_columns ";}" : __VA_ARGS__ : "l"(x), "l"(y), "r"((int)keep));                    \
    }
#define KVLAB_REGISTERS(n, count, numbers, a0, a1, a2, a3, b, ...)                                           \
    __device__ __forceinline__ void multiply_async(float (&c)[count], const u32* a, u64 y) {                 \
        asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; " KVLAB_WGMMA(n) " {" numbers "}, {%" #a0 ", %" #a1 ", %" #a2 \
                     ", %" #a3 "}, %" #b ", p, 1, 1, 1;}" : __VA_ARGS__                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(y));                                  \
    }
KVLAB_SHARED(multiply_async, 32, 16, "0", "0", KVLAB_NUMBERS16, 16, 17, 18, KVLAB_SUMS8(c, 0), KVLAB_SUMS8(c, 8))
KVLAB_SHARED(multiply_mixed, 128, 64, "0", "1", KVLAB_NUMBERS0 KVLAB_NUMBERS1, 64, 65, 66, KVLAB_SUMS32(c, 0), KVLAB_SUMS32(c, 32))
KVLAB_SHARED(multiply_columns, 128, 64, "1", "1", KVLAB_NUMBERS0 KVLAB_NUMBERS1, 64, 65, 66, KVLAB_SUMS32(c, 0), KVLAB_SUMS32(c, 32))
KVLAB_SHARED(multiply_columns, 64, 32, "1", "1", KVLAB_NUMBERS0, 32, 33, 34, KVLAB_SUMS32(c, 0))
KVLAB_SHARED(multiply_async, 64, 32, "0", "0", KVLAB_NUMBERS0, 32, 33, 34, KVLAB_SUMS32(c, 0))
KVLAB_SHARED(multiply_async, 128, 64, "0", "0", KVLAB_NUMBERS0 KVLAB_NUMBERS1, 64, 65, 66, KVLAB_SUMS32(c, 0), KVLAB_SUMS32(c, 32))
KVLAB_REGISTERS(64, 32, KVLAB_NUMBERS0, 32, 33, 34, 35, 36, KVLAB_SUMS32(c, 0))
KVLAB_REGISTERS(128, 64, KVLAB_NUMBERS0 KVLAB_NUMBERS1, 64, 65, 66, 67, 68, KVLAB_SUMS32(c, 0), KVLAB_SUMS32(c, 32))
KVLAB_REGISTERS(256, 128, KVLAB_NUMBERS0 KVLAB_NUMBERS1 KVLAB_NUMBERS2, 128, 129, 130, 131, 132,
                KVLAB_SUMS32(c, 0), KVLAB_SUMS32(c, 32), KVLAB_SUMS32(c, 64), KVLAB_SUMS32(c, 96))
// clang-format on
