"""A lock of a GPU: shared by processes that read text, exclusive for a process that measures time.

Cases of a sweep run in several processes on one GPU, because one case leaves most of it idle. A time that is
taken while others work would be wrong. So a process that measures time waits until the others pause, which
they do between two calls of the model, and the others wait until it is done. The lock is a file of the
machine's temporary folder, one for each user and GPU, so jobs that share a GPU wait for each other, and the
system frees it when a process dies. A second file is the gate: without it processes that read could keep one
that waits out for ever, since each of them takes the lock again before the last has left.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

__all__ = ["ProcessLock", "gpu_lock", "shared_gpu"]


class ProcessLock:
    """A shared or exclusive lock between processes of this machine; `name`: letters, digits, hyphens.

    Examples
    --------
    >>> lock = ProcessLock("doctest")
    >>> with lock.shared() as pause:
    ...     pause()
    >>> with lock.exclusive():
    ...     pass
    """

    def __init__(self, name: str) -> None:
        stem = Path(tempfile.gettempdir()) / f"kvlab-{os.getuid()}-{name}"
        self._gate, self._lock = stem.with_suffix(".gate"), stem.with_suffix(".lock")

    @contextmanager
    def shared(self) -> Iterator[Callable[[], None]]:
        """Share the lock; yields the function that lets a waiting process in, to be called whenever idle."""
        with self._gate.open("a") as gate, self._lock.open("a") as lock:

            def enter() -> None:
                fcntl.flock(gate, fcntl.LOCK_SH)  # closed while a process waits for it or holds it alone
                fcntl.flock(lock, fcntl.LOCK_SH)
                fcntl.flock(gate, fcntl.LOCK_UN)

            def pause() -> None:
                fcntl.flock(lock, fcntl.LOCK_UN)
                enter()

            enter()
            yield pause

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone, once the others have paused."""
        with ExitStack() as stack:
            for path in (self._gate, self._lock):
                file: IO[str] = stack.enter_context(path.open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def gpu_lock() -> ProcessLock:
    """The lock of torch's current GPU."""
    import torch

    return ProcessLock(f"gpu-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")


@contextmanager
def shared_gpu(device: str) -> Iterator[Callable[[], None]]:
    """Share torch's current GPU, idle at each pause and at the end; on the CPU, nothing."""
    if device == "cpu":
        yield lambda: None
        return
    import torch

    with gpu_lock().shared() as pause:

        def idle() -> None:
            torch.cuda.synchronize()
            pause()

        yield idle
        torch.cuda.synchronize()
