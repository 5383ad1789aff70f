"""`kvlab report expected`: what is claimed of packed caches, each claim beside what was measured.

A claim without a measurement is "not measured", never passed; its line says which command measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np

import kvlab
from kvlab.lab.results import Row
from kvlab.lab.views import devices, done

__all__ = ["expectations"]

_CODES = 1_000_000
_PACKING = {2: (3.5, 4.0), 3: (2.3, 2.67), 4: (1.9, 2.0)}
_SMALL_BUDGET = 0.4


def expectations(rows: Sequence[Row]) -> list[Row]:
    """Judge every claim.

    Parameters
    ----------
    rows : sequence of dict
        Of the summary of one sweep or several.

    Returns
    -------
    list of dict
        ``claim``, ``expected``, ``measured``, ``verdict``: "pass", "fail" or "not measured".

    Examples
    --------
    >>> [row["verdict"] for row in expectations([])][:4]
    ['pass', 'pass', 'pass', 'not measured']
    """
    return [
        *_packing_ratios(),
        _saving(rows, "int8", "actual_vs_int8", 0.20, 0.40),
        _saving(rows, "fp16", "actual_vs_fp16", 0.50, 0.80),
        _gpu_against_cpu(rows),
        _latency(rows),
        _row(
            "end to end, less than 20 ms a token at 2K",
            "< 20 ms",
            None,
            "python benchmarks/generation/run.py",
        ),
        _row("CPU equals GPU in float32", "<= 1e-5", None, "pytest tests/gpu"),
        _fewer_bits(rows),
        _slower_with_context(rows),
    ]


def _packing_ratios() -> list[Row]:
    """By packing a million codes: bytes of one code a byte over packed bytes."""
    rng, found = np.random.default_rng(0), []
    for bits, (low, high) in _PACKING.items():
        codes = rng.integers(0, 2**bits, _CODES, dtype=np.uint8)
        ratio = codes.nbytes / kvlab.pack(codes, bits).nbytes
        passed = low <= ratio <= high + 0.005
        found.append(_row(f"{bits}-bit codes packed", f"{low:g} to {high:g}x", passed, f"{ratio:.2f}x"))
    return found


def _saving(rows: Sequence[Row], name: str, column: str, low: float, high: float) -> Row:
    """The median packed case of small budgets; more than the claim is a pass, too."""
    claim = f"saved against {name}, budgets up to {_SMALL_BUDGET:g}"
    chosen = [row for row in done(rows, packed=True) if float(row["budget"] or 0) <= _SMALL_BUDGET]
    saved = [1 - 1 / float(row[column] or 1) for row in chosen]
    expected = f"{low:.0%} to {high:.0%} or more"
    if not saved:
        return _row(claim, expected, None, "kvlab sweep")
    middle = median(saved)
    text = f"median {middle:.0%} of {len(saved)} cases ({min(saved):.0%} to {max(saved):.0%})"
    return _row(claim, expected, middle >= low, text)


def _gpu_against_cpu(rows: Sequence[Row]) -> Row:
    claim, expected = "GPU against CPU", "2 to 3x or more"
    found = [float(row["speedup"] or 0) for row in devices(rows)]
    if not found:
        return _row(claim, expected, None, "the same sweep with --device cpu and cuda")
    return _row(claim, expected, median(found) >= 2, f"median {median(found):.1f}x of {len(found)} cases")


def _latency(rows: Sequence[Row]) -> Row:
    claim, expected = "cache work of 32 layers, a token at 2K", "< 20 ms"
    chosen = [
        float(row["p50_latency_ms"] or 0)
        for row in done(rows, packed=True)
        if row["context_length"] == 2048 and row["num_layers"] == 32
    ]
    if not chosen:
        return _row(claim, expected, None, "kvlab sweep plan --contexts 2K --num-layers 32 ...")
    return _row(claim, expected, max(chosen) < 20, f"at most {max(chosen):.3g} ms of {len(chosen)} cases")


def _fewer_bits(rows: Sequence[Row]) -> Row:
    """For every ladder and context, average bits never rise when the budget falls."""
    return _monotone(
        rows, "lower budget gives fewer bits", ("bits", "context_length"), "budget", "avg_bits", 1.0
    )


def _slower_with_context(rows: Sequence[Row]) -> Row:
    """For every ladder and budget, throughput never rises with the context, but for noise of 5 %."""
    names = ("bits", "budget")
    return _monotone(rows, "throughput falls with context", names, "context_length", "avg_latency_ms", 0.95)


def _monotone(
    rows: Sequence[Row], claim: str, same: tuple[str, ...], over: str, value: str, slack: float
) -> Row:
    series: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for row in done(rows, packed=True):
        key = (*(row[name] for name in same), row["device"], row["model"])
        series.setdefault(key, []).append((float(row[over] or 0), float(row[value] or 0)))
    series = {key: sorted(points) for key, points in series.items() if len(points) > 1}
    if not series:
        return _row(claim, "in every series", None, f"a sweep over {over}")
    rising = sum(
        all(high[1] >= slack * low[1] for low, high in pairwise(points)) for points in series.values()
    )
    return _row(claim, "in every series", rising == len(series), f"in {rising} of {len(series)} series")


def _row(claim: str, expected: str, passed: bool | None, measured: str) -> Row:
    verdict = "not measured" if passed is None else "pass" if passed else "fail"
    return {"claim": claim, "expected": expected, "measured": measured, "verdict": verdict}
