"""What a sweep costs beside its cases: time of the runner for a case, and of collecting 10,000 results.

    python benchmarks/sweep/run.py OUT.json [--cases 10000]

The runner is given cases whose work is to return a result at once, the size of a real one; what is left is
its own: looking for a result, writing one (with the disk's own delay of fsync), reporting.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvlab.lab.ablation import run as ablation
from kvlab.lab.ablation.grid import AblationCase, Geometry
from kvlab.lab.benchmark import harness
from kvlab.lab.sweep.manifest import Manifest
from kvlab.lab.sweep.run import run_cases
from kvlab.lab.sweep.tables import collect, write_summary

LIKE = AblationCase(0.5, "2,4", 128, model=None, geometry=Geometry(1, 2, 1, 32))


def measure(count: int) -> dict[str, Any]:
    ready = ablation.run(LIKE)

    def at_once(case: AblationCase) -> dict[str, Any]:
        source = {**ready["provenance"], "case_id": case.id}
        return {**ready, "experiment": case.name, "config": case.to_dict(), "provenance": source}

    manifest = Manifest(tuple(replace(LIKE, budget=0.2 + 0.5 * i / count) for i in range(count)))
    with TemporaryDirectory() as name:
        folder = Path(name)
        manifest.write(folder)
        start = time.perf_counter()
        run_cases(folder, manifest, range(count), runner=at_once)
        ran = time.perf_counter()
        rows, missing = collect(folder, Manifest.read(folder))
        collected = time.perf_counter()
        write_summary(rows, folder)
        written = time.perf_counter()
    if missing or len(rows) != count:
        raise RuntimeError(f"{len(missing)} of {count} cases are missing")
    return {
        "cases": count,
        "runner_ms_a_case": 1e3 * (ran - start) / count,
        "collect_s": collected - ran,
        "tables_s": written - collected,
    }


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [harness.Case(f"{given.cases} cases", partial(measure, given.cases))]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--cases", type=int, default=10_000)
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())
