"""Compiled by torch, functions on a GPU give what they give alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import kvlab  # noqa: E402
from kvlab.integrations.torch_autograd import attention, attention_varlen  # noqa: E402
from tests.traced import CALLS, assert_traced_alike  # noqa: E402


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_are_the_plain_ones(name: str) -> None:
    assert_traced_alike(name, "cuda", torch.bfloat16, backend="eager")


@pytest.mark.slow  # a minute: torch writes kernels for the host, too
def test_beside_kernels_that_torch_writes() -> None:
    """With inductor, which `torch.compile` takes by default: what it makes of the rest of the program."""
    pytest.importorskip("triton")
    assert_traced_alike("recorded_groups", "cuda", torch.bfloat16)


@pytest.mark.parametrize("varlen", [False, True])
def test_one_graph_between_kernels_that_torch_writes(varlen: bool) -> None:
    """Operators and their gradients stand in the middle of a graph of inductor, of other lengths too."""
    pytest.importorskip("triton")

    def loss(q: Any, k: Any, v: Any, bounds: Any) -> Any:
        options: Any = {"causal": True, "deterministic": True}
        if varlen:
            out = attention_varlen(q + q, k, v + 1, bounds, bounds, 300, 300, **options)
        else:
            out = attention((q + q)[None], k[None], (v + 1)[None], **options)
        return (out * 2).float().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    for length in (70, 90, 300):
        leaves = [
            torch.randn(length, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        ]
        bounds = torch.tensor([0, 20, length], dtype=torch.int32, device="cuda")
        plain, made, other = (
            torch.autograd.grad(f(*leaves[:2], v, bounds), leaves)
            for f, v in ((loss, leaves[2]), (compiled, leaves[2]), (compiled, 2 * leaves[2]))
        )
        for x, y, wrong in zip(plain, made, other, strict=True):
            torch.testing.assert_close(y, x, atol=0, rtol=0)
            assert not torch.equal(wrong, x)


def test_gradients_take_the_words_of_the_forward() -> None:
    for head_dim in (128, 192):
        x = torch.randn(300, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        bounds = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
        own: Any = {"cu_seqlens_q_groups": [bounds], "cu_seqlens_k": bounds, "prefix_lens": [bounds[1:]]}
        outs, lses = kvlab.grouped_attention_varlen([x], x, x, return_lse=True, **own)
        results = [
            kvlab.grouped_attention_varlen_backward(
                outs, [x], x, x, outs, lses, implementation=word, deterministic=True, **own
            )
            for word in (None, "paired", "listed")
        ]
        for dq, dk, dv in results[1:]:
            assert torch.equal(dq[0], results[0][0][0])
            assert torch.equal(dk, results[0][1])
            assert torch.equal(dv, results[0][2])
