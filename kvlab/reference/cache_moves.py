"""Which tokens and pages move, and the tables afterwards: second half of the oracle ``cache_plan.py``.

What ``kernels/cuda/plan/moves.cu`` and ``plan/tables.cu`` do, once it is known how many chunks of
each class go to which rung and which new pages take them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlab.reference.cache_layer import (
    NEW_TOKEN,
    NO_PAGE,
    PAGE,
    QUAD,
    SEGMENT,
    TABLE_FULL,
    Change,
    Group,
    Ints,
    Layer,
    Rules,
    Tokens,
    chunk_tokens,
    leaving,
    left_over,
    moved,
    pages_needed,
    slots_left,
)

__all__ = ["close_up", "move_to_new_pages", "set_tables"]


def _ranks(blocks: list[tuple[int, Ints]]) -> list[Ints]:
    """Rank of every token of a class by key, then place; -1 where there is none."""
    keys = np.concatenate([key for _, key in blocks])
    order = np.argsort(keys, kind="stable")
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(keys)) - int((keys < 0).sum())
    rank = np.maximum(rank, -1)
    ends = np.cumsum([len(key) for _, key in blocks])[:-1]
    return np.split(rank, ends)


def move_to_new_pages(layer: Layer, g: Group, r: int, new: Tokens | None, change: Change) -> None:
    """Moves of phase 0 into the pages of rung r new pages of a group, in their order."""
    number = g.first[r]
    for c in range(len(g.blocks)):
        if c == r or not g.blocks[c]:
            continue
        is_new = c == len(layer.rungs)
        count = moved(g, layer, c, r)
        first = min(PAGE * sum(g.chosen[c][: r + layer.evicts]), chunk_tokens(g, c))
        moves: list[tuple[int, int, tuple[int, ...]]] = []
        for (origin, _), ranks in zip(g.blocks[c], _ranks(g.blocks[c]), strict=True):
            for slot in np.flatnonzero((ranks >= first) & (ranks < first + count)):
                page, to_slot = divmod(int(ranks[slot]) - first, PAGE)
                to = layer.address(r, number + page)
                if is_new:
                    assert new is not None
                    token = g.bh // layer.heads * new.code.shape[1] + origin + int(slot)
                    moves.append((page, to_slot, (g.bh, to, 0, to_slot, NEW_TOKEN, r, token)))
                else:
                    source = int(layer.index[g.bh, origin])
                    moves.append((page, to_slot, (source, to, int(slot), to_slot, c, r, g.bh)))
        change.phases[0].extend(move for _, _, move in sorted(moves))
        number += -(-count // PAGE)


def close_up(
    layer: Layer,
    g: Group,
    r: int,
    change: Change,
    counts: NDArray[np.uint8],
    dropped: dict[int, list[int]],
    roles: dict[tuple[int, int, str], int],
) -> None:
    """Moves of phase 1 in a stored class: what stays fills the pages that stay, full ones first."""
    if not g.blocks[r]:
        return
    gone, needed = leaving(g, layer, r), pages_needed(g, layer, r)
    staying = g.tokens[r] - gone
    is_top = r == len(layer.rungs) - 1
    kept = min(len(g.blocks[r]), needed + (is_top and g.extra))
    ranks = _ranks(g.blocks[r])
    before = [int(layer.count[g.bh, e]) for e, _ in g.blocks[r]]
    kind = [0 if n == PAGE else 1 if n else 2 for n in before]
    order = sorted(range(len(kind)), key=lambda i: kind[i])
    ordinal = {i: o for o, i in enumerate(order)}
    holes, movers = [], []
    for i, (e, _) in enumerate(g.blocks[r]):
        o, address = ordinal[i], int(layer.index[g.bh, e])
        target = PAGE if o < needed - 1 else staying - PAGE * (needed - 1) if o == needed - 1 else 0
        stays = ranks[i] >= gone
        holes += [(address, slot) for slot in range(target) if not stays[slot]]
        movers += [(address, slot) for slot in range(target, PAGE) if stays[slot]]
        counts[g.bh, e] = target
        if o >= kept:
            dropped.setdefault(g.bh, []).append(e)
        elif is_top and o == needed - 1:
            roles[g.bh, g.segment, "left over"] = e
        elif o >= needed:
            roles[g.bh, g.segment, "extra"] = e
    for (source, from_slot), (to, to_slot) in zip(movers, holes, strict=True):
        change.phases[1].append((source, to, from_slot, to_slot, r, r, g.bh))


# ---- tables


def set_tables(
    layer: Layer,
    groups: list[Group],
    counts: NDArray[np.uint8],
    dropped: dict[int, list[int]],
    roles: dict[tuple[int, int, str], int],
    rules: Rules,
    change: Change,
) -> None:
    """Sort the table of every bh by rung: pages that stay, in their order, new ones, fillers up to a quad."""
    rungs, entries = range(len(layer.rungs)), layer.rung.shape[1]
    freed: list[list[int]] = [[] for _ in rungs]
    for bh in range(layer.batch * layer.heads):
        if layer.row_waits(bh // layer.heads):
            continue
        gone, own = sorted(dropped.get(bh, [])), [g for g in groups if g.bh == bh]
        for e in gone:
            r = int(layer.rung[bh, e])
            freed[r].append(layer.number(r, int(layer.index[bh, e])))
        stay = [e for e in range(layer.num_pages[bh]) if e not in gone and layer.index[bh, e] != NO_PAGE]
        table: list[tuple[int, int, int, int]] = []
        moved: dict[int, int] = {}
        found: dict[tuple[int, int, str], int] = {}
        for r in rungs:
            for e in stay:
                if layer.rung[bh, e] == r:
                    moved[e] = len(table)
                    table.append((r, int(counts[bh, e]), int(layer.base[bh, e]), int(layer.index[bh, e])))
            for g in own:
                _add_pages(layer, g, r, table, found)
            table += [(r, 0, 0, NO_PAGE)] * (-len(table) % QUAD)
        if len(table) > entries:
            change.status |= TABLE_FULL
            return
        for key, e in roles.items():
            if key[0] == bh:
                roles[key] = moved[e]
        roles |= found
        layer.num_pages[bh] = len(table)
        for e, (r, count, base, address) in enumerate(table):
            layer.rung[bh, e], layer.count[bh, e] = r, count
            layer.base[bh, e], layer.index[bh, e] = base, address
            if address != NO_PAGE:
                layer.entry_of[r, layer.number(r, address)] = bh * entries + e
        _set_open(layer, bh, own, roles, rules)
    _close_pools(layer, freed, change)


def _add_pages(
    layer: Layer,
    g: Group,
    r: int,
    table: list[tuple[int, int, int, int]],
    roles: dict[tuple[int, int, str], int],
) -> None:
    """Enter the new pages of a (group, rung); the one behind those with tokens is held ready."""
    filled, top = _filled(layer, g, r), len(layer.rungs) - 1
    for j in range(g.new_pages[r]):
        if j >= len(filled):
            roles[g.bh, g.segment, "extra"] = len(table)
        elif r == top and j == len(filled) - 1 and left_over(g, top + 1) % PAGE:
            roles[g.bh, g.segment, "left over"] = len(table)
        count = filled[j] if j < len(filled) else 0
        table.append((r, count, g.segment, layer.address(r, g.first[r] + j)))


def _filled(layer: Layer, g: Group, r: int) -> list[int]:
    """Tokens of each new page of a (group, rung) that gets any."""
    found = []
    for c in range(len(g.chosen)):
        tokens = 0 if c == r else moved(g, layer, c, r)
        found += [min(PAGE, tokens - start) for start in range(0, tokens, PAGE)]
    return found


def _set_open(
    layer: Layer, bh: int, groups: list[Group], roles: dict[tuple[int, int, str], int], rules: Rules
) -> None:
    current = rules.seqlen >> SEGMENT
    started = roles.get((bh, current, "left over"), -1)
    if not any(g.segment == current and slots_left(g) for g in groups):
        started = -1
    ready = roles.get((bh, current, "extra"), -1)
    beyond = roles.get((bh, current + 1, "extra"), -1)
    pages = [ready if ready >= 0 else started, beyond] if beyond >= 0 else [started, ready]
    if pages[0] < 0:
        pages = [pages[1], -1]
    layer.open[bh] = pages


def _close_pools(layer: Layer, freed: list[list[int]], change: Change) -> None:
    """Copy the last pages of each rung to the places of dropped ones; give back slabs that became empty."""
    for r, numbers in enumerate(freed):
        after = int(layer.used[r]) - len(numbers)
        holes = [number for number in numbers if number < after]
        last = [number for number in range(after, int(layer.used[r])) if number not in numbers]
        for source, to in zip(last, holes, strict=True):
            address, entry = layer.address(r, to), int(layer.entry_of[r, source])
            change.copies.append((layer.address(r, source), address, r))
            layer.index[divmod(entry, layer.rung.shape[1])] = address
            layer.entry_of[r, to] = entry
        layer.used[r] = after
        slabs = -(-after // layer.rungs[r].per_slab)
        for slab in layer.slabs[r, slabs : layer.slab_count[r]]:
            layer.free_slabs[layer.num_free] = slab
            layer.num_free += 1
        layer.slab_count[r] = slabs
