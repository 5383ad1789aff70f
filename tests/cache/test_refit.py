"""Frames of keys that are fitted to later tokens, of which channels have become large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.cpu.refit import fit_frames
from kvlab.ops.frame import MAX_SHIFT, MIN_AGAIN, MIN_GROWN, add_queries, further_shift, key_shift
from kvlab.reference.blocks import BLOCKS, follow_ratios, refit_codes
from tests.strategies import SEEDS

LADDER = ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8)
HEADS_Q, HEADS, DIM, PROMPT = 4, 2, 64, 300
PAIRS = [3, 20]


def tokens(n: int, begin: int, factor: float, dim: int = DIM) -> list[np.ndarray]:
    """Queries, keys and values; from `begin` on two pairs of keys are larger by a factor."""
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((1, n, heads, dim)) for heads in (HEADS_Q, HEADS, HEADS))
    pairs = [*PAIRS, *(pair + dim // 2 for pair in PAIRS)]
    k[:, begin:, :, pairs] *= factor
    q[:, begin:, :, pairs] /= factor
    return [x.astype(np.float16) for x in (q, k, v)]


def cache_of(**options: Any) -> MixedPrecisionCache:
    options = {"bits": LADDER, "budget": 0.3, "plan_length": 1, "importance": "key_norm"} | options
    return MixedPrecisionCache(1, HEADS_Q, HEADS, options.pop("dim", DIM), **options)


def fed(cache: MixedPrecisionCache, whole: list[np.ndarray], parts: list[int]) -> list[np.ndarray]:
    """Results of the parts."""
    ends = np.cumsum(parts)
    return [
        np.asarray(cache.step(0, *(x[:, end - n : end] for x in whole)))
        for n, end in zip(parts, ends, strict=True)
    ]


def error(cache: MixedPrecisionCache, whole: list[np.ndarray]) -> float:
    """Relative error of attention with the last queries."""
    q, k, v = (x.astype(np.float64)[0] for x in whole)
    out, wanted = np.asarray(cache.attend(0, whole[0][:, -16:]), np.float64)[0], []
    for head in range(HEADS_Q):
        scores = q[-16:, head] @ k[:, head // 2].T / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted.append(weights / weights.sum(1, keepdims=True) @ v[:, head // 2])
    reference = np.stack(wanted, 1)
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def shifts(cache: MixedPrecisionCache) -> np.ndarray:
    return cache.pages(0).k_shift[0]


SINGLE = [PROMPT, *[1] * 96]
WAYS = {
    "single": SINGLE,
    "threes": [PROMPT, *[3] * 32],
    "parts": [PROMPT, 64, 32],
    "both": [PROMPT, 40, *[1] * 56],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("factor", [6.0, 11.0, 45.0])
def test_channels_that_become_large_late_cost_little(
    way: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = WAYS[way]
    plain, large = tokens(sum(parts), PROMPT, 1), tokens(sum(parts), PROMPT, factor)
    ordinary, cache, blind = cache_of(), cache_of(), cache_of()
    fed(ordinary, plain, parts)
    fed(cache, large, parts)
    assert not shifts(ordinary).any()
    found = shifts(cache)
    assert np.flatnonzero(found.all(0)).tolist() == PAIRS
    assert not np.delete(found, PAIRS, axis=1).any()
    assert np.abs(found[:, PAIRS] - np.log2(factor)).max() < 1.5
    assert error(cache, large) < 1.15 * error(ordinary, plain)
    monkeypatch.setattr("kvlab.ops.cpu.refit.further_shift", lambda ratios, shift: np.zeros_like(shift))
    fed(blind, large, parts)
    assert not shifts(blind).any()
    if factor == 45:
        assert error(blind, large) > 1.5 * error(ordinary, plain)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_pages_hold_the_codes_of_the_oracle(dim: int) -> None:
    """All codes of keys become those of `refit_codes`; what else a page has stays."""
    whole, cache = tokens(PROMPT, PROMPT, 1, dim), cache_of(dim=dim)
    fed(cache, whole, [PROMPT])
    before, layer = cache.pages(0), cache._device.kernels.layers[0]
    keys, order = codes_of(before), before.k_order[0]
    layer.tables["k_ratio"][0, :, PAIRS] = 11 * 256
    nothing = np.zeros((1, 0, HEADS_Q, dim), np.float32), np.zeros((1, 0, HEADS, dim), np.float32)
    fit_frames(layer, *nothing, np.zeros((1, 0), bool))
    after = cache.pages(0)
    further = (after.k_shift - before.k_shift)[0]
    assert [np.flatnonzero(x).tolist() for x in further] == [PAIRS] * HEADS
    changed = 0
    for (head, profile, old), (_, _, new) in zip(keys, codes_of(after), strict=True):
        assert np.array_equal(new, refit_codes(old, profile, order[head], further[head]))
        changed += int((new != old).sum())
    assert changed > 100
    for name in ("rung", "count", "index", "base", "k_mean", "exponent", "k_order", "k_gain"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
    for layout, one, other in zip(before.layouts, before.pools, after.pools, strict=True):
        rest = slice(layout.code_bytes(layout.bits_k), None)
        assert np.array_equal(one[:, rest], other[:, rest])


def codes_of(pages: Any) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
    """Head, profile and codes (tokens, head_dim) of keys, page by page."""
    from kvlab.reference.blocks import profile_bits

    found = []
    for head in range(HEADS):
        for entry in np.flatnonzero(pages.count[0, head] > 0):
            layout = pages.layouts[pages.rung[0, head, entry]]
            record = pages.pools[pages.rung[0, head, entry]][pages.index[0, head, entry]]
            bits = np.unpackbits(record[: layout.code_bytes(layout.bits_k)], bitorder="little")
            width = np.repeat(layout.bits_k, layout.head_dim // BLOCKS)
            codes = np.where(width > 0, 1 << np.maximum(width - 1, 0), 0) + np.zeros((16, 1), np.int64)
            for run, address in profile_bits(layout.bits_k, layout.head_dim):
                own = slice(run.first, run.first + run.channels)
                codes[:, own] = (bits[address].astype(np.int64) << np.arange(run.width)).sum(-1)
            found.append((head, layout.bits_k, codes[: pages.count[0, head, entry]].astype(np.uint8)))
    return found


@given(SEEDS, st.integers(0, 6))
def test_a_shift_rises_as_that_of_first_tokens_is_found(seed: int, power: int) -> None:
    """Of many tokens, in a frame without shifts, by the rule of `key_shift`, but next to its borders."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((60, heads, DIM)).astype(np.float32) for heads in (HEADS_Q, HEADS))
    q, k = q / np.abs(q), k / np.abs(k)  # all of one size, so that means of logarithms are those of sizes
    factor = 2.0 ** (power * rng.standard_normal(DIM // 2) / 2)
    q, k = ((x * np.tile(by, 2)).astype(np.float32) for x, by in ((q, 1 / factor), (k, factor)))
    k[:4], mean = 0, np.zeros((HEADS, DIM), np.float16)
    query_sums, ratios = np.zeros((HEADS, DIM), np.float32), np.zeros((HEADS, DIM // 2), np.int16)
    add_queries(query_sums, q)
    follow_ratios(ratios, q, k, mean.astype(np.float32))
    found, wanted = (
        further_shift(ratios, np.zeros((HEADS, DIM // 2), np.uint8)),
        key_shift(k, mean, query_sums),
    )
    orders = 2 * np.log2(factor / np.sort(factor)[(DIM // 2 - 1) // 2])
    inside = (np.abs(orders - np.log2(9)) > 0.4) & (1 - np.abs((orders + 1) % 2 - 1) > 0.4)
    assert np.array_equal(found[:, inside], np.minimum(wanted, 10)[:, inside])


def test_shifts_stay_within_their_bounds() -> None:
    ratios, at, rises = np.zeros(DIM // 2, np.int16), np.zeros(DIM // 2, np.uint8), []
    ratios[3] = 32000
    while (further := further_shift(ratios, at)).any():
        at += further
        rises.append(int(further.max()))
    assert rises == [10, MAX_SHIFT - 10]
    for old, least, rise in ((0, MIN_GROWN, 2), (1, MIN_AGAIN, 1), (MAX_SHIFT, MIN_AGAIN, 0)):
        ratios[3], at = least - 1 + 512 * old, np.full(DIM // 2, 0, np.uint8)
        at[3] = old
        assert not further_shift(ratios, at).any()
        ratios[3] += 1
        assert further_shift(ratios, at).tolist() == [rise * (i == 3) for i in range(DIM // 2)]


def test_ratios_follow_a_line_between_powers_of_2() -> None:
    """Against float64, and by a comparison that another rounding fails."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((30, heads, DIM)).astype(np.float32) for heads in (HEADS_Q, HEADS))
    k[:, :, 5] = k[:, :, 5 + DIM // 2] = 0  # counts nothing
    q[7, :, 9], k[8, :, 9] = np.inf, np.nan
    ratios, mean = np.zeros((HEADS, DIM // 2), np.int16), rng.standard_normal((HEADS, DIM)).astype(np.float32)
    mean[:, [5, 5 + DIM // 2]] = 0
    follow_ratios(ratios, q, k, mean)

    def expected(rounding: Any) -> np.ndarray:
        found = np.zeros((HEADS, DIM // 2))
        for t in range(30):
            sizes = np.abs(k[t].astype(np.float64) - mean).reshape(HEADS, 2, -1).sum(1)
            query_sums = np.abs(q[t].astype(np.float64)).reshape(HEADS, -1, 2, DIM // 2).sum((1, 2))
            with np.errstate(invalid="ignore"):
                lines = [256 * (np.frexp(x)[1] - 2 + 2 * np.frexp(x)[0]) for x in (sizes, query_sums)]
                change = (np.floor(lines[0]) - np.floor(lines[1]) - found) / 8
            counts = np.isfinite(sizes) & np.isfinite(query_sums) & (sizes > 0) & (query_sums > 0)
            found = np.where(counts, found + rounding(np.where(counts, change, 0)), found)
        return found

    assert np.abs(ratios - expected(np.floor)).max() <= 2  # sizes themselves are rounded to float32
    assert np.abs(ratios - expected(np.ceil)).max() > 2
    assert not ratios[:, 5].any()


def test_a_saved_cache_is_fitted_as_the_one_that_was_saved(tmp_path: Path) -> None:
    whole, cache = tokens(400, PROMPT, 45), cache_of()
    fed(cache, whole, [PROMPT, *[1] * 7])
    cache.save(tmp_path / "cache")
    other = MixedPrecisionCache.load(tmp_path / "cache")
    for at in range(PROMPT + 7, 400):
        results = [np.asarray(x.step(0, *(y[:, at : at + 1] for y in whole))) for x in (cache, other)]
        assert np.array_equal(*results)
    assert shifts(cache).any()
    assert np.array_equal(shifts(cache), shifts(other))


def test_padding_and_tokens_without_queries_fit_nothing() -> None:
    whole, cache, silent = tokens(PROMPT + 64, PROMPT, 45), cache_of(), cache_of()
    for x in (cache, silent):
        fed(x, whole, [PROMPT])
    for at in range(PROMPT, PROMPT + 64):
        q, k, v = (x[:, at : at + 1] for x in whole)
        cache.step(0, q, k, v, valid=np.zeros((1, 1), bool))
        silent.append(0, k, v)
    assert not shifts(cache).any()
    assert not shifts(silent).any()
