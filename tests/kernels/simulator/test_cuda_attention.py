"""Attention and its gradients of backend "numba" in Numba's CUDA simulator against float64, on tiny shapes.

Runs in a process of its own, as test_cuda_packed.py, from which the edge to the device comes: the launchers
are those that a GPU sees, with smaller tiles, since every thread is one of Python.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.ops.attention_call import Sequences, checked_options, scores_of
from kvlab.ops.numba import attention as attention_numba
from kvlab.reference import attention as reference
from tests.compare import assert_accurate, each_sequence, low_precision_attention, wrong_attention
from tests.gradients import (
    assert_gradients,
    assert_refuses,
    exact_gradients,
    low_precision_gradients,
    wrong_gradients,
)
from tests.gradients import each_sequence as gradients_of_each
from tests.kernels.simulator.test_cuda_packed import Gpu, SimulatedKernel
from tests.strategies import FLOATS

Array = NDArray[Any]
TILE = 4

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()

    def kernel(module: str, entry: str, options: tuple[tuple[str, Any], ...], device: int) -> Any:
        make = getattr(import_module(f"kvlab.numba_kernels.cuda.{module}"), entry)
        return SimulatedKernel(make(**dict(options)), gpu.at)

    def launch(kernel: Any, grid: Any, block: tuple[int], args: list[Any], like: Any) -> None:
        kernel(grid, block, args, 0, 0)

    def empty(shape: Any, dtype: str, like: Any) -> Array:
        return np.full(shape, np.nan, like.dtype if dtype != "float32" else np.float32)

    monkeypatch.setattr(attention_numba, "cuda_view", gpu.view)
    monkeypatch.setattr(attention_numba, "numba_kernel", kernel)
    monkeypatch.setattr(attention_numba, "launch", launch)
    monkeypatch.setattr(attention_numba, "empty", empty)
    for tiles in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(attention_numba, tiles, dict.fromkeys(attention_numba.HEAD_DIMS, TILE))


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    x = rng.standard_normal(shape).astype(dtype)
    *outer, dim = shape
    gap = np.full((*outer, dim + 3), np.nan, dtype)  # rows on no boundary, NaN around them
    gap[..., 1 : 1 + dim] = x
    return gap[..., 1 : 1 + dim]


CASES: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
    (5, 7, 2, 1, 16, {"causal": True}),
    (7, 5, 2, 2, 20, {"causal": True}),  # the first rows see no key
    (6, 9, 3, 1, 8, {"window": (2, 1), "softcap": 1.5, "scale": 0.4}),
    (1, 6, 1, 1, 16, {"scale": -0.3}),
    (3, 0, 1, 1, 16, {}),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, FLOATS[2]) for case in CASES), *((CASES[3], dtype) for dtype in FLOATS[:2])],
    ids=str,
)
def test_one_length(case: Any, dtype: np.dtype[Any]) -> None:
    rows, keys, heads, kv_heads, dim, options = case
    rng = np.random.default_rng(rows + keys)
    q, dout = (draw(rng, (2, rows, heads, dim), dtype) for _ in range(2))
    k, v = (draw(rng, (2, keys, kv_heads, dim), dtype) for _ in range(2))
    defaults = {"causal": False, "scale": None, "window": (-1, -1), "softcap": 0.0}
    scores = scores_of(dim, checked_options(**(defaults | options)))
    out, lse = attention_numba.attend(q, k, v, None, scores)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    low, low_lse = low_precision_attention(q, k, v, **options)
    assert_accurate(out, expected, low)
    assert_accurate(lse, expected_lse, low_lse, "lse")
    gradients = attention_numba.attend_backward(dout, q, k, v, out, lse, None, scores, True, False)
    exact, low_ones = (f(dout, q, k, v, **options) for f in (exact_gradients, low_precision_gradients))
    assert_gradients(gradients, exact, low_ones)


def test_lengths_that_differ() -> None:
    rng, options = np.random.default_rng(1), {"causal": True, "softcap": 3.0}
    bounds = [np.array(x, np.int32) for x in ([0, 5, 5, 8], [0, 4, 9, 15])]
    q, dout = (draw(rng, (8, 2, 16), FLOATS[2]) for _ in range(2))
    k, v = (draw(rng, (15, 1, 16), FLOATS[2]) for _ in range(2))
    scores = scores_of(16, (True, None, -1, -1, 3.0))
    sequences = Sequences(*bounds, 5, 6)
    out, lse = attention_numba.attend(q, k, v, sequences, scores)
    expected, expected_lse = reference.attention_varlen(q, k, v, *bounds, 5, 6, return_lse=True, **options)
    low, low_lse = each_sequence(low_precision_attention, q, k, v, *bounds, **options)
    assert_accurate(out, expected, low)
    assert_accurate(lse, expected_lse, low_lse, "lse")
    gradients = attention_numba.attend_backward(dout, q, k, v, out, lse, sequences, scores, False, False)
    exact, low_ones = (
        gradients_of_each(f, dout, q, k, v, *bounds, **options)
        for f in (exact_gradients, low_precision_gradients)
    )
    assert_gradients(gradients, exact, low_ones)


def test_wrong_answers_are_refused() -> None:
    rng, options = np.random.default_rng(2), {"causal": True, "window": (3, -1), "softcap": 4.0}
    dout, q = (draw(rng, (1, 6, 4, 16), FLOATS[0]) for _ in range(2))
    k, v = (draw(rng, (1, 9, 2, 16), FLOATS[0]) for _ in range(2))
    expected, low = reference.attention(q, k, v, **options), low_precision_attention(q, k, v, **options)[0]
    for answer in wrong_attention(q, k, v, **options).values():
        with pytest.raises(AssertionError):
            assert_accurate(answer, expected, low)
    exact, low_ones = (f(dout, q, k, v, **options) for f in (exact_gradients, low_precision_gradients))
    for wrong in wrong_gradients(dout, q, k, v, **options).values():
        assert_refuses(wrong, exact, low_ones)
