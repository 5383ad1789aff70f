"""kvlab.device and kvlab.environment, with and without GPU, driver and CUDA packages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvlab import device, environment
from kvlab.errors import OutOfMemory


@pytest.fixture(autouse=True)
def fresh_probe() -> Iterator[None]:
    """Each test asks the hardware again."""
    device._probe.cache_clear()
    yield
    device._probe.cache_clear()


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


class FakeDriver(ModuleType):
    """The part of `cuda.bindings.driver` that is asked, with two GPUs."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="count",
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE="clock",
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH="bus",
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE="l2",
    )

    def __init__(self, init: Result = Result.CUDA_SUCCESS, count: int = 2) -> None:
        super().__init__("cuda.bindings.driver")
        self.init, self.count = init, count

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.count

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetName(self, length: int, handle: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, f"GPU {handle}\0and what lay there".encode()

    def cuDeviceTotalMem(self, handle: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 80 << 30

    def cuDeviceGetAttribute(self, key: str, handle: int) -> tuple[Any, ...]:
        memory = {"clock": 2_619_000, "bus": 5120, "l2": 50 << 20}
        return Result.CUDA_SUCCESS, {"major": 9, "minor": handle, "count": 132, **memory}[key]

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 12080


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: ModuleType | None) -> None:
    bindings = None
    if driver is not None:
        bindings = ModuleType("cuda.bindings")
        bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, FakeDriver())
    assert device.gpus() == (
        device.Gpu(0, "GPU 0", (9, 0), 132, 80 << 30, 2_619_000, 5120, 50 << 20),
        device.Gpu(1, "GPU 1", (9, 1), 132, 80 << 30, 2_619_000, 5120, 50 << 20),
    )
    assert device.gpus_missing_because() is None
    assert device.compute_capability(1) == (9, 1)
    assert device.driver_cuda_version() == (12, 8)
    with pytest.raises(ValueError, match="index=2: there are 2 GPUs"):
        device.compute_capability(2)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "cuda-bindings is not installed: pip install"),
        (FakeDriver(init=Result.CUDA_ERROR_NO_DEVICE), "no usable NVIDIA driver: CUDA_ERROR_NO_DEVICE"),
        (FakeDriver(count=0), "the NVIDIA driver sees no GPU"),
    ],
)
def test_no_gpu_is_no_error_and_says_why(
    monkeypatch: pytest.MonkeyPatch, driver: ModuleType | None, reason: str
) -> None:
    use_driver(monkeypatch, driver)
    assert device.gpus() == ()
    assert reason in (device.gpus_missing_because() or "")
    with pytest.raises(ValueError, match=r"index=0: there are 0 GPUs \("):
        device.compute_capability(0)


def test_memory_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    job, step = tmp_path / "job", tmp_path / "job" / "step"
    step.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    assert device._cgroup_memory(tmp_path, membership) == (sys.maxsize, 0)
    for folder, limit, used in ((step, "max", 50), (job, 100, 60), (tmp_path, 1000, 100)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\nshmem 3\n")
    assert device._cgroup_memory(tmp_path, membership) == (100, 60)
    # Files that were read fill the job's memory; the kernel gives it back when it is asked for.
    (job / "memory.stat").write_text(
        "anon 5\nfile 48\nactive_file 20\ninactive_file 25\nslab_reclaimable 4\n"
    )
    assert device._cgroup_memory(tmp_path, membership) == (100, 11)
    (job / "memory.stat").write_text("active_file 80\n")  # read at another moment than what is used
    assert device._cgroup_memory(tmp_path, membership) == (100, 0)
    assert device._cgroup_memory(tmp_path, tmp_path / "absent") == (sys.maxsize, 0)


def test_memory_is_capped_by_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cgroup_memory", lambda: (1 << 20, 1 << 19))
    assert (device.memory_total(), device.memory_available()) == (1 << 20, 1 << 19)


@pytest.mark.parametrize(
    "allocate", [lambda: np.empty(1 << 62, np.uint8), lambda: torch.empty(1 << 60, dtype=torch.uint8)]
)
def test_failed_allocation_is_our_out_of_memory(allocate: Any) -> None:
    with pytest.raises(OutOfMemory, match="pages: ") as caught, device.translated_out_of_memory("pages"):
        allocate()
    assert caught.value.__cause__ is not None


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    for error in (RuntimeError("shape mismatch"), ValueError("can't allocate memory"), OutOfMemory("inner")):
        with pytest.raises(type(error)) as caught, device.translated_out_of_memory("pages"):
            raise error
        assert caught.value is error


def test_report_is_json_and_complete() -> None:
    report = environment.report()
    assert json.loads(json.dumps(report))["cpu"]["threads"] >= 1
    assert report["packages"]["numpy"] == np.__version__
    assert (report["packages"]["torch"] or "").partition("+")[0] == torch.__version__.partition("+")[0]
    assert report["cuda"]["torch"] == torch.version.cuda
    assert bool(report["gpus"]) == (report["gpus_missing_because"] is None)


@pytest.mark.parametrize(
    ("packages", "cuda", "expected"),
    [
        ({"cupy-cuda13x": "14.2.0", "cuda-bindings": "13.3.1"}, {"nvrtc": "13.0", "driver": "13.0"}, None),
        ({"cupy-cuda12x": "14.2.0", "cuda-bindings": "12.9.4"}, {"nvrtc": "12.9", "driver": "13.0"}, None),
        ({"cupy-cuda12x": "14.2.0", "cuda-bindings": "13.3.1"}, {}, "CUDA 12 .*CUDA 13 .*mixed"),
        ({"cupy-cuda13x": "14.2.0"}, {"torch": "12.8"}, r"CUDA 12 \(torch's CUDA 12.8\).*mixed"),
        (
            {"cupy-cuda13x": "14.2.0"},
            {"nvrtc": "13.0", "driver": "12.8"},
            r"driver supports .*12.8.*kvlab\[cu12\]",
        ),
        ({}, {}, "there is a GPU and no CuPy"),
    ],
)
def test_cuda_parts_that_do_not_fit_are_named(
    packages: dict[str, str | None], cuda: dict[str, str | None], expected: str | None
) -> None:
    problems = environment.cuda_problems(packages, cuda, has_gpu=True)
    assert len(problems) == (expected is not None)
    assert expected is None or re.search(expected, problems[0])


def test_headers_are_read_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's headers hold bytes that are neither ASCII nor UTF-8."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    (tmp_path / "cuda.h").write_bytes(b"// \xa9 \xe2\x80\x9cquoted\xe2\x80\x9d\n#define CUDA_VERSION 13010\n")
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: str(tmp_path))
    assert environment._headers_version() == "13.1"
