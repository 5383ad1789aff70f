"""Time a call on the CPU: checked first, warm, many times, and in turns with a baseline.

Other work on a machine slows everything down by a factor that changes within seconds. So contestants run in
turns, call by call, and a ratio is the median of the ratios of neighbours, not the ratio of two medians from
different minutes. Working sets must exceed the caches: that is the caller's business.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

__all__ = ["Timing", "limited_threads", "time_in_turns"]


@dataclass(frozen=True)
class Timing:
    """Seconds of every repeat of one call, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return float(np.median(self.seconds))

    def percentile(self, percent: float) -> float:
        """Return a percentile, in seconds."""
        return float(np.percentile(self.seconds, percent))

    def milliseconds(self) -> dict[str, float]:
        """Return the median and the 5th and 95th percentile, as columns of a table."""
        return {
            "ms": 1e3 * self.median,
            "p5_ms": 1e3 * self.percentile(5),
            "p95_ms": 1e3 * self.percentile(95),
        }

    def latency(self) -> dict[str, float]:
        """Return the figures of one decode step, as columns of a table: latencies, tokens a second."""
        mean = float(np.mean(self.seconds))
        return {
            "avg_latency_ms": 1e3 * mean,
            "p5_latency_ms": 1e3 * self.percentile(5),
            "p50_latency_ms": 1e3 * self.median,
            "p95_latency_ms": 1e3 * self.percentile(95),
            "throughput_tps": 1 / mean,
        }

    def ratio_to(self, other: Timing) -> float:
        """Return how many times longer the other call took: the median over turns.

        Examples
        --------
        >>> Timing((1.0, 2.0, 4.0)).ratio_to(Timing((2.0, 4.0, 4.0)))
        2.0
        """
        if len(self.seconds) != len(other.seconds):
            raise ValueError(f"{len(self.seconds)} and {len(other.seconds)} turns cannot be compared")
        return float(np.median(np.divide(other.seconds, self.seconds)))


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], *, repeats: int = 15, warm_up: int = 2
) -> dict[str, Timing]:
    """Time calls against each other.

    Every call runs `warm_up` times untimed, which also compiles kernels, and then once in each of `repeats`
    turns. The caller has checked the results.

    Parameters
    ----------
    calls : mapping of name to callable
    repeats : int
    warm_up : int

    Returns
    -------
    dict of name to Timing

    Raises
    ------
    ValueError
        If `repeats` is below 1 or `warm_up` below 0.

    Examples
    --------
    >>> timings = time_in_turns({"sort": lambda: sorted(range(9)), "sum": lambda: sum(range(9))}, repeats=3)
    >>> len(timings["sort"].seconds), timings["sum"].median > 0
    (3, True)
    """
    if repeats < 1 or warm_up < 0:
        raise ValueError(f"repeats={repeats} must be at least 1 and warm_up={warm_up} at least 0")
    for _ in range(warm_up):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Let Numba, and torch where it is imported, use so many threads within a block."""
    import numba

    torch = sys.modules.get("torch")
    before = numba.get_num_threads(), torch.get_num_threads() if torch else count
    numba.set_num_threads(min(count, before[0]))
    if torch:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before[0])
        if torch:
            torch.set_num_threads(before[1])
