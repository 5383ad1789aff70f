"""Quality where a cache is used, by named tasks: one configuration beside its opponents.

A task is a way to use a cache: single tokens behind a prompt, chunks, a prompt in parts, questions that come
late, keys with large or shifted channels, text of the cache's own. All caches read the same, and every figure
stands beside the bytes that its cache took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.integrations.rotary import head_dim_of
from kvlab.lab.quality.cases import held
from kvlab.lab.quality.divergence import diverge, floor
from kvlab.lab.quality.measure import Case
from kvlab.lab.quality.model import Subject
from kvlab.lab.quality.plan import SCHEDULES
from kvlab.lab.quality.prompts import KINDS, Haystack
from kvlab.lab.quality.recall import recall
from kvlab.lab.quality.stress import large_channels, shifted_keys
from kvlab.lab.quality.text import Windows, cut_windows
from kvlab.lab.quality.writing import free_run
from kvlab.ladder import BITS, Bits

__all__ = ["TASKS", "run_tasks"]

OUTLIERS = {"outliers": (6.0, 11.0), "large-outliers": (45.0, 45.0)}
"""Factors of two rotary pairs, near the end and near the beginning of a head; no powers of 2."""
STRESSES = {
    f"{name}{where}": (factors, where)
    for name, factors in OUTLIERS.items()
    for where in ("", "-late", "-short")
}
"""By task: factors, and whether they begin with the text, behind the prompt, or behind a first call."""
SHIFT = 100.0
TASKS = (*SCHEDULES, *KINDS, *STRESSES, "shifted", "equal-bytes", "free", "floor")
Figures = dict[str, dict[str, Any]]


def run_tasks(
    subject: Subject,
    cases: Sequence[Case],
    tasks: Sequence[str],
    *,
    length: int = 1024,
    scored: int = 256,
    windows: int = 4,
    bits: Bits = BITS,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Figures]:
    """Measure caches by some of `TASKS`; figures by task, then by cache.

    A prompt, or a text that is asked about, has `length` tokens, and `scored` stand behind it, in so many
    windows. `bits` are the widths of caches that "equal-bytes" sets beside opponents. `progress` is told the
    name of a cache after each of its texts. Unknown tasks and a text that is too short are ValueErrors.

    Examples
    --------
    >>> from kvlab.lab.quality.cases import held
    >>> from kvlab.lab.quality.model import tiny_llama
    >>> subject = tiny_llama()
    >>> cases = held(subject.model.config, [0.5])
    >>> found = run_tasks(subject, cases, ["single"], length=64, scored=8, windows=1)
    >>> 0 < found["single"]["held 0.5"]["kl"] < 1
    True
    """
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"tasks: {', '.join(unknown)} not known; supported are {', '.join(TASKS)}")
    texts = cut_windows(subject.text, subject.encode, windows, length + scored + 1)
    run = _Run(subject, cases, length, scored, texts, progress)
    for name in KINDS.keys() & set(tasks):  # a text that is too short is refused before anything is read
        run.haystacks(name)
    return {task: run.task(task, bits) for task in tasks}


class _Run:
    def __init__(
        self,
        subject: Subject,
        cases: Sequence[Case],
        length: int,
        scored: int,
        texts: Windows,
        progress: Callable[[str], None],
    ) -> None:
        self.subject, self.cases, self.texts = subject, cases, texts
        self.length, self.scored, self.progress = length, scored, progress

    def task(self, name: str, bits: Bits) -> Figures:
        if name in KINDS:
            return self.questions(name)
        if name == "free":
            return self.free()
        if name == "shifted":
            channels = self.channels()
            with shifted_keys(self.subject.model, [channels // 2 - 2, channels - 2], SHIFT):
                return self.divergence("single")
        if name in STRESSES:
            factors, where = STRESSES[name]
            schedule = "short" if where == "-short" else "single"
            begin = {"": 0, "-late": self.length, "-short": SCHEDULES[schedule].first}[where]
            rotary = (self.channels() // 2 - 3, self.channels() // 16)
            changes = dict(zip(rotary, factors, strict=True))
            with large_channels(self.subject.model, changes, begin=begin):
                return self.divergence(schedule)
        if name == "equal-bytes":
            return self.equal_bytes(bits)
        return self.divergence(name)

    def equal_bytes(self, bits: Bits) -> Figures:
        """Single tokens through every opponent, and through a held budget of the bytes that it took."""
        rivals = [case for case in self.cases if case.kind == "opponent"]
        found = self.divergence("single", rivals)
        budgets = [found[case.name]["bits_last"] / 16 for case in rivals]
        own = zip(held(self.subject.model.config, budgets, bits=bits), rivals, strict=True)
        equal = [replace(case, name=f"held, bytes of {rival.name}") for case, rival in own]
        return found | self.divergence("single", equal)

    def channels(self) -> int:
        return head_dim_of(self.subject.model.config)

    def divergence(self, name: str, cases: Sequence[Case] = ()) -> Figures:
        schedule = replace(SCHEDULES.get(name, SCHEDULES["single"]), prefill=self.length, scored=self.scored)
        if name == "floor":
            lowest = floor(self.subject.model, self.texts, schedule)
            return {lowest.name: lowest.summary()}
        cases = cases or self.cases
        found = diverge(self.subject.model, self.texts, cases, schedule, progress=self.progress)
        return {divergence.name: divergence.summary() for divergence in found}

    def questions(self, name: str) -> Figures:
        haystacks = self.haystacks(name)
        full, *found = recall(self.subject.model, haystacks, self.cases, progress=self.progress)
        return {
            answers.name: answers.summary(full) | {"by_depth": answers.by_depth(full)}
            for answers in (full, *found)
        }

    def haystacks(self, name: str) -> list[Haystack]:
        return [
            KINDS[name](self.subject.text[start:], self.subject.encode, self.length, seed=number)
            for number, start in enumerate(self.texts.starts)
        ]

    def free(self) -> Figures:
        figures: Figures = {}
        for case in self.cases:
            runs = []
            for row in self.texts.tokens:
                runs.append(free_run(self.subject.model, row[: self.length].tolist(), case, self.scored))
                self.progress(case.name)
            figures[case.name] = {
                "tokens_until_divergence": float(np.mean([run.until for run in runs])),
                "kl_along_own_text": float(np.mean([run.kl for run in runs])),
            }
        return figures
