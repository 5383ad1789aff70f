// Quantisation of groups along rows, and back, in one pass: a group has 32 LANES elements, a power of two,
// and rows are whole groups, so the array is one run of groups and (but for TERNARY) one run of codes.
//
// Threads and data
//   warp   one tile of 1,024 elements, that is 32 / LANES groups.
//   lane   32 elements of one group. Element e of a group is, by its bits from the top, e = (j, t, k): load j
//   of
//          32 / PER_LOAD, lane t of LANES, element k of the 16 bytes of a load. So lanes of a group read
//          neighbouring 16 bytes, sums by halves and butterflies run over j and k in registers, over t by
//          shuffles.
// Codes meet in shared memory, one a byte, and are packed there (bit_stream.cuh). Memory: 1 KiB of shared
// memory a warp, and the codebook; registers: 32 values a lane.
//
// One barrier of the block: thresholds or levels are there. Else only lanes of a warp wait for each other.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric, 2 hadamard, 3 ternary;
// CODE_BITS (ternary: 2, the bits of a digit); LANES.
//
// clang-format off
// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 LANES=4 registers<=80
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 LANES=4 registers<=80 arch=sm_80,sm_90a
// gate: DTYPE=0,2 CODEC=2 CODE_BITS=4 LANES=4 registers<=80
// gate: DTYPE=0 CODEC=2 CODE_BITS=2,8 LANES=4 registers<=80 arch=sm_90a
// gate: DTYPE=0 CODEC=0,2 CODE_BITS=4 LANES=1,2,8,32 registers<=80 arch=sm_90a
// gate: DTYPE=0,2 CODEC=3 CODE_BITS=2 LANES=4 registers<=80
// clang-format on
#include "codec_codes.cuh"
#include "ternary_bytes.cuh"

constexpr int WARPS = 8;
constexpr int GROUP = 32 * LANES;
constexpr int LOADS = 32 / PER_LOAD;
constexpr int HALF = 1 << (CODE_BITS - 1);
constexpr float TOP = (1 << CODE_BITS) - 1;
constexpr bool CODEBOOK = CODEC == HADAMARD;

__host__ __device__ constexpr int log2_of(int x) {
    return x > 1 ? 1 + log2_of(x / 2) : 0;
}
constexpr float ROTATION = root_of_power(log2_of(GROUP));

struct Lane {
    int lane;     // of the warp
    int at;       // of its first element in the tile: element k of load j is at + j * STRIDE + k
    i64 group;    // its group in the array
    bool inside;  // whether there is that group
    static constexpr int STRIDE = LANES * PER_LOAD;
};

__device__ __forceinline__ Lane lane_of(i64 first, int here) {
    Lane me;
    me.lane = threadIdx.x % 32;
    const int start = me.lane / LANES * GROUP;
    me.at = start + me.lane % LANES * PER_LOAD;
    me.group = (first + start) / GROUP;
    me.inside = start < here;
    return me;
}

__device__ __forceinline__ float of_group(float x, float (*combine)(float, float)) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) x = combine(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
}

__device__ __forceinline__ float sum(float a, float b) {
    return __fadd_rn(a, b);
}

// Adds the upper half of the first 2 FROM elements to the lower, and so on down to TO.
template <int FROM, int TO>
__device__ __forceinline__ void add_halves(float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < FROM; ++i) x[i] = __fadd_rn(x[i], x[i + FROM]);
    if constexpr (FROM > TO) add_halves<FROM / 2, TO>(x);
}

// The sum over a group by halves: first element i and i + GROUP / 2, at last the last two.
__device__ __forceinline__ float sum_of_squares(const float (&v)[32], float down) {
    float squares[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const float y = __fmul_rn(v[i], down);
        squares[i] = __fmul_rn(y, y);
    }
    add_halves<16, PER_LOAD>(squares);
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) squares[k] = of_group(squares[k], sum);
    add_halves<PER_LOAD / 2, 1>(squares);
    return squares[0];
}

template <int H>
__device__ __forceinline__ void butterflies_in_lane(float (&v)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (i & H) continue;
        const float a = v[i], b = v[i + H];
        v[i] = __fadd_rn(a, b), v[i + H] = __fsub_rn(a, b);
    }
}

// The orthonormal Hadamard transform of every group.
__device__ __forceinline__ void rotate(float (&v)[32], int lane) {
    butterflies_in_lane<1>(v);
    butterflies_in_lane<2>(v);
    if constexpr (PER_LOAD == 8) butterflies_in_lane<4>(v);
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const u32 sign = lane & mask ? 0x80000000u : 0u;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float own = __uint_as_float(__float_as_uint(v[i]) ^ sign);
            v[i] = __fadd_rn(own, __shfl_xor_sync(ALL_LANES, v[i], mask));
        }
    }
    if constexpr (PER_LOAD == 4) butterflies_in_lane<4>(v);
    butterflies_in_lane<8>(v);
    butterflies_in_lane<16>(v);
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] = __fmul_rn(v[i], ROTATION);
}

// The lowest and highest value of 16-bit elements, two at a time.
__device__ __forceinline__ void extremes_of_pairs(const uint4 (&raw)[LOADS], float& low, float& high) {
    u32 lows = raw[0].x, highs = raw[0].x;
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        const u32 words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) lows = lower_pair(lows, words[i]), highs = higher_pair(highs, words[i]);
    }
    const float2 l = pair_values(lows), h = pair_values(highs);
    low = lower(l.x, l.y), high = higher(h.x, h.y);
}

__device__ __forceinline__ Scale measure(const uint4 (&raw)[LOADS], const float (&v)[32]) {
    float low = v[0], high = fabsf(v[0]);
    if constexpr (CODEC == AFFINE && DTYPE != FLOAT32) {
        extremes_of_pairs(raw, low, high);
    } else if (CODEC == AFFINE) {
        high = v[0];
#pragma unroll
        for (int i = 1; i < 32; ++i) low = lower(low, v[i]), high = higher(high, v[i]);
    } else {
#pragma unroll
        for (int i = 1; i < 32; ++i) high = higher(high, fabsf(v[i]));
    }
    high = of_group(high, higher);
    if (CODEC == AFFINE) low = of_group(low, lower);
    if (CODEC == HADAMARD || CODEC == TERNARY) {
        float up, down;
        powers_near(high, up, down);
        const float mean = __fmul_rn(sum_of_squares(v, down), 1.f / GROUP);  // GROUP is a power of two
        low = __fmul_rn(__fsqrt_rn(mean), up);
    }
    return find_scale(low, high, TOP, CODE_BITS <= 4 ? HALF : TOP * .5f);
}

// Whether the codes of one load are packed in registers: then they are whole bytes that a store can write.
constexpr bool PACKS_LOADS = CODEC != TERNARY && is_power_of_2(CODE_BITS) && CODE_BITS * PER_LOAD >= 8;

// The codes of one load, to the tile: packed, or one a byte.
__device__ __forceinline__ void put_codes(const float* v, const Scale& scale, const Spacing& spacing,
                                          const float* thresholds, u8* tile, int at) {
    u32 codes[PER_LOAD];
    if constexpr (CODEC == AFFINE || CODEC == SYMMETRIC) {
        spaced_codes<PER_LOAD>(v, spacing, TOP, codes);
    } else {
#pragma unroll
        for (int k = 0; k < PER_LOAD; ++k) {
            const u32 none = CODEC == TERNARY ? 1 : 0;
            codes[k] = CODEC == TERNARY ? ternary_digit(v[k], scale.s)
                                        : codebook_code(v[k], scale.s, thresholds, HALF);
            if (!scale.known) codes[k] = none;
        }
    }
    constexpr u32 MORE = CODEC == AFFINE || CODEC == SYMMETRIC ? MAGIC_BITS : 0;  // than the code itself
    constexpr int WIDTH = PACKS_LOADS ? CODE_BITS : 8,
                  IN_WORD = 32 / WIDTH < PER_LOAD ? 32 / WIDTH : PER_LOAD;
    constexpr int USED = IN_WORD * WIDTH;  // bits of a word
    constexpr u32 EXCESS =
        MORE * (low_bits(1, WIDTH) & 0xffffffffu >> (32 - USED));  // of the sum over its codes
#pragma unroll
    for (int k = 0; k < PER_LOAD; k += IN_WORD) {
        u32 word = 0u - EXCESS;
#pragma unroll
        for (int i = 0; i < IN_WORD; ++i) word += codes[k + i] << (WIDTH * i);
        u8* to = tile + (at + k) * WIDTH / 8;
        if constexpr (USED == 32) {
            *(u32*)to = word;
        } else if constexpr (USED == 16) {
            *(u16*)to = (u16)word;
        } else {
            *to = (u8)word;
        }
    }
}

// x: `count` elements, a multiple of GROUP, 16-byte aligned; `row`: elements of a row (TERNARY: divides
// 1,024); packed: 16-byte aligned; offset: AFFINE; bad: null, or set to 1 if a group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    quantize_rows(const void* __restrict__ x, i64 count, int row, u8* __restrict__ packed,
                  u16* __restrict__ scale, u16* __restrict__ offset, i32* bad,
                  const __grid_constant__ Codebook book) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE + 16];
    __shared__ float thresholds[CODEBOOK ? HALF : 1];
    if constexpr (CODEBOOK) {
        for (int i = threadIdx.x; i < HALF - 1; i += blockDim.x) thresholds[i] = threshold(book, i);
        __syncthreads();  // the thresholds are there
    }
    const int warp = threadIdx.x / 32;
    const i64 first = ((i64)blockIdx.x * WARPS + warp) * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)TILE, count - first);
    const Lane me = lane_of(first, here);
    uint4 raw[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        raw[j] = make_uint4(0, 0, 0, 0);
        if (me.inside)
            raw[j] = *(const uint4*)((const u8*)x + (first + me.at + j * Lane::STRIDE) * ELEMENT_BYTES);
    }
    float v[32];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) elements(raw[j], v + j * PER_LOAD);
    const Scale found = measure(raw, v);
    const Spacing spacing = spacing_of(found.s, found.o, found.known);
    if (CODEC == HADAMARD) rotate(v, me.lane);
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        put_codes(v + j * PER_LOAD, found, spacing, thresholds, tiles[warp], me.at + j * Lane::STRIDE);
    }
    if (me.inside && me.lane % LANES == 0) {
        scale[me.group] = (u16)found.scale_word;
        if (CODEC == AFFINE) offset[me.group] = (u16)found.offset_word;
        if (!found.known && bad) *bad = 1;
    }
    if constexpr (CODEC == TERNARY) {
        store_ternary_rows(tiles[warp], here / row, row, packed + first / row * ((row + 4) / 5), me.lane);
    } else if constexpr (PACKS_LOADS) {
        store_words<CODE_BITS>(tiles[warp], here, packed + first / 8 * CODE_BITS, me.lane);
    } else {
        store_tile<CODE_BITS>(tiles[warp], here, packed + first / 8 * CODE_BITS, me.lane);
    }
}

// Reverse of quantize_rows; bad is set to 1 if a ternary byte is above 242.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_rows(const u8* __restrict__ packed, i64 count, int row, const u16* __restrict__ scale,
                    const u16* __restrict__ offset, void* __restrict__ out, i32* bad,
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
    if constexpr (CODEC == TERNARY) {
        const u8* bytes = packed + first / row * ((row + 4) / 5);
        if (load_ternary_rows(bytes, here / row, row, tile, me.lane) && bad) *bad = 1;
    } else {
        load_tile<CODE_BITS>(packed + first / 8 * CODE_BITS, here, tile, me.lane);
    }
    const Scale found = read_scale(words[0], words[1], TOP);
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const u32 code = tile[me.at + i / PER_LOAD * Lane::STRIDE + i % PER_LOAD];
        if (CODEC == HADAMARD) {
            v[i] = __fmul_rn(levels[code], found.s);
        } else if (CODEC == TERNARY) {
            v[i] = __fmul_rn((float)((int)code - 1), found.s);
        } else {
            const float number = __fsub_rn(__uint_as_float(code | 0x4b000000u), 8388608.f);  // 2^23 + code
            v[i] = __fadd_rn(__fmul_rn(number, found.s), found.o);
        }
    }
    if (CODEC == HADAMARD) rotate(v, me.lane);
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        const uint4 raw = raw_elements(v + j * PER_LOAD);
        if (me.inside) *(uint4*)((u8*)out + (first + me.at + j * Lane::STRIDE) * ELEMENT_BYTES) = raw;
    }
}
