"""Attention of backend "cuda" against float64, over drawn shapes of every kind.

Inputs lie in memory full of NaN, results are allocated where NaN was, and every case of a grid has its own
lengths, heads, head dimension, strides and options.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.ops.attention_arguments import encoder_of
from kvlab.ops.cuda import attention as attention_cuda
from kvlab.ops.cuda import attention_sm90
from kvlab.reference import attention as reference
from kvlab.views import cuda_view
from tests.compare import assert_accurate, each_sequence, low_precision_attention, wrong_attention
from tests.gpu.attention_cases import (
    DTYPES,
    HEAD_DIMS,
    HEADS,
    LENGTHS,
    draw,
    draw_options,
    poison,
    to_numpy,
)
from tests.variable_parts import expected_of_parts, make_parts


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    poison(q)
    out, lse = kvlab.attention(q, k, v, return_lse=True, **options)
    assert kvlab.last_backend() == "cuda"
    arrays = [to_numpy(x) for x in (q, k, v)]
    expected = reference.attention(*arrays, return_lse=True, **options)
    compare(out, lse, expected, low_precision_attention(*arrays, **options))
    return out


def compare(out: torch.Tensor, lse: torch.Tensor, expected: Any, low: Any) -> None:
    """Promise 2 for both, and no log-sum-exp off by more than 1e-3, or the rounding of scores beyond 500."""
    assert_accurate(to_numpy(out), expected[0], low[0])
    assert_accurate(to_numpy(lse), expected[1], low[1], "lse")
    seen = np.isfinite(expected[1])
    error = np.abs(to_numpy(lse)[seen] - expected[1][seen])
    assert (error < np.maximum(1e-3, 2e-6 * np.abs(expected[1][seen]))).all()


@pytest.fixture(params=["hopper", "hopper as for long sequences", "portable"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each kernel in turn; on other GPUs the portable one every time."""
    monkeypatch.setattr(attention_cuda, "HOPPER", request.param != "portable")
    if "long" in request.param:
        monkeypatch.setattr(attention_sm90, "SHORT", -1)
    prepared = attention_cuda._prepare, attention_cuda._prepare_into
    for one in prepared:
        one.cache_clear()
    yield
    for one in prepared:
        one.cache_clear()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(10))
def test_fixed_length_grid(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(24):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, seqlen_q, seqlen_k = rng.choice(HEAD_DIMS), *rng.choice(LENGTHS, 2)
        batch = int(rng.integers(0, 4)) if rng.random() < 0.3 else 1
        q = draw(rng, (batch, seqlen_q, heads, dim), dtype)
        k, v = (draw(rng, (batch, seqlen_k, kv_heads, dim), dtype) for _ in range(2))
        check(q, k, v, **draw_options(rng))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_variable_length_grid(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(14):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, batch = rng.choice(HEAD_DIMS), int(rng.integers(0, 6))
        bounds = [np.cumsum([0, *rng.choice(LENGTHS, batch)]).astype(np.int32) for _ in range(2)]
        q = draw(rng, (bounds[0][-1], heads, dim), dtype)
        k, v = (draw(rng, (bounds[1][-1], kv_heads, dim), dtype) for _ in range(2))
        options, longest = draw_options(rng), [int(np.diff(x).max(initial=0)) for x in bounds]
        poison(q)
        device_bounds = [torch.from_numpy(x).cuda() for x in bounds]
        out, lse = kvlab.attention_varlen(q, k, v, *device_bounds, *longest, return_lse=True, **options)
        arrays = [to_numpy(x) for x in (q, k, v)]
        expected = reference.attention_varlen(*arrays, *bounds, *longest, return_lse=True, **options)
        compare(out, lse, expected, each_sequence(low_precision_attention, *arrays, *bounds, **options))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_parts_merged_into_results_in_place(dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out and lse are a part of wider memory, of which nothing else changes; out begins as NaN."""
    rng = np.random.default_rng(seed)
    for head_dim in HEAD_DIMS:
        heads = HEADS[int(rng.integers(len(HEADS)))]
        case = make_parts(rng, DTYPES[dtype], heads, head_dim, most=int(rng.choice([5, 300])))
        shape = *case.q.shape[:2], head_dim
        wide = torch.full((shape[0] + 2, shape[1] + 2, head_dim + 8), 7.0, device="cuda")
        wide_lse = torch.full((shape[1] + 2, shape[0] + 2), 7.0, device="cuda")
        out, lse = wide[1:-1, 1:-1, :head_dim], wide_lse[1:-1, 1:-1]
        out[:], lse[:] = torch.nan, -torch.inf
        q = in_nan(case.q, dtype)
        with monkeypatch.context() as patch:
            if attention_cuda.HOPPER and head_dim % 8 == 0 and torch.cuda.get_device_capability() == (9, 0):
                patch.delattr("kvlab.ops.attention.merge_attention")
            for (k, v, *lengths), options in case.calls():
                bounds = [torch.from_numpy(x).cuda() for x in lengths[:2]]
                keys = in_nan(k, dtype), in_nan(v, dtype), *bounds, *lengths[2:]
                if 0 not in keys[0].shape:  # without keys there is nothing to map
                    kvlab.attention_varlen(q, *keys, into=(out, lse), **options)
                    assert kvlab.last_backend() == "cuda"
        if bool(out.isnan().any()):  # no part had keys
            assert all(0 in k.shape for k, *_ in case.parts)
            continue
        compare(out, lse, *expected_of_parts(case))
        for x, part in ((wide, out), (wide_lse, lse)):
            part[:] = 7
            assert bool((x == 7).all())


def in_nan(x: np.ndarray, dtype: str) -> torch.Tensor:
    """The array, on the device, as a view into NaN."""
    memory = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, device="cuda")
    view = memory.to(getattr(torch, dtype))[..., : x.shape[-1]]
    return view.copy_(torch.from_numpy(x.astype(np.float32)))


@pytest.mark.parametrize("seed", range(30))
def test_float32_grid(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    for _ in range(10):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, seqlen_q, seqlen_k = rng.choice(HEAD_DIMS), *rng.choice(LENGTHS, 2)
        q = draw(rng, (2, seqlen_q, heads, dim), "float32")
        k, v = (draw(rng, (2, seqlen_k, kv_heads, dim), "float32") for _ in range(2))
        out = check(q, k, v, **(options := draw_options(rng)))
        exact = reference.attention(*(to_numpy(x) for x in (q, k, v)), **options)
        if out.numel():
            error = np.abs(to_numpy(out) - exact)
            assert error.mean() < 1e-5
            assert np.sqrt((error**2).mean()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_comparison_refuses_wrong_answers(dtype: str) -> None:
    rng = np.random.default_rng(7)
    q, k, v = (
        to_numpy(draw(rng, (1, rows, heads, 64), dtype, 2.0)) for rows, heads in ((40, 6), (70, 2), (70, 2))
    )
    options = {"causal": True, "window": (30, -1), "softcap": 4.0}
    expected, low = reference.attention(q, k, v, **options), low_precision_attention(q, k, v, **options)[0]
    for answer in wrong_attention(q, k, v, **options).values():
        with pytest.raises(AssertionError):
            assert_accurate(answer, expected, low)


def test_long_sequences_of_grouped_heads_against_float64_on_the_device() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3000, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    out = kvlab.attention(q, k, v, causal=True)
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(4, 1).transpose(2, 3) / 128**0.5
    scores.masked_fill_(torch.ones(3000, 3000, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    expected = (scores.softmax(-1) @ wide[2].repeat_interleave(4, 1)).transpose(1, 2)
    assert float((out.double() - expected).norm() / expected.norm()) < 4e-3


def test_same_bits_again_and_in_a_graph() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 515, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    first = kvlab.attention(q, k, v, causal=True)
    for _ in range(1000):
        assert torch.equal(kvlab.attention(q, k, v, causal=True), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kvlab.attention(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, kvlab.attention(q, k, v, causal=True))


def test_variable_lengths_in_a_graph_are_read_when_it_is_replayed() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(700, h, 128, device="cuda", dtype=torch.bfloat16) for h in (6, 2, 2))
    bounds = [
        torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 300, 301, 700], [0, 1, 500, 700])
    ]

    def call() -> torch.Tensor:
        return kvlab.attention_varlen(q, k, v, *bounds, 700, 700, causal=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([0, 300, 301, 700], [0, 0, 700, 700], [0, 650, 650, 700]):
        bounds[0].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, call())


def test_calls_of_a_graph_read_one_list_side_by_side_and_beside_calls_outside() -> None:
    """Each has a semaphore of its own: two branches of a graph, another graph, a call outside."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 700, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    expected = kvlab.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graphs, outs = [], []
    for _ in range(2):
        graph, branch = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            branch.wait_stream(torch.cuda.current_stream())
            outs.append(kvlab.attention(q, k, v, causal=True))
            with torch.cuda.stream(branch):
                outs.append(kvlab.attention(q, k, v, causal=True))
            torch.cuda.current_stream().wait_stream(branch)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        outside = kvlab.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        for out in (*outs, outside):
            assert torch.equal(out, expected)


LEFT_BEHIND = [
    (3e38, torch.float32),
    (6e4, torch.float16),
    (float("inf"), torch.bfloat16),
    (-1.7e300, torch.float64),
]


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_what_shared_memory_held_before_changes_no_bit(dim: int, group: int) -> None:
    """Tiles of 3, 5 and 7 heads have rows without a query; matrix products leave what is not finite."""
    torch.manual_seed(dim)
    q, k, v = (torch.randn(1, 130, h, dim, device="cuda", dtype=torch.bfloat16) for h in (group, 1, 1))
    wide = [torch.full((512, 512), x, device="cuda", dtype=t) for x, t in LEFT_BEHIND]
    first = kvlab.attention(q, k, v)
    for x in wide * 8:
        x @ x
        assert torch.equal(kvlab.attention(q, k, v), first)


def test_two_streams_at_once_and_blocks_left_to_others() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(4, 1000, h, 64, device="cuda", dtype=torch.float16) for h in (8, 2, 2))
    expected = kvlab.attention(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            outs.append(kvlab.attention(q, k, v, causal=True, sm_margin=number % 2 * 100))
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)
    assert torch.equal(kvlab.attention(q, k, v, causal=True, sm_margin=1 << 20), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_inputs(dtype: str) -> None:
    rng = np.random.default_rng(3)
    shapes = (1, 70, 2, 64), (1, 150, 2, 64), (1, 150, 2, 64)
    q, k, v = (draw(rng, shape, dtype, 10.0) for shape in shapes)
    check(q, k, v, causal=True)
    k[:, 77] *= 4  # one dominant key
    check(q, k, v)
    k[:] = k[:, :1].clone()  # equal keys
    check(q, k, v, window=(20, 20))
    k[:, 120:] = torch.inf  # hidden from the rows that are compared
    out = kvlab.attention(q, k, v, causal=True)
    assert bool(torch.isfinite(out[:, :40]).all())
    assert bool(torch.isnan(out[:, 41:]).any())


def test_strides_beyond_32_bits() -> None:
    memory = torch.empty(2**31 + 2**16, device="cuda", dtype=torch.bfloat16)
    views = [memory[start : start + 2**31 + 2**14] for start in (0, 2**14, 2**15)]
    q, k, v = (torch.as_strided(x, (2, 64, 2, 64), (2**31, 128, 64, 1)) for x in views)
    rng = np.random.default_rng(5)
    for x in (q, k, v):
        x.copy_(torch.from_numpy(rng.standard_normal((2, 64, 2, 64))))
    check(q, k, v, causal=True)


def test_cupy_arrays_on_a_stream_of_their_own() -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v = (cupy.random.standard_normal((1, 50, 2, 64)).astype("float16") for _ in range(3))
        out = kvlab.attention(q, k, v)
    stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    arrays = [x.get() for x in (q, k, v)]
    assert_accurate(out.get(), reference.attention(*arrays), low_precision_attention(*arrays)[0])


def test_what_a_gpu_does_not_do_is_refused() -> None:
    x = torch.randn(1, 8, 2, 64, device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="dtype=float64"):
        kvlab.attention(x, x, x, backend="cuda")
    h = x.half().transpose(1, 3)
    with pytest.raises(NotImplementedError, match="last axis must be contiguous"):
        kvlab.attention(h, h, h)
    wide = torch.randn(1, 8, 2, 264, device="cuda", dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="head_dim=264"):
        kvlab.attention(wide, wide, wide)


def test_a_thread_that_has_not_used_cuda_describes_arrays() -> None:
    """As backward's thread is, where nothing else comes first: the driver needs a context of the thread."""
    q = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    encode = encoder_of(cuda_view(q, "q"), 64)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(encode, q.data_ptr()).result() == encode(q.data_ptr())
