// cp.async and ldmatrix (sm_80 and later): rows of a tensor to shared memory, 8 x 8 matrices to registers.
//
// Macros: HEAD_DIM; ALIGNED: 1 rows can be copied 16 bytes at a time, 0 element by element.
#pragma once
#include "common/async_copies.cuh"
#include "common/pairs.cuh"

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// How THREADS threads copy rows that lie PITCH elements apart in shared memory: CHUNKS 16-byte pieces side by
// side a row, PASS rows at a time.
template <int THREADS, int PITCH>
struct Copier {
    static constexpr int CHUNKS = HEAD_DIM / 8, PASS = THREADS / CHUNKS;
    int row, channel;      // of the first row and of the 16 bytes that this thread copies
    bool takes_part, any;  // any: there are such channels

    __device__ __forceinline__ static Copier of(int dim) {
        const int row = threadIdx.x / CHUNKS, channel = threadIdx.x % CHUNKS * 8;
        return {row, channel, row < PASS, channel < dim};
    }
};

// Copies the first `present` of ROWS rows to shared memory, zeros for the others; `from` is this thread's
// part of the first row.
template <int ROWS, int THREADS, int PITCH>
__device__ __forceinline__ void copy_rows(u16* to, const u16* from, i64 stride, int present,
                                          const Copier<THREADS, PITCH>& c, int dim) {
    constexpr int CHUNKS = Copier<THREADS, PITCH>::CHUNKS, PASS = Copier<THREADS, PITCH>::PASS;
    if constexpr (ALIGNED) {
        if (THREADS % CHUNKS && !c.takes_part) return;
        const u32 at = shared_address(to + c.row * PITCH + c.channel);
#pragma unroll
        for (int i = 0; i < ROWS; i += PASS) {
            if (ROWS % PASS && i + PASS > ROWS && c.row + i >= ROWS) break;
            copy_async_if(at + i * PITCH * 2, from, c.any && c.row + i < present);
            from += PASS * stride;
            asm volatile("" : "+l"(from));  // step by step, else multiples of stride take registers
        }
    } else {
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * HEAD_DIM; at += THREADS) {
            const int r = at / HEAD_DIM, channel = at % HEAD_DIM;
            to[r * PITCH + channel] = r < present && channel < dim ? from[r * stride + channel] : (u16)0;
        }
    }
}

__device__ __forceinline__ float (&sums_of(float* x))[4] {
    return *(float (*)[4])x;
}
