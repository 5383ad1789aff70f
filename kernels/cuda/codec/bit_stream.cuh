// Codes of a few bits, one a byte, to the interchange bit stream and back.
//
// Element i of a run is bits [i * BITS, (i + 1) * BITS) of a little-endian stream, so 32 codes are exactly
// BITS words. A warp moves a tile of 1,024 codes through shared memory: there the codes stand one a byte in
// the order of the stream, lane l packs or unpacks those from 32 l on, and whatever touches global memory
// does so with neighbouring lanes at neighbouring addresses. Ternary tiles hold digits 0, 1, 2 in place of
// codes, of which five of a row are a byte of the stream: d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4.
#pragma once
#include "common/words.cuh"

constexpr int TILE = 1024;  // codes that a warp takes at a time

// x / by, without the slow division of 64 bits where 32 are enough.
__device__ __forceinline__ i64 quotient(i64 x, i64 by) {
    return (x | by) >> 32 ? x / by : (i64)((u32)x / (u32)by);
}

// Words that one thread moves with as few accesses as their number allows.
template <int COUNT>
struct alignas(COUNT % 4 == 0 ? 16
               : COUNT == 2   ? 8
                              : 4) Words {
    u32 at[COUNT];
};

// A tile, a warp's. Every 128 codes are followed by 16 unused bytes, so that lanes whose codes are whole
// lines apart meet different banks.
struct Tile {
    __align__(16) u8 bytes[TILE + TILE / 8];

    __device__ __forceinline__ u8* at(int code) { return bytes + code + code / 128 * 16; }
};

// A mask of the `count` low bits of every `lane` bits.
__host__ __device__ constexpr u32 low_bits(int count, int lane) {
    u32 mask = 0;
    for (int start = 0; start < 32; start += lane)
        for (int i = 0; i < count; ++i) mask |= 1u << (start + i);
    return mask;
}

// Four codes, one a byte, to the low 4 * BITS bits.
template <int BITS>
__device__ __forceinline__ u32 squeezed(u32 x) {
    if constexpr (BITS == 8) return x;
    constexpr u32 pair = low_bits(2 * BITS, 16);
    x = (x & low_bits(BITS, 16)) | (x >> (8 - BITS) & pair & ~low_bits(BITS, 16));
    return (x & low_bits(2 * BITS, 32)) |
           (x >> (16 - 2 * BITS) & low_bits(4 * BITS, 32) & ~low_bits(2 * BITS, 32));
}

// The low 4 * BITS bits to four codes, one a byte.
template <int BITS>
__device__ __forceinline__ u32 spread(u32 x) {
    if constexpr (BITS == 8) return x;
    x = (x & low_bits(2 * BITS, 32)) | (x << (16 - 2 * BITS) & low_bits(2 * BITS, 32) << 16);
    return (x & low_bits(BITS, 16)) | (x << (8 - BITS) & low_bits(BITS, 16) << 8);
}

template <int BITS>
__device__ __forceinline__ Words<BITS> pack_32(const Words<8>& codes) {
    Words<BITS> words;
    u64 waiting = 0;
    int filled = 0, next = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        waiting |= (u64)squeezed<BITS>(codes.at[i]) << filled;
        filled += 4 * BITS;
        if (filled >= 32) {
            words.at[next++] = (u32)waiting;
            waiting >>= 32;
            filled -= 32;
        }
    }
    return words;
}

template <int BITS>
__device__ __forceinline__ Words<8> unpack_32(const Words<BITS>& words) {
    Words<8> codes;
    u64 waiting = 0;
    int filled = 0, next = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (filled < 4 * BITS) {
            waiting |= (u64)words.at[next++] << filled;
            filled += 32;
        }
        codes.at[i] = spread<BITS>((u32)waiting);
        waiting >>= 4 * BITS;
        filled -= 4 * BITS;
    }
    return codes;
}

// Packs the first `count` codes of a tile to `packed`, which begins on a word; codes beyond must be 0 up to
// the next byte. The tile, written by the lanes of this warp, is spent.
template <int BITS>
__device__ __forceinline__ void store_tile(Tile& tile, int count, u8* packed, int lane) {
    __syncwarp();  // the codes of all lanes are there
    const Words<BITS> words = pack_32<BITS>(*(const Words<8>*)tile.at(32 * lane));
    __syncwarp();  // all have read their codes; words take the place
    ((Words<BITS>*)tile.bytes)[lane] = words;
    __syncwarp();  // the words of all lanes are there
    const int nbytes = (count * BITS + 7) / 8;
#pragma unroll
    for (int i = lane; i < TILE / 32 * BITS; i += 32) {
        if (i < nbytes / 4) ((u32*)packed)[i] = ((const u32*)tile.bytes)[i];
    }
    if (lane < nbytes % 4) packed[nbytes / 4 * 4 + lane] = tile.bytes[nbytes / 4 * 4 + lane];
}

// The reverse; afterwards every lane may read all codes of the tile.
template <int BITS>
__device__ __forceinline__ void load_tile(const u8* packed, int count, Tile& tile, int lane) {
    const int nbytes = (count * BITS + 7) / 8;
#pragma unroll
    for (int i = lane; i < TILE / 32 * BITS; i += 32) {
        if (i < nbytes / 4) ((u32*)tile.bytes)[i] = ((const u32*)packed)[i];
    }
    if (lane < nbytes % 4) tile.bytes[nbytes / 4 * 4 + lane] = packed[nbytes / 4 * 4 + lane];
    __syncwarp();  // the words of all lanes are there
    const Words<BITS> words = ((const Words<BITS>*)tile.bytes)[lane];
    __syncwarp();  // all have read their words; codes take the place
    *(Words<8>*)tile.at(32 * lane) = unpack_32<BITS>(words);
    __syncwarp();  // the codes of all lanes are there
}

// ---- Ternary digits, of whole rows of n or of a part of one; a lane takes 20 of a row, which are 4 bytes

struct TernaryUnits {
    int n, row_bytes, of_row, count;  // units of a row, of all rows
    u32 inverse;                      // x * inverse >> 20 is x / of_row for both up to 1,000

    __device__ __forceinline__ TernaryUnits(int rows, int n)
        : n(n), row_bytes((n + 4) / 5), of_row((n + 19) / 20), count(rows * of_row) {
        inverse = ((1 << 20) + of_row - 1) / of_row;
    }
    // The first digit of a unit and its first byte; how many digits the row has there.
    __device__ __forceinline__ int first(int unit, int& byte, int& digits) const {
        const int row = unit * inverse >> 20, part = unit - row * of_row;
        byte = row * row_bytes + 4 * part, digits = min(20, n - 20 * part);
        return row * n + 20 * part;
    }
};

__device__ __forceinline__ void store_digits(Tile& tile, int rows, int n, u8* packed, int lane) {
    const TernaryUnits units(rows, n);
    __syncwarp();  // the digits of all lanes are there
#pragma unroll 2
    for (int unit = lane; unit < units.count; unit += 32) {
        int at, digits, first = units.first(unit, at, digits);
        u32 words[5] = {}, bytes = 0;
        if (n % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 5; ++i) {
                if (4 * i < digits) words[i] = *(const u32*)tile.at(first + 4 * i);
            }
        } else {
#pragma unroll
            for (int k = 0; k < 20; ++k) {
                if (k < digits) words[k / 4] |= *tile.at(first + k) << 8 * (k % 4);
            }
        }
        bytes = (u32)__dp4a((i32)words[1], 0x51, __dp4a((i32)words[0], 0x1b090301, 0));
        bytes |= (u32)__dp4a((i32)words[2], 0x511b, __dp4a((i32)words[1], 0x09030100, 0)) << 8;
        bytes |= (u32)__dp4a((i32)words[3], 0x511b09, __dp4a((i32)words[2], 0x03010000, 0)) << 16;
        bytes |= (u32)__dp4a((i32)words[4], 0x511b0903, __dp4a((i32)words[3], 0x01000000, 0)) << 24;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (5 * k < digits) packed[at + k] = (u8)(bytes >> 8 * k);
        }
    }
}

// The reverse; afterwards every lane may read all digits. Returns whether a byte is above 242.
__device__ __forceinline__ bool load_digits(const u8* packed, int rows, int n, Tile& tile, int lane) {
    const TernaryUnits units(rows, n);
    bool wrong = false;
#pragma unroll 2
    for (int unit = lane; unit < units.count; unit += 32) {
        int at, digits, first = units.first(unit, at, digits);
        u32 words[5] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 byte = 5 * i < digits ? packed[at + i] : 0;
            wrong |= byte > 242;
#pragma unroll
            for (int k = 5 * i; k < 5 * i + 5; ++k) {
                const u32 rest = byte * 171 >> 9;  // byte / 3, exact up to 242
                words[k / 4] |= (byte - 3 * rest) << 8 * (k % 4);
                byte = rest;
            }
        }
        if (n % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 5; ++i) {
                if (4 * i < digits) *(u32*)tile.at(first + 4 * i) = words[i];
            }
        } else {
#pragma unroll
            for (int k = 0; k < 20; ++k) {
                if (k < digits) *tile.at(first + k) = (u8)(words[k / 4] >> 8 * (k % 4));
            }
        }
    }
    __syncwarp();  // the digits of all lanes are there
    return wrong;
}
