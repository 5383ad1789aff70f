// How the pages of a warp reach shared memory: bulk copies into the slots of its ring, each with a barrier.
//
// Needs HEAD_DIM, WIDTHS_K, WIDTHS_V, packed_call.cuh and pairs.cuh.
#pragma once

constexpr bool MAY_BE_ONE = (WIDTHS_K & 7) && (WIDTHS_V & 7), ALL_ARE_ONE = (WIDTHS_K | WIDTHS_V) <= 7;

// A page is one item if it is no larger than 4 bits make it; else K and V are items of their own, in two
// halves each at width 16.
__device__ __forceinline__ bool is_one_item(const Rung& rung) {
    return ALL_ARE_ONE || (MAY_BE_ONE && rung.bits_k + rung.bits_v <= 8);
}

// Pages are read once, so they leave the second-level cache first, and tables and weights stay.
__device__ __forceinline__ void copy_bulk(u8* to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile(
        "{.reg .b64 first;\ncreatepolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], "
        "first;}" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Asks for part `part` of a page and says whether it is the last; lane 0 copies.
__device__ __forceinline__ bool copy_part(const Rung& rung, u32 index, int part, u8* slot, u32 barrier,
                                          int lane) {
    const u8* page = rung.pool + (u64)index * rung.record;
    const u32 k_bytes = 8 * HEAD_DIM * rung.bits_k, v_bytes = 8 * HEAD_DIM * rung.bits_v;
    const u32 k_steps = rung.bits_k < 16 ? 64 : 0, v_steps = rung.bits_v < 16 ? 64 : 0;
    u32 bytes = k_bytes + v_bytes + k_steps + v_steps, from = 0, steps = 0, steps_from = 0;
    bool last = true;
    if (!is_one_item(rung)) {
        const int k_parts = k_steps ? 1 : 2, v_parts = v_steps ? 1 : 2;
        if (part < k_parts) {
            bytes = k_bytes / k_parts;
            from = part * bytes;
            steps = k_steps;
            steps_from = k_bytes + v_bytes;
        } else {
            bytes = v_bytes / v_parts;
            from = k_bytes + (part - k_parts) * bytes;
            steps = v_steps;
            steps_from = k_bytes + v_bytes + k_steps;
        }
        last = part + 1 == k_parts + v_parts;
    }
    if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes + steps)
                     : "memory");
        copy_bulk(slot, page + from, bytes, barrier);
        if (!ALL_ARE_ONE && steps) copy_bulk(slot + bytes, page + steps_from, steps, barrier);
    }
    return last;
}

// What a page that is not read adds to its barrier in place of bytes; lane 0.
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}
