"""The float64 attention reference: against three loops, and by the laws that attention obeys."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference.attention import (
    attend_rows,
    attention,
    attention_mass,
    attention_varlen,
    merge_attention,
    visible_keys,
)
from tests.compare import each_sequence
from tests.strategies import (
    SEEDS,
    AttentionCase,
    VarlenAttentionCase,
    attention_cases,
    attention_options,
    varlen_attention_cases,
)

Array = NDArray[Any]

# Scores reach about 100 and values 4: float64 keeps 12 digits of everything computed from them.
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def _attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Array]:
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse


def _assert_same(actual: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    np.testing.assert_allclose(actual[0], expected[0], **EXACT)
    np.testing.assert_allclose(actual[1], expected[1], **EXACT)


def _by_loops(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Array, Array, Array]:
    """Attention element by element: out, lse, mass. The mask is the sentence in flash-attn's README."""
    (batch, seqlen_q, num_heads_q, head_dim), (seqlen_k, num_heads_kv) = q.shape, k.shape[1:3]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, mass = np.zeros_like(q), np.zeros((batch, num_heads_kv, seqlen_k))
    lse = np.full((batch, num_heads_q, seqlen_q), -np.inf)
    for b, i, h in np.ndindex(batch, seqlen_q, num_heads_q):
        kv_head, weights = h // (num_heads_q // num_heads_kv), {}
        for j in range(seqlen_k):
            after_left = window[0] < 0 or j >= i + seqlen_k - seqlen_q - window[0]
            before_right = window[1] < 0 or j <= i + seqlen_k - seqlen_q + window[1]
            before_self = not causal or j <= i + seqlen_k - seqlen_q
            if before_self and after_left and (before_right or causal):
                score = math.fsum(q[b, i, h] * k[b, j, kv_head]) * (scale or 1 / math.sqrt(head_dim))
                weights[j] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
        if weights:
            total = math.fsum(weights.values())
            lse[b, h, i] = math.log(total)
            for j, weight in weights.items():
                out[b, i, h] += weight / total * v[b, j, kv_head]
                mass[b, kv_head, j] += weight / total
    return out, lse, mass


@given(attention_cases(max_seqlen=5))
def test_agrees_with_three_loops(case: AttentionCase) -> None:
    out, lse = _attend(case.q, case.k, case.v, **case.options)
    mass = attention_mass(case.q, case.k, **case.options)
    expected_out, expected_lse, expected_mass = _by_loops(case.q, case.k, case.v, **case.options)
    np.testing.assert_allclose(out, expected_out, **EXACT)
    np.testing.assert_allclose(lse, expected_lse, **EXACT)
    np.testing.assert_allclose(mass, expected_mass, **EXACT)


@given(attention_cases())
def test_probabilities_of_a_row_sum_to_one(case: AttentionCase) -> None:
    out, lse = _attend(case.q, case.k, np.ones(case.k.shape), **case.options)
    has_keys = np.swapaxes(lse, 1, 2) > -np.inf
    np.testing.assert_allclose(out, np.where(has_keys, 1.0, 0.0)[..., None] * np.ones(out.shape), **EXACT)
    mass = attention_mass(case.q, case.k, **case.options)
    assert (mass >= 0).all()
    np.testing.assert_allclose(mass.sum(), np.count_nonzero(has_keys), rtol=1e-12)


@given(attention_cases())
def test_rows_without_a_key_are_zero_and_minus_infinity(case: AttentionCase) -> None:
    out, lse = _attend(case.q, case.k, case.v, **case.options)
    mask = {name: case.options[name] for name in ("causal", "window")}
    empty = ~visible_keys(case.q.shape[1], case.k.shape[1], **mask).any(axis=1)
    assert (out[:, empty] == 0).all()
    assert (lse[:, :, empty] == -np.inf).all()
    assert np.isfinite(lse[:, :, ~empty]).all()
    assert np.isfinite(out).all()


@given(attention_cases(min_seqlen=1), SEEDS)
def test_adding_one_vector_to_all_keys_only_shifts_lse(case: AttentionCase, seed: int) -> None:
    options = case.options | {"softcap": 0.0, "scale": 0.25}
    q, k = case.q.astype(np.float64), case.k.astype(np.float64)
    vector = np.random.default_rng(seed).normal(size=k.shape[2:])
    out, lse = _attend(q, k, case.v, **options)
    out_shifted, lse_shifted = _attend(q, k + vector, case.v, **options)
    np.testing.assert_allclose(out_shifted, out, **EXACT)
    by_head = np.repeat(vector, q.shape[2] // k.shape[2], axis=0)
    np.testing.assert_allclose(lse_shifted, lse + 0.25 * np.einsum("bqhd,hd->bhq", q, by_head), **EXACT)


@given(attention_cases(min_seqlen=1), SEEDS)
def test_the_order_of_keys_does_not_matter(case: AttentionCase, seed: int) -> None:
    options = case.options | {"causal": False, "window": (-1, -1)}
    order = np.random.default_rng(seed).permutation(case.k.shape[1])
    q, k, v = case.q, case.k[:, order], case.v[:, order]
    _assert_same(_attend(q, k, v, **options), _attend(q, case.k, case.v, **options))
    mass = attention_mass(q, case.k, **options)
    np.testing.assert_allclose(attention_mass(q, k, **options), mass[..., order], **EXACT)


@given(attention_cases())
def test_grouped_heads_are_repeated_heads(case: AttentionCase) -> None:
    group = case.q.shape[2] // case.k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (case.k, case.v))
    _assert_same(_attend(case.q, case.k, case.v, **case.options), _attend(case.q, k, v, **case.options))
    mass = attention_mass(case.q, k, **case.options)
    by_head = sum(mass[:, head::group] for head in range(group))
    np.testing.assert_allclose(attention_mass(case.q, case.k, **case.options), by_head, **EXACT)


@given(attention_cases(min_seqlen=1))
def test_a_causal_row_is_plain_attention_over_its_past(case: AttentionCase) -> None:
    options = case.options | {"causal": True, "window": (-1, -1)}
    out, lse = _attend(case.q, case.k, case.v, **options)
    seqlen_q, seqlen_k = case.q.shape[1], case.k.shape[1]
    for i in range(seqlen_q):
        past = slice(0, max(0, i + 1 + seqlen_k - seqlen_q))
        plain = options | {"causal": False}
        row = _attend(case.q[:, i : i + 1], case.k[:, past], case.v[:, past], **plain)
        _assert_same((out[:, i : i + 1], lse[:, :, i : i + 1]), row)


def _merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    return merge_attention(*zip(*parts, strict=True))


@given(attention_cases(min_seqlen=1), st.integers(1, 5), SEEDS)
def test_merging_any_disjoint_split_of_the_keys_is_exact(case: AttentionCase, parts: int, seed: int) -> None:
    q, k, v = (x[0].astype(np.float64) for x in (case.q, case.k, case.v))
    mask = {name: case.options[name] for name in ("causal", "window")}
    scores = {name: case.options[name] for name in ("scale", "softcap")}
    visible = visible_keys(len(q), len(k), **mask)
    owner = np.random.default_rng(seed).integers(0, parts, len(k))
    partial = [attend_rows(q, k, v, visible & (owner == part), **scores) for part in range(parts)]
    _assert_same(_merge(*partial), attend_rows(q, k, v, visible, **scores))


def test_merge_takes_batches_orders_and_groupings() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 30, 2, 8)), rng.normal(size=(2, 30, 2, 8))
    expected = _attend(q, k, v)
    a, b, c = (_attend(q, k[:, part], v[:, part]) for part in (slice(0, 9), slice(9, 10), slice(10, 30)))
    for parts in ((a, b, c), (c, a, b), (_merge(c, b), a), (a, _merge(b, c))):
        _assert_same(_merge(*parts), expected)


def test_merge_ignores_what_an_empty_part_holds() -> None:
    out, lse = merge_attention(
        [np.full((1, 2, 3), 5.0), np.full((1, 2, 3), np.nan)], [[[1.0], [-np.inf]], np.full((2, 1), -np.inf)]
    )
    np.testing.assert_array_equal(out, [[[5.0] * 3, [0.0] * 3]])
    np.testing.assert_array_equal(lse, [[1.0], [-np.inf]])


def test_merge_survives_lse_far_apart_and_large() -> None:
    outs = [np.full((1, 1, 1), value) for value in (1.0, 2.0, 3.0)]
    out, lse = merge_attention(outs, [np.full((1, 1), value) for value in (5000.0, 5000.0, -5000.0)])
    assert out.item() == 1.5
    assert lse.item() == 5000 + math.log(2)


@pytest.mark.parametrize(("outs", "lses"), [([], []), ([np.ones((1, 1, 1))], [])])
def test_merge_refuses_no_parts_and_unequal_numbers(outs: list[Array], lses: list[Array]) -> None:
    with pytest.raises(ValueError, match=rf"outs has {len(outs)} parts, lses {len(lses)}"):
        merge_attention(outs, lses)


@given(varlen_attention_cases())
def test_variable_length_is_each_sequence_by_itself(case: VarlenAttentionCase) -> None:
    out, lse = attention_varlen(*case.args, return_lse=True, **case.options)
    expected_out, expected_lse = each_sequence(_attend, *case.args[:5], **case.options)
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)
    assert out.shape == case.q.shape
    assert lse.shape == (case.q.shape[1], len(case.q))
    np.testing.assert_array_equal(attention_varlen(*case.args, **case.options), out)


@given(attention_cases(), attention_options())
def test_the_layout_of_the_arguments_does_not_matter(case: AttentionCase, options: dict[str, Any]) -> None:
    dense = [np.ascontiguousarray(x) for x in (case.q, case.k, case.v)]
    _assert_same(_attend(case.q, case.k, case.v, **options), _attend(*dense, **options))
    np.testing.assert_array_equal(attention(*dense, **options), _attend(*dense, **options)[0])


def test_scale_defaults_to_one_over_the_root_of_head_dim() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 16))
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, scale=0.25))
    assert not np.allclose(attention(q, k, v), attention(q, k, v, scale=1.0))


def test_softcap_bounds_scores() -> None:
    q, k, v = 100 * np.random.default_rng(0).normal(size=(3, 1, 5, 2, 16))
    _, lse = _attend(q, k, v, softcap=3.0)
    assert np.abs(lse - math.log(5)).max() <= 3.0
    small = [x / 1000 for x in (q, k, v)]
    np.testing.assert_allclose(attention(*small, softcap=1e6), attention(*small), **EXACT)


def test_a_window_of_no_limit_on_either_side_is_no_mask() -> None:
    assert visible_keys(3, 5).all()
    np.testing.assert_array_equal(visible_keys(3, 5, causal=True), visible_keys(3, 5, window=(-1, 0)))
    np.testing.assert_array_equal(
        visible_keys(3, 5, causal=True, window=(1, 4)), visible_keys(3, 5, window=(1, 0))
    )


def test_nan_and_infinity_stay_in_their_row_without_a_warning() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 1, 8))
    q[0, 1, 0, 3], q[0, 2, 0, 0] = np.nan, np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = _attend(q, k, v)
        merged, _ = merge_attention([out, out], [lse, lse])
    for result in (out, merged):
        assert np.isnan(result[0, 1:3]).all()
        assert np.isfinite(result[0, [0, 3]]).all()
    assert np.isnan(lse[0, 0, 1])


@pytest.mark.parametrize(("num_heads_q", "num_heads_kv"), [(3, 2), (2, 4), (1, 0)])
def test_heads_that_do_not_divide_are_refused(num_heads_q: int, num_heads_kv: int) -> None:
    q, kv = np.zeros((2, num_heads_q, 8)), np.zeros((2, num_heads_kv, 8))
    message = f"num_heads_q is {num_heads_q}: it must be a multiple of num_heads_kv={num_heads_kv}"
    with pytest.raises(ValueError, match=message):
        attention(q[None], kv[None], kv[None])
    with pytest.raises(ValueError, match=message):
        attention_varlen(q, kv, kv, [0, 2], [0, 2], 2, 2)
    with pytest.raises(ValueError, match=message):
        attention_mass(q[None], kv[None])


def test_bad_options_are_refused() -> None:
    x = np.zeros((1, 2, 1, 8))
    with pytest.raises(ValueError, match=r"window is \(-2, 0\)"):
        attention(x, x, x, window=(-2, 0))
    with pytest.raises(ValueError, match=r"softcap is -1"):
        attention(x, x, x, softcap=-1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": [0, 3]}, r"cu_seqlens_q is \[0, 3\]: it must rise from 0 to 4"),
        ({"cu_seqlens_q": [1, 4]}, r"cu_seqlens_q is \[1, 4\]"),
        ({"cu_seqlens_k": [0, 5, 4]}, r"cu_seqlens_k is \[0, 5, 4\]"),
        ({"cu_seqlens_k": []}, r"cu_seqlens_k is \[\]"),
        ({"cu_seqlens_k": [0, 1, 4]}, "cu_seqlens_q names 1 sequences, cu_seqlens_k names 2"),
        ({"max_seqlen_q": 3}, "max_seqlen_q is 3, but one sequence has 4 rows"),
        ({"max_seqlen_k": 0}, "max_seqlen_k is 0, but one sequence has 4 rows"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    x = np.zeros((4, 1, 8))
    good: dict[str, Any] = {
        "cu_seqlens_q": [0, 4],
        "cu_seqlens_k": [0, 4],
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    attention_varlen(x, x, x, **good)
    with pytest.raises(ValueError, match=message):
        attention_varlen(x, x, x, **(good | change))
