"""Figures of the laboratory: empty axes, an axis of lengths, files and elements of a page that repeat.

matplotlib is optional, so it is imported where a figure is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["label", "lengths_along_x", "new_figure", "save_figure", "to_svg"]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that belongs to no window."""
    with needs_extra("lab", "the figure"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> None:
    """Give axes a title, names and a grid."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(which="major", alpha=0.3)


def lengths_along_x(axes: Axes, lengths: Iterable[float], base: int) -> None:
    """Put lengths as 512, 4K along x and plain numbers along y, in powers of `base`."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    axes.set_xticks(ticks, [f"{x / 1024:g}K" if x >= 1024 else f"{x:g}" for x in ticks], fontsize=8)
    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


@contextmanager
def _repeatable() -> Iterator[dict[str, Any]]:
    """Let equal figures give equal SVG files; yields the options to save with."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "kvlab"}):
        yield {"format": "svg", "metadata": {"Date": None}}


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; return the paths."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    figure.savefig(paths[0], dpi=150)
    with _repeatable() as options:
        figure.savefig(paths[1], **options)
    return paths


def to_svg(figure: Figure) -> str:
    """A figure as an element of a page, of which the width is the page's."""
    text = io.StringIO()
    with _repeatable() as options:
        figure.savefig(text, **options)
    found = text.getvalue()
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", found[found.index("<svg") :], count=1).replace(
        'height="', 'data-height="', 1
    )
