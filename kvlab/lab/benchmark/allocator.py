"""`kvlab benchmark allocator`: the time of a decision, and the loss of each method.

Instances are made to look like those of a model: pages of 16 tokens with every byte counted, errors that fall
by about four for each bit, importance that is log-normal over pages (or equal, which makes all pages tie).
Each is solved at several budgets; a row states the slowest time and the worst loss among them. Every
allocation is checked before it is timed.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from numpy.typing import NDArray

from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.results import Row
from kvlab.ops.allocator import METHODS, Method, allocate
from kvlab.pages import PAGE_TABLE_BYTES, TOKENS_PER_PAGE, PageLayout

__all__ = ["NOTE", "benchmark_allocator"]

NOTE = "ms: median of a call at the slowest budget; greedy over dp: loss against loss, at the worst budget"
PAGES = 4096
"""Of an instance."""
ERROR_OF_WIDTH = {0: 1.0, 2: 0.117, 3: 0.0345, 4: 0.0095, 8: 3.5e-5, 16: 0.0}
"""Mean squared error of a standard normal variable at each width, by the best quantiser of that width."""
LADDERS = ((2, 3, 4, 8, 16), (0, 2, 3, 4, 8), (0, 2, 4, 8, 16))
IMPORTANCE: dict[str, float] = {"log-normal, sigma 2": 2.0, "log-normal, sigma 3": 3.0, "equal": 0.0}
BUDGETS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.5, 0.7)
"""Fractions of the bytes of the same tokens in fp16."""


def benchmark_allocator(options: Options) -> list[Row]:
    """Time all methods, `repeats` calls at each budget; one row per ladder, head dimension and importance.

    A row has ``ladder``, ``head_dim``, ``importance``, ``pages``; ``greedy_ms``, ``dp_ms``, ``uniform_ms``:
    median milliseconds of a call, at the slowest budget; ``greedy_over_dp``: loss of greedy over loss of dp,
    at the budget where greedy does worst. An allocation that breaks its budget, and a dp that loses more than
    another method, are RuntimeErrors.

    Examples
    --------
    >>> rows = benchmark_allocator(Options(repeats=1, tiny=True))
    >>> len(rows), rows[0]["ladder"], rows[0]["greedy_over_dp"] >= 1
    (18, '2,3,4,8,16', True)
    """
    rng, pages = np.random.default_rng(0), 64 if options.tiny else PAGES
    rows = []
    for ladder in LADDERS:
        for head_dim in (64, 128):
            for importance, sigma in IMPORTANCE.items():
                weight = rng.lognormal(0.0, sigma, (pages, 1))
                loss = weight * np.array([ERROR_OF_WIDTH[width] for width in ladder])
                row: Row = {
                    "ladder": ",".join(map(str, ladder)),
                    "head_dim": head_dim,
                    "importance": importance,
                    "pages": pages,
                }
                rows.append(row | _measure(loss, _page_bytes(ladder, head_dim), head_dim, options.repeats))
    return rows


def _page_bytes(ladder: tuple[int, ...], head_dim: int) -> NDArray[np.int64]:
    """Bytes of a page at each width: codes of K and V, scales, positions and importance, the table entry."""
    layouts = [PageLayout(head_dim, width, width, 2) if width else None for width in ladder]
    return np.array([layout.nbytes + PAGE_TABLE_BYTES if layout else 0 for layout in layouts])


def _measure(loss: NDArray[np.float64], cost: NDArray[np.int64], head_dim: int, repeats: int) -> Row:
    slowest = dict.fromkeys(METHODS, 0.0)
    worst_ratio = 1.0
    for fraction in BUDGETS:
        budget = int(fraction * len(loss) * TOKENS_PER_PAGE * head_dim * 4)
        if budget < len(loss) * cost[0]:
            continue
        losses = dict.fromkeys(METHODS, 0.0)
        for method in METHODS:
            losses[method], milliseconds = _solve_timed(loss, cost, budget, method, repeats)
            slowest[method] = max(slowest[method], milliseconds)
        if losses["dp"] > min(losses.values()) * (1 + 1e-12):
            raise RuntimeError(f"dp is not optimal at budget {budget}: losses are {losses}")
        if losses["dp"] > 0:
            worst_ratio = max(worst_ratio, losses["greedy"] / losses["dp"])
    return {**{f"{method}_ms": slowest[method] for method in METHODS}, "greedy_over_dp": worst_ratio}


def _solve_timed(
    loss: NDArray[np.float64], cost: NDArray[np.int64], budget: int, method: Method, repeats: int
) -> tuple[float, float]:
    """Loss of the method, checked against the budget, and the median milliseconds of a call."""
    rung = allocate(loss, cost, budget, method=method)
    if cost[rung].sum() > budget:
        raise RuntimeError(f"{method} takes {cost[rung].sum()} bytes of a budget of {budget}")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        allocate(loss, cost, budget, method=method)
        times.append(1e3 * (time.perf_counter() - start))
    return float(loss[np.arange(len(rung)), rung].sum()), statistics.median(times)
