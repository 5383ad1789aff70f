// Sixteen raw vectors of a side of a page into rotated ones, a warp, bit for bit as kvlab/reference/pages.py.
//
// Numbers are whole and no sum is more than 2^24, so sums are exact in any order and tensor cores may take
// them: the rotation is a product with a matrix of signs. An integer n is a subnormal number of the
// type of the cache, n 2^-24 or n 2^-133: to round to integers is to multiply by a power of 2, two numbers an
// instruction, and tensor cores take such numbers at full speed. Behind them a number counts 2^-26.
//
// Threads and data
//   lane  4 g + u: rows g and g + 8 (`Two`) of the sixteen; of every 16 channels from 16 t on, 2 u and the
//         next of both rows in x[t][0] and x[t][1], channels 8 further on in x[t][2] and x[t][3]. That is
//         both the first operand and the result of m16n8k16, and of a key's tile the pairs in their order.
//         Values of a whole row are computed once: lanes of even u have those of row g, odd u of row g + 8.
// Memory: registers HEAD_DIM / 4 for the vectors, and as many again while they are rotated.
//
// Raw rows lie in shared memory as RawRows says.
#pragma once

#include "common/async_copies.cuh"
#include "common/half_pairs.cuh"
#include "pages/scales.cuh"
#if IN_BLOCKS
#include "pages/order.cuh"
#endif

constexpr int TILES = HEAD_DIM / 16;
constexpr u32 SIGN =
    BF16 ? 0x7500 : 0x3400;  // 2^107 or 2^-2, what signs are multiplied by: results count 2^-26

using Vectors = u32[TILES][4];

// Of rows g and g + 8.
template <class T>
struct Two {
    T low, high;
};

// What both rows of a lane have, from what lanes hold of the row that is theirs.
__device__ __forceinline__ Two<u32> of_both(u32 mine) {
    return {__shfl_sync(ALL_LANES, mine, 0, 2), __shfl_sync(ALL_LANES, mine, 1, 2)};
}

// The larger of the first and the size of the second of two pairs of raw elements. Compared as float16 even
// if they are bfloat16: the order is the same up to 2^121, and what is above is NaN.
__device__ __forceinline__ u32 larger_raw(u32 x, u32 y) {
    u32 r;
    asm("{.reg .b32 size; abs.f16x2 size, %2; max.NaN.f16x2 %0, %1, size;}" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// Two elements of the type of the cache times two.
__device__ __forceinline__ u32 raw_product(u32 x, u32 y) {
    u32 r;
    asm("fma.rn." KVLAB_PAIR "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(0x80008000u));
    return r;
}

// The bits of 2^exponent in the type of the cache; its exponents are at least -24, or -133.
__device__ __forceinline__ u32 raw_power(int exponent) {
#if BF16
    return __float_as_uint(power_of_two(exponent + 33) * power_of_two(-33)) >> 16;
#else
    return half_of(power_of_two(exponent));
#endif
}

// Raw rows in shared memory: BYTES apart, so that neither copies of rows nor ldmatrix meet in banks.
// SWIZZLED: they begin at multiples of 128 bytes, and the 16 bytes of eight channels are exchanged; 32 bytes
// of a row stay together, or a copy would ask for them twice.
template <bool SWIZZLED>
struct RawRows {
    static constexpr bool IS_SWIZZLED = SWIZZLED;
    static constexpr int BYTES = SWIZZLED ? (2 * HEAD_DIM + 127) / 128 * 128 : 2 * HEAD_DIM + 16;

    // Where a channel of a row lies.
    __device__ __forceinline__ static u32 at(u32 row, u32 channel) {
        return row * BYTES + (2 * channel ^ (SWIZZLED ? 16 * (row % 8) : 0));
    }
};

// Integers from raw rows, and what is known of them.
struct Loaded {
    Two<u32> rows;  // of rows g and g + 8: the exponent of the unit in the upper halves
    float factor;   // of the rotated numbers of this lane's row
    bool finite;    // it has no NaN, nothing infinite or beyond what counts as that
    bool decoded;   // it comes from codes
};

// The frame of the keys of a bh: what they are scaled down by, and their mean, scaled and rotated.
struct Frame {
    alignas(16) float sums[HEAD_DIM];  // of the mean, times 2^exponent, counting 2^-26
    alignas(16) u8 shifts[HEAD_DIM];   // binary orders
    float largest;                     // of the mean
    int exponent;
    bool is_scaled;  // whether any channel is scaled
#if IN_BLOCKS        // sums and shifts are by position
    Order order;
    alignas(16) float gain[KEY_BLOCKS];
    u32 mantissas[KEY_BLOCKS];  // of gains
#endif
};

// Asks for a table of rotary pairs of a head, a byte each: for all channels, or all positions of their order.
template <bool IN_ORDER>
__device__ __forceinline__ void ask_for_pairs(u8* to, const u8* table, u32 bh, u32 lane) {
    const int position = 8 * (int)lane,
              pair = IN_ORDER ? pair_of_position(position) : position % (HEAD_DIM / 2);
    if (lane < HEAD_DIM / 8) copy_half_async(to + position, table + (u64)bh * (HEAD_DIM / 2) + pair);
}

// A number of 11 significant bits as float16 in both halves, its exponent modulo 64.
__device__ __forceinline__ u32 mantissa_of(float x) {
    return twice((__float_as_uint(x) >> 13) - (112u << 10));
}

// Scales channels down, as the frame says; numbers of float16 that become subnormal are rounded.
__device__ __forceinline__ void scale_channels(Vectors& x, const Frame& frame, u32 lane) {
    constexpr u32 ONE = BF16 ? 0x3f803f80u : 0x3c003c00u;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 two = *(const u16*)(frame.shifts + 16 * t + 8 * half + 2 * (lane % 4));
            const u32 power = ONE - (__byte_perm(two, 0, 0x4140) << (BF16 ? 7 : 10));
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) x[t][i] = raw_product(x[t][i], power);
        }
}

// Signs of values of channels 2 u, 2 u + 1 of a tile, and of those 8 further on, but for what the tile's own
// bits say: 1 in the highest bit of halves that turn.
__device__ __forceinline__ Two<u32> value_signs(u32 lane) {
    const u32 second = lane << 31;  // channel 2 u + 1 where u is odd
    return {second, lane & 2 ? second ^ 0x80008000u : second};
}

// Gives values those signs that `Signs` lacks: of the tiles where bits 2 and 3 turn them twice.
__device__ __forceinline__ void turn_signs(Vectors& x, u32 lane) {
    const u32 turned = lane & 2 ? 0x80008000u : 0;
#pragma unroll
    for (int t = 7; t < TILES; t += 8) x[t][2] ^= turned, x[t][3] ^= turned;
}

// Loads vectors: keys into their frame, if there is one, and values, which have none. What counts as the
// largest element of a row if no other is larger is that of the mean. Vectors are divided by 2^down on the
// way, and in ladders with profiles turned rows of keys remain.
template <class Rows>
__device__ __forceinline__ Loaded load_raw(u8* rows, const Frame* frame, int down, Vectors& x, u32 lane) {
    constexpr int MIN_UNIT =
        BF16 ? -200 : -39;  // exponents of units from which on one product makes integers
    const u32 from = shared_address(rows) + Rows::at(lane % 16, lane / 16 * 8);
    const u32 u = lane % 4;
    u32 most[2] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t)
        load_matrices(x[t], Rows::IS_SWIZZLED ? (from ^ 32 * (t % 4)) + t / 4 * 128 : from + 32 * t);
#if IN_BLOCKS
    if (frame) put_in_order(rows, frame->order, x, lane);
#endif
    if (frame && frame->is_scaled) scale_channels(x, *frame, lane);
    if (HEAD_DIM >= 128 && !frame) turn_signs(x, lane);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) most[i % 2] = larger_raw(most[i % 2], x[t][i]);
    u32 both = larger_raw(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
#pragma unroll
    for (int h = 1; h <= 2; h *= 2) both = larger_raw(both, __shfl_xor_sync(ALL_LANES, both, h));
    const float2 magnitudes = unpack_pair(both);
    // Divided by 2^down, which may be a number below all normal ones.
    const float by = __uint_as_float(max((127 - down) << 23, 1 << 22)),
                size = (u % 2 ? magnitudes.y : magnitudes.x) * by;
    const int log = frame ? LOG_KEYS : LOG_BLOCK;
    const float root = IN_BLOCKS && frame ? 1.f : FACTOR;
    const bool finite = size < power_of_two(TOO_LARGE);
    const int exponent = rotation_exponent(fmaxf(finite ? size : 0.f, frame ? frame->largest : 0.f), log);
    const int unit = exponent + down;  // of the raw elements
    const Two<u32> found =
        of_both(raw_power((BF16 ? -133 : -24) - max(min(unit, 0), MIN_UNIT)) | (u32)exponent << 16);
    const u32 scale[2] = {twice(found.low), twice(found.high)};
    if (!__all_sync(ALL_LANES, finite && unit <= 0 && unit >= MIN_UNIT)) {
        const int first = min(max(MIN_UNIT - unit, 0), 15) - max(unit, 0);
        const Two<u32> factors = of_both(finite ? raw_power(first) : 0x8000u);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 down = i % 2 ? factors.high : factors.low;
                x[t][i] = down == 0x8000u ? 0 : raw_product(x[t][i], twice(down));
            }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[t][i] = raw_product(x[t][i], scale[i % 2]);
    return {found, finite ? root * power_of_two(exponent + 2 - (log + 1) / 2) : 0.f, finite, false};
}

// Completes a frame that has its shifts, a warp: scales and rotates a mean of float16, which may lie where
// the sums go. Where keys are kept in blocks, the pairs of positions lie at the beginning of the order, a
// byte each, and all becomes by position.
__device__ __forceinline__ void complete_frame(const __half* mean, Frame& to, u32 lane) {
    constexpr int PER_LANE = (HEAD_DIM + 31) / 32;
    float x[PER_LANE], most = 0.f;
    u32 shifts = 0;
#if IN_BLOCKS
    u8 channels[PER_LANE], own_shifts[PER_LANE];
#endif
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int position = lane + 32 * j;
        const bool there = HEAD_DIM % 32 == 0 || position < HEAD_DIM;
#if IN_BLOCKS
        const int channel = channel_of_position(((const u8*)&to.order)[position], position);
        channels[j] = (u8)channel, own_shifts[j] = to.shifts[channel];
#else
        const int channel = position;
#endif
        const u32 shift = there ? to.shifts[channel] : 0;
        x[j] = there ? __half2float(mean[channel]) * power_of_two(-(int)shift) : 0.f;
        shifts |= shift;
        most = fmaxf(most, fabsf(x[j]));
    }
    most = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(most)));
    const int exponent = rotation_exponent(most, LOG_KEYS);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = rintf(x[j] * power_of_two(-exponent));
#pragma unroll
    for (int h = 1; h < KEY_ROTATION; h *= 2)
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            if (h < 32) {
                const float other = __shfl_xor_sync(ALL_LANES, x[j], h);
                x[j] = lane & h ? other - x[j] : x[j] + other;
            } else if (!(j & h / 32)) {
                const float a = x[j], b = x[j + h / 32];
                x[j] = a + b, x[j + h / 32] = a - b;
            }
        }
    __syncwarp();  // all lanes have read the mean
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
        if (HEAD_DIM % 32 == 0 || lane + 32 * j < HEAD_DIM) to.sums[lane + 32 * j] = x[j] * power_of_two(-26);
#if IN_BLOCKS
    if (lane < KEY_BLOCKS) to.mantissas[lane] = mantissa_of(to.gain[lane]);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        to.shifts[lane + 32 * j] = own_shifts[j];
        to.order.put(lane + 32 * j, channels[j]);
    }
#endif
    const bool is_scaled = __any_sync(ALL_LANES, shifts != 0);
    if (lane == 0) to.largest = most, to.exponent = exponent, to.is_scaled = is_scaled;
}

// Takes the mean off four sums of tile t, columns 8 half + 2 u and the next of rows g and g + 8.
__device__ __forceinline__ void take_mean_off(float* sums, const Frame& mean, const float (&less)[2], int t,
                                              int half, u32 lane) {
    const float2 m = *(const float2*)(mean.sums + 16 * t + 8 * half + 2 * (lane % 4));
    sums[0] = fmaf(m.x, less[0], sums[0]), sums[1] = fmaf(m.y, less[0], sums[1]);
    sums[2] = fmaf(m.x, less[1], sums[2]), sums[3] = fmaf(m.y, less[1], sums[3]);
}

// What a rotated mean is multiplied by before it is added to sums.
__device__ __forceinline__ void scale_of_mean(const Frame& mean, const Loaded& loaded, float (&less)[2]) {
    less[0] = -power_of_two(mean.exponent - ((int)loaded.rows.low >> 16));
    less[1] = -power_of_two(mean.exponent - ((int)loaded.rows.high >> 16));
}

// What a lane multiplies by: signs of rows 2 u, 2 u + 1 and of column g in the first register of pair 0;
// those of other rows and columns are the same or their opposites, which makes four pairs.
struct alignas(16) Signs {
    u32 pair[4][2];

    // Of values times theirs.
    __device__ __forceinline__ static Signs of(u32 lane, bool of_values) {
        const u32 g = lane / 4, u = lane % 4;
        const u32 even = (u32)__popc(2 * u & g) << 15, odd = (u32)__popc((2 * u + 1) & g) << 31;
        const u32 all = SIGN * 0x10001u ^ (even & 0x8000u) ^ odd, turned = 0x80008000u;
        const Two<u32> own = value_signs(lane);
        const u32 a = of_values ? all ^ own.low : all, b = of_values ? all ^ own.high : all;
        return {{{a, b}, {a, b ^ turned}, {a ^ turned, b ^ turned}, {a ^ turned, b}}};
    }
};

// The Hadamard transform of integers in blocks of BLOCK channels, less that of the mean, rounded to 11
// significant bits; AT_ONCE channels at a time, whole blocks. `signs` are those of keys, or of values.
template <int BLOCK, int AT_ONCE, bool OF_VALUES>
__device__ __forceinline__ void rotate_blocks(Vectors& x, const Signs& signs, const Frame* mean,
                                              const Loaded& loaded, u32 lane) {
    constexpr int SPAN = BLOCK < 32 ? BLOCK : 32;  // channels that one matrix of signs rotates
    constexpr int SPANS = AT_ONCE / SPAN, OF_SPAN = SPAN / 16;
    float less[2] = {};
    if (mean) scale_of_mean(*mean, loaded, less);
#pragma unroll
    for (int first = 0; first < TILES; first += AT_ONCE / 16) {
        u32 z[AT_ONCE / 16][4];
#pragma unroll
        for (int n = 0; n < SPAN / 8; ++n) {  // columns 8 n to 8 n + 7
            float sums[SPANS][4] = {};
#pragma unroll
            for (int s = 0; s < SPANS; ++s)
#pragma unroll
                for (int i = 0; i < OF_SPAN; ++i) {
                    const bool turned = OF_VALUES && turns_sign(16 * (first + s * OF_SPAN + i));
                    const int sign = (__popc(i & n / 2) + turned) & 1;
                    mma(sums[s], x[first + s * OF_SPAN + i], signs.pair[2 * sign + n % 2][0],
                        signs.pair[2 * sign + n % 2][1]);
                }
#pragma unroll
            for (int h = 1; h * SPAN < BLOCK; h *= 2)
#pragma unroll
                for (int s = 0; s < SPANS; ++s)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (s & h) continue;
                        const float a = sums[s][i], b = sums[s + h][i];
                        sums[s][i] = a + b, sums[s + h][i] = a - b;
                    }
#pragma unroll
            for (int s = 0; s < SPANS; ++s) {
                const int t = s * OF_SPAN + n / 2;
                if (mean) take_mean_off(sums[s], *mean, less, first + t, n % 2, lane);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    z[t][n % 2 * 2 + i] = pack_halves(sums[s][2 * i], sums[s][2 * i + 1]);
            }
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE / 16; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[first + t][i] = z[t][i];
    }
}

// Rotates keys, which have a mean, or values.
__device__ __forceinline__ void rotate_integers(Vectors& x, const Signs& signs, const Frame* mean,
                                                const Loaded& loaded, u32 lane) {
    constexpr int AT_ONCE = IN_BLOCKS ? HEAD_DIM / KEY_BLOCKS : HEAD_DIM;
    if (mean)
        rotate_blocks<KEY_ROTATION, AT_ONCE, false>(x, signs, mean, loaded, lane);
    else
        rotate_blocks<ROTATION_BLOCK, HEAD_DIM, true>(x, signs, nullptr, loaded, lane);
}
