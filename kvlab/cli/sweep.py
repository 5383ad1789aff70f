"""`kvlab sweep`: grids of ablation cases, planned, run here or on Slurm, and collected into tables."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.cli.options import (
    HeadDim,
    Json,
    NumHeads,
    NumKvHeads,
    NumLayers,
    NumSamples,
    Output,
    emit_json,
    fractions,
)

if TYPE_CHECKING:
    from kvlab.cli.progress import Tick
    from kvlab.lab.ablation.grid import AblationCase
    from kvlab.lab.sweep.manifest import Manifest

__all__ = ["group"]

group = typer.Typer(
    no_args_is_help=True,
    help="Grids of cases: plan, run here or submit to Slurm, look, collect. A sweep is a folder: see plan.",
)
Folder = Annotated[Path, typer.Argument(help="Folder of the sweep.")]
_WELL = {"ok", "infeasible", "done before"}
"""What may become of a case that has not failed."""
Cases = Annotated[str | None, typer.Option(help="Only these cases, for example 3,17,40-42.")]


@group.command()
def plan(
    folder: Folder,
    budgets: Annotated[
        str, typer.Option(help="Parts of the float16 bytes, as 0.3 or 30%, separated by spaces.")
    ] = "0.2 0.3 0.4 0.5 0.6 0.7",
    bits: Annotated[
        str,
        typer.Option(
            help="Ladders, separated by spaces; default: a cache's own, with profiles if all are packed."
        ),
    ] = "2,3,4,8 4,8 2,4,8",
    contexts: Annotated[
        str, typer.Option(help="Tokens in the cache, separated by spaces.")
    ] = "512 1K 2K 4K 8K",
    packing: Annotated[str, typer.Option(help="true, false or both.")] = "true false",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    num_samples: NumSamples = 0,
    num_layers: NumLayers = None,
    num_heads: NumHeads = None,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Check a whole grid, say what it costs, and write its manifest.

    Every combination is checked before anything runs. The manifest never changes: for another grid take
    another folder. Planning the same again changes nothing.

    Example: kvlab sweep plan results/first --budgets "0.2 0.3" --bits "2,3,4,8 4,8" --contexts "512 1K"
    """
    from kvlab.cli.ablate import make_case
    from kvlab.lab.ablation.grid import make_grid
    from kvlab.lab.sweep.estimate import estimate
    from kvlab.lab.sweep.manifest import Manifest
    from kvlab.sizes import parse_size

    parts = fractions(_words("budgets", budgets.replace(",", " ")), budgets)
    ladders = _words("bits", bits)
    lengths = [parse_size(word, "contexts") for word in _words("contexts", contexts.replace(",", " "))]
    modes = [_truth(word) for word in _words("packing", packing.replace(",", " "))]
    shape = (num_layers, num_heads, num_kv_heads, head_dim)
    like = make_case(parts[0], ladders[0], min(lengths), True, device, num_samples, shape)
    manifest = Manifest(make_grid(like, parts, ladders, lengths, modes))
    cost = estimate(manifest.cases)
    path = manifest.write(folder)
    emit_json(
        {"manifest": str(path), "cases": len(manifest.cases), **cost.to_dict()},
        as_json=as_json,
        output=output,
    )
    if not as_json:
        typer.echo("\n".join(cost.lines()))
        typer.echo(f"{len(manifest.cases)} cases in {path}; next: kvlab sweep run {folder}")


@group.command()
def run(
    folder: Folder,
    cases: Cases = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            "--share",
            help="I/N: the part of task I of N; cases that share an evaluation stay together.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds a case may take, once its worker runs (2 processes or more)."),
    ] = None,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Run the cases that have no result yet.

    Stop it at any time: results are complete or not there, and the next run goes on. In a Slurm job SIGUSR1
    drops the case at hand and puts the job back into the queue. The last line counts what is done, failed and
    left, with the reasons. Exit code 1 if a case failed.

    Example: kvlab sweep run results/first --processes 2
    """
    from kvlab.cli.progress import bar
    from kvlab.lab.sweep.manifest import Manifest, closing
    from kvlab.lab.sweep.run import run_cases
    from kvlab.lab.sweep.slurm import requeue_this_job
    from kvlab.lab.targets import machine

    os.environ.setdefault("TQDM_DISABLE", "1")
    manifest = Manifest.read(folder)
    numbers = _chosen(cases, part, manifest.cases)
    if any(manifest.cases[number].device == "cuda" for number in numbers):
        machine("cuda")  # or an error that says what is missing
    outcomes: Counter[str] = Counter()
    try:
        with _signals_stop() as asked, bar(str(folder)) as tick:
            report = partial(_report, manifest, len(numbers), outcomes, tick, asked)
            run_cases(folder, manifest, numbers, processes=processes, timeout=timeout, report=report)
    except _Stopped as stopped:
        requeued = stopped.args[0] == signal.SIGUSR1 and requeue_this_job()
        typer.echo("requeued" if requeued else f"stopped; kvlab sweep run {folder} goes on", err=True)
        raise typer.Exit(128 + stopped.args[0]) from None
    result: dict[str, Any] = {"folder": str(folder), "outcomes": dict(outcomes)}
    emit_json(result, as_json=as_json, output=output)
    if not as_json:
        typer.echo(closing(folder, manifest))
    if set(outcomes) - _WELL:
        raise typer.Exit(1)


def _report(
    manifest: Manifest,
    total: int,
    outcomes: Counter[str],
    tick: Tick,
    asked: list[int],
    number: int,
    outcome: str,
) -> None:
    """Count what became of a case and say it: on the bar of a terminal, in a line of a log."""
    outcomes[outcome] += 1
    done, name = sum(outcomes.values()), manifest.cases[number].name
    if sys.stderr.isatty():
        failed = sum(count for kind, count in outcomes.items() if kind not in _WELL)
        tick(done, total, f"{done}/{total}, failed {failed}, last: {name}")
    else:
        typer.echo(f"{done}/{total} {name}: {outcome}", err=True)
    if asked:
        raise _Stopped(asked[0])


@group.command()
def status(folder: Folder, as_json: Json = False, output: Output = None) -> None:
    """Count the cases that are done, failed and left.

    Example: kvlab sweep status results/first
    """
    from kvlab.lab.sweep.manifest import Manifest, array_list, failure_of
    from kvlab.lab.sweep.manifest import status as look

    manifest = Manifest.read(folder)
    found = look(folder, manifest)
    counts = {name: len(getattr(found, name)) for name in ("done", "failed", "left")}
    numbers = {f"{name}_cases": array_list(getattr(found, name)) for name in ("failed", "left")}
    emit_json({**counts, **numbers}, as_json=as_json, output=output)
    if as_json:
        return
    typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))
    if found.left:
        typer.echo(f"left: {numbers['left_cases']}")
    for number in found.failed:
        failure = failure_of(folder, manifest.cases[number])
        if failure is not None:
            typer.echo(f"{manifest.cases[number].name}: {failure.kind}: {failure.message}")


@group.command()
def collect(folder: Folder, as_json: Json = False, output: Output = None) -> None:
    """Write ablation_summary.csv and .parquet from all results.

    Exit code 1 if a case is missing or failed; the tables hold what is there.

    Example: kvlab sweep collect results/first
    """
    from kvlab.lab.sweep.manifest import Manifest, array_list
    from kvlab.lab.sweep.tables import collect as gather
    from kvlab.lab.sweep.tables import write_summary

    rows, missing = gather(folder, Manifest.read(folder))
    paths = write_summary(rows, folder)
    failed = [row["experiment"] for row in rows if str(row["status"]).startswith("failed")]
    result = {
        "rows": len(rows),
        "failed": failed,
        "missing": array_list(missing),
        "files": list(map(str, paths)),
    }
    emit_json(result, as_json=as_json, output=output)
    if not as_json:
        typer.echo(f"{len(rows)} rows: {', '.join(map(str, paths))}")
    if missing or failed:
        typer.echo(f"{len(missing)} cases missing ({array_list(missing)}), {len(failed)} failed", err=True)
        raise typer.Exit(1)


@group.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(
    context: typer.Context,
    folder: Folder,
    throttle: Annotated[int, typer.Option(min=1, help="Tasks at the same time.")] = 8,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Submit what is left to Slurm: arrays of cases, and the collection after them.

    A task does the cases that share an evaluation (packed or not, and the budgets of a context and ladder).
    What follows the folder goes to sbatch. Submitting again submits what is still left.

    Example: kvlab sweep submit results/first --throttle 4 --gpus=1 --time=2:00:00
    """
    from kvlab.lab.sweep.groups import in_groups
    from kvlab.lab.sweep.manifest import Manifest
    from kvlab.lab.sweep.manifest import status as look
    from kvlab.lab.sweep.slurm import submit as send

    manifest = Manifest.read(folder)
    left = look(folder, manifest).left
    if not left:
        typer.echo(f"nothing is left to do; kvlab sweep collect {folder}")
        return
    tasks = len(in_groups(manifest.cases, left, 2 * throttle))
    arrays, collection = send(folder, left, tasks, throttle=throttle, options=context.args)
    emit_json(
        {"arrays": arrays, "collection": collection, "cases": len(left), "tasks": tasks},
        as_json=as_json,
        output=output,
    )
    if not as_json:
        typer.echo(f"{len(left)} cases in jobs {', '.join(arrays)}, collected by job {collection}")


class _Stopped(BaseException):
    """A signal asked to stop; the argument is its number."""


@contextmanager
def _signals_stop() -> Iterator[list[int]]:
    """Let signals raise `_Stopped`; yields the list of those that came.

    An exception raised while a destructor or a callback of C runs gets lost, so the list is to be looked at.
    """
    asked: list[int] = []

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        raise _Stopped(number)

    wanted = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in wanted]
    try:
        yield asked
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)


def _chosen(cases: str | None, part: str | None, among: Sequence[AblationCase]) -> list[int]:
    from kvlab.lab.sweep.groups import in_groups
    from kvlab.lab.sweep.manifest import parse_numbers

    chosen = list(range(len(among))) if cases is None else list(parse_numbers(cases, len(among)))
    if part is None:
        return chosen
    first, _, step = part.partition("/")
    if not (first.isdigit() and step.isdigit() and int(first) < int(step)):
        raise ValueError(f"part={part!r}: write I/N with 0 <= I < N, for example 0/4")
    groups = in_groups(among, chosen, int(step))
    return [number for group in groups[int(first) :: int(step)] for number in group]


def _words(option: str, text: str) -> list[str]:
    found = text.split()
    if not found:
        raise ValueError(f"{option}={text!r} is empty; give at least one value, or leave the option out")
    return found


def _truth(word: str) -> bool:
    known = {"true": True, "1": True, "packed": True, "false": False, "0": False, "unpacked": False}
    if word.lower() not in known:
        raise ValueError(f"packing: {word!r} is neither true nor false")
    return known[word.lower()]
