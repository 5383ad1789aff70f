"""Steps of a cache on a CPU: a prompt, parts of 64 tokens, decode steps with their plans, appends, attention.

    python benchmarks/cpu_cache/run.py OUT.json [--lengths 1024,4096]

Milliseconds a layer, for 4 layers of 9 query heads on 3 KV heads of 64 channels at budget 0.3, behind prompts
of 1,024 and 4,096 tokens. To compare two versions, run both in turns: PYTHONPATH says which.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.lab.benchmark import harness

LAYERS, HEADS_Q, HEADS, DIM = 4, 9, 3, 64


def tokens(rng: np.random.Generator, n: int) -> list[Any]:
    return [rng.standard_normal((1, n, heads, DIM), dtype=np.float32) for heads in (HEADS_Q, HEADS, HEADS)]


def times(inputs: list[Any], call: Callable[[int, Any], Any]) -> np.ndarray:
    """Milliseconds a layer of each input."""
    found = []
    for x in inputs:
        start = time.perf_counter()
        for layer in range(LAYERS):
            call(layer, x)
        found.append(1e3 * (time.perf_counter() - start) / LAYERS)
    return np.array(found)


def measure(length: int) -> dict[str, Any]:
    rng, prompts = np.random.default_rng(0), []
    for _ in range(3):
        cache = MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, budget=0.3, plan_length=2048)
        prompts.append(times([tokens(rng, length)], lambda layer, x: cache.step(layer, *x))[0])  # noqa: B023
    parts = times([tokens(rng, 64) for _ in range(6)], lambda layer, x: cache.step(layer, *x))
    ones = [tokens(rng, 1) for _ in range(160)]
    steps = times(ones, lambda layer, x: cache.step(layer, *x))
    appends = times(ones[:64], lambda layer, x: cache.append(layer, *x[1:]))
    attention = times(ones[:64], lambda layer, x: cache.attend(layer, x[0]))
    found = {
        "prompt": min(prompts), "part of 64": parts.min(), "decode step, mean": steps[16:].mean(),
        "decode step, median": np.median(steps), "step with a plan": np.sort(steps)[-3],
        "append": appends.mean(), "attend": np.median(attention),
    }  # fmt: skip
    return {"length": length, "ms": {name: round(float(x), 3) for name, x in found.items()}}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [harness.Case(f"{length} tokens", partial(measure, length)) for length in given.lengths]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--lengths", type=harness.numbers, default="1024,4096", help="tokens of a prompt")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
