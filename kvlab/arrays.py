"""Arrays of every library: their kind, their elements and their device, found without importing a framework.

A caller's array may come from NumPy, CuPy, torch (CPU or CUDA) or anything else that speaks DLPack. A torch
tensor exists only if torch is in `sys.modules`, and torch is found there. `kvlab.views` gives the memory of
arrays to kernels, `kvlab.new_arrays` makes arrays of the caller's library.

bfloat16 has no NumPy type of its own. It is `ml_dtypes.bfloat16` inside, and crosses to and from torch as a
view of 16-bit integers, because neither NumPy's DLPack nor its buffer protocol can carry it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np

__all__ = [
    "Array",
    "ArrayT",
    "Device",
    "check_tensor",
    "check_writable",
    "common_device",
    "device_of",
    "device_of_torch",
    "dtype_name",
    "kind_of",
    "loaded_cupy",
    "numpy_dtype",
    "one_device",
    "refused",
    "takes_duals",
    "torch_of",
]


class Array(Protocol):
    """Anything that exports itself by DLPack: NumPy, CuPy, torch and JAX arrays do."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)

_NUMPY_NAMES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"
_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_NAMES.split()},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# DLPack device type codes (dlpack.h, DLDeviceType).
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13


class Device(NamedTuple):
    """Where an array lives: `kind` ``"cpu"`` or ``"cuda"``; `index` the number of the GPU, 0 for the CPU."""

    kind: str
    index: int  # type: ignore[assignment]  # a tuple has a method of this name; the field hides it

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


_CPU = Device("cpu", 0)


def torch_of(x: object) -> ModuleType | None:
    """Return torch if `x` is one of its tensors."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def loaded_cupy(x: object, name: str) -> ModuleType:
    """Return CuPy for an array on a GPU that is not a torch tensor."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        raise TypeError(
            f"{name} ({kind_of(x)}) is on a GPU and can only be used through CuPy: import cupy first"
        )
    return cupy


def kind_of(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def refused(x: object, name: str) -> TypeError:
    hint = "; pass numpy.asarray(...) of it" if isinstance(x, list | tuple | int | float | np.generic) else ""
    value = f"{x!r}, a " if isinstance(x, int | float | np.generic) else ""
    return TypeError(
        f"{name} must be an array with __dlpack__ (NumPy, CuPy, torch), got {value}{kind_of(x)}{hint}"
    )


def takes_duals(torch: ModuleType) -> bool:
    """Whether torch is in a level of forward-mode differentiation, where tensors may be dual numbers."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def check_tensor(tensor: Any, torch: ModuleType, name: str) -> None:
    """Refuse the tensors of torch whose memory does not say everything about their value."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} requires grad, and this function records nothing for autograd: "
            f"pass {name}.detach(), or call under torch.no_grad()"
        )
    if takes_duals(torch) and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise TypeError(
            f"{name} is a dual number of torch.autograd.forward_ad, whose tangent would be lost: "
            f"pass {name}.detach()"
        )
    if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
        raise TypeError(
            f"{name} is a lazy or sparse tensor (layout {tensor.layout}); pass a plain strided one: "
            f"{name}.to_dense(), {name}.resolve_neg() or {name}.resolve_conj()"
        )


def check_writable(x: Any, name: str) -> None:
    """Refuse an array that cannot be written in place: read-only, or with elements that are one.

    Examples
    --------
    >>> check_writable(np.broadcast_to(np.zeros(1), (3,)), "into[0]")
    Traceback (most recent call last):
        ...
    ValueError: into[0] is read-only: pass a writable array
    """
    if not getattr(getattr(x, "flags", None), "writeable", True):
        raise ValueError(f"{name} is read-only: pass a writable array")
    strides = x.stride() if hasattr(x, "stride") else x.strides
    repeats = [stride == 0 and size > 1 for stride, size in zip(strides, x.shape, strict=True)]
    if any(repeats) and 0 not in x.shape:
        raise ValueError(f"{name} repeats elements in memory (a stride is 0): pass a copy")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy data type of a dtype name; ``"bfloat16"`` is that of `ml_dtypes`.

    Raises
    ------
    TypeError
        If kvlab has no such type.

    Examples
    --------
    >>> numpy_dtype("float16"), numpy_dtype("bfloat16").itemsize
    (dtype('float16'), 2)
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise TypeError(f"dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}") from None


@cache
def _dtype_text(dtype: Hashable) -> str:
    """Return a dtype as text; making the text again takes longer than all other checks of an argument."""
    return str(dtype).removeprefix("torch.")


def dtype_name(x: Any, name: str = "x") -> str:
    """Return the name of an array's element type, the same for every library: ``"float16"``, ``"bfloat16"``.

    Parameters
    ----------
    x : array or dtype
        An array of any kind, or a dtype of NumPy, CuPy or torch.
    name : str
        What the caller calls it, for the error.

    Raises
    ------
    TypeError
        If the element type is not one kvlab knows (complex, object, other byte orders, float8).

    Examples
    --------
    >>> dtype_name(np.zeros(3, np.float16)), dtype_name(np.dtype("int32"))
    ('float16', 'int32')
    """
    try:
        text = _dtype_text(getattr(x, "dtype", x))
    except TypeError:  # unhashable: a list or the like, no dtype
        raise refused(x, name) from None
    if text not in _DTYPES:
        if x is None or isinstance(x, int | float | complex):
            raise refused(x, name)
        raise TypeError(
            f"{name} has dtype {text}, which is not supported; supported are {', '.join(_DTYPES)}"
        )
    return text


@cache  # asking it takes longer
def device_of_torch(device: Any, name: str) -> Device:
    """Return a device of torch as kvlab's; errors as `device_of`."""
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name} is on device {device}; kvlab works on cpu and cuda")
    return Device(device.type, device.index or 0)


def device_of(x: Any, name: str = "x") -> Device:
    """Return the device that holds an array.

    Pinned host memory counts as CPU, managed memory as CUDA.

    Raises
    ------
    TypeError
        If `x` is no array, or lives on a device other than a CPU or a CUDA GPU.

    Examples
    --------
    >>> str(device_of(np.zeros(3)))
    'cpu'
    """
    if isinstance(x, np.ndarray):
        return _CPU
    if torch_of(x) is not None:
        return device_of_torch(x.device, name)
    if not hasattr(x, "__dlpack_device__"):
        raise refused(x, name)
    code, index = x.__dlpack_device__()
    if code in (_DL_CPU, _DL_CUDA_HOST):
        return _CPU
    if code in (_DL_CUDA, _DL_CUDA_MANAGED):
        return Device("cuda", int(index))
    raise TypeError(f"{name} is on DLPack device type {int(code)}; kvlab works on cpu and cuda")


def common_device(arrays: Mapping[str, Any]) -> Device:
    """Return the one device that holds all arrays of a call.

    Parameters
    ----------
    arrays : mapping of argument name to array
        In the order of the signature; the first one decides.

    Raises
    ------
    ValueError
        If two arrays are on different devices; the message names both.
    TypeError
        As `device_of`.

    Examples
    --------
    >>> common_device({"q": np.zeros(3), "k": np.zeros(4)})
    Device(kind='cpu', index=0)
    """
    return one_device({name: device_of(array, name) for name, array in arrays.items()})


def one_device(devices: Mapping[str, Device]) -> Device:
    """`common_device` of arrays whose devices are known.

    Examples
    --------
    >>> one_device({"q": Device("cuda", 0), "k": Device("cpu", 0)})
    Traceback (most recent call last):
        ...
    ValueError: all arrays must be on one device: q is on cuda:0, k on cpu
    """
    if not devices:
        raise ValueError("common_device needs at least one array")
    first_name, first_device = next(iter(devices.items()))
    for name, device in devices.items():
        if device != first_device:
            raise ValueError(
                f"all arrays must be on one device: {first_name} is on {first_device}, {name} on {device}"
            )
    return first_device
