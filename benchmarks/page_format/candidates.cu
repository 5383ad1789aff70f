// Candidate page formats in one streaming decode loop (page-format study, see
// docs/performance/page_format.md).
//
// One query token per sequence attends to every token of its pages. A sequence is one (row, KV head); its
// query heads (group size up to 8) are the 8 columns of the mma tile. Query rows arrive rotated and scaled by
// log2(e)/sqrt(d).
//
// Threads and data
//   grid     one CTA per SM; CTA b takes pages [P*b/grid, P*(b+1)/grid) of the concatenated page lists.
//   warp     pages begin + warp, + WARPS, ...; every warp owns a ring of STAGES page buffers in shared
//   memory, filled by
//            bulk copies that its lane 0 issues, so that no barrier between warps is needed until a sequence
//            ends.
//   lane     g = lane / 4, t = lane % 4 of mma.m16n8k16: A = K tile (16 tokens x 16 channels) or V^T tile (16
//   channels x
//            16 tokens), B = q^T or P, C = scores (tokens x heads) or out^T (channels x heads).
//
// A page holds 64 tokens. Its codes are stored as the A fragments that the lanes need: tile t of K is (token
// block t / N, channel tile t % N), tile t of V is (channel tile t / 4, token block t % 4), N = HEAD_DIM
// / 16. GROUP_TILES tiles share GROUP_WORDS 32-bit words per lane. Slot s of a page is row (s / 8) + 8 * (s %
// 2) of token block (s % 8) / 2, so that a lane finds the steps of its 8 tokens side by side.
//
// Memory: shared WARPS * STAGES * COPY_BYTES + barriers + merge area; registers see the study's table.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILES_D (HEAD_DIM / 16)
#define TILES (4 * TILES_D)
// Order of the tiles of a page. INTERLEAVED: consecutive tiles go to different accumulators, so that mma
// chains overlap.
#if INTERLEAVED
#define K_BLOCK(tile) ((tile) % 4)
#define K_CHANNELS(tile) ((tile) / 4)
#define V_BLOCK(tile) ((tile) / TILES_D)
#define V_CHANNELS(tile) ((tile) % TILES_D)
#else
#define K_BLOCK(tile) ((tile) / TILES_D)
#define K_CHANNELS(tile) ((tile) % TILES_D)
#define V_BLOCK(tile) ((tile) % 4)
#define V_CHANNELS(tile) ((tile) / 4)
#endif
#if BITS == 2
#define GROUP_TILES 2
#define GROUP_WORDS 1
#elif BITS == 3
#define GROUP_TILES 4
#define GROUP_WORDS 3
#elif BITS == 4
#define GROUP_TILES 1
#define GROUP_WORDS 1
#elif BITS == 8
#define GROUP_TILES 1
#define GROUP_WORDS 2
#endif
#define WORDS (TILES / GROUP_TILES * GROUP_WORDS)  // 32-bit words per lane, K or V
#define CODE_BYTES (WORDS * 128)
#define CODEC_STEP16 0   // value = (2c + 1 - 2^b) * step, step fp16 per token
#define CODEC_STEP8 1    // the same, step one byte: fp16 bits >> 7
#define CODEC_ASYM 2     // value = (2c + 1 - 2^b) * step + middle, both fp16 per token
#define CODEC_PRMT 3     // 4-bit codebook, looked up by byte permutes; norm fp16 per token
#define CODEC_LUT 4      // codebook in shared memory, two codes a look-up; norm fp16 per token
#define CODEC_CHANNEL 5  // K: step and middle fp16 per channel of the page; V as STEP16

#if BF16
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif

__device__ __forceinline__ u32 smem_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
                 ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// (x & mask) | magic in one LOP3
template <u32 MASK, u32 MAGIC>
__device__ __forceinline__ u32 and_or(u32 x) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(x), "n"(MASK), "n"(MAGIC));
    return r;
}

__device__ __forceinline__ u32 fma_pair(u32 x, u32 factor, u32 addend) {
    u32 r;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(factor), "r"(addend));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(factor), "r"(addend));
#endif
    return r;
}

__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 r;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}

// Both halves hold x, which must be representable in the 16-bit type.
__host__ __device__ constexpr u32 pair_bits(float x) {
    u32 sign = x < 0.0f ? 0x8000u : 0u;
    float rest = x < 0.0f ? -x : x;
    int exponent = 0;
    while (rest >= 2.0f) {
        rest *= 0.5f;
        ++exponent;
    }
    while (rest < 1.0f) {
        rest *= 2.0f;
        --exponent;
    }
    u32 bits = sign | (BF16 ? ((u32)(exponent + 127) << 7) + (u32)((rest - 1.0f) * 128.0f)
                            : ((u32)(exponent + 15) << 10) + (u32)((rest - 1.0f) * 1024.0f));
    return bits * 0x00010001u;
}

__device__ __forceinline__ float half_bits_to_float(u32 bits) {
    float f;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
    return f;
}

// The field of BITS bits at bit OFFSET of each 16-bit half of x, as the odd integers 2c + 1 - 2^BITS in the
// 16-bit type. The mantissa of the magic number (bf16: 2^7, fp16: 2^10) takes the field as it stands; one FMA
// brings it to scale.
template <int OFFSET>
__device__ __forceinline__ u32 centred(u32 x) {
    constexpr u32 field = (1u << BITS) - 1u;
    constexpr u32 mask = (field << OFFSET) * 0x00010001u;
    constexpr float factor = 2.0f / (1 << OFFSET);
    constexpr u32 magic = BF16 ? 0x43004300u : 0x64006400u;
    constexpr u32 factor_pair = pair_bits(factor),
                  addend_pair = pair_bits((BF16 ? -128.0f : -1024.0f) * factor - (float)field);
    return fma_pair(and_or<mask, magic>(x), factor_pair, addend_pair);
}

// The same field left as magic + 2^OFFSET c: for K, where one constant per query head takes the magic number
// out again.
template <int OFFSET>
__device__ __forceinline__ u32 raw(u32 x) {
    return and_or<(((1u << BITS) - 1u) << OFFSET) * 0x00010001u, BF16 ? 0x43004300u : 0x64006400u>(x);
}

// Raw fields: rows g at OFFSET_LOW, rows g + 8 at OFFSET_HIGH, so that a token has one factor.
#define OFFSET_LOW 1
#define OFFSET_HIGH (BITS == 2 ? 3 : BITS == 3 ? 4 : 1)
#if K_FOLD
__device__ __forceinline__ void expand_raw(const u32* w, u32 (&a)[GROUP_TILES][4]) {
#if BITS == 2
    u32 x[4] = {w[0] << 1, w[0] >> 3, w[0] >> 7, w[0] >> 11};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        a[i / 2][2 * (i % 2)] = raw<1>(x[i]);
        a[i / 2][2 * (i % 2) + 1] = raw<3>(x[i]);
    }
#elif BITS == 3
    u32 y = w[0] >> 6, z = w[0] >> 12;
    a[0][0] = raw<1>(w[0]);
    a[0][1] = raw<4>(w[0]);
    a[0][2] = raw<1>(y);
    a[0][3] = raw<4>(y);
    a[1][0] = raw<1>(z);
    u32 m = w[1] << 3;
    y = w[1] >> 3;
    z = w[1] >> 9;
    a[1][1] = raw<4>(m);
    a[1][2] = raw<1>(y);
    a[1][3] = raw<4>(y);
    a[2][0] = raw<1>(z);
    a[2][1] = raw<4>(z);
    y = w[2] >> 6;
    z = w[2] >> 12;
    a[2][2] = raw<1>(w[2]);
    a[2][3] = raw<4>(w[2]);
    a[3][0] = raw<1>(y);
    a[3][1] = raw<4>(y);
    a[3][2] = raw<1>(z);
    a[3][3] = raw<4>(((w[0] & 0x00010001u) << 4) | ((w[1] & 0x00010001u) << 5) | ((w[2] & 0x00010001u) << 6));
#else
    a[0][0] = raw<1>(w[0] << 1);
    a[0][1] = raw<1>(w[0] >> 3);
    a[0][2] = raw<1>(w[0] >> 7);
    a[0][3] = raw<1>(w[0] >> 11);
#endif
}
#endif

#if CODEC == CODEC_LUT
__shared__ u32 lut[1 << (2 * BITS)];
#endif

// Codes of GROUP_TILES tiles from GROUP_WORDS words: A fragments a[tile][0..3]; pair p = 4 * tile + register.
__device__ __forceinline__ void expand(const u32* w, u32 (&a)[GROUP_TILES][4]) {
#if CODEC == CODEC_LUT
#if BITS == 2
#pragma unroll
    for (int p = 0; p < 8; ++p) a[p / 4][p % 4] = lut[(w[0] >> (4 * p)) & 15u];
#elif BITS == 4
#pragma unroll
    for (int p = 0; p < 4; ++p) a[0][p] = lut[(w[0] >> (8 * p)) & 255u];
#endif
#elif CODEC == CODEC_PRMT
    // bf16 magnitudes of the 16-level Gaussian codebook: high and low bytes of 8 entries
    u32 select = w[0] & 0x77777777u, upper = select >> 16;
    u32 high_l = __byte_perm(TABLE_HIGH0, TABLE_HIGH1, select),
        high_h = __byte_perm(TABLE_HIGH0, TABLE_HIGH1, upper);
    u32 low_l = __byte_perm(TABLE_LOW0, TABLE_LOW1, select),
        low_h = __byte_perm(TABLE_LOW0, TABLE_LOW1, upper);
    u32 l01 = __byte_perm(low_l, high_l, 0x5140), l23 = __byte_perm(low_l, high_l, 0x7362);
    u32 h01 = __byte_perm(low_h, high_h, 0x5140), h23 = __byte_perm(low_h, high_h, 0x7362);
    a[0][0] = __byte_perm(l01, h01, 0x5410) | ((w[0] << 12) & 0x80008000u);
    a[0][1] = __byte_perm(l01, h01, 0x7632) | ((w[0] << 8) & 0x80008000u);
    a[0][2] = __byte_perm(l23, h23, 0x5410) | ((w[0] << 4) & 0x80008000u);
    a[0][3] = __byte_perm(l23, h23, 0x7632) | (w[0] & 0x80008000u);
#elif BITS == 2
    u32 x = w[0] << 1, y = w[0] >> 5, z = w[0] >> 11;
    a[0][0] = centred<1>(x);
    a[0][1] = centred<3>(x);
    a[0][2] = centred<5>(x);
    a[0][3] = centred<1>(y);
    a[1][0] = centred<3>(y);
    a[1][1] = centred<5>(y);
    a[1][2] = centred<1>(z);
    a[1][3] = centred<3>(z);
#elif BITS == 3
    // 15 fields at bits 1, 4, 7, 10, 13 of three words; the 16th field is the three bits 0
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        u32 y = w[i] >> 6, z = w[i] >> 12;
        a[(5 * i) / 4][(5 * i) % 4] = centred<1>(w[i]);
        a[(5 * i + 1) / 4][(5 * i + 1) % 4] = centred<4>(w[i]);
        a[(5 * i + 2) / 4][(5 * i + 2) % 4] = centred<1>(y);
        a[(5 * i + 3) / 4][(5 * i + 3) % 4] = centred<4>(y);
        a[(5 * i + 4) / 4][(5 * i + 4) % 4] = centred<1>(z);
    }
    u32 last = ((w[0] & 0x00010001u) << 1) | ((w[1] & 0x00010001u) << 2) | ((w[2] & 0x00010001u) << 3);
    a[3][3] = centred<1>(last);
#elif BITS == 4
    a[0][0] = centred<1>(w[0] << 1);
    a[0][1] = centred<1>(w[0] >> 3);
    a[0][2] = centred<1>(w[0] >> 7);
    a[0][3] = centred<1>(w[0] >> 11);
#elif BITS == 8
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#if BF16
        // 2c - 255 = 16 (2 high - 15) + (2 low - 15); every step is exact in bf16
        constexpr u32 one = pair_bits(1.f), minus143 = pair_bits(-143.f), sixteen = pair_bits(16.f);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            u32 low = and_or<0x001e001eu, 0x43004300u>(j ? w[i] >> 7 : w[i] << 1);
            u32 high = and_or<0x001e001eu, 0x43004300u>(j ? w[i] >> 11 : w[i] >> 3);
            low = fma_pair(low, one, minus143);
            high = fma_pair(high, one, minus143);
            a[0][2 * i + j] = fma_pair(high, sixteen, low);
        }
#else
        a[0][2 * i] = centred<1>(w[i] << 1);
        a[0][2 * i + 1] = centred<1>(w[i] >> 7);
#endif
    }
#endif
}

// All tiles of one code region, handed to f(tile, fragment) in order.
template <bool RAW, class F>
__device__ __forceinline__ void for_each_tile(const u8* codes, int lane, F f) {
    constexpr int VECTOR = WORDS_PER_VECTOR;
    constexpr int CHUNK_WORDS = GROUP_WORDS == 3 ? 3 * VECTOR : (VECTOR > GROUP_WORDS ? VECTOR : GROUP_WORDS);
#pragma unroll
    for (int base = 0; base < WORDS; base += CHUNK_WORDS) {
        u32 w[CHUNK_WORDS];
#pragma unroll
        for (int v = 0; v < CHUNK_WORDS / VECTOR; ++v) {
            const u8* p = codes + (((base / VECTOR + v) * 32 + lane) * VECTOR) * 4;
            if (VECTOR == 4) {
                uint4 x = *(const uint4*)p;
                w[4 * v] = x.x;
                w[4 * v + 1] = x.y;
                w[4 * v + 2] = x.z;
                w[4 * v + 3] = x.w;
            } else {
                w[v] = *(const u32*)p;
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNK_WORDS; i += GROUP_WORDS) {
            u32 a[GROUP_TILES][4];
#if K_FOLD
            if (RAW)
                expand_raw(w + i, a);
            else
#endif
                expand(w + i, a);
#pragma unroll
            for (int j = 0; j < GROUP_TILES; ++j) f((base + i) / GROUP_WORDS * GROUP_TILES + j, a[j]);
        }
    }
}

// Steps (or norms) of the lane's 8 tokens.
__device__ __forceinline__ void load_steps(const u8* p, int g, float (&step)[8]) {
#if CODEC == CODEC_STEP8
    uint2 x = *(const uint2*)(p + 8 * g);
    u32 w[2] = {x.x, x.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        step[4 * i] = half_bits_to_float((w[i] << 7) & 0x7f80u);
        step[4 * i + 1] = half_bits_to_float((w[i] >> 1) & 0x7f80u);
        step[4 * i + 2] = half_bits_to_float((w[i] >> 9) & 0x7f80u);
        step[4 * i + 3] = half_bits_to_float((w[i] >> 17) & 0x7f80u);
    }
#else
    uint4 x = *(const uint4*)(p + 16 * g);
    u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        step[2 * i] = half_bits_to_float(w[i] & 0xffffu);
        step[2 * i + 1] = half_bits_to_float(w[i] >> 16);
    }
#endif
}

#define STEP_BYTES (CODEC == CODEC_STEP8 ? 64 : 128)
#define K_META_BYTES (CODEC == CODEC_CHANNEL ? 4 * HEAD_DIM : CODEC == CODEC_ASYM ? 256 : STEP_BYTES)
#define V_META_BYTES (CODEC == CODEC_ASYM ? 256 : STEP_BYTES)
#define NEEDED_BYTES (2 * CODE_BYTES + K_META_BYTES + V_META_BYTES)
#define PAGE_BYTES (NEEDED_BYTES + 192)  // + positions (u16) and importance (u8)
#define COPY_BYTES (READ_ALL ? PAGE_BYTES : NEEDED_BYTES)

struct State {              // one warp's running softmax over its pages of a sequence
    float out[TILES_D][4];  // out^T: channels g, g+8 x heads 2t, 2t+1
    float max0, max1, sum0, sum1, mid0, mid1;
};

__device__ __forceinline__ void attend_page(const u8* page, const u32 (&q)[TILES_D][2], float q_sum0,
                                            float q_sum1, State& state, int lane) {
#if !COMPUTE
    state.sum0 +=
        (float)*(const u32*)(page + 16 * lane);  // the ring alone: what the copies cost without arithmetic
    return;
#endif
    const int g = lane / 4;
    float s[4][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
    }
    const u8* k_meta = page + 2 * CODE_BYTES;
    const u8* v_meta = k_meta + K_META_BYTES;
#if CODEC == CODEC_CHANNEL
    u32 q_page[TILES_D][2];
    float bias[4] = {0.f, 0.f, 0.f, 0.f};
    {
        const u32* steps = (const u32*)k_meta;  // in the 16-bit type, pairs of channels in q's fragment order
        const u32* middles = steps + HEAD_DIM / 2;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            u32 m0 = middles[8 * i + lane % 4], m1 = middles[8 * i + 4 + lane % 4];
            u32 a[4] = {m0, m0, m1, m1};
            mma(bias, a, q[i][0], q[i][1]);
            q_page[i][0] = fma_pair(q[i][0], steps[8 * i + lane % 4], 0u);
            q_page[i][1] = fma_pair(q[i][1], steps[8 * i + 4 + lane % 4], 0u);
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            s[b][0] = bias[0];
            s[b][1] = bias[1];
            s[b][2] = bias[2];
            s[b][3] = bias[3];
        }
    }
#define Q_PAGE q_page
#else
#define Q_PAGE q
#endif
#if K_FOLD
    constexpr float low = 128.f + (1 << OFFSET_LOW) * ((1 << BITS) - 1) * 0.5f,
                    high = 128.f + (1 << OFFSET_HIGH) * ((1 << BITS) - 1) * 0.5f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        s[b][0] = -low * q_sum0;
        s[b][1] = -low * q_sum1;
        s[b][2] = -high * q_sum0;
        s[b][3] = -high * q_sum1;
    }
#endif
    for_each_tile<true>(page, lane, [&](int tile, const u32(&a)[4]) {
        mma(s[K_BLOCK(tile)], a, Q_PAGE[K_CHANNELS(tile)][0], Q_PAGE[K_CHANNELS(tile)][1]);
    });
#if CODEC != CODEC_CHANNEL
    float step[8];
    load_steps(k_meta, g, step);
#if K_FOLD && OFFSET_HIGH != OFFSET_LOW
#pragma unroll
    for (int i = 1; i < 8; i += 2) step[i] *= 1.f / (1 << (OFFSET_HIGH - OFFSET_LOW));
#endif
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        s[i / 2][2 * (i % 2)] *= step[i];
        s[i / 2][2 * (i % 2) + 1] *= step[i];
    }
#endif
#if CODEC == CODEC_ASYM
    float middle[8];
    load_steps(k_meta + 128, g, middle);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        s[i / 2][2 * (i % 2)] += middle[i] * q_sum0;
        s[i / 2][2 * (i % 2) + 1] += middle[i] * q_sum1;
    }
#endif
    float max0 = s[0][0], max1 = s[0][1];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        max0 = fmaxf(max0, s[i / 2][2 * (i % 2)]);
        max1 = fmaxf(max1, s[i / 2][2 * (i % 2) + 1]);
    }
    // The maximum only has to be near enough that exp2 cannot overflow: move it when a lane exceeds it by
    // 2^8.
    if (__any_sync(0xffffffffu, max0 > state.max0 + 8.f || max1 > state.max1 + 8.f)) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
            max0 = fmaxf(max0, __shfl_xor_sync(0xffffffffu, max0, offset));
            max1 = fmaxf(max1, __shfl_xor_sync(0xffffffffu, max1, offset));
        }
        max0 = fmaxf(max0, state.max0);
        max1 = fmaxf(max1, state.max1);
        float f0 = exp2f(state.max0 - max0), f1 = exp2f(state.max1 - max1);
        state.max0 = max0;
        state.max1 = max1;
        state.sum0 *= f0;
        state.sum1 *= f1;
        state.mid0 *= f0;
        state.mid1 *= f1;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            state.out[i][0] *= f0;
            state.out[i][1] *= f1;
            state.out[i][2] *= f0;
            state.out[i][3] *= f1;
        }
    }
    float v_step[8];
    load_steps(v_meta, g, v_step);
#if CODEC == CODEC_ASYM
    float v_middle[8];
    load_steps(v_meta + 128, g, v_middle);
#endif
    u32 p[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float p0, p1;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p0) : "f"(s[i / 2][2 * (i % 2)] - state.max0));
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p1) : "f"(s[i / 2][2 * (i % 2) + 1] - state.max1));
        state.sum0 += p0;
        state.sum1 += p1;
#if CODEC == CODEC_ASYM
        state.mid0 += p0 * v_middle[i];
        state.mid1 += p1 * v_middle[i];
#endif
        u32 pair = pack_pair(p0 * v_step[i], p1 * v_step[i]);
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(p[i / 2][i % 2]) : "r"(pair));
    }
    for_each_tile<false>(page + CODE_BYTES, lane, [&](int tile, const u32(&a)[4]) {
        mma(state.out[V_CHANNELS(tile)], a, p[V_BLOCK(tile)][0], p[V_BLOCK(tile)][1]);
    });
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// pool: pages; page_index: [pages] position of each page in the pool; cu_pages: [sequences + 1]; q:
// [sequences, 8, HEAD_DIM] 16-bit; partial: [grid + sequences, 8, HEAD_DIM + 2] float32: out (not
// normalised), maximum (base 2), sum
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    decode_pages(const u8* __restrict__ pool, const u32* __restrict__ page_index,
                 const int* __restrict__ cu_pages, const u16* __restrict__ q, float* __restrict__ partial,
                 int pages, int sequences, const u32* __restrict__ lut_source) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(8) u64 barriers[WARPS * STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* own = ring + (size_t)warp * STAGES * COPY_BYTES;
    float* merge = (float*)(ring + (size_t)WARPS * STAGES * COPY_BYTES);  // [WARPS][GROUP][HEAD_DIM + 2]
    const int begin = (int)((long long)pages * blockIdx.x / gridDim.x),
              end = (int)((long long)pages * (blockIdx.x + 1) / gridDim.x);

    if (lane == 0) {
        for (int i = 0; i < STAGES; ++i)
            asm volatile(
                "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_address(&barriers[warp * STAGES + i])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if CODEC == CODEC_LUT
    for (int i = threadIdx.x; i < (1 << (2 * BITS)); i += WARPS * 32) lut[i] = lut_source[i];
#endif
#if CODEC == CODEC_LUT
    __syncthreads();
#endif
    __syncwarp();

    u32 upcoming = 0;          // lane j: page_index of this warp's page number 32 n + j
    auto issue = [&](int n) {  // ask for the warp's n-th page
        int page = begin + warp + n * WARPS;
        if (n % 32 == 0) {
            int mine = page + lane * WARPS;
            upcoming = mine < end ? page_index[mine] : 0u;
        }
        u32 index = __shfl_sync(0xffffffffu, upcoming, n % 32);
        if (page < end && lane == 0) {
            u32 barrier = smem_address(&barriers[warp * STAGES + n % STAGES]);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(COPY_BYTES)
                         : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                    "r"(smem_address(own + (n % STAGES) * COPY_BYTES)),
                "l"(pool + (u64)index * PAGE_BYTES), "r"(COPY_BYTES), "r"(barrier)
                : "memory");
        }
    };
#pragma unroll 1
    for (int n = 0; n < STAGES; ++n) issue(n);

    int sequence = 0;  // the sequence of page `begin`, 32 at a time
    for (int base = 0; base < sequences; base += 32) {
        bool before = base + lane < sequences && cu_pages[base + lane + 1] <= begin;
        int count = __popc(__ballot_sync(0xffffffffu, before));
        sequence += count;
        if (count < 32) break;
    }
    int n = 0;
    for (int segment = begin; segment < end; ++sequence) {
        int segment_end = min(cu_pages[sequence + 1], end);
        u32 q_fragment[TILES_D][2];
        const u32* q_row = (const u32*)(q + ((size_t)sequence * 8 + lane / 4) * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            q_fragment[i][0] = q_row[8 * i + lane % 4];
            q_fragment[i][1] = q_row[8 * i + 4 + lane % 4];
        }
        float q_sum0 = 0.f, q_sum1 = 0.f;
#if CODEC == CODEC_ASYM || K_FOLD
        {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
            u32 one = pack_pair(1.f, 1.f);
            u32 ones[4] = {one, one, one, one};
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) mma(total, ones, q_fragment[i][0], q_fragment[i][1]);
            q_sum0 = total[0];
            q_sum1 = total[1];
        }
#endif
        State state;
        state.max0 = state.max1 = -1e30f;
        state.sum0 = state.sum1 = state.mid0 = state.mid1 = 0.f;
#pragma unroll
        for (int i = 0; i < TILES_D; ++i) {
            state.out[i][0] = state.out[i][1] = state.out[i][2] = state.out[i][3] = 0.f;
        }

#pragma unroll 1
        for (; begin + warp + n * WARPS < segment_end; ++n) {
            wait_barrier(smem_address(&barriers[warp * STAGES + n % STAGES]), (n / STAGES) & 1);
            attend_page(own + (n % STAGES) * COPY_BYTES, q_fragment, q_sum0, q_sum1, state, lane);
            __syncwarp();  // every lane has read the buffer before it is filled again
            issue(n + STAGES);
        }
        // lanes with equal t hold partial sums of the same heads
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
            state.sum0 += __shfl_xor_sync(0xffffffffu, state.sum0, offset);
            state.sum1 += __shfl_xor_sync(0xffffffffu, state.sum1, offset);
            state.mid0 += __shfl_xor_sync(0xffffffffu, state.mid0, offset);
            state.mid1 += __shfl_xor_sync(0xffffffffu, state.mid1, offset);
        }
        const int head = 2 * (lane % 4), g = lane / 4;
        float* row0 = merge + ((size_t)warp * GROUP + head) * (HEAD_DIM + 2);
        float* row1 = row0 + HEAD_DIM + 2;
        if (head < GROUP) {
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) {
                row0[16 * i + g] = state.out[i][0] + state.mid0;
                row0[16 * i + 8 + g] = state.out[i][2] + state.mid0;
            }
            if (g == 0) {
                row0[HEAD_DIM] = state.max0;
                row0[HEAD_DIM + 1] = state.sum0;
            }
        }
        if (head + 1 < GROUP) {
#pragma unroll
            for (int i = 0; i < TILES_D; ++i) {
                row1[16 * i + g] = state.out[i][1] + state.mid1;
                row1[16 * i + 8 + g] = state.out[i][3] + state.mid1;
            }
            if (g == 0) {
                row1[HEAD_DIM] = state.max1;
                row1[HEAD_DIM + 1] = state.sum1;
            }
        }
        __syncthreads();  // all warps' partial results are in the merge area
        float* target = partial + (size_t)(blockIdx.x + sequence) * 8 * (HEAD_DIM + 2);
        for (int i = threadIdx.x; i < GROUP * (HEAD_DIM + 2); i += WARPS * 32) {
            int h = i / (HEAD_DIM + 2), c = i % (HEAD_DIM + 2);
            float top = -1e30f, value = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                top = fmaxf(top, merge[((size_t)w * GROUP + h) * (HEAD_DIM + 2) + HEAD_DIM]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float* row = merge + ((size_t)w * GROUP + h) * (HEAD_DIM + 2);
                value += row[c] * exp2f(row[HEAD_DIM] - top);
            }
            target[i] = c == HEAD_DIM ? top : value;
        }
        __syncthreads();  // the merge area may be written again
        segment = segment_end;
    }
}
