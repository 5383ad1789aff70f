// Quantisation of groups of any size along rows to codes, one a byte, and back, for sizes that the faster
// codec/rows.cu does not support. Another launch packs the codes.
//
// Threads and data: a block takes groups blockIdx.x, blockIdx.x + gridDim.x, ...; its threads take elements
// threadIdx.x, threadIdx.x + blockDim.x, ... of a group. The float32 values of a group stand in `scratch`, a
// stretch of `pitch` floats a block, or, if that is null, in dynamic shared memory of as many. pitch is a
// power of two, at least the size of a group: squares are summed there by halves. Behind them stands the
// table of codes, or of levels, of HADAMARD.
//
// Barriers of the block stand between the levels of sums and butterflies, and where the values are replaced.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric, 2 hadamard, 3 ternary;
// CODE_BITS.
#include "codec/bit_stream.cuh"
#include "codec/codes.cuh"

constexpr int MAX_WARPS = 8;

// How rows are cut into groups: `rows` rows of n elements, groups of `group`, the last of a row may have
// fewer.
struct Groups {
    i64 rows, n, group;

    __device__ __forceinline__ i64 of_row() const { return (n + group - 1) / group; }
    __device__ __forceinline__ i64 first(i64 index, int& count) const {
        const i64 row = quotient(index, of_row()), start = (index - row * of_row()) * group;
        count = (int)min(group, n - start);
        return row * n + start;
    }
};

// x of all threads.
template <class Combine>
__device__ __forceinline__ float of_block(float x, const Combine& combine) {
    __shared__ float parts[MAX_WARPS];
    for (int mask = 16; mask; mask /= 2) x = combine(x, __shfl_xor_sync(ALL_LANES, x, mask));
    __syncthreads();  // those of the call before are read
    parts[threadIdx.x / 32] = x;
    __syncthreads();  // those of all warps are there
    for (int warp = 0; warp < blockDim.x / 32; ++warp) x = combine(x, parts[warp]);
    return x;
}

// The root mean square of a group, whose largest magnitude is `high`; values are lost.
__device__ __forceinline__ float root_mean_square(float* values, int count, float high) {
    float up, down;
    powers_near(high, up, down);
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
    return root_mean(values[0], count, up);
}

// The Hadamard transform of a group, to be multiplied by what this returns; ends behind a barrier.
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
    return rotation_of(block);
}

// codes: one a byte, for TERNARY the values -1, 0, 1; offset: AFFINE; bad: null, or set to 1 if a group
// cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS)
    quantize_groups(const void* __restrict__ x, const Groups groups, u8* __restrict__ codes,
                    u16* __restrict__ scale, u16* __restrict__ offset, i32* bad, float* scratch, i64 pitch,
                    const __grid_constant__ Codebook book) {
    extern __shared__ __align__(16) u8 dynamic[];
    float* values = scratch ? scratch + blockIdx.x * pitch : (float*)dynamic;
    u8* cells = dynamic + (scratch ? 0 : pitch * sizeof(float));
    if (CODEC == HADAMARD) fill_cells(book, cells);
    for (i64 index = blockIdx.x; index < groups.rows * groups.of_row(); index += gridDim.x) {
        int count;
        const i64 first = groups.first(index, count);
        float low = __uint_as_float(0x7f800000u), high = CODEC == AFFINE ? -low : 0.f;
        __syncthreads();  // the codes of the group before are made; the table is there
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const float value = values[i] = element(x, first + i);
            low = lower(low, value), high = higher(high, CODEC == AFFINE ? value : fabsf(value));
        }
        low = of_block(low, lower), high = of_block(high, higher);
        float mean = 0.f;
        if (CODEC == HADAMARD || CODEC == TERNARY) {
            mean = root_mean_square(values, count, high);
            __syncthreads();  // all have read the sum
            for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = element(x, first + i);
        }
        const Scale found = find_scale(low, high, mean);
        const Encoder encoder =
            encoder_of(found, CODEC == HADAMARD ? __fmul_rn(book.units, rotate(values, count)) : 0.f);
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const u32 pair = pair_of_codes(values[i], 0.f, encoder, encoder, cells, book.reach);
            codes[first + i] = (u8)(CODEC == TERNARY ? pair - 1 : pair);
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
    __shared__ float levels[CODEC == HADAMARD ? TOP_CODE + 1 : 1];
    float* values = scratch ? scratch + blockIdx.x * pitch : (float*)dynamic;
    if (CODEC == HADAMARD) fill_levels(book, levels);
    for (i64 index = blockIdx.x; index < groups.rows * groups.of_row(); index += gridDim.x) {
        int count;
        const i64 first = groups.first(index, count);
        const Scale found = read_scale(scale[index], CODEC == AFFINE ? offset[index] : 0);
        __syncthreads();  // the group before is written; the levels are there
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const u32 code = CODEC == TERNARY ? codes[first + i] + 1 & 0xff : codes[first + i];
            const float value = value_of(code, found, levels);
            if (CODEC == HADAMARD) {
                values[i] = value;
            } else {
                store_element(out, first + i, value);
            }
        }
        if (CODEC == HADAMARD) {
            const float factor = rotate(values, count);
            for (int i = threadIdx.x; i < count; i += blockDim.x)
                store_element(out, first + i, __fmul_rn(values[i], factor));
        }
    }
}

// gate: DTYPE=0 CODEC=0,1,2 CODE_BITS=4 registers<=64
// gate: DTYPE=0 CODEC=3 CODE_BITS=2 registers<=64
// gate: DTYPE=1,2 CODEC=0 CODE_BITS=4 registers<=64
