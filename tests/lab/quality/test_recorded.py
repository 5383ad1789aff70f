"""Recorded rows of held budgets: only plain caches, both measures, in the order of their bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import FormatError
from kvlab.lab.quality.recorded import SCHEMA, read_held


def row(task: str, figures: dict[str, Any], **case: Any) -> dict[str, Any]:
    return {"case": {"name": "any", "tasks": [task], **case}, "seconds": 1.0, task: figures}


def single(kl: float, bits: float) -> dict[str, Any]:
    return {"kl": kl, "error": kl / 10, "last_quarter": 2 * kl, "bits": [bits, bits - 0.1]}


HELD, WIDTH = {"budget": 0.2, "plan_length": 1}, {"budget": None, "bits": [3]}
ROWS = [
    row("retrieval", {"exact": [1, 1, 0], "log_p": [-1.0, -2.0, -3.0]}, dense=True),
    row("equal_bytes", {"case": single(0.2, 3.35), "default": single(0.02, 3.35)}, **WIDTH),
    row("retrieval", {"exact": [1, 0, 1], "log_p": [-1.0, -4.0, -2.0]}, **WIDTH),
    row("single", single(0.02, 3.2), **HELD),
    row("single", single(9.0, 3.2), **HELD, constant=100),
    row("single", single(9.0, 3.2), budget=0.2, plan_length=128),
    row("single", single(9.0, 3.2), **HELD, bits=[2, 8]),
    row("retrieval", {"exact": [1, 1, 0], "log_p": [-1.0, -2.0, -4.5]}, **HELD),
    row("single", single(9.0, 4.3), budget=0.27, plan_length=1),
]


def test_rows_are_those_of_plain_caches_with_both_measures(tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    path.write_text(json.dumps({"schema": SCHEMA, "rows": ROWS}))
    columns = ("cache", "bits", "KL", "last quarter", "found", "log p lost")
    assert read_held(path) == [
        dict(zip(columns, ("mixed 0.2", "3.20", "0.020 ± 0.002", "0.040", "2 of 2", "0.50"), strict=True)),
        dict(zip(columns, ("uniform 3", "3.35", "0.20 ± 0.02", "0.40", "1 of 2", "0.33"), strict=True)),
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "other"}', json.dumps({"schema": SCHEMA, "rows": []})]
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="does not hold results"):
        read_held(path)
