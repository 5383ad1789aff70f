"""A GPU in host memory, for tests of what the host does around the kernels of a cache.

`install` gives caches with device "cuda" the executor of the CPU. What plans have done is noted, and faults
can be asked for.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.cache import cpu, runner
from kvlab.cache.store import DeviceStore

view = cpu.CPU.view


class Kernels(cpu.CpuExecutor):
    """The executor of the CPU, with notes of what was launched."""

    def __init__(self) -> None:
        self.made: list[cpu.CpuKernels] = []
        self.plans: list[tuple[int, int, int]] = []  # (layer, new tokens, status) of every plan so far
        self.max_new_pages: list[int] = []  # of the next plans, in place of what their workspace has room for
        self.max_query_tokens = 1 << 20
        self.scored: list[list[tuple[int, int]]] = []  # of every launch: (layer, tokens before the step)

    def kernels(self, store: DeviceStore) -> cpu.CpuKernels:  # type: ignore[override]
        self.made.append(_Noted(store, self))
        return self.made[-1]


class _Noted(cpu.CpuKernels):
    def __init__(self, store: DeviceStore, notes: Kernels) -> None:
        super().__init__(store)
        self.notes = notes

    def launch_plan(
        self, first: int, layers: int, workspace: Any, *args: Any, num_new: int = 0, **rules: Any
    ) -> None:
        tables, notes, most = self.store.tables, self.notes, workspace.max_new_pages
        before = tables["status"][first : first + layers].copy()
        tables["status"][first : first + layers] = 0
        workspace.max_new_pages = notes.max_new_pages.pop(0) if notes.max_new_pages else most
        super().launch_plan(first, layers, workspace, *args, num_new=num_new, **rules)
        workspace.max_new_pages = most
        for layer in range(first, first + layers):
            notes.plans.append((layer, num_new, int(tables["status"][layer, 0])))
        tables["status"][first : first + layers] |= before

    def max_query_tokens(self, group: int) -> int:
        return self.notes.max_query_tokens

    def score_stored(self, first: int, scores: Any, lse: Any, *, counted: int, **rest: Any) -> None:
        lengths = self.store.tables["seqlen"][first : first + len(scores)]
        self.notes.scored.append(
            [(first + i, int(x.max(initial=0)) - counted) for i, x in enumerate(lengths)]
        )
        super().score_stored(first, scores, lse, counted=counted, **rest)


def install(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Put host memory in place of the GPU for one test."""
    kernels = Kernels()
    monkeypatch.setitem(runner.EXECUTORS, "cuda", kernels)
    return kernels
