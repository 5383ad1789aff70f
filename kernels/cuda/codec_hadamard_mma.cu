// Hadamard codec: quantisation of groups of 128 16-bit elements to 1 to 4 bits, on tensor cores. The bits are
// those of the reference, though the arithmetic is not.
//
// Transform: of the seven butterflies those of distances 1 to 8 are one product with the Hadamard matrix of
// 16, whose sums are float32 in an order of the tensor core's own; those of 16 to 64 are additions as the
// reference has them. So a value differs from the reference's by less than a known part of the scale
// (DOUBT). Where a value is nearer to a threshold than that, one in 5,000 at 4 bits, a warp makes it again in
// the order of the reference (`exact_codes`). The squares are the diagonal of the product of the elements
// with themselves, and are added again by the reference's order where the doubt that leaves could change the
// scale (`exact_scale`). Values stay 8 sqrt(2) times as large as the reference's; what they are compared with
// is as large.
//
// Threads and data: a warp takes tiles of 8 groups, a quad of lanes a group: lane q of a quad has elements
// 16 h + 4 q + r of h < 8, r < 4, as v[4 h + r]. Blocks stay; while a tile is worked on the next one is
// copied. Memory of a warp: two tiles, 4.3 KB; thresholds of 3 and 4 bits, a column a lane, 1 or 2 KB.
//
// One barrier of the block: thresholds are there. Else only lanes of a warp wait for each other.
//
// Macros: DTYPE 0 float16, 1 bfloat16; CODE_BITS 1 to 4.
//
// gate: DTYPE=0,1 CODE_BITS=2,3,4 registers<=96
// gate: DTYPE=0 CODE_BITS=1 registers<=80 arch=sm_90a
#define CODEC 2
#include "async_copies.cuh"
#include "codec_codes.cuh"
#include "codec_squares.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
#if __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = 5;  // resident; with 6 registers spill
#else
constexpr int BLOCKS = 6;
#endif
constexpr int GROUP = 128, GROUPS = 8;  // of a tile
constexpr int PITCH = 2 * GROUP + 16;   // bytes of a group in shared memory
constexpr int VALUES = 32;              // of a lane
constexpr int HALF = 1 << (CODE_BITS - 1), THRESHOLDS = 2 * HALF;
constexpr u32 TOP = (1 << CODE_BITS) - 1;
constexpr bool IN_CELLS = CODE_BITS >= 3;
constexpr int OF_LANE = IN_CELLS ? THRESHOLDS / 4 : 1;  // thresholds that a lane multiplies by scales
constexpr u32 MIDDLE = HALF * ((1 << 4 * CODE_BITS) - 1) / TOP * 0x10001u;   // words of the code of 0
constexpr float ROTATION = root_of_power(7), SIZE = 128 * root_of_power(7);  // SIZE is its inverse

// What a value differs by from that of the reference, in units of the scale, with the root of the sum of
// squares S = 128 / SIZE scales and a sum of magnitudes of at most SIZE S = 128 scales: 16 additions of a
// tensor core, 2^-23 each; 7 of the reference and 3 here, 2^-24 each; products with thresholds, to the right
// of them all. The scale itself is rounded by 2^-11.
constexpr float DOUBT = 128.f * (16 * 2 + 7 + 3 + 2) / (1 << 24);

struct Memory {
    __align__(128) u8 elements[2][GROUPS * PITCH];
    __align__(128) float thresholds[IN_CELLS ? THRESHOLDS * 32 : 32];
};

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#if DTYPE == 1
#define KVLAB_PRODUCT "row.col.f32.bf16.bf16.f32"
#else
#define KVLAB_PRODUCT "row.col.f32.f16.f16.f32"
#endif

// c += a b, of 16 and of 8 columns of a and rows of b.
__device__ __forceinline__ void multiply_add(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16." KVLAB_PRODUCT
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add_8(float* c, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8." KVLAB_PRODUCT " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ float shared_float(u32 address) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
    return r;
}

// Two neighbouring elements of the Hadamard matrix of 16: of rows `row` and row + 1, column `column`.
__device__ __forceinline__ u32 matrix_pair(int row, int column) {
    constexpr u32 ONE = DTYPE == FLOAT16 ? 0x3c00 : 0x3f80;
    const u32 low = __popc(row & column) & 1, high = __popc((row + 1) & column) & 1;
    return (ONE | low << 15) | (ONE | high << 15) << 16;
}

// ---- Tiles

__device__ __forceinline__ void copy_16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies the groups of a tile, 16 bytes a lane: `from` and `to` are those of this lane of the first two.
__device__ __forceinline__ void fetch(const u8* from, u32 to, i64 groups, int lane) {
    if (groups >= GROUPS) {
#pragma unroll
        for (int i = 0; i < GROUPS / 2; ++i) copy_16(to + i * (2 * PITCH), from + i * (4 * GROUP));
    } else {
#pragma unroll 1
        for (int i = 0; 2 * i + lane / 16 < groups; ++i)
            copy_16(to + i * (2 * PITCH), from + i * (4 * GROUP));
    }
}

// Butterflies of distances H to END / 2 of v.
template <int H>
__device__ __forceinline__ void butterflies(float (&v)[VALUES]) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        if (i & H) continue;
        const float a = v[i], b = v[i + H];
        v[i] = __fadd_rn(a, b), v[i + H] = __fsub_rn(a, b);
    }
    if constexpr (2 * H < VALUES) butterflies<2 * H>(v);
}

// The values of a tile, SIZE times the transform, and the sum of squares of the group of this quad.
// `from`: where the row of the 8 x 8 matrices begins that this lane names (ldmatrix).
__device__ __forceinline__ float transform(u32 from, const u32 (&matrix)[4], float (&v)[VALUES], int lane) {
    float squares[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 a[4];  // rows 0 to 7: 16 elements of all groups with h = 2 j; 8 to 15: 2 j + 1
        load_matrices(a, from + 64 * j);
        float c[2][4] = {};
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            multiply_add(c[t], a, matrix[2 * t], matrix[2 * t + 1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[4 * (2 * j + i / 2) + 2 * t + i % 2] = c[t][i];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            multiply_add_8(squares[i], a[0], a[1], a[i]);
            multiply_add_8(squares[i], a[2], a[3], a[2 + i]);
        }
    }
    butterflies<4>(v);
    // Row and column g meet in the lane of quad g whose columns are 2 (g / 2) and the next.
    const float mine =
        lane & 4 ? __fadd_rn(squares[0][1], squares[1][3]) : __fadd_rn(squares[0][0], squares[1][2]);
    return __shfl_sync(ALL_LANES, mine, (lane & 28) + (lane >> 3));
}

// ---- In the order of the reference, by a warp: lane l has elements 4 l to 4 l + 3 of a group

__device__ __forceinline__ void elements_of(const u8* group, int lane, float (&x)[4]) {
    const uint2 raw = *(const uint2*)(group + 8 * lane);
    const float2 low = pair_values(raw.x), high = pair_values(raw.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// `zeros` says whether all elements are 0.
__device__ __forceinline__ Scale exact_scale(const u8* group, int lane, bool& zeros) {
    float x[4], up, down;
    elements_of(group, lane, x);
    float high = higher(higher(fabsf(x[0]), fabsf(x[1])), higher(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
    for (int mask = 16; mask; mask /= 2) high = higher(high, __shfl_xor_sync(ALL_LANES, high, mask));
    zeros = high == 0.f;
    powers_near(high, up, down);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        x[k] = __fmul_rn(x[k], down), x[k] = __fmul_rn(x[k], x[k]);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) x[k] = __fadd_rn(x[k], __shfl_xor_sync(ALL_LANES, x[k], mask));
    }
    const float mean = __fmul_rn(__fadd_rn(__fadd_rn(x[0], x[2]), __fadd_rn(x[1], x[3])), 1.f / GROUP);
    return find_scale(__fmul_rn(__fsqrt_rn(mean), up), high, 0.f, 0.f);
}

// The code of value 16 (lane / 4) + `place` of a group, place < 16.
__device__ __forceinline__ u32 exact_codes(const u8* group, int place, float s, const float* units,
                                           int lane) {
    float x[4];
    elements_of(group, lane, x);
    const float one = place & 1 ? -1.f : 1.f, two = place & 2 ? -1.f : 1.f;
    float y = __fmaf_rn(__fmaf_rn(x[3], one, x[2]), two, __fmaf_rn(x[1], one, x[0]));
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, y, mask);
        y = __fmaf_rn(lane & mask ? y : other, place & 4 * mask ? -1.f : 1.f, lane & mask ? other : y);
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
        y = __fmaf_rn(y, lane & mask ? -1.f : 1.f, __shfl_xor_sync(ALL_LANES, y, mask));
    return codebook_code(__fmul_rn(y, ROTATION), s, units, HALF);
}

// ---- Codes

// What codes of a group are made with: the distance from a threshold below which a value is in doubt; the
// cells of a unit, as a part of all, and where the threshold of cell 0 of this lane stands (see CELL_WIDTH);
// for 2 bits half the threshold.
struct Coder {
    float doubt, to_cells, middle;
    u32 table;
};

// Codes of 16 bits of every word: of value v[k] at bit BITS (k % 4) of half h % 2 of word h / 2, h = k / 4.
// `nearest`: of r = k % 4 the least distance from a threshold.
__device__ __forceinline__ void code_values(const float (&v)[VALUES], const Coder& coder, u32 (&words)[4],
                                            float (&nearest)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) nearest[r] = 3e38f;
    if constexpr (IN_CELLS) {
#pragma unroll
        for (int k = 0; k < VALUES; ++k) {
            const int word = k / 8, bit = 16 * (k / 4 % 2) + CODE_BITS * (k % 4);
            const float part = __saturatef(__fmaf_rn(v[k], coder.to_cells, .5f));
            const u32 cell = __float_as_uint(__fmaf_rd(part, TOP * (1.f - 1e-6f), MAGIC));
            // Negative where the value is above the threshold.
            const float above = __fsub_rn(shared_float(coder.table + cell * 128), v[k]);
            nearest[k % 4] = fminf(nearest[k % 4], fabsf(above));
            const u32 code = cell + (__float_as_uint(above) >> 31);
            words[word] = (code << bit) + (k % 8 ? words[word] : 0) - (MAGIC_BITS << bit);
        }
    } else {
#pragma unroll
        for (int h = 7; h >= 0; --h) {
            u32 field = 0;
#pragma unroll
            for (int r = 3; r >= 0; --r) {
                const float x = v[4 * h + r];
                field = __funnelshift_l(__float_as_uint(x), field, 1);
                float distance = x;
                if constexpr (CODE_BITS == 2) {
                    // From 0 and from the threshold at once; negative below the threshold.
                    distance = __fsub_rn(fabsf(__fsub_rn(fabsf(x), coder.middle)), coder.middle);
                    field = __funnelshift_l(__float_as_uint(distance), field, 1);
                }
                nearest[r] = fminf(nearest[r], fabsf(distance));
            }
            words[h / 2] = h % 2 ? field << 16 : words[h / 2] | field;
        }
        // Of 2 bits the upper is set where the value is not negative, the lower where that is so and it is
        // above the threshold, or neither.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (CODE_BITS == 2) words[i] ^= words[i] >> 1 & 0x00550055u;
            words[i] ^= CODE_BITS == 2 ? 0x00ff00ffu : 0x000f000fu;
        }
    }
}

// Makes codes again, those of one lane and r of which one is in doubt at a time.
__device__ __forceinline__ void mend(const u8* elements, float s, float doubt, const float* units,
                                     const float (&nearest)[4], u32 (&words)[4], int lane) {
#pragma unroll 1
    for (int r = 0; r < 4; ++r) {
        const float mine = r < 2 ? r ? nearest[1] : nearest[0] : r == 2 ? nearest[2] : nearest[3];
        u32 doubtful = __ballot_sync(ALL_LANES, mine < doubt);
#pragma unroll 1
        for (; doubtful; doubtful &= doubtful - 1) {
            const int of = __ffs(doubtful) - 1;
            const u32 code = exact_codes(elements + of / 4 * PITCH, of % 4 * 4 + r,
                                         __shfl_sync(ALL_LANES, s, of), units, lane);
#pragma unroll
            for (int h = 0; h < 8; ++h) {
                const u32 other = __shfl_sync(ALL_LANES, code, 4 * h);
                const int bit = 16 * (h % 2) + CODE_BITS * r;
                if (lane == of) words[h / 2] = (words[h / 2] & ~(TOP << bit)) | other << bit;
            }
        }
    }
}

// Puts the four words of the lanes of a quad, halves for h = 0 to 7, in the order of the stream: lane q then
// has the codes of h = 2 q and 2 q + 1.
__device__ __forceinline__ void transpose(u32 (&w)[4], int lane) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & mask) continue;
            const u32 other = __shfl_xor_sync(ALL_LANES, upper ? w[i] : w[i + mask], mask);
            if (upper) w[i] = other;
            if (!upper) w[i + mask] = other;
        }
    }
}

// Writes the codes of a tile: word p of a lane has 4 codes of each half from place 4 p on. Those of 3 bits,
// 12 bytes a lane, go through `stage`.
__device__ __forceinline__ void give(const u32 (&w)[4], u8* stage, u8* to, i64 groups, int lane) {
    constexpr int BYTES = 4 * CODE_BITS;
    if constexpr (CODE_BITS == 3) {
        const u64 low =
            w[0] & 0xfff | (w[1] & 0xfff) << 12 | (u64)(w[2] & 0xfff | (w[3] & 0xfff) << 12) << 24;
        const u64 high = w[0] >> 16 | w[1] >> 16 << 12 | (u64)(w[2] >> 16 | w[3] >> 16 << 12) << 24;
        __syncwarp();  // the elements of the tile are read
        copy_words<3>({(u32)low, (u32)(low >> 32 | high << 16), (u32)(high >> 16)},
                      (u32*)(stage + BYTES * lane));
        __syncwarp();  // the codes of all lanes are there
        if (lane < 3 * min(groups, (i64)GROUPS))
            *(uint4*)(to + 16 * lane) = *(const uint4*)(stage + 16 * lane);
    } else if (lane < 4 * groups) {
        u8* own = to + BYTES * lane;
        if constexpr (CODE_BITS == 4) {
            *(uint4*)own = make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                                      __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
        } else if constexpr (CODE_BITS == 2) {
            const u32 a = w[0] | w[1] << 8, b = w[2] | w[3] << 8;
            *(uint2*)own = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
        } else {
            *(u32*)own = w[0] | w[1] << 4 | w[2] << 8 | w[3] << 12;
        }
    }
}

// The thresholds of all groups, from four or two in units of the scale: those from lane / 8 times that on, of
// group lane % 8, to the columns of its quad.
__device__ __forceinline__ void put_thresholds(const float (&units)[OF_LANE], float s, float* table,
                                               int lane) {
    s = __shfl_sync(ALL_LANES, s, 4 * (lane % GROUPS));
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const float t = __fmul_rn(units[i], s);
        *(float4*)(table + 32 * (lane / 8 * OF_LANE + i) + 4 * (lane % GROUPS)) = make_float4(t, t, t, t);
    }
    __syncwarp();  // the thresholds of all groups are there
}

// x: `count` groups, 16-byte aligned; packed: 16-byte aligned; bad: null, or set to 1 if a group cannot be
// represented.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantize_hadamard_mma(const void* __restrict__ x, i64 count, u8* __restrict__ packed,
                          u16* __restrict__ scale, i32* bad, const __grid_constant__ Codebook book) {
    extern __shared__ __align__(128) u8 dynamic[];
    __shared__ float positive[HALF], units[THRESHOLDS];  // thresholds; all of them times SIZE
    if (threadIdx.x < HALF - 1) {
        const float t = threshold(book, threadIdx.x);
        positive[threadIdx.x] = t;
        units[HALF + threadIdx.x] = __fmul_rn(t, SIZE), units[HALF - 2 - threadIdx.x] = __fmul_rn(-t, SIZE);
    }
    if (threadIdx.x == 0) units[HALF - 1] = 0.f, units[THRESHOLDS - 1] = 0.f;
    __syncthreads();  // the thresholds are there
    const int lane = threadIdx.x % 32, quad = lane / 4;
    Memory& own = ((Memory*)dynamic)[threadIdx.x / 32];
    // Columns of the matrix: 4 q, 4 q + 1 and, of the second half, the next two, for lanes q of a quad.
    const int row = 2 * (lane % 4), column = 4 * (quad / 2) + quad % 2;
    const u32 matrix[4] = {matrix_pair(row, column), matrix_pair(row + 8, column),
                           matrix_pair(row, column + 2), matrix_pair(row + 8, column + 2)};
    float of_lane[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) of_lane[i] = units[lane / 8 * OF_LANE % THRESHOLDS + i];
    const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * GROUPS;
    const i64 stride = (i64)gridDim.x * (WARPS * GROUPS);
    const u8* from = (const u8*)x + first * (2 * GROUP) + 16 * lane;
    u8* to = packed + first * (16 * CODE_BITS);
    u16* to_scale = scale + first + quad;
    u32 copy_to = shared_address(own.elements[0] + lane / 16 * PITCH + lane % 16 * 16);
    u32 read_from =
        shared_address(own.elements[0] + lane % 8 * PITCH + (lane >> 3 & 1) * 32 + (lane >> 4) * 16);
    u32 table = shared_address(own.thresholds + lane) - MAGIC_BITS * 128;
    asm volatile("" : "+r"(copy_to), "+r"(read_from), "+r"(table));  // shall stay in registers
    u32 turn = 0;                                                    // the place of the tile, in bytes
    i64 left = count - first;                                        // groups from the tile on
    if (left > 0) fetch(from, copy_to, left, lane);
    for (; left > 0; left -= stride, turn ^= sizeof(own.elements[0])) {
        const bool inside = quad < left;
        u8* elements = own.elements[0] + turn;
        wait_for_copies();
        __syncwarp();  // the copies of all lanes are there, the tile before the last is read
        from += stride * (2 * GROUP);
        fetch(from, copy_to + (turn ^ sizeof(own.elements[0])), left - stride, lane);
        float v[VALUES];
        const float squares = transform(read_from + turn, matrix, v, lane);
        Scale found;
        // 64 additions of a tensor core count twice, as they may round down.
        const bool sure = scale_of_squares<2 * 64 + 2>(squares, 1.f / GROUP, found) || !inside;
        bool zeros = false;
        u32 unsure = __ballot_sync(ALL_LANES, !sure) & 0x11111111u;
#pragma unroll 1
        for (; unsure; unsure &= unsure - 1) {
            const int of = (__ffs(unsure) - 1) / 4;
            bool nothing;
            const Scale exact = exact_scale(elements + of * PITCH, lane, nothing);
            if (quad == of) found = exact, zeros = nothing;
        }
        if (inside && lane % 4 == 0) {
            *to_scale = (u16)found.scale_word;
            if (!found.known && bad) *bad = 1;
        }
        to_scale += stride;
        // Of scales beyond the range of float16 every value is in doubt; of zeros and without a scale none.
        const bool usual = found.s > 6e-5f && found.s < 32768.f, fixed = zeros || !found.known;
        Coder coder;
        coder.doubt = !inside || fixed ? 0.f : usual ? found.s * DOUBT : 3.4e38f;
        if constexpr (CODE_BITS == 2) coder.middle = found.s * (.5f * units[HALF]);
        if constexpr (IN_CELLS) {
            put_thresholds(of_lane, found.s, own.thresholds, lane);
            constexpr float UNIT = ROTATION / (TOP * CELL_WIDTH<CODE_BITS>);
            coder.to_cells = usual ? rough_inverse(found.s) * UNIT : 0.f;
            coder.table = table;
        }
        u32 words[4];
        float nearest[4];
        code_values(v, coder, words, nearest);
        const float least = fminf(fminf(nearest[0], nearest[1]), fminf(nearest[2], nearest[3]));
        if (__any_sync(ALL_LANES, least < coder.doubt))
            mend(elements, found.s, coder.doubt, positive, nearest, words, lane);
        if (fixed) words[0] = words[1] = words[2] = words[3] = zeros ? MIDDLE : 0;
        transpose(words, lane);
        give(words, elements, to, left, lane);
        to += stride * (16 * CODE_BITS);
    }
}
