"""The figure of `kvlab benchmark decode --device cuda`: time against context for each width, and floors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.lab.benchmark.length_axes import label, new_figure
from kvlab.lab.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]


def draw(rows: Sequence[Row]) -> Figure:
    """Draw time against context for each width, its floor dashed, and dense attention.

    Parameters
    ----------
    rows : sequence of dict
        From `kvlab.lab.benchmark.decode_cuda.benchmark_decode`.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure = new_figure(8, 5.5)
    axes = figure.subplots()
    axes.plot(*_curve(rows, "dense_us"), "k-o", ms=4, label="dense bfloat16")
    for color, name in enumerate(dict.fromkeys(row["widths"] for row in rows)):
        own = [row for row in rows if row["widths"] == name]
        text = "ladder of widths" if name == "default" else f"{name} bits"
        axes.plot(*_curve(own, "packed_us"), f"C{color}-o", ms=4, label=text)
        axes.plot(*_curve(own, "floor_us"), f"C{color}--", lw=1)
    title = "Decode attention: 32 query heads, 8 KV heads of 128 channels, batch 1"
    label(axes, title, "stored tokens", _curve(rows, "dense_us")[0], base=2)
    axes.set_ylabel("microseconds a layer and step (dashed: bytes at read bandwidth)")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _curve(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Contexts in order, and what the rows say of each."""
    points = sorted({float(row["context"] or 0): float(row[name] or 0) for row in rows}.items())
    return [x for x, _ in points], [y for _, y in points]
