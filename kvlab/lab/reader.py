"""A model that reads its windows through caches, and writes: what one process of a comparison does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvlab.lab.cases import controls, hqq, mixed, quanto, uniform
from kvlab.lab.continuation import continue_text
from kvlab.lab.model import Subject, load_smollm2, tiny_llama
from kvlab.lab.quality import Case, Protocol, evaluate, full_precision
from kvlab.lab.scores import Continuation, Score
from kvlab.lab.text import cut_windows

__all__ = ["GROUPS", "About", "Plan", "Reader", "Reading"]

GROUPS = ("kvlab", "controls", "hqq", "quanto")
SUBJECTS: dict[str, Callable[[], Subject]] = {"smollm2": load_smollm2, "tiny": tiny_llama}
Reading = tuple[tuple[int, ...], int]
"""Numbers of windows, and the group of caches they are read through."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare.

    Attributes
    ----------
    subject : {"smollm2", "tiny"}
    protocol : Protocol
    windows : int
    budgets : tuple of float
        Of the mixed caches.
    groups : tuple of str
        Of `GROUPS`: kvlab's own caches, controls at equal bytes, quantised caches of transformers.
    device : {"cpu", "cuda"}
        Where model and caches are. Controls need what caches on a GPU do not have.
    """

    subject: str
    protocol: Protocol
    windows: int
    budgets: tuple[float, ...]
    groups: tuple[str, ...] = GROUPS[:1]
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.device != "cpu" and "controls" in self.groups:
            raise NotImplementedError(
                "controls score tokens by functions and choose widths by other allocators, which caches on a "
                "GPU do not take: leave them out (--groups), or read them on the CPU"
            )

    @property
    def settings(self) -> str:
        """What the scores of a window depend on: runs that differ in the rest share a journal."""
        return repr(replace(self, windows=0, groups=(), protocol=replace(self.protocol, rows=1)))

    @property
    def writing_steps(self) -> int:
        """Steps of a continuation, which takes about as long as one cache takes for a window."""
        return self.protocol.length // self.protocol.chunk

    def cases(self, config: Any) -> list[list[Case]]:
        """The caches, for a model of a configuration; those of a group are read and saved together."""
        length = self.protocol.length
        makers = {
            "kvlab": lambda: [*uniform(config), *mixed(config, length, self.budgets)],
            "controls": lambda: controls(config, length, min(self.budgets, key=lambda b: abs(b - 0.2))),
            "hqq": lambda: hqq(config),
            "quanto": lambda: quanto(config),
        }
        return [makers[group]() for group in self.groups]


@dataclass(frozen=True, slots=True)
class About:
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


class Reader:
    """A model with its windows and caches; `tick` is told of every step done."""

    def __init__(self, plan: Plan, tick: Callable[[int], None]) -> None:
        self.plan, self.tick = plan, tick
        self.subject = SUBJECTS[plan.subject]()
        self.subject.model.to(plan.device)
        self.groups = plan.cases(self.subject.model.config)
        self.windows = cut_windows(
            self.subject.text, self.subject.encode, plan.windows, plan.protocol.length + 1
        )

    def describe(self, _: None) -> About:
        names = tuple(tuple(case.name for case in group) for group in self.groups)
        return About(self.windows.starts, self.subject.name, self.subject.text_name, names)

    def read(self, reading: Reading) -> list[Score]:
        numbers, group = reading
        return evaluate(
            self.subject.model,
            self.windows.part(numbers),
            self.groups[group],
            self.plan.protocol,
            progress=lambda name: self.tick(1),
        )

    def write(self, budget: float | None) -> tuple[str, str, Continuation]:
        config, length = self.subject.model.config, self.plan.protocol.length
        case = full_precision(config) if budget is None else mixed(config, length, [budget])[0]
        prompt = self.windows.tokens[-1][: 3 * length // 4].tolist()
        written = continue_text(self.subject, prompt, case.make(), length // 32)
        self.tick(self.plan.writing_steps)
        return case.name, self.subject.decode(prompt[-64:]), written
