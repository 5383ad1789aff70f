// Codes of packed pages as operands of mma.m16n8k16: 16-bit pairs, expansion of every width, steps.
//
// A code region is a sequence of 16 x 16 tiles in the order of A fragments. Fields<BITS>::TILES tiles share
// Fields<BITS>::WORDS 32-bit words a lane, word after word, 32 lanes each; every word holds fields of both
// halves of its pairs, so one logical operation with a magic exponent makes a pair of 16-bit numbers of them.
// Needs the macro BF16: whether the 16-bit type is bfloat16 or float16.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#if BF16
#define KVLAB_PAIR "bf16"
#else
#define KVLAB_PAIR "f16"
#endif

constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KVLAB_PAIR "." KVLAB_PAIR
        ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transposed(u32 x) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

__device__ __forceinline__ float power_of_2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 fma_pair(u32 x, u32 factor, u32 addend) {
    u32 r;
    asm("fma.rn." KVLAB_PAIR "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(factor), "r"(addend));
    return r;
}

__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 r;
    asm("cvt.rn." KVLAB_PAIR "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float half_bits_to_float(u32 bits) {
    float f;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
    return f;
}

__device__ __forceinline__ float2 unpack_pair(u32 x) {
#if BF16
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
#else
    return {half_bits_to_float(x & 0xffffu), half_bits_to_float(x >> 16)};
#endif
}

// Both halves hold x, which must be representable in the 16-bit type and not 0.
__host__ __device__ constexpr u32 both(float x) {
    const u32 sign = x < 0.f ? 0x8000u : 0u;
    float rest = x < 0.f ? -x : x;
    int exponent = 0;
    for (; rest >= 2.f; ++exponent) rest *= .5f;
    for (; rest < 1.f; --exponent) rest *= 2.f;
    return (sign | (BF16 ? ((u32)(exponent + 127) << 7) + (u32)((rest - 1.f) * 128.f)
                         : ((u32)(exponent + 15) << 10) + (u32)((rest - 1.f) * 1024.f))) *
           0x00010001u;
}

template <int BITS>
struct Fields {
    static constexpr int TILES = BITS == 2 ? 2 : BITS == 3 ? 4 : 1;  // that share words
    static constexpr int WORDS = BITS == 2 ? 1 : BITS * TILES / 4;   // of a lane for these tiles
    // Bits at which the two registers of a pair of rows stand when expanded without an addition.
    static constexpr int LOW = BITS == 3, HIGH = BITS == 2 ? 2 : BITS == 3 ? 4 : 0;
};

// The fields at bit OFFSET of both halves under the exponent whose last mantissa bit is 1: MAGIC + 2^OFFSET
// code.
constexpr float MAGIC = BF16 ? 128.f : 1024.f;
template <int BITS, int OFFSET>
__device__ __forceinline__ u32 raised(u32 x) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;"  // (x & mask) | magic
        : "=r"(r)
        : "r"(x), "n"((((1u << BITS) - 1u) << OFFSET) * 0x00010001u), "n"(BF16 ? 0x43004300u : 0x64006400u));
    return r;
}

// The same fields as the odd integers 2 code + 1 - 2^BITS, exact.
template <int BITS, int OFFSET>
__device__ __forceinline__ u32 centred(u32 x) {
    constexpr float FACTOR = 2.f / (1 << OFFSET);
    constexpr u32 factor = both(FACTOR), addend = both(-MAGIC * FACTOR - (float)((1 << BITS) - 1));
    return fma_pair(raised<BITS, OFFSET>(x), factor, addend);
}

// A fragments of the tiles that share `w`. RAISED: MAGIC + 2^LOW code in even and MAGIC + 2^HIGH code in odd
// registers; else centred. Pair p = 4 tile + register.
template <int BITS, bool RAISED>
__device__ __forceinline__ void expand(const u32* w, u32 (&a)[Fields<BITS>::TILES][4]) {
    constexpr int L = Fields<BITS>::LOW, H = Fields<BITS>::HIGH;
    if constexpr (BITS == 2 && RAISED) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i / 2][2 * (i % 2)] = raised<2, L>(w[0] >> (4 * i));
            a[i / 2][2 * (i % 2) + 1] = raised<2, H>(w[0] >> (4 * i));
        }
    } else if constexpr (BITS == 2) {
        const u32 x = w[0] << 1, y = w[0] >> 5, z = w[0] >> 11;
        a[0][0] = centred<2, 1>(x), a[0][1] = centred<2, 3>(x), a[0][2] = centred<2, 5>(x);
        a[0][3] = centred<2, 1>(y), a[1][0] = centred<2, 3>(y), a[1][1] = centred<2, 5>(y);
        a[1][2] = centred<2, 1>(z), a[1][3] = centred<2, 3>(z);
    } else if constexpr (BITS == 3) {
        constexpr u32 ONE = 0x00010001u;
        const u32 last = RAISED ? (w[0] & ONE) << 4 | (w[1] & ONE) << 5 | (w[2] & ONE) << 6
                                : (w[0] & ONE) << 1 | (w[1] & ONE) << 2 | (w[2] & ONE) << 3;
#pragma unroll
        for (int p = 0; p < 15; ++p) {
            const int from = 1 + 3 * (p % 5);  // the bit where the field stands
            u32& to = a[p / 4][p % 4];
            if constexpr (RAISED) {
                const int at = p % 2 ? H : L;
                const u32 x = from < at ? w[p / 5] << (at - from) : w[p / 5] >> (from - at);
                to = p % 2 ? raised<3, H>(x) : raised<3, L>(x);
            } else {
                const u32 x = w[p / 5] >> (p % 5 / 2 * 6);
                to = p % 5 % 2 ? centred<3, 4>(x) : centred<3, 1>(x);
            }
        }
        a[3][3] = RAISED ? raised<3, H>(last) : centred<3, 1>(last);
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int p = 0; p < 4; ++p)
            a[0][p] = RAISED ? raised<4, L>(w[0] >> (4 * p))
                             : centred<4, 1>(p == 0 ? w[0] << 1 : w[0] >> (4 * p - 1));
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const u32 x = w[p / 2];
            if constexpr (BF16) {  // 2 c - 255 = 16 (2 high - 15) + (2 low - 15), every step exact
                const u32 low = raised<4, 1>(p % 2 ? x >> 7 : x << 1),
                          high = raised<4, 1>(p % 2 ? x >> 11 : x >> 3);
                constexpr u32 one = both(1.f), sixteen = both(16.f), minus = both(-143.f);
                a[0][p] = fma_pair(fma_pair(high, one, minus), sixteen, fma_pair(low, one, minus));
            } else {
                a[0][p] = centred<8, 1>(p % 2 ? x >> 7 : x << 1);
            }
        }
    } else {
#pragma unroll
        for (int p = 0; p < 4; ++p) a[0][p] = w[p];
    }
}

// Tiles FIRST to FIRST + COUNT - 1 of a region, of which `codes` is the part from tile FIRST on: f(tile,
// fragment), the groups of tiles that share words in the order order(0), order(1), ...
template <int BITS, bool RAISED, int FIRST, int COUNT, class Order, class F>
__device__ __forceinline__ void for_each_tile(const u8* codes, int lane, Order order, F f) {
    constexpr int TILES = Fields<BITS>::TILES, WORDS = Fields<BITS>::WORDS;
#pragma unroll
    for (int i = 0; i < COUNT / TILES; ++i) {
        const int group = order(i);
        u32 w[WORDS], a[TILES][4];
#pragma unroll
        for (int v = 0; v < WORDS; ++v) w[v] = ((const u32*)codes)[(group * WORDS + v) * 32 + lane];
        expand<BITS, RAISED>(w, a);
#pragma unroll
        for (int j = 0; j < TILES; ++j) f(FIRST + group * TILES + j, a[j]);
    }
}

// Steps of slots 8 g to 8 g + 7: one byte each, a float16 without sign and without its lower 7 mantissa bits.
__device__ __forceinline__ void load_steps(const u8* steps, int g, float (&step)[8]) {
    const uint2 x = ((const uint2*)steps)[g];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 w = i ? x.y : x.x, even = (w & 0x00ff00ffu) << 7, odd = (w >> 1) & 0x7f807f80u;
        step[4 * i] = half_bits_to_float(even & 0xffffu), step[4 * i + 2] = half_bits_to_float(even >> 16);
        step[4 * i + 1] = half_bits_to_float(odd & 0xffffu), step[4 * i + 3] = half_bits_to_float(odd >> 16);
    }
}
