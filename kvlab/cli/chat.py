"""`kvlab chat`: talk to a model whose cache stays packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvlab.cli.options import Json, Output, emit_json, options_named

_NAMES = {"model_or_path": "MODEL", "cache_budget": "--budget", "max_seqlen": "--max-seqlen",
          "device": "--device", "temperature": "--temperature"}  # fmt: skip


Model = Annotated[
    str,
    typer.Argument(
        help="Folder of a model with its tokenizer, or its name in the Hugging Face cache of this "
        "machine; or a known size, for example pythia-2.8b, with random weights: its tokens are bytes "
        "and numbers."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        help="Budget of the KV cache: 0.3 or 4.25bpe, of what --max-seqlen tokens take; 6GiB; default: "
        "16 bits."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
MaxSeqlen = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of the whole talk at most; default: what the model takes, up to 2,048."),
]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")]
TopP = Annotated[
    float,
    typer.Option(min=0, max=1, help="Draw among the likeliest tokens whose probabilities add up to this."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the draws.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]


def command(
    model: Model,
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 256,
    max_seqlen: MaxSeqlen = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Talk with a model: answer line by line, until the input ends or the talk has --max-seqlen tokens.

    Below each answer a line says how fast it comes and what the cache takes; on a terminal it is live.

    Example: kvlab chat ./SmolLM2-135M-Instruct --budget 0.3
    """
    from kvlab.lab.engine.text import Chat

    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
    with options_named(**_NAMES):
        chat, turns = Chat(model, device=device, budget=budget, max_seqlen=max_seqlen), []
        while True:
            try:
                line = typer.prompt("you", prompt_suffix=": ", err=as_json)
            except typer.Abort:  # the end of the input
                break
            said = ""
            with _shown(err=as_json) as show:
                for part in chat.answer(line, max_new_tokens, **sampling):
                    said += part
                    show(said, chat.summary())
            turns.append({"you": line, "answer": said, "summary": chat.summary()})
    typer.echo(err=as_json)
    emit_json({"model": model, "turns": turns}, as_json=as_json, output=output)


@contextmanager
def _shown(*, err: bool) -> Iterator[Callable[[str, str], None]]:
    """Yields what shows a text as far as it has come and the line below it."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=err)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, vertical_overflow="visible") as live:
            yield lambda text, line: live.update(Group(Text(text), Text(f"[{line}]", style="dim")))
        return
    shown, last = 0, ""

    def show(text: str, line: str) -> None:
        nonlocal shown, last
        typer.echo(text[shown:], nl=False, err=err)
        shown, last = len(text), line

    yield show
    typer.echo(f"\n[{last}]", err=err)
