"""Processes of two versions are asked in turns, and only if each has kernels of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.jit.build import kernel_folder
from kvlab.lab.benchmark.versions import ask_in_turns

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
rounds = [0, 0]
for line in sys.stdin:
    print([int(line), rounds[int(line)]], flush=True)
    rounds[int(line)] += 1
"""


@pytest.mark.skipif(
    not kernel_folder("numba").is_relative_to(ROOT), reason="kvlab is not installed from this checkout"
)
def test_answers_of_all_rounds_but_the_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = ask_in_turns(str(script), {"before": ROOT, "after": ROOT}, 2, 3)
    assert found == {
        (case, name): [[case, 1], [case, 2], [case, 3]] for case in (0, 1) for name in ("before", "after")
    }


def test_kernels_of_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"before=.*runs the kernels of another version"):
        ask_in_turns("script.py", {"before": tmp_path}, 1, 1)
