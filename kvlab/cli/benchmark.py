"""`kvlab benchmark`: speed of one part of the library, beside a baseline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.cli.options import Device, Json, MinVram, Release, Verbose, size

Case = Annotated[
    str,
    typer.Argument(
        help="What to measure: packing, codec, allocator, decode, attention, cache, engine or grouped; "
        "or flash_attention, packed, ternary, all."
    ),
]
ArraySize = Annotated[
    int,
    typer.Option(
        "--size",
        parser=size,
        metavar="SIZE",
        show_default="256MiB",
        help="Bytes of an array (packing, codec).",
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads on the CPU; default: 2, or as many as there are.")]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        "--iterations",
        "--num-iterations",
        "--num-runs",
        help="Times a call is timed; the median counts.",
    ),
]
Baseline = Annotated[str, typer.Option(help="cache: fp16, uniform_8bit, uniform_4bit, mixed or all.")]
Contexts = Annotated[str, typer.Option(help="cache: stored tokens.")]
Seqlens = Annotated[
    str,
    typer.Option(
        help="grouped: tokens, up to 128K, separated by commas. [default: 512,1K; on cuda 4K to 32K]",
        show_default=False,
    ),
]
NumGroups = Annotated[str, typer.Option(help="grouped: groups, 1 to 16, separated by commas.")]
Config = Annotated[str, typer.Option(help="grouped: heads, of llama3-8b or llama3-70b.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Also write the result to this .json or .csv file.")
]
Csv = Annotated[Path | None, typer.Option(help="Also write the rows to this .csv file.")]
Picture = Annotated[
    Path | None,
    typer.Option(help="Also draw time against length (attention, grouped, decode on cuda): .png, .svg."),
]


def command(
    case: Case,
    device: Device = "cpu",
    array_size: ArraySize = 256 * 2**20,
    threads: Threads = None,
    repeats: Repeats = 15,
    baseline: Baseline = "all",
    context_lengths: Contexts = "512,1K,2K,4K,8K",
    seqlens: Seqlens = "",
    num_groups: NumGroups = "2",
    config: Config = "llama3-8b",
    min_vram: MinVram = 0.0,
    release: Release = False,
    verbose: Verbose = False,
    as_json: Json = False,
    output: Output = None,
    csv: Csv = None,
    figure: Picture = None,
) -> None:
    """Measure one part of the library, or several, and print a table of each.

    Results are checked before they are timed. "of copy" is the speed relative to a copy of the bytes that the
    call must read and write, by as many threads or on the same GPU; "times numpy" relative to the same in
    NumPy; "speedup" that of a decode step over packed pages, or of attention, relative to torch, of grouped
    attention relative to separate calls.

    Example: kvlab benchmark packing --size 256MiB --threads 2 --output packing.json
    """
    from kvlab.lab.benchmark.baseline import Options
    from kvlab.lab.benchmark.run import CASES, cases_of, run
    from kvlab.lab.targets import Machine, machine

    names = cases_of(case)
    where = machine(device, min_vram) if device == "auto" or min_vram else Machine((device,))
    runs = [(name, on) for name in names for on in where.devices]
    draw = None if figure is None else _drawing_of(runs, f"figure={str(figure)!r}", f"{case} on {device}")
    if len(names) > 1:  # of several, those that run there
        runs = [(name, on) for name, on in runs if on in CASES[name]]
    threads = Options().threads if threads is None else threads
    options = Options(
        array_size, threads, repeats, device, release, baseline, context_lengths, seqlens, num_groups, config
    )
    results = [run(name, replace(options, device=on)) for name, on in runs]
    result: dict[str, Any] = results[0] if len(results) == 1 else {"case": case, "results": results}
    _write_files(result, results, output, csv)
    if draw is not None and figure is not None:
        draw(results[0]["rows"], figure)
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
        return
    for (name, on), one in zip(runs, results, strict=True):
        _print(one, f"{name}, {threads} threads" if on == "cpu" else f"{name}, {on}", verbose=verbose)
    for on, reason in where.skipped.items():
        typer.echo(f"skipped: {on}: {reason}")


def _drawing_of(runs: Sequence[tuple[str, str]], given: str, what: str) -> Callable[[Any, Path], object]:
    """Return what draws the rows of the one run into a file; refuse runs without a figure."""
    from kvlab.lab.benchmark.figures import DRAW
    from kvlab.lab.figures import save_figure

    draw = DRAW.get(runs[0])
    if draw is None or len(runs) != 1:
        raise ValueError(f"{given}: attention, grouped and decode on cuda have one, not {what}")
    return lambda rows, path: save_figure(draw(rows), path)


def _write_files(
    result: dict[str, Any], results: Sequence[dict[str, Any]], output: Path | None, csv: Path | None
) -> None:
    from kvlab.lab.results import write

    if output is not None:
        if len(results) > 1 and output.suffix != ".json":
            raise ValueError(f"output={str(output)!r}: several results go into one .json file")
        write(result, output)
    if csv is not None:
        if len(results) > 1 or csv.suffix != ".csv":
            raise ValueError(f"csv={str(csv)!r}: the rows of one case go into one .csv file")
        write(results[0], csv)


def _print(result: dict[str, Any], title: str, *, verbose: bool) -> None:
    from kvlab.lab.results import print_table

    hidden = () if verbose else ("p5_ms", "p95_ms", "p5_us", "p95_us", "copy_gb_per_s")
    print_table(result["rows"], title, hidden)
    typer.echo(result["note"])
