"""The byte budget holds in every state; what a cache holds can be saved and loaded (promises 5, 9, 11)."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import BudgetError, MixedPrecisionCache

HEADS, DIM = 2, 64


def make(**options: Any) -> MixedPrecisionCache:
    return MixedPrecisionCache(1, 2, HEADS, DIM, **{"bits": (2, 4, 8), **options})


def new_tokens(rng: np.random.Generator, batch: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = rng.standard_normal((3, batch, n, HEADS, DIM), dtype=np.float32)
    return q, k, v


def state(cache: MixedPrecisionCache) -> list[Any]:
    """What a caller can see of a cache, and what it answers."""
    q = np.random.default_rng(5).standard_normal((cache.batch, 3, 2, DIM), dtype=np.float32)
    pages = {name: counts.tolist() for name, counts in cache.allocation().items()}
    return [cache.batch, cache.seqlen, cache.nbytes, cache.budget_nbytes, pages, cache.attend(0, q).tolist()]


def assert_holds(cache: MixedPrecisionCache) -> None:
    assert cache.budget_nbytes is None or cache.nbytes <= cache.budget_nbytes


def test_the_comparator_sees_a_cache_that_is_too_large() -> None:
    class Larger:
        nbytes, budget_nbytes = 101, 100

    with pytest.raises(AssertionError):
        assert_holds(Larger())  # type: ignore[arg-type]


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({"budget": 20_000, "residual": 100}, 100),
        ({"budget": 0.2, "residual": 512}, 500),
        ({"budget": 0.2, "residual": 256, "plan_length": 256}, 256),
    ],
)
def test_a_residual_window_counts_before_any_page_is_written(
    options: dict[str, Any], n: int, attends: bool
) -> None:
    cache, (q, k, v) = make(**options), new_tokens(np.random.default_rng(0), 1, n)
    with pytest.raises(
        BudgetError, match=r"length that fits.* width 0 the least important tokens"
    ) as refused:
        cache.step(0, q, k, v) if attends else cache.append(0, k, v)
    assert cache.seqlen == 0
    longest, needed = refused.value.longest_length, refused.value.needed_bytes
    assert longest is not None
    assert needed is not None
    cache.append(0, k[:, :longest], v[:, :longest])
    assert_holds(cache)
    with pytest.raises(BudgetError):
        cache.append(0, k[:, :1], v[:, :1])
    enough = make(**{**options, "budget": needed})
    enough.append(0, k, v)
    assert enough.nbytes == needed


@pytest.mark.parametrize("call", ["repeat", "select"])
def test_rows_without_pages_count(call: str) -> None:
    cache, (_, k, v) = make(budget=420, bits=(0, 2)), new_tokens(np.random.default_rng(0), 1, 50)
    cache.append(0, k, v)  # 420 bytes hold no page: all tokens are evicted
    before = state(cache)
    with pytest.raises(BudgetError, match="so many rows take 996") as refused:
        cache.repeat(3) if call == "repeat" else cache.select(np.zeros(3, int))
    assert state(cache) == before
    assert refused.value.needed_bytes == 996


def test_exact_tokens_go_to_pages_where_more_rows_leave_no_bytes_for_them() -> None:
    cache, (_, k, v) = make(budget=60_000), new_tokens(np.random.default_rng(0), 1, 60)
    cache.append(0, k, v)
    assert cache.nbytes > 40_000
    cache.repeat(2)
    assert_holds(cache)
    pages = sum(int(counts.sum()) for counts in cache.allocation().values())
    assert pages == 2 * HEADS * 5  # four with the tokens, and an open one


def test_an_empty_cache_fits_its_budget() -> None:
    with pytest.raises(BudgetError, match=r"budget=100 is 100 bytes and an empty cache takes 332") as refused:
        make(budget=100)
    assert_holds(make(budget=refused.value.needed_bytes))
    short = make(budget=0.3, plan_length=1)
    assert_holds(short)
    short.append(0, *new_tokens(np.random.default_rng(0), 1, 0)[1:])
    assert_holds(short)
    with pytest.raises(BudgetError, match="Raise the budget or plan_length"):
        short.append(0, *new_tokens(np.random.default_rng(0), 1, 1)[1:])


def test_a_relative_budget_names_the_longest_length_and_a_plan_length_that_does() -> None:
    """A page takes the same bytes however full it is, so a longer sequence may fit where one does not."""
    cache, (_, k, v) = make(budget=0.2, plan_length=1), new_tokens(np.random.default_rng(0), 1, 200)
    refused = {}
    for n in range(201):
        try:
            cache._limit.check(n, 1)
        except BudgetError as error:
            refused[n] = error
    fitting, longest = [n for n in range(201) if n not in refused], max(refused)
    assert any(1 < n < longest for n in fitting)
    for n, error in refused.items():
        assert error.longest_length == max(m for m in fitting if m < n)
        above = min(m for m in fitting if m > n)
        assert f"fits below {n} is {error.longest_length}, the shortest above is {above}." in str(error)
        found = re.search(r"plan_length \(to (\d+)\)", str(error))
        assert found is not None
        assert int(found[1]) == longest + 1  # then the next tokens fit, too
    grown = make(budget=0.2, plan_length=longest + 1)
    for n in range(200):
        grown.append(0, k[:, n : n + 1], v[:, n : n + 1])


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.3, "bits": (2, 4), "residual": 50},
        {"budget": 0.3, "bits": (2, 4), "residual": 20, "plan_length": 30, "sliding_window": 400},
        {"budget": 0.3, "bits": (0, 4), "residual": 7},
        {"budget": 0.16, "bits": (4,)},
        {"budget": 30_000},
    ],
)
def test_lengths_and_plan_lengths_that_errors_name_are_those_that_fit(options: dict[str, Any]) -> None:
    most, refused = 1000, {}
    for n in range(most):
        try:
            make(**{"plan_length": 1, **options})._limit.check(n, 1)
        except BudgetError as error:
            refused[n] = str(error)
    assert refused
    for n, text in refused.items():
        below, above = ([m for m in range(most) if m not in refused and (m > n) == up] for up in (0, 1))
        assert re.search(rf"fits( below {n})? is {max(below)}\b", text)
        assert (f"shortest above is {min(above)}." in text) if above else "above" not in text
    advised = {int(found[1]) for text in refused.values() if (found := re.search(r"\(to (\d+)\)", text))}
    assert len(advised) == (max(refused) < most - 1)
    for length in advised:
        for n in (*range(most), 1 << 16, (1 << 16) + 1, 1 << 20):
            make(**{**options, "plan_length": length})._limit.check(n, 1)


BUDGETS = st.one_of(st.sampled_from([None, 0.2, 0.35, 0.7]), st.integers(392, 80_000))
NAMES = st.sampled_from(["step", "append", "crop", "repeat", "select"])
CALLS = st.lists(st.tuples(NAMES, st.integers(0, 130)), max_size=7)


@given(
    budget=BUDGETS,
    bits=st.sampled_from([(2, 4, 8), (0, 2), (4,), (0, 3, 16)]),
    residual=st.sampled_from([0, 7, 100]),
    plan_length=st.sampled_from([1, 100, 2048]),
    calls=CALLS,
)
@settings(deadline=None)
def test_every_call_holds_or_changes_nothing_and_every_state_is_a_file(
    budget: float | None, bits: Any, residual: int, plan_length: int, calls: list[tuple[str, int]]
) -> None:
    cache = make(budget=budget, bits=bits, residual=residual, plan_length=plan_length)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name, n in [("append", 0), *calls]:
            before = state(cache)
            q, k, v = new_tokens(rng, cache.batch, n)
            try:
                if name == "step":
                    cache.step(0, q, k, v)
                elif name == "append":
                    cache.append(0, k, v)
                elif name == "crop":
                    cache.crop(min(n, cache.seqlen))
                elif name == "repeat":
                    cache.repeat(1 + n % 3)
                else:
                    cache.select(np.arange(n % 4 if cache.batch else 0) % max(cache.batch, 1))
            except BudgetError:
                assert state(cache) == before
            assert_holds(cache)
            cache.save(Path(folder, "cache"))
            loaded = MixedPrecisionCache.load(Path(folder, "cache"))
            assert state(loaded) == state(cache)
            q, k, v = new_tokens(rng, cache.batch, 1)
        try:
            expected = cache.step(0, q, k, v)
        except BudgetError:
            with pytest.raises(BudgetError):
                loaded.step(0, q, k, v)
        else:
            np.testing.assert_array_equal(loaded.step(0, q, k, v), expected)
            assert state(loaded) == state(cache)
