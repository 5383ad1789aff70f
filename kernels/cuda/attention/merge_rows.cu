// Attention over more keys merged into that of some rows, in place: a rank's keys, and those of others.
//
// Threads and data
//   row      a position and a query head. LANES lanes side by side have it, a power of two up to 32.
//   CTA      THREADS / LANES rows, a position's heads side by side.
//   lane     VECTOR channels at a time, LANES * VECTOR further on the next.
//
// Memory: no shared memory; what is added is read once, the row read and written once. A row that has seen no
// new key (lse = -inf) is left as it is.
//
// Macros: FLOAT32, BF16: the type of what is added; WIDE: 1 rows are float32, 0 they are of that type;
// VECTOR: channels of a lane, 1 where rows do not begin at multiples of 16 bytes; LANES.
#include "common/pairs.cuh"

#include "attention/call.cuh"

#if WIDE || FLOAT32
using Sum = float;
#else
using Sum = u16;
#endif

constexpr int THREADS = 256, ROWS = THREADS / LANES;

struct Call {
    Sum* out;
    i64 position, head;  // strides of out
    float* lse;
    i64 lse_head;  // stride; positions lie side by side
    const Element* new_out;
    i64 new_position, new_head;
    const float* new_lse;
    i64 new_lse_head;
    const i64* rows;  // positions of out; null: from first on
    i64 first, count;
    int heads, dim;
};

template <typename T>
struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Vector {
    T x[VECTOR];
};

__device__ __forceinline__ float widen(float x) {
    return x;
}
__device__ __forceinline__ float widen(u16 x) {
    return unpack_pair(x).x;
}
__device__ __forceinline__ void narrow(float& to, float x) {
    to = x;
}
__device__ __forceinline__ void narrow(u16& to, float x) {
    to = (u16)pack_pair(x, 0.f);
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_rows(const __grid_constant__ Call call) {
    const int lane = threadIdx.x % LANES;
    const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / LANES;
    if (row >= call.count * call.heads) return;
    const i64 added = row / call.heads;
    const int head = (int)(row - added * call.heads);
    const i64 position = call.rows ? call.rows[added] : call.first + added;
    float* const lse = call.lse + head * call.lse_head + position;
    const float old_lse = *lse, new_lse = call.new_lse[head * call.new_lse_head + added];
    const float highest = fmaxf(old_lse, new_lse);
    if (new_lse == -INFINITE) return;
    const float old_part = expf(old_lse - highest), new_part = expf(new_lse - highest),
                total = old_part + new_part;
    const float old_weight = old_part / total, new_weight = new_part / total;
    Sum* const out = call.out + position * call.position + head * call.head;
    const Element* const from = call.new_out + added * call.new_position + head * call.new_head;
    for (int channel = VECTOR * lane; channel < call.dim; channel += VECTOR * LANES) {
        Vector<Sum> sum = *(const Vector<Sum>*)(out + channel);
        const Vector<Element> x = *(const Vector<Element>*)(from + channel);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float old = old_weight == 0.f ? 0.f : old_weight * widen(sum.x[i]);
            narrow(sum.x[i], fmaf(new_weight, widen(x.x[i]), old));
        }
        *(Vector<Sum>*)(out + channel) = sum;
    }
    __syncwarp((u32)((1ull << LANES) - 1) << threadIdx.x % 32 / LANES * LANES);  // all have read lse
    if (lane == 0) *lse = highest + logf(total);
}

// gate: FLOAT32=0 BF16=0,1 WIDE=0,1 VECTOR=8 LANES=16 registers<=64
// gate: FLOAT32=0 BF16=1 WIDE=0,1 VECTOR=1 LANES=32 registers<=64
// gate: FLOAT32=1 BF16=0 WIDE=0 VECTOR=4 LANES=32 registers<=64
