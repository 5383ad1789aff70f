"""Tables of results: whatever the width of the terminal, nothing is cut off."""

import pytest

from kvlab.lab.results import print_table

ROWS = [{f"a_column_of_name_{i}": f"{i}" * 12, f"number_{i}": i * 1.23456} for i in range(9)]
WIDE = {name: value for row in ROWS for name, value in row.items()}


def test_what_goes_into_a_pipe_is_as_wide_as_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([WIDE], "title")
    title, _, names, _, values, *_ = capsys.readouterr().out.splitlines()
    assert title.strip() == "title"
    assert names.split("  ")[0].strip() == "a column of name 0"
    expected = [value if isinstance(value, str) else f"{value:.3g}" for value in WIDE.values()]
    assert values.split() == expected


def test_a_narrow_terminal_folds_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich asks for a terminal
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    print_table([WIDE], "title")
    out = capsys.readouterr().out
    assert "…" not in out
    assert out.count("8") >= 12
