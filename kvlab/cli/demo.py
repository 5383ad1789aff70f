"""`kvlab demo`: a real model reads a real book from a packed cache; bytes against quality."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvlab.cli.options import Json, fractions, size

if TYPE_CHECKING:
    from rich.console import Console

    from kvlab.lab.quality.checkpoint import Checkpoint
    from kvlab.lab.quality.comparison import Comparison
    from kvlab.lab.quality.plan import Plan
    from kvlab.lab.quality.report import Row

RESULTS, RECORDED = Path(__file__).parents[2] / "benchmarks" / "results", "*-demo-*.json"
"""Runs that were kept: their rows of transformers' caches stand, marked, in the table of a run without."""
HELD = "*-quality.json"
"""Of single tokens and late questions under budgets that hold at every length; the newest is shown."""

BUDGETS = "0.17,0.2,0.3,0.5"
"""Budgets of the mixed caches. With three heads and 2,048 tokens the least is 0.146, on a GPU 0.167."""
GPU_ROWS = 20
"""Windows that a GPU reads at once."""
LONG = 8_192
"""Tokens from which on a run is long."""
TOKENS = {(False, False): 4_000, (False, True): 40_000, (True, False): 200, (True, True): 400}
"""To score, for the real model and the tiny one, without --full and with it."""


Full = Annotated[
    bool, typer.Option("--full", help="Ten times the text, controls at equal bytes, transformers' caches.")
]
Folder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the table, the figure, the data.")
]
Tokens = Annotated[
    int | None,
    typer.Option(parser=size, metavar="SIZE", help="Tokens to score; default 4000, with --full 40000."),
]
Budgets = Annotated[
    str, typer.Option(help="Budgets of the mixed caches: fractions of float16, separated by commas.")
]
Groups = Annotated[
    str | None,
    typer.Option(help="Which caches: kvlab (default), controls, hqq, quanto; with --full all of them."),
]
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="Where model and caches are; cuda: one process.")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes; default as processors and memory allow, at most 4.")
]


def command(
    full: Full = False,
    output: Folder = Path("kvlab-demo"),
    as_json: Json = False,
    tokens: Tokens = None,
    budgets: Budgets = BUDGETS,
    groups: Groups = None,
    device: Device = "cpu",
    processes: Processes = None,
) -> None:
    """Read a book with a real model from packed caches: bytes against quality.

    SmolLM2-135M predicts every next token in windows of the King James Bible, with a full-precision cache
    and with each packed one. The table shows what a cache takes and how far its predictions are from full
    precision. Runs on the CPU, or on a GPU with --device cuda, and downloads nothing. A run that was
    interrupted goes on where it stopped when the same command is given again.

    Example: kvlab demo --tokens 8K --budgets 0.2,0.4 --output results
    """
    # NumPy multiplies only small matrices here; threads of its own would hinder those of torch and Numba.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # one bar is enough
    parts = _fractions(budgets)
    if tokens is not None and tokens < 1:
        raise typer.BadParameter(f"--tokens {tokens}: at least 1 token is to be scored")
    from kvlab.lab import targets
    from kvlab.lab.quality.checkpoint import Checkpoint
    from kvlab.lab.quality.comparison import Comparison, write_files
    from kvlab.lab.quality.workers import processes_for
    from kvlab.lab.results import provenance

    if device == "cuda":
        targets.machine("cuda")  # or say why not
        processes = 1
    tiny = targets.is_tiny()
    tokens = tokens or TOKENS[tiny, full]
    plan = _plan(parts, _groups(groups, full, tiny), tiny, tokens, device)
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(output, plan.settings)
    result = _compare(plan, checkpoint, processes or (1 if tiny else processes_for(plan)))
    result.provenance = provenance(
        tokens=tokens, budgets=budgets, groups=",".join(plan.groups), device=_device_name(device)
    )
    rows = result.rows([] if tiny else [Comparison.read(path) for path in sorted(RESULTS.glob(RECORDED))])
    paths = write_files(result, rows, output)
    checkpoint.remove()
    if as_json:
        typer.echo(result.to_json())
    else:
        _show(result, rows, paths)


def _fractions(text: str) -> tuple[float, ...]:
    found = fractions(text.split(","), text)
    if not all(0 < part <= 1 for part in found) or len(set(found)) < len(found):
        raise typer.BadParameter(f"--budgets {text!r}: every budget lies between 0 and 1, none stands twice")
    return found


def _groups(text: str | None, full: bool, tiny: bool) -> tuple[str, ...]:
    from kvlab.lab.quality.plan import GROUPS

    if text is None:
        # The quantised caches of transformers are compared on the real model only.
        whole = GROUPS[:2] if tiny else GROUPS
        return whole if full else GROUPS[:1]
    if unknown := set(text.split(",")) - set(GROUPS):
        raise typer.BadParameter(f"--groups {text!r}: {min(unknown)!r} is none of {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in text.split(","))


def _plan(budgets: tuple[float, ...], groups: tuple[str, ...], tiny: bool, tokens: int, device: str) -> Plan:
    """What to compare, once it is sure that everything it needs is installed."""
    from kvlab.lab.quality.model import require_smollm2
    from kvlab.lab.quality.plan import Plan, Protocol

    if not tiny:
        require_smollm2()
        if libraries := {"hqq", "quanto"} & set(groups):
            from kvlab.lab.quality.cases import require

            for library in libraries:
                require(library)
    # In a long run every window is saved as soon as it is read; a GPU reads more of them at once.
    rows = GPU_ROWS if device == "cuda" else 1 if tokens > LONG else 4
    protocol = Protocol(length=256, scored_from=128, rows=2) if tiny else Protocol(rows=rows)
    windows = -(-tokens // protocol.scored)
    return Plan("tiny" if tiny else "smollm2", protocol, windows, budgets, groups, device)


def _compare(plan: Plan, checkpoint: Checkpoint, processes: int) -> Comparison:
    """Carry a plan out, showing how far it is."""
    from kvlab.cli.progress import bar
    from kvlab.lab.quality.workers import compare

    shared = f" in {processes} processes" if processes > 1 else ""
    try:
        with bar(f"{plan.windows} windows{shared}") as tick:
            return compare(plan, checkpoint, processes, tick)
    except KeyboardInterrupt:
        saved = f"What was read is saved in {checkpoint.path}: the same command goes on from there"
        typer.echo(f"Interrupted. {saved if checkpoint.path.exists() else 'Nothing was read yet'}", err=True)
        raise typer.Exit(130) from None


def _device_name(device: str) -> str:
    from kvlab.environment import report

    return device if device == "cpu" else ", ".join(gpu["name"] for gpu in report()["gpus"])


def _show(result: Comparison, rows: list[Row], paths: list[Path]) -> None:
    from rich.console import Console

    from kvlab.lab.quality.report import WIDE, to_table, verdicts

    # Pipes and logs are as wide as the table.
    console = Console(highlight=False) if Console().is_terminal else Console(width=WIDE, highlight=False)
    length, windows = result.protocol["length"], len(result.scores[0].starts)
    title = f"{result.model} reads the {result.text}: {windows} windows of {length} tokens, "
    console.print(to_table(rows, f"{title}{result.scored:,} scored", console.width))
    for word, meaning in _explained(result, rows).items():
        console.print(f"[bold]{word}[/bold]: {meaning}")
    if lines := verdicts(rows):
        console.print("\n[bold]Against the best that fits into the same bytes[/bold]", *lines, sep="\n")
    _show_held(console)
    if result.races:
        console.print("\n[bold]GPU against CPU[/bold], a chunk of one window, tokens a second")
    for race, (gpu, cpu) in result.races.items():
        console.print(f"behind {int(race):,} tokens: {gpu:,.0f} and {cpu:,.0f}, {gpu / cpu:.1f} times")
    _show_continuations(console, result)
    console.print("Written: " + ", ".join(map(str, paths)))


def _explained(result: Comparison, rows: list[Row]) -> dict[str, str]:
    """What the columns of the table mean."""
    explained = {
        "MiB, bits": "what the cache of one window takes at its end, and that for each element of K and V: "
        "codes, scales, positions, importance, tables and exact tokens are counted",
        "budget": "fraction of the float16 bytes; exact tokens of packed caches are "
        f"{result.cache_dtype}, the full-precision cache is float32 as the model",
        "change": "of the perplexity; below 0.5 % it is noise",
        "KL": "mean divergence of the predictions from those of full precision, ± standard error",
        "last quarter": "KL of the last quarter of these tokens, where the cache is fullest",
        "top-1": "how often the most probable token is the same",
        "tok/s": f"the whole model, {result.protocol['chunk']} tokens of a window at once, beside other "
        "processes",
    }
    if earlier := sorted({row.windows for row in rows if row.recorded}):
        explained["*"] = (
            f"transformers' QuantizedCache, recorded earlier on {' or '.join(map(str, earlier))} of these "
            f"{len(result.scores[0].starts)} windows: benchmarks/results/{RECORDED}"
        )
    return explained


def _show_held(console: Console) -> None:
    """What is harder than the demo, as it was recorded with SmolLM2."""
    from kvlab.lab.quality.recorded import read_held
    from kvlab.lab.results import to_table

    if not (paths := sorted(RESULTS.glob(HELD))):
        return
    console.print(
        "\n[bold]Harder[/bold], recorded earlier: the budget holds at every length, tokens come one by one "
        "behind a prompt of 1,024, and numbers in a text are asked for when it has been read"
    )
    console.print(to_table(read_held(paths[-1]), "", left=("cache",)))
    console.print(
        "[bold]found[/bold]: of the answers that full precision finds; [bold]log p lost[/bold]: of the right "
        f"answers, nats\nFrom benchmarks/results/{paths[-1].name}; kvlab ablate --budget 0.2 "
        "--context-length 1K --tasks single,retrieval measures such figures"
    )


def _show_continuations(console: Console, result: Comparison) -> None:
    from rich.markup import escape
    from rich.table import Table

    side_by_side = Table(
        title=f"\nThe same prompt continued. It ends: ...{escape(result.prompt)}",
        title_justify="left",
        show_lines=True,
    )
    for name, written in result.continuations.items():
        speed = f"{written.nbytes / 2**20:.1f} MiB at the end, {written.seconds:.0f} s"
        side_by_side.add_column(f"{name} ({speed})", ratio=1)
    side_by_side.add_row(*(escape(written.text) for written in result.continuations.values()))
    console.print(side_by_side)
