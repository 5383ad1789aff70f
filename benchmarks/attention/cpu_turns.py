"""Attention on a CPU of two versions in turns, forward and backward.

    python benchmarks/attention/cpu_turns.py OUT.json BEFORE AFTER

BEFORE and AFTER are folders of checkouts, each with its kernels: where kvlab is installed from a folder, link
kernels/numba to kvlab/numba_kernels in the others. One process of each answers in turns, with the
processor time of some calls, 30 rounds. The machine may be busy: given are the least time of each in
milliseconds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CALLS = {64: 30, 256: 8, 1024: 2}  # of a round, by tokens
KINDS = (  # dtypes, soft caps and what keys are like
    ("float32", 0.0, "random"), ("float32", 30.0, "random"), ("bfloat16", 0.0, "random"),
    ("float32", 0.0, "equal"), ("float32", 0.0, "nearly equal"),
)  # fmt: skip
CASES = [(what, tokens, *kind) for kind in KINDS for what in ("forward", "backward") for tokens in CALLS]
HEADS, KV_HEADS, HEAD_DIM, ROUNDS = 8, 4, 64, 30


def call_of(what: str, tokens: int, dtype: str, softcap: float, keys: str) -> Callable[[], Any]:
    import kvlab

    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    q, k, v, dout = (
        rng.standard_normal((1, tokens, n, HEAD_DIM)).astype(kind) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    if keys != "random":
        spread = 1e-3 if keys == "nearly equal" else 0
        k[:] = k[:, :1] * (1 + spread * rng.standard_normal((1, tokens, KV_HEADS, 1)))
    options: dict[str, Any] = {"causal": True, "softcap": softcap, "backend": "cpu"}
    if what == "forward":
        return lambda: kvlab.attention(q, k, v, **options)
    out, lse = kvlab.attention(q, k, v, return_lse=True, **options)
    return lambda: kvlab.attention_backward(dout, q, k, v, out, lse, **options)


def serve() -> None:
    """Answer each number of a case on stdin with the least milliseconds of its calls."""
    calls = [call_of(*case) for case in CASES]
    for line in sys.stdin:
        case, times = int(line), []
        for _ in range(CALLS[CASES[case][1]]):
            start = time.process_time()
            calls[case]()
            times.append(1e3 * (time.process_time() - start))
        print(min(times), flush=True)


def measure(folders: dict[str, Path]) -> list[dict[str, Any]]:
    from kvlab.lab.benchmark.versions import ask_in_turns

    found = ask_in_turns(__file__, folders, [*product(range(len(CASES)), folders)], ROUNDS)
    rows = []
    for case, (what, tokens, dtype, softcap, keys) in enumerate(CASES):
        before, after = (np.array(found[case, name]) for name in ("before", "after"))
        row = {"call": what, "tokens": tokens, "dtype": dtype, "softcap": softcap, "keys": keys}
        row |= {"before": round(before.min(), 3), "after": round(after.min(), 3)}
        rows.append(row | {"ratio": round(float(np.median(after / before)), 3)})
    return rows


def main() -> int:
    from kvlab.lab.benchmark import harness, versions  # not above: a process that answers may be older

    def cases(given: argparse.Namespace) -> list[harness.Case]:
        return [harness.Case("both versions in turns", partial(measure, versions.folders(given)))]

    return harness.run(versions.options(__doc__, "cpu"), cases)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        raise SystemExit(main())
