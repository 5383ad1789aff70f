"""`kvlab test`: run the tests of a part of the library here."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.cli.options import Device, Json, MinVram, Output, Release, Target, Verbose, emit_json


def command(
    target: Target = "all",
    device: Device = "auto",
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, help="Random examples of a property; default: the same 50, with --release 2,000."
        ),
    ] = None,
    min_vram: MinVram = 0.0,
    release: Release = False,
    verbose: Verbose = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes; several need pytest-xdist.")] = 1,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Run the tests of the repository that concern a part of kvlab, on the CPU and on a GPU.

    Exit code 1 if a test fails. Without a GPU the tests of the CPU run, and what is left out is printed with
    its reason. With --release slow tests run, too.

    Example: kvlab test ternary --device cpu
    """
    from kvlab.lab.results import print_table
    from kvlab.lab.targets import machine
    from kvlab.lab.testing import run

    where = machine(device, min_vram)
    result = run(target, where, release=release, verbose=verbose, jobs=jobs, examples=iterations)
    emit_json(result, as_json=as_json, output=output)
    if not as_json:
        print_table(result["rows"], f"tests of {target}")
        for part, reason in result["skipped"].items():
            typer.echo(f"skipped: {part}: {reason}")
    if not result["passed"]:
        raise typer.Exit(1)
