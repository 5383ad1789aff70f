"""New arrays of the caller's library: allocated, copied between host and device, returned as results.

Memory for torch callers comes from torch (which also works while a CUDA graph is captured), for CuPy callers
from CuPy, on their current stream.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import ArrayT, device_of, dtype_name, loaded_cupy, numpy_dtype, torch_of

__all__ = [
    "empty",
    "like_first",
    "on_device_of",
    "overwrite",
    "to_device",
    "to_host",
    "viewed",
]


def empty(shape: Sequence[int], dtype: str, like: ArrayT) -> ArrayT:
    """Allocate an uninitialised array of the kind and on the device of `like`.

    Parameters
    ----------
    shape : sequence of int
    dtype : str
        A name as `dtype_name` gives it.
    like : array
        Usually the first array argument of the call.

    Raises
    ------
    TypeError
        If the dtype is not supported.

    Examples
    --------
    >>> empty((2, 3), "float32", like=np.zeros(1)).shape
    (2, 3)
    """
    target = numpy_dtype(dtype)
    torch = torch_of(like)
    if torch is not None:
        tensor, wanted = cast("Any", like), getattr(torch, dtype)
        if tensor.dtype == wanted:  # half the time of a call that names dtype and device
            return cast("ArrayT", tensor.new_empty(shape))
        return cast("ArrayT", torch.empty(tuple(shape), dtype=wanted, device=tensor.device))
    device = device_of(like)
    if device.kind == "cpu":
        return like_first(np.empty(tuple(shape), target), like)
    cupy = loaded_cupy(like, "like")
    with cupy.cuda.Device(device.index):
        return cast("ArrayT", cupy.empty(tuple(shape), target))


def viewed(block: Any, dtype: str, shape: Sequence[int]) -> Any:
    """View bytes, an aligned uint8 array of one axis, as an array of another dtype and shape.

    Examples
    --------
    >>> viewed(np.zeros(16, np.uint8), "int32", (2, 2)).dtype
    dtype('int32')
    """
    torch = torch_of(block)
    kind = numpy_dtype(dtype) if torch is None else getattr(torch, dtype)
    return block.view(kind).reshape(tuple(shape))


def to_device(host: NDArray[Any], like: ArrayT) -> ArrayT:
    """Copy a NumPy array to the device of `like`, as an array of its kind, on its current stream.

    Does not wait for the device, and `host` may change afterwards: the driver takes pageable memory over
    before it returns.

    Parameters
    ----------
    host : numpy.ndarray
    like : array
        CuPy or torch on CUDA.

    Returns
    -------
    array
        Of the shape and dtype of `host`.
    """
    torch = torch_of(like)
    if torch is not None:
        found = torch.from_numpy(np.ascontiguousarray(host))
        return cast("ArrayT", found.to(cast("Any", like).device, copy=True, non_blocking=True))
    cupy = loaded_cupy(like, "like")
    with cupy.cuda.Device(device_of(like).index):
        return cast("ArrayT", cupy.asarray(host))


def on_device_of(x: Any) -> AbstractContextManager[Any]:
    """Return a block in which the device of a CuPy array is current, as the array's own operations need.

    They run on the current stream of that device, as kernels of kvlab do. Other libraries see to it alone.
    """
    cupy = sys.modules.get("cupy")
    is_other = cupy is None or torch_of(x) is not None or not isinstance(x, cupy.ndarray)
    return nullcontext() if is_other else x.device


def overwrite(array: Any, host: NDArray[Any]) -> None:
    """Write a NumPy array over one on a GPU, both contiguous and of one dtype, as `to_device` does.

    An assignment would first make a copy of the whole on the device, for which there may be no memory.
    """
    if torch_of(array) is not None:
        array.copy_(like_first(host, array), non_blocking=True)
        return
    cupy = loaded_cupy(array, "array")
    with array.device:
        array.set(host, cupy.cuda.get_current_stream())


def to_host(x: Any) -> NDArray[Any]:
    """Copy an array on a GPU to a NumPy array; waits until what its stream does before is done."""
    if torch_of(x) is not None:
        return cast("NDArray[Any]", x.cpu().numpy())
    return cast("NDArray[Any]", loaded_cupy(x, "x").asnumpy(x))


def like_first(result: NDArray[Any], first: ArrayT) -> ArrayT:
    """Return a NumPy result as the kind of array that the first argument of the call was, without a copy.

    Parameters
    ----------
    result : numpy.ndarray
        A new array owned by kvlab.
    first : array
        The first array argument of the call, in CPU memory.

    Returns
    -------
    array
        NumPy for NumPy, torch for torch; for other libraries what their array namespace makes of it through
        DLPack (NumPy, where they have none).

    Examples
    --------
    >>> like_first(np.zeros(3), np.ones(1))
    array([0., 0., 0.])
    """
    if isinstance(first, np.ndarray):
        return cast("ArrayT", result)
    torch = torch_of(first)
    if torch is not None:
        if dtype_name(result) == "bfloat16":
            return cast("ArrayT", torch.from_numpy(result.view(np.int16)).view(torch.bfloat16))
        return cast("ArrayT", torch.from_numpy(result))
    namespace = getattr(first, "__array_namespace__", None)
    return cast("ArrayT", result if namespace is None else namespace().from_dlpack(result))
