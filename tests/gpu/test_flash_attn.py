"""flash-attn's names and torch's autograd on a GPU, and what calls take of its memory."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvlab
from kvlab import device
from kvlab.integrations import flash_attn, torch_autograd, torch_grouped
from kvlab.reference import attention as reference
from tests.compare import assert_accurate, low_precision_attention
from tests.gradients import assert_gradients, exact_gradients, low_precision_gradients


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def to_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def test_compiled_calls_of_functions_that_are_no_operators() -> None:
    q, k, v = draw(1, 70, 8, 64), draw(1, 90, 2, 64), draw(1, 90, 2, 64)
    rows, keys = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (70, 90))
    lengths: Any = {"cu_seqlens_q_groups": [rows] * 2, "cu_seqlens_k": keys, "prefix_lens": [keys[1:]] * 2}

    def plain(q: Any) -> Any:
        return 2 * kvlab.attention(q + 1, k, v, causal=True)

    def grouped(q: Any) -> Any:
        outs = torch_grouped.grouped_attention_varlen(
            [q[0], 2 * q[0]], k[0], v[0], deterministic=True, **lengths
        )
        return sum((out * out).sum() for out in outs)

    for function in (plain, grouped):
        found = []
        for call in (function, torch.compile(function, backend="eager")):
            leaf = q.clone().requires_grad_(function is grouped)
            found.append([call(leaf)])
            if function is grouped:
                found[-1][0].backward()
                found[-1].append(leaf.grad)
        for expected, made in zip(*found, strict=True):
            torch.testing.assert_close(made, expected, atol=0, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_flash_attn_func(head_dim: int) -> None:
    """Heads first in memory and an expanded dout, as models have them."""
    torch.manual_seed(0)
    q, k, v = (draw(2, heads, 150, head_dim).transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    dout = draw(2, 150, 4, head_dim)
    flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True).backward(dout)
    assert kvlab.last_backend() == "cuda"
    arrays = [to_numpy(x) for x in (dout, q, k, v)]
    expected = exact_gradients(*arrays, causal=True)
    low = low_precision_gradients(*arrays, causal=True)
    assert_gradients(tuple(to_numpy(x.grad) for x in (q, k, v)), expected, low)


def test_compiled_attention_is_the_same() -> None:
    def loss(q: torch.Tensor, k: torch.Tensor) -> Any:
        return torch_autograd.attention(2 * q, k, k, causal=True, deterministic=True).float().square().mean()

    results = []
    q, k = draw(1, 200, 4, 64), draw(1, 200, 2, 64)
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        function(*leaves).backward()
        results.append([x.grad for x in leaves])
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize("variable", [False, True])
def test_forward_and_backward_in_a_graph_are_the_same(variable: bool) -> None:
    """Captured once; replayed with other numbers and, where lengths are variable, other lengths."""
    cu = torch.tensor([0, 150, 260, 400], device="cuda", dtype=torch.int32)
    shapes = [(400, heads, 64) if variable else (2, 200, heads, 64) for heads in (4, 2, 2)]

    def step(leaves: list[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out: Any = (
            torch_autograd.attention_varlen(*leaves, cu, cu, 250, 250, causal=True, deterministic=True)
            if variable
            else torch_autograd.attention(*leaves, causal=True, deterministic=True)
        )
        return out, *torch.autograd.grad(out, leaves, dout)

    leaves, dout = [draw(*shape).requires_grad_() for shape in shapes], draw(*shapes[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(leaves, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves, dout)
    for middle in (260, 160, 350):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.copy_(torch.randn_like(x))
        cu[2] = max(middle, 260) if variable else 260
        graph.replay()
        found = [x.clone() for x in captured]
        for x, expected in zip(found, step(leaves, dout), strict=True):
            assert torch.equal(x, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_compiled_gradients_come_again_and_again(backend: str) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor) -> Any:
        return torch_autograd.attention(2 * q, k, k, causal=True, deterministic=True).float().square().mean()

    compiled = torch.compile(loss, backend=backend)
    q, k = draw(1, 200, 4, 64), draw(1, 200, 2, 64)
    for _ in range(5):  # a graph is recorded at the second call and replayed from the third on
        results = []
        for function in (loss, compiled):
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            function(*leaves).backward()
            results.append([x.grad.clone() for x in leaves])
        for plain, made in zip(*results, strict=True):
            assert torch.equal(plain, made)
        q, k = draw(1, 200, 4, 64), draw(1, 200, 2, 64)


def test_a_cache_is_read_in_place_and_its_lengths_on_the_device() -> None:
    torch.manual_seed(1)
    lengths = torch.tensor([5, 0, 90], dtype=torch.int32, device="cuda")
    cache = torch.full((2, 3, 128, 2, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    old = draw(2, 3, 128, 2, 64)
    for b, length in enumerate(lengths.tolist()):
        cache[:, b, :length] = old[:, b, :length]
    q, k, v = (draw(3, 4, heads, 64) for heads in (8, 2, 2))
    out = flash_attn.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (torch.cat([old[i, b, :length], x[b]])[None] for i, x in enumerate((k, v)))
        expected = reference.attention(to_numpy(q[b : b + 1]), to_numpy(keys), to_numpy(values), causal=True)
        assert np.abs(to_numpy(out[b : b + 1]).astype(np.float64) - expected).max() < 0.03
        assert torch.equal(cache[0, b, length : length + 4], k[b])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("page_size", "head_dim", "heads", "seqlen"),
    [
        (16, 128, (8, 2), 1), (16, 256, (4, 4), 9), (48, 64, (8, 1), 70), (64, 96, (4, 2), 3),
        (128, 128, (32, 8), 130), (256, 64, (8, 2), 1), (256, 256, (8, 1), 40), (20, 128, (8, 2), 5),
    ],
)  # fmt: skip
def test_pages_are_read_where_they_lie(
    page_size: int, head_dim: int, heads: tuple[int, int], seqlen: int, causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All but the tokens of the rows is NaN; pages lie in any order. Only pages of 20 tokens are copied."""
    if page_size % 16 == 0:
        monkeypatch.delattr("kvlab.integrations.flash_attn_cache._gather_pages")
    rng = np.random.default_rng(page_size + head_dim)
    lengths = [5, 0, 1300, 16 * page_size - seqlen]
    table = rng.permutation(100)[:64].reshape(4, 16)
    caches = torch.full((2, 100, page_size, heads[1], head_dim), torch.nan, device="cuda").bfloat16()
    lengths = [min(length, 16 * page_size - seqlen) for length in lengths]
    old = draw(2, 4, 16 * page_size, heads[1], head_dim)
    for b, length in enumerate(lengths):
        rows = torch.from_numpy(table[b]).cuda().repeat_interleave(page_size) * page_size
        rows = (rows + torch.arange(len(rows), device="cuda") % page_size)[:length]
        caches.view(2, -1, heads[1], head_dim)[:, rows] = old[:, b, :length]
    q, *new = (draw(4, seqlen, number, head_dim) for number in (heads[0], heads[1], heads[1]))
    blocks = torch.from_numpy(table).int().cuda()
    for b, length in enumerate(lengths):
        blocks[b, -(-(length + seqlen) // page_size) :] = 1 << 30
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_table=blocks, causal=causal, return_softmax_lse=True,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        keys, values = (
            to_numpy(torch.cat([o[b, :length], n[b]])[None]) for o, n in zip(old, new, strict=True)
        )
        query = to_numpy(q[b : b + 1])
        expected, expected_lse = reference.attention(query, keys, values, causal=causal, return_lse=True)
        low = low_precision_attention(query, keys, values, causal=causal)
        assert_accurate(to_numpy(out[b : b + 1]), expected, low[0])
        assert np.abs(lse[b].cpu().numpy() - expected_lse[0]).max() < 1e-3


def test_variable_lengths_in_pages_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sequences in a row; all other tokens of the pages are NaN."""
    monkeypatch.delattr("kvlab.integrations.flash_attn_cache._gather_pages")
    torch.manual_seed(3)
    rows, keys, page_size = [40, 3, 0, 170], [700, 0, 64, 190], 64
    cu_q, cu_k = (torch.tensor(np.cumsum([0, *x]), dtype=torch.int32, device="cuda") for x in (rows, keys))
    q, k, v = draw(sum(rows), 8, 128), draw(sum(keys), 2, 128), draw(sum(keys), 2, 128)
    table = torch.randperm(60)[:48].int().cuda().view(4, 12)
    pages = torch.full((2, 60, page_size, 2, 128), torch.nan, device="cuda").bfloat16()
    for b, (first, last) in enumerate(itertools.pairwise(cu_k.tolist())):
        places = torch.arange(last - first, device="cuda")
        places = table[b].long()[places // page_size] * page_size + places % page_size
        pages.view(2, -1, 2, 128)[:, places] = torch.stack([k, v])[:, first:last]
    for causal in (False, True):
        found = flash_attn.flash_attn_varlen_func(
            q, *pages, cu_q, cu_k, 170, 700, causal=causal, block_table=table, return_attn_probs=True
        )
        expected = flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 170, 700, causal=causal, return_attn_probs=True
        )
        assert float((found[0].float() - expected[0].float()).abs().max()) < 0.01
        assert torch.allclose(found[1], expected[1], atol=1e-4)
        assert not found[0][40:43].any()  # these see no key


@pytest.mark.parametrize("paged", [False, True])
def test_values_out_of_range_reach_nothing_outside_the_cache(paged: bool) -> None:
    """They are not looked at, but moved into range; NaN lies around the cache."""

    def i32(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    torch.manual_seed(2)
    memory = torch.full((2, 4, 64, 1, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    caches = memory[:, 1:3]
    caches[:] = draw(2, 2, 64, 1, 64)
    q, new = draw(2, 4, 2, 64), draw(2, 4, 1, 64)
    table = {"block_table": i32([0, 1, 2, 99], [-1, 5, 6, 7])} if paged else {"cache_batch_idx": i32(-1, 7)}
    angles = torch.ones(8, 16, device="cuda", dtype=torch.bfloat16)
    out = flash_attn.flash_attn_with_kvcache(
        q, *(x.view(8, 16, 1, 64) if paged else x for x in caches), new, new, angles, angles,
        cache_seqlens=i32(1000, -7), cache_leftpad=i32(-5, 3), causal=True, **table,
    )  # fmt: skip
    assert bool(out.isfinite().all())
    assert int(memory.isnan().sum()) == memory.numel() // 2


def _peak(call: Any) -> int:
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    assert result is not None
    return int(torch.cuda.max_memory_allocated() - before)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_estimates_are_within_5_percent_of_the_peak(head_dim: int) -> None:
    shape = {
        "batch": 2, "seqlen_q": 4096, "seqlen_k": 2048, "num_heads_q": 16, "num_heads_kv": 4,
        "head_dim": head_dim, "dtype": "bfloat16",
    }  # fmt: skip
    q, dout = draw(2, 4096, 16, head_dim), draw(2, 4096, 16, head_dim)
    k, v = draw(2, 2048, 4, head_dim), draw(2, 2048, 4, head_dim)
    found = device.estimate("attention", **shape)
    taken = found.arguments + _peak(lambda: kvlab.attention(q, k, v, return_lse=True))
    assert abs(found.peak - taken) < 0.05 * taken
    out, lse = kvlab.attention(q, k, v, return_lse=True)
    found = device.estimate("attention_backward", **shape)
    taken = found.arguments + _peak(lambda: kvlab.attention_backward(dout, q, k, v, out, lse))
    assert abs(found.peak - taken) < 0.05 * taken
    assert found.peak < 2 * found.minimum


def test_lack_of_memory_is_kvlabs_and_leaves_nothing() -> None:
    q, k = draw(1, 1, 1, 128).expand(1, 2**24, 64, 128), draw(1, 16, 64, 128)
    before = torch.cuda.memory_allocated()
    with pytest.raises(kvlab.OutOfMemory, match=r"attention needs 260.00 GiB beyond its arguments: "):
        kvlab.attention(q, k, k)
    assert torch.cuda.memory_allocated() == before


def test_a_thousand_calls_leave_nothing_behind() -> None:
    q, k, v = draw(1, 256, 8, 64), draw(1, 256, 2, 64), draw(1, 256, 2, 64)
    out, lse = kvlab.attention(q, k, v, return_lse=True)
    kvlab.attention_backward(out, q, k, v, out, lse)
    gc.collect()  # what earlier tests left
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        kvlab.attention(q, k, v)
        kvlab.attention_backward(out, q, k, v, out, lse)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="needs ring-flash-attn")
def test_ring_flash_attn_runs_on_it_unmodified_over_nccl() -> None:
    """Ring, zigzag ring, striped ring and llama3 over all GPUs, forward and backward."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.ring_attention", "nccl"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "agree with float64 over" in run.stdout
