"""The notebooks run from top to bottom, in small form, and each says what one learns and what to try."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.md"))


def cells(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path) -> None:
    environment = os.environ | {"KVLAB_TINY": "1", "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
    program = "\n".join(cells(path))
    answer = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_opens_with_what_one_learns_and_ends_with_what_to_try(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("---\njupyter:\n  jupytext:\n    formats: ipynb,md")
    assert re.search(r"^# .+\n\nWhat you learn: ", text, re.MULTILINE)
    assert re.search(r"^## Try\n\n- ", text, re.MULTILINE)
    assert text.index("## Try") > text.rindex("```python")


def test_there_are_four() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]
