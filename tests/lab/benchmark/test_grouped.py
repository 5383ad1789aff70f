"""`kvlab benchmark grouped` and `kvlab profile grouped`, in small form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.cli.benchmark import command
from kvlab.lab.benchmark import grouped
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.profiling import calls_of

SMALL = Options(threads=1, repeats=1, seqlens="256", num_groups="2,3")


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grouped.CONFIGS, "llama3-8b", (4, 2, 16))


def test_rows_say_what_was_read_and_how_fast() -> None:
    rows = grouped.benchmark_grouped(SMALL)
    assert [(row["groups"], row["implementation"]) for row in rows] == [
        (groups, name) for groups in (2, 3) for name in ("separate", "listed", "paired")
    ]
    separate, listed, paired = rows[:3]
    of_key = 2 * 2 * 16 * 4 / 1e9
    assert separate["speedup"] == 1
    assert separate["kv_gb"] == pytest.approx((64 + 208) * of_key)
    assert listed["kv_gb"] == paired["kv_gb"] == pytest.approx(208 * of_key)
    assert all(float(row["tflops"] or 0) > 0 for row in rows)
    assert {row["read_gb"] for row in rows} == {None}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = grouped.kvlab.grouped_attention_varlen
    monkeypatch.setattr(
        grouped.kvlab,
        "grouped_attention_varlen",
        lambda *a, **o: [2 * x for x in right(*a, **o)],
        raising=False,
    )
    with pytest.raises(RuntimeError, match="256 tokens, 2 groups, separate"):
        grouped.benchmark_grouped(SMALL)


def test_bytes_that_ncu_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of separate calls are sums over groups, in the order of launches."""
    lines = ['"ID","Kernel Name","Metric Name","Metric Value"']
    for number, (read, hits) in enumerate(((1e9, 90), (3e9, 70), (2.5e9, 60), (2e9, 50))):
        lines.append(f'"{number}","attend","dram__bytes_read.sum","{read:,.0f}"')
        lines.append(f'"{number}","attend","lts__t_sector_hit_rate.pct","{hits}"')
    ncu, answer = tmp_path / "ncu", "\n".join(["==PROF== Connected", *lines])
    ncu.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat << 'END'\n{answer}\nEND\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    counted, reason = grouped.bytes_read(512, [(32, 128), (32, 416)], (4, 2, 16))
    assert reason is None
    assert counted == {
        "separate": {"read_gb": 4.0, "l2_hits": 80.0},
        "listed": {"read_gb": 2.5, "l2_hits": 60.0},
        "paired": {"read_gb": 2.0, "l2_hits": 50.0},
    }
    asked = (tmp_path / "asked").read_text()
    assert asked.endswith("-m kvlab.lab.benchmark.grouped 4 2 16 512 0 32,128 32,416\n")
    monkeypatch.setenv("PATH", "/nowhere")
    assert grouped.bytes_read(512, [(32, 128)], (4, 2, 16)) == ({}, "ncu (Nsight Compute) is not on the path")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": "17"}, "num_groups='17': a call has 1 to 16 groups"),
        ({"seqlens": "8"}, "seqlens='8': lengths are at least 256 tokens"),
        ({"config": "gpt"}, "config='gpt' is not supported"),
    ],
)
def test_refuses(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped.benchmark_grouped(replace(SMALL, **change))


def test_the_command_writes_json_rows_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = {"seqlens": "256,512", "num_groups": "2", "repeats": 1, "threads": 1}
    files = {"output": tmp_path / "g.json", "csv": tmp_path / "g.csv", "figure": tmp_path / "g.png"}
    command("grouped", device="cpu", **options, **files)  # type: ignore[arg-type]
    assert (tmp_path / "g.csv").read_text().startswith("tokens,groups,heads,implementation")
    assert (tmp_path / "g.svg").stat().st_size > 1000
    assert '"case": "grouped"' in (tmp_path / "g.json").read_text()
    assert "paired" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"csv='.*': the rows of one case go into one .csv file"):
        command("grouped", device="cpu", csv=tmp_path / "g.txt", **options)  # type: ignore[arg-type]


def test_calls_to_profile() -> None:
    calls = calls_of("grouped", "cpu")
    assert [call.name for call in calls] == ["grouped, separate", "grouped, listed", "grouped, paired"]
    assert calls[0].nbytes > calls[1].nbytes == calls[2].nbytes
