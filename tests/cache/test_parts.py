"""The small parts of a cache: exact attention, key mean, scores, parsing."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.ladder import parse_bits
from kvlab.ops.cpu.exact import attend_exact
from kvlab.ops.frame import FIRST, LAST, MIN_TOKENS, key_mean
from kvlab.reference.attention import attend_rows, softmax_rows
from kvlab.reference.importance import updated_scores
from kvlab.sizes import parse_budget


@given(
    rows=st.integers(1, 9),
    older=st.integers(0, 9),
    group=st.sampled_from([1, 3]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 999),
)
def test_exact_attention_and_its_mass(rows, older, group, softcap, seed):
    rng = np.random.default_rng(seed)
    keys, heads, dim = rows + older, 2, 8
    q = rng.standard_normal((2, rows, heads * group, dim), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, keys, heads, dim), dtype=np.float32)
    visible = rng.random((2, keys)) < 0.8
    hidden = ~visible
    k[hidden], v[hidden] = np.nan, np.nan
    kept = int(rng.integers(0, rows + 1))
    result = attend_exact(q, k, v, visible, scale=0.5, softcap=softcap, keep_rows=kept)
    for row in range(2):
        seen = (np.arange(keys) <= np.arange(rows)[:, None] + older) & visible[row]
        clean = np.nan_to_num(k[row]), np.nan_to_num(v[row])
        out, lse = attend_rows(q[row], *clean, seen, scale=0.5, softcap=softcap)
        np.testing.assert_allclose(result.out[row], out, atol=3e-6)
        np.testing.assert_allclose(result.lse[row], lse, atol=3e-6)
        if kept:
            probabilities, _ = softmax_rows(q[row], clean[0], seen, scale=0.5, softcap=softcap)
            want = probabilities.reshape(heads, group, rows, keys)[:, :, rows - kept :].mean((1, 2))
            np.testing.assert_allclose(result.mass(result.lse)[row], want, atol=3e-6)


def test_exact_attention_over_several_blocks():
    rng = np.random.default_rng(0)
    rows = 326  # of one head: two blocks of panels, six tiles of keys
    q, k, v = rng.standard_normal((3, 1, rows, 1, 8), dtype=np.float32)
    result = attend_exact(q, k, v, np.ones((1, rows), bool), scale=0.4, softcap=0.0, keep_rows=100)
    out, _ = attend_rows(q[0], k[0], v[0], np.tri(rows, dtype=bool), scale=0.4, softcap=0.0)
    np.testing.assert_allclose(result.out[0], out, atol=3e-6)
    probabilities, _ = softmax_rows(q[0], k[0], np.tri(rows, dtype=bool), scale=0.4, softcap=0.0)
    np.testing.assert_allclose(result.mass(result.lse)[0], probabilities[:, -100:].mean(1), atol=1e-6)


def test_exact_attention_joins_other_keys():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 3, 6, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 9, 2, 8), dtype=np.float32)
    sees = np.concatenate([np.ones((3, 5), bool), np.tri(3, 4, 1, dtype=bool)], 1)  # five older keys
    older = [attend_rows(q[row], k[row, :5], v[row, :5], sees[:, :5], scale=0.5) for row in range(2)]
    out, lse = (np.stack(parts).astype(np.float32) for parts in zip(*older, strict=True))
    out[1, 2], lse[1, :, 2] = np.nan, -np.inf  # a row without older keys
    visible = np.ones((2, 4), bool)
    visible[0] = False  # a sequence without exact keys
    result = attend_exact(q, k[:, 5:], v[:, 5:], visible, scale=0.5, softcap=0.0, keep_rows=0)
    both, total = result.merged(out, lse)
    for row in range(2):
        seen = sees.copy()
        seen[:, 5:] &= visible[row]
        seen[2, :5] &= row == 0
        want, want_lse = attend_rows(q[row], k[row], v[row], seen, scale=0.5)
        np.testing.assert_allclose(both[row], want, atol=3e-6)
        np.testing.assert_allclose(total[row], want_lse, atol=3e-6)


def test_key_mean():
    k = np.random.default_rng(1).standard_normal((100, 2, 16)).astype(np.float32) + 3
    np.testing.assert_array_equal(key_mean(k), k[FIRST:LAST].astype(np.float64).mean(0).astype(np.float16))
    assert not key_mean(k[: FIRST + MIN_TOKENS - 1]).any()
    k[50, 0, 3], k[50, 1, 4] = np.nan, 1e9
    mean = key_mean(k)
    assert (mean[0, 3], mean[1, 4]) == (0, 0)
    assert np.isfinite(mean).all()


@given(st.integers(0, 1000), st.floats(0, 10))
def test_key_mean_of_narrow_ladders_makes_no_channel_of_the_first_key_longer(seed, offset):
    rng = np.random.default_rng(seed)
    k = (rng.standard_normal((64, 2, 16)) + offset * rng.standard_normal((2, 16))).astype(np.float32)
    whole, mean = key_mean(k), key_mean(k, narrow=True)
    assert ((mean == whole) | (mean == 0)).all()
    shorter = np.abs(k[0] - whole.astype(np.float64)) < np.abs(k[0]) * (1 - 2e-3)
    longer = np.abs(k[0] - whole.astype(np.float64)) > np.abs(k[0]) * (1 + 2e-3) + 1e-6
    assert (mean == whole)[shorter].all()
    assert not mean[longer].any()
    k[5, 0, 0], k[6, 0, 1] = np.nan, np.inf
    assert not key_mean(k, narrow=True)[0, :2].any()


def test_scores_of_tokens_that_nobody_attends_sink():
    rng = np.random.default_rng(2)
    first, positions = rng.random(50, dtype=np.float32), np.arange(50)
    names = "attention", "forecast"
    later = [updated_scores(name, first, 0 * first, positions, 60, 0.1, 32) for name in names]
    assert (later[1] >= 0).all()
    assert (later[1] <= later[0]).all()
    assert (later[0] <= first).all()


def test_parsed_bits_are_ordered_and_complete():
    ladders = parse_bits("0-1:8,2:k4v2+8+2,3-4:16", 5)
    assert [[str(rung) for rung in ladder] for ladder in ladders] == [
        ["8"],
        ["8"],
        ["2", "k4v2", "8"],
        ["16"],
        ["16"],
    ]
    for wrong in ("0-1:8", "0-4:8,3:4", "0-5:8", "4-0:8", "0-4:", "0-4:k8"):
        with pytest.raises(ValueError, match="bits"):
            parse_bits(wrong, 5)


@pytest.mark.parametrize("budget", [0, 0.0, -3, "0bpe", "xbpe", "-1GiB", float("nan"), float("inf")])
def test_budgets_that_are_none(budget):
    with pytest.raises(ValueError, match="budget"):
        parse_budget(budget)
    with pytest.raises(TypeError, match="budget"):
        parse_budget(True)


def test_scale_is_the_callers():
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 1, 5, 1, 8), dtype=np.float32)
    results = [
        attend_exact(q, k, v, np.ones((1, 5), bool), scale=s, softcap=0.0, keep_rows=0).out
        for s in (1.0, math.pi)
    ]
    assert np.abs(results[0] - results[1]).max() > 0.01
