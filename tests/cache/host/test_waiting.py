"""Rows whose tokens wait for the mean of their keys on a GPU; test_splitting.py has prompts in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.frame import LAST, key_mean
from tests.cache.host.cases import DIM, HEADS, LAYERS, check_state, draw, make, step
from tests.cache.host.noted import Kernels


def means(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have a mean, (layers, batch), and the means, (layers, batch, heads, head_dim)."""
    tables = cache._device.store.tables
    return tables["waits"] == 0, tables["k_mean"].copy()


def fed(cache: Any, tokens: list[np.ndarray], valid: np.ndarray, parts: list[int]) -> None:
    """Step all layers in parts; only parts with padding have a mask."""
    for steps in parts:
        part = slice(cache.seqlen, cache.seqlen + steps)
        mask = None if valid[:, part].all() else np.ascontiguousarray(valid[:, part])
        for layer in range(LAYERS):
            cache.step(layer, *(x[:, part] for x in tokens), valid=mask)
        waiting = cache._device.waiting
        assert waiting.modes() == tuple(map(waiting.mode, range(LAYERS)))
        assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)


@pytest.mark.parametrize("parts", [[100, *[1] * 50], [100, 40, 10], [16] * 9 + [6]])
def test_rows_of_unequal_length(kernels: Kernels, parts: list[int]) -> None:
    """A short row waits while a long one has its mean, and gets the mean of its own first tokens."""
    cache, rng = make(), np.random.default_rng(0)
    tokens, valid = draw(rng, cache, 150), np.ones((2, 150), bool)
    valid[1, :80] = False
    fed(cache, tokens, valid, parts[:-1] if len(parts) == 3 else [n for n in parts if n > 1])
    rest = 150 - cache.seqlen
    if rest != 10:
        assert means(cache)[0].tolist() == [[True, rest < 50]] * LAYERS
    fed(cache, tokens, valid, parts[-1:] * (rest // parts[-1]))
    step(cache, rng, 1)
    has_mean, found = means(cache)
    assert has_mean.all()
    keys = [tokens[1][row][valid[row]].astype(np.float32)[:LAST] for row in range(2)]
    assert np.array_equal(found, [[key_mean(k) for k in keys]] * LAYERS)
    assert found[0, 0].any()
    check_state(cache, [range(151), range(80, 151)])
    assert cache._device.waiting.modes() == ("none",) * LAYERS


def test_a_mask_that_the_host_does_not_read(kernels: Kernels) -> None:
    """Padding between tokens of short steps: only the device knows when a row has enough."""
    cache, rng = make(), np.random.default_rng(1)
    tokens = draw(rng, cache, 130)
    valid = rng.random((2, 130)) < [[0.9], [0.5]]
    fed(cache, tokens, valid, [5] * 26)
    step(cache, rng, 1)
    has_mean, found = means(cache)
    assert has_mean[:, 0].all()
    keys = tokens[1][0][valid[0]].astype(np.float32)[:LAST]
    assert np.array_equal(found[:, 0], [key_mean(keys)] * LAYERS)
    check_state(cache, [[*np.flatnonzero(row), 130] for row in valid])


def test_waiting_tokens_are_counted_and_exact(kernels: Kernels) -> None:
    cache, rng = make(batch=1), np.random.default_rng(2)
    step(cache, rng, 40)
    device = cache._device
    head = 5 * (device.store.widest.nbytes + 8) + 4 * DIM  # pages and sums of queries
    assert cache.nbytes == LAYERS * HEADS * (head + 6 + 5 * DIM // 2)
    assert sum(int(pages.sum()) for pages in cache.allocation().values()) == 0
    step(cache, rng, 30)
    assert sum(int(pages.sum()) for pages in cache.allocation().values()) > 0
    assert cache.nbytes < LAYERS * HEADS * head


def test_graphs_tell_waiting_steps_from_others(kernels: Kernels) -> None:
    cache, rng = make(batch=1), np.random.default_rng(3)
    step(cache, rng, 1)
    kinds: dict[Any, list[int]] = {}
    while cache.seqlen < 100:
        key = cache.prepare()
        kinds.setdefault(key[3], []).append(cache.seqlen)
        q, k, v = draw(rng, cache, 1)
        with cache.recording():
            for layer in range(LAYERS):
                cache.step(layer, q, k, v)
        cache.replayed()
    assert kinds == {("all",) * LAYERS: [*range(1, LAST)], ("none",) * LAYERS: [*range(LAST, 100)]}
    assert means(cache)[0].all()
    check_state(cache, [range(100)])


@pytest.mark.parametrize("options", [{}, {"allocator": "dp"}, {"residual": 5, "budget": 1.2}])
def test_rare_operations_while_rows_wait(kernels: Kernels, options: dict[str, Any], tmp_path: Any) -> None:
    """Crops, other rows and files, of a CPU's cache, too, keep what waits; the mean is that of all tokens."""
    cache, rng = make(**options), np.random.default_rng(4)
    tokens = draw(rng, cache, 90)
    valid = np.ones((2, 90), bool)
    fed(cache, tokens, valid, [30, 10])
    cache.crop(7)
    cache.reorder(np.array([1, 0]))
    cache.save(tmp_path / "cache")
    tokens = [x[::-1].copy() for x in tokens]
    wanted = [key_mean(k.astype(np.float32)[:LAST]) for k in tokens[1]]
    for device in ("cuda", "cpu"):
        again = MixedPrecisionCache.load(tmp_path / "cache", device=device)
        assert not means(again)[0].any()
        fed(again, tokens, valid, [7, 20, 30])
        assert np.array_equal(means(again)[1], [wanted] * LAYERS)
    cache.repeat(2)
    step(cache, rng, 3)
    check_state(cache, [range(36)] * 4)


def test_bytes_too_few_to_wait(kernels: Kernels) -> None:
    """The first call gives the mean, as far as it has tokens; what a CPU's cache lets wait is packed."""
    cache, rng = make(batch=1, budget=60_000, bits=(2, 8), plan_length=64), np.random.default_rng(5)
    tokens = draw(rng, cache, 40)
    fed(cache, tokens, np.ones((1, 40), bool), [30, 10])
    has_mean, found = means(cache)
    assert has_mean.all()
    assert np.array_equal(found, [[key_mean(tokens[1][0].astype(np.float32)[:30])]] * LAYERS)
    check_state(cache, [range(40)])


def test_bytes_of_five_exact_pages_are_enough_to_wait(kernels: Kernels) -> None:
    """A short first call then gives no mean: that is taken of the first 64 tokens."""
    cache, rng = make(batch=1, budget=90_000, bits=(2, 8), plan_length=64), np.random.default_rng(5)
    tokens = draw(rng, cache, 90)
    fed(cache, tokens, np.ones((1, 90), bool), [10])
    assert not means(cache)[0].any()
    fed(cache, tokens, np.ones((1, 90), bool), [80])
    wanted = key_mean(tokens[1][0].astype(np.float32)[:LAST])
    assert np.array_equal(means(cache)[1], [[wanted]] * LAYERS)
    check_state(cache, [range(90)])


@pytest.mark.parametrize("steps", [1, 16, 17, 40])
def test_queries_of_padding_give_0(kernels: Kernels, steps: int) -> None:
    """Whatever stands before them, waiting or packed."""
    for stored in (0, 20, 100):
        cache, rng = make(), np.random.default_rng(6)
        if stored:
            step(cache, rng, stored)
        valid = rng.random((2, steps)) < 0.5
        valid[0, 0] = False
        q, k, v = draw(rng, cache, steps)
        q[~valid] = np.nan
        out = cache.step(0, q, k, v, valid=valid)
        assert not out[~valid].any()
        assert np.isfinite(out).all()
        if stored:
            assert out[valid].any(axis=(1, 2)).all()
