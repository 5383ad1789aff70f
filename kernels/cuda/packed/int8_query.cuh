// Queries as operands of integer products: see packed/int8_mma.cuh.
//
// A query row is relative to its largest element.
#pragma once

#include "packed/int8_mma.cuh"

constexpr bool THREE_BITS = WIDTHS_K & 2, ONE_KEY_WIDTH = (WIDTHS_K & (WIDTHS_K - 1)) == 0;
constexpr float MAX_FIXED_POINT = 127 * 256 + 127;  // of two bytes with signs

// Sums of the fixed-point numbers of a row: of all, and of those for 3 bits; of each block, if there are any.
#if IN_BLOCKS
using RowSums = float4;
#else
using RowSums = int2;
#endif

// The rows of a lane, and B fragments of two tiles, and those for 3 bits, where columns 0 to 7 are a quarter.
// Those of 8 rows stay in shared memory: registers have no room.
struct Query {
    const uint2* stored;         // [row of the lane][for 3 bits][two tiles][32 lanes]
    uint2 own[2][TWOS_D];        // the same of 4 rows
    const RowSums* stored_sums;  // [row of the lane]
    const float2* stored_units;  // twice what 1 stands for, and the part of the mean key in a score
    RowSums sums[LANE_ROWS];     // both of 4 rows
    float2 units[LANE_ROWS];
    u32 start[LANE_ROWS][4];  // of accumulators, if keys have one width
};

template <bool OF_3>
__device__ __forceinline__ uint2 fragment_of(const Query& query, int j, int two) {
    if (LANE_ROWS == 1) return query.own[OF_3][two];
    return query.stored[((2 * j + OF_3) * TWOS_D + two) * 32];
}

__device__ __forceinline__ RowSums sums_of(const Query& query, int j) {
    return LANE_ROWS == 1 ? query.sums[j] : query.stored_sums[j];
}

__device__ __forceinline__ float2 unit_and_bias(const Query& query, int j) {
    return LANE_ROWS == 1 ? query.units[j] : query.stored_units[j];
}

// Where accumulators start: ZERO less what lies between codes and values.
template <int BITS>
__device__ __forceinline__ void start_scores(int sum, u32 (&start)[4]) {
    const int middle = (((1 << BITS) - 1) * sum) >> 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int from = -middle * ((r ? Bytes<BITS>::ODD : Bytes<BITS>::EVEN) << Bytes<BITS>::SECOND);
        start[2 * r] = SIGNED_ZERO + (from >> 8);
        start[2 * r + 1] = SIGNED_ZERO + (from & 255);
    }
}

// Rows j of the lanes as a B fragment of two tiles, of which the second is 0 if there is none.
template <bool OF_3>
__device__ __forceinline__ uint2 fixed_point_row(const float* rows, int row_count, int j, int two, int lane) {
    const float* row = rows + min(LANE_ROWS * (lane / 8) + j, row_count - 1) * ROW_FLOATS;
    const float factor = MAX_FIXED_POINT / fmaxf(row[HEAD_DIM], 1e-30f);
    const int u = lane % 4, lower = lane / 4 % 2;
    const u32 select = lower ? 0x40 : 0x51, flip = lower ? 0x80808080u : 0u;
    // [tile][columns from 8 on][column 2u + 1]: byte 1 is the upper one, byte 0 the lower one + 128.
    u32 x[2][2][2], part[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool there = TILES_D % 2 == 0 || 2 * two + i / 2 < TILES_D;
        const float2 pair = there ? ((const float2*)row)[16 * two + 4 * i + u] : float2{0.f, 0.f};
        const float own = OF_3 && i % 2 == 0 ? .25f * factor : factor;
        x[i / 2][i % 2][0] = __float_as_uint(fmaf(pair.x, own, 12582912.f + 128.f));
        x[i / 2][i % 2][1] = __float_as_uint(fmaf(pair.y, own, 12582912.f + 128.f));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u32 halves[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) halves[h] = __byte_perm(x[r][0][h], x[r][1][h], select);
        part[r] = __byte_perm(halves[0], halves[1], 0x5410) ^ flip;
    }
    return {part[0], part[1]};
}

// The sum of row j of the lane over tiles from `first` on, before `end`.
template <bool OF_3>
__device__ __forceinline__ int add_up(const Query& query, int j, int first, int end) {
    constexpr u32 COUNTS = OF_3 ? 0x01040104u : 0x01010101u;
    u32 sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int two = 0; two < TWOS_D; ++two) {
        const u32 left = 2 * two >= first && 2 * two < end ? COUNTS : 0;
        const u32 right = 2 * two + 1 >= first && 2 * two + 1 < end ? COUNTS : 0;
        const u32 counts[4] = {left, left, right, right};
        const uint2 part = fragment_of<OF_3>(query, j, two);
        if (left | right) KVLAB_MMA_BYTES("s8", sums, counts, part.x, part.y);
    }
    return 256 * (int)sums[0] + (int)sums[1];
}

__device__ __forceinline__ RowSums sums_of_row(const Query& query, int j) {
#if IN_BLOCKS
    const auto of_block = [&](int block) {
        return (float)add_up<false>(query, j, block * BLOCK_TILES, (block + 1) * BLOCK_TILES);
    };
    return {of_block(0), of_block(1), of_block(2), of_block(3)};
#else
    return {WIDTHS_K != 2 ? add_up<false>(query, j, 0, 2 * TWOS_D) : 0,
            THREE_BITS ? add_up<true>(query, j, 0, 2 * TWOS_D) : 0};
#endif
}

// Fragments, each made by one warp, come to where the rows lie. All threads.
__device__ __forceinline__ void store_fragments(float* rows, int row_count, int lane) {
    constexpr int KINDS = 2 * LANE_ROWS, COUNT = KINDS * TWOS_D, OF_A_WARP = (COUNT + WARPS - 1) / WARPS;
    uint2 part[OF_A_WARP] = {};
#pragma unroll
    for (int i = 0; i < OF_A_WARP; ++i) {
        const int n = i * WARPS + threadIdx.x / 32, kind = n % KINDS, two = n / KINDS;
        const bool of_3 = kind % 2;
        if (n >= COUNT) break;
        if (WIDTHS_K != 2 && !of_3) part[i] = fixed_point_row<false>(rows, row_count, kind / 2, two, lane);
        if (THREE_BITS && of_3) part[i] = fixed_point_row<true>(rows, row_count, kind / 2, two, lane);
    }
    __syncthreads();  // every warp has read the rows
#pragma unroll
    for (int i = 0; i < OF_A_WARP; ++i) {
        const int n = i * WARPS + threadIdx.x / 32;
        if (n < COUNT) ((uint2*)rows)[32 * (n % KINDS * TWOS_D + n / KINDS) + lane] = part[i];
    }
    __syncthreads();  // the fragments are written
}

// Takes the rows, each with its largest magnitude and its bias behind it. Rows beyond the last repeat it;
// their results go nowhere. All threads; afterwards fragments lie where the rows were.
__device__ __forceinline__ void load_query(float* rows, int row_count, int lane, Query& query) {
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const float* own = rows + min(LANE_ROWS * (lane % 4) + j, row_count - 1) * ROW_FLOATS;
        const float amax = own[HEAD_DIM];
        query.units[j] = {
            amax < INFINITY_F ? fmaxf(amax, 1e-30f) * (2.f / MAX_FIXED_POINT) : __int_as_float(0x7fffffff),
            own[HEAD_DIM + 1]};
    }
    store_fragments(rows, row_count, lane);
    query.stored = (const uint2*)rows + lane;
    query.stored_sums = (const RowSums*)(rows + FRAGMENT_FLOATS) + LANE_ROWS * (lane % 4);
    query.stored_units = (const float2*)(rows + ROWS_FLOATS - 16) + LANE_ROWS * (lane % 4);
    if (LANE_ROWS == 1) {
#pragma unroll
        for (int two = 0; two < TWOS_D; ++two) {
            if (WIDTHS_K != 2) query.own[0][two] = query.stored[32 * two];
            if (THREE_BITS) query.own[1][two] = query.stored[32 * (TWOS_D + two)];
        }
    }
#pragma unroll
    for (int j = 0; j < LANE_ROWS; ++j) {
        const RowSums sums = sums_of_row(query, j);
        if (LANE_ROWS == 1)
            query.sums[j] = sums;
        else if (threadIdx.x / 32 == 0 && lane < 4) {
            ((RowSums*)query.stored_sums)[j] = sums;
            ((float2*)query.stored_units)[j] = query.units[j];
        }
#ifndef PROFILES
        if (ONE_KEY_WIDTH) {
            start_scores<bits_of<WIDTHS_K>(0)>(THREE_BITS ? sums.y : sums.x, query.start[j]);
#pragma unroll
            for (int r = 0; r < 4; ++r)
                asm volatile("" : "+r"(query.start[j][r]));  // or it is computed for every quad
        }
#endif
    }
    if (LANE_ROWS > 1) __syncthreads();  // sums are stored
}
