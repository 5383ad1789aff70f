"""`kvlab benchmark engine`: the time of a token, and the bytes a second that it reads.

Weights are random, in the sizes of known models. On a GPU every layer has the numbers of the first one, in
memory of its own: drawing billions of numbers would take longer than all else. A text is decoded greedily, as
`Decoder.stream` gives it to a user. Before it is timed, a prompt in parts must give the logits of the whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time

import numpy as np

from kvlab.engine import Decoder
from kvlab.engine.geometry import published
from kvlab.engine.weights import Weights, draw, from_seed
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.decode_cuda import read_bandwidth
from kvlab.lab.results import Row

__all__ = ["CASES", "NOTE", "benchmark_engine", "check", "repeated"]

NOTE = (
    "us: median from token to token of a greedy stream behind a prompt; GB/s: weights, keys and values that "
    "a token reads; share: of what the GPU reads at most"
)
CASES: dict[str, tuple[tuple[str, int, int], ...]] = {
    "cpu": (("smollm2-135m", 1, 32), ("smollm2-135m", 4, 32)),
    "cuda": (
        *itertools.product(("pythia-2.8b",), (1, 8), (32, 1024)),
        *itertools.product(("llama-3.2-1b",), (1, 8), (32, 4096)),
        *itertools.product(("pythia-160m", "pythia-410m", "pythia-1.4b", "pythia-6.9b"), (1,), (32,)),
        *itertools.product(("llama-3.1-8b",), (1, 8), (32, 4096)),
    ),
}
"""Model, batch, tokens of the prompt."""
TINY = (("pythia-14m", 2, 32),)
DTYPE = "float16"


def benchmark_engine(options: Options) -> list[Row]:
    """Time decoding; one row for each case of a device.

    A row has ``model``, ``batch``, ``context``; ``us``, ``tokens/s`` (of all rows), ``GB/s``, on a GPU
    ``share``. A prompt that in parts has other logits than as a whole is a RuntimeError.

    Examples
    --------
    >>> (row,) = benchmark_engine(Options(tiny=True))
    >>> row["model"], row["us"] > 0
    ('pythia-14m', True)
    """
    device, rows = options.device, []
    cases, tokens = (TINY, 3) if options.tiny else (CASES[device], 200 if device == "cuda" else 32)
    for (name, batch), group in itertools.groupby(cases, key=lambda case: case[:2]):
        contexts = [context for _, _, context in group]
        weights = from_seed(name, 0, DTYPE) if device == "cpu" else repeated(name)
        decoder = Decoder(weights, batch=batch, device=device, max_seqlen=max(contexts) + tokens)
        check(decoder, name, min(contexts))
        rows += [_time(decoder, name, context, tokens) for context in contexts]
        del decoder
    return rows


def repeated(name: str) -> Weights:
    """Random weights of a known size; every layer has those of the first one."""
    geometry, base = published(name)
    one = draw(dataclasses.replace(geometry, layers=1), base, 0, DTYPE)
    layer = next(one.layers)
    return dataclasses.replace(one, geometry=geometry, layers=iter([layer] * geometry.layers))


def _prompt(decoder: Decoder, length: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, decoder.geometry.vocabulary, length).tolist() for _ in range(decoder.batch)]


def check(decoder: Decoder, name: str, length: int) -> None:
    """Refuse a decoder to which a prompt in parts says something else than the whole."""
    rows = _prompt(decoder, length)
    whole = decoder.prefill(rows)
    decoder.reset()
    decoder.prefill([row[:-1] for row in rows])
    parts = decoder.step([row[-1] for row in rows])
    decoder.reset()
    if not np.abs(parts - whole).max() <= 1e-2 * np.abs(whole).max():
        raise RuntimeError(f"{name}, batch {decoder.batch}: a prompt in parts has other logits")


def _time(decoder: Decoder, name: str, context: int, tokens: int) -> Row:
    decoder.reset()
    decoder.prefill(_prompt(decoder, context))
    times = [time.perf_counter()]
    for _ in decoder.stream(tokens):
        times.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in itertools.pairwise(times[1:]))
    geometry = decoder.geometry
    keys = context + tokens // 2
    per_key = 2 * geometry.layers * geometry.heads_kv * geometry.head_dim
    nbytes = 2 * (geometry.parameters + decoder.batch * keys * per_key)
    row: Row = {
        "model": name, "batch": decoder.batch, "context": context, "us": seconds * 1e6,
        "tokens/s": decoder.batch / seconds, "GB/s": nbytes / seconds / 1e9,
    }  # fmt: skip
    return row if decoder.device == "cpu" else row | {"share": nbytes / seconds / read_bandwidth()}
