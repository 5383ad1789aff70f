"""Drawn calls that are hard on accuracy: those that keep promise 2, all of them, and a judge that says no.

The numbers are those that `benchmarks/accuracy/draws.py` counts: none is beyond the promise there of what is
tested here. Packed attention in float32 is not: docs/performance/flash_attention.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvlab.arrays import numpy_dtype
from kvlab.ops.attention import attention
from kvlab.ops.attention_backward import attention_backward
from kvlab.reference import attention as reference
from kvlab.reference.attention_backward import attention_backward as reference_backward
from tests.compare import assert_accurate, low_precision_attention, share_of_allowed
from tests.draws import CASES, draw_call, shares
from tests.gradients import exact_gradients, low_precision_gradients

WHOLE = [case for case in CASES if case[1] != "float32" or not case[0].startswith("packed")]
# What was beyond the promise among 5,000 draws of float32, up to 78 times what is allowed.
PINNED = {
    "attention": (
        78, 265, 704, 1222, 1252, 1602, 1947, 1960, 2179, 2338, 3349, 3507, 3703, 4103, 4436, 4545, 4762,
        4881, 4891,
    ),
    "grouped": (664, 946, 1225),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype"), WHOLE)
@settings(max_examples=20)
@given(number=st.integers(0, 299))
@example(number=131)  # bfloat16: dq of equal keys was the rounding of out, 500 times what is allowed
@example(number=274)  # both: the same of nearly equal keys
def test_drawn_calls_keep_the_promise(kind: str, dtype: str, number: int) -> None:
    keys, found = shares(kind, dtype, number)
    assert max(found.values()) <= 1, (keys, found)


@pytest.mark.parametrize(("kind", "number"), [(kind, n) for kind in PINNED for n in PINNED[kind]])
def test_float32_keeps_the_promise_where_it_did_not(kind: str, number: int) -> None:
    """Equal and nearly equal keys, a key alone, and one with nearly all the weight of 70."""
    keys, found = shares(kind, "float32", number)
    assert max(found.values()) <= 1, (keys, found)


def test_a_row_with_keys_in_two_tiles_keeps_its_delta() -> None:
    """Of 65 to 70 keys the first tile had nearly all the weight, so its mean passed for that of all."""
    for dtype in ("float16", "bfloat16"):
        assert max(shares("attention", dtype, 306)[1].values()) <= 1


def _equal_keys(dtype: str, count: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(count)
    q, k, v, dout = (
        rng.standard_normal((1, n, 2, 32)).astype(numpy_dtype(dtype)) for n in (9, count, count, 9)
    )
    k[:] = k[:, :1]
    return dout, q, k, v


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(dtype, n) for dtype in ("float16", "bfloat16", "float32") for n in (2, 3, 10, 64)]
    + [("float32", n) for n in (65, 200, 1000)],
)
def test_equal_keys_leave_nothing_of_dq(dtype: str, count: int) -> None:
    """In 16 bits where one tile holds all keys of a row: then it need not ask out, which is rounded."""
    dout, q, k, v = _equal_keys(dtype, count)
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    dq = attention_backward(dout, q, k, v, out, lse, backend="cpu")[0]
    assert np.abs(dq.astype(np.float64)).max() < (2e-5 if dtype != "float32" else 3e-7)
    if dtype != "float32":
        from_rounded, _, _ = reference_backward(dout, q, k, v, out, lse)
        assert np.abs(from_rounded).max() > 5e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_of_the_keys_keep_the_delta_of_all(dtype: str) -> None:
    """The keys of a part are all that a row sees there, but not all that out is of."""
    rng = np.random.default_rng(3)
    dout, q, k, v = (rng.standard_normal((1, n, 2, 32)).astype(numpy_dtype(dtype)) for n in (9, 9, 80, 80))
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    cuts = slice(0, 60), slice(60, 80)
    parts = [attention_backward(dout, q, k[:, c], v[:, c], out, lse, backend="cpu") for c in cuts]
    dq = sum(part[0].astype(np.float64) for part in parts)
    expected, low = (f(dout, q, k, v)[0] for f in (exact_gradients, low_precision_gradients))
    assert_accurate(dq.astype(numpy_dtype(dtype)), expected, low, "dq")


def test_the_judge_refuses_what_mistakes_give() -> None:
    """Zeros, heads permuted, dq from a rounded out: in draws with several rows, keys and heads."""
    rng = np.random.default_rng(2)
    refused = 0
    for _ in range(60):
        q, k, v, dout, options, keys = draw_call(rng, numpy_dtype("bfloat16"))
        expected, low = (
            reference.attention(q, k, v, **options),
            low_precision_attention(q, k, v, **options)[0],
        )
        assert share_of_allowed(np.zeros_like(q), expected, low) > 1 or not expected.any()
        if q.shape[2] > 1 and q.shape[1] > 8 and k.shape[1] > 1 and keys == "unrelated":
            wrong = np.roll(expected, 1, axis=2).astype(q.dtype)
            assert share_of_allowed(wrong, expected, low) > 1
            refused += 1
    assert refused > 3
    wrong_dq = 0
    for count in range(2, 60):
        dout, q, k, v = (x[:, :, :1] for x in _equal_keys("bfloat16", count))
        rows = dout[:, :1], q[:, :1], k[:, :2], v[:, :2]
        out, lse = reference.attention(*rows[1:], return_lse=True)
        wrong, _, _ = reference_backward(*rows, out.astype(q.dtype), lse)
        judged = exact_gradients(*rows)[0], low_precision_gradients(*rows)[0]
        wrong_dq += share_of_allowed(wrong.astype(q.dtype), *judged) > 1
    assert wrong_dq > 3  # of 58: mostly low precision errs as much
    with pytest.raises(AssertionError, match="stands at other places"):
        share_of_allowed(np.full_like(q, np.nan), *(np.zeros(q.shape),) * 2)
