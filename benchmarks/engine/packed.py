"""The decode engine with a packed cache on a GPU, and its prompts, in the geometry of Llama-3.1-8B.

Weights, keys and values are random: what is timed does not depend on them. Every layer has the numbers of
the first one, in memory of its own. Caches are filled directly, not by a prompt; then tokens are timed from
one to the next of a greedy stream, plans of the cache included. Besides: the engine's launches without those
of the cache, from a graph.

    python benchmarks/engine/packed.py OUT.json [--cases mixed:1x32768,...] [--prompts 2048,...] [--steps 200]

`kvlab.integrations.decode_graph` is measured by ``benchmarks/generation/run.py --cases graph:8x32768``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from kvlab.engine import Decoder, gpu
from kvlab.engine.geometry import published
from kvlab.engine.weights import Weights, draw
from kvlab.lab.benchmark import harness

LOOKAHEAD, WARM_UP = 512, 40  # tokens: all kinds of steps are recorded within 40
BITS: dict[str, dict[str, Any]] = {
    "mixed": {"bits": (4, 8), "cache_budget": 0.3},
    "default": {"cache_budget": 0.3},
    "4": {"bits": 4, "cache_budget": 0.3},
    "16": {"bits": 16, "cache_budget": 1.02},
}


def weights_of(name: str) -> Callable[[], Weights]:
    """Random weights of a known size, drawn once."""
    geometry, base = published(name)
    one = draw(dataclasses.replace(geometry, layers=1), base, 0, "bfloat16")
    layer, head = next(one.layers), one.head()
    return lambda: dataclasses.replace(
        one, geometry=geometry, layers=iter([layer] * geometry.layers), head=lambda: head
    )


def recorded_ms(executor: Any, work: Callable[[], None], repeats: int = 20) -> float:
    """Milliseconds of launches in a graph, median."""
    with executor._current():
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=executor._torch_stream):
            work()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def unread_ms(executor: Any, tokens: int = 32) -> float:
    """Milliseconds of a token that nobody waits for, mean: what the host's part costs a stream."""
    with executor._current():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(tokens):
            executor._replay()
            executor.lengths += 1
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / tokens


def engine_alone(executor: Any) -> Callable[[], None]:
    token, stream = executor._decode, executor._stream.ptr
    layers, phases = executor.geometry.layers, executor._decode.kernel.phases

    def work() -> None:
        token.launch_embed(stream)
        for layer in range(layers + 1):
            first = layer * phases - phases + 2 if layer else 0
            token.launch_phases(first, layer * phases + 1, stream)

    return work


def decode(weights: Callable[[], Weights], kind: str, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    geometry = weights().geometry
    decoder = Decoder(
        weights(), batch=batch, max_seqlen=tokens + LOOKAHEAD, device="cuda", **BITS[kind]
    )  # fmt: skip
    executor, cache = decoder._executor, decoder.cache
    assert cache is not None
    with executor._current(), executor._torch_current():
        shape = batch, tokens, geometry.heads_kv, geometry.head_dim
        for layer in range(geometry.layers):
            cache.append(layer, *torch.randn(2, *shape, dtype=torch.bfloat16, device="cuda"))
    executor.lengths[:] = tokens
    times, most = [time.perf_counter()], WARM_UP + steps + 1
    for _ in decoder.stream(most):
        times.append(time.perf_counter())
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times[WARM_UP:])]
    nbytes = 2 * geometry.parameters + cache.nbytes
    found = {
        "cache": kind, "batch": batch, "tokens": tokens, "ms_mean": statistics.fmean(gaps),
        "ms_median": statistics.median(gaps), "cache_bytes": cache.nbytes,
        "bits_per_element": cache.bits_per_element, "reserved_bytes": cache.reserved_nbytes,
    }  # fmt: skip
    found["GB/s"] = nbytes / found["ms_mean"] / 1e6
    found["ms_unread"] = unread_ms(executor)
    found["ms_engine_alone"] = recorded_ms(executor, engine_alone(executor))
    return found


def time_prompts(decoder: Decoder, lengths: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of a prompt, by products and by the token kernel."""
    rng, found = np.random.default_rng(0), []
    for length in lengths:
        ids = rng.integers(0, decoder.geometry.vocabulary, length)
        row: dict[str, Any] = {"prompt": length}
        for name, seconds in (("ms_products", 0.0), ("ms_token_kernel", 1.0)):
            if name == "ms_token_kernel" and (length > 512 or decoder.cache is not None):
                continue
            gpu.LAYER_SECONDS = seconds
            times = []
            for _ in range(4):
                decoder.reset()
                begin = time.perf_counter()
                decoder.prefill(ids)
                times.append(1e3 * (time.perf_counter() - begin))
            row[name] = min(times)
        row["tokens/s"] = 1e3 * length / row["ms_products"]
        found.append(row)
    return found


def cases(given: argparse.Namespace) -> list[harness.Case]:
    drawn = cache(lambda: weights_of(given.model))

    def weights() -> Weights:
        return drawn()()

    def prompts(lengths: list[int], kind: dict[str, Any]) -> list[dict[str, Any]]:
        decoder = Decoder(weights(), device="cuda", max_seqlen=max(lengths) + 64, **kind)
        return time_prompts(decoder, lengths)

    found = [
        harness.Case(f"{kind}:{batch}x{tokens}", partial(decode, weights, kind, batch, tokens, given.steps))
        for kind, batch, tokens in given.cases
    ]
    if given.prompts:
        found.append(harness.Case("prompts", partial(prompts, given.prompts, {})))
    if given.packed_prompts:
        found.append(harness.Case("packed prompts", partial(prompts, given.packed_prompts, BITS["mixed"])))
    return found


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--cases",
        type=harness.shapes,
        default="mixed:8x32768,mixed:1x32768,mixed:16x32768,4:8x32768,16:8x32768",
    )
    parser.add_argument("--prompts", type=harness.numbers, default="32,64,128,256,2048,8192")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--packed-prompts", type=harness.numbers, default="")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
