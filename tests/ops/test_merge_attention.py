"""merge_attention on every backend: exact up to rounding, whatever the parts; and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.ops.attention import merge_attention
from kvlab.reference import attention as reference
from kvlab.registry import last_backend, rows
from tests.compare import assert_accurate, low_precision_merge
from tests.strategies import FLOATS, HEAD_PAIRS, SEEDS, hostile_view, random_floats

Array = NDArray[Any]

BACKENDS = [row.backend for row in rows("merge_attention") if row.device_kind == "cpu"]


@st.composite
def merge_cases(draw: st.DrawFn) -> tuple[list[Array], list[Array]]:
    """Draw partial results of either layout; where lse is -inf out holds NaN: nothing may read it."""
    rng, dtype = np.random.default_rng(draw(SEEDS)), draw(st.sampled_from(FLOATS))
    rows_shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    heads = draw(st.sampled_from([num_heads_q for num_heads_q, _ in HEAD_PAIRS]))
    spread, center, empty = draw(
        st.tuples(*map(st.sampled_from, ((0.0, 2.0, 60.0), (0.0, 900.0), (0.0, 0.3, 1.0))))
    )
    outs, lses = [], []
    for _ in range(draw(st.integers(1, 5))):
        lse = rng.normal(center, spread, (*rows_shape[:-1], heads, rows_shape[-1])).astype(np.float32)
        lse[rng.random(lse.shape) < empty] = -np.inf
        out = random_floats(rng, (*rows_shape, heads, 24), dtype)
        out[np.swapaxes(lse, -1, -2) == -np.inf] = np.nan
        outs.append(hostile_view(rng, out) if draw(st.booleans()) else out)
        lses.append(hostile_view(rng, lse) if draw(st.booleans()) else lse)
    return outs, lses


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=merge_cases())
def test_agrees_with_the_reference(backend: str, case: tuple[list[Array], list[Array]]) -> None:
    outs, lses = case
    before = [x.tobytes() for x in (*outs, *lses)]
    out, lse = merge_attention(outs, lses, backend=backend)
    assert last_backend() == backend
    assert out.dtype == outs[0].dtype
    assert lse.dtype == np.float32
    expected_out, expected_lse = reference.merge_attention(outs, lses)
    known = [np.where(np.isnan(x.astype(np.float32)), 0, x).astype(x.dtype) for x in outs]
    low_precision_out, low_precision_lse = low_precision_merge(known, lses)
    assert_accurate(out, expected_out, low_precision_out)
    assert_accurate(lse, expected_lse, low_precision_lse, "lse")
    assert [x.tobytes() for x in (*outs, *lses)] == before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wrong_merges_would_be_noticed(dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    outs = [random_floats(rng, (2, 5, 4, 64), dtype) for _ in range(3)]
    lses = [rng.normal(0, 2, (2, 4, 5)).astype(np.float32) for _ in range(3)]
    expected, expected_lse = reference.merge_attention(outs, lses)
    low_precision, low_precision_lse = low_precision_merge(outs, lses)
    assert_accurate(merge_attention(outs, lses)[0], expected, low_precision)
    wrong = {
        "zeros": np.zeros_like(expected),
        "plain mean": np.mean([x.astype(np.float64) for x in outs], axis=0),
        "a part missing": reference.merge_attention(outs[:2], lses[:2])[0],
        "parts exchanged": reference.merge_attention(outs, lses[::-1])[0],
        "heads permuted": np.roll(expected, 1, axis=2),
        "base-2 weights": reference.merge_attention(outs, [x * math.log(2) for x in lses])[0],
    }
    for answer in wrong.values():
        with pytest.raises(AssertionError, match="out: error"):
            assert_accurate(answer.astype(dtype), expected, low_precision)
    with pytest.raises(AssertionError, match="lse: error"):
        assert_accurate(np.max(lses, axis=0), expected_lse, low_precision_lse, "lse")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_part_sees_a_key(backend: str) -> None:
    outs, lses = [np.full((2, 3, 8), np.nan, np.float16)] * 2, [np.full((3, 2), -np.inf, np.float32)] * 2
    out, lse = merge_attention(outs, lses, backend=backend)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 8)))
    np.testing.assert_array_equal(lse, np.full((3, 2), -np.inf))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("error")
def test_a_part_may_outweigh_another_by_more_than_float32_counts(backend: str) -> None:
    outs = [np.full((2, 3, 8), value, np.float32) for value in (1, 2)]
    lses = [np.full((3, 2), value, np.float32) for value in (-3e38, 3e38)]
    out, lse = merge_attention(outs, lses, backend=backend)
    np.testing.assert_array_equal(out, outs[1])
    np.testing.assert_array_equal(lse, lses[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_torch_in_torch_out(backend: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    outs = [torch.randn(2, 5, 3, 16).to(getattr(torch, kind)) for _ in range(2)]
    lses = [torch.randn(2, 3, 5) for _ in range(2)]
    out, lse = merge_attention(outs, lses, backend=backend)
    assert (out.dtype, lse.dtype) == (getattr(torch, kind), torch.float32)
    as_numpy = [
        [np.asarray(x.float()).astype(numpy_dtype(kind)) for x in outs],
        [np.asarray(x) for x in lses],
    ]
    for actual, expected in zip((out, lse), merge_attention(*as_numpy, backend=backend), strict=True):
        np.testing.assert_array_equal(np.asarray(actual.float()), expected.astype(np.float32))


def _parts(count: int = 2) -> tuple[list[Array], list[Array]]:
    return [np.ones((2, 5, 3, 8), np.float16)] * count, [np.zeros((2, 3, 5), np.float32)] * count


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, "outs has 0 parts, lses 0: pass equally many, at least one"),
        (_parts(2)[0], _parts(1)[1], ValueError, "outs has 2 parts, lses 1"),
        ([np.ones((3, 8), np.float16)], _parts(1)[1], ValueError, r"outs\[0\] has shape \(3, 8\)"),
        (
            _parts(1)[0],
            [np.zeros((2, 5, 3), np.float32)],
            ValueError,
            r"lses\[0\] has Hq = 5 .*outs\[0\] has Hq = 3",
        ),
        (
            [_parts()[0][0], np.ones((2, 4, 3, 8), np.float16)],
            _parts()[1],
            ValueError,
            r"outs\[1\] has Sq = 4 .*outs\[0\] has Sq = 5",
        ),
        (_parts(1)[0], [np.zeros((2, 3, 5))], TypeError, r"lses\[0\] has dtype float64; it must be float32"),
        (
            [_parts()[0][0], np.ones((2, 5, 3, 8), np.float32)],
            _parts()[1],
            TypeError,
            r"outs\[1\] has dtype float32; it must be float16",
        ),
        ([np.ones((2, 5, 3, 8))], _parts(1)[1], NotImplementedError, "dtype=float64"),
        ([[1.0]], _parts(1)[1], TypeError, r"outs\[0\]"),
    ],
)
def test_what_does_not_fit_is_refused(outs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_attention(outs, lses)


def test_backends_elsewhere_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="works on cuda arrays"):
        merge_attention(*_parts(), backend="cuda")
