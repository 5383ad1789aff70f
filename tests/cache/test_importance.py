"""Which tokens keep their width: important ones, and those that the options protect."""

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.allocator import METHODS
from tests.cache.plain_model import HEADS, LAYERS, check, make, tokens
from tests.cache_contents import tokens_in


def test_important_tokens_keep_their_width():
    """Tokens that every query attends must end up above tokens that none does."""
    cache, rng = make(budget=0.3, sink=0, recent=0, floor=0), np.random.default_rng(6)
    q, k, v = tokens(rng, 1, 256)
    k[0, 100:140] = 4 * np.abs(k[0, 100:140])
    q = np.abs(q)
    for start in range(0, 256, 64):
        part = slice(start, start + 64)
        cache.step(0, q[:, part], k[:, part], v[:, part])
    listed = tokens_in(cache.pages(0), 0)
    wanted = (listed.position >= 100) & (listed.position < 140)
    assert listed.rung[wanted].mean() > listed.rung[~wanted].mean() + 0.5


def test_a_floor_keeps_tokens_readable_that_nobody_attends():
    """Bytes that would go to tokens with all the attention go to the others instead."""
    lowest = []
    for floor in (0, 1, 1000):
        cache, rng = make(budget=0.3, sink=0, recent=0, floor=floor), np.random.default_rng(6)
        q, k, v = tokens(rng, 1, 256)
        k[0, 100:140] = 4 * np.abs(k[0, 100:140])
        for start in range(0, 256, 64):
            part = slice(start, start + 64)
            cache.step(0, np.abs(q[:, part]), k[:, part], v[:, part])
        lowest.append(int((tokens_in(cache.pages(0), 0).rung == 0).sum()))
    assert lowest[0] > lowest[1] >= lowest[2]
    with pytest.raises(ValueError, match="floor"):
        make(floor=-1)


def test_user_importance_is_called():
    seen = []

    def newest(previous, mass, positions, seqlen):
        seen.append((previous is None, mass.shape == positions.shape))
        return positions.astype(np.float32)

    cache, rng = make(importance=newest), np.random.default_rng(7)
    for n in (100, 64):
        cache.step(0, *tokens(rng, 1, n))
    assert {first for first, _ in seen} == {True, False}
    assert all(fits for _, fits in seen)


@pytest.mark.parametrize(
    "scores", [lambda mass: -mass - 1, lambda mass: mass * np.nan, lambda mass: mass[:1], lambda mass: "a"]
)
def test_what_a_user_importance_gives_is_checked(scores):
    cache, rng = (
        make(importance=lambda previous, mass, positions, seqlen: scores(mass)),
        np.random.default_rng(7),
    )
    with pytest.raises(ValueError, match="importance: the function"):
        cache.step(0, *tokens(rng, 1, 100))
    assert cache.seqlen == 0


@pytest.mark.parametrize("allocator", METHODS)
@pytest.mark.parametrize(
    ("head_dim", "bits", "budget", "worse"),
    [
        (16, "default", 0.5, ("2", "k3v2")),
        (16, (2, 3, 4, 8), "tight", ("2", "3")),
        (32, (2, 3, 4, 8), 0.35, ("3",)),
        (48, (0, 2, 3, 4, 8), 0.3, ("3",)),
        (64, ("k8882v2", "k8884v2", 8), 0.5, ("k8882v2",)),
    ],
)
def test_no_page_is_at_a_rung_of_the_bytes_of_a_higher_one(allocator, head_dim, bits, budget, worse):
    """Words of pages are shared by tiles, so pages of few channels take the same bytes at several widths."""
    if budget == "tight":
        free = MixedPrecisionCache(1, 2, 1, head_dim, budget=None, bits=bits)
        budget = free.smallest_nbytes(230)
    cache = MixedPrecisionCache(
        1, 2, 1, head_dim, budget=budget, bits=bits, allocator=allocator, plan_length=230
    )
    rng = np.random.default_rng(0)
    for length in (200, 20, *[1] * 10):
        q, k, v = (rng.normal(size=(1, length, n, head_dim)).astype(np.float16) for n in (2, 1, 1))
        cache.step(0, q, k, v)
    cache.crop(40)
    pages = {name: n.sum() for name, n in cache.allocation().items()}
    assert sum(pages.values()) > 0
    assert not any(pages[name] for name in worse)


def test_eviction_only_where_0_is_listed():
    rng = np.random.default_rng(8)
    cache = make(bits=(0, 4, 8), budget=8_000 * LAYERS)
    for _ in range(6):
        cache.step(0, *tokens(rng, 1, 64))
        check(cache)
    assert 0 < len(tokens_in(cache.pages(0), 0).head) < 6 * 64 * HEADS
