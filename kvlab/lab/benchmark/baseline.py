"""Shared by the cases of `kvlab benchmark`: options of a run, the check before timing, a copy as baseline.

Memory-bound cases on the CPU use `against_copy`: the baseline copies as many bytes as the call must touch,
with as many threads. It copies to a new array, because the call returns one, and the system clears every page
that is new to a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvlab.device import cpu
from kvlab.lab.results import Row
from kvlab.lab.timing import limited_threads, time_in_turns

__all__ = ["Options", "against_copy", "check"]


@dataclass(frozen=True)
class Options:
    """Options of a run: bytes of the arrays (packing, codec), threads, repeats of a timed call, where.

    release: long sequences too (attention). baseline, contexts (cache): one of its baselines or "all", and
    stored tokens, divided by commas. seqlens, num_groups, config (grouped): tokens (empty: by the device)
    and groups, divided by commas, and a model's heads. tiny: shrink what no option names, for tests.
    """

    size: int = 256 * 2**20
    threads: int = field(default_factory=lambda: min(2, cpu().threads))
    repeats: int = 15
    device: str = "cpu"
    release: bool = False
    baseline: str = "all"
    contexts: str = "512,1K,2K,4K,8K"
    seqlens: str = ""
    num_groups: str = "2"
    config: str = "llama3-8b"
    tiny: bool = False


def against_copy(
    call: Callable[[], object],
    nbytes: int,
    options: Options,
    numpy_call: Callable[[], object] | None = None,
    numpy_part: float = 1.0,
) -> Row:
    """Time a call that touches `nbytes` (read and written) beside a copy of as many bytes.

    `numpy_call` is the same as a NumPy expression, on `numpy_part` of the data. A row has ``ms``, ``p5_ms``,
    ``p95_ms``: of the call; ``gb_per_s``; ``copy_gb_per_s``: of the copy; ``of_copy``: speed relative to the
    copy; ``times_numpy``: relative to NumPy, None without an expression.
    """
    from kvlab.numba_kernels.cpu.copy import copy_words

    source, numpy_seconds = np.ones(nbytes // 16, np.uint64), None
    copy = lambda: copy_words(source, np.empty_like(source))  # noqa: E731
    with limited_threads(options.threads):
        timings = time_in_turns({"call": call, "copy": copy}, repeats=options.repeats)
        if numpy_call is not None:
            repeats = min(options.repeats, 3)
            numpy_seconds = time_in_turns({"numpy": numpy_call}, repeats=repeats, warm_up=1)["numpy"].median
    timing = timings["call"]
    return {
        **timing.milliseconds(),
        "gb_per_s": nbytes / timing.median / 1e9,
        "copy_gb_per_s": nbytes / timings["copy"].median / 1e9,
        "of_copy": timing.ratio_to(timings["copy"]),
        "times_numpy": None if numpy_seconds is None else numpy_seconds / numpy_part / timing.median,
    }


def check(right: bool, what: str) -> None:
    """Refuse to time a wrong answer."""
    if not right:
        raise RuntimeError(f"{what} is wrong, so it was not timed")
