"""Options that several commands share, and the output of a result as JSON or to a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.sizes import MAX_FRACTION, parse_budget, parse_size

__all__ = [
    "Device",
    "HeadDim",
    "Json",
    "MinVram",
    "NumHeads",
    "NumKvHeads",
    "NumLayers",
    "NumSamples",
    "Output",
    "Release",
    "Target",
    "Verbose",
    "emit_json",
    "emit_table",
    "fraction",
    "fractions",
    "options_named",
    "size",
    "writable",
]


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the work whose result it gets."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        fault = "Is a folder" if path.is_dir() else f"No such file or directory: {path.parent}"
        raise OSError(f"{option.opts[0]} {path}: {fault}; name a file in a folder that exists")
    return path


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", callback=writable, help="Also write the result to this file as JSON."),
]

Target = Annotated[str, typer.Argument(help="attention (or flash_attention), packed, ternary or all.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the CPU, and a GPU where there is one.")]
MinVram = Annotated[
    float, typer.Option("--min-vram", metavar="GiB", help="Use a GPU only if it has this much memory.")
]
Release = Annotated[bool, typer.Option("--release", help="All cases, as before a release; takes longer.")]
NumSamples = Annotated[
    int, typer.Option(min=0, help="Windows of text to score; 0: enough for 8,192 scored tokens.")
]
NumLayers = Annotated[
    int | None, typer.Option(help="Layers; with the next three options keys and values are synthetic.")
]
NumHeads = Annotated[int | None, typer.Option(help="Query heads.")]
NumKvHeads = Annotated[int | None, typer.Option(help="KV heads; default: as many as query heads.")]
HeadDim = Annotated[int | None, typer.Option(help="Channels of a head.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every column and every case.")]


def size(text: str) -> int:
    """Parse a size on the command line: ``Annotated[int, typer.Option(parser=size, metavar="SIZE")]``."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def fraction(budget: str | float) -> float:
    """Parse a budget on the command line as a part of float16's bytes.

    Examples
    --------
    >>> fraction("0.3"), fraction("30%"), fraction("4bpe")
    (0.3, 0.3, 0.25)
    """
    try:
        number: str | float = float(budget)
    except ValueError:
        number = budget
    try:
        found, fault = parse_budget(number).fraction, "is bytes"
    except ValueError:
        found, fault = None, f"is no number above 0 and at most {MAX_FRACTION}"
    if found is None:
        raise typer.BadParameter(
            f"{budget!r} {fault}; a case is of a part of float16's bytes: write 0.3, 30% or, in bits, 4.8bpe"
        )
    return found


def fractions(words: Iterable[str], text: str) -> tuple[float, ...]:
    """Return `fraction` of the words of ``--budgets``; errors name the option and its text.

    Examples
    --------
    >>> fractions(["0.3", "4bpe"], "0.3 4bpe")
    (0.3, 0.25)
    """
    try:
        return tuple(map(fraction, words))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"--budgets {text!r}: {error}") from None


@contextmanager
def options_named(**options: str) -> Iterator[None]:
    """Let errors inside the block name options of a command, each given by the argument of Python it sets.

    Examples
    --------
    >>> with options_named(cache_budget="--budget", seq_len="--seq-len"):
    ...     raise ValueError("cache_budget='x' is no size; raise cache_budget, or take seq_len=3")
    Traceback (most recent call last):
        ...
    ValueError: --budget 'x' is no size; raise --budget, or take --seq-len 3
    """
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        said = str(error)
        for name, option in options.items():
            said = re.sub(rf"(?<![\w.-]){name}=", f"{option} ", said)
            if "_" in name:  # else it may be a plain word
                said = re.sub(rf"(?<![\w.-]){name}\b", option, said)
        if said != str(error):
            error.args = (said,)
        raise


def emit_table(
    result: dict[str, Any], rows: Sequence[Any], title: str, *, as_json: bool, output: Path | None
) -> None:
    """Print a result as JSON if that was asked for, else its rows as a table; write it to `output`, too."""
    emit_json(result, as_json=as_json, output=output)
    if rows and not as_json:
        from kvlab.lab.results import print_table

        print_table(rows, title)


def emit_json(result: dict[str, Any], *, as_json: bool, output: Path | None) -> None:
    """Print a result if JSON was asked for, and write it where `output` says."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    if as_json:
        typer.echo(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
