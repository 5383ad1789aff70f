"""A prefill's kernel, byte for byte against the page format in NumPy, as test_cache_kernels.py does it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvlab.new_arrays import to_device
from kvlab.ops.cuda import pages as kernels
from kvlab.ops.layer_state import UNIT
from tests.gpu.packed_cases import DTYPES, to_numpy
from tests.gpu.test_cache_kernels import (
    BATCH,
    HEADS,
    MIXED,
    NEW,
    PAGE,
    PROFILES,
    Record,
    device_store,
    draw_vectors,
    few_warps,
    frames_of,
    run_moves,
)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "bits"),
    [
        *product([64, 80, 96, 128, 256], [*MIXED, "2", "3,4"]),
        *product([64, 128, 256], [*PROFILES, "k8422v2"]),
    ],
)
def test_prefill(monkeypatch: pytest.MonkeyPatch, bits: str, head_dim: int, dtype: str) -> None:
    """Pages of some slots and of all, in any order, hold the bytes that NumPy gives; others stay."""
    device = device_store(bits, head_dim, dtype)
    layouts, rng = device.stores[0].layouts, np.random.default_rng(len(bits))
    steps, rungs = 130, len(device.stores[0].layouts)
    shape, odd = (BATCH, steps, HEADS, head_dim), dtype == "float16"
    k, v = draw_vectors(rng, shape, dtype, odd), draw_vectors(rng, shape, dtype, not odd)
    importance = rng.integers(0, 256, (BATCH * HEADS, steps), np.uint8)
    mean = to_numpy(device.tables["k_mean"])[0].reshape(-1, head_dim)
    mean[1] *= 100
    mean[2] = 0
    device.tables["k_mean"][...] = to_device(mean.reshape(1, BATCH, HEADS, head_dim), device.like)
    frames = frames_of(device, head_dim)
    before, slab = to_numpy(device.arenas[0]), device.slab[0] // UNIT
    after, rows, used = before.copy(), [], dict[tuple[int, int], list[int]]()
    for s in range(12):
        r = s % rungs
        for p in range(min(3, device.slab[0] // layouts[r].nbytes)):
            to, pair = s * slab + p * layouts[r].nbytes // UNIT, int(rng.integers(BATCH * HEADS))
            row, head = divmod(pair, HEADS)
            slots = rng.choice(PAGE, rng.choice([PAGE, rng.integers(1, PAGE)]), replace=False)
            record = Record(after, to, layouts[r])
            used[to, r] = slots.tolist()
            for slot, step in zip(slots, rng.choice(steps, len(slots), replace=False), strict=True):
                rows.append((pair, to, 0, slot, NEW, r, row * steps + step))
                raw = {"k": k[row, step, head].astype(np.float32), "v": v[row, step, head].astype(np.float32)}
                record.write(slot, raw, frames[pair], dtype)
                position, code = record.tail(slot)
                record.bytes[position] = np.array([step], np.uint16).view(np.uint8)
                record.bytes[code] = importance[pair, step]
    monkeypatch.setattr(kernels, "_MANY_PAGES", 1)
    few_warps(monkeypatch)
    taken, kernel = [], kernels._kernel
    monkeypatch.setattr(
        kernels,
        "_kernel",
        lambda source, *args, **options: taken.append(source) or kernel(source, *args, **options),
    )
    run_moves(device, rows, k, v, importance, steps, 0)
    assert taken == ["pages/prefill"], "another kernel was taken"
    got = to_numpy(device.arenas[0])
    for (to, r), slots in used.items():  # pages are new, so they are written whole
        Record(after, to, layouts[r]).take_unused(Record(got, to, layouts[r]), slots)
    wrong = np.flatnonzero(got != after)
    assert len(wrong) == 0, f"{len(wrong)} bytes differ, the first at {wrong[:5]}"
    assert (got != before).any()
    assert (to_numpy(device.tables["seqlen"]) == steps).all()
