"""`kvlab test`, `validate` and `clean`, and gpu-test.sh, as on a machine without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

import kvlab
from kvlab import cli, device
from kvlab.jit import native
from kvlab.jit.cubin import Resources
from kvlab.jit.launch import Kernel, PreparedLaunch, PreparedLaunches
from kvlab.lab import accuracy, cleaning, profiling, targets, testing, validate
from tests import conftest

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]
SMALL_GPU = device.Gpu(0, "A small GPU", (9, 0), 10, 2 << 30)


def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.device, "gpus", lambda: ())
    monkeypatch.setattr(targets.device, "gpus_missing_because", lambda: "there is none in this test")


def test_where_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_gpu(monkeypatch)
    assert targets.machine("auto").skipped == {"cuda": "there is none in this test"}
    with pytest.raises(NotImplementedError, match="device='cuda': there is none in this test; --device cpu"):
        targets.machine("cuda")
    monkeypatch.setattr(targets.device, "gpus", lambda: (SMALL_GPU,))
    reason = targets.machine("auto", min_vram=3).skipped["cuda"]
    assert reason == "A small GPU has 2.00 GiB, --min-vram asks for 3 GiB"
    with pytest.raises(ValueError, match="device='tpu' is unknown; known are auto, cpu, cuda"):
        targets.machine("tpu")
    with pytest.raises(ValueError, match="target='speed' is unknown; known are flash_attention, attention"):
        targets.resolve("speed")
    with pytest.raises(ValueError, match="ternary, grouped, engine, all"):
        targets.resolve("group", more=targets.PARTS)


def test_validate_prints_errors_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_gpu(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    result = RUNNER.invoke(cli.app(), ["validate", "flash_attention"])
    assert result.exit_code == 0, result.output
    assert "skipped: everything on cuda: there is none in this test" in result.output
    assert "kernel attention, backend cpu: right" in result.output
    for word in ("mae", "rmse", "max error", "cosine", "bfloat16", "passed"):
        assert word in result.output


def test_validate_as_json_holds_the_thresholds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _no_gpu(monkeypatch)
    path = tmp_path / "out.json"
    result = json.loads(
        RUNNER.invoke(cli.app(), ["validate", "attention", "--json", "--output", str(path)]).output
    )
    assert result == json.loads(path.read_text())
    assert [row["dtype"] for row in result["rows"]] == 2 * ["float32"] + 2 * ["float16"] + 2 * ["bfloat16"]
    for row in result["rows"]:
        if row["dtype"] == "float32":
            assert max(row["mae"], row["rmse"]) < 1e-6
        else:
            assert row["max_error"] <= row["limit"]
        assert row["cosine"] > 0.999


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wrong_attention_does_not_pass(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a few thousandths in float32, by shifted heads in any dtype."""
    right = kvlab.attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        return out * np.float32(1.00001) if out.dtype == np.float32 else np.roll(out, 1, axis=2)

    monkeypatch.setattr(kvlab, "attention", wrong)
    rows, _ = accuracy.validate_attention("cpu", accuracy.SHAPES[:2])
    assert {row["passed"] for row in rows if row["dtype"] == dtype} == {"NO"}


def test_validate_fails_if_a_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_gpu(monkeypatch)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such instruction\nsecond line")

    monkeypatch.setattr(kvlab, "pack_ternary", broken)
    result = RUNNER.invoke(cli.app(), ["validate", "ternary"])
    assert result.exit_code == 1
    assert "kernel pack_ternary, backend cpu: RuntimeError: no such instruction\n" in result.output
    assert "FAILED" in result.output


@pytest.mark.parametrize(
    ("where", "name", "target"),
    [
        (kvlab, "attention", "attention"),
        (kvlab, "attention_backward", "attention"),
        (kvlab, "quantize", "packed"),
        (validate, "packed_attention", "packed"),
        (kvlab, "unpack_ternary", "ternary"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_validate_sees_a_kernel_that_is_wrong(
    where: Any, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(where, name)

    def wrong(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        found = right(*args, backend=backend, **kwargs)
        if backend == "reference":
            return found
        if name == "quantize":
            return replace(found, packed=found.packed ^ 1)
        if name == "packed_attention":
            return found._replace(out=found.out * np.float16(1.01))
        return tuple(x + x for x in found) if isinstance(found, tuple) else found + found

    monkeypatch.setattr(where, name, wrong)
    monkeypatch.setenv("KVLAB_TINY", "1")
    result = validate.run(target, targets.machine("cpu"))
    found = {(kernel["operation"], kernel["backend"]): kernel["result"] for kernel in result["kernels"]}
    operation = {"unpack_ternary": "pack_ternary"}.get(name, name)
    assert found[operation, "cpu"] == "wrong"
    assert {result for (kind, _), result in found.items() if kind != operation} <= {"right"}
    assert not result["passed"]


@pytest.mark.parametrize("key", testing.PATTERNS, ids=str)
def test_every_target_has_tests(key: tuple[str, str]) -> None:
    for pattern in testing.PATTERNS[key]:
        assert list((ROOT / "tests").glob(pattern)), pattern
    assert set(testing.paths(*key)) <= {str(x.relative_to(ROOT)) for x in ROOT.glob("tests/**/test_*.py")}


def test_tests_are_run_and_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _no_gpu(monkeypatch)
    file = tmp_path / "test_sample.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no')\ndef test_c(): assert 0\n"
    )
    monkeypatch.setattr(testing, "paths", lambda target, device: [str(file)])
    result = RUNNER.invoke(cli.app(), ["test", "ternary", "--json"])
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["rows"]
    assert {name: row[name] for name in ("device", "passed", "failed", "skipped")} == {
        "device": "cpu", "passed": 1, "failed": 1, "skipped": 1,
    }  # fmt: skip
    assert json.loads(result.stdout)["skipped"] == {"tests on cuda": "there is none in this test"}


def test_a_number_of_examples_reaches_the_properties(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(
        "from hypothesis import given, settings, strategies as st\n"
        "seen = set()\n"
        "@given(st.integers())\ndef test_a(x): seen.add(x)\n"
        "def test_b(): assert settings().max_examples == 7 and len(seen) <= 7\n"
    )
    monkeypatch.setattr(testing, "paths", lambda target, device: ["-p", "tests.conftest", str(file)])
    assert testing.run("ternary", targets.machine("cpu"), examples=7)["passed"]


def _config(**options: int | None) -> pytest.Config:
    return cast(pytest.Config, SimpleNamespace(option=SimpleNamespace(**options)))


def test_processes_of_a_run_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they inherit; pytest-xdist is not installed here."""
    monkeypatch.setattr(conftest, "cpu", lambda: SimpleNamespace(threads=16))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what the user said stays
    for name in ("OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for option in ({}, {"numprocesses": None}):  # without the plugin, without processes
        conftest.pytest_configure(_config(**option))
        assert "NUMBA_NUM_THREADS" not in os.environ
    conftest.pytest_configure(_config(numprocesses=5))
    assert [os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "OPENBLAS", "NUMBA")] == ["2", "3", "3"]


def test_several_processes_need_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        testing.run("ternary", targets.machine("cpu"), jobs=0)
    monkeypatch.setattr(testing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="jobs=2 needs pytest-xdist"):
        testing.run("ternary", targets.machine("cpu"), jobs=2)


def test_clean_lists_before_it_deletes_and_leaves_what_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cubin, compiled, results = tmp_path / "cache" / "cubin", tmp_path / "numba" / "cpu", tmp_path / "results"
    for folder in (cubin, compiled / "__pycache__", results):
        folder.mkdir(parents=True)
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cleaning, "kernel_folder", lambda kind: tmp_path / kind)
    (cubin / "a").write_bytes(bytes(100))
    ours = [results / "run.json", compiled / "__pycache__" / "a.nbi", cubin / "a"]
    ours[0].write_text(json.dumps({"provenance": {"kvlab": "0.1"}, "rows": []}))
    ours[1].write_bytes(b"x")
    theirs = [results / "notes.json", results / "run.csv", compiled / "__pycache__" / "a.pyc"]
    theirs.append(tmp_path / "cache" / "other")
    for path in theirs:
        path.write_text('{"rows": []}')
    listed = RUNNER.invoke(cli.app(), ["clean", "--results", str(results)])
    assert listed.exit_code == 0
    assert all(path.exists() for path in ours)
    assert "compiled CUDA kernels" in listed.output
    assert "add --yes" in listed.output
    deleted = RUNNER.invoke(cli.app(), ["clean", "--results", str(results), "--yes", "--json"])
    assert json.loads(deleted.output)["found"][0]["bytes"] == 100
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in theirs)
    assert "there is nothing to clean" in RUNNER.invoke(cli.app(), ["clean", "all"]).output
    one_part = RUNNER.invoke(cli.app(), ["clean", "packed"])
    assert one_part.exit_code == 1
    assert "target='packed'" in str(one_part.exception)
    assert RUNNER.invoke(cli.app(), ["clean", "--results", str(ours[0])]).exit_code == 1


def test_profile_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_gpu(monkeypatch)
    result = json.loads(
        RUNNER.invoke(cli.app(), ["profile", "ternary", "--iterations", "1", "--json"]).output
    )
    assert [row["call"] for row in result["rows"]] == ["pack_ternary", "unpack_ternary"]
    for row in result["rows"]:
        assert row["tb_per_s"] == pytest.approx(row["gbyte"] / row["ms"])
    assert (result["kernels"], result["ncu"]) == ([], [])
    assert result["skipped"] == {"everything on cuda": "there is none in this test"}
    names = ["attention", "attention_backward"]
    assert [call.name for call in profiling.calls_of("attention", "cpu")] == names


def test_a_release_is_profiled_on_longer_calls_too() -> None:
    result = profiling.run("ternary", targets.machine("cpu"), repeats=1, release=True)
    assert [row["shape"] for row in result["rows"]] == 2 * ["5 Mi values"] + 2 * ["20 Mi values"]
    assert result["rows"][2]["gbyte"] == 4 * result["rows"][0]["gbyte"]


@pytest.mark.parametrize(("wrong_at", "passed"), [(2, False), (4, True)])
def test_a_kernel_that_is_wrong_once_is_seen(
    wrong_at: int, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = kvlab.unpack_ternary, []

    def sometimes(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        calls.append(backend)
        found = right(*args, backend=backend, **kwargs)
        return found + found if calls.count("cpu") == wrong_at and backend == "cpu" else found

    monkeypatch.setattr(kvlab, "unpack_ternary", sometimes)
    assert validate.run("ternary", targets.machine("cpu"), repeats=3)["passed"] == passed


class _Event:
    def record(self) -> None:
        """As an event of torch."""


def test_launches_are_recorded_and_still_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "new_event", _Event)
    launched: list[Any] = []
    kernel = Kernel(lambda *launch: launched.append(launch), "attend", 0, Resources(40, 0, 0, (8,)))
    seen: list[Any] = []
    driver = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(
        lambda config, function, *_: launched.append(("prepared", function)) or 0
    )
    address = ctypes.cast(driver, ctypes.c_void_p).value
    monkeypatch.setattr(native, "launch_function", lambda: address)
    config = np.zeros(8, np.uint64)
    prepared: Any = object.__new__(PreparedLaunch)
    prepared.kernel, prepared.grid, prepared.block, prepared.shared_bytes = kernel, (4,), (32,), 16
    prepared._table = native.Table([(config.ctypes.data, 7, 0)], [], prepared._go_on)
    both: Any = object.__new__(PreparedLaunches)
    both.launches, both._table = [prepared, prepared], native.Table([], [], both._go_on)
    with profiling.recorded(seen):
        kernel((2,), (128,), [1], 64)
        prepared(5)
        both._table.run(5)
    kernel((3,), (128,), [1])
    assert [launch[0] for launch in launched] == [(2,), *["prepared"] * 3, (3,)]
    assert [launch[:4] for launch in seen] == [
        (kernel, (2,), (128,), 64), *[(kernel, (4,), (32,), 16)] * 3
    ]  # fmt: skip


def test_counters_of_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    metrics = list(profiling._METRICS)
    lines = ['"ID","Kernel Name","Metric Name","Metric Value"']
    lines += [f'"0","attend","{name}","{value}"' for name, value in zip(metrics, (81, 12, 25), strict=True)]
    answer = "\n".join(["==PROF== Connected", *lines])
    ncu.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat << 'END'\n{answer}\nEND\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows, reason = profiling._count("attention", {"prepare", "attend"})
    assert reason is None
    assert "--kernel-name regex:^(attend|prepare)$" in (tmp_path / "asked").read_text()
    assert rows == [
        {"kernel": "attend", "compute_percent": 81.0, "memory_percent": 12.0, "warps_percent": 25.0}
    ]
    ncu.write_text("#!/bin/sh\necho '==ERROR== no permission'; exit 1\n")
    assert profiling._count("attention", {"attend"}) == ([], "==ERROR== no permission")
    monkeypatch.setenv("PATH", "/nowhere")
    assert profiling._count("attention", {"attend"}) == ([], "ncu (Nsight Compute) is not on the path")


def test_the_shell_alias_takes_the_same_words() -> None:
    script = [str(ROOT / "gpu-test.sh")]
    run = subprocess.run(
        [*script, "validate", "ternary", "--device", "cpu"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "skipped: everything on cuda: --device cpu" in run.stdout
    wrong = subprocess.run([*script, "run"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "'run' is not one of test, benchmark, profile, validate, clean" in wrong.stderr
