"""Arrays are viewed without a copy, results are of the kind of arguments, errors name what is wrong."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvlab import arrays, new_arrays, views

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class Exporter:
    """An array of some other library: it has DLPack and nothing else."""

    def __init__(self, data: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.data = data
        self.device = device

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class StandardArray(Exporter):
    """An array of some other library that follows the array API standard."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: StandardArray(np.from_dlpack(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensor_is_viewed_without_a_copy_at_any_strides(dtype: str) -> None:
    base = torch.arange(2 * 3 * 8).reshape(2, 3, 8).to(getattr(torch, dtype))
    tensor = base.transpose(0, 2)[1::2]
    view = views.to_numpy_view(tensor, "x")
    assert view.dtype == arrays.numpy_dtype(dtype)
    assert view.shape == tuple(tensor.shape)
    assert view.ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(view.astype(np.float64), tensor.to(torch.float64).numpy())


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)), st.data())
def test_numpy_array_is_viewed_as_itself(x: np.ndarray, data: st.DataObject) -> None:
    x = np.transpose(x, data.draw(st.permutations(range(x.ndim))))
    view = views.to_numpy_view(x, "x")
    assert view.ctypes.data == x.ctypes.data
    assert (view.shape, view.strides) == (x.shape, x.strides)


def test_bfloat16_keeps_every_bit_both_ways() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    view = views.to_numpy_view(tensor, "x")
    assert view.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(view.view(np.uint16), bits)
    back = new_arrays.like_first(view, tensor)
    assert back.dtype == torch.bfloat16
    assert back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("kind", [Exporter, StandardArray])
def test_other_exporters_are_viewed_without_a_copy(kind: type[Exporter]) -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(views.to_numpy_view(kind(data), "x"), data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_of_the_kind_of_the_first_argument_and_share_memory(dtype: str) -> None:
    result = np.zeros((2, 3), arrays.numpy_dtype(dtype))
    assert new_arrays.like_first(result, np.ones(1)) is result
    tensor = new_arrays.like_first(result, torch.ones(1))
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == result.ctypes.data


def test_results_for_other_libraries() -> None:
    result = np.zeros(3, np.float32)
    standard = new_arrays.like_first(result, StandardArray(np.ones(1)))
    assert isinstance(standard, StandardArray)
    assert np.shares_memory(standard.data, result)
    assert new_arrays.like_first(result, Exporter(np.ones(1))) is result


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_is_of_kind_shape_and_dtype(dtype: str) -> None:
    tensor = new_arrays.empty((2, 0, 3), dtype, like=torch.ones(1))
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 0, 3), getattr(torch, dtype))
    array = new_arrays.empty((2, 3), dtype, like=np.ones(1))
    assert (array.shape, array.dtype) == ((2, 3), arrays.numpy_dtype(dtype))


def test_grad_is_refused_only_while_it_is_recorded() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match=r"q requires grad.*q\.detach\(\).*no_grad"):
        views.to_numpy_view(weight * 2, "q")
    with torch.no_grad():
        assert views.to_numpy_view(weight, "q").ctypes.data == weight.data_ptr()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1, 2], r"codes must be an array with __dlpack__.*builtins\.list; pass numpy\.asarray"),
        (np.float32(1), r"codes must be an array.*pass numpy\.asarray"),
        (None, "codes must be an array"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"codes is a masked array.*codes\.filled"),
        (np.zeros(2, np.complex64), "codes has dtype complex64, .*supported are bool, "),
        (np.zeros(2, ">f4"), "codes has dtype >f4"),
        (np.array([{}]), "codes has dtype object"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "codes has dtype float8_e4m3fn"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "codes has dtype float8_e4m3fn"),
        (torch.zeros(2, device="meta"), "codes is on device meta"),
        (torch.eye(2).to_sparse(), r"codes is a lazy or sparse tensor.*to_dense"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, r"codes is a lazy or sparse tensor.*resolve_neg"),
        (
            Exporter(np.zeros(2), device=(2, 3)),
            "codes is on cuda:3; this backend works on arrays in CPU memory",
        ),
        (Exporter(np.zeros(2), device=(8, 0)), "codes is on DLPack device type 8"),
        (Exporter(np.zeros(2, ml_dtypes.bfloat16)), "codes .* cannot be viewed by NumPy through DLPack"),
    ],
)
def test_what_cannot_be_viewed_is_refused_by_name(x: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        views.to_numpy_view(x, "codes")


def test_dtype_of_a_list_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="codes must be an array"):
        arrays.dtype_name([1, 2], "codes")


def test_cpu_arrays_have_no_cuda_view_and_no_stream() -> None:
    for x, place in ((np.zeros(2), "cpu"), (torch.zeros(2), "cpu")):
        with pytest.raises(TypeError, match=f"k is on {place}; this backend works on arrays on a CUDA GPU"):
            views.cuda_view(x, "k")
        with pytest.raises(TypeError, match="an array on cpu has no stream"):
            views.current_stream(x)


def test_gpu_array_of_another_library_asks_for_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match=r"k .*is on a GPU and can only be used through CuPy"):
        views.cuda_view(Exporter(np.zeros(2), device=(2, 0)), "k")


def test_common_device_names_both_arrays() -> None:
    q, k = np.zeros(2), torch.zeros(2)
    assert arrays.common_device({"q": q, "k": k}) == arrays.Device("cpu", 0)
    with pytest.raises(ValueError, match="q is on cpu, v on cuda:1"):
        arrays.common_device({"q": q, "k": k, "v": Exporter(q, device=(2, 1))})


def test_pinned_memory_is_cpu_and_managed_memory_is_cuda() -> None:
    assert arrays.device_of(Exporter(np.zeros(2), device=(3, 0))) == arrays.Device("cpu", 0)
    assert arrays.device_of(Exporter(np.zeros(2), device=(13, 2))) == arrays.Device("cuda", 2)


def test_viewing_never_imports_a_framework() -> None:
    code = (
        "import sys, numpy as np; from kvlab import arrays, new_arrays, views; x = np.zeros((2, 3));"
        "views.to_numpy_view(x, 'x'); new_arrays.like_first(x, x); arrays.common_device({'x': x});"
        "sys.exit(any(name in sys.modules for name in ('torch', 'cupy', 'jax', 'numba', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("x", [1, 2.5, None, True])
def test_what_is_no_array_is_not_said_to_have_a_dtype(x: object) -> None:
    with pytest.raises(TypeError, match=r"q must be an array with __dlpack__"):
        arrays.dtype_name(x, "q")
