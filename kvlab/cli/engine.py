"""`kvlab engine`: the decode engine checked against transformers, and text from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvlab.cli.options import Json, Output, emit_json, emit_table, options_named, writable

__all__ = ["group"]

group = typer.Typer(
    no_args_is_help=True, help="The decode engine: checks against transformers, text from a model."
)
Model = Annotated[
    str,
    typer.Option(
        help="A known size, for example pythia-2.8b, with random weights; or the folder of a model, or its "
        "name in the Hugging Face cache of this machine."
    ),
]
Dtype = Annotated[Literal["float16", "bfloat16"], typer.Option(help="Of weights, keys and values.")]
Device = Annotated[
    str, typer.Option(help="Of the engine: cpu, cuda or cuda:1. transformers runs on the CPU.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Of random weights and tokens.")]
SeqLen = Annotated[int, typer.Option(min=1, help="Random tokens.")]
_CHECKED = {"model_or_path": "--model", "layer": "--layer", "seq_len": "--seq-len", "dtype": "--dtype",
            "device": "--device"}  # fmt: skip


@group.command()
def check(
    model: Model = "pythia-14m",
    layer: Annotated[str, typer.Option(help="Number of a layer, or all, with the logits.")] = "all",
    seq_len: SeqLen = 128,
    dtype: Dtype = "float16",
    seed: Seed = 0,
    device: Device = "cpu",
    dump: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            help="File .npz for what the layers compute: normed, q, k, v, rotated, attended, out; "
            "on a GPU by a launch for each operation.",
        ),
    ] = None,
    benchmark: Annotated[bool, typer.Option("--benchmark", help="Also time tokens behind the text.")] = False,
    num_runs: Annotated[int, typer.Option(min=1, help="Tokens that --benchmark times.")] = 100,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Compare layers and logits with transformers in float64. Exit code 1 if one is worse than its 16 bits.

    "ratio" is the larger of two: the engine's largest and root mean square error, over those of transformers
    with the same weights in 16 bits. Up to 1.1 passes. With --benchmark, tokens of the layers up to --layer
    and the head are timed on the device, those of transformers in float32 on the CPU.

    Example: kvlab engine check --model pythia-2.8b --layer 0 --seq-len 128
    """
    from kvlab.lab.engine.check import check as compare
    from kvlab.lab.results import print_table, provenance

    if layer != "all" and not layer.isdecimal():
        raise typer.BadParameter(f"--layer {layer!r}: write the number of a layer, or all")
    with options_named(**_CHECKED):
        _say_how_weights_come(model)
        rows, times = compare(
            model, layers=None if layer == "all" else [int(layer)], seq_len=seq_len, dtype=dtype, seed=seed,
            device=device, dump=dump, runs=num_runs if benchmark else 0,
        )  # fmt: skip
    passes = all(row["passes"] for row in rows)
    record = {**provenance(model=model, seq_len=seq_len, dtype=dtype, seed=seed, device=device),
              "rows": rows, "times": times, "passes": passes}  # fmt: skip
    emit_json(record, as_json=as_json, output=output)
    if not as_json:
        print_table(rows, f"{model}, {dtype}, {seq_len} tokens, engine on {device}")
        if times:
            print_table(times, f"tokens behind {seq_len}")
    raise typer.Exit(0 if passes else 1)


@group.command("random-check")
def random_check(
    model: Model = "pythia-14m",
    runs: Annotated[
        int, typer.Option(min=1, help="Random models; of the folder of a model, random texts.")
    ] = 100,
    seq_len: SeqLen = 16,
    dtype: Dtype = "float16",
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Compare the first layer of many random models with float64. Exit code 1 if it fails.

    Of the folder of a model it is the layer that the model has, with many random texts.

    Errors are mean absolute ones over the mean size of the layer's output. It passes if the largest is below
    0.01 and the average up to 1.1 times that of transformers with the same weights in 16 bits.

    Example: kvlab engine random-check --model pythia-160m --runs 20
    """
    from kvlab.lab.engine.check import random_check as compare

    with options_named(**_CHECKED):
        _say_how_weights_come(model)
        found = compare(model, runs=runs, seq_len=seq_len, dtype=dtype, seed=seed, device=device)
    what = "random layers" if found["random weights"] else "texts through the first layer"
    title = f"{runs} {what}, {dtype}, {seq_len} tokens, engine on {device}"
    emit_table(found, [found], title, as_json=as_json, output=output)
    raise typer.Exit(0 if found["passes"] else 1)


@group.command()
def generate(
    model: Annotated[
        str,
        typer.Option(
            help="Folder of a model with its tokenizer, or its name in the Hugging Face cache of this "
            "machine."
        ),
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many of the likeliest; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Then among those whose probabilities add up to this.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the draws.")] = 0,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Budget of the KV cache: 0.3 or 4.25bpe, of what --prompt and --max-new-tokens take; 6GiB; "
            "default: none, 16 bits."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Continue a text, printed as it comes.

    Example: kvlab engine generate --model ./SmolLM2-135M --prompt "Once upon a time" --temperature 0.8
    """
    from kvlab.lab.engine.text import continue_text

    text = ""
    with options_named(
        model_or_path="--model", prompt="--prompt", max_new_tokens="--max-new-tokens",
        temperature="--temperature", cache_budget="--budget", device="--device",
    ):  # fmt: skip
        for part in continue_text(
            model, prompt, max_new_tokens, device=device, budget=budget, temperature=temperature, top_k=top_k,
            top_p=top_p, seed=seed,
        ):  # fmt: skip
            typer.echo(part, nl=False, err=as_json)
            text += part
    typer.echo(err=as_json)
    emit_json({"model": model, "prompt": prompt, "text": text}, as_json=as_json, output=output)


def _say_how_weights_come(model: str) -> None:
    """Print the line that stands on stderr for minutes where a model is large."""
    from kvlab.engine.geometry import PUBLISHED

    come = "drawn" if model in PUBLISHED else "read"
    typer.echo(f"{model}: weights are {come}, then layers are compared", err=True)
