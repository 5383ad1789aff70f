// One decoder, by macros: what each product of a layer multiplies, and the struct a launch takes.
//
// Macros: BATCH tokens of 16-bit type BF16; HIDDEN, HEADS_Q, HEADS_KV, HEAD_DIM, ROTARY_DIM, FFN of the
// model, and its pieces: PARALLEL (attention and MLP read the same x), LAYER_NORM (else RMS norms), GATED_MLP
// (else GELU), HEAD_NORMS (of queries and keys); PACKED: keys and values are those of a packed cache, whose
// own launches attend and store; SPLITS, WARPS, ADDER_GROUPS, SLOTS, SLOT_BLOCKS as in engine/token.cu.
#pragma once

#include "engine/embed.cuh"

constexpr int Q_COLS = HEADS_Q * HEAD_DIM, QKV_ROWS = Q_COLS + 2 * HEADS_KV * HEAD_DIM;
constexpr int ADDERS = (BATCH + 3) / 4, MMA_THREADS = 32 * WARPS, ADD_THREADS = 32 * ADDERS * ADDER_GROUPS;
constexpr int THREADS = MMA_THREADS + ADD_THREADS + 32;
static_assert(THREADS <= 1024 && BATCH <= 16, "one CTA, tokens in the columns of two mma");
constexpr int BLOCK_BYTES = 1024, SLOT_BYTES = SLOT_BLOCKS * BLOCK_BYTES;
constexpr int N_TILES = (BATCH + 7) / 8;
constexpr int SUM_PITCH = 20, SUMS = WARPS * BATCH * SUM_PITCH;  // floats of a tile

enum Kind { QKV, UP, OUT, O, GATED, DOWN, HEAD };

constexpr int OF_MMA = 1;                            // named barrier
constexpr int PHASES = PARALLEL ? 3 : 5;             // of a layer, attention among them
constexpr int PRODUCTS = PARALLEL ? 3 : 4;           // of a layer
constexpr Kind MLP_KIND = GATED_MLP ? GATED : UP;    // of layers that are not parallel
constexpr int MLP_ROWS = GATED_MLP ? 2 * FFN : FFN;  // of that product

__host__ __device__ constexpr int columns_of(Kind kind) {
    return kind == OUT    ? (Q_COLS + FFN) / SPLITS
           : kind == O    ? Q_COLS / SPLITS
           : kind == DOWN ? FFN / SPLITS
                          : HIDDEN;
}
__host__ __device__ constexpr bool adds_to_hidden(Kind kind) {
    return kind == OUT || kind == O || kind == DOWN;
}
__host__ __device__ constexpr int pitch_of(int columns) {
    return (2 * columns + 127) / 128 * 128 + 64;  // 8 rows at one column meet all banks
}
__host__ __device__ constexpr int larger(int a, int b) {
    return a > b ? a : b;
}
template <Kind KIND>
struct Shape {
    static constexpr int COLS = columns_of(KIND), BLOCKS = COLS / 32, STAGES = BLOCKS / SLOT_BLOCKS;
    static constexpr int PITCH = pitch_of(COLS);
    // Slots that the warps multiply at a time, each the work of WARPS / SIDES of them. All slots of a warp in
    // a phase are every SIDES-th of the ring, so it sees all that they ever hold, and phases of barriers
    // alternate.
    static constexpr int SIDES = STAGES % 4 == 0 && WARPS % 4 == 0 && SLOTS % 4 == 0   ? 4
                                 : STAGES % 2 == 0 && WARPS % 2 == 0 && SLOTS % 2 == 0 ? 2
                                                                                       : 1;
    static constexpr int PARTS = adds_to_hidden(KIND) ? SPLITS : 1;
    static_assert(COLS % 32 == 0 && BLOCKS % SLOT_BLOCKS == 0, "slots are full");
};
constexpr int WIDEST =
    PARALLEL ? larger(columns_of(OUT), HIDDEN) : larger(larger(columns_of(O), columns_of(DOWN)), HIDDEN);
constexpr int GROUP = HEADS_Q / HEADS_KV;
// Query heads of a warp; teams of warps that read the same keys, as many as the group needs and there are
// warps for; and how often a KV head is read for all of its group.
constexpr int HEADS_OF_WARP = GROUP % 2 || BATCH > 8 ? 1 : 2;
__host__ __device__ constexpr int largest_divisor(int number, int limit) {
    int found = limit < number ? limit : number;
    while (number % found) --found;
    return found;
}
constexpr int TEAMS = largest_divisor(GROUP / HEADS_OF_WARP, WARPS), PASSES = GROUP / HEADS_OF_WARP / TEAMS;
constexpr int HEADS = TEAMS * HEADS_OF_WARP;  // of a pass
constexpr int MERGED_ROW = HEAD_DIM + 2;      // channels, maximum, sum
// At attention, of a segment: queries of a pass, newest key and value; what warps have summed.
constexpr int NEWEST_BYTES = (HEADS + 2) * HEAD_DIM * 2;
constexpr int SEGMENT_BYTES = NEWEST_BYTES + WARPS * HEADS_OF_WARP * MERGED_ROW * 4;
constexpr int X_BYTES = (larger(BATCH * pitch_of(WIDEST), SEGMENT_BYTES) + 127) / 128 * 128;

struct Matrix {
    const char* weights;
    const float* bias;                   // or null
    const u16 *norm_weight, *norm_bias;  // of what is multiplied, or null
};

struct Call {
    const Matrix* matrices;  // [layers][PRODUCTS], then the head
    int layers, vocabulary;
    int split_ctas;                   // CTAs with columns of OUT, O and DOWN: a multiple of SPLITS
    int most_under_way;               // slots of the ring that are filled at a time, at least 1
    int first_phase, end_phase;       // phases of this launch, of PHASES a layer and one for the head
    float* hidden;                    // [BATCH][HIDDEN]
    float2* statistics;               // [BATCH][GROUPS] mean and squared deviations
    u64* partials;                    // [SPLITS - 1][tiles][BATCH][16] sums and flags, 0 between launches
    u32* barrier;                     // [3][32] arrivals, of QKV alone, exits of CTAs; 0 between launches
    u16 *q, *k, *v;                   // q [BATCH][heads][HEAD_DIM]
    u16* newest;                      // [2][BATCH][HEADS_KV][HEAD_DIM] keys and values of this token
    i64 kv_layer, kv_batch, kv_head;  // strides; 0 from a token to the next: tokens of one sequence
    const float2* rotation;           // [BATCH][ROTARY_DIM / 2]
    const int* positions;             // [BATCH]
    u16 *attended, *activation;       // [BATCH][Q_COLS], [BATCH][FFN]
    float* logits;                    // [BATCH][vocabulary]
    const u16* head_norms;  // HEAD_NORMS: [layers][2][HEAD_DIM], channels in the order of packed rows
    float* raw_heads;  // HEAD_NORMS: [BATCH][HEADS_Q + HEADS_KV][HEAD_DIM] before their norms, so ordered
    u64* kv_parts;     // [CTAs][HEADS][HEAD_DIM][2], 0 between launches
    float eps;
    int chooses, tokens;  // whether the launch chooses the next token of each row, of so many
    u64* best;            // [BATCH] candidates, 0 between launches
    int* history;         // [positions][BATCH], memory of the host: the token of each position
    Embed embed;          // with what the next token begins, and, until a layer has added to it, this one
};
static_assert(sizeof(Call) == 272, "CALL of kvlab/engine/kernels.py");

// Whether a product of a layer, of PRODUCTS, reads or adds to the embedding and not to `hidden`.
__device__ __forceinline__ bool is_embedded(int layer, int product) {
    return layer == 0 && (PARALLEL || product < 2);
}

// A query, key or value head of token n that this launch makes.
__device__ __forceinline__ u16* head_of(const Call& call, int n, int head) {
    if (head < HEADS_Q) return call.q + (n * HEADS_Q + head) * HEAD_DIM;
    const int of_values = head >= HEADS_Q + HEADS_KV, kv_head = head - HEADS_Q - of_values * HEADS_KV;
    return call.newest + ((of_values * BATCH + n) * HEADS_KV + kv_head) * HEAD_DIM;
}
