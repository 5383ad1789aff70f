// Attention of the new tokens, whose keys and values come through the ring as weights do.
//
// Keys and values of earlier launches wait for nothing, so the copy engine brings them right behind QKV: a
// slot of the ring has a chunk of keys and then their values. Chunks of all tokens and KV heads, one after
// the other, are dealt out evenly: a CTA has a run of them, in up to a few segments, each of one KV head of
// one token. Only keys of this launch, of the token and of its neighbours before it, come when QKV is done.
//
// In a CTA a team of warps has HEADS_OF_WARP query heads, and TEAMS of them the heads of a pass over the
// keys. A key is read by LANES lanes, 8 channels each; KEYS keys are side by side in a warp (head_dim 80: 10
// lanes a key, 3 keys, 30 lanes at work), and the warps of a side of a team take KEYS of a slot in turns.
// Each key's lanes keep maximum, sum and weighted values of what they saw (online softmax); they are merged
// in the warp, then in shared memory. Segments that go on with a head leave their sums to the CTA that begins
// with it, which adds them to its own, in their order.
#pragma once

#include "common/async_copies.cuh"
#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/grid.cuh"
#include "engine/norm.cuh"
#include "engine/ring.cuh"

constexpr int LANES = HEAD_DIM / 8, KEYS = 32 / LANES;
constexpr int KEY_BYTES = 2 * HEAD_DIM, CHUNK = SLOT_BYTES / (2 * KEY_BYTES);
// The warps of a team take two slots at a time where one gives them too little to do.
constexpr int TEAM_WARPS = WARPS / TEAMS,
              SIDES = TEAM_WARPS % 2 == 0 && CHUNK <= 2 * TEAM_WARPS * KEYS ? 2 : 1;
constexpr int SIDE_WARPS = TEAM_WARPS / SIDES, ROUND = SIDE_WARPS * KEYS;  // keys taken together
constexpr int MAX_KEYS_AT_ONCE = BATCH > 8 ? 1 : 4;
constexpr int KEYS_AT_ONCE =
    CHUNK > (MAX_KEYS_AT_ONCE - 1) * ROUND ? MAX_KEYS_AT_ONCE : (CHUNK + ROUND - 1) / ROUND;
constexpr int READERS = HEADS_KV * PASSES;  // of a token: passes over a KV head's keys
constexpr float LOWEST = -1e30f;
static_assert(HEAD_DIM % 16 == 0 && KEYS >= 1 && CHUNK >= 1, "a key has up to 32 lanes, a slot has a key");

// KiB of weights that a CTA could take in while attention waits for QKV, merges and tells the others.
constexpr float KIB_OF_WAITS = PACKED ? 0 : BATCH > 4 ? 300 : 200;

// Who attends what: a function of positions, the same in all CTAs.
struct Chunks {
    int old[BATCH];         // keys of earlier launches
    int before[BATCH + 1];  // chunks of a reader, of all tokens before
    int qkv_ctas;           // PARALLEL: of the CTAs that have QKV and attend; the others have UP
    int attending;          // CTAs that have chunks
};

// Chunks [begin, end) of a reader of token n, which has `chunks`.
struct Segment {
    int n, reader, begin, end, chunks;
};

// What a CTA has at most of so many tiles.
__device__ __forceinline__ float most_tiles(int tiles, float ctas) {
    return ceilf(__fdividef(tiles, ctas) - 1e-3f);
}

// The number of CTAs that have QKV, keys and values, where the others have UP: so that the CTA with most, in
// whole tiles, and the larger mean have least together. All lanes of a warp.
__device__ __forceinline__ int balance(int old_keys) {
    constexpr int QKV_TILES = QKV_ROWS / 16, UP_TILES = FFN / 16;
    constexpr float TILE_KIB = HIDDEN / 32, KEY_KIB = READERS * KEY_BYTES * 2 / 1024.f;
    const int ctas = gridDim.x;
    u32 best = ~0u;
    for (int n = 1 + threadIdx.x % 32; n < ctas; n += 32) {
        const float of_qkv = n, of_up = ctas - n,
                    beside = __fdividef(old_keys * KEY_KIB, of_qkv) + KIB_OF_WAITS;
        const float mean =
            fmaxf(__fdividef(QKV_TILES * TILE_KIB, of_qkv) + beside, __fdividef(UP_TILES * TILE_KIB, of_up));
        const float most =
            fmaxf(most_tiles(QKV_TILES, of_qkv) * TILE_KIB + beside, most_tiles(UP_TILES, of_up) * TILE_KIB);
        best = min(best, (u32)fminf(most + mean, (1 << 22) - 1) << 10 | n);
    }
    return __reduce_min_sync(ALL_LANES, best) & 1023;
}

// All lanes of a warp, the first of which writes.
__device__ __forceinline__ void count_chunks(const Call& call, Chunks& chunks) {
    int keys = 0, before = 0;
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
        // With 0 from a sequence to the next, tokens are neighbours, whose keys this launch makes.
        const int old = PACKED ? 0 : __ldg(call.positions + n) - (call.kv_batch ? 0 : n);
        if (threadIdx.x % 32 == 0) chunks.old[n] = old, chunks.before[n] = before;
        keys += old, before += max(1, (old + CHUNK - 1) / CHUNK);
    }
    const int qkv_ctas = PARALLEL ? balance(keys) : (int)gridDim.x;
    // Where CTAs are a few more than a multiple of the readers, some go without, and none has two segments.
    const int even = qkv_ctas / (BATCH * READERS) * (BATCH * READERS);
    if (threadIdx.x % 32) return;
    chunks.before[BATCH] = before, chunks.qkv_ctas = qkv_ctas;
    chunks.attending = min(10 * even >= 9 * qkv_ctas ? even : qkv_ctas, before * READERS);
}

// First chunk of a CTA that attends, and the CTA of a chunk.
__device__ __forceinline__ int first_chunk(const Chunks& chunks, int cta) {
    return (u32)cta * (chunks.before[BATCH] * READERS) / (u32)chunks.attending;
}
__device__ __forceinline__ int cta_of_chunk(const Chunks& chunks, int chunk) {
    return ((u32)(chunk + 1) * chunks.attending - 1) / (u32)(chunks.before[BATCH] * READERS);
}

// The segments of this CTA, one after the other.
struct Walk {
    int at, end, n;
    __device__ __forceinline__ explicit Walk(const Chunks& chunks) : at(0), end(0), n(0) {
        if ((int)blockIdx.x < chunks.attending)
            at = first_chunk(chunks, blockIdx.x), end = first_chunk(chunks, blockIdx.x + 1);
    }
    __device__ __forceinline__ bool done() const { return at == end; }
    __device__ __forceinline__ Segment next(const Chunks& chunks) {
        while (chunks.before[n + 1] * READERS <= at) ++n;
        const int count = chunks.before[n + 1] - chunks.before[n], within = at - chunks.before[n] * READERS;
        const int begin = within % count, stop = min(count, begin + end - at);
        at += stop - begin;
        return {n, within / count, begin, stop, count};
    }
};

// Calls visit(first key, keys) for every slot that a segment has.
template <class Visit>
__device__ __forceinline__ void visit_slots(const Chunks& chunks, const Segment& segment,
                                            const Visit& visit) {
    const int end = min(segment.end * CHUNK, chunks.old[segment.n]);
    for (int key = segment.begin * CHUNK; key < end; key += CHUNK) visit(key, min(CHUNK, end - key));
}

// Keys of a reader, in elements from the first of all.
__device__ __forceinline__ i64 keys_of(const Call& call, int layer, const Segment& segment) {
    return layer * call.kv_layer + segment.n * call.kv_batch + segment.reader / PASSES * call.kv_head;
}

// The copies of this CTA's chunks.
__device__ __forceinline__ void produce_keys(const Call& call, int layer, const Chunks& chunks,
                                             Copies& copies) {
    for (Walk walk(chunks); !walk.done();) {
        const Segment segment = walk.next(chunks);
        const i64 base = keys_of(call, layer, segment);
        visit_slots(chunks, segment, [&](int key, int count) {
            const u32 bytes = count * KEY_BYTES;
            const i64 from = base + (i64)key * HEAD_DIM;
            copies.open(2 * bytes);
            copy_bytes(copies.to(), call.k + from, bytes, copies.full());
            copy_bytes(copies.to() + CHUNK * KEY_BYTES, call.v + from, bytes, copies.full());
            copies.ring.advance();
        });
    }
}

// Sum over the lanes of a key, to all of them; `first` is the lane of its first channels, j this lane's own.
__device__ __forceinline__ float sum_of_key(float x, int first, int j) {
    if constexpr ((LANES & (LANES - 1)) == 0) return sum_over<LANES>(x);
#pragma unroll
    for (int width = LANES; width > 1; width = (width + 1) / 2) {
        const int half = (width + 1) / 2;
        const float other = __shfl_down_sync(ALL_LANES, x, half);
        if (j + half < width) x += other;
    }
    return __shfl_sync(ALL_LANES, x, first);
}

struct Running {
    float maximum, total, values[8];
    __device__ __forceinline__ void raise(float highest) {
        const float factor = exp2f(maximum - highest);
        maximum = highest, total *= factor;
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] *= factor;
    }
    __device__ __forceinline__ void add(float weight, float weights, const float* other) {
        total += weights;
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] += weight * other[c];
    }
};

__device__ __forceinline__ void unpack_eight(const uint4& packed, float* x) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

// Takes `count` keys of OF_WARPS warps of a team, AT_ONCE of a lane at a time: load_key(i) and load_value(i)
// give 8 channels of key and value i. What is behind the end is read at the end and not counted.
template <int OF_WARPS = SIDE_WARPS, int AT_ONCE = KEYS_AT_ONCE, class LoadKey, class LoadValue>
__device__ __forceinline__ void take_keys(Running (&running)[HEADS_OF_WARP],
                                          const float (&q)[HEADS_OF_WARP][8], int count,
                                          const LoadKey& load_key, const LoadValue& load_value) {
    const int lane = threadIdx.x % 32, j = lane % LANES;
    constexpr int TOGETHER = OF_WARPS * KEYS;
    const int own = threadIdx.x / 32 % OF_WARPS * KEYS + lane / LANES;
    const bool idle = lane >= KEYS * LANES;
#pragma unroll 1
    for (int from = 0; from < count; from += AT_ONCE * TOGETHER) {
        uint4 key[AT_ONCE], value[AT_ONCE];
        float score[AT_ONCE][HEADS_OF_WARP];
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            const int at = min(from + s * TOGETHER + own, count - 1);
            key[s] = load_key(at), value[s] = load_value(at);
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            float k[8];
            unpack_eight(key[s], k);
#pragma unroll
            for (int g = 0; g < HEADS_OF_WARP; ++g) {
                float sum = 0.f;
#pragma unroll
                for (int c = 0; c < 8; ++c) sum += q[g][c] * k[c];
                score[s][g] = sum_of_key(sum, lane - j, j);
                if (idle || from + s * TOGETHER + own >= count) score[s][g] = LOWEST;
            }
        }
#pragma unroll
        for (int g = 0; g < HEADS_OF_WARP; ++g) {
            float highest = running[g].maximum;
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) highest = fmaxf(highest, score[s][g]);
            running[g].raise(highest);
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            float v[8];
            unpack_eight(value[s], v);
#pragma unroll
            for (int g = 0; g < HEADS_OF_WARP; ++g) {
                const float p = score[s][g] == LOWEST ? 0.f : exp2f(score[s][g] - running[g].maximum);
                running[g].add(p, p, v);
            }
        }
    }
}

struct Merged {
    float value, maximum, total;
};

constexpr int ROWS = BATCH > 8 ? 2 : 4;  // whose loads are under way together

// Adds `count` rows of up to ROWS in their order; what is behind the count is not counted.
__device__ __forceinline__ void merge(Merged& m, int count, const float (&value)[ROWS],
                                      const float (&maximum)[ROWS], const float (&total)[ROWS]) {
    float highest = m.maximum;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) highest = i < count ? fmaxf(highest, maximum[i]) : highest;
    const float factor = exp2f(m.maximum - highest);
    m = {m.value * factor, highest, m.total * factor};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const float weight = i < count ? exp2f(maximum[i] - highest) : 0.f;
        m.value += weight * value[i], m.total += weight * total[i];
    }
}

// One channel of what the warps of a team have left, `row` floats from one to the next.
__device__ __forceinline__ Merged merge_warps(const float* first, int row, int channel) {
    Merged m = {0.f, LOWEST, 0.f};
    for (int begin = 0; begin < TEAM_WARPS; begin += ROWS) {
        float value[ROWS], maximum[ROWS], total[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float* const from = first + min(begin + i, TEAM_WARPS - 1) * row;
            value[i] = from[channel], maximum[i] = from[HEAD_DIM], total[i] = from[HEAD_DIM + 1];
        }
        merge(m, TEAM_WARPS - begin, value, maximum, total);
    }
    return m;
}

// Adds one channel of `count` parts that other CTAs leave, at(0) the first.
template <class At>
__device__ __forceinline__ void merge_parts(Merged& m, int count, const At& at) {
    for (int begin = 0; begin < count; begin += ROWS) {
        float2 values[ROWS], maxima[ROWS];
        float value[ROWS], maximum[ROWS], total[ROWS];
        take_numbers<ROWS>(values, maxima, count - begin, [&](int i) { return at(begin + i); });
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            value[i] = values[i].x, maximum[i] = maxima[i].x, total[i] = values[i].y;
        merge(m, count - begin, value, maximum, total);
    }
}

// Leaves what a warp's lanes have in a row of shared memory for each of its heads.
__device__ __forceinline__ void leave_row(Running& r, float* row) {
    const int lane = threadIdx.x % 32, j = lane % LANES;
#pragma unroll
    for (int k = 1; k < KEYS; ++k) {
        const int from = j + k * LANES;
        const float maximum = __shfl_sync(ALL_LANES, r.maximum, from);
        const float total = __shfl_sync(ALL_LANES, r.total, from);
        float values[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] = __shfl_sync(ALL_LANES, r.values[c], from);
        if (lane < LANES) {
            r.raise(fmaxf(r.maximum, maximum));
            const float weight = exp2f(maximum - r.maximum);
            r.add(weight, weight * total, values);
        }
    }
    if (lane < LANES)
#pragma unroll
        for (int c = 0; c < 8; ++c) row[8 * j + c] = r.values[c];
    if (lane == 0) row[HEAD_DIM] = r.maximum, row[HEAD_DIM + 1] = r.total;
}

__device__ __forceinline__ int first_head(const Segment& segment) {
    return segment.reader / PASSES * GROUP + segment.reader % PASSES * HEADS;
}

// Of a segment's key or value head, among all heads of a token.
__device__ __forceinline__ int kv_head(const Segment& segment, bool of_values) {
    return HEADS_Q + of_values * HEADS_KV + segment.reader / PASSES;
}

// Brings what this launch made for a segment: the queries of a pass, the newest key, the newest value.
__device__ __forceinline__ void copy_newest(const Call& call, const Segment& segment, u16* newest) {
    constexpr int ROW = HEAD_DIM / 8;  // pieces of 16 bytes
    for (int i = threadIdx.x; i < (HEADS + 2) * ROW; i += MMA_THREADS) {
        const int row = i / ROW;
        const int head = row < HEADS ? first_head(segment) + row : kv_head(segment, row > HEADS);
        copy_async(newest + 8 * i, head_of(call, segment.n, head) + i % ROW * 8);
    }
}

// Keys and their values in slots of the ring, which all warps wait for and free.
struct RingKeys {
    static constexpr bool IN_RUNS = false;
    Ring& ring;
    __device__ __forceinline__ void begin() const { wait_barrier(ring.full + 8 * ring.slot, ring.parity); }
    __device__ __forceinline__ uint4 load(int i) const {
        return load_shared(ring.slots + ring.slot * SLOT_BYTES + i * KEY_BYTES +
                           threadIdx.x % 32 % LANES * 16);
    }
    __device__ __forceinline__ uint4 key(int i) const { return load(i); }
    __device__ __forceinline__ uint4 value(int i) const { return load(CHUNK + i); }
    __device__ __forceinline__ void end() const {
        __syncwarp();  // all lanes have read
        if (threadIdx.x % 32 == 0) arrive(ring.empty + 8 * ring.slot);
        ring.advance();
    }
};

// A segment; the warp's sums go to its HEADS_OF_WARP rows. `source` has key(i) and value(i) of a slot between
// begin() and end(), slot by slot; IN_RUNS: also of the whole segment, before the first begin(), which the
// warps of a team then share without sides where that gives them more loads at a time.
template <class Source>
__device__ __forceinline__ void attend_segment(const Call& call, const Chunks& chunks, const Segment& segment,
                                               const u16* newest, Source source, float* rows) {
    const int n = segment.n, warp = threadIdx.x / 32, j = threadIdx.x % 32 % LANES;
    const int team = min(warp / TEAM_WARPS, TEAMS - 1);  // warps that no team needs repeat the last one's
    const int side = warp % TEAM_WARPS / SIDE_WARPS;
    const float scale = LOG2E * rsqrtf((float)HEAD_DIM);
    const u32 own = shared_address(newest) + 16 * j;
    float q[HEADS_OF_WARP][8];
    Running running[HEADS_OF_WARP];
#pragma unroll
    for (int g = 0; g < HEADS_OF_WARP; ++g) {
        unpack_eight(load_shared(own + (team * HEADS_OF_WARP + g) * KEY_BYTES), q[g]);
#pragma unroll
        for (int c = 0; c < 8; ++c) q[g][c] *= scale;
        running[g] = {LOWEST, 0.f, {}};
    }
    if (segment.end == segment.chunks && side == 0) {
        if (call.kv_batch) {
            take_keys(
                running, q, 1, [&](int) { return load_shared(own + HEADS * KEY_BYTES); },
                [&](int) { return load_shared(own + (HEADS + 1) * KEY_BYTES); });
        } else {
            const auto load = [&](int i, bool of_values) {
                return __ldcg((const uint4*)head_of(call, i, kv_head(segment, of_values)) + j);
            };
            take_keys(
                running, q, n + 1, [&](int i) { return load(i, false); },
                [&](int i) { return load(i, true); });
        }
    }
    const auto key = [&](int i) { return source.key(i); };
    const auto value = [&](int i) { return source.value(i); };
    if (Source::IN_RUNS && segment.end - segment.begin > SIDES) {
        const int end = min(segment.end * CHUNK, chunks.old[n]);
        take_keys<TEAM_WARPS, MAX_KEYS_AT_ONCE>(running, q, end - segment.begin * CHUNK, key, value);
    } else {
        int slot = 0;
        visit_slots(chunks, segment, [&](int, int count) {
            source.begin();
            if (slot++ % SIDES == side) take_keys(running, q, count, key, value);
            source.end();
        });
    }
#pragma unroll
    for (int g = 0; g < HEADS_OF_WARP; ++g) leave_row(running[g], rows + g * MERGED_ROW);
}

// All segments of this CTA, by all multiplying warps. `x` has room for X_BYTES.
__device__ __forceinline__ void attend(const Call& call, const Chunks& chunks, Ring& ring, char* x) {
    constexpr int WARP_ROWS = HEADS_OF_WARP * MERGED_ROW, MAX_SEGMENTS = X_BYTES / SEGMENT_BYTES;
    constexpr int AT_ONCE = MAX_SEGMENTS < 8 ? MAX_SEGMENTS : 8;  // segments
    u16* const newest = (u16*)x;
    float* const rows = (float*)(x + AT_ONCE * NEWEST_BYTES);
    __shared__ Segment segments[AT_ONCE];
    // Of a segment that goes on with a head: value and sum, maximum and sum of each channel.
    const auto part_of = [&](int cta) { return call.kv_parts + cta * HEADS * HEAD_DIM * 2; };
    for (Walk walk(chunks); !walk.done();) {
        int count = 0;
#pragma unroll 1
        for (; count < AT_ONCE && !walk.done(); ++count) {
            const Segment segment = walk.next(chunks);
            if (threadIdx.x == 0) segments[count] = segment;
            copy_newest(call, segment, newest + count * (NEWEST_BYTES / 2));
        }
        wait_copies();
        sync_threads(OF_MMA, MMA_THREADS);  // segments and what is new of them are there
#pragma unroll 1
        for (int c = 0; c < count; ++c)
            attend_segment(call, chunks, segments[c], newest + c * (NEWEST_BYTES / 2), RingKeys{ring},
                           rows + (c * WARPS + threadIdx.x / 32) * WARP_ROWS);
        sync_threads(OF_MMA, MMA_THREADS);  // all warps' sums are there
#pragma unroll 1
        for (int c = 0; c < count; ++c) {
            const Segment segment = segments[c];
            const int chunk = chunks.before[segment.n] * READERS + segment.reader * segment.chunks;
            const int last_cta = cta_of_chunk(chunks, chunk + segment.chunks - 1);
            u16* const out = call.attended + segment.n * Q_COLS + first_head(segment) * HEAD_DIM;
#pragma unroll 1
            for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += MMA_THREADS) {
                const int head = i / HEAD_DIM, channel = i % HEAD_DIM;
                const float* const first = rows +
                                           (c * WARPS + head / HEADS_OF_WARP * TEAM_WARPS) * WARP_ROWS +
                                           head % HEADS_OF_WARP * MERGED_ROW;
                Merged m = merge_warps(first, WARP_ROWS, channel);
                if (segment.begin > 0) {
                    const float sum = fmaxf(m.total, 1e-30f);  // 0 where all scores are -inf: no flag
                    leave_numbers(part_of(blockIdx.x) + 2 * i, {m.value, sum}, {m.maximum, sum});
                } else {
                    merge_parts(m, last_cta - (int)blockIdx.x,
                                [&](int p) { return part_of(blockIdx.x + 1 + p) + 2 * i; });
                    out[i] = round_element(m.value / m.total);
                }
            }
        }
        sync_threads(OF_MMA, MMA_THREADS);  // the sums of warps have been read, all is written
    }
}

// Leaves the newest key and value of a segment to the next launches; a warp.
__device__ __forceinline__ void keep_segment(const Call& call, int layer, const Segment& segment) {
    constexpr int ROW = HEAD_DIM / 8;  // pieces of 16 bytes
    const i64 at = keys_of(call, layer, segment) + (i64)__ldg(call.positions + segment.n) * HEAD_DIM;
    for (int i = threadIdx.x % 32; i < 2 * ROW; i += 32) {
        const bool of_values = i >= ROW;
        const u16* const from = head_of(call, segment.n, kv_head(segment, of_values));
        const int piece = (i - of_values * ROW) * 8;
        *(uint4*)((of_values ? call.v : call.k) + at + piece) = __ldcg((const uint4*)(from + piece));
    }
}

// The newest keys and values of this CTA's segments. Memory takes microseconds for pages that nobody has read
// yet, so none of this launch waits for them.
__device__ __forceinline__ void keep_newest(const Call& call, int layer, const Chunks& chunks) {
    int count = 0;
    for (Walk walk(chunks); !walk.done();) {
        const Segment segment = walk.next(chunks);
        if (segment.end < segment.chunks || segment.reader % PASSES) continue;
        if (count++ % WARPS == threadIdx.x / 32) keep_segment(call, layer, segment);
    }
}
