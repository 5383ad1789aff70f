"""Cubins on a device: launches on the caller's stream, large shared memory, figures the driver confirms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.jit.build import Built, arch_of, build
from kvlab.jit.launch import Kernel, load
from tests.spilling_kernel import SPILLS

cupy = pytest.importorskip("cupy")

SOURCE = (
    SPILLS
    + """
struct Large { unsigned long long word[16]; };

// out[i] = sum of everything that came in by value
extern "C" __global__ void by_value(double* out, const __grid_constant__ Large large, short s, float f,
                                    char c) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = double(large.word[15]) + s + f + c + VALUE;
}
// one block: out[i] = in[reversed i] by way of dynamic shared memory, after `spins` clock ticks
extern "C" __global__ void reversed_by_shared(float* out, const float* in, int count, long long spins) {
  extern __shared__ float s[];
  __shared__ float unused_but_kept[256];
  const long long start = clock64();
  while (clock64() - start < spins) {}
  for (int i = threadIdx.x; i < count; i += blockDim.x) s[i] = in[i];
  unused_but_kept[threadIdx.x] = 0.0f;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = s[count - 1 - i] + unused_but_kept[i % 256];
}
"""
)


def _arch() -> str:
    capability = cupy.cuda.Device().compute_capability
    return arch_of(int(capability[:-1]), int(capability[-1]))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "some.cu").write_text(SOURCE)
    return build("some", {"VALUE": 1000}, _arch(), root=tmp_path)


def test_arguments_arrive_by_value(built: Built) -> None:
    large = np.arange(16, dtype=np.uint64).view("V128")[0]
    out = cupy.zeros(64, np.float64)
    load(built, "by_value")((2,), (32,), (out.data.ptr, large, np.int16(-300), np.float32(0.5), np.int8(-7)))
    assert cupy.asnumpy(out).tolist() == [15 - 300 + 0.5 - 7 + 1000] * 64


@pytest.mark.parametrize("shared_bytes", [16, 46 * 1024, 48 * 1024, 90 * 1024, 8 * 1024])
def test_shared_memory_of_any_size_is_had(built: Built, shared_bytes: int) -> None:
    count = shared_bytes // 4
    given = cupy.arange(count, dtype=np.float32)
    out = cupy.full(count, np.nan, np.float32)
    arguments = (out.data.ptr, given.data.ptr, np.int32(count), np.int64(0))
    load(built, "reversed_by_shared")((1,), (256,), arguments, shared_bytes)
    np.testing.assert_array_equal(cupy.asnumpy(out), np.arange(count, dtype=np.float32)[::-1])


def test_more_shared_memory_than_the_device_has_is_a_value_error(built: Built) -> None:
    kernel = load(built, "reversed_by_shared")
    out = cupy.zeros(1, np.float32)
    with pytest.raises(
        ValueError, match=r"cannot give 300000 bytes of dynamic shared memory beside 1024 static"
    ):
        kernel((1,), (256,), (out.data.ptr, out.data.ptr, np.int32(1), np.int64(0)), 300_000)
    assert not out.any()


def test_a_launch_goes_to_the_stream_it_is_given(built: Built) -> None:
    kernel, stream = load(built, "reversed_by_shared"), cupy.cuda.Stream(non_blocking=True)
    given, out = cupy.ones(8, np.float32), cupy.zeros(8, np.float32)
    cupy.cuda.Device().synchronize()
    kernel((1,), (256,), (out.data.ptr, given.data.ptr, np.int32(8), np.int64(10**9)), 32, stream.ptr)
    assert not stream.done, "the launch did not return at once, or went to another stream"
    cupy.cuda.get_current_stream().synchronize()
    assert not stream.done
    stream.synchronize()
    assert cupy.asnumpy(out).tolist() == [1] * 8


def test_an_empty_grid_is_no_launch(built: Built) -> None:
    out = cupy.zeros(1, np.float64)
    arguments = (out.data.ptr, np.zeros(1, "V128")[0], np.int16(1), np.float32(1), np.int8(1))
    load(built, "by_value")((0,), (32,), arguments)
    assert not out.any()


def _attributes(kernel: Kernel) -> tuple[int, int, int]:
    numbers = {"registers": 4, "shared_bytes": 1, "local_bytes": 3}  # CUfunction_attribute
    get: Any = cupy.cuda.driver.funcGetAttribute
    registers, shared, local = (get(number, kernel._function.ptr) for number in numbers.values())
    return registers, shared, local


@pytest.mark.parametrize("entry", ["by_value", "reversed_by_shared", "spills"])
def test_the_driver_agrees_with_what_the_cubin_says(built: Built, entry: str) -> None:
    kernel = load(built, entry)
    takes = kernel.resources
    assert _attributes(kernel) == (takes.registers, takes.shared_bytes, takes.local_bytes)


def test_a_kernel_is_loaded_once_for_each_device(built: Built) -> None:
    assert load(built, "by_value") is load(built, "by_value", device=0)
    last = cupy.cuda.runtime.getDeviceCount() - 1
    current = cupy.cuda.runtime.getDevice()
    assert load(built, "by_value", device=last).device == last
    assert cupy.cuda.runtime.getDevice() == current


def test_a_launch_on_every_device_there_is(built: Built) -> None:
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(device):
            out = cupy.zeros(32, np.float64)
            arguments = (out.data.ptr, np.zeros(1, "V128")[0], np.int16(1), np.float32(0), np.int8(0))
            load(built, "by_value")((1,), (32,), arguments)
            assert cupy.asnumpy(out).tolist() == [1001] * 32


def test_capture_into_a_graph(built: Built) -> None:
    kernel, stream = load(built, "by_value"), cupy.cuda.Stream(non_blocking=True)
    out = cupy.zeros(32, np.float64)
    cupy.cuda.Device().synchronize()
    arguments = (out.data.ptr, np.zeros(1, "V128")[0], np.int16(1), np.float32(0), np.int8(0))
    with stream:
        stream.begin_capture()
        kernel((1,), (32,), arguments, 0, stream.ptr)
        graph = stream.end_capture()
    assert not out.any()
    graph.launch(stream)
    stream.synchronize()
    assert cupy.asnumpy(out).tolist() == [1001] * 32


def test_a_process_that_used_kernels_ends_quietly(built: Built, tmp_path: Path) -> None:
    code = f"""
import cupy, numpy as np
from pathlib import Path
from kvlab.jit.build import build
from kvlab.jit.launch import load
kernel = load(build("some", {{"VALUE": 1000}}, {built.arch!r}, root=Path({str(tmp_path)!r})), "by_value")
out = cupy.zeros(32, np.float64)
kernel((1,), (32,), (out.data.ptr, np.zeros(1, "V128")[0], np.int16(1), np.float32(0), np.int8(0)))
print(out.sum())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "32032.0\n", "")
