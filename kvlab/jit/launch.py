"""Kernels on a device: from a cubin to a launch on the caller's stream.

`load` puts a cubin of `kvlab.jit.build` or `kvlab.jit.numba` on a device and gives back a `Kernel`.
`cuda_kernel` and `numba_kernel` build and load in one step and remember the result. There are two ways to
launch: a call of the `Kernel` with its arguments, and a `PreparedLaunch`, whose one argument is a struct
(`kvlab.jit.structs`) that stays where it is. CuPy holds the modules and makes launches of the first kind;
`kvlab.jit.native` asks the driver for those of the second, several at once if they follow each other.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.device import compute_capability
from kvlab.errors import needs_extra
from kvlab.jit.build import Built, arch_of, build
from kvlab.jit.cubin import Resources, read_resources
from kvlab.jit.native import HELD, Table, Target, allows_cluster
from kvlab.jit.numba import build_numba

__all__ = [
    "Kernel",
    "PreparedLaunch",
    "PreparedLaunches",
    "cuda_kernel",
    "load",
    "numba_kernel",
]

_SHARED_BYTES_UNASKED = 48 * 1024  # static and dynamic together; a kernel that wants more has to ask
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER, _MAX_CLUSTER = 8, 16  # blocks
_COOPERATIVE, _CLUSTER, _EARLY = (
    2,
    4,
    6,
)  # CU_LAUNCH_ATTRIBUTE_: the last is PROGRAMMATIC_STREAM_SERIALIZATION


class Kernel:
    """One entry point of a cubin on one device, made by `load`.

    Attributes
    ----------
    name : str
        The entry point.
    device : int
        Ordinal of the device it is loaded on.
    resources : Resources
        What it takes of the device.
    """

    def __init__(self, function: Any, name: str, device: int, resources: Resources) -> None:
        self.name = name
        self.device = device
        self.resources = resources
        self._function = function
        self._dynamic_shared = _SHARED_BYTES_UNASKED - resources.shared_bytes
        self._argument_types: set[tuple[type, ...]] = set()  # combinations found to fit the parameters

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
        stream_pointer: int = 0,
    ) -> None:
        """Launch on a stream of the kernel's device, the current one or another; returns without waiting.

        Parameters
        ----------
        grid, block : tuple of int
            Blocks and threads in up to three dimensions. A grid with a 0 launches nothing.
        args : sequence
            Device pointers as int, everything else as a NumPy scalar of exactly the parameter's size.
        shared_bytes : int
            Dynamic shared memory per block.
        stream_pointer : int
            ``cudaStream_t`` as int; 0 is the default stream.

        Raises
        ------
        TypeError
            If `args` does not fit the kernel's parameters.
        ValueError
            If the device cannot give `shared_bytes`.
        """
        if 0 in grid:
            return
        self._check_arguments(args)
        self.ask_for_shared(shared_bytes)
        try:
            self._function(grid, block, args, shared_bytes, _stream(stream_pointer))
        except _driver_error():
            with _current(self.device):
                self._function(grid, block, args, shared_bytes, _stream(stream_pointer))

    @property
    def pointer(self) -> int:
        """The ``CUfunction`` as an integer."""
        return int(self._function.ptr)

    def _check_arguments(self, args: Sequence[Any]) -> None:
        types = tuple(map(type, args))
        if types in self._argument_types:
            return
        wanted = self.resources.parameter_bytes
        if len(args) != len(wanted):
            raise TypeError(f"{self.name} has {len(wanted)} parameters, {len(args)} arguments were given")
        for position, (argument, size) in enumerate(zip(args, wanted, strict=True)):
            if isinstance(argument, np.generic):
                given = argument.itemsize
            else:
                given = 8 if type(argument) is int else 0
            if given != size:
                raise TypeError(
                    f"{self.name}: args[{position}]={argument!r} ({type(argument).__name__}) does not fit a "
                    f"parameter of {size} bytes; pass pointers as int, all else as NumPy scalars of its size"
                )
        self._argument_types.add(types)

    def ask_for_shared(self, shared_bytes: int) -> None:
        """Get ready for launches with so much dynamic shared memory; errors as in a call."""
        if shared_bytes <= self._dynamic_shared:
            return
        from cupy.cuda import driver

        try:
            driver.funcSetAttribute(self._function.ptr, _MAX_DYNAMIC_SHARED, shared_bytes)
        except driver.CUDADriverError as error:
            raise ValueError(
                f"{self.name}: device {self.device} cannot give {shared_bytes} bytes of dynamic shared "
                f"memory beside {self.resources.shared_bytes} static bytes ({error})"
            ) from error
        self._dynamic_shared = shared_bytes


class PreparedLaunch:
    """A launch whose grid and arguments stay where they are.

    The host writes new contents into the arguments between launches. A launch takes it 4 us, where a
    `Kernel`, which looks at its arguments every time, takes 7 to 12.

    Parameters
    ----------
    kernel : Kernel
    grid, block : tuple of int
        Blocks in up to three dimensions, threads in one. A grid with a 0 launches nothing.
    argument : array, contiguous
        The kernel's parameters, usually one struct, end to end; read at each launch.
    shared_bytes : int
        Dynamic shared memory per block.
    early : bool
        Whether blocks may come to the device while the kernel before them in the stream still runs; they wait
        for it by ``begin_early`` of ``common/early_launch.cuh``, so no more than the launch is saved. Only
        from compute capability 9.0 on; elsewhere it changes nothing.
    cluster : int
        Blocks, next to each other in x, that the device starts together as a thread block cluster: a divisor
        of the grid's x, up to 16. More than 1 takes compute capability 9.0.
    cooperative : bool
        Whether blocks wait for each other: the driver refuses a grid that is not on the device as a whole.

    Attributes
    ----------
    kernel, grid, block, shared_bytes
        As given.

    Raises
    ------
    TypeError, ValueError
        As a call of the kernel.
    ValueError
        If `cluster` does not fit the grid, or the device has no clusters.
    NotImplementedError
        If it has none of so many blocks.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        block: tuple[int],
        argument: NDArray[Any],
        shared_bytes: int = 0,
        *,
        early: bool = False,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        if early and cooperative:
            raise ValueError(
                "early=True, cooperative=True: blocks that wait for each other cannot share the device with "
                "the launch before, so choose one"
            )
        from cupy.cuda import driver

        hopper = compute_capability(kernel.device) >= (9, 0)
        _check_cluster(kernel, grid[0], cluster, has_clusters=hopper)
        sizes = kernel.resources.parameter_bytes
        if sum(sizes) != argument.nbytes:
            raise TypeError(
                f"{kernel.name}: an argument of {argument.nbytes} bytes does not fit parameters of "
                f"{', '.join(map(str, sizes))} bytes"
            )
        kernel.ask_for_shared(shared_bytes)
        if cluster > _PORTABLE_CLUSTER:
            driver.funcSetAttribute(kernel.pointer, _LARGE_CLUSTERS, 1)
        self.kernel, self.grid, self.block, self.shared_bytes = kernel, grid, block, shared_bytes
        self._argument = argument
        self._pointers = argument.ctypes.data + np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
        self._config = _config(
            (*(*grid, 1, 1)[:3], *block, 1, 1, shared_bytes),
            cooperative=cooperative, early=early and hopper, cluster=cluster,
        )  # fmt: skip
        if cluster > _PORTABLE_CLUSTER and not allows_cluster(kernel.pointer, self._config[0].ctypes.data):
            raise NotImplementedError(
                f"{kernel.name}: cluster={cluster}: device {kernel.device} has no clusters of so many; take "
                f"{_PORTABLE_CLUSTER} or fewer"
            )
        self._table = Table([self.row] if self.row else [], [], self._go_on)

    @property
    def row(self) -> tuple[int, int, int] | None:
        """The launch in a `Table`, which it must outlive; None if nothing is launched."""
        if 0 in self.grid:
            return None
        return self._config[0].ctypes.data, self.kernel.pointer, self._pointers.ctypes.data

    def __call__(self, stream_pointer: int) -> None:
        """Launch on a stream of the kernel's device, the current one or another."""
        self._table.run(stream_pointer)

    def _go_on(self, failed: int) -> None:
        _go_on(self._table, failed, self.kernel.device)


class PreparedLaunches:
    """Prepared launches of one device in turn, behind words that are written into their arguments.

    All of it is one call for the host; only what it writes differs from call to call.

    Parameters
    ----------
    launches : sequence of PreparedLaunch
    targets : sequence of Target
        Where in arguments the values of a call are written, one for each.

    Attributes
    ----------
    launches
        As given.
    run : function
        Write values and launch, given a stream and the values; not in two threads at once.
    """

    def __init__(self, launches: Sequence[PreparedLaunch], targets: Sequence[Target]) -> None:
        self.launches = launches
        self._table = Table([launch.row for launch in launches if launch.row], targets, self._go_on)
        self.run = self._table.run

    def _go_on(self, failed: int) -> None:
        if failed != HELD:
            return _go_on(self._table, failed, self.launches[0].kernel.device)
        # A call for each launch, which can be recorded; nothing is launched where the table only writes.
        self._table.run_from(len(self.launches))
        for launch in self.launches:
            launch(self._table.written()[0])
        return None


def _go_on(table: Table, failed: int, device: int) -> None:
    """Go on with the launch that failed: another device is current, or the thread has not used CUDA yet."""
    if failed == HELD:
        failed = table.run_from(0)
    if failed:
        with _current(device):
            failed = table.run_from(failed >> 32)
    if failed:
        raise _driver_error()(failed & 0xFFFFFFFF)


def _config(
    shape: tuple[int, ...], *, cooperative: bool, early: bool, cluster: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a ``CUlaunchConfig`` without a stream, and the attributes to which it points."""
    wanted = {
        **({_COOPERATIVE: (1, 0, 0)} if cooperative else {}),
        **({_EARLY: (1, 0, 0)} if early else {}),
        **({_CLUSTER: (cluster, 1, 1)} if cluster > 1 else {}),
    }
    packed = b"".join(struct.pack("2I3I52x", which, 0, *value) for which, value in wanted.items())
    attributes = np.frombuffer(packed + bytes(8), np.uint64)
    config = struct.pack("7I4xQQI4x", *shape, 0, attributes.ctypes.data, len(wanted))
    return np.frombuffer(bytearray(config), np.uint64), attributes


@functools.cache
def _driver_error() -> type[Exception]:
    from cupy.cuda import driver

    error: type[Exception] = driver.CUDADriverError
    return error


@contextmanager
def _current(device: int) -> Iterator[None]:
    """For a launch that failed: another device is current, or the thread has not used CUDA yet."""
    import cupy

    with cupy.cuda.Device(device):
        cupy.cuda.runtime.free(0)  # makes the context
        yield


def _check_cluster(kernel: Kernel, blocks: int, cluster: int, *, has_clusters: bool) -> None:
    if not 1 <= cluster <= _MAX_CLUSTER or blocks % cluster:
        raise ValueError(
            f"{kernel.name}: cluster={cluster} must be 1 to {_MAX_CLUSTER} and divide the "
            f"{blocks} blocks in x"
        )
    if cluster > 1 and not has_clusters:
        raise ValueError(
            f"{kernel.name}: cluster={cluster} takes compute capability 9.0, which device {kernel.device} "
            "lacks; launch with cluster=1"
        )


# ---- kernels


@functools.lru_cache(maxsize=1024)
def cuda_kernel(
    name: str, entry: str | None, macros: tuple[tuple[str, int | str], ...], device: int
) -> Kernel:
    """Return kernel `entry` (None: its only one) of ``<name>.cu`` for a device, built or remembered."""
    arch = arch_of(*compute_capability(device))
    return load(build(name, dict(macros), arch), entry, device=device)


@functools.lru_cache(maxsize=1024)
def numba_kernel(module: str, entry: str, options: tuple[tuple[str, Any], ...], device: int) -> Kernel:
    """Return the kernel that `entry` of ``kernels/numba/cuda/<module>.py`` makes, for a device."""
    arch = arch_of(*compute_capability(device))
    return load(build_numba(module, entry, dict(options), arch), entry, device=device)


def load(built: Built, entry: str | None = None, *, device: int | None = None) -> Kernel:
    """Put `built` on a device; later calls give the same `Kernel`.

    Parameters
    ----------
    built : Built
        From `build`, for the architecture of the device.
    entry : str, optional
        Name of the ``extern "C"`` kernel; may be left out if the cubin has only one.
    device : int, optional
        CUDA device ordinal; the current device by default.

    Returns
    -------
    Kernel
        Callable as ``kernel(grid, block, args, shared_bytes, stream_pointer)``.

    Raises
    ------
    ValueError
        If the cubin has no such entry, or several and none is named.
    RuntimeError
        If there is no CUDA device.
    kvlab.errors.MissingExtraError
        If CuPy is not installed.
    """
    kernels = read_resources(built.cubin)
    if entry is None and len(kernels) == 1:
        (entry,) = kernels
    if entry is None or entry not in kernels:
        raise ValueError(
            f"entry={entry!r}: {built.name}.cu has the kernels {', '.join(sorted(kernels)) or 'none'}"
        )
    with needs_extra("cu13", "a CUDA kernel"):
        import cupy
    if not cupy.cuda.is_available():
        raise RuntimeError("no CUDA device was found; the backends 'cpu' and 'reference' work without one")
    ordinal = cupy.cuda.runtime.getDevice() if device is None else device
    return _load(built.key, built.cubin, entry, ordinal)


@functools.cache
def _load(key: str, cubin: bytes, entry: str, device: int) -> Kernel:
    return Kernel(
        _module(key, cubin, device).get_function(entry), entry, device, read_resources(cubin)[entry]
    )


@functools.cache
def _module(key: str, cubin: bytes, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        module = cupy.cuda.function.Module()
        module.load(cubin)
    return module


@dataclasses.dataclass(frozen=True)
class _Stream:
    """All that CuPy's launch reads of a stream."""

    ptr: int


@functools.lru_cache(maxsize=256)
def _stream(pointer: int) -> _Stream:
    return _Stream(pointer)
