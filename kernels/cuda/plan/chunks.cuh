// The chunks of a row whose rungs a plan chooses (plan/plan.cu): 16 tokens of one class. A block has a row.
#pragma once

#include "plan/plan.cuh"

constexpr int ROW_THREADS = 1024;

// The chunks of a class of a group, in the order of their weights.
struct Run {
    const float* weights;
    int chunks, first;  // first: number of chunks of the row before these
};

// The chunks that may climb one edge of their hull.
struct Edge {
    Run run;
    float rate;
    int bytes;  // more of each, 0 if there is no such edge
};

// What is known of the first chunk beyond a price: it is one of these.
struct Bounds {
    int low, high;
};

// The first chunk of a run whose slope exceeds the price, or reaches it; their number if none does.
__device__ __forceinline__ int first_beyond(const Run& run, float rate, float price, const Bounds& within,
                                            bool reaching) {
    int found = within.low, half = within.high - within.low;
    half = half ? 1 << (31 - __clz(half)) : 0;
#pragma unroll 1
    for (; half; half /= 2) {
        const int at = found + half;
        const float slope = at <= within.high ? __fmul_rn(run.weights[at - 1], rate) : price;
        const bool beyond = at > within.high || slope > price || (reaching && slope == price);
        found = beyond ? found : at;
    }
    return found;
}

// How many chunks of a run take a step of their hull: those whose slope exceeds the price, `above` is the
// first of them, and of those at the price the chunks with numbers below `ties`.
__device__ __forceinline__ int taking(const Run& run, float rate, float price, const Bounds& within, int ties,
                                      int& above) {
    above = first_beyond(run, rate, price, within, false);
    if (ties <= run.first) return run.chunks - above;
    const int equal = first_beyond(run, rate, price, {within.low, above}, true);
    return run.chunks - above + min(max(ties - run.first, equal), above) - equal;
}

// Cuts the tokens of a row's groups into chunks; returns their number and the bytes that everything else
// takes. If it is compact, what is left over makes chunks of fewer tokens, but in the page that takes the
// next tokens, if that has enough free slots; so does what leaves the window. All threads.
__device__ int make_chunks(const Plan& p, int row, bool compact, const int* cost, long long& other_bytes) {
    const int own = p.s.heads * p.call.segments, classes = p.classes, top = p.s.num_rungs - 1;
    int total = 0;
    other_bytes = 0;
    for (int first = 0; first < own; first += ROW_THREADS) {
        const int i = first + threadIdx.x, g = row * own + i;
        int chunks = 0, started = -1, all;
        int of_top = 0, of_new = 0;  // what is left over
        auto chunks_of = [&](int c, int movable) {
            const bool is_short = (compact && c != started) || (p.call.window && c >= top);
            return is_short ? pages_of(movable) : movable / PAGE;
        };
        if (i < own) {
            const int* tokens = p.tokens(g);
            const int lookahead = p.s.waits[row] ? 0 : p.to_come(g % p.call.segments);
            if (compact && lookahead > 0 && !p.call.window) {
                of_new = tokens[top + 1] - p.movable(g, top + 1) / PAGE * PAGE;
                of_top = tokens[top] - p.movable(g, top) / PAGE * PAGE;
                if (slots_behind(of_new, of_top) >= lookahead) started = of_new % PAGE ? top + 1 : top;
            }
#pragma unroll 4
            for (int c = 0; c < classes; ++c) {
                const int movable = p.movable(g, c), n = chunks_of(c, movable);
                const int beside = tokens[c] - min(PAGE * n, movable);
                chunks += n;
                other_bytes += (long long)pages_of(beside) * cost[p.level_of(c)];
                if (c == top) of_top = beside;
                if (c > top) of_new = beside;
            }
            const bool extra = slots_behind(of_new, of_top) < lookahead;
            p.call.extra[p.group(g)] = (extra ? EXTRA : 0) | (compact || p.call.window ? COMPACT : 0);
            if (extra) other_bytes += cost[p.levels - 1];
        }
        int number = total + block_scan<ROW_THREADS, int>(chunks, all), weights = 0;
        for (int c = 0; c < classes && i < own; ++c) {
            const int movable = p.movable(g, c), n = chunks_of(c, movable);
            p.run(g, c) = {n, number, weights, min(PAGE * n, movable)};
            number += n;
            weights += pages_of(movable);
        }
        total += all;
    }
    block_scan<ROW_THREADS, long long>(other_bytes, other_bytes);  // and the runs are there
    return total;
}
