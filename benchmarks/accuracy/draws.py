"""How many of drawn calls that are hard on accuracy are beyond promise 2 on a CPU, and by how much.

    python benchmarks/accuracy/draws.py OUT.json [--calls 1000] [--slow-calls 300]

The draws are those of `tests/draws.py`: call N of a kind is the same in each run. A row for each kind, dtype
and result: calls, those beyond, the largest error as a share of what is allowed, keys of the calls beyond,
and the numbers of the first ten.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from kvlab.lab.benchmark import harness

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.draws import CASES, shares


def count(kind: str, dtype: str, calls: int) -> list[dict[str, Any]]:
    """Return a row for each result of a call."""
    found: dict[str, list[tuple[float, str]]] = {}
    for number in range(calls):
        keys, of_call = shares(kind, dtype, number)
        for name, share in of_call.items():
            found.setdefault(name, []).append((share, keys))
    rows = []
    for name, all_calls in found.items():
        beyond = [(number, keys) for number, (share, keys) in enumerate(all_calls) if share > 1]
        rows.append(
            {
                "call": kind, "dtype": dtype, "result": name, "calls": calls, "beyond": len(beyond),
                "worst": float(f"{max(all_calls)[0]:.3g}"), "keys": Counter(keys for _, keys in beyond),
                "first": [number for number, _ in beyond[:10]],
            }
        )  # fmt: skip
    return rows


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(
            f"{kind}, {dtype}",
            partial(
                count, kind, dtype, given.calls if kind in ("attention", "grouped") else given.slow_calls
            ),
        )
        for kind, dtype in CASES
    ]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--calls", type=int, default=1000, help="of attention, and of groups")
    parser.add_argument("--slow-calls", type=int, default=300, help="of packed attention, and of many keys")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
