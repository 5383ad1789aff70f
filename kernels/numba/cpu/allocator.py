"""The loops of the page allocator: a multiple-choice knapsack in which a rung costs the same for every page.

`kvlab/ops/allocator.py` states the problem and calls these loops. Shapes used throughout: ``loss``
(pages, rungs), ``cost`` (rungs,), ``ceiling`` and ``rung`` (pages,). An *edge* lifts a page from one corner
of its lower convex hull of (bytes, loss) points to the next; its *slope* is the loss saved per byte.
``free_bytes`` are bytes of the budget that nothing takes yet.

All loops are serial: at 4,096 pages the greedy ones take a fraction of a millisecond, too little to divide
among threads.
"""

import numpy as np
from numba import njit


@njit(cache=True)
def hull_edges(loss, cost, ceiling):
    """Slope, bytes and target rung of each page's edges, steepest first: three arrays (pages, rungs - 1).

    Unused places have slope 0. Edges of equal slope are kept apart, because smaller ones fit more often.
    """
    pages, rungs = loss.shape
    slope = np.zeros((pages, rungs - 1))
    edge_cost = np.zeros((pages, rungs - 1), np.int64)
    target = np.zeros((pages, rungs - 1), np.int64)
    for page in range(pages):
        edges = 0
        for rung in range(1, ceiling[page] + 1):
            while True:
                start = target[page, edges - 1] if edges else 0
                saved_per_byte = (loss[page, start] - loss[page, rung]) / (cost[rung] - cost[start])
                if edges == 0 or saved_per_byte <= slope[page, edges - 1]:
                    break
                edges -= 1
            if saved_per_byte > 0:
                slope[page, edges] = saved_per_byte
                edge_cost[page, edges] = cost[rung] - cost[start]
                target[page, edges] = rung
                edges += 1
        slope[page, edges:] = 0
    return slope, edge_cost, target


@njit(cache=True)
def break_price(slope_bits, edge_cost, free_bytes):
    """The lowest price such that all edges of a steeper slope fit together; 0 if all edges fit.

    Prices and slopes are the bit patterns of non-negative floats: read as integers they keep their order, so
    at most 63 halvings end at the exact slope of the first edge that does not fit, whatever the slopes are.
    """
    low, high = np.int64(-1), slope_bits.max()
    while high - low > 1:
        price = low + (high - low) // 2
        total = np.int64(0)
        for edge in range(slope_bits.size):
            total += edge_cost[edge] if slope_bits[edge] > price else 0
        if total <= free_bytes:
            high = price
        else:
            low = price
    return high


@njit(cache=True)
def climb(slope, edge_cost, target, price, free_bytes):
    """Rungs and free bytes after all edges above the price, then those at it, by page, while they fit."""
    pages, max_edges = slope.shape
    rung = np.zeros(pages, np.int64)
    edges_taken = np.zeros(pages, np.int64)
    for page in range(pages):
        while edges_taken[page] < max_edges and slope[page, edges_taken[page]] > price:
            free_bytes -= edge_cost[page, edges_taken[page]]
            rung[page] = target[page, edges_taken[page]]
            edges_taken[page] += 1
    if price == 0:
        return rung, free_bytes
    for page in range(pages):
        while edges_taken[page] < max_edges and slope[page, edges_taken[page]] == price:
            if edge_cost[page, edges_taken[page]] > free_bytes:
                return rung, free_bytes
            free_bytes -= edge_cost[page, edges_taken[page]]
            rung[page] = target[page, edges_taken[page]]
            edges_taken[page] += 1
    return rung, free_bytes


@njit(cache=True)
def fill(rung, loss, cost, ceiling, free_bytes):
    """Raise rungs, in place, until nothing more fits: first what saves most, then whatever is lowest.

    After `climb` fewer bytes are free than one edge takes. Few upgrades fit, so each is found by a pass over
    all pages, and what it saves counts rather than what it saves per byte.
    """
    pages, rungs = loss.shape
    while True:
        max_saved, best_page, best_rung = 0.0, -1, -1
        for page in range(pages):
            now = rung[page]
            for higher in range(now + 1, ceiling[page] + 1):
                if cost[higher] - cost[now] > free_bytes:
                    break
                if loss[page, now] - loss[page, higher] > max_saved:
                    max_saved, best_page, best_rung = loss[page, now] - loss[page, higher], page, higher
        if best_page < 0:
            break
        free_bytes -= cost[best_rung] - cost[rung[best_page]]
        rung[best_page] = best_rung
    for higher in range(1, rungs):
        for page in range(pages):
            extra = cost[higher] - cost[rung[page]]
            if 0 < extra <= free_bytes and higher <= ceiling[page]:
                free_bytes -= extra
                rung[page] = higher


@njit(cache=True)
def search_core(spent, saved, shortfall, free_bytes, price, best, tolerance, max_states):
    """The best set of moves away from the Lagrangian solution at `price`, at most one move per core page.

    A state is what the moves of the pages seen so far spent and saved (both may be negative). Each page turns
    the front, the Pareto-optimal states sorted by bytes, into the next. A state is dropped unless the best
    rates at which the pages to come can use its free bytes, or give back what it overdrew, let it beat the
    best known solution by more than the tolerance.

    Parameters
    ----------
    spent, saved, shortfall : (core, rungs) int64, float64, float64
        Of moving a page to a rung: bytes, loss saved, and ``price * spent - saved``, infinite at the rung it
        has and where the move is not allowed. Rows in the order of their smallest shortfall.
    free_bytes : int
        Bytes free before any move.
    best : float
        What the best known solution saves.

    Returns
    -------
    (core,) int64
        New rungs of the first pages and -1 for the others; all -1 if the known solution is optimal.
    bool
        False if `max_states` are not enough.
    """
    core = len(spent)
    gain_rate, give_rate = _rates_to_come(spent, saved, shortfall)
    moves = np.full(core, -1)
    front_spent, front_saved = np.zeros(1, np.int64), np.zeros(1)
    parents = [np.zeros(1, np.int32)]
    choices = [np.zeros(1, np.int16)]
    kept, best_page, best_state = 0, -1, -1
    for page in range(core):
        useful = shortfall[page] < price * free_bytes - best - tolerance
        if front_spent.size == 0 or not useful.any():
            break
        options = np.flatnonzero(useful | (spent[page] == 0))
        if kept + options.size * front_spent.size > max_states:
            return moves, False
        front_spent, front_saved, parent, choice = _next_front(
            front_spent, front_saved, spent[page][options], saved[page][options],
            free_bytes, gain_rate[page + 1], give_rate[page + 1], best, tolerance,
        )  # fmt: skip
        parents.append(parent.copy())
        choices.append(options[choice].astype(np.int16))
        kept += front_spent.size
        last = np.searchsorted(front_spent, free_bytes, side="right") - 1  # saves most of those that fit
        if last >= 0 and front_saved[last] > best:
            best, best_page, best_state = front_saved[last], page, last
    for page in range(best_page, -1, -1):
        moves[page] = choices[page + 1][best_state]
        best_state = parents[page + 1][best_state]
    return moves, True


@njit(cache=True)
def _rates_to_come(spent, saved, shortfall):
    """From each page on: the most a byte spent can save, and the least a byte given back costs."""
    core, rungs = spent.shape
    gain_rate = np.zeros(core + 1)
    give_rate = np.full(core + 1, np.inf)
    for page in range(core - 1, -1, -1):
        gain_rate[page], give_rate[page] = gain_rate[page + 1], give_rate[page + 1]
        for rung in range(rungs):
            if shortfall[page, rung] < np.inf:
                rate = saved[page, rung] / spent[page, rung]
                if spent[page, rung] > 0:
                    gain_rate[page] = max(gain_rate[page], rate)
                else:
                    give_rate[page] = min(give_rate[page], rate)
    return gain_rate, give_rate


@njit(cache=True)
def _next_front(front_spent, front_saved, spent, saved, free_bytes, gain_rate, give_rate, best, tolerance):
    """Merge a shifted copy of the front per option; also returns the parent and the option of each state."""
    states, options = front_spent.size, spent.size
    next_spent = np.empty(options * states, np.int64)
    next_saved = np.empty(options * states)
    parent = np.empty(options * states, np.int32)
    choice = np.empty(options * states, np.int16)
    head = np.zeros(options, np.int64)
    count, max_saved = 0, -np.inf
    for _ in range(options * states):
        # the cheapest state not merged yet; of equally cheap ones the one that saves most
        option, cheapest, saves = -1, np.int64(0), 0.0
        for index in range(options):
            if head[index] < states:
                bytes_here = front_spent[head[index]] + spent[index]
                saved_here = front_saved[head[index]] + saved[index]
                if option < 0 or bytes_here < cheapest or (bytes_here == cheapest and saved_here > saves):
                    option, cheapest, saves = index, bytes_here, saved_here
        head[option] += 1
        rate = gain_rate if cheapest <= free_bytes else give_rate
        if saves <= max_saved or saves + rate * (free_bytes - cheapest) <= best + tolerance:
            continue
        next_spent[count], next_saved[count] = cheapest, saves
        parent[count], choice[count] = head[option] - 1, option
        count += 1
        max_saved = saves
        if cheapest <= free_bytes:
            best = max(best, saves)
    return next_spent[:count], next_saved[:count], parent[:count], choice[:count]
