// Bulk copies of pages into shared memory and nothing else: what reading pages can reach.
//
// Threads and data: as packed/packed_attention.cu. Each warp has a ring of `stages` slots and takes `pages` entries
// of its part of `list` [grid, warps, pages] in turn, offsets into `pool` in units of 64 bytes; a page is
// `items` copies of `bytes`, one after the other, and a lane reads 4 bytes of each. ALIKE: whether a copy
// begins where in a line of 128 bytes its source does.
//
// Memory: shared warps * stages * (bytes + 64), rounded up to lines.
using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int MAX_WARPS = 16, MAX_STAGES = 8;

struct Copies {
    const u8* pool;
    const u32* list;
    u32* sink;
    int pages, items, bytes, stages;
};

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

extern "C" __global__ void copy_pages(const __grid_constant__ Copies call) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 barriers[MAX_WARPS * MAX_STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int slot_bytes = (call.bytes + 64 + 127) / 128 * 128, total = call.pages * call.items;
    u8* const ring = shared + warp * call.stages * slot_bytes;
    const u32 barrier = shared_address(barriers + warp * MAX_STAGES);
    if (lane == 0) {
        for (int i = 0; i < call.stages; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * i));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();  // the barriers of this warp are ready
    const u32* own = call.list + ((u64)blockIdx.x * warps + warp) * call.pages;
    u32 entry = 0;
    int next = 0, item = 0;
    auto produce = [&](int slot) {
        if (next == call.pages) return;
        if (next % 32 == 0 && item == 0 && next + lane < call.pages) entry = own[next + lane];
        const u8* from = call.pool + (u64)__shfl_sync(~0u, entry, next % 32) * 64 + item * call.bytes;
        const u32 to = shared_address(ring + slot * slot_bytes) + (ALIKE ? (u32)(u64)from & 64 : 0);
        if (lane == 0)
            asm volatile(
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n\t"
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%2], "
                "[%3], %1, [%0], %4;" ::"r"(barrier + 8 * slot),
                "r"(call.bytes), "r"(to), "l"(from), "l"(0x12f0000000000000ull)  // evict first
                : "memory");
        if (++item == call.items) item = 0, ++next;
    };
    for (int i = 0; i < call.stages; ++i) produce(i);
    int slot = 0;
    u32 parity = 0, sum = 0;
    for (int i = 0; i < total; ++i) {
        asm volatile(
            "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;}" ::
                "r"(barrier + 8 * slot),
            "r"(parity)
            : "memory");
        sum += *(const u32*)(ring + slot * slot_bytes + 64 + 4 * lane);
        __syncwarp();  // every lane has read the slot before it is filled again
        produce(slot);
        if (++slot == call.stages) slot = 0, parity ^= 1;
    }
    if (sum == 0x12345678u) *call.sink = sum;  // or nothing would be read
}
