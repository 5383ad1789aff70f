"""The figure of `kvlab benchmark attention`: time of a call against its length, beside torch and the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvlab.errors import needs_extra
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
        From `kvlab.lab.benchmark_attention.benchmark_attention`.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    with needs_extra("lab", "the figure"):
        from matplotlib.figure import Figure

    names = ("heads", "batch", "head_dim", "causal")
    same = [row for row in rows if all(row[name] == rows[0][name] for name in names)]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        _panel(axes, [row for row in same if row["direction"] == direction])
        axes.set_title(direction, loc="left", fontsize=11)
    figure.axes[0].set_ylabel("milliseconds a call")
    figure.axes[0].legend(frameon=False, fontsize=9)
    first = rows[0]
    figure.suptitle(
        f"Attention: {first['heads']} heads of {first['head_dim']}, batch {first['batch']}"
        + (", causal" if first["causal"] else ""),
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    for label, (style, value) in _CURVES.items():
        points = sorted((_number(row, "tokens"), y) for row in rows if (y := value(row)) is not None)
        if points:
            axes.plot(*zip(*points, strict=True), style, ms=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({_number(row, "tokens") for row in rows})
    axes.set_xticks(tokens, [f"{x / 1024:g}K" if x >= 1024 else f"{x:g}" for x in tokens], fontsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens")
    axes.grid(which="major", alpha=0.3)


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0)
