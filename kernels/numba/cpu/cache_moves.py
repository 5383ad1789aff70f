"""Which tokens and pages move, and the tables afterwards: `kvlab.reference.cache_moves`, bit for bit.

Second half of `cache_plan`: it is known how many chunks of each class go to which rung and which new
pages take them. A token that leaves its class finds its place by its rank: by key, then by place, as in a
counting sort. Those that stay close up: the n-th that has to move goes to the n-th hole.
"""

import numpy as np

from .cache_groups import (
    DROPPED,
    NEW_TOKEN,
    PAGE,
    PER_SLAB,
    SEGMENT,
    TABLE_FULL,
    TAIL,
    UNIT,
    allocating,
    chunk_tokens,
    key_of,
    left_over,
    opens_empty,
    page_address,
    page_number,
    pages_needed,
    pages_of,
    planned_pages,
    slots_left,
    tokens_leaving,
    tokens_moved,
)
from .simd import helper


@allocating
def list_moves(tables, rules, new, groups):
    """Return the moves of both phases and what becomes of every entry, int16 (bh, entries).

    That is its count afterwards, or DROPPED.
    """
    (num_groups, rungs), num_levels = groups.first.shape, groups.chosen.shape[2]
    first, targets = np.zeros((num_groups, rungs), np.int64), np.zeros((rungs + 1, 3, num_levels), np.int64)
    moves = np.empty((_first_moves(rules, groups, first), 4), np.uint32)
    stays, after = np.zeros(tables.counts.shape, np.uint64), tables.counts.astype(np.int16)
    for g in range(num_groups):
        _leave(tables, rules, groups, g, first, moves, targets, stays)
        if groups.tokens[g, rungs]:
            _enter(tables, rules, new, groups, g, first, moves, targets[rungs])
    holes = np.empty((PAGE * max(tables.counts.shape[1], 1), 2), np.uint32)
    closing, closed = np.empty((0, 4), np.uint32), np.int64(0)
    for _ in range(2):  # moves are counted, then listed
        closing, closed = np.empty((closed, 4), np.uint32), np.int64(0)
        for g in range(num_groups):
            for r in range(rungs):
                closed = _close_up(tables, rules, groups, g, r, stays, after, holes, closing, closed)
    return moves, closing, after


@helper
def _first_moves(rules, groups, first):
    """Find where the moves of a (group, rung) begin, by rung, then by group; return how many there are."""
    (num_groups, rungs), total = groups.first.shape, np.int64(0)
    for r in range(rungs):
        for g in range(num_groups):
            first[g, r] = total
            for c in range(rungs + 1):
                if c != r:
                    total += tokens_moved(groups, rules, g, c, r)
    return total


@helper
def _find_targets(rules, groups, g, c, first, targets):
    """Of class c: where the ranks of each level end, its first new page, the place of its first move."""
    ends, pages, begins = targets[0], targets[1], targets[2]
    rungs, end, most = groups.kinds.shape[1], np.int64(0), chunk_tokens(groups, g, c)
    for level in range(groups.chosen.shape[2]):
        r = level - rules.evicts
        if r >= 0:
            pages[level], begins[level] = groups.first[g, r], first[g, r]
            for other in range(c):
                if other != r:
                    moved = tokens_moved(groups, rules, g, other, r)
                    pages[level] += pages_of(moved)
                    begins[level] += moved
        end += 0 if r == c else PAGE * groups.chosen[g, c, level]
        ends[level] = min(end, most)
    if c == rungs:
        ends[-1] += left_over(groups, g, c)


@helper
def _move(tables, rules, moves, targets, rank, source, slot, rung, token):
    """Write the move of a token that leaves its class; none if it is evicted."""
    ends, pages, begins = targets[0], targets[1], targets[2]
    level = 0
    while ends[level] <= rank:
        level += 1
    r = level - rules.evicts
    if r < 0:
        return
    rank -= ends[level - 1] if level else 0
    move = moves[begins[level] + rank]
    move[0], move[3] = source, token
    move[1] = page_address(tables, rules.slab_units, r, pages[level] + rank // PAGE)
    move[2] = slot | rank % PAGE << 8 | rung << 16 | r << 24


@helper
def _leave(tables, rules, groups, g, first, moves, targets, stays):
    """List the tokens of a group that leave their rungs; which stay of every page, a bit a slot."""
    bh, segment, top = g // rules.segments, g % rules.segments, len(tables.rungs) - 1
    for r in range(len(tables.rungs)):
        _find_targets(rules, groups, g, r, first, targets[r])
    shorts = tables.arena.view(np.uint16)
    for e in range(planned_pages(tables, rules, bh)):
        r, n = np.int64(tables.rung[bh, e]), np.int64(tables.counts[bh, e])
        if tables.base[bh, e] != segment:
            continue
        leaving, window = tokens_leaving(groups, rules, g, r), rules.window if r == top else 0
        if leaving == 0 and groups.slots[g, r] == groups.tokens[g, r]:
            stays[bh, e] = ~np.uint64(0) >> np.uint64(PAGE - n) if n else np.uint64(0)
            continue
        address, ranks = np.int64(tables.addresses[bh, e]), groups.starts[g, r]
        tail, mask = address * UNIT + tables.rungs[r, TAIL], np.uint64(0)
        for slot in range(n):
            position = (segment << SEGMENT) + np.int64(shorts[tail // 2 + slot])
            key = key_of(rules, tables.arena[tail + 2 * PAGE + slot], position, window)
            if key < 0:
                continue
            rank = np.int64(ranks[key])
            ranks[key] += 1
            if rank >= leaving:
                mask |= np.uint64(1) << np.uint64(slot)
            else:
                _move(tables, rules, moves, targets[r], rank, address, slot, r, bh)
        stays[bh, e] = mask


@helper
def _enter(tables, rules, new, groups, g, first, moves, targets):
    """List the new tokens of a group."""
    rungs, tokens = len(tables.rungs), new.codes.shape[1]
    bh, segment = g // rules.segments, g % rules.segments
    row = bh // rules.heads
    _find_targets(rules, groups, g, rungs, first, targets)
    ranks = groups.starts[g, rungs]
    for i in range(tokens):
        position = np.int64(new.positions[row, i])
        if new.valid[row, i] and position >> SEGMENT == segment:
            key = key_of(rules, new.codes[bh, i], position, rules.window)
            rank = np.int64(ranks[key])
            ranks[key] += 1
            _move(tables, rules, moves, targets, rank, bh, np.int64(0), np.int64(NEW_TOKEN), row * tokens + i)


@helper
def _close_up(tables, rules, groups, g, r, stays, after, holes, closing, closed):
    """Let what stays in a class fill the pages that stay, full ones first; return the number of moves.

    They are listed from closing[closed] on, unless that has no place for any.
    """
    bh, segment, top = g // rules.segments, g % rules.segments, len(tables.rungs) - 1
    full, partial, empty = groups.kinds[g, r, 0], groups.kinds[g, r, 1], groups.kinds[g, r, 2]
    if full + partial + empty == 0:
        return closed
    needed = pages_needed(groups, rules, g, r)
    staying = groups.tokens[g, r] - tokens_leaving(groups, rules, g, r)
    kept = needed + (r == top and groups.extra[g])
    for phase in range(2):
        next_full, next_partial, next_empty = np.int64(0), full, full + partial
        num_holes, hole = 0, 0
        for e in range(planned_pages(tables, rules, bh)):
            if tables.rung[bh, e] != r or tables.base[bh, e] != segment:
                continue
            n, address = tables.counts[bh, e], tables.addresses[bh, e]
            if n == PAGE:
                o, next_full = next_full, next_full + 1
            elif n:
                o, next_partial = next_partial, next_partial + 1
            else:
                o, next_empty = next_empty, next_empty + 1
            target = PAGE if o < needed - 1 else staying - PAGE * (needed - 1) if o == needed - 1 else 0
            mask = stays[bh, e]
            if phase == 0:
                for slot in range(target):
                    if not mask >> np.uint64(slot) & np.uint64(1):
                        holes[num_holes, 0], holes[num_holes, 1] = address, slot
                        num_holes += 1
                _keep(groups, g, r == top, e, o, needed, kept, target, after[bh])
                continue
            for slot in range(target, PAGE):
                if mask >> np.uint64(slot) & np.uint64(1):
                    if len(closing):
                        move = closing[closed]
                        move[0], move[1], move[3] = address, holes[hole, 0], bh
                        move[2] = slot | np.int64(holes[hole, 1]) << 8 | r << 16 | r << 24
                    hole, closed = hole + 1, closed + 1
    return closed


@helper
def _keep(groups, g, is_top, e, o, needed, kept, target, after):
    """Say what becomes of the o-th page of a class, entry e."""
    after[e] = DROPPED if o >= kept else target
    if is_top and o == needed - 1:
        groups.role[g, 0] = e
    elif is_top and needed <= o < kept:
        groups.role[g, 1] = e


# ---- tables


@allocating
def set_tables(tables, rules, groups, after):
    """Bring the tables to their final state; return copies of pages, new_pages, dropped pages, status."""
    rungs, dropped, new_pages = len(tables.rungs), np.int64(0), groups.new_pages.sum()
    for bh in range(len(after)):
        for e in range(planned_pages(tables, rules, bh)):
            dropped += after[bh, e] == DROPPED
    freed, num_freed = np.empty((rungs, dropped), np.int64), np.zeros(rungs, np.int64)
    vacant, is_freed = np.empty(2 * tables.counts.shape[1], np.int64), np.empty(dropped, np.bool_)
    copies = np.empty((dropped, 3), np.uint32)
    for bh in range(len(after)):
        if tables.waits[bh // rules.heads]:
            continue  # its pages stay as they are
        if not _set_table(tables, rules, groups, bh, after[bh], freed, num_freed, vacant):
            return copies[:0], new_pages, dropped, TABLE_FULL
    copied = np.int64(0)
    for r in range(rungs):
        copied = _close_pool(tables, rules, r, freed[r, : num_freed[r]], is_freed, copies, copied)
    return copies[:copied], new_pages, dropped, 0


@helper
def _set_table(tables, rules, groups, bh, after, freed, num_freed, vacant):
    """Let entries of dropped pages be taken by others; false if there are too few."""
    n, entries, slab_units = np.int64(tables.num_pages[bh]), tables.counts.shape[1], rules.slab_units
    groups_of = range(bh * rules.segments, (bh + 1) * rules.segments)
    gone, added = np.int64(0), np.int64(0)
    for e in range(n):
        gone += after[e] == DROPPED
    for g in groups_of:
        for r in range(len(tables.rungs)):
            added += groups.new_pages[g, r]
    end = n - gone + added
    if end > entries:
        return False
    free = 0
    for e in range(n):
        if after[e] != DROPPED:
            tables.counts[bh, e] = after[e]
            continue
        tables.counts[bh, e], r = 0, np.int64(tables.rung[bh, e])
        freed[r, num_freed[r]] = page_number(tables, slab_units, r, np.int64(tables.addresses[bh, e]))
        num_freed[r] += 1
        if e < end:
            vacant[free] = e
            free += 1
    for e in range(n, end):
        vacant[free] = e
        free += 1
    taken = np.int64(0)
    for e in range(end, n):
        if after[e] == DROPPED:
            continue
        to, r = vacant[taken], np.int64(tables.rung[bh, e])
        taken += 1
        tables.rung[bh, to], tables.counts[bh, to] = tables.rung[bh, e], tables.counts[bh, e]
        tables.addresses[bh, to], tables.base[bh, to] = tables.addresses[bh, e], tables.base[bh, e]
        number = page_number(tables, slab_units, r, np.int64(tables.addresses[bh, to]))
        tables.entry_of[r, number] = bh * entries + to
        for g in groups_of:
            for role in range(2):
                if groups.role[g, role] == e:
                    groups.role[g, role] = to
    for g in groups_of:
        for r in range(len(tables.rungs)):
            taken = _add_pages(tables, rules, groups, g, r, vacant, taken)
    tables.num_pages[bh] = end
    _set_open(tables, rules, groups, bh)
    return True


@helper
def _add_pages(tables, rules, groups, g, r, vacant, taken):
    """Enter the new pages of a (group, rung)."""
    bh, rungs, number = g // rules.segments, len(tables.rungs), groups.first[g, r]
    for c in range(rungs + 2):  # behind the classes, the page that is held ready
        tokens, pages = np.int64(0), np.int64(r == rungs - 1 and opens_empty(groups, rules, g))
        if c <= rungs:
            tokens = 0 if c == r else tokens_moved(groups, rules, g, c, r)
            pages = pages_of(tokens)
        for j in range(pages):
            e = vacant[taken]
            tables.rung[bh, e], tables.base[bh, e] = r, g % rules.segments
            tables.addresses[bh, e] = page_address(tables, rules.slab_units, r, number)
            tables.entry_of[r, number] = bh * tables.counts.shape[1] + e
            tables.counts[bh, e] = min(PAGE, tokens - PAGE * j) if c <= rungs else 0
            if c > rungs:
                groups.role[g, 1] = e
            elif r == rungs - 1 and j == pages - 1 and left_over(groups, g, rungs) % PAGE:
                groups.role[g, 0] = e
            taken, number = taken + 1, number + 1
    return taken


@helper
def _set_open(tables, rules, groups, bh):
    """Name the pages that take the next tokens, in order."""
    segment = rules.seqlen >> SEGMENT
    first, second, beyond = -1, -1, -1
    if segment < rules.segments:
        g = bh * rules.segments + segment
        first = groups.role[g, 0] if slots_left(groups, g) else -1
        second = groups.role[g, 1]
        beyond = groups.role[g + 1, 1] if segment + 1 < rules.segments else -1
    if beyond >= 0:
        first, second = second if second >= 0 else first, beyond
    if first < 0:
        first, second = second, -1
    tables.open[bh, 0], tables.open[bh, 1] = first, second


@helper
def _close_pool(tables, rules, r, freed, is_freed, copies, copied):
    """Copy the last pages of a rung to the slots of dropped ones; give back slabs that became empty."""
    used, entries = np.int64(tables.used[r]), tables.counts.shape[1]
    after = used - len(freed)
    hole = 0
    for i in range(len(freed)):
        is_freed[i] = False
    for number in freed:
        if number >= after:
            is_freed[number - after] = True
    for number in range(after, used):
        if is_freed[number - after]:
            continue
        while freed[hole] >= after:
            hole += 1
        source, to = page_address(tables, rules.slab_units, r, number), freed[hole]
        address, entry = page_address(tables, rules.slab_units, r, to), tables.entry_of[r, number]
        copies[copied, 0], copies[copied, 1], copies[copied, 2] = source, address, r
        tables.addresses[entry // entries, entry % entries], tables.entry_of[r, to] = address, entry
        hole, copied = hole + 1, copied + 1
    tables.used[r] = after
    per_slab = tables.rungs[r, PER_SLAB]
    slabs = (after + per_slab - 1) // per_slab
    for i in range(slabs, tables.slab_count[r]):
        tables.free_slabs[tables.num_free[0]] = tables.slabs[r, i]
        tables.num_free[0] += 1
    tables.slab_count[r] = slabs
    return copied
