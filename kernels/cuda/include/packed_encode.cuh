// Vectors into slots of pages and back, LANES lanes a vector: lane holds elements lane, lane + LANES, ...
//
// The codes are those of kvlab/reference/pages.py bit for bit. So every operation is rounded on its own, sums
// go by halves, and nothing may be contracted: hence the intrinsics. A code is the floor of a quotient; here
// it is that of a product with a reciprocal that is rounded away from 0 for positive numbers and towards 0
// for negative ones: a step has 4 significant bits and a code 8, so no float32 number lies between a
// multiple of a cell and where the product meets the integer (tests/kernels/test_grid_codes.py tries all).
// The floor itself is an addition of 2^23, rounded down.
//
// Several warps may write slots of one page at the same time, in shared or global memory: codes below 8 bits
// share words and are changed by exclusive or with what differs. All lanes of a warp call what is here
// together. Needs HEAD_DIM, BF16, packed_codes.cuh and LANES, a power of 2 up to 32.
#pragma once

constexpr int PER_LANE = (HEAD_DIM + LANES - 1) / LANES;
constexpr int SUM_WIDTH = (HEAD_DIM > 128 ? 256 : HEAD_DIM > 64 ? 128 : 64) / LANES;
constexpr int ROTATION_BLOCK = HEAD_DIM & -HEAD_DIM, CANDIDATES = 5;
constexpr u32 HIGHEST_STEP = 0xf7, NAN_STEP = 0xff;
constexpr float TWO_23 = 8388608.f, LARGEST = 3.402823466e38f;

__host__ __device__ constexpr float rotation_factor(int block) {
    return block >= 4 ? .5f * rotation_factor(block / 4) : block == 2 ? .70710678118654752f : 1.f;
}

__device__ __forceinline__ float half_cell(int bits) {
    return bits == 2 ? .4978f : bits == 3 ? .2930f : bits == 4 ? .1676f : .0135f;
}

__device__ __forceinline__ float step_value(u32 byte) {
    return half_bits_to_float(byte << 7);
}

__device__ __forceinline__ bool is_there(int lane, int j) {
    return HEAD_DIM % LANES == 0 || lane + LANES * j < HEAD_DIM;
}

// The orthonormal block Hadamard transform, its own inverse up to rounding.
__device__ __forceinline__ void rotate(float (&x)[PER_LANE], int lane) {
#pragma unroll
    for (int h = 1; h < LANES && h < ROTATION_BLOCK; h *= 2) {
        const float sign = lane & h ? -1.f : 1.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = fmaf(x[j], sign, __shfl_xor_sync(ALL_LANES, x[j], h));
    }
#pragma unroll
    for (int h = 1; h < ROTATION_BLOCK / LANES; h *= 2) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            if (j & h) continue;
            const float a = x[j], b = x[j + h];
            x[j] = __fadd_rn(a, b);
            x[j + h] = __fsub_rn(a, b);
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = __fmul_rn(x[j], rotation_factor(ROTATION_BLOCK));
}

// The sum of term(J), term(J + STRIDE), ... of a lane by halves; what is beyond PER_LANE counts as 0.
template <int J, int STRIDE, class Term>
__device__ __forceinline__ float sum_of_lane(const Term& term) {
    if constexpr (STRIDE >= SUM_WIDTH) {
        return term(J);
    } else if constexpr (J + STRIDE >= PER_LANE) {
        return sum_of_lane<J, 2 * STRIDE>(term);
    } else {
        const float first = sum_of_lane<J, 2 * STRIDE>(term);
        return __fadd_rn(first, sum_of_lane<J + STRIDE, 2 * STRIDE>(term));
    }
}

// The sum of all elements, none negative, in the order of reference.pages.tree_sum; every lane gets it.
template <class Term>
__device__ __forceinline__ float tree_sum(const Term& term) {
    float sum = sum_of_lane<0, 1>(term);
#pragma unroll
    for (int h = LANES / 2; h > 0; h /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, h));
    return sum;
}

// How numbers become codes of a step.
struct Grid {
    float step, cell, up, down;  // cell = 2 step; 1 / cell rounded up, rounded down
    float middle;                // 2^(bits - 1)
};

__device__ __forceinline__ Grid grid_of(u32 byte, int bits) {
    Grid g;
    g.step = step_value(byte);
    g.cell = g.step + g.step;
    const float nearest = __frcp_rn(g.cell), rest = fmaf(-g.cell, nearest, 1.f);
    g.up = rest > 0.f ? __uint_as_float(__float_as_uint(nearest) + 1) : nearest;
    g.down = rest < 0.f ? __uint_as_float(__float_as_uint(nearest) - 1) : nearest;
    g.middle = 1 << (bits - 1);
    return g;
}

__device__ __forceinline__ u32 grid_code(float x, const Grid& g) {
    constexpr float ORIGIN = 1.5f * TWO_23;
    const float code = __fmaf_rd(x, x < 0.f ? g.down : g.up, ORIGIN + g.middle);
    return __float_as_uint(fminf(fmaxf(code, ORIGIN), ORIGIN + (2.f * g.middle - 1.f))) & 255;
}

__device__ __forceinline__ float grid_value(u32 code, float step, int bits) {
    return __fmul_rn(fmaf(2.f, (float)code, 1.f - (1 << bits)), step);
}

// The squared error of a vector for a step. The grid is symmetric, so magnitudes do.
__device__ __forceinline__ float grid_error(const float (&x)[PER_LANE], const Grid& g, int lane) {
    const float last = TWO_23 + (g.middle - 1.f);
    return tree_sum([&](int j) {
        const float size = fabsf(x[j]), cells = fminf(__fmaf_rd(size, g.up, TWO_23), last);
        const float d = fmaf(-__fsub_rn(cells, TWO_23 - .5f), g.cell, size);
        return is_there(lane, j) ? __fmul_rn(d, d) : 0.f;
    });
}

// Which steps are tried for a rotated vector whose elements beyond HEAD_DIM are 0: `nearest` - 2 to + 2
// within bounds, unless `known` is the answer.
struct StepRange {
    int nearest, known;

    __device__ __forceinline__ u32 candidate(int i) const {
        return min(max(nearest - CANDIDATES / 2 + i, 1), (int)HIGHEST_STEP);
    }
};

__device__ __forceinline__ StepRange steps_near(const float (&x)[PER_LANE], int bits, int lane) {
    const float sum = tree_sum([&](int j) { return __fmul_rn(x[j], x[j]); });
    constexpr bool IS_POWER = (HEAD_DIM & (HEAD_DIM - 1)) == 0;
    const float mean = IS_POWER ? __fmul_rn(sum, 1.f / HEAD_DIM) : __fdiv_rn(sum, (float)HEAD_DIM);
    const float root = __fsqrt_rn(mean);
    const u32 guess = __half_as_ushort(__float2half_rn(__fmul_rn(root, half_cell(bits))));
    StepRange range = {(int)min(max((guess + 63 + (guess >> 7 & 1)) >> 7, 1u), HIGHEST_STEP), -1};
    if (root == 0.f) range.known = 0;
    if (__any_sync(ALL_LANES, !(sum <= LARGEST))) {  // an element is not finite, or the sum alone
        bool finite = true;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) finite = finite && fabsf(x[j]) <= LARGEST;
        int all = finite;
#pragma unroll
        for (int h = LANES / 2; h > 0; h /= 2) all &= __shfl_xor_sync(ALL_LANES, all, h);
        if (!all) range.known = NAN_STEP;
    }
    return range;
}

// ---- Where codes lie

enum Side { KEYS, VALUES };

// Of a channel of a slot: its tile, its lane and register there, and which half of the register.
struct Element {
    u32 tile, lane, reg, half;
};

__device__ __forceinline__ Element element_at(Side side, u32 slot, u32 channel) {
    const u32 block = slot % 8 / 2, token = slot / 8 + 8 * (slot % 2);
    const u32 tile = side == KEYS ? block * (HEAD_DIM / 16) + channel / 16 : channel / 16 * 4 + block;
    const u32 row = side == KEYS ? token : channel % 16, column = side == KEYS ? channel % 16 : token;
    return {tile, 4 * (row % 8) + column % 8 / 2, row / 8 + 2 * (column / 8), column % 2};
}

// Of a code below 8 bits: its word, its lowest bit there, and whether bit j of it lies in word j instead.
struct Field {
    u32 word, shift;
    bool spread;
};

template <int BITS>
__device__ __forceinline__ Field field_of(const Element& e) {
    constexpr u32 TILES = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS, PER_WORD = 16 / BITS;
    const u32 pair = 4 * (e.tile % TILES) + e.reg, first = e.tile / TILES * WORDS;
    const bool spread = BITS == 3 && pair == 15;
    const u32 word = spread ? first : first + pair / PER_WORD;
    const u32 bit = spread ? 0 : pair % PER_WORD * BITS + (BITS == 3);
    return {32 * word + e.lane, bit + 16 * e.half, spread};
}

// Byte of a code of 8 bits, or the first one of 16.
template <int BITS>
__device__ __forceinline__ u32 byte_of(const Element& e) {
    if (BITS == 16) return 4 * (32 * (4 * e.tile + e.reg) + e.lane) + 2 * e.half;
    return 4 * (32 * (2 * e.tile + e.reg / 2) + e.lane) + e.reg % 2 + 2 * e.half;
}

template <int BITS>
__device__ __forceinline__ u32 read_code(const u8* codes, const Element& e) {
    if constexpr (BITS == 16) return *(const u16*)(codes + byte_of<16>(e));
    if constexpr (BITS == 8) return codes[byte_of<8>(e)];
    if constexpr (BITS < 8) {
        const Field f = field_of<BITS>(e);
        const u32* word = (const u32*)codes + f.word;
        u32 code = word[0] >> f.shift;
        if (BITS == 3 && f.spread)
            code = (code & 1u) | (word[32] >> f.shift & 1u) << 1 | (word[64] >> f.shift & 1u) << 2;
        return code & ((1u << BITS) - 1u);
    }
}

template <int BITS>
__device__ __forceinline__ void write_code(u8* codes, const Element& e, u32 code) {
    if constexpr (BITS == 16) *(u16*)(codes + byte_of<16>(e)) = (u16)code;
    if constexpr (BITS == 8) codes[byte_of<8>(e)] = (u8)code;
    if constexpr (BITS < 8) {
        const Field f = field_of<BITS>(e);
        u32* word = (u32*)codes + f.word;
        const u32 change = read_code<BITS>(codes, e) ^ code;
        if (BITS == 3 && f.spread) {
#pragma unroll
            for (int j = 0; j < 3; ++j) atomicXor(word + 32 * j, (change >> j & 1u) << f.shift);
        } else {
            atomicXor(word, change << f.shift);
        }
    }
}

__device__ __forceinline__ float raw_value(u32 bits) {
#if BF16
    return __uint_as_float(bits << 16);
#else
    return half_bits_to_float(bits);
#endif
}

__device__ __forceinline__ u32 raw_bits(float x) {
    return pack_pair(x, 0.f) & 0xffffu;
}
