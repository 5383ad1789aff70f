"""Attention on a GPU: shapes that hypothesis chooses, totals beyond 2^31 elements, a second GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvlab
from kvlab.reference import attention as reference
from tests.compare import assert_accurate, each_sequence, low_precision_attention
from tests.gpu.attention_cases import draw, poison, to_numpy, with_noise
from tests.gradients import assert_gradients, exact_gradients, low_precision_gradients
from tests.strategies import HEAD_PAIRS, SEEDS, attention_options

DTYPES = st.sampled_from(["float16", "bfloat16", "float32"])
HEADS = st.sampled_from(HEAD_PAIRS)
LENGTHS = st.integers(0, 400)
HEAD_DIMS = st.integers(1, 256)
BROAD = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@BROAD
@given(DTYPES, HEADS, HEAD_DIMS, st.integers(0, 3), LENGTHS, LENGTHS, attention_options(), SEEDS)
def test_any_shape_of_one_length(
    dtype: str, heads: tuple[int, int], dim: int, batch: int, rows: int, keys: int, options: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q, dout = (draw(rng, (batch, rows, heads[0], dim), dtype) for _ in range(2))
    k, v = (draw(rng, (batch, keys, heads[1], dim), dtype) for _ in range(2))
    poison(q)
    out, lse = kvlab.attention(q, k, v, return_lse=True, **options)
    arrays = [to_numpy(x) for x in (q, k, v)]
    assert_accurate(
        to_numpy(out), reference.attention(*arrays, **options), low_precision_attention(*arrays, **options)[0]
    )
    got = kvlab.attention_backward(dout, q, k, v, out, lse, **options)
    arrays = [to_numpy(dout), *arrays]
    low = with_noise(low_precision_gradients(*arrays, **options), *arrays, options["scale"])
    assert_gradients(tuple(map(to_numpy, got)), exact_gradients(*arrays, **options), low)


@BROAD
@given(
    DTYPES, HEADS, HEAD_DIMS, st.lists(st.tuples(LENGTHS, LENGTHS), max_size=5), attention_options(), SEEDS
)
def test_any_variable_length(
    dtype: str,
    heads: tuple[int, int],
    dim: int,
    lengths: list[tuple[int, int]],
    options: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    bounds = [np.cumsum([0, *(pair[side] for pair in lengths)]).astype(np.int32) for side in (0, 1)]
    longest = [int(np.diff(x).max(initial=0)) for x in bounds]
    q = draw(rng, (int(bounds[0][-1]), heads[0], dim), dtype)
    k, v = (draw(rng, (int(bounds[1][-1]), heads[1], dim), dtype) for _ in range(2))
    poison(q)
    on_device = [torch.from_numpy(x).cuda() for x in bounds]
    out = kvlab.attention_varlen(q, k, v, *on_device, *longest, **options)
    arrays = [to_numpy(x) for x in (q, k, v)]
    expected = reference.attention_varlen(*arrays, *bounds, *longest, **options)
    low, _ = each_sequence(low_precision_attention, *arrays, *bounds, **options)
    assert_accurate(to_numpy(out), expected, low)


# ---- totals beyond 2^31 elements

MANY = 2**18 + 40
"""Tokens of 64 heads of 128: 2^31 elements and 327,680 more."""


def big(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((got.double() - expected).norm() / expected.norm()) < 6e-3


def test_more_than_2_31_elements_of_q_and_its_gradient() -> None:
    torch.manual_seed(0)
    q, k, v = big(1, MANY, 64, 128), big(1, 96, 8, 128), big(1, 96, 8, 128)
    out, lse = kvlab.attention(q, k, v, return_lse=True)
    gradients = kvlab.attention_backward(q, q, k, v, out, lse)  # of sum(out * q) with q held: dout is q
    keys, values = (x[0, :, 7].double() for x in (k, v))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for head in range(56, 64):  # those that read KV head 7
        for rows in torch.arange(MANY, device="cuda").split(2**16):
            a = q[0, rows, head].double()
            p = (a @ keys.T / 128**0.5).softmax(-1)
            slopes = a @ values.T
            ds = p * (slopes - (p * slopes).sum(-1, keepdim=True)) / 128**0.5
            assert_close(out[0, rows, head], p @ values)
            assert_close(gradients[0][0, rows, head], ds @ keys)
            dk += ds.T @ a
            dv += p.T @ a
    assert_close(gradients[1][0, :, 7], dk)
    assert_close(gradients[2][0, :, 7], dv)


@pytest.mark.parametrize("variable", [False, True])
def test_more_than_2_31_elements_of_keys(variable: bool) -> None:
    torch.manual_seed(1)
    q, k, v = big(1, 48, 64, 128), big(1, MANY, 64, 128), big(1, MANY, 64, 128)
    call: Callable[..., Any] = kvlab.attention
    arguments: tuple[Any, ...] = (q, k, v)
    start = 0
    if variable:  # the last of two sequences holds the end of k
        start = MANY - 5000
        ends = (8, 48), (start, MANY)
        bounds = [torch.tensor([0, *x], dtype=torch.int32, device="cuda") for x in ends]
        call, arguments = kvlab.attention_varlen, (q[0], k[0], v[0], *bounds, 40, start)
    out = call(*arguments).view(q.shape)
    for head in (0, 63):
        a, b, c = q[0, :, head].double(), k[0, start:, head].double(), v[0, start:, head].double()
        if variable:
            a = a[8:]
        assert_close(out[0, 48 - len(a) :, head], (a @ b.T / 128**0.5).softmax(-1) @ c)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_arrays_on_a_gpu_that_is_not_the_current_one() -> None:
    torch.manual_seed(2)
    q, k, v, dout = (torch.randn(1, 200, h, 64, dtype=torch.float16) for h in (4, 2, 2, 4))
    results = []
    for device in ("cuda:0", "cuda:1"):
        there = [x.to(device) for x in (q, k, v, dout)]
        out, lse = kvlab.attention(*there[:3], causal=True, return_lse=True)
        gradients = kvlab.attention_backward(there[3], *there[:3], out, lse, causal=True, deterministic=True)
        results.append([x.cpu() for x in (out, lse, *gradients)])
        assert out.device == torch.device(device)
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
