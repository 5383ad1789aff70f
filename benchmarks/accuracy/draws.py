"""How many of drawn calls that are hard on accuracy are beyond promise 2 on a CPU, and by how much.

    python benchmarks/accuracy/draws.py OUT.json [CALLS [KIND [DTYPE]]]

The draws are those of `tests/draws.py`: call N of a kind is the same in each run. Per kind, dtype and result:
calls, those beyond, the largest error as a share of what is allowed, and the numbers of the first ten beyond.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvlab.lab.results import provenance
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


def main() -> None:
    path, calls = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    rows = []
    for kind in sys.argv[3:4] or KINDS:
        for dtype in sys.argv[4:5] or DTYPES:
            if dtype == "float32" or kind != "packed and recent":
                rows += count(kind, dtype, calls)
                for row in [row for row in rows if (row["call"], row["dtype"]) == (kind, dtype)]:
                    print(*row.values(), flush=True)
    Path(path).write_text(json.dumps({"provenance": provenance(calls=calls), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
