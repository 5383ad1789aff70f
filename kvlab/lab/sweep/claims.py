"""`kvlab report expected`: claims about packed caches, each beside its measurement.

Most are judged by the summary of a sweep, packing by packing codes, and two by other result files: a decode
step of a whole model by that of `benchmarks/generation/run.py`, a GPU beside the CPU by that of `kvlab
validate`. A claim without a measurement is "not measured", never passed; its line says which command
measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

import kvlab
from kvlab.lab.results import Row
from kvlab.lab.sweep.views import devices, done

__all__ = ["judge_claims"]

_CODES = 1_000_000
_PACKING = {2: (3.5, 4.0), 3: (2.3, 2.67), 4: (1.9, 2.0)}
_SMALL_BUDGET = 0.4
_ALIKE = ("device", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim")
"""Columns that rows of one series have in common."""


def judge_claims(rows: Sequence[Row], files: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
    """Judge every claim by rows of summaries and, in any order, contents of other result files.

    A row has ``claim``, ``expected``, ``measured``, ``verdict``: "pass", "fail" or "not measured".

    Examples
    --------
    >>> [row["verdict"] for row in judge_claims([])][:4]
    ['pass', 'pass', 'pass', 'not measured']
    """
    return [
        *_packing_ratios(),
        _saving(rows, "int8", "actual_vs_int8", 0.20, 0.40),
        _saving(rows, "fp16", "actual_vs_fp16", 0.50, 0.80),
        _gpu_against_cpu(rows),
        _latency(rows),
        _end_to_end(files),
        _gpu_equals_cpu(files),
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
    claim, expected = "cache work of 32 layers in one CUDA graph, a token at 2K", "< 20 ms"
    chosen = [
        float(row["p50_latency_ms"] or 0)
        for row in done(rows, packed=True)
        if (row["device"], row["context_length"], row["num_layers"]) == ("cuda", 2048, 32)
    ]
    if not chosen:
        return _row(claim, expected, None, "kvlab sweep plan --device cuda --contexts 2K --num-layers 32 ...")
    return _row(claim, expected, max(chosen) < 20, f"at most {max(chosen):.3g} ms of {len(chosen)} cases")


def _end_to_end(files: Sequence[Mapping[str, Any]]) -> Row:
    """A decode step of a model of 32 layers at 2,048 tokens: cache, weights and all."""
    claim, expected = "end to end, a token at 2K, 32 layers", "< 20 ms"
    found = [
        float(case["ms_median"])
        for file in files
        if file.get("layers", file.get("provenance", {}).get("settings", {}).get("layers")) == 32
        for case in file.get("cases", file.get("rows", ()))
        if (case.get("cache"), case.get("batch"), case.get("tokens")) == ("graph", 1, 2048)
    ]
    if not found:
        return _row(claim, expected, None, "python benchmarks/generation/run.py OUT.json, then --file")
    return _row(claim, expected, max(found) < 20, f"{max(found):.3g} ms, steps in CUDA graphs")


def _gpu_equals_cpu(files: Sequence[Mapping[str, Any]]) -> Row:
    """The largest difference of float32 attention on a GPU from the CPU's."""
    claim, expected = "CPU equals GPU in float32", "<= 1e-5"
    found = [
        float(row["from_cpu"])
        for file in files
        for row in file.get("rows", ())
        if (row.get("device"), row.get("dtype")) == ("cuda", "float32") and "from_cpu" in row
    ]
    if not found:
        return _row(claim, expected, None, "kvlab validate all --device cuda -o OUT.json, then --file")
    return _row(claim, expected, max(found) <= 1e-5, f"at most {max(found):.2g} in {len(found)} shapes")


def _fewer_bits(rows: Sequence[Row]) -> Row:
    """For every ladder and context, average bits never rise when the budget falls."""
    return _monotone(
        rows, "lower budget gives fewer bits", ("bits", "context_length"), "budget", "avg_bits", 1.0
    )


def _slower_with_context(rows: Sequence[Row]) -> Row:
    """For every ladder and budget, throughput never rises with the context, but for noise of 5 %.

    By the 5th percentile of the latency, which other work on a machine disturbs least.
    """
    names = ("bits", "budget")
    return _monotone(rows, "throughput falls with context", names, "context_length", "p5_latency_ms", 0.95)


def _monotone(
    rows: Sequence[Row], claim: str, same: tuple[str, ...], over: str, value: str, slack: float
) -> Row:
    series: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for row in done(rows, packed=True):
        key = tuple(row[name] for name in (*same, *_ALIKE))
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
