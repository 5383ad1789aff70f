"""What a grid will cost, before anything of it runs: memory of the largest case, time, cases that cannot be.

Times are for two processors as the demo was measured on: a reading of SmolLM2 takes about 150 tokens a second
and cache, synthetic data 3 million elements of K a second. On a GPU the host decides: a chunk of 64 tokens
takes it GPU_CHUNK_S through both caches, however many windows are read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.device import memory_available
from kvlab.errors import OutOfMemory
from kvlab.lab.ablation import feasible_budget
from kvlab.lab.grid import AblationCase
from kvlab.sizes import format_size

__all__ = ["Cost", "estimate"]

READ_TOKENS_PER_S, SYNTHETIC_ELEMENTS_PER_S = 150, 3e6
GPU_CHUNK_S, GPU_ELEMENTS_PER_S = 0.07, 1.5e7
_MODEL_BYTES = {"smollm2": 2 << 30, "tiny": 300 << 20, None: 300 << 20}
_NEEDLES, _CHUNK = 4, 64


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
            f"time: about {self.seconds / 3600:.1f} h in one process {where}",
        ]
        if self.infeasible:
            found.append(f"{self.infeasible} cases are infeasible: recorded as such, at no cost")
        if self.synthetic:
            found.append(f"{self.synthetic} cases have synthetic keys and values, so no text is scored")
        return found


def estimate(cases: Sequence[AblationCase]) -> Cost:
    """Return what cases cost; packed and unpacked share one reading.

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
    least: dict[AblationCase, float] = {}
    for case in cases:
        key = replace(case, budget=1.0, use_packing=True)
        if key not in least:
            least[key] = feasible_budget(key)
    feasible = [case for case in cases if least[replace(case, budget=1.0, use_packing=True)] <= case.budget]
    readings = {replace(case, use_packing=True) for case in feasible}
    nbytes = max(map(_nbytes, cases))
    if nbytes > memory_available():
        worst = max(cases, key=_nbytes)
        raise OutOfMemory(
            f"{worst.name} needs about {format_size(nbytes)} and {format_size(memory_available())} are "
            f"available; leave out its context or use fewer layers"
        )
    return Cost(
        len(cases),
        len(cases) - len(feasible),
        sum(case.model is None for case in cases),
        sum(map(_seconds, readings)),
        cases[0].device,
        nbytes,
    )


def _seconds(case: AblationCase) -> float:
    on_gpu = case.device == "cuda"
    if case.model is None:
        speed = GPU_ELEMENTS_PER_S if on_gpu else SYNTHETIC_ELEMENTS_PER_S
        return case.geometry.fp16_nbytes(case.context_length) / 4 / speed
    if on_gpu:
        batches = -(-(case.windows + _NEEDLES) // case.rows_at_once)
        return GPU_CHUNK_S * batches * case.context_length / _CHUNK
    # Every window and every needle is read twice: from the dense cache and from the packed one.
    return 2 * case.context_length * (case.windows + _NEEDLES) / READ_TOKENS_PER_S


def _nbytes(case: AblationCase) -> int:
    """Float32 keys and values of the windows read at once, the packed cache, and one code a byte."""
    fp16 = case.geometry.fp16_nbytes(case.context_length)
    windows = 1 if case.model is None else _NEEDLES  # needles and windows are read four at once
    dense = 2 * fp16 * windows if case.model is not None else 2 * fp16 // case.geometry.num_layers
    return int(_MODEL_BYTES[case.model] + dense + windows * fp16 * case.budget + fp16 // 2)
