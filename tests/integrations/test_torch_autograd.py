"""Gradients through torch: gradcheck in float64, against torch's own attention, and compiled."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kvlab  # noqa: E402
from kvlab.integrations import torch_autograd  # noqa: E402
from kvlab.integrations.torch_autograd import attention, attention_varlen  # noqa: E402

BOUNDS = torch.tensor([0, 3, 3, 7], dtype=torch.int32), torch.tensor([0, 2, 6, 9], dtype=torch.int32)


def _leaves(*shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (2, 1), "softcap": 3.0}, {"scale": -0.4}],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    q, k, v = _leaves((1, 3, 4, 2), (1, 4, 2, 2), (1, 4, 2, 2))
    assert torch.autograd.gradcheck(lambda *x: attention(*x, **options), (q, k, v))
    assert kvlab.last_backend() == "reference"
    q, k, v = _leaves((7, 2, 2), (9, 1, 2), (9, 1, 2))
    assert torch.autograd.gradcheck(lambda *x: attention_varlen(*x, *BOUNDS, 4, 4, **options), (q, k, v))


def test_gradcheck_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch_autograd.attention_backward
    right = backward.compute

    def wrong(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv = right(*args, **kwargs)
        return dq, 1.01 * dk, dv

    monkeypatch.setattr(backward, "compute", wrong)
    leaves = _leaves((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(attention, leaves)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_agrees_with_torch(kind: str) -> None:
    """On the fast backend; dout expanded and q, k, v with heads first, as models have them."""
    dtype = getattr(torch, kind)
    q, k, v = (
        x.transpose(1, 2) for x in _leaves((2, 4, 33, 16), (2, 2, 40, 16), (2, 2, 40, 16), dtype=dtype)
    )
    for x in (q, k, v):
        x.retain_grad()
    out, lse = attention(q, k, v, causal=False, return_lse=True)
    assert kvlab.last_backend() == "cpu"
    assert not lse.requires_grad
    out.sum().backward()
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), enable_gqa=True
    )
    exact.sum().backward()
    for x, leaf in zip((q, k, v), leaves, strict=True):
        torch.testing.assert_close(
            x.grad.double(), leaf.grad, atol=2e-6 if kind == "float32" else 0.05, rtol=0
        )


@pytest.mark.parametrize("varlen", [False, True])
def test_compiles_as_one_graph(varlen: bool) -> None:
    """Forward and backward in one graph without a break, for other lengths too, with the same numbers."""
    graphs = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def loss(q: Any, k: Any, v: Any) -> Any:
        if varlen:
            out = attention_varlen(2 * q, k, v, *BOUNDS, 4, 4, causal=True, window=(3, -1))
        else:
            out = attention(2 * q, k, v, causal=True)
        return (out * out).sum()

    shapes = [(7, 4, 8), (9, 2, 8), (9, 2, 8)] if varlen else [(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8)]
    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    results = []
    for function in (loss, compiled):
        leaves = _leaves(*shapes, dtype=torch.float32)
        value = function(*leaves)
        value.backward()
        results.append([value.detach(), *(x.grad for x in leaves)])
    for plain, made in zip(*results, strict=True):
        torch.testing.assert_close(made, plain, atol=0, rtol=0)
    assert len(graphs) == 2
    named = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    kind = "attention_varlen" if varlen else "attention"
    assert sum(name.startswith(f"kvlab.{kind}.") for name in named) == 1
    assert sum(name.startswith(f"kvlab.{kind}_backward.") for name in named) == 1


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    q, k, v = (x.detach() for x in _leaves((1, 4, 2, 8), (1, 5, 1, 8), (1, 5, 1, 8), dtype=torch.float32))
    with pytest.raises(NotImplementedError, match=r"no rule for the transforms of torch\.func"):
        torch.func.grad(lambda x: attention(x, k, v).sum())(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward_ad"):
        attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with torch.autograd.forward_ad.dual_level():
        attention(q, k, v)  # none of them is dual
    out = attention(q.requires_grad_(), k, v)

    def differentiate(dout: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(out, q, dout, retain_graph=True)[0]

    with pytest.raises(NotImplementedError, match="is_grads_batched=True"):
        torch.func.vmap(differentiate)(torch.ones(2, *out.shape))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward_ad"):
        differentiate(torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


@pytest.mark.parametrize("times", [1, 3])  # the third call finds the one before
def test_dual_numbers_are_refused_where_nothing_is_recorded(times: int) -> None:
    q, k, v = (torch.ones(1, 4, 2, 8) for _ in range(3))
    for _ in range(times):
        kvlab.attention(q, k, v)
    cache = kvlab.MixedPrecisionCache(1, 2, 2, 16, budget=None, bits=(16,))
    row = torch.ones(1, 1, 2, 16)
    with torch.autograd.forward_ad.dual_level():
        kvlab.attention(q, k, v)  # none of them is dual
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        for attend in (
            kvlab.attention,
            lambda *x: torch.ops.kvlab.attention(*x, False, None, -1, -1, 0.0, False),
        ):
            with pytest.raises(TypeError, match=r"k is a dual number .*: pass k\.detach\(\)"):
                attend(q, dual, v)
        kvlab.attention(q, dual.detach(), v)
        with pytest.raises(TypeError, match="q is a dual number"):
            cache.step(0, torch.autograd.forward_ad.make_dual(row, row), row, row)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_come_in_batches(varlen: bool, deterministic: bool) -> None:
    """`is_grads_batched=True` gives each as a call of its own does."""
    shapes = ((7, 4, 8), (9, 2, 8), (9, 2, 8)) if varlen else ((1, 4, 2, 8), (1, 5, 1, 8), (1, 5, 1, 8))
    leaves = _leaves(*shapes, dtype=torch.float32)
    bounds = (*BOUNDS, 4, 4) if varlen else ()
    out = (attention_varlen if varlen else attention)(*leaves, *bounds, deterministic=deterministic)
    douts = torch.randn(3, *out.shape)
    found = torch.autograd.grad(out, leaves, douts, retain_graph=True, is_grads_batched=True)
    alone = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    for x, *parts in zip(found, *alone, strict=True):
        assert (x == torch.stack(parts)).all()
    with pytest.raises(NotImplementedError, match="create_graph=True, or call"):
        torch.autograd.grad(out, leaves, douts, is_grads_batched=True, create_graph=True)


def test_tensors_without_memory_are_refused_by_name() -> None:
    q = torch.ones(2, 1, 4, 2, 8)
    with pytest.raises(TypeError, match="q is a tensor without memory, as in a transform"):
        torch.func.vmap(lambda x: kvlab.attention(x, q[0], q[0]))(q)


def test_the_operators_pass_the_checks_of_torch() -> None:
    """Schema, fake shapes and the registration of gradients, as torch tests operators."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = _leaves((1, 4, 2, 8), (1, 5, 1, 8), (1, 5, 1, 8), dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.kvlab.attention.default,
        (*leaves, True, None, -1, -1, 0.0, False),
        test_utils=checks,
    )
    leaves = _leaves((7, 4, 8), (9, 2, 8), (9, 2, 8), dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.kvlab.attention_varlen.default,
        (*leaves, *BOUNDS, 4, 4, True, None, -1, -1, 0.0, False),
        test_utils=checks,
    )


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("varlen", [False, True])
def test_what_looks_at_operators_sees_them_and_the_numbers_are_the_same(varlen: bool) -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attention_varlen(q, k, v, *BOUNDS, 4, 4) if varlen else attention(q, k, v, causal=True)
        return (out * out).sum()

    shapes = [(7, 4, 8), (9, 2, 8), (9, 2, 8)] if varlen else [(1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8)]
    leaves = _leaves(*shapes, dtype=torch.float32)
    for _ in range(3):  # the third time tensors are known
        plain = torch.autograd.grad(loss(*leaves), leaves)
    with Seen() as seen:
        under_a_mode = torch.autograd.grad(loss(*leaves), leaves)
    kind = "kvlab.attention_varlen" if varlen else "kvlab.attention"
    assert [name for name in seen.names if name.startswith("kvlab")] == [
        f"{kind}.default",
        f"{kind}_backward.default",
    ]
    recomputed = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    for other in (under_a_mode, recomputed):
        for x, y in zip(plain, other, strict=True):
            torch.testing.assert_close(x, y, atol=0, rtol=0)


@pytest.mark.parametrize("changed", ["q", "k", "v", "out", "lse"])
def test_what_was_kept_must_not_change(changed: str) -> None:
    leaves = _leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), dtype=torch.float32)
    for turn in range(4):  # tensors are known at last
        q, k, v = (x * 1 for x in leaves)
        out, lse = attention(q, k, v, return_lse=True)
        if turn == 3:
            with torch.no_grad():
                {"q": q, "k": k, "v": v, "out": out, "lse": lse}[changed].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_gradients_of_all_kinds_of_dout_are_the_same() -> None:
    """Known calls and others: expanded, negated, of other strides."""
    leaves = _leaves((2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8), dtype=torch.float32)
    expected = None
    for _ in range(3):
        for dout in (
            torch.ones(2, 5, 2, 8),
            torch.ones(()).expand(2, 5, 2, 8),
            torch._neg_view(torch.full((2, 5, 2, 8), -1.0)),
            torch.ones(2, 2, 5, 8).transpose(1, 2),
            torch.ones(2, 5, 2, 9)[..., :8],
        ):
            for return_lse in (False, True):
                found = attention(*leaves, causal=True, return_lse=return_lse)
                gradients = torch.autograd.grad(found[0] if return_lse else found, leaves, dout)
                expected = expected or gradients
                for x, y in zip(gradients, expected, strict=True):
                    torch.testing.assert_close(x, y, atol=0, rtol=0)


def test_kept_tensors_are_unpacked_once() -> None:
    """As checkpoints demand it, whether the call is known or not."""
    leaves = _leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), dtype=torch.float32)
    unpacked: list[Any] = []
    for turn in range(4):
        unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(x) or x):
            out = attention(*leaves)
        dout = torch.ones_like(out) if turn % 2 else torch.ones(()).expand(out.shape)
        torch.autograd.grad(out, leaves, dout)
        assert len(unpacked) == 5


def test_only_what_needs_gradients_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_autograd, "_attention", None)  # plain tensors need no operator
    q, k, v = _leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), dtype=torch.float32)
    assert attention(q, k.detach(), v.detach()).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert not attention(*(x.detach() for x in (q, k, v))).requires_grad
    (dk,) = torch.autograd.grad(attention(q.detach(), k, v.detach()).sum(), k)
    assert dk.shape == k.shape


def test_other_arrays_are_refused_by_name() -> None:
    q = np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(TypeError, match="must be tensors of torch, got ndarray"):
        attention(q, q, q)


def test_errors_are_those_of_the_function() -> None:
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"q has 3 heads: .* multiple of the 2 heads"):
        attention(q, k, k)
    with pytest.raises(NotImplementedError, match="dtype=int32"):
        attention(k.int(), k.int(), k.int())
    leaves = _leaves((1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4))
    for loss in (torch.square, torch.Tensor.double):  # dout of a linear one needs no gradient
        (dq,) = torch.autograd.grad(loss(attention(*leaves)).sum(), leaves[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dq.square().sum().backward()


def test_what_is_not_recorded_is_the_plain_function() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    np.testing.assert_array_equal(attention(q, k, v).numpy(), kvlab.attention(q, k, v).numpy())
