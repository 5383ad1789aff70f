"""Forward attention over ragged sequences on a GPU: TFLOPS beside those of sequences of one length.

    python benchmarks/attention/varlen.py OUT.json

16 sequences, 32K tokens in all: of 2K each in one call of fixed and one of variable length, and ragged.
TFLOPS count 4 * heads * head_dim operations for every pair of tokens of a sequence, half of them under a
causal mask. Every call is checked against the fixed-length kernel, sequence by sequence, before it is timed.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run import about, clocks_and_power, times_ms

import kvlab

TOTAL, SEQUENCES = 32768, 16
CASES = {  # query heads, KV heads, head_dim, causal
    "d128 causal mha16": (16, 16, 128, True),
    "d128 full mha16": (16, 16, 128, False),
    "d128 causal gqa32/8": (32, 8, 128, True),
    "d64 causal mha16": (16, 16, 64, True),
}


def ragged_bounds() -> list[int]:
    """Lengths from 176 to 6,000 or so, as of texts: a lognormal draw."""
    sizes = np.random.default_rng(0).lognormal(0, 0.9, SEQUENCES)
    bounds = np.round(np.cumsum(sizes) / sizes.sum() * TOTAL).astype(int)
    return [0, *bounds.tolist()]


def contestants(case: tuple[int, int, int, bool]) -> dict[str, tuple[Any, float]]:
    """Calls, and the operations of each."""
    heads, kv_heads, d, causal = case
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(TOTAL, h, d, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)
    )
    even = list(range(0, TOTAL + 1, TOTAL // SEQUENCES))

    def varlen(bounds: list[int]) -> tuple[Any, float]:
        cu = torch.tensor(bounds, device="cuda", dtype=torch.int32)
        longest = max(np.diff(bounds).tolist())

        def call() -> torch.Tensor:
            return kvlab.attention_varlen(q, k, v, cu, cu, longest, longest, causal=causal)

        got = call()
        for start, stop in pairwise(bounds):
            alone = kvlab.attention(*(x[None, start:stop] for x in (q, k, v)), causal=causal)[0]
            error = float((got[start:stop].double() - alone.double()).norm() / alone.double().norm())
            if not error < 4e-3:
                raise AssertionError(f"tokens {start} to {stop}: relative error {error:.2e}")
        return call, operations(bounds)

    def operations(bounds: list[int]) -> float:
        return float(4 * heads * d * (np.diff(bounds) ** 2).sum() / (2 if causal else 1))

    fixed = [x.reshape(SEQUENCES, -1, *x.shape[1:]) for x in (q, k, v)]
    one = [x[None] for x in (q, k, v)]
    return {
        "fixed 16 x 2K": (lambda: kvlab.attention(*fixed, causal=causal), operations(even)),
        "fixed 1 x 32K": (lambda: kvlab.attention(*one, causal=causal), operations([0, TOTAL])),
        "varlen 16 x 2K": varlen(even),
        "varlen ragged": varlen(ragged_bounds()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    results, clocks = [], {}
    for name, case in CASES.items():
        calls = contestants(case)
        for contestant, ms in times_ms({key: call for key, (call, _) in calls.items()}).items():
            row = {
                "case": name,
                "contestant": contestant,
                "ms": ms,
                "tflops": calls[contestant][1] / ms / 1e9,
            }
            results.append(row)
            print(f"{name:28s} {contestant:24s} {ms:8.3f} ms {row['tflops']:7.1f} TFLOPS", flush=True)
        clocks[name] = clocks_and_power()
    document = {"provenance": about(clocks), "lengths": np.diff(ragged_bounds()).tolist(), "results": results}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
