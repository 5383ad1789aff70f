"""Sweeps on a real Slurm: whatever happens to tasks, the table is that of an uninterrupted run.

The cluster is one node that `local_slurm.sh` starts, and installs first where this runs as root. Faults are
real: a task is killed by SIGKILL between writing its file and renaming it, requeued, cancelled, given twice,
and the disk is full. They reach the tasks as a `sitecustomize` module on PYTHONPATH, so the library has no
hook for them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlab.lab.ablation.grid import MODELS, AblationCase, Geometry, make_grid
from kvlab.lab.results import to_csv
from kvlab.lab.sweep import tables
from kvlab.lab.sweep.manifest import Manifest, status
from kvlab.lab.sweep.run import run_cases

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
LIKE = AblationCase(0.4, "2,4", 128, model=None, geometry=Geometry(1, 2, 1, 32))
BUDGETS = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)
GRID = make_grid(LIKE, BUDGETS, ("2,4", "4,8"), (128,), (True,))
"""Each case is a task of its own, since synthetic data share no reading."""
FAULT = """
import os, signal, sys, time
fault, mark, case = (os.environ.get("KVLAB_TEST_FAULT", "") + "::").split(":")[:3]
if fault and "sweep" in sys.argv and not os.path.exists(mark):
    real = os.replace
    def replace(source, target):
        if ".json" in str(target) and case in str(target):
            open(mark, "w").close()
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(120)
        real(source, target)
    os.replace = replace
"""
"""At the first result, or that of a case: be killed, or hang, between writing and renaming; only once, as the
mark remembers."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None and os.getuid() != 0:
        pytest.skip("Slurm is not installed, and installing it takes root")
    home = Path(f"/tmp/kvlab-slurm-{os.getpid()}")
    environment = os.environ | {"LOCAL_SLURM_HOME": str(home), "LOCAL_SLURM_CPUS": "4"}
    script = ["bash", str(Path(__file__).with_name("local_slurm.sh"))]
    started = subprocess.run([*script, "start"], env=environment, capture_output=True, text=True, check=False)
    if started.returncode:
        pytest.skip(f"Slurm did not start: {started.stderr.strip().splitlines()[-1]}")
    os.environ["SLURM_CONF"] = str(home / "slurm.conf")
    yield
    subprocess.run([*script, "stop"], env=environment, check=True)
    del os.environ["SLURM_CONF"]
    shutil.rmtree(home)


@pytest.fixture(autouse=True)
def _tasks_see_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("KVLAB_TINY", "1")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The table of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_TINY", "1")
        Manifest(GRID).write(folder)
        run_cases(folder, Manifest(GRID), range(len(GRID)))
    return table(folder)


def table(folder: Path) -> str:
    """The collected table without times; a commit in the meantime is no difference."""
    rows, missing = tables.collect(folder, Manifest.read(folder))
    assert missing == []
    varying = dict.fromkeys((*tables.TIMES, "commit", "modified"))
    return to_csv([row | varying for row in rows])


def head(text: str, count: int) -> str:
    return "".join(text.splitlines(keepends=True)[: count + 1])


def call(*command: object) -> str:
    answer = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def submit(folder: Path, throttle: int = 4) -> list[str]:
    answer = json.loads(call("kvlab", "sweep", "submit", folder, "--throttle", throttle, "--json"))
    return [*answer["arrays"], answer["collection"]]


def planned(folder: Path, count: int) -> Path:
    Manifest(GRID[:count]).write(folder)
    return folder


def running(jobs: list[str], *states: str) -> int:
    """Number of tasks in the queue; an error of squeue is no answer, so it is asked again."""
    options = ["-t", ",".join(states)] if states else []
    while True:
        answer = subprocess.run(
            ["squeue", "-h", "-r", "-j", ",".join(jobs), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode == 0:
            return len(answer.stdout.split("\n")) - 1
        if "Invalid job id" in answer.stderr:
            return 0
        time.sleep(0.2)


def wait(jobs: list[str], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while running(jobs, "PD", "R", "CG", "CF"):
        assert time.monotonic() < deadline, call("squeue")
        time.sleep(0.2)


def until(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def test_an_array_with_throttling(tmp_path: Path, expected: str) -> None:
    folder = planned(tmp_path / "sweep", 20)
    jobs = submit(folder, throttle=2)
    most = 0
    while running(jobs, "PD", "R", "CG", "CF"):
        most = max(most, running(jobs[:1], "R"))
        time.sleep(0.1)
    assert most == 2
    assert table(folder) == expected
    assert (folder / "ablation_summary.csv").exists()
    assert (folder / "report.html").exists()


def test_a_task_killed_amid_a_write(tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = planned(tmp_path / "sweep", 4), tmp_path / "mark"
    monkeypatch.setenv("KVLAB_TEST_FAULT", f"kill:{mark}")
    wait(submit(folder, throttle=1))
    assert mark.exists()
    assert len(status(folder, Manifest(GRID[:4])).left) == 1
    assert list(folder.glob(".*.tmp"))  # what the killed task had written: no result
    wait(submit(folder))
    assert table(folder) == head(expected, 4)


def test_a_task_killed_amid_cases_that_it_reads_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = AblationCase(0.4, "2,4", 256, True, "tiny", MODELS["tiny"].geometry, num_samples=1)
    manifest = Manifest(make_grid(like, (0.3, 0.4, 0.5), ("2,4",), (256,)))
    folder, mark = tmp_path / "sweep", tmp_path / "mark"
    manifest.write(folder)
    monkeypatch.setenv("KVLAB_TEST_FAULT", f"kill:{mark}:b0.4_bits2_4_ctx256_unpacked")
    call("kvlab", "sweep", "run", folder, "--cases", "5")  # one of the group is there before
    wait(submit(folder, throttle=1))
    assert mark.exists()
    assert status(folder, manifest).left == (3, 4)
    wait(submit(folder, throttle=1))
    once = tmp_path / "once"
    manifest.write(once)
    run_cases(once, manifest, range(6))
    assert table(folder) == table(once)


@pytest.mark.parametrize("how", ["requeue", "USR1"])
def test_a_requeued_task(tmp_path: Path, expected: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an administrator, and by itself after the signal that comes before the time limit."""
    folder, mark = planned(tmp_path / "sweep", 2), tmp_path / "mark"
    monkeypatch.setenv("KVLAB_TEST_FAULT", f"hang:{mark}")
    jobs = submit(folder, throttle=1)
    until(mark)
    command = ["scontrol", "requeue"] if how == "requeue" else ["scancel", "--batch", "--signal=USR1"]
    call(*command, f"{jobs[0]}_0")
    wait(jobs)
    assert table(folder) == head(expected, 2)
    result = json.loads((folder / f"{GRID[0].name}.json").read_text())
    assert result["provenance"]["job"]["SLURM_RESTART_COUNT"] == "1"


def test_an_array_cancelled_and_submitted_again(
    tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = planned(tmp_path / "sweep", 8), tmp_path / "mark"
    monkeypatch.setenv("KVLAB_TEST_FAULT", f"hang:{mark}")
    jobs = submit(folder, throttle=2)
    until(mark)
    call("scancel", *jobs)
    wait(jobs)
    assert status(folder, Manifest(GRID[:8])).left
    wait(submit(folder))
    assert table(folder) == head(expected, 8)


def test_two_tasks_given_the_same_case(tmp_path: Path, expected: str) -> None:
    folder = planned(tmp_path / "sweep", 3)
    wait([*submit(folder), *submit(folder)])
    assert table(folder) == head(expected, 3)
    assert len(list(folder.glob("b0*.json"))) == 3


def test_a_full_disk(tmp_path: Path, expected: str) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path / "disk"
    folder.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
    try:
        planned(folder, 4)
        filler = folder / "filler"
        filler.write_bytes(bytes(44_000))
        wait(submit(folder))
        assert status(folder, Manifest(GRID[:4])).left
        filler.unlink()
        call("mount", "-o", "remount,size=1m", folder)
        wait(submit(folder))
        assert table(folder) == head(expected, 4)
    finally:
        call("umount", "-l", folder)


def test_the_script_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users of environment variables call it: the grid is planned by the tasks themselves."""
    values = {
        "DEVICE": "cpu",
        "MEMORY_BUDGETS": "0.3 0.6",
        "BIT_CONFIGS": "2,4 2,4,8",
        "CONTEXT_LENGTHS": "128",
    }
    values |= {"USE_BIT_PACKING_MODES": "true", "NUM_LAYERS": "1", "NUM_HEADS": "2", "HEAD_DIM": "32"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    script = ROOT / "slurm" / "ablate_memory.sbatch"
    job = call("sbatch", "--parsable", f"--chdir={tmp_path}", "--output=/dev/null", "--array=0-1", script)
    wait([job])
    folder = tmp_path / "results" / "ablations" / job
    names = {path.name for path in folder.glob("b*.json")}
    assert names == {
        f"b{budget}_bits{bits}_ctx128_packed.json" for budget in ("0.3", "0.6") for bits in ("2_4", "2_4_8")
    }
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert len(re.findall(": ok", logs)) == 4


def test_the_benchmark_script_joins_its_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEVICE": "cpu", "BASELINES": "fp16 mixed", "NUM_ITERATIONS": "1"}.items():
        monkeypatch.setenv(name, value)
    script = ROOT / "slurm" / "benchmark_gpu.sbatch"
    wait([call("sbatch", "--parsable", f"--chdir={tmp_path}", "--output=/dev/null", "--array=0-1", script)])
    (folder,) = (tmp_path / "results" / "benchmarks").iterdir()
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert (folder / "benchmark_comparison.csv").exists(), logs
    text = (folder / "benchmark_comparison.csv").read_text()
    assert text.startswith("context_length,fp16_avg_latency_ms"), logs
    assert "mixed_allocated_gb" in text
