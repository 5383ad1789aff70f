"""Progress: plain lines in a log, a bar on a terminal."""

from __future__ import annotations

import pytest
from rich import console

from kvlab.cli import progress


def test_a_log_gets_a_line_at_the_end_and_one_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.bar("work") as tick:
        for done in range(1, 101):
            tick(done, 100)
    assert capsys.readouterr().err == "work: 100/100\n"
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.bar("work") as tick:
        tick(1, 3)
        tick(2, 3)
    assert capsys.readouterr().err == "work: 1/3\nwork: 2/3\n"


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.Console, "is_terminal", True)
    with progress.bar("work") as tick:
        tick(1, 2)
    drawn = capsys.readouterr().err
    assert "50%" in drawn
    assert "work: " not in drawn
