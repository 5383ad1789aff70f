"""Random calls of a cache on a GPU: every operation in any order, on the cache and on lists of tokens.

Subclasses say how a cache is made, stepped and checked: on a GPU (tests/gpu/test_cache_stateful.py),
on kernels in NumPy (tests/cache/host/test_stateful.py). A step is compared with attention over what the pages
hold; after each operation budget and memory hold, and every row has its tokens, each once.
"""

from __future__ import annotations

import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.cache.reallocation import LOOKAHEAD
from tests.cache_contents import check_store, contents_of, pages_of, positions
from tests.twins import padding

LONGEST, MAX_NEW = 600, 130
LADDERS = {
    (2, 4, 8): 0.6, (2, 3, 4, 8): 0.6, (8,): None, (4, 16): 1.2, ("k4v2", 8): 0.7, (2, 3, 4, 8, 16): 0.8,
    (0, 4): 0.4, (0, 2, 8): 0.4, ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8): 0.6,
    ("k4422v3", "k8444v4", 16): 1.2,
}  # fmt: skip
"""Ladders, and of each a budget that takes some tokens down."""


@st.composite
def options_of_caches(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `MixedPrecisionCache` on a GPU that hold a run."""
    bits = draw(st.sampled_from(list(LADDERS)))
    options = {
        "bits": bits,
        "budget": LADDERS[bits],
        "batch": draw(st.integers(1, 3)),
        "importance": draw(st.sampled_from(["attention", "forecast", "recency", "key_norm", "uniform"])),
        "plan_length": draw(st.sampled_from([256, 512])),
        "recent": draw(st.sampled_from([0, 20, 128])),
        "sink": draw(st.sampled_from([0, 4])),
        "realloc_every": draw(st.sampled_from([1, 4, 16])),
        "dtype": draw(st.sampled_from(["float16", "bfloat16"])),
        "sliding_window": draw(st.sampled_from([None, None, 100, [40, None]])),
        "rewind": draw(st.sampled_from([0, 20])),
    }
    if 0 not in bits and 16 not in bits:
        options["allocator"] = draw(st.sampled_from(["greedy", "greedy", "dp", "uniform"]))
        options["residual"] = draw(st.sampled_from([0, 0, 5, 70]))
        if options["residual"] and options["budget"]:
            options["budget"] += 0.9  # pages of 16 bits beside the others
    return options


class StatefulCache(RuleBasedStateMachine):
    """Subclasses say how a cache is made, stepped and attended, and how tokens are drawn and put there."""

    make: Any
    step_all: Any
    attend_checked: Any
    draw: Any
    put: Any

    @initialize(options=options_of_caches(), tight=st.booleans(), seed=st.integers(0, 2**31))
    def start(self, options: dict[str, Any], tight: bool, seed: int) -> None:
        """A `tight` cache has the fewest bytes that are promised to suffice for `max_seqlen`."""
        self.options, self.tight, self.rng = options, tight, np.random.default_rng(seed)
        dims = [64, 128, 256] if "k4422" in str(options["bits"]) else [64, 80, 96, 128, 256]
        head_dim = int(self.rng.choice(dims))
        self.cache = self.make(head_dim, **options)
        if tight:
            longest = LONGEST + MAX_NEW
            options |= {"budget": None, "max_seqlen": longest}
            least = self.make(head_dim, **options).smallest_nbytes(longest)
            self.cache = self.make(head_dim, **options | {"budget": least})
        self.rows: list[list[int]] = [[] for _ in range(options["batch"])]
        self.length = 0

    def add(self, n: int, valid: np.ndarray) -> None:
        for row, held in enumerate(self.rows):
            held.extend(self.length + np.flatnonzero(valid[row]))
        self.length += n

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 16, 17, 64, MAX_NEW]), padded=st.booleans())
    @precondition(lambda self: self.length < LONGEST)
    def step(self, n: int, padded: bool) -> None:
        valid = np.ones((len(self.rows), n), bool)
        if padded:
            valid = padding(self.rng, valid.shape, self.cache.windows)
        self.step_all(self.cache, self.rng, n, valid if padded else None)
        self.add(n, valid)

    @rule(n=st.integers(2, 40))
    @precondition(lambda self: 0 < self.length < LONGEST)
    def decode(self, n: int) -> None:
        for _ in range(n):
            self.step_all(self.cache, self.rng, 1, None)
            self.add(1, np.ones((len(self.rows), 1), bool))

    @rule(n=st.sampled_from([1, 3, 70]))
    @precondition(lambda self: self.length < LONGEST)
    def append(self, n: int) -> None:
        _, k, v = self.draw(self.rng, self.cache, n)
        for layer in range(self.cache.num_layers):
            self.cache.append(layer, self.put(k), self.put(v))
        self.add(n, np.ones((len(self.rows), n), bool))

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.length))
        before, unlimited = contents_of(self.cache), self.cache.budget_nbytes is None
        lacks = n > self.cache.rewind and self.lacks(self.length - n)
        if lacks:
            with pytest.raises(ValueError, match=f"n={n}: .* have left it and were dropped"):
                self.cache.crop(n)
            assert contents_of(self.cache) == before
            return
        self.cache.crop(n)
        self.length -= n
        after, kept = contents_of(self.cache), {at: x for at, x in before.items() if at[3] < self.length}
        assert after.keys() <= kept.keys()
        assert all(token[0] <= kept[at][0] for at, token in after.items())
        assert all(token == kept[at] for at, token in after.items() if unlimited or token[0] == kept[at][0])
        self.rows = [[p for p in held if p < self.length] for held in self.rows]

    def lacks(self, end: int) -> bool:
        """Whether a window would begin before what plans have left of a layer if rows ended at `end`."""
        dropped = self.cache._device.dropped
        return any(
            window and end and max(end - window + 1, 0) < dropped[layer]
            for layer, window in enumerate(self.cache.windows)
        )

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        row = st.integers(0, len(self.rows) - 1)
        rows = data.draw(st.lists(row, min_size=len(self.rows), max_size=len(self.rows)))
        before = contents_of(self.cache)
        self.cache.reorder(np.array(rows))
        self.holds_rows(before, rows)
        self.rows = [list(self.rows[row]) for row in rows]

    @rule(data=st.data())
    @precondition(lambda self: not self.tight)
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        before = contents_of(self.cache)
        self.cache.select(np.array(rows))
        self.holds_rows(before, rows)
        self.rows = [list(self.rows[row]) for row in rows]

    @rule()
    @precondition(lambda self: len(self.rows) < 2 and not self.tight)
    def repeat(self) -> None:
        before = contents_of(self.cache)
        self.cache.repeat(2)
        self.holds_rows(before, [0, 0])
        self.rows = [list(held) for held in self.rows for _ in range(2)]

    @rule()
    @precondition(lambda self: self.length < LONGEST)
    def copy(self) -> None:
        """A copy holds the same, and goes its own way."""
        before, other = contents_of(self.cache), deepcopy(self.cache)
        assert contents_of(other) == before
        self.step_all(other, self.rng, 20, None)
        assert other.seqlen == self.length + 20
        assert contents_of(self.cache) == before

    def holds_rows(self, before: dict[Any, Any], rows: list[int]) -> None:
        """Row i holds what row `rows[i]` held before; a budget that more rows share may have demoted some."""
        after = contents_of(self.cache)
        expected = {
            (layer, i, *rest): token
            for i, taken in enumerate(rows)
            for (layer, row, *rest), token in before.items()
            if row == taken
        }
        if len(rows) > len(self.rows) and self.cache.budget_nbytes is not None:
            assert after.keys() <= expected.keys()
            assert all(token[0] <= expected[at][0] for at, token in after.items())
        else:
            assert after == expected

    @rule()
    @precondition(lambda self: self.length > 0)
    def attend(self) -> None:
        self.attend_checked(self.cache, self.rng)

    @rule(by_the_cpu=st.booleans())
    def save_and_load(self, by_the_cpu: bool) -> None:
        before = contents_of(self.cache)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            self.cache.save(path)
            if by_the_cpu:
                MixedPrecisionCache.load(path).save(path)
            self.cache = MixedPrecisionCache.load(path, device="cuda")
        if self.length:
            self.attend()  # what was loaded comes to the device
        assert contents_of(self.cache) == before

    @rule()
    @precondition(lambda self: self.length > 300)
    def reset(self) -> None:
        self.cache.reset()
        self.rows, self.length = [[] for _ in self.rows], 0

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert (cache.seqlen, cache.batch) == (self.length, len(self.rows))
        assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)
        assert cache.nbytes <= cache.reserved_nbytes
        device = cache._device
        if device is None:
            return
        check_store(device.store)
        for layer, pages in enumerate(pages_of(cache)):
            assert not device.reallocator.status(layer)
            pages.check_entries()
            for row, held in enumerate(self.rows):
                for head in range(pages.rung.shape[1]):
                    found = positions(pages, row, head)
                    if window := cache.windows[layer]:
                        # The next query sees all that is left of its window, and little more is kept.
                        dropped, reach = device.dropped[layer], window + cache.rewind + LOOKAHEAD
                        assert dropped <= max(0, self.length - window + 1)
                        waits = not pages.k_mean[row].any() and len(found) < 128
                        assert waits or all(p > self.length - reach for p in found)
                        held, found = ([p for p in x if p >= dropped] for x in (held, found))
                    if 0 in self.options["bits"]:
                        assert len(set(found)) == len(found)
                        assert set(found) <= set(held)
                    else:
                        assert found == held
