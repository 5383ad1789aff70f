"""Time crops, other rows and copies of a whole cache on a GPU, as a caller sees them.

    python benchmarks/cache_plan/rows.py OUT.json [--tokens 32768] [--layers 32] [--repeats 9]

The layers are those of `run.py`: 8 KV heads of 128 channels, ladder 2, 3, 4, 8, budget 0.35. A time, in
milliseconds, is from the call until the device is done, the median of several after two that warm up;
`repeat_2_host` is until the call returns. `repeat_2_first` is the first of all, of sizes that nothing
remembers, in memory that torch has had before. `copy` is torch's copy of as many bytes as the operation
writes. What a crop or other rows leave is compared with what was there first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch

import kvlab
from kvlab.lab.benchmark import harness

HEADS, GROUP, HEAD_DIM = 8, 4, 128


def make(batch: int, layers: int, tokens: int) -> Any:
    cache = kvlab.MixedPrecisionCache(
        layers, HEADS * GROUP, HEADS, HEAD_DIM, batch=batch, budget=0.35, device="cuda", dtype="bfloat16",
        max_seqlen=tokens + 256,
    )  # fmt: skip
    torch.manual_seed(0)
    k, v = torch.randn(2, batch, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for layer in range(layers):
        cache.append(layer, k, v)
        cache.append(layer, k[:, :1], v[:, :1])
    return cache


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of the median; what the work returns is dropped before the next."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        del result
    return statistics.median(times[2:])


def time_of_copy(nbytes: int, repeats: int) -> float:
    source, target = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    return timed(lambda: target.copy_(source), repeats)


def held(cache: Any) -> list[np.ndarray]:
    """All pages of the first layer, by rung, in the order of rows."""
    return [pool.view(np.uint64).sum(1) for pool in cache.pages(0).pools]


def equal(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def measure(batch: int, layers: int, tokens: int, repeats: int) -> dict[str, Any]:
    cache = make(batch, layers, tokens)
    before, found = held(cache), {"batch": batch, "nbytes": cache.nbytes}
    found["reserved_nbytes"] = cache.reserved_nbytes
    swapped = np.arange(batch)[::-1].copy()
    found["reorder_reversed"] = timed(lambda: cache.reorder(swapped), repeats)
    if (repeats + 2) % 2:
        cache.reorder(swapped)
    assert equal(held(cache), before)
    beams = np.array([0, *range(batch - 1)])
    found["reorder_one_lost"] = timed(lambda: cache.reorder(beams), repeats)
    found["select_all"] = timed(lambda: cache.select(np.arange(batch)), repeats)
    found["deepcopy"] = timed(lambda: deepcopy(cache), repeats)
    found["copy"] = time_of_copy(found["nbytes"], repeats)
    copy = deepcopy(cache)
    assert equal(held(copy), held(cache))
    del copy
    deepcopy(cache).repeat(3)  # compiles what is needed, and torch has taken the memory
    times, host = [], []
    for _ in range(repeats + 2):
        copy = deepcopy(cache)
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy.repeat(2)
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    twice = [np.sort(np.repeat(x, 2)) for x in held(cache)]
    assert equal([np.sort(x) for x in held(copy)], twice)
    found["repeat_2"], found["repeat_2_first"] = statistics.median(times[2:]), times[0]
    found["repeat_2_min"], found["repeat_2_host"] = min(times), statistics.median(host[2:])
    found["copy_2"] = time_of_copy(2 * found["nbytes"], repeats)
    for n in (1, 64):
        found[f"crop_{n}"] = timed(lambda n=n: cache.crop(n), repeats)  # type: ignore[misc]
    assert cache.nbytes <= cache.budget_nbytes
    return found


def cases(given: argparse.Namespace) -> list[harness.Case]:
    shape = given.layers, given.tokens, given.repeats
    return [harness.Case(f"batch {batch}", partial(measure, batch, *shape)) for batch in (1, 4)]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
