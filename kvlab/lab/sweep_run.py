"""Working through the cases of a sweep, in this process or in several.

A case is checked for a result right before it starts, so processes that are given the same cases do little
twice. With several processes each lane has a worker of its own: one that dies or hangs costs its case, which
is recorded, and is replaced; the other lanes do not notice. An interrupt (Ctrl-C, a signal before the time
limit) drops the cases that are being worked on and leaves complete results.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from kvlab.lab import ablation
from kvlab.lab.grid import AblationCase
from kvlab.lab.sweep import Manifest, WorkerDied, classify, failure_of, record, record_failure, recorded

__all__ = ["run_cases"]

Runner = Callable[[AblationCase], dict[str, Any]]
Report = Callable[[int, str], None]


def run_cases(
    folder: Path,
    manifest: Manifest,
    numbers: Sequence[int],
    *,
    processes: int = 1,
    timeout: float | None = None,
    runner: Runner = ablation.run,
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
        Seconds that a case may take in a worker; then the worker is ended.
    runner : callable
        Case to result; pickled if there are workers.
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
    if processes == 1:
        waiting = _Waiting(folder, manifest, numbers, report)
        for number, case in waiting:
            outcome = _attempt(folder, case, partial(runner, case))
            report(number, outcome)
            if outcome == "gpu":
                raise RuntimeError(f"{case.name} left the GPU unusable for this process; run the sweep again")
        return
    # Long ones first, so that no process is left alone with one at the end.
    numbers = sorted(numbers, key=lambda number: -manifest.cases[number].context_length)
    waiting = _Waiting(folder, manifest, numbers, report)
    lanes = [_Lane(folder, runner, timeout, max(1, _processors() // processes)) for _ in range(processes)]
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


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _attempt(folder: Path, case: AblationCase, work: Callable[[], dict[str, Any]]) -> str:
    """Do a case and record what became of it; errors of the disk are the caller's."""
    try:
        result = work()
    except Exception as error:
        return record_failure(folder, case, error).kind
    record(folder, case, result)
    return str(result["status"])


class _Waiting:
    """The cases still to do, handed out to any thread; files are looked at when a turn comes.

    Neighbours that share a reading, packed and unpacked, go to one thread.
    """

    def __init__(self, folder: Path, manifest: Manifest, numbers: Sequence[int], report: Report) -> None:
        self._folder, self._manifest, self._report = folder, manifest, report
        groups = groupby(numbers, lambda number: replace(manifest.cases[number], use_packing=True))
        self._groups = iter([list(group) for _, group in groups])
        self._lock = threading.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[tuple[int, AblationCase]]:
        while (group := self._next()) is not None:
            for number in group:
                if self._closed:
                    return
                if self._is_left(number):
                    yield number, self._manifest.cases[number]

    def close(self) -> None:
        self._closed = True

    def _next(self) -> list[int] | None:
        with self._lock:
            return None if self._closed else next(self._groups, None)

    def _is_left(self, number: int) -> bool:
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
    """One worker process and the thread that feeds it."""

    def __init__(self, folder: Path, runner: Runner, timeout: float | None, threads: int) -> None:
        self._folder, self._runner, self._timeout, self._threads = folder, runner, timeout, threads
        self._pool: ProcessPoolExecutor | None = None
        self._ended = False

    def work(self, waiting: _Waiting, report: Report) -> None:
        for number, case in waiting:
            report(number, _attempt(self._folder, case, partial(self._in_worker, case)))

    def _in_worker(self, case: AblationCase) -> dict[str, Any]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
            self._pool = ProcessPoolExecutor(1, context, _begin, (self._threads,))
        try:
            return self._pool.submit(self._runner, case).result(self._timeout)
        except Exception as error:
            if self._ended:
                raise _Ended from None
            if isinstance(error, BrokenProcessPool):
                error = WorkerDied(f"the process that ran {case.name} died, as it does without memory")
            elif isinstance(error, TimeoutError):
                error = TimeoutError(f"{case.name} took longer than {self._timeout} s")
            if classify(error) in ("died", "timeout", "gpu"):  # this worker can do no more
                self._replace()
            raise error from None

    def _replace(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list(
                (pool._processes or {}).values()
            ):  # there is no public way before Python 3.14
                process.kill()
            pool.shutdown(cancel_futures=True)

    def end(self) -> None:
        self._ended = True
        self._replace()


class _Ended(BaseException):
    """The run was interrupted while a worker was busy: its case is dropped, and has not failed."""


def _begin(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when torch and Numba are imported
        os.environ.setdefault(name, str(threads))
