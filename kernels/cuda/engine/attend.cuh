// Attention of the new tokens, whose keys and values come through the ring as weights do.
//
// Keys and values of earlier launches wait for nothing, so the copy engine brings them right behind QKV: a
// slot of the ring has a chunk of keys and then their values. Chunks of all tokens and KV heads, one after
// the other, are dealt out evenly: a CTA has a run of them, in up to a few segments, each of one KV head of
// one token. Only keys of this launch, of the token and of its neighbours before it, are read from memory
// when QKV is done.
//
// In a CTA a team of warps has HEADS_OF_WARP query heads, and TEAMS of them the heads of a pass over the
// keys. A key is read by LANES lanes, 8 channels each; KEYS keys are side by side in a warp (head_dim 80: 10
// lanes a key, 3 keys, 30 lanes at work), and a team's warps take KEYS of a slot in turns. Each key's lanes
// keep maximum, sum and weighted values of what they saw (online softmax); they are merged in the warp, then
// in shared memory. Segments that are not all of a head leave their sums in memory, and the CTA that comes
// last merges them, in their order.
#pragma once

#include "common/pairs.cuh"

#include "common/hopper.cuh"
#include "engine/norm.cuh"
#include "engine/ring.cuh"

constexpr int LANES = HEAD_DIM / 8, KEYS = 32 / LANES;
constexpr int TEAM_WARPS = WARPS / TEAMS, ROUND = TEAM_WARPS * KEYS;  // keys that a team takes at a time
constexpr int KEY_BYTES = 2 * HEAD_DIM, CHUNK = SLOT_BYTES / (2 * KEY_BYTES);
constexpr int MOST_STEPS = BATCH > 8 ? 1 : 4;
constexpr int STEPS = CHUNK > (MOST_STEPS - 1) * ROUND ? MOST_STEPS : (CHUNK + ROUND - 1) / ROUND;
constexpr int READERS = HEADS_KV * PASSES;  // of a token: passes over a KV head's keys
constexpr float LOWEST = -1e30f;
static_assert(HEAD_DIM % 16 == 0 && KEYS >= 1 && CHUNK >= 1, "a key has up to 32 lanes, a slot has a key");

// KiB of weights that a CTA could take in while attention waits for QKV, merges and tells the others.
constexpr u32 KIB_OF_WAITS = PACKED ? 0 : 300;

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
    __device__ __forceinline__ bool whole() const { return begin == 0 && end == chunks; }
};

// The number of CTAs whose QKV, keys and values take as long as UP takes the others. All lanes of a warp.
__device__ __forceinline__ int balance(int old_keys) {
    constexpr u32 TILE_KIB = HIDDEN / 32, QKV_TILES = QKV_ROWS / 16, UP_TILES = FFN / 16;
    const u32 ctas = gridDim.x, key_kib = (float)old_keys * READERS * KEY_BYTES * 2 / 1024;
    u32 best = ~0u;
    for (u32 n = 1 + threadIdx.x % 32; n < ctas; n += 32) {
        const u32 qkv = (QKV_TILES + n - 1) / n * TILE_KIB + key_kib / n + KIB_OF_WAITS;
        const u32 up = (UP_TILES + ctas - n - 1) / (ctas - n) * TILE_KIB;
        best = min(best, min(max(qkv, up), (1u << 22) - 1) << 10 | n);
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
__device__ __forceinline__ void produce_keys(const Call& call, int layer, const Chunks& chunks, Ring& ring) {
    for (Walk walk(chunks); !walk.done();) {
        const Segment segment = walk.next(chunks);
        const i64 base = keys_of(call, layer, segment);
        visit_slots(chunks, segment, [&](int key, int count) {
            const u32 to = ring.slots + ring.slot * SLOT_BYTES, full = ring.full + 8 * ring.slot;
            const u32 bytes = count * KEY_BYTES;
            const i64 from = base + (i64)key * HEAD_DIM;
            wait_barrier(ring.empty + 8 * ring.slot, ring.parity ^ 1);
            expect_bytes(full, 2 * bytes);
            copy_bytes(to, call.k + from, bytes, full);
            copy_bytes(to + CHUNK * KEY_BYTES, call.v + from, bytes, full);
            ring.advance();
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

// Takes `count` keys of a team: load_key(i) and load_value(i) give 8 channels of key and value i. What is
// behind the end is read at the end and not counted.
template <class LoadKey, class LoadValue>
__device__ __forceinline__ void take_keys(Running (&running)[HEADS_OF_WARP],
                                          const float (&q)[HEADS_OF_WARP][8], int count,
                                          const LoadKey& load_key, const LoadValue& load_value) {
    const int lane = threadIdx.x % 32, j = lane % LANES;
    const int own = threadIdx.x / 32 % TEAM_WARPS * KEYS + lane / LANES;
    const bool idle = lane >= KEYS * LANES;
#pragma unroll 1
    for (int from = 0; from < count; from += STEPS * ROUND) {
        uint4 key[STEPS], value[STEPS];
        float score[STEPS][HEADS_OF_WARP];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int at = min(from + s * ROUND + own, count - 1);
            key[s] = load_key(at), value[s] = load_value(at);
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            float k[8];
            unpack_eight(key[s], k);
#pragma unroll
            for (int g = 0; g < HEADS_OF_WARP; ++g) {
                float sum = 0.f;
#pragma unroll
                for (int c = 0; c < 8; ++c) sum += q[g][c] * k[c];
                score[s][g] = sum_of_key(sum, lane - j, j);
                if (idle || from + s * ROUND + own >= count) score[s][g] = LOWEST;
            }
        }
#pragma unroll
        for (int g = 0; g < HEADS_OF_WARP; ++g) {
            float highest = running[g].maximum;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) highest = fmaxf(highest, score[s][g]);
            running[g].raise(highest);
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
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

// One channel of `count` rows, merged in their order. Row r is where at(r) points.
template <class At>
__device__ __forceinline__ Merged merge_rows(int count, int channel, const At& at) {
    constexpr int AT_ONCE = BATCH > 8 ? 2 : 4;  // rows whose loads are under way together
    Merged m = {0.f, LOWEST, 0.f};
    for (int begin = 0; begin < count; begin += AT_ONCE) {
        float value[AT_ONCE], maximum[AT_ONCE], total[AT_ONCE], highest = m.maximum;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int r = min(begin + i, count - 1);
            value[i] = at(r, channel), maximum[i] = at(r, HEAD_DIM), total[i] = at(r, HEAD_DIM + 1);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) highest = fmaxf(highest, maximum[i]);
        const float factor = exp2f(m.maximum - highest);
        m = {m.value * factor, highest, m.total * factor};
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float weight = begin + i < count ? exp2f(maximum[i] - highest) : 0.f;
            m.value += weight * value[i], m.total += weight * total[i];
        }
    }
    return m;
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

constexpr int HEADS = TEAMS * HEADS_OF_WARP;  // of a pass

__device__ __forceinline__ int first_head(const Segment& segment) {
    return segment.reader / PASSES * GROUP + segment.reader % PASSES * HEADS;
}

// A segment; the warp's sums go to its HEADS_OF_WARP rows.
__device__ __forceinline__ void attend_segment(const Call& call, int layer, const Chunks& chunks,
                                               const Segment& segment, Ring& ring, float* rows) {
    const int n = segment.n, warp = threadIdx.x / 32, j = threadIdx.x % 32 % LANES;
    const int team = min(warp / TEAM_WARPS, TEAMS - 1);  // warps that no team needs repeat the last one's
    const float scale = LOG2E * rsqrtf((float)HEAD_DIM);
    float q[HEADS_OF_WARP][8];
    Running running[HEADS_OF_WARP];
#pragma unroll
    for (int g = 0; g < HEADS_OF_WARP; ++g) {
        const int head = first_head(segment) + team * HEADS_OF_WARP + g;
        unpack_eight(__ldcg((const uint4*)(call.q + (n * HEADS_Q + head) * HEAD_DIM) + j), q[g]);
#pragma unroll
        for (int c = 0; c < 8; ++c) q[g][c] *= scale;
        running[g] = {LOWEST, 0.f, {}};
    }
    if (segment.end == segment.chunks) {
        const i64 base = keys_of(call, layer, segment) + (i64)chunks.old[n] * HEAD_DIM + 8 * j;
        take_keys(
            running, q, call.kv_batch ? 1 : n + 1,
            [&](int i) { return __ldcg((const uint4*)(call.k + base + i * HEAD_DIM)); },
            [&](int i) { return __ldcg((const uint4*)(call.v + base + i * HEAD_DIM)); });
    }
    visit_slots(chunks, segment, [&](int, int count) {
        wait_barrier(ring.full + 8 * ring.slot, ring.parity);
        const u32 keys = ring.slots + ring.slot * SLOT_BYTES + 16 * j, values = keys + CHUNK * KEY_BYTES;
        take_keys(
            running, q, count, [&](int i) { return load_shared(keys + i * KEY_BYTES); },
            [&](int i) { return load_shared(values + i * KEY_BYTES); });
        __syncwarp();  // all lanes have read
        if (threadIdx.x % 32 == 0) arrive(ring.empty + 8 * ring.slot);
        ring.advance();
    });
#pragma unroll
    for (int g = 0; g < HEADS_OF_WARP; ++g) leave_row(running[g], rows + g * MERGED_ROW);
}

// A head whose parts are all there: how many, the first's CTA, and where its channels go. Else parts is 0.
struct Shared {
    int parts, first_cta, out;
};

// All segments of this CTA, by all multiplying warps. `rows` has room for X_BYTES.
__device__ __forceinline__ void attend(const Call& call, int layer, const Chunks& chunks, Ring& ring,
                                       float* rows) {
    constexpr int WARP_ROWS = HEADS_OF_WARP * MERGED_ROW, ROOM = X_BYTES / (4 * WARPS * WARP_ROWS);
    constexpr int AT_ONCE = ROOM < 8 ? ROOM : 8;  // segments
    __shared__ Segment segments[AT_ONCE];
    // A CTA has up to two segments that are parts: one goes on with a head, one begins with a head.
    const auto part_of = [&](int cta, bool begins) {
        return call.kv_parts + (2 * cta + begins) * HEADS * MERGED_ROW;
    };
    const auto out_of = [&](const Segment& segment) {
        return call.attended + segment.n * Q_COLS + first_head(segment) * HEAD_DIM;
    };
    Segment segment;
    for (Walk walk(chunks); !walk.done();) {
        int count = 0;
#pragma unroll 1
        for (; count < AT_ONCE && !walk.done(); ++count) {
            segment = walk.next(chunks);
            if (threadIdx.x == 0) segments[count] = segment;
            float* const own = rows + (count * WARPS + threadIdx.x / 32) * WARP_ROWS;
            attend_segment(call, layer, chunks, segment, ring, own);
        }
        sync_threads(OF_MMA, MMA_THREADS);  // all warps' sums are there
#pragma unroll 1
        for (int c = 0; c < count; ++c) {
            segment = segments[c];
#pragma unroll 1
            for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += MMA_THREADS) {
                const int head = i / HEAD_DIM, channel = i % HEAD_DIM;
                const float* const first = rows +
                                           (c * WARPS + head / HEADS_OF_WARP * TEAM_WARPS) * WARP_ROWS +
                                           head % HEADS_OF_WARP * MERGED_ROW;
                const Merged m =
                    merge_rows(TEAM_WARPS, channel, [&](int w, int at) { return first[w * WARP_ROWS + at]; });
                if (segment.whole()) {
                    out_of(segment)[i] = round_element(m.value / m.total);
                } else {
                    float* const row = part_of(blockIdx.x, segment.begin == 0) + head * MERGED_ROW;
                    row[channel] = m.value;
                    if (channel == 0) row[HEAD_DIM] = m.maximum, row[HEAD_DIM + 1] = m.total;
                }
            }
        }
        sync_threads(OF_MMA, MMA_THREADS);  // the sums of warps have been read, all is written
    }

    // Thread 0 for the segment that goes on with a head, thread 1 for the one that begins with a head.
    Shared* const shared = (Shared*)rows;
    if (threadIdx.x < 2) {
        Shared own = {0, 0, 0};
        if (threadIdx.x == 0) segment = Walk(chunks).next(chunks);
        if (!segment.whole() && (threadIdx.x == 0) == (segment.begin > 0)) {
            const int reader = segment.n * READERS + segment.reader;
            const int chunk = chunks.before[segment.n] * READERS + segment.reader * segment.chunks;
            own.first_cta = cta_of_chunk(chunks, chunk);
            own.out = segment.n * Q_COLS + first_head(segment) * HEAD_DIM;
            const int parts = cta_of_chunk(chunks, chunk + segment.chunks - 1) - own.first_cta + 1;
            u32* const counter = call.kv_arrivals + reader;
            u32 before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                         : "=r"(before)
                         : "l"(counter)
                         : "memory");
            if (before == parts - 1) *(volatile u32*)counter = 0, own.parts = parts;
        }
        shared[threadIdx.x] = own;
    }
    sync_threads(OF_MMA, MMA_THREADS);  // whether all parts are there is known
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * HEADS * HEAD_DIM; i += MMA_THREADS) {
        const Shared own = shared[i / (HEADS * HEAD_DIM)];
        if (!own.parts) continue;
        const int channel = i % (HEADS * HEAD_DIM);
        const Merged m = merge_rows(own.parts, channel % HEAD_DIM, [&](int p, int at) {
            return __ldcg(part_of(own.first_cta + p, p == 0) + channel / HEAD_DIM * MERGED_ROW + at);
        });
        call.attended[own.out + channel] = round_element(m.value / m.total);
    }
    sync_threads(OF_MMA, MMA_THREADS);  // `shared` has been read, all is written
}
