"""Estimate a grid before it runs: memory of the largest group, time, infeasible cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.errors import OutOfMemory
from kvlab.lab.ablation.grid import AblationCase
from kvlab.lab.ablation.memory import Group, gpu_nbytes, nbytes, refuse_too_large
from kvlab.lab.ablation.run import feasible_budget
from kvlab.lab.sweep.groups import in_groups, seconds
from kvlab.sizes import format_size

__all__ = ["Cost", "estimate"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Numbers of cases (all, infeasible, synthetic), seconds in one process, its bytes on CPU and GPU.

    `split` counts the cases that would be read together where there was more memory.
    """

    cases: int
    infeasible: int
    synthetic: int
    split: int
    seconds: float
    device: str
    nbytes: int
    gpu_nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what a person wants to know."""
        where = "on a GPU" if self.device == "cuda" else "on two processors"
        of_gpu = f", and {format_size(self.gpu_nbytes)} of a GPU" if self.gpu_nbytes else ""
        found = []
        if self.infeasible < self.cases:
            found.append(f"memory: up to {format_size(self.nbytes)} a process{of_gpu}")
            time = f"time: about {_duration(self.seconds)} in one process {where}"
            found.append(f"{time}; more where kernels are not compiled yet")
        for count, what in (
            (self.infeasible, "infeasible: recorded as such, at no cost"),
            (self.synthetic, "of synthetic keys and values: no text is scored"),
            (self.split, "too large to be read together here: read one by one"),
        ):
            if count:
                found.append(f"{count} {'case is' if count == 1 else 'cases are'} {what}")
        return found


def _duration(seconds: float) -> str:
    """Seconds as a person says them.

    Examples
    --------
    >>> _duration(0.2), _duration(20), _duration(200), _duration(20_000)
    ('1 s', '20 s', '3 min', '5.6 h')
    """
    hours, minutes = seconds / 3600, seconds / 60
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{max(seconds, 1):.0f} s"


def estimate(cases: Sequence[AblationCase]) -> Cost:
    """Return what cases cost in one process, in groups that share their evaluations.

    A case that needs more memory than is available here, or than a visible GPU has, raises OutOfMemory.

    Examples
    --------
    >>> cost = estimate([AblationCase(0.2, "4,8", 512), AblationCase(0.3, "4,8", 512)])
    >>> cost.cases, cost.infeasible, cost.synthetic
    (2, 1, 0)
    """
    of_case = {case: replace(case, budget=1.0, use_packing=True) for case in cases}
    smallest = {key: feasible_budget(key) for key in dict.fromkeys(of_case.values())}
    feasible = [case for case in cases if smallest[of_case[case]] <= case.budget]
    groups: list[Group] = []
    split = 0
    for numbers in in_groups(feasible, range(len(feasible))):
        group = list({replace(feasible[number], use_packing=True): None for number in numbers})
        parts = _that_fit(group)
        groups += parts
        split += len(numbers) if len(parts) > 1 else 0
    return Cost(
        len(cases),
        len(cases) - len(feasible),
        sum(case.model is None for case in cases),
        split,
        sum(map(seconds, groups)),
        cases[0].device,
        max(map(nbytes, groups), default=0),
        max(map(gpu_nbytes, groups), default=0),
    )


def _that_fit(group: Group) -> list[Group]:
    """A group, or each of its cases by itself where that takes too much memory, as a run does it."""
    try:
        refuse_too_large(group)
    except OutOfMemory:
        for case in group:
            refuse_too_large([case])
        return [[case] for case in group]
    return [group]
