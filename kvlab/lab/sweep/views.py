"""Questions about a sweep: each takes rows of the summary and returns a small table.

Quality is the divergence from full precision where a model read text, and the relative error of attention
where keys and values are synthetic; the two are never mixed in one comparison, because contexts with and
without text are compared apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from kvlab.lab.results import Row

__all__ = [
    "View",
    "banner",
    "best_under",
    "by_budget",
    "context_scaling",
    "devices",
    "done",
    "failed",
    "loss_of",
    "packing_impact",
    "pareto",
    "views",
]


_CASE = ("context_length", "bits", "budget")


@dataclass(frozen=True, slots=True)
class View:
    """A question, its answer as rows with the same keys, and a sentence on how to read it."""

    title: str
    rows: list[Row]
    note: str


def views(rows: Sequence[Row], change: float = 0.01) -> list[View]:
    """Every view that the rows have an answer to; `change` bounds the perplexity of the best case."""
    found = [
        View("Failed", failed(rows), "cases without figures, with the class of the error and its message"),
        View(
            "Budget against quality",
            by_budget(rows),
            "packed cases; loss: KL divergence from full precision in nats a token, or, for synthetic data, "
            "the relative error of attention",
        ),
        View(
            "What packing saves",
            packing_impact(rows),
            "the same codes stored packed and with one code a byte; saved: of the bytes, everything counted",
        ),
        View(
            "Longer contexts",
            context_scaling(rows),
            "means over packed cases; latency: attention of one new token over the pages of all layers",
        ),
        View(
            "Pareto front",
            pareto(rows),
            "packed cases that no other of the context beats in bytes and in loss",
        ),
        View(
            "Best configuration",
            best_under(rows, change),
            f"per context, the packed case of fewest bytes whose perplexity is within {change:.1%}",
        ),
        View("GPU against CPU", devices(rows), "the same case on both; speedup: of latency"),
    ]
    return [view for view in found if view.rows]


def done(rows: Iterable[Row], packed: bool | None = None) -> list[Row]:
    """Rows with figures; with packing, without, or both."""
    return [row for row in rows if row["status"] == "ok" and packed in (None, row["use_packing"])]


def failed(rows: Iterable[Row]) -> list[Row]:
    """Cases that failed: name, class of the error, message."""
    return [
        {
            "experiment": row["experiment"],
            "class": str(row["status"]).partition(": ")[2],
            "reason": row["reason"] or "not recorded",
        }
        for row in rows
        if str(row["status"]).startswith("failed")
    ]


def banner(rows: Sequence[Row]) -> str:
    """The sentence that warns of failed cases; empty if there are none.

    Examples
    --------
    >>> banner([{"experiment": "b0.2", "status": "failed: gpu", "reason": None}])
    '1 of 1 cases failed: no figure here speaks of them.'
    """
    count = len(failed(rows))
    return f"{count} of {len(rows)} cases failed: no figure here speaks of them." if count else ""


def loss_of(row: Row) -> float:
    """What a case loses in quality: KL divergence, or for synthetic data the error of attention."""
    return _number(row["kl"] if row["kl"] is not None else row["attention_error"])


def by_budget(rows: Sequence[Row]) -> list[Row]:
    """Bits and loss of every packed case, by context, ladder and budget; what infeasible ones need."""
    chosen = [row for row in rows if row["use_packing"] and row["status"] in ("ok", "infeasible")]
    shown = ("avg_bits", "bits_per_element", "perplexity_change", "top1_agreement", "needle_retrieval")
    answer: list[Row] = []
    for row in sorted(chosen, key=lambda row: tuple(_sortable(row[name]) for name in _CASE)):
        ok = row["status"] == "ok"
        answer.append(
            _columns(row, *_CASE)
            | {"status": row["status"], "loss": loss_of(row) if ok else None}
            | _columns(row, *shown)
            | {"smallest_feasible_budget": None if ok else _rounded_up(row["smallest_feasible_budget"])}
        )
    return answer


def _rounded_up(budget: Any) -> float | None:
    """A budget of four decimals with three, as many as tables show, so that what stands there does."""
    return None if budget is None else math.ceil(round(1e4 * _number(budget)) / 10) / 1e3


def packing_impact(rows: Sequence[Row]) -> list[Row]:
    """Bytes and latency of packed cases beside those with one code a byte."""
    answer: list[Row] = []
    unpacked = {(row["device"], _key(row)): row for row in done(rows, packed=False)}
    for row in done(rows, packed=True):
        other = unpacked.get((row["device"], _key(row)))
        if other is not None:
            answer.append(
                {
                    **_columns(row, *_CASE, "device"),
                    "packed_mb": 1e3 * _number(row["allocated_gb"]),
                    "unpacked_mb": 1e3 * _number(other["allocated_gb"]),
                    "saved": 1 - _number(row["allocated_gb"]) / _number(other["allocated_gb"]),
                    "latency_ratio": _number(row["p50_latency_ms"]) / _number(other["p50_latency_ms"]),
                }
            )
    return answer


def context_scaling(rows: Sequence[Row]) -> list[Row]:
    """Mean latency, throughput and bytes by device, layers and context."""
    names = ("device", "num_layers", "context_length")
    groups = _grouped(done(rows, packed=True), lambda row: tuple(row[name] for name in names))
    return [
        {
            "device": device,
            "layers": layers,
            "context_length": context,
            "cases": len(group),
            "avg_latency_ms": mean(_number(row["avg_latency_ms"]) for row in group),
            "throughput_tps": 1e3 / mean(_number(row["avg_latency_ms"]) for row in group),
            "allocated_mb": 1e3 * mean(_number(row["allocated_gb"]) for row in group),
        }
        for (device, layers, context), group in groups.items()
    ]


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Packed cases that no other case of the same context and data beats in both bytes and loss."""
    answer: list[Row] = []
    groups = _grouped(done(rows, packed=True), lambda row: (row["context_length"], row["model"] or ""))
    for group in groups.values():
        best = float("inf")
        for row in sorted(group, key=lambda row: (_number(row["allocated_gb"]), loss_of(row))):
            if loss_of(row) < best:
                best = loss_of(row)
                answer.append(_configuration(row))
    return answer


def best_under(rows: Sequence[Row], change: float) -> list[Row]:
    """Per context, the packed case of fewest bytes whose change of perplexity is at most `change`."""
    answer: list[Row] = []
    readable = [row for row in done(rows, packed=True) if row["perplexity_change"] is not None]
    for group in _grouped(readable, lambda row: (row["context_length"],)).values():
        fitting = [row for row in group if _number(row["perplexity_change"]) <= change]
        if fitting:
            answer.append(_configuration(min(fitting, key=lambda row: _number(row["allocated_gb"]))))
    return answer


def devices(rows: Sequence[Row]) -> list[Row]:
    """Latency on the CPU and on the GPU of cases that were measured on both."""
    cuda = {_key(row): row for row in done(rows, packed=True) if row["device"] == "cuda"}
    answer: list[Row] = []
    for row in done(rows, packed=True):
        if row["device"] == "cpu" and (other := cuda.get(_key(row))) is not None:
            cpu_ms, gpu_ms = _number(row["p50_latency_ms"]), _number(other["p50_latency_ms"])
            times: Row = {"cpu_ms": cpu_ms, "gpu_ms": gpu_ms, "speedup": cpu_ms / gpu_ms}
            answer.append(_columns(row, *_CASE) | times)
    return answer


def _configuration(row: Row) -> Row:
    figures: Row = {"allocated_mb": 1e3 * _number(row["allocated_gb"]), "loss": loss_of(row)}
    return _columns(row, *_CASE, "device") | figures | _columns(row, "perplexity_change")


def _columns(row: Row, *names: str) -> Row:
    return {name: row[name] for name in names}


def _key(row: Row) -> tuple[Any, ...]:
    """What makes two rows the same case, device and packing apart."""
    names = ("budget", "bits", "context_length", "model", "num_layers", "num_kv_heads", "head_dim")
    return tuple(row[name] for name in names)


def _grouped(rows: Sequence[Row], key: Callable[[Row], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: tuple(map(_sortable, key(row)))):
        groups.setdefault(key(row), []).append(row)
    return groups


def _sortable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
