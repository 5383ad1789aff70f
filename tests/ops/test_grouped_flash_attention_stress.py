"""Grouped attention on a CPU under stress: long, imbalanced, repeated, large numbers, many threads."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest

import kvlab
from tests.compare import assert_accurate
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


def test_inputs_ten_times_as_large() -> None:
    case = make_case([[60, 9], [80, 30]], [[90, 11], [160, 35]], [164, 40], dtype=FLOATS[2])
    case = GroupedCase(
        [10 * q for q in case.q_groups], 10 * case.k, case.v, case.lengths, case.prefixes, case.k_lengths
    )
    expected, low = (np.concatenate(x[0]) for x in (case.expected, case.low_precision))
    assert_accurate(np.concatenate(attend(case)), expected, low)


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
