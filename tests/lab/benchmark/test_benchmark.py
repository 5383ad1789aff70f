"""Benchmarks in small form: what rows hold, that wrong answers are not timed, what becomes of results."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab.device import cpu
from kvlab.lab import results
from kvlab.lab.benchmark import run as benchmark
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.figures import draw_attention
from kvlab.lab.timing import Timing, time_in_turns

SMALL = Options(size=2**16, threads=1, repeats=1)
FIGURES = {"ms", "p5_ms", "p95_ms", "gb_per_s", "copy_gb_per_s", "of_copy", "times_numpy"}


def test_packing_rows_state_the_ratios_to_int8() -> None:
    rows = benchmark.run("packing", SMALL)["rows"]
    ratios = {row["bits"]: row["times_smaller"] for row in rows}
    expected = {1: 8, 2: 4, 3: 8 / 3, 4: 2, 5: 1.6, 6: 4 / 3, 8: 1, 1.6: 5}
    assert ratios == pytest.approx(expected)
    assert [row["operation"] for row in rows] == ["pack", "unpack"] * 8
    for row in rows:
        assert set(row) >= FIGURES
        assert row["p5_ms"] <= row["ms"] <= row["p95_ms"]
        assert min(row[name] for name in FIGURES) > 0


def test_codec_rows() -> None:
    rows = benchmark.run("codec", SMALL)["rows"]
    assert len({tuple(row) for row in rows}) == 1
    kinds = {(row["codec"], row["bits"], row["groups"], row["dtype"]) for row in rows}
    assert ("affine", 4, "per channel", "float16") in kinds
    assert ("hadamard", 3, "per token", "float32") in kinds
    for row in rows:
        assert row["bits_per_element"] > row["bits"] - 0.01
        assert (row["times_numpy"] is None) == (row["codec"] != "affine" or row["groups"] == "per channel")


def test_allocator_and_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    rows = benchmark.run("allocator", SMALL)["rows"]
    assert {row["pages"] for row in rows} == {64}
    assert all(1 <= row["greedy_over_dp"] < 1.5 and row["greedy_ms"] > 0 for row in rows)
    rows = benchmark.run("decode", SMALL)["rows"]
    profiles = "profiles, average 4.1"
    assert {row["widths"] for row in rows} == {"2", "3", "4", "8", "mixed, average 4", profiles}
    assert {(row["context"], row["threads"]) for row in rows} == {(128, 1)}
    assert all(row["speedup"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("case", "function"), [("packing", "pack"), ("packing", "unpack"), ("codec", "dequantize")]
)
def test_wrong_answers_are_not_timed(case: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(kvlab, function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return np.roll(right(*args, **kwargs), 1)

    monkeypatch.setattr(kvlab, function, wrong)
    with pytest.raises(RuntimeError, match="is wrong, so it was not timed"):
        benchmark.run(case, SMALL)


def test_attention_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    rows = benchmark.run("attention", SMALL)["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["tflops"] > 0
        assert row["speedup"] == pytest.approx(row["torch_ms"] / row["ms"])
        assert row["times_cpu"] is None
    right = kvlab.attention_backward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv = right(*args, **kwargs)
        return dq, 1.01 * dk, dv

    monkeypatch.setattr(kvlab, "attention_backward", wrong)
    with pytest.raises(RuntimeError, match=r"backward=True, beside torch, is wrong, so it was not timed"):
        benchmark.run("attention", SMALL)


def test_the_figure_of_attention_has_the_calls_that_differ_in_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvlab.cli.benchmark import command

    row = {"heads": "8/4", "batch": 1, "head_dim": 128, "causal": True, "torch_ms": 3.0, "times_cpu": 9.0}
    rows = [
        row | {"tokens": tokens, "direction": direction, "ms": 2.0}
        for tokens in (512, 64)
        for direction in ("forward", "backward")
    ]
    rows.append(rows[0] | {"tokens": 2048, "heads": "64/8"})
    forward, backward = draw_attention(rows).axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in forward.lines}
    assert curves == {
        "kvlab": [[64, 2], [512, 2]],
        "torch, its faster backend": [[64, 3], [512, 3]],
        "kvlab on the CPU beside it": [[64, 18], [512, 18]],
    }
    assert len(backward.lines) == 3
    monkeypatch.setattr(benchmark, "run", lambda case, options: {"rows": rows, "note": ""})
    command("flash_attention", device="cpu", figure=tmp_path / "figure.png")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
    with pytest.raises(
        ValueError, match="figure='x': attention, grouped and decode on cuda have one, not packing"
    ):
        command("packing", device="cpu", figure=Path("x"))


def test_cases_of_attention_hold_the_sweeps_and_no_case_twice() -> None:
    from kvlab.lab.benchmark.attention import CASES, release_cases

    assert len(set(CASES)) == len(CASES) == 17
    assert {case.tokens for case in CASES} == {64, 128, 256, 512, 1024, 2048}
    assert {case.heads for case in CASES} >= {(4, 4), (8, 4), (8, 1), (32, 8), (64, 8)}
    assert {(case.head_dim, case.causal) for case in CASES if case.tokens == 2048} >= {
        (64, False),
        (128, True),
    }
    assert {case.batch for case in CASES} == {1, 2, 4, 8}
    assert max(case.tokens for case in release_cases("cuda")) == 128 * 1024


def test_a_target_is_several_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from kvlab.cli.benchmark import command
    from kvlab.lab import targets

    def measure(case: str, options: Options) -> dict[str, Any]:
        return {"case": case, "rows": [{"device": options.device, "ms": 1.0, "p5_ms": 0.5}], "note": "a note"}

    monkeypatch.setattr(benchmark, "run", measure)
    monkeypatch.setattr(targets, "machine", lambda device, min_vram: targets.Machine(("cpu", "cuda")))
    command("all", device="auto", as_json=True)
    results = json.loads(capsys.readouterr().out)["results"]
    measured = [(one["case"], one["rows"][0]["device"]) for one in results]
    assert len(measured) == 2 * len(benchmark.CASES) - 1
    assert ("allocator", "cuda") not in measured
    machine = targets.Machine(("cpu",), {"cuda": "no GPU here"})
    monkeypatch.setattr(targets, "machine", lambda device, min_vram: machine)
    command("packed", device="auto", verbose=True)
    printed = capsys.readouterr().out
    assert printed.count("a note") == len(benchmark.cases_of("packed"))
    assert "p5 ms" in printed
    assert "skipped: cuda: no GPU here" in printed
    with pytest.raises(ValueError, match=r"several results go into one \.json file"):
        command("packed", output=tmp_path / "out.csv")


def test_a_result_says_where_it_comes_from() -> None:
    result = benchmark.run("packing", SMALL)
    source = result["provenance"]
    assert source["settings"] == vars(replace(SMALL, contexts="128", seqlens="256", tiny=True))
    assert source["packages"]["numba"]
    assert source["cpu"]["threads"] >= 1
    assert source["git"] is None or len(source["git"]["commit"]) == 40


def test_files(tmp_path: Path) -> None:
    result = {"rows": [{"a": 1, "b": "x"}, {"a": 2.5, "b": None}]}
    results.write(result, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == result
    results.write(result, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "x"], ["2.5", ""]]
    with pytest.raises(ValueError, match=r"must end in \.json or \.csv"):
        results.write(result, tmp_path / "out.txt")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError, match=r"folder\.json"):
        results.write(result, tmp_path / "folder.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "out.csv", "out.json"]


def test_bad_options() -> None:
    with pytest.raises(
        ValueError, match="case='speed' is unknown; known are packing, codec, allocator, decode, attention"
    ):
        benchmark.run("speed", SMALL)
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        benchmark.run("packing", Options(threads=0))
    with pytest.raises(ValueError, match=f"threads=99999: this process may use {cpu().threads} at most"):
        benchmark.run("packing", Options(threads=99999))
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        time_in_turns({}, repeats=0)


def test_calls_take_turns() -> None:
    order: list[str] = []
    timings = time_in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2, warm_up=1
    )
    assert order == ["a", "b"] * 3
    assert len(timings["a"].seconds) == 2


def test_figures_of_a_timing() -> None:
    timing = Timing((3.0, 1.0, 2.0, 4.0, 5.0))
    assert (timing.median, timing.percentile(0), timing.percentile(100)) == (3, 1, 5)
    assert timing.ratio_to(Timing((3.0, 3.0, 4.0, 8.0, 50.0))) == 2
    with pytest.raises(ValueError, match="cannot be compared"):
        timing.ratio_to(Timing((1.0,)))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvlab.cli.benchmark import command

    command("packing", array_size=2**16, threads=1, repeats=1, output=tmp_path / "out.json")
    assert "times numpy" in capsys.readouterr().out.replace("\n", " ")
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 16
    command("packing", array_size=2**16, threads=1, repeats=1, as_json=True)
    assert json.loads(capsys.readouterr().out)["case"] == "packing"
    with pytest.raises(NotImplementedError, match="the case allocator runs on cpu"):
        command("allocator", device="cuda")


@pytest.mark.parametrize(
    ("program", "command"),
    [("benchmarks/resident_memory/run.py", "python benchmarks/resident_memory/run.py"), ("kvlab", "kvlab")],
)
def test_a_result_says_what_made_it(program: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(Path(__file__).parents[3] / program), "--size", "1GiB"])
    assert results.provenance()["command"] == f"{command} --size 1GiB"


def test_a_result_does_not_say_where_its_machine_keeps_files(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["sweep", "run", "/home/me/first", "--output=/tmp/out.json", "results/second", "a=/b"]
    monkeypatch.setattr("sys.argv", ["kvlab", *arguments])
    command = "kvlab sweep run first --output=out.json results/second a=/b"
    assert results.provenance()["command"] == command


def test_a_copy_without_git_is_told_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "__file__", str(tmp_path / "kvlab" / "lab" / "results.py"))
    monkeypatch.delenv("KVLAB_COMMIT", raising=False)
    assert results._git_state() is None
    for told, modified in (("0123abcd", False), ("0123abcd-modified", True)):
        monkeypatch.setenv("KVLAB_COMMIT", told)
        assert results._git_state() == {"commit": "0123abcd", "modified": modified}
