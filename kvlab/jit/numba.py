"""Compile a Numba CUDA kernel to a cubin, which `kvlab.jit.launch.load` loads and launches like CUDA C++.

Numba's own launcher takes 24 to 74 us of the host a call and refuses torch's bfloat16 tensors. So Numba is
only the compiler: Python to PTX (NVVM), PTX to the cubin of one exact architecture (nvJitLink), with
no GPU needed. Kernels take plain parameters, as in C: pointers, integers, floats.

A kernel is a function of ``kvlab.numba_kernels.cuda.<module>`` that returns, for its options,

    (Python function, types of its arguments, (threads of a block, blocks of a multiprocessor))

so that options are constants of the kernel, as macros are in CUDA C++. A module with ``CONTRACT = False`` has
every product and sum rounded on its own; else both may become one operation with one rounding. Pointers
are ``CPointer`` types and are indexed like arrays of one dimension, which stand for them in Numba's
simulator. A tuple of scalars becomes one parameter a member. The key of the cache hashes the module and the
files of that folder that it imports.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlab.errors import BuildError, needs_extra
from kvlab.jit.build import Built, digest, kernel_folder, with_included
from kvlab.jit.filecache import FileCache, cache_folder
from kvlab.jit.notice import say_compiling

__all__ = ["build_numba", "numba_content_key", "numba_kernel_root"]

_PARTS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
_IMPORTED = re.compile(r"^from \.(\w+) import", re.MULTILINE)
_compiling = threading.Lock()


def build_numba(module: str, kernel: str, options: Mapping[str, Any], arch: str) -> Built:
    """Compile a kernel of ``kernels/numba/cuda/<module>.py`` for `arch`, or take it from the cache.

    Parameters
    ----------
    module : str
        Source file without ``.py``.
    kernel : str
        Function of the module that makes the kernel; also the name of the entry point.
    options : mapping of str to int, str or tuple of these
        Keyword arguments of that function.
    arch : str
        ``"sm_75"`` or later (``"sm_90a"``); see `kvlab.jit.build.arch_of`.

    Returns
    -------
    kvlab.jit.build.Built
        For `kvlab.jit.launch.load`.

    Raises
    ------
    kvlab.errors.BuildError
        If Numba, NVVM or nvJitLink refuses the kernel.
    ValueError
        If `arch` is no architecture or is older than sm_75.
    kvlab.errors.MissingExtraError
        If numba-cuda is not installed.
    """
    key = numba_content_key(module, kernel, options, arch)
    cubin = _cache(cache_folder() / "cubin").get(key, lambda: _compile(module, kernel, options, arch))
    return Built(f"{module}.{kernel}", _definitions(options), arch, key, cubin)


def numba_content_key(module: str, kernel: str, options: Mapping[str, Any], arch: str) -> str:
    """The `Built.key` that `build_numba` would give, without compiling; arguments and errors as there."""
    _capability(arch)
    texts = with_included(
        f"{module}.py", numba_kernel_root(), lambda text: (f"{name}.py" for name in _IMPORTED.findall(text))
    )
    parts = [compiler(), arch, module, kernel, repr(_definitions(options)), *map(str, texts.items())]
    return digest(parts)


def numba_kernel_root() -> Path:
    """Folder of the Numba CUDA kernels."""
    return kernel_folder("numba") / "cuda"


@functools.cache
def compiler() -> str:
    """Versions of all that decides the bytes of a cubin; a part that is not a package has none."""
    versions = []
    for part in _PARTS:
        try:
            versions.append(f"{part} {importlib.metadata.version(part)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{part} -")
    return ", ".join(versions)


@functools.cache
def _cache(folder: Path) -> FileCache:
    return FileCache(folder)


def _definitions(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in options.items()))


def _capability(arch: str) -> tuple[int, int]:
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None or int(match[1]) < 75:
        raise ValueError(f"arch={arch!r} is not supported; sm_75 and later are, for example 'sm_90a'")
    return int(match[1][:-1]), int(match[1][-1])


def _compile(module: str, kernel: str, options: Mapping[str, Any], arch: str) -> bytes:
    with needs_extra("cu13", "a Numba CUDA kernel"):
        from cuda.core import Program, ProgramOptions

        numba_compiler: Any = importlib.import_module("numba.cuda.compiler")
    say_compiling()
    source = importlib.import_module(f"kvlab.numba_kernels.cuda.{module}")
    make = getattr(source, kernel)
    capability = _capability(arch)
    try:
        with _for_architecture(capability):
            function, arguments, bounds = make(**options)
            # What `numba.cuda.compile_ptx` does; it does not pass NVVM's option `fma` on.
            library, _ = numba_compiler._compile_pyfunc_with_fixup(
                function, arguments, device=False, abi="numba", cc=capability, launch_bounds=bounds
            )
            library._nvvm_options["fma"] = int(getattr(source, "CONTRACT", True))
            (ptx,) = library.get_asm_strs(cc=capability)
        (entry,) = re.findall(r"\.entry (\w+)", ptx)
        program = Program(ptx.replace(entry, kernel), "ptx", ProgramOptions(arch=arch))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # Numba, NVVM and nvJitLink have no common class
        given = " ".join(f"{name}={value}" for name, value in _definitions(options))
        raise BuildError(f"{module}.{kernel} for {arch} {given}\n{error}") from error


@contextmanager
def _for_architecture(capability: tuple[int, int]) -> Iterator[None]:
    """Compile device functions for this architecture: Numba would ask the current device for its own."""
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    with _compiling:
        ask = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        try:
            yield
        finally:
            dispatcher.get_current_device = ask
