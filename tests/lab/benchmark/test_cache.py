"""`kvlab benchmark cache`: rows, guards, and the joined table."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvlab import cli
from kvlab.lab.ablation import page_attention
from kvlab.lab.benchmark import cache as module
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.cache import BASELINES, benchmark_cache
from kvlab.lab.timing import Timing

RUNNER = CliRunner()
SMALL = Options(contexts="128", repeats=1, tiny=True)


def test_four_baselines_are_compared_by_context() -> None:
    rows = benchmark_cache(replace(SMALL, contexts="128,256", repeats=2))
    assert [row["baseline"] for row in rows] == [*BASELINES, *BASELINES]
    ratio = {row["baseline"]: float(row["memory_ratio"] or 0) for row in rows}
    assert ratio["fp16"] == 1
    assert 0.5 < ratio["uniform_8bit"] < 0.55
    assert 0.25 < ratio["uniform_4bit"] < 0.3
    for row in rows:
        assert float(row["throughput_tps"] or 0) == pytest.approx(1e3 / float(row["avg_latency_ms"] or 0))
        assert (row["speedup"] == 1) == (row["baseline"] == "fp16")
    (alone,) = benchmark_cache(replace(SMALL, baseline="uniform_8bit"))
    assert alone["speedup"] is None
    with pytest.raises(ValueError, match="baseline='int8' is unknown"):
        benchmark_cache(replace(SMALL, baseline="int8"))


def test_wrong_and_impossible_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = page_attention.packed_attention

    def shifted(q: Any, pages: Any, **options: Any) -> Any:
        found = right(q, pages, **options)
        return found if options else found._replace(out=np.roll(found.out, 1, axis=2))

    with monkeypatch.context() as patch:
        patch.setattr(page_attention, "packed_attention", shifted)
        with pytest.raises(RuntimeError, match="it was not timed"):
            benchmark_cache(replace(SMALL, baseline="uniform_4bit"))
    monkeypatch.setattr(page_attention, "time_in_turns", lambda calls, repeats: {"layers": Timing((1e-9,))})
    with pytest.raises(RuntimeError, match="did not do the work"):
        benchmark_cache(replace(SMALL, baseline="uniform_4bit"))


def test_files_of_single_baselines_are_joined(tmp_path: Path) -> None:
    for name in ("fp16", "mixed"):
        output = tmp_path / f"benchmark_{name}.csv"
        options = ["--baseline", name, "--context-lengths", "128", "--num-iterations", "1"]
        result = RUNNER.invoke(cli.app(), ["benchmark", "cache", *options, "--output", str(output)])
        assert result.exit_code == 0, result.output
    result = RUNNER.invoke(cli.app(), ["report", "compare", str(tmp_path)])
    assert result.exit_code == 0
    (row,) = csv.DictReader((tmp_path / "benchmark_comparison.csv").open())
    assert set(row) == {"context_length"} | {
        f"{name}_{column}"
        for name in ("fp16", "mixed")
        for column in ("avg_latency_ms", "throughput_tps", "allocated_gb")
    }
    result = RUNNER.invoke(cli.app(), ["report", "compare", str(tmp_path / "absent")])
    assert "kvlab benchmark cache writes them" in str(result.exception)


def test_the_old_name_of_the_mixed_baseline_works_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="baseline='smartkv_mixed' is now called 'mixed'"):
        (row,) = benchmark_cache(replace(SMALL, baseline="smartkv_mixed"))
    assert row["baseline"] == "mixed"
    names = ("context_length", "baseline", "avg_latency_ms", "throughput_tps", "allocated_gb")
    for name, latency in (("smartkv_mixed", 1), ("mixed", 2)):
        values = ",".join(map(str, (128, name, latency, 1, 1)))
        (tmp_path / f"benchmark_{name}.csv").write_text(f"{','.join(names)}\n{values}\n")
        assert [row["mixed_avg_latency_ms"] for row in module.compare(tmp_path)] == [latency]
