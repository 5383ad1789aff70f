"""A cache on a CPU and one whose plans the oracle makes, told the same random calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from kvlab.cache import cpu, runner
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.cpu.layer import array_at
from kvlab.ops.layer_state import UNIT
from kvlab.reference.cache_layer import Layer, Rung, Tokens
from kvlab.reference.cache_plan import plan
from tests.planner_simulation import CHOICES
from tests.twins import Twins, assert_same


class OraclesKernels(cpu.CpuKernels):
    """Kernels of a CPU, but for plans."""

    def launch_plan(
        self, first: int, layers: int, workspace: Any, ladder: Any, stream: int, *, codes: int = 0,
        valid: int = 0, positions: int = 0, num_new: int = 0, first_position: int = 0,
        allocator: str = "greedy", **rules: Any,
    ) -> None:  # fmt: skip
        store, rules["max_new_pages"] = self.store, workspace.max_new_pages
        for name in ("cropped", "rewind"):
            rules.pop(name, None)
        workspace.moves, workspace.copies = [], []
        for number in range(first, first + layers):
            t, new = self.layers[number].planned, None
            length = int(store.tables["seqlen"][number].max(initial=0))
            if num_new:
                mask = np.ones((store.batch, num_new), bool)
                if valid:
                    mask = array_at(valid, mask.shape, "bool")
                num_bh = store.batch * store.heads
                at = array_at(positions, mask.shape, "int32") if positions else None
                new = Tokens(array_at(codes, (num_bh, num_new), "uint8"), mask, first_position, at)
            n, tables = len(t.rungs), t[1:8]
            layer = Layer(
                store.batch, store.heads, tuple(Rung(*map(int, rung)) for rung in t.rungs),
                store.stores[number].evicts, store.slab[number] // UNIT, *tables, t.used[:n],
                t.slab_count[:n], t.slabs[:n], t.free_slabs, int(t.num_free[0]), t.entry_of[:n], t.slab_slot,
                length, t.budget, t.waits,
            )  # fmt: skip
            reach = store.reach(number)
            change = plan(layer, ladder, new, choose=CHOICES[allocator], reach=reach, **rules)
            t.num_free[0] = layer.num_free
            t.status[0] |= change.status
            phases = [
                [(a, b, c | d << 8 | e << 16 | f << 24, g) for a, b, c, d, e, f, g in part]
                for part in change.phases
            ]
            workspace.moves.append([np.array(x, np.uint32).reshape(-1, 4) for x in phases])
            workspace.copies.append(np.array(change.copies, np.uint32).reshape(-1, 3))


class Oracle(cpu.CpuExecutor):
    kernels = OraclesKernels


class ByTheOracle(Twins):
    head_dims = (64,)

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setitem(runner.EXECUTORS, "cuda", Oracle())

    def teardown(self) -> None:
        self.patch.undo()


TestTwins = ByTheOracle.TestCase
TestTwins.settings = settings(max_examples=10, stateful_step_count=10, deadline=None, phases=[Phase.generate])


def test_another_importance_is_seen() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, heads, 64), dtype=np.float32) for heads in (4, 2, 2))
    caches = [
        MixedPrecisionCache(1, 4, 2, 64, budget=0.4, plan_length=300, importance=importance)
        for importance in ("key_norm", "uniform")
    ]
    for cache in caches:
        cache.step(0, q, k, v)
    with pytest.raises(AssertionError):
        assert_same(*caches)
