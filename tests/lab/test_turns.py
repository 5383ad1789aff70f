"""Turns on a GPU: readers run together, one that times is alone, and neither keeps the other out."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from kvlab.lab.turns import Turns


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def read(folder: Path, number: int, stop: Event) -> None:
    """Mark its presence while it uses the thing; there is none while it pauses."""
    import tempfile

    tempfile.tempdir = str(folder)
    mine = folder / f"reads.{number}"
    with Turns("test").together() as pause:
        while not stop.is_set():
            mine.touch()
            time.sleep(2e-3)
            mine.unlink()
            pause()


def test_who_is_alone_sees_nobody_and_gets_its_turn(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    readers = [context.Process(target=read, args=(tmp_path, number, stop)) for number in range(3)]
    for reader in readers:
        reader.start()
    together = 0
    try:
        for _ in range(20):  # each waits for a pause of all three, though one of them always works
            with Turns("test").alone():
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
    with Turns("test").alone():
        pass


def test_things_of_other_names_take_no_turns_with_each_other() -> None:
    with Turns("first").alone(), Turns("second").alone():
        pass
