"""Gradients of attention on a GPU against float64, over drawn shapes of every kind.

Inputs lie in memory full of NaN, results and the workspace are allocated where NaN was.
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
from kvlab.ops.cuda.attention_backward_split import num_sections
from tests.gpu.attention_cases import (
    DTYPES,
    HEAD_DIMS,
    HEADS,
    LENGTHS,
    check,
    draw,
    draw_options,
    gradients,
    poison,
    to_numpy,
    with_noise,
)
from tests.gradients import (
    assert_gradients,
    assert_refuses,
    each_sequence,
    exact_gradients,
    low_precision_gradients,
    wrong_gradients,
)


@pytest.fixture(params=["hopper", "portable"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels in turn; on other GPUs the portable one twice."""
    monkeypatch.setattr(attention_backward_cuda, "HOPPER", request.param == "hopper")


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_fixed_length_grid(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(12):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, seqlen_q, seqlen_k = rng.choice(HEAD_DIMS), *rng.choice(LENGTHS, 2)
        batch = int(rng.integers(0, 4)) if rng.random() < 0.3 else 1
        dout, q = (draw(rng, (batch, seqlen_q, heads, dim), dtype) for _ in range(2))
        k, v = (draw(rng, (batch, seqlen_k, kv_heads, dim), dtype) for _ in range(2))
        check(dout, q, k, v, deterministic=bool(rng.integers(2)), **draw_options(rng))


@pytest.mark.parametrize("seed", range(30))
def test_float32_grid(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    for _ in range(10):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, seqlen_q, seqlen_k = rng.choice(HEAD_DIMS), *rng.choice(LENGTHS, 2)
        dout, q = (draw(rng, (2, seqlen_q, heads, dim), "float32") for _ in range(2))
        k, v = (draw(rng, (2, seqlen_k, kv_heads, dim), "float32") for _ in range(2))
        check(dout, q, k, v, deterministic=bool(rng.integers(2)), **draw_options(rng))


@pytest.fixture(params=[1, 2, 4, 8])
def _shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every number of blocks that share keys, whatever a call would choose; one where it is no cluster."""

    def divide(*sizes: Any) -> int:
        blocks, largest = sizes[-2:]
        return max(1, min(request.param, largest // blocks))

    monkeypatch.setattr(attention_backward_cuda, "divide", divide)
    attention_backward_cuda._prepare.cache_clear()
    yield
    attention_backward_cuda._prepare.cache_clear()


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_shared_keys_grid(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(300 + seed)
    for _ in range(10):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, seqlen_q, seqlen_k = 8 * int(rng.integers(1, 33)), *rng.choice(LENGTHS, 2)
        q, k, v, dout = (
            torch.from_numpy(rng.standard_normal((2, tokens, h, dim))).cuda().to(getattr(torch, dtype))
            for tokens, h in (
                (seqlen_q, heads),
                (seqlen_k, kv_heads),
                (seqlen_k, kv_heads),
                (seqlen_q, heads),
            )
        )
        check(dout, q, k, v, deterministic=bool(rng.integers(2)), **draw_options(rng))


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_shared_keys_of_sequences_of_any_length(dim: int) -> None:
    """dk and dv beside those of the sequences alone; the last has no keys, the first no rows."""
    rng = np.random.default_rng(dim)
    bounds_q, bounds_k = (
        np.cumsum(x).astype(np.int32) for x in ([0, 0, 700, 65, 300], [0, 130, 700, 900, 0])
    )
    q, dout = (
        torch.from_numpy(rng.standard_normal((bounds_q[-1], 6, dim))).cuda().bfloat16() for _ in range(2)
    )
    k, v = (torch.from_numpy(rng.standard_normal((bounds_k[-1], 2, dim))).cuda().bfloat16() for _ in range(2))
    lengths = (*(torch.from_numpy(x).cuda() for x in (bounds_q, bounds_k)), 700, 900)
    out, lse = kvlab.attention_varlen(q, k, v, *lengths, causal=True, return_lse=True)
    poison(q)
    got = kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *lengths, causal=True)
    arrays = [to_numpy(x) for x in (dout, q, k, v)]
    exact, low = (
        each_sequence(f, *arrays, bounds_q, bounds_k, causal=True)
        for f in (exact_gradients, low_precision_gradients)
    )
    assert_gradients(tuple(map(to_numpy, got)), exact, with_noise(low, *arrays, None))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_variable_length_grid(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(8):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, batch = rng.choice(HEAD_DIMS), int(rng.integers(0, 6))
        bounds = [np.cumsum([0, *rng.choice(LENGTHS, batch)]).astype(np.int32) for _ in range(2)]
        dout, q = (draw(rng, (bounds[0][-1], heads, dim), dtype) for _ in range(2))
        k, v = (draw(rng, (bounds[1][-1], kv_heads, dim), dtype) for _ in range(2))
        options = draw_options(rng)
        lengths = (
            *(torch.from_numpy(x).cuda() for x in bounds),
            *(int(np.diff(x).max(initial=0)) for x in bounds),
        )
        out, lse = kvlab.attention_varlen(q, k, v, *lengths, return_lse=True, **options)
        poison(q)
        got = kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *lengths, **options)
        arrays = [to_numpy(x) for x in (dout, q, k, v)]
        exact, low = (
            each_sequence(f, *arrays, *bounds, **options) for f in (exact_gradients, low_precision_gradients)
        )
        low = with_noise(low, *arrays, options["scale"])
        assert_gradients(tuple(map(to_numpy, got)), exact, low)


@pytest.mark.parametrize("dtype", DTYPES)
def test_comparison_refuses_wrong_answers(dtype: str) -> None:
    rng = np.random.default_rng(7)
    dout, q = (to_numpy(draw(rng, (1, 40, 6, 64), dtype)) for _ in range(2))
    k, v = (to_numpy(draw(rng, (1, 70, 2, 64), dtype)) for _ in range(2))
    options = {"causal": True, "window": (30, -1), "softcap": 4.0}
    exact, low = (f(dout, q, k, v, **options) for f in (exact_gradients, low_precision_gradients))
    low = with_noise(low, dout, q, k, v, None)
    for answer in wrong_gradients(dout, q, k, v, **options).values():
        assert_refuses(answer, exact, low)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_long_sequences_of_grouped_heads_against_float64_on_the_device(dim: int) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 3000, h, dim, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
    got = gradients(dout, q, k, v, causal=True)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    a, b, c = (x.transpose(1, 2) for x in wide)
    scores = a @ b.repeat_interleave(4, 1).transpose(2, 3) / dim**0.5
    hidden = torch.ones(3000, 3000, device="cuda", dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ c.repeat_interleave(4, 1)
    expected = torch.autograd.grad(out.transpose(1, 2), wide, dout.double())
    for x, y in zip(got, expected, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < 6e-3


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_same_bits_again_and_in_a_graph(dim: int) -> None:
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(2, 515, h, dim, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)

    def call() -> list[torch.Tensor]:
        return list(kvlab.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True))

    first = call()
    for _ in range(1000):
        assert all(torch.equal(x, y) for x, y in zip(call(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    dout.copy_(torch.randn_like(dout))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, call(), strict=True))


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "heads_kv"), [(1, 4096, 16, 4), (8, 512, 32, 8), (1, 1024, 8, 1)]
)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_same_bits_back_to_back_beside_other_work(
    dim: int, batch: int, tokens: int, heads: int, heads_kv: int
) -> None:
    """A call begins while the one before ends and copies delay its memory: the order of sums still holds."""
    torch.manual_seed(6)
    q, k, v, dout = (
        torch.randn(batch, tokens, h, dim, device="cuda", dtype=torch.bfloat16)
        for h in (heads, heads_kv, heads_kv, heads)
    )
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    beside, busy = torch.cuda.Stream(), torch.randn(64 << 20, device="cuda")
    differing = torch.zeros(3, device="cuda", dtype=torch.int64)
    first: list[torch.Tensor] = []
    for i in range(300):
        if i % 3 == 0:
            with torch.cuda.stream(beside):
                busy.mul_(1.0000001)
        found = list(kvlab.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True))
        first = first or found
        differing += torch.stack([(x != y).sum() for x, y in zip(found, first, strict=True)])
    assert differing.tolist() == [0, 0, 0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_multiprocessors_left_to_others(dim: int, deterministic: bool) -> None:
    """dk and dv have the same bits as ever, dq where the order of its sums is fixed."""
    torch.manual_seed(4)
    q, k, v, dout = (torch.randn(4, 1000, h, dim, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    first, *others = (
        kvlab.attention_backward(
            dout, q, k, v, out, lse, causal=True, deterministic=deterministic, sm_margin=margin
        )
        for margin in (1, 0, 20, 1 << 20)
    )
    for found in others:
        for x, y in zip(found, first, strict=True):
            assert float((x.double() - y.double()).norm() / y.double().norm()) < 3e-3
    exact = slice(None if deterministic else 1, None)
    for found in others[1:]:  # without a margin clusters may share keys, and sum in another order
        assert all(torch.equal(x, y) for x, y in zip(found[exact], first[exact], strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_sections_of_many_sequences_have_the_bits_of_one(dim: int, causal: bool) -> None:
    """A margin keeps short calls from sharing keys, which would sum in another order."""
    rng = np.random.default_rng(dim)
    bounds = np.cumsum([0, *rng.integers(1, 1200, 20)]).astype(np.int32)
    pairs, blocks = 20 * 8, torch.cuda.get_device_properties(0).multi_processor_count
    blocks //= attention_backward_cuda.HOPPER_SHAPES[dim].cluster
    assert num_sections(pairs, 1200 // 128, 3, dim, blocks, causal, True) > 1
    q, k, v, dout = (
        torch.from_numpy(rng.standard_normal((bounds[-1], h, dim), np.float32)).cuda().bfloat16()
        for h in (24, 8, 8, 24)
    )
    options = {"causal": causal, "deterministic": True, "sm_margin": 1}
    cu, longest = torch.from_numpy(bounds).cuda(), int(np.diff(bounds).max())
    sequences = cu, cu, longest, longest
    out, lse = kvlab.attention_varlen(q, k, v, *sequences, causal=causal, return_lse=True)
    got = kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *sequences, **options)
    for low, high in itertools.pairwise(bounds.tolist()):
        own = [x[None, low:high] for x in (dout, q, k, v, out)]
        alone = kvlab.attention_backward(*own, lse[None, :, low:high].contiguous(), **options)
        for x, y in zip(got, alone, strict=True):
            assert torch.equal(x[low:high], y[0])


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(("tokens", "dim"), [(300, 64), (3000, 128), (300, 256), (70, 40)])
def test_float32_gradients_of_keys_round_to_the_others(tokens: int, dim: int) -> None:
    torch.manual_seed(2)
    q, k, v, dout = (
        torch.randn(1, tokens, h, dim, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4)
    )
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    _, *narrow = kvlab.attention_backward(dout, q, k, v, out, lse, causal=True)
    _, *wide = kvlab.attention_backward(dout, q, k, v, out, lse, causal=True, float32_dk_dv=True)
    for x, y in zip(wide, narrow, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x.bfloat16(), y)  # sums are the same bits every time
        assert not torch.equal(x, y.float())


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_inputs(dtype: str) -> None:
    rng = np.random.default_rng(3)
    dout, q = (draw(rng, (1, 70, 2, 64), dtype) for _ in range(2))
    k, v = (draw(rng, (1, 150, 2, 64), dtype) for _ in range(2))
    q *= 10
    check(dout, q, k, v, causal=True, scale=None, deterministic=False)
    k[:, 77] *= 4  # one dominant key
    check(dout, q, k, v, scale=None, deterministic=False)
    k[:] = k[:, :1].clone()  # equal keys
    check(dout, q, k, v, window=(20, 20), scale=None, deterministic=False)


def test_strides_that_a_gpu_does_not_read_are_refused() -> None:
    x = torch.randn(1, 8, 2, 64, device="cuda", dtype=torch.float16)
    out, lse = kvlab.attention(x, x, x, return_lse=True)
    one = torch.ones((), device="cuda", dtype=torch.float16).expand(x.shape)
    with pytest.raises(NotImplementedError, match="last axis must be contiguous"):
        kvlab.attention_backward(one, x, x, x, out, lse)
    with pytest.raises(NotImplementedError, match="lse has strides"):
        kvlab.attention_backward(x, x, x, x, out, lse.transpose(1, 2).contiguous().transpose(1, 2))
