"""The hardware of this machine, and one exception for running out of its memory.

Everything works without a GPU, a driver or a CUDA package: then there are no GPUs, and
`gpus_missing_because` says why. Attributes of GPUs come from the CUDA driver (`cuda.bindings`), which reads
them without creating a context. A query takes no device memory and changes no current device.

The features of the CPU are those LLVM sees, because that is what Numba compiles the CPU kernels for.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvlab.errors import OutOfMemory
from kvlab.estimates import Estimate, estimate
from kvlab.sizes import format_size

__all__ = [
    "Cpu",
    "Estimate",
    "Gpu",
    "compute_capability",
    "cpu",
    "driver_cuda_version",
    "enough_memory",
    "estimate",
    "gpus",
    "gpus_missing_because",
    "memory_available",
    "memory_total",
    "translated_out_of_memory",
]

_SIMD_X86 = ("sse4.2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vnni", "avx512bf16")
_SIMD_ARM = ("neon", "fullfp16", "bf16", "sve", "sve2")

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
_DROPPED_ON_DEMAND = ("active_file", "inactive_file", "slab_reclaimable")  # of memory.stat

_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation")
"""How torch on the CPU, the CUDA driver and the CUDA runtime say it where no class of exception does."""


_WORTH_ASKING = 1 << 26  # bytes; asking the system takes 50 us


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU: its name, the threads this process may use, and the SIMD features kernels are compiled for."""

    name: str
    threads: int
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA GPU; memory in bytes, its clock, bus and second-level cache 0 where they are not known."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_total: int
    memory_clock_khz: int = 0
    memory_bus_bits: int = 0
    l2_nbytes: int = 0


def cpu() -> Cpu:
    """Return what kvlab's CPU kernels run on.

    Examples
    --------
    >>> cpu().threads >= 1
    True
    """
    import llvmlite.binding as llvm

    present = llvm.get_host_cpu_features()
    return Cpu(
        _cpu_name(), _threads(), tuple(feature for feature in _SIMD_X86 + _SIMD_ARM if present.get(feature))
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> int:
    """Return the number of CPUs this process may run on, not the number the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_total() -> int:
    """Return the bytes of memory of the machine, or of the control group this process is in if that is less.

    Examples
    --------
    >>> 0 < memory_available() <= memory_total()
    True
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = _cgroup_memory()
    return min(physical, limit)


def memory_available() -> int:
    """Return the bytes that can be allocated in CPU memory now without swapping."""
    limit, used = _cgroup_memory()
    return min(_meminfo_available(), max(limit - used, 0), memory_total())


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return memory_total()


def _cgroup_memory(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_MEMBERSHIP) -> tuple[int, int]:
    """Return the tightest (limit, use) in bytes of this process's control group and those above it.

    Of the use, copies of files and what the kernel drops on demand do not count: they are up to the limit
    wherever much has been read. Only version 2 of control groups is read; where there is no limit, a very
    large one is returned.
    """
    tightest, free = (sys.maxsize, 0), sys.maxsize
    try:
        own = membership.read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return tightest
    for folder in (root / own, *(root / own).parents):
        try:
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            lines = (folder / "memory.stat").read_text().splitlines()
            amounts = {name: int(amount) for name, _, amount in (line.partition(" ") for line in lines)}
        except (OSError, ValueError):  # ValueError: the limit reads "max"
            continue
        used = max(used - sum(amounts.get(name, 0) for name in _DROPPED_ON_DEMAND), 0)
        if limit - used < free:
            tightest, free = (limit, used), limit - used
    return tightest


def gpus() -> tuple[Gpu, ...]:
    """Return the CUDA GPUs this process can see, in the order of their numbers; empty without GPU or driver.

    Examples
    --------
    >>> bool(gpus()) == (gpus_missing_because() is None)
    True
    """
    return _probe()[0]


def gpus_missing_because() -> str | None:
    """Return why `gpus` is empty, None if it is not."""
    return _probe()[1]


def compute_capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a GPU, for example ``(9, 0)``.

    Raises
    ------
    ValueError
        If there is no such GPU.
    """
    found = gpus()
    if not 0 <= index < len(found):
        raise ValueError(f"index={index}: there are {len(found)} GPUs{_because()}")
    return found[index].compute_capability


def _because() -> str:
    reason = gpus_missing_because()
    return f" ({reason})" if reason else ""


@cache
def _probe() -> tuple[tuple[Gpu, ...], str | None]:
    """Ask the driver once; its list of GPUs cannot change while a process lives."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return (), "cuda-bindings is not installed: pip install 'kvlab[cu12]' or 'kvlab[cu13]'"
    try:
        _call(driver.cuInit(0))
        count = _call(driver.cuDeviceGetCount())
    except RuntimeError as error:
        return (), f"no usable NVIDIA driver: {error}"
    if count == 0:
        return (), "the NVIDIA driver sees no GPU"
    return tuple(_gpu(driver, index) for index in range(count)), None


def _gpu(driver: Any, index: int) -> Gpu:
    handle = _call(driver.cuDeviceGet(index))

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver.cuDeviceGetAttribute(key, handle)))

    return Gpu(
        index=index,
        name=_call(driver.cuDeviceGetName(256, handle)).partition(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory_total=int(_call(driver.cuDeviceTotalMem(handle))),
        memory_clock_khz=attribute("MEMORY_CLOCK_RATE"),
        memory_bus_bits=attribute("GLOBAL_MEMORY_BUS_WIDTH"),
        l2_nbytes=attribute("L2_CACHE_SIZE"),
    )


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version the installed driver supports, None without a driver."""
    try:
        from cuda.bindings import driver

        version = int(_call(driver.cuDriverGetVersion()))
    except (ImportError, RuntimeError):
        return None
    return version // 1000, version % 1000 // 10


def _call(answer: tuple[Any, ...]) -> Any:
    """Return what a driver call gave, or raise its error: each answers with (error code, values...)."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(getattr(code, "name", str(code)))
    return values[0] if values else None


class enough_memory:
    """Refuse a block that must allocate `need` bytes where they are not available; nothing has happened then.

    CPU memory is asked before the block begins, for a system that promises more than it has would end the
    process later. On a GPU the allocator of torch or CuPy says no before a kernel is launched.

    Parameters
    ----------
    need : int
    what : str
        The call, for the message.
    kind : str
        ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    OutOfMemory
        Naming what is needed and what is available.

    Examples
    --------
    >>> with enough_memory(1 << 60, "attention", "cpu"):
    ...     pass
    Traceback (most recent call last):
        ...
    kvlab.errors.OutOfMemory: attention needs 1048576.00 TiB beyond its arguments, ... available: ...
    """

    __slots__ = ("_kind", "_need", "_what")

    def __init__(self, need: int, what: str, kind: str) -> None:
        self._need, self._what, self._kind = need, what, kind

    def __enter__(self) -> None:
        if self._kind == "cpu" and self._need >= _WORTH_ASKING:
            available = memory_available()
            if self._need > available:
                raise OutOfMemory(
                    f"{self._says()}, {format_size(available)} are available: call it for a part of the "
                    "batch or of the heads at a time"
                )

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Raise `OutOfMemory` from an error of the block if that is what it means."""
        if isinstance(error, Exception) and not isinstance(error, OutOfMemory) and _is_out_of_memory(error):
            raise OutOfMemory(f"{self._says()}: {error}") from error

    def _says(self) -> str:
        return f"{self._what} needs {format_size(self._need)} beyond its arguments"


@contextmanager
def translated_out_of_memory(what: str) -> Iterator[None]:
    """Turn a failed allocation of NumPy, CuPy or torch inside the block into `kvlab.OutOfMemory`.

    Parameters
    ----------
    what : str
        What was being allocated, with its size, for the message.

    Examples
    --------
    >>> import numpy as np
    >>> with translated_out_of_memory("the pages of a cache (4 EiB)"):
    ...     np.empty(1 << 62, np.uint8)
    Traceback (most recent call last):
        ...
    kvlab.errors.OutOfMemory: the pages of a cache (4 EiB): ...
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{what}: {error}") from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
