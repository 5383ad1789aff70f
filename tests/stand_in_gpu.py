"""A stand-in for a Hopper GPU: torch tensors of the CPU pass for ones on it, and launches are only kept.

What a launcher of attention hands to the driver can so be looked at, and its time on the host measured,
without a GPU. Kernels are built, since launches are checked against their parameters.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvlab.arrays import Device
from kvlab.jit import launch, native
from kvlab.jit.cubin import read_resources
from kvlab.jit.launch import Kernel
from kvlab.ops import array_kinds, attention_call
from kvlab.ops import attention as operation
from kvlab.ops import grouped as grouped_operation
from kvlab.ops.cuda import (
    attention,
    attention_backward,
    attention_sm90,
    gathered,
    grouped,
    grouped_backward,
    tile_list,
)

STREAM = 7


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
_CONFIG = struct.Struct("7I4xQQI4x")  # CUlaunchConfig


class _Pinned(bytearray):
    """Memory of the host, with its address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class Launch(NamedTuple):
    """A launch: the kernel's name, its grid, the bytes of each parameter, and whether it may come early."""

    name: str
    grid: tuple[int, ...]
    parameters: tuple[bytes, ...]
    early: bool


class StandInGpu:
    """Keeps launches in `launches`; `is_capturing` is what streams answer; `is_full`: CuPy has no memory;
    `is_behind`: what was recorded has not come to pass yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bindings = pytest.importorskip("cuda.bindings.driver")
        self.launches: list[Launch] = []
        self.is_capturing = self.is_full = self.is_behind = False
        self._kernels: list[Kernel] = []
        driver = SimpleNamespace(funcSetAttribute=lambda *_: None, CUDADriverError=RuntimeError)
        runtime = SimpleNamespace(streamIsCapturing=lambda stream: self.is_capturing)
        cuda = SimpleNamespace(
            driver=driver, runtime=runtime, Device=nullcontext,
            Stream=SimpleNamespace(from_external=nullcontext),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            alloc_pinned_memory=lambda nbytes: _Pinned(nbytes),
        )  # fmt: skip
        cupy = SimpleNamespace(cuda=cuda, empty=self._empty)
        for name, module in (("cupy", cupy), ("cupy.cuda", cuda)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(bindings, "cuTensorMapEncodeTiled", self._encode)
        self._launch_function = _LAUNCH(self._launch)
        address = ctypes.cast(self._launch_function, ctypes.c_void_p).value
        monkeypatch.setattr(native, "launch_function", lambda: address)
        for name, answer in (
            ("cuMemsetD32Async", ()), ("cuEventCreate", ("event",)), ("cuEventRecord", ()),
            ("cuThreadExchangeStreamCaptureMode", ("mode",)),
        ):  # fmt: skip
            monkeypatch.setattr(bindings, name, lambda *_, answer=answer: (0, *answer))
        monkeypatch.setattr(
            bindings, "cuMemcpyHtoDAsync",
            lambda to, source, nbytes, stream: (ctypes.memmove(to, source, nbytes) and 0,),
        )  # fmt: skip
        monkeypatch.setattr(bindings, "cuEventQuery", lambda event: (600 * self.is_behind,))
        monkeypatch.setattr(array_kinds, "device_of_torch", lambda device, name: Device("cuda", 0))
        for name in ("attention_call", "attention", "grouped"):
            own = f"kvlab.ops.{name}.requirements_of"
            monkeypatch.setattr(own, lambda device: {"compute_capability": (9, 0)})
        for module in (attention, attention_backward, gathered, launch):
            monkeypatch.setattr(module, "compute_capability", lambda device: (9, 0))
        for module in (attention_sm90, attention_backward, gathered, grouped, grouped_backward, tile_list):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        for module in (attention, attention_sm90, attention_backward, gathered, grouped, grouped_backward):
            if hasattr(module, "load"):
                monkeypatch.setattr(module, "load", self._load)
            if hasattr(module, "stream_of"):
                monkeypatch.setattr(module, "stream_of", lambda kind: lambda: STREAM)
        for module in (tile_list, grouped):
            monkeypatch.setattr(module, "cuda_kernel", self._kernel)
        self.forget()

    def forget(self) -> None:
        """Let go of all that was remembered of calls."""
        remembered = (
            attention_call._call_of, attention_call.last_call, operation._row_into,
            attention._prepare_into, attention._prepare, attention._plan, attention_backward._prepare,
            attention_backward.plan_of, gathered._prepare, grouped_operation._checked,
            grouped_operation._row_into, grouped._listed, grouped_backward.listed_call, launch._driver_error,
            tile_list._runtime,
        )  # fmt: skip
        for function in remembered:
            function.cache_clear()

    def _kernel(self, name: str, entry: str, macros: Any, device: int) -> Kernel:
        return self._load(launch.build(name, dict(macros), "sm_90a"), entry)

    def _load(self, built: Any, entry: str | None = None, *, device: int = 0) -> Kernel:
        kernels = read_resources(built.cubin)
        entry = entry or next(iter(kernels))
        self._kernels.append(Kernel(SimpleNamespace(ptr=len(self._kernels)), entry, 0, kernels[entry]))
        return self._kernels[-1]

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> int:
        assert not extra
        *grid, _, _, _, _, stream, _, attributes = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
        assert attributes in (0, 1)
        self._keep(function or 0, tuple(grid), stream, parameters, early=attributes == 1)
        return 0

    def _keep(
        self, function: int, grid: tuple[int, ...], stream: int, parameters: int, *, early: bool
    ) -> None:
        assert stream == STREAM
        kernel = self._kernels[function]
        sizes = kernel.resources.parameter_bytes
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(parameters)
        read = tuple(map(ctypes.string_at, pointers, sizes))
        self.launches.append(Launch(kernel.name, grid, read, early))

    def _empty(self, nbytes: int, dtype: Any) -> Any:
        if self.is_full:
            raise MemoryError
        made = np.zeros(nbytes, dtype)
        return SimpleNamespace(data=SimpleNamespace(ptr=made.ctypes.data, held=made))

    @staticmethod
    def _encode(kind: Any, rank: int, address: int, *rest: Any) -> tuple[int, Any]:
        number = sum(int(x) * 3**i for i, x in enumerate([*rest[0], *rest[1], *rest[2]]))
        return 0, SimpleNamespace(opaque=[address, *(number + i for i in range(15))])
