"""The strategies draw what they say: a test on data that are tamer than they claim proves nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import (
    FLOATS,
    SEEDS,
    VarlenAttentionCase,
    hostile_view,
    random_floats,
    varlen_attention_cases,
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_floats_have_all_signs_and_exponents(dtype: np.dtype) -> None:
    values = random_floats(np.random.default_rng(0), (20_000,), dtype, (-3, 2)).astype(np.float64)
    normal = values[np.abs(values) >= 2.0**-3]
    assert set(np.unique(np.floor(np.log2(np.abs(normal))))) == set(range(-3, 3))
    assert np.abs(values).max() < 2.0**3
    small = values[np.abs(values) < 2.0**-3]
    assert 100 < len(small) < 400
    assert np.abs(small).max() < 2.0**-13
    assert (small == 0).any()
    assert abs(np.mean(values > 0) - 0.5) < 0.05


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([*FLOATS, np.dtype(np.uint8), np.dtype(np.int32)]),
    SEEDS,
)
def test_hostile_view_equals_the_array_and_lies_in_poison(
    shape: list[int], dtype: np.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 100, shape).astype(dtype)
    view = hostile_view(rng, array)
    np.testing.assert_array_equal(view, array)
    buffer = view
    while buffer.base is not None:
        buffer = buffer.base
    poison = np.isnan(buffer) if dtype.kind not in "ui" else buffer == np.iinfo(dtype).max
    assert np.count_nonzero(~poison) == array.size


def test_hostile_views_are_mostly_not_contiguous() -> None:
    rng = np.random.default_rng(0)
    views = [hostile_view(rng, np.ones((3, 4, 5), np.float32)) for _ in range(50)]
    assert sum(view.flags.c_contiguous for view in views) < 10
    assert sum(view.strides[-1] != 4 for view in views) > 10


@given(varlen_attention_cases())
def test_varlen_cases_fit_together(case: VarlenAttentionCase) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = case.args
    for rows, cu_seqlens, longest in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k)):
        assert cu_seqlens.dtype == np.int32
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == len(rows)
        assert np.diff(cu_seqlens).max(initial=0) == longest
        assert (np.diff(cu_seqlens) >= 0).all()
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0


def test_examples_are_the_same_at_every_run_unless_asked_otherwise() -> None:
    assert settings.get_profile("default").derandomize
    assert not settings.get_profile("thorough").derandomize
