// Raw rows of a page of keys in the order of their blocks: LayerState::k_order.
//
// Rows lie token by token, and an element is half a word, so no lane could take its pair of positions at
// once. They are turned instead: written channel by channel to where they lay, 32 bytes each, which ldmatrix
// reads back as the fragments of tiles, a channel an address. The 16 bytes of eight tokens are exchanged in
// every other four channels, so that those of eight neighbours lie in different banks.
#pragma once

#include "common/words.cuh"

// Where the channel of each position lies among turned rows, in bytes, the first eight tokens and the others:
// a lane needs the TILES of a row of one of these.
struct alignas(16) Order {
    u32 offsets[2][16][HEAD_DIM / 16];

    __device__ __forceinline__ void put(u32 position, u32 channel) {
        const u32 offset = 32 * channel + channel % 8 / 4 * 16;
        offsets[0][position % 16][position / 16] = offset;
        offsets[1][position % 16][position / 16] = offset ^ 16;
    }
};

// Stores four 8 x 8 matrices turned; `address` is where row lane % 8 of matrix lane / 8 goes.
__device__ __forceinline__ void store_turned_matrices(u32 address, const u32 (&x)[4], u32 lane) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#else
#pragma unroll
    for (u32 matrix = 0; matrix < 4; ++matrix) {
        u32 turned;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(x[matrix]));
        const u32 row = __shfl_sync(ALL_LANES, address, 8 * matrix + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(turned) : "memory");
    }
#endif
}

__device__ __forceinline__ void load_turned_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Puts the sixteen vectors of a warp, loaded from `rows`, in order; what lies there is turned rows then.
__device__ __forceinline__ void put_in_order(u8* rows, const Order& order, u32 (&x)[HEAD_DIM / 16][4],
                                             u32 lane) {
    constexpr u32 TILES = HEAD_DIM / 16, AT_ONCE = 4;
    static_assert(TILES % AT_ONCE == 0);
    const u32 to = shared_address(rows), half = lane / 8 % 2 * 16;  // of eight tokens
    const u32 turned = to + lane / 16 * 256 + lane % 8 * 32 + (half ^ lane % 8 / 4 * 16);
    __syncwarp();  // all lanes have read the rows
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) store_turned_matrices(turned + 512 * t, x[t], lane);
    __syncwarp();  // rows are turned
    const u32* const offsets = order.offsets[lane / 8 % 2][lane / 16 * 8 + lane % 8];
#pragma unroll
    for (u32 first = 0; first < TILES; first += AT_ONCE) {
        const uint4 of_tiles = *(const uint4*)(offsets + first);
        load_turned_matrices(x[first], to + of_tiles.x);
        load_turned_matrices(x[first + 1], to + of_tiles.y);
        load_turned_matrices(x[first + 2], to + of_tiles.z);
        load_turned_matrices(x[first + 3], to + of_tiles.w);
    }
}
