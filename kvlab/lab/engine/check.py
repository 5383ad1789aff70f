"""The engine's layers and predictions against transformers in float64.

Errors are judged by those that transformers makes with the same weights in 16 bits: the engine passes where
neither its largest nor its root mean square error is more than 1.1 times theirs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import whole_number
from kvlab.engine import Decoder
from kvlab.engine.geometry import PUBLISHED, Geometry
from kvlab.engine.options import check_options
from kvlab.lab.engine.models import load, sizes_of
from kvlab.lab.results import Row

__all__ = ["ALLOWED", "check", "random_check", "states"]

ALLOWED = 1.1
"""Times the error of transformers in 16 bits."""
MEAN_ALLOWED = 0.01
"""Mean absolute error of a layer, over the mean size of what it gives."""

Floats = NDArray[Any]


def check(
    name_or_path: str,
    *,
    layers: Sequence[int] | None,
    seq_len: int,
    dtype: str,
    seed: int,
    device: str,
    dump: Path | None = None,
    runs: int = 0,
) -> tuple[list[Row], list[Row]]:
    """Compare what every layer leaves of a text, and the logits, with transformers.

    `name_or_path` is a known size, with random weights, or the folder of a model. The text is random tokens.
    By default all layers are reported, and the logits. transformers runs on the CPU, the engine on `device`.
    `dump` is an .npz that gets what the layers compute on the way (`Decoder.layer_values`), on a GPU by plan
    "ops". `runs` tokens of the layers that were checked, and those before them, are timed behind the text.

    Rows have layer, largest and root mean square error of the engine and of transformers in 16 bits, the
    larger of their two ratios, and whether it passes. Others are of timed tokens, of the engine and of
    transformers in float32 on the CPU: microseconds.
    """
    geometry = sizes_of(name_or_path)
    if layers is not None and not 0 <= min(layers) <= max(layers) < geometry.layers:
        raise ValueError(f"layer={max(layers)}: the model has layers 0 to {geometry.layers - 1}")
    _check_length(seq_len, runs, geometry, device)
    depth = None if layers is None else max(layers) + 1
    model = load(name_or_path, dtype, depth, seed)
    count = model.config.num_hidden_layers
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, seq_len)
    exact, low = states(model, ids, "float64"), states(model, ids, dtype)
    # The model is again what it was: 16-bit numbers survive both.
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    decoder = Decoder.from_pretrained(model.float(), max_seqlen=seq_len + runs, **options)
    found = [*decoder.layer_outputs(ids), decoder.prefill(ids)]
    wanted = [*range(count)] if layers is None else list(layers)
    rows = [_row(str(i), found[i], exact[i], low[i]) for i in wanted]
    if layers is None:
        rows.append(_row("logits", found[-1], exact[-1][-1:], low[-1][-1:]))
    if dump is not None:
        plan = "graph" if device == "cpu" else "ops"
        values = Decoder.from_pretrained(model, max_seqlen=seq_len, plan=plan, **options).layer_values(ids)
        np.savez(
            dump,
            allow_pickle=False,
            **{name: x for name, x in values.items() if int(name.split(".")[0]) in wanted},
        )
    return rows, _times(decoder, model, ids, runs) if runs else []


def _check_length(seq_len: int, runs: int, geometry: Geometry, device: str) -> None:
    if seq_len + runs > geometry.max_positions:
        behind = f", {runs} tokens timed behind them" if runs else ""
        raise ValueError(
            f"seq_len={seq_len}{behind}: the model takes {geometry.max_positions}; ask for fewer tokens"
        )
    check_options(geometry, device=device)


def _times(decoder: Decoder, model: Any, ids: Floats, runs: int) -> list[Row]:
    """Microseconds of tokens behind a text, one after the other."""
    import torch

    decoder.reset()
    decoder.prefill(ids[:1])
    decoder.step(ids[:1])  # compiles what a token takes
    decoder.reset()
    decoder.prefill(ids)

    def theirs() -> Iterator[Callable[[], Any]]:
        with torch.no_grad():
            past = model(torch.from_numpy(ids)[None]).past_key_values
        token = torch.tensor([[int(ids[-1])]])
        while True:
            yield lambda: model(token, past_key_values=past)

    rows: list[Row] = []
    for name, calls in (
        ("engine", itertools.repeat(lambda: decoder.step([int(ids[-1])]))),
        ("transformers", theirs()),
    ):
        times = []
        for call in itertools.islice(calls, runs):
            begin = time.perf_counter()
            with torch.no_grad():
                call()
            times.append(1e6 * (time.perf_counter() - begin))
        rows.append(
            {
                "token of": name, "runs": runs, "median us": float(np.median(times)), "least us": min(times),
                "most us": max(times),
            }
        )  # fmt: skip
    return rows


def random_check(name: str, *, runs: int, seq_len: int, dtype: str, seed: int, device: str) -> dict[str, Any]:
    """Compare the first layer of a model with float64, with a random text in each run.

    Of a known size every run has random weights of its own; the folder of a model has the same in all runs.

    The result has the largest, smallest and average of mean absolute errors over `runs`, relative to the mean
    size of the layer's output, the same of transformers in 16 bits, whether the weights are random and
    whether it passes.
    """
    ours, theirs, is_random = [], [], name in PUBLISHED
    _check_length(seq_len, 0, sizes_of(name), device)
    for run in range(whole_number(runs, "runs", 1)):
        if run == 0 or is_random:
            model = load(name, dtype, 1, seed + run)
            decoder = Decoder.from_pretrained(model, dtype=dtype, device=device, max_seqlen=seq_len)
        ids = np.random.default_rng(seed + run).integers(0, model.config.vocab_size, seq_len)
        exact, low = states(model, ids, "float64")[0], states(model, ids, dtype)[0]
        size = np.abs(exact).mean()
        ours.append(float(np.abs(decoder.layer_outputs(ids)[0] - exact).mean() / size))
        theirs.append(float(np.abs(low - exact).mean() / size))
    passes = max(ours) < MEAN_ALLOWED and np.mean(ours) <= ALLOWED * np.mean(theirs)
    return {
        "model": name, "random weights": is_random, "runs": runs, "maximum": max(ours), "minimum": min(ours),
        "average": float(np.mean(ours)), "transformers maximum": max(theirs),
        "transformers average": float(np.mean(theirs)), "passes": bool(passes),
    }  # fmt: skip


def states(model: Any, ids: Floats, dtype: str) -> list[Floats]:
    """What each layer leaves, before the final norm, and logits, (tokens, ...) float64."""
    import torch

    body = model.base_model
    seen: list[Any] = []

    def keep(_module: Any, _inputs: Any, out: Any) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    hooks = [layer.register_forward_hook(keep) for layer in body.layers]
    # Rotary frequencies stay what they are: casting the model would round them, too.
    frequencies = {name: buffer.clone() for name, buffer in body.rotary_emb.named_buffers()}
    try:
        with torch.no_grad():
            model.to(getattr(torch, dtype))
            for name, buffer in frequencies.items():
                setattr(body.rotary_emb, name, buffer)
            logits = model(torch.from_numpy(ids)[None], use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.float()
        for name, buffer in frequencies.items():
            setattr(body.rotary_emb, name, buffer)
    return [state[0].double().numpy() for state in (*seen, logits)]


def _row(name: str, got: Floats, exact: Floats, low: Floats) -> Row:
    mine, theirs = _errors(got, exact), _errors(low, exact)
    ratio = max(a / b if b else np.inf for a, b in zip(mine, theirs, strict=True))
    return {
        "layer": name, "largest error": mine[0], "rms error": mine[1], "transformers largest": theirs[0],
        "transformers rms": theirs[1], "ratio": ratio, "passes": bool(ratio <= ALLOWED),
    }  # fmt: skip


def _errors(got: Floats, want: Floats) -> tuple[float, float]:
    return float(np.abs(got - want).max()), float(np.sqrt(np.square(got - want).mean()))
