"""The plan of a comparison of caches: how text is read, through which caches, and which text.

What a packed cache costs depends on how text is read. A running chunk of 64 tokens is exact, so chunks hide
what single tokens lose; a prompt in one call is attended exactly and packed once, a prompt in parts is read
as it is packed. A comparison of many caches reads all in chunks (`Protocol`); tasks state their calls
(`Schedule`).

Nothing here needs torch, so the process that starts the readers (workers.py) does not wait for its import.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from kvlab.lab.quality.scores import Score

__all__ = [
    "CACHE_DTYPE",
    "GROUPS",
    "SCHEDULES",
    "Plan",
    "Protocol",
    "Schedule",
    "WorkItem",
    "Workload",
    "num_chunks",
]

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
class Schedule:
    """Calls in which a window is read.

    Examples
    --------
    >>> schedule = Schedule(prefill=100, part=64, scored=4, chunk=2)
    >>> list(schedule.calls()), schedule.length
    ([(0, 64), (64, 100), (100, 102), (102, 104)], 104)
    >>> list(Schedule(prefill=100, first=10, scored=1).calls())
    [(0, 10), (10, 100), (100, 101)]
    """

    prefill: int = 1024  # tokens of the prompt, which are not scored
    part: int = 0  # tokens of a part of the prompt; 0: all of it in one call
    scored: int = 256  # tokens behind the prompt
    chunk: int = 1  # scored tokens of a call
    first: int = 0  # tokens of a call before these; 0: none

    def __post_init__(self) -> None:
        if min(self.prefill, self.scored, self.chunk) < 1 or min(self.part, self.first) < 0:
            raise ValueError(
                f"{self} must have prefill, scored and chunk of at least 1, part and first of at least 0"
            )

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return self.prefill + self.scored

    def calls(self) -> Iterator[tuple[int, int]]:
        """First position and end of every call."""
        borders = [*range(min(self.first, 1)), *range(self.first, self.prefill, self.part or self.prefill)]
        borders += [*range(self.prefill, self.length, self.chunk), self.length]
        return pairwise(borders)


SCHEDULES = {
    "single": Schedule(),
    "chunks": Schedule(chunk=64),
    "parts-64": Schedule(part=64),
    "parts-512": Schedule(part=512),
    "short": Schedule(first=10),
}
"""By the names of tasks: single tokens and chunks of 64 behind a prompt in one call; prompts in parts, and in
two calls of which the first has 10 tokens."""


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
