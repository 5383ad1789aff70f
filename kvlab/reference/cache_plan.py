"""Which pages of a layer change: the oracle of ``kernels/cuda/plan`` and ``kernels/numba/cpu/cache_plan.py``.

Tokens of one (row, KV head, run of 65,536 positions), a *group*, lie in pages of 16. A change of a layer puts
them and new tokens at lower rungs until the row's bytes fit, in steps that are parallel over groups, rows or
pages and whose results do not depend on any order of execution:

count   histogram of the importance of every (group, class); a class is a rung, or the new tokens. The 16
        least important tokens of a class are its chunk 0, the next 16 chunk 1, and so on. What is left over,
        the most important ones, stays where it is (new ones: in a page of the top rung).
choose  bisection of a price: every chunk climbs the rungs as far as each step saves more loss than its bytes
        cost at that price; at the price itself, chunks in order of their number while they fit.
pages   a chunk that changes its rung becomes one new page there, behind the pages of that rung.
moves   (1) tokens of these chunks go to the new pages; (2) those that stay behind in a class close up, so
        that all its pages but one are full; pages without tokens are dropped.
tables  are sorted by rung, each rung's pages followed by fillers up to a quad, four entries; dropped pages
        are taken by the last pages of their rung.

Weights are integers and every sum is exact, so results are equal bit for bit on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvlab.reference.cache_layer import (
    KEYS,
    NO_PAGE,
    OVER_BUDGET,
    PAGE,
    RECENT,
    RETRY,
    SEGMENT,
    SINK,
    TOKENS_PER_RECENT,
    WINDOW,
    Change,
    Group,
    Ints,
    Ladder,
    Layer,
    Rules,
    Tokens,
    left_over,
    moved,
    pages_needed,
    slots_left,
    to_come,
)
from kvlab.reference.cache_moves import close_up, move_to_new_pages, set_tables

__all__ = ["Choose", "by_price", "plan", "recency_code", "token_weight", "uniform"]

Choose = Callable[[NDArray[np.float32], Ints, Ladder, int], Ints]

_MANTISSA = np.round(2.0 ** (np.arange(8) / 8) * 2**32).astype(np.uint64)


def token_weight(key: int) -> int:
    """What an error of a token costs: its importance in units of 2**-32; 1e4 recent, 2**24 sinks."""
    if key >= RECENT:
        return 10_000 << 32 if key == RECENT else 1 << 56
    power = (key - 192) >> 3
    mantissa = int(_MANTISSA[(key - 192) & 7])
    return 128 if key == 0 else mantissa << power if power >= 0 else mantissa >> -power


_WEIGHT = np.array([token_weight(key) for key in range(KEYS)], np.uint64)


def recency_code(age: Ints) -> Ints:
    """Importance code of 1 / age."""
    code: Ints = np.clip(np.round(-8 * np.log2(np.maximum(age, 1))) + 192, 1, 255).astype(np.int64)
    return code


def by_price(
    weights: NDArray[np.float32], ceilings: Ints, ladder: Ladder, bytes_left: int
) -> NDArray[np.int64]:
    """Choose the level of every chunk: all it is worth at the lowest price at which they fit.

    Parameters
    ----------
    weights : (chunks,) float32
    ceilings : (chunks,) int
        Highest level of each.
    ladder : Ladder
    bytes_left : int
        What the row has for chunks.
    """
    cost, levels = np.array(ladder.cost), range(len(ladder.cost))
    edges = [ladder.edges(ceiling) for ceiling in levels]

    def levels_at(price: np.float32, ties: int) -> NDArray[np.int64]:
        chosen = np.zeros(len(weights), np.int64)
        for ceiling in levels:
            climbing = np.flatnonzero(ceilings == ceiling)
            for higher, rate in edges[ceiling]:
                slope = weights[climbing] * rate
                climbing = climbing[(slope > price) | ((slope == price) & (climbing < ties))]
                chosen[climbing] = higher
        return chosen

    def fits(price: np.float32, ties: int) -> bool:
        return bool(cost[levels_at(price, ties)].sum() <= bytes_left)

    low, high = -1, 0x7F7FFFFF
    while high - low > 1:
        middle = low + (high - low) // 2
        if fits(np.int32(middle).view(np.float32), 0):
            high = middle
        else:
            low = middle
    price = np.int32(high).view(np.float32)
    ties, beyond = 0, len(weights) + 1
    while beyond - ties > 1:
        middle = (ties + beyond) // 2
        if fits(price, middle):
            ties = middle
        else:
            beyond = middle
    return levels_at(price, ties)


def uniform(
    weights: NDArray[np.float32], ceilings: Ints, ladder: Ladder, bytes_left: int
) -> NDArray[np.int64]:
    """Choose one level for all chunks, or their ceiling where that is lower: the highest that fits."""
    cost = np.array(ladder.cost)
    for level in range(len(cost) - 1, -1, -1):
        chosen = np.minimum(ceilings, level)
        if cost[chosen].sum() <= bytes_left or cost[level] == cost[0]:
            break
    return chosen


def plan(
    layer: Layer,
    ladder: Ladder,
    new: Tokens | None,
    *,
    sink: int,
    recent: int,
    lookahead: int,
    fixed_nbytes: int,
    by_position: bool = False,
    window: int = 0,
    floor: int = 0,
    reach: int = 0,
    choose: Choose = by_price,
    max_new_pages: int = 1 << 30,
) -> Change:
    """Decide a change of a layer, and bring its tables to their final state; page contents stay as they are.

    Parameters
    ----------
    layer : Layer
        Its tables are changed in place.
    ladder : Ladder
    new : Tokens, optional
    sink, recent : int
        First and newest positions that outweigh others; of the newest at most one in 16 of all.
    lookahead : int
        Every bh gets open pages for at least so many tokens to come, at most 16.
    fixed_nbytes : int
        Bytes of a row beside its pages.
    by_position : bool
        Importance is 1 / age, whatever the codes say.
    window : int
        Newest positions that stay at the top rung, which only they have then, outside the choice.
    floor : int
        What the weights of all tokens have more than their importance, together, in units of 2**-32.
    reach : int
        If positive, tokens are dropped which the next query cannot see, if it sees `reach` with itself: those
        of layers with a sliding window.
    choose : callable
        How levels are chosen: `by_price`, `uniform`, or any function of the same arguments.
    max_new_pages : int
        Pages that may be new. If that or the free slabs do not do, the new tokens are not taken in, stored
        ones are demoted as far as it goes, and the status says RETRY: carry it out and plan again.
    """
    change = Change()
    seqlen = new.first + new.code.shape[1] if new else layer.seqlen
    oldest = seqlen - reach + 1 if reach else 0
    recent = min(recent, seqlen // TOKENS_PER_RECENT)
    rules = Rules(seqlen, sink, recent, lookahead, by_position, window, floor, oldest)
    groups = _count(layer, new, rules)
    for row in range(layer.batch):
        own = [g for g in groups if g.bh // layer.heads == row]
        bytes_left = _make_chunks(layer, ladder, own, rules, int(layer.budget[row]) - fixed_nbytes, row)
        if any(n > m // PAGE for g in own for n, m in zip(g.chunks, g.movable, strict=True)):
            change.compact.append(row)
        _choose(layer, ladder, own, rules, choose, bytes_left, row, change)
    if not _allocate(layer, groups, max_new_pages):
        change.status |= RETRY
    for r in range(len(layer.rungs)):  # new pages are allocated: rung by rung, in the order of groups
        for g in groups:
            move_to_new_pages(layer, g, r, new, change)
    dropped: dict[int, list[int]] = {}
    roles: dict[tuple[int, int, str], int] = {}
    counts = layer.count.copy()
    for g in groups:
        for r in range(len(layer.rungs)):
            close_up(layer, g, r, change, counts, dropped, roles)
    change.new_pages = sum(sum(g.new_pages) for g in groups)
    change.dropped = sum(map(len, dropped.values()))
    set_tables(layer, groups, counts, dropped, roles, rules, change)
    return change


# ---- count


def _key(code: Ints, position: Ints, rules: Rules, window: int = 0) -> Ints:
    if rules.by_position:
        code = recency_code(rules.seqlen - position)
    key = np.minimum(code, RECENT - 1)
    key = np.where(position >= rules.seqlen - rules.recent, RECENT, key)
    key = np.where(position < rules.sink, SINK, key)
    key = np.where(position >= rules.seqlen - window, WINDOW, key)
    # Beyond the end is no token: so a cache is cropped. Nor before the first that is seen.
    return np.where((position < rules.seqlen) & (position >= rules.oldest), key, -1)


def _count(layer: Layer, new: Tokens | None, rules: Rules) -> list[Group]:
    held = np.arange(layer.base.shape[1]) < layer.num_pages[:, None]
    last = max((rules.seqlen + rules.lookahead - 1) >> SEGMENT, int(layer.base[held].max(initial=0)))
    segments = last + 1
    classes = len(layer.rungs) + 1
    groups = []
    for bh in range(layer.batch * layer.heads):
        for segment in range(segments):
            g = Group(bh, segment, [[] for _ in range(classes)])
            row = bh // layer.heads
            for e in range(0 if layer.row_waits(row) else int(layer.num_pages[bh])):
                if layer.base[bh, e] == segment and layer.index[bh, e] != NO_PAGE:
                    r, address, n = int(layer.rung[bh, e]), int(layer.index[bh, e]), layer.count[bh, e]
                    position = (segment << SEGMENT) + layer.positions(r, address).astype(np.int64)
                    window = rules.window if r == len(layer.rungs) - 1 else 0
                    key = _key(layer.codes(r, address).astype(np.int64), position, rules, window)
                    g.blocks[r].append((e, np.where(np.arange(PAGE) < n, key, -1)))
            if new is not None:
                position = new.first + np.arange(new.code.shape[1])
                position = position if new.positions is None else new.positions[row].astype(np.int64)
                key = _key(new.code[bh].astype(np.int64), position, rules, rules.window)
                use = new.valid[row] & (position >> SEGMENT == segment)
                for s in range(0, len(key), PAGE):
                    g.blocks[-1].append((s, np.where(use, key, -1)[s : s + PAGE]))
            g.tokens = [sum(int((key >= 0).sum()) for _, key in blocks) for blocks in g.blocks]
            g.movable = [sum(int((key >= 0).sum() - (key == WINDOW).sum()) for _, key in x) for x in g.blocks]
            groups.append(g)
    return groups


def _chunk_weights(blocks: list[tuple[int, Ints]], floor: int) -> NDArray[np.float32]:
    """Weight of each chunk of a class: exact sums, rounded once; that of fewer tokens as if it had 16."""
    keys = np.sort(np.concatenate([key for _, key in blocks] or [np.empty(0, np.int64)]))
    weights = _WEIGHT[keys[(keys >= 0) & (keys < WINDOW)]] + np.uint64(floor)
    full = weights[: len(weights) // PAGE * PAGE].reshape(-1, PAGE)
    rest = weights[full.size :]
    found: NDArray[np.float32] = full.sum(1, dtype=np.uint64).astype(np.float32)
    if not len(rest):
        return found
    scaled = rest.sum(dtype=np.uint64).astype(np.float32) * (np.float32(PAGE) / np.float32(len(rest)))
    return np.append(
        found, np.maximum(scaled, found[-1:].max(initial=0))
    )  # weights rise, in spite of rounding


# ---- choose


def _make_chunks(
    layer: Layer, ladder: Ladder, groups: list[Group], rules: Rules, bytes_left: int, row: int
) -> int:
    """Cut the tokens of a row into chunks, and return the bytes that these may take.

    Where even the lowest level leaves too few bytes for what is left over, that makes chunks of fewer tokens,
    but in the page that takes the next tokens, if it has enough free slots. So does what leaves the window,
    which holds the same tokens for all heads.
    """
    top, classes = len(ladder.cost) - 1, len(layer.rungs) + 1
    for compact in (False, True):
        needed = 0
        for g in groups:
            lookahead = 0 if layer.row_waits(row) else to_come(g.segment, rules)
            g.chunks, started = [n // PAGE for n in g.movable], -1
            if compact and not rules.window and slots_left(g) >= lookahead > 0:
                started = classes - 1 - (left_over(g, classes - 1) % PAGE == 0)
            for c in range(classes):
                if (compact and c != started) or (rules.window and c >= classes - 2):
                    g.chunks[c] = -(-g.movable[c] // PAGE)
            g.extra = slots_left(g) < lookahead
            pages = [-(-left_over(g, c) // PAGE) for c in range(classes)]
            needed += sum(n * ladder.cost[min(c + layer.evicts, top)] for c, n in enumerate(pages))
            needed += g.extra * ladder.cost[top]
        if needed + sum(sum(g.chunks) for g in groups) * ladder.cost[0] <= bytes_left:
            break
    return bytes_left - needed


def _choose(
    layer: Layer,
    ladder: Ladder,
    groups: list[Group],
    rules: Rules,
    choose: Choose,
    bytes_left: int,
    row: int,
    change: Change,
) -> None:
    """Choose how many chunks of every class of a row's groups go to each level."""
    levels = len(ladder.cost)
    highest = levels - 1 - (rules.window > 0)
    classes = [(g, c) for g in groups for c in range(len(g.chunks))]
    floor = rules.floor // max(rules.seqlen - max(rules.oldest, 0), 1)
    weights = [_chunk_weights(g.blocks[c], floor)[: g.chunks[c]] for g, c in classes]
    ceilings = [np.full(g.chunks[c], min(c + layer.evicts, highest)) for g, c in classes]
    weight, ceiling = np.concatenate(weights), np.concatenate(ceilings)
    chosen = choose(weight, ceiling, ladder, bytes_left)
    if sum(ladder.cost[level] for level in chosen) > bytes_left:
        change.status |= OVER_BUDGET
    ends = np.cumsum([len(w) for w in weights])[:-1]
    for (g, c), own in zip(classes, np.split(chosen, ends), strict=True):
        if c == 0:
            g.chosen = []
        g.chosen.append(np.bincount(own, minlength=levels).tolist())
    for chunk in zip(weight, ceiling, chosen, strict=True):
        change.chunks.append((row, float(chunk[0]), int(chunk[1]), int(chunk[2])))


# ---- allocate


def _allocate(layer: Layer, groups: list[Group], most: int) -> bool:
    """Number the new pages and take slabs for them; false if they had to be cut down."""
    top = len(layer.rungs) - 1

    def count(g: Group, r: int) -> int:
        filled = sum(-(-moved(g, layer, c, r) // PAGE) for c in range(len(g.chosen)) if c != r)
        reused = len(g.blocks[r]) > pages_needed(g, layer, r)
        return filled + (r == top and g.extra and not reused)

    rungs = range(len(layer.rungs))

    def slabs_needed(new_pages: list[int]) -> list[int]:
        held = [-(-(int(layer.used[r]) + new_pages[r]) // layer.rungs[r].per_slab) for r in rungs]
        return [held[r] - int(layer.slab_count[r]) for r in rungs]

    wanted = [sum(count(g, r) for g in groups) for r in rungs]
    whole = sum(wanted) <= most and sum(slabs_needed(wanted)) <= layer.num_free
    if not whole:
        slabs_each = layer.num_free // len(layer.rungs)
        left = [
            min(
                (int(layer.slab_count[r]) + slabs_each) * layer.rungs[r].per_slab - int(layer.used[r]),
                most // len(layer.rungs),
            )
            for r in rungs
        ]
        for g in groups:
            g.extra = False
            g.chosen[-1], g.chunks[-1], g.tokens[-1], g.blocks[-1] = [0] * len(g.chosen[-1]), 0, 0, []
            for r in rungs:
                for c in range(r + 1, len(layer.rungs)):
                    level, own = r + layer.evicts, c + layer.evicts
                    cut = max(0, g.chosen[c][level] - left[r])
                    left[r] -= g.chosen[c][level] - cut
                    g.chosen[c][level] -= cut
                    g.chosen[c][own] += cut
    new_pages = [0] * len(layer.rungs)
    for g in groups:
        g.new_pages = [count(g, r) for r in rungs]
        g.first = [int(layer.used[r]) + new_pages[r] for r in rungs]
        new_pages = [new_pages[r] + g.new_pages[r] for r in rungs]
    for r, more in enumerate(slabs_needed(new_pages)):
        for _ in range(more):
            layer.num_free -= 1
            slab = int(layer.free_slabs[layer.num_free])
            layer.slabs[r, layer.slab_count[r]] = slab
            layer.slab_slot[slab] = layer.slab_count[r]
            layer.slab_count[r] += 1
    layer.used += np.array(new_pages, np.int32)
    return whole
