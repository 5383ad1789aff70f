"""Figures of `kvlab benchmark`: the rows of a case against the length of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvlab.lab.figures import label, lengths_along_x, new_figure
from kvlab.lab.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DRAW", "draw_attention", "draw_decode", "draw_grouped"]

_CURVES: dict[str, tuple[str, Callable[[Row], float | None]]] = {
    "kvlab": ("C0-o", lambda row: _number(row, "ms")),
    "torch, its faster backend": ("k-s", lambda row: _number(row, "torch_ms")),
    "kvlab on the CPU beside it": (
        "C1-^",
        lambda row: None if row["times_cpu"] is None else _number(row, "ms") * _number(row, "times_cpu"),
    ),
}


def draw_attention(rows: Sequence[Row]) -> Figure:
    """Draw milliseconds against tokens, forward and backward, of the calls that differ in length alone."""
    first = rows[0]
    names = ("heads", "batch", "head_dim", "causal")
    same = [row for row in rows if all(row[name] == first[name] for name in names)]
    figure = new_figure(10, 4.2)
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        own = [row for row in same if row["direction"] == direction]
        for name, (style, value) in _CURVES.items():
            points = sorted((_number(row, "tokens"), y) for row in own if (y := value(row)) is not None)
            if points:
                axes.plot(*zip(*points, strict=True), style, ms=4, label=name)
        label(axes, direction, "tokens", "milliseconds a call" if direction == "forward" else "")
        lengths_along_x(axes, [_number(row, "tokens") for row in own], base=10)
    figure.axes[0].legend(frameon=False, fontsize=9)
    causal = ", causal" if first["causal"] else ""
    title = f"Attention: {first['heads']} heads of {first['head_dim']}, batch {first['batch']}{causal}"
    figure.suptitle(title, fontsize=11)
    return figure


def draw_decode(rows: Sequence[Row]) -> Figure:
    """Draw time on a GPU against context for each width, its floor dashed, and dense attention."""
    figure = new_figure(8, 5.5)
    axes = figure.subplots()
    axes.plot(*_curve(rows, "dense_us"), "k-o", ms=4, label="dense bfloat16")
    for color, name in enumerate(dict.fromkeys(row["widths"] for row in rows)):
        own = [row for row in rows if row["widths"] == name]
        text = "ladder of widths" if name == "default" else f"{name} bits"
        axes.plot(*_curve(own, "packed_us"), f"C{color}-o", ms=4, label=text)
        axes.plot(*_curve(own, "floor_us"), f"C{color}--", lw=1)
    label(
        axes,
        "Decode attention: 32 query heads, 8 KV heads of 128 channels, batch 1",
        "stored tokens",
        "microseconds a layer and step (dashed: bytes at read bandwidth)",
    )
    lengths_along_x(axes, _curve(rows, "dense_us")[0], base=2)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _curve(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Contexts in order, and what the rows say of each."""
    points = sorted({_number(row, "context"): _number(row, name) for row in rows}.items())
    return [x for x, _ in points], [y for _, y in points]


def draw_grouped(rows: Sequence[Row]) -> Figure:
    """Draw the speed against separate calls, by tokens, a panel for each number of groups."""
    numbers = sorted({int(row["groups"] or 0) for row in rows})
    figure = new_figure(4.5 * len(numbers), 4)
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for axes, number in zip(panels, numbers, strict=True):
        own = [row for row in rows if row["groups"] == number]
        for name in dict.fromkeys(str(row["implementation"]) for row in own):
            line = [row for row in own if row["implementation"] == name]
            x, y = ([row[column] for row in line] for column in ("tokens", "speedup"))
            axes.plot(x, y, "-o", ms=4, label=name)
        label(axes, f"{number} groups", "tokens")
        lengths_along_x(axes, [_number(row, "tokens") for row in own], base=10)
    panels[0].set_ylabel("times faster than separate calls")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0)


DRAW = {
    **{("attention", device): draw_attention for device in ("cpu", "cuda")},
    **{("grouped", device): draw_grouped for device in ("cpu", "cuda")},
    ("decode", "cuda"): draw_decode,
}
"""The cases that have a figure, by device."""
