"""Axes on which the figures of benchmarks stand: time against a length in tokens, both logarithmic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvlab.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["label", "new_figure"]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that belongs to no window.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    with needs_extra("lab", "the figure"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label(axes: Axes, title: str, xlabel: str, lengths: Iterable[float], base: int) -> None:
    """Give axes a title, lengths as 512, 4K along x, and plain numbers along y, in powers of `base`."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    axes.set_xticks(ticks, [f"{x / 1024:g}K" if x >= 1024 else f"{x:g}" for x in ticks], fontsize=8)
    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(which="major", alpha=0.3)
