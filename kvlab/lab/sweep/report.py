"""A sweep as files for people: Markdown, figures, and one HTML page that needs nothing but itself.

The page holds its tables, its figures (as SVG) and the few lines of script that sort a table when a heading
is clicked, so it opens from a disk, offline, on a telephone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.files import write_whole
from kvlab.lab import results
from kvlab.lab.figures import save_figure, to_svg
from kvlab.lab.results import Row
from kvlab.lab.sweep.claims import judge_claims
from kvlab.lab.sweep.figures import figures
from kvlab.lab.sweep.views import View, banner, views

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["all_views", "to_html", "to_markdown", "write_report"]

_CAPTIONS = {
    "quality": "Loss of quality against bytes.",
    "packing": "Bytes that packing saves.",
    "context": "Latency against context.",
}
_PERCENT = ("saved", "perplexity_change", "top1_agreement", "needle_retrieval")
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}p.note{color:#555;font-size:.9rem;margin:.25rem 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid #ddd}
th.text,td.text{text-align:left}th button{all:unset;cursor:pointer;font-weight:600}
th button:focus-visible{outline:2px solid #1b6ca8}th[aria-sort=ascending] button::after{content:" \\25B2"}
th[aria-sort=descending] button::after{content:" \\25BC"}
.failed{background:#b3261e;color:#fff;font-weight:600;padding:.6rem 1rem;border-radius:.25rem}
td.text{max-width:40rem;white-space:normal}
figure{margin:1rem 0}figure svg{width:100%;height:auto}
"""
_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const x = value(a), y = value(b), m = parseFloat(x), n = parseFloat(y);
      return isNaN(m) || isNaN(n) ? x.localeCompare(y) : m - n;
    };
    [...body.rows].sort((a, b) => down ? compare(b, a) : compare(a, b)).forEach(row => body.append(row));
  }));
}
"""


def all_views(
    rows: Sequence[Row], change: float = 0.01, files: Sequence[Mapping[str, Any]] = ()
) -> list[View]:
    """The views of a sweep and what was expected of it."""
    claims = View("Expected and measured", judge_claims(rows, files), "no claim passes without a measurement")
    return [*views(rows, change), claims]


def write_report(
    rows: Sequence[Row], folder: Path, change: float = 0.01, files: Sequence[Mapping[str, Any]] = ()
) -> list[Path]:
    """Write report.md, report.html, and the figures as PNG and SVG into a folder.

    Parameters
    ----------
    rows : sequence of dict
        Of the summary.
    folder : Path
    change : float
        Bound on the change of perplexity for the best configuration.
    files : sequence of mapping
        Contents of other result files, as for `kvlab.lab.sweep.claims.judge_claims`.

    Returns
    -------
    list of Path

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn, shown = figures(rows), all_views(rows, change, files)
    paths = [folder / "report.md", folder / "report.html"]
    write_whole(paths[0], to_markdown(shown, list(drawn), banner(rows)).encode())
    write_whole(paths[1], to_html(rows, shown, drawn).encode())
    return paths + [path for name, figure in drawn.items() for path in save_figure(figure, folder / name)]


def to_markdown(shown: Sequence[View], drawn: Sequence[str] = (), warning: str = "") -> str:
    """A warning if there is one, views as Markdown tables, and links to the figures.

    Examples
    --------
    >>> print(to_markdown([View("Bits", [{"bits": "2,4", "loss": 0.01234}], "a note")]))
    ## Bits
    <BLANKLINE>
    | bits | loss |
    | --- | --: |
    | 2,4 | 0.0123 |
    <BLANKLINE>
    a note
    <BLANKLINE>
    """
    parts = [f"> **{warning}**\n"] if warning else []
    for view in shown:
        left = [name for name, text in zip(view.rows[0], _is_text(view), strict=True) if text]
        texts = [{name: _in_a_line(cell(name, value)) for name, value in row.items()} for row in view.rows]
        table = results.to_markdown(texts, left)
        parts.append(f"## {view.title}\n\n{table}\n{view.note}\n")
    parts += [f"![{_CAPTIONS[name]}]({name}.svg)\n" for name in drawn]
    return "\n".join(parts)


def _in_a_line(text: str) -> str:
    """Text as a cell of a Markdown table can hold it."""
    return " ".join(text.split()).replace("|", "\\|")


def to_html(rows: Sequence[Row], shown: Sequence[View], drawn: dict[str, Figure]) -> str:
    """One page with everything in it."""
    pictures = "".join(
        f"<figure>{to_svg(figure)}<figcaption>{_CAPTIONS[name]}</figcaption></figure>\n"
        for name, figure in drawn.items()
    )
    warning = f'<p class="failed" role="alert">{escape(banner(rows))}</p>\n' if banner(rows) else ""
    everything = View("All cases", list(rows), "the summary as it stands in ablation_summary.csv")
    first = [view for view in shown if view.title == "Failed"]
    failures = "".join(map(_table, first))
    tables = "".join(map(_table, [*shown[len(first) :], everything]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,"><title>kvlab: ablation</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>Ablation of packed caches</h1>\n"
        f"{warning}<p>{_source(rows)}</p>\n{failures}{pictures}{tables}<script>{_SCRIPT}</script></body></html>\n"
    )


def _source(rows: Sequence[Row]) -> str:
    """Where the rows come from, in a sentence."""
    counts = {
        name: sum(str(row["status"]).startswith(name) for row in rows)
        for name in ("ok", "infeasible", "failed")
    }
    where = sorted({str(row["gpu"] or row["device"]) for row in rows if row["backend"] is not None})
    models = sorted({str(row["model"] or "synthetic keys and values") for row in rows})
    commits = sorted({str(row["commit"])[:10] for row in rows if row["commit"] is not None})
    parts = [", ".join(f"{count} {name}" for name, count in counts.items()), ", ".join(models)]
    return escape("; ".join([*parts, ", ".join(where), f"commit {', '.join(commits)}"])) + "."


def _table(view: View) -> str:
    text = _is_text(view)
    kinds = [' class="text"' if each else "" for each in text]
    heads = "".join(
        f'<th scope="col"{kind}><button>{escape(name.replace("_", " "))}</button></th>'
        for name, kind in zip(view.rows[0], kinds, strict=True)
    )
    lines = []
    for row in view.rows:
        cells = []
        for (name, value), kind in zip(row.items(), kinds, strict=True):
            exact = f' data-value="{value}"' if isinstance(value, (int, float)) else ""
            cells.append(f"<td{kind}{exact}>{escape(cell(name, value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<h2>{escape(view.title)}</h2><p class="note">{escape(view.note)}</p>\n<div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table></div>\n"
    )


def _is_text(view: View) -> list[bool]:
    return [any(isinstance(row[name], str) for row in view.rows) for name in view.rows[0]]


def cell(name: str, value: object) -> str:
    """A value as people read it; the name of its column says which values are fractions.

    Examples
    --------
    >>> cell("saved", 0.251), cell("loss", 0.00123), cell("cases", 12), cell("loss", None)
    ('25.1%', '0.00123', '12', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if name in _PERCENT else f"{value:.3g}"
    return str(value)
