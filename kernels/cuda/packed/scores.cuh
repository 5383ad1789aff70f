// Scores of the keys of a quad, in float16 if they are coded.
#pragma once

#include "packed/quad_ring.cuh"

// With one width of coded keys the factor of second tiles is in the query, else it is put there for each
// quad.
constexpr bool ONE_KEY_WIDTH = ((WIDTHS_K & CODED) & ((WIDTHS_K & CODED) - 1)) == 0 && !IN_BLOCKS;
constexpr int SECOND_OF_KEYS = ONE_KEY_WIDTH && WIDTHS_K & 1 ? Fields<2>::SECOND : 0;

// A float16 query is exact until it is rotated, so what rounding it then takes off must not stay off: the
// rest is multiplied as well. To bfloat16 the rounding to float16 is nothing.
constexpr bool WITH_RESIDUAL = !BF16;

struct Query {
    u32 rotated[TILES_D][2];  // B fragments of float16: the rows times 2^e
    const uint2* residual;    // what these lack, [TILES_D][32 lanes] in shared memory
    float sum[2], bias[2];    // of rows 2u, 2u + 1: the sum of the above, the part of the mean key in a score
    float unit;               // 2^(25 - e)
    const float4* sums_of_blocks;  // with blocks, in the place of `sum`: of both rows
};

// Takes the rows, each with its largest magnitude and its bias behind it. All are scaled by one power of 2,
// which brings the largest near the top of float16. Rows beyond the last repeat it; their results go nowhere.
// All threads; afterwards the rest lies where the rows were.
__device__ __forceinline__ void load_query(float* rows, int row_count, int lane, Query& query) {
    const int u = lane % 4;
    const float amax = rows[min(lane / 4, row_count - 1) * ROW_FLOATS + HEAD_DIM];
    const int exponent = __reduce_max_sync(ALL_LANES, __float_as_uint(amax < INFINITY_F ? amax : 0.f)) >>
                         23;  // amax < 2^(exponent - 126)
    const int e = max(min(141 - exponent, 100), -100);
    const float factor = exp2_exact(e);
    const float2* x = (const float2*)(rows + min(lane / 4, row_count - 1) * ROW_FLOATS) + u;
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    u32 residual[TILES_D][2];
    float* const sums_of_blocks = rows + 8 * ROW_FLOATS;
#pragma unroll
    for (int i = 0; i < TILES_D; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 pair = x[8 * i + 4 * j];
            query.rotated[i][j] = pack_halves(pair.x * factor, pair.y * factor);
            const float2 rounded = __half22float2(*(const __half2*)&query.rotated[i][j]);
            residual[i][j] = pack_halves(pair.x * factor - rounded.x, pair.y * factor - rounded.y);
        }
        mma_half(sums, ones, query.rotated[i][0], query.rotated[i][1]);
        if (WITH_RESIDUAL) mma_half(sums, ones, residual[i][0], residual[i][1]);
        if (IN_BLOCKS && i % BLOCK_TILES == BLOCK_TILES - 1) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (threadIdx.x < 4) sums_of_blocks[4 * (2 * u + j) + i / BLOCK_TILES] = sums[j];
                sums[j] = 0.f;
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (i % 2) query.rotated[i][j] = lowered<SECOND_OF_KEYS>(query.rotated[i][j]);
    }
    query.unit = exp2_exact(25 - e);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        query.sum[j] = sums[j];
        query.bias[j] = rows[min(2 * u + j, row_count - 1) * ROW_FLOATS + HEAD_DIM + 1];
    }
    query.sums_of_blocks = (const float4*)sums_of_blocks + 2 * u;
    if (IN_BLOCKS && !WITH_RESIDUAL) __syncthreads();  // sums are stored
    if (WITH_RESIDUAL) {
        __syncthreads();  // every warp has read the rows, sums are stored
#pragma unroll
        for (int i = 0; i < TILES_D; ++i)
            if (i % WARPS == threadIdx.x / 32)
                ((uint2*)rows)[32 * i + lane] = {residual[i][0], residual[i][1]};
        query.residual = (const uint2*)rows + lane;
        __syncthreads();  // the rest is written
    }
}

// Scores of coded keys, less `base`.
template <int BITS>
__device__ __forceinline__ void coded_scores(const Item& item, const Query& query, const float (&base)[2],
                                             float (&s)[8][2], int lane) {
    constexpr float MIDDLE = -((1 << BITS) - 1) * .5f / (1 << 24);
    constexpr float EVEN = 1 << Fields<BITS>::EVEN, ODD = 1 << Fields<BITS>::ODD;
    constexpr int SECOND = Fields<BITS>::SECOND;
    float sums[4][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[b][r] = query.sum[r % 2] * (MIDDLE * (r < 2 ? EVEN : ODD));
    }
    u32 rotated[TILES_D][2];
#pragma unroll
    for (int i = 0; i < 2 * TILES_D; ++i) {
        const u32 x = query.rotated[i / 2][i % 2];
        rotated[i / 2][i % 2] = ONE_KEY_WIDTH || i / 2 % 2 == 0 ? x : lowered<SECOND>(x);
    }
#pragma unroll
    for (int group = 0; group < groups_of<BITS>(TILES_D); ++group) {
#pragma unroll
        for (int b = 0; b < 4; ++b)
            for_each_tile<BITS, TILES_D>(item.page[b], lane, group, [&](int i, const u32(&a)[4]) {
                mma_half(sums[b], a, rotated[i][0], rotated[i][1]);
                if (WITH_RESIDUAL) {
                    const uint2 x = query.residual[32 * i];
                    mma_half(sums[b], a, i % 2 ? lowered<SECOND>(x.x) : x.x,
                             i % 2 ? lowered<SECOND>(x.y) : x.y);
                }
            });
    }
    const Scales scale = load_scales(item, code_bytes(BITS), lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float factor = scale.at(i) * (query.unit * (1.f / (i % 2 ? ODD : EVEN)));
#pragma unroll
        for (int j = 0; j < 2; ++j)
            s[i][j] = fmaf(sums[i / 2][2 * (i % 2) + j], factor, query.bias[j] - base[j]);
    }
}

// Scores of the raw keys of pages FIRST and FIRST + 1, less `base`; q comes from the first-level cache.
template <int FIRST>
__device__ __forceinline__ void raw_scores(const Item& item, const u16* row, float unit,
                                           const float (&base)[2], float (&s)[8][2], int lane) {
    float sums[2][4] = {};
#pragma unroll
    for (int group = 0; group < TILES_D; ++group) {
#pragma unroll
        for (int b = 0; b < 2; ++b)
            for_each_tile<16, TILES_D>(item.page[FIRST + b], lane, group, [&](int i, const u32(&a)[4]) {
                const u32* const at = (const u32*)row + 8 * i + lane % 4;
                mma(sums[b], a, __ldg(at), __ldg(at + 4));
            });
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) s[2 * FIRST + i][j] = fmaf(sums[i / 2][2 * (i % 2) + j], unit, -base[j]);
    }
}
