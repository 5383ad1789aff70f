"""Helpers for launchers of GPU kernels: contiguous arrays, launches in turn, a flag that kernels raise.

An array stays in its library: torch allocates and copies memory for torch tensors, CuPy for all others.
Kernels run on the current stream of that library. Only `Flag.is_raised` and `to_host` wait for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from kvlab.new_arrays import empty, on_device_of
from kvlab.views import CudaView, cuda_view, current_stream, to_numpy_view

__all__ = [
    "Flag",
    "contiguous",
    "copied",
    "dense_pointer",
    "dense_strides",
    "launch",
    "launch_sequence",
    "memory_bandwidth",
    "multiprocessors",
    "permuted",
    "pointer",
    "to_host",
]

_ALIGNMENT = 16  # bytes that a thread reads at once


def contiguous(x: Any, name: str) -> Any:
    """Return `x` as a torch tensor or CuPy array in contiguous, aligned memory: itself, or a copy."""
    view = cuda_view(x, name)
    if not hasattr(x, "contiguous") and not hasattr(x, "get"):  # neither torch nor CuPy
        import cupy

        x = cupy.from_dlpack(x)
    if view.strides != dense_strides(view.shape):
        return x.contiguous() if hasattr(x, "contiguous") else x.copy(order="C")
    return copied(x) if view.pointer % _ALIGNMENT else x


def copied(x: Any) -> Any:
    """Return a copy in memory of its own, on the stream that is current in its library."""
    return x.clone() if hasattr(x, "clone") else x.copy()


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array, counted in elements."""
    return tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def permuted(x: Any, order: Sequence[int]) -> Any:
    """Return `x` with its axes in another order: axis i of the result is axis order[i]; a view."""
    return x.permute(*order) if hasattr(x, "permute") else x.transpose(*order)


def pointer(x: Any) -> int:
    """Return the address of an array on a GPU; 0 for None."""
    return 0 if x is None else cuda_view(x, "x").pointer


def dense_pointer(view: CudaView, name: str) -> int:
    """Return the address of an array that must be contiguous, because kernels take it for that."""
    if view.strides != dense_strides(view.shape) and 0 not in view.shape:
        raise ValueError(
            f"{name} must be contiguous, got strides {view.strides} of shape {view.shape}; pass a copy"
        )
    return view.pointer


def to_host(x: Any, name: str) -> NDArray[Any]:
    """Return a copy in CPU memory, of which errors name elements; waits for the GPU."""
    return to_numpy_view(x.cpu() if hasattr(x, "cpu") else contiguous(x, name).get(), name)


class Flag:
    """A word on the GPU that kernels set where something is wrong.

    Parameters
    ----------
    like : array
        On whose device and stream.
    wanted : bool
        Whether anyone wants to know. If not, CUDA C++ kernels get a null pointer and set nothing.
    backend : str
        Kernels of "numba" set a word in any case.
    """

    def __init__(self, like: Any, wanted: bool, backend: str) -> None:
        self._wanted = wanted
        self._word: Any = None
        if wanted or backend == "numba":
            self._word = empty((1,), "int32", like)
            with on_device_of(self._word):
                self._word[...] = 0

    @property
    def pointer(self) -> int:
        """Address for kernels."""
        return pointer(self._word)

    def is_raised(self) -> bool:
        """Return whether a kernel has set it; waits for the GPU, if anyone wants to know."""
        return self._wanted and bool(self._word.item())


@lru_cache(maxsize=16)
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a device has."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@lru_cache(maxsize=16)
def memory_bandwidth(device: int) -> float:
    """Return the bytes a second of a device's memory, by its clock and width."""
    import cupy

    kilohertz, bits = (cupy.cuda.runtime.deviceGetAttribute(which, device) for which in (36, 37))
    return float(2e3 * kilohertz * bits / 8)  # two transfers a clock


@lru_cache(maxsize=16)
def shared_memory_per_block(device: int) -> int:
    """Return the bytes of shared memory that a block of a device can ask for."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def launch(
    kernel: Any,
    grid: int | tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    like: Any,
    shared_bytes: int = 0,
) -> None:
    """Launch on the device and the current stream of `like`; returns without waiting."""
    launch_sequence([(kernel, grid if isinstance(grid, tuple) else (grid,), block, args, shared_bytes)], like)


def launch_sequence(
    launches: Sequence[tuple[Any, tuple[int, ...], tuple[int, ...], Sequence[Any], int]], like: Any
) -> None:
    """As `launch`, kernels of one device in turn: kernel, grid, block, arguments, shared bytes of each."""
    import cupy

    stream = current_stream(like)
    with cupy.cuda.Device(launches[0][0].device):
        for kernel, grid, block, args, shared_bytes in launches:
            kernel(grid, block, args, shared_bytes, stream)
