"""Rows of a cache: batch mates, padding, other rows, and rows that are cropped."""

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError
from tests.cache.plain_model import HEADS, LAYERS, check, make, tokens
from tests.cache_contents import tokens_in


def test_batch_mates_and_padding_change_nothing():
    rng = np.random.default_rng(3)
    alone, among = make(budget=0.4), make(budget=0.4, batch=2)
    for n, left in ((200, 30), (64, 0), (1, 0), (64, 0)):
        q, k, v = tokens(rng, 2, n)
        valid = np.ones((2, n), bool)
        valid[1, :left] = False
        for layer in range(LAYERS):
            one = alone.step(layer, *(x[:1] for x in (q, k, v)))
            both = among.step(layer, q, k, v, valid=valid)
            np.testing.assert_allclose(one, both[:1], atol=1e-6)
    for name, pages in alone.allocation().items():
        np.testing.assert_array_equal(pages[:, 0], among.allocation()[name][:, 0])


@pytest.mark.parametrize("chunk", [1, 20, 90])
def test_queries_of_padding_are_not_looked_at(chunk):
    held = []
    for query in (0, 30, np.nan):
        cache, rng = make(budget=0.3, batch=2, bits=(2, 8), realloc_every=1), np.random.default_rng(0)
        cache.step(0, *tokens(rng, 2, 120))
        q, k, v = tokens(rng, 2, chunk)
        valid = np.ones((2, chunk), bool)
        valid[0, -3:] = False
        q[0, -3:] = query
        cache.step(0, q, k, v, valid=valid)
        held.append((tokens_in(cache.pages(0), 0).code, cache.step(0, *tokens(rng, 2, 90))))
    for other in held[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(held[0], other, strict=True))


@pytest.mark.parametrize("stored", [0, 40, 120])
@pytest.mark.parametrize("chunk", [1, 2, 16, 17, 64, 90])
def test_rows_of_padding_give_0(chunk, stored):
    cache, rng = make(batch=2), np.random.default_rng(3)
    cache.step(0, *tokens(rng, 2, stored))
    q, k, v = tokens(rng, 2, chunk)
    valid = np.arange(chunk) % 3 > 0  # at the ends and between
    q[0, ~valid] = np.nan
    out = cache.step(0, q, k, v, valid=np.stack([valid, np.ones(chunk, bool)]))
    assert (out[0, ~valid] == 0).all()
    assert (out[0, valid] != 0).all()
    assert (out[1] != 0).all()


def test_a_nan_token_spoils_its_row_only():
    cache, rng = make(batch=2), np.random.default_rng(5)
    q, k, v = tokens(rng, 2, 150)
    k[0, 140] = np.nan
    cache.step(0, q, k, v)
    out = cache.step(0, *tokens(rng, 2, 64))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_repeat_under_an_absolute_budget_demotes():
    cache, rng = make(budget=90_000 * LAYERS), np.random.default_rng(10)
    for layer in range(LAYERS):
        cache.step(layer, *tokens(rng, 1, 400))
    cache.repeat(2)
    check(cache)
    assert len(tokens_in(cache.pages(1), 1).head) == 400 * HEADS
    with pytest.raises(BudgetError):
        cache.repeat(40)
    check(cache)
    assert cache.batch == 2


def test_what_a_crop_leaves_fits_the_smaller_budget():
    """The first tokens are the important ones, at high widths: a third of the length, most of the bytes."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 1, 1024, 1, 32), dtype=np.float32)
    k[:, :300] *= 0.1  # keys of small norm count as important
    cache = MixedPrecisionCache(1, 2, 1, 32, budget=0.3, plan_length=1, importance="key_norm", recent=0)
    cache.append(0, k, v)
    wide = 1024 * 4 * 32 * 0.3
    assert wide / 2 < cache.nbytes <= wide
    cache.crop(724)
    assert cache.seqlen == 300
    assert len(tokens_in(cache.pages(0), 0).head) == 300
    assert cache.nbytes <= cache.budget_nbytes < wide / 2
    before = cache.nbytes
    with pytest.raises(BudgetError, match="at least"):
        cache.crop(299)  # a page for one token is more than its share
    assert (cache.seqlen, cache.nbytes, len(tokens_in(cache.pages(0), 0).head)) == (300, before, 300)
