"""What kernels are told of a store: addresses of every table and arena, also after a copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvlab.cache.cpu import CPU
from kvlab.cache.cuda import _copied_rows
from kvlab.cache.layers import Layer, LayerFormat
from kvlab.cache.store import DeviceStore, RowMove
from kvlab.ladder import parse_bits

HOLDS = [True, False, True]


def make(bits: str = "0:2+4,1:16,2:3+8") -> DeviceStore:
    """Layers of three ladders, of which one has a sliding window and another no pages of tokens that wait."""
    stores = [LayerFormat(ladder, 2, 64, "float16") for ladder in parse_bits(bits, 3)]
    layers = [Layer(store, 0, "mass", window) for store, window in zip(stores, [0, 0, 100], strict=True)]
    return DeviceStore(layers, 3, CPU, np.zeros(0, np.uint8), 900, [30_000, 60_000, 50_000], HOLDS, rewind=5)


BLOCKS = "0:k4220v2+k8422v4,1:16,2:3+8"


@pytest.mark.parametrize("bits", ["0:2+4,1:16,2:3+8", BLOCKS])
@pytest.mark.parametrize("copied", [False, True])
def test_states_name_the_memory(bits: str, copied: bool) -> None:
    first = make(bits)
    seen = first.tables, first.arenas  # views of the first store, which are not those of its copy
    assert all(len(x) for x in seen)
    store = first.copy() if copied else first
    for layer, state in enumerate(store.host_states):
        for name, table in store.tables.items():
            assert state[name] == table[layer].ctypes.data or not table.size, name
        arena = store.arenas[layer]
        assert state["arena"] == arena.ctypes.data
        waiting = store.waiting[layer]
        assert (waiting is not None) == HOLDS[layer]
        assert state["waiting"] == (0 if waiting is None else waiting.ctypes.data)
        rungs = state["rungs"][: int(state["num_rungs"]) + 1]
        layouts = [*store.stores[layer].layouts, store.widest]
        assert [int(x) * 16 for x in rungs["record"]] == [layout.nbytes for layout in layouts]
        assert [(int(x["bits_k"]), int(x["bits_v"])) for x in rungs] == [
            (0x4220, 2) if x.bits_k == (4, 2, 2, 0) else (0x8422, 4) if x.in_blocks else (x.bits_k, x.bits_v)
            for x in layouts
        ]
        slabs = int(state["slab_units"]) * 16 * store.num_slabs[layer]
        assert len(arena) == slabs + (0 if waiting is None else len(waiting))
    assert np.array_equal(store.states, store.host_states.view(np.uint8))


@pytest.mark.parametrize("bits", ["0:2+4,1:16,2:3+8", BLOCKS])
def test_an_empty_store(bits: str) -> None:
    store = make(bits)
    for table in store.tables.values():
        table[...] = 7
    store.clear()
    tables = {**store.tables}
    assert (tables.pop("waits") == np.array(HOLDS)[:, None]).all()
    assert (tables.pop("open") == -1).all()
    free, numbers = tables.pop("free_slabs"), tables.pop("num_free")[:, 0].tolist()
    assert tuple(numbers) == store.num_slabs
    for layer, n in enumerate(numbers):
        assert free[layer, :n].tolist() == [*range(n)][::-1]
    assert (tables.pop("k_order") == np.arange(32 * (bits == BLOCKS))).all()
    assert (tables.pop("k_gain") == 1).all()
    del tables["entry_of"]  # of pages that are used: of none
    assert not any(table.any() for table in tables.values())
    assert not store.memory_of_arenas.any()


def test_neighbours_that_get_the_same_pages_are_copied_once() -> None:
    rows, origins = np.array([2, 2, 2, 0, 1, 1], np.int32), np.array([-1, 0, 0, -1, -1, 4], np.int32)
    move = RowMove(make(), rows, origins, np.zeros(3, np.int32), in_place=True)
    assert _copied_rows(move).tolist() == [0, 3, 6, 8, 10]
    assert _copied_rows(replace(move, origins=rows)).tolist() == [1, 4, 6, 9]
