"""Memory of pages: what is free is given back, and packing a pool changes nothing that is stored."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache.ladder import parse_bits
from kvlab.cache.plan import NewTokens, Plan
from kvlab.cache.pools import PagePools
from kvlab.cache.store import LayerStore
from kvlab.pages import read_tokens

HEADS, DIM, TOKENS = 2, 16, 64 * 12
LOW, HIGH = 0, 1


def demoted_store(keep_high: int) -> LayerStore:
    """Two rows at 8 bits, of which the second keeps its newest `keep_high` and demotes the others."""
    store = LayerStore(parse_bits((4, 8), 1)[0], 2, HEADS, DIM, "float16")
    rng = np.random.default_rng(0)
    nothing = NewTokens.none(HEADS, DIM)
    for row in range(2):
        k, v = rng.standard_normal((2, TOKENS, HEADS, DIM), np.float32)
        code = rng.integers(0, 256, (HEADS, TOKENS), np.uint8)
        new = NewTokens(k, v, np.arange(TOKENS), code)
        store.apply(row, Plan(store.tokens(row), np.empty(0, np.int64), np.full((HEADS, TOKENS), HIGH)), new)
    tokens = store.tokens(1)
    stored = np.where(tokens.position >= TOKENS - keep_high, HIGH, LOW)
    store.apply(1, Plan(tokens, stored, nothing.code.astype(np.int64)), nothing)
    return store


def contents(store: LayerStore, row: int) -> dict[tuple[int, int], tuple[int, int, bytes]]:
    """(head, position) of every token: its rung, its importance and the bits of its numbers."""
    tokens = store.tokens(row)
    index = store.index[row, tokens.head, tokens.page].astype(np.int64)
    found = {}
    for r in range(len(store.ladder)):
        mine = np.flatnonzero(tokens.rung == r)
        k, v = read_tokens(store.pools[r], store.layouts[r], store.dtype, index[mine], tokens.slot[mine])
        for i, key, value in zip(mine, k, v, strict=True):
            place = int(tokens.head[i]), int(tokens.position[i])
            found[place] = r, int(tokens.code[i]), key.tobytes() + value.tobytes()
    return found


def test_pages_of_demoted_tokens_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = demoted_store(keep_high=100)
    high = packed.page_counts()[..., HIGH].sum()
    assert high == HEADS * (12 + 2)
    assert len(packed.pools[HIGH]) == high
    monkeypatch.setattr(PagePools, "is_loose", lambda self, rung: False)
    loose = demoted_store(keep_high=100)
    assert len(loose.pools[HIGH]) >= 2 * HEADS * 12
    assert loose.nbytes().tolist() == packed.nbytes().tolist()
    for row in range(2):
        assert len(contents(packed, row)) == HEADS * TOKENS
        assert contents(packed, row) == contents(loose, row)


def test_a_few_free_pages_are_kept_for_the_tokens_to_come() -> None:
    store = demoted_store(keep_high=TOKENS - 64)
    assert len(store.pools[HIGH]) > store.page_counts()[..., HIGH].sum()
