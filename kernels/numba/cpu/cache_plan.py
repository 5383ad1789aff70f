"""Plan the pages of a layer on the CPU: `kvlab.reference.cache_plan.plan`, bit for bit.

A plan has three parts: `count_tokens`, `choose_levels` and `finish_plan`. The last one calls `cache_moves`,
which says what tokens move and sets the tables. One thread makes a plan, in a millisecond for 100,000 tokens;
most of that time it reads their importance. Other threads plan other layers at the same time.
"""

import numpy as np

from .cache_groups import (
    KEYS,
    NO_PAGE,
    OVER_BUDGET,
    PAGE,
    PER_SLAB,
    RECENT,
    RETRY,
    SEGMENT,
    TAIL,
    UNIT,
    WINDOW,
    allocating,
    key_of,
    left_over,
    new_groups,
    opens_empty,
    pages_of,
    planned_pages,
    slots_left,
    tokens_moved,
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
def count_tokens(tables, levels, rules, new):
    """Count the tokens of a layer and make chunks of them, the first of three parts of a plan.

    Returns
    -------
    groups : Groups
    weights : float32 (n,)
        Of chunks; `Groups.chunk` says where those of a class begin.
    bytes_left : int64 (batch,)
        What chunks of a row may take.
    """
    rungs, num_bh = len(tables.rungs), len(tables.num_pages)
    groups = new_groups(num_bh * rules.segments, rungs, rungs + rules.evicts)
    _count(tables, rules, new, groups)
    kept = rules.seqlen - max(rules.oldest, 0)
    weights = _weigh(groups, np.uint64(rules.floor // max(kept, 1)))
    own, bytes_left = rules.heads * rules.segments, np.empty(len(tables.budget), np.int64)
    for row in range(len(bytes_left)):
        waits, available = tables.waits[row] != 0, tables.budget[row] - rules.fixed_nbytes
        bytes_left[row] = _make_chunks(levels, rules, groups, row * own, own, available, waits)
    return groups, weights, bytes_left


@serial
def choose_levels(levels, rules, groups, weights, bytes_left, uniform):
    """Choose levels for all chunks, by price or the same for all; the second part, which others may do.

    Returns bits of the layer's status.
    """
    status, own, scratch = 0, rules.heads * rules.segments, np.empty(1, np.int32)
    for row in range(len(bytes_left)):
        if uniform:
            fits = _choose_one(levels, rules, groups, row * own, own, bytes_left[row])
        else:
            fits = _choose(levels, rules, groups, weights, row * own, own, bytes_left[row], scratch)
        if not fits:
            status |= OVER_BUDGET
    return status


@serial
def finish_plan(tables, rules, new, groups, status):
    """Allocate pages, list moves and set the tables; the last part.

    Returns
    -------
    moves, closing : uint32 (n, 4)
        Of both phases, as Move of pages/state.cuh: from, to, slots and rungs, token. Those to one page are
        neighbours.
    copies : uint32 (n, 3)
        Whole pages: from, to, rung.
    new_pages, dropped, status : int
    """
    if not _allocate(tables, rules, groups, np.empty(len(tables.rungs), np.int64)):
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
            if tables.addresses[bh, e] == NO_PAGE:
                continue
            g = bh * rules.segments + np.int64(tables.base[bh, e])
            r, n = np.int64(tables.rung[bh, e]), np.int64(tables.counts[bh, e])
            groups.kinds[g, r, 0 if n == PAGE else 1 if n else 2] += 1
            groups.slots[g, r] += n
            tail = np.int64(tables.addresses[bh, e]) * UNIT + tables.rungs[r, TAIL]
            start, counts = np.int64(tables.base[bh, e]) << SEGMENT, groups.starts[g, r]
            window = rules.window if r == rungs - 1 else 0
            for slot in range(n):
                position = start + np.int64(shorts[tail // 2 + slot])
                key = key_of(rules, tables.arena[tail + 2 * PAGE + slot], position, window)
                if key >= 0:
                    counts[key] += 1
        for i in range(new.codes.shape[1]):
            if new.valid[bh // rules.heads, i]:
                position = np.int64(new.positions[bh // rules.heads, i])
                g = bh * rules.segments + (position >> SEGMENT)
                key = key_of(rules, new.codes[bh, i], position, rules.window)
                if key >= 0:
                    groups.starts[g, rungs, key] += 1


@allocating
def _weigh(groups, floor):
    """Return the weight of every chunk, exact sums rounded once; counts become starts.

    Each token has `floor` more than its importance. Where a page does not divide a class, its last chunk has
    fewer tokens than a page; that chunk weighs as if it were full.
    """
    number, (num_groups, classes) = 0, groups.tokens.shape
    for g in range(num_groups):
        for c in range(classes):
            total = np.int64(0)
            for key in range(WINDOW):
                total += groups.starts[g, c, key]
            groups.movable[g, c], groups.chunk[g, c] = total, number
            groups.tokens[g, c] = total + groups.starts[g, c, WINDOW]
            number += pages_of(total)
    weights = np.empty(number, np.float32)
    for g in range(num_groups):
        for c in range(classes):
            first, left, weight, before = groups.chunk[g, c], PAGE, np.uint64(0), 0
            chunk, starts = first, groups.starts[g, c]
            for key in range(KEYS):
                n = np.int64(starts[key])
                starts[key] = before
                before += n
                while n > 0 and key < WINDOW:
                    part = min(n, left)
                    weight += np.uint64(part) * (_WEIGHT[key] + floor)
                    n, left = n - part, left - part
                    if left == 0:
                        weights[chunk] = np.float32(weight)
                        chunk, left, weight = chunk + 1, PAGE, np.uint64(0)
            if left < PAGE:
                weights[chunk] = np.float32(weight) * (np.float32(PAGE) / np.float32(PAGE - left))
                if chunk > first:  # weights rise, in spite of rounding
                    weights[chunk] = max(weights[chunk], weights[chunk - 1])
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
def _ceiling(levels, rules, c):
    """The highest level of chunks of a class; the top rung has none where it is for the window."""
    return min(c + rules.evicts, len(levels.cost) - 1 - (rules.window > 0))


@helper
def _nbytes_at(levels, rules, groups, weights, first, own, price, ties):
    """Bytes of all chunks of a row beyond those of the lowest level."""
    total, classes = np.int64(0), groups.chosen.shape[1]
    for g in range(first, first + own):
        for c in range(classes):
            begin, ceiling = groups.chunk[g, c], _ceiling(levels, rules, c)
            end, limit = begin + groups.chunks[g, c], ties + begin - groups.number[g, c]
            if begin == end:
                continue
            below = 0
            for edge in range(levels.edges[ceiling]):
                n = _taking(weights, begin, end, levels.rate[ceiling, edge], price, limit)
                if n == 0:
                    break
                level = levels.level[ceiling, edge]
                total += n * (levels.cost[level] - levels.cost[below])
                below = level
    return total


@helper
def _make_chunks(levels, rules, groups, first, own, bytes_left, waits):
    """Cut the tokens of a row into chunks, and return the bytes that these may take.

    Where even the lowest level leaves too few bytes for what is left over, that makes chunks of fewer tokens,
    but in the page that takes the next tokens, if it has enough free slots. So does what leaves the window.
    """
    classes, top = groups.tokens.shape[1], len(levels.cost) - 1
    for compact in range(2):
        needed, number = np.int64(0), np.int64(0)
        for g in range(first, first + own):
            lookahead = 0 if waits else _to_come(rules, g % rules.segments)
            for c in range(classes):
                groups.chunks[g, c] = groups.movable[g, c] // PAGE
            started = -1
            if compact and not rules.window and slots_left(groups, g) >= lookahead > 0:
                started = classes - 1 if left_over(groups, g, classes - 1) % PAGE else classes - 2
            for c in range(classes):
                if (compact and c != started) or (rules.window and c >= classes - 2):
                    groups.chunks[g, c] = pages_of(groups.movable[g, c])
                groups.number[g, c] = number
                number += groups.chunks[g, c]
                needed += pages_of(left_over(groups, g, c)) * levels.cost[min(c + rules.evicts, top)]
            groups.extra[g] = slots_left(groups, g) < lookahead
            needed += groups.extra[g] * levels.cost[top]
        if needed + number * levels.cost[0] <= bytes_left:
            break
    return bytes_left - needed


@helper
def _num_chunks(groups, first, own):
    """Chunks of a row."""
    if own == 0:
        return np.int64(0)
    last = first + own - 1
    return groups.number[last, -1] + groups.chunks[last, -1]


@helper
def _choose(levels, rules, groups, weights, first, own, bytes_left, bits):
    """Choose how many chunks of every class of a row's groups go to each level; false if they do not fit."""
    chunks, price = _num_chunks(groups, first, own), bits.view(np.float32)
    bytes_left -= chunks * levels.cost[0]
    low, high = -1, 0x7F7FFFFF
    while high - low > 1:
        middle = low + (high - low) // 2
        bits[0] = middle
        if _nbytes_at(levels, rules, groups, weights, first, own, price[0], 0) <= bytes_left:
            high = middle
        else:
            low = middle
    bits[0] = high
    ties, beyond = np.int64(0), chunks + 1
    while beyond - ties > 1:
        middle = (ties + beyond) // 2
        if _nbytes_at(levels, rules, groups, weights, first, own, price[0], middle) <= bytes_left:
            ties = middle
        else:
            beyond = middle
    for g in range(first, first + own):
        for c in range(groups.chosen.shape[1]):
            _take_levels(levels, rules, groups, weights, g, c, price[0], ties)
    return _nbytes_at(levels, rules, groups, weights, first, own, price[0], ties) <= bytes_left


@helper
def _take_levels(levels, rules, groups, weights, g, c, price, ties):
    """Choose the levels of a class at a price."""
    begin, ceiling = groups.chunk[g, c], _ceiling(levels, rules, c)
    end, limit = begin + groups.chunks[g, c], ties + begin - groups.number[g, c]
    here, level = end - begin, 0
    for edge in range(levels.edges[ceiling]):
        n = _taking(weights, begin, end, levels.rate[ceiling, edge], price, limit)
        groups.chosen[g, c, level] = here - n
        here, level = n, levels.level[ceiling, edge]
    groups.chosen[g, c, level] = here


@helper
def _choose_one(levels, rules, groups, first, own, bytes_left):
    """Choose one level for all chunks, or their ceiling where that is lower; false if they do not fit."""
    level, total = 0, np.int64(0)
    for level in range(len(levels.cost) - 1, -1, -1):
        total = np.int64(0)
        for g in range(first, first + own):
            for c in range(groups.chosen.shape[1]):
                total += groups.chunks[g, c] * levels.cost[min(_ceiling(levels, rules, c), level)]
        if total <= bytes_left or levels.cost[level] == levels.cost[0]:
            break
    for g in range(first, first + own):
        for c in range(groups.chosen.shape[1]):
            groups.chosen[g, c, min(_ceiling(levels, rules, c), level)] = groups.chunks[g, c]
    return total <= bytes_left


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
            pages += pages_of(tokens_moved(groups, rules, g, c, r))
    return pages + np.int64(r == rungs - 1 and opens_empty(groups, rules, g))


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
    whole = pages <= rules.max_new_pages and slabs <= tables.num_free[0]
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
        left[r] = min(held, rules.max_new_pages // rungs)
    for g in range(num_groups):
        groups.extra[g], groups.tokens[g, rungs], groups.chunks[g, rungs] = False, 0, 0
        for level in range(groups.chosen.shape[2]):
            groups.chosen[g, rungs, level] = 0
        for r in range(rungs):
            for c in range(r + 1, rungs):
                level, own = r + rules.evicts, c + rules.evicts
                cut = max(0, groups.chosen[g, c, level] - left[r])
                left[r] -= groups.chosen[g, c, level] - cut
                groups.chosen[g, c, level] -= cut
                groups.chosen[g, c, own] += cut
