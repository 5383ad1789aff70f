// A token for each row, drawn by temperature, top_k and top_p, becomes the next one: positions move on by
// one.
//
// What kvlab/engine/sampling.py does on a host, with the same random numbers (Philox). Nothing is sorted:
// tokens in the order of their logits, of equals the first one first, are numbers of 56 bits, how far a logit
// is below the largest in units of 2^-26 above the token. `find` descends their digits to the first one with
// which the count or the mass of all up to it reaches a target: it gives the last of top_k tokens, the last
// of top_p and the one that is drawn. Two digits leave a few tokens, which are listed and compared; where a
// CTA has more than FEW, equals mostly, the other five digits are descended, too. Masses are whole numbers,
// in units of 2^-2 LIMB of the largest, so sums do not depend on their order, and every run gives the same
// token.
//
// A row has a cluster of CTAS CTAs, each with a part of the tokens one after the other; a thread has every
// THREADS-th of a part. Shared memory: sums of 256 digits, in two halves whose additions are single
// instructions, and lists of tokens; all CTAs of the cluster read those of all.
//
// Macros: CTAS of a row, 8 or, where there are no clusters, 1.
#include "common/words.cuh"

constexpr int THREADS = 1024, DIGITS = 256;
constexpr int FEW = 64;  // tokens of a CTA that are listed
static_assert(CTAS * FEW <= THREADS, "a thread for each token of all lists");
constexpr int LIMB = CTAS > 1 ? 16 : 14;  // sums of 2^18 tokens, or an eighth of them, fit in 32 bits
constexpr u32 LOW = (1u << LIMB) - 1;

struct Settings {
    float inverse_temperature;
    u32 top_k;  // 0: all
    double top_p;
    u64 seed;
};
struct Draw {
    const float* logits;  // [batch][pitch]
    int vocabulary, pitch;
    const Settings* settings;
    int *ids, *positions;  // [batch]
    int* history;          // [positions][batch], memory of the host: the token of each position
};

struct Sums {
    u32 low[DIGITS], high[DIGITS];
};
__shared__ Sums sums;
__shared__ float of_warps[THREADS / 32], largest;
__shared__ u64 totals[DIGITS], mass, before;
__shared__ u32 digit;
// Tokens with the digits found so far: those of this CTA, in any order, and those of all CTAs side by side.
template <int CAPACITY>
struct List {
    u64 numbers[CAPACITY];
    u32 weights[CAPACITY], count;
};
__shared__ List<FEW> own_list;
__shared__ List<CTAS * FEW> list;
__shared__ u64 answer;

__device__ __forceinline__ void sync_row() {
#if CTAS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#else
    __syncthreads();
#endif
}
// A word of shared memory of a CTA of the cluster.
__device__ __forceinline__ u32 load_of(const void* at, int cta) {
#if CTAS > 1
    u32 address, word;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(cta));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
#else
    return *(const volatile u32*)at;
#endif
}

// The first number of Philox4x64-10 for a key and a counter, in [0, 1), as NumPy draws it.
__device__ __forceinline__ double uniform(u64 key, u64 other_key, u64 counter) {
    u64 c[4] = {counter + 1, 0, 0, 0};
    for (int round = 0; round < 10; ++round) {
        constexpr u64 A = 0xD2E7470EE14C6C93ull, B = 0xCA5A826395121157ull;
        const u64 high_a = __umul64hi(A, c[0]), low_a = A * c[0], high_b = __umul64hi(B, c[2]),
                  low_b = B * c[2];
        const u64 next[4] = {high_b ^ c[1] ^ key, low_b, high_a ^ c[3] ^ other_key, low_a};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        key += 0x9E3779B97F4A7C15ull, other_key += 0xBB67AE8584CAA73Bull;
    }
    return (double)(c[0] >> 11) * 0x1p-53;
}

struct Row {
    const float* logits;
    int begin, end;  // of this CTA
    float largest, inverse_temperature;
    __device__ __forceinline__ float below(int i) const {
        return (largest - __ldcg(logits + i)) * inverse_temperature;
    }
    __device__ __forceinline__ u64 number(float below, int i) const {
        return (u64)__float2uint_rd(below * 0x1p26f) << 24 | (u32)i;
    }
    __device__ __forceinline__ u32 mass(float below) const {
        return min(__float2uint_rn(expf(-below) * (float)(1ull << 2 * LIMB)), ~0u >> (32 - 2 * LIMB));
    }
};

// Of the tokens up to a number.
__device__ __forceinline__ u64 mass_of(const Row& row, u64 bound) {
    u64 own = 0;
    if (threadIdx.x == 0) mass = 0;
    for (int i = row.begin + threadIdx.x; i < row.end; i += THREADS) {
        const float below = row.below(i);
        if (row.number(below, i) <= bound) own += row.mass(below);
    }
    for (int i = 16; i; i /= 2) own += __shfl_xor_sync(ALL_LANES, own, i);
    __syncthreads();  // the sum is 0
    if (threadIdx.x % 32 == 0) atomicAdd(&mass, own);
    sync_row();  // all sums are there
    u64 total = 0;
    for (int cta = 0; cta < CTAS; ++cta)
        total += (u64)load_of((u32*)&mass + 1, cta) << 32 | load_of(&mass, cta);
    sync_row();  // all have read them
    return total;
}

// `find` among tokens up to `bound` whose number begins with `prefix`, behind others of a count or mass; ~0
// if a CTA has too many to list.
__device__ __forceinline__ u64 find_listed(const Row& row, u64 bound, bool by_mass, u64 target, u64 prefix,
                                           int shift, u64 passed) {
    if (threadIdx.x == 0) own_list.count = 0;
    __syncthreads();  // the list is empty
    for (int i = row.begin + threadIdx.x; i < row.end; i += THREADS) {
        const float below = row.below(i);
        const u64 number = row.number(below, i);
        if (number > bound || number >> shift != prefix) continue;
        const u32 at = atomicAdd(&own_list.count, 1u);
        if (at < FEW) own_list.numbers[at] = number, own_list.weights[at] = by_mass ? row.mass(below) : 1;
    }
    sync_row();  // lists of all CTAs are there
    const int cta = threadIdx.x / FEW, at = threadIdx.x % FEW;
    u32 count = 0, own = 0;
    bool fits = true;
    for (int i = 0; i < CTAS; ++i) {
        const u32 of_cta = load_of(&own_list.count, i);
        fits = fits && of_cta <= FEW;
        if (i == cta && at < (int)of_cta) own = count + at + 1;
        count += of_cta;
    }
    if (fits && own) {
        const u32* number = (const u32*)(own_list.numbers + at);
        list.numbers[own - 1] = (u64)load_of(number + 1, cta) << 32 | load_of(number, cta);
        list.weights[own - 1] = load_of(own_list.weights + at, cta);
    }
    sync_row();  // all have read the lists of all
    if (!fits) return ~0ull;
    if (threadIdx.x < count) {
        const u64 number = list.numbers[threadIdx.x];
        u64 up_to = passed;
        for (u32 i = 0; i < count; ++i)
            if (list.numbers[i] <= number) up_to += list.weights[i];
        if (up_to >= target && up_to - list.weights[threadIdx.x] < target) answer = number;
    }
    __syncthreads();  // the answer is there
    return answer;
}

// The first number, of tokens up to `bound`, with which counts or masses of all up to it reach the target.
__device__ __forceinline__ u64 find(const Row& row, u64 bound, bool by_mass, u64 target) {
    u64 prefix = 0, passed = 0;
    for (int shift = 48; shift >= 0; shift -= 8) {
        if (threadIdx.x < DIGITS) sums.low[threadIdx.x] = sums.high[threadIdx.x] = 0;
        __syncthreads();  // sums are 0
        for (int i = row.begin + threadIdx.x; i < row.end; i += THREADS) {
            const float below = row.below(i);
            const u64 number = row.number(below, i);
            if (number > bound || number >> (shift + 8) != prefix) continue;
            const u32 weight = by_mass ? row.mass(below) : 1, at = number >> shift & (DIGITS - 1);
            if (weight & LOW) atomicAdd(sums.low + at, weight & LOW);
            if (weight >> LIMB) atomicAdd(sums.high + at, weight >> LIMB);
        }
        sync_row();  // all sums are there
        if (threadIdx.x < DIGITS) {
            u64 total = 0;
            for (int cta = 0; cta < CTAS; ++cta)
                total += ((u64)load_of(sums.high + threadIdx.x, cta) << LIMB) +
                         load_of(sums.low + threadIdx.x, cta);
            totals[threadIdx.x] = total;
        }
        sync_row();  // all have read them, and totals are there
        if (threadIdx.x < 32) {
            constexpr int EACH = DIGITS / 32;
            u64 own = 0;
            for (int i = 0; i < EACH; ++i) own += totals[EACH * threadIdx.x + i];
            u64 up_to = own;
            for (int i = 1; i < 32; i *= 2) {
                const u64 other = __shfl_up_sync(ALL_LANES, up_to, i);
                if ((int)threadIdx.x >= i) up_to += other;
            }
            const u32 reach = __ballot_sync(ALL_LANES, passed + up_to >= target);
            if ((int)threadIdx.x == __ffs(reach) - 1) {
                u64 sum = passed + up_to - own;
                int i = EACH * threadIdx.x;
                while (sum + totals[i] < target) sum += totals[i++];
                digit = i, before = sum;
            }
        }
        __syncthreads();  // the digit is known
        prefix = prefix << 8 | digit, passed = before;
        if (shift == 40) {
            const u64 found = find_listed(row, bound, by_mass, target, prefix, shift, passed);
            if (found != ~0ull) return found;
        }
    }
    return prefix;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(const __grid_constant__ Draw call) {
    const int n = blockIdx.y, part = (call.vocabulary + CTAS - 1) / CTAS,
              begin = min((int)blockIdx.x * part, call.vocabulary);
    const Settings settings = *call.settings;
    const int position = call.positions[n] + 1;
    Row row = {call.logits + (i64)n * call.pitch, begin, min(begin + part, call.vocabulary), -1e38f,
               settings.inverse_temperature};
    for (int i = row.begin + threadIdx.x; i < row.end; i += THREADS)
        row.largest = fmaxf(row.largest, __ldcg(row.logits + i));
    for (int i = 16; i; i /= 2) row.largest = fmaxf(row.largest, __shfl_xor_sync(ALL_LANES, row.largest, i));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = row.largest;
    __syncthreads();  // those of all warps are there
    if (threadIdx.x == 0) {
        for (int w = 0; w < THREADS / 32; ++w) row.largest = fmaxf(row.largest, of_warps[w]);
        largest = row.largest;
    }
    sync_row();  // those of all CTAs are there
    for (int cta = 0; cta < CTAS; ++cta)
        row.largest = fmaxf(row.largest, __uint_as_float(load_of(&largest, cta)));

    u64 bound = ~0ull;
    if (settings.top_k && settings.top_k < call.vocabulary) bound = find(row, bound, false, settings.top_k);
    u64 total = mass_of(row, bound);
    if (settings.top_p < 1) {
        const u64 enough = (u64)ceil(settings.top_p * (double)total);
        bound = find(row, bound, true, enough ? enough : 1);
        total = mass_of(row, bound);
    }
    const u64 drawn = (u64)(uniform(settings.seed, n, position) * (double)total);
    const int token = (int)(find(row, bound, true, drawn + 1) & 0xffffff);
    if (blockIdx.x || threadIdx.x) return;
    call.positions[n] = position, call.ids[n] = token;
    *(volatile int*)(call.history + (i64)position * gridDim.y + n) = token;
    __threadfence_system();
}

// clang-format off
// gate: CTAS=8 registers<=64 arch=sm_90a,sm_100a,sm_120a
// gate: CTAS=1 registers<=64 arch=sm_80
// clang-format on
