"""kvlab.arrays, kvlab.device and kvlab.environment on a GPU, with torch and CuPy."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
import torch

from kvlab import arrays, device, environment, new_arrays, views
from kvlab.errors import OutOfMemory

DTYPES = ["uint8", "int32", "int64", "float16", "bfloat16", "float32"]


def make(library: str, shape: tuple[int, ...], dtype: str) -> Any:
    if library == "torch":
        return torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
    return cupy.zeros(shape, dtype=arrays.numpy_dtype(dtype))


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_view_is_the_memory_of_the_array_at_any_strides(library: str, dtype: str) -> None:
    base = make(library, (4, 6, 8), dtype)
    x = base.swapaxes(0, 2)[1::2]
    pointer = base.data_ptr() if library == "torch" else base.data.ptr
    itemsize = arrays.numpy_dtype(dtype).itemsize
    expected = views.CudaView(pointer + itemsize, (4, 6, 4), (2, 8, 48), dtype, 0)
    assert views.cuda_view(x, "x") == expected
    assert arrays.device_of(x) == arrays.Device("cuda", 0)


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_is_of_kind_device_and_dtype(library: str, dtype: str) -> None:
    like = make(library, (1,), "float32")
    result = new_arrays.empty((2, 0, 3), dtype, like)
    assert type(result) is type(like)
    assert (tuple(result.shape), arrays.dtype_name(result)) == ((2, 0, 3), dtype)
    assert arrays.device_of(result) == arrays.Device("cuda", 0)


def test_array_of_another_library_is_viewed_through_cupy() -> None:
    data = cupy.arange(6, dtype=cupy.float32).reshape(2, 3)

    class Exporter:
        def __dlpack__(self, **kwargs: Any) -> Any:
            return data.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return data.__dlpack_device__()

    assert views.cuda_view(Exporter(), "x").pointer == data.data.ptr


def test_stream_is_the_current_one_of_the_library() -> None:
    x, y = torch.zeros(1, device="cuda"), cupy.zeros(1)
    assert views.current_stream(x) == torch.cuda.default_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert views.current_stream(x) == side.cuda_stream
    with cupy.cuda.Stream(non_blocking=True) as other:
        assert views.current_stream(y) == other.ptr
        assert views.current_stream(x) == torch.cuda.default_stream().cuda_stream


def test_gpu_arrays_are_refused_where_cpu_memory_is_meant() -> None:
    for x in (torch.zeros(2, device="cuda"), cupy.zeros(2)):
        with pytest.raises(TypeError, match="q is on cuda:0; this backend works on arrays in CPU memory"):
            views.to_numpy_view(x, "q")
        with pytest.raises(ValueError, match="q is on cpu, k on cuda:0"):
            arrays.common_device({"q": np.zeros(2), "k": x})


def test_pinned_memory_is_viewed_on_the_cpu() -> None:
    pinned = torch.zeros(3).pin_memory()
    assert views.to_numpy_view(pinned, "x").ctypes.data == pinned.data_ptr()


def test_gpus_are_what_torch_sees() -> None:
    assert len(device.gpus()) == torch.cuda.device_count()
    gpu, properties = device.gpus()[0], torch.cuda.get_device_properties(0)
    assert gpu.name == properties.name
    assert gpu.compute_capability == torch.cuda.get_device_capability(0)
    assert gpu.multiprocessors == properties.multi_processor_count
    assert gpu.memory_total == properties.total_memory


def test_report_names_gpu_driver_and_compiler() -> None:
    report = environment.report()
    assert report["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert all(report["cuda"][name] for name in ("driver", "nvrtc", "headers", "torch"))
    assert report["problems"] == []


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_failed_allocation_is_our_out_of_memory(library: str) -> None:
    with pytest.raises(OutOfMemory, match="pages: "), device.translated_out_of_memory("pages"):
        make(library, (1 << 42,), "uint8")
