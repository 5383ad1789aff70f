"""Results of a quality run for people: a table, Markdown, CSV, and a figure of quality against bytes.

All of them come from the same rows, made by `summarise` from the scores of a run, so they cannot disagree.
Scores recorded earlier (of caches whose libraries are not installed) join as rows that say so.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import needs_extra
from kvlab.lab.quality import FULL_PRECISION, Score, mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = [
    "Row",
    "common_windows",
    "draw",
    "save_figure",
    "summarise",
    "to_csv",
    "to_markdown",
    "to_table",
    "verdicts",
]


@dataclass(frozen=True, slots=True)
class Row:
    """One cache in a table.

    Attributes
    ----------
    cache, kind, budget
        As in `Score`.
    mebibytes : float
        Of the cache of one window at its end.
    bits_per_element, tokens_per_second
        As in `Score`.
    perplexity, change : float
        Of the text, and its relative change against full precision.
    kl, kl_error, agreement : float
        Mean divergence and its standard error; share of tokens with the same best prediction.
    widths : str
        Share of pages at each width.
    windows : int
    recorded : bool
        Measured earlier, elsewhere; not in this run.
    """

    cache: str
    kind: str
    budget: float | None
    mebibytes: float
    bits_per_element: float
    perplexity: float
    change: float
    kl: float
    kl_error: float
    agreement: float
    tokens_per_second: float
    widths: str
    windows: int
    recorded: bool = False


def summarise(scores: Sequence[Score], *, recorded: bool = False) -> list[Row]:
    """Make the rows of a table.

    Parameters
    ----------
    scores : sequence of Score
        All of the same windows, full precision among them.
    recorded : bool
        Whether they were measured earlier.
    """
    (full,) = (score for score in scores if score.kind == FULL_PRECISION)
    exact = mean_and_error(full.nll)[0]
    return [_row(score, exact, recorded) for score in scores]


def _row(score: Score, exact: float, recorded: bool) -> Row:
    nll = mean_and_error(score.nll)[0]
    kl, error = mean_and_error(score.kl)
    return Row(
        cache=score.name,
        kind=score.kind,
        budget=score.budget,
        mebibytes=score.nbytes / 2**20,
        bits_per_element=score.bits_per_element,
        perplexity=math.exp(nll),
        change=math.expm1(nll - exact),
        kl=kl,
        kl_error=error,
        agreement=mean_and_error(score.agreement)[0],
        tokens_per_second=score.tokens_per_second,
        widths=" ".join(f"{width}:{share:.0%}" for width, share in score.widths.items()),
        windows=len(score.starts),
        recorded=recorded,
    )


def common_windows(scores: Sequence[Score], starts: Sequence[int]) -> list[Score]:
    """Restrict scores to those of the windows `starts` that they have; to all they have if there are none.

    Sizes and speeds stay those of all windows.
    """
    chosen = []
    for score in scores:
        wanted = [i for i, start in enumerate(score.starts) if start in set(starts)] or range(
            len(score.starts)
        )
        chosen.append(
            replace(
                score,
                starts=[score.starts[i] for i in wanted],
                kl=[score.kl[i] for i in wanted],
                nll=[score.nll[i] for i in wanted],
                agreement=[score.agreement[i] for i in wanted],
            )
        )
    return chosen


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Compare each mixed cache with the best others of at most its bytes, one sentence each."""
    sentences = []
    for row in (row for row in rows if row.kind == "mixed"):
        for kind, label in (
            ("uniform", "uniform width"),
            ("control", "control"),
            ("transformers", "QuantizedCache"),
        ):
            fitting = [other for other in rows if other.kind == kind and _fits(other, row)]
            if fitting:
                best = min(fitting, key=lambda other: other.kl)
                sentences.append(
                    f"{row.cache} ({row.bits_per_element:.2f} bits) has KL {_figures(row.kl)}; the best "
                    f"{label} that fits, {best.cache} ({best.bits_per_element:.2f} bits), has "
                    f"{_figures(best.kl)}: {best.kl / max(row.kl, 1e-12):.1f} times as much"
                )
    return sentences


def _fits(other: Row, row: Row) -> bool:
    """Whether a cache takes at most the bytes of a mixed one; half a percent is a page, not a choice."""
    return other.mebibytes <= 1.005 * row.mebibytes


# ---- tables ------------------------------------------------------------------------------------------------

WIDE = 110
"""Columns of a terminal in which the whole table fits."""
_HEADERS = (
    "cache",
    "budget",
    "MiB",
    "bpe",
    "perpl.",
    "change",
    "KL",
    "±",
    "top-1",
    "tok/s",
    "pages at each width",
)


def _cells(row: Row) -> tuple[str, ...]:
    is_full = row.kind == FULL_PRECISION
    return (
        row.cache + ("*" if row.recorded else ""),
        "" if row.budget is None else f"{row.budget:g}",
        f"{row.mebibytes:.2f}",
        f"{row.bits_per_element:.2f}",
        f"{row.perplexity:.2f}",
        "" if is_full else f"{row.change:+.2%}",
        "" if is_full else _figures(row.kl),
        "" if is_full else _figures(row.kl_error),
        "" if is_full else f"{row.agreement:.1%}",
        f"{row.tokens_per_second:.0f}",
        row.widths,
    )


def _figures(value: float) -> str:
    """Two significant digits without an exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.{max(1 - math.floor(math.log10(abs(value))), 0)}f}"


def to_table(rows: Sequence[Row], title: str, width: int) -> Table:
    """A table for a terminal of a width; a narrow one has no room for the last column."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    shown = len(_HEADERS) if width >= WIDE else len(_HEADERS) - 1
    for header in _HEADERS[:shown]:
        left = header in (_HEADERS[0], _HEADERS[-1])
        table.add_column(header, justify="left" if left else "right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.kind != row.kind:
            table.add_section()
        table.add_row(*_cells(row)[:shown])
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    """The same table in Markdown."""
    lines = [_HEADERS, ("---",) + ("--:",) * (len(_HEADERS) - 2) + ("---",), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_csv(rows: Sequence[Row]) -> str:
    """All fields of all rows, unrounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(Row.__slots__)
    writer.writerow(names)
    writer.writerows([[getattr(row, name) for name in names] for row in rows])
    return text.getvalue()


# ---- figure ------------------------------------------------------------------------------------------------

_STYLES: dict[str, dict[str, Any]] = {
    "mixed": {"color": "#1b6ca8", "marker": "o", "linestyle": "-", "linewidth": 2, "zorder": 4},
    "uniform": {"color": "#555555", "marker": "s", "linestyle": "--", "linewidth": 1.2, "zorder": 3},
    "control": {"color": "#b0722d", "marker": "^", "linestyle": "", "zorder": 2},
    "transformers": {"color": "#b03a48", "marker": "D", "linestyle": "", "zorder": 2},
}
_LABELS = {
    "mixed": "kvlab, mixed widths under a budget",
    "uniform": "kvlab, one width",
    "control": "controls at the bytes of a mixed cache",
    "transformers": "transformers QuantizedCache",
}


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Draw divergence from full precision (log scale) against bits per element.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    with needs_extra("lab", "the figure"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for kind, style in _STYLES.items():
        group = sorted((row for row in rows if row.kind == kind), key=lambda row: row.bits_per_element)
        if not group:
            continue
        x = [row.bits_per_element for row in group]
        floor = [max(row.kl, 1e-7) for row in group]
        errors = [min(2 * row.kl_error, 0.9 * y) for row, y in zip(group, floor, strict=True)]
        axes.errorbar(x, floor, yerr=errors, label=_LABELS[kind], markersize=6, capsize=2, **style)
        for row, y in zip(group, floor, strict=True):
            above = kind in ("uniform", "transformers")
            axes.annotate(
                _short(row),
                (row.bits_per_element, y),
                xytext=(7, 4) if above else (-7, -5),
                textcoords="offset points",
                ha="left" if above else "right",
                va="bottom" if above else "top",
                fontsize=8,
                color=style["color"],
            )
    axes.set_yscale("log")
    axes.set_xscale("log")
    ticks = [2, 2.5, 3, 4, 5, 6, 8, 10]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    fp16 = max(16 * row.mebibytes / row.bits_per_element for row in rows)
    axes.set_xlabel(f"bits per element of K and V, everything counted (float16: 16, {fp16:.1f} MiB a window)")
    axes.set_ylabel(
        "KL divergence from full precision\n(nats per token, ± 2 standard errors; lower is better)"
    )
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(which="major", alpha=0.3)
    axes.margins(x=0.12, y=0.1)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _short(row: Row) -> str:
    """What stands beside a point: the name without the words that the legend has."""
    name = row.cache.removeprefix("uniform ").removeprefix("mixed ")
    return {"uniform": f"{name} bit", "mixed": f"budget {name}"}.get(row.kind, name) + "*" * row.recorded


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; return the paths."""
    from matplotlib import rc_context

    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    figure.savefig(paths[0], dpi=150)
    with rc_context({"svg.hashsalt": "kvlab"}):  # this and no date: equal figures give equal files
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
