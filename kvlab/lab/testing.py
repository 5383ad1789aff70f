"""`kvlab test`: the tests of a part of the library, on the CPU and on a GPU, each in a process of its own.

The tests are those of the repository, so this needs a checkout. GPU tests import CUDA libraries and fill the
device's memory, so they do not share a process with the others.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from kvlab.errors import MissingExtraError
from kvlab.lab.results import provenance
from kvlab.lab.targets import PARTS, ROOT, Machine, resolve

__all__ = ["PATTERNS", "paths", "run"]

PATTERNS = {
    ("attention", "cpu"): ("ops/test_attention*.py", "ops/test_merge*.py", "ops/test_grouped*.py",
                           "reference/test_attention*.py", "reference/test_tile_list.py",
                           "reference/test_grouped*.py", "integrations/test_flash_attn.py",
                           "integrations/test_torch_autograd.py", "integrations/test_compiled.py"),
    ("attention", "cuda"): ("gpu/test_attention*.py", "gpu/test_flash_attn.py", "gpu/test_grouped*.py",
                            "gpu/test_tile_list.py", "gpu/test_merge_rows.py",
                            "gpu/test_gathered_attention.py", "gpu/test_query_gradients.py",
                            "gpu/test_compiled.py"),
    ("packed", "cpu"): ("ops/test_packed*.py", "ops/test_codec*.py", "reference/test_pages.py",
                        "cache/**/test_*.py", "integrations/test_transformers.py"),
    ("packed", "cuda"): ("gpu/test_cuda_kernels*.py", "gpu/test_codec*.py", "gpu/test_cache*.py"),
    ("ternary", "cpu"): ("ops/test_bits.py", "reference/test_bits.py"),
    ("ternary", "cuda"): ("gpu/test_bit_packing.py",),
    ("grouped", "cpu"): ("ops/test_grouped*.py", "reference/test_grouped*.py"),
    ("grouped", "cuda"): ("gpu/test_grouped*.py", "gpu/test_query_gradients.py"),
    ("engine", "cpu"): ("engine/test_*.py", "reference/test_decoder.py", "integrations/test_accelerate.py"),
    ("engine", "cuda"): ("gpu/test_engine*.py",),
}  # fmt: skip
"""Test files of each part on each kind of device, below ``tests/``."""

_NOTHING_COLLECTED = 5  # exit code of pytest


def paths(target: str, device: str) -> list[str]:
    """Return the test files of a target on a device, relative to the repository.

    ``all`` is more than the sum of its parts: every test there is. Outside a checkout of the repository this
    is a FileNotFoundError.

    Examples
    --------
    >>> paths("ternary", "cpu")
    ['tests/ops/test_bits.py', 'tests/reference/test_bits.py']
    """
    if not (ROOT / "tests" / "conftest.py").exists():
        raise FileNotFoundError(
            f"there are no tests beside {ROOT}: kvlab test needs a checkout of the repository"
        )
    parts = resolve(target, more=PARTS)
    if target == "all":
        return ["tests", "kvlab"] if device == "cpu" else ["tests/gpu"]
    tests = ROOT / "tests"
    found = [path for part in parts for pattern in PATTERNS[part, device] for path in tests.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def run(
    target: str,
    where: Machine,
    *,
    release: bool = False,
    verbose: bool = False,
    jobs: int = 1,
    examples: int | None = None,
) -> dict[str, Any]:
    """Run tests and count them.

    With `release` a property has 2,000 examples, others each time, instead of 50, always the same, and tests
    marked slow run, too; `examples` is another number of them, but for properties that state their own.
    `verbose` shows the name of every test. `jobs` processes share the tests of a device, and each takes its
    share of the threads of the CPU.

    The result has ``target``, ``provenance``; ``rows``: for each device ``passed``, ``failed``, ``skipped``
    and ``seconds``; ``skipped``: by part, why; ``passed``.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if jobs > 1 and importlib.util.find_spec("xdist") is None:
        raise ModuleNotFoundError(f"jobs={jobs} needs pytest-xdist: pip install pytest-xdist")
    environment = {"HYPOTHESIS_PROFILE": "thorough" if release else "default"}
    if examples is not None:
        environment["KVLAB_EXAMPLES"] = str(examples)
    options = ["-v" if verbose else "-q"] + (["-m", ""] if release else [])
    rows = [_run(paths(target, device), device, options, environment, jobs) for device in where.devices]
    return {
        "target": target,
        "provenance": provenance(target=target, release=release, examples=examples),
        "rows": rows,
        "skipped": {f"tests on {device}": reason for device, reason in where.skipped.items()},
        "passed": all(row["failed"] == 0 and row["passed"] > 0 for row in rows),
    }


def _run(
    files: list[str], device: str, options: list[str], environment: dict[str, str], jobs: int
) -> dict[str, Any]:
    if jobs > 1:
        options = [*options, "-n", str(jobs)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files]
        # What pytest prints goes to standard error: standard output belongs to the result.
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, stdout=2, check=False
        ).returncode
        if not report.exists():
            raise MissingExtraError(
                f"pytest ended with {code} and no report; it takes pip install 'kvlab[test]'"
            )
        suites = ElementTree.parse(report).getroot().findall("testsuite")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in _COUNTS}
    failed = counts["failures"] + counts["errors"]
    return {
        "device": device,
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed or int(code not in (0, _NOTHING_COLLECTED)),
        "skipped": counts["skipped"],
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1),
    }


_COUNTS = ("tests", "failures", "errors", "skipped")
