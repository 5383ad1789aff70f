"""Tables, files and the figure: what they say follows from the scores, and comes back from the files."""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from kvlab.errors import FormatError
from kvlab.lab.quality.comparison import Comparison, write_files
from kvlab.lab.quality.report import Row, summarise, to_csv, to_markdown, to_table, verdicts
from kvlab.lab.quality.scores import FULL_PRECISION, Continuation, Score, common_windows


def score(name: str, kind: str, nbytes: int, kl: float, *, starts: tuple[int, ...] = (0, 50)) -> Score:
    return Score(
        name=name,
        kind=kind,
        budget=0.25 if kind == "mixed" else None,
        starts=list(starts),
        nbytes=nbytes,
        bits_per_element=nbytes / 100,
        tokens_per_second=100,
        widths={"2": 0.75, "8": 0.25} if kind == "mixed" else {},
        kl=[[kl * (i + 1), kl * (i + 1)] for i in range(len(starts))],
        nll=[[2 + kl, 2 + kl] for _ in starts],
        agreement=[[0.5, 1.0] for _ in starts],
    )


SCORES = [
    score(FULL_PRECISION, FULL_PRECISION, 3200, 0.0),
    score("uniform 4", "uniform", 430, 0.02),
    score("uniform 2", "uniform", 230, 0.2),
    score("mixed 0.25", "mixed", 400, 0.01),
]


def comparison(scores: list[Score]) -> Comparison:
    return Comparison(
        provenance={"command": "kvlab demo"},
        model="A model",
        text="book",
        cache_dtype="float16",
        protocol={"length": 8, "scored_from": 4, "chunk": 2, "rows": 2},
        seconds=1.5,
        scores=scores,
        prompt="Once",
        continuations={"full precision": Continuation("upon a time", [7, 8], 0.5, 3200)},
    )


def test_rows_follow_from_the_scores() -> None:
    full, _, _, mixed = summarise(SCORES)
    assert full.perplexity == pytest.approx(math.exp(2))
    assert mixed.perplexity == pytest.approx(math.exp(2.01))
    assert mixed.change == pytest.approx(math.expm1(0.01))
    assert mixed.kl == pytest.approx(0.015)
    assert mixed.kl_error == pytest.approx(0.00577350 / 2)
    assert mixed.agreement == 0.75
    assert mixed.kl_last_quarter == pytest.approx(0.015)
    uneven = replace(SCORES[3], kl=[[1.0, 2, 3, 4, 5, 6, 7, 9], [3.0, 0, 0, 0, 0, 0, 2, 2]])
    assert summarise([SCORES[0], uneven])[1].kl_last_quarter == 5
    assert mixed.mebibytes == 400 / 2**20
    assert (mixed.widths, mixed.windows, mixed.recorded) == ("2:75% 8:25%", 2, False)


def test_verdicts_compare_with_the_best_that_fits() -> None:
    (line,) = verdicts(summarise(SCORES))
    assert line == "mixed 0.25: KL 0.015, 20 times less than uniform 2"
    (line,) = verdicts(summarise([*SCORES[:3], score("mixed 0.25", "mixed", 430, 0.04)]))
    assert line == "mixed 0.25: KL 0.060, 2.0 times MORE than uniform 4"


def test_controls_are_compared_at_their_budget() -> None:
    control = score("random 0.25", "mixed", 400, 0.05)
    control.kind = "control"
    other = score("mixed 0.5", "mixed", 800, 0.001)
    other.budget = 0.5
    at_budget, above = verdicts(summarise([*SCORES, other, control]))[:2]
    assert "5.0 times less than random 0.25" in at_budget
    assert "random" not in above


def test_recorded_rows_join_on_the_windows_both_have() -> None:
    starts = (0, 25, 50)
    recorded = comparison(
        [
            score(FULL_PRECISION, FULL_PRECISION, 3200, 0.0, starts=starts),
            score("mixed 0.25", "mixed", 400, 0.1, starts=starts),
            score("quanto 4", "transformers", 500, 0.1, starts=starts),
        ]
    )
    *own, row = comparison(SCORES).rows([recorded])
    assert own == summarise(SCORES)
    assert (row.cache, row.recorded, row.windows) == ("quanto 4", True, 2)
    assert row.kl == pytest.approx((0.1 + 0.3) / 2)
    assert comparison(recorded.scores).rows([recorded]) == summarise(recorded.scores)
    shorter = comparison(common_windows([recorded.scores[0], score("hqq 4", "transformers", 500, 0.2)], [0]))
    shorter.scores.append(common_windows(recorded.scores[2:], [0])[0])
    joined = comparison(SCORES).rows([shorter, recorded, shorter])[len(SCORES) :]
    assert [(row.cache, row.windows) for row in joined] == [("hqq 4", 1), ("quanto 4", 2)]
    elsewhere = common_windows(recorded.scores, [7])
    assert elsewhere == recorded.scores


def test_tables_hold_every_row() -> None:
    rows = summarise(SCORES)
    table = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [line["cache"] for line in table] == [row.cache for row in rows]
    assert [float(line["kl"]) for line in table] == [row.kl for row in rows]
    lines = to_markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[-1].startswith(
        "| mixed 0.25 | 0.25 | 0.00 | 4.00 | 7.46 | +1.01% | 0.015 ± 0.003 | 0.015 | 75.0% |"
    )


@pytest.mark.parametrize("width", [72, 80, 125])
def test_a_table_fits_its_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(to_table(summarise(SCORES), "", width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.015 ± 0.003" in text
    assert "…" not in text
    assert ("2:75% 8:25%" in text) == (width == 125)


def test_files_can_be_read_back(tmp_path: Path) -> None:
    result = comparison(SCORES)
    paths = {path.name: path for path in write_files(result, result.rows(), tmp_path)}
    assert set(paths) == {"results.json", "table.csv", "table.md", "quality.png", "quality.svg"}
    assert Comparison.read(paths["results.json"]) == result
    assert paths["quality.png"].read_bytes().startswith(b"\x89PNG")
    drawing = ElementTree.parse(paths["quality.svg"])
    assert drawing.getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_equal_results_give_equal_files(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_files(comparison(SCORES), summarise(SCORES), folder)
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"schema": "other"}',
        json.dumps({**json.loads(comparison(SCORES).to_json()), "scores": [{"name": "x"}]}),
        json.dumps({**json.loads(comparison(SCORES).to_json()), "more": 1}),
    ],
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="does not hold results"):
        Comparison.read(path)


def test_every_field_of_a_row_is_explained() -> None:
    """A field that is not that of a score has a comment behind it."""
    lines = inspect.getsource(Row).splitlines()
    for name in Row.__slots__:
        (line,) = (line for line in lines if line.startswith(f"    {name}: "))
        assert name in Score.__slots__ or "  # " in line, name
