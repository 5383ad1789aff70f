// The ring of a warp: bulk copies bring its pages into slots in shared memory, each slot with a barrier.
#pragma once

#include "packed/call.cuh"

constexpr bool MAY_BE_ONE = (WIDTHS_K & 7) && (WIDTHS_V & 7), ALL_ARE_ONE = (WIDTHS_K | WIDTHS_V) <= 7;

// The bits of a page, which are known if there is one width.
template <int WIDTHS>
__host__ __device__ constexpr int bits_of(int bits) {
    return WIDTHS & (WIDTHS - 1) ? bits : WIDTHS == 1 ? 2 : WIDTHS == 2 ? 3 : WIDTHS;
}

// A page is one item if it is no larger than 4 bits make it; else K and V are items of their own, in two
// halves each at width 16.
__device__ __forceinline__ bool is_one_item(const Rung& rung) {
    return ALL_ARE_ONE || (MAY_BE_ONE && rung.bits_k + rung.bits_v <= 8);
}

// Pages are read once, so they leave the second-level cache first, and tables and scaled_p stay: what
// createpolicy.fractional.L2::evict_first gives for all of a copy.
constexpr u64 EVICT_FIRST = 0x12f0000000000000ull;

__device__ __forceinline__ void copy_bulk(u8* to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Where an item begins in its slot. Source and target of a copy have to lie alike in lines of 128 bytes, or
// it runs at 92 to 98 % of its speed; and pages begin at multiples of 64. The word of a slot has this bit
// beside its rung.
constexpr u32 SHIFT = 64, RUNG = MAX_RUNGS - 1;

__device__ __forceinline__ u32 shift_of(const u8* page, const u8* slot) {
    return ((u32)(u64)page ^ shared_address(slot)) & SHIFT;
}

// Asks for part `part` of a page and says whether it is the last; lane 0 copies.
__device__ __forceinline__ bool copy_part(const Rung& rung, const u8* page, int part, u8* to, u32 barrier,
                                          int lane) {
    const int bits_k = bits_of<WIDTHS_K>(rung.bits_k), bits_v = bits_of<WIDTHS_V>(rung.bits_v);
    const u32 k_bytes = 8 * HEAD_DIM * bits_k, v_bytes = 8 * HEAD_DIM * bits_v;
    const u32 k_scales = !(WIDTHS_K & RAW) || bits_k < 16 ? 64 : 0;
    const u32 v_scales = !(WIDTHS_V & RAW) || bits_v < 16 ? 64 : 0;
    u32 bytes = k_bytes + v_bytes + k_scales + v_scales, from = 0, scales = 0, scales_from = 0;
    bool last = true;
    if (!is_one_item(rung)) {
        const int k_parts = k_scales ? 1 : 2, v_parts = v_scales ? 1 : 2;
        if (part < k_parts) {
            bytes = k_bytes / k_parts;
            from = part * bytes;
            scales = k_scales;
            scales_from = k_bytes + v_bytes;
        } else {
            bytes = v_bytes / v_parts;
            from = k_bytes + (part - k_parts) * bytes;
            scales = v_scales;
            scales_from = k_bytes + v_bytes + k_scales;
        }
        last = part + 1 == k_parts + v_parts;
    }
    if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes + scales)
                     : "memory");
        copy_bulk(to, page + from, bytes, barrier);
        if (!ALL_ARE_ONE && scales) copy_bulk(to + bytes, page + scales_from, scales, barrier);
    }
    return last;
}

// What is known of the page in a slot: its entry, and its word. `at` is an address in shared memory, which
// the compiler would compute again for each page.
__device__ __forceinline__ void write_page(u32 at, u32 entry, u32 word) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(entry), "r"(word) : "memory");
}

__device__ __forceinline__ uint2 read_page(u32 at) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(at) : "memory");
    return r;
}

// What a slot holds.
struct Item {
    const u8* data;
    uint2 word;
};

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
