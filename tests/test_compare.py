"""The judge accepts what is as good as its dtype allows, and says no to everything else."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from kvlab.reference import attention as reference
from tests.compare import (
    assert_accurate,
    low_precision_attention,
    low_precision_merge,
    ulp,
    wrong_attention,
)
from tests.strategies import (
    FLOATS,
    AttentionCase,
    attention_cases,
    random_floats,
)

FLOAT16, BFLOAT16, FLOAT32 = FLOATS

# Calls that a kernel sees: decoding, prefill, a chunk with a window, soft-capped scores.
CALLS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "decode": ((1, 130), {}),
    "prefill": ((70, 70), {"causal": True}),
    "chunk with window": ((9, 100), {"causal": True, "window": (20, 0)}),
    "softcap": ((5, 60), {"softcap": 1.0, "scale": 0.5}),
}


def _call(name: str, dtype: np.dtype[Any]) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    (seqlen_q, seqlen_k), options = CALLS[name]
    rng = np.random.default_rng(1)
    q = random_floats(rng, (2, seqlen_q, 6, 64), dtype)
    k, v = (random_floats(rng, (2, seqlen_k, 3, 64), dtype) for _ in range(2))
    return (q, k, v), options


def _accepts(actual: Any, expected: Any, low_precision: Any) -> bool:
    try:
        assert_accurate(actual, expected, low_precision)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_right_answer_is_accepted_and_every_wrong_one_rejected(name: str, dtype: np.dtype[Any]) -> None:
    qkv, options = _call(name, dtype)
    expected: Any = reference.attention(*qkv, **options)
    low_precision, _ = low_precision_attention(*qkv, **options)
    assert_accurate(expected.astype(dtype), expected, low_precision)
    wrong = wrong_attention(*qkv, **options)
    assert {"zeros", "mean of v", "missing scale", "permuted heads", "swapped kv heads"} < wrong.keys()
    assert {answer.dtype for answer in wrong.values()} == {dtype}
    assert [bug for bug, answer in wrong.items() if _accepts(answer, expected, low_precision)] == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_answer_merged_from_blocks_in_float32_is_accepted(dtype: np.dtype[Any]) -> None:
    (q, k, v), options = _call("decode", dtype)
    expected = reference.attention(q, k, v, **options)
    low_precision, _ = low_precision_attention(q, k, v, **options)
    wide = [x.astype(np.float32) for x in (k, v)]
    parts = [
        low_precision_attention(q.astype(np.float32), *(x[:, keys] for x in wide), **options)
        for keys in (slice(0, 50), slice(50, 51), slice(51, None))
    ]
    out, _ = low_precision_merge(*zip(*parts, strict=True))
    assert_accurate(out.astype(dtype), expected, low_precision)


@pytest.mark.parametrize("bug", [{"scale": 1.0}, {"causal": False, "window": (20, 1)}, {"window": (19, 0)}])
def test_wrong_lse_is_rejected(bug: dict[str, Any]) -> None:
    qkv, options = _call("chunk with window", BFLOAT16)
    expected, wrong = (
        reference.attention(*qkv, return_lse=True, **chosen)[1] for chosen in (options, options | bug)
    )
    _, low_precision = low_precision_attention(*qkv, **options)
    assert_accurate(expected.astype(np.float32), expected, low_precision, "lse")
    with pytest.raises(AssertionError, match="lse: error"):
        assert_accurate(wrong.astype(np.float32), expected, low_precision, "lse")


def test_the_tolerance_is_two_low_precision_errors_and_two_ulp() -> None:
    expected = np.array([1.0, -0.25, 0.0])
    low_precision = np.array([1.0, 0.25, 0.25])
    edge = 2 * 0.5 + 2 * 2.0**-10
    assert_accurate(np.array([1.0, -0.25, edge], np.float16), expected, low_precision)
    beyond = np.nextafter(np.float16(edge), np.float16(2))
    with pytest.raises(AssertionError, match=r"at \(2,\): .*, expected 0, 0.25 in low precision.* 1 of 3 "):
        assert_accurate(np.array([1.0, -0.25, beyond], np.float16), expected, low_precision)


def test_ulp_is_the_spacing_of_each_dtype() -> None:
    assert [ulp(-1.5, dtype) for dtype in FLOATS] == [2.0**-10, 2.0**-7, 2.0**-23]
    assert ulp(0.0, FLOAT16) == 2.0**-24


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nan_and_infinities_must_stand_at_the_same_places(special: float) -> None:
    expected = np.array([1.0, special, 3.0])
    assert_accurate(expected.astype(np.float32), expected, expected)
    for actual in ([1.0, 2.0, 3.0], [special, special, 3.0], [1.0, -special, 3.0], [special, 1.0, 3.0]):
        if not np.array_equal(actual, expected, equal_nan=True):
            with pytest.raises(AssertionError, match=r"stands at other places than expected, first at \("):
                assert_accurate(np.array(actual, np.float32), expected, expected)
    with pytest.raises(AssertionError, match=r"error 1 at \(2,\)"):
        assert_accurate(np.array([1.0, special, 4.0], np.float32), expected, expected)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"out: shape \(3,\), expected \(1, 3\)"):
        assert_accurate(np.ones(3, np.float32), np.ones((1, 3)), np.ones((1, 3)))


def test_data_that_cannot_judge_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot judge"):
        assert_accurate(np.zeros(2, np.float16), np.zeros(2), np.array([0.0, np.inf]))
    with pytest.raises(ValueError, match="cannot judge"):
        assert_accurate(np.zeros(2, np.float16), np.array([0.0, 1e6]), np.zeros(2))


def test_nothing_is_accurate() -> None:
    empty = np.zeros((0, 4))
    assert_accurate(empty.astype(np.float16), empty, empty)


@given(attention_cases())
def test_low_precision_attention_agrees_with_the_reference(case: AttentionCase) -> None:
    expected, expected_lse = reference.attention(case.q, case.k, case.v, return_lse=True, **case.options)
    out, lse = low_precision_attention(case.q, case.k, case.v, **case.options)
    assert (out.dtype, lse.dtype) == (case.q.dtype, FLOAT32)
    eps = ulp(
        1.0, case.q.dtype
    )  # scores of up to 100 are off by 50 * eps, each probability by that part of itself
    np.testing.assert_allclose(lse, expected_lse, atol=100 * eps, rtol=eps)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=400 * eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_low_precision_merge_agrees_with_the_reference(dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    outs = [random_floats(rng, (2, 5, 3, 16), dtype) for _ in range(3)]
    lses = [rng.normal(0, 3, (2, 3, 5)).astype(np.float32) for _ in range(3)]
    for lse in lses:
        lse[0, 0, 0] = -np.inf
    expected, expected_lse = reference.merge_attention(outs, lses)
    out, lse = low_precision_merge(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, FLOAT32)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=16 * ulp(1.0, dtype))
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
