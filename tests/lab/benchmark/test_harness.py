"""The driver of the scripts in benchmarks/: what it writes, and that every script states its cases by it."""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlab.lab.benchmark import harness

ROOT = Path(__file__).parents[3]
FILES = {path: path.read_text() for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
SCRIPTS = [str(path.relative_to(ROOT)) for path, text in FILES.items() if "harness.run(" in text]
NEEDED = {
    "benchmarks/cache_plan/turns.py": ["OUT.json", "BEFORE", "AFTER"],
    "benchmarks/attention/cpu_turns.py": ["OUT.json", "BEFORE", "AFTER"],
    "benchmarks/cpu_decode/turns.py": ["OUT.json", "BEFORE", "AFTER"],
    "benchmarks/quality/simulation.py": ["OUT.json", "FORMATS.json"],
    "benchmarks/engine/tokens.py": ["--cases", "pythia-2.8b:1x32,pythia-2.8b:8x1024"],
}


def run(
    monkeypatch: pytest.MonkeyPatch, cases: Any, *arguments: str, device: str = "cpu", **head: Any
) -> int:
    monkeypatch.setattr("sys.argv", ["kvlab", *arguments])
    return harness.run(harness.options("A test.", device), lambda _: cases, **head)


def test_a_result_holds_where_it_comes_from_and_a_row_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    cases = [harness.Case("two", lambda: [{"x": 2}, {"x": 3}])]
    assert run(monkeypatch, cases, str(output), "--seconds", "60", schema="a 1") == 0
    assert capsys.readouterr().out.splitlines() == ["x 2", "x 3"]
    found = json.loads(output.read_text())
    assert list(found) == ["schema", "provenance", "rows"]
    assert found["provenance"]["settings"] == {"seconds": 60.0, "device": "cpu"}
    assert found["provenance"]["command"] == "kvlab out.json --seconds 60"
    assert '\n  {"x": 2},\n  {"x": 3}\n' in output.read_text()
    cases = [harness.Case("a path", lambda: {"x": tmp_path / "é"})]
    assert run(monkeypatch, cases, str(output)) == 0
    assert '{"x": "é"}' in output.read_text()


def test_the_file_is_whole_after_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.json"

    def rows() -> Iterator[dict[str, int]]:
        for x in range(3):
            yield {"x": x}
            assert len(json.loads(output.read_text())["rows"]) == x + 1

    assert run(monkeypatch, [harness.Case("three", rows)], str(output)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_case_that_fails_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"

    def fails() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise AssertionError("a wrong answer")

    cases = [harness.Case("wrong", fails), harness.Case("right", lambda: {"x": 2})]
    assert run(monkeypatch, cases, str(output)) == 1
    found = json.loads(output.read_text())
    assert found["failed"] == {"wrong": "AssertionError: a wrong answer"}
    assert found["rows"] == [{"x": 1}, {"x": 2}]
    assert "a wrong answer" in capsys.readouterr().err
    cases = [harness.Case("no JSON", lambda: {"x": object}), harness.Case("right", lambda: {"x": 2})]
    assert run(monkeypatch, cases, str(output)) == 1
    found = json.loads(output.read_text())
    assert found["failed"] == {"no JSON": "TypeError: <class 'object'> of type is no JSON"}
    assert found["rows"] == [{"x": 2}]


def test_no_case_begins_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [harness.Case(str(x), lambda x=x: {"x": x}) for x in range(3)]  # type: ignore[misc]
    assert run(monkeypatch, cases, "--seconds", "-1") == 0
    assert capsys.readouterr().out == "out of time: 3 of 3 cases are left\n"


def test_what_is_asked_wrongly_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvlab.lab.targets._no_gpu_because", lambda _: "there is none")
    never = [harness.Case("never", lambda: pytest.fail("measured"))]
    for arguments, device, message in (
        (["out.csv"], "cpu", "'out.csv' must end in .json"),
        ([], "cuda", "there is none"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, never, *arguments, device=device)
        assert message in capsys.readouterr().err
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=harness.names(("one", "two")))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--names", "one,three"])
    assert "'three' is unknown; known are one, two" in capsys.readouterr().err


def test_clocks_of_the_gpu_stand_beside_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "name")
    monkeypatch.setattr(harness, "gpu_state", lambda: dict.fromkeys(names, "7"))
    assert run(monkeypatch, [harness.Case("one", dict)], str(tmp_path / "out.json")) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["gpu_after"] == {"one": dict.fromkeys(names[:4], "7")}


def test_every_script_uses_the_driver() -> None:
    with_main = [path for path, text in FILES.items() if "\ndef main(" in text]
    assert [str(path.relative_to(ROOT)) for path in with_main] == SCRIPTS


def call(script: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("sys.argv", [str(ROOT / script), *NEEDED.get(script, ()), *arguments])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))  # as Python does
    return runpy.run_path(str(ROOT / script), run_name="script")["main"]()


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_name_their_cases_without_a_gpu(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("FORMATS.json").write_text('[{"name": "the cache"}]')
    assert call(script, monkeypatch, "--list") == 0
    names = capsys.readouterr().out.splitlines()
    assert names
    assert len(set(names)) == len(names)


SMALL = {
    "benchmarks/cpu_cache/run.py": ["--lengths", "128"],
    "benchmarks/replay/run.py": ["--tiny", "--device", "cpu", "--windows", "1", "--budgets", "0.3"],
    "benchmarks/resident_memory/run.py": ["--size", "16MiB"],
    "benchmarks/sweep/run.py": ["--cases", "20"],
}


@pytest.mark.parametrize("script", SMALL)
def test_scripts_that_need_no_gpu_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "out.json"
    assert call(script, monkeypatch, str(output), *SMALL[script]) == 0
    found = json.loads(output.read_text())
    assert found["provenance"]["command"].startswith(f"python {script} out.json")
    assert found["rows"]
