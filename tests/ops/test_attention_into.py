"""attention_varlen that merges into results over other keys: as attention over all keys at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlab
from tests.compare import assert_accurate
from tests.strategies import SEEDS
from tests.variable_parts import expected_of_parts, make_parts

BACKENDS = ("cpu", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=SEEDS, whole=st.booleans())
def test_parts_of_the_keys_one_after_the_other(backend: str, seed: int, whole: bool) -> None:
    """Where no key was seen yet out holds NaN; rows that see none in any part become 0."""
    case = make_parts(np.random.default_rng(seed), np.dtype(np.float32))
    out = np.full(case.q.shape, np.nan, np.float32)
    lse = np.full((case.q.shape[1], len(case.q)), -np.inf, np.float32)
    memory = np.asfortranarray(lse) if whole else lse
    for arrays, options in case.calls():
        found: Any = kvlab.attention_varlen(case.q, *arrays, into=(out, memory), backend=backend, **options)
        assert found[0] is out
        assert found[1] is memory
        assert kvlab.last_backend() == backend
    expected, low = expected_of_parts(case)
    assert_accurate(out, expected[0], low[0])
    assert_accurate(memory, expected[1], low[1], "lse")


def test_a_merge_that_forgets_a_part_would_be_noticed() -> None:
    case = make_parts(np.random.default_rng(3), np.dtype(np.float32))
    expected, low = expected_of_parts(case)
    case.parts.pop()
    wrong, _ = expected_of_parts(case)
    for kind in (0, 1):
        with pytest.raises(AssertionError):
            assert_accurate(wrong[kind].astype(np.float32), expected[kind], low[kind])


def test_wrong_results_to_merge_into_are_refused() -> None:
    x, bounds = np.ones((2, 1, 4), np.float32), np.array([0, 2], np.int32)
    out, lse = np.zeros((2, 1, 4), np.float32), np.zeros((1, 2), np.float32)
    lengths = bounds, bounds, 2, 2
    with pytest.raises(TypeError, match="into must be a tuple of two arrays, out and lse, got ndarray"):
        kvlab.attention_varlen(x, x, x, *lengths, into=out)
    with pytest.raises(TypeError, match=r"into\[0\] has dtype float16; it must be float32"):
        kvlab.attention_varlen(x, x, x, *lengths, into=(out.astype(np.float16), lse))
    with pytest.raises(ValueError, match=r"into\[1\]"):
        kvlab.attention_varlen(x, x, x, *lengths, into=(out, lse[:, :1]))


def test_results_that_cannot_be_written_are_refused_before_anything_is() -> None:
    x = np.ones((3, 1, 8), np.float32)
    lengths: Any = (*[np.array([0, 3], np.int32)] * 2, 3, 3)
    for i, name in enumerate(("out", "lse")):
        into: list[Any] = [np.zeros((3, 1, 8), np.float32), np.full((1, 3), -np.inf, np.float32)]
        into[i].flags.writeable = False
        before = [y.copy() for y in into]
        with pytest.raises(ValueError, match=rf"into\[{i}\] is read-only: pass a writable array"):
            kvlab.attention_varlen(x, x, x, *lengths, into=tuple(into))
        assert all(map(np.array_equal, into, before)), name
    torch = pytest.importorskip("torch")
    one = torch.zeros(1, 1, 8).expand(3, 1, 8)
    tensors = [torch.from_numpy(y) for y in (x, x, x, *lengths[:2])]
    with pytest.raises(ValueError, match=r"into\[0\] repeats elements in memory"):
        kvlab.attention_varlen(*tensors, 3, 3, into=(one, torch.full((1, 3), -torch.inf)))
