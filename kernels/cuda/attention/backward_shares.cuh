// Attention backward on Hopper: CTAs of a cluster that share the same keys, so that a short call has work for
// all multiprocessors. Each takes a part of the steps; dk and dv are added up through shared memory, always
// in the order of ranks. Needs HEAD_DIM, BLOCK_M, BLOCK_N, SHARES, CLUSTER (CTAs of a cluster: SHARES, or
// more if several work on the same steps; those that share are CLUSTER / SHARES apart), common/pairs.cuh,
// attention/call.cuh and attention/backward.cuh.
#pragma once

constexpr int COMPUTING = 256;  // threads, from 128 on

// A CTA's steps: tiles from `at` on, before `end`. CTAs that share keys have as many each, to within one.
struct Part {
    Tile at, end;
    __device__ __forceinline__ bool more() const {
        return at.head < end.head || (SHARES > 1 && at.head == end.head && at.row < end.row);
    }
    __device__ __forceinline__ void next(const Rows& rows) { at = next_tile(at, rows); }
};

__device__ __forceinline__ Part find_part(const Call& call, const Rows& rows, int kv_head) {
    const Tile first = first_tile(call, rows, kv_head), end = {(kv_head + 1) * call.group, rows.first};
    if (SHARES == 1 || first.head == end.head) return {first, end};
    const int tiles = (rows.last - rows.first + BLOCK_M - 1) / BLOCK_M, steps = tiles * call.group;
    const auto tile = [&](int step) -> Tile {
        return {first.head + step / tiles, rows.first + step % tiles * BLOCK_M};
    };
    const int share = blockIdx.x % CLUSTER / (CLUSTER / SHARES);
    return {tile(share * steps / SHARES), tile((share + 1) * steps / SHARES)};
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Reads an address of the shared memory of a CTA of the cluster.
__device__ __forceinline__ float4 read_of(u32 address, int rank) {
    float4 x;
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n\t"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(address), "r"(rank)
        : "memory");
    return x;
}

// Adds up what the CTAs of a cluster have of dK or dV in their shared memory, in the order of their ranks,
// and writes the CTA's share of the keys; all computing threads.
__device__ __forceinline__ void write_shares(const Tensor& t, const Call& call, const Span& s,
                                             const Keys& keys, u32 sums, float factor) {
    constexpr int OWN_KEYS = BLOCK_N / SHARES, PIECES = HEAD_DIM / 4, STEP = CLUSTER / SHARES;
    const int rank = blockIdx.x % CLUSTER;
    for (int i = threadIdx.x - 128; i < OWN_KEYS * PIECES; i += COMPUTING) {
        const int own = rank / STEP * OWN_KEYS + i / PIECES, channel = i % PIECES * 4;
        const int key = keys.block * BLOCK_N + own;
        if (key >= s.keys) return;
        float4 parts[SHARES], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int j = 0; j < SHARES; ++j)
            parts[j] = read_of(sums + 4 * place_of(own, channel), rank % STEP + j * STEP);
#pragma unroll
        for (int j = 0; j < SHARES; ++j)
            sum.x += parts[j].x, sum.y += parts[j].y, sum.z += parts[j].z, sum.w += parts[j].w;
        u16* const to = row_of(t, s, s.k0, key, keys.head);
        write_pair(to, channel, call.dim, pack_pair(sum.x * factor, sum.y * factor));
        write_pair(to, channel + 2, call.dim, pack_pair(sum.z * factor, sum.w * factor));
    }
}
