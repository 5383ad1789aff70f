"""`python -m kvlab.parallel.benchmark`: what it prints and writes, and what its model says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.lab.benchmark import context_parallel as benchmark
from kvlab.lab.benchmark.context_parallel import SETS, lengths_of, step_seconds

SMALL = ["--tokens", "32", "--heads", "2", "2", "--head-dim", "16", "--stride", "1", "--seconds", "1e-3"]


def test_two_ranks_from_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "kvlab.parallel.benchmark", *SMALL, "--sets", "fixed", "variable", "--repeats", "1"]
    result = subprocess.run([*command, "--output", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(path.read_text())["results"]
    assert [sum(one["lengths"]) for one in found] == [64] * 5
    for one in found:
        assert one["ranks"] == 2
        assert one["forward, efficiency"] == pytest.approx(
            one["one device, forward, ms"] / 2 / one["forward, ms"]
        )
        longer, alone = (one[f"{name}, device, ms"] for name in ("longer by communication", "gathers alone"))
        assert alone > 0
        assert one["hidden"] == pytest.approx(1 - longer / alone)
        assert one["hidden, error"] >= 0


def test_one_call_for_both_chunks_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([*SMALL, "--implementation", "paired", "--repeats", "1"]) == 0
    assert "1 ranks, sequences of 32 tokens:" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", [pattern for patterns in SETS.values() for pattern in patterns])
@pytest.mark.parametrize("ranks", [1, 2, 8, 512])
def test_lengths_can_be_cut_for_every_rank(pattern: tuple[float, ...], ranks: int) -> None:
    lengths = lengths_of(pattern, 8192, ranks)
    assert all(n > 0 and n % (2 * ranks) == 0 for n in lengths)
    assert sum(lengths) == 8192 * ranks


@pytest.mark.parametrize("backward", [False, True])
def test_the_model_of_a_step(backward: bool) -> None:
    alone, efficiency = step_seconds(1, 8192, backward=backward)
    assert efficiency == pytest.approx(1.0)
    operations = 4 * 32 * 128 * 8192**2 / 2
    assert alone == pytest.approx(operations / 700e12 + backward * 2.5 * operations / 600e12)
    slow, little = step_seconds(8, 8192, gbytes=1.0, backward=backward)
    gathered = 4 * 8 * 128 * 8192 * 7 / 1e9  # all time goes to transfers there
    assert slow > gathered
    assert little < 0.1 < step_seconds(8, 8192, backward=backward)[1]


def test_the_model_needs_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--model", "--tokens", "8192"]) == 0
    assert "8192 tokens on each of 512 ranks: forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3", "2"], "--heads 3 2: query heads must be a multiple"),
        (["--stride", "9"], "--stride 9: there are 8 KV heads"),
        (["--tokens", "12"], "--tokens 12: a rank's tokens must be a multiple of 8"),
        (["--repeats", "0"], "argument --repeats: 0 is not supported"),
    ],
)
def test_options_are_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert words in capsys.readouterr().err
