"""What calls are said to take, against what they take; and refusal of what does not fit."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlab
from kvlab import device
from kvlab.ops.cpu import attention as attention_cpu
from kvlab.ops.cpu import attention_backward as attention_backward_cpu

SHAPE = {
    "batch": 1, "seqlen_q": 6000, "seqlen_k": 5000, "num_heads_q": 8, "num_heads_kv": 4, "head_dim": 64,
}  # fmt: skip


def _arrays(dtype: str) -> tuple[np.ndarray[Any, Any], ...]:
    q = np.ones((1, 6000, 8, 64), dtype)
    return q, *np.ones((2, 1, 5000, 4, 64), dtype)


def _peak(call: Any) -> int:
    """Bytes of NumPy's arrays that a call adds at most."""
    tracemalloc.start()
    try:
        call()  # compiles, and fills what Python keeps
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_estimates_are_within_5_percent_of_what_the_cpu_takes(dtype: str) -> None:
    """Scratch memory of threads is not in an estimate, and small beside arrays of megabytes."""
    q, k, v = _arrays(dtype)
    options: dict[str, Any] = {"window": (32, 32)}
    out, lse = kvlab.attention(q, k, v, return_lse=True, **options)
    found = device.estimate("attention", **SHAPE, dtype=dtype, backend="cpu")
    assert found.arguments == q.nbytes + k.nbytes + v.nbytes
    taken = found.arguments + _peak(lambda: kvlab.attention(q, k, v, return_lse=True, **options))
    assert abs(found.peak - taken) < 0.05 * taken
    found = device.estimate("attention_backward", **SHAPE, dtype=dtype, backend="cpu")
    assert found.arguments == 3 * q.nbytes + k.nbytes + v.nbytes + lse.nbytes
    taken = found.arguments + _peak(lambda: kvlab.attention_backward(out, q, k, v, out, lse, **options))
    assert abs(found.peak - taken) < 0.05 * taken


@given(
    st.fixed_dictionaries(dict.fromkeys(SHAPE, st.integers(1, 3000)) | {"head_dim": st.integers(33, 256)}),
    st.sampled_from(["attention", "attention_backward"]),
)
def test_estimates_grow_with_the_lengths_and_not_with_their_product(shape: Any, operation: str) -> None:
    once, twice = (
        device.estimate(operation, **(shape | {"seqlen_q": n * 128, "seqlen_k": n * 64})) for n in (1, 2)
    )
    assert twice.peak == 2 * once.peak
    assert once.minimum == once.arguments + once.results <= once.peak < 2 * once.minimum


def test_many_calls_leave_nothing_behind() -> None:
    q, k, v = (x[:, :20] for x in _arrays("float16"))
    out, lse = kvlab.attention(q, k, v, return_lse=True)

    def calls(number: int) -> None:
        for _ in range(number):
            kvlab.attention(q, k, v)
            kvlab.attention_backward(out, q, k, v, out, lse)

    tracemalloc.start()
    try:
        calls(10)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        calls(60)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < out.nbytes
    finally:
        tracemalloc.stop()


def test_what_cannot_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x[:, :600] for x in _arrays("float16"))
    out, lse = kvlab.attention(q, k, v, return_lse=True)
    monkeypatch.setattr(device, "_WORTH_ASKING", 0)
    monkeypatch.setattr(device, "memory_available", lambda: 2**19)
    for module, name in ((attention_cpu, "lay_out"), (attention_backward_cpu, "lay_out")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("it began"))
    message = r"attention needs 618.75 KiB beyond its arguments, 512.00 KiB are available: call it for a part"
    with pytest.raises(kvlab.OutOfMemory, match=message):
        kvlab.attention(q, k, v)
    with pytest.raises(kvlab.OutOfMemory, match=r"attention_backward needs 1.19 MiB beyond its arguments"):
        kvlab.attention_backward(out, q, k, v, out, lse)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"operation": "softmax"}, ValueError, "operation='softmax' is unknown; known are attention"),
        ({"dtype": "int8"}, ValueError, "dtype='int8' is unknown"),
        ({"batch": -1}, ValueError, "batch=-1 must be at least 0"),
        ({"backend": "reference"}, NotImplementedError, "estimates for 'cuda' and 'cpu'"),
    ],
)
def test_bad_arguments(changed: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        device.estimate(**({"operation": "attention"} | SHAPE | changed))
