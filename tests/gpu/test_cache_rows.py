"""Rows of a cache that take over pages of others: a GPU against the CPU's executor, table by table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.arrays import dtype_name
from kvlab.cache.cpu import CPU
from kvlab.cache.store import DeviceStore, move_rows, reorder_rows
from kvlab.ops.frame import FRAME
from kvlab.ops.layer_state import MOVED
from tests.cache_contents import check_store, contents_of
from tests.gpu.packed_cases import to_torch
from tests.gpu.test_cache import draw, make, step

ROWS = [[3, 2, 1, 0], [0, 0, 1, 2], [1, 1, 1, 1], [2, 0, 0, 3], [0, 1, 2, 3], [3, 3, 0, 0]]
BITS: Any = (2, 3, 4, 8), ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8)
TABLES = (
    "used",
    "slab_count",
    "num_free",
    "slab_slot",
    "num_pages",
    "open",
    "waits",
    *FRAME,
    "query_sums",
    "seqlen",
)


def on_host(store: DeviceStore) -> DeviceStore:
    """A copy of a store in host memory."""
    copy, to_host = object.__new__(DeviceStore), store.executor.to_host
    vars(copy).update(vars(store))
    for name in ("tables", "arenas", "waiting"):
        vars(copy).pop(name, None)
    copy.executor, copy.like = CPU, np.zeros(0, np.uint8)
    for name in ("memory_of_arenas", "_memory_of_tables"):
        setattr(copy, name, np.array(to_host(getattr(store, name))))
    return copy


def compare(store: DeviceStore, host: DeviceStore) -> None:
    found = on_host(store)
    check_store(found)
    for name in TABLES:
        assert np.array_equal(found.tables[name], host.tables[name]), name
    live = np.arange(host.entries) < host.tables["num_pages"][..., None]
    for name in ("rung", "count", "base", "index"):
        assert np.array_equal(found.tables[name][live], host.tables[name][live]), name
    for layer in range(len(host.stores)):
        for r in range(len(host.stores[layer].layouts)):
            used, slabs = int(host.tables["used"][layer, r]), int(host.tables["slab_count"][layer, r])
            for name, n in (("entry_of", used), ("slabs", slabs)):
                assert np.array_equal(found.tables[name][layer, r, :n], host.tables[name][layer, r, :n])


def filled(batch: int = 4, **options: Any) -> Any:
    """A cache some of whose rows still wait for the mean of their keys, if they are to."""
    cache, rng = make(batch=batch, budget=0.4, **{"bits": BITS[0], **options}), np.random.default_rng(3)
    for steps in (40, 30, 300, 7):
        valid = np.ones((batch, steps), bool)
        valid[1::2] = rng.random((len(valid[1::2]), steps)) < 0.1
        step(cache, rng, steps, valid, compared=False)
    store = cache._device.store
    for name, most in (("k_shift", 3), ("query_sums", 1000), ("exponent", 9), ("k_gain", 9)):
        table = rng.integers(name == "k_gain", most, tuple(store.tables[name].shape))
        store.executor.overwrite(store.tables[name], table.astype(dtype_name(store.tables[name])))
    return cache


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_reorder(rows: list[int], bits: Any) -> None:
    cache = filled(bits=bits)
    device, before = cache._device, contents_of(cache)
    device.flush(0)
    host = on_host(device.store)
    reorder_rows(host, CPU.kernels(host), np.array(rows), host.holds_waiting, 0)
    arenas = [arena.data_ptr() for arena in device.store.arenas]
    cache.reorder(np.array(rows))
    assert arenas == [arena.data_ptr() for arena in device.store.arenas]
    compare(device.store, host)
    expected = {
        (layer, i, *rest): token
        for i, taken in enumerate(rows)
        for (layer, row, *rest), token in before.items()
        if row == taken
    }
    assert contents_of(cache) == expected
    assert set(contents_of(cache)) != set(before) or rows == [0, 1, 2, 3]  # rows hold different tokens


@pytest.mark.parametrize("rows", [[1, 3], [0, 0, 1, 1, 2, 2, 3, 3], [2]])
@pytest.mark.parametrize("bits", BITS)
def test_new_memory(rows: list[int], bits: Any) -> None:
    cache = filled(bits=bits)
    old = cache._device.store
    cache._device.flush(0)
    before = on_host(old)
    cache.select(np.array(rows))
    new = cache._device.store
    host = on_host(new)
    for table in host.tables.values():
        table[...] = 0
    host.tables["num_free"][...] = np.array(host.num_slabs)[:, None]
    host.tables["free_slabs"][...] = host.all_slabs()
    host.tables["k_order"][...] = np.arange(host.tables["k_order"].shape[-1])
    assert set(MOVED) < set(host.tables)
    move_rows(before, host, np.array(rows), 0)
    compare(new, host)
    step(cache, np.random.default_rng(0), 3)


def test_a_crop_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of budgets that do not fall; neither do reorder, select and repeat."""
    cache = filled(plan_length=4096)
    cache._device.flush(0)
    monkeypatch.setattr(type(cache._executor), "to_host", None)
    cache.crop(9)
    cache.reorder(np.array([1, 0, 3, 3]))
    cache.select(np.array([3, 0]))
    cache.repeat(2)
    monkeypatch.undo()
    assert cache.seqlen == 368
    q, k, v = draw(np.random.default_rng(1), cache, 2)
    cache.step(0, *map(to_torch, (q, k, v)))
