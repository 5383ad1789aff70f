"""`kvlab env`: hardware and versions, and whether the CUDA packages fit together."""

from __future__ import annotations

from typing import Any

import typer

from kvlab.cli.options import Json, Output, emit_json


def command(as_json: Json = False, output: Output = None) -> None:
    """Show hardware and versions, and whether they fit together.

    Exit code 1 if the CUDA parts do not fit together.

    Example: kvlab env --json --output env.json
    """
    from kvlab.environment import report

    result = report()
    emit_json(result, as_json=as_json, output=output)
    if not as_json:
        _print_table(result)
    if result["problems"]:
        raise typer.Exit(1)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in _lines(result):
        table.add_row(label, Text(text))  # as it is: what to install stands in square brackets
    console = Console()
    console.print(table)
    for problem in result["problems"]:
        console.print(f"problem: {problem}", style="red", highlight=False, markup=False)


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table: label and text."""
    from kvlab.sizes import format_size

    cpu, memory = result["cpu"], result["memory"]
    lines = [
        ("kvlab", f"{result['kvlab']}, Python {result['python']}, {result['platform']}"),
        ("cpu", f"{cpu['name']}, {cpu['threads']} threads, {' '.join(cpu['features'])}"),
        ("memory", f"{format_size(memory['total'])}, {format_size(memory['available'])} available"),
    ]
    for gpu in result["gpus"]:
        major, minor = gpu["compute_capability"]
        size = format_size(gpu["memory_total"])
        text = f"{gpu['name']}, sm_{major}{minor}, {gpu['multiprocessors']} SMs, {size}"
        lines.append((f"cuda:{gpu['index']}", text))
    if not result["gpus"]:
        lines.append(("gpu", f"none: {result['gpus_missing_because']}"))
    cuda = ", ".join(f"{part} {version or 'none'}" for part, version in result["cuda"].items())
    installed = ", ".join(f"{name} {version}" for name, version in result["packages"].items() if version)
    absent = ", ".join(name for name, version in result["packages"].items() if not version)
    return [*lines, ("CUDA", cuda), ("packages", installed), ("not installed", absent or "-")]
