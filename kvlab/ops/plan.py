"""What the plans of caches on all devices have in common: ladders and sizes, bytes, the choice of "dp".

``kvlab.reference.cache_plan`` says what a plan decides. A GPU's is launched by ``cuda/plan.py``, a CPU's by
``cpu/plan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.allocator import allocate
from kvlab.ops.layer_state import RUNGS
from kvlab.pages import TOKENS_PER_PAGE

__all__ = [
    "HULL",
    "OVER_BUDGET",
    "RETRY",
    "Ladder",
    "PlanShape",
    "ample_nbytes",
    "choose_optimum",
    "crop_bounds",
    "decode_bounds",
    "first_seen",
    "hulls_of",
    "optimum",
    "reach_of",
    "smallest_nbytes",
    "spare_nbytes",
]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

OVER_BUDGET, RETRY = 1, 8
"""Bits of a layer's status, as `PlanStatus` of state.cuh: rows are larger than they may be; call again."""
HULL = np.dtype([("rate", "f4", RUNGS), ("level", "i4", RUNGS), ("edges", "i4")])
"""`Hull` of plan.cuh."""
_PAGE, _RUN = TOKENS_PER_PAGE, 1 << 16


def _highest_levels(cost: tuple[int, ...]) -> list[int]:
    """Of each number of bytes, the highest level that counts it."""
    return [level for level, c in enumerate(cost) if c not in cost[level + 1 :]]


@dataclass(frozen=True)
class Ladder:
    """Bytes that a page counts and loss of its tokens at each level, lowest first; level 0 may be eviction.

    Levels may count the same bytes: pages of few channels do at several widths. Plans choose the highest of
    them that a chunk may rise to.

    Examples
    --------
    >>> [level for level, _ in Ladder((10, 20, 30), (8.0, 7.5, 1.0)).edges(2)]
    [2]
    >>> Ladder((10, 10, 30), (8.0, 7.5, 1.0)).edges(2)
    [(1, np.float32(inf)), (2, np.float32(0.325))]
    """

    cost: tuple[int, ...]
    loss: tuple[float, ...]

    def edges(self, top: int) -> list[tuple[int, np.float32]]:
        """Corners of the lower convex hull of (bytes, loss) up to a level, but for the lowest level.

        Of each: its level, and the loss that a byte saves on the way to it; infinite if none is needed.
        """
        here, *higher = _highest_levels(self.cost[: top + 1])
        found: list[tuple[int, np.float32]] = [(here, np.float32(np.inf))] if here else []
        while higher:
            rates = [
                (self.loss[here] - self.loss[level]) / (self.cost[level] - self.cost[here])
                for level in higher
            ]
            steepest = int(np.argmax(rates))
            here, higher = higher[steepest], higher[steepest + 1 :]
            found.append((here, np.float32(rates[steepest])))
        return found


@dataclass(frozen=True)
class PlanShape:
    """Sizes of the layers that a workspace serves.

    Attributes
    ----------
    batch, heads, entries : int
        Of the page tables.
    num_rungs : int
        Rungs that hold pages; `evicts`: whether tokens may be dropped, too.
    segments : int
        Runs of 65,536 positions, counted to the last position that an open page is made for.
    new_tokens : int
        Most new tokens of a call.
    """

    batch: int
    heads: int
    entries: int
    num_rungs: int
    evicts: bool
    segments: int
    new_tokens: int

    @property
    def chunks(self) -> int:
        """Most chunks of a (row, head, segment): a page each, but for one of every class."""
        return min(_RUN // _PAGE, self.entries + self.new_tokens // _PAGE) + self.num_rungs + 1


@lru_cache(maxsize=64)
def hulls_of(ladder: Ladder) -> Any:
    """`Ladder.edges` of every level, as kernels take them: `Hull` of plan.cuh."""
    hulls = np.zeros(RUNGS + 1, HULL)
    for top in range(len(ladder.cost)):
        edges = ladder.edges(top)
        hulls[top]["edges"] = len(edges)
        for i, (level, rate) in enumerate(edges):
            hulls[top]["level"][i], hulls[top]["rate"][i] = level, rate
    return hulls


def decode_bounds(shape: PlanShape, ladder: Ladder) -> tuple[int, int]:
    """Return (max_new_pages, max_dropped) of a layer for plans without new tokens, one in 16 tokens.

    Each head may need one more page of the top rung; what it costs is saved by demotions, the smallest of
    which saves the least difference of two costs, and the last of which may save too much.

    Examples
    --------
    >>> shape = PlanShape(1, 8, 600, num_rungs=2, evicts=False, segments=1, new_tokens=0)
    >>> decode_bounds(shape, Ladder((2136, 4184), (0.018, 1e-4)))
    (35, 51)
    """
    smallest = _smallest_step(ladder)
    demoted = -(-(shape.heads + 1) * ladder.cost[-1] // smallest)
    return shape.batch * (demoted + 2 * shape.heads), shape.batch * (demoted + 4 * shape.heads)


def _smallest_step(ladder: Ladder) -> int:
    """The fewest bytes that a demotion saves; the window's rung may take as many as the one below."""
    differences = [high - low for low, high in pairwise(ladder.cost) if high > low]
    return min(differences, default=ladder.cost[-1])


def crop_bounds(shape: PlanShape, ladder: Ladder, tokens: int, nbytes: int) -> tuple[int, int]:
    """Return (max_new_pages, max_dropped) of a layer for a call behind a crop by `tokens` time steps.

    `nbytes`: by how much the budget of a row has fallen. What the cropped tokens leave in full pages is less
    than one page of each rung and segment.

    Examples
    --------
    >>> shape = PlanShape(1, 8, 600, num_rungs=2, evicts=False, segments=1, new_tokens=0)
    >>> crop_bounds(shape, Ladder((2136, 4184), (0.018, 1e-4)), 64, 100_000)
    (84, 148)
    """
    new_pages, dropped = decode_bounds(shape, ladder)
    smallest = _smallest_step(ladder)
    demoted, max_pages = shape.batch * -(-nbytes // smallest), shape.batch * shape.heads * shape.entries
    cropped = shape.batch * shape.heads * (tokens // _PAGE + shape.num_rungs * shape.segments)
    return min(new_pages + demoted, max_pages), min(dropped + demoted + cropped, max_pages)


def reach_of(sliding_window: int, rewind: int) -> int:
    """How many tokens a query sees and crops may bring back to its sight, itself the last; 0: all."""
    return sliding_window + rewind if sliding_window else 0


def first_seen(length: int, reach: int) -> int:
    """The first position that the next token behind `length` others sees, if it sees `reach`; 0: all.

    Examples
    --------
    >>> first_seen(100, 32), first_seen(20, 32), first_seen(100, 0)
    (69, 0, 0)
    """
    return max(length - reach + 1, 0) if reach else 0


def spare_nbytes(batch: int, heads: int, ladder: Ladder, slab_nbytes: int) -> int:
    """Return what an arena needs beyond its rows' budgets: new pages are taken before others are dropped."""
    cost = [c for c in ladder.cost if c]
    per_byte = max((low / (high - low) for low, high in pairwise(cost) if high > low), default=0.0)
    top = (heads + 1) * cost[-1]
    return int(batch * top * (1 + per_byte)) + 2 * len(cost) * slab_nbytes


def _kept(tokens: int, reach: int) -> tuple[int, int]:
    """How many of the tokens of a row a plan keeps, and in how many runs of positions they may begin anew."""
    return (min(tokens, reach - 1), int(tokens > _RUN)) if reach else (tokens, 0)


def smallest_nbytes(
    tokens: int,
    heads: int,
    ladder: Ladder,
    fixed_nbytes: int,
    *,
    window: int = 0,
    lookahead: int = 0,
    reach: int = 0,
) -> int:
    """Return the bytes that always suffice for a row of `tokens` tokens: as few pages as can be.

    Pages at the lowest level hold all tokens of a run of 65,536 positions but those of the window, which are
    in pages of the top rung, and tokens to come have an empty page there. Compact plans get there whatever
    stands in pages; with padding rows need no more. `reach`: as for `kvlab.reference.cache_plan.plan`.

    Examples
    --------
    >>> smallest_nbytes(1000, 2, Ladder((2136, 4184), (0.018, 1e-4)), fixed_nbytes=520)
    269656
    """
    kept, borders = _kept(tokens, reach)
    end, exact = tokens - min(kept, window), 0
    low = -(-(kept - min(kept, window)) // _PAGE) + borders  # _RUN is whole pages
    if end < tokens:
        exact = sum(
            -(-(min(tokens, start + _RUN) - max(end, start)) // _PAGE)
            for start in range(end // _RUN * _RUN, tokens, _RUN)
        )
    opened = (tokens + lookahead - 1) // _RUN - tokens // _RUN + 1 if lookahead else 0
    return heads * (low * ladder.cost[0] + (exact + opened) * ladder.cost[-1]) + fixed_nbytes


def ample_nbytes(
    tokens: int, heads: int, ladder: Ladder, fixed_nbytes: int, *, window: int = 0, reach: int = 0
) -> int:
    """Return the bytes of a row with which no plan has to be compact.

    Beside full pages at the lowest level each head has a page of every rung with what is left over there, for
    each run of 65,536 positions, and three of the top rung: for new tokens, those to come, and the window.

    Examples
    --------
    >>> ample_nbytes(1000, 2, Ladder((2136, 4184), (0.018, 1e-4)), fixed_nbytes=520)
    303128
    """
    tokens, borders = _kept(tokens, reach)
    runs = tokens // _RUN + 1 + borders
    exact = 3 + (-(-window // _PAGE) + 1 if window else 0)
    return (
        heads * (tokens // _PAGE * ladder.cost[0] + runs * sum(ladder.cost) + exact * ladder.cost[-1])
        + fixed_nbytes
    )


def optimum(weights: Floats, ceilings: Ints, ladder: Ladder, bytes_left: int) -> Ints:
    """Levels of chunks as `allocator="dp"` chooses them; those of the fewest bytes where that does not fit.

    Arguments as of `kvlab.reference.cache_plan.by_price`.
    """
    highest = _highest_levels(ladder.cost)
    levels = np.minimum(highest, ceilings[:, None])
    if len(weights) * ladder.cost[0] > bytes_left:
        return levels[:, 0]
    loss = weights.astype(np.float64)[:, None] * np.array(ladder.loss)[levels]
    cost, tops = np.array(ladder.cost)[highest], np.searchsorted(highest, ceilings)
    chosen = allocate(loss, cost, bytes_left, ceiling=tops, method="dp")
    return levels[np.arange(len(levels)), chosen]


def choose_optimum(
    ladder: Ladder, evicts: int, window: int, chunks: Ints, weights: Floats, bytes_left: Ints
) -> tuple[Ints, int]:
    """Choose levels for the chunks of a layer by `optimum`, row by row.

    Parameters
    ----------
    ladder, evicts, window
        Of the plan.
    chunks : (batch, groups, classes) int
        How many each class of a group of a row has.
    weights : (sum of chunks,) float32
        In that order.
    bytes_left : (batch,) int64
        What chunks of a row may take.

    Returns
    -------
    chosen : (batch * groups, classes, levels) int64
        Chunks at each level.
    status : int
        Bits of `PlanStatus`.
    """
    batch, groups, classes = chunks.shape
    levels, ends, status = len(ladder.cost), np.cumsum(chunks.sum((1, 2)))[:-1], 0
    top = levels - 1 - (window > 0)
    highest, below = np.minimum(np.arange(classes) + evicts, top), top + 1
    of_chunks = Ladder(ladder.cost[:below], ladder.loss[:below])
    chosen = np.zeros((batch, groups * classes, levels), np.int64)
    for row, own in enumerate(np.split(weights, ends) if batch else []):
        run = np.repeat(np.arange(groups * classes), chunks[row].ravel())
        level = optimum(own, highest[run % classes], of_chunks, int(bytes_left[row]))
        np.add.at(chosen[row], (run, level), 1)
        if np.array(ladder.cost)[level].sum() > bytes_left[row]:
            status = OVER_BUDGET
    return chosen.reshape(batch * groups, classes, levels), status
