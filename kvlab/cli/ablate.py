"""`kvlab ablate`: memory, quality and speed of one configuration of a packed cache."""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    fraction,
    size,
)

if TYPE_CHECKING:
    from kvlab.lab.ablation.grid import AblationCase
    from kvlab.lab.quality.model import Subject

Shape = tuple[int | None, int | None, int | None, int | None]
"""Layers, heads, KV heads, channels of a head: the options of a geometry."""
Budget = Annotated[
    float,
    typer.Option(parser=fraction, metavar="BUDGET", help="Part of the float16 bytes: 0.3, 30% or 4.8bpe."),
]
Bits = Annotated[
    str,
    typer.Option(help="Widths, as 2,4,8; default: a cache's own ladder, with profiles if it is packed."),
]
Length = Annotated[int, typer.Option(parser=size, metavar="SIZE", help="Tokens in the cache.")]
Packing = Annotated[
    bool,
    typer.Option(
        "--use-bit-packing/--no-bit-packing",
        help="Store codes packed, or with the same allocation one code a byte.",
    ),
]
Device = Annotated[
    str, typer.Option(help="Where the model reads and attention is timed: cpu, cuda or cuda:0.")
]
Seed = Annotated[int, typer.Option(help="Of synthetic data.")]
Tasks = Annotated[
    str, typer.Option(help="Only quality, by tasks (above), beside opponents of about the same bytes.")
]
Text = Annotated[
    Literal["bible", "manual", "code"],
    typer.Option(help="What --tasks read: a book, the manual or the source of this Python."),
]


def command(
    budget: Budget = 0.5,
    bits: Bits = "default",
    context_length: Length = 2048,
    use_bit_packing: Packing = True,
    device: Device = "cpu",
    num_samples: NumSamples = 0,
    num_layers: NumLayers = None,
    num_heads: NumHeads = None,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    seed: Seed = 0,
    tasks: Tasks = "",
    text: Text = "bible",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Measure one configuration of a packed cache.

    SmolLM2-135M reads a book through the cache: bytes, quality, and the time of attention of one new token
    over the pages of all layers. With a geometry (--num-layers and so on), or beyond the 8,192 tokens of the
    model, keys and values are synthetic and only their attention has a quality. A budget that the smallest
    width does not fit gives the status "infeasible", the smallest that does, and exit code 0 all the same.
    Memory and time are estimated first (on standard error), the time without that of kernels which are not
    compiled yet; what needs more memory than is available is refused then.

    With --tasks the budget holds at every length, and other caches of about its bytes stand beside it; 8
    windows of text are read, unless --num-samples is given, and memory alone is estimated. Tasks, joined by
    commas: single (tokens behind a prompt of the context length), chunks (of 64), parts-64 and
    parts-512 (the prompt in parts), short (a first call of 10 tokens; the budget is that of all), retrieval,
    tracking, copying (asked behind the text), outliers, large-outliers (keys with large channels; with -late
    from the end of the prompt on, with -short behind a first call of 10 tokens), shifted (a constant on
    keys), equal-bytes (each opponent beside a budget of its bytes), free (the cache writes), floor (of the
    model's own type).

    Example: kvlab ablate --budget 0.3 --bits 2,4,8 --context-length 1K --output case.json
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # one bar is enough
    shape = (num_layers, num_heads, num_kv_heads, head_dim)
    if tasks:
        if not use_bit_packing or num_layers is not None:
            raise ValueError(
                "--tasks reads with a model and packs its cache: leave out --no-bit-packing and "
                "--num-layers, --num-heads, --num-kv-heads, --head-dim"
            )
        result = _run_tasks(tasks.split(","), budget, bits, context_length, num_samples, device, text)
    elif text != "bible":
        raise ValueError(f"--text {text} is read with --tasks; name some, or leave --text out")
    else:
        result = _run_case(
            make_case(budget, bits, context_length, use_bit_packing, device, num_samples, shape, seed)
        )
    emit_json(result, as_json=as_json, output=output)
    if not as_json:
        (_show_tasks if tasks else _show)(result)


def make_case(
    budget: float,
    bits: str,
    context_length: int,
    use_packing: bool,
    device: str,
    num_samples: int,
    shape: Shape,
    seed: int = 0,
) -> AblationCase:
    """Return the case that the options stand for, of a geometry if there is one."""
    from kvlab.lab.ablation.grid import MODELS, AblationCase, Geometry
    from kvlab.lab.targets import is_tiny

    kind, _, number = device.partition(":")
    if number not in ("", "0"):
        raise ValueError(
            f"device={device!r}: choose the GPU by CUDA_VISIBLE_DEVICES={number} and --device cuda"
        )
    layers, heads, kv_heads, channels = shape
    name = "tiny" if is_tiny() else "smollm2"
    model, geometry = name if context_length <= MODELS[name].longest else None, MODELS[name].geometry
    if layers is not None and heads is not None and channels is not None:
        model, geometry = None, Geometry(layers, heads, kv_heads or heads, channels)
    elif any(value is not None for value in shape):
        raise ValueError("a geometry takes --num-layers, --num-heads and --head-dim; give all three or none")
    return AblationCase(budget, bits, context_length, use_packing, model, geometry, kind, num_samples, seed)


def _run_case(case: AblationCase) -> dict[str, Any]:
    """Say what a case costs, then measure it."""
    from kvlab.cli.progress import bar
    from kvlab.lab.ablation.run import run
    from kvlab.lab.sweep.estimate import estimate
    from kvlab.lab.targets import machine

    machine(case.device)  # or an error that says what is missing
    cost = estimate([case])  # or an error that says what memory it needs
    if not cost.infeasible:
        typer.echo("\n".join(cost.lines()), err=True)
    with bar(case.name) as tick:
        return run(case, tick)


def _run_tasks(
    tasks: list[str], budget: float, bits: str, length: int, windows: int, device: str, text: str
) -> dict[str, Any]:
    """Measure a held budget and its opponents."""
    from kvlab.cli.progress import bar
    from kvlab.lab.quality.cases import held, opponents
    from kvlab.lab.quality.tasks import TASKS, run_tasks
    from kvlab.lab.results import provenance

    if unknown := [task for task in tasks if task not in TASKS]:  # before the model is loaded
        raise ValueError(f"--tasks {','.join(unknown)}: not known; supported are {','.join(TASKS)}")
    scored, windows = min(256, length // 4), windows or 8
    _refuse_what_cannot_run(budget, length, scored, device.partition(":")[0])
    subject = _subject(text, device)
    config = subject.model.config
    others = opponents(config, budget)
    found: dict[str, Any] = {}
    done, total = count(1), len(tasks) * windows * (2 * len(others) + 1)
    with bar(f"budget {budget:g}, {1 + len(others)} caches") as tick:
        for task in tasks:  # a budget that holds at every length holds no call of 10 tokens
            plan_length = length + scored if task.endswith("short") else 1
            cases = [*held(config, [budget], bits=bits, plan_length=plan_length), *others]
            sizes: dict[str, Any] = {"length": length, "scored": scored, "windows": windows, "bits": bits}
            found |= run_tasks(subject, cases, [task], **sizes, progress=lambda _: tick(next(done), total))
    return {
        "schema": "kvlab quality tasks 1",
        "config": {"budget": budget, "bits": bits, "context_length": length, "windows": windows},
        "device": device,
        "model": subject.name,
        "text": subject.text_name,
        "tasks": found,
        "provenance": provenance(),
    }


def _refuse_what_cannot_run(budget: float, length: int, scored: int, device: str) -> None:
    """Refuse tasks without their device, beyond the tokens of the model, or of too much memory."""
    from kvlab.lab.ablation.grid import CHUNK, MODELS
    from kvlab.lab.ablation.memory import refuse_too_large
    from kvlab.lab.targets import is_tiny, machine

    machine(device)  # or an error that says what is missing
    known = MODELS["tiny" if is_tiny() else "smollm2"]
    if length + scored > known.longest:
        raise ValueError(
            f"--context-length {length} and {scored} tokens behind it are more than the {known.longest} that "
            "the model was made for"
        )
    tokens = max(-(-(length + scored) // (2 * CHUNK)) * 2 * CHUNK, known.shortest)
    case = make_case(budget, "default", tokens, True, device, 1, (None,) * 4)
    refuse_too_large([case] * 4)  # this cache and three opponents are read beside each other


def _subject(text: str, device: str) -> Subject:
    """The model on its device, with the text that it is to read."""
    from dataclasses import replace

    from kvlab.lab.quality.model import load_smollm2, tiny_llama
    from kvlab.lab.quality.text import TEXTS
    from kvlab.lab.targets import is_tiny

    subject = tiny_llama() if is_tiny() else load_smollm2()
    subject.model.to(device)
    if text == "bible":  # a model comes with the book, or with words of its own
        return subject
    name, read = TEXTS[text]
    return replace(subject, text_name=name, text=read())


def _show_tasks(result: dict[str, Any]) -> None:
    for task, caches in result["tasks"].items():
        _print_turned(task, caches)
        depths = {cache: figures["by_depth"] for cache, figures in caches.items() if "by_depth" in figures}
        if depths:
            _print_turned(f"{task}, log p change by depth", depths)


def _print_turned(title: str, caches: dict[str, dict[Any, Any]]) -> None:
    """Print a column for each cache, so that a narrow terminal holds every figure."""
    from kvlab.lab.results import print_table

    names = [name for name in next(reversed(caches.values())) if name != "by_depth"]
    figures = [{cache: caches[cache][name] for cache in caches} for name in names]
    titled = [{"": str(name).replace("_", " ")} | row for name, row in zip(names, figures, strict=True)]
    print_table(titled, title, digits=4)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    config = result["config"]
    source = "synthetic keys and values" if config["model"] is None else config["model"]
    console.print(f"[bold]{result['experiment']}[/bold]: {source}, {config['device']}", highlight=False)
    if result["status"] == "infeasible":
        least = result["smallest_feasible_budget"]
        needed = "" if least is None else f": {least:g} of float16, the budget is {config['budget']:g}"
        console.print(f"infeasible: {result['reason']}{needed}", highlight=False)
        return
    for part in ("memory", "quality", "performance", "compression"):
        values = ", ".join(f"{name} {_text(value)}" for name, value in result[part].items())
        console.print(f"{part}: {values}", highlight=False)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}:{fraction:.0%}" for name, fraction in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
