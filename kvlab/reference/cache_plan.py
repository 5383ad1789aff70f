"""Which pages of a layer change, as the GPU decides it: the oracle of ``kernels/cuda/cache_plan.cu``.

Tokens of one (row, KV head, run of 65,536 positions), a *group*, lie in pages of 64. A change of a layer puts
them and new tokens at lower rungs until the row's bytes fit, in steps that are parallel over groups, rows or
pages and whose results do not depend on any order of execution:

count   histogram of the importance of every (group, class); a class is a rung, or the new tokens. The 64
        least important tokens of a class are its chunk 0, the next 64 chunk 1, and so on. What is left over,
        the most important ones, stays where it is (new ones: in a page of the top rung).
choose  bisection of a price: every chunk climbs the rungs as far as each step saves more loss than its bytes
        cost at that price; at the price itself, chunks in order of their number while they fit.
pages   a chunk that changes its rung becomes one fresh page there, behind the pages of that rung.
moves   (1) tokens of these chunks go to the fresh pages; (2) those that stay behind in a class close up, so
        that all its pages but one are full; pages without tokens are dropped.
tables  entries of dropped pages are taken by others, and dropped pages by the last pages of their rung.

Weights are integers and every sum is exact, so results are equal bit for bit on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Change", "Ladder", "Layer", "Rung", "Tokens", "plan", "token_weight"]

Ints = NDArray[np.int64]
PAGE, UNIT, SEGMENT, KEYS = 64, 64, 16, 256
RECENT, SINK = 254, 255
"""Keys of tokens that outweigh all importance codes, which end at 253."""
NEW_TOKEN = 255
NO_ROOM, NO_ENTRY, UNFINISHED = 1, 4, 8


@dataclass(frozen=True)
class Rung:
    """Pages of one rung: units of a record, pages in a slab, byte offset of positions and importance."""

    record: int
    per_slab: int
    tail: int


@dataclass(frozen=True)
class Ladder:
    """Bytes that a page counts and loss of its tokens at each level, lowest first; level 0 may be eviction.

    `steps(top)` are the corners of the lower convex hull of (bytes, loss) up to a level, as (level, loss
    saved per byte) from the lowest corner on.

    Examples
    --------
    >>> [level for level, _ in Ladder((10, 20, 30), (8.0, 7.5, 1.0)).steps(2)]
    [2]
    """

    cost: tuple[int, ...]
    loss: tuple[float, ...]

    def steps(self, top: int) -> list[tuple[int, np.float32]]:
        corners: list[tuple[int, float]] = [(0, np.inf)]
        for level in range(1, top + 1):
            while True:
                start = corners[-1][0]
                rate = (self.loss[start] - self.loss[level]) / (self.cost[level] - self.cost[start])
                if rate <= corners[-1][1]:
                    break
                corners.pop()
            corners.append((level, rate))
        return [(level, np.float32(rate)) for level, rate in corners[1:]]


@dataclass(frozen=True)
class Tokens:
    """New tokens: importance codes (pairs, n), which are valid (batch, n), position of the first."""

    code: NDArray[np.uint8]
    valid: NDArray[np.bool_]
    first: int


@dataclass
class Layer:
    """State of one layer: LayerState of ``kernels/cuda/include/cache_state.cuh``; tables (pairs, entries)."""

    batch: int
    heads: int
    rungs: tuple[Rung, ...]
    evicts: bool
    slab_units: int
    arena: NDArray[np.uint8]
    rung: NDArray[np.uint8]
    count: NDArray[np.uint8]
    index: NDArray[np.uint32]
    base: NDArray[np.uint16]
    num_pages: NDArray[np.int32]
    open: NDArray[np.int32]
    used: NDArray[np.int32]
    slab_count: NDArray[np.int32]
    slabs: NDArray[np.int32]
    free_slabs: NDArray[np.int32]
    num_free: int
    owner: NDArray[np.uint32]
    place: NDArray[np.int32]
    seqlen: int
    budget: Ints

    def address(self, r: int, number: int) -> int:
        """Units from the start of the arena to page `number` of rung r."""
        slab, within = divmod(number, self.rungs[r].per_slab)
        return int(self.slabs[r, slab]) * self.slab_units + within * self.rungs[r].record

    def number(self, r: int, address: int) -> int:
        """The inverse of `address`."""
        slab, within = divmod(address, self.slab_units)
        return int(self.place[slab]) * self.rungs[r].per_slab + within // self.rungs[r].record

    def positions(self, r: int, address: int) -> NDArray[np.uint16]:
        start = address * UNIT + self.rungs[r].tail
        return self.arena[start : start + 2 * PAGE].view("<u2")

    def codes(self, r: int, address: int) -> NDArray[np.uint8]:
        start = address * UNIT + self.rungs[r].tail + 2 * PAGE
        return self.arena[start : start + PAGE]


@dataclass
class Change:
    """What `plan` returns: moves (from, to, from_slot, to_slot, from_rung, to_rung, token) of both phases.

    from_rung 255: a new token; `from` is its pair, `token` = row * steps + step; else `token` is the pair.
    `copies` are (from, to, rung) of whole pages. `chunks`: (row, weight, ceiling, level). `births` and
    `dropped` count pages.
    """

    phases: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = field(default_factory=lambda: ([], []))
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[tuple[int, float, int, int]] = field(default_factory=list)
    births: int = 0
    dropped: int = 0
    status: int = 0


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


@dataclass
class _Group:
    """Tokens of a group: for each class a list of blocks (where from, keys of its tokens), in table order."""

    pair: int
    segment: int
    blocks: list[list[tuple[int, Ints]]]  # [class] -> (entry or first step, key of each slot; -1: no token)
    tokens: list[int] = field(default_factory=list)
    chosen: list[list[int]] = field(default_factory=list)  # [class][level]: chunks
    extra: bool = False
    births: list[int] = field(default_factory=list)  # [rung]
    first: list[int] = field(default_factory=list)  # [rung]: number of the first page born


@dataclass(frozen=True)
class _Rules:
    seqlen: int
    sink: int
    recent: int
    room: int
    by_position: bool


def plan(
    layer: Layer,
    ladder: Ladder,
    new: Tokens | None,
    *,
    sink: int,
    recent: int,
    room: int,
    fixed_nbytes: int,
    by_position: bool = False,
    most_births: int = 1 << 30,
) -> Change:
    """Decide a change of a layer, and bring its tables to their final state; page contents stay as they are.

    Parameters
    ----------
    layer : Layer
        Its tables are changed in place.
    ladder : Ladder
    new : Tokens, optional
    sink, recent : int
        First and newest positions that outweigh others.
    room : int
        Every pair gets open pages for at least so many tokens to come, at most 64.
    fixed_nbytes : int
        Bytes of a row beside its pages.
    by_position : bool
        Importance is 1 / age, whatever the codes say.
    most_births : int
        Pages that may be born. If that or the free slabs do not do, the new tokens are not taken in, stored
        ones are demoted as far as it goes, and the status says UNFINISHED: carry it out and plan again.
    """
    change = Change()
    rules = _Rules(new.first + new.code.shape[1] if new else layer.seqlen, sink, recent, room, by_position)
    groups = _count(layer, new, rules)
    for row in range(layer.batch):
        own = [g for g in groups if g.pair // layer.heads == row]
        _choose(layer, ladder, own, rules, int(layer.budget[row]) - fixed_nbytes, row, change)
    if not _births(layer, groups, most_births):
        change.status |= UNFINISHED
    for r in range(len(layer.rungs)):  # pages are born: rung by rung, in the order of groups
        for g in groups:
            _move_to_fresh_pages(layer, g, r, new, change)
    dropped: dict[int, list[int]] = {}
    roles: dict[tuple[int, int, str], int] = {}
    counts = layer.count.copy()
    for g in groups:
        for r in range(len(layer.rungs)):
            _close_up(layer, g, r, change, counts, dropped, roles)
    layer.count[:] = counts
    change.births = sum(sum(g.births) for g in groups)
    change.dropped = sum(map(len, dropped.values()))
    _tables(layer, groups, dropped, roles, rules, change)
    return change


# ---- count


def _key(code: Ints, position: Ints, rules: _Rules) -> Ints:
    if rules.by_position:
        code = recency_code(rules.seqlen - position)
    key = np.minimum(code, RECENT - 1)
    key = np.where(position >= rules.seqlen - rules.recent, RECENT, key)
    return np.where(position < rules.sink, SINK, key)


def _count(layer: Layer, new: Tokens | None, rules: _Rules) -> list[_Group]:
    segments = ((rules.seqlen + rules.room - 1) >> SEGMENT) + 1
    classes = len(layer.rungs) + 1
    groups = []
    for pair in range(layer.batch * layer.heads):
        for segment in range(segments):
            g = _Group(pair, segment, [[] for _ in range(classes)])
            for e in range(int(layer.num_pages[pair])):
                if layer.base[pair, e] == segment:
                    r, address, n = int(layer.rung[pair, e]), int(layer.index[pair, e]), layer.count[pair, e]
                    position = (segment << SEGMENT) + layer.positions(r, address).astype(np.int64)
                    key = _key(layer.codes(r, address).astype(np.int64), position, rules)
                    g.blocks[r].append((e, np.where(np.arange(PAGE) < n, key, -1)))
            if new is not None:
                position = new.first + np.arange(new.code.shape[1])
                key = _key(new.code[pair].astype(np.int64), position, rules)
                use = new.valid[pair // layer.heads] & (position >> SEGMENT == segment)
                for s in range(0, len(key), PAGE):
                    g.blocks[-1].append((s, np.where(use, key, -1)[s : s + PAGE]))
            g.tokens = [sum(int((key >= 0).sum()) for _, key in blocks) for blocks in g.blocks]
            groups.append(g)
    return groups


def _chunk_weights(blocks: list[tuple[int, Ints]]) -> list[np.float32]:
    """Weight of each full chunk of a class: exact sums, rounded once."""
    keys = np.sort(np.concatenate([key for _, key in blocks] or [np.empty(0, np.int64)]))
    weights = _WEIGHT[keys[keys >= 0]]
    full = weights[: len(weights) // PAGE * PAGE].reshape(-1, PAGE)
    return list(full.sum(1, dtype=np.uint64).astype(np.float32))


# ---- choose


def _choose(
    layer: Layer, ladder: Ladder, groups: list[_Group], rules: _Rules, room: int, row: int, change: Change
) -> None:
    """Choose how many chunks of every class of a row's groups go to each level."""
    levels, classes = len(ladder.cost), len(layer.rungs) + 1
    top = levels - 1
    weights: list[np.float32] = []
    ceilings: list[int] = []
    owners: list[tuple[_Group, int]] = []
    for g in groups:
        g.extra = _room_of(g) < _to_come(g.segment, rules)
        rest = [ladder.cost[min(c + layer.evicts, top)] for c in range(classes) if g.tokens[c] % PAGE]
        room -= sum(rest) + g.extra * ladder.cost[top]
        g.chosen = [[0] * levels for _ in range(classes)]
        for c in range(classes):
            own = _chunk_weights(g.blocks[c])
            weights += own
            ceilings += [min(c + layer.evicts, top)] * len(own)
            owners += [(g, c)] * len(own)
    steps = [ladder.steps(ceiling) for ceiling in range(levels)]

    def levels_at(price: np.float32, ties: int) -> list[int]:
        chosen = []
        for number, (weight, ceiling) in enumerate(zip(weights, ceilings, strict=True)):
            level = 0
            for higher, rate in steps[ceiling]:
                slope = weight * rate
                if not (slope > price or (slope == price and number < ties)):
                    break
                level = higher
            chosen.append(level)
        return chosen

    def fits(price: np.float32, ties: int) -> bool:
        return sum(ladder.cost[level] for level in levels_at(price, ties)) <= room

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
    chosen = levels_at(price, ties)
    if sum(ladder.cost[level] for level in chosen) > room:
        change.status |= NO_ROOM
    for (g, c), level, weight, ceiling in zip(owners, chosen, weights, ceilings, strict=True):
        g.chosen[c][level] += 1
        change.chunks.append((row, float(weight), ceiling, level))


def _to_come(segment: int, rules: _Rules) -> int:
    """How many of the next tokens lie in a segment."""
    first, end = segment << SEGMENT, (segment + 1) << SEGMENT
    return max(0, min(end, rules.seqlen + rules.room) - max(first, rules.seqlen))


def _room_of(g: _Group) -> int:
    """Free slots of the page that takes the next tokens of a group: the one with what is left over."""
    left = g.tokens[-1] % PAGE or g.tokens[-2] % PAGE
    return PAGE - left if left else 0


# ---- pages


def _leaving(g: _Group, layer: Layer, c: int) -> int:
    """Chunks of a class that change their rung."""
    stay = 0 if c == len(layer.rungs) else g.chosen[c][c + layer.evicts]
    return sum(g.chosen[c]) - stay


def _needed(g: _Group, layer: Layer, r: int) -> int:
    """Pages that the tokens of a stored class fill once its leaving chunks are gone."""
    return -(-(g.tokens[r] - PAGE * _leaving(g, layer, r)) // PAGE)


def _births(layer: Layer, groups: list[_Group], most: int) -> bool:
    """Number the pages that are born and take slabs for them; false if they had to be cut down."""
    top = len(layer.rungs) - 1

    def count(g: _Group, r: int) -> int:
        from_chunks = sum(g.chosen[c][r + layer.evicts] for c in range(len(g.chosen)) if c != r)
        reused = len(g.blocks[r]) > _needed(g, layer, r)
        return from_chunks + (r == top) * ((g.tokens[-1] % PAGE > 0) + (g.extra and not reused))

    rungs = range(len(layer.rungs))

    def slabs_needed(births: list[int]) -> list[int]:
        held = [-(-(int(layer.used[r]) + births[r]) // layer.rungs[r].per_slab) for r in rungs]
        return [held[r] - int(layer.slab_count[r]) for r in rungs]

    wanted = [sum(count(g, r) for g in groups) for r in rungs]
    whole = sum(wanted) <= most and sum(slabs_needed(wanted)) <= layer.num_free
    if not whole:
        share = layer.num_free // len(layer.rungs)
        left = [
            min(
                (int(layer.slab_count[r]) + share) * layer.rungs[r].per_slab - int(layer.used[r]),
                most // len(layer.rungs),
            )
            for r in rungs
        ]
        for g in groups:
            g.extra = False
            g.chosen[-1], g.tokens[-1], g.blocks[-1] = [0] * len(g.chosen[-1]), 0, []
            for r in rungs:
                for c in range(r + 1, len(layer.rungs)):
                    level, own = r + layer.evicts, c + layer.evicts
                    cut = max(0, g.chosen[c][level] - left[r])
                    left[r] -= g.chosen[c][level] - cut
                    g.chosen[c][level] -= cut
                    g.chosen[c][own] += cut
    births = [0] * len(layer.rungs)
    for g in groups:
        g.births = [count(g, r) for r in rungs]
        g.first = [int(layer.used[r]) + births[r] for r in rungs]
        births = [births[r] + g.births[r] for r in rungs]
    for r, more in enumerate(slabs_needed(births)):
        for _ in range(more):
            layer.num_free -= 1
            slab = int(layer.free_slabs[layer.num_free])
            layer.slabs[r, layer.slab_count[r]] = slab
            layer.place[slab] = layer.slab_count[r]
            layer.slab_count[r] += 1
    layer.used += np.array(births, np.int32)
    return whole


# ---- moves


def _ranks(blocks: list[tuple[int, Ints]]) -> list[Ints]:
    """Rank of every token of a class by key, then place; -1 where there is none."""
    keys = np.concatenate([key for _, key in blocks])
    order = np.argsort(keys, kind="stable")
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(keys)) - int((keys < 0).sum())
    rank = np.maximum(rank, -1)
    ends = np.cumsum([len(key) for _, key in blocks])[:-1]
    return np.split(rank, ends)


def _move_to_fresh_pages(layer: Layer, g: _Group, r: int, new: Tokens | None, change: Change) -> None:
    """Moves of phase 0 into the pages of rung r that a group gives birth to, in their order."""
    number = g.first[r]
    for c in range(len(g.blocks)):
        if c == r or not g.blocks[c]:
            continue
        is_new = c == len(layer.rungs)
        chunks = g.chosen[c][r + layer.evicts]
        first = PAGE * sum(g.chosen[c][: r + layer.evicts])
        count = PAGE * chunks
        if is_new and r == len(layer.rungs) - 1:
            count += g.tokens[c] % PAGE
        moves: list[tuple[int, int, tuple[int, ...]]] = []
        for (origin, _), ranks in zip(g.blocks[c], _ranks(g.blocks[c]), strict=True):
            for slot in np.flatnonzero((ranks >= first) & (ranks < first + count)):
                page, to_slot = divmod(int(ranks[slot]) - first, PAGE)
                to = layer.address(r, number + page)
                if is_new:
                    assert new is not None
                    token = g.pair // layer.heads * new.code.shape[1] + origin + int(slot)
                    moves.append((page, to_slot, (g.pair, to, 0, to_slot, NEW_TOKEN, r, token)))
                else:
                    source = int(layer.index[g.pair, origin])
                    moves.append((page, to_slot, (source, to, int(slot), to_slot, c, r, g.pair)))
        change.phases[0].extend(move for _, _, move in sorted(moves))
        number += -(-count // PAGE)


def _close_up(
    layer: Layer,
    g: _Group,
    r: int,
    change: Change,
    counts: NDArray[np.uint8],
    dropped: dict[int, list[int]],
    roles: dict[tuple[int, int, str], int],
) -> None:
    """Moves of phase 1 in a stored class: what stays fills the pages that stay, full ones first."""
    if not g.blocks[r]:
        return
    leaving, needed = PAGE * _leaving(g, layer, r), _needed(g, layer, r)
    staying = g.tokens[r] - leaving
    is_top = r == len(layer.rungs) - 1
    kept = min(len(g.blocks[r]), needed + (is_top and g.extra))
    ranks = _ranks(g.blocks[r])
    before = [int(layer.count[g.pair, e]) for e, _ in g.blocks[r]]
    kind = [0 if n == PAGE else 1 if n else 2 for n in before]
    order = sorted(range(len(kind)), key=lambda i: kind[i])
    ordinal = {i: o for o, i in enumerate(order)}
    holes, movers = [], []
    for i, (e, _) in enumerate(g.blocks[r]):
        o, address = ordinal[i], int(layer.index[g.pair, e])
        target = PAGE if o < needed - 1 else staying - PAGE * (needed - 1) if o == needed - 1 else 0
        stays = ranks[i] >= leaving
        holes += [(address, slot) for slot in range(target) if not stays[slot]]
        movers += [(address, slot) for slot in range(target, PAGE) if stays[slot]]
        counts[g.pair, e] = target
        if o >= kept:
            dropped.setdefault(g.pair, []).append(e)
        elif is_top and o == needed - 1:
            roles[g.pair, g.segment, "left over"] = e
        elif o >= needed:
            roles[g.pair, g.segment, "extra"] = e
    for (source, from_slot), (to, to_slot) in zip(movers, holes, strict=True):
        change.phases[1].append((source, to, from_slot, to_slot, r, r, g.pair))


# ---- tables


def _tables(
    layer: Layer,
    groups: list[_Group],
    dropped: dict[int, list[int]],
    roles: dict[tuple[int, int, str], int],
    rules: _Rules,
    change: Change,
) -> None:
    top, entries = len(layer.rungs) - 1, layer.rung.shape[1]
    dead: list[list[int]] = [[] for _ in layer.rungs]
    for pair in range(layer.batch * layer.heads):
        gone = sorted(dropped.get(pair, []))
        for e in gone:
            r = int(layer.rung[pair, e])
            dead[r].append(layer.number(r, int(layer.index[pair, e])))
        own = [g for g in groups if g.pair == pair]
        born = [(g, r, j) for g in own for r in range(top + 1) for j in range(g.births[r])]
        n = int(layer.num_pages[pair])
        after = n - len(gone) + len(born)
        if after > entries:
            change.status |= NO_ENTRY
            return
        places = [e for e in gone if e < after] + list(range(n, after))
        fillers = [e for e in range(after, n) if e not in gone]
        moved = dict(zip(fillers, places, strict=False))
        for e, to in moved.items():
            for table in (layer.rung, layer.count, layer.index, layer.base):
                table[pair, to] = table[pair, e]
            r = int(layer.rung[pair, to])
            layer.owner[r, layer.number(r, int(layer.index[pair, to]))] = pair * entries + to
        for key, e in roles.items():
            if key[0] == pair:
                roles[key] = moved.get(e, e)
        for e, (g, r, j) in zip(places[len(fillers) :], born, strict=True):
            number = g.first[r] + j
            layer.rung[pair, e], layer.base[pair, e] = r, g.segment
            layer.index[pair, e] = layer.address(r, number)
            layer.owner[r, number] = pair * entries + e
            left = g.tokens[-1] % PAGE
            pages = g.births[r] - (0 if r < top else _born_empty(layer, g))
            partial = r == top and left and j == pages - 1
            layer.count[pair, e] = 0 if j >= pages else left if partial else PAGE
            if j >= pages:
                roles[pair, g.segment, "extra"] = e
            elif partial:
                roles[pair, g.segment, "left over"] = e
        layer.num_pages[pair] = after
        _set_open(layer, pair, own, roles, rules)
    _close_pools(layer, dead, change)


def _born_empty(layer: Layer, g: _Group) -> int:
    """1 if the page that a group holds ready is born; 0 if it has none, or a dropped one serves."""
    top = len(layer.rungs) - 1
    return int(g.extra and len(g.blocks[top]) <= _needed(g, layer, top))


def _set_open(
    layer: Layer, pair: int, groups: list[_Group], roles: dict[tuple[int, int, str], int], rules: _Rules
) -> None:
    current = rules.seqlen >> SEGMENT
    started = roles.get((pair, current, "left over"), -1)
    if not any(g.segment == current and _room_of(g) for g in groups):
        started = -1
    ready = roles.get((pair, current, "extra"), -1)
    beyond = roles.get((pair, current + 1, "extra"), -1)
    pages = [ready if ready >= 0 else started, beyond] if beyond >= 0 else [started, ready]
    if pages[0] < 0:
        pages = [pages[1], -1]
    layer.open[pair] = pages


def _close_pools(layer: Layer, dead: list[list[int]], change: Change) -> None:
    """Copy the last pages of each rung to the places of dropped ones; give back slabs that became empty."""
    for r, numbers in enumerate(dead):
        after = int(layer.used[r]) - len(numbers)
        gaps = [number for number in numbers if number < after]
        last = [number for number in range(after, int(layer.used[r])) if number not in numbers]
        for source, to in zip(last, gaps, strict=True):
            address, entry = layer.address(r, to), int(layer.owner[r, source])
            change.copies.append((layer.address(r, source), address, r))
            layer.index[divmod(entry, layer.rung.shape[1])] = address
            layer.owner[r, to] = entry
        layer.used[r] = after
        slabs = -(-after // layer.rungs[r].per_slab)
        for slab in layer.slabs[r, slabs : layer.slab_count[r]]:
            layer.free_slabs[layer.num_free] = slab
            layer.num_free += 1
        layer.slab_count[r] = slabs
