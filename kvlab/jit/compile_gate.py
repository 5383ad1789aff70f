"""The compile gate: every kernel compiles for every architecture, without spills, within its registers.

The last lines of a CUDA source are comments that declare its specialisations:

    // gate: HEAD_DIM=64,128 BITS=2,4,8 registers<=128
    // gate: HEAD_DIM=256 BITS=4 registers<=255 arch=sm_90a,sm_100a

A line stands for every combination of its values, for the four gated architectures or those it names. In a
Numba CUDA kernel file the lines begin with ``#`` and name the function that makes the kernel:

    # gate: attend_pages head_dim=64,128 dtype=bfloat16 registers<=168

A kernel fails if the compiler refuses it, if it uses local memory (spilled registers, arrays indexed at run
time) or more registers than its line allows. Registers decide how many blocks fit a multiprocessor, and a
spill can halve the speed; both change silently with an edit elsewhere or another compiler.

``resources.json`` beside the sources holds what the last full run found, one row for each kernel, under
the content key of its cubin. `fast` builds the first combination of every line and all whose key is not in
the table, which is what a change touched; ``python -m kvlab.jit.compile_gate`` builds all and writes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kvlab.errors import BuildError, FormatError
from kvlab.jit.build import build, content_key, kernel_root
from kvlab.jit.cubin import read_resources
from kvlab.jit.numba import build_numba, numba_content_key, numba_kernel_root

__all__ = ["GATED_ARCHS", "Row", "Specialisation", "fast", "full", "specialisations"]

GATED_ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
TABLE = "resources.json"
_PURPOSE = "Compile every declared CUDA kernel and check registers and spills; write the resource table."
_LINE = re.compile(r"^[ \t]*(?://|#)[ \t]*gate[ \t]*:(?P<words>.*)$", re.MULTILINE)
_CODE = re.compile(r"^(?!//|#).*\S", re.MULTILINE)  # a line that is neither a comment nor blank
_WORD = re.compile(r"(?P<name>[A-Za-z_]\w+)=(?P<values>[^\s,]+(?:,[^\s,]+)*)|registers<=(?P<limit>\d+)")


@dataclasses.dataclass(frozen=True)
class Specialisation:
    """One source with one set of macros for one architecture, as a gate line declares it.

    Attributes
    ----------
    name : str
        The source: ``attention/forward.cu``, or ``cuda/packed.py`` and the kernel after a colon.
    macros : tuple of (str, str)
        Macros (for Numba: options) and values, sorted by name.
    arch : str
        Architecture.
    max_registers : int
        Most registers a thread of any of its kernels may take.
    first : bool
        Whether it is the first combination of its line.
    """

    name: str
    macros: tuple[tuple[str, str], ...]
    arch: str
    max_registers: int
    first: bool

    def __str__(self) -> str:
        return " ".join([self.name, self.arch, *(f"{name}={value}" for name, value in self.macros)])


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """What one kernel of one specialisation takes: a line of the resource table."""

    specialisation: str
    kernel: str
    registers: int
    shared_bytes: int
    local_bytes: int
    key: str


def specialisations(root: Path | None = None) -> list[Specialisation]:
    """Everything that the sources in `root` (kvlab's own by default) declare.

    Raises
    ------
    ValueError
        If a source declares nothing, or a line is malformed, stands before code or repeats a specialisation.
    """
    found = []
    folder = kernel_root() if root is None else root
    for path in sorted([*folder.rglob("*.cu"), *folder.glob("*.py")]):
        text, is_numba = path.read_text(encoding="utf-8"), path.suffix == ".py"
        declared = []
        for match in _LINE.finditer(text):
            location = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
            name, words = path.relative_to(folder).as_posix(), match["words"].split()
            if is_numba:
                if not words or f"\ndef {words[0]}(" not in f"\n{text}":
                    raise ValueError(
                        f"{location}: the first word of a gate line is the function that makes the kernel"
                    )
                name = f"{path.name}:{words.pop(0)}"
            if _CODE.search(text, match.end()):
                raise ValueError(
                    f"{location}: gate lines are the last of a source, and code follows this one"
                )
            declared += _expand(name, words, location)
        if not declared and not is_numba:  # Numba files of device functions declare nothing
            raise ValueError(
                f"{path} declares no specialisation; add a line like // gate: BITS=2,4 registers<=128"
            )
        if len(set(map(str, declared))) != len(declared):
            raise ValueError(f"{path}: the // gate: lines declare a specialisation twice")
        found += declared
    return found


def _expand(name: str, words: Sequence[str], location: str) -> list[Specialisation]:
    """All combinations of one line."""
    choices: dict[str, list[str]] = {}
    limits = []
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None or match["name"] in choices:
            raise ValueError(
                f"{location}: {word!r} is not NAME=value[,value...], arch=..., registers<=N, each once"
            )
        if match["limit"]:
            limits.append(int(match["limit"]))
        else:
            choices[match["name"]] = match["values"].split(",")
    if len(limits) != 1:
        raise ValueError(f"{location}: a // gate: line has one registers<=N")
    archs = choices.pop("arch", GATED_ARCHS)
    names = sorted(choices)
    products = itertools.product(*(choices[key] for key in names))
    combinations = [tuple(zip(names, values, strict=True)) for values in products]
    return [
        Specialisation(name, macros, arch, limits[0], first=number == 0)
        for number, macros in enumerate(combinations)
        for arch in archs
    ]


def fast(root: Path | None = None) -> list[str]:
    """Check the first combination of every line, and all that the resource table does not know.

    Parameters
    ----------
    root : Path, optional
        Folder of the sources and of ``resources.json``; kvlab's own by default.

    Returns
    -------
    list of str
        What is wrong, one line each; empty if the gate is passed.
    """
    root = kernel_root() if root is None else root
    declared, table = specialisations(root), _read_table(root / TABLE)
    known = [table.get(_key(item, root), []) for item in declared]
    items = list(zip(declared, known, strict=True))
    to_build = [item for item, rows in items if item.first or not rows]
    built = dict(zip(to_build, _rows_of(to_build, root), strict=True))
    failures = []
    for item, rows in items:
        found = built.get(item, rows)
        failures += _failures(item, found)
        if rows and not _agree(found, rows):
            failures.append(f"{item}: {TABLE} does not hold what the compiler gives; run make compile-gate")
    return failures


def full(root: Path | None = None) -> tuple[list[Row], list[str]]:
    """Build everything that is declared; write the resource table if nothing is wrong.

    Returns
    -------
    rows : list of Row
        One for every kernel of every specialisation that compiles.
    failures : list of str
        What is wrong, as `fast` says it.
    """
    root = kernel_root() if root is None else root
    declared = specialisations(root)
    found = list(zip(declared, _rows_of(declared, root), strict=True))
    failures = [failure for item, rows in found for failure in _failures(item, rows)]
    rows = sorted(row for _, rows in found if isinstance(rows, list) for row in rows)
    if not failures:
        lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows)
        (root / TABLE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return rows, failures


def _agree(found: list[Row] | str, known: list[Row]) -> bool:
    """Whether the compiler gives what the table holds.

    What NVRTC compiled before in a process now and then moves the registers of a kernel by a few, so they may
    differ by 8, the unit in which a multiprocessor gives them out.
    """
    if isinstance(found, str) or len(found) != len(known):
        return False
    return all(
        dataclasses.replace(one, registers=other.registers) == other
        and abs(one.registers - other.registers) <= 8
        for one, other in zip(found, known, strict=True)
    )


def _failures(item: Specialisation, rows: list[Row] | str) -> list[str]:
    if isinstance(rows, str):
        return [rows]
    found = []
    for row in rows:
        if row.local_bytes:
            found.append(
                f"{item}: {row.kernel} has {row.local_bytes} bytes of local memory (spills) a thread"
            )
        if row.registers > item.max_registers:
            found.append(f"{item}: {row.kernel} takes {row.registers} registers of {item.max_registers}")
    return found


def _rows_of(items: list[Specialisation], root: Path) -> list[list[Row] | str]:
    """Rows of every item, or the compiler's log; in processes, as NVRTC compiles one source at a time."""
    workers = min(len(os.sched_getaffinity(0)), len(items) // 4)
    roots = itertools.repeat(root)
    if workers < 2:
        return list(map(_build_rows, items, roots))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_build_rows, items, roots))


def _numba_kernel(item: Specialisation) -> tuple[str, str, dict[str, int | str], str]:
    """Return the arguments of `build_numba` for a kernel that Numba compiles."""
    source, _, kernel = item.name.partition(":")
    options = {name: int(value) if value.isdigit() else value for name, value in item.macros}
    return source.removesuffix(".py"), kernel, options, item.arch


def _build_rows(item: Specialisation, root: Path) -> list[Row] | str:
    try:
        if ":" in item.name:
            built = build_numba(*_numba_kernel(item))
        else:
            built = build(item.name.removesuffix(".cu"), dict(item.macros), item.arch, root=root)
    except BuildError as error:
        return str(error)
    return [
        Row(str(item), kernel, takes.registers, takes.shared_bytes, takes.local_bytes, built.key)
        for kernel, takes in sorted(read_resources(built.cubin).items())
    ]


def _key(item: Specialisation, root: Path) -> str:
    if ":" in item.name:
        return numba_content_key(*_numba_kernel(item))
    return content_key(item.name.removesuffix(".cu"), dict(item.macros), item.arch, root=root)


def _read_table(path: Path) -> dict[str, list[Row]]:
    """Rows of the committed table by content key; empty if there is none."""
    if not path.exists():
        return {}
    table: dict[str, list[Row]] = {}
    try:
        for fields in json.loads(path.read_text(encoding="utf-8")):
            row = Row(**fields)
            table.setdefault(row.key, []).append(row)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path} is damaged ({error}); run make compile-gate to write it again") from error
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate from a shell; the exit code is 0 if it is passed."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.jit.compile_gate", description=_PURPOSE)
    parser.add_argument("--fast", action="store_true", help="only one of each and what changed; no table")
    parser.add_argument("--root", type=Path, help="folder of the sources, kvlab's two by default")
    options = parser.parse_args(arguments)
    failures = []
    for root in [options.root] if options.root else [kernel_root(), numba_kernel_root()]:
        if options.fast:
            failures += fast(root)
            continue
        rows, failed = full(root)
        failures += failed
        for row in rows:
            print(
                f"{row.specialisation} {row.kernel}: {row.registers} registers, {row.shared_bytes} B shared"
            )
    for failure in failures:
        print(failure, file=sys.stderr)
    print("the compile gate failed" if failures else "the compile gate is passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
