"""Functions that are no operators of torch in code that `torch.compile` traces: called as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvlab  # noqa: E402
from kvlab.integrations import torch_autograd, torch_grouped  # noqa: E402
from kvlab.integrations.flash_attn import flash_attn_with_kvcache  # noqa: E402

BOUNDS = torch.tensor([0, 3, 7], dtype=torch.int32)
PREFIXES = [torch.tensor([2, 1], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)]
GROUPS = {"cu_seqlens_q_groups": [BOUNDS] * 2, "cu_seqlens_k": BOUNDS, "prefix_lens": PREFIXES}


def of_cache(q: Any, k: Any, v: Any) -> Any:
    lengths = torch.tensor([7], dtype=torch.int32)
    return flash_attn_with_kvcache(q[None, :1], k[None], v[None], cache_seqlens=lengths)


def merged(q: Any, k: Any, v: Any) -> Any:
    parts = [kvlab.attention(q[None], x[None], y[None], return_lse=True) for x, y in ((k, v), (v, k))]
    return kvlab.merge_attention(*map(list, zip(*parts, strict=True)))[0]


def gradients(q: Any, k: Any, v: Any) -> Any:
    call = q[None], k[None], v[None]
    out, lse = kvlab.attention(*call, return_lse=True)
    return kvlab.attention_backward(out, *call, out, lse)[1]


def gradients_of_groups(q: Any, k: Any, v: Any) -> Any:
    outs, lses = kvlab.grouped_attention_varlen([q, q], k, v, return_lse=True, **GROUPS)
    return kvlab.grouped_attention_varlen_backward(outs, [q, q], k, v, outs, lses, **GROUPS)[1]


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: kvlab.attention(q[None], k[None], v[None], causal=True),
    "attention_varlen": lambda q, k, v: kvlab.attention_varlen(q, k, v, BOUNDS, BOUNDS, 4, 4),
    "attention_backward": gradients,
    "merge_attention": merged,
    "grouped_attention_varlen": lambda q, k, v: kvlab.grouped_attention_varlen([q, 2 * q], k, v, **GROUPS)[1],
    "grouped_attention_varlen_backward": gradients_of_groups,
    "flash_attn_with_kvcache": of_cache,
}


def draw() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7, heads, 16, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_gives_the_same_bits(name: str) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return 2 * CALLS[name](q + 1, k, v)

    arrays = draw()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(*arrays), function(*arrays), atol=0, rtol=0)
        arrays = [x + 0.5 for x in arrays]


def test_gradients_of_groups_in_compiled_code() -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        outs = torch_grouped.grouped_attention_varlen([q, 2 * q], k, v, **GROUPS)
        return sum((out * out).sum() for out in outs)

    found = []
    for function in (loss, torch.compile(loss, backend="eager")):
        leaves = [x.requires_grad_() for x in draw()]
        function(*leaves).backward()
        found.append([x.grad for x in leaves])
    for plain, made in zip(*found, strict=True):
        torch.testing.assert_close(made, plain, atol=0, rtol=0)


def test_numbers_and_lengths_that_change() -> None:
    """In one graph: dynamo makes symbols of numbers and sizes that differ between calls."""

    def function(x: Any, scale: float, softcap: float) -> Any:
        return torch_autograd.attention(2 * x, x, x, scale=scale, softcap=softcap)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for rows, scale, softcap in ((7, 0.1, 0.0), (7, 0.2, 0.0), (9, 0.3, 2.0), (11, 0.3, 3.0)):
        x = torch.linspace(-2, 2, rows * 32).reshape(1, rows, 2, 16)
        torch.testing.assert_close(compiled(x, scale, softcap), function(x, scale, softcap), atol=0, rtol=0)
    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="must be finite"):
        function(x, float("inf"), 0.0)
