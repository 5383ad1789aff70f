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

// The byte of the first `count` (up to 5) of five digits, given as four and one.
__device__ __forceinline__ u32 ternary_byte(u32 four, u32 fifth, int count) {
    if (count < 4) four &= (1u << 8 * count) - 1;
    if (count < 5) fifth = 0;
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

// x * inverse_of(y) >> 20 is x / y for x and y up to 400: a tile has no more bytes.
__device__ __forceinline__ u32 inverse_of(int y) {
    return ((1 << 20) + y - 1) / y;
}

// Packs `rows` rows of n digits, one a byte, from shared memory; `packed` has (n + 4) / 5 bytes a row.
__device__ __forceinline__ void store_ternary_rows(const u8* digits, int rows, int n, u8* packed, int lane) {
    const int row_bytes = (n + 4) / 5;
    const u32 inverse = inverse_of(row_bytes);
    __syncwarp();  // the digits of all lanes are there
    for (int i = lane; i < rows * row_bytes; i += 32) {
        const int row = i * inverse >> 20, first = 5 * (i - row * row_bytes), at = row * n + first;
        const u32* words = (const u32*)digits + at / 4;
        const u32 next = words[1];  // rows end before the end of the tile's memory
        const u32 four = __funnelshift_r(words[0], next, 8 * (at % 4));
        packed[i] = (u8)ternary_byte(four, next >> 8 * (at % 4) & 0xff, min(5, n - first));
    }
}

// The reverse; afterwards every lane may read all digits. Returns whether a byte is above 242.
__device__ __forceinline__ bool load_ternary_rows(const u8* packed, int rows, int n, u8* digits, int lane) {
    const int row_bytes = (n + 4) / 5;
    const u32 inverse = inverse_of(row_bytes);
    bool wrong = false;
    for (int i = lane; i < rows * row_bytes; i += 32) {
        const int row = i * inverse >> 20, first = 5 * (i - row * row_bytes);
        const u32 byte = packed[i];
        wrong |= byte > LAST_TERNARY_BYTE;
        u32 four;
        const u32 fifth = ternary_digits(byte, four);
        u8* out = digits + row * n + first;
#pragma unroll
        for (int k = 0; k < 5; ++k) {
            if (first + k < n) out[k] = (u8)(k < 4 ? four >> 8 * k : fifth);
        }
    }
    __syncwarp();  // the digits of all lanes are there
    return wrong;
}
