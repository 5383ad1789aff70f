"""Which page gets which width: a multiple-choice knapsack under a byte budget.

Every page takes exactly one rung of the ladder; a higher rung costs more bytes and loses less, and all pages
together may not exceed the budget. Three ways to choose:

``uniform``  one rung for all pages: the baseline the others have to beat.
``greedy``   climbs the lower convex hull of each page's (bytes, loss) points, best loss decrease per byte
             first. Only the price at which the budget runs out, in loss per byte, decides what is taken. It
             is found by bisection; nothing is sorted.
``dp``       the exact optimum. Seen from greedy's price, each move of a page to another rung has a shortfall:
             how far every solution with that move stays behind the linear bound, at least. Moves whose
             shortfall exceeds the gap between that bound and greedy are struck out, and the pages that still
             have a choice (the core) are searched by dynamic programming.

References: P. Sinha and A. A. Zoltners, "The multiple-choice knapsack problem", Operations Research 27
(1979), for the hull and the linear bound; D. Pisinger, "A minimal algorithm for the multiple-choice knapsack
problem", EJOR 83 (1995), for the core; F. Eisenbrand and R. Weismantel, "Proximity results and faster
algorithms for integer programming using the Steinitz lemma", ACM TALG 16 (2020), for the limit on moves among
equal pages.
"""

from __future__ import annotations

import math
import operator
from typing import Literal, SupportsIndex, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.errors import BudgetError, OutOfMemory
from kvlab.numba_kernels.cpu import allocator as loops

__all__ = ["LARGEST_TOTAL", "MAX_STATES", "METHODS", "Method", "allocate"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Method = Literal["greedy", "dp", "uniform"]
METHODS: tuple[Method, ...] = get_args(Method)
MAX_STATES = 1 << 24
"""States ``dp`` may keep, 6 bytes each and 22 more in the newest two fronts: never above 640 MiB."""
LARGEST_TOTAL = 1e280
"""Limit on the total loss; it keeps the product of a price and a number of bytes within float64."""


def allocate(
    loss: ArrayLike,
    cost: ArrayLike,
    budget: SupportsIndex,
    *,
    ceiling: ArrayLike | None = None,
    method: Method = "greedy",
) -> Ints:
    """Choose a rung for every page so that the total loss is small and the total cost within the budget.

    ``dp`` is optimal, up to the float64 rounding of the total loss. ``greedy`` takes hull edges in the order
    of their loss decrease per byte up to the first that does not fit; with the fitting fraction of that edge
    it would reach the linear bound, which no allocation beats, so its loss is at most that of ``dp`` plus the
    loss decrease of the largest hull edge (one rung up, where loss is convex in bytes). Both spend the bytes
    left over on any upgrade that fits, even one that gains nothing now, since a page is never promoted later.

    Parameters
    ----------
    loss : (pages, rungs) float
        Importance times predicted error of a page at each rung, lowest rung first; finite, not negative,
        non-increasing along a row.
    cost : (rungs,) int
        Bytes of a page at each rung; not negative, strictly increasing.
    budget : int
        Bytes that all pages may take together.
    ceiling : (pages,) int, optional
        Highest rung each page may take: its present one, since pages are only ever demoted. Default: the top.
    method : {"greedy", "dp", "uniform"}
        ``uniform`` gives all pages the highest rung that fits, or their ceiling where that is lower.

    Returns
    -------
    (pages,) int64
        Rung of each page. Equal arguments give equal results.

    Raises
    ------
    BudgetError
        If the lowest rung for every page does not fit; `needed_bytes` says what it takes.
    OutOfMemory
        If ``dp`` would need more than `MAX_STATES` states. It takes crafted instances to get there: loss
        almost proportional to bytes on many pages, and costs of many digits without a common divisor.
    TypeError, ValueError
        If an argument is not as described; the message names it.

    Examples
    --------
    >>> loss = [[9.0, 2.0, 0.1], [5.0, 1.0, 0.1], [0.3, 0.1, 0.0]]
    >>> allocate(loss, cost=[10, 20, 40], budget=70)
    array([2, 1, 0])
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; supported are {', '.join(map(repr, METHODS))}")
    losses, costs, ceilings = _checked(loss, cost, ceiling)
    free_bytes = _free_bytes(len(losses), costs, budget)
    if len(losses) == 0 or len(costs) == 1:
        return np.zeros(len(losses), np.int64)
    if method == "uniform":
        return _uniform(costs, ceilings, free_bytes)

    slope, edge_cost, target = loops.hull_edges(losses, costs, ceilings)
    price_bits = loops.break_price(slope.view(np.int64).ravel(), edge_cost.ravel(), free_bytes)
    price = float(np.int64(price_bits).view(np.float64))
    base, left = loops.climb(slope, edge_cost, target, price, free_bytes)
    rung: Ints = base.copy()
    loops.fill(rung, losses, costs, ceilings, left)
    if method == "dp" and price > 0:
        _move_to_optimum(rung, base, losses, costs, ceilings, left, price)
        loops.fill(rung, losses, costs, ceilings, free_bytes - int(np.sum(costs[rung] - costs[0])))
    return rung


def _checked(loss: ArrayLike, cost: ArrayLike, ceiling: ArrayLike | None) -> tuple[Floats, Ints, Ints]:
    costs = _integers("cost", cost)
    if costs.ndim != 1 or len(costs) == 0 or costs[0] < 0 or np.any(np.diff(costs) <= 0):
        raise ValueError(f"cost is {costs}; expected one row of strictly increasing bytes, none negative")
    losses = np.ascontiguousarray(loss, np.float64)
    if losses.ndim != 2 or losses.shape[1] != len(costs):
        raise ValueError(
            f"loss has shape {losses.shape}; expected (pages, {len(costs)}), as cost has entries"
        )
    pages = max(len(losses), 1)
    if int(costs[-1]) * pages >= 1 << 62:
        raise ValueError(f"cost goes up to {costs[-1]} bytes; {pages} pages of that size overflow int64")
    limit = LARGEST_TOTAL / pages
    if not _is_sound(losses, limit):
        page = next(page for page in range(pages) if not _is_sound(losses[page : page + 1], limit))
        raise ValueError(
            f"loss of page {page} is {losses[page]}; a row must be finite (all pages below {LARGEST_TOTAL:g} "
            "in total), not negative, and must not increase from a rung to the next: "
            "np.minimum.accumulate(loss, axis=1) levels noisy predictions"
        )
    if ceiling is None:
        return losses, costs, np.full(len(losses), len(costs) - 1, np.int64)
    ceilings = _integers("ceiling", ceiling)
    if ceilings.shape != losses.shape[:1]:
        raise ValueError(f"ceiling has shape {ceilings.shape}; loss has {len(losses)} pages")
    if np.any((ceilings < 0) | (ceilings >= len(costs))):
        raise ValueError(
            f"ceiling goes from {ceilings.min()} to {ceilings.max()}; rungs are 0 to {len(costs) - 1}"
        )
    return losses, costs, ceilings


def _is_sound(loss: Floats, limit: float) -> bool:
    """Whether rows never increase and lie between the limit and 0; false for NaN."""
    falls = bool(np.all(loss[:, 1:] <= loss[:, :-1]))
    return falls and bool(np.all(loss[:, 0] < limit)) and bool(np.all(loss[:, -1] >= 0))


def _integers(name: str, values: ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; integers are expected")
    return np.ascontiguousarray(array, np.int64)


def _free_bytes(pages: int, cost: Ints, budget: SupportsIndex) -> int:
    """Bytes left when every page has the lowest rung, as far as they can be spent at all."""
    needed = pages * int(cost[0])
    try:
        free = operator.index(budget) - needed
    except TypeError:
        raise TypeError(f"budget is {budget!r}; an integer number of bytes is expected") from None
    if free < 0:
        raise BudgetError(
            f"{pages} pages need {needed} bytes at the lowest rung, {cost[0]} each; the budget is {budget}: "
            "raise it, hold fewer pages, or add a narrower width",
            needed_bytes=needed,
        )
    return min(free, pages * int(cost[-1] - cost[0]))


def _uniform(cost: Ints, ceiling: Ints, free_bytes: int) -> Ints:
    for rung in range(len(cost) - 1, 0, -1):
        chosen = np.minimum(ceiling, rung)
        if np.sum(cost[chosen] - cost[0]) <= free_bytes:
            return chosen
    return np.zeros_like(ceiling)


def _move_to_optimum(
    rung: Ints, base: Ints, loss: Floats, cost: Ints, ceiling: Ints, free_bytes: int, price: float
) -> None:
    """Replace the feasible solution `rung` by an optimal one, in place.

    Every solution is the Lagrangian solution `base` and moves of pages away from it. It saves what the linear
    bound saves, ``price * free_bytes``, less the shortfall of its moves and less the price of the bytes it
    leaves.
    """
    base_loss = loss[np.arange(len(loss)), base]
    best = float(np.sum(base_loss - loss[np.arange(len(loss)), rung]))
    tolerance = float(np.sum(base_loss)) * 2.0**-50
    spent = cost - cost[base][:, None]
    saved = base_loss[:, None] - loss
    shortfall = np.maximum(price * spent - saved, 0)
    shortfall[(np.arange(len(cost)) > ceiling[:, None]) | (spent == 0)] = np.inf
    while True:
        shortfall[shortfall >= price * free_bytes - best - tolerance] = np.inf
        left = np.unique(spent[shortfall < np.inf])
        if len(left) == 0:
            return
        unit = math.gcd(*left.tolist())
        if free_bytes % unit == 0:
            break
        free_bytes -= (
            free_bytes % unit
        )  # sums of moves are multiples of the unit: a tighter bound, which may strike out more

    smallest = shortfall.min(axis=1)
    core = np.flatnonzero(smallest < np.inf)
    core = core[np.lexsort((base[core], *shortfall[core].T, smallest[core]))]
    copies = _equal_pages_before(shortfall[core], base[core])
    max_moves = (max(free_bytes, left[-1]) - min(0, left[0])) // unit
    order = np.lexsort((copies, smallest[core]))  # by smallest shortfall; then one page of each kind in turn
    core = core[order[copies[order] < max_moves]]
    moves, complete = loops.search_core(
        spent[core], saved[core], shortfall[core], free_bytes, price, best, tolerance, MAX_STATES
    )
    if not complete:
        raise OutOfMemory(
            f'method "dp" needs more than {MAX_STATES} states for these {len(loss)} pages (a core of '
            f'{len(core)} pages, costs in units of {unit} bytes): use method "greedy"'
        )
    if np.any(moves >= 0):
        rung[:] = base
        rung[core[moves >= 0]] = moves[moves >= 0]


def _equal_pages_before(shortfall: Floats, base: Ints) -> Ints:
    """How many pages with the same choices stand before each page of a core where these are neighbours.

    They are interchangeable, so only as many of a kind are needed as an optimal solution has moves. Moves
    whose bytes cancel can be left out. The rest can be ordered such that the running sum of their bytes stays
    between the largest refund of a move and the largest expense (or all free bytes), and takes no multiple of
    the unit twice.
    """
    index = np.arange(len(base))
    new = np.ones(len(base), np.bool_)
    new[1:] = (base[1:] != base[:-1]) | np.any(shortfall[1:] != shortfall[:-1], axis=1)
    first_of_kind: Ints = np.maximum.accumulate(np.where(new, index, 0))
    return index - first_of_kind
