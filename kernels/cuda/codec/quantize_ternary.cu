// The ternary codec of groups along rows, and back, in one pass: groups of 32 LANES elements, a power of two,
// in rows of whole groups that divide a tile.
//
// Threads and data: a warp takes a tile of 2,048 elements, whole rows, as two parts of 1,024; a lane 32
// elements of a group of each part (codec/lanes.cuh), both loaded before the first is used. Digits 0, 1, 2
// meet in shared memory, one a byte, where a lane packs units of 80 (codec/ternary_tile.cuh): 2,048 digits
// are 26 to 64 units. Memory: 2.9 KiB of shared memory a warp; no barrier but those among the lanes of a
// warp.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; LANES.
#define CODEC 3
#include "codec/lanes.cuh"
#include "codec/squares.cuh"
#include "codec/ternary_tile.cuh"

constexpr int WARPS = 4, PARTS = 2;
constexpr int ROWS_OF_32 = PARTS * TILE / 32;  // bytes of rows of 32 are the most: 7 for 32 digits

struct Memory {
    __align__(128) u8 digits[PARTS * TILE + 128];
    __align__(16) u8 bytes[7 * ROWS_OF_32 + 32];
};

__device__ __forceinline__ Scale measured_exactly(const uint4 (&raw)[LOADS], const float (&v)[32]) {
    float high = 0.f, low;
    extremes(raw, v, low, high);
    high = of_lanes<LANES>(high, higher);
    return find_scale(root_mean_square(v, high), high, 0.f, 0.f);
}

// The scale of a group from the elements of its lanes.
__device__ __forceinline__ Scale measure(const uint4 (&raw)[LOADS], bool inside) {
    float v[32], part[4];
    all_elements(raw, v);
#pragma unroll
    for (int i = 0; i < 32; ++i)
        part[i % 4] = i < 4 ? __fmul_rn(v[i], v[i]) : __fmaf_rn(v[i], v[i], part[i % 4]);
    const float total = __fadd_rn(__fadd_rn(part[0], part[1]), __fadd_rn(part[2], part[3]));
    Scale found;
    const bool sure = scale_of_squares<8 + 7>(of_lanes<LANES>(total, sum), 1.f / GROUP, found);
    if (!__all_sync(ALL_LANES, sure || !inside)) found = measured_exactly(raw, v);
    return found;
}

// The digits of a load, one a byte: of 16-bit elements by comparing their bits, two at a time.
struct Digits {
    float s;
    u32 borders;  // see digits_of_pair
    bool known;

    __device__ __forceinline__ explicit Digits(const Scale& scale) : s(scale.s), known(scale.known) {
        const u32 border = known ? border_bits(__fmul_rn(s, .5f)) : 0x7fff;
        borders = 0x10001u * (0x10000u - border & 0xffff);
    }

    __device__ __forceinline__ void put(const uint4& raw, u8* to) const {
        if constexpr (DTYPE == FLOAT32) {
            const float v[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                                __uint_as_float(raw.w)};
            u32 word = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) word += (known ? ternary_digit(v[k], s) : 1) << 8 * k;
            *(u32*)to = word;
        } else {
            const u32 a = digits_of_pair(raw.x, borders), b = digits_of_pair(raw.y, borders);
            const u32 c = digits_of_pair(raw.z, borders), d = digits_of_pair(raw.w, borders);
            *(uint2*)to = make_uint2(__byte_perm(a, b, 0x6420), __byte_perm(c, d, 0x6420));
        }
    }
};

// x: `count` elements, a multiple of GROUP, in rows of `row`, 16-byte aligned; bad: null, or set to 1 if a
// group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * WARPS, DTYPE == FLOAT16    ? 8
                                                         : DTYPE == BFLOAT16 ? 6
                                                                             : 5)
    quantize_ternary(const void* __restrict__ x, i64 count, int row, u8* __restrict__ packed,
                     u16* __restrict__ scale, i32* bad) {
    __shared__ Memory memory[WARPS];
    Memory& own = memory[threadIdx.x / 32];
    const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * PARTS * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)PARTS * TILE, count - first);
    uint4 raw[PARTS][LOADS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const Lane me = lane_of(first + p * TILE, here - p * TILE);
        load_lane(x, first + p * TILE, me, raw[p]);
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const Lane me = lane_of(first + p * TILE, here - p * TILE);
        const Scale found = measure(raw[p], me.inside);
        const Digits digits(found);
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            digits.put(raw[p][j], own.digits + place<4>(p * TILE + me.at + j * Lane::STRIDE));
        if (me.inside && me.lane % LANES == 0) {
            scale[me.group] = (u16)found.scale_word;
            if (!found.known && bad) *bad = 1;
        }
    }
    const TernaryTile<true> tile = {own.digits, own.bytes, here / row, row};
    tile.store(packed + first / row * ((row + 4) / 5), threadIdx.x % 32);
}

// What the digits of a group stand for. 16-bit elements: -s, 0, s as a table of halves, from which four
// digits take two bytes each.
struct Values {
    float s;
    u32 low, high;

    __device__ __forceinline__ explicit Values(u32 word) : s(read_scale(word, 0, 0.f).s) {
        if constexpr (DTYPE != FLOAT32) {
            low = pair_bits(__fmul_rn(-1.f, s), __fmul_rn(0.f, s));
            high = pair_bits(s, s);
        }
    }

    __device__ __forceinline__ uint4 of(const u8* from) const {
        if constexpr (DTYPE == FLOAT32) {
            const u32 digits = *(const u32*)from;
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] = __fmul_rn(__fsub_rn(byte_number(digits, k), 1.f), s);
            return raw_elements(v);
        } else {
            const uint2 digits = *(const uint2*)from;
            return make_uint4(two(digits.x), two(digits.x >> 16), two(digits.y), two(digits.y >> 16));
        }
    }

    // The elements of the digits in the low two bytes of a word.
    __device__ __forceinline__ u32 two(u32 digits) const {
        return select_bytes(low, high, digits * 0x22 + 0x1010);
    }
};

// Whether lanes write side by side, 512 bytes at once, and take scales from each other. Only for float32: a
// scale is not much to prepare there, and writing takes most of the time.
constexpr bool WHOLE_LINES = DTYPE == FLOAT32;

// Reverse of quantize_ternary; bad is set to 1 if a byte is above 242.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_ternary(const u8* __restrict__ packed, i64 count, int row, const u16* __restrict__ scale,
                       void* __restrict__ out, i32* bad) {
    __shared__ Memory memory[WARPS];
    Memory& own = memory[threadIdx.x / 32];
    const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * PARTS * TILE;
    if (first >= count) return;
    const int here = (int)min((i64)PARTS * TILE, count - first);
    const int lane = threadIdx.x % 32;
    u32 words[PARTS];  // of 16-bit elements, the scales of this lane's groups; else that of the lane-th group
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const Lane me = lane_of(first + p * TILE, here - p * TILE);
        const bool has = WHOLE_LINES ? p * TILE + lane * GROUP < min((p + 1) * TILE, here) : me.inside;
        words[p] = has ? scale[WHOLE_LINES ? (first + p * TILE) / GROUP + lane : me.group] : 0;
    }
    const TernaryTile<true> tile = {own.digits, own.bytes, here / row, row};
    if (tile.load(packed + first / row * ((row + 4) / 5), lane) && bad) *bad = 1;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const Lane me = lane_of(first + p * TILE, here - p * TILE);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const int at = WHOLE_LINES ? (32 * j + lane) * PER_LOAD : me.at + j * Lane::STRIDE;
            const Values values(WHOLE_LINES ? __shfl_sync(ALL_LANES, words[p], at / GROUP) : words[p]);
            const uint4 raw = values.of(own.digits + place<4>(p * TILE + at));
            if (p * TILE + at < here) *(uint4*)((u8*)out + (first + p * TILE + at) * ELEMENT_BYTES) = raw;
        }
    }
}

// gate: DTYPE=0 LANES=4 registers<=64
// gate: DTYPE=1,2 LANES=4 registers<=96
// gate: DTYPE=0 LANES=1,32 registers<=64 arch=sm_90a
