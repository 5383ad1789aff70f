// Sum of equally large arrays: gradients of keys that several groups of queries see.
//
// Threads and data
//   thread   4 elements of all arrays at a time: sums in float32, in the order of the arrays.
//
// Memory: each array is read once, the sum written once.
//
// Macros: FLOAT32 and BF16 say what elements are, as in attention/call.cuh; WIDE: 1 the sum is float32, 0 it
// is of their type.
#include "common/pairs.cuh"

#include "attention/call.cuh"

constexpr int THREADS = 256, MAX_GROUPS = 16;

struct Call {
    const Element* parts[MAX_GROUPS];
    void* sum;
    i64 count;  // of elements
    int groups, unused;
};

__device__ __forceinline__ float4 read_four(const Element* from) {
#if FLOAT32
    return *(const float4*)from;
#else
    const uint2 x = *(const uint2*)from;
    const float2 a = unpack_pair(x.x), b = unpack_pair(x.y);
    return make_float4(a.x, a.y, b.x, b.y);
#endif
}

__device__ __forceinline__ float read_one(const Element* from) {
#if FLOAT32
    return *from;
#else
    return unpack_pair(*from).x;
#endif
}

__device__ __forceinline__ void write_one(void* sum, i64 at, float x) {
#if FLOAT32 || WIDE
    ((float*)sum)[at] = x;
#else
    ((u16*)sum)[at] = (u16)pack_pair(x, 0.f);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) add_groups(const __grid_constant__ Call call) {
    for (i64 i = 4 * ((i64)blockIdx.x * THREADS + threadIdx.x); i < call.count;
         i += 4 * (i64)gridDim.x * THREADS) {
        if (i + 4 > call.count) {
            for (i64 j = i; j < call.count; ++j) {
                float sum = 0.f;
                for (int g = 0; g < call.groups; ++g) sum += read_one(call.parts[g] + j);
                write_one(call.sum, j, sum);
            }
            return;
        }
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int g = 0; g < call.groups; ++g) {
            const float4 x = read_four(call.parts[g] + i);
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
#if FLOAT32 || WIDE
        *(float4*)((float*)call.sum + i) = sum;
#else
        *(uint2*)((u16*)call.sum + i) = make_uint2(pack_pair(sum.x, sum.y), pack_pair(sum.z, sum.w));
#endif
    }
}

// gate: FLOAT32=0 BF16=0,1 WIDE=0,1 registers<=64
// gate: FLOAT32=1 BF16=0 WIDE=0 registers<=64
