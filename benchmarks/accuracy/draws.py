"""How many of drawn calls that are hard on accuracy are beyond promise 2 on a CPU, and by how much.

    python benchmarks/accuracy/draws.py OUT.json [--calls 2000] [--kinds ...] [--dtypes ...]

The draws are those of `tests/draws.py`: call N of a kind is the same in each run. Per kind, dtype and result:
calls, those beyond, the largest error as a share of what is allowed, and the numbers of the first ten beyond.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvlab.lab.benchmark import harness
from tests.draws import KINDS, shares

DTYPES = ("float32", "float16", "bfloat16")


def count(kind: str, dtype: str, calls: int) -> list[dict[str, Any]]:
    """Return a row for each result of a call."""
    worst: dict[str, float] = {}
    beyond: dict[str, list[int]] = {}
    by_keys: dict[str, Counter[str]] = {}
    for number in range(calls):
        keys, found = shares(kind, dtype, number)
        for name, share in found.items():
            worst[name] = max(worst.get(name, 0.0), share)
            beyond.setdefault(name, [])
            if share > 1:
                beyond[name].append(number)
                by_keys.setdefault(name, Counter())[keys] += 1
    return [
        {
            "call": kind, "dtype": dtype, "result": name, "calls": calls, "beyond": len(numbers),
            "worst": float(f"{worst[name]:.3g}"), "keys": dict(by_keys.get(name, {})), "first": numbers[:10],
        }
        for name, numbers in beyond.items()
    ]  # fmt: skip


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(f"{kind}, {dtype}", partial(count, kind, dtype, given.calls))
        for kind in given.kinds
        for dtype in given.dtypes
        if dtype == "float32" or kind != "packed and recent"
    ]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
