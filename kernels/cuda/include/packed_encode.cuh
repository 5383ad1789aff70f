// Vectors into slots of pages and back, one warp a vector: lane holds elements lane, lane + 32, ...
//
// The codes are those of kvlab/reference/pages.py bit for bit. So every operation is rounded on its own, sums
// go by halves, and nothing may be contracted: hence the intrinsics. A code is the floor of a quotient; here
// it comes from a product with the reciprocal, put right by the exact remainder: a step has 4 significant
// bits and a code 8, so their product is exact and its difference to x has the right sign.
//
// Several warps may write slots of one page at the same time, in shared or global memory: codes below 8 bits
// share words and are changed by exclusive or with what differs. Needs HEAD_DIM, BF16, packed_codes.cuh and
// AT_ONCE: how many candidates of a step are tried side by side.
#pragma once

constexpr int PER_LANE = (HEAD_DIM + 31) / 32;
constexpr int SUM_WIDTH = HEAD_DIM > 128 ? 8 : HEAD_DIM > 64 ? 4 : HEAD_DIM > 32 ? 2 : 1;
constexpr int ROTATION_BLOCK = HEAD_DIM & -HEAD_DIM;
constexpr u32 HIGHEST_STEP = 0xf7, NAN_STEP = 0xff;

__host__ __device__ constexpr float rotation_factor(int block) {
    return block >= 4 ? .5f * rotation_factor(block / 4) : block == 2 ? .70710678118654752f : 1.f;
}

__host__ __device__ constexpr float half_cell(int bits) {
    return bits == 2 ? .4978f : bits == 3 ? .2930f : bits == 4 ? .1676f : .0135f;
}

__device__ __forceinline__ float step_value(u32 byte) {
    return half_bits_to_float(byte << 7);
}

// The orthonormal block Hadamard transform, its own inverse up to rounding.
__device__ __forceinline__ void rotate(float (&x)[PER_LANE], int lane) {
#pragma unroll
    for (int h = 1; h < 32 && h < ROTATION_BLOCK; h *= 2) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const float other = __shfl_xor_sync(ALL_LANES, x[j], h);
            x[j] = lane & h ? __fsub_rn(other, x[j]) : __fadd_rn(x[j], other);
        }
    }
#pragma unroll
    for (int h = 1; h < ROTATION_BLOCK / 32; h *= 2) {
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

// The sum of all elements in the order of reference.pages.tree_sum; every lane gets it.
__device__ __forceinline__ float tree_sum(const float (&x)[PER_LANE]) {
    float a[SUM_WIDTH];
#pragma unroll
    for (int j = 0; j < SUM_WIDTH; ++j) a[j] = j < PER_LANE ? x[j] : 0.f;
#pragma unroll
    for (int h = SUM_WIDTH / 2; h > 0; h /= 2) {
#pragma unroll
        for (int j = 0; j < h; ++j) a[j] = __fadd_rn(a[j], a[j + h]);
    }
#pragma unroll
    for (int h = 16; h > 0; h /= 2) a[0] = __fadd_rn(a[0], __shfl_xor_sync(ALL_LANES, a[0], h));
    return a[0];
}

// The code of x as a float, for a step and the reciprocal of twice the step.
template <int BITS>
__device__ __forceinline__ float grid_code(float x, float cell, float reciprocal) {
    constexpr float MIDDLE = 1 << (BITS - 1);
    float code = floorf(__fmul_rn(x, reciprocal));
    const float rest = fmaf(-code, cell, x);
    code += rest < 0.f ? -1.f : rest >= cell ? 1.f : 0.f;
    return fminf(fmaxf(code + MIDDLE, 0.f), 2.f * MIDDLE - 1.f);
}

template <int BITS>
__device__ __forceinline__ float grid_value(float code, float step) {
    return __fmul_rn(fmaf(2.f, code, 1.f - (1 << BITS)), step);
}

// The step byte of a rotated vector; elements beyond HEAD_DIM must be 0.
template <int BITS>
__device__ __forceinline__ u32 choose_step(const float (&x)[PER_LANE], int lane) {
    float squares[PER_LANE];
    bool finite = true;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        squares[j] = __fmul_rn(x[j], x[j]);
        finite = finite && fabsf(x[j]) <= 3.402823466e38f;
    }
    const float root = __fsqrt_rn(__fdiv_rn(tree_sum(squares), (float)HEAD_DIM));
    const u32 guess = __half_as_ushort(__float2half_rn(__fmul_rn(root, half_cell(BITS))));
    const int nearest = min(max((guess + 63 + (guess >> 7 & 1)) >> 7, 1u), HIGHEST_STEP);
    u32 byte = 0;
    float least = 0.f;
#pragma unroll AT_ONCE
    for (int i = -2; i <= 2; ++i) {
        const u32 candidate = min(max(nearest + i, 1), (int)HIGHEST_STEP);
        const float step = step_value(candidate), cell = step + step, reciprocal = __frcp_rn(cell);
        float error[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const float d = __fsub_rn(x[j], grid_value<BITS>(grid_code<BITS>(x[j], cell, reciprocal), step));
            const bool there = HEAD_DIM % 32 == 0 || lane + 32 * j < HEAD_DIM;
            error[j] = there ? __fmul_rn(d, d) : 0.f;
        }
        const float sum = tree_sum(error);
        if (i == -2 || sum < least) least = sum, byte = candidate;
    }
    byte = root == 0.f ? 0 : byte;
    return __all_sync(ALL_LANES, finite) ? byte : NAN_STEP;
}

// ---- Where codes lie

enum Side { KEYS, VALUES };

// Of a channel of a slot: its tile, its lane and register there, and which half of the register.
struct Element {
    int tile, lane, reg, half;
};

template <Side SIDE>
__device__ __forceinline__ Element element_at(int slot, int channel) {
    const int block = slot % 8 / 2, token = slot / 8 + 8 * (slot % 2);
    const int tile = SIDE == KEYS ? block * (HEAD_DIM / 16) + channel / 16 : channel / 16 * 4 + block;
    const int row = SIDE == KEYS ? token : channel % 16, column = SIDE == KEYS ? channel % 16 : token;
    return {tile, 4 * (row % 8) + column % 8 / 2, row / 8 + 2 * (column / 8), column % 2};
}

// Of a code below 8 bits: its word, its lowest bit there, and whether bit j of it lies in word j instead.
struct Field {
    int word, shift;
    bool spread;
};

template <int BITS>
__device__ __forceinline__ Field field_of(const Element& e) {
    constexpr int TILES = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS, PER_WORD = 16 / BITS;
    const int pair = 4 * (e.tile % TILES) + e.reg, first = e.tile / TILES * WORDS;
    const bool spread = BITS == 3 && pair == 15;
    const int word = spread ? first : first + pair / PER_WORD;
    const int bit = spread ? 0 : pair % PER_WORD * BITS + (BITS == 3);
    return {32 * word + e.lane, bit + 16 * e.half, spread};
}

// Byte of a code of 8 bits, or the first one of 16.
template <int BITS>
__device__ __forceinline__ int byte_of(const Element& e) {
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

// ---- Vectors

// Encodes a rotated vector into a slot.
template <Side SIDE, int BITS>
__device__ __forceinline__ void encode_vector(const float (&x)[PER_LANE], u8* codes, u8* steps, int slot,
                                              int lane) {
    const u32 byte = choose_step<BITS>(x, lane);
    const float step = step_value(byte), cell = step + step, reciprocal = __frcp_rn(cell);
    const bool usual = byte > 0 && byte <= HIGHEST_STEP;
    if (lane == 0) steps[slot] = (u8)byte;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int channel = lane + 32 * j;
        if (HEAD_DIM % 32 && channel >= HEAD_DIM) break;
        const u32 code = usual ? (u32)grid_code<BITS>(x[j], cell, reciprocal) : 1u << (BITS - 1);
        write_code<BITS>(codes, element_at<SIDE>(slot, channel), code);
    }
}

// The codes of a slot: integers below 2^BITS, or the 16 bits of raw elements.
template <Side SIDE, int BITS>
__device__ __forceinline__ void read_codes(const u8* codes, int slot, int lane, u32 (&code)[PER_LANE]) {
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int channel = lane + 32 * j;
        const bool there = HEAD_DIM % 32 == 0 || channel < HEAD_DIM;
        code[j] = there ? read_code<BITS>(codes, element_at<SIDE>(slot, channel)) : 0;
    }
}

template <Side SIDE, int BITS>
__device__ __forceinline__ void write_codes(u8* codes, int slot, int lane, const u32 (&code)[PER_LANE]) {
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int channel = lane + 32 * j;
        if (HEAD_DIM % 32 && channel >= HEAD_DIM) break;
        write_code<BITS>(codes, element_at<SIDE>(slot, channel), code[j]);
    }
}

// The same for a width that is known at run time.
template <Side SIDE>
__device__ __forceinline__ void encode_vector(int bits, const float (&x)[PER_LANE], u8* codes, u8* steps,
                                              int slot, int lane) {
    switch (bits) {
        case 2:
            return encode_vector<SIDE, 2>(x, codes, steps, slot, lane);
        case 3:
            return encode_vector<SIDE, 3>(x, codes, steps, slot, lane);
        case 4:
            return encode_vector<SIDE, 4>(x, codes, steps, slot, lane);
        case 8:
            return encode_vector<SIDE, 8>(x, codes, steps, slot, lane);
    }
}

template <Side SIDE>
__device__ __forceinline__ void read_codes(int bits, const u8* codes, int slot, int lane,
                                           u32 (&code)[PER_LANE]) {
    switch (bits) {
        case 2:
            return read_codes<SIDE, 2>(codes, slot, lane, code);
        case 3:
            return read_codes<SIDE, 3>(codes, slot, lane, code);
        case 4:
            return read_codes<SIDE, 4>(codes, slot, lane, code);
        case 8:
            return read_codes<SIDE, 8>(codes, slot, lane, code);
        case 16:
            return read_codes<SIDE, 16>(codes, slot, lane, code);
    }
}

template <Side SIDE>
__device__ __forceinline__ void write_codes(int bits, u8* codes, int slot, int lane,
                                            const u32 (&code)[PER_LANE]) {
    switch (bits) {
        case 2:
            return write_codes<SIDE, 2>(codes, slot, lane, code);
        case 3:
            return write_codes<SIDE, 3>(codes, slot, lane, code);
        case 4:
            return write_codes<SIDE, 4>(codes, slot, lane, code);
        case 8:
            return write_codes<SIDE, 8>(codes, slot, lane, code);
        case 16:
            return write_codes<SIDE, 16>(codes, slot, lane, code);
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
