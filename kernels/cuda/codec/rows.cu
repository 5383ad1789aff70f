// Quantisation of groups along rows, and back, in one pass, every codec: a group has 32 LANES elements, a
// power of two, and rows are whole groups, so the array is one run of groups and, but for ternary codes, one
// run of codes.
//
// Threads and data: a warp takes a tile of 1,024 elements, 32 / LANES groups; a lane 32 elements of one
// group. Element e of a group is, by its bits from the top, e = (j, t, k): load j of 32 / PER_LOAD, lane t of
// LANES, element k of the 16 bytes of a load. So lanes of a group read neighbouring 16 bytes; sums by halves
// run over j and k in registers, over t by shuffles, and butterflies over k, t and j. Codes meet in shared
// memory, one a byte, and go to the stream from there (codec/bit_stream.cuh). Memory: 1,152 bytes of shared
// memory a warp and, HADAMARD, the table of codes or of levels, for which a block takes some tiles.
//
// Barriers of the block: the table is there. Else only lanes of a warp wait for each other.
//
// Macros: DTYPE 0 float16, 1 bfloat16, 2 float32; CODEC 0 affine, 1 symmetric, 2 hadamard, 3 ternary;
// CODE_BITS; LANES.
#include "codec/bit_stream.cuh"
#include "codec/codes.cuh"

constexpr int WARPS = 8;
constexpr int GROUP = 32 * LANES, LOADS = 32 / PER_LOAD, STRIDE = LANES * PER_LOAD;

// What a lane has of the tile that begins at element `first` and has `here`.
struct Lane {
    int lane;     // of the warp
    int at;       // its first element in the tile: element k of load j is at + j * STRIDE + k
    i64 group;    // its group in the array
    bool inside;  // whether there is that group
};

__device__ __forceinline__ Lane lane_of(i64 first, int here) {
    const int lane = threadIdx.x % 32, start = lane / LANES * GROUP;
    return {lane, start + lane % LANES * PER_LOAD, (first + start) / GROUP, start < here};
}

// ---- A group on its lanes

// Combines x of the lanes of a group by halves.
template <class Combine>
__device__ __forceinline__ float of_group(float x, const Combine& combine) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) x = combine(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
}

// Adds the upper half of the first 2 FROM values to the lower, and so on down to TO.
template <int FROM, int TO>
__device__ __forceinline__ void add_halves(float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < FROM; ++i) x[i] = __fadd_rn(x[i], x[i + FROM]);
    if constexpr (FROM > TO) add_halves<FROM / 2, TO>(x);
}

// The root mean square of a group, whose largest magnitude is `high`: squares are added by halves, first
// element i and i + GROUP / 2, at last the last two.
__device__ __forceinline__ float root_mean_square(const float (&v)[32], float high) {
    float up, down, squares[32];
    powers_near(DTYPE == FLOAT16 ? 1.f : high, up, down);  // squares of float16 are in range
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const float x = DTYPE == FLOAT16 ? v[i] : __fmul_rn(v[i], down);
        squares[i] = __fmul_rn(x, x);
    }
    add_halves<16, PER_LOAD>(squares);
#pragma unroll
    for (int i = 0; i < PER_LOAD; ++i) squares[i] = of_group(squares[i], __fadd_rn);
    add_halves<PER_LOAD / 2, 1>(squares);
    return root_mean(squares[0], GROUP, up);
}

__device__ __forceinline__ Scale measure(const float (&v)[32]) {
    float low = v[0], high = CODEC == AFFINE ? v[0] : fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 32; ++i) {
        if (CODEC == AFFINE) low = lower(low, v[i]);
        high = higher(high, CODEC == AFFINE ? v[i] : fabsf(v[i]));
    }
    high = of_group(high, higher);
    if (CODEC == AFFINE) low = of_group(low, lower);
    return find_scale(low, high, CODEC == HADAMARD || CODEC == TERNARY ? root_mean_square(v, high) : 0.f);
}

// Butterflies of distances from H up to below END, counted in values of a lane.
template <int H, int END>
__device__ __forceinline__ void butterflies(float (&v)[32]) {
    if constexpr (H < END) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            if (i & H) continue;
            const float a = v[i], b = v[i + H];
            v[i] = __fadd_rn(a, b), v[i + H] = __fsub_rn(a, b);
        }
        butterflies<2 * H, END>(v);
    }
}

// The Hadamard transform of every group, to be multiplied by rotation_of(GROUP).
__device__ __forceinline__ void rotate(float (&v)[32], int lane) {
    butterflies<1, PER_LOAD>(v);
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const float sign = lane & mask ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(ALL_LANES, v[i], mask));
    }
    butterflies<PER_LOAD, 32>(v);
}

// x: `count` elements, a multiple of GROUP, in rows of `row`, 16-byte aligned; packed: 16-byte aligned;
// offset: AFFINE; bad: null, or set to 1 if a group cannot be represented.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CODEC == HADAMARD ? 3 : 4)
    quantize_rows(const void* __restrict__ x, i64 count, int row, u8* __restrict__ packed,
                  u16* __restrict__ scale, u16* __restrict__ offset, i32* bad,
                  const __grid_constant__ Codebook book) {
    extern __shared__ u8 cells[];
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    if (CODEC == HADAMARD) {
        fill_cells(book, cells);
        __syncthreads();  // the table of codes is there
    }
    const float whole = CODEC == HADAMARD ? __fmul_rn(book.units, rotation_of(GROUP)) : 0.f;
    i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * TILE;
    for (; first < count; first += (i64)gridDim.x * WARPS * TILE) {
        const int here = (int)min((i64)TILE, count - first);
        const Lane me = lane_of(first, here);
        float v[32] = {};
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (me.inside) load_elements(x, first + me.at + j * STRIDE, v + j * PER_LOAD);
        }
        const Scale found = measure(v);
        const Encoder encoder = encoder_of(found, whole);
        if (CODEC == HADAMARD) rotate(v, me.lane);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            Words<PER_LOAD / 4> codes;
#pragma unroll
            for (int i = 0; i < PER_LOAD / 4; ++i) {
                const float* f = v + j * PER_LOAD + 4 * i;
                const u32 even = pair_of_codes(f[0], f[2], encoder, encoder, cells, book.reach);
                codes.at[i] = even | pair_of_codes(f[1], f[3], encoder, encoder, cells, book.reach) << 8;
            }
            *(Words<PER_LOAD / 4>*)tile.at(me.at + j * STRIDE) = codes;
        }
        if (me.inside && me.lane % LANES == 0) {
            scale[me.group] = (u16)found.scale_word;
            if (CODEC == AFFINE) offset[me.group] = (u16)found.offset_word;
            if (!found.known && bad) *bad = 1;
        }
        if (CODEC == TERNARY) {
            store_digits(tile, here / row, row, packed + first / row * ((row + 4) / 5), me.lane);
        } else {
            store_tile<CODE_BITS>(tile, here, packed + first / 8 * CODE_BITS, me.lane);
        }
        __syncwarp();  // the tile is spent
    }
}

// Reverse of quantize_rows; bad: null, or set to 1 if a byte of ternary codes is above 242.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_rows(const u8* __restrict__ packed, i64 count, int row, const u16* __restrict__ scale,
                    const u16* __restrict__ offset, void* __restrict__ out, i32* bad,
                    const __grid_constant__ Codebook book) {
    __shared__ float levels[CODEC == HADAMARD ? TOP_CODE + 1 : 1];
    __shared__ Tile tiles[WARPS];
    Tile& tile = tiles[threadIdx.x / 32];
    if (CODEC == HADAMARD) {
        fill_levels(book, levels);
        __syncthreads();  // the levels are there
    }
    i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * TILE;
    for (; first < count; first += (i64)gridDim.x * WARPS * TILE) {
        const int here = (int)min((i64)TILE, count - first);
        const Lane me = lane_of(first, here);
        u32 words[2] = {0, 0};
        if (me.inside) {
            words[0] = scale[me.group];
            if (CODEC == AFFINE) words[1] = offset[me.group];
        }
        if (CODEC == TERNARY) {
            const u8* from = packed + first / row * ((row + 4) / 5);
            if (load_digits(from, here / row, row, tile, me.lane) && bad) *bad = 1;
        } else {
            load_tile<CODE_BITS>(packed + first / 8 * CODE_BITS, here, tile, me.lane);
        }
        const Scale found = read_scale(words[0], words[1]);
        float v[32];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const auto codes = *(const Words<PER_LOAD / 4>*)tile.at(me.at + j * STRIDE);
#pragma unroll
            for (int k = 0; k < PER_LOAD; ++k)
                v[j * PER_LOAD + k] = value_of(codes.at[k / 4] >> 8 * (k % 4) & 0xff, found, levels);
        }
        if (CODEC == HADAMARD) {
            rotate(v, me.lane);
#pragma unroll
            for (int i = 0; i < 32; ++i) v[i] = __fmul_rn(v[i], rotation_of(GROUP));
        }
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (me.inside) store_elements(out, first + me.at + j * STRIDE, v + j * PER_LOAD);
        }
        __syncwarp();  // the tile is spent
    }
}

// gate: DTYPE=0,1,2 CODEC=0,1,2 CODE_BITS=4 LANES=4 registers<=128
// gate: DTYPE=0,1,2 CODEC=3 CODE_BITS=2 LANES=4 registers<=128
// gate: DTYPE=0 CODEC=0,2 CODE_BITS=1,2,3,5,6,8 LANES=4 registers<=128 arch=sm_90a
// gate: DTYPE=0 CODEC=0,2 CODE_BITS=4 LANES=1,2,8,32 registers<=128 arch=sm_90a
