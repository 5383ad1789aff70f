"""NVRTC, the CUDA compiler that is a library: source text in, cubin out, without a GPU, a driver or nvcc.

Only this module knows where the compiler and the CUDA headers are: in the packages nvidia-cuda-nvrtc and
nvidia-cuda-runtime, in a conda environment or in a CUDA toolkit, whichever ``cuda.pathfinder`` finds first.
Kernels include nothing of CUDA but ``cuda_fp16.h``, ``cuda_bf16.h`` and ``cuda_fp8.h``; these need no further
package (cooperative groups and ``mma.h`` would).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import BuildError, MissingExtraError, needs_extra

__all__ = ["arch_of", "check_arch", "compile_cubin", "compiler"]

_STD = "c++17"
_CUDA_HEADERS = ("cuda_fp16", "cuda_bf16", "cuda_fp8")


def arch_of(major: int, minor: int) -> str:
    """NVRTC's name of a compute capability, with all of the architecture's own features (``a``) from 9.0 on.

    Examples
    --------
    >>> arch_of(8, 6), arch_of(9, 0)
    ('sm_86', 'sm_90a')
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def check_arch(arch: str) -> None:
    """Raise `ValueError` unless this NVRTC compiles for `arch`, ``sm_80`` or later."""
    numbers = [number for number in _nvrtc().nvrtcGetSupportedArchs()[1] if number >= 80]
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None or int(match[1]) not in numbers:
        known = ", ".join(arch_of(*divmod(number, 10)) for number in numbers)
        raise ValueError(f"arch={arch!r} is not supported by this NVRTC; supported are {known}")


@functools.cache
def compiler() -> str:
    """All of the compiler that decides the bytes of a cubin: version, build, options, CUDA headers."""
    nvrtc = _nvrtc()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    _, major, minor = nvrtc.nvrtcVersion()
    library = load_nvidia_dynamic_lib("nvrtc").abs_path
    build = (
        Path(library).stat().st_size if library else 0
    )  # releases differ in it; the version has no third number
    headers = hashlib.sha256()
    for stem in _CUDA_HEADERS:
        for suffix in (".h", ".hpp"):
            headers.update((_cuda_include() / (stem + suffix)).read_bytes())
    return f"nvrtc {major}.{minor} {build} {_STD} {headers.hexdigest()}"


def compile_cubin(
    path: Path, root: Path, source: str, definitions: Sequence[tuple[str, str]], arch: str
) -> bytes:
    """Compile `source`, the text of `path`, whose headers lie in folders of `root`.

    Parameters
    ----------
    path : Path
        Names the source in error messages.
    root : Path
        Folder that included names start from.
    source : str
        CUDA C++.
    definitions : sequence of (str, str)
        Macros and what they stand for.
    arch : str
        Exact architecture, as `check_arch` accepts it.

    Returns
    -------
    bytes
        The cubin, an ELF image.

    Raises
    ------
    kvlab.errors.BuildError
        With NVRTC's log, if it refuses the source.
    """
    with needs_extra("cu13", "kvlab.jit.build"):
        from cuda.core import Program, ProgramOptions
    options = ProgramOptions(
        name=path.name,
        std=_STD,
        arch=arch,
        define_macro=list(definitions) or None,
        include_path=[str(root), str(_cuda_include())],
    )
    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # the class cuda.core raises is private; its message holds NVRTC's log
        macros = " ".join(f"-D{name}={value}" for name, value in definitions)
        raise BuildError(f"{path} for {arch} {macros}\n{error}") from error


@functools.cache
def _nvrtc() -> Any:
    """The bindings of NVRTC, known to find the library."""
    with needs_extra("cu13", "kvlab.jit.build"):
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError
    try:
        nvrtc.nvrtcVersion()
    except DynamicLibNotFoundError:
        raise MissingExtraError(
            "kvlab.jit.build needs the library NVRTC, which was not found: pip install 'kvlab[cu13]'"
        ) from None
    return nvrtc


@functools.cache
def _cuda_include() -> Path:
    """Folder of ``cuda_fp16.h``: the nvidia-cuda-runtime package, a conda environment or a CUDA toolkit."""
    with needs_extra("cu13", "kvlab.jit.build"):
        from cuda.pathfinder import find_nvidia_header_directory
    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda_fp16.h").is_file():
        raise MissingExtraError(
            "kvlab.jit.build needs cuda_fp16.h, which was not found: pip install 'kvlab[cu13]'"
        )
    return Path(found)
