"""What a grid will cost, before anything of it runs: memory of the largest group, time, infeasible cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.device import memory_available
from kvlab.errors import OutOfMemory
from kvlab.lab.ablation import feasible_budget
from kvlab.lab.grid import AblationCase
from kvlab.lab.groups import in_groups, seconds
from kvlab.sizes import format_size

__all__ = ["Cost", "estimate"]

_READ_AT_ONCE = 4  # windows, on a CPU; a GPU reads more, in memory of its own
_MODEL_BYTES = {"smollm2": 2 << 30, "tiny": 300 << 20, None: 300 << 20}


@dataclass(frozen=True, slots=True)
class Cost:
    """Numbers of cases (all, infeasible, synthetic), seconds in one process, bytes of one."""

    cases: int
    infeasible: int
    synthetic: int
    seconds: float
    device: str
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what a person wants to know."""
        where = "on a GPU" if self.device == "cuda" else "on two processors"
        found = [
            f"memory: up to {format_size(self.nbytes)} a process",
            f"time: about {_duration(self.seconds)} in one process {where}",
        ]
        if self.infeasible:
            found.append(f"{self.infeasible} cases are infeasible: recorded as such, at no cost")
        if self.synthetic:
            found.append(f"{self.synthetic} cases have synthetic keys and values, so no text is scored")
        return found


def _duration(seconds: float) -> str:
    hours, minutes = seconds / 3600, seconds / 60
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"


def estimate(cases: Sequence[AblationCase]) -> Cost:
    """Return what cases cost in one process, in groups that share their readings.

    Raises
    ------
    OutOfMemory
        If a case needs more memory than is available here.

    Examples
    --------
    >>> cost = estimate([AblationCase(0.2, "4,8", 512), AblationCase(0.3, "4,8", 512)])
    >>> cost.cases, cost.infeasible, cost.synthetic
    (2, 1, 0)
    """
    of_case = {case: replace(case, budget=1.0, use_packing=True) for case in cases}
    least = {key: feasible_budget(key) for key in dict.fromkeys(of_case.values())}
    feasible = [case for case in cases if least[of_case[case]] <= case.budget]
    groups = [
        list({replace(feasible[number], use_packing=True): None for number in group})
        for group in in_groups(feasible, range(len(feasible)))
    ]
    worst = max(groups, key=_nbytes, default=[cases[0]])
    nbytes = _nbytes(worst)
    if nbytes > memory_available():
        raise OutOfMemory(
            f"{worst[0].name} needs about {format_size(nbytes)} with the cases that are read beside it and "
            f"{format_size(memory_available())} are available; leave out its context or use fewer layers"
        )
    return Cost(
        len(cases),
        len(cases) - len(feasible),
        sum(case.model is None for case in cases),
        sum(map(seconds, groups)),
        cases[0].device,
        nbytes,
    )


def _nbytes(group: Sequence[AblationCase]) -> int:
    """Float32 keys and values of the windows read at once, the packed caches, and one code a byte."""
    like = group[0]
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    windows = 1 if like.model is None else _READ_AT_ONCE
    dense = 2 * fp16 * windows if like.model is not None else 2 * fp16 // like.geometry.num_layers
    packed = windows * fp16 * sum(case.budget for case in group)
    return int(_MODEL_BYTES[like.model] + dense + packed + fp16 // 2)
