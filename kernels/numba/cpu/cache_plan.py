"""What a layer's pages become, on the CPU: `kvlab.reference.cache_plan.plan`, bit for bit.

`plan_layer` counts, chooses and allocates, and `cache_moves` says which tokens move and sets the tables.
A plan is the work of one thread: a millisecond for some 100,000 tokens, most of it to read their importance.
Layers are planned side by side by different threads.
"""

import numpy as np

from .cache_groups import (
    KEYS,
    OVER_BUDGET,
    PAGE,
    PER_SLAB,
    RECENT,
    RETRY,
    SEGMENT,
    TAIL,
    UNIT,
    allocating,
    key_of,
    new_groups,
    opens_empty,
    planned_pages,
    slots_left,
)
from .cache_moves import list_moves, set_tables
from .simd import helper
from .softmax import serial


def _weight_of(key):
    """What an error of a token costs: its importance in units of 2**-32; 1e4 recent, 2**24 sinks."""
    if key >= RECENT:
        return 10_000 << 32 if key == RECENT else 1 << 56
    power = (key - 192) >> 3
    mantissa = round(2.0 ** (((key - 192) & 7) / 8) * 2**32)
    return 128 if key == 0 else mantissa << power if power >= 0 else mantissa >> -power


_WEIGHT = np.array([_weight_of(key) for key in range(KEYS)], np.uint64)


@serial
def plan_layer(tables, levels, rules, new):
    """Plan a layer: its tables are brought to their final state, page contents stay as they are.

    Returns
    -------
    moves, closing : uint32 (n, 4)
        Of both phases, as Move of cache_state.cuh: from, to, slots and rungs, token. Those to one page are
        neighbours.
    copies : uint32 (n, 3)
        Whole pages: from, to, rung.
    new_pages, dropped, status : int
    """
    rungs, pairs = len(tables.rungs), len(tables.num_pages)
    groups = new_groups(pairs * rules.segments, rungs, rungs + rules.evicts)
    _count(tables, rules, new, groups)
    weights = _weigh(groups)
    status, own, scratch = 0, rules.heads * rules.segments, np.empty(1, np.int32)
    for row in range(len(tables.budget)):
        bytes_left = tables.budget[row] - rules.fixed_nbytes
        waits = tables.waits[row] != 0
        if not _choose(levels, rules, groups, weights, row * own, own, bytes_left, waits, scratch):
            status |= OVER_BUDGET
    if not _allocate(tables, rules, groups, np.empty(rungs, np.int64)):
        status |= RETRY
    moves, closing, after = list_moves(tables, rules, new, groups)
    copies, new_pages, dropped, failed = set_tables(tables, rules, groups, after)
    status |= failed
    tables.status[0] |= status
    return moves, closing, copies, new_pages, dropped, status


# ---- count


@helper
def _count(tables, rules, new, groups):
    """Count the tokens of every (group, class, key), and the pages of every kind."""
    rungs, shorts = len(tables.rungs), tables.arena.view(np.uint16)
    for bh in range(len(tables.num_pages)):
        for e in range(planned_pages(tables, rules, bh)):
            g = bh * rules.segments + np.int64(tables.base[bh, e])
            r, n = np.int64(tables.rung[bh, e]), np.int64(tables.counts[bh, e])
            groups.kinds[g, r, 0 if n == PAGE else 1 if n else 2] += 1
            groups.slots[g, r] += n
            tail = np.int64(tables.addresses[bh, e]) * UNIT + tables.rungs[r, TAIL]
            start, counts = np.int64(tables.base[bh, e]) << SEGMENT, groups.starts[g, r]
            for slot in range(n):
                position = start + np.int64(shorts[tail // 2 + slot])
                key = key_of(rules, tables.arena[tail + 2 * PAGE + slot], position)
                if key >= 0:
                    counts[key] += 1
        for i in range(new.codes.shape[1]):
            if new.valid[bh // rules.heads, i]:
                position = np.int64(new.positions[bh // rules.heads, i])
                g = bh * rules.segments + (position >> SEGMENT)
                groups.starts[g, rungs, key_of(rules, new.codes[bh, i], position)] += 1


@allocating
def _weigh(groups):
    """Return the weight of every full chunk, exact sums rounded once; counts become starts."""
    number, (num_groups, classes) = 0, groups.tokens.shape
    for g in range(num_groups):
        for c in range(classes):
            total = np.int64(0)
            for key in range(KEYS):
                total += groups.starts[g, c, key]
            groups.tokens[g, c], groups.chunk[g, c] = total, number
            number += total // PAGE
    weights = np.empty(number, np.float32)
    for g in range(num_groups):
        for c in range(classes):
            chunk, left, weight, before = groups.chunk[g, c], PAGE, np.uint64(0), 0
            end, starts = chunk + groups.tokens[g, c] // PAGE, groups.starts[g, c]
            for key in range(KEYS):
                n = np.int64(starts[key])
                starts[key] = before
                before += n
                while n > 0 and chunk < end:
                    part = min(n, left)
                    weight += np.uint64(part) * _WEIGHT[key]
                    n, left = n - part, left - part
                    if left == 0:
                        weights[chunk] = np.float32(weight)
                        chunk, left, weight = chunk + 1, PAGE, np.uint64(0)
    return weights


# ---- choose


@helper
def _first_above(weights, begin, end, rate, price, reaching):
    """The first chunk whose slope exceeds the price, or reaches it; weights rise."""
    while begin < end:
        middle = (begin + end) // 2
        slope = weights[middle] * rate
        if slope > price or (reaching and slope == price):
            end = middle
        else:
            begin = middle + 1
    return begin


@helper
def _taking(weights, begin, end, rate, price, ties):
    """How many chunks take an edge of their hull: those above the price, and at it those below `ties`."""
    above = _first_above(weights, begin, end, rate, price, False)
    if ties <= begin:
        return end - above
    equal = _first_above(weights, begin, above, rate, price, True)
    return end - above + min(max(ties, equal), above) - equal


@helper
def _nbytes_at(levels, rules, groups, weights, first, own, price, ties):
    """Bytes of all chunks of a row beyond those of the lowest level."""
    total, (_, classes, top) = np.int64(0), groups.chosen.shape
    for g in range(first, first + own):
        for c in range(classes):
            begin = groups.chunk[g, c]
            end, ceiling = begin + groups.tokens[g, c] // PAGE, min(c + rules.evicts, top - 1)
            if begin == end:
                continue
            below = 0
            for edge in range(levels.edges[ceiling]):
                n = _taking(weights, begin, end, levels.rate[ceiling, edge], price, ties)
                if n == 0:
                    break
                level = levels.level[ceiling, edge]
                total += n * (levels.cost[level] - levels.cost[below])
                below = level
    return total


@helper
def _choose(levels, rules, groups, weights, first, own, bytes_left, waits, bits):
    """Choose how many chunks of every class of a row's groups go to each level; false if they do not fit."""
    _, classes, num_levels = groups.chosen.shape
    top, chunks, begin = num_levels - 1, np.int64(0), groups.chunk[first, 0] if own else np.int64(0)
    for g in range(first, first + own):
        groups.extra[g] = not waits and slots_left(groups, g) < _to_come(rules, g % rules.segments)
        bytes_left -= groups.extra[g] * levels.cost[top]
        for c in range(classes):
            chunks += groups.tokens[g, c] // PAGE
            if groups.tokens[g, c] % PAGE:
                bytes_left -= levels.cost[min(c + rules.evicts, top)]
    bytes_left -= chunks * levels.cost[0]
    price = bits.view(np.float32)
    low, high = -1, 0x7F7FFFFF
    while high - low > 1:
        middle = low + (high - low) // 2
        bits[0] = middle
        if _nbytes_at(levels, rules, groups, weights, first, own, price[0], begin) <= bytes_left:
            high = middle
        else:
            low = middle
    bits[0] = high
    ties, beyond = np.int64(0), chunks + 1
    while beyond - ties > 1:
        middle = (ties + beyond) // 2
        if _nbytes_at(levels, rules, groups, weights, first, own, price[0], begin + middle) <= bytes_left:
            ties = middle
        else:
            beyond = middle
    for g in range(first, first + own):
        for c in range(classes):
            _take_levels(levels, rules, groups, weights, g, c, price[0], begin + ties)
    return _nbytes_at(levels, rules, groups, weights, first, own, price[0], begin + ties) <= bytes_left


@helper
def _take_levels(levels, rules, groups, weights, g, c, price, ties):
    begin, ceiling = groups.chunk[g, c], min(c + rules.evicts, groups.chosen.shape[2] - 1)
    end = begin + groups.tokens[g, c] // PAGE
    here, level = end - begin, 0
    for edge in range(levels.edges[ceiling]):
        n = _taking(weights, begin, end, levels.rate[ceiling, edge], price, ties)
        groups.chosen[g, c, level] = here - n
        here, level = n, levels.level[ceiling, edge]
    groups.chosen[g, c, level] = here


@helper
def _to_come(rules, segment):
    """How many of the next tokens lie in a segment."""
    first, end = segment << SEGMENT, (segment + 1) << SEGMENT
    return max(0, min(end, rules.seqlen + rules.lookahead) - max(first, rules.seqlen))


# ---- allocate


@helper
def _new_pages(rules, groups, g, r):
    """Pages of a rung that a group needs beside those it has."""
    rungs = groups.kinds.shape[1]
    pages = np.int64(0)
    for c in range(rungs + 1):
        if c != r:
            pages += groups.chosen[g, c, r + rules.evicts]
    if r == rungs - 1:
        pages += (groups.tokens[g, rungs] % PAGE > 0) + np.int64(opens_empty(groups, rules, g))
    return pages


@helper
def _slabs_needed(tables, new_pages, r):
    per_slab = tables.rungs[r, PER_SLAB]
    return (tables.used[r] + new_pages + per_slab - 1) // per_slab - tables.slab_count[r]


@helper
def _allocate(tables, rules, groups, new_pages):
    """Number the new pages and take slabs for them; false if they had to be cut down."""
    (num_groups, rungs), pages, slabs = groups.first.shape, np.int64(0), np.int64(0)
    for r in range(rungs):
        new_pages[r] = 0
        for g in range(num_groups):
            new_pages[r] += _new_pages(rules, groups, g, r)
        slabs += _slabs_needed(tables, new_pages[r], r)
        pages += new_pages[r]
    whole = pages <= rules.most_new_pages and slabs <= tables.num_free[0]
    if not whole:
        _cut_down(tables, rules, groups, new_pages)
    for r in range(rungs):
        new_pages[r] = 0
    for g in range(num_groups):
        for r in range(rungs):
            groups.new_pages[g, r] = _new_pages(rules, groups, g, r)
            groups.first[g, r] = tables.used[r] + new_pages[r]
            new_pages[r] += groups.new_pages[g, r]
    for r in range(rungs):
        for _ in range(_slabs_needed(tables, new_pages[r], r)):
            tables.num_free[0] -= 1
            slab = tables.free_slabs[tables.num_free[0]]
            tables.slabs[r, tables.slab_count[r]], tables.slab_slot[slab] = slab, tables.slab_count[r]
            tables.slab_count[r] += 1
        tables.used[r] += new_pages[r]
    return whole


@helper
def _cut_down(tables, rules, groups, left):
    """Take no new tokens in, and demote no more than the free slabs hold."""
    num_groups, rungs = groups.first.shape
    part = tables.num_free[0] // rungs
    for r in range(rungs):
        held = (tables.slab_count[r] + part) * tables.rungs[r, PER_SLAB] - tables.used[r]
        left[r] = min(held, rules.most_new_pages // rungs)
    for g in range(num_groups):
        groups.extra[g], groups.tokens[g, rungs] = False, 0
        for level in range(groups.chosen.shape[2]):
            groups.chosen[g, rungs, level] = 0
        for r in range(rungs):
            for c in range(r + 1, rungs):
                level, own = r + rules.evicts, c + rules.evicts
                cut = max(0, groups.chosen[g, c, level] - left[r])
                left[r] -= groups.chosen[g, c, level] - cut
                groups.chosen[g, c, level] -= cut
                groups.chosen[g, c, own] += cut
