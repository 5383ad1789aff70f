"""`kvlab clean`: delete what kvlab keeps on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.options import Json, Output, Target, emit_json


def command(
    target: Target = "all",
    results: Annotated[
        Path | None, typer.Option(help="Also the results in this folder: .json files that kvlab wrote.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete; otherwise the list is all.")] = False,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """List compiled kernels and results of kvlab on disk, and delete them with --yes.

    Kernels are compiled again when they are needed. Only what kvlab wrote is listed, and only what is listed
    is deleted. Compiled kernels are kept by content, so `all` is the only target.

    Example: kvlab clean --results results --yes
    """
    from kvlab.lab.cleaning import find, remove
    from kvlab.lab.targets import resolve
    from kvlab.sizes import format_size

    if resolve(target) != resolve("all"):
        raise ValueError(
            f"target={target!r}: compiled kernels are kept by their content, not by target; take target all "
            "(kernels that are needed are compiled again)"
        )
    found = find(results)
    if yes:
        remove(found)
    emit_json({"deleted": yes, "found": found}, as_json=as_json, output=output)
    if as_json:
        return
    for entry in found:
        size = format_size(entry["bytes"])
        typer.echo(f"{entry['what']}: {entry['path']} ({entry['files']} files, {size})")
    if not found:
        typer.echo("there is nothing to clean")
    elif yes:
        typer.echo("deleted")
    else:
        typer.echo("nothing was deleted: add --yes to delete these")
