"""What Nsight Compute (``ncu``) counts of the kernels of a program, where it is on the path."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from kvlab.lab.results import Row

__all__ = ["count"]


def count(
    arguments: Sequence[str], metrics: Mapping[str, str], kernels: str, *options: str
) -> tuple[list[Row], str | None]:
    """Run a program of Python under ncu.

    `arguments` are those of Python, such as ``("-m", "kvlab.lab.profiling", "attention")``. `metrics` say for
    what ncu calls a counter what a row calls it, `kernels` is a regular expression for the names of kernels
    to count in, and `options` are more of ncu's. A row is a launch, in order: ``kernel``, and the counters.
    If there are no rows, the reason stands beside.
    """
    program = shutil.which("ncu")
    if program is None:
        return [], "ncu (Nsight Compute) is not on the path"
    command = [
        program, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(metrics),
        *options, "--kernel-name", f"regex:^({kernels})$", sys.executable, *arguments,
    ]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in answer.stdout.splitlines() if line.startswith('"')]
    if answer.returncode != 0 or not lines:
        said = [*answer.stdout.splitlines(), *answer.stderr.splitlines(), "nothing"]
        return [], next((line for line in said if "ERR" in line or "Error" in line), said[-1])
    found: dict[str, Row] = {}
    for line in csv.DictReader(lines):
        row = found.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        row[metrics[line["Metric Name"]]] = float(line["Metric Value"].replace(",", ""))
    return list(found.values()), None
