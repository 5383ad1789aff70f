"""CUDA source to cubin to launchable kernel; the one road all CUDA C++ of kvlab takes.

`build` compiles ``<root>/<name>.cu`` with NVRTC for one exact architecture and keeps the cubin in a folder by the hash of
everything that decides its bytes: the source, every ``.cuh``, the CUDA headers kernels may include, macros, options and
compiler version. It needs neither a GPU nor a driver nor nvcc, so a machine without a GPU can compile and check every
kernel. `load` puts a cubin on a device and gives back a `Kernel`, which launches on the caller's stream.

NVRTC is driven through ``cuda.core`` because CuPy asks the driver before it compiles and leaves included headers out of its
cache key; launching goes through CuPy, which holds the modules. Kernels are specialised by macros, not templates: the entry
names stay readable and the macros are all there is to hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import io
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import needs_extra
from kvlab.filecache import FileCache, cache_folder

__all__ = ["BuildError", "Built", "Kernel", "arch_of", "build", "kernel_root", "load"]

_STD = "c++17"
_CUDA_HEADERS = ("cuda_fp16", "cuda_bf16", "cuda_fp8")  # the only CUDA headers kernels include, so the only ones hashed
_STATIC_SHARED_LIMIT = 48 * 1024  # bytes a kernel may use before it has to ask for more
_MAX_DYNAMIC_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class BuildError(RuntimeError):
    """NVRTC refused a source; the message is its log, with file and line of every error."""


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


def build(name: str, macros: Mapping[str, int | str], arch: str, *, root: Path | None = None) -> Built:
    """Compile ``<root>/<name>.cu`` for `arch`, or take it from the cache.

    Parameters
    ----------
    name : str
        Source file without ``.cu``.
    macros : mapping of str to int or str
        ``-D`` definitions. Names have at least two characters: one-letter macros break NVRTC's own headers.
    arch : str
        ``"sm_80"`` or later, as NVRTC knows it (``"sm_90a"``, ``"sm_120a"``); see `arch_of`.
    root : Path, optional
        Folder of the sources, with their shared headers in ``include/``; kvlab's own (`kernel_root`) by default.

    Returns
    -------
    Built
        The cubin and what it was made from.

    Raises
    ------
    BuildError
        If NVRTC refuses the source.
    ValueError
        If there is no such source, a macro is malformed, or NVRTC does not know `arch`.
    kvlab.errors.MissingExtraError
        If ``cuda.core`` is not installed.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (root / "fill.cu").write_text('extern "C" __global__ void fill(int* out) { out[threadIdx.x] = VALUE; }')
    >>> built = build("fill", {"VALUE": 7}, "sm_90a", root=root)
    >>> built.arch, built.cubin[1:4]
    ('sm_90a', b'ELF')
    """
    root = kernel_root() if root is None else root
    path = root / f"{name}.cu"
    if not path.is_file():
        known = sorted(source.stem for source in root.glob("*.cu"))
        raise ValueError(f"name={name!r}: no such kernel source in {root}; there are {known}")
    _check_arch(arch)
    definitions = _definitions(macros)
    source = path.read_text()
    key = _key(source, root / "include", definitions, arch)
    cubin = _cache(cache_folder() / "cubin").get(key, lambda: _compile(path, source, definitions, arch))
    return Built(name, definitions, arch, key, cubin)


def arch_of(major: int, minor: int) -> str:
    """NVRTC's name of the architecture with this compute capability, with its own features from 9.0 on.

    Examples
    --------
    >>> arch_of(8, 6), arch_of(9, 0)
    ('sm_86', 'sm_90a')
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def kernel_root() -> Path:
    """Folder of kvlab's own CUDA sources: the installed ``kvlab.cuda_kernels``, or ``kernels/cuda`` of a checkout."""
    spec = importlib.util.find_spec("kvlab.cuda_kernels")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[1] / "kernels" / "cuda"


# ---- what decides the bytes


def _definitions(macros: Mapping[str, int | str]) -> tuple[tuple[str, str], ...]:
    """`macros` as text, sorted, after checking every name and value."""
    definitions = []
    for name, value in macros.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]+", name):
            raise ValueError(f"macros: {name!r} is no macro name; an identifier of two or more characters is")
        if isinstance(value, str):
            text = value
        else:
            try:
                text = str(operator.index(value))
            except TypeError:
                raise ValueError(f"macros[{name!r}]={value!r} is {type(value).__name__}; int and str are supported") from None
        if not text or not text.isprintable():
            raise ValueError(f"macros[{name!r}]={value!r} is empty or has characters that cannot stand in one line")
        definitions.append((name, text))
    return tuple(sorted(definitions))


@functools.cache
def _check_arch(arch: str) -> None:
    with needs_extra("cu13", "kvlab.build"):
        from cuda.bindings import nvrtc
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    known = [number for number in nvrtc.nvrtcGetSupportedArchs()[1] if number >= 80]
    if match is None or int(match[1]) not in known:
        names = ", ".join(arch_of(number // 10, number % 10) for number in known)
        raise ValueError(f"arch={arch!r} is not supported by this NVRTC; supported are {names}")


def _key(source: str, include: Path, definitions: Sequence[tuple[str, str]], arch: str) -> str:
    digest = hashlib.sha256()
    parts = [_compiler(), _STD, arch, source, *(f"{name}={value}" for name, value in definitions)]
    for header in sorted(include.glob("*.cuh")):
        parts += [header.name, header.read_text()]
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


@functools.cache
def _compiler() -> str:
    """NVRTC's version and a hash of the CUDA headers that kernels may include."""
    with needs_extra("cu13", "kvlab.build"):
        from cuda.bindings import nvrtc
    digest = hashlib.sha256()
    for stem in _CUDA_HEADERS:
        for suffix in (".h", ".hpp"):
            digest.update((_cuda_include() / (stem + suffix)).read_bytes())
    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor} headers {digest.hexdigest()}"


@functools.cache
def _cuda_include() -> Path:
    """Folder of ``cuda_fp16.h``: the nvidia-cuda-runtime package, a conda environment or a CUDA toolkit."""
    with needs_extra("cu13", "kvlab.build"):
        from cuda.pathfinder import find_nvidia_header_directory
    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda_fp16.h").is_file():
        raise BuildError("cuda_fp16.h was not found: pip install nvidia-cuda-runtime of NVRTC's version (13.0)")
    return Path(found)


# ---- NVRTC


@functools.cache
def _cache(folder: Path) -> FileCache:
    return FileCache(folder)


def _compile(path: Path, source: str, definitions: Sequence[tuple[str, str]], arch: str) -> bytes:
    with needs_extra("cu13", "kvlab.build"):
        from cuda.core import Program, ProgramOptions
    options = ProgramOptions(
        name=path.name,
        std=_STD,
        arch=arch,
        define_macro=list(definitions),
        include_path=[str(path.parent / "include"), str(_cuda_include())],
    )
    log = io.StringIO()
    try:
        program = Program(source, "c++", options)
        return bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's error class is private; everything it raises here carries NVRTC's log
        with_macros = " ".join(f"-D{name}={value}" for name, value in definitions)
        raise BuildError(f"{path} for {arch} {with_macros}\n{error}") from error


# ---- on a device


class Kernel:
    """One entry point of a cubin on one device. Made by `load`."""

    def __init__(self, function: Any, name: str) -> None:
        from cupy.cuda import driver

        self.name = name
        self._function = function
        self._set_attribute = driver.funcSetAttribute
        self._shared_bytes = _STATIC_SHARED_LIMIT

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
        stream_pointer: int = 0,
    ) -> None:
        """Launch on the stream with this handle; returns at once.

        Parameters
        ----------
        grid, block : tuple of int
            Blocks and threads in up to three dimensions. A grid with a 0 launches nothing.
        args : sequence
            Device pointers as int, scalars as NumPy scalars of the parameter's exact type.
        shared_bytes : int
            Dynamic shared memory, bytes.
        stream_pointer : int
            ``cudaStream_t`` as int; 0 is the default stream.
        """
        if 0 in grid:
            return
        if shared_bytes > self._shared_bytes:
            self._set_attribute(self._function.ptr, _MAX_DYNAMIC_SHARED_ATTRIBUTE, shared_bytes)
            self._shared_bytes = shared_bytes
        self._function(grid, block, args, shared_bytes, _stream(stream_pointer))


class _Stream:
    """What CuPy's launch reads of a stream."""

    def __init__(self, pointer: int) -> None:
        self.ptr = pointer


@functools.lru_cache(maxsize=256)
def _stream(pointer: int) -> _Stream:
    return _Stream(pointer)


def load(built: Built, entry: str | None = None, *, device: int | None = None) -> Kernel:
    """Put `built` on a device (the current one by default); repeated calls give the same `Kernel`.

    Parameters
    ----------
    built : Built
        From `build`.
    entry : str, optional
        Name of the ``extern "C"`` kernel; the source's name by default.
    device : int, optional
        CUDA device ordinal.
    """
    with needs_extra("cu13", "launching a CUDA kernel"):
        import cupy
    if not cupy.cuda.is_available():
        raise RuntimeError("no CUDA device was found; backend='cpu' and backend='reference' run without one")
    ordinal = cupy.cuda.runtime.getDevice() if device is None else device
    found = _kernels.get((ordinal, built.key, entry))
    if found is None:
        with cupy.cuda.Device(ordinal):
            module = _modules.get((ordinal, built.key))
            if module is None:
                module = cupy.cuda.function.Module()
                module.load(built.cubin)
                module = _modules.setdefault((ordinal, built.key), module)
            name = built.name if entry is None else entry
            found = _kernels.setdefault((ordinal, built.key, entry), Kernel(module.get_function(name), name))
    return found


_modules: dict[tuple[int, str], Any] = {}
_kernels: dict[tuple[int, str, str | None], Kernel] = {}
