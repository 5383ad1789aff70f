"""A comparison of caches on several processes, saved as it goes.

Windows do not depend on each other, and much of a cache's work on a CPU is planning that one thread does
alone. So each process reads its own windows through all caches, with its own copy of the model and its share
of the threads: no process ever waits for another.

The parent process counts and draws. Only the readers import reader.py with torch and transformers, which
takes seconds.

The scores of a batch of windows go into a checkpoint (checkpoint.py) when the batch is done. A run that was
interrupted goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvlab.device import memory_available
from kvlab.lab.quality.checkpoint import Checkpoint
from kvlab.lab.quality.comparison import Comparison
from kvlab.lab.quality.plan import CACHE_DTYPE, Plan, WorkItem, Workload, num_chunks
from kvlab.lab.quality.scores import Continuation, Score, join
from kvlab.lab.worker_process import end_with_parent

if TYPE_CHECKING:
    from kvlab.lab.quality.reader import Reader

__all__ = ["compare", "processes_for"]

MAX_PROCESSES = 4
PROCESS_BYTES = 5 << 29
"""Memory that a process takes: the model, its caches, logits."""
BESIDE = 0.25
"""Budget of the cache whose continuation stands beside the one of full precision."""


def processes_for(plan: Plan) -> int:
    """How many processes this machine has processors and memory for.

    Examples
    --------
    >>> from kvlab.lab.quality.plan import Plan, Protocol
    >>> processes_for(Plan("smollm2", Protocol(), windows=1, budgets=(0.2,)))
    1
    """
    processors = len(os.sched_getaffinity(0))
    return max(1, min(plan.windows, processors, MAX_PROCESSES, memory_available() // PROCESS_BYTES))


def compare(
    plan: Plan,
    checkpoint: Checkpoint,
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Read all windows through all caches, then continue a text with two of them.

    Scores are saved in the checkpoint as they come, and found there after an interruption. With one process
    everything happens in this one, with the threads as they are. `progress` is told the number of chunks done
    and their total.

    The comparison has no provenance yet. Its parts stand in the order of their first windows, in whatever
    order they were read. If a process died, as it does when memory runs out, a RuntimeError says so; what was
    finished is in the checkpoint.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from kvlab.lab.quality.plan import Plan, Protocol
    >>> plan = Plan("tiny", Protocol(length=128, scored_from=64), windows=1, budgets=(0.5,))
    >>> with TemporaryDirectory() as folder:
    ...     outcome = compare(plan, Checkpoint(Path(folder), plan.settings), processes=1)
    >>> [score.name for score in outcome.scores][-2:], sorted(outcome.continuations)
    (['uniform 2', 'mixed 0.5'], ['full precision', 'mixed 0.25'])
    """
    start = time.perf_counter()
    done, total = 0, 1

    def count(chunks: int) -> None:
        nonlocal done
        done += chunks
        progress(min(done, total), total)

    with _team(plan, processes, count) as run:
        # One such job for each process, so that all of them load at the same time.
        (_, workload), *_ = run([("describe", None)] * processes)
        parts = [part for part in checkpoint.read() if workload.has(part)]
        saved = len(parts)
        items = _left(plan, workload, parts, processes)
        jobs: list[_Job] = [("read", item) for item in items]
        jobs += [("write", budget) for budget in (BESIDE, None)]  # the longer one first
        sizes = workload.sizes
        total = sum(num_chunks(len(windows), sizes[group], plan.protocol) for windows, group in items)
        total += 2 * plan.continuation_chunks
        jobs += [("race", None)] if plan.device != "cpu" else []
        prompt, continuations, races = "", dict[str, Continuation](), dict[str, tuple[float, float]]()
        for method, result in run(jobs):
            if method == "read":
                checkpoint.add(result)
                parts.append(result)
            elif method == "race":
                races = result
            else:
                name, prompt, continuations[name] = result
    return Comparison(
        model=workload.model,
        text=workload.text,
        cache_dtype=CACHE_DTYPE,
        protocol=asdict(plan.protocol),
        scores=_joined(workload, parts),
        prompt=prompt,
        continuations=dict(sorted(continuations.items())),
        races=races,
        seconds=time.perf_counter() - start,
        resumed=saved,
    )


def _left(plan: Plan, workload: Workload, parts: list[list[Score]], processes: int) -> list[WorkItem]:
    """What is not read yet, all groups of one window before the next window."""
    found: list[WorkItem] = []
    for group in range(len(workload.groups)):
        read = {start for part in parts if workload.group_of(part) == group for start in part[0].starts}
        left = [number for number, start in enumerate(workload.starts) if start not in read]
        rows = max(1, min(plan.protocol.rows, -(-len(left) // processes)))
        found += [(tuple(left[first : first + rows]), group) for first in range(0, len(left), rows)]
    return sorted(found)


def _joined(workload: Workload, parts: list[list[Score]]) -> list[Score]:
    """Scores of all windows in their order; full precision, which every group has, stands once."""
    parts = sorted(parts, key=lambda part: workload.starts.index(part[0].starts[0]))
    scores: list[Score] = []
    for group in range(len(workload.groups)):
        joined = join([part for part in parts if workload.group_of(part) == group])
        scores += joined[bool(scores) :]
    return scores


# ---- processes ---------------------------------------------------------------------------------------------

_Job = tuple[str, Any]
"""A method of `Reader` and its argument."""
_Run = Callable[[list[_Job]], Iterator[tuple[str, Any]]]
"""Carries jobs out; yields the method and the result of each as it is done."""


@contextmanager
def _team(plan: Plan, processes: int, tick: Callable[[int], None]) -> Iterator[_Run]:
    """Readers in `processes` processes, or one in this one; without them when the block ends."""
    if processes == 1:
        from kvlab.lab.quality.reader import Reader

        reader = Reader(plan, tick)
        yield lambda jobs: ((method, getattr(reader, method)(argument)) for method, argument in jobs)
        return
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    ticks = context.SimpleQueue()
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    pool = ProcessPoolExecutor(processes, context, _begin, (plan, threads, ticks))

    def run(jobs: list[_Job]) -> Iterator[tuple[str, Any]]:
        pending = {pool.submit(_carry_out, *job): job[0] for job in jobs}
        while pending:
            finished, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            while not ticks.empty():
                tick(ticks.get())
            for future in finished:
                yield pending.pop(future), future.result()

    try:
        yield run
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_reader: Reader | None = None
"""The reader of a process that is one of several."""


def _begin(plan: Plan, threads: int, ticks: Any) -> None:
    global _reader
    end_with_parent()
    import numba
    import torch

    from kvlab.lab.quality.reader import Reader

    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
    _reader = Reader(plan, ticks.put)


def _carry_out(method: str, argument: Any) -> Any:
    return getattr(_reader, method)(argument)
