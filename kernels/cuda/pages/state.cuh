// One layer of a cache in device memory, and how tokens are told to move in it.
//
// An array of LayerState lies in device memory, one a layer, so that a launch can serve many layers. A bh
// is a (row, KV head). All pages of a layer lie in its arena; a page's address counts UNIT bytes, and so does
// `index`, so attention gets pool = arena and record = UNIT for every rung. The arena is cut into slabs; a
// slab belongs to one rung at a time. The pages of a rung have the numbers 0 to used - 1 without a gap: a
// freed page is replaced by a copy of the last one. Tables of bh are sorted by rung, and a rung has whole
// quads of entries there, of which the last may have fewer pages.
#pragma once

#include "common/pairs.cuh"

constexpr int CACHE_RUNGS = 16;
constexpr int PAGE = 16, QUAD = 4;  // tokens of a page, pages of a quad: all of one rung
constexpr u32 UNIT = 16;
constexpr u32 NO_PAGE = ~0u;  // LayerState::index where a quad has fewer pages
constexpr int OPEN_PAGES = 2;
constexpr int WAITING_PAGES = 5, WAITING_ENTRIES = (WAITING_PAGES + QUAD - 1) / QUAD * QUAD;
constexpr int LAST = 64;       // the first tokens of a row, before this one, make the frame of its keys
constexpr int ASKING = 48;     // the first token of these whose queries count, too
constexpr u8 NEW_TOKEN = 255;  // Move::from_rung

struct CacheRung {
    u32 record;          // of a page, in units
    u32 per_slab;        // pages
    u16 bits_k, bits_v;  // of K the digits of its profile, 0x8422, where keys are kept in blocks
    u32 tail;  // byte offset of the positions in a record, u16[PAGE]; importance, u8[PAGE], is behind
};

struct LayerState {
    CacheRung rungs[CACHE_RUNGS];  // lowest first; width 0 is not among them
    u8* arena;                     // [max_slabs * slab_units * UNIT]
    u8 *rung, *count;              // [num_bh][entries]
    u32* index;                    // [num_bh][entries]: address of the page, or NO_PAGE
    u16* base;                     // [num_bh][entries]: position >> 16 of its tokens
    int* num_pages;                // [num_bh]: entries, those without a page among them
    __half* k_mean;                // [num_bh][HEAD_DIM]
    u8* k_shift;                   // [num_bh][HEAD_DIM / 2]: binary orders that pairs are scaled down by
    signed char* exponent;  // [num_bh][2] of K and V, k_order and k_gain only where keys are kept in blocks:
    u8* k_order;            // [num_bh][HEAD_DIM / 2]: rotary pairs in order; see pages/profiles.cuh
    float* k_gain;          // [num_bh][KEY_BLOCKS]: what blocks are multiplied by, of 11 significant bits
    short* k_ratio;         // [num_bh][HEAD_DIM / 2], there alone: what frames are fitted to; see refit.cuh
    float* query_sums;  // [num_bh][HEAD_DIM]: magnitudes of queries so far, of rows that wait; see means.cu
    int* waits;         // [batch]: 1 while the tokens of a row wait for the mean of its keys
    int* open;          // [num_bh][OPEN_PAGES]: entries that take the next tokens in order, or -1
    int* seqlen;        // [num_bh]: time steps so far, equal for all bh
    int* used;          // [CACHE_RUNGS]: live pages
    int* slab_count;    // [CACHE_RUNGS]
    int* slabs;         // [num_rungs][max_slabs]
    int* free_slabs;    // [max_slabs], a stack: the last of num_free is taken next
    int* num_free;      // [1]
    u32* entry_of;      // [num_rungs][max_pages]: bh * entries + entry of a page by number
    int* slab_slot;     // [max_slabs]: the index of a slab in `slabs` of its rung
    long long* budget;  // [batch]: bytes that pages, tables and key means of a row may take
    int* status;        // [1]: 0, or a bit of PlanStatus that the host finds when it next looks
    u8* waiting;        // [num_bh][WAITING_PAGES] pages of rung num_rungs, which no plan sees; see means.cu
    int batch, heads, entries, num_rungs, max_slabs, max_pages, slab_units, evicts;
    int sliding_window;  // a query sees so many tokens, itself the last; 0: all
};

enum PlanStatus { OVER_BUDGET = 1, TABLE_FULL = 4, RETRY = 8 };

// The address of page `number` of rung r.
__device__ __forceinline__ u32 page_address(const LayerState& s, int r, u32 number) {
    const u32 per_slab = s.rungs[r].per_slab, slab = number / per_slab;
    return (u32)s.slabs[r * s.max_slabs + slab] * (u32)s.slab_units +
           (number - slab * per_slab) * s.rungs[r].record;
}

// A token on its way to a slot. It comes from a slot of a page of bh `token`, or it is new: then `from` is
// its bh and `token` = row * num_new + step says which of the caller's keys and values it is.
struct Move {
    u32 from, to;
    u8 from_slot, to_slot, from_rung, to_rung;
    u32 token;
};

// A whole page that changes its place; a page is copied to a free place only.
struct PageCopy {
    u32 from, to, units, unused;
};

// What a layer is told: moves sorted by their destination, begins[g] to begins[g + 1] for the g-th page. The
// slots of a destination that no move names keep what they hold, so they may be sources of the same list.
struct MoveList {
    const Move* moves;
    const u32* begins;      // [num_groups + 1]
    const int* num_groups;  // [1]
    const PageCopy* copies;
    const int* num_copies;  // [1]
};

// Keys and values that are not stored yet, (batch, num_new, heads, HEAD_DIM) by strides in elements.
struct NewTokens {
    const u16 *k, *v;
    const u8* valid;       // [batch][num_new], 0: padding; or null: none is
    const u8* importance;  // [num_bh][num_new], codes
    long long k_batch, k_step, k_head, v_batch, v_step, v_head;
    int num_new, first;    // first: the position of step 0
    const int* positions;  // [batch][num_new], or null: first, first + 1, ...
};

// ---- Importance: 0, or eighths of a binary order around 192, as in kvlab.cache.pages, bit for bit

__device__ __forceinline__ u8 encode_importance(float x) {
    // Where an eighth ends: 2^((2 j + 1) / 16), the next float32 above it.
    const u32 bits = __float_as_uint(x), m = bits & 0x7fffffu;
    int code = 192 + 8 * ((int)(bits >> 23) - 127);
    code += (m >= 0x05aac4u) + (m >= 0x11c3d4u) + (m >= 0x1ef533u) + (m >= 0x2d583fu) + (m >= 0x3d08a4u) +
            (m >= 0x4e248du) + (m >= 0x60ccdfu) + (m >= 0x75257eu);
    return x > 0.f ? (u8)min(max(code, 1), 255) : 0;
}

__device__ __forceinline__ float decode_importance(u8 code) {
    const int e = (int)code - 192, j = e & 7;
    const u32 m = j == 0   ? 0u
                  : j == 1 ? 0x0b95c2u
                  : j == 2 ? 0x1837f0u
                  : j == 3 ? 0x25fed7u
                  : j == 4 ? 0x3504f3u
                  : j == 5 ? 0x45672au
                  : j == 6 ? 0x5744fdu
                           : 0x6ac0c7u;
    return code ? __uint_as_float((u32)((e >> 3) + 127) << 23 | m) : 0.f;
}
