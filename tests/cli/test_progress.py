"""Progress: plain lines in a log, a bar on a terminal."""

from __future__ import annotations

import warnings

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
        tick(1, 2, "1/2, failed 1")
    drawn = capsys.readouterr().err
    assert "50%" in drawn
    assert "1/2, failed 1" in drawn
    assert "work: " not in drawn


def test_a_warning_is_a_line_without_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    with progress.bar("work"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("12 cases are read [one by one]", RuntimeWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: 12 cases are read [one by one]\n"
    assert warnings.showwarning is before
