"""Blocks of Numba's simulator whose threads take turns.

The simulator runs every CUDA thread as a thread of Python and asks all of them in a loop whether they wait,
and it has no `syncwarp`. Here one thread of a block runs at a time, until it waits or ends; then the next one
goes on. Nothing polls. The order of threads is drawn anew behind each barrier, the same every time, so what a
thread reads without a barrier is often not there. A barrier that a thread never reaches is an error at once.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from numba.cuda.simulator import kernel
from numba.cuda.simulator.kernelapi import FakeCUDAModule

WARP = 32


class _Aborted(BaseException):
    """Ends a thread of a block in which another one failed."""


class Thread(kernel.BlockThread):
    """A CUDA thread that runs while it holds its turn."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self) -> None:
        """Run the kernel from the first turn on, and hand the turn on at the end."""
        self.turn.acquire()
        try:
            if not self.abort:
                super().run()
        except _Aborted:
            return
        self._manager.leave(self)

    def wait(self, group: int | None) -> None:
        """Wait for all threads of a warp, or of the block."""
        self._manager.arrive(self, group)
        self.turn.acquire()
        if self.abort:
            raise _Aborted

    def syncthreads(self) -> None:
        """Wait for all threads of the block."""
        self.wait(None)


class Block(kernel.BlockManager):
    """A block of threads that take turns."""

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run all threads of one block; raise what the first one that failed raised."""
        self.members: dict[int | None, list[Thread]] = {None: []}
        self.waiting: dict[int | None, list[Thread]] = {}
        for point in np.ndindex(*self._block_dim):
            thread = Thread(lambda: self._f(*args), self, grid_point, point, self._debug)
            self.members[None].append(thread)
            self.members.setdefault(thread.thread_id // WARP, []).append(thread)
        threads = list(self.members[None])
        self.order = random.Random(str(grid_point))
        self.ready = self.order.sample(threads, len(threads))
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()
        for thread in threads:
            thread.start()
        self.hand_on()
        self.done.acquire()
        for thread in threads:
            if self.members[None]:
                thread.abort = True
                if thread.turn.locked():
                    thread.turn.release()
            thread.join()
        if self.error is not None:
            raise self.error

    def arrive(self, thread: Thread, group: int | None) -> None:
        """Note that a thread waits, and hand the turn on."""
        self.waiting.setdefault(group, []).append(thread)
        self.open(group)
        self.hand_on()

    def leave(self, thread: Thread) -> None:
        """Take a thread that has ended out of its groups, and hand the turn on."""
        if thread.exception:
            self.error = thread.exception[0].with_traceback(thread.exception[1])
            self.done.release()
            return
        for group in (None, thread.thread_id // WARP):
            self.members[group].remove(thread)
            self.open(group)
        self.hand_on()

    def open(self, group: int | None) -> None:
        """Let the threads of a group go on if all of them wait."""
        waiting = self.waiting.get(group, [])
        if waiting and len(waiting) == len(self.members[group]):
            self.ready.extend(self.order.sample(waiting, len(waiting)))
            del self.waiting[group]

    def hand_on(self) -> None:
        """Give the turn to the next thread, or to the caller of the block."""
        if self.ready:
            self.ready.pop().turn.release()
            return
        if self.members[None]:
            self.error = RuntimeError("threads wait at barriers that others of their group never reach")
        self.done.release()


@pytest.fixture(autouse=True)
def _turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the blocks of the simulator."""

    def syncwarp(module: FakeCUDAModule) -> None:
        thread: Any = threading.current_thread()
        thread.wait(thread.thread_id // WARP)

    monkeypatch.setattr(kernel, "BlockManager", Block)
    monkeypatch.setattr(FakeCUDAModule, "syncwarp", syncwarp, raising=False)
