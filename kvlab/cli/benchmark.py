"""`kvlab benchmark`: speed of one part of the library, next to a yardstick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.options import Json, size


def command(
    case: Annotated[str, typer.Argument(help="What to measure: packing, codec, allocator or decode.")],
    device: Annotated[str, typer.Option(help="Where: cpu or cuda.")] = "cpu",
    array_size: Annotated[
        int, typer.Option("--size", parser=size, metavar="SIZE", help="Bytes of an array (packing, codec).")
    ] = 256 * 2**20,
    threads: Annotated[int, typer.Option(help="Threads on the CPU.")] = 2,
    repeats: Annotated[int, typer.Option(help="Times a call is timed; the median counts.")] = 15,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the result to this .json or .csv file.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw time against context (decode on cuda): .png and .svg.")
    ] = None,
) -> None:
    """Measure one part of the library and print a table.

    Results are checked before they are timed. `of copy` is the speed relative to a copy of the bytes that the
    call must read and write, by as many threads or on the same GPU; `times numpy` relative to the same in
    NumPy; `speedup` that of a decode step over packed pages relative to torch.

    Example: kvlab benchmark packing --size 256MiB --threads 2 --output packing.json
    """
    from kvlab.lab.benchmark import Options, run
    from kvlab.lab.results import print_table, write

    if figure is not None and (case, device) != ("decode", "cuda"):
        raise ValueError(f"figure={figure}: only decode on cuda has one, not {case} on {device}")
    result = run(case, Options(array_size, threads, repeats, device))
    if output is not None:
        write(result, output)
    if figure is not None:
        from kvlab.lab.decode_figure import draw
        from kvlab.lab.report import save_figure

        save_figure(draw(result["rows"]), figure)
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        hidden = ("p5_ms", "p95_ms", "p5_us", "p95_us", "copy_gb_per_s")
        where = f"{threads} threads" if device == "cpu" else device
        print_table(result["rows"], f"{case}, {where}", hidden)
        typer.echo(result["note"])
