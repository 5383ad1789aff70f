"""A comparison of caches as one object and as files: JSON with everything, CSV, Markdown, figure.

The JSON holds the means of every chunk of every window with command, hardware and versions, so that a later
run can show its rows beside its own, on the windows both have read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvlab.lab.figures import save_figure
from kvlab.lab.quality.report import Row, draw, summarise, to_csv, to_markdown
from kvlab.lab.quality.scores import FULL_PRECISION, Continuation, Score, common_windows
from kvlab.lab.results import results_of

__all__ = ["Comparison", "write_files"]

SCHEMA = "kvlab comparison 1"


@dataclass(slots=True)
class Comparison:
    """What a run found."""

    model: str
    text: str
    cache_dtype: str
    protocol: dict[str, int]  # fields of `Protocol`
    seconds: float  # from the start of the processes to the last result
    scores: list[Score]  # full precision first
    prompt: str = ""  # end of the prompt of the continuations
    continuations: dict[str, Continuation] = field(default_factory=dict)  # by name of the cache
    races: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tokens a second on a GPU and on the CPU, by tokens that are read; empty for a run on the CPU."""
    resumed: int = 0
    """Parts (windows read through a group of caches) from the checkpoint of an interrupted run."""
    provenance: dict[str, Any] = field(default_factory=dict)  # of `kvlab.lab.results.provenance`

    @property
    def scored(self) -> int:
        """Number of scored tokens."""
        return len(self.scores[0].starts) * (self.protocol["length"] - self.protocol["scored_from"])

    def to_json(self) -> str:
        """All fields."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False)

    @staticmethod
    def read(path: Path) -> Comparison:
        """Read what `to_json` made; a file of something else is a FormatError."""
        with results_of(SCHEMA, path) as found:
            del found["schema"]
            found["scores"] = [Score(**score) for score in found["scores"]]
            written = found["continuations"]
            found["continuations"] = {name: Continuation(**text) for name, text in written.items()}
            return Comparison(**found)

    def rows(self, recorded: Sequence[Comparison] = ()) -> list[Row]:
        """Rows of the table; caches of transformers come from earlier runs if this one has none.

        Of a cache that several have read the one with the most of this run's windows counts.
        """
        rows = summarise(self.scores)
        if any(row.kind == "transformers" for row in rows):
            return rows
        best: dict[str, Row] = {}
        for earlier in recorded:
            theirs = [score for score in earlier.scores if score.kind in (FULL_PRECISION, "transformers")]
            theirs = common_windows(theirs, self.scores[0].starts)
            for row in summarise(theirs, recorded=True)[1:]:
                if row.cache not in best or best[row.cache].windows < row.windows:
                    best[row.cache] = row
        return [*rows, *best.values()]


def write_files(comparison: Comparison, rows: list[Row], folder: Path) -> list[Path]:
    """Write results.json, table.csv, table.md, quality.png and quality.svg into a folder."""
    source = f"{comparison.model} reads the {comparison.text} from its cache"
    figure = draw(rows, f"{source}, {comparison.scored:,} tokens scored")
    contents = {
        "results.json": comparison.to_json() + "\n",
        "table.csv": to_csv(rows),
        "table.md": to_markdown(rows),
    }
    paths = []
    for name, text in contents.items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    return paths + save_figure(figure, folder / "quality")
