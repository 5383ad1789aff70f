"""The plan of a comparison of caches: how text is read, through which caches, and which text.

Nothing here needs torch, so the process that starts the readers (workers.py) does not wait for its import.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.lab.quality.scores import Score

__all__ = ["CACHE_DTYPE", "GROUPS", "Plan", "Protocol", "WorkItem", "Workload", "num_chunks"]

CACHE_DTYPE = "float16"
"""What exact tokens are kept in, also for a float32 model."""
GROUPS = ("kvlab", "controls", "hqq", "quanto")
WorkItem = tuple[tuple[int, ...], int]
"""Numbers of windows, and the group of caches they are read through."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How windows are read: length, first scored position, tokens of a chunk, windows read at once."""

    length: int = 2048
    scored_from: int = 1024
    chunk: int = 64
    rows: int = 4

    def __post_init__(self) -> None:
        if min(self.chunk, self.rows) < 1 or not 0 <= self.scored_from < self.length:
            raise ValueError(f"{self} must have chunk, rows >= 1 and 0 <= scored_from < length")
        if self.length % self.chunk or self.scored_from % self.chunk:
            raise ValueError(f"length and scored_from of {self} must be multiples of chunk")

    @property
    def scored(self) -> int:
        """Scored tokens of a window."""
        return self.length - self.scored_from


def num_chunks(windows: int, cases: int, protocol: Protocol) -> int:
    """How often `evaluate` calls `progress`."""
    return -(-windows // protocol.rows) * (protocol.length // protocol.chunk) * (cases + 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare."""

    subject: str  # "smollm2" or "tiny"
    protocol: Protocol
    windows: int
    budgets: tuple[float, ...]  # of the mixed caches
    groups: tuple[str, ...] = GROUPS[:1]
    """kvlab's own caches, controls at equal bytes, quantised caches of transformers."""
    device: str = "cpu"  # or "cuda": where model and caches are

    @property
    def settings(self) -> str:
        """What the scores of a window depend on: runs that differ in the rest share a checkpoint."""
        return repr(replace(self, windows=0, groups=(), protocol=replace(self.protocol, rows=1)))

    @property
    def continuation_chunks(self) -> int:
        """Chunks of a continuation, which takes about as long as one cache takes for a window."""
        return self.protocol.length // self.protocol.chunk


@dataclass(frozen=True, slots=True)
class Workload:
    """What there is to read: starts of the windows, names of model and text, names of the caches."""

    starts: tuple[int, ...]
    model: str
    text: str
    groups: tuple[tuple[str, ...], ...]

    @property
    def sizes(self) -> list[int]:
        return [len(names) for names in self.groups]

    def has(self, part: list[Score]) -> bool:
        names = tuple(score.name for score in part[1:])
        return names in self.groups and set(part[0].starts) <= set(self.starts)

    def group_of(self, part: list[Score]) -> int:
        return self.groups.index(tuple(score.name for score in part[1:]))
