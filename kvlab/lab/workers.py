"""A comparison of caches on several processes, saved as it goes.

Windows do not depend on each other, and much of a cache's work on a CPU is planning that one thread does
alone. So each process reads its own windows through all caches, with its own copy of the model and its share
of the threads: no process ever waits for another.

The scores of a batch of windows go into a journal (journal.py) when the batch is done, and a run that was
interrupted goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvlab.device import memory_available
from kvlab.lab.cases import controls, hqq, mixed, quanto, uniform
from kvlab.lab.continuation import continue_text
from kvlab.lab.journal import Journal
from kvlab.lab.model import Subject, load_smollm2, tiny_llama
from kvlab.lab.quality import Case, Protocol, evaluate, full_precision, steps
from kvlab.lab.scores import Continuation, Score, join
from kvlab.lab.text import cut_windows

__all__ = ["GROUPS", "Outcome", "Plan", "compare", "processes_for"]

GROUPS = ("kvlab", "controls", "hqq", "quanto")
SUBJECTS: dict[str, Callable[[], Subject]] = {"smollm2": load_smollm2, "tiny": tiny_llama}
MOST_PROCESSES = 4
PROCESS_BYTES = 5 << 29
"""Memory that a process takes: the model, its caches, logits."""
BESIDE = 0.25
"""Budget of the cache whose continuation stands beside the one of full precision."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare.

    Attributes
    ----------
    subject : {"smollm2", "tiny"}
    protocol : Protocol
    windows : int
    budgets : tuple of float
        Of the mixed caches.
    groups : tuple of str
        Of `GROUPS`: kvlab's own caches, controls at equal bytes, quantised caches of transformers.
    """

    subject: str
    protocol: Protocol
    windows: int
    budgets: tuple[float, ...]
    groups: tuple[str, ...] = GROUPS[:1]

    @property
    def settings(self) -> str:
        """What the scores of a window depend on: runs that differ in the rest share a journal."""
        return repr(replace(self, windows=0, groups=(), protocol=replace(self.protocol, rows=1)))

    def cases(self, config: Any) -> list[list[Case]]:
        """The caches, for a model of a configuration; those of a group are read and saved together."""
        length = self.protocol.length
        makers = {
            "kvlab": lambda: [*uniform(config), *mixed(config, length, self.budgets)],
            "controls": lambda: controls(config, length, min(self.budgets, key=lambda b: abs(b - 0.2))),
            "hqq": lambda: hqq(config),
            "quanto": lambda: quanto(config),
        }
        return [makers[group]() for group in self.groups]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a comparison found.

    Attributes
    ----------
    model, text : str
        Names of the model and the text.
    scores : list of Score
        Full precision first.
    prompt : str
        End of the prompt of the continuations.
    continuations : dict of str to Continuation
        By name of the cache.
    seconds : float
        From the start of the processes to the last result.
    resumed : int
        Parts (windows read through a group of caches) that came from the journal of an interrupted run.
    """

    model: str
    text: str
    scores: list[Score]
    prompt: str
    continuations: dict[str, Continuation]
    seconds: float
    resumed: int


def processes_for(plan: Plan) -> int:
    """How many processes this machine has processors and memory for.

    Examples
    --------
    >>> processes_for(Plan("smollm2", Protocol(), windows=1, budgets=(0.2,)))
    1
    """
    processors = len(os.sched_getaffinity(0))
    return max(1, min(plan.windows, processors, MOST_PROCESSES, memory_available() // PROCESS_BYTES))


def compare(
    plan: Plan,
    journal: Journal,
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Read all windows through all caches, then continue a text with two of them.

    Parameters
    ----------
    plan : Plan
    journal : Journal
        Where scores are saved as they come, and found after an interruption.
    processes : int
        1: everything happens in this process, with the threads as they are.
    progress : callable
        Called with the number of steps done and their total.

    Returns
    -------
    Outcome
        Windows stand in the order of `cut_windows`, in whatever order they were read.

    Raises
    ------
    RuntimeError
        If a process died, as it does when memory runs out; what was finished is in the journal.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> plan = Plan("tiny", Protocol(length=128, scored_from=64), windows=1, budgets=(0.5,))
    >>> with TemporaryDirectory() as folder:
    ...     outcome = compare(plan, Journal(Path(folder), plan.settings), processes=1)
    >>> [score.name for score in outcome.scores][-2:], sorted(outcome.continuations)
    (['uniform 2', 'mixed 0.5'], ['full precision', 'mixed 0.25'])
    """
    start = time.perf_counter()
    done, total = 0, 1

    def count(steps: int) -> None:
        nonlocal done
        done += steps
        progress(min(done, total), total)

    with _team(plan, processes, count) as run:
        # One such job for each process, so that all of them load at the same time.
        (_, about), *_ = run([("describe", None)] * processes)
        parts = [part for part in journal.read() if about.has(part)]
        saved = len(parts)
        readings = _left(plan, about, parts, processes)
        jobs: list[_Job] = [("read", reading) for reading in readings]
        jobs += [("write", budget) for budget in (None, BESIDE)]
        total = sum(steps(len(windows), about.sizes[group], plan.protocol) for windows, group in readings)
        total += 2 * _writing_steps(plan.protocol)
        prompt, continuations = "", dict[str, Continuation]()
        for method, result in run(jobs):
            if method == "read":
                journal.add(result)
                parts.append(result)
            else:
                name, prompt, continuations[name] = result
    return Outcome(
        model=about.model,
        text=about.text,
        scores=_joined(about, parts),
        prompt=prompt,
        continuations=dict(sorted(continuations.items())),
        seconds=time.perf_counter() - start,
        resumed=saved,
    )


_Reading = tuple[tuple[int, ...], int]
"""Numbers of windows, and the group of caches they are read through."""


def _left(plan: Plan, about: _About, parts: list[list[Score]], processes: int) -> list[_Reading]:
    """What is not read yet, all groups of one window before the next window."""
    found: list[_Reading] = []
    for group in range(len(about.groups)):
        read = {start for part in parts if about.group_of(part) == group for start in part[0].starts}
        left = [number for number, start in enumerate(about.starts) if start not in read]
        rows = max(1, min(plan.protocol.rows, -(-len(left) // processes)))
        found += [(tuple(left[first : first + rows]), group) for first in range(0, len(left), rows)]
    return sorted(found)


def _joined(about: _About, parts: list[list[Score]]) -> list[Score]:
    """Scores of all windows in their order; full precision, which every group has, stands once."""
    parts = sorted(parts, key=lambda part: about.starts.index(part[0].starts[0]))
    scores: list[Score] = []
    for group in range(len(about.groups)):
        joined = join([part for part in parts if about.group_of(part) == group])
        scores += joined[bool(scores) :]
    return scores


# ---- what a process does -----------------------------------------------------------------------------------

_Job = tuple[str, Any]
"""A method of `_Reader` and its argument."""


@dataclass(frozen=True, slots=True)
class _About:
    starts: tuple[int, ...]
    model: str
    text: str
    groups: tuple[tuple[str, ...], ...]

    @property
    def sizes(self) -> list[int]:
        return [len(names) for names in self.groups]

    def has(self, part: list[Score]) -> bool:
        names = tuple(score.name for score in part[1:])
        return names in self.groups and set(part[0].starts) <= set(self.starts)

    def group_of(self, part: list[Score]) -> int:
        return self.groups.index(tuple(score.name for score in part[1:]))


class _Reader:
    """A model with its windows and caches; `tick` is told of every step done."""

    def __init__(self, plan: Plan, tick: Callable[[int], None]) -> None:
        self.plan, self.tick = plan, tick
        self.subject = SUBJECTS[plan.subject]()
        self.groups = plan.cases(self.subject.model.config)
        self.windows = cut_windows(
            self.subject.text, self.subject.encode, plan.windows, plan.protocol.length + 1
        )

    def describe(self, _: None) -> _About:
        names = tuple(tuple(case.name for case in group) for group in self.groups)
        return _About(self.windows.starts, self.subject.name, self.subject.text_name, names)

    def read(self, reading: _Reading) -> list[Score]:
        numbers, group = reading
        return evaluate(
            self.subject.model,
            self.windows.part(numbers),
            self.groups[group],
            self.plan.protocol,
            progress=lambda name: self.tick(1),
        )

    def write(self, budget: float | None) -> tuple[str, str, Continuation]:
        config, length = self.subject.model.config, self.plan.protocol.length
        case = full_precision(config) if budget is None else mixed(config, length, [budget])[0]
        prompt = self.windows.tokens[-1][: 3 * length // 4].tolist()
        written = continue_text(self.subject, prompt, case.make(), length // 32)
        self.tick(_writing_steps(self.plan.protocol))
        return case.name, self.subject.decode(prompt[-64:]), written


def _writing_steps(protocol: Protocol) -> int:
    """A continuation takes about as long as one cache takes for a window."""
    return protocol.length // protocol.chunk


_Run = Callable[[list[_Job]], Iterator[tuple[str, Any]]]
"""Carries jobs out; yields the method and the result of each as it is done."""


@contextmanager
def _team(plan: Plan, processes: int, tick: Callable[[int], None]) -> Iterator[_Run]:
    """Readers in `processes` processes, or one in this one; without them when the block ends."""
    if processes == 1:
        reader = _Reader(plan, tick)
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


_reader: _Reader | None = None
"""The reader of a process that is one of several."""


def _begin(plan: Plan, threads: int, ticks: Any) -> None:
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it
    import numba
    import torch

    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
    _reader = _Reader(plan, ticks.put)


def _carry_out(method: str, argument: Any) -> Any:
    return getattr(_reader, method)(argument)
