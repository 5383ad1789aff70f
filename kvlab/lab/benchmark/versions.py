"""Two versions of kvlab on a CPU in turns, each answered for by a process of its own.

A script that compares versions starts itself once for each checkout, without arguments: it then reads numbers
of cases from stdin and answers each with a line of JSON. This module runs in the script that asks alone, for
the processes that answer may be of a version without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

__all__ = ["Answers", "ask_in_turns"]

Answers = dict[tuple[int, str], list[Any]]
"""What a version, "before" or "after", answered to a case in each round."""
_KERNELS = "from kvlab.jit.build import kernel_folder; print(kernel_folder('numba').resolve())"


def ask_in_turns(script: str, folders: dict[str, Path], num_cases: int, rounds: int) -> Answers:
    """Ask processes of `script`, one for each folder of a checkout, for every case in turns.

    A first round, in which kernels compile, does not count. A folder that would run the kernels of another
    version is a ValueError.
    """
    servers = {}
    for name, folder in folders.items():
        environment = os.environ | {"PYTHONPATH": str(folder.resolve()), "OMP_WAIT_POLICY": "PASSIVE"}
        kernels = subprocess.check_output(
            [sys.executable, "-c", _KERNELS], env=environment, cwd=folder, text=True
        )
        if not Path(kernels.strip()).is_relative_to(folder.resolve()):
            raise ValueError(
                f"{name}={folder} runs the kernels of another version, {kernels.strip()}: link kernels/numba "
                "to kvlab/numba_kernels in it"
            )
        servers[name] = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
    found: Answers = {}
    for turn, case in product(range(rounds + 1), range(num_cases)):
        for name in sorted(servers, reverse=bool(turn % 2)):
            asked, answered = servers[name].stdin, servers[name].stdout
            assert asked
            assert answered
            print(case, file=asked, flush=True)
            answer = json.loads(answered.readline())
            if turn:
                found.setdefault((case, name), []).append(answer)
    for server in servers.values():
        server.communicate()
    return found
