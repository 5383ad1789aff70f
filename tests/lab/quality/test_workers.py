"""Comparisons on several processes, and what an interrupted one leaves behind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvlab.lab.quality import reader, workers
from kvlab.lab.quality.checkpoint import Checkpoint
from kvlab.lab.quality.plan import Plan, Protocol
from kvlab.lab.quality.scores import Score
from kvlab.lab.quality.workers import compare, processes_for

PROTOCOL = Protocol(length=128, scored_from=64, chunk=32, rows=1)
PLAN = Plan("tiny", PROTOCOL, windows=3, budgets=(0.3,))


def without_speed(scores: list[Score]) -> list[dict[str, object]]:
    return [{**asdict(score), "tokens_per_second": None} for score in scores]


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    alone = compare(PLAN, Checkpoint(tmp_path / "a", PLAN.settings), 1)
    shared = compare(
        PLAN, Checkpoint(tmp_path / "b", PLAN.settings), 2, lambda done, total: steps.append((done, total))
    )
    assert without_speed(shared.scores) == without_speed(alone.scores)
    assert {name: text.text for name, text in shared.continuations.items()} == {
        name: text.text for name, text in alone.continuations.items()
    }
    assert steps[-1][0] == steps[-1][1]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(PLAN, Checkpoint(tmp_path / "whole", PLAN.settings), 1)
    read: list[int] = []
    evaluate = reader.evaluate

    def interrupted(model: object, windows: object, *args: object, **kwargs: object) -> list[Score]:
        if len(read) == 2:
            raise KeyboardInterrupt
        read.extend(windows.starts)  # type: ignore[attr-defined]
        return evaluate(model, windows, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "evaluate", interrupted)
    checkpoint = Checkpoint(tmp_path, PLAN.settings)
    with pytest.raises(KeyboardInterrupt):
        compare(PLAN, checkpoint, 1)
    with checkpoint.path.open("a") as file:  # the process was killed while it wrote
        file.write('\n[{"name": "full prec')
    monkeypatch.setattr(reader, "evaluate", evaluate)
    outcome = compare(PLAN, checkpoint, 1)
    assert outcome.resumed == 2
    assert without_speed(outcome.scores) == without_speed(whole.scores)
    assert [len(part[0].starts) for part in checkpoint.read()] == [1, 1, 1]
    checkpoint.remove()
    assert checkpoint.read() == []


def test_a_shorter_run_takes_its_windows_from_the_journal_of_a_longer_one(tmp_path: Path) -> None:
    checkpoint, shorter = Checkpoint(tmp_path, PLAN.settings), replace(PLAN, windows=2)
    assert shorter.settings == PLAN.settings
    compare(PLAN, checkpoint, 1)
    outcome = compare(shorter, checkpoint, 1)
    assert outcome.resumed == len(outcome.scores[0].starts) == 2
    assert outcome.resumed == len(outcome.scores[-1].starts)


def test_groups_of_caches_are_saved_one_by_one(tmp_path: Path) -> None:
    plan = replace(PLAN, windows=2, groups=("kvlab", "controls"))
    checkpoint = Checkpoint(tmp_path / "a", plan.settings)
    whole = compare(plan, checkpoint, 1)
    names = [score.name for score in whole.scores]
    assert len(names) == len(set(names)) == 1 + 4 + 1 + 4
    parts = checkpoint.read()
    assert [len(part) for part in parts] == [6, 5, 6, 5]
    ragged = Checkpoint(tmp_path / "b", plan.settings)
    for part in (parts[0], parts[3]):
        ragged.add(part)
    outcome = compare(plan, ragged, 1)
    assert outcome.resumed == 2
    controls = replace(plan, groups=("controls",))
    assert controls.settings == plan.settings
    assert [score.kind for score in compare(controls, ragged, 1).scores] == ["full precision"] + [
        "control"
    ] * 4
    assert without_speed(outcome.scores) == without_speed(whole.scores)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, budgets=(0.4,)),
        replace(PLAN, protocol=replace(PROTOCOL, chunk=64)),
    ],
)
def test_other_settings_have_another_journal(other: Plan, tmp_path: Path) -> None:
    assert Checkpoint(tmp_path, other.settings).path != Checkpoint(tmp_path, PLAN.settings).path


def test_other_source_has_another_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Checkpoint(tmp_path, PLAN.settings).path
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "store.py"))
    assert Checkpoint(tmp_path, PLAN.settings).path != before


def test_no_more_processes_than_windows_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(workers, "memory_available", lambda: 64 << 30)
    assert processes_for(replace(PLAN, windows=40)) == 4
    assert processes_for(PLAN) == 3
    monkeypatch.setattr(workers, "memory_available", lambda: 6 << 30)
    assert processes_for(PLAN) == 2
    monkeypatch.setattr(workers, "memory_available", lambda: 0)
    assert processes_for(PLAN) == 1


def test_the_process_that_starts_the_others_needs_neither_torch_nor_transformers() -> None:
    parts = "kvlab.cli.demo, kvlab.lab.quality.workers, kvlab.lab.quality.model, kvlab.lab.quality.comparison"
    code = f"import sys, {parts}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numpy" in run.stdout.split()
    assert not {"torch", "transformers", "numba"} & set(run.stdout.split())
