"""`kvlab chat`: talk to a model whose cache stays packed."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.cli.options import Json, Output, emit_json


def command(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Budget of the KV cache: 0.3, 4.25bpe, 6GiB; default: 16 bits."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    max_seqlen: Annotated[int, typer.Option(min=2, help="Tokens of the whole talk at most.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest tokens.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw among those that reach this.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Answer what is typed, line by line, until the input ends or the talk is as long as it may be.

    Below each answer a line says how fast it came and what the cache takes.

    Example: kvlab chat ./SmolLM2-135M-Instruct --budget 0.3
    """
    from kvlab.lab.engine.text import Chat

    chat, turns = Chat(model, device=device, budget=budget, max_seqlen=max_seqlen), []
    while True:
        try:
            line = typer.prompt("you", prompt_suffix=": ", err=as_json)
        except typer.Abort:  # the end of the input
            break
        said = ""
        for part in chat.answer(line, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed):
            typer.echo(part, nl=False, err=as_json)
            said += part
        typer.echo(f"\n[{chat.summary()}]", err=as_json)
        turns.append({"you": line, "answer": said, "summary": chat.summary()})
    typer.echo(err=as_json)
    emit_json({"model": model, "turns": turns}, as_json=as_json, output=output)
