"""Views of a caller's arrays: memory that is read where it is, without a copy.

CPU code sees `numpy.ndarray` views and CUDA code sees `CudaView`s (pointer, shape, strides). A view shares
memory with the caller's array. kvlab never writes to a caller's array; results are always new.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import check_tensor, device_of, dtype_name, kind_of, loaded_cupy, torch_of

__all__ = [
    "CudaView",
    "cuda_view",
    "current_stream",
    "meant_strides",
    "pointer_of",
    "to_numpy_view",
]


class CudaView(NamedTuple):
    """What a kernel launch needs to know of an array on a GPU; the caller keeps the array itself alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, not bytes
    dtype: str
    device: int


def to_numpy_view(x: Any, name: str) -> NDArray[Any]:
    """Return a NumPy view of an array in CPU memory, without a copy.

    A torch tensor that requires grad is refused while gradients are being recorded, since the result would
    be cut from the graph without a word; under ``torch.no_grad()`` it is viewed like any other.

    Parameters
    ----------
    x : array
        NumPy, torch on the CPU, or anything on the CPU with ``__dlpack__``. Any shape, strides and
        supported dtype.
    name : str
        The caller's name of the argument, for the error.

    Returns
    -------
    numpy.ndarray
        Shares memory with `x`; bfloat16 is `ml_dtypes.bfloat16`. Never write to it.

    Raises
    ------
    TypeError
        If `x` is no array, is not on the CPU, has an unsupported dtype or masked elements, or requires grad.

    Examples
    --------
    >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> np.shares_memory(to_numpy_view(x, "x"), x)
    True
    >>> to_numpy_view([1, 2], "codes")
    Traceback (most recent call last):
        ...
    TypeError: codes must be an array with __dlpack__ (NumPy, CuPy, torch), got builtins.list; pass ...
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled(value)")
    device = device_of(x, name)
    if device.kind != "cpu":
        raise TypeError(f"{name} is on {device}; this backend works on arrays in CPU memory")
    if isinstance(x, np.ndarray):
        dtype_name(x, name)
        return np.asarray(x)
    torch = torch_of(x)
    if torch is None:
        return _numpy_from_dlpack(x, name)
    check_tensor(x, torch, name)
    if dtype_name(x, name) == "bfloat16":
        return cast("NDArray[Any]", x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return cast("NDArray[Any]", x.detach().numpy())


def _numpy_from_dlpack(x: Any, name: str) -> NDArray[Any]:
    try:
        view = np.from_dlpack(x)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name} ({kind_of(x)}) cannot be viewed by NumPy through DLPack: {error}") from error
    dtype_name(view, name)
    return view


def cuda_view(x: Any, name: str) -> CudaView:
    """Return pointer, shape and strides of an array on a GPU, without a copy and without any synchronisation.

    Parameters
    ----------
    x : array
        CuPy, torch on CUDA, or another DLPack exporter on CUDA if CuPy is loaded.
    name : str
        The caller's name of the argument, for the error.

    Raises
    ------
    TypeError
        If `x` is no array, is not on a GPU, has an unsupported dtype, or requires grad (see `to_numpy_view`).
    """
    torch = torch_of(x)
    if torch is not None:
        if not x.is_cuda:
            raise TypeError(f"{name} is on {x.device}; this backend works on arrays on a CUDA GPU")
        check_tensor(x, torch, name)
        return CudaView(
            x.data_ptr(), *_described_by_torch(x.shape, x.stride()), dtype_name(x, name), x.device.index
        )
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(x, cupy.ndarray):
        device = device_of(x, name)
        if device.kind != "cuda":
            raise TypeError(f"{name} is on {device}; this backend works on arrays on a CUDA GPU")
        x = loaded_cupy(x, name).from_dlpack(x)
    itemsize = x.itemsize
    strides = meant_strides(x.shape, tuple([step // itemsize for step in x.strides]))
    return CudaView(x.data.ptr, x.shape, strides, dtype_name(x, name), x.device.id)


@lru_cache(maxsize=4096)
def _described_by_torch(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a torch tensor as a plain tuple, and its strides as `meant_strides` has them."""
    return tuple(shape), meant_strides(tuple(shape), strides)


def meant_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with those of a contiguous array along axes of one element, where frameworks leave any.

    Examples
    --------
    >>> meant_strides((1, 20), (400, 1))
    (20, 1)
    """
    if 1 not in shape:
        return strides
    meant, dense = [], 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        meant.append(dense if size == 1 else stride)
        dense *= size
    return tuple(reversed(meant))


def pointer_of(x: Any) -> int:
    """Return the address of an array that `empty` made on a GPU, where nothing else is to be asked."""
    return int(x.data.ptr if torch_of(x) is None else x.data_ptr())


def current_stream(x: Any) -> int:
    """Return the handle of the stream on which the library of `x` runs its work on the device of `x`.

    Parameters
    ----------
    x : array
        A CuPy array or a torch CUDA tensor; for other arrays on a GPU CuPy's current stream is meant.

    Returns
    -------
    int
        A ``cudaStream_t`` as an integer; 0 is the legacy default stream.

    Raises
    ------
    TypeError
        If `x` is not on a GPU.
    """
    torch = torch_of(x)
    if torch is not None and x.is_cuda:
        # What torch's own compiler calls; the public way makes a Stream object first, which takes 2 us.
        return int(torch._C._cuda_getCurrentRawStream(x.device.index))
    device = device_of(x)
    if device.kind != "cuda":
        raise TypeError(f"an array on {device} has no stream")
    return int(loaded_cupy(x, "x").cuda.get_current_stream(device.index).ptr)
