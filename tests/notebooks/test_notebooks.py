"""The notebooks run from top to bottom, in small form, and each says what one learns and what to try."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_pair_has_the_same_cells_and_outputs_without_errors(path: Path) -> None:
    notebook = json.loads(path.with_suffix(".ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in code] == [cell.rstrip("\n") for cell in cells(path)]
    text = path.read_text()
    for cell in notebook["cells"]:
        assert "".join(cell["source"]) in text
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert "error" not in {output["output_type"] for output in outputs}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    places = json.dumps(notebook)
    assert "/home/" not in places
    assert not re.search(r"(?<![\w./+])/\w+/", places)  # base64 has slashes, too
    assert str(path.parents[1]) not in places
    assert "/tmp/" not in places


def test_there_are_four() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]
