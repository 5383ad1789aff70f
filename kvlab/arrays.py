"""Arrays of every library: taken in without a copy, returned as the kind of the argument.

A caller's array may come from NumPy, CuPy, torch (CPU or CUDA) or anything else that speaks DLPack. Inside,
CPU code sees `numpy.ndarray` views and CUDA code sees `CudaView`s (pointer, shape, strides). This
module imports no framework: a torch tensor exists only if torch is in `sys.modules`, and it is found there.

bfloat16 has no NumPy type of its own. It is `ml_dtypes.bfloat16` inside, and crosses to and from torch as a
view of 16-bit integers, because neither NumPy's DLPack nor its buffer protocol can carry it.

A view shares memory with the caller's array. kvlab never writes to a caller's array; results are always new.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache, wraps
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Array",
    "ArrayT",
    "CudaView",
    "Device",
    "check_tensor",
    "check_writable",
    "common_device",
    "cuda_view",
    "current_stream",
    "device_of",
    "device_of_torch",
    "dtype_name",
    "empty",
    "like_first",
    "loaded_cupy",
    "meant_strides",
    "numpy_dtype",
    "one_device",
    "opaque",
    "overwrite",
    "pointer_of",
    "to_device",
    "to_host",
    "to_numpy_view",
    "viewed",
]


class Array(Protocol):
    """Anything that exports itself by DLPack: NumPy, CuPy, torch and JAX arrays do."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)
P = ParamSpec("P")
T = TypeVar("T")

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


class CudaView(NamedTuple):
    """What a kernel launch needs to know of an array on a GPU; the caller keeps the array itself alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, not bytes
    dtype: str
    device: int


def _torch_of(x: object) -> ModuleType | None:
    """Return torch if `x` is one of its tensors."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that `torch.compile` is to call as it is, outside of its graphs.

    Launchers ask arrays for their memory, which a trace does not have, and their NumPy numbers would be
    arrays in it. With ``fullgraph=True`` torch refuses the call by the function's name.
    """
    plain: Callable[P, T] | None = None

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        nonlocal plain
        if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
            return function(*arguments, **options)
        if plain is None:
            dynamo = sys.modules["torch"]._dynamo
            skip_code = getattr(dynamo.eval_frame, "skip_code", None)  # not part of what torch documents
            if skip_code is not None:
                skip_code(cast(Any, call).__code__)  # not traced for each kind of arguments
            plain = cast(Callable[P, T], dynamo.disable(function))
        return plain(*arguments, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


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


def loaded_cupy(x: object, name: str) -> ModuleType:
    """Return CuPy for an array on a GPU that is not a torch tensor."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        raise TypeError(
            f"{name} ({_kind(x)}) is on a GPU and can only be used through CuPy: import cupy first"
        )
    return cupy


def _kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _refuse(x: object, name: str) -> TypeError:
    hint = "; pass numpy.asarray(...) of it" if isinstance(x, list | tuple | int | float | np.generic) else ""
    value = f"{x!r}, a " if isinstance(x, int | float | np.generic) else ""
    return TypeError(
        f"{name} must be an array with __dlpack__ (NumPy, CuPy, torch), got {value}{_kind(x)}{hint}"
    )


def check_tensor(tensor: Any, torch: ModuleType, name: str) -> None:
    """Refuse the tensors of torch whose memory does not say everything about their value."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} requires grad, and this function records nothing for autograd: "
            f"pass {name}.detach(), or call under torch.no_grad()"
        )
    if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
        raise TypeError(
            f"{name} is a lazy or sparse tensor (layout {tensor.layout}); pass a plain strided one: "
            f"{name}.to_dense(), {name}.resolve_neg() or {name}.resolve_conj()"
        )


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
        raise _refuse(x, name) from None
    if text not in _DTYPES:
        if x is None or isinstance(x, int | float | complex):
            raise _refuse(x, name)
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
    if _torch_of(x) is not None:
        return device_of_torch(x.device, name)
    if not hasattr(x, "__dlpack_device__"):
        raise _refuse(x, name)
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
    torch = _torch_of(x)
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
        raise TypeError(f"{name} ({_kind(x)}) cannot be viewed by NumPy through DLPack: {error}") from error
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
    torch = _torch_of(x)
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
    return int(x.data.ptr if _torch_of(x) is None else x.data_ptr())


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
    torch = _torch_of(x)
    if torch is not None and x.is_cuda:
        # What torch's own compiler calls; the public way makes a Stream object first, which takes 2 us.
        return int(torch._C._cuda_getCurrentRawStream(x.device.index))
    device = device_of(x)
    if device.kind != "cuda":
        raise TypeError(f"an array on {device} has no stream")
    return int(loaded_cupy(x, "x").cuda.get_current_stream(device.index).ptr)


def empty(shape: Sequence[int], dtype: str, like: ArrayT) -> ArrayT:
    """Allocate an uninitialised array of the kind and on the device of `like`.

    Memory for torch callers comes from torch (which also works while a CUDA graph is captured), for CuPy
    callers from CuPy, on their current stream.

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
    torch = _torch_of(like)
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
    torch = _torch_of(block)
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
    torch = _torch_of(like)
    if torch is not None:
        found = torch.from_numpy(np.ascontiguousarray(host))
        return cast("ArrayT", found.to(cast("Any", like).device, copy=True, non_blocking=True))
    cupy = loaded_cupy(like, "like")
    with cupy.cuda.Device(device_of(like).index):
        return cast("ArrayT", cupy.asarray(host))


def overwrite(array: Any, host: NDArray[Any]) -> None:
    """Write a NumPy array over one on a GPU, both contiguous and of one dtype, as `to_device` does.

    An assignment would first make a copy of the whole on the device, for which there may be no memory.
    """
    if _torch_of(array) is not None:
        array.copy_(like_first(host, array), non_blocking=True)
        return
    cupy = loaded_cupy(array, "array")
    with array.device:
        array.set(host, cupy.cuda.get_current_stream())


def to_host(x: Any) -> NDArray[Any]:
    """Copy an array on a GPU to a NumPy array; waits until what its stream does before is done."""
    if _torch_of(x) is not None:
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
    torch = _torch_of(first)
    if torch is not None:
        if dtype_name(result) == "bfloat16":
            return cast("ArrayT", torch.from_numpy(result.view(np.int16)).view(torch.bfloat16))
        return cast("ArrayT", torch.from_numpy(result))
    namespace = getattr(first, "__array_namespace__", None)
    return cast("ArrayT", result if namespace is None else namespace().from_dlpack(result))
