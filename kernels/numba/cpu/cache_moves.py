"""Choose which tokens and pages move, and set the tables: `kvlab.reference.cache_moves`, bit for bit.

This is the second half of `cache_plan`. The first half has found how many chunks of each class go to which
rung, and which new pages take them. Here a counting sort ranks the tokens that leave a class, and a rank says
which page and slot a token goes to. Tokens that stay fill holes: the n-th that moves goes to the n-th hole.
"""

import numpy as np

from .cache_groups import (
    DROPPED,
    NEW_TOKEN,
    NO_PAGE,
    PAGE,
    PER_SLAB,
    QUAD,
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
    stays, after = np.zeros(tables.counts.shape, np.uint16), tables.counts.astype(np.int16)
    begins = np.empty((len(after), rungs + 1), np.int64)
    for bh in range(len(after)):
        _find_rungs(tables, rules, bh, begins[bh])
    for g in range(num_groups):
        _leave(tables, rules, groups, g, begins[g // rules.segments], first, moves, targets, stays)
        if groups.tokens[g, rungs]:
            _enter(tables, rules, new, groups, g, first, moves, targets[rungs])
    holes = np.empty((PAGE * max(tables.counts.shape[1], 1), 2), np.uint32)
    closing, closed = np.empty((_max_holes(rules, groups), 4), np.uint32), np.int64(0)
    for g in range(num_groups):
        for r in range(rungs):
            run = begins[g // rules.segments, r : r + 2]
            closed = _close_up(tables, rules, groups, g, r, run, stays, after, holes, closing, closed)
    return moves, closing[:closed], after


@helper
def _max_holes(rules, groups):
    """Count the slots that tokens leave, and all of pages that are partly filled."""
    (num_groups, rungs), total = groups.first.shape, np.int64(0)
    for g in range(num_groups):
        for r in range(rungs):
            total += tokens_leaving(groups, rules, g, r) + groups.slots[g, r] - groups.tokens[g, r]
            total += PAGE * groups.kinds[g, r, 1]
    return total


@helper
def _find_rungs(tables, rules, bh, begins):
    """Find where the entries of each rung begin, and the end of the last."""
    e, n = np.int64(0), planned_pages(tables, rules, bh)
    for r in range(begins.size):
        while e < n and tables.rung[bh, e] < r:
            e += 1
        begins[r] = e


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
def _is_still(rules, groups, g, r):
    """Whether no token of a class moves: none leaves, and its pages are full but one."""
    if r == groups.kinds.shape[1] - 1 or groups.kinds[g, r, 1] > 1 or groups.kinds[g, r, 2]:
        return False
    return tokens_leaving(groups, rules, g, r) == 0 and groups.slots[g, r] == groups.tokens[g, r]


@helper
def _leave(tables, rules, groups, g, begins, first, moves, targets, stays):
    """List the tokens of a group that leave their rungs; which stay of every page, a bit a slot."""
    bh, segment, top = g // rules.segments, g % rules.segments, len(tables.rungs) - 1
    for r in range(len(tables.rungs)):
        _find_targets(rules, groups, g, r, first, targets[r])
    shorts = tables.arena.view(np.uint16)
    for r in range(len(tables.rungs)):
        if _is_still(rules, groups, g, r):
            continue
        leaving, window = tokens_leaving(groups, rules, g, r), rules.window if r == top else 0
        whole, ranks = leaving == 0 and groups.slots[g, r] == groups.tokens[g, r], groups.starts[g, r]
        for e in range(begins[r], begins[r + 1]):
            if tables.base[bh, e] != segment:
                continue
            address, n = np.int64(tables.addresses[bh, e]), np.int64(tables.counts[bh, e])
            tail, mask = address * UNIT + tables.rungs[r, TAIL], (1 << n) - 1 if whole else 0
            for slot in range(0 if whole else n):
                position = (segment << SEGMENT) + np.int64(shorts[tail // 2 + slot])
                key = key_of(rules, tables.arena[tail + 2 * PAGE + slot], position, window)
                if key < 0:
                    continue
                rank = np.int64(ranks[key])
                ranks[key] += 1
                if rank >= leaving:
                    mask |= 1 << slot
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
            if key < 0:
                continue
            rank = np.int64(ranks[key])
            ranks[key] += 1
            _move(tables, rules, moves, targets, rank, bh, np.int64(0), np.int64(NEW_TOKEN), row * tokens + i)


@helper
def _close_up(tables, rules, groups, g, r, run, stays, after, holes, closing, closed):
    """Let what stays in a class fill the pages that stay, full ones first; return the number of moves.

    `run`: where the entries of the rung begin and end. Moves are listed from closing[closed] on.
    """
    bh, segment, top = g // rules.segments, g % rules.segments, len(tables.rungs) - 1
    full, partial, empty = groups.kinds[g, r, 0], groups.kinds[g, r, 1], groups.kinds[g, r, 2]
    if full + partial + empty == 0 or _is_still(rules, groups, g, r):
        return closed
    needed = pages_needed(groups, rules, g, r)
    staying = groups.tokens[g, r] - tokens_leaving(groups, rules, g, r)
    kept = needed + (r == top and groups.extra[g])
    for phase in range(2):
        next_full, next_partial, next_empty = np.int64(0), full, full + partial
        num_holes, hole = 0, 0
        for e in range(run[0], run[1]):
            if tables.base[bh, e] != segment or tables.addresses[bh, e] == NO_PAGE:
                continue
            n, address = tables.counts[bh, e], tables.addresses[bh, e]
            if n == PAGE:
                o, next_full = next_full, next_full + 1
            elif n:
                o, next_partial = next_partial, next_partial + 1
            else:
                o, next_empty = next_empty, next_empty + 1
            target = PAGE if o < needed - 1 else staying - PAGE * (needed - 1) if o == needed - 1 else 0
            mask = np.int64(stays[bh, e])
            if phase == 0:
                left = ~mask & (1 << target) - 1
                for slot in range(target if left else 0):
                    if left >> slot & 1:
                        holes[num_holes, 0], holes[num_holes, 1] = address, slot
                        num_holes += 1
                _keep(groups, g, r == top, e, o, needed, kept, target, after[bh])
                continue
            for slot in range(target, PAGE if mask >> target else target):
                if mask >> slot & 1:
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
    old, roles = np.empty((4, tables.counts.shape[1]), np.int64), groups.role.copy()
    copies, is_freed = np.empty((dropped, 3), np.uint32), np.empty(dropped, np.bool_)
    for bh in range(len(after)):
        if tables.waits[bh // rules.heads]:
            continue  # its pages stay as they are
        if not _set_table(tables, rules, groups, bh, after[bh], freed, num_freed, old, roles):
            return copies[:0], new_pages, dropped, TABLE_FULL
    copied = np.int64(0)
    for r in range(rungs):
        copied = _close_pool(tables, rules, r, freed[r, : num_freed[r]], is_freed, copies, copied)
    return copies[:copied], new_pages, dropped, 0


@helper
def _end_of_table(tables, rules, groups, bh, after):
    """Entries of a table afterwards: of each rung the pages that stay and new ones, in whole quads."""
    e, end, n = np.int64(0), np.int64(0), np.int64(tables.num_pages[bh])
    for r in range(len(tables.rungs)):
        while e < n and tables.rung[bh, e] == r:
            end += after[e] != DROPPED and tables.addresses[bh, e] != NO_PAGE
            e += 1
        for g in range(bh * rules.segments, (bh + 1) * rules.segments):
            end += groups.new_pages[g, r]
        end += -end % QUAD
    return end


@helper
def _set_table(tables, rules, groups, bh, after, freed, num_freed, old, roles):
    """Sort a table by rung: pages that stay, new ones, fillers up to a quad; false if they are too many."""
    n, entries, slab_units = np.int64(tables.num_pages[bh]), tables.counts.shape[1], rules.slab_units
    if _end_of_table(tables, rules, groups, bh, after) > entries:
        return False
    for e in range(n):
        old[0, e], old[1, e] = tables.rung[bh, e], tables.base[bh, e]
        old[2, e], old[3, e] = tables.addresses[bh, e], after[e]
    e, to = np.int64(0), np.int64(0)
    for r in range(len(tables.rungs)):
        while e < n and old[0, e] == r:
            segment, address, count = old[1:, e]
            if count == DROPPED:
                freed[r, num_freed[r]] = page_number(tables, slab_units, r, address)
                num_freed[r] += 1
            elif address != NO_PAGE:
                g = bh * rules.segments + segment
                for role in range(2):
                    if roles[g, role] == e:
                        groups.role[g, role] = to
                _set_entry(tables, bh, to, r, segment, address, count)
                if to != e:
                    tables.entry_of[r, page_number(tables, slab_units, r, address)] = bh * entries + to
                to += 1
            e += 1
        for g in range(bh * rules.segments, (bh + 1) * rules.segments):
            to = _add_pages(tables, rules, groups, g, r, to)
        while to % QUAD:
            _set_entry(tables, bh, to, r, 0, NO_PAGE, 0)
            to += 1
    tables.num_pages[bh] = to
    _set_open(tables, rules, groups, bh)
    return True


@helper
def _set_entry(tables, bh, e, r, segment, address, count):
    tables.rung[bh, e], tables.base[bh, e] = r, segment
    tables.addresses[bh, e], tables.counts[bh, e] = address, count


@helper
def _add_pages(tables, rules, groups, g, r, e):
    """Enter the new pages of a (group, rung) from entry e on; return the entry behind them."""
    bh, rungs, number = g // rules.segments, len(tables.rungs), groups.first[g, r]
    for c in range(rungs + 2):  # behind the classes, the page that is held ready
        tokens, pages = np.int64(0), np.int64(r == rungs - 1 and opens_empty(groups, rules, g))
        if c <= rungs:
            tokens = 0 if c == r else tokens_moved(groups, rules, g, c, r)
            pages = pages_of(tokens)
        for j in range(pages):
            count = min(PAGE, tokens - PAGE * j) if c <= rungs else 0
            _set_entry(
                tables, bh, e, r, g % rules.segments, page_address(tables, rules.slab_units, r, number), count
            )
            tables.entry_of[r, number] = bh * tables.counts.shape[1] + e
            if c > rungs:
                groups.role[g, 1] = e
            elif r == rungs - 1 and j == pages - 1 and left_over(groups, g, rungs) % PAGE:
                groups.role[g, 0] = e
            e, number = e + 1, number + 1
    return e


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
    """Copy the last pages of a rung to the places of dropped ones; give back slabs that became empty."""
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
