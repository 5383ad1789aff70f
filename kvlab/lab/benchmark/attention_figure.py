"""The figure of `kvlab benchmark attention`: time of a call against its length, beside torch and the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvlab.lab.benchmark.length_axes import label, new_figure
from kvlab.lab.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

_CURVES: dict[str, tuple[str, Callable[[Row], float | None]]] = {
    "kvlab": ("C0-o", lambda row: _number(row, "ms")),
    "torch, its faster backend": ("k-s", lambda row: _number(row, "torch_ms")),
    "kvlab on the CPU beside it": (
        "C1-^",
        lambda row: None if row["times_cpu"] is None else _number(row, "ms") * _number(row, "times_cpu"),
    ),
}


def draw(rows: Sequence[Row]) -> Figure:
    """Draw milliseconds against tokens, forward and backward, of the calls that differ in length alone.

    Parameters
    ----------
    rows : sequence of dict
        From `kvlab.lab.benchmark.attention.benchmark_attention`.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    names = ("heads", "batch", "head_dim", "causal")
    same = [row for row in rows if all(row[name] == rows[0][name] for name in names)]
    figure = new_figure(10, 4.2)
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        _panel(axes, direction, [row for row in same if row["direction"] == direction])
    figure.axes[0].set_ylabel("milliseconds a call")
    figure.axes[0].legend(frameon=False, fontsize=9)
    first = rows[0]
    figure.suptitle(
        f"Attention: {first['heads']} heads of {first['head_dim']}, batch {first['batch']}"
        + (", causal" if first["causal"] else ""),
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, direction: str, rows: Sequence[Row]) -> None:
    for name, (style, value) in _CURVES.items():
        points = sorted((_number(row, "tokens"), y) for row in rows if (y := value(row)) is not None)
        if points:
            axes.plot(*zip(*points, strict=True), style, ms=4, label=name)
    label(axes, direction, "tokens", [_number(row, "tokens") for row in rows], base=10)


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0)
