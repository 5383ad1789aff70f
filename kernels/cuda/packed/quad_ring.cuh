// The ring of a warp: bulk copies bring its quads into slots in shared memory, each slot with a barrier.
//
// A quad is one item of the ring if it is no larger than 4 bits make it; else K and V are items of their own,
// in two halves of two pages each at width 16. A page is a copy, which the lane that holds it asks for.
#pragma once

#include "packed/call.cuh"
#include "packed/state.cuh"

constexpr int MAX_STAGES = 6;
constexpr bool MAY_BE_ONE = (IN_BLOCKS || WIDTHS_K & 7) && (WIDTHS_V & 7),
               ALL_ARE_ONE = !IN_BLOCKS && (WIDTHS_K | WIDTHS_V) <= 7;

// The bits of a page, which are known if there is one width.
template <int WIDTHS>
__host__ __device__ constexpr int bits_of(int bits) {
    return WIDTHS & (WIDTHS - 1) ? bits : WIDTHS == 1 ? 2 : WIDTHS == 2 ? 3 : WIDTHS;
}

// The width or profile of K of a page, which is known if there is one.
__device__ __forceinline__ int key_bits_of(int bits_k) {
#if IN_BLOCKS
    return NUM_PROFILES == 1 && !(WIDTHS_K & RAW) ? profile_at(0) : bits_k;
#else
    return bits_of<WIDTHS_K>(bits_k);
#endif
}

__device__ __forceinline__ bool is_one_item(int bits_k, int bits_v) {
    if (IN_BLOCKS) return MAY_BE_ONE && bits_k != 16 && widths_before(bits_k, KEY_BLOCKS) + 4 * bits_v <= 32;
    return ALL_ARE_ONE || (MAY_BE_ONE && bits_k + bits_v <= 8);
}

// Of a side of a page: bytes of codes, and of these and their scales.
__device__ __forceinline__ u32 code_bytes(int bits) {
    return 128 * words_of(bits, TILES_D);
}

__device__ __forceinline__ u32 side_bytes(int bits) {
    return code_bytes(bits) + (bits < 16 ? 16 : 0);
}

__device__ __forceinline__ u32 key_side_bytes(int bits_k) {
    if (!IN_BLOCKS || ((WIDTHS_K & RAW) && bits_k == 16)) return side_bytes(bits_k);
    return 128 * words_of(widths_before(bits_k, KEY_BLOCKS), BLOCK_TILES) + 16;
}

// What an item has of a page of its quad, pages `first` to `first` + `pages` - 1.
struct Part {
    u32 from, bytes;
    int first, pages;
    bool last;  // of the items of the quad
};

__device__ __forceinline__ Part part_of(const Rung& rung, int item) {
    const int bits_k = key_bits_of(rung.bits_k), bits_v = bits_of<WIDTHS_V>(rung.bits_v);
    const u32 k_bytes = key_side_bytes(bits_k), v_bytes = side_bytes(bits_v);
    if (is_one_item(bits_k, bits_v)) return {0, k_bytes + v_bytes, 0, 4, true};
    const bool k_in_halves = (WIDTHS_K & RAW) && bits_k == 16, v_in_halves = (WIDTHS_V & RAW) && bits_v == 16;
    const int of_v = item - (k_in_halves ? 2 : 1);
    if (of_v < 0) return {0, k_bytes, k_in_halves ? 2 * item : 0, k_in_halves ? 2 : 4, false};
    return {k_bytes, v_bytes, v_in_halves ? 2 * of_v : 0, v_in_halves ? 2 : 4, of_v == v_in_halves};
}

// Pages are read once, so they leave the second-level cache first, and tables and scaled_p stay: what
// createpolicy.fractional.L2::evict_first gives for all of a copy.
constexpr u64 EVICT_FIRST = 0x12f0000000000000ull;

__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Source and target of a copy have to lie alike in lines of 128 bytes, or it runs at 92 to 98 % of its speed.
// Pages begin at multiples of 16, so each has room to be shifted.
constexpr u32 LINE = 128, ROOM_TO_SHIFT = LINE - 16;

// The label of a slot: where its four pages begin in shared memory, each with its word, which is rung | count
// << 8, with a window | MASKED | the upper 16 bits of positions << 16; and offsets of the slot's barrier, of
// the quad's column in the table, if scores are kept, and of the pages' indices in their pool, with a window.
constexpr u32 LABEL_BYTES = 64, BARRIER = 32, COLUMN = 40, INDICES = 48;
constexpr u32 RUNG = MAX_RUNGS - 1, MASKED = 1 << 15;

// Labels are addresses in shared memory, which the compiler would compute again for each item.
__device__ __forceinline__ void store_shared(u32 to, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_shared(u32 from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ int tokens_of(u32 word) {
    return word >> 8 & 31;
}

struct PageWords {
    u32 of[4];

    __device__ __forceinline__ bool have(u32 bits) const { return (of[0] | of[1] | of[2] | of[3]) & bits; }
    __device__ __forceinline__ bool are_full() const { return of[0] & of[1] & of[2] & of[3] & 16 << 8; }
};

// What a slot holds: an item of a quad.
struct Item {
    const u8* page[4];
    PageWords words;
};

// Waits for the item of a slot.
__device__ __forceinline__ Item wait_for(u32 label, u32 parity) {
    asm volatile(
        "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;}" ::"r"(
            label + BARRIER),
        "r"(parity)
        : "memory");
    Item r;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(label + 8 * i)
                     : "memory");
        r.page[i] = (const u8*)__cvta_shared_to_generic(x.x), r.words.of[i] = x.y;
        r.page[i + 1] = (const u8*)__cvta_shared_to_generic(x.z), r.words.of[i + 1] = x.w;
    }
    return r;
}

// The lane that holds page `page` of a quad asks for it, if it has tokens and is in the item, and says in the
// label of the slot where it will be.
__device__ __forceinline__ void ask_for_page(const Part& part, const u8* record, u32 word, u32 label,
                                             u32 slot, int page) {
    const u8* from = record + part.from;
    const u32 number = page - part.first, begin = slot + number * (part.bytes + ROOM_TO_SHIFT);
    const u32 to = begin + (((u32)(u64)from - begin) & (LINE - 1));
    const bool copied = number < part.pages && tokens_of(word);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(label + 8 * page), "r"(to), "r"(word) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(label + BARRIER),
                 "r"(copied ? part.bytes : 0)
                 : "memory");
    if (copied) copy_bulk(to, from, part.bytes, label + BARRIER);
}

// Scales of the lane's slots of the four pages, whose bytes begin `from` behind the beginning of a page.
__device__ __forceinline__ Scales load_scales(const Item& item, u32 from, int lane) {
    u32 bytes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 low = ((const u16*)(item.page[2 * i] + from))[lane / 4];
        const u32 high = ((const u16*)(item.page[2 * i + 1] + from))[lane / 4];
        bytes[i] = __byte_perm(low, high, 0x5410);
    }
    return scales_of(bytes);
}

// The same, of which those of slots without a token, which may be NaN, are 0.
__device__ __forceinline__ Scales load_live_scales(const Item& item, u32 from, const PageWords& words,
                                                   int lane) {
    Scales r = load_scales(item, from, lane);
    if (!words.are_full()) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int slot = lane / 4 * 2 + i % 2;
            const u32 live = (slot < tokens_of(words.of[i / 2 * 2]) ? 0xffffu : 0u) |
                             (slot < tokens_of(words.of[i / 2 * 2 + 1]) ? 0xffff0000u : 0u);
            *(u32*)&r.half2s[i] &= live;
        }
    }
    return r;
}
