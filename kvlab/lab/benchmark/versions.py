"""Two versions of kvlab in turns, each answered for by a process of its own.

A script that compares versions starts itself once for each checkout, with arguments that tell it so: it then
reads questions from stdin, a line of JSON each, and answers each with a line of JSON. This module runs in the
script that asks alone, for the processes that answer may be of a version without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from kvlab.lab.benchmark import harness

__all__ = ["ask_in_turns", "folders", "options"]

_KERNELS = (
    "import sys; from kvlab.jit.build import kernel_folder; print(kernel_folder(sys.argv[1]).resolve())"
)
Question = TypeVar("Question", bound=Hashable)


def options(description: str | None, device: str = "cuda") -> argparse.ArgumentParser:
    """Return the parser of `kvlab.lab.benchmark.harness.options`, with two folders of checkouts."""
    parser = harness.options(description, device)
    parser.add_argument("before", type=Path, help="folder of a checkout")
    parser.add_argument("after", type=Path, help="folder of another one")
    return parser


def folders(given: argparse.Namespace) -> dict[str, Path]:
    """The folders by the names of their versions."""
    return {"before": given.before, "after": given.after}


def ask_in_turns(
    script: str,
    checkouts: dict[str, Path],
    questions: Sequence[tuple[Question, str]],
    rounds: int,
    *,
    arguments: Sequence[str] = (),
    kernels: str = "numba",
) -> dict[tuple[Question, str], list[Any]]:
    """Ask processes of `script`, one for each folder of a checkout, every question in each round.

    A question is a plain value with the name of the folder that it goes to; rounds go through them back and
    forth. A first round, in which kernels compile, does not count. A folder that would run the kernels of
    another version, "numba" or "cuda", is a ValueError, and a process that ends a RuntimeError.
    """
    found: dict[tuple[Question, str], list[Any]] = {}
    with ExitStack() as ended:  # which leaves the processes without questions, and waits for their ends
        servers = {
            name: ended.enter_context(_started(script, name, folder, arguments, kernels))
            for name, folder in checkouts.items()
        }
        for turn in range(rounds + 1):
            for question, name in questions[:: -1 if turn % 2 else 1]:
                answer = _answer(servers[name], name, question)
                if turn:
                    found.setdefault((question, name), []).append(answer)
    return found


def _started(
    script: str, name: str, folder: Path, arguments: Sequence[str], kernels: str
) -> subprocess.Popen[str]:
    """Start the process of a checkout, once it is sure that it would run its own kernels."""
    root = folder.resolve()
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(root), *(other for other in others if other and not Path(other, "kvlab").exists())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", _KERNELS, kernels]
    used = Path(subprocess.check_output(command, env=environment, cwd=folder, text=True).strip())
    if not used.is_relative_to(root):
        raise ValueError(
            f"{name}={folder} runs the kernels of another version, {used}: link kernels/{kernels} to "
            f"kvlab/{kernels}_kernels in it"
        )
    return subprocess.Popen(
        [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


def _answer(server: subprocess.Popen[str], name: str, question: Any) -> Any:
    assert server.stdin
    assert server.stdout
    print(json.dumps(question), file=server.stdin, flush=True)
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of {name} ended with status {server.wait()}")
    return json.loads(line)
