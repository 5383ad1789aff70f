"""grouped_attention_varlen that merges into results over other keys: as attention over all keys at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvlab
from kvlab.ops.grouped import IMPLEMENTATIONS
from tests.compare import assert_accurate
from tests.grouped import GroupedCase, expected_of_parts, make_case, other_keys, scenarios
from tests.strategies import FLOATS, SEEDS

Array = NDArray[Any]
BACKENDS = ("cpu", "reference")


def merged(parts: list[GroupedCase], **options: Any) -> tuple[list[Array], list[Array]]:
    """Return outs and lses of parts one after the other; where no key was seen yet out holds NaN."""
    first = parts[0].q_groups
    outs = [np.full(q.shape, np.nan, np.float32) for q in first]
    lses = [np.full((q.shape[1], len(q)), -np.inf, np.float32) for q in first]
    for case in parts:
        found = kvlab.grouped_attention_varlen(
            case.q_groups, case.k, case.v, into=(outs, lses), **case.options, **options
        )
        for kind, own in zip(found, (outs, lses), strict=True):
            assert all(x is y for x, y in zip(kind, own, strict=True))
    return outs, lses


def assert_right(parts: list[GroupedCase], outs: list[Array], lses: list[Array]) -> None:
    expected, low = expected_of_parts(parts)
    for kind, (name, axis, found) in enumerate((("outs", 0, outs), ("lses", 1, lses))):
        whole = [np.concatenate(x, axis) for x in (found, expected[kind], low[kind])]
        assert_accurate(whole[0], whole[1], whole[2].astype(np.float32), name)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(name=st.sampled_from(sorted(scenarios())), seed=SEEDS)
def test_parts_of_the_keys_one_after_the_other(
    backend: str, implementation: str | None, name: str, seed: int
) -> None:
    case = make_case(**scenarios()[name], head_dim=8, dtype=FLOATS[2], seed=seed)
    parts = [other_keys(case, seed + 1), other_keys(case, seed + 2), case]
    found = merged(parts, backend=backend, implementation=implementation)
    assert kvlab.last_backend() == backend
    assert_right(parts, *found)


def test_a_part_that_is_forgotten_would_be_noticed() -> None:
    case = make_case([[20, 9], [20, 9]], [[30, 11], [60, 25]], [64, 40], dtype=FLOATS[2])
    parts = [other_keys(case, 1), case]
    assert_right(parts, *merged(parts))
    exchanged = replace(case, prefixes=case.prefixes[::-1])
    for wrong in (parts[:1], parts[1:], [*parts, case], [parts[0], exchanged]):
        with pytest.raises(AssertionError):
            assert_right(parts, *merged(wrong))


CASE = make_case([[3, 2], [4, 1]], [[3, 2], [5, 6]], [5, 6], dtype=FLOATS[2])
OUTS = [np.zeros(q.shape, np.float32) for q in CASE.q_groups]
LSES = [np.zeros((4, 5), np.float32) for _ in CASE.q_groups]


@pytest.mark.parametrize(
    ("into", "error", "message"),
    [
        (OUTS[0], TypeError, "into must be a tuple of two lists, outs and lses, got ndarray"),
        ((OUTS, LSES[0]), TypeError, r"into\[1\] must be a list or tuple of arrays, got ndarray"),
        ((OUTS[:1], LSES), ValueError, r"into\[0\] has 1 groups, q_groups 2: pass equally many"),
        (([OUTS[0], OUTS[1].astype(np.float16)], LSES), TypeError,
         r"into\[0\]\[1\] has dtype float16; it must be float32"),
        ((OUTS, [LSES[0], LSES[1][:, :2]]), ValueError, r"into\[1\]\[1\] has rows 1 = 2"),
    ],
)  # fmt: skip
def test_wrong_results_to_merge_into_are_refused(into: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvlab.grouped_attention_varlen(CASE.q_groups, CASE.k, CASE.v, into=into, **CASE.options)


def test_results_that_cannot_be_written_are_refused_before_anything_is() -> None:
    outs, lses = [x.copy() for x in OUTS], [x.copy() for x in LSES]
    lses[1].flags.writeable = False
    with pytest.raises(ValueError, match=r"into\[1\]\[1\] is read-only: pass a writable array"):
        kvlab.grouped_attention_varlen(CASE.q_groups, CASE.k, CASE.v, into=(outs, lses), **CASE.options)
    assert all(map(np.array_equal, outs, OUTS))
