"""A sweep on Slurm: arrays of the cases that are left, and a job that collects after them.

A task takes a part of these cases, in groups that share an evaluation (groups.py): all tasks are told the
same list of cases and number of tasks, and find the same groups. Results lie in the sweep's folder under the
name of the case, never of the job: a task that is requeued, or submitted twice, fills the same file. Clusters
limit indices (MaxArraySize), so a long sweep becomes several arrays, each with an offset.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvlab.lab.sweep.manifest import array_list

__all__ = ["SCRIPTS", "requeue_this_job", "submit"]

SCRIPTS = Path(__file__).parents[3] / "slurm"
"""The batch scripts of the repository."""
GRACE_S = 120
"""Seconds before the time limit at which a task is warned; Slurm's delivery is up to a minute early."""
MAX_RESTARTS = 3
_DEFAULT_ARRAY = 1001


def submit(
    folder: Path, numbers: Sequence[int], tasks: int, *, throttle: int, options: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Submit cases of a sweep as arrays of so many tasks, and the collection after them.

    At the same time `throttle` tasks of an array run. `options` are more options for sbatch, such as
    ``("--gpus=1", "--time=2:00:00")``; not for the collection. Job ids of the arrays are returned, and that
    of the collection, which runs when they have ended, however they did, and fails if a case is missing.

    If sbatch or the batch scripts are not here, that is a FileNotFoundError; if Slurm refuses, a
    ChildProcessError.
    """
    for script in ("ablate_memory.sbatch", "collect.sbatch"):
        if not (SCRIPTS / script).exists():
            raise FileNotFoundError(
                f"{SCRIPTS / script} is not there: submit from a checkout of the repository"
            )
    folder = folder.resolve()
    (folder / "logs").mkdir(parents=True, exist_ok=True)  # without it tasks fail before their first line
    limit = max_array_size(_call(["scontrol", "show", "config"]))
    arrays = []
    cases = {"KVLAB_SWEEP": str(folder), "KVLAB_CASES": array_list(numbers), "KVLAB_TASKS": str(tasks)}
    for offset in range(0, tasks, limit):
        indices = array_list(range(min(limit, tasks - offset)))
        command = [
            *("sbatch", "--parsable", "--job-name=kvlab-sweep", f"--array={indices}%{throttle}"),
            *("--requeue", "--open-mode=append", f"--signal=B:USR1@{GRACE_S}", "--export=ALL"),
            *(f"--output={folder}/logs/%A_%a.out", *options, str(SCRIPTS / "ablate_memory.sbatch")),
        ]
        arrays.append(_call(command, {**cases, "KVLAB_OFFSET": str(offset)}).partition(";")[0])
    command = [
        *("sbatch", "--parsable", "--job-name=kvlab-collect", f"--dependency=afterany:{':'.join(arrays)}"),
        *("--export=ALL", f"--output={folder}/logs/collect_%j.out", str(SCRIPTS / "collect.sbatch")),
    ]
    return arrays, _call(command, {"KVLAB_SWEEP": str(folder)}).partition(";")[0]


def max_array_size(config: str) -> int:
    """Read MaxArraySize, which every index must be below, from `scontrol show config`.

    Examples
    --------
    >>> max_array_size("MaxArraySize            = 4001\\nMaxJobCount = 10000"), max_array_size("")
    (4001, 1001)
    """
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    return max(int(match[1]) if match else _DEFAULT_ARRAY, 1)


def requeue_this_job() -> bool:
    """Ask Slurm to run the job of this process again; False outside of one, or after too many restarts."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= MAX_RESTARTS:
        return False
    _call(["scontrol", "requeue", job])
    return True


def _call(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    try:
        answer = subprocess.run(
            command, env=os.environ | (environment or {}), capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise FileNotFoundError(f"{command[0]} is not here: submit on a machine of a Slurm cluster") from None
    except subprocess.CalledProcessError as error:
        raise ChildProcessError(
            f"{command[0]} refused: {error.stderr.strip()}; `sinfo` says whether Slurm answers"
        ) from None
    return answer.stdout.strip()
