"""Sweeps: manifests that cannot change, results that are whole, failures by class, and what is left to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvlab import files
from kvlab.errors import FormatError
from kvlab.lab.ablation import run as ablation
from kvlab.lab.ablation.grid import MODELS, AblationCase, Geometry, make_grid
from kvlab.lab.guard import Refused
from kvlab.lab.results import to_csv
from kvlab.lab.sweep import manifest as sweep
from kvlab.lab.sweep import run as sweep_run
from kvlab.lab.sweep import tables
from kvlab.lab.sweep.groups import in_groups, seconds
from kvlab.lab.sweep.manifest import Manifest, Status, classify, failure_of, record, recorded, status
from kvlab.lab.sweep.run import run_cases

LIKE = AblationCase(0.4, "2,4", 128, model=None, geometry=Geometry(1, 2, 1, 32))
GRID = make_grid(LIKE, (0.3, 0.4, 0.6), ("2,4", "4,8"), (128, 256))
REAL = "KVLAB_TEST_RESULT"
"""The environment variable that tells workers where a real result is."""


@pytest.fixture(scope="module", autouse=True)
def real_result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("real") / "result.json"
    path.write_text(json.dumps(ablation.run(LIKE)))
    os.environ[REAL] = str(path)
    yield
    del os.environ[REAL]


def fake(case: AblationCase) -> dict[str, Any]:
    """A result with the provenance and the size of a real one, made in no time, in a worker, too."""
    real = json.loads(Path(os.environ[REAL]).read_text())
    provenance = {**real["provenance"], "case_id": case.id}
    made = {**real, "experiment": case.name, "config": case.to_dict(), "provenance": provenance}
    return json.loads(json.dumps(made))


def failing(case: AblationCase) -> dict[str, Any]:
    if case.budget == 0.3:
        raise MemoryError("too large")
    if case.budget == 0.4:
        raise Refused("wrong_answer", "off by one")
    return fake(case)


def dying(case: AblationCase) -> dict[str, Any]:
    if case.budget == 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    return fake(case)


def hanging(case: AblationCase) -> dict[str, Any]:
    if case.budget == 0.3:
        time.sleep(60)
    return fake(case)


def told(cases: Sequence[AblationCase], folder: Path) -> None:
    """Write down which cases were to be read together."""
    with (folder / "read.txt").open("a") as file:
        file.write(" ".join(f"{case.budget:g}{'pu'[not case.use_packing]}" for case in cases) + "\n")


def unreadable(cases: Sequence[AblationCase]) -> None:
    raise MemoryError("too many caches")


def deadly(cases: Sequence[AblationCase]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    made = Manifest(GRID)
    made.write(tmp_path)
    return made


# ---- manifests ---------------------------------------------------------------------------------------------


def test_a_manifest_never_changes(tmp_path: Path, manifest: Manifest) -> None:
    path = manifest.write(tmp_path)  # the same again changes nothing
    assert Manifest.read(tmp_path) == manifest
    with pytest.raises(ValueError, match="another sweep"):
        Manifest(GRID[:3]).write(tmp_path)
    text = path.read_text()
    for damage in (text.replace("0.3", "0.35", 1), text[:-4], "", "[]", '{"cases": [1]}', text + " "):
        path.write_text(damage)
        with pytest.raises(FormatError):
            Manifest.read(tmp_path)
    path.unlink()
    with pytest.raises(FormatError, match="0 manifests"):
        Manifest.read(tmp_path)


# ---- results and failures ----------------------------------------------------------------------------------


def test_only_whole_results_of_the_case_count(tmp_path: Path, manifest: Manifest) -> None:
    case = manifest.cases[0]
    record(tmp_path, case, fake(case))
    assert recorded(tmp_path, case) == fake(case)
    assert status(tmp_path, manifest) == Status((0,), (), tuple(range(1, len(GRID))))
    path = tmp_path / f"{case.name}.json"
    text = path.read_text()
    for damage in ("", text[: len(text) // 2], "null", "[]", "{}", text.replace(case.id, "0" * 16)):
        path.write_text(damage)
        assert recorded(tmp_path, case) is None
    with pytest.raises(ValueError, match="is not that of"):
        record(tmp_path, manifest.cases[1], fake(case))
    with pytest.raises(ValueError, match="without provenance"):
        record(tmp_path, case, {"memory": {}})


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, manifest: Manifest, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = manifest.cases[0]
    before = fake(case)
    record(tmp_path, case, before)

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(OSError, match="No space"):
        record(tmp_path, case, {**before, "status": "other"})
    assert recorded(tmp_path, case) == before
    assert len(list(tmp_path.glob(f"*{case.name}*"))) == 1


def test_failures_are_classed_and_tried_again_by_policy(tmp_path: Path, manifest: Manifest) -> None:
    everything = range(len(GRID))
    outcomes: dict[int, str] = {}
    run_cases(tmp_path, manifest, everything, runner=failing, report=outcomes.__setitem__)
    assert set(outcomes.values()) == {"out_of_memory", "wrong_answer", "ok"}
    found = status(tmp_path, manifest)
    kinds = [failure_of(tmp_path, manifest.cases[number]).kind for number in found.failed]
    assert kinds == ["wrong_answer"] * 8  # a wrong answer is final, too little memory is not
    assert len(found.done) == len(found.left) == 8
    run_cases(tmp_path, manifest, everything, runner=failing, report=outcomes.__setitem__)
    assert set(outcomes.values()) == {"out_of_memory", "failed before", "done before"}
    again = status(tmp_path, manifest)
    assert (len(again.done), len(again.failed), len(again.left)) == (8, 16, 0)
    error = next(tmp_path.glob("*.error.json"))
    assert "MemoryError: too large" in error.read_text() or "off by one" in error.read_text()
    error.unlink()
    assert len(status(tmp_path, manifest).left) == 1
    run_cases(tmp_path, manifest, everything, runner=fake)
    assert len(status(tmp_path, manifest).done) == 9


def interrupted(case: AblationCase) -> dict[str, Any]:
    """What a function of C gives when an interrupt comes while it runs."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise SystemError("a result with an exception set") from interrupt


def test_an_interrupt_inside_compiled_code_is_no_failure(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_cases(tmp_path, manifest, range(2), runner=interrupted)
    assert status(tmp_path, manifest).failed == ()
    assert len(status(tmp_path, manifest).left) == len(manifest.cases)


def test_classes_of_errors() -> None:
    assert classify(Refused("throttled", "hot")) == "throttled"
    assert classify(OSError(28, "No space left on device")) == "disk_full"
    assert classify(sweep.WorkerDied("gone")) == "died"
    assert classify(TimeoutError()) == "timeout"
    assert classify(ValueError("bad")) == "ValueError"


# ---- several processes -------------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_its_case_only(tmp_path: Path) -> None:
    manifest = Manifest(make_grid(LIKE, (0.3, 0.5, 0.6), ("2,4",), (128,), (True,)))
    manifest.write(tmp_path)
    outcomes: dict[int, str] = {}
    run_cases(tmp_path, manifest, range(3), processes=2, runner=dying, report=outcomes.__setitem__)
    assert outcomes == {0: "died", 1: "ok", 2: "ok"}
    assert status(tmp_path, manifest).left == (0,)


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    manifest = Manifest(make_grid(LIKE, (0.3, 0.5), ("2,4",), (128,), (True,)))
    manifest.write(tmp_path)
    outcomes: dict[int, str] = {}
    start = time.monotonic()
    run_cases(tmp_path, manifest, [1, 0], processes=2, timeout=5, runner=hanging, report=outcomes.__setitem__)
    assert outcomes == {0: "timeout", 1: "ok"}
    assert time.monotonic() - start < 50


def where(case: AblationCase) -> dict[str, Any]:
    time.sleep(0.3)  # so that both workers get a case
    return fake(case) | {"reason": os.environ["CUDA_VISIBLE_DEVICES"]}


def test_workers_are_spread_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.lab.sweep.run.gpus", lambda: ["one", "another"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep_run._visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    manifest = Manifest(make_grid(replace(LIKE, device="cuda"), (0.3, 0.4, 0.5, 0.6), ("2,4",), (128,)))
    manifest.write(tmp_path)
    run_cases(tmp_path, manifest, range(8), processes=2, runner=where)
    assert {recorded(tmp_path, case)["reason"] for case in manifest.cases} == {"3", "5"}


# ---- groups ------------------------------------------------------------------------------------------------

READ = replace(LIKE, model="tiny", geometry=MODELS["tiny"].geometry, context_length=256)
TOGETHER = make_grid(READ, (0.3, 0.4, 0.5, 0.6), ("2,4",), (256, 512))


@pytest.mark.parametrize("least", [1, 2, 3, 4, 7, 8, 100])
def test_groups_are_all_cases_once_and_as_many_as_workers_need(least: int) -> None:
    groups = in_groups(TOGETHER, range(len(TOGETHER)), least)
    assert sorted(number for group in groups for number in group) == list(range(16))
    assert len(groups) == max(2, min(least, 8))  # 2 contexts; 8 evaluations
    for group in groups:
        assert {number ^ 1 for number in group} == set(group)  # packed and unpacked stay together
        assert len({TOGETHER[number].context_length for number in group}) == 1
    costs = [seconds([TOGETHER[number] for number in group]) for group in groups]
    assert costs == sorted(costs, reverse=True)
    assert in_groups(TOGETHER, [3], least) == [[3]]
    assert in_groups(TOGETHER, [], least) == []


def test_synthetic_cases_share_no_evaluation_but_that_of_their_pair() -> None:
    assert sorted(in_groups(GRID, range(8))) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_is_left_of_a_group_is_read_together(tmp_path: Path) -> None:
    manifest = Manifest(TOGETHER)
    manifest.write(tmp_path)
    for number in (0, 1, 3):
        record(tmp_path, TOGETHER[number], fake(TOGETHER[number]))
    for number in (8, 9, 10, 11, 12, 13):
        record(tmp_path, TOGETHER[number], fake(TOGETHER[number]))
    run_cases(tmp_path, manifest, range(16), runner=fake, reader=partial(told, folder=tmp_path))
    assert len(status(tmp_path, manifest).done) == 16
    # Of the longer context one pair is left, which is one evaluation.
    assert (tmp_path / "read.txt").read_text() == "0.4p 0.5p 0.5u 0.6p 0.6u\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_where_reading_together_fails_each_case_is_by_itself(tmp_path: Path, processes: int) -> None:
    manifest = Manifest(TOGETHER)
    manifest.write(tmp_path)
    reader = unreadable if processes == 1 else deadly
    with pytest.warns(RuntimeWarning, match="cases could not be read together, so each is by itself"):
        run_cases(tmp_path, manifest, range(16), processes=processes, runner=failing, reader=reader)
    assert status(tmp_path, manifest).done == (4, 5, 6, 7, 12, 13, 14, 15)
    kinds = [failure_of(tmp_path, TOGETHER[number]).kind for number in (0, 1, 2, 3)]
    assert kinds == ["out_of_memory"] * 2 + ["wrong_answer"] * 2


SCRIPT = """
import os, signal, sys
from pathlib import Path
from kvlab import files
from kvlab.lab.sweep.manifest import Manifest
from kvlab.lab.sweep.run import run_cases
from tests.lab.sweep.test_sweep import fake
folder, crash = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
for name in ("fsync", "replace"):
    def counted(*arguments, real=getattr(os, name)):
        global calls
        calls += 1
        if calls == crash:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    setattr(files.os, name, counted)
run_cases(folder, Manifest.read(folder), range(2), runner=fake)
"""


@pytest.mark.parametrize("crash", [2, 3])
def test_a_process_killed_amid_a_write_leaves_whole_files(tmp_path: Path, crash: int) -> None:
    """Every result is written in three steps: fsync of the file, rename, fsync of the folder."""
    manifest = Manifest(GRID[:2])
    manifest.write(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(crash)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    expected = {2: 0, 3: 1}[crash]
    assert len(status(tmp_path, manifest).done) == expected
    run_cases(tmp_path, manifest, range(2), runner=fake)
    assert len(status(tmp_path, manifest).done) == 2
    rows, missing = tables.collect(tmp_path, manifest)
    assert (len(rows), missing) == (2, [])


# ---- tables ------------------------------------------------------------------------------------------------


def test_the_table_of_a_resumed_sweep_is_that_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    manifest = Manifest(make_grid(LIKE, (0.25, 0.6), ("2,4", "4,8"), (128,)))
    texts = []
    for name, parts in (("once", [range(8)]), ("twice", [[5, 1], range(7, -1, -1)])):
        folder = tmp_path / name
        manifest.write(folder)
        for part in parts:
            run_cases(folder, manifest, part)
        rows, missing = tables.collect(folder, manifest)
        assert missing == []
        for row in rows:
            for column in tables.TIMES:
                row[column] = None
        texts.append(to_csv(rows))
    assert texts[0] == texts[1]
    assert texts[0].count("infeasible") == 2


def test_failures_are_rows_and_missing_cases_are_named(tmp_path: Path, manifest: Manifest) -> None:
    run_cases(tmp_path, manifest, range(20), runner=failing)
    rows, missing = tables.collect(tmp_path, manifest)
    assert missing == [20, 21, 22, 23]
    assert sum(row["status"] == "failed: wrong_answer" for row in rows) > 0
    assert len({tuple(row) for row in rows}) == 1
    tables.write_summary(rows, tmp_path)
    _, answer = tables.query("select count(*) from results where status = 'ok'", tmp_path)
    assert answer == [(sum(row["status"] == "ok" for row in rows),)]
    head = (tmp_path / tables.SUMMARY).read_text().splitlines()
    first = "experiment,budget,bits,context_length,use_packing,memory_ratio,avg_bits,allocated_gb"
    assert head[0].startswith(f"{first},throughput_tps,avg_latency_ms,status,")
    assert '"2,4"' in head[1]
    with pytest.raises(ValueError, match="query"):
        tables.query("select nothing from nowhere", tmp_path)
    with pytest.raises(FileNotFoundError, match="kvlab sweep collect"):
        tables.query("select 1", tmp_path / "absent")


def test_ten_thousand_results_are_collected(tmp_path: Path) -> None:
    """The bound on time is measured by benchmarks/sweep/run.py; here the work is counted: one read a case."""
    manifest = Manifest(tuple(replace(LIKE, budget=round(0.3 + i / 1000, 3)) for i in range(200)))
    manifest.write(tmp_path)
    run_cases(tmp_path, manifest, range(200), runner=fake)
    rows, missing = tables.collect(tmp_path, manifest)
    assert (len(rows), missing) == (200, [])
    assert [row["experiment"] for row in rows] == [case.name for case in manifest.cases]


def test_results_are_json_on_one_line(tmp_path: Path, manifest: Manifest) -> None:
    record(tmp_path, GRID[0], fake(GRID[0]))
    (path,) = tmp_path.glob("b0.3*.json")
    assert json.loads(path.read_text())["provenance"]["case_id"] == GRID[0].id
