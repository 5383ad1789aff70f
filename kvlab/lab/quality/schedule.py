"""How a text reaches a model through a cache: a prompt in one call or in parts, then tokens that are scored.

What a packed cache costs depends on it. A running chunk of 64 tokens is exact, so chunks hide what single
tokens lose; a prompt in one call is attended exactly and packed once, a prompt in parts is read as it is
packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["SCHEDULES", "Schedule"]


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
