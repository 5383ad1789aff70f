"""Kinds of arrays: dtype, shape, strides and device, the key under which a checked call is kept.

A model repeats a call; only addresses change. What follows from all else is found once and kept. `kinds_of`
reads only what makes the key, in the terms of the array's own library: to translate them takes longer than a
short kernel runs. `view_of` translates them where a kind is new.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, Generic, TypeVar

import numpy as np

from kvlab.arrays import (
    Device,
    check_tensor,
    device_of,
    device_of_torch,
    dtype_name,
    loaded_cupy,
    numpy_dtype,
    takes_duals,
)
from kvlab.views import CudaView, meant_strides

__all__ = [
    "ALIGNMENT",
    "Kind",
    "LastCall",
    "allocator",
    "device_of_kind",
    "dtype_of_kind",
    "kinds_of",
    "splitter",
    "stream_of",
    "view_of",
]

ALIGNMENT = 16
"""Bytes; an address matters to a kernel only by where it lies between multiples of this."""

Kind = tuple[tuple[int, ...], tuple[int, ...], Any, Any, int]
"""Shape, strides in elements, dtype, device, address modulo `ALIGNMENT`; dtype and device of its library."""


def kinds_of(arrays: Sequence[Any], names: Sequence[str]) -> tuple[tuple[Kind, ...], list[int]]:
    """Return the kinds of the arrays of a call and, of those on a GPU, the addresses.

    Raises
    ------
    TypeError
        As `kvlab.views.cuda_view`; an array on the CPU may still be refused by `to_numpy_view`.
    """
    torch = sys.modules.get("torch")
    tensor: Any = ()
    records = differentiates = False
    if torch is not None:
        tensor, records, differentiates = torch.Tensor, torch.is_grad_enabled(), takes_duals(torch)
    kinds: list[Kind] = []
    addresses = []
    try:
        for x in arrays:
            if isinstance(x, tensor):
                if x.is_neg() or (records and x.requires_grad) or differentiates:
                    check_tensor(x, sys.modules["torch"], names[len(kinds)])
                address = x.data_ptr()
                kinds.append((x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT))
            else:
                kind, address = _other_kind(x, names[len(kinds)])
                kinds.append(kind)
            addresses.append(address)
    except RuntimeError as error:  # of a tensor without memory or strides
        if isinstance(x, tensor):
            check_tensor(x, sys.modules["torch"], names[len(kinds)])
        raise TypeError(
            f"{names[len(kinds)]} is a tensor without memory, as in a transform of torch.func or with "
            "is_grads_batched=True: call this function outside of it, or for each tensor alone"
        ) from error
    return tuple(kinds), addresses


CallT = TypeVar("CallT")


class LastCall(Generic[CallT]):
    """The last call: whether it comes again with tensors as they were, without a look at each from Python.

    torch compares types, dtypes, devices, shapes, strides and all that its dispatcher knows of tensors in a
    tenth of the time that `kinds_of` takes. What it compares with are the tensors of the call last kept, once
    that call has come twice in a row.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Callable[..., bool], Any] = None, _never, None

    def find(self, arrays: Sequence[Any]) -> tuple[CallT, list[int]] | None:
        """Return the call last kept and the addresses of its arrays, if these are as they were."""
        call, are_alike, address_of = self._last
        if not are_alike(*arrays):
            return None
        addresses = list(map(address_of, arrays))
        return None if reduce(or_, addresses) % ALIGNMENT else (call, addresses)

    def keep(self, call: CallT, arrays: Sequence[Any], addresses: Sequence[int]) -> None:
        """Keep a call that was not found; equal calls must be one object."""
        torch = sys.modules.get("torch")
        if torch is None or not all(isinstance(x, torch.Tensor) for x in arrays):
            return
        are_alike = _never
        if self._last[0] is call and not any(address % ALIGNMENT for address in addresses):
            are_alike = _check_of(arrays)
        self._last = call, are_alike, torch.Tensor.data_ptr


def _check_of(tensors: Sequence[Any]) -> Callable[..., bool]:
    """Return torch's check that tensors are as these are."""
    seen = set(map(id, tensors))
    if len(seen) == len(tensors):
        guards = sys.modules["torch"]._C._dynamo.guards.TensorGuards
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        check: Callable[..., bool] = guards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check
    if len(seen) < len(tensors) - 1:
        return _never
    # One of them comes twice, as cu_seqlens do, which torch does not allow: they are checked in two parts.
    end = next(i for i, x in enumerate(tensors) if any(x is y for y in tensors[:i]))
    first, rest = _check_of(tensors[:end]), _check_of(tensors[end:])
    return lambda *others: first(*others[:end]) and rest(*others[end:])


def _never(*_tensors: Any) -> bool:
    return False


def _other_kind(x: Any, name: str) -> tuple[Kind, int]:
    """Return the kind and the address of an array that is no torch tensor."""
    dtype = x.dtype if isinstance(x, np.ndarray) else dtype_name(x, name)
    device = device_of(x, name)
    if device.kind == "cpu":
        return (tuple(x.shape), (), dtype, device, 0), 0
    cupy = loaded_cupy(x, name)
    x = x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)
    address, itemsize = int(x.data.ptr), x.itemsize
    strides = tuple([step // itemsize for step in x.strides])
    return (x.shape, strides, dtype, device, address % ALIGNMENT), address


def dtype_of_kind(kind: Kind, name: str) -> str:
    """Return the dtype as kvlab calls it; errors as `dtype_name`."""
    return dtype_name(kind[2], name)


def device_of_kind(kind: Kind, name: str) -> Device:
    """Return the device as kvlab calls it; errors as `device_of`."""
    return kind[3] if isinstance(kind[3], Device) else device_of_torch(kind[3], name)


def view_of(kind: Kind, name: str) -> CudaView:
    """Return a view of an array on a GPU whose address is the kind's, between 0 and `ALIGNMENT`."""
    shape, device = tuple(kind[0]), device_of_kind(kind, name)
    return CudaView(kind[4], shape, meant_strides(shape, kind[1]), dtype_of_kind(kind, name), device.index)


def allocator(kind: Kind, *results: tuple[Sequence[int], str]) -> Callable[[], tuple[list[Any], list[int]]]:
    """Return what makes new arrays of these shapes and dtypes, on the GPU and in the library of a kind.

    It returns a list of them, and one of their addresses.
    """
    shapes = [tuple(shape) for shape, _ in results]
    if isinstance(kind[3], Device):
        import cupy

        index, dtypes = kind[3].index, [numpy_dtype(dtype) for _, dtype in results]

        def make_in_cupy() -> tuple[list[Any], list[int]]:
            with cupy.cuda.Device(index):
                made = [cupy.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            return made, [x.data.ptr for x in made]

        return make_in_cupy
    torch, device = sys.modules["torch"], kind[3]
    strides = [tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))]) for shape in shapes]
    wanted = shapes, strides, [getattr(torch, dtype) for _, dtype in results]
    # What torch's own compiler calls, for the current device, in half the time of torch.empty_strided. That
    # takes half the time of torch.empty, whose sizes may be symbols.
    new_here = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
    current_device = torch._C._cuda_getDevice if device.type == "cuda" else lambda: None
    index, address_of = device.index, torch.Tensor.data_ptr

    def new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def make_in_torch() -> tuple[list[Any], list[int]]:
        made = list(map(new_here if current_device() == index else new, *wanted))
        return made, list(map(address_of, made))

    return make_in_torch


def splitter(sizes: Sequence[int], axis: int, kind: Kind) -> Callable[[Any], list[Any]]:
    """Return what cuts an array of a kind's library into parts of these sizes along an axis."""
    sizes = list(sizes)
    if not isinstance(kind[3], Device):
        # Half the time of slices. Nobody else has the whole, so its parts need not know of each other.
        split = sys.modules["torch"].unsafe_split_with_sizes
        return lambda x: list(split(x, sizes, axis))
    ends = np.cumsum([0, *sizes]).tolist()
    spans = [(slice(None),) * axis + (slice(*ends[i : i + 2]),) for i in range(len(sizes))]
    return lambda x: [x[span] for span in spans]


def stream_of(kind: Kind) -> Callable[[], int]:
    """Return a function: the current stream of a kind's library and device, as `current_stream`."""
    if not isinstance(kind[3], Device):
        torch = sys.modules["torch"]
        # What torch's own compiler calls; the public way makes a Stream object first, which takes 2 us.
        return partial(torch._C._cuda_getCurrentRawStream, kind[3].index)
    import cupy

    index = kind[3].index
    return lambda: int(cupy.cuda.get_current_stream(index).ptr)
