// Quantisation of groups along rows, and back, in one pass: a group has 32 LANES elements, a power of two,
// and rows are whole groups, so the array is one run of groups and one run of codes.
//
// Threads and data: a warp takes one tile of 1,024 elements, a lane 32 elements of a group (codec_lanes.cuh);
// butterflies run over the elements of a load and over loads in registers, over lanes by shuffles.
//
// Codes meet in shared memory, those of 1, 2, 4 and 8 bits packed, others one a byte and packed there
// (bit_stream.cuh). Memory: 1 KiB of shared memory a warp, and the codebook; registers: 32 values a lane.
//
// One barrier of the block: thresholds or levels are there. Else only lanes of a warp wait for each other.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric, 2 hadamard; CODE_BITS;
// LANES.
//
// clang-format off
// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 LANES=4 registers<=80
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 LANES=4 registers<=80 arch=sm_80,sm_90a
// gate: DTYPE=0,2 CODEC=2 CODE_BITS=4 LANES=4 registers<=80
// gate: DTYPE=0 CODEC=2 CODE_BITS=1,2,3,5,6,8 LANES=4 registers<=80 arch=sm_90a
// gate: DTYPE=0 CODEC=0,2 CODE_BITS=4 LANES=1,2,8,32 registers<=80 arch=sm_90a
// clang-format on
#include "codec_lanes.cuh"

constexpr int WARPS = 8;
constexpr int HALF = 1 << (CODE_BITS - 1);
constexpr float TOP = (1 << CODE_BITS) - 1;
constexpr bool CODEBOOK = CODEC == HADAMARD;

constexpr float ROTATION = root_of_power(log2_of(GROUP));

template <int H>
__device__ __forceinline__ void butterflies_in_lane(float (&v)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (i & H) continue;
        const float a = v[i], b = v[i + H];
        v[i] = __fadd_rn(a, b), v[i + H] = __fsub_rn(a, b);
    }
}

// The Hadamard transform of every group, to be multiplied by ROTATION.
__device__ __forceinline__ void rotate(float (&v)[32], int lane) {
    butterflies_in_lane<1>(v);
    butterflies_in_lane<2>(v);
    if constexpr (PER_LOAD == 8) butterflies_in_lane<4>(v);
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const float sign = lane & mask ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(ALL_LANES, v[i], mask));
    }
    if constexpr (PER_LOAD == 4) butterflies_in_lane<4>(v);
    butterflies_in_lane<8>(v);
    butterflies_in_lane<16>(v);
}

__device__ __forceinline__ Scale measure(const uint4 (&raw)[LOADS], const float (&v)[32]) {
    float low, high;
    extremes(raw, v, low, high);
    high = of_group(high, higher);
    if (CODEC == AFFINE) low = of_group(low, lower);
    if (CODEC == HADAMARD) low = root_mean_square(v, high);
    return find_scale(low, high, TOP, CODE_BITS <= 4 ? HALF : TOP * .5f);
}

constexpr int WIDTH = PACKS_LOADS<CODE_BITS> ? CODE_BITS : 8;  // of a code in the tile

// The order of a tile (see `place`) in which the groups' loads j of codes of `width` bits meet different
// banks.
__host__ __device__ constexpr int shift_of(int width) {
    const int bytes = LANES * PER_LOAD * width / 8;
    return bytes >= 128 ? 7 : bytes <= 16 ? 4 : log2_of(bytes);
}

// What the codes of a group are made with.
struct Coder {
    Spacing spacing;  // AFFINE, SYMMETRIC
    float s;          // else
    float to_cells;   // HADAMARD
    u32 highest;      // of two codes, in halves; 0 for a group without a scale
    const Cell* cells;
    const float* thresholds;
};

// Codes of v[0] and v[1] in halves. USUAL: see quantize_rows.
template <bool USUAL>
__device__ __forceinline__ u32 codes_of(float low, float high, const Coder& coder) {
    if constexpr (CODEC == AFFINE || CODEC == SYMMETRIC) {
        return pair_of_codes(spaced_code(low, coder.spacing), spaced_code(high, coder.spacing),
                             coder.highest);
    } else if constexpr (USUAL) {
        return pair_of_signed<CODE_BITS>(
            code_of_magnitude<CODE_BITS>(low, coder.s, coder.to_cells, coder.cells),
            code_of_magnitude<CODE_BITS>(high, coder.s, coder.to_cells, coder.cells), low, high);
    } else {
        const u32 first = codebook_code(low, coder.s, coder.thresholds, HALF);
        return (first | codebook_code(high, coder.s, coder.thresholds, HALF) << 16) & coder.highest;
    }
}

// The codes of a lane, to the tile: packed, or one a byte.
template <bool USUAL>
__device__ __forceinline__ void put_codes(const float (&v)[32], const Coder& coder, u8* tile, int at) {
    using Codes = Packing<WIDTH>;
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        u32 words[Codes::WORDS] = {};
#pragma unroll
        for (int i = 0; i < PER_LOAD / 2; ++i) {
            const int k = j * PER_LOAD + Codes::first(i);
            words[Codes::word(i)] += codes_of<USUAL>(v[k], v[k + Codes::IN_HALF], coder) << Codes::bit(i);
        }
        Codes::store(words, tile + place<shift_of(WIDTH)>((at + j * Lane::STRIDE) * WIDTH / 8));
    }
}

// x: `count` elements, a multiple of GROUP, 16-byte aligned; packed: 16-byte aligned; offset: AFFINE; bad:
// null, or set to 1 if a group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    quantize_rows(const void* __restrict__ x, i64 count, u8* __restrict__ packed, u16* __restrict__ scale,
                  u16* __restrict__ offset, i32* bad, const __grid_constant__ Codebook book) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE + 16];
    __shared__ float thresholds[CODEBOOK ? HALF : 1];
    __shared__ Cell cells[CODEBOOK ? Cells<CODE_BITS>::COUNT + 1 : 1];
    if constexpr (CODEBOOK) {
        for (int i = threadIdx.x; i < HALF - 1; i += blockDim.x) thresholds[i] = threshold(book, i);
        for (int i = threadIdx.x; i < Cells<CODE_BITS>::COUNT; i += blockDim.x)
            cells[i] = cell_at<CODE_BITS>(book, i);
        __syncthreads();  // thresholds and cells are there
    }
    const int warp = threadIdx.x / 32;
    const i64 first = ((i64)blockIdx.x * WARPS + warp) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    const Lane me = lane_of(first, here);
    uint4 raw[LOADS];
    load_lane(x, first, me, raw);
    float v[32];
    all_elements(raw, v);
    const Scale found = measure(raw, v);
    Coder coder;
    coder.s = found.s, coder.cells = cells, coder.thresholds = thresholds;
    coder.highest = found.known ? 0xffffffffu : 0;
    // Scales for which no product with their inverse leaves the range of float32; others have small and slow
    // code.
    bool usual = true;
    if constexpr (CODEC == AFFINE || CODEC == SYMMETRIC) {
        coder.spacing = spacing_of(found.s, found.o, found.known);
        coder.highest = highest_codes(coder.spacing, coder.spacing, (u32)TOP);
    } else if constexpr (CODEBOOK) {
        usual = found.known && found.s > 1e-20f && found.s < 1e20f;
        coder.to_cells = rough_inverse(found.s) * (Cells<CODE_BITS>::A_UNIT / Cells<CODE_BITS>::COUNT);
        rotate(v, me.lane);
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] = __fmaf_rn(v[i], ROTATION, 0.f);  // -0 becomes 0
    }
    if (!CODEBOOK || __all_sync(ALL_LANES, usual || !me.inside)) {
        put_codes<true>(v, coder, tiles[warp], me.at);
    } else {
        put_codes<false>(v, coder, tiles[warp], me.at);
    }
    if (me.inside && me.lane % LANES == 0) {
        scale[me.group] = (u16)found.scale_word;
        if (CODEC == AFFINE) offset[me.group] = (u16)found.offset_word;
        if (!found.known && bad) *bad = 1;
    }
    if constexpr (PACKS_LOADS<CODE_BITS>) {
        store_words<CODE_BITS, shift_of(CODE_BITS)>(tiles[warp], here, packed + first / 8 * CODE_BITS,
                                                    me.lane);
    } else {
        store_tile<CODE_BITS, shift_of(8)>(tiles[warp], here, packed + first / 8 * CODE_BITS, me.lane);
    }
}

// Reverse of quantize_rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_rows(const u8* __restrict__ packed, i64 count, const u16* __restrict__ scale,
                    const u16* __restrict__ offset, void* __restrict__ out,
                    const __grid_constant__ Codebook book) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE + 16];
    __shared__ float levels[CODEBOOK ? 2 * HALF : 1];
    if constexpr (CODEBOOK) {
        for (int i = threadIdx.x; i < 2 * HALF; i += blockDim.x) levels[i] = level(book, i, HALF);
        __syncthreads();  // the levels are there
    }
    const int warp = threadIdx.x / 32;
    const i64 first = ((i64)blockIdx.x * WARPS + warp) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    const Lane me = lane_of(first, here);
    u32 words[2] = {0, 0};
    if (me.inside) {
        words[0] = scale[me.group];
        if (CODEC == AFFINE) words[1] = offset[me.group];
    }
    u8* tile = tiles[warp];
    load_tile<CODE_BITS, shift_of(8)>(packed + first / 8 * CODE_BITS, here, tile, me.lane);
    const Scale found = read_scale(words[0], words[1], TOP);
    float v[32];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        u32 codes[PER_LOAD / 4];
        read_tile<shift_of(8)>(tile, me.at + j * Lane::STRIDE, codes);
#pragma unroll
        for (int k = 0; k < PER_LOAD; ++k) {
            float& value = v[j * PER_LOAD + k];
            if constexpr (CODEC == HADAMARD) {
                value = __fmul_rn(levels[codes[k / 4] >> 8 * (k % 4) & 0xff], found.s);
            } else {
                value = spaced_value(codes[k / 4], k % 4, found);
            }
        }
    }
    if constexpr (CODEC == HADAMARD) {
        rotate(v, me.lane);
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] = __fmul_rn(v[i], ROTATION);
    }
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        const uint4 raw = raw_elements(v + j * PER_LOAD);
        if (me.inside) *(uint4*)((u8*)out + (first + me.at + j * Lane::STRIDE) * ELEMENT_BYTES) = raw;
    }
}
