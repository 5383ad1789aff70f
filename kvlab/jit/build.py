"""Compile CUDA C++ to a cubin: all CUDA C++ of kvlab goes through here.

`build` compiles ``<root>/<name>.cu`` for one exact architecture and keeps the cubin in a folder by the
hash of everything that decides its bytes: the source, every ``.cuh`` it includes, the CUDA headers
kernels may include, macros, options and compiler version. It needs no GPU, so any machine can compile
and check every kernel. `kvlab.jit.launch` puts a cubin on a device.

NVRTC compiles through ``cuda.core``, because CuPy asks the driver before it compiles and leaves included
headers out of its cache key. Kernels are specialised by macros, not by templates: entry names stay readable
and the macros are all there is to hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import SupportsIndex

from kvlab.jit.filecache import FileCache, cache_folder
from kvlab.jit.notice import say_compiling
from kvlab.jit.nvrtc import arch_of, check_arch, compile_cubin, compiler

__all__ = [
    "Built",
    "arch_of",
    "build",
    "content_key",
    "kernel_folder",
    "kernel_root",
    "source_names",
]

_INCLUDED = re.compile(r'^#include "(.+)"', re.MULTILINE)

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
        say_compiling()
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
