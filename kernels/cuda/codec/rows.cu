// Affine and symmetric codecs of groups along rows, and back, in one pass: a group has 32 LANES elements, a
// power of two, and rows are whole groups, so the array is one run of groups and one run of codes.
//
// Threads and data: a warp takes one tile of 1,024 elements, a lane 32 elements of a group (codec/lanes.cuh).
// Codes meet in shared memory, those of 1, 2, 4 and 8 bits packed, and so those of 3 bits of 16-bit elements;
// others one a byte, packed there (codec/bit_stream.cuh). Memory: 1 KiB of shared memory a warp; no barrier
// but those among the lanes of a warp.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric; CODE_BITS; LANES.
#include "codec/lanes.cuh"

constexpr int WARPS = 8;
constexpr int HALF = 1 << (CODE_BITS - 1);
constexpr float TOP = (1 << CODE_BITS) - 1;

__device__ __forceinline__ Scale measure(const uint4 (&raw)[LOADS], const float (&v)[32]) {
    float low, high;
    extremes(raw, v, low, high);
    high = of_lanes<LANES>(high, higher);
    if (CODEC == AFFINE) low = of_lanes<LANES>(low, lower);
    return find_scale(low, high, TOP, CODE_BITS <= 4 ? HALF : TOP * .5f);
}

constexpr bool THREE_BYTES = CODE_BITS == 3 && PER_LOAD == 8;                 // a load has 24 bits of codes
constexpr int WIDTH = PACKS_LOADS<CODE_BITS> || THREE_BYTES ? CODE_BITS : 8;  // of a code in the tile

// The order of a tile (see `place`) in which the groups' loads j of codes of `width` bits meet different
// banks.
__host__ __device__ constexpr int shift_of(int width) {
    const int bytes = LANES * PER_LOAD * width / 8;
    return bytes >= 128 ? 7 : bytes <= 16 ? 4 : log2_of(bytes);
}

// The codes of a lane, to the tile: packed, or one a byte. `highest`: of two codes, in halves.
__device__ __forceinline__ void put_codes(const float (&v)[32], const Spacing& spacing, u32 highest, u8* tile,
                                          int at) {
    using Codes = Packing<WIDTH>;
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        u32 words[Codes::WORDS] = {};
#pragma unroll
        for (int i = 0; i < PER_LOAD / 2; ++i) {
            const int k = j * PER_LOAD + Codes::first(i);
            const u32 low = spaced_code(v[k], spacing), high = spaced_code(v[k + Codes::IN_HALF], spacing);
            words[Codes::word(i)] += pair_of_codes(low, high, highest) << Codes::bit(i);
        }
        const int byte = (at + j * Lane::STRIDE) * WIDTH / 8;
        if constexpr (THREE_BYTES) {
            const u32 all = (words[0] & 0xfff) | words[0] >> 16 << 12;
            tile[byte] = (u8)all, tile[byte + 1] = (u8)(all >> 8), tile[byte + 2] = (u8)(all >> 16);
        } else {
            Codes::store(words, tile + place<shift_of(WIDTH)>(byte));
        }
    }
}

// Copies the codes of `here` elements, groups of 32 and more and so whole words, from the tile.
__device__ __forceinline__ void copy_stream(const u8* tile, int here, u8* to, int lane) {
#pragma unroll
    for (int i = 0; i < CODE_BITS; ++i) {
        const int word = 32 * i + lane;
        if (word < here / 32 * CODE_BITS) ((u32*)to)[word] = ((const u32*)tile)[word];
    }
}

// x: `count` elements, a multiple of GROUP, 16-byte aligned; packed: 16-byte aligned; offset: AFFINE; bad:
// null, or set to 1 if a group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    quantize_rows(const void* __restrict__ x, i64 count, u8* __restrict__ packed, u16* __restrict__ scale,
                  u16* __restrict__ offset, i32* bad) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE + 16];
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
    const Spacing spacing = spacing_of(found.s, found.o, found.known);
    put_codes(v, spacing, highest_codes(spacing, spacing, (u32)TOP), tiles[warp], me.at);
    if (me.inside && me.lane % LANES == 0) {
        scale[me.group] = (u16)found.scale_word;
        if (CODEC == AFFINE) offset[me.group] = (u16)found.offset_word;
        if (!found.known && bad) *bad = 1;
    }
    if constexpr (PACKS_LOADS<CODE_BITS>) {
        store_words<CODE_BITS, shift_of(CODE_BITS)>(tiles[warp], here, packed + first / 8 * CODE_BITS,
                                                    me.lane);
    } else if constexpr (THREE_BYTES) {
        __syncwarp();  // the codes of all lanes are there
        copy_stream(tiles[warp], here, packed + first / 8 * CODE_BITS, me.lane);
    } else {
        store_tile<CODE_BITS, shift_of(8)>(tiles[warp], here, packed + first / 8 * CODE_BITS, me.lane);
    }
}

// Reverse of quantize_rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_rows(const u8* __restrict__ packed, i64 count, const u16* __restrict__ scale,
                    const u16* __restrict__ offset, void* __restrict__ out) {
    __shared__ __align__(16) u8 tiles[WARPS][TILE + 16];
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
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        const int at = me.at + j * Lane::STRIDE;
        u32 codes[PER_LOAD / 4];
        float v[PER_LOAD];
        read_tile<shift_of(8)>(tile, at, codes);
#pragma unroll
        for (int k = 0; k < PER_LOAD; ++k) v[k] = spaced_value(codes[k / 4], k % 4, found);
        const uint4 raw = raw_elements(v);
        if (me.inside) *(uint4*)((u8*)out + (first + at) * ELEMENT_BYTES) = raw;
    }
}

// gate: DTYPE=0,1,2 CODEC=0,1 CODE_BITS=4 LANES=4 registers<=80
// gate: DTYPE=0 CODEC=0 CODE_BITS=1,2,3,5,6,8 LANES=4 registers<=80 arch=sm_80,sm_90a
// gate: DTYPE=0 CODEC=0 CODE_BITS=4 LANES=1,2,8,32 registers<=80 arch=sm_90a
