"""One process of a comparison: a model reads its windows through caches, and continues a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvlab.lab.quality.cases import controls, hqq, mixed, quanto, uniform
from kvlab.lab.quality.measure import Case, evaluate, full_precision
from kvlab.lab.quality.model import Subject, load_smollm2, tiny_llama
from kvlab.lab.quality.plan import Plan, WorkItem, Workload
from kvlab.lab.quality.scores import Continuation, Score
from kvlab.lab.quality.text import cut_windows
from kvlab.lab.quality.writing import continue_text

__all__ = ["Reader"]

SUBJECTS: dict[str, Callable[[], Subject]] = {"smollm2": load_smollm2, "tiny": tiny_llama}


class Reader:
    """A model with its windows and caches; `tick` is called after every step."""

    def __init__(self, plan: Plan, tick: Callable[[int], None]) -> None:
        self.plan, self.tick = plan, tick
        self.subject = SUBJECTS[plan.subject]()
        self.subject.model.to(plan.device)
        self.groups = _cases(plan, self.subject.model.config)
        self.windows = cut_windows(
            self.subject.text, self.subject.encode, plan.windows, plan.protocol.length + 1
        )

    def describe(self, _: None) -> Workload:
        names = tuple(tuple(case.name for case in group) for group in self.groups)
        return Workload(self.windows.starts, self.subject.name, self.subject.text_name, names)

    def read(self, item: WorkItem) -> list[Score]:
        numbers, group = item
        return evaluate(
            self.subject.model,
            self.windows.part(numbers),
            self.groups[group],
            self.plan.protocol,
            progress=lambda name: self.tick(1),
        )

    def race(self, _: None) -> dict[str, tuple[float, float]]:
        """Tokens a second on this device and on the CPU, by tokens that are read; of the largest budget."""
        from kvlab.lab.quality.replay import speeds

        protocol, config = self.plan.protocol, self.subject.model.config
        case = mixed(config, protocol.length, [max(self.plan.budgets)])[0]
        lengths = [protocol.length // 4, protocol.length // 2, protocol.length - protocol.chunk]
        tokens = torch.from_numpy(self.windows.tokens[:1])
        found = speeds(self.subject.model, tokens, case, protocol.chunk, lengths)
        return {str(length): rates for length, rates in found.items()}

    def write(self, budget: float | None) -> tuple[str, str, Continuation]:
        """Continue the beginning of the last window; name of the cache, end of the prompt, what it wrote."""
        config, length = self.subject.model.config, self.plan.protocol.length
        count = length // 32
        prompt = self.windows.tokens[-1][: length // 2 - count].tolist()
        case = full_precision(config) if budget is None else mixed(config, length // 2, [budget])[0]
        written = continue_text(self.subject, prompt, case.make(), count)
        self.tick(self.plan.continuation_chunks)
        return case.name, self.subject.decode(prompt[-64:]), written


def _cases(plan: Plan, config: Any) -> list[list[Case]]:
    """The caches, for a model of a configuration; those of a group are read and saved together."""
    length = plan.protocol.length
    makers = {
        "kvlab": lambda: [*uniform(config), *mixed(config, length, plan.budgets)],
        "controls": lambda: controls(config, length, min(plan.budgets, key=lambda b: abs(b - 0.2))),
        "hqq": lambda: hqq(config),
        "quanto": lambda: quanto(config),
    }
    return [makers[group]() for group in plan.groups]
