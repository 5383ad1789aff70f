"""Processes that stay for many tests, each a rank of a group: torch takes seconds to import."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 240.0
"""Seconds: only a call that never ends takes as long, on however busy a machine."""


def serve(rank: int, size: int, store: str, pipe: Connection, timeout: float, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        said = os.open(f"{store}-said-by-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 2)
    dist.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
    )
    while True:
        work = pipe.recv()
        if work is None:
            break
        function, arguments = work
        try:
            pipe.send((True, function(rank, size, *arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Ranks:
    """A group of processes.

    Parameters
    ----------
    size : int
    timeout : float
        Seconds that a collective waits for a rank.
    backend : str
        ``"gloo"``, or ``"nccl"`` for ranks with a GPU each, which leave what they say in files.
    """

    def __init__(self, size: int, timeout: float = TIMEOUT, backend: str = "gloo") -> None:
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name, "store"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvlab.parallel", "kvlab.ops.cpu.attention"])
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(rank, size, store, other, timeout, backend), daemon=True)
            for rank, (_, other) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call ``function(rank, size, *arguments)`` on each rank."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def outcomes(self, ranks: list[int] | None = None) -> list[tuple[bool, Any]]:
        """Wait for what ranks return, or for the text of what they raise."""
        found = []
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            if not self.pipes[rank].poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} of {len(self.pipes)} says nothing")
            found.append(self.pipes[rank].recv())
        return found

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, size, *arguments)`` on each rank; return the results by rank."""
        self.start(function, *arguments)
        outcomes = self.outcomes()
        failures = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(outcomes) if not fine]
        assert not failures, "\n".join(failures)
        return [result for _, result in outcomes]

    def said_by(self, rank: int) -> str:
        """Return what a rank with a GPU has said to stderr."""
        return Path(self.folder.name, f"store-said-by-{rank}").read_text()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()
        self.folder.cleanup()


class StartedRanks:
    """The group of the processes that torchrun started, of which this is one, used as `Ranks` is."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.found: list[tuple[bool, Any]] = []

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call ``function(rank, size, *arguments)`` on this rank, as the others do."""
        import torch.distributed as dist

        try:
            mine = True, function(self.rank, self.size, *arguments)
        except Exception as error:
            mine = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        self.found = [(False, None)] * self.size
        dist.all_gather_object(self.found, mine)

    def outcomes(self) -> list[tuple[bool, Any]]:
        """Return what ranks returned, or the text of what they raised."""
        return self.found

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, size, *arguments)`` on each rank; return the results by rank."""
        self.start(function, *arguments)
        failures = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(self.found) if not fine]
        assert not failures, "\n".join(failures)
        return [result for _, result in self.found]

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
