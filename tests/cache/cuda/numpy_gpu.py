"""A GPU in host memory, for tests of what the host does around the kernels of a cache.

`install` puts the kernels of the CPU (`kvlab.cache.cpu`) in place of the launchers, and arrays of NumPy in
place of those of a GPU. What plans have done is noted, and faults can be asked for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.arrays import CudaView, dtype_name, meant_strides
from kvlab.cache import cpu
from kvlab.cache.cuda import (
    calls,
    changes,
    collect,
    exchange,
    function,
    host,
    layers,
    long,
    repeat,
    road,
    state,
    store,
    waiting,
)
from kvlab.cache.cuda import kernels as launchers
from kvlab.cache.cuda.store import STATE, DeviceStore


def view(x: np.ndarray, name: str) -> CudaView:
    like = x if x.size else np.empty([max(n, 1) for n in x.shape], x.dtype)
    # Without an element NumPy's strides are 0, those of GPU arrays are not.
    strides = meant_strides(like.shape, tuple(s // x.itemsize for s in like.strides))
    return CudaView(x.ctypes.data, x.shape, strides, dtype_name(x), 0)


class Kernels:
    """All launchers, by the store whose states or arena they are given."""

    def __init__(self) -> None:
        self.made: list[cpu.CpuKernels] = []
        self.plans: list[tuple[int, int, int]] = []  # (layer, new tokens, status) of every plan so far
        self.most_births: list[int] = []  # of the next plans, in place of what their workspace has room for
        self.most_query_tokens = 1 << 20
        self.scored: list[list[tuple[int, int]]] = []  # of every launch: (layer, tokens before the step)

    view = staticmethod(view)

    def of(self, states: int) -> cpu.CpuKernels:
        for made in reversed(self.made):
            if 0 <= states - made.store.states_pointer < made.store.states.nbytes:
                return made
        raise AssertionError("states of no cache")

    def device_store(self, *args: Any) -> DeviceStore:
        made = DeviceStore(*args)
        self.made.append(cpu.CpuKernels(made))
        return made

    def make_workspace(self, *args: Any) -> cpu.Workspace:
        return self.made[-1].make_workspace(*args)

    def launch_plan(
        self, states: int, first: int, n: int, workspace: Any, *args: Any, steps: int = 0, **rules: Any
    ) -> None:
        found, most = self.of(states), workspace.most_births
        tables = found.store.tables
        before = tables["status"][first : first + n].copy()
        tables["status"][first : first + n] = 0
        workspace.most_births = self.most_births.pop(0) if self.most_births else most
        found.launch_plan(states, first, n, workspace, *args, steps=steps, **rules)
        workspace.most_births = most
        for layer in range(first, first + n):
            self.plans.append((layer, steps, int(tables["status"][layer, 0])))
        tables["status"][first : first + n] |= before

    def write_tokens(self, dim: int, dtype: str, device: int, states: int, *args: Any) -> None:
        self.of(states).write_tokens(dim, dtype, device, states, *args)

    def copy_pages(self, dim: int, dtype: str, device: int, states: int, *args: Any) -> None:
        self.of(states).copy_pages(dim, dtype, device, states, *args)

    def freeze_means(self, dim: int, dtype: str, device: int, state: int, *args: Any, **options: Any) -> None:
        self.of(state).freeze_means(dim, dtype, device, state, *args, **options)

    def append_call(self, state: Any, *args: Any, **options: Any) -> cpu.AppendCall:
        for made in reversed(self.made):
            if any(int(other["arena"]) == int(state["arena"]) for other in made.store.host_states):
                return made.append_call(state, *args, **options)
        raise AssertionError("state of no cache")

    def score_stored(self, states: int, scores: Any, lse: Any, *, counted: int, **rest: Any) -> None:
        found = self.of(states)
        first = (states - found.store.states_pointer) // STATE.itemsize
        lengths = found.store.tables["seqlen"][first : first + len(scores)]
        self.scored.append([(first + i, int(x.max(initial=0)) - counted) for i, x in enumerate(lengths)])
        found.score_stored(states, scores, lse, counted=counted, **rest)


def install(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Put host memory in place of the GPU for one test."""
    kernels = Kernels()
    for module in (store, state, layers, calls, long, road, repeat, waiting):
        monkeypatch.setattr(module, "cuda_view", view)
    for module in (calls, long, state, waiting):
        monkeypatch.setattr(module, "pointer_of", lambda x: x.ctypes.data)
    for module in (store, exchange, changes, function, host, long):
        for name, stand_in in (("to_device", lambda host, like: np.array(host)), ("to_host", np.array)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    for module in (exchange, function, store):
        monkeypatch.setattr(module, "overwrite", np.copyto)
    for module in (layers, long, host, repeat, calls):
        monkeypatch.setattr(module, "current_stream", lambda x: 0)
    for module in (calls, collect, long):
        monkeypatch.setattr(module, "kept_page_bytes", cpu.kept_page_bytes)
    scores = SimpleNamespace(
        score_new=cpu.score_new, score_norms=cpu.score_norms, score_stored=kernels.score_stored
    )
    workspace = SimpleNamespace(partial=np.zeros(1), arrivals=np.zeros(1))
    for module, names in (
        (changes, {"DeviceStore": kernels.device_store, "make_workspace": kernels.make_workspace,
                        "launch_plan": kernels.launch_plan}),
        (long, {"score": scores, "contiguous": lambda x, name: np.ascontiguousarray(x)}),
        (road, {"check_capability": lambda device: (9, 0)}),
        (collect, {"score": scores}),
        (calls, {"AttendCall": cpu.AttendCall, "make_workspace": lambda *args: workspace,
                      "most_query_tokens": lambda pages, group, device: kernels.most_query_tokens}),
        (launchers, {"write_tokens": kernels.write_tokens, "copy_pages": kernels.copy_pages,
                        "freeze_means": kernels.freeze_means, "merge_rows": cpu.merge_rows,
                        "AppendCall": kernels.append_call}),
    ):  # fmt: skip
        for name, stand_in in names.items():
            monkeypatch.setattr(module, name, stand_in)
    return kernels
