// Ternary values, five to a byte: the number d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4 of digits d = value + 1.
#pragma once
#include "bit_stream.cuh"

constexpr u32 LAST_TERNARY_BYTE = 242;

// Values -1, 0, 1, one a byte, to digits 0, 1, 2. A carry out of another value reaches only a neighbour.
__device__ __forceinline__ u32 digits_of_values(u32 values) {
    return (values ^ 0x80808080u) + 0x01010101u ^ 0x80808080u;
}

__device__ __forceinline__ u32 values_of_digits(u32 digits) {
    return digits + 0x7f7f7f7fu ^ 0x80808080u;
}

// Not 0 if one of four bytes is none of 0, 1, 2.
__device__ __forceinline__ u32 wrong_digits(u32 digits) {
    return (digits & 0xfcfcfcfcu) | (digits & digits >> 1 & 0x01010101u);
}

// Five digits, four in `four`, as a byte.
__device__ __forceinline__ u32 ternary_byte(u32 four, u32 fifth) {
    return __dp4a(four, 0x1b090301u, 81 * fifth);
}

// The five digits of a byte up to 242: four in `four`, the last as the result. Quotients by 3, 9, 27 and 81
// as products that are exact up to 242.
__device__ __forceinline__ u32 ternary_digits(u32 byte, u32& four) {
    const u32 q1 = byte * 171 >> 9, q2 = byte * 57 >> 9, q3 = byte * 19 >> 9, q4 = byte * 203 >> 14;
    four = byte + q1 * ((1u << 8) - 3) + q2 * ((1u << 16) - (3u << 8)) + q3 * ((1u << 24) - (3u << 16)) -
           q4 * (3u << 24);
    return q4;
}

// 20 digits in 5 words to 4 bytes, and back.
__device__ __forceinline__ u32 bytes_of_20(const u32 (&w)[5]) {
    return ternary_byte(w[0], w[1] & 0xff) |
           ternary_byte(__funnelshift_r(w[1], w[2], 8), w[2] >> 8 & 0xff) << 8 |
           ternary_byte(__funnelshift_r(w[2], w[3], 16), w[3] >> 16 & 0xff) << 16 |
           ternary_byte(__funnelshift_r(w[3], w[4], 24), w[4] >> 24) << 24;
}

__device__ __forceinline__ void digits_of_4(u32 bytes, u32 (&w)[5]) {
    u32 four[4], fifth[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) fifth[i] = ternary_digits(bytes >> 8 * i & 0xff, four[i]);
    w[0] = four[0];
    w[1] = fifth[0] | four[1] << 8;
    w[2] = four[1] >> 24 | fifth[1] << 8 | four[2] << 16;
    w[3] = four[2] >> 16 | fifth[2] << 16 | four[3] << 24;
    w[4] = four[3] >> 8 | fifth[3] << 24;
}

// Whether one of four bytes is above 242.
__device__ __forceinline__ bool above_last(u32 bytes) {
    const u32 excess = (bytes & 0x7f7f7f7fu) + 0x0d0d0d0du;  // from 243 on bit 7 is set, here and in the byte
    return bytes & excess & 0x80808080u;
}

// x * inverse_of(y) >> 20 is x / y for x up to 2,000, which a tile has at most, and y up to 400.
__device__ __forceinline__ u32 inverse_of(int y) {
    return ((1 << 20) + y - 1) / y;
}

// Copies bytes that begin on a multiple of 4 in shared memory, and perhaps in global memory.
template <bool TO_GLOBAL>
__device__ __forceinline__ void copy_bytes(u8* shared, u8* global, int count, int lane) {
    const int words = (u64)global % 4 == 0 ? count / 4 : 0;
    for (int i = lane; i < words; i += 32) {
        if (TO_GLOBAL) ((u32*)global)[i] = ((const u32*)shared)[i];
        if (!TO_GLOBAL) ((u32*)shared)[i] = ((const u32*)global)[i];
    }
    for (int i = 4 * words + lane; i < count; i += 32) {
        if (TO_GLOBAL) global[i] = shared[i];
        if (!TO_GLOBAL) shared[i] = global[i];
    }
}

// Four bytes at any place of shared memory; those behind them up to the next word are touched.
__device__ __forceinline__ u32 word_at(const u8* shared, int at) {
    const u32* words = (const u32*)shared + at / 4;
    return __funnelshift_r(words[0], words[1], 8 * (at % 4));
}

// A tile of ternary digits, one a byte, and its bytes: `rows` rows of n digits and (n + 4) / 5 bytes. A lane
// takes four bytes of a row and their 20 digits. WHOLE: n is a multiple of 4, so these are whole words, and
// digits stand in the order of `place`.
template <bool WHOLE, int SHIFT = 7>
struct TernaryTile {
    u8 *digits, *bytes;  // in shared memory, with a word to spare behind them
    int rows, n;

    // Packs the digits, which the lanes of this warp have written, to global memory.
    __device__ __forceinline__ void store(u8* packed, int lane) const {
        const int row_bytes = (n + 4) / 5, parts = (row_bytes + 3) / 4;
        const u32 inverse = inverse_of(parts);
        __syncwarp();  // the digits of all lanes are there
        for (int i = lane; i < rows * parts; i += 32) {
            const int row = i * inverse >> 20, part = i - row * parts;
            const int at = row * n + 20 * part, left = n - 20 * part;
            u32 words[5];
#pragma unroll
            for (int k = 0; k < 5; ++k) {
                const u32 word = 4 * k < left ? !WHOLE ? word_at(digits, at + 4 * k)
                                                       : *(const u32*)(digits + place<SHIFT>(at + 4 * k))
                                              : 0;
                const int beyond = 4 * k + 4 - left;  // digits of the next row
                words[k] = beyond > 0 && beyond < 4 ? word & 0xffffffffu >> 8 * beyond : word;
            }
            const u32 found = bytes_of_20(words);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (5 * k < left) bytes[row * row_bytes + 4 * part + k] = (u8)(found >> 8 * k);
            }
        }
        __syncwarp();  // the bytes of all lanes are there
        copy_bytes<true>(bytes, packed, rows * row_bytes, lane);
    }

    // The reverse; afterwards every lane may read all digits. Returns whether a byte is above 242.
    __device__ __forceinline__ bool load(const u8* packed, int lane) const {
        const int row_bytes = (n + 4) / 5, parts = (row_bytes + 3) / 4;
        const u32 inverse = inverse_of(parts);
        bool wrong = false;
        copy_bytes<false>(bytes, (u8*)packed, rows * row_bytes, lane);
        __syncwarp();  // the bytes of all lanes are there
        for (int i = lane; i < rows * parts; i += 32) {
            const int row = i * inverse >> 20, part = i - row * parts;
            const int at = row * n + 20 * part, left = n - 20 * part, here = row_bytes - 4 * part;
            u32 found = word_at(bytes, row * row_bytes + 4 * part), words[5];
            if (here < 4) found &= 0xffffffffu >> 8 * (4 - here);
            wrong |= above_last(found);
            digits_of_4(found, words);
            if constexpr (WHOLE) {
#pragma unroll
                for (int k = 0; k < 5; ++k) {
                    if (4 * k < left) *(u32*)(digits + place<SHIFT>(at + 4 * k)) = words[k];
                }
            } else {
#pragma unroll
                for (int k = 0; k < 20; ++k) {
                    if (k < left) digits[at + k] = (u8)(words[k / 4] >> 8 * (k % 4));
                }
            }
        }
        __syncwarp();  // the digits of all lanes are there
        return wrong;
    }
};
