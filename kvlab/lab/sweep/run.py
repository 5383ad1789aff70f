"""Run the cases of a sweep, in this process or in several.

Cases come in groups that share a reading (groups.py). The open cases of a group are read together, then
each is measured and recorded by itself. Where reading together fails, each case is read alone, so that one
failing case fails alone. A case is checked for a result right before it starts, so processes that are
given the same cases do little twice.

With several processes each lane has a worker of its own: one that dies or hangs costs its case, which is
recorded, and is replaced; the other lanes do not notice. Workers are spread over the GPUs. An interrupt
(Ctrl-C, a signal before the time limit) drops the cases that are being worked on and leaves complete results.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.device import gpus
from kvlab.lab.ablation.grid import AblationCase
from kvlab.lab.ablation.run import read_ahead, run
from kvlab.lab.sweep.groups import in_groups
from kvlab.lab.sweep.manifest import (
    Manifest,
    WorkerDied,
    classify,
    failure_of,
    record,
    record_failure,
    recorded,
)
from kvlab.lab.worker_process import end_with_parent

__all__ = ["run_cases"]

Runner = Callable[[AblationCase], dict[str, Any]]
Reader = Callable[[Sequence[AblationCase]], None]
Report = Callable[[int, str], None]


def run_cases(
    folder: Path,
    manifest: Manifest,
    numbers: Sequence[int],
    *,
    processes: int = 1,
    timeout: float | None = None,
    runner: Runner = run,
    reader: Reader = read_ahead,
    report: Report = lambda number, outcome: None,
) -> None:
    """Run cases of a sweep that have no result yet.

    Parameters
    ----------
    folder : Path
    manifest : Manifest
    numbers : sequence of int
        Which cases.
    processes : int
        1: in this process, without a timeout.
    timeout : float, optional
        Seconds that a case may take in a worker, whose start does not count; then the worker is ended.
    runner : callable
        Case to result; pickled if there are workers.
    reader : callable
        Told the cases of a group that are left, before the runner gets each, unless it is one evaluation.
    report : callable
        Told the number of each case and what became of it: "ok", "infeasible", "done before", "failed
        before", or the class of a failure.

    Raises
    ------
    ValueError
        If processes is below 1, or a timeout is given for one process.
    OSError
        If results cannot be written.
    """
    if processes < 1 or (processes == 1 and timeout is not None):
        raise ValueError(f"processes={processes} must be at least 1, and at least 2 for timeout={timeout}")
    groups = in_groups(manifest.cases, numbers, processes)
    waiting = _Waiting(folder, manifest, groups, report)
    if processes == 1:
        _Lane(folder, runner, reader).work(waiting, report)
        return
    threads_of_each = max(1, len(os.sched_getaffinity(0)) // processes)
    found = _visible_gpus() if any(manifest.cases[number].device == "cuda" for number in numbers) else []
    gpus = [found[i % len(found)] if found else None for i in range(processes)]
    lanes = [_WorkerLane(folder, runner, reader, timeout, _Resources(threads_of_each, gpu)) for gpu in gpus]
    threads = ThreadPoolExecutor(processes)
    working = [threads.submit(lane.work, waiting, report) for lane in lanes]
    try:
        for finished in wait(working, return_when="FIRST_EXCEPTION").done:
            finished.result()
    finally:
        waiting.close()
        for lane in lanes:
            lane.end()
        threads.shutdown()


def _visible_gpus() -> list[str]:
    """The GPUs of this process, by the names that CUDA_VISIBLE_DEVICES has for them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) if chosen is None else chosen.split(",")[i].strip() for i in range(len(gpus()))]


def _attempt(folder: Path, case: AblationCase, work: Callable[[], dict[str, Any]]) -> str:
    """Do a case and record what became of it; errors of the disk are the caller's."""
    try:
        result = work()
    except Exception as error:
        _raise_interrupt(error)
        return record_failure(folder, case, error).kind
    record(folder, case, result)
    return str(result["status"])


def _raise_interrupt(error: BaseException) -> None:
    """Raise the interrupt that an error comes from: compiled code that meets one gives a SystemError."""
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, Exception):
            raise cause from None
        cause = cause.__cause__ or cause.__context__


class _Waiting:
    """The groups still to do, handed out to any thread; files are looked at when a turn comes."""

    def __init__(
        self, folder: Path, manifest: Manifest, groups: Sequence[Sequence[int]], report: Report
    ) -> None:
        self._folder, self._manifest, self._report = folder, manifest, report
        self._groups = iter(groups)
        self._lock = threading.Lock()
        self.closed = False

    def __iter__(self) -> Iterator[dict[int, AblationCase]]:
        while (group := self._next()) is not None:
            yield {number: self._manifest.cases[number] for number in group if self.is_left(number)}

    def close(self) -> None:
        self.closed = True

    def _next(self) -> Sequence[int] | None:
        with self._lock:
            return None if self.closed else next(self._groups, None)

    def is_left(self, number: int) -> bool:
        """Whether a case is to be done; if not, that is reported."""
        case = self._manifest.cases[number]
        failure = failure_of(self._folder, case)
        if recorded(self._folder, case) is not None:
            self._report(number, "done before")
        elif failure is not None and failure.final:
            self._report(number, "failed before")
        else:
            return True
        return False


class _Lane:
    """What works through groups, in this process."""

    def __init__(self, folder: Path, runner: Runner, reader: Reader) -> None:
        self._folder, self._runner, self._reader = folder, runner, reader

    def work(self, waiting: _Waiting, report: Report) -> None:
        for group in waiting:
            cases = list(group.values())
            if len({replace(case, use_packing=True) for case in cases}) > 1:
                try:
                    self._call(self._reader, cases, len(cases))
                except Exception as error:
                    what = f"{len(cases)} cases could not be read together, so each is by itself: {error}"
                    warnings.warn(what, RuntimeWarning, stacklevel=2)
            for number, case in group.items():
                if waiting.closed:
                    return
                if len(cases) == 1 or waiting.is_left(number):
                    outcome = _attempt(self._folder, case, partial(self._call, self._runner, case))
                    report(number, outcome)
                    self._after(case, outcome)

    def _call(self, work: Callable[[Any], Any], argument: Any, count: int = 1) -> Any:
        """Do something for so many cases."""
        return work(argument)

    def _after(self, case: AblationCase, outcome: str) -> None:
        if outcome == "gpu":
            raise RuntimeError(f"{case.name} left the GPU unusable for this process; run the sweep again")


class _WorkerLane(_Lane):
    """A worker process and the thread that feeds it."""

    def __init__(
        self, folder: Path, runner: Runner, reader: Reader, timeout: float | None, resources: _Resources
    ) -> None:
        super().__init__(folder, runner, reader)
        self._timeout, self._resources = timeout, resources
        self._pool: ProcessPoolExecutor | None = None
        self._ended = False

    def _call(self, work: Callable[[Any], Any], argument: Any, count: int = 1) -> Any:
        allowed = None if self._timeout is None else count * self._timeout
        try:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
                self._pool = ProcessPoolExecutor(1, context, _begin, (self._resources,))
                self._pool.submit(_ready, work).result()  # a slow start takes no time of a case
            return self._pool.submit(work, argument).result(allowed)
        except Exception as error:
            if self._ended:
                raise _Ended from None
            what = argument.name if isinstance(argument, AblationCase) else f"{count} cases"
            if isinstance(error, BrokenProcessPool):
                error = WorkerDied(f"the process that ran {what} died; lack of memory is the usual reason")
            elif isinstance(error, TimeoutError):
                error = TimeoutError(f"{what} took longer than {allowed} s")
            if classify(error) in ("died", "timeout", "gpu"):  # this worker can do no more
                self._replace()
            raise error from None

    def _after(self, case: AblationCase, outcome: str) -> None:
        pass  # a worker that can do no more was replaced

    def _replace(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            # There is no public way before Python 3.14.
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(cancel_futures=True)

    def end(self) -> None:
        self._ended = True
        self._replace()


class _Ended(BaseException):
    """The run was interrupted while a worker was busy: its case is dropped, and has not failed."""


class _Resources(NamedTuple):
    """What a worker may use: threads, and a GPU by its name in CUDA_VISIBLE_DEVICES (None: as it is)."""

    threads: int
    gpu: str | None


def _ready(work: Callable[[Any], Any]) -> None:
    """Return once a worker has imported what it is to call."""


def _begin(resources: _Resources) -> None:
    end_with_parent()
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when torch and Numba are imported
        os.environ.setdefault(name, str(resources.threads))
    if resources.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = resources.gpu
