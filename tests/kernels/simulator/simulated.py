"""Launchers of Numba kernels with NumPy arrays for GPU arrays and Numba's simulator for the GPU.

What is replaced is the edge to the device alone: views, memory, streams, and the kernel that `build_numba`
would compile, which here is the same Python function under ``numba.cuda.jit``. The launchers and kernels are
the ones that a GPU runs, with fewer threads a block, since every thread is one of Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numba import cuda, types

from kvlab import arrays, views
from kvlab.ops import device_arrays
from kvlab.ops.cuda import bits as bits_cuda
from kvlab.ops.cuda import codec as codec_cuda

THREADS = 4
_CANARY = 0xA5


class SimulatedKernel:
    """What `kvlab.ops.device_arrays.numba_kernel` returns, on the simulator."""

    def __init__(self, module: str, entry: str, options: tuple[tuple[str, Any], ...], device: int) -> None:
        make = getattr(import_module(f"kvlab.numba_kernels.cuda.{module}"), entry)
        function, self.types, _ = make(**dict(options))
        self.function = cuda.jit(function)  # type: ignore[no-untyped-call]
        self.device = device

    def __call__(self, grid: tuple[int], block: tuple[int], args: Sequence[Any], shared_bytes: int) -> None:
        taken = [self._argument(arg, kind) for arg, kind in zip(args, self.types, strict=True)]
        self.function[grid, (min(*block, THREADS),), 0, shared_bytes](*taken)

    @staticmethod
    def _argument(arg: Any, kind: Any) -> Any:
        if not isinstance(kind, types.CPointer):
            return arg
        dtype = np.dtype(str(kind.dtype))
        return arg.reshape(-1).view(dtype) if isinstance(arg, np.ndarray) else np.zeros(1, dtype)


def _view(x: Any, name: str) -> views.CudaView:
    strides = tuple(step // x.itemsize for step in x.strides)
    return views.CudaView(x.ctypes.data, x.shape, strides, arrays.dtype_name(x, name), 0)


def _empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
    kind = arrays.numpy_dtype(dtype)
    count = int(np.prod(shape))
    return np.full(count * kind.itemsize, _CANARY, np.uint8).view(kind).reshape(shape)


def _launch(kernel: Any, grid: int, block: Any, args: Any, like: Any, shared_bytes: int = 0) -> None:
    kernel((grid,), block, args, shared_bytes)


def simulate(patch: pytest.MonkeyPatch) -> None:
    """Send launches to the simulator until the patch is undone."""
    replaced = {
        "cuda_view": _view,
        "empty": _empty,
        "contiguous": lambda x, name: np.ascontiguousarray(x),
        "pointer": lambda x: x,
        "to_host": lambda x, name: x,
        "launch": _launch,
        "numba_kernel": SimulatedKernel,
    }
    for module in (device_arrays, bits_cuda, codec_cuda):
        for name, value in replaced.items():
            if hasattr(module, name):
                patch.setattr(module, name, value)
    patch.setattr(bits_cuda, "_THREADS", THREADS)
