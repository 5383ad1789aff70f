"""What kernels are told of a store: addresses of every table and arena, also after a copy."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache.cpu import CPU
from kvlab.cache.ladder import LayerFormat, parse_bits
from kvlab.cache.store import DeviceStore

HOLDS = [True, False, True]


def make() -> DeviceStore:
    """Layers of three ladders, of which one has a sliding window and another no pages of tokens that wait."""
    stores = [LayerFormat(ladder, 2, 32, "float16") for ladder in parse_bits("0:2+4,1:16,2:3+8", 3)]
    return DeviceStore(
        stores, 3, CPU, np.zeros(0, np.uint8), 900, [30_000, 60_000, 50_000],
        takes_mean=HOLDS, holds_waiting=HOLDS, sliding_windows=[0, 0, 100], rewind=5,
    )  # fmt: skip


@pytest.mark.parametrize("copied", [False, True])
def test_states_name_the_memory(copied: bool) -> None:
    first = make()
    seen = first.tables, first.arenas  # views of the first store, which are not those of its copy
    assert all(len(x) for x in seen)
    store = first.copy() if copied else first
    for layer, state in enumerate(store.host_states):
        for name, table in store.tables.items():
            assert state[name] == table[layer].ctypes.data, name
        arena = store.arenas[layer]
        assert state["arena"] == arena.ctypes.data
        waiting = store.waiting[layer]
        assert (waiting is not None) == HOLDS[layer]
        assert state["waiting"] == (0 if waiting is None else waiting.ctypes.data)
        rungs = state["rungs"][: int(state["num_rungs"]) + 1]
        layouts = [*store.stores[layer].layouts, store.widest]
        assert [int(x) * 16 for x in rungs["record"]] == [layout.nbytes for layout in layouts]
        slabs = int(state["slab_units"]) * 16 * store.num_slabs[layer]
        assert len(arena) == slabs + (0 if waiting is None else len(waiting))
    assert np.array_equal(store.states, store.host_states.view(np.uint8))


def test_an_empty_store() -> None:
    store = make()
    for table in store.tables.values():
        table[...] = 7
    store.clear()
    tables = {**store.tables}
    assert (tables.pop("waits") == np.array(HOLDS)[:, None]).all()
    assert (tables.pop("open") == -1).all()
    free, numbers = tables.pop("free_slabs"), tables.pop("num_free")[:, 0].tolist()
    assert numbers == store.num_slabs
    for layer, n in enumerate(numbers):
        assert free[layer, :n].tolist() == [*range(n)][::-1]
    assert not any(table.any() for table in tables.values())
    assert not store.memory_of_arenas.any()
