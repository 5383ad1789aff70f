"""What a grid will cost, before anything of it runs: memory of the largest group, time, infeasible cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.device import gpus, memory_available
from kvlab.errors import OutOfMemory
from kvlab.lab.ablation.grid import CHUNK, MODELS, AblationCase
from kvlab.lab.ablation.run import feasible_budget
from kvlab.lab.sweep.groups import in_groups, seconds
from kvlab.sizes import format_size

__all__ = ["Cost", "estimate"]

_MODEL_BYTES = {"smollm2": 3 << 29, "tiny": 300 << 20, None: 300 << 20}
_GPU_MODEL_BYTES = {"smollm2": 2 << 30, "tiny": 1 << 30, None: 1 << 30}
_GPU_LIBRARIES = 1 << 29
"""Weights and libraries: on a CPU, on a GPU, and what those of a GPU take of the CPU's memory."""
_FILLING_NBYTES, _CHUNKS = 94 << 10, 4.5
"""Pages that a layer and KV head of a cache is filling; chunks of predictions (docs/performance/sweep.md)."""


Group = Sequence[AblationCase]
"""Cases that are read together."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Numbers of cases (all, infeasible, synthetic), seconds in one process, its bytes on CPU and GPU."""

    cases: int
    infeasible: int
    synthetic: int
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
        found = [
            f"memory: up to {format_size(self.nbytes)} a process{of_gpu}",
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
        If a case needs more memory than is available here, or than a GPU that is visible has.

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
    groups = groups or [[cases[0]]]
    _refuse(max(groups, key=_nbytes), _nbytes, memory_available(), "memory")
    if cases[0].device == "cuda" and gpus():
        _refuse(
            max(groups, key=_gpu_nbytes), _gpu_nbytes, min(gpu.memory_total for gpu in gpus()), "GPU memory"
        )
    return Cost(
        len(cases),
        len(cases) - len(feasible),
        sum(case.model is None for case in cases),
        sum(map(seconds, groups)),
        cases[0].device,
        max(map(_nbytes, groups)),
        max(map(_gpu_nbytes, groups)),
    )


def _refuse(group: Group, nbytes: Callable[[Group], int], available: int, kind: str) -> None:
    if nbytes(group) > available:
        raise OutOfMemory(
            f"{group[0].name} needs about {format_size(nbytes(group))} of {kind} with the cases read "
            f"beside it and {format_size(available)} are available; leave out its context or use fewer layers"
        )


def _nbytes(group: Group) -> int:
    """Bytes of a process on the CPU: the model; what is read, or a row of each cache; one code a byte."""
    like = group[0]
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    if like.device == "cpu":
        held = _read_nbytes(group)
    else:
        held = int(fp16 * sum(case.budget for case in group)) + _synthetic_nbytes(like) + _GPU_LIBRARIES
    return _MODEL_BYTES[like.model] + held + fp16 // 2


def _gpu_nbytes(group: Group) -> int:
    """Bytes of a process on its GPU."""
    like = group[0]
    if like.device == "cpu":
        return 0
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    return _GPU_MODEL_BYTES[like.model] + _read_nbytes(group) + fp16 // 2


def _read_nbytes(group: Group) -> int:
    """Of all texts that are read at once: float32 keys and values, packed caches, predictions of a chunk."""
    like = group[0]
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    packed = fp16 * sum(case.budget for case in group)
    packed += len(group) * like.geometry.num_layers * like.geometry.num_kv_heads * _FILLING_NBYTES
    if like.model is None:
        return int(packed) + _synthetic_nbytes(like)
    predictions = _CHUNKS * 4 * CHUNK * MODELS[like.model].vocabulary
    return int(like.texts_at_once * (2 * fp16 + packed + predictions))


def _synthetic_nbytes(case: AblationCase) -> int:
    """Float32 keys and values of a layer, and as many queries as its heads take."""
    if case.model is not None:
        return 0
    shape = case.geometry
    return 4 * case.context_length * shape.head_dim * (2 * shape.num_kv_heads + shape.num_heads)
