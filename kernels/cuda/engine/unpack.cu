// A packed matrix becomes rows again, for products of many tokens: undoes kvlab/engine/packing.py `pack`.
//
// A warp has a block of 16 rows by 32 columns. A lane holds 8 neighbouring columns of two rows, half of each
// in either fragment, so it writes 16 bytes to each row; lanes 4 g to 4 g + 3 fill 64 bytes of rows g and g
// + 8. No shared memory.
#include "common/words.cuh"

constexpr int WARPS = 8;

struct Unpack {
    const uint4* packed;  // [tiles][blocks][2][32]
    uint4* rows;          // [16 * tiles][4 * blocks]
    int blocks;           // of 32 columns
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) unpack(const __grid_constant__ Unpack call) {
    const int lane = threadIdx.x % 32, tile = blockIdx.x;
    for (int block = blockIdx.y * WARPS + threadIdx.x / 32; block < call.blocks; block += gridDim.y * WARPS) {
        const uint4* from = call.packed + ((i64)tile * call.blocks + block) * 64 + lane;
        const uint4 first = __ldcs(from), second = __ldcs(from + 32);
        uint4* to = call.rows + ((i64)tile * 16 + lane / 4) * (4 * call.blocks) + 4 * block + lane % 4;
        *to = make_uint4(first.x, first.z, second.x, second.z);
        to[(i64)32 * call.blocks] = make_uint4(first.y, first.w, second.y, second.w);
    }
}

// clang-format off
// gate: registers<=32 arch=sm_80,sm_90a,sm_100a,sm_120a
// clang-format on
