"""Compile CUDA C++ to a cubin and load it as a launchable kernel: all CUDA C++ of kvlab goes through here.

`build` compiles ``<root>/<name>.cu`` for one exact architecture and keeps the cubin in a folder by the
hash of everything that decides its bytes: the source, every ``.cuh`` it includes, the CUDA headers
kernels may include, macros, options and compiler version. It needs no GPU, so any machine can compile
and check every kernel. `load` puts a cubin on a device and gives back a `Kernel`, which launches on the
caller's stream.

NVRTC compiles through ``cuda.core``, because CuPy asks the driver before it compiles and leaves included
headers out of its cache key; launching goes through CuPy, which holds the modules. Kernels are
specialised by macros, not by templates: entry names stay readable and the macros are all there is to
hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvlab.device import compute_capability
from kvlab.errors import needs_extra
from kvlab.jit.cubin import Resources, read_resources
from kvlab.jit.filecache import FileCache, cache_folder
from kvlab.jit.nvrtc import arch_of, check_arch, compile_cubin, compiler

__all__ = [
    "Built",
    "Kernel",
    "arch_of",
    "build",
    "content_key",
    "kernel_folder",
    "kernel_root",
    "load",
    "source_names",
]

_SHARED_BYTES_UNASKED = 48 * 1024  # static and dynamic together; a kernel that wants more has to ask
_INCLUDED = re.compile(r'^#include "(.+)"', re.MULTILINE)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Macros = Mapping[str, SupportsIndex | str]


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled kernel source.

    Attributes
    ----------
    name : str
        The source without ``.cu``.
    macros : tuple of (str, str)
        Macros it was specialised with, sorted by name.
    arch : str
        Architecture, for example ``"sm_90a"``.
    key : str
        SHA-256 over all that decides `cubin`, hexadecimal.
    cubin : bytes
        ELF image for `arch`.
    """

    name: str
    macros: tuple[tuple[str, str], ...]
    arch: str
    key: str
    cubin: bytes = dataclasses.field(repr=False)


def build(name: str, macros: Macros, arch: str, *, root: Path | None = None) -> Built:
    """Compile ``<root>/<name>.cu`` for `arch`, or take it from the cache.

    Parameters
    ----------
    name : str
        Source file without ``.cu``, with its folder: ``"attention/forward"``.
    macros : mapping of str to int or str
        ``-D`` definitions. Names have at least two characters: one-letter macros break NVRTC's own headers.
    arch : str
        ``"sm_80"`` or later, as NVRTC knows it (``"sm_90a"``, ``"sm_120a"``); see `arch_of`.
    root : Path, optional
        Folder of the sources, from which headers are included, too; kvlab's own (`kernel_root`) by default.

    Returns
    -------
    Built
        The cubin and what it was made from.

    Raises
    ------
    kvlab.errors.BuildError
        If NVRTC refuses the source.
    ValueError
        If there is no such source, a macro is malformed, or NVRTC does not know `arch`.
    kvlab.errors.MissingExtraError
        If ``cuda.core``, NVRTC or the CUDA headers are not installed.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (root / "fill.cu").write_text('extern "C" __global__ void fill(int* out) { *out = VALUE; }')
    >>> built = build("fill", {"VALUE": 7}, "sm_90a", root=root)
    >>> built.macros, built.arch, built.cubin[1:4]
    ((('VALUE', '7'),), 'sm_90a', b'ELF')
    """
    request = _request(name, macros, arch, root)
    cubin = _cache(cache_folder() / "cubin").get(request.key, lambda: request.compile())
    return Built(name, request.definitions, arch, request.key, cubin)


def content_key(name: str, macros: Macros, arch: str, *, root: Path | None = None) -> str:
    """The `Built.key` that `build` would give, without compiling; arguments and errors as there."""
    return _request(name, macros, arch, root).key


def kernel_root() -> Path:
    """Folder of kvlab's own CUDA sources."""
    return kernel_folder("cuda")


def source_names(root: Path) -> list[str]:
    """Names of all CUDA sources below `root`, as `build` takes them, sorted."""
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.cu"))


@functools.cache
def kernel_folder(kind: str) -> Path:
    """Folder of the kernels of a kind, "cuda" or "numba": the installed package or a checkout's folder."""
    spec = importlib.util.find_spec(f"kvlab.{kind}_kernels")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "kernels" / kind


# ---- what decides the bytes


@dataclasses.dataclass(frozen=True)
class _Request:
    path: Path
    root: Path
    source: str
    definitions: tuple[tuple[str, str], ...]
    arch: str
    key: str

    def compile(self) -> bytes:
        return compile_cubin(self.path, self.root, self.source, self.definitions, self.arch)


def _request(name: str, macros: Macros, arch: str, root: Path | None) -> _Request:
    root = kernel_root() if root is None else root
    path = root / f"{name}.cu"
    if not path.is_file():
        known = ", ".join(source_names(root)) or "none"
        raise ValueError(f"name={name!r}: no such kernel source in {root}; there are: {known}")
    definitions = _definitions(macros)
    check_arch(arch)
    texts = with_included(f"{name}.cu", root, _INCLUDED.findall)
    parts = [compiler(), arch, *(f"{key}={value}" for key, value in definitions), *map(str, texts.items())]
    return _Request(path, root, texts[f"{name}.cu"], definitions, arch, digest(parts))


def _definitions(macros: Macros) -> tuple[tuple[str, str], ...]:
    """`macros` as text, sorted, every name and value checked."""
    definitions = []
    for name, value in macros.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]+", name):
            raise ValueError(f"macros: {name!r} is no macro name; an identifier of two or more characters is")
        try:
            text = value if isinstance(value, str) else str(operator.index(value))
        except TypeError:
            kind = type(value).__name__
            raise ValueError(f"macros[{name!r}]={value!r} is a {kind}; int and str are supported") from None
        if not text or not text.isprintable():
            raise ValueError(f"macros[{name!r}]={value!r} is empty or cannot stand on one line")
        definitions.append((name, text))
    return tuple(sorted(definitions))


def with_included(first: str, root: Path, included: Callable[[str], Iterable[str]]) -> dict[str, str]:
    """Texts of a source file and of all that it includes, by name, sorted; compilers name what is missing.

    Names are paths below `root`; `included` finds those that a text includes.
    """
    texts: dict[str, str] = {}
    wanted = [first]
    while wanted:
        name = wanted.pop()
        if name not in texts and (root / name).is_file():
            texts[name] = (root / name).read_text(encoding="utf-8")
            wanted += included(texts[name])
    return dict(sorted(texts.items()))


def digest(parts: Iterable[str]) -> str:
    """Hash of all `parts` and of where each ends."""
    found = hashlib.sha256()
    for part in map(str.encode, parts):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


@functools.cache
def _cache(folder: Path) -> FileCache:
    return FileCache(folder)


# ---- on a device


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
        self.accept(args, shared_bytes)
        try:
            self._function(grid, block, args, shared_bytes, _stream(stream_pointer))
        except _driver_error():
            with _current(self.device):
                self._function(grid, block, args, shared_bytes, _stream(stream_pointer))

    @property
    def pointer(self) -> int:
        """The ``CUfunction`` as an integer."""
        return int(self._function.ptr)

    def accept(self, args: Sequence[Any], shared_bytes: int) -> None:
        """Check arguments and get ready for so much dynamic shared memory; errors as in a call."""
        types = tuple(map(type, args))
        if types not in self._argument_types:
            self._check_arguments(args)
            self._argument_types.add(types)
        if shared_bytes > self._dynamic_shared:
            self._ask_for_shared(shared_bytes)

    def _check_arguments(self, args: Sequence[Any]) -> None:
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

    def _ask_for_shared(self, shared_bytes: int) -> None:
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
    """A launch whose grid and argument stay where they are, for kernels of one argument, a struct.

    The host writes new contents into the struct between launches. A launch takes it 2 us, where a `Kernel`,
    which looks at its arguments every time, takes 5 to 10.

    Parameters
    ----------
    kernel : Kernel
    grid, block : tuple of int
        Blocks in up to three dimensions, threads in one.
    argument : structured array, (1,)
        The struct; read at each launch.
    shared_bytes : int
        Dynamic shared memory per block.
    early : bool
        Whether blocks may come to the device while the kernel before them in the stream still runs; they wait
        for it by ``begin_early`` of ``common/early_launch.cuh``, so no more than the launch is saved. Only
        from compute capability 9.0 on; elsewhere it changes nothing.
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
        cooperative: bool = False,
    ) -> None:
        if early and cooperative:
            raise ValueError(
                "early=True, cooperative=True: blocks that wait for each other cannot share the device with "
                "the launch before, so choose one"
            )
        from cupy.cuda import driver

        kernel.accept((argument[0],), shared_bytes)
        self.kernel, self.grid, self.block, self.shared_bytes = kernel, grid, block, shared_bytes
        self._argument = argument
        self._pointers = np.array([argument.ctypes.data], np.uint64)
        address = int(self._pointers.ctypes.data)
        shape = (*(*grid, 1, 1)[:3], *block, 1, 1, shared_bytes)
        if cooperative or (early and compute_capability(kernel.device) >= (9, 0)):
            attribute = "cooperative" if cooperative else "programmaticStreamSerializationAllowed"
            self._launch: Callable[[int], None] = _launch_with(attribute, kernel.pointer, shape, address)
        else:
            fixed, launch = (kernel.pointer, *shape), driver.launchKernel
            self._launch = lambda stream: launch(*fixed, stream, address, 0)
        self._error = _driver_error()

    def __call__(self, stream_pointer: int) -> None:
        """Launch on a stream of the kernel's device, the current one or another."""
        try:
            self._launch(stream_pointer)
        except self._error:
            with _current(self.kernel.device):
                self._launch(stream_pointer)


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


_ATTRIBUTES = {
    "programmaticStreamSerializationAllowed": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    "cooperative": "CU_LAUNCH_ATTRIBUTE_COOPERATIVE",
}


def _launch_with(option: str, function: int, shape: tuple[int, ...], address: int) -> Callable[[int], None]:
    """Return a launch with an attribute, "early" or "cooperative", which CuPy's launches do not offer."""
    from cuda.bindings import driver
    from cupy.cuda import driver as cupy_driver

    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    names = [f"{what}Dim{axis}" for what in ("grid", "block") for axis in "XYZ"]
    for name, value in zip((*names, "sharedMemBytes"), shape, strict=True):
        setattr(config, name, value)
    attribute.id = getattr(driver.CUlaunchAttributeID, _ATTRIBUTES[option])
    setattr(attribute.value, option, 1)
    config.attrs, config.numAttrs = [attribute], 1

    def launch(stream_pointer: int) -> None:
        config.hStream = stream_pointer
        (error,) = driver.cuLaunchKernelEx(config, function, address, 0)
        if error:
            raise cupy_driver.CUDADriverError(int(error))

    return launch


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
