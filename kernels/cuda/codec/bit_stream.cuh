// Codes of a few bits, one a byte, to the interchange bit stream and back.
//
// Element i of a run is bits [i * BITS, (i + 1) * BITS) of a little-endian stream, so 32 codes are exactly
// BITS words. A warp moves a tile of 1,024 codes through shared memory: there the codes stand one a byte in
// the order of the stream, lane l packs or unpacks those from 32 l on, and whatever touches global memory
// does so with neighbouring lanes at neighbouring addresses. Ternary tiles hold digits 0, 1, 2 in place of
// codes.
#pragma once
#include "common/words.cuh"

constexpr int TILE = 1024;  // codes that a warp takes at a time; bytes of shared memory it needs for them

// x / by, without the slow division of 64 bits where 32 are enough.
__device__ __forceinline__ i64 quotient(i64 x, i64 by) {
    return (x | by) >> 32 ? x / by : (i64)((u32)x / (u32)by);
}

// Bytes of two words; the sign of a byte, eight times, where a digit of the selector has its highest bit set
// (__byte_perm has no such mode).
__device__ __forceinline__ u32 select_bytes(u32 low, u32 high, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}

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
__device__ __forceinline__ void pack_32(const u32 (&codes)[8], u32 (&words)[BITS]) {
    u64 waiting = 0;
    int filled = 0, next = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        waiting |= (u64)squeezed<BITS>(codes[i]) << filled;
        filled += 4 * BITS;
        if (filled >= 32) {
            words[next++] = (u32)waiting;
            waiting >>= 32;
            filled -= 32;
        }
    }
}

template <int BITS>
__device__ __forceinline__ void unpack_32(const u32 (&words)[BITS], u32 (&codes)[8]) {
    u64 waiting = 0;
    int filled = 0, next = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (filled < 4 * BITS) {
            waiting |= (u64)words[next++] << filled;
            filled += 32;
        }
        codes[i] = spread<BITS>((u32)waiting);
        waiting >>= 4 * BITS;
        filled -= 4 * BITS;
    }
}

template <int WORDS>
__device__ __forceinline__ void copy_words(const u32* from, u32 (&to)[WORDS]) {
    constexpr int STEP = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 && WORDS < 4 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < WORDS; i += STEP) {
        if constexpr (STEP == 4) {
            const uint4 part = *(const uint4*)(from + i);
            to[i] = part.x, to[i + 1] = part.y, to[i + 2] = part.z, to[i + 3] = part.w;
        } else if constexpr (STEP == 2) {
            const uint2 part = *(const uint2*)(from + i);
            to[i] = part.x, to[i + 1] = part.y;
        } else {
            to[i] = from[i];
        }
    }
}

template <int WORDS>
__device__ __forceinline__ void copy_words(const u32 (&from)[WORDS], u32* to) {
    constexpr int STEP = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 && WORDS < 4 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < WORDS; i += STEP) {
        if constexpr (STEP == 4) {
            *(uint4*)(to + i) = make_uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
        } else if constexpr (STEP == 2) {
            *(uint2*)(to + i) = make_uint2(from[i], from[i + 1]);
        } else {
            to[i] = from[i];
        }
    }
}

// Where byte `at` of a tile stands. Lines of 128 bytes have their pieces of 2^SHIFT bytes in different
// orders, so that lanes which are whole lines apart meet different banks; with SHIFT 7 all stand in order.
template <int SHIFT>
__device__ __forceinline__ int place(int at) {
    return at ^ (at >> 7 & ((128 >> SHIFT) - 1)) << SHIFT;
}

// Words of a tile from byte `at` on, a multiple of their size.
template <int SHIFT, int WORDS>
__device__ __forceinline__ void read_tile(const u8* tile, int at, u32 (&words)[WORDS]) {
    constexpr int STEP = WORDS < 4 ? WORDS : 4;
#pragma unroll
    for (int i = 0; i < WORDS; i += STEP) {
        u32 part[STEP];
        copy_words<STEP>((const u32*)(tile + place<SHIFT>(at + 4 * i)), part);
#pragma unroll
        for (int k = 0; k < STEP; ++k) words[i + k] = part[k];
    }
}

template <int SHIFT, int WORDS>
__device__ __forceinline__ void write_tile(const u32 (&words)[WORDS], u8* tile, int at) {
    constexpr int STEP = WORDS < 4 ? WORDS : 4;
#pragma unroll
    for (int i = 0; i < WORDS; i += STEP) {
        u32 part[STEP];
#pragma unroll
        for (int k = 0; k < STEP; ++k) part[k] = words[i + k];
        copy_words<STEP>(part, (u32*)(tile + place<SHIFT>(at + 4 * i)));
    }
}

__host__ __device__ constexpr bool is_power_of_2(int x) {
    return (x & (x - 1)) == 0;
}

// Copies the stream of `count` codes, which the lanes of this warp have written to a tile, to `packed`,
// 16-byte aligned; BITS is a power of two.
template <int BITS, int SHIFT>
__device__ __forceinline__ void store_words(const u8* tile, int count, u8* packed, int lane) {
    __syncwarp();  // the words of all lanes are there
    if (count < TILE) {
        for (int i = lane; i < (count * BITS + 7) / 8; i += 32) packed[i] = tile[place<SHIFT>(i)];
    } else {
        u32 words[BITS];
        read_tile<SHIFT>(tile, 4 * BITS * lane, words);
        copy_words<BITS>(words, (u32*)packed + BITS * lane);
    }
}

// Packs the first `count` codes of a tile, one a byte, to `packed`, 16-byte aligned; codes beyond must be 0
// up to the next byte. The tile, written by the lanes of this warp, is spent.
template <int BITS, int SHIFT = 7>
__device__ __forceinline__ void store_tile(u8* tile, int count, u8* packed, int lane) {
    u32 codes[8], words[BITS];
    __syncwarp();  // the codes of all lanes are there
    read_tile<SHIFT>(tile, 32 * lane, codes);
    pack_32<BITS>(codes, words);
    if (is_power_of_2(BITS) && count == TILE) {
        copy_words<BITS>(words, (u32*)packed + BITS * lane);
        return;
    }
    __syncwarp();  // all have read their codes; words may take the place
    copy_words<BITS>(words, (u32*)tile + BITS * lane);
    __syncwarp();  // the words of all lanes are there
    if (count < TILE) {
        for (int i = lane; i < (count * BITS + 7) / 8; i += 32) packed[i] = tile[i];
    } else {
#pragma unroll
        for (int i = 0; i < BITS; ++i) ((u32*)packed)[32 * i + lane] = ((const u32*)tile)[32 * i + lane];
    }
}

// The reverse; afterwards every lane may read all codes of the tile.
template <int BITS, int SHIFT = 7>
__device__ __forceinline__ void load_tile(const u8* packed, int count, u8* tile, int lane) {
    u32 codes[8], words[BITS];
    const int nbytes = (count * BITS + 7) / 8;
    if constexpr (is_power_of_2(BITS)) {
        if (count == TILE) {
            copy_words<BITS>((const u32*)packed + BITS * lane, words);
        } else {
#pragma unroll
            for (int i = 0; i < 4 * BITS; ++i) {
                const int at = 4 * BITS * lane + i;
                const u32 byte = at < nbytes ? packed[at] : 0;
                words[i / 4] = (i % 4 ? words[i / 4] : 0) | byte << 8 * (i % 4);
            }
        }
    } else {
        if (count == TILE) {
#pragma unroll
            for (int i = 0; i < BITS; ++i) ((u32*)tile)[32 * i + lane] = ((const u32*)packed)[32 * i + lane];
        } else {
            for (int i = lane; i < nbytes; i += 32) tile[i] = packed[i];
        }
        __syncwarp();  // the words of all lanes are there
        copy_words<BITS>((const u32*)tile + BITS * lane, words);
        __syncwarp();  // all have read their words; codes may take the place
    }
    unpack_32<BITS>(words, codes);
    write_tile<SHIFT>(codes, tile, 32 * lane);
    __syncwarp();  // the codes of all lanes are there
}
