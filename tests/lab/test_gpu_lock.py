"""The lock on a GPU: readers share it, the process that times holds it alone, neither keeps the other out."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from kvlab.lab.gpu_lock import ProcessLock


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def read(folder: Path, number: int, stop: Event) -> None:
    """Mark its presence while it holds the lock; there is none while it pauses."""
    import tempfile

    tempfile.tempdir = str(folder)
    mine = folder / f"reads.{number}"
    with ProcessLock("test").shared() as pause:
        while not stop.is_set():
            mine.touch()
            time.sleep(2e-3)
            mine.unlink()
            pause()


def test_the_exclusive_holder_sees_nobody_and_is_let_in(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    readers = [context.Process(target=read, args=(tmp_path, number, stop)) for number in range(3)]
    for reader in readers:
        reader.start()
    together = 0
    try:
        for _ in range(20):  # each waits for a pause of all three, though one of them always works
            with ProcessLock("test").exclusive():
                assert not list(tmp_path.glob("reads.*"))
                time.sleep(5e-3)
                assert not list(tmp_path.glob("reads.*"))
            time.sleep(4e-3)
            together = max(together, len(list(tmp_path.glob("reads.*"))))
    finally:
        stop.set()
        for reader in readers:
            reader.join(10)
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert together > 1


def test_a_process_that_dies_leaves_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    reader = context.Process(target=read, args=(tmp_path, 0, context.Event()))
    reader.start()
    while not list(tmp_path.glob("reads.*")):
        time.sleep(1e-3)
    reader.kill()
    reader.join(10)
    with ProcessLock("test").exclusive():
        pass


def test_locks_of_different_names_do_not_exclude_each_other() -> None:
    with ProcessLock("first").exclusive(), ProcessLock("second").exclusive():
        pass
