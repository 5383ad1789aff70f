// Sixteen raw vectors of a side of a page into rotated ones, a warp, bit for bit as kvlab/reference/pages.py.
//
// Numbers are whole, so sums are exact in any order and tensor cores may take them: the rotation is a product
// with a matrix of signs. A whole number n is the float16 n 2^-24, subnormal up to 1023: to round to whole
// numbers is to convert, or to multiply by a power of 2, and tensor cores take such numbers at full speed.
//
// Threads and data
//   lane  4 g + u: rows g and g + 8 (`Two`) of the sixteen; of every 16 channels from 16 t on, 2 u and the
//         next of both rows in x[t][0] and x[t][1], channels 8 further on in x[t][2] and x[t][3]. That is
//         both the first operand and the result of m16n8k16, and of a key's tile the pairs in their order.
//         What there is one of for a row is found once: by lanes of even u for rows g, odd u for rows g + 8.
// Memory: registers HEAD_DIM / 4 for the vectors, and as many again while they are rotated.
//
// Needs ROW_BYTES, packed_codes.cuh, packed_encode.cuh, packed_steps.cuh and half_pairs.cuh.
#pragma once

constexpr int TILES = HEAD_DIM / 16;
constexpr int SPAN = ROTATION_BLOCK < 32 ? ROTATION_BLOCK : 32;  // channels that one matrix of signs rotates

using Vectors = u32[TILES][4];

// Of rows g and g + 8.
template <class T>
struct Two {
    T low, high;
};

// What both rows of a lane have, from what lanes hold of the row that is theirs.
__device__ __forceinline__ Two<u32> of_both(u32 mine, int lane) {
    return {__shfl_sync(ALL_LANES, mine, lane & ~1), __shfl_sync(ALL_LANES, mine, lane | 1)};
}

__device__ __forceinline__ float larger_or_nan(float x, float y) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

// The larger of the first and the size of the second of two pairs of raw elements. Compared as float16 even
// if they are bfloat16: the order is the same up to 2^121, and what is above is NaN.
__device__ __forceinline__ u32 larger_raw(u32 x, u32 y) {
    u32 r;
    asm("{.reg .b32 size; abs.f16x2 size, %2; max.NaN.f16x2 %0, %1, size;}" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// Whole numbers from raw rows (less the mean), and what a lane knows of its own row.
struct Taken {
    float factor;  // of the rotated numbers
    bool fine;     // no NaN, nothing infinite or beyond what counts as that
};

template <bool HAS_MEAN>
__device__ __forceinline__ Taken take_raw(const u8* rows, const float2* mean, Vectors& x, int lane) {
    const u32 from = shared_address(rows + lane % 16 * ROW_BYTES + lane / 16 * 16);
    const int u = lane % 4;
    float2 v[HAS_MEAN ? TILES : 1][4], most[2] = {};
    u32 raw_most[2] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        load_matrices(x[t], from + 32 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (HAS_MEAN) {
                const float2 m = mean[8 * t + 4 * (i / 2) + u], y = unpack_pair(x[t][i]);
                v[t][i] = {__fsub_rn(y.x, m.x), __fsub_rn(y.y, m.y)};
                float2& z = most[i % 2];
                z = {larger_or_nan(z.x, fabsf(v[t][i].x)), larger_or_nan(z.y, fabsf(v[t][i].y))};
            } else {
                raw_most[i % 2] = larger_raw(raw_most[i % 2], x[t][i]);
            }
        }
    }
    float size[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (!HAS_MEAN) most[i] = unpack_pair(raw_most[i]);
        size[i] = larger_or_nan(most[i].x, most[i].y);
#pragma unroll
        for (int h = 1; h <= 2; h *= 2)
            size[i] = larger_or_nan(size[i], __shfl_xor_sync(ALL_LANES, size[i], h));
        size[i] = __fmul_rn(size[i], STRETCH);
    }
    const bool fine[2] = {size[0] < power_of_two(TOO_LARGE), size[1] < power_of_two(TOO_LARGE)};
    int exponent[2];
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        exponent[i] = max(exponent_of(size[i]) - 10, LEAST_EXPONENT);
        scale[i] = STRETCH * power_of_two(fine[i] ? -24 - exponent[i] : 0);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 y;
            if constexpr (HAS_MEAN)
                y = v[t][i];
            else
                y = unpack_pair(x[t][i]);
            x[t][i] = pack_halves(__fmul_rn(y.x, scale[i % 2]), __fmul_rn(y.y, scale[i % 2]));
        }
    if (!__all_sync(ALL_LANES, fine[0] && fine[1])) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!fine[i % 2]) x[t][i] = 0;
    }
    const bool is_fine = u % 2 ? fine[1] : fine[0];
    return {power_of_two((is_fine ? u % 2 ? exponent[1] : exponent[0] : 0) - (LOG_BLOCK + 1) / 2), is_fine};
}

// The Hadamard transform of whole numbers, rounded to 11 significant bits.
__device__ __forceinline__ void rotate_whole(Vectors& x, int lane) {
    constexpr int SPANS = HEAD_DIM / SPAN, OF_SPAN = SPAN / 16;
    const int g = lane / 4, u = lane % 4;
    // Signs of rows 2 u, 2 u + 1 and column g; those of other rows and columns are the same or their
    // opposites.
    const u32 even = (u32)__popc(2 * u & g) << 15, odd = (u32)__popc((2 * u + 1) & g) << 31;
    const u32 signs[2] = {0x3c003c00u ^ (even & 0x8000u) ^ odd, 0xbc00bc00u ^ (even & 0x8000u) ^ odd};
    Vectors z;
#pragma unroll
    for (int n = 0; n < SPAN / 8; ++n) {  // columns 8 n to 8 n + 7
        float sums[SPANS][4] = {};
#pragma unroll
        for (int s = 0; s < SPANS; ++s)
#pragma unroll
            for (int i = 0; i < OF_SPAN; ++i) {
                const int sign = i & n / 2;
                mma_half(sums[s], x[s * OF_SPAN + i], signs[sign], signs[sign ^ n % 2]);
            }
#pragma unroll
        for (int h = 1; h * SPAN < ROTATION_BLOCK; h *= 2)
#pragma unroll
            for (int s = 0; s < SPANS; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (s & h) continue;
                    const float a = sums[s][i], b = sums[s + h][i];
                    sums[s][i] = a + b, sums[s + h][i] = a - b;
                }
#pragma unroll
        for (int s = 0; s < SPANS; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                z[s * OF_SPAN + n / 2][n % 2 * 2 + i] = pack_halves(sums[s][2 * i], sums[s][2 * i + 1]);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[t][i] = z[t][i];
}
