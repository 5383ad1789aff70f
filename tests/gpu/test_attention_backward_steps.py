"""Gradients of attention on Hopper with steps of more rows, which long calls of 128 channels have.

Short calls are made to take them here, so that NumPy can follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.ops.cuda import attention_backward as attention_backward_cuda
from tests.gpu.attention_cases import (
    DTYPES,
    HEADS,
    check,
    draw_options,
    gradients,
    poison,
    to_numpy,
    with_noise,
)
from tests.gradients import assert_gradients, each_sequence, exact_gradients, low_precision_gradients

ROWS = attention_backward_cuda.LONG_STEPS[128].block_m
LENGTHS = (1, 17, 79, 80, 81, 128, 129, 159, 160, 161, 240, 300, 410)
DIMS = (104, 120, 128)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Normal numbers in rows that begin at multiples of 16 bytes, in NaN."""
    stored = torch.full((*shape[:-1], shape[-1] + 8), float("nan"), device="cuda").to(getattr(torch, dtype))
    view = stored[..., : shape[-1]]
    view.copy_(torch.from_numpy(rng.standard_normal(shape)))
    return view


def options_of(rng: np.random.Generator) -> dict[str, Any]:
    """Options for which there is a kernel with long steps."""
    options = draw_options(rng)
    return options | {"softcap": 0.0, "scale": abs(options["scale"] or 0.1)}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Long steps wherever the kernel can; rows of a step of the calls that were made."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    found: list[int] = []
    plan_of = attention_backward_cuda.plan_of

    def remember(*options: Any) -> Any:
        found.append(plan_of(*options).box)
        return plan_of(*options)

    monkeypatch.setattr(attention_backward_cuda, "plan_of", remember)
    monkeypatch.setattr(
        attention_backward_cuda,
        "has_long_steps",
        lambda dim, capped, deterministic, *_: dim > 96 and not capped and not deterministic,
    )
    monkeypatch.setattr(attention_backward_cuda, "divide", lambda *_: 1)
    attention_backward_cuda._prepare.cache_clear()
    yield found
    attention_backward_cuda._prepare.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_fixed_length_grid(steps: list[int], dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(12):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, seqlen_q, seqlen_k = int(rng.choice(DIMS)), *rng.choice(LENGTHS, 2)
        dout, q, k, v = (
            normal(rng, (2, tokens, h, dim), dtype)
            for tokens, h in (
                (seqlen_q, heads), (seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads),
            )
        )  # fmt: skip
        check(dout, q, k, v, deterministic=False, **options_of(rng))
    assert set(steps) == {ROWS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_variable_length_grid(steps: list[int], dtype: str, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(8):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, batch = int(rng.choice(DIMS)), int(rng.integers(1, 6))
        bounds = [
            np.cumsum([0, rng.choice(LENGTHS), *rng.choice((0, *LENGTHS), batch)]).astype(np.int32)
            for _ in range(2)
        ]
        shapes = [(x[-1], h, dim) for x, h in zip(bounds, (heads, kv_heads), strict=True)]
        q, k, v, dout = (normal(rng, shapes[x], dtype) for x in (0, 1, 1, 0))
        options = options_of(rng)
        lengths = (
            *(torch.from_numpy(x).cuda() for x in bounds),
            *(int(np.diff(x).max()) for x in bounds),
        )
        out, lse = kvlab.attention_varlen(q, k, v, *lengths, return_lse=True, **options)
        poison(q)
        got, again = (
            kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *lengths, **options) for _ in "ab"
        )
        arrays = [to_numpy(x) for x in (dout, q, k, v)]
        exact, low = (
            each_sequence(f, *arrays, *bounds, **options) for f in (exact_gradients, low_precision_gradients)
        )
        assert_gradients(tuple(map(to_numpy, got)), exact, with_noise(low, *arrays, options["scale"]))
        assert all(torch.equal(x, y) for x, y in zip(again[1:], got[1:], strict=True))
    assert set(steps) == {ROWS}


def test_float32_gradients_of_keys_round_to_the_others(steps: list[int]) -> None:
    torch.manual_seed(2)
    q, k, v, dout = (torch.randn(1, 1000, h, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    _, *narrow = kvlab.attention_backward(dout, q, k, v, out, lse, causal=True)
    _, *wide = kvlab.attention_backward(dout, q, k, v, out, lse, causal=True, float32_dk_dv=True)
    assert set(steps) == {ROWS}
    for x, y in zip(wide, narrow, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x.bfloat16(), y)
        assert not torch.equal(x, y.float())


def test_multiprocessors_left_to_others(steps: list[int]) -> None:
    """dk and dv have the same bits as ever."""
    torch.manual_seed(4)
    q, k, v, dout = (torch.randn(4, 1000, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    found = [
        kvlab.attention_backward(dout, q, k, v, out, lse, sm_margin=x, causal=True)
        for x in (0, 1, 130, 1 << 20)
    ]
    assert set(steps) == {ROWS}
    for one, other in itertools.pairwise(found):
        assert all(torch.equal(x, y) for x, y in zip(one[1:], other[1:], strict=True))


def test_short_sequences_beside_a_long_one() -> None:
    """As they choose for themselves: nothing behind a short one is read, which may not be mapped."""
    torch.manual_seed(6)
    lengths = (512, 14784, 1088)
    q, k, v, dout = (
        torch.randn(sum(lengths), h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8, 32)
    )
    starts = list(itertools.accumulate(lengths, initial=0))
    bounds = torch.tensor(starts, dtype=torch.int32, device="cuda")
    sizes = bounds, bounds, max(lengths), max(lengths)
    out, lse = kvlab.attention_varlen(q, k, v, *sizes, causal=True, return_lse=True)
    found = kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *sizes, causal=True)
    for first, last in itertools.pairwise(starts):
        own = [x[None, first:last] for x in (dout, q, k, v, out)]
        alone = kvlab.attention_backward(*own, lse[None, :, first:last], causal=True)
        for x, y in zip(found, alone, strict=True):
            assert float((x[first:last] - y[0]).float().norm() / y.float().norm()) < 6e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_calls_against_float64_on_the_device(dim: int, causal: bool) -> None:
    """As they choose for themselves."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 8300, h, dim, device="cuda", dtype=torch.bfloat16) for h in (16, 8, 8, 16)
    )
    dq, dk, dv = gradients(dout, q, k, v, causal=causal)
    hidden = torch.ones(8300, 8300, dtype=torch.bool, device="cuda").triu(1)
    for kv_head in (0, 7):
        wide = [x[0, :, kv_head].double().requires_grad_() for x in (k, v)]
        rows = [q[0, :, 2 * kv_head + i].double().requires_grad_() for i in (0, 1)]
        total = torch.zeros((), device="cuda", dtype=torch.double)
        for i, row in enumerate(rows):
            scores = row @ wide[0].T / dim**0.5
            scores = scores.masked_fill(hidden, -torch.inf) if causal else scores
            total = total + (scores.softmax(-1) @ wide[1] * dout[0, :, 2 * kv_head + i]).sum()
        found = [dq[0, :, 2 * kv_head], dq[0, :, 2 * kv_head + 1], dk[0, :, kv_head], dv[0, :, kv_head]]
        for x, y in zip(found, torch.autograd.grad(total, rows + wide), strict=True):
            assert float((x.double() - y).norm() / y.norm()) < 6e-3
