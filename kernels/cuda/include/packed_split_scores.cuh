// Scores of coded keys by integer products: see packed_split.cuh.
//
// A query row is relative to its largest element. Needs WIDTHS_K.
#pragma once

constexpr bool TWO_BITS_ALONE = WIDTHS_K == 1, THREE_BITS = WIDTHS_K & 2,
               ONE_KEY_WIDTH = (WIDTHS_K & (WIDTHS_K - 1)) == 0;

struct Query {
    u32 parts[TILES_D / 2][2];  // B fragments, in the order of 2 bits if keys have no other, else of 4
    u32 of_3[TILES_D / 2][2];   // the same for 3 bits: columns 0 to 7 are a quarter
    int sum, sum_of_3;          // of row u: the sum of its fixed-point numbers
    float bias[1];              // the part of the mean key in a score
    float unit;                 // twice what 1 stands for
    u32 start[4];               // of accumulators, if keys have one width
};

// Where accumulators start: ZERO less what lies between codes and values.
template <int BITS>
__device__ __forceinline__ void start_scores(int sum, u32 (&start)[4]) {
    const int middle = (((1 << BITS) - 1) * sum) >> 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int from = -middle * (r ? Bytes<BITS>::ODD : Bytes<BITS>::EVEN);
        start[2 * r] = SIGNED_ZERO + (from >> 8);
        start[2 * r + 1] = SIGNED_ZERO + (from & 255);
    }
}

// The rows times `factor` as B fragments, in the order of 2 bits or of others, with a quarter of columns 0 to
// 7 or not. Their sum, in which those count 4 times, is that of row u.
template <bool TWO_BITS, bool QUARTER>
__device__ __forceinline__ int split_rows(const float* row, float factor, int lane,
                                          u32 (&parts)[TILES_D / 2][2]) {
    const int u = lane % 4, lower = lane / 4 % 2;
    const u32 select = lower ? 0x40 : 0x51, flip = lower ? 0x80808080u : 0u;
    constexpr u32 COUNTS = QUARTER ? 0x01040104u : 0x01010101u;
    u32 sums[4] = {0, 0, 0, 0};
    const u32 counts[4] = {COUNTS, COUNTS, COUNTS, COUNTS};
#pragma unroll
    for (int i = 0; i < TILES_D / 2; ++i) {
        // [tile][columns from 8 on][column 2u + 1]: byte 1 is the upper one, byte 0 the lower one + 128.
        u32 x[2][2][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 pair = ((const float2*)row)[16 * i + 4 * j + u];
            const float own = QUARTER && j % 2 == 0 ? .25f * factor : factor;
            x[j / 2][j % 2][0] = __float_as_uint(fmaf(pair.x, own, 12582912.f + 128.f));
            x[j / 2][j % 2][1] = __float_as_uint(fmaf(pair.y, own, 12582912.f + 128.f));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32 halves[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                halves[h] = TWO_BITS ? __byte_perm(x[0][r][h], x[1][r][h], select)
                                     : __byte_perm(x[r][0][h], x[r][1][h], select);
            parts[i][r] = __byte_perm(halves[0], halves[1], 0x5410) ^ flip;
        }
        KVLAB_MMA_BYTES("s8", sums, counts, parts[i][0], parts[i][1]);
    }
    return 256 * (int)sums[0] + (int)sums[1];
}

// Takes the rows, each with its largest magnitude and its bias behind it. Rows beyond the last repeat it;
// their results go nowhere.
__device__ __forceinline__ void load_query(const float* rows, int row_count, int lane, Query& query) {
    constexpr float MOST = 127 * 256 + 127;
    const float* row = rows + min(lane / 8, row_count - 1) * ROW_FLOATS;
    const float factor = MOST / fmaxf(row[HEAD_DIM], 1e-30f);
    if (WIDTHS_K != 2) query.sum = split_rows<TWO_BITS_ALONE, false>(row, factor, lane, query.parts);
    if (THREE_BITS) query.sum_of_3 = split_rows<false, true>(row, factor, lane, query.of_3);
    const float* own = rows + min(lane % 4, row_count - 1) * ROW_FLOATS;
    const float peak = own[HEAD_DIM];
    query.unit = peak < INFINITE ? fmaxf(peak, 1e-30f) * (2.f / MOST) : __int_as_float(0x7fffffff);
    query.bias[0] = own[HEAD_DIM + 1];
    if (ONE_KEY_WIDTH) {
        start_scores<bits_of<WIDTHS_K>(0)>(THREE_BITS ? query.sum_of_3 : query.sum, query.start);
#pragma unroll
        for (int r = 0; r < 4; ++r)
            asm volatile("" : "+r"(query.start[r]));  // or it is computed for every page
    }
}

// Scores of coded keys, less `base`.
template <int BITS>
__device__ __forceinline__ void coded_scores(const u8* codes, const u8* steps, const Query& query,
                                             const float (&base)[1], float (&s)[8][1], int lane) {
    constexpr float EVEN = Bytes<BITS>::EVEN, ODD = Bytes<BITS>::ODD;
    constexpr int TWOS = Bytes<BITS>::TWOS, PER_BLOCK = TILES_D / 2 % TWOS ? 0 : TILES_D / 2 / TWOS;
    u32 start[4] = {query.start[0], query.start[1], query.start[2], query.start[3]}, sums[4][4];
    if (!ONE_KEY_WIDTH) start_scores<BITS>(BITS == 3 ? query.sum_of_3 : query.sum, start);
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = start[i % 4];
    for_each_two<BITS>(
        codes, lane, [](int i) { return PER_BLOCK ? i % 4 * PER_BLOCK + i / 4 : i; },
        [&](int two, const u32(&a)[4]) {
            const u32(&q)[2] = (BITS == 3 ? query.of_3 : query.parts)[two % (TILES_D / 2)];
            const bool other = BITS == 2 && !TWO_BITS_ALONE;
            KVLAB_MMA_BYTES("s8", sums[two / (TILES_D / 2)], a,
                            other ? __byte_perm(q[0], q[1], 0x6240) : q[0],
                            other ? __byte_perm(q[0], q[1], 0x7351) : q[1]);
        });
    const Steps step = load_steps(steps, lane / 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float sum = joined<SIGNED_ZERO>(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
        s[i][0] =
            fmaf(sum, step.at(i) * (query.unit * (1.f / (i % 2 ? ODD : EVEN))), query.bias[0] - base[0]);
    }
}
