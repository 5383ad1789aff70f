"""Processes of two versions are asked in turns, and only if each has kernels of its own."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from kvlab.jit.build import kernel_folder
from kvlab.lab.benchmark.versions import ask_in_turns

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, sys
assert sys.argv[1:] == ["serve"]
rounds = {}
for line in sys.stdin:
    question = json.loads(line)
    if question == ["b", 0]:
        sys.exit(3)
    rounds[line] = rounds.get(line, -1) + 1
    print(json.dumps([question, rounds[line]]), flush=True)
"""


@pytest.mark.skipif(
    not kernel_folder("numba").is_relative_to(ROOT), reason="kvlab is not installed from this checkout"
)
def test_answers_of_all_rounds_but_the_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folders = {"before": ROOT, "after": ROOT}
    questions = [*product((("a", 1), ("b", 2)), folders)][:3]  # not every version is asked everything
    found = ask_in_turns(str(script), folders, questions, 3, arguments=["serve"])
    assert found == {(asked, name): [[[*asked], n] for n in (1, 2, 3)] for asked, name in questions}
    with pytest.raises(RuntimeError, match="the process of before ended with status 3"):
        ask_in_turns(str(script), folders, [(("b", 0), "before")], 1, arguments=["serve"])


def test_kernels_of_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"before=.*runs the kernels of another version"):
        ask_in_turns("script.py", {"before": tmp_path}, [], 1)
