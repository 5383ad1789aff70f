"""One layer of a cache on a GPU and what a plan works with: the words of ``cache_plan.py``.

The classes mirror the structs of ``kernels/cuda/pages/state.cuh`` and ``plan/plan.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Change", "Group", "Ladder", "Layer", "Rules", "Rung", "Tokens"]

Ints = NDArray[np.int64]
PAGE, QUAD, UNIT, SEGMENT, KEYS = 16, 4, 16, 16, 256
NO_PAGE = 0xFFFFFFFF
"""Address in a filler, an entry without a page: a rung's entries begin and end with a quad."""
RECENT, SINK, WINDOW = 253, 254, 255
"""Keys of tokens that outweigh all importance codes, which end at 252; those of the window never move."""
TOKENS_PER_RECENT = 16
"""At most one in so many tokens is recent."""
NEW_TOKEN = 255
OVER_BUDGET, TABLE_FULL, RETRY = 1, 4, 8


@dataclass(frozen=True)
class Rung:
    """Pages of one rung: units of a record, pages in a slab, byte offset of positions and importance."""

    record: int
    per_slab: int
    tail: int


@dataclass(frozen=True)
class Ladder:
    """Bytes that a page counts and loss of its tokens at each level, lowest first; level 0 may be eviction.

    `edges(top)` are the corners of the lower convex hull of (bytes, loss) up to a level, as (level, loss
    saved per byte) from the lowest level on. Of levels of the same bytes the highest is the corner; where
    that is not the lowest level, the way there saves infinitely much.

    Examples
    --------
    >>> [level for level, _ in Ladder((10, 20, 30), (8.0, 7.5, 1.0)).edges(2)]
    [2]
    >>> [level for level, _ in Ladder((10, 10, 10, 20), (8.0, 7.5, 1.0, 0.5)).edges(3)]
    [2, 3]
    """

    cost: tuple[int, ...]
    loss: tuple[float, ...]

    def edges(self, top: int) -> list[tuple[int, np.float32]]:
        corners: list[tuple[int, float]] = []
        for level in range(top + 1):
            rate = np.inf
            while corners:
                start, steepest = corners[-1]
                if self.cost[level] > self.cost[start]:
                    rate = (self.loss[start] - self.loss[level]) / (self.cost[level] - self.cost[start])
                    if rate <= steepest:
                        break
                corners.pop()
            corners.append((level, rate))
        return [(level, np.float32(rate)) for level, rate in corners if level]


@dataclass(frozen=True)
class Tokens:
    """New tokens: importance codes (num_bh, n), which are valid (batch, n), position of the first.

    `positions` (batch, n), unless they follow the first; the rows have `first + n` time steps then.
    """

    code: NDArray[np.uint8]
    valid: NDArray[np.bool_]
    first: int
    positions: Ints | None = None


@dataclass
class Layer:
    """State of one layer: LayerState of ``kernels/cuda/pages/state.cuh``; tables (num_bh, entries).

    `waits` (batch,): rows whose pages a plan leaves alone; None: there are none.
    """

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
    entry_of: NDArray[np.uint32]
    slab_slot: NDArray[np.int32]
    seqlen: int
    budget: Ints
    waits: NDArray[np.int32] | None = None

    def row_waits(self, row: int) -> bool:
        """Whether the tokens of a row wait outside the plan."""
        return self.waits is not None and bool(self.waits[row])

    def address(self, r: int, number: int) -> int:
        """Units from the start of the arena to page `number` of rung r."""
        slab, within = divmod(number, self.rungs[r].per_slab)
        return int(self.slabs[r, slab]) * self.slab_units + within * self.rungs[r].record

    def number(self, r: int, address: int) -> int:
        """The inverse of `address`."""
        slab, within = divmod(address, self.slab_units)
        return int(self.slab_slot[slab]) * self.rungs[r].per_slab + within // self.rungs[r].record

    def positions(self, r: int, address: int) -> NDArray[np.uint16]:
        start = address * UNIT + self.rungs[r].tail
        return self.arena[start : start + 2 * PAGE].view("<u2")

    def codes(self, r: int, address: int) -> NDArray[np.uint8]:
        start = address * UNIT + self.rungs[r].tail + 2 * PAGE
        return self.arena[start : start + PAGE]


@dataclass
class Change:
    """What `plan` returns: moves (from, to, from_slot, to_slot, from_rung, to_rung, token) of both phases.

    from_rung 255: a new token; `from` is its bh, `token` = row * num_new + i; else `token` is the bh.
    `copies` are (from, to, rung) of whole pages. `chunks`: (row, weight, ceiling, level). `compact` are the
    rows whose left over tokens made chunks. `new_pages` and `dropped` count pages.
    """

    phases: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = field(default_factory=lambda: ([], []))
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[tuple[int, float, int, int]] = field(default_factory=list)
    compact: list[int] = field(default_factory=list)
    new_pages: int = 0
    dropped: int = 0
    status: int = 0


@dataclass
class Group:
    """Tokens of a group: for each class a list of blocks (where from, keys of its tokens), in table order."""

    bh: int
    segment: int
    blocks: list[list[tuple[int, Ints]]]  # [class] -> (entry or first token, key of each slot; -1: no token)
    tokens: list[int] = field(default_factory=list)
    movable: list[int] = field(default_factory=list)  # tokens outside the window
    chunks: list[int] = field(default_factory=list)  # [class]
    chosen: list[list[int]] = field(default_factory=list)  # [class][level]: chunks
    extra: bool = False
    new_pages: list[int] = field(default_factory=list)  # [rung]
    first: list[int] = field(default_factory=list)  # [rung]: number of the first new page


@dataclass(frozen=True)
class Rules:
    seqlen: int
    sink: int
    recent: int
    lookahead: int
    by_position: bool
    window: int
    floor: int
    oldest: int


def chunk_tokens(g: Group, c: int) -> int:
    """Tokens of the chunks of a class: a page each, but for the last one of a compact class."""
    return min(PAGE * g.chunks[c], g.movable[c])


def left_over(g: Group, c: int) -> int:
    """Tokens of a class beside its chunks: those that fill no chunk, and the window."""
    return g.tokens[c] - chunk_tokens(g, c)


def leaving(g: Group, layer: Layer, c: int) -> int:
    """Tokens of a stored class that change their rung."""
    return min(PAGE * (g.chunks[c] - g.chosen[c][c + layer.evicts]), g.movable[c])


def moved(g: Group, layer: Layer, c: int, r: int) -> int:
    """Tokens of class c that go to new pages of rung r."""
    before, own = sum(g.chosen[c][: r + layer.evicts]), g.chosen[c][r + layer.evicts]
    all_of_class = chunk_tokens(g, c)
    stays = left_over(g, c) if c == len(layer.rungs) and r == c - 1 else 0
    return min(PAGE * (before + own), all_of_class) - min(PAGE * before, all_of_class) + stays


def pages_needed(g: Group, layer: Layer, r: int) -> int:
    """Pages that the tokens of a stored class fill once the leaving ones are gone."""
    return -(-(g.tokens[r] - leaving(g, layer, r)) // PAGE)


def to_come(segment: int, rules: Rules) -> int:
    """How many of the next tokens lie in a segment."""
    first, end = segment << SEGMENT, (segment + 1) << SEGMENT
    return max(0, min(end, rules.seqlen + rules.lookahead) - max(first, rules.seqlen))


def slots_left(g: Group) -> int:
    """Free slots of the page that takes the next tokens of a group: the one with what is left over."""
    left = left_over(g, len(g.tokens) - 1) % PAGE or left_over(g, len(g.tokens) - 2) % PAGE
    return PAGE - left if left else 0
