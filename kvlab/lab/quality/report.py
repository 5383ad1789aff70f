"""Results of a quality run for people: a table, Markdown, CSV, and a figure of quality against bytes.

All of them come from the same rows, made by `summarise` from the scores of a run, so they cannot disagree.
Scores recorded earlier (of caches whose libraries are not installed) join as rows that say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvlab.lab import results
from kvlab.lab.figures import label, new_figure
from kvlab.lab.quality.scores import FULL_PRECISION, Score, mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = [
    "Row",
    "draw",
    "figures",
    "summarise",
    "to_csv",
    "to_markdown",
    "to_table",
    "verdicts",
    "with_error",
]


@dataclass(frozen=True, slots=True)
class Row:
    """One cache in a table."""

    cache: str  # name of its `Score`, of which fields without a comment are
    kind: str
    budget: float | None
    mebibytes: float  # of the cache of one window at its end
    bits_per_element: float
    perplexity: float  # of the text
    change: float  # of the perplexity, relative, against full precision
    kl: float  # mean divergence
    kl_error: float  # its standard error
    kl_last_quarter: float  # of the last quarter of the scored tokens, where a cache is fullest
    agreement: float  # fraction of tokens with the same best prediction
    tokens_per_second: float
    widths: str  # part of the pages at each width
    windows: int  # that were read
    recorded: bool = False  # measured earlier, elsewhere; not in this run


def summarise(scores: Sequence[Score], *, recorded: bool = False) -> list[Row]:
    """Make the rows of a table, of scores of the same windows, full precision among them.

    `recorded`: they were measured earlier.
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
        kl_last_quarter=mean_and_error([chunks[-max(1, len(chunks) // 4) :] for chunks in score.kl])[0],
        agreement=mean_and_error(score.agreement)[0],
        tokens_per_second=score.tokens_per_second,
        widths=" ".join(f"{width}:{fraction:.0%}" for width, fraction in score.widths.items()),
        windows=len(score.starts),
        recorded=recorded,
    )


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Compare each mixed cache with the best others of at most its bytes, one line each.

    A control is compared with the mixed cache of its budget only.
    """
    lines = []
    for row in (row for row in rows if row.kind == "mixed"):
        compared = []
        for kind in ("uniform", "control", "transformers"):
            fitting = [other for other in rows if other.kind == kind and _fits(other, row)]
            if fitting:
                best = min(fitting, key=lambda other: other.kl)
                compared.append(f"{_times(row.kl, best.kl)} {_name(best)}")
        if compared:
            lines.append(f"{row.cache}: KL {figures(row.kl)}, {', '.join(compared)}")
    return lines


def _fits(other: Row, row: Row) -> bool:
    """Whether a cache takes at most the bytes of a mixed one; half a percent is a page, not a choice."""
    same_budget = other.kind != "control" or other.budget == row.budget
    return same_budget and other.mebibytes <= 1.005 * row.mebibytes


def _times(kl: float, other: float) -> str:
    low, high = sorted((max(kl, 1e-12), max(other, 1e-12)))
    return f"{high / low:.{0 if high >= 10 * low else 1}f} times {'less' if kl <= other else 'MORE'} than"


# ---- tables ------------------------------------------------------------------------------------------------

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "cache": lambda row: _name(row),
    "budget": lambda row: "" if row.budget is None else f"{row.budget:g}",
    "MiB": lambda row: f"{row.mebibytes:.2f}",
    "bits": lambda row: f"{row.bits_per_element:.2f}",
    "ppl": lambda row: "" if row.recorded else f"{row.perplexity:.2f}",
    "change": lambda row: "" if row.kind == FULL_PRECISION else f"{row.change:+.2%}",
    "KL": lambda row: "" if row.kind == FULL_PRECISION else with_error(row.kl, row.kl_error),
    "last quarter": lambda row: "" if row.kind == FULL_PRECISION else figures(row.kl_last_quarter),
    "top-1": lambda row: "" if row.kind == FULL_PRECISION else f"{row.agreement:.1%}",
    "tok/s": lambda row: "" if row.recorded else f"{row.tokens_per_second:.0f}",
    "pages at each width": lambda row: row.widths,
}
_LEFT = ("cache", "pages at each width")
_FIRST_TO_GO = ("pages at each width", "budget", "tok/s", "top-1", "last quarter")
"""Columns that a narrow terminal has no room for."""
WIDE = 160
"""Columns of a terminal in which the whole table fits."""


def _name(row: Row) -> str:
    return row.cache + "*" * row.recorded


def figures(value: float) -> str:
    """Two significant digits without an exponent."""
    return f"{value:.{_decimals(value, 2)}f}"


def with_error(value: float, error: float) -> str:
    """A mean and its standard error with as many decimals as both need."""
    decimals = max(_decimals(value, 2), _decimals(error, 1))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show a number of significant digits."""
    if not math.isfinite(value) or value == 0:
        return 0
    return max(digits - 1 - math.floor(math.log10(abs(value))), 0)


def _texts(rows: Sequence[Row]) -> list[dict[str, str]]:
    return [{header: text(row) for header, text in _COLUMNS.items()} for row in rows]


def to_table(rows: Sequence[Row], title: str, width: int) -> Table:
    """A table for a terminal of a width; a narrow one shows fewer columns."""
    texts = _texts(rows)
    needed = {header: max(len(row[header]) for row in [*texts, {header: header}]) + 2 for header in _COLUMNS}
    for header in _FIRST_TO_GO:
        if sum(needed.values()) + 1 > width:
            del needed[header]
    table = results.to_table([{header: row[header] for header in needed} for row in texts], title, _LEFT)
    for column in table.columns:
        column.no_wrap = True
    for line, (row, following) in zip(table.rows, pairwise(rows), strict=False):
        line.end_section = row.kind != following.kind
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    """The same table in Markdown."""
    return results.to_markdown(_texts(rows), _LEFT)


def to_csv(rows: Sequence[Row]) -> str:
    """All fields of all rows, unrounded."""
    return results.to_csv([asdict(row) for row in rows])


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
    """Draw divergence from full precision (log scale) against bits per element."""
    figure = new_figure(8, 5)
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
            # hqq and quanto take the same bytes: their names stand on different sides.
            above = kind in ("uniform", "transformers") and not row.cache.startswith("hqq")
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
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    fp16 = max(16 * row.mebibytes / row.bits_per_element for row in rows)
    label(
        axes,
        title,
        f"bits per element of K and V, everything counted (float16: 16, {fp16:.1f} MiB a window)",
        "KL divergence from full precision\n(nats per token, ± 2 standard errors; lower is better)",
    )
    axes.margins(x=0.12, y=0.1)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _short(row: Row) -> str:
    """What stands beside a point: the name without the words that the legend has."""
    name = row.cache.removeprefix("uniform ").removeprefix("mixed ")
    return {"uniform": f"{name} bit", "mixed": f"budget {name}"}.get(row.kind, name) + "*" * row.recorded
