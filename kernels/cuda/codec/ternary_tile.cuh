// Tiles of ternary values: a warp packs and unpacks in shared memory, one value a byte, rows of n values or a
// part of one row. A lane takes units: up to 80 values of a row, which are 16 bytes, in registers.
#pragma once
#include "codec/ternary_bytes.cuh"

constexpr int UNIT = 80, UNIT_BYTES = 16;

// Four bytes at any place of shared memory; those behind them up to the next word are touched.
__device__ __forceinline__ u32 word_at(const u8* shared, int at) {
    const u32* words = (const u32*)shared + at / 4;
    return __funnelshift_r(words[0], words[1], 8 * (at % 4));
}

// A word of which the first `count` bytes count, 4 or more or 0 or less; the others become `other`.
__device__ __forceinline__ u32 first_bytes(u32 word, int count, u32 other) {
    const u32 mask = count >= 4 ? 0 : count <= 0 ? 0xffffffffu : 0xffffffffu << 8 * count;
    return (word & ~mask) | (other & mask);
}

// Copies bytes between shared and global memory, in pieces as large as their alignment allows; `shared`
// begins on 16 bytes.
template <class Piece, bool TO_GLOBAL>
__device__ __forceinline__ int copy_pieces(u8* shared, u8* global, int first, int count, int lane) {
    const int end = count / (int)sizeof(Piece);
    for (int i = first / (int)sizeof(Piece) + lane; i < end; i += 32) {
        if (TO_GLOBAL) ((Piece*)global)[i] = ((const Piece*)shared)[i];
        if (!TO_GLOBAL) ((Piece*)shared)[i] = ((const Piece*)global)[i];
    }
    return end * (int)sizeof(Piece);
}

template <bool TO_GLOBAL>
__device__ __forceinline__ void copy_bytes(u8* shared, u8* global, int count, int lane) {
    int done = 0;
    if ((u64)global % 16 == 0) done = copy_pieces<uint4, TO_GLOBAL>(shared, global, 0, count, lane);
    if ((u64)global % 4 == 0) done = copy_pieces<u32, TO_GLOBAL>(shared, global, done, count, lane);
    copy_pieces<u8, TO_GLOBAL>(shared, global, done, count, lane);
}

// x * inverse_of(y) >> 20 is x / y for x and y up to 1,000.
__device__ __forceinline__ u32 inverse_of(int y) {
    return ((1 << 20) + y - 1) / y;
}

// A tile: its values, or DIGITS, in the order of place<4>, with 20 bytes to spare, and its bytes, with 20 to
// spare.
template <bool DIGITS>
struct TernaryTile {
    static constexpr i32 ZEROS = DIGITS ? 0 : 121;
    static constexpr u32 LAST = DIGITS ? 0 : 0xffffffffu;  // what stands for digits 0, as bytes have them
                                                           // beyond a row
    static constexpr u32 TABLE = DIGITS ? 0x020100 : 0x0100ff;  // byte d stands for digit d

    u8 *values, *bytes;  // in shared memory, on lines of 128 and on 16 bytes
    int rows, n;

    // Packs the values, which the lanes of this warp have written, to global memory. Returns whether one is
    // none of -1, 0, 1; of digits it says nothing.
    __device__ __forceinline__ bool store(u8* packed, int lane) const {
        const int row_bytes = (n + 4) / 5, parts = (n + UNIT - 1) / UNIT;
        const u32 inverse = inverse_of(parts);
        const bool whole = row_bytes % 16 == 0 && (u64)packed % 16 == 0;  // bytes of units are whole pieces
        OtherValues other;
        __syncwarp();  // the values of all lanes are there
        for (int unit = lane; unit < rows * parts; unit += 32) {
            const int row = unit * inverse >> 20, part = unit - row * parts;
            const int left = min(n - UNIT * part, UNIT), here = (left + 4) / 5;
            u32 words[UNIT / 4], found[4];
            read(row * n + UNIT * part, left, words);
#pragma unroll
            for (int k = 0; k < UNIT / 4; ++k) other.see(words[k]);
#pragma unroll
            for (int i = 0; i < 4; ++i) found[i] = bytes_of_20(words + 5 * i, ZEROS);
            const int at = row * row_bytes + UNIT_BYTES * part;
            u8* to = bytes + at;
            if (whole) {
                copy_words<4>(found, (u32*)(packed + at));
            } else {
#pragma unroll
                for (int k = 0; k < UNIT_BYTES; ++k) {
                    if (k < here) to[k] = (u8)(found[k / 4] >> 8 * (k % 4));
                }
            }
        }
        if (!whole) {
            __syncwarp();  // the bytes of all lanes are there
            copy_bytes<true>(bytes, packed, rows * row_bytes, lane);
        }
        return other.any();
    }

    // The reverse; afterwards every lane may read them all. Returns whether a byte is above 242.
    __device__ __forceinline__ bool load(const u8* packed, int lane) const {
        const int row_bytes = (n + 4) / 5, parts = (n + UNIT - 1) / UNIT;
        const u32 inverse = inverse_of(parts);
        bool wrong = false;
        const bool whole = row_bytes % 16 == 0 && (u64)packed % 16 == 0;  // bytes of units are whole pieces
        if (!whole) {
            copy_bytes<false>(bytes, (u8*)packed, rows * row_bytes, lane);
            if (lane < 20) bytes[rows * row_bytes + lane] = 0;  // so that no byte there is wrong
        }
        __syncwarp();  // the bytes of all lanes are there
        for (int unit = lane; unit < rows * parts; unit += 32) {
            const int row = unit * inverse >> 20, part = unit - row * parts;
            const int left = min(n - UNIT * part, UNIT), from = row * row_bytes + UNIT_BYTES * part;
            u32 words[UNIT / 4], found[4];
            if (whole) {
                copy_words<4>((const u32*)(packed + from), found);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) found[i] = word_at(bytes, from + 4 * i);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wrong |= above_last(found[i]);
                unpack_20(found[i], TABLE, words + 5 * i);
            }
            write(words, row * n + UNIT * part, left);
        }
        __syncwarp();  // the values of all lanes are there
        return wrong;
    }

  private:
    __device__ __forceinline__ void read(int at, int left, u32 (&words)[UNIT / 4]) const {
        if (DIGITS || n % 16 == 0) {  // rows of a codec are of 32 and more
#pragma unroll
            for (int k = 0; k < UNIT / 16; ++k) {
                uint4 piece = make_uint4(LAST, LAST, LAST, LAST);
                if (16 * k < left) piece = *(const uint4*)(values + place<4>(at + 16 * k));
                words[4 * k] = piece.x, words[4 * k + 1] = piece.y;
                words[4 * k + 2] = piece.z, words[4 * k + 3] = piece.w;
            }
        } else {
            u32 next = *(const u32*)(values + place<4>(at & ~3));
#pragma unroll
            for (int k = 0; k < UNIT / 4; ++k) {
                const u32 word = next;
                next = 4 * k < left ? *(const u32*)(values + place<4>((at & ~3) + 4 * k + 4)) : 0;
                words[k] = first_bytes(__funnelshift_r(word, next, 8 * (at % 4)), left - 4 * k, LAST);
            }
        }
    }

    __device__ __forceinline__ void write(const u32 (&words)[UNIT / 4], int at, int left) const {
        if (DIGITS || n % 16 == 0) {  // rows of a codec are of 32 and more
#pragma unroll
            for (int k = 0; k < UNIT / 16; ++k) {
                if (16 * k < left)
                    *(uint4*)(values + place<4>(at + 16 * k)) =
                        make_uint4(words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < UNIT; ++k) {
                if (k < left) values[place<4>(at + k)] = (u8)(words[k / 4] >> 8 * (k % 4));
            }
        }
    }
};
