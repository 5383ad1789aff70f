"""Results as files: rows of plain values with their provenance.

A result is a dict of ``provenance`` and ``rows``; a row is a flat dict, with the same keys in every row of a
result. So JSON holds all of it, CSV and a table in the terminal the rows.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import environment
from kvlab.errors import FormatError
from kvlab.files import write_whole
from kvlab.lab.guard import gpu_state

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Row",
    "print_table",
    "provenance",
    "results_of",
    "to_csv",
    "to_markdown",
    "to_table",
    "write",
]

Row = dict[str, str | int | float | None]

_PACKAGES = (
    *("numpy", "scipy", "numba", "ml_dtypes", "torch", "transformers", "hqq", "optimum-quanto"),
    *("cupy-cuda12x", "cupy-cuda13x", "cuda-core"),
)
_GPU = ("name", "driver_version", "clocks.sm", "clocks.mem")


def provenance(**settings: str | int | float | None) -> dict[str, Any]:
    """Return where a result comes from: command, time, versions, machine, state of the source, settings.

    `settings` are what the run was told, for example ``threads=2``. With a GPU there are also ``gpu``: its
    name, driver and present clocks; ``cuda``: versions.

    Examples
    --------
    >>> sorted(set(provenance(threads=2)) - {"gpu", "cuda"})
    ['command', 'cpu', 'git', 'kvlab', 'memory', 'packages', 'platform', 'python', 'settings', 'time']
    """
    report, state = environment.report(), gpu_state()
    gpu = {} if state is None else {"gpu": {name: state[name] for name in _GPU}, "cuda": report["cuda"]}
    return gpu | {
        "command": shlex.join([*_program(), *map(_without_folders, sys.argv[1:])]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git_state(),
        "settings": settings,
        "packages": {name: report["packages"][name] for name in _PACKAGES},
        **{name: report[name] for name in ("kvlab", "python", "platform", "cpu", "memory")},
    }


def _program() -> list[str]:
    """Return how this program is called: a script of the repository by its path in it, else as kvlab."""
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).parents[2]
    is_script = script.is_relative_to(root / "benchmarks")
    return ["python", str(script.relative_to(root))] if is_script else ["kvlab"]


def _without_folders(argument: str) -> str:
    """An argument; of an absolute path, which says where somebody keeps files, only the last part.

    Examples
    --------
    >>> _without_folders("--output=/home/me/case.json"), _without_folders("results/first")
    ('--output=case.json', 'results/first')
    """
    option, sign, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    return f"{option}{sign}{Path(value).name}" if Path(value).is_absolute() else argument


def _git_state() -> dict[str, str | bool] | None:
    """Return commit and whether the work tree differs from it; None where the source is not under git.

    A copy of the source without its `.git` can be told its commit by `KVLAB_COMMIT` ("<commit>", or
    "<commit>-modified"), as `git describe --always --abbrev=40 --exclude='*' --dirty=-modified` prints it.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        stated = os.environ.get("KVLAB_COMMIT")
        commit, _, modified = (stated or "").partition("-")
        return {"commit": commit, "modified": modified == "modified"} if stated else None
    try:
        commit, status = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.strip(), "modified": bool(status.strip())}


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result to ``.json``, or its rows to ``.csv``; the file is whole or not there."""
    if path.suffix not in (".json", ".csv"):
        raise ValueError(f"output={str(path)!r} must end in .json or .csv")
    is_json = path.suffix == ".json"
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n" if is_json else to_csv(result["rows"])
    write_whole(path, text.encode())


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as CSV, unrounded; the columns are those of the first row unless they are given."""
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue()


def to_markdown(rows: Sequence[Mapping[str, str]], left: Collection[str]) -> str:
    """Rows of texts as a Markdown table; the columns in `left` begin at the left."""
    rule = ["---" if name in left else "--:" for name in rows[0]]
    lines = [list(rows[0]), rule, *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@contextmanager
def results_of(schema: str, path: Path) -> Iterator[dict[str, Any]]:
    """Read a JSON file for a block that takes it apart; a file of something else is a FormatError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != schema:
            raise ValueError("another schema")
        yield found
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise FormatError(f"{path} does not hold results of {schema!r}: {error!r}") from None


def print_table(rows: Sequence[Row], title: str, hidden: Sequence[str] = (), *, digits: int = 3) -> None:
    """Print rows as a table, numbers to so many digits, without the columns in `hidden`.

    Nothing is cut off: narrow terminals fold cells, pipes and logs are as wide as the table.
    """
    from rich.console import Console

    shown = [name for name in rows[0] if name not in hidden]
    texts = [{name.replace("_", " "): _cell(row[name], digits) for name in shown} for row in rows]
    left = [name.replace("_", " ") for name in shown if isinstance(rows[0][name], str)]
    console = Console()
    if not console.is_terminal:
        console.width = 1_000
    console.print(to_table(texts, title, left), highlight=False)


def to_table(rows: Sequence[Mapping[str, str]], title: str, left: Collection[str]) -> Table:
    """Rows of texts as a table of a terminal, folded where it is narrow; columns in `left` begin there."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def _cell(value: str | int | float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
