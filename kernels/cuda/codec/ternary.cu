// Packing of ternary values, one a byte, five to a byte, and unpacking.
//
// Threads and data: a warp takes a tile, up to 32 units of 80 values, one a lane (codec/ternary_tile.cuh):
// some whole rows or, of rows longer than that, a part. Values and bytes cross global memory in pieces of
// neighbouring lanes, 16 bytes where a tile begins on such, and go through shared memory to and from the
// lanes. To unpack whole rows of a multiple of 16, a lane takes 16 values at a time, which are part of 4
// bytes, and no shared memory. Memory: 3.2 KiB of shared memory a warp; no barrier but those among the lanes
// of a warp.
//
// `bad`, if it is not null, is set to 1 if a value is none of -1, 0, 1, or a byte is above 242.
#include "codec/ternary_tile.cuh"

constexpr int WARPS = 8;
constexpr int TERNARY_TILE = 32 * UNIT;         // values that a tile has at most
constexpr int PIECES = TERNARY_TILE / 16 / 32;  // of 16 bytes, a lane

struct Memory {
    __align__(128) u8 values[TERNARY_TILE + 128];
    __align__(16) u8 bytes[32 * UNIT_BYTES + 32];
};

// Where the tile of this warp begins, and what it has. With n values a row, a tile is `rows_a_tile` rows or,
// if that is 0, a part of a row, TERNARY_TILE values.
struct Place {
    i64 value, byte;
    int rows, n;
};

__device__ __forceinline__ bool place_of(i64 rows, i64 n, int rows_a_tile, Place& tile) {
    const i64 index = (i64)blockIdx.x * WARPS + threadIdx.x / 32, row_bytes = (n + 4) / 5;
    if (rows_a_tile) {
        const i64 row = index * rows_a_tile;
        if (row >= rows) return false;
        tile = {row * n, row * row_bytes, (int)min((i64)rows_a_tile, rows - row), (int)n};
    } else {
        const i64 parts = (n + TERNARY_TILE - 1) / TERNARY_TILE;
        if (index >= rows * parts) return false;
        const i64 row = rows == 1 ? 0 : quotient(index, parts), first = (index - row * parts) * TERNARY_TILE;
        tile = {row * n + first, row * row_bytes + first / 5, 1, (int)min((i64)TERNARY_TILE, n - first)};
    }
    return true;
}

// Values from global memory to a tile, all loads of 16 bytes before the first store.
__device__ __forceinline__ void take(const u8* from, u8* tile, int count, int lane) {
    int done = 0;
    if ((u64)from % 16 == 0) {
        uint4 piece[PIECES];
        done = count & ~15;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            if (16 * (32 * i + lane) < done) piece[i] = ((const uint4*)from)[32 * i + lane];
        }
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            if (16 * (32 * i + lane) < done) *(uint4*)(tile + place<4>(16 * (32 * i + lane))) = piece[i];
        }
    } else if ((u64)from % 4 == 0) {
        done = count & ~3;
#pragma unroll 4
        for (int i = 4 * lane; i < done; i += 128) *(u32*)(tile + place<4>(i)) = *(const u32*)(from + i);
    }
    for (int i = done + lane; i < count; i += 32) tile[place<4>(i)] = from[i];
}

// The reverse.
__device__ __forceinline__ void give(const u8* tile, u8* to, int count, int lane) {
    int done = 0;
    if ((u64)to % 16 == 0) {
        done = count & ~15;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = 16 * (32 * i + lane);
            if (at < done) *(uint4*)(to + at) = *(const uint4*)(tile + place<4>(at));
        }
    } else if ((u64)to % 4 == 0) {
        done = count & ~3;
#pragma unroll 4
        for (int i = 4 * lane; i < done; i += 128) *(u32*)(to + i) = *(const u32*)(tile + place<4>(i));
    }
    for (int i = done + lane; i < count; i += 32) to[i] = tile[place<4>(i)];
}

// Unpacks the pieces of 16 values of a tile of `rows` rows of n values, a multiple of 16. Returns whether a
// byte is above 242.
__device__ __forceinline__ bool unpack_pieces(const u8* packed, u8* values, int rows, int n, int lane) {
    const int in_row = n / 16, pieces = rows * in_row, row_bytes = (n + 4) / 5;
    const u32 inverse = inverse_of(in_row);
    const u32* words = (const u32*)((u64)packed & ~3ull);
    u32 low[PIECES], high[PIECES];
    int begin[PIECES], skipped[PIECES];  // in bytes; values of the first byte that the piece before has
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int piece = 32 * i + lane, row = piece * inverse >> 20, value = 16 * (piece - row * in_row);
        begin[i] = (int)((u64)packed % 4) + row * row_bytes + value / 5, skipped[i] = value % 5;
        low[i] = high[i] = 0;
        if (piece >= pieces) continue;
        low[i] = words[begin[i] / 4];
        if (begin[i] % 4) high[i] = words[begin[i] / 4 + 1];
    }
    bool wrong = false;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        if (32 * i + lane >= pieces) break;
        const u32 bytes = __funnelshift_r(low[i], high[i], 8 * (begin[i] % 4));
        const u32 selector = 0x3210 + 0x1111 * skipped[i];
        u32 w[5];
        unpack_20(bytes, TernaryTile<false>::TABLE, w);
        wrong |= above_last(bytes);
        ((uint4*)values)[32 * i + lane] =
            make_uint4(__byte_perm(w[0], w[1], selector), __byte_perm(w[1], w[2], selector),
                       __byte_perm(w[2], w[3], selector), __byte_perm(w[3], w[4], selector));
    }
    return wrong;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pack_ternary(const u8* __restrict__ values, i64 rows, i64 n, int rows_a_tile, u8* __restrict__ packed,
                 i32* bad) {
    __shared__ Memory memory[WARPS];
    Memory& own = memory[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    Place tile;
    if (!place_of(rows, n, rows_a_tile, tile)) return;
    take(values + tile.value, own.values, tile.rows * tile.n, lane);
    const TernaryTile<false> whole = {own.values, own.bytes, tile.rows, tile.n};
    if (whole.store(packed + tile.byte, lane) && bad) *bad = 1;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_ternary(const u8* __restrict__ packed, i64 rows, i64 n, int rows_a_tile, u8* __restrict__ values,
                   i32* bad) {
    __shared__ Memory memory[WARPS];
    Memory& own = memory[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    Place tile;
    if (!place_of(rows, n, rows_a_tile, tile)) return;
    if (rows_a_tile && n % 16 == 0) {
        const bool wrong = unpack_pieces(packed + tile.byte, values + tile.value, tile.rows, tile.n, lane);
        if (wrong && bad) *bad = 1;
        return;
    }
    const TernaryTile<false> whole = {own.values, own.bytes, tile.rows, tile.n};
    if (whole.load(packed + tile.byte, lane) && bad) *bad = 1;
    give(own.values, values + tile.value, tile.rows * tile.n, lane);
}

// gate: registers<=80
