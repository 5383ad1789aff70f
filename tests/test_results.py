"""Committed results are those that the documentation cites, and it cites none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = "\n".join(
    path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
)


def is_cited(name: str, pages: str) -> bool:
    """By its whole name, or by its end behind dots or a backtick."""
    ends = [name[dash.start() :] for dash in re.finditer("-", name)]
    return name in pages or any(f"...{end}" in pages or f"`{end}" in pages for end in ends)


def test_every_result_is_cited() -> None:
    results = [path.name for path in RESULTS.glob("*.json")]
    assert len(results) > 100
    assert [name for name in results if not is_cited(name, PAGES)] == []


def test_every_cited_result_is_there() -> None:
    named = set(re.findall(r"\b\d{4}-\d\d-\d\d-[\w.-]+?\.json", PAGES))
    assert len(named) > 100
    assert [name for name in sorted(named) if not (RESULTS / name).exists()] == []


def test_a_result_that_nobody_cites_is_seen() -> None:
    assert not is_cited("2026-01-01-cpu-nothing.json", PAGES)
    assert is_cited("2026-01-01-h100-engine-later.json", "as in 2026-01-01-h100-engine.json, ...-later.json")
