// Quantisation of groups of any size along rows to codes, one a byte, and back, for sizes that the faster
// codec/rows.cu does not support. Another launch packs the codes.
//
// Threads and data: a block takes groups blockIdx.x, blockIdx.x + gridDim.x, ...; its threads take elements
// threadIdx.x, threadIdx.x + blockDim.x, ... of a group. The float32 values of a group stand in `scratch`, a
// stretch of `pitch` floats a block, or, if that is null, in dynamic shared memory of as many. pitch is a
// power of two, at least the size of a group: squares are summed there by halves.
//
// Barriers of the block stand between the steps of sums and butterflies, and where the values are replaced.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric, 2 hadamard, 3 ternary.
#include "codec/codebook.cuh"

constexpr int MAX_WARPS = 8;

// How rows are cut into groups: `rows` rows of n elements, groups of `group`, the last of a row may have
// fewer.
struct Groups {
    i64 rows, n, group;
    int bits;
};

struct Group {
    i64 first;
    int count;
};

__device__ __forceinline__ Group group_at(const Groups& groups, i64 index) {
    const i64 of_row = (groups.n + groups.group - 1) / groups.group, row = quotient(index, of_row);
    const i64 start = (index - row * of_row) * groups.group;
    return {row * groups.n + start, (int)min(groups.group, groups.n - start)};
}

__device__ __forceinline__ i64 number_of(const Groups& groups) {
    return groups.rows * ((groups.n + groups.group - 1) / groups.group);
}

// The lowest and the highest of all threads.
__device__ __forceinline__ void extremes_of_block(float& low, float& high) {
    __shared__ float lows[MAX_WARPS], highs[MAX_WARPS];
    for (int mask = 16; mask; mask /= 2) {
        low = lower(low, __shfl_xor_sync(ALL_LANES, low, mask));
        high = higher(high, __shfl_xor_sync(ALL_LANES, high, mask));
    }
    __syncthreads();  // those of the group before are read
    lows[threadIdx.x / 32] = low, highs[threadIdx.x / 32] = high;
    __syncthreads();  // those of all warps are there
    for (int warp = 0; warp < blockDim.x / 32; ++warp)
        low = lower(low, lows[warp]), high = higher(high, highs[warp]);
}

// The sum of squares of a group, by halves, after a multiplication by `down`; values are lost.
__device__ __forceinline__ float sum_of_squares(float* values, int count, float down) {
    int size = 1;
    while (size < count) size *= 2;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const float y = i < count ? __fmul_rn(values[i], down) : 0.f;
        values[i] = __fmul_rn(y, y);
    }
    for (int half = size / 2; half; half /= 2) {
        __syncthreads();  // all terms are there
        for (int i = threadIdx.x; i < half; i += blockDim.x)
            values[i] = __fadd_rn(values[i], values[i + half]);
    }
    __syncthreads();  // the sum is there
    return values[0];
}

// The butterflies of the block Hadamard transform; ends behind a barrier. Returns what sums are to be
// multiplied by to make it orthonormal.
__device__ __forceinline__ float rotate(float* values, int count) {
    const int block = count & -count;
    for (int h = 1; h < block; h *= 2) {
        __syncthreads();  // all values are there
        for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
            const int at = (i & ~(h - 1)) * 2 | (i & (h - 1));
            const float a = values[at], b = values[at + h];
            values[at] = __fadd_rn(a, b), values[at + h] = __fsub_rn(a, b);
        }
    }
    __syncthreads();  // all values are transformed
    return root_of_power(31 - __clz(block));
}

// The code of a sum y of butterflies, whose `whole` is one of a scale s.
__device__ __forceinline__ u32 code_of_sum(float y, float whole, float s, const i32* borders, int top) {
    const float up = s < LEAST_SCALE ? RAISED : 1.f;
    return code_of_cell(borders, saturated_cell(__fmul_rn(y, up), to_units(whole, __fmul_rn(s, up))), top);
}

// codes: one a byte, for TERNARY the values -1, 0, 1; offset: AFFINE; bad: null, or set to 1 if a group
// cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS)
    quantize_groups(const void* __restrict__ x, const Groups groups, u8* __restrict__ codes,
                    u16* __restrict__ scale, u16* __restrict__ offset, i32* bad, float* scratch, i64 pitch,
                    const __grid_constant__ Borders book) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ i32 borders[CODEC == HADAMARD ? 255 : 1];
    float* values = scratch ? scratch + blockIdx.x * pitch : (float*)dynamic;
    const int half = 1 << (groups.bits - 1);
    const float top = (float)((1 << groups.bits) - 1);
    if (CODEC == HADAMARD) {
        for (int i = threadIdx.x; i < 2 * half - 1; i += blockDim.x) borders[i] = book.at[i];
    }
    for (i64 index = blockIdx.x; index < number_of(groups); index += gridDim.x) {
        const Group group = group_at(groups, index);
        float low = __uint_as_float(0x7f800000u), high = CODEC == AFFINE ? -low : 0.f;
        __syncthreads();  // the codes of the group before are made
        for (int i = threadIdx.x; i < group.count; i += blockDim.x) {
            const float value = element(x, group.first + i);
            values[i] = value;
            low = lower(low, value), high = higher(high, CODEC == AFFINE ? value : fabsf(value));
        }
        extremes_of_block(low, high);
        if (CODEC == HADAMARD || CODEC == TERNARY) {
            float up, down;
            powers_near(high, up, down);
            low = root_mean(sum_of_squares(values, group.count, down), group.count, up);
            __syncthreads();  // all have read the sum
            for (int i = threadIdx.x; i < group.count; i += blockDim.x)
                values[i] = element(x, group.first + i);
        }
        const Scale found = find_scale(low, high, top, groups.bits <= 4 ? (float)half : __fmul_rn(top, .5f));
        float whole = 0.f;
        if (CODEC == HADAMARD) whole = units_of(groups.bits) * rotate(values, group.count);
        const Spacing spacing = spacing_of(found.s, found.o, found.known);
        const u32 highest = highest_codes(spacing, spacing, (u32)top);
        for (int i = threadIdx.x; i < group.count; i += blockDim.x) {
            u32 code = 0;
            if (CODEC == HADAMARD) {
                code = code_of_sum(values[i], whole, found.s, borders, (int)top);
            } else if (CODEC == TERNARY) {
                code = ternary_digit(values[i], found.s) - 1;
            } else {
                code = pair_of_codes(spaced_code(values[i], spacing), 0, highest);
            }
            codes[group.first + i] = found.known ? (u8)code : 0;
        }
        if (threadIdx.x == 0) {
            scale[index] = (u16)found.scale_word;
            if (CODEC == AFFINE) offset[index] = (u16)found.offset_word;
            if (!found.known && bad) *bad = 1;
        }
    }
}

// Reverse of quantize_groups.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS)
    dequantize_groups(const u8* __restrict__ codes, const Groups groups, const u16* __restrict__ scale,
                      const u16* __restrict__ offset, void* __restrict__ out, float* scratch, i64 pitch,
                      const __grid_constant__ Codebook book) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ float levels[256];
    float* values = scratch ? scratch + blockIdx.x * pitch : (float*)dynamic;
    const int half = 1 << (groups.bits - 1);
    const float top = (float)((1 << groups.bits) - 1);
    if (CODEC == HADAMARD) {
        for (int i = threadIdx.x; i < 2 * half; i += blockDim.x) levels[i] = level(book, i, half);
    }
    for (i64 index = blockIdx.x; index < number_of(groups); index += gridDim.x) {
        const Group group = group_at(groups, index);
        const Scale found = read_scale(scale[index], CODEC == AFFINE ? offset[index] : 0, top);
        __syncthreads();  // the group before is written; the levels are there
        for (int i = threadIdx.x; i < group.count; i += blockDim.x) {
            const u32 code = codes[group.first + i];
            if (CODEC == HADAMARD) {
                values[i] = __fmul_rn(levels[code], found.s);
            } else if (CODEC == TERNARY) {
                store_element(out, group.first + i, __fmul_rn((float)(signed char)code, found.s));
            } else {
                store_element(out, group.first + i, __fadd_rn(__fmul_rn((float)code, found.s), found.o));
            }
        }
        if (CODEC == HADAMARD) {
            const float factor = rotate(values, group.count);
            for (int i = threadIdx.x; i < group.count; i += blockDim.x) {
                store_element(out, group.first + i, __fmul_rn(values[i], factor));
            }
        }
    }
}

// gate: DTYPE=0 CODEC=0,1,2,3 registers<=64
// gate: DTYPE=1,2 CODEC=0 registers<=64
