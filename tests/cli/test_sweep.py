"""`kvlab sweep` from plan to tables, as a user calls it; submission with a stand-in for Slurm."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlab import cli, device
from kvlab.lab.ablation import run as ablation
from kvlab.lab.ablation.grid import AblationCase
from kvlab.lab.sweep.manifest import Manifest, status
from kvlab.ladder import BITS_IN_BLOCKS, BITS_OF_WIDTHS, parse_bits

RUNNER = CliRunner()
GEOMETRY = [*("--num-layers", "1", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "32")]
SMALL = ["--budgets", "0.25 0.6", "--bits", "2,4 4,8", "--contexts", "128", "--packing", "true"]


def call(*arguments: object) -> str:
    result = RUNNER.invoke(cli.app(), ["sweep", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_plan_run_status_collect(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    planned = call("plan", folder, *SMALL, *GEOMETRY)
    assert "1 case is infeasible" in planned
    assert "4 cases in" in planned
    assert json.loads(call("status", folder, "--json")) == {
        "done": 0, "failed": 0, "left": 4, "failed_cases": "", "left_cases": "0-3",
    }  # fmt: skip
    result = RUNNER.invoke(cli.app(), ["sweep", "collect", str(folder)])
    assert result.exit_code == 1
    assert "4 cases missing (0-3)" in result.output
    call("run", folder, "--part", "1/2")
    assert json.loads(call("status", folder, "--json"))["left_cases"] == "0,2"
    call("run", folder, "--cases", "0,2")
    assert "4 done, 0 failed, 0 left" in call("status", folder)
    call("collect", folder)
    rows = list(csv.DictReader((folder / "ablation_summary.csv").open()))
    assert [row["bits"] for row in rows] == ["2,4", "2,4", "4,8", "4,8"]
    assert [row["status"] for row in rows] == ["ok", "ok", "infeasible", "ok"]
    assert "nothing is left to do" in call("submit", folder)
    for result in set(folder.rglob("*.json")) - set(folder.glob("manifest-*.json")):
        result.unlink()
    assert "stays as it is" in str(RUNNER.invoke(cli.app(), ["sweep", "collect", str(folder)]).exception)
    assert len(list(csv.DictReader((folder / "ablation_summary.csv").open()))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budgets", "0.2 x"], "'x' is no number"),
        (["--budgets", "20% 6GiB"], "'6GiB' is bytes"),
        (["--budgets", "0.2 0.2"], "stand twice"),
        (["--contexts", "500"], "multiple of 128"),
        (["--bits", "2,5"], "width 5"),
        (["--bits", ""], "bits='' is empty"),
        (["--budgets", " , "], "is empty"),
        (["--contexts", "128"], "reads 256 to 4096 tokens"),
        (["--contexts", "1K", "--num-samples", "9"], "num_samples=9: the text .* take 8 at most"),
        (["--packing", "maybe"], "'maybe' is neither true nor false"),
        (["--num-layers", "2"], "give all three or none"),
    ],
)
def test_a_wrong_grid_is_refused_as_a_whole(options: list[str], message: str, tmp_path: Path) -> None:
    result = RUNNER.invoke(cli.app(), ["sweep", "plan", str(tmp_path / "sweep"), *options])
    error = result.exception  # the command line itself refuses a budget: then what it prints says so
    assert isinstance(error, (ValueError, SystemExit))
    assert re.search(message, str(error) if isinstance(error, ValueError) else result.output)
    assert not (tmp_path / "sweep").exists()


def test_what_is_planned_can_run_whatever_the_order_of_contexts(tmp_path: Path) -> None:
    call("plan", tmp_path, "--budgets", "0.5", "--bits", "2,4", "--contexts", "8K 256", "--packing", "true")
    assert [case.model for case in Manifest.read(tmp_path).cases] == [None, "tiny"]


def test_default_bits_are_those_of_a_cache_that_names_none(tmp_path: Path) -> None:
    """With profiles where all cases are packed; else those that differ in packing have the same ladder."""
    options = ["--bits", "default", "--contexts", "1K", "--budgets", "0.3 0.6"]
    call("plan", tmp_path / "packed", *options, "--packing", "true")
    call("plan", tmp_path / "both", *options)
    packed, both = (Manifest.read(tmp_path / name).cases for name in ("packed", "both"))
    ample = (*BITS_IN_BLOCKS, 16)
    ladders = [BITS_IN_BLOCKS, ample, *[BITS_OF_WIDTHS] * 4]
    assert [parse_bits(case.bits, 1) for case in (*packed, *both)] == [parse_bits(x, 1) for x in ladders]
    assert [case.use_packing for case in both] == [True, False] * 2


@pytest.mark.skipif(device.gpus() != (), reason="needs a machine without a GPU")
def test_a_sweep_for_a_gpu_is_planned_anywhere_and_run_where_one_is(tmp_path: Path) -> None:
    call("plan", tmp_path, *SMALL, *GEOMETRY[:-1], "64", "--device", "cuda")
    result = RUNNER.invoke(cli.app(), ["sweep", "run", str(tmp_path)])
    assert isinstance(result.exception, NotImplementedError)
    assert len(status(tmp_path, Manifest.read(tmp_path)).left) == 4


def test_a_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    call("plan", tmp_path, *SMALL, *GEOMETRY)
    RUNNER.invoke(cli.app(), ["sweep", "collect", str(tmp_path)])
    for command in ("show", "write"):
        result = RUNNER.invoke(cli.app(), ["report", command, str(tmp_path)])
        assert "has a result: kvlab sweep run, then" in str(result.exception)


def test_wrong_choices_of_cases_are_refused(tmp_path: Path) -> None:
    call("plan", tmp_path, *SMALL, *GEOMETRY)
    for option, value in (("--cases", "4"), ("--cases", "x"), ("--part", "2/2"), ("--part", "a")):
        result = RUNNER.invoke(cli.app(), ["sweep", "run", str(tmp_path), option, value])
        assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, 2), (signal.SIGUSR1, 1)])
def test_a_signal_leaves_complete_results_and_the_next_run_goes_on(
    tmp_path: Path, number: int, processes: int
) -> None:
    budgets = " ".join(f"{0.2 + i / 500:.3f}" for i in range(300))
    call(
        "plan",
        tmp_path,
        "--budgets",
        budgets,
        "--bits",
        "2,4",
        "--contexts",
        "128",
        "--packing",
        "true",
        *GEOMETRY,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlab.cli", "sweep", "run", tmp_path, "--processes", str(processes)]
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("b0.2*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=30) == {signal.SIGINT: 130}.get(number, 128 + number)
    found = status(tmp_path, Manifest.read(tmp_path))
    assert found.done
    assert found.left
    assert found.failed == ()
    assert not list(tmp_path.glob(".*.tmp"))
    following = found.left[0]
    call("run", tmp_path, "--cases", following)
    assert following in status(tmp_path, Manifest.read(tmp_path)).done


SLURM = """#!/bin/bash
echo "$(basename "$0") $* | $KVLAB_SWEEP $KVLAB_CASES $KVLAB_OFFSET/$KVLAB_TASKS" >> {log}
case $(basename "$0") in
  scontrol) echo "MaxArraySize = 2" ;;
  sbatch) [ -z "${{REFUSE:-}}" ] || {{ echo "sbatch: error: no such partition" >&2; exit 1; }}
          echo "$(wc -l < {log});local" ;;
esac
"""


def test_submission_splits_above_the_limit_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, programs, folder = tmp_path / "log", tmp_path / "bin", tmp_path / "sweep"
    programs.mkdir()
    for name in ("sbatch", "scontrol"):
        (programs / name).write_text(SLURM.format(log=log))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    call("plan", folder, *SMALL, *GEOMETRY)
    call("run", folder, "--cases", "1")
    answer = json.loads(call("submit", folder, "--throttle", 2, "--json", "--gpus=1"))
    assert answer == {"arrays": ["2", "3"], "collection": "4", "cases": 3, "tasks": 3}
    lines = log.read_text().splitlines()
    assert "--array=0-1%2" in lines[1]
    assert "--array=0%2" in lines[2]
    assert all("--requeue" in line and "--gpus=1" in line for line in lines[1:3])
    assert lines[1].endswith(f"ablate_memory.sbatch | {folder} 0,2-3 0/3")
    assert lines[2].endswith(f"ablate_memory.sbatch | {folder} 0,2-3 2/3")
    assert "--dependency=afterany:2:3" in lines[3]
    assert "--gpus=1" not in lines[3]
    assert (folder / "logs").is_dir()
    monkeypatch.setenv("REFUSE", "1")
    result = RUNNER.invoke(cli.app(), ["sweep", "submit", str(folder)])
    assert "sbatch refused: sbatch: error: no such partition" in str(result.exception)


def test_without_slurm_submission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("plan", tmp_path, *SMALL, *GEOMETRY)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = RUNNER.invoke(cli.app(), ["sweep", "submit", str(tmp_path)])
    assert "scontrol is not here" in str(result.exception)


def test_the_tiny_grid_from_plan_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model reads; contexts beyond it are synthetic and say so."""
    monkeypatch.setenv("KVLAB_TINY", "1")
    grid = ["--budgets", "0.6", "--bits", "2,4,8", "--contexts", "256 512", "--num-samples", "1"]
    assert "4 cases in" in call("plan", tmp_path, *grid)
    call("run", tmp_path)
    call("collect", tmp_path)
    rows = list(csv.DictReader((tmp_path / "ablation_summary.csv").open()))
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["kl"]) > 0 and row["model"] == "tiny" for row in rows)
    written = RUNNER.invoke(cli.app(), ["report", "write", str(tmp_path), "--change", "0.5"])
    assert written.exit_code == 0, written.output
    page = (tmp_path / "report.html").read_text()
    assert "What packing saves" in page
    assert "Best configuration" in page
    assert "2 cases are of synthetic" in call("plan", tmp_path / "long", *grid[:-4], "--contexts", "256 8K")


def test_the_grid_of_the_readme_in_its_smallest_form(tmp_path: Path) -> None:
    """From the commands as they stand in README.md to the page, each with the exit code 0."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = text[text.index("kvlab sweep plan results/grid") :].partition("```")[0]
    commands = [line.partition("#")[0] for line in block.splitlines() if line.startswith("kvlab ")]
    words = [shlex.split(part) for line in commands for part in line.split("&&")]
    assert [each[1:3] for each in words] == [
        ["sweep", "plan"], ["sweep", "run"], ["sweep", "collect"], ["report", "write"],
    ]  # fmt: skip
    for command in words:
        named = [word.replace("results/grid", str(tmp_path)) for word in command[1:]]
        result = RUNNER.invoke(cli.app(), named)
        assert result.exit_code == 0, result.output
        if command[2] == "plan":
            assert re.search(r"time: about \d+ s in", result.output), result.output
    rows = list(csv.DictReader((tmp_path / "ablation_summary.csv").open()))
    assert {row["status"] for row in rows} == {"ok", "infeasible"}
    assert {row["scored_tokens"] for row in rows if row["status"] == "ok"} == {"1024"}
    assert (tmp_path / "report.html").exists()


def test_a_sweep_that_fails_says_so_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("plan", tmp_path, *SMALL, *GEOMETRY)
    ablation._latest.clear()
    right = ablation.fill

    def broken(case: AblationCase, progress: Any) -> Any:
        if case.bits == "2,4":
            raise ValueError("the text | of\n9 characters is <too> short")
        return right(case, progress)

    monkeypatch.setattr(ablation, "fill", broken)
    result = RUNNER.invoke(cli.app(), ["sweep", "run", str(tmp_path)])
    assert result.exit_code == 1
    line = f"4 cases: 2 done, 2 failed (2x ValueError: the text | of); see kvlab sweep status {tmp_path}"
    assert result.stdout.splitlines()[-1] == line
    assert RUNNER.invoke(cli.app(), ["sweep", "collect", str(tmp_path)]).exit_code == 1
    rows = list(csv.DictReader((tmp_path / "ablation_summary.csv").open()))
    assert [row["reason"][:8] for row in rows] == ["the text", "the text", "the smal", ""]
    written = RUNNER.invoke(cli.app(), ["report", "write", str(tmp_path)])
    assert "2 of 4 cases failed" in written.stderr
    page, plain = ((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))
    places = [page.index(text) for text in ("2 of 4 cases failed", "<h2>Failed</h2>", "<h2>Budget against")]
    assert places == sorted(places)
    assert "&lt;too&gt; short" in page
    assert plain.startswith("> **2 of 4 cases failed")
    assert "_packed | ValueError | the text \\| of 9 characters is <too> short |" in plain


def test_a_sweep_that_ends_well_says_what_is_next(tmp_path: Path) -> None:
    call("plan", tmp_path, *SMALL, *GEOMETRY)
    shown = call("run", tmp_path, "--cases", "2,3").splitlines()[-1]
    assert shown == f"4 cases: 2 done, 0 failed, 2 left; next: kvlab sweep collect {tmp_path}"
