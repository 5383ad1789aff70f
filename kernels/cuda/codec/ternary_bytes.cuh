// Ternary values -1, 0, 1, five to a byte: the number d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4 of digits d = value
// + 1.
#pragma once
#include "codec/bit_stream.cuh"

// 20 values, or digits, in 5 words to 4 bytes: two dot products a byte. `zeros` is the byte of five zeros.
__device__ __forceinline__ u32 bytes_of_20(const u32* w, i32 zeros) {
    const i32 byte0 = __dp4a((i32)w[1], 0x00000051, __dp4a((i32)w[0], 0x1b090301, zeros));
    const i32 byte1 = __dp4a((i32)w[2], 0x0000511b, __dp4a((i32)w[1], 0x09030100, zeros));
    const i32 byte2 = __dp4a((i32)w[3], 0x00511b09, __dp4a((i32)w[2], 0x03010000, zeros));
    const i32 byte3 = __dp4a((i32)w[4], 0x511b0903, __dp4a((i32)w[3], 0x01000000, zeros));
    return (u32)byte0 + ((u32)byte1 << 8) + ((u32)byte2 << 16) + ((u32)byte3 << 24);
}

// The first four digits of two bytes up to 242, which stand in the halves of `pair`, as digits of four bits
// in halves; `fifth`: the last digits in halves. The quotients q by 3, 9, 27 and 81 are products that are
// exact up to 242; digit i is q[i] - 3 q[i + 1].
__device__ __forceinline__ u32 digits_of_pair_of_bytes(u32 pair, u32& fifth) {
    const u32 q1 = pair * 171 >> 9 & 0x007f007fu, q2 = pair * 57 >> 9 & 0x007f007fu;
    const u32 q3 = pair * 19 >> 9 & 0x007f007fu;
    fifth = pair * 203 >> 14 & 0x00030003u;
    return pair + 13 * q1 + 208 * q2 + 3328 * q3 - 12288 * fifth;
}

// 4 bytes to 20 digits or values in 5 words: byte d of `table` is what stands for digit d.
__device__ __forceinline__ void unpack_20(u32 bytes, u32 table, u32* w) {
    u32 fifth_even, fifth_odd;
    const u32 even = digits_of_pair_of_bytes(bytes & 0x00ff00ffu, fifth_even);
    const u32 odd = digits_of_pair_of_bytes(bytes >> 8 & 0x00ff00ffu, fifth_odd);
    const u32 four0 = select_bytes(table, 0, even), four1 = select_bytes(table, 0, odd);
    const u32 four2 = select_bytes(table, 0, even >> 16), four3 = select_bytes(table, 0, odd >> 16);
    const u32 fifths = fifth_even + 16 * fifth_odd, last = select_bytes(table, 0, fifths | fifths >> 8);
    w[0] = four0;
    w[1] = select_bytes(four1, last, 0x2104);
    w[2] = select_bytes(select_bytes(four1, last, 0x0053), four2, 0x5410);
    w[3] = select_bytes(select_bytes(four2, last, 0x0632), four3, 0x4210);
    w[4] = select_bytes(four3, last, 0x7321);
}

// Whether one of four bytes is above 242.
__device__ __forceinline__ bool above_last(u32 bytes) {
    const u32 excess = (bytes & 0x7f7f7f7fu) + 0x0d0d0d0du;  // from 243 on bit 7 is set, here and in the byte
    return bytes & excess & 0x80808080u;
}

// Collects what shows whether bytes are none of -1, 0, 1: bits 1 to 7 differ, or bit 1 is set and bit 0 is
// not.
struct OtherValues {
    u32 differ = 0, even = 0;

    __device__ __forceinline__ void see(u32 values) {
        differ |= values ^ values >> 1;
        even |= values >> 1 & ~values;
    }
    __device__ __forceinline__ bool any() const { return (differ & 0x7e7e7e7eu) | (even & 0x01010101u); }
};
