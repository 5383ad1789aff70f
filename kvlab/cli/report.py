"""`kvlab report`: results of sweeps as tables, SQL answers, files and one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.options import Json, Output, emit_json, emit_table

__all__ = ["group"]

group = typer.Typer(
    no_args_is_help=True,
    help="What sweeps found: tables, SQL, claims, Markdown, figures, one HTML page.",
)
Folders = Annotated[list[Path], typer.Argument(help="Folders of collected sweeps.")]
Change = Annotated[float, typer.Option(help="Change of perplexity that the best configuration may have.")]
Files = Annotated[
    list[Path],
    typer.Option(
        "--file",
        help="Result of kvlab validate or benchmarks/generation/run.py, for the claims; repeat it.",
    ),
]


@group.command()
def show(folders: Folders, change: Change = 0.01, as_json: Json = False, output: Output = None) -> None:
    """Print budget against quality, packing, contexts, the Pareto front and the best configuration.

    Example: kvlab report show results/first --change 0.02
    """
    from kvlab.lab.sweep.tables import read_summary
    from kvlab.lab.sweep.views import views

    found = views(read_summary(*folders), change)
    emit_json({view.title: view.rows for view in found}, as_json=as_json, output=output)
    if not as_json:
        from kvlab.lab.results import print_table

        for view in found:
            print_table(view.rows, view.title)
            typer.echo(f"{view.note}\n")


@group.command()
def query(
    sql: Annotated[str, typer.Argument(help="A question; the table is called results.")],
    folders: Folders,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Ask the results in SQL.

    Example: kvlab report query "select bits, min(kl) from results group by bits" results/first
    """
    from kvlab.lab.sweep.tables import query as ask

    columns, rows = ask(sql, *folders)
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    emit_table({"rows": found}, found, "Answer", as_json=as_json, output=output)


@group.command()
def expected(
    folders: Folders,
    files: Files = [],  # noqa: B006
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Print every published claim beside what was measured. Exit code 1 if one fails.

    Example: kvlab report expected results/first --file validate.json --file generation.json
    """
    from kvlab.lab.sweep.claims import judge_claims
    from kvlab.lab.sweep.tables import read_summary

    rows = judge_claims(read_summary(*folders), [json.loads(path.read_bytes()) for path in files])
    emit_table({"rows": rows}, rows, "Expected and measured", as_json=as_json, output=output)
    if any(row["verdict"] == "fail" for row in rows):
        raise typer.Exit(1)


@group.command()
def compare(
    folder: Annotated[Path, typer.Argument(help="Folder of benchmark_BASELINE.csv files.")],
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Join the files of kvlab benchmark cache into benchmark_comparison.csv.

    Example: kvlab report compare results/benchmarks/4711
    """
    from kvlab.lab.benchmark.cache import compare as join

    rows = join(folder)
    title = "Latency, throughput and memory by context"
    emit_table({"rows": rows}, rows, title, as_json=as_json, output=output)


@group.command()
def write(
    folders: Folders,
    files: Files = [],  # noqa: B006
    change: Change = 0.01,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; default: that of the sweep.")
    ] = None,
) -> None:
    """Write report.md, report.html (one page, with everything in it) and figures as PNG and SVG.

    Example: kvlab report write results/first --output results/first/report
    """
    from kvlab.lab.sweep.report import write_report
    from kvlab.lab.sweep.tables import read_summary
    from kvlab.lab.sweep.views import banner

    found = [json.loads(path.read_bytes()) for path in files]
    rows = read_summary(*folders)
    paths = write_report(rows, output or folders[0], change, found)
    emit_json({"files": list(map(str, paths))}, as_json=as_json, output=None)
    if not as_json:
        typer.echo("\n".join(map(str, paths)))
    if warning := banner(rows):
        typer.echo(f"{warning} See the table Failed, or kvlab sweep status FOLDER", err=True)
