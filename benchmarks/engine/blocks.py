"""The attention block of a layer alone: norm, QKV, rotation, attention, output, residual; by every plan.

All layers of a model, the block of each in a CUDA graph: the token kernel in launches of three phases,
operations one by one, clusters of 1 to 16 blocks. Microseconds a layer, median of rounds. Weights are random,
float16.

    python benchmarks/engine/blocks.py OUT.json [--model llama-2-7b] [--contexts 32,1024,4000]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from kvlab.engine import Decoder
from kvlab.engine.geometry import published
from kvlab.engine.gpu import CLUSTERS
from kvlab.lab.benchmark import harness
from kvlab.lab.benchmark.engine import repeated

ROUNDS, REPLAYS = 7, 20


def launches(decoder: Decoder) -> Callable[[], None]:
    """The blocks of all layers."""
    executor: Any = decoder._executor
    token, stream, layers = executor._decode, executor._stream.ptr, decoder.geometry.layers

    def run() -> None:
        for layer in range(layers):
            if decoder.plan == "graph":
                token.launch_phases(layer * token.kernel.phases, layer * token.kernel.phases + 3, stream)
            else:
                token.launch_layer(layer, stream, token.block_operations())

    return run


def block_us(decoder: Decoder, context: int) -> tuple[float, Any]:
    """Microseconds a layer, and the hidden state that the blocks of all layers make of one."""
    executor: Any = decoder._executor
    cupy, run, times = executor._cupy, launches(decoder), []
    token = executor._decode
    with executor._current():
        token.set(ids=np.array([7]), positions=np.array([context]))
        token.launch_embed(executor._stream.ptr)
        run()
        hidden = cupy.asnumpy(token.arrays["hidden"])
        executor._stream.synchronize()
        executor._stream.begin_capture()
        run()
        graph = executor._stream.end_capture()
        for _ in range(ROUNDS):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for _ in range(REPLAYS):
                graph.launch(executor._stream)
            end.record()
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / REPLAYS / decoder.geometry.layers)
    return statistics.median(times), hidden


def cases(given: argparse.Namespace) -> list[harness.Case]:
    geometry = replace(published(given.model)[0], layers=given.layers)
    wanted: dict[int, Any] = {}

    @cache
    def drawn() -> tuple[Any, Any, Any]:
        one = repeated(given.model)
        return one, next(one.layers), one.head()

    def measure(plan: str) -> Iterator[dict[str, Any]]:
        one, layer, head = drawn()
        weights = replace(one, geometry=geometry, layers=iter([layer] * geometry.layers), head=lambda: head)
        decoder = Decoder(weights, device="cuda", max_seqlen=max(given.contexts) + 8, plan=plan)
        for context in given.contexts:
            us, hidden = block_us(decoder, context)
            reference = wanted.setdefault(context, hidden)
            error = float(np.abs(hidden - reference).max() / np.abs(reference).max())
            yield {"model": given.model, "plan": plan, "context": context, "us": us, "error": error}

    plans = ("graph", "ops", *(name for name in CLUSTERS if name != "cluster"))
    return [harness.Case(plan, partial(measure, plan)) for plan in plans]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--contexts", type=harness.numbers, default="32,1024,4000")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
