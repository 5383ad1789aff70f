"""`kvlab demo`: a real model reads a real book from a packed cache; bytes against quality."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli.options import Json, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from kvlab.lab.comparison import Comparison
    from kvlab.lab.model import Subject
    from kvlab.lab.quality import Case, Protocol
    from kvlab.lab.report import Row

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "demo_full.json"
"""A run with --full; its rows of transformers' caches stand, marked, in the table of a run without."""
BESIDE = 0.25
"""Budget of the continuation beside the one of full precision."""


def command(
    full: Annotated[
        bool,
        typer.Option("--full", help="Ten times the text, controls at equal bytes, transformers' caches."),
    ] = False,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the table, the figure, the data."),
    ] = Path("kvlab-demo"),
    as_json: Json = False,
    tokens: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Tokens to score; default 4000, with --full 40000."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Budgets of the mixed caches: fractions of float16, divided by commas.")
    ] = "0.17,0.2,0.3,0.5",
) -> None:
    """Read a book with a real model from packed caches: bytes against quality.

    SmolLM2-135M predicts every next token in windows of the King James Bible, with a full-precision cache
    and with each packed one. The table shows what a cache takes and how far its predictions are from full
    precision. Runs on the CPU and downloads nothing.

    Example: kvlab demo --tokens 8K --budgets 0.2,0.4 --output results
    """
    # NumPy multiplies only small matrices here; threads of its own would hinder those of torch and Numba.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # one bar is enough
    fractions = _fractions(budgets)
    from rich.console import Console

    tiny = os.environ.get("KVLAB_TINY") == "1"
    progress = Console(stderr=True)
    subject, protocol = _prepare(progress, tiny)
    from kvlab.lab.comparison import Comparison, write_files

    wanted = tokens or ((400 if tiny else 40_000) if full else (200 if tiny else 4_000))
    cases = _cases(subject, protocol, fractions, full, tiny)
    result = _compare(progress, subject, protocol, cases, wanted)
    rows = result.rows(Comparison.read(RECORDED) if RECORDED.exists() and not tiny else None)
    output.mkdir(parents=True, exist_ok=True)
    paths = write_files(result, rows, output)
    if as_json:
        typer.echo(result.to_json())
    else:
        from kvlab.lab.report import WIDE

        # Pipes and logs are as wide as the table.
        _show(Console() if Console().is_terminal else Console(width=WIDE), result, rows, paths)


def _fractions(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--budgets {text!r}: write fractions, for example 0.2,0.35") from None
    if not all(0 < fraction <= 1 for fraction in found) or len(set(found)) < len(found):
        raise typer.BadParameter(f"--budgets {text!r}: every budget lies between 0 and 1, none stands twice")
    return found


def _prepare(progress: Console, tiny: bool) -> tuple[Subject, Protocol]:
    from kvlab.lab.model import load_smollm2, tiny_llama
    from kvlab.lab.quality import Protocol

    if tiny:
        return tiny_llama(), Protocol(length=256, scored_from=128, rows=2)
    with progress.status("Loading SmolLM2-135M-Instruct from its package"):
        return load_smollm2(), Protocol()


def _cases(subject: Subject, protocol: Protocol, budgets: list[float], full: bool, tiny: bool) -> list[Case]:
    from kvlab.lab import cases

    config, length = subject.model.config, protocol.length
    found = [*cases.uniform(config), *cases.mixed(config, length, budgets)]
    if full:
        found += cases.controls(config, length, min(budgets, key=lambda budget: abs(budget - 0.2)))
    return found + (cases.of_transformers(config) if full and not tiny else [])


def _compare(
    progress: Console, subject: Subject, protocol: Protocol, cases: list[Case], tokens: int
) -> Comparison:
    """Evaluate the cases, then continue a text, with a bar and the time left."""
    from kvlab import environment
    from kvlab.lab.cases import CACHE_DTYPE
    from kvlab.lab.comparison import Comparison
    from kvlab.lab.quality import evaluate, steps
    from kvlab.lab.text import cut_windows

    count = -(-tokens // protocol.scored)
    windows = cut_windows(subject.text, subject.encode, count, protocol.length + 1)
    start = time.perf_counter()
    with _bar(progress) as bar:
        task = bar.add_task("", total=steps(count, len(cases), protocol))
        scores = evaluate(
            subject.model,
            windows,
            cases,
            protocol,
            progress=lambda name: bar.update(
                task, advance=1, description=f"{count} windows, {len(cases)} caches"
            ),
        )
    result = Comparison(
        command=" ".join(["kvlab", *sys.argv[1:]]),
        model=subject.name,
        text=subject.text_name,
        cache_dtype=CACHE_DTYPE,
        protocol={**asdict(protocol), "scored": protocol.scored},
        environment=environment.report(),
        seconds=time.perf_counter() - start,
        scores=scores,
    )
    with progress.status("Continuing a text with full precision and with a packed cache"):
        _continue(result, subject, windows.tokens[-1][: 3 * protocol.length // 4].tolist(), protocol.length)
    return result


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    text = TextColumn("{task.description}")
    return Progress(text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeLeft(), console=console)


def _continue(result: Comparison, subject: Subject, prompt: list[int], length: int) -> None:
    """Add continuations of one prompt to a result."""
    from kvlab.integrations.transformers import KVLabCache
    from kvlab.lab.cases import CACHE_DTYPE
    from kvlab.lab.continuation import continue_text

    packed = KVLabCache(subject.model.config, dtype=CACHE_DTYPE, budget=BESIDE, plan_length=length)
    result.prompt = subject.decode(prompt[-64:])
    for name, cache in (("full precision", None), (f"mixed {BESIDE:g}", packed)):
        result.continuations[name] = continue_text(subject, prompt, cache, length // 32).text


def _show(console: Console, result: Comparison, rows: list[Row], paths: list[Path]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvlab.lab.report import to_table, verdicts

    protocol, windows = result.protocol, len(result.scores[0].starts)
    title = (
        f"{result.model} reads the {result.text}: {windows} windows of {protocol['length']} tokens, "
        f"{windows * protocol['scored']} scored"
    )
    console.print(to_table(rows, title, console.width), highlight=False)
    console.print(
        "MiB and bpe (bits per element of K and V): at the end of a window, everything counted. Budgets are "
        f"fractions of float16. Exact tokens of packed caches are {result.cache_dtype}; the model and its "
        "full-precision cache are float32. KL: mean divergence of the next-token distributions from those "
        "of full precision, ± its standard error. tok/s: the whole model, reading chunks of "
        f"{protocol['chunk']} tokens in {protocol['rows']} windows at once.",
        style="dim",
        highlight=False,
    )
    if any(row.recorded for row in rows):
        console.print(f"* recorded by `kvlab demo --full`, {RECORDED.name}", style="dim", highlight=False)
    for sentence in verdicts(rows):
        console.print(sentence, highlight=False)
    side_by_side = Table(title=f"Prompt ends: ...{result.prompt}", title_justify="left", show_lines=True)
    for name in result.continuations:
        side_by_side.add_column(name, ratio=1)
    side_by_side.add_row(*map(escape, result.continuations.values()))
    console.print(side_by_side, highlight=False)
    console.print("Written: " + ", ".join(map(str, paths)), highlight=False)
