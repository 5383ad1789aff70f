"""`kvlab ablate`: the case that options stand for, JSON in a file, one line for wrong options."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlab import cli
from kvlab.cli.ablate import command, make_case
from kvlab.errors import OutOfMemory
from kvlab.lab.ablation import memory
from kvlab.lab.ablation.grid import Geometry
from kvlab.ladder import BITS_IN_BLOCKS, BITS_OF_WIDTHS, parse_bits

RUNNER = CliRunner()
GEOMETRY = [*("--num-layers", "2", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "64")]


def test_widths_are_those_of_caches_that_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    default = inspect.signature(command).parameters["bits"].default
    monkeypatch.setenv("KVLAB_TINY", "1")
    no_shape = (None, None, None, None)
    cases = [
        make_case(0.3, default, 1024, packed, "cpu", 0, shape)
        for packed in (True, False)
        for shape in (no_shape, (1, 2, 1, 64))
    ]
    wanted = [BITS_IN_BLOCKS, *[BITS_OF_WIDTHS] * 3]
    assert [parse_bits(case.bits, 1) for case in cases] == [parse_bits(bits, 1) for bits in wanted]


def test_a_geometry_gives_json_on_screen_and_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    options = [*GEOMETRY, "--context-length", "256", "--budget", "0.4", "--no-bit-packing"]
    result = RUNNER.invoke(cli.app(), ["ablate", *options, "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert "b0.4_bits2_k3v2_k4v3_k8v4_8_ctx256_unpacked: synthetic keys and values" in result.output
    written = json.loads(path.read_text())
    assert written["config"]["geometry"] == {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    assert written["config"]["use_packing"] is False
    parts = ("config", "memory", "quality", "performance", "compression", "provenance")
    assert all(written[part] for part in parts)


def test_an_infeasible_budget_says_what_would_do() -> None:
    result = RUNNER.invoke(cli.app(), ["ablate", *GEOMETRY, "--bits", "8", "--context-length", "256"])
    assert result.exit_code == 0
    assert "infeasible: the smallest width takes more than the budget: 0.5" in result.output


def test_options_become_a_case() -> None:
    none = (None, None, None, None)
    assert make_case(0.5, "2,4", 2048, True, "cuda:0", 3, none).device == "cuda"
    assert make_case(0.5, "2,4", 1 << 20, True, "cpu", 0, none).model is None
    assert make_case(0.5, "2,4", 512, True, "cpu", 0, (2, 4, None, 64)).geometry == Geometry(2, 4, 4, 64)
    with pytest.raises(ValueError, match="give all three or none"):
        make_case(0.5, "2,4", 512, True, "cpu", 0, (2, None, None, None))
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=1"):
        make_case(0.5, "2,4", 512, True, "cuda:1", 0, none)


def test_memory_and_time_are_said_first_and_what_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["ablate", *GEOMETRY, "--context-length", "256", "--json"]
    result = RUNNER.invoke(cli.app(), options)
    assert re.search(r"memory: up to .*\ntime: about \d+ s in one process", result.stderr)
    assert json.loads(result.stdout)["status"] == "ok"
    monkeypatch.setattr(memory, "memory_available", lambda: 1 << 30)
    path = tmp_path / "case.json"
    result = RUNNER.invoke(cli.app(), ["ablate", "--context-length", "1M", "--output", str(path)])
    assert isinstance(result.exception, OutOfMemory)
    assert "needs about" in str(result.exception)
    assert not path.exists()


def test_tasks_print_a_table_each_and_are_known_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    path = tmp_path / "tasks.json"
    options = ["ablate", "--context-length", "256", "--num-samples", "1", "--output", str(path)]
    result = RUNNER.invoke(cli.app(), [*options, "--budget", "0.5", "--tasks", "tracking,floor"])
    assert result.exit_code == 0, result.output
    assert "tracking" in result.output
    written = json.loads(path.read_text())["tasks"]
    assert set(written) == {"tracking", "floor"}
    assert {"full precision", "held 0.5", "one width 8"} <= set(written["tracking"])
    assert f"{written['tracking']['held 0.5']['log_p_change']:.4g}" in result.output
    assert "…" not in result.output
    wrong = RUNNER.invoke(cli.app(), [*options, "--tasks", "neddle"])
    assert isinstance(wrong.exception, ValueError)
    assert "neddle: not known" in str(wrong.exception)
    plain = RUNNER.invoke(cli.app(), [*options, "--tasks", "floor", "--no-bit-packing"])
    assert "leave out --no-bit-packing" in str(plain.exception)
    long = RUNNER.invoke(cli.app(), ["ablate", "--context-length", "8K", "--tasks", "floor"])
    assert "are more than the" in str(long.exception)
    monkeypatch.setattr(memory, "memory_available", lambda: 1 << 20)
    large = RUNNER.invoke(cli.app(), [*options, "--tasks", "floor"])
    assert isinstance(large.exception, OutOfMemory)


@pytest.mark.parametrize("budget", ["40%", "0.4", "6.4bpe"])
def test_a_budget_is_written_as_everywhere(budget: str, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    options = ["ablate", *GEOMETRY, "--context-length", "256", "--budget", budget, "--output", str(path)]
    assert RUNNER.invoke(cli.app(), options).exit_code == 0
    assert json.loads(path.read_text())["config"]["budget"] == 0.4
    refused = RUNNER.invoke(cli.app(), ["ablate", "--budget", "6GiB"])
    assert "'6GiB' is bytes" in " ".join(refused.output.split())


def test_tasks_read_other_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    path = tmp_path / "tasks.json"
    options = ["ablate", "--context-length", "128", "--num-samples", "1", "--output", str(path)]
    result = RUNNER.invoke(cli.app(), [*options, "--tasks", "floor", "--text", "manual"])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["text"] == "manual of Python"
    alone = RUNNER.invoke(cli.app(), [*options, "--text", "code"])
    assert "is read with --tasks" in str(alone.exception)


def test_tasks_of_short_calls_and_of_equal_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    path = tmp_path / "tasks.json"
    options = ["ablate", "--context-length", "256", "--num-samples", "1", "--output", str(path)]
    tasks = "short,outliers-short,large-outliers-late,equal-bytes,tracking"
    result = RUNNER.invoke(cli.app(), [*options, "--budget", "0.5", "--tasks", tasks])
    assert result.exit_code == 0, result.output
    assert "tracking, log p change by depth" in result.output
    written = json.loads(path.read_text())["tasks"]
    assert list(written) == tasks.split(",")
    assert 0 <= written["short"]["held 0.5"]["unused"] < 0.1
    equal = written["equal-bytes"]
    assert len(equal) == 6
    for name, figures in equal.items():
        if not name.startswith("held"):
            own = equal[f"held, bytes of {name}"]["bits_last"]
            assert 0.9 * figures["bits_last"] < own <= figures["bits_last"]
