"""Worker processes end when the process that began them is killed, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab.lab.quality import workers
from kvlab.lab.sweep import run as sweep

COMPUTE = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from kvlab.lab.worker_process import end_with_parent

def compute(folder):
    Path(folder, str(os.getpid())).touch()
    while True:
        sum(range(1000))

if __name__ == "__main__":
    with ProcessPoolExecutor(2, get_context("spawn"), end_with_parent) as pool:
        list(pool.map(compute, [sys.argv[1]] * 2))
"""


def becomes_true(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_began_them(tmp_path: Path, number: signal.Signals) -> None:
    script, folder = tmp_path / "compute.py", tmp_path / "workers"
    folder.mkdir()
    script.write_text(COMPUTE)
    parent = subprocess.Popen([sys.executable, str(script), str(folder)])
    try:
        assert becomes_true(lambda: len(list(folder.iterdir())) == 2, 60)
    finally:
        parent.send_signal(number)
        parent.wait()
    started = [int(file.name) for file in folder.iterdir()]
    ended = becomes_true(lambda: not any(map(runs, started)), 20)
    for process in filter(runs, started):
        os.kill(process, signal.SIGKILL)
    assert ended


@pytest.mark.parametrize(
    ("module", "arguments"), [(workers, (None, 1, None)), (sweep, (None,))], ids=["quality", "sweep"]
)
def test_workers_of_the_laboratory_begin_so(
    module: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begun() -> None:
        raise Begun

    monkeypatch.setattr(module, "end_with_parent", begun)
    with pytest.raises(Begun):
        module._begin(*arguments)
