// Groups along rows: a group has 32 LANES elements on LANES lanes. Its layout, its lowest and highest values,
// and its mean square.
//
// A warp takes tiles of 1,024 elements, that is 32 / LANES groups; a lane 32 elements of one group. Element e
// of a group is, by its bits from the top, e = (j, t, k): load j of 32 / PER_LOAD, lane t of LANES, element k
// of the 16 bytes of a load. So lanes of a group read neighbouring 16 bytes, sums by halves run over j and k
// in registers, over t by shuffles.
//
// Macro: LANES, a power of two.
#pragma once
#include "codec/codes.cuh"
#include "codec/reduce.cuh"

constexpr int GROUP = 32 * LANES;
constexpr int LOADS = 32 / PER_LOAD;

struct Lane {
    int lane;     // of the warp
    int at;       // of its first element in the tile: element k of load j is at + j *
                  // STRIDE + k
    i64 group;    // its group in the array
    bool inside;  // whether there is that group
    static constexpr int STRIDE = LANES * PER_LOAD;
};

__device__ __forceinline__ Lane lane_of(i64 first, int here) {
    Lane me;
    me.lane = threadIdx.x % 32;
    const int start = me.lane / LANES * GROUP;
    me.at = start + me.lane % LANES * PER_LOAD;
    me.group = (first + start) / GROUP;
    me.inside = start < here;
    return me;
}

// Adds the upper half of the first 2 FROM elements to the lower, and so on down to TO.
template <int FROM, int TO>
__device__ __forceinline__ void add_halves(float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < FROM; ++i) x[i] = __fadd_rn(x[i], x[i + FROM]);
    if constexpr (FROM > TO) add_halves<FROM / 2, TO>(x);
}

// The sum over a group by halves: first element i and i + GROUP / 2, at last the last two; of squares of
// elements times `down`. Squares of float16 are exact and far from the ends of float32's range, so they need
// no factor and may be fused with the first addition.
__device__ __forceinline__ float sum_of_squares(const float (&v)[32], float down) {
    float squares[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if constexpr (DTYPE == FLOAT16) {
            squares[i] = __fmaf_rn(v[i], v[i], __fmul_rn(v[i + 16], v[i + 16]));
        } else {
            const float x = __fmul_rn(v[i], down), y = __fmul_rn(v[i + 16], down);
            squares[i] = __fadd_rn(__fmul_rn(x, x), __fmul_rn(y, y));
        }
    }
    add_halves<8, PER_LOAD>(squares);
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) squares[k] = of_lanes<LANES>(squares[k], sum);
    add_halves<PER_LOAD / 2, 1>(squares);
    return squares[0];
}

// The loads of a lane of the tile that begins at element `first`; zeros where it has no group.
__device__ __forceinline__ void load_lane(const void* x, i64 first, const Lane& me, uint4 (&raw)[LOADS]) {
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        raw[j] = make_uint4(0, 0, 0, 0);
        if (me.inside)
            raw[j] = *(const uint4*)((const u8*)x + (first + me.at + j * Lane::STRIDE) * ELEMENT_BYTES);
    }
}

__device__ __forceinline__ void all_elements(const uint4 (&raw)[LOADS], float (&v)[32]) {
#pragma unroll
    for (int j = 0; j < LOADS; ++j) elements(raw[j], v + j * PER_LOAD);
}

// The lowest and highest value of a lane, 16-bit elements two at a time; but for AFFINE, the largest
// magnitude.
__device__ __forceinline__ void extremes(const uint4 (&raw)[LOADS], const float (&v)[32], float& low,
                                         float& high) {
    if constexpr (DTYPE == FLOAT32) {
        low = v[0], high = CODEC == AFFINE ? v[0] : fabsf(v[0]);
#pragma unroll
        for (int i = 1; i < 32; ++i) {
            if (CODEC == AFFINE) low = lower(low, v[i]);
            high = higher(high, CODEC == AFFINE ? v[i] : fabsf(v[i]));
        }
    } else {
        u32 lows = raw[0].x, highs = CODEC == AFFINE ? raw[0].x : absolute_pair(raw[0].x);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const u32 words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (CODEC == AFFINE) lows = lower_pair(lows, words[i]);
                highs = higher_pair(highs, CODEC == AFFINE ? words[i] : absolute_pair(words[i]));
            }
        }
        const float2 l = pair_values(lows), h = pair_values(highs);
        low = lower(l.x, l.y), high = higher(h.x, h.y);
    }
}

// The root mean square of a group, whose largest magnitude is `high`; float16 elements need none.
__device__ __forceinline__ float root_mean_square(const float (&v)[32], float high) {
    float up, down;
    powers_near(DTYPE == FLOAT16 ? 1.f : high, up, down);
    const float mean = __fmul_rn(sum_of_squares(v, down), 1.f / GROUP);  // GROUP is a power of two
    return __fmul_rn(__fsqrt_rn(mean), up);
}
