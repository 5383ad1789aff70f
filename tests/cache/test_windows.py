"""Layers with a sliding window: what queries see, what is kept, bytes, and the way back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import BudgetError, MixedPrecisionCache
from kvlab.cache.reallocation import LOOKAHEAD
from kvlab.reference import attention as reference
from tests.cache_contents import contents_of, pages_of, positions
from tests.compare import assert_accurate, low_precision_attention

HEADS_Q, HEADS, DIM = 4, 2, 64


def make(**options: Any) -> MixedPrecisionCache:
    options = {"bits": 16, "budget": None, "batch": 2, **options}
    return MixedPrecisionCache(1, HEADS_Q, HEADS, DIM, **options)


def draw(rng: np.random.Generator, n: int, batch: int = 2) -> list[np.ndarray]:
    return [
        rng.standard_normal((batch, n, heads, DIM)).astype(np.float16) for heads in (HEADS_Q, HEADS, HEADS)
    ]


def feed(cache: Any, tokens: list[np.ndarray], parts: list[int], start: int = 0) -> np.ndarray:
    """Step with parts of tokens; the results one behind the other."""
    ends = start + np.cumsum(parts)
    found = [
        cache.step(0, *(x[:, end - n : end] for x in tokens)) for end, n in zip(ends, parts, strict=True)
    ]
    return np.concatenate(found, 1)


def assert_window(out: np.ndarray, tokens: list[np.ndarray], window: int) -> None:
    """`out` is attention of the last queries, each over `window` tokens."""
    rules: dict[str, Any] = {"causal": True, "window": (window - 1, -1)}
    q, k, v = tokens[0][:, -out.shape[1] :], *tokens[1:]
    wanted, low = reference.attention(q, k, v, **rules), low_precision_attention(q, k, v, **rules)[0]
    assert_accurate(out, wanted, low)


@given(
    window=st.sampled_from([1, 2, 7, 16, 24, 100, 500]),
    parts=st.lists(st.sampled_from([1, 1, 1, 3, 16, 17, 40, 130]), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=40)
def test_at_width_16_queries_see_exactly_their_window(window: int, parts: list[int], seed: int) -> None:
    tokens, cache = draw(np.random.default_rng(seed), sum(parts)), make(sliding_window=window)
    assert_window(feed(cache, tokens, parts), tokens, window)
    (pages,) = pages_of(cache)
    kept = max(64, window + LOOKAHEAD)  # the first tokens of a row may wait for its frame
    assert all(len(positions(pages, row, head)) <= kept for row in range(2) for head in range(HEADS))


@pytest.mark.parametrize("window", [23, 25, None])
def test_another_window_shows(window: int | None) -> None:
    tokens, cache = draw(np.random.default_rng(0), 100), make(sliding_window=window)
    with pytest.raises(AssertionError):
        assert_window(feed(cache, tokens, [60, *[1] * 40]), tokens, 24)


def test_what_has_left_never_matters() -> None:
    """NaN in tokens that plans have dropped changes no result."""
    tokens, results = draw(np.random.default_rng(1), 200), []
    for hidden in (0.0, np.nan):
        for x in tokens[1:]:
            x[:, :100] = hidden
        cache = make(sliding_window=24)
        feed(cache, tokens, [100, 40])
        results.append(feed(cache, tokens, [*[1] * 30, 30], 140))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)


def gemma(**options: Any) -> MixedPrecisionCache:
    """The geometry of Gemma 3 270M: every sixth layer has full attention, others see 512 tokens."""
    windows = [None if layer % 6 == 5 else 512 for layer in range(18)]
    return MixedPrecisionCache(18, 4, 1, 256, sliding_window=windows, **options)


@pytest.mark.parametrize("parts", [[2048], [64] * 32])
def test_bytes_of_gemma_3_270m(parts: list[int]) -> None:
    """0.3 of the bytes of a dense cache in float16, which keeps 511 tokens of a window."""
    rng, cache = np.random.default_rng(0), gemma(budget=0.3)
    dense = 2 * 2 * 256 * (3 * 2048 + 15 * 511)
    for n in parts:
        k, v = rng.standard_normal((2, 1, n, 1, 256), dtype=np.float32)
        for layer in range(18):
            cache.append(layer, k, v)
        assert cache.budget_nbytes is not None
        assert cache.nbytes <= cache.budget_nbytes
    assert 0.28 * dense < cache.nbytes < 0.31 * dense
    assert positions(cache.pages(0), 0, 0)[-511:] == list(range(2048 - 511, 2048))


def test_budgets_count_the_tokens_that_layers_see() -> None:
    for budget in (0.25, None):
        cache = gemma(budget=budget)
        assert cache.budget_nbytes == (None if budget is None else 2**8 * (3 * 2048 + 15 * 512))
    cache = gemma(budget="8MiB", max_seqlen=8192)
    budgets = cache._limit.row_budgets(100, 1)
    assert budgets is not None
    assert sum(budgets) <= 8 << 20
    assert budgets[5] == pytest.approx(16 * budgets[0], abs=16)
    assert budgets == cache._limit.row_budgets(8192, 1)  # shares are fixed before the first token


def test_a_budget_too_small_for_a_window_is_refused_before_anything_changes() -> None:
    cache = make(sliding_window=64, budget=0.12, bits=(2, 8), plan_length=512)
    with pytest.raises(BudgetError, match="Raise the budget, add") as refused:
        cache.append(0, *draw(np.random.default_rng(0), 200)[1:])
    assert cache.seqlen == 0
    enough = make(sliding_window=64, budget=refused.value.needed_bytes, bits=(2, 8), plan_length=512)
    enough.append(0, *draw(np.random.default_rng(0), 200)[1:])
    assert enough.nbytes <= refused.value.needed_bytes


@pytest.mark.parametrize(
    ("budget", "words", "help_of"),
    [
        (
            0.3,
            r"is 921\. Raise the budget to ([0-9.]+), or add",
            lambda n: {"budget": float(n)},
        ),
        ("60KiB", "keep tokens of 2048 .*Pass max_seqlen=([0-9]+), or", lambda n: {"max_seqlen": int(n)}),
        ("60KiB", "raise the budget to ([0-9]+) bytes;", lambda n: {"budget": int(n)}),
    ],
)
def test_a_share_too_small_for_a_window_is_named_with_what_helps(
    budget: Any, words: str, help_of: Callable[[str], dict[str, Any]]
) -> None:
    """The budget is many times what the cache needs, so its sum says nothing."""

    def fed(**options: Any) -> MixedPrecisionCache:
        options = {"sliding_window": (None, 24, 24), "budget": budget, **options}
        cache = MixedPrecisionCache(3, 4, 2, 16, **options)
        for layer in range(3):
            cache.append(layer, *np.ones((2, 1, 70, 2, 16), np.float16))
        return cache

    with pytest.raises(BudgetError, match="70 tokens: layer 1, with a sliding window of 24") as refused:
        fed()
    found = re.search(words, str(refused.value))
    assert found
    assert fed(**help_of(found[1])).seqlen == 70


# ---- the way back


@pytest.mark.parametrize("parts", [[100], [60, *[1] * 40]])
def test_a_crop_that_lacks_tokens_is_refused_by_name(parts: list[int]) -> None:
    tokens, cache = draw(np.random.default_rng(2), 100), make(sliding_window=24)
    feed(cache, tokens, parts)
    before = contents_of(cache)
    with pytest.raises(ValueError, match=r"n=30: at position 70 the sliding window of layer 0, 24 tokens"):
        cache.crop(30)
    assert contents_of(cache) == before
    assert cache.seqlen == 100
    cache.crop(100)
    assert_window(feed(cache, tokens, [100]), tokens, 24)


def test_a_window_that_is_not_full_is_cropped_like_any_layer() -> None:
    tokens, cache = draw(np.random.default_rng(3), 100), make(sliding_window=90)
    feed(cache, tokens, [80])
    cache.crop(70)
    assert_window(feed(cache, tokens, [1, 60, 29], 10), tokens, 90)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [None, 2.5])
def test_with_rewind_tokens_come_back_into_sight(late: bool, budget: float | None) -> None:
    tokens = draw(np.random.default_rng(4), 200)
    cache = make(sliding_window=24, rewind=0 if late else 20, budget=budget)
    feed(cache, tokens, [100])
    if late:
        cache.allow_rewind(20)
        assert cache.rewind == 20
    for _ in range(4):
        feed(cache, tokens, [20], 100)
        cache.crop(20)
    feed(cache, tokens, [*[1] * 30, 20], 100)
    cache.crop(20)
    assert_window(feed(cache, tokens, [50, 20], 130), tokens, 24)
    with pytest.raises(ValueError, match=r"the option `rewind` says \(20\)"):
        cache.crop(21)


def test_a_rewind_that_does_not_fit_changes_nothing() -> None:
    tokens, cache = draw(np.random.default_rng(5), 200), make(sliding_window=64, budget=32_000, bits=(4,))
    feed(cache, tokens, [150])
    before, other = contents_of(cache), copy.deepcopy(cache)
    with pytest.raises(BudgetError, match="longest length that fits"):
        cache.allow_rewind(500)
    assert (cache.rewind, contents_of(cache)) == (0, before)
    np.testing.assert_array_equal(*(feed(x, tokens, [50], 150) for x in (cache, other)))


def test_after_a_rewind_a_length_is_checked_again_though_a_step_of_it_failed() -> None:
    def fail(_: Any, observed: Any, *__: Any) -> Any:
        if cache.rewind == 0:
            raise ZeroDivisionError
        return observed

    tokens = draw(np.random.default_rng(8), 300)
    cache = make(sliding_window=32, budget=18_000, bits=(2, 4, 8), importance=fail)
    with pytest.raises(ZeroDivisionError):
        feed(cache, tokens, [300])
    cache.allow_rewind(200)
    with pytest.raises(BudgetError, match="longest length that fits"):
        feed(cache, tokens, [300])
    assert cache.seqlen == 0


# ---- rows, files, padding


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder(np.array([1, 1])), [1, 1]),
        (lambda cache: cache.repeat(2), [0, 0, 1, 1]),
        (lambda cache: cache.select(np.array([1])), [1]),
    ],
)
def test_rows_take_their_windows_with_them(change: Any, rows: list[int]) -> None:
    tokens, cache = draw(np.random.default_rng(6), 100), make(sliding_window=24)
    feed(cache, tokens, [60, *[1] * 10])
    change(cache)
    tokens = [x[rows] for x in tokens]
    assert_window(feed(cache, tokens, [*[1] * 20, 10], 70), tokens, 24)


def test_a_file_remembers_what_was_dropped(tmp_path: Any) -> None:
    tokens, cache = draw(np.random.default_rng(7), 200), make(sliding_window=[24], rewind=9)
    feed(cache, tokens, [100, 1, 1])
    cache.save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache")
    assert (loaded.windows, loaded.rewind) == ((24,), 9)
    for held in (cache, loaded):
        held.crop(9)
        with pytest.raises(ValueError, match="n=8: at position 85"):
            held.crop(8)
    assert_window(feed(loaded, tokens, [100], 93), [x[:, :193] for x in tokens], 24)


def test_padding_at_the_ends_counts_as_time() -> None:
    rng, window = np.random.default_rng(8), 24
    (q, k, v), cache = draw(rng, 120), make(sliding_window=window)
    valid = np.ones((2, 120), bool)
    valid[0, :30], valid[1, 110:] = False, False
    out = np.concatenate([
        cache.step(0, *(x[:, part] for x in (q, k, v)), valid=valid[:, part])
        for part in (slice(0, 90), slice(90, 100), slice(100, 120))
    ], 1)  # fmt: skip
    for row, (first, last) in enumerate([(30, 120), (0, 110)]):
        own = [x[row : row + 1, first:last] for x in (q, k, v)]
        assert_window(out[row : row + 1, first:last], own, window)
        assert not out[row, ~valid[row]].any()


def test_padding_between_tokens_is_refused_in_steps_longer_than_the_window() -> None:
    (q, k, v), cache = draw(np.random.default_rng(9), 60), make(sliding_window=24)
    valid = np.ones((2, 60), bool)
    valid[1, 7] = False
    with pytest.raises(NotImplementedError, match="row 1 has padding between its tokens, in 60 tokens"):
        cache.step(0, q, k, v, valid=valid)
    assert cache.seqlen == 0
    for part in (slice(0, 24), slice(24, 48), slice(48, 60)):
        out = cache.step(0, *(x[:, part] for x in (q, k, v)), valid=valid[:, part])
    assert_window(out, [q, k, v], 24)


@pytest.mark.parametrize(
    ("window", "error", "text"),
    [
        (0, ValueError, "sliding_window=0"),
        ("a", TypeError, "sliding_window='a'"),
        ([None, 8], ValueError, "sliding_window names 2 layers of 1"),
        ([2.5], TypeError, "sliding_window=2.5"),
    ],
)
def test_windows_that_are_none_are_refused(window: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(sliding_window=window)
