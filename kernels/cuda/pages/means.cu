// The frame of the keys of a row, in which they are packed, and its first tokens, which wait for it.
//
// The frame, a mean and a power of 2 a channel, is that of the valid tokens FIRST to LAST - 1 of a row,
// whatever calls they come in, and of the last queries of these (kvlab/ops/frame.py). In ladders with
// profiles it has exponents of keys and values, too, an order of channels and gains of blocks. Until a row
// has LAST valid tokens they wait unchanged, in pages of width 16 that attention reads like any others and
// that no plan sees. Then they are new tokens of the plan that follows.
//
// freeze_means  grid (batch): a CTA has a row with all its heads. It lists the valid new tokens. If there are
//               enough, it writes the frame and copies waiting tokens to arrays in front of the new ones;
//               else it copies new tokens to the waiting pages. A warp copies a vector, a thread sums a
//               channel.
// refit_frames  grid (num_bh), ladders with profiles alone: a CTA has a head, whose frame is fitted to the
//               newest tokens of a prefill as that of an append is to its own (refit.cuh).
// crop_rows     grid (batch, layers): rows get another length, and waiting pages, whose tokens stand in the
//               order of their positions, forget those beyond it. A thread has a (head, page). Plans drop the
//               tokens of other pages.
// Memory: shared 8.5 KB, 15 KB with blocks.
//
// Macros: HEAD_DIM; BF16; IN_BLOCKS: whether the ladder has profiles.
#include "pages/encode.cuh"
#include "pages/code_layout.cuh"
#include "pages/refit.cuh"
#include "pages/state.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int V_CODES = code_bytes(16);                  // their byte offset in a waiting page
constexpr int FIRST = 4, MIN_TOKENS = 16;                // fewer tokens than MIN_TOKENS make the mean 0
constexpr double MIN_RATIO = 9., MIN_RATIO_ALONE = 64.;  // ratios of sizes; see key_shift
constexpr int MIN_USUAL = -4, END_USUAL = 12, MIN_EXPONENT = -100;  // exponents; see side_exponent
constexpr int WIDEST = IN_BLOCKS ? 0x8888 : 8;                      // of packed keys
#define INFINITE __longlong_as_double(0x7ff0000000000000)

struct Freeze {
    const LayerState* layer;
    NewTokens new_tokens;  // of the call; `num_new` may be 0
    // What the plan is given, by token: `before` waiting ones and the new ones. Without `before` keys,
    // values, importance and positions are those of `new_tokens`, without `valid` all rows get their mean.
    u16 *k, *v;      // [batch][before + num_new][heads][HEAD_DIM]
    u8* valid;       // [batch][before + num_new]
    u8* importance;  // [num_bh][before + num_new]
    int* positions;  // [batch][before + num_new]
    const u16* q;    // [batch][num_new][num_heads_q][HEAD_DIM] by strides, of the call, or null
    long long q_batch, q_step, q_head;
    int num_heads_q, before, lookahead,
        force;  // lookahead: tokens that may come until the next call; force: no row waits any longer
    const float* mean_factor;  // [HEAD_DIM]: what means are multiplied by; see kvlab/ops/frame.py
};

// The tokens of a row that wait, which lie in the same slots for all heads. All pages but the last are full,
// or the first, if the next ones are of another segment.
struct WaitingTokens {
    const LayerState& s;
    int first_bh, in_first, in_others;

    __device__ WaitingTokens(const LayerState& state, int row) : s(state), first_bh(row * state.heads) {
        const u8* const count = s.count + (u64)first_bh * s.entries;
        const bool any = s.waits[row] && s.num_pages[first_bh];
        in_first = any ? count[0] : 0, in_others = 0;
#pragma unroll
        for (int page = 1; page < WAITING_PAGES; ++page) in_others += any ? count[page] : 0;
    }
    __device__ int tokens() const { return in_first + in_others; }
    __device__ u8* page(int head, int number) const {
        const u32 record = s.rungs[s.num_rungs].record;
        return s.waiting + ((u64)(first_bh + head) * WAITING_PAGES + number) * record * UNIT;
    }
    __device__ u8* tail(int head, int number) const { return page(head, number) + s.rungs[s.num_rungs].tail; }
    __device__ int page_of(int token) const { return token < in_first ? 0 : 1 + (token - in_first) / PAGE; }
    __device__ int slot_of(int token) const { return token < in_first ? token : (token - in_first) % PAGE; }
    __device__ int segment_of(int number) const { return s.base[(u64)first_bh * s.entries + number]; }
    __device__ int position_of(int token) const {
        const int number = page_of(token);
        return segment_of(number) << 16 | ((const u16*)tail(0, number))[slot_of(token)];
    }
    __device__ u32 element(Side side, int head, int token, int channel) const {
        const u8* codes = page(head, page_of(token)) + (side == VALUES ? V_CODES : 0);
        return read_code<16>(codes, element_at(side, slot_of(token), channel));
    }
};

__device__ __forceinline__ bool is_valid(const NewTokens& n, int row, int step) {
    return !n.valid || n.valid[(u64)row * n.num_new + step];
}

// Lists the first LAST valid new tokens of a row and returns how many there are; all threads.
__device__ int list_valid(const NewTokens& n, int row, int* listed) {
    __shared__ int counts[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int seen = 0;
#pragma unroll 1
    for (int first = 0; first < n.num_new; first += THREADS) {
        const int step = first + threadIdx.x;
        const bool valid = step < n.num_new && is_valid(n, row, step);
        const u32 mine = __ballot_sync(ALL_LANES, valid);
        if (lane == 0) counts[warp] = __popc(mine);
        __syncthreads();  // the counts of all warps are there
        int rank = seen + __popc(mine & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; ++w) {
            rank += w < warp ? counts[w] : 0;
            seen += counts[w];
        }
        if (valid && rank < LAST) listed[rank] = step;
        __syncthreads();  // the counts have been read; the list is whole
    }
    return seen;
}

// Says which tokens the plan takes in and where they stand, and copies those that wait, if they are to go.
__device__ void fill_arrays(const Freeze& call, const WaitingTokens& waiting, int row, bool goes,
                            bool waits) {
    const LayerState& s = waiting.s;
    const NewTokens& n = call.new_tokens;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int total = call.before + n.num_new, moving = goes && call.before ? waiting.tokens() : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < total; i += THREADS) {
        const int step = i - call.before;
        call.valid[(u64)row * total + i] = step < 0 ? i < moving : (goes || !waits) && is_valid(n, row, step);
        if (call.before)
            call.positions[(u64)row * total + i] = step >= 0    ? n.first + step
                                                   : i < moving ? waiting.position_of(i)
                                                                : 0;
    }
#pragma unroll 1
    for (int i = warp; i < moving * s.heads; i += WARPS) {
        const int token = i / s.heads, head = i - token * s.heads;
        const u64 to = (((u64)row * total + token) * s.heads + head) * HEAD_DIM;
#pragma unroll 1
        for (int channel = lane; channel < HEAD_DIM; channel += 32) {
            call.k[to + channel] = (u16)waiting.element(KEYS, head, token, channel);
            call.v[to + channel] = (u16)waiting.element(VALUES, head, token, channel);
        }
        if (lane == 0)
            call.importance[(u64)(waiting.first_bh + head) * total + token] =
                waiting.tail(head, waiting.page_of(token))[2 * PAGE + waiting.slot_of(token)];
    }
}

// Adds queries to what frames are made of, one after the other; a thread has a channel of a head.
__device__ void add_queries(const Freeze& call, const WaitingTokens& waiting, int row, int seen,
                            const int* listed) {
    const LayerState& s = waiting.s;
    const int num_waiting = waiting.tokens(), end = min(LAST, num_waiting + seen),
              group = call.num_heads_q / s.heads;
#pragma unroll 1
    for (int i = threadIdx.x; i < s.heads * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM, channel = i - head * HEAD_DIM;
        float* const sums = s.query_sums + (u64)waiting.first_bh * HEAD_DIM + i;
        float sum = *sums;
#pragma unroll 2
        for (int token = max(ASKING, num_waiting); token < end; ++token) {
            const u16* q = call.q + row * call.q_batch + listed[token - num_waiting] * call.q_step +
                           head * group * call.q_head + channel;
#pragma unroll 4
            for (int g = 0; g < group; ++g) sum += fabsf(raw_value(q[g * call.q_head]));
        }
        *sums = sum;
    }
    __syncthreads();  // all of them are there
}

// 2^exponent.
__device__ __forceinline__ double wide_power(int exponent) {
    return __longlong_as_double((long long)(exponent + 1023) << 52);
}

// The exponent of a side of a head, given the bits of its largest finite magnitude.
__device__ __forceinline__ int side_exponent(u32 largest) {
    const int exponent = (int)(largest >> 23) - 127;
    return largest == 0 || (exponent >= MIN_USUAL && exponent < END_USUAL) ? 0 : max(exponent, MIN_EXPONENT);
}

// Orders and gains of a frame in blocks, of AT_ONCE heads.
template <int AT_ONCE>
struct Blocks {
    double squares[AT_ONCE][HEAD_DIM];  // of keys less their mean, over tokens
    double energies[AT_ONCE][HEAD_DIM / 2];
    double sums[AT_ONCE][4];
    int has_queries[AT_ONCE];
    u8 shifts[AT_ONCE][HEAD_DIM / 2], order[AT_ONCE][HEAD_DIM / 2];
};

// Puts the pairs of a head in order, those of most energy first; a thread has a pair.
template <int AT_ONCE>
__device__ __forceinline__ void order_pair(Blocks<AT_ONCE>& blocks, int h, int pair) {
    constexpr int HALF = HEAD_DIM / 2;
    const double energy = blocks.energies[h][pair];
    int before = 0;
    for (int i = 0; i < HALF; ++i)
        before += blocks.energies[h][i] > energy || (blocks.energies[h][i] == energy && i < pair);
    blocks.order[h][before] = (u8)pair;
}

// The energy of a pair of channels: of its keys, times that of its queries.
template <int AT_ONCE>
__device__ __forceinline__ double energy_of(const Blocks<AT_ONCE>& blocks, int h, int pair, double query,
                                            double other) {
    const bool asks = blocks.has_queries[h];
    const double keys = __dadd_rn(blocks.squares[h][pair], blocks.squares[h][pair + HEAD_DIM / 2]);
    const double queries = asks ? __dadd_rn(__dmul_rn(query, query), __dmul_rn(other, other)) : 2.;
    const double energy = __dmul_rn(keys, queries);
    return energy < INFINITE ? energy : 0.;  // one that is no number neither
}

// The sum of squares of a block in its frame, channel after channel.
template <int AT_ONCE>
__device__ __forceinline__ double sum_of_block(const Blocks<AT_ONCE>& blocks, int h, int block,
                                               int exponent) {
    double sum = 0.;
#pragma unroll 1
    for (int i = 0; i < HEAD_DIM / 4; ++i) {
        const int position = HEAD_DIM / 4 * block + i, pair = blocks.order[h][pair_of_position(position)];
        sum = __dadd_rn(sum, __dmul_rn(blocks.squares[h][channel_of_position(pair, position)],
                                       wide_power(-2 * (blocks.shifts[h][pair] + exponent))));
    }
    return sum;
}

// What a block is multiplied by, given the sums of all; `tokens`: as many as they are over, all of few.
__device__ __forceinline__ float gain_of(const double (&sums)[4], int block, int tokens, bool few) {
    constexpr int LOG = log_of(HEAD_DIM / 4 & -(HEAD_DIM / 4));
    double largest = 0., own = 0.;
    for (int i = 0; i < 4; ++i) {
        const double all = __dadd_rn(__dadd_rn(__dadd_rn(sums[0], sums[1]), sums[2]), sums[3]);
        const double square =
            __dmul_rn((few ? all / 4. : sums[i]) / max(tokens * HEAD_DIM / 4, 1), LOG % 2 ? .5 : 1.);
        const double root = __dsqrt_rn(square < INFINITE ? square : 0.);
        largest = fmax(largest, root);
        if (i == block) own = root;
    }
    const double gain = 16. / fmax(own, largest / 256.);
    const long long bits = __double_as_longlong(gain <= wide_power(-MIN_EXPONENT) ? gain : 1.),
                    ones = (1ll << 52) - 1;
    const __half part = __double2half(__longlong_as_double((bits & ones) | 1022ll << 52));
    return ldexpf(__half2float(part), (int)(bits >> 52) - 1022);
}

// The frame of keys over waiting and new tokens; `size` becomes that of a pair of channels. Sums of 60
// numbers of 16 bits are exact in double, but for bfloat16 numbers far apart; they are added up in the order
// of tokens.
//
// A thread has a channel of a head, and half of them then a pair of channels. A channel whose mean float16
// cannot hold is left as it is, and, where the ladder has no width of 8 for the first tokens, one whose mean
// makes the first key longer.
__device__ void take_frames(const Freeze& call, const WaitingTokens& waiting, int row, int seen,
                            const int* listed) {
    constexpr int AT_ONCE = THREADS / HEAD_DIM,
                  HALF = HEAD_DIM / 2;  // heads; channels of the first of each pair
    __shared__ double sizes[AT_ONCE][HEAD_DIM], energies[AT_ONCE][HEAD_DIM], middle[AT_ONCE];
    __shared__ int has_queries[AT_ONCE];
    __shared__ u32 largest[AT_ONCE][2];  // of keys and of values
#if IN_BLOCKS
    __shared__ Blocks<AT_ONCE> blocks;
#endif
    const LayerState& s = waiting.s;
    const NewTokens& n = call.new_tokens;
    const int num_waiting = waiting.tokens(), end = min(LAST, num_waiting + seen);
    const bool counts = end - FIRST >= MIN_TOKENS;
    bool narrow = true;
    for (int rung = 0; rung < s.num_rungs; ++rung) narrow = narrow && s.rungs[rung].bits_k != WIDEST;
#pragma unroll 1
    for (int first = 0; first < s.heads; first += AT_ONCE) {
        const int h = threadIdx.x / HEAD_DIM, channel = threadIdx.x % HEAD_DIM, head = first + h;
        const bool there = h < AT_ONCE && head < s.heads;
        const u64 at = (u64)(waiting.first_bh + head) * HEAD_DIM + channel;
        const auto element = [&](Side side, const u16* x, long long step, int token) {
            return raw_value(token < num_waiting ? waiting.element(side, head, token, channel)
                                                 : x[listed[token - num_waiting] * step]);
        };
        if (threadIdx.x < 2 * AT_ONCE) largest[threadIdx.x / 2][threadIdx.x % 2] = 0;
#if IN_BLOCKS
        if (threadIdx.x < AT_ONCE) blocks.has_queries[threadIdx.x] = 0;
#endif
        __syncthreads();  // nothing is the largest yet
        if (there) {
            const u16* const k = n.k + row * n.k_batch + head * n.k_head + channel;
            const u16* const v = n.v + row * n.v_batch + head * n.v_head + channel;
            u32 of_keys = 0, of_values = 0;
            const auto finite_size = [](float x) {
                const u32 size = __float_as_uint(fabsf(x));
                return size < 0x7f800000u ? size : 0u;
            };
#pragma unroll 4
            for (int token = 0; token < end; ++token) {
                of_keys = max(of_keys, finite_size(element(KEYS, k, n.k_step, token)));
                of_values = max(of_values, finite_size(element(VALUES, v, n.v_step, token)));
            }
            atomicMax(&largest[h][KEYS], of_keys);
            atomicMax(&largest[h][VALUES], of_values);
#if IN_BLOCKS
            if (s.query_sums[at] > 0.f) blocks.has_queries[h] = 1;
#endif
        }
        __syncthreads();  // the largest elements are known
        const int exponent = there ? side_exponent(largest[h][KEYS]) : 0;
        if (there && channel < 2)
            s.exponent[2 * (waiting.first_bh + head) + channel] =
                (signed char)side_exponent(largest[h][channel]);
        if (there) {
            const u16* const k = n.k + row * n.k_batch + head * n.k_head + channel;
            const auto key = [&](int token) { return (double)element(KEYS, k, n.k_step, token); };
            double sum = 0.;
#pragma unroll 4
            for (int token = FIRST; token < end; ++token) sum += key(token);
            double mean = counts ? sum / (end - FIRST) * call.mean_factor[channel] : 0.;
            if (narrow && mean != 0. && !(mean * mean <= 2. * mean * key(0))) mean = 0.;
            mean *= wide_power(-exponent);
            const __half rounded = __double2half(fabs(mean) <= 65504. ? mean : 0.);
            s.k_mean[at] = rounded;
            mean = (double)__half2float(rounded);
            mean *= wide_power(exponent);
            double size = 0.;
#pragma unroll 4
            for (int token = FIRST; token < end; ++token) size += fabs(key(token) - mean);
            sizes[h][channel] = size, energies[h][channel] = s.query_sums[at];
#if IN_BLOCKS
            double squares = 0.;
#pragma unroll 4
            for (int token = counts ? FIRST : 0; token < end; ++token) {
                const double off = key(token) - mean;
                squares = __dadd_rn(squares, __dmul_rn(off, off));
            }
            blocks.squares[h][channel] = squares;
#endif
        }
        if (threadIdx.x < AT_ONCE) has_queries[threadIdx.x] = 0;
        __syncthreads();  // what is known of all channels is there
        const bool leads = there && channel < HALF;
        const u64 of_pair = (u64)(waiting.first_bh + head) * HALF + channel;
        double size = 0., energy = 0.;
        if (leads) {
            size = sizes[h][channel] + sizes[h][channel + HALF];
            energy = energies[h][channel] + energies[h][channel + HALF];
            if (energy > 0.) has_queries[h] = 1;
#if IN_BLOCKS
            blocks.energies[h][channel] =
                counts ? energy_of(blocks, h, channel, energies[h][channel], energies[h][channel + HALF])
                       : 0.;
#endif
        }
        __syncthreads();  // sizes of channels have been read, and all queries been seen
        const bool asks = leads && has_queries[h];
        if (asks) size /= energy;
        if (!(size < INFINITE)) size = INFINITE;
        if (leads) sizes[h][channel] = size;
        __syncthreads();  // those of pairs are there
        if (leads) {
            int below = 0;
            for (int i = 0; i < HALF; ++i)
                below += sizes[h][i] < size || (sizes[h][i] == size && i < channel);
            if (below == (HALF - 1) / 2) middle[h] = size;
        }
        __syncthreads();  // the median is there
        if (leads) {
            double ratio = size / middle[h];
            if (!asks) ratio = __dmul_rn(ratio, ratio) / 4.;
            const bool large = counts && ratio >= (asks ? MIN_RATIO : MIN_RATIO_ALONE) && ratio < INFINITE;
            const int orders = (int)(__double_as_longlong(ratio) >> 52) - 1022;  // floor(log2(2 ratio))
            const u8 shift = large ? (u8)min(orders >> 1, MAX_SHIFT) : 0;
            s.k_shift[of_pair] = shift;
#if IN_BLOCKS
            blocks.shifts[h][channel] = shift;
            order_pair(blocks, h, channel);
#endif
        }
#if IN_BLOCKS
        __syncthreads();  // shifts and the order are there
        if (leads) s.k_order[of_pair] = blocks.order[h][channel];
        if (there && channel < 4) blocks.sums[h][channel] = sum_of_block(blocks, h, channel, exponent);
        __syncthreads();  // sums of blocks are there
        if (there && channel < 4)
            s.k_gain[4 * (waiting.first_bh + head) + channel] =
                gain_of(blocks.sums[h], channel, counts ? end - FIRST : end, !counts);
#endif
    }
}

// Copies new tokens to the waiting pages, behind those that are there.
__device__ void keep_tokens(const NewTokens& n, const WaitingTokens& waiting, int row, int seen,
                            const int* listed) {
    const LayerState& s = waiting.s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = warp; i < seen * s.heads; i += WARPS) {
        const int token = i / s.heads, head = i - token * s.heads, step = listed[token];
        const int to = waiting.tokens() + token, slot = to % PAGE;
        u8* const page = waiting.page(head, to / PAGE);
        const u16* k = n.k + row * n.k_batch + step * n.k_step + head * n.k_head;
        const u16* v = n.v + row * n.v_batch + step * n.v_step + head * n.v_head;
#pragma unroll 1
        for (int channel = lane; channel < HEAD_DIM; channel += 32) {
            write_code<16>(page, element_at(KEYS, slot, channel), k[channel]);
            write_code<16>(page + V_CODES, element_at(VALUES, slot, channel), v[channel]);
        }
        if (lane == 0) {
            u8* const tail = waiting.tail(head, to / PAGE);
            ((u16*)tail)[slot] = (u16)(n.first + step);
            tail[2 * PAGE + slot] = n.importance[(u64)(waiting.first_bh + head) * n.num_new + step];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) freeze_means(const __grid_constant__ Freeze call) {
    __shared__ int listed[LAST];
    const LayerState& s = *call.layer;
    const NewTokens& n = call.new_tokens;
    const int row = blockIdx.x, seen = list_valid(n, row, listed);
    const bool waits = s.waits[row];
    const WaitingTokens waiting(s, row);
    const int tokens = waiting.tokens() + seen;
    // Positions of a page share their upper bits, so the tokens of a row do not wait beyond a border of
    // these.
    const int next = (n.first + n.num_new) >> 16,
              last = (n.first + n.num_new + max(call.lookahead, 1) - 1) >> 16;
    const int first = waiting.tokens() ? waiting.segment_of(0) : seen ? (n.first + listed[0]) >> 16 : last;
    const bool goes = waits && (call.force || tokens >= LAST || first != last);
    if (call.valid) fill_arrays(call, waiting, row, goes, waits);
    if (waits && call.q) add_queries(call, waiting, row, seen, listed);
    if (goes) take_frames(call, waiting, row, seen, listed);
    if (waits && !goes) keep_tokens(n, waiting, row, seen, listed);
    __syncthreads();  // tables have been read
#pragma unroll 1
    for (int i = threadIdx.x; i < s.heads; i += THREADS) {
        const int bh = waiting.first_bh + i;
        const u64 at = (u64)bh * s.entries;
        if (n.num_new) s.seqlen[bh] = n.first + n.num_new;
        if (!waits) continue;
        s.num_pages[bh] = goes ? 0 : WAITING_ENTRIES;
        for (int i = 0; i < OPEN_PAGES; ++i) s.open[bh * OPEN_PAGES + i] = goes ? -1 : tokens / PAGE + i;
        if (goes) continue;
        for (int page = 0; page < WAITING_ENTRIES; ++page) {
            s.rung[at + page] = (u8)s.num_rungs;
            s.count[at + page] = (u8)min(max(tokens - page * PAGE, 0), PAGE);
            s.base[at + page] = (u16)(tokens ? first : page ? last : next);
            const u32 address = (u32)((waiting.page(i, page) - s.arena) / UNIT);
            s.index[at + page] = page < WAITING_PAGES ? address : NO_PAGE;
        }
    }
    if (goes && threadIdx.x == 0) s.waits[row] = 0;
#if IN_BLOCKS
    if (goes)
        for (int i = threadIdx.x; i < s.heads * HEAD_DIM / 2; i += THREADS)
            s.k_ratio[(u64)waiting.first_bh * HEAD_DIM / 2 + i] = 0;
#endif
}

#if IN_BLOCKS
constexpr int FITTED_TO = 16;  // the newest tokens of a prefill

struct Fit {
    const LayerState* layer;
    NewTokens new_tokens;  // of a prefill
    Queries queries;       // of the same tokens
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) refit_frames(const __grid_constant__ Fit call) {
    constexpr int HALF = HEAD_DIM / 2;
    const LayerState& s = *call.layer;
    const int bh = blockIdx.x, row = bh / s.heads, thread = threadIdx.x;
    if (s.waits[row]) return;
    int rises = 0;
    if (thread < HALF) {
        const int first = max(call.new_tokens.num_new - FITTED_TO, 0);
        const int ratio =
            follow_ratio(s, call.new_tokens, call.queries, row, bh - row * s.heads, first, thread);
        rises = further_shift(ratio, s.k_shift[(u64)bh * HALF + thread], thread,
                              [] { __barrier_sync_count(1, HALF); });
    }
    if (__syncthreads_or(rises)) raise_shifts(s, bh, thread, rises);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) crop_rows(const LayerState* layers, int seqlen) {
    const LayerState& s = layers[blockIdx.y];
    const int row = blockIdx.x;
    const bool waits = s.waits[row];
#pragma unroll 1
    for (int i = threadIdx.x; i < s.heads * WAITING_PAGES; i += THREADS) {
        const int bh = row * s.heads + i / WAITING_PAGES, page = i % WAITING_PAGES;
        if (page == 0) s.seqlen[bh] = seqlen;
        if (!waits || s.num_pages[bh] == 0) continue;
        const u64 at = (u64)bh * s.entries + page;
        const u8* tail = s.arena + (u64)s.index[at] * UNIT + s.rungs[s.num_rungs].tail;
        int count = s.count[at];
        while (count && (s.base[at] << 16 | ((const u16*)tail)[count - 1]) >= seqlen) --count;
        s.count[at] = (u8)count;
    }
}
static_assert(WAITING_PAGES >= (LAST - 1) / PAGE + OPEN_PAGES, "waiting pages take the next tokens");

// gate: HEAD_DIM=128,64,80,96,256 BF16=1,0 registers<=112
// gate: HEAD_DIM=128,64,256 BF16=1,0 IN_BLOCKS=1 registers<=128 arch=sm_90a,sm_100a,sm_120a
