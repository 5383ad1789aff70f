"""Figures of a sweep: loss against bytes with the Pareto front, what packing saves, speed against context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.lab.figures import label, new_figure
from kvlab.lab.results import Row
from kvlab.lab.sweep.views import context_scaling, done, loss_of, packing_impact, pareto

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figures"]

_COLORS = ("#1b6ca8", "#b0722d", "#2f7d4f", "#b03a48", "#6b4fa0", "#555555")
_MARKERS = "osD^vP"


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw what the rows have data for: "quality", "packing", "context"."""
    drawn = {}
    if done(rows, packed=True):
        drawn["quality"] = _quality(rows)
        drawn["context"] = _context(rows)
    if packing_impact(rows):
        drawn["packing"] = _packing(rows)
    return drawn


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Any]:
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    label(axes, title, xlabel, ylabel)
    return figure, axes


def _quality(rows: Sequence[Row]) -> Figure:
    figure, axes = _axes(
        "Loss of quality against bytes; the line joins what nothing beats",
        "bits per element of K and V, everything counted",
        "KL divergence (nats a token), or relative error\nof attention for synthetic data",
    )
    packed = done(rows, packed=True)
    ladders = dict(zip(sorted({str(row["bits"]) for row in packed}), _MARKERS * len(packed), strict=False))
    contexts = sorted({int(row["context_length"] or 0) for row in packed})
    synthetic = {row["context_length"] for row in packed if row["model"] is None}
    bits = {(row["context_length"], row["bits"], row["budget"]): row["bits_per_element"] for row in packed}
    front = pareto(rows)
    for context, color in zip(contexts, _shades(len(contexts)), strict=True):
        for row in packed:
            if row["context_length"] == context:
                marker = ladders[str(row["bits"])]
                axes.scatter(row["bits_per_element"], loss_of(row), marker=marker, color=color, s=22)
        line = [row for row in front if row["context_length"] == context]
        x = [bits[row["context_length"], row["bits"], row["budget"]] for row in line]
        style, note = ("--", ", synthetic") if context in synthetic else ("-", "")
        name = f"{context:,} tokens{note}"
        axes.plot(x, [row["loss"] for row in line], style, color=color, linewidth=1, label=name)
    for ladder, marker in ladders.items():
        axes.scatter([], [], marker=marker, color="#555555", s=22, label=f"{ladder} bits")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _shades(count: int) -> list[tuple[float, ...]]:
    """Colors in an order that the eye sees, from dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]


def _packing(rows: Sequence[Row]) -> Figure:
    figure, axes = _axes("What packing saves at the same allocation", "budget", "bytes saved (%)")
    impact = packing_impact(rows)
    ladders = sorted({str(row["bits"]) for row in impact})
    for ladder, marker, color in zip(ladders, _MARKERS * len(ladders), _COLORS * len(ladders), strict=False):
        group = [row for row in impact if row["bits"] == ladder]
        saved = [100 * float(row["saved"] or 0) for row in group]
        axes.scatter(
            [row["budget"] for row in group], saved, marker=marker, color=color, label=f"{ladder} bits"
        )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _context(rows: Sequence[Row]) -> Figure:
    figure, axes = _axes(
        "Attention of one new token over all layers", "tokens in the cache", "mean latency (ms)"
    )
    scaling = context_scaling(rows)
    series = dict.fromkeys((row["device"], row["layers"]) for row in scaling)
    for (device, layers), color in zip(series, _COLORS * len(series), strict=False):
        line = [row for row in scaling if (row["device"], row["layers"]) == (device, layers)]
        x, y = ([row[name] for row in line] for name in ("context_length", "avg_latency_ms"))
        axes.plot(x, y, marker="o", color=color, label=f"{device}, {layers} layers")
    axes.set_xscale("log", base=2)
    ticks = sorted({int(row["context_length"] or 0) for row in scaling})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    latencies = [float(row["avg_latency_ms"] or 0) for row in scaling]
    if max(latencies) > 5 * min(latencies):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure
