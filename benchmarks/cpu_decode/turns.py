"""Packed CPU decode of two versions in turns, calls behind one of torch, as `kvlab benchmark decode` has it.

    python benchmarks/cpu_decode/turns.py OUT.json BEFORE AFTER

BEFORE and AFTER are folders of checkouts, each with its kernels: where kvlab is installed from a folder, link
kernels/numba to kvlab/numba_kernels in the others. One process of each answers in turns: 4 calls of each
side, 40 rounds. The machine may be busy: given are the least time, and the quartiles, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

MIXED = "mixed, average 4"
CASES = [
    *((context, widths, 1) for context in (2048, 8192) for widths in ("2", "8", MIXED)),
    *((context, MIXED, size) for context, size in ((64, 1), (64, 3), (2048, 3))),
]
"""Tokens, widths, and a factor on the queries: few tokens have most of the weight where it is 3."""
ROUNDS, CALLS = 40, 4


def serve() -> None:
    """Answer each number of a case on stdin with milliseconds of (packed, torch) calls."""
    import torch

    from kvlab.lab.benchmark.decode import HEAD_DIM, NUM_HEADS_KV, NUM_HEADS_Q, WIDTHS, decode, make_pages
    from kvlab.ops.packed import packed_attention

    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, NUM_HEADS_Q, HEAD_DIM), np.float32)
    cases = []
    for context, widths, size in CASES:
        pages, queries = make_pages(rng, WIDTHS[widths], context), size * q
        grouped = torch.from_numpy(queries).reshape(1, NUM_HEADS_KV, -1, HEAD_DIM)
        cases.append((queries, grouped, pages, *map(torch.from_numpy, decode(pages))))
    for line in sys.stdin:
        queries, grouped, pages, k, v = cases[int(line)]
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            packed_attention(queries, pages)
            middle = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(grouped, k, v)
            times.append((1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)))
        print(json.dumps(times), flush=True)


def measure(folders: dict[str, Path]) -> list[dict[str, Any]]:
    from kvlab.lab.benchmark.versions import ask_in_turns

    found = ask_in_turns(__file__, folders, [*product(range(len(CASES)), folders)], ROUNDS)
    rows: list[dict[str, Any]] = []
    for (case, name), times in sorted(found.items()):
        packed, dense = np.transpose(np.concatenate(times))
        steps = ("least", "quarter", "median")
        row = dict(zip(steps, np.quantile(packed, (0, 0.25, 0.5)).round(3).tolist(), strict=True))
        row["speedup"] = round(float(np.median(dense / packed)), 2)
        of_case = dict(zip(("context", "widths", "queries_times"), CASES[case], strict=True))
        rows.append({**of_case, "version": name, **row})
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
