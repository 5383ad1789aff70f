"""Lack of memory, on the device and on the host: `OutOfMemory`, and the cache is as it was."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from kvlab.cache import runner
from kvlab.errors import OutOfMemory
from kvlab.new_arrays import overwrite
from tests.allocations import fail_everywhere
from tests.cache.host.cases import HEADS, check_state, draw, make, step
from tests.cache.host.noted import Kernels
from tests.cache.host.test_tight import tight_cache
from tests.cache_contents import failures_of_cache, pages_of

NO_MEMORY = MemoryError("no memory")


class Call:
    """An object of which `fail_everywhere` lets calls of a method fail, in place of its `empty`."""

    def __init__(self, owner: Any, method: str) -> None:
        self.owner, self.method = owner, method

    @property
    def empty(self) -> Any:
        return getattr(self.owner, self.method)

    @empty.setter
    def empty(self, call: Any) -> None:
        setattr(self.owner, self.method, call)


def allocating(executor: Any) -> list[Any]:
    return [executor, *(Call(executor, name) for name in ("to_device", "arena", "copied"))]


def weigh(previous: Any, observed: Any, positions: Any, seqlen: int) -> Any:
    return np.exp2(-(positions % 7.0))


def test_growth_fails_as_a_whole(kernels: Kernels) -> None:
    cache, rng = make(plan_length=256), np.random.default_rng(5)
    step(cache, rng, 100)
    many = draw(rng, cache, 500)
    unchanged = kept(cache)
    assert fail_everywhere(allocating(kernels), NO_MEMORY, lambda: cache.step(0, *many), unchanged) > 0
    cache.step(1, *many)
    check_state(cache, [range(600)] * 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"allocator": "dp"},
        {"residual": 40, "budget": 0.7},
        {"importance": weigh},
        {"importance": weigh, "allocator": "dp"},
    ],
)
def test_at_any_allocation(kernels: Kernels, options: dict[str, Any]) -> None:
    """Steps, appends, growth and other rows: a failed allocation leaves the cache as it was."""
    cache, rng = make(**options), np.random.default_rng(8)
    step(cache, rng, 100)
    new, many = draw(rng, cache, 1), draw(rng, cache, 90)
    found = failures_of_cache(cache, new, many, allocating(kernels), NO_MEMORY)
    assert min(found[2:]) > 0
    assert (cache.batch, cache._device.lengths) == (4, [191, 191])
    check_state(cache, [range(191)] * 4)


def test_where_bytes_are_few(kernels: Kernels) -> None:
    """Plans follow until all bytes are within the budget."""
    cache, rng = tight_cache(300, (2, 4, 8)), np.random.default_rng(2)
    for steps in (100, 137, 33):
        step(cache, rng, steps)
    cache.crop(25)
    for steps in (1, 3, 51):
        new, lengths = draw(rng, cache, steps), cache._device.lengths.copy()
        for layer in range(2):
            unchanged = kept(cache, lengths)
            fail_everywhere(allocating(kernels), NO_MEMORY, lambda: cache.step(layer, *new), unchanged)  # noqa: B023
            lengths[layer] += steps
    check_state(cache, [range(300)] * 2)


def test_of_a_crop_where_bytes_are_few(kernels: Kernels) -> None:
    """It forgets tokens before it plans the others, in memory that it has taken before."""
    cache, rng = tight_cache(2000, (2, 4, 8)), np.random.default_rng(2)
    step(cache, rng, 1990)
    plans = Call(cache._device.kernels, "make_workspace")
    assert fail_everywhere([plans], NO_MEMORY, lambda: cache.crop(40), kept(cache)) > 0
    check_state(cache, [range(1950)] * 2)


ROWS: dict[str, Callable[[Any], Any]] = {
    "repeat": lambda cache: cache.repeat(2),
    "select": lambda cache: cache.select(np.array([1])),
    "deepcopy": deepcopy,
    "growth": lambda cache: cache.step(0, *draw(np.random.default_rng(1), cache, 700)),
}


@pytest.mark.parametrize("what", ROWS)
@pytest.mark.parametrize("options", [{}, {"residual": 40, "budget": 0.7}], ids=["plain", "window"])
def test_of_other_rows(kernels: Kernels, what: str, options: dict[str, Any]) -> None:
    """New memory for rows, or for longer ones."""
    cache, rng = make(**options), np.random.default_rng(9)
    step(cache, rng, 100)
    work, unchanged = ROWS[what], kept(cache)
    assert fail_everywhere(allocating(kernels), NO_MEMORY, lambda: work(cache), unchanged) >= 2
    assert cache.batch == {"repeat": 4, "select": 1}.get(what, 2)


@pytest.mark.parametrize("options", [{}, {"residual": 40, "budget": 0.7}], ids=["plain", "window"])
def test_of_a_file(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """A file is written from all pages of a layer on the host."""
    cache, rng = make(**options), np.random.default_rng(9)
    step(cache, rng, 100)
    unchanged, new = kept(cache), draw(rng, cache, 20)
    with monkeypatch.context() as patch:
        patch.setattr("kvlab.cache.cache.contents_of", no_memory)
        with pytest.raises(OutOfMemory, match="no memory"):
            cache.save("/nowhere")
    unchanged()
    for layer in range(2):
        cache.step(layer, *new)
    check_state(cache, [range(120)] * 2)


def test_of_a_loaded_cache(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    cache, rng = make(), np.random.default_rng(10)
    step(cache, rng, 100)
    cache.save(tmp_path / "cache")
    again = type(cache).load(tmp_path / "cache", device="cuda")
    new = draw(rng, cache, 20)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "fill", no_memory)
        with pytest.raises(OutOfMemory, match="no memory"):
            again.step(0, *new)
    assert again.seqlen == 100
    for layer in range(2):
        again.step(layer, *new)
    check_state(again, [range(120)] * 2)


def test_writing_over_a_tensor() -> None:
    """As on the device, for which the other tests have NumPy: every dtype of tables, one layer of several."""
    torch = pytest.importorskip("torch")
    for dtype in (np.uint8, np.int16, np.int32, np.int64, np.float16):
        table, host = (
            torch.zeros((3, 2, 4), dtype=getattr(torch, np.dtype(dtype).name)),
            np.ones((2, 4), dtype),
        )
        overwrite(table[1], host)
        assert np.array_equal(table.numpy(), np.stack([0 * host, host, 0 * host]))


def no_memory(*args: Any) -> Any:
    raise NO_MEMORY


def kept(cache: Any, lengths: list[int] | None = None) -> Callable[[], None]:
    """A check that a cache holds what it holds now."""
    lengths, batch, before = list(lengths or cache._device.lengths), cache.batch, pages_of(cache)

    def unchanged() -> None:
        assert cache._device.lengths == lengths
        assert cache.batch == cache._device.store.batch == batch
        assert cache._device.store.num_bh == batch * HEADS
        for old, new in zip(before, pages_of(cache), strict=True):
            assert np.array_equal(old.num_pages, new.num_pages)
            assert all(np.array_equal(a, b) for a, b in zip(old.pools, new.pools, strict=True))

    return unchanged
