// Raw vectors from rows of shared memory, rotated: LANES = 4 lanes a vector, bit for bit as packed_encode.cuh
// rotates, with half of the exchanges.
//
// Needs packed_places.cuh and packed_encode.cuh with LANES = 4 and RUN = 2.
#pragma once

static_assert(LANES == 4 && RUN == 2, "runs of 8 elements");
constexpr bool HAS_RUNS = ROTATION_BLOCK >= 32;

// The lower and the upper end of a butterfly.
__device__ __forceinline__ void add_subtract(float& x, float& y) {
    const float a = x, b = y;
    x = __fadd_rn(a, b);
    y = __fsub_rn(a, b);
}

// `rotate` times `scale`, of vectors of which a lane has the 8 elements in a row from 32 i + 8 lane on; after
// it the lane has those of element_of. Partners 8 and 16 elements apart are in two lanes: a lane keeps one
// half of its elements and gets the same half of its neighbour's for the other, so half of them cross. Which
// half is one register for all lanes, because lanes exchange the results of the butterfly before where they
// have to.
__device__ __forceinline__ void rotate_runs(float (&x)[PER_LANE], int lane, float scale) {
    const float signs[2] = {lane & 1 ? -1.f : 1.f, lane & 2 ? -1.f : 1.f};
#pragma unroll
    for (int j = 0; j < PER_LANE; j += 2) add_subtract(x[j], x[j + 1]);
#pragma unroll
    for (int h = 2; h <= 4; h *= 2)
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            if (j & h) continue;
            const float a = x[j], b = x[j + h];
            x[j] = fmaf(signs[h / 4], b, a);
            x[j + h] = fmaf(-signs[h / 4], b, a);
        }
#pragma unroll
    for (int h = 2; h <= 4; h *= 2)
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            if (j & h) continue;
            x[j + h] = __shfl_xor_sync(ALL_LANES, x[j + h], h / 2);
            add_subtract(x[j], x[j + h]);  // the difference has the sign of the lane
        }
#pragma unroll
    for (int h = 8; h < ROTATION_BLOCK / LANES; h *= 2)
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (!(j & h)) add_subtract(x[j], x[j + h]);
    const float factor = rotation_factor(ROTATION_BLOCK) * scale;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
        x[j] = __fmul_rn(x[j], factor * (j & 2 ? signs[0] : 1.f) * (j & 4 ? signs[1] : 1.f));
}

// The smaller numbers of two pairs without signs.
__device__ __forceinline__ void keep_smallest(u32& smallest, u32 pair) {
#if BF16 && __CUDA_ARCH__ >= 860
    asm("min.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(smallest) : "r"(pair));
#elif BF16
    asm("{.reg .b32 size; abs.bf16x2 size, %1; min.bf16x2 %0, %0, size;}" : "+r"(smallest) : "r"(pair));
#endif
}

__device__ __forceinline__ bool are_usual(u32 smallest) {
    constexpr u32 LEAST = 31 << 7;  // 2^-96: sums of such numbers are 0 or keep their sign times 2^-40
    return !BF16 || ((smallest & 0x7fffu) >= LEAST && (smallest >> 16 & 0x7fffu) >= LEAST);
}

// A raw vector less the mean, rotated, times `scale`. Returns whether 2^-40 is no scale too small for it.
__device__ __forceinline__ bool take_raw(Side side, const u8* row, const float4* mean, float scale,
                                         float (&x)[PER_LANE], int lane) {
    u32 smallest = 0x7f7f7f7fu;
    if constexpr (HAS_RUNS) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 8) {
            const uint4 raw = *(const uint4*)(row + 8 * j + 16 * lane);
            const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                keep_smallest(smallest, pairs[i]);
                const float2 pair = unpack_pair(pairs[i]);
                x[j + 2 * i] = pair.x, x[j + 2 * i + 1] = pair.y;
            }
        }
        if (side == KEYS) {
#pragma unroll
            for (int j = 0; j < PER_LANE; j += 4) {
                const float4 m = mean[j / 8 * 8 + 2 * lane + j / 4 % 2];
                x[j] = __fsub_rn(x[j], m.x), x[j + 1] = __fsub_rn(x[j + 1], m.y);
                x[j + 2] = __fsub_rn(x[j + 2], m.z), x[j + 3] = __fsub_rn(x[j + 3], m.w);
            }
        }
        rotate_runs(x, lane, scale);
    } else {
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 2) {
            const int at = lane + j / 2 * LANES;
            const u32 raw = ((const u32*)row)[at];
            keep_smallest(smallest, raw);
            const float2 pair = unpack_pair(raw),
                         m = side == KEYS ? ((const float2*)mean)[at] : float2{0.f, 0.f};
            x[j] = __fsub_rn(pair.x, m.x), x[j + 1] = __fsub_rn(pair.y, m.y);
        }
        rotate(x, lane);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = __fmul_rn(x[j], scale);
    }
    return are_usual(smallest);
}
