"""`kvlab validate`: check that this machine is supported, kernels run, and results are accurate."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvlab.cli.options import Device, Json, MinVram, Output, Release, Target, Verbose, emit_json


def command(
    target: Target = "all",
    device: Device = "auto",
    iterations: Annotated[int, typer.Option(min=1, help="Times each kernel is run.")] = 1,
    min_vram: MinVram = 0.0,
    release: Release = False,
    verbose: Verbose = False,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Check versions and GPUs, run one kernel of each kind, and compare attention with float64.

    "mae", "rmse", "max error" and "cosine" are of out against float64, per shape. float32 must be below 1e-6
    (MAE, RMSE) on the CPU and 1e-5 and 1e-4 on a GPU; 16-bit results below "limit", twice the error of the
    same formula in that precision. Exit code 1 if anything is not as it should be. What cannot be checked
    here is skipped, with its reason.

    Example: kvlab validate attention --device cpu --json
    """
    from kvlab.lab.targets import machine
    from kvlab.lab.validate import run

    result = run(target, machine(device, min_vram), release=release, repeats=iterations)
    emit_json(result, as_json=as_json, output=output)
    if not as_json:
        _print(result, verbose=verbose)
    if not result["passed"]:
        raise typer.Exit(1)


def _print(result: dict[str, Any], *, verbose: bool) -> None:
    from kvlab.lab.results import print_table
    from kvlab.sizes import format_size

    about = result["machine"]
    for gpu in about["gpus"]:
        capability = ".".join(map(str, gpu["compute_capability"]))
        memory = format_size(gpu["memory_total"])
        typer.echo(f"GPU {gpu['index']}: {gpu['name']}, compute capability {capability}, {memory}")
    for line in about["clocks"]:
        typer.echo(f"nvidia-smi: {line}")
    typer.echo("CUDA: " + ", ".join(f"{part} {version or 'none'}" for part, version in about["cuda"].items()))
    if verbose:
        found = (f"{name} {version}" for name, version in about["packages"].items() if version)
        typer.echo("packages: " + ", ".join(found))
    for problem in result["problems"]:
        typer.echo(f"problem: {problem}")
    for kernel in result["kernels"]:
        typer.echo(f"kernel {kernel['operation']}, backend {kernel['backend']}: {kernel['result']}")
    if result["rows"]:
        print_table(result["rows"], "accuracy of attention", () if verbose else ("limit", "from_cpu"))
    for part, reason in result["skipped"].items():
        typer.echo(f"skipped: {part}: {reason}")
    typer.echo("passed" if result["passed"] else "FAILED")
