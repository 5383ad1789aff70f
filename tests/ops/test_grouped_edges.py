"""Groups of queries on a CPU read nothing beside their arrays, and write nothing beside results.

NaN stands around and between arguments and where no group sees a key; canaries stand around and between
results that others are merged into, and around those that a call makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvlab
from kvlab.ops.grouped import IMPLEMENTATIONS
from kvlab.registry import rows
from tests.grouped import GroupedCase, grouped_cases, in_segments, make_case
from tests.strategies import FLOATS, SEEDS, hostile_view

Array = NDArray[Any]

BACKENDS = [row.backend for row in rows("grouped_attention") if row.device_kind == "cpu"]
CANARY, NOWHERE = 7, 2**20


class Results:
    """float32 arrays in the midst of canaries; `first` is what they hold at first."""

    def __init__(self, first: list[Array]) -> None:
        self._wide = [np.full([2 * n + 3 for n in x.shape], CANARY, np.float32) for x in first]
        self.views = [self._own(wide) for wide in self._wide]
        for view, x in zip(self.views, first, strict=True):
            view[...] = x

    def taken(self) -> list[Array]:
        """Return copies of what they hold; raises if a canary is dead."""
        found = [view.copy() for view in self.views]
        for wide in self._wide:
            around = wide.copy()
            self._own(around)[...] = CANARY
            assert (around == CANARY).all()
        return found

    @staticmethod
    def _own(wide: Array) -> Array:
        return wide[(slice(2, -1, 2),) * wide.ndim]


@contextmanager
def canaries_around_new_arrays() -> Iterator[list[Array]]:
    """Let calls allocate in the midst of canaries, which must be alive afterwards."""
    margin, buffers = 64, list[Array]()

    def empty(shape: Any, dtype: Any = np.float64) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffers.append(np.full(size + 2 * margin, CANARY, np.uint8))
        inside: Array = buffers[-1][margin : margin + size].view(dtype).reshape(shape)
        return inside

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpy.empty", empty)
        yield buffers
    for buffer in buffers:
        assert (buffer[:margin] == CANARY).all()
        assert (buffer[-margin:] == CANARY).all()


def without_unseen_keys(case: GroupedCase) -> GroupedCase:
    """Put NaN where no group sees a key."""
    unseen = np.ones(len(case.k), bool)
    for prefix in case.prefixes:
        unseen[case.seen(prefix)] = False
    k, v = case.k.copy(), case.v.copy()
    k[unseen], v[unseen] = np.nan, np.nan
    return replace(case, k=k, v=v)


def in_poison(case: GroupedCase, seed: int) -> GroupedCase:
    """Put the arrays into the midst of NaN, their axes in another order, with gaps."""
    rng = np.random.default_rng(seed)
    q = [hostile_view(rng, x) for x in case.q_groups]
    return replace(case, q_groups=q, k=hostile_view(rng, case.k), v=hostile_view(rng, case.v))


def results_of(case: GroupedCase, segment_len: int, first: list[Array] | None, **options: Any) -> list[Array]:
    """Return outs and lses, merged into results that hold `first`, or new where there is none.

    With a `segment_len` the keys lie in segments out of order, and unused places of their table name none.
    """
    own = case.options | options
    if segment_len:
        k, v, table = in_segments(case, segment_len)
        used = -(-np.array(case.k_lengths, int) // segment_len)
        table[np.arange(table.shape[1]) >= used[:, None]] = NOWHERE
        own |= {"segment_table": table, "segment_len": segment_len}
        rng = np.random.default_rng(segment_len)
        case = replace(case, k=hostile_view(rng, k), v=hostile_view(rng, v))
    if first is None:
        outs, lses = kvlab.grouped_attention_varlen(case.q_groups, case.k, case.v, return_lse=True, **own)
        return [*outs, *lses]
    results, count = Results(first), len(case.q_groups)
    into = results.views[:count], results.views[count:]
    kvlab.grouped_attention_varlen(case.q_groups, case.k, case.v, into=into, **own)
    return results.taken()


def assert_same_bits(found: list[Array], expected: list[Array]) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), y.copy().view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20)
@given(case=grouped_cases(), segment_len=st.sampled_from((0, 1, 7, 16)), merges=st.booleans(), seed=SEEDS)
def test_nothing_beside_the_arrays_is_touched(
    backend: str, implementation: str, case: GroupedCase, segment_len: int, merges: bool, seed: int
) -> None:
    options = {"backend": backend, "implementation": implementation}
    rng = np.random.default_rng(seed)
    first = None
    if merges:
        first = [rng.standard_normal(q.shape).astype(np.float32) for q in case.q_groups]
        first += [rng.standard_normal((q.shape[1], len(q))).astype(np.float32) for q in case.q_groups]
    expected = results_of(case, 0, first, **options)
    poisoned = in_poison(without_unseen_keys(case), seed)
    found = results_of(poisoned, segment_len, first, **options)
    assert_same_bits(found, expected)
    assert not any(np.isnan(x).any() for x in found)


@pytest.mark.parametrize("float32_dk_dv", [False, True])
@settings(max_examples=20)
@given(case=grouped_cases(), seed=SEEDS)
def test_gradients_touch_nothing_beside_the_arrays(float32_dk_dv: bool, case: GroupedCase, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, answers = len(case.q_groups), []
    for one in (case, in_poison(without_unseen_keys(case), seed)):
        douts = case.douts() if one is case else [hostile_view(rng, x) for x in case.douts()]

        def call(one: GroupedCase = one, douts: list[Array] = douts) -> list[Array]:
            results = results_of(one, 0, None, backend="cpu")
            dq, dk, dv = kvlab.grouped_attention_varlen_backward(
                douts, one.q_groups, one.k, one.v, results[:count], results[count:], backend="cpu",
                float32_dk_dv=float32_dk_dv, **one.options,
            )  # fmt: skip
            return [*results, *dq, dk, dv]

        if one is case:
            call()  # kernels compile, and the compiler knows NumPy's own functions alone
        with canaries_around_new_arrays() as buffers:
            answers.append(call())
        assert len(buffers) > 3
    assert_same_bits(answers[1], answers[0])
    assert not any(np.isnan(x).any() for x in answers[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("segment_len", [0, 7])
def test_a_key_that_is_nan_would_be_noticed(segment_len: int, implementation: str) -> None:
    """The last one that any group sees; the next one may be NaN."""
    case = make_case([[9, 4], [7, 5]], [[30, 6], [20, 3]], [64, 40], dtype=FLOATS[2])
    for key, is_right in ((30, True), (29, False)):
        v = case.v.copy()
        v[key] = np.nan
        found = results_of(replace(case, v=v), segment_len, None, implementation=implementation)
        assert any(np.isnan(x).any() for x in found) is not is_right


def test_a_dead_canary_would_be_noticed() -> None:
    results = Results([np.zeros((2, 3), np.float32)])
    results.taken()
    results.views[0].base[3, 2] = 0  # between two rows
    with pytest.raises(AssertionError):
        results.taken()
    for at in (63, -64):
        with pytest.raises(AssertionError):
            allocate_and_change(at)
    allocate_and_change(64)


def allocate_and_change(at: int) -> None:
    with canaries_around_new_arrays() as buffers:
        np.empty((2, 3), np.float32)
        buffers[0][at] = 0
