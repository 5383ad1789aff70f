"""Grouped attention on a CPU under stress: long, imbalanced, repeated, large numbers, many threads."""

import gc
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvlab
from tests.compare import assert_accurate
from tests.gradients import assert_gradients, assert_refuses
from tests.grouped import GroupedCase, make_case
from tests.strategies import FLOATS

CASES = {
    "100 against 9,900 keys": make_case([[100], [100]], [[100], [9900]], [9900], heads=(4, 1), head_dim=32),
    "16 groups of one token": make_case(
        [[1]] * 16, [[300 * g + 1] for g in range(16)], [4801], heads=(8, 2), head_dim=32
    ),
    "32 sequences": make_case(
        [list(range(32)), [31 - b for b in range(32)]], [list(range(32)), [64] * 32], [64] * 32,
        head_dim=16,
    ),
    "4,096 sequences": make_case(
        [[1] * 4096] * 2, [[1] * 4096, [2] * 4096], [2] * 4096, heads=(1, 1), head_dim=8
    ),
}  # fmt: skip


def attend(case: GroupedCase, **options: str) -> list[np.ndarray]:
    outs = kvlab.grouped_attention_varlen(case.q_groups, case.k, case.v, **case.options, **options)
    assert isinstance(outs, list)
    return outs


@pytest.mark.parametrize("name", CASES)
def test_hard_shapes(name: str) -> None:
    case = CASES[name]
    expected, low = (np.concatenate(x[0]) for x in (case.expected, case.low_precision))
    for implementation in ("separate", "listed", "paired"):
        assert_accurate(np.concatenate(attend(case, implementation=implementation)), expected, low)


@pytest.mark.parametrize("implementation", ["separate", "listed", "paired"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_inputs_ten_times_as_large(dtype: np.dtype[Any], implementation: str) -> None:
    """Outs and gradients, of which those of keys are a hundred times as large."""
    case, douts = ten_times(dtype)
    expected, low = (np.concatenate(x[0]) for x in (case.expected, case.low_precision))
    outs, lses = kvlab.grouped_attention_varlen(
        case.q_groups, case.k, case.v, return_lse=True, implementation=implementation, **case.options
    )
    assert_accurate(np.concatenate(outs), expected, low)
    dq, dk, dv = kvlab.grouped_attention_varlen_backward(
        douts, case.q_groups, case.k, case.v, outs, lses, implementation=implementation, **case.options
    )
    right = case.expected_gradients(douts)
    assert_gradients((np.concatenate(dq), dk, dv), right, case.low_precision_gradients(douts))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_that_are_not_ten_times_as_large_would_be_noticed(dtype: np.dtype[Any]) -> None:
    """Each of q, k, v and dout, one after the other, as it was."""
    case, douts = ten_times(dtype)
    right, low = case.expected_gradients(douts), case.low_precision_gradients(douts)
    tenth = np.float32(0.1)
    small_q = replace(case, q_groups=[(tenth * q).astype(dtype) for q in case.q_groups])
    small_k, small_v = (replace(case, **{x: (tenth * getattr(case, x)).astype(dtype)}) for x in "kv")
    small_douts = [(tenth * x).astype(dtype) for x in douts]
    for other, of_other in ((small_q, douts), (small_k, douts), (small_v, douts), (case, small_douts)):
        dq, dk, dv = (x.astype(dtype) for x in other.expected_gradients(of_other))
        assert_refuses((dq, dk, dv), right, low)


def ten_times(dtype: np.dtype[Any]) -> tuple[GroupedCase, list[np.ndarray]]:
    """Return a call and gradients of its outs, all of whose numbers are ten times as large."""
    case = make_case([[60, 9], [80, 30]], [[90, 11], [160, 35]], [164, 40], dtype=dtype)
    ten = dtype.type(10)
    large = replace(case, q_groups=[ten * q for q in case.q_groups], k=ten * case.k, v=ten * case.v)
    return large, [ten * x for x in case.douts()]


@pytest.mark.parametrize("calls", [10, 1000])
def test_repeated_calls_give_the_same_bits_and_keep_no_memory(calls: int) -> None:
    case = make_case([[9, 4], [7, 5]], [[30, 6], [20, 3]], [40, 10], head_dim=16)
    first = attend(case)
    tracemalloc.start()
    try:
        traced = []
        for _ in range(2):  # the first time NumPy fills memory that it keeps
            for _ in range(calls):
                again = attend(case)
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert traced[1] - traced[0] < max(20_000, 50 * calls)  # Python keeps some hundred tuples


def test_calls_from_several_threads() -> None:
    case = make_case([[90, 40], [70, 50]], [[300, 60], [200, 30]], [340, 100])
    first, wrong = attend(case), []

    def work() -> None:
        for _ in range(5):
            wrong.extend(a for a, b in zip(first, attend(case), strict=True) if (a != b).any())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
