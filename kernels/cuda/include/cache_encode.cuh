// Vectors of a page into codes at the fewest instructions: LANES = 4 lanes a vector, numbers times 2^-40.
//
// Scaled so, 2^-149, the unit of subnormal numbers, counts cells: the product of a number and the reciprocal
// of a cell, added to a small integer of that unit and rounded, is an integer, and .sat is a cut at 0 for
// nothing. What is found here is what packed_encode.cuh finds, or `safe` says that it may not be: then the
// vector has to go through that. Unsafe are sums that come so near to each other that their rounding decides,
// steps at the ends of their range, and numbers that 2^-40 makes too small.
//
// Needs packed_encode.cuh with LANES = 4 and RUN = 2.
#pragma once

constexpr float SCALE = 1.f / (1ull << 40);

__device__ __forceinline__ float times_power_of_2(float x, int exponent) {  // x and the result normal
    return __uint_as_float(__float_as_uint(x) + (exponent << 23));
}

// Of a step: 1 / cell rounded up, times 2^-109, and cell times 2^109.
__device__ __forceinline__ float2 scaled_grid(u32 byte) {
    const Grid grid = grid_of(byte, 2);
    return {times_power_of_2(grid.up, -109), times_power_of_2(grid.cell, 109)};
}

__device__ __forceinline__ Grid unscaled_grid(float2 g, int bits) {
    return {times_power_of_2(g.y, -109), times_power_of_2(g.x, 109), (float)(1 << (bits - 1))};
}

struct Found {
    u32 byte;
    bool safe;
};

// The byte in the middle of the candidates.
__device__ __forceinline__ Found find_middle(const float (&x)[PER_LANE], int bits) {
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) sums[j % 2] = fmaf(x[j], x[j], sums[j % 2]);
    float sum = sums[0] + sums[1];
#pragma unroll
    for (int h = LANES / 2; h > 0; h /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, h);
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(sum * (1.f / HEAD_DIM)));
    const float guess = root * (half_cell(bits) / SCALE);
    constexpr float OFF = 1.f / (1 << 17);  // more than all roundings
    u32 both = pack_halves(guess * (1.f - OFF), guess * (1.f + OFF));
    both = (both + 0x003f003fu + (both >> 7 & 0x00010001u)) >> 7;
    const u32 byte = both & 255;
    const bool inner = byte - 3 <= HIGHEST_STEP - 5;  // no candidate is beyond the range
    return {inner ? byte : 3, inner && byte == (both >> 16 & 255)};
}

// The candidate with the least error. A distance is the multiple of a cell that is left up to the last one,
// and how far the number is from there: the sum is off by less than 2^-24 of the grid's half, an error, which
// is at least 2^-6 cells squared an element, by 2^-13 of it at 8 bits and 2^-17 at 4, and by 2^-18 as its
// order.
template <int BITS>
__device__ __forceinline__ Found find_step(const float (&x)[PER_LANE], u32 middle, const float2* grids) {
    constexpr int LAST = (1 << (BITS - 1)) - 1;
    float least = __int_as_float(0x7f800000), second = least;
    int best = 0;
#pragma unroll 1
    for (int i = -CANDIDATES / 2; i <= CANDIDATES / 2; ++i) {
        const float2 g = grids[middle + i];
        const float cell = times_power_of_2(g.y, -149), end = cell * (LAST + .5f);
        float sums[2] = {};
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const float size = fabsf(x[j]);
            float d;
            if constexpr (BITS == 2)  // two cells: from the border between them to the middles
                d = __fsub_rn(fabsf(__fsub_rn(size, cell)), .5f * cell);
            else
                d = fmaf(__saturatef(__fmaf_ru(-size, g.x, __int_as_float(LAST))), g.y, __fsub_rn(size, end));
            sums[j % 2] = fmaf(d, d, sums[j % 2]);
        }
        float error = sums[0] + sums[1];
#pragma unroll
        for (int h = LANES / 2; h > 0; h /= 2) error += __shfl_xor_sync(ALL_LANES, error, h);
        second = fminf(second, fmaxf(error, least));
        if (error < least) least = error, best = i;
    }
    constexpr float margin = BITS == 8 ? 1.f / (1 << 12) : 1.f / (1 << 15);
    const float cell = times_power_of_2(grids[middle + CANDIDATES / 2].y, -149);  // the largest
    const bool apart = second > fmaf(least, margin, least);
    return {middle + best, apart && least >= HEAD_DIM / 64.f * cell * cell};
}

__device__ __forceinline__ Found find_step(const float (&x)[PER_LANE], u32 middle, int bits,
                                           const float2* grids) {
    if (bits == 2) return find_step<2>(x, middle, grids);
    if (bits == 3) return find_step<3>(x, middle, grids);
    if (bits == 4) return find_step<4>(x, middle, grids);
    return find_step<8>(x, middle, grids);
}

// Codes of elements j, j + 1, j + 2, j + 3 of a lane as a word of a row (code_byte).
struct Coder {
    float up;     // 1 / cell for numbers times 2^-40, in units of 2^-24
    float first;  // code 2^(bits - 1), where 1 is the last code
    u32 last;     // code in both halves

    __device__ __forceinline__ u32 code(float x) const {  // less the last code, in the lower half
        const int sign = (int)__float_as_uint(x) >> 31;
        return __float_as_uint(__saturatef(__fmaf_rd(x, __uint_as_float(__float_as_uint(up) + sign), first)));
    }

    __device__ __forceinline__ u32 pair(float x, float y) const {
        return __viaddmax_s16x2(__byte_perm(code(x), code(y), 0x5410), last, 0);
    }
};

__device__ __forceinline__ Coder coder_of(float2 g, int bits) {
    const int middle = 1 << (bits - 1);
    return {times_power_of_2(g.x, 125), __int_as_float(0x3f800000 - (middle - 1)),
            (2u * middle - 1u) * 0x10001u};
}
