"""`kvlab profile`: the cost of calls, and registers, memory and occupancy of their kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.cli.options import Device, Json, MinVram, Output, Release, Target, Verbose, emit_json


def command(
    target: Target = "all",
    device: Device = "auto",
    iterations: Annotated[int, typer.Option(help="Times a call is timed; the median counts.")] = 10,
    min_vram: MinVram = 0.0,
    release: Release = False,
    verbose: Verbose = False,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Time typical calls, and say what their kernels take of a GPU.

    The target may also be "grouped": the implementations of grouped attention; or "engine": a token of a
    decoder, whose shape says, on a GPU, how many lanes of a warp are at work.

    "gflop" and "gbyte" are what a call must compute and move at least, "tflops" and "tb per s" what it
    reaches of that. On a GPU each kernel is listed with its registers, spills, shared memory and occupancy,
    and with its counters where Nsight Compute is on the path. With --release calls of four times the length
    are made, too; with --verbose the grid of a kernel and its shared memory are shown.

    Example: kvlab profile attention --device cpu --iterations 5
    """
    from kvlab.lab.profiling import run
    from kvlab.lab.results import print_table
    from kvlab.lab.targets import machine

    result = run(target, machine(device, min_vram), repeats=iterations, release=release)
    emit_json(result, as_json=as_json, output=output)
    if as_json:
        return
    print_table(result["rows"], f"calls of {target}")
    for rows, title in ((result["kernels"], "kernels"), (result["ncu"], "counters of Nsight Compute")):
        if rows:
            print_table(rows, title, () if verbose else ("grid", "threads", "shared_kib"))
    for part, reason in result["skipped"].items():
        typer.echo(f"skipped: {part}: {reason}")
