"""Attention that torch can differentiate and compile.

`attention` and `attention_varlen` are those of kvlab, for tensors, with gradients. Where torch runs what is
called, gradients are recorded by an `autograd.Function`. Where it looks at the call (`torch.compile`,
`torch.export`, dispatch modes such as those of selective checkpointing), the call is one of four
custom operators, ``kvlab::attention``, ``kvlab::attention_varlen`` and their backwards, each with a rule that
says what shapes it returns; an operator takes the host longer than a short kernel runs. Both compute by the
same functions. The registry chooses the best backend on the tensors' device that supports their dtype;
float64, for `torch.autograd.gradcheck`, runs on the CPU by the reference.

The log-sum-exp is for merging parts and has no gradient here; a second derivative is not offered either, nor
are dual numbers. Several gradients at once (``is_grads_batched=True``) are computed one after the other.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from kvlab.arguments import flag
from kvlab.ops import attention as forward
from kvlab.ops import attention_backward
from kvlab.ops.attention_call import (
    EVERYWHERE,
    Call,
    Options,
    call_of,
    checked_options,
    last_call,
    longest_of,
)

__all__ = ["attention", "attention_varlen", "refuse_transforms", "refusing_second", "with_contiguous_rows"]

Two = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Longest = tuple[int, int] | None
Numbers = tuple[Longest, Options, bool]
"""The longest lengths of a call of variable length, options, and whether gradients are deterministic."""

Known = tuple[Call, list[int]]
"""A call and the addresses of its tensors, as `call_of` returns them."""

_are_transforms_active = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`kvlab.attention` with gradients.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, num_heads_q, head_dim)
    k, v : tensor, (batch, seqlen_k, num_heads_kv, head_dim)
        float16, bfloat16 or float32, on the CPU also float64, with gradients to 1e-7. Copied if the last axis
        is not contiguous.
    causal, scale, window, softcap, return_lse
        As in `kvlab.attention`.
    deterministic : bool
        Give the same bits in every backward, as in `kvlab.attention_backward`.

    Returns
    -------
    out : tensor, shape and dtype of q
    lse : float32 tensor, (batch, num_heads_q, seqlen_q), only if return_lse
        Without gradient.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `kvlab.attention`.

    Examples
    --------
    >>> import torch
    >>> q, k, v = (torch.ones(1, 1, 1, 2, requires_grad=True) for _ in range(3))
    >>> attention(q, k, v).sum().backward()
    >>> v.grad.ravel()
    tensor([1., 1.])
    """
    options = checked_options(causal, scale, window, softcap)
    numbers = None, options, flag(deterministic, "deterministic")
    return _run((q, k, v), numbers, flag(return_lse, "return_lse"))


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`kvlab.attention_varlen` with gradients, without results that are merged, which have none.

    Parameters
    ----------
    q : tensor, (total_q, num_heads_q, head_dim)
    k, v : tensor, (total_k, num_heads_kv, head_dim)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `kvlab.attention_varlen`.
    causal, scale, window, softcap, deterministic, return_lse
        As in `attention`.

    Returns
    -------
    out : tensor, shape and dtype of q
    lse : float32 tensor, (num_heads_q, total_q), only if return_lse

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `kvlab.attention_varlen`.

    Examples
    --------
    >>> import torch
    >>> q, k, v = (torch.ones(2, 1, 2, requires_grad=True) for _ in range(3))
    >>> bounds = torch.arange(3, dtype=torch.int32)
    >>> attention_varlen(q, k, v, bounds, bounds, 1, 1)[1].sum().backward()
    >>> v.grad[:, 0]
    tensor([[0., 0.],
            [1., 1.]])
    """
    options, longest = checked_options(causal, scale, window, softcap), longest_of(max_seqlen_q, max_seqlen_k)
    numbers = longest, options, flag(deterministic, "deterministic")
    return _run((q, k, v, cu_seqlens_q, cu_seqlens_k), numbers, flag(return_lse, "return_lse"))


def refuse_transforms(*tensors: torch.Tensor) -> None:
    """Refuse calls under the transforms of torch.func and of dual numbers."""
    parts: Callable[..., Any] = forward_ad.unpack_dual
    dual = forward_ad._current_level >= 0 and any(parts(x).tangent is not None for x in tensors)
    if dual or _are_transforms_active():
        raise NotImplementedError(
            "attention has no rule for the transforms of torch.func (grad, vmap, ...), nor for the dual "
            "numbers of torch.autograd.forward_ad: call backward(), or torch.autograd.grad, for several "
            "gradients at once with is_grads_batched=True"
        )


def with_contiguous_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with their last axis contiguous: themselves, or copies."""
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"q, k and v must be tensors of torch, got {type(x).__name__}: kvlab.attention takes others"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            return tuple([x if x.stride(-1) == 1 else x.contiguous() for x in tensors])
    return tensors


class _Calls:
    """Calls with the same numbers, which are checked: what `call_of` takes, and those that come again."""

    def __init__(self, numbers: Numbers) -> None:
        longest, options, deterministic = numbers
        self.numbers, self.is_variable = numbers, longest is not None
        self.forward = forward.signature_of(longest), options, longest, 0
        self.backward = attention_backward.signature_of(longest), options, longest, int(deterministic)
        self.find, self.find_backward = (
            last_call(*x, None, False).find for x in (self.forward, self.backward)
        )


_calls_of = lru_cache(maxsize=4096)(_Calls)


def _call_of(arguments: tuple[Any, ...], tensors: Sequence[Any]) -> Known:
    signature, options, longest, extra = arguments
    return call_of(signature, tensors, None, options, longest, extra)


def _run(tensors: tuple[Any, ...], numbers: Numbers, return_lse: bool) -> torch.Tensor | Two:
    """Compute in the cheapest way that torch can still differentiate and compile; numbers are checked."""
    if is_compiling():
        return _operate(tensors, numbers, return_lse)
    if _are_transforms_active() or forward_ad._current_level >= 0:
        refuse_transforms(*tensors[:3])
    q, k, v, *bounds = tensors
    calls = _calls_of(numbers)
    known = calls.find(tensors)
    if known is None:
        q, k, v = with_contiguous_rows(q, k, v)
        tensors = q, k, v, *bounds
        if _is_looked_at(tensors):
            return _operate(tensors, numbers, return_lse)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        recorded: torch.Tensor | Two = _record(q, k, v, (known, calls, return_lse), *bounds)
        return recorded
    call, addresses = known or _call_of(calls.forward, tensors)
    found: torch.Tensor | Two = forward.compute(call, addresses, tensors, return_lse)
    return found


def _operate(tensors: tuple[Any, ...], numbers: Numbers, return_lse: bool) -> torch.Tensor | Two:
    """Compute by an operator, which torch can look at."""
    q, k, v, *bounds = tensors
    longest, options, deterministic = numbers
    arrays = *with_contiguous_rows(q, k, v), *bounds
    operator = _attention if longest is None else _varlen
    out, lse = operator(*arrays, *(longest or ()), *options, deterministic)
    return (out, lse) if return_lse else out


def _is_looked_at(tensors: tuple[Any, ...]) -> bool:
    """Whether a dispatch mode or a kind of tensor wants to see operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or not _PLAIN.issuperset(map(type, tensors))


class _Recorded(torch.autograd.Function):
    """Attention as a node of autograd.

    Its inputs are q, k and v, how they attend (the call if it is known, `_Calls`, whether lse is wanted), and
    cu_seqlens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        how: tuple[Known | None, _Calls, bool],
        *bounds: torch.Tensor,
    ) -> torch.Tensor | Two:
        tensors, (known, calls, return_lse) = (q, k, v, *bounds), how
        call, addresses = known or _call_of(calls.forward, tensors)
        out, lse = forward.compute(call, addresses, tensors, True)
        ctx.calls = calls
        # To save the output of a node itself costs its backward a new tensor. This one knows of changes, too.
        ctx.save_for_backward(q, k, v, out.detach(), lse, *bounds)
        if not return_lse:
            return out  # type: ignore[no-any-return]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # else each backward fills a gradient of lse with zeros
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, *_: Any) -> Any:
        """As compilers call it, and where gradients are recorded."""
        if torch.is_grad_enabled():
            return _backward_once(ctx, dout)
        if dout is None:
            return _NO_GRADIENTS
        q, k, v, *others = ctx.saved_tensors
        return *_gradients(ctx.calls.numbers, (q, k, v, dout, *others)), None, None, None


def _backward_at_once(ctx: Any, dout: torch.Tensor | None, *_: Any) -> Any:
    """As torch's engine calls `_Recorded.backward`, mostly in a thread of its own, whose core has seen little
    of what it touches here."""
    if dout is None or torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _Recorded.backward(ctx, dout)
    q, k, v, *others = ctx.saved_tensors
    tensors, calls = (q, k, v, dout, *others), ctx.calls
    known = calls.find_backward(tensors)
    if known is None:
        return *_gradients(calls.numbers, tensors), None, None, None
    call, addresses = known
    dq, dk, dv = attention_backward.compute(call, addresses, tensors)
    return (dq, dk, dv, None, None, None) if calls.is_variable else (dq, dk, dv, None)


def _gradients(numbers: Numbers, tensors: tuple[Any, ...]) -> Three:
    """Gradients of q, k and v, given what a forward keeps, and dout behind v; no call is known."""
    q, k, v, dout, *others = tensors
    longest, options, deterministic = numbers
    if dout.stride(-1) != 1 or dout.is_neg():
        dout = dout.resolve_neg().contiguous()
    tensors = q, k, v, dout, *others
    if is_compiling() or _is_looked_at(tensors) or _is_batched(dout):
        operator = _attention_backward if longest is None else _varlen_backward
        dq, dk, dv = operator(dout, q, k, v, *others, *(longest or ()), *options, deterministic)
    else:
        refuse_transforms(dout)
        dq, dk, dv = attention_backward.backward(tensors, longest, options, int(deterministic))
    return dq, dk, dv


def refusing_second(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward for where gradients are recorded: its results have no derivative, and say so.

    `once_differentiable` says nothing where dout needs no gradient, as that of a loss that is linear in out;
    the result depends on q, k and v all the same.
    """
    recorded: Callable[..., Any] = once_differentiable(backward)

    def run(ctx: Any, *douts: torch.Tensor | None) -> Any:
        if any(x is not None and _is_batched(x) for x in douts):
            raise NotImplementedError(
                "attention records nothing of gradients that come with is_grads_batched=True: leave out "
                "create_graph=True, or call torch.autograd.grad for each"
            )
        return recorded(
            ctx, *(x if x is None or x.requires_grad else x.detach().requires_grad_() for x in douts)
        )

    return run


_backward_once = refusing_second(_Recorded.backward)

_Recorded._backward_cls.apply = _backward_at_once  # type: ignore[attr-defined]

_NO_GRADIENTS = (None,) * 6
"""Of as many inputs as a `_Recorded` has at most: torch lets those go that are too many."""

_record: Any = super(torch.autograd.Function, _Recorded).apply
"""`_Recorded.apply` but for what only torch.func needs, which takes 2 us."""


# ---- operators


def _split(inputs: Sequence[Any]) -> tuple[list[torch.Tensor], Numbers]:
    """Return the tensors of an operator, which come first, and its numbers as functions have them."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    *longest, causal, scale, left, right, softcap, deterministic = inputs[len(tensors) :]
    pair = (longest[0], longest[1]) if longest else None
    return tensors, (pair, (causal, scale, left, right, softcap), deterministic)


@torch.no_grad()
def _attend(*inputs: Any) -> Two:
    tensors, (longest, options, _) = _split(inputs)
    out, lse = forward.attend(tensors, longest, options, True)
    return out, lse


@torch.no_grad()
def _attend_backward(dout: torch.Tensor, *inputs: Any) -> Three:
    (q, k, v, *others), (longest, options, deterministic) = _split(inputs)
    tensors = q, k, v, dout, *others
    dq, dk, dv = attention_backward.backward(tensors, longest, options, int(deterministic))
    return dq, dk, dv


def _shapes(q: torch.Tensor, *_: Any) -> Two:
    *batch, seqlen, heads, _head_dim = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, seqlen), dtype=torch.float32)


def _backward_shapes(dout: torch.Tensor, *inputs: Any) -> Three:
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs[:3])
    return dq, dk, dv


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Two) -> None:
    (q, k, v, *bounds), ctx.numbers = _split(inputs)
    ctx.save_for_backward(q, k, v, *output, *bounds)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, _dlse: Any) -> tuple[Any, ...]:
    behind = [None] * (6 if ctx.numbers[0] is None else 10)  # numbers, and before them cu_seqlens
    if dout is None:
        return None, None, None, *behind
    q, k, v, *others = ctx.saved_tensors
    return *_gradients(ctx.numbers, (q, k, v, dout, *others)), *behind


def _operators(name: str, bounds: str = "", longest: str = "") -> tuple[Any, Any]:
    """Return the operator that attends and that of its gradients; parameters of variable length are given."""
    options = (
        f"{longest}bool causal, float? scale, SymInt left, SymInt right, float softcap, bool deterministic"
    )
    qkv, two = "Tensor q, Tensor k, Tensor v, ", "Tensor out, Tensor lse, "
    attend = torch.library.custom_op(
        f"kvlab::{name}", _attend, mutates_args=(), schema=f"({qkv}{bounds}{options}) -> (Tensor, Tensor)"
    )
    backward = torch.library.custom_op(
        f"kvlab::{name}_backward", _attend_backward, mutates_args=(),
        schema=f"(Tensor dout, {qkv}{two}{bounds}{options}) -> (Tensor, Tensor, Tensor)",
    )  # fmt: skip
    attend.register_fake(_shapes)
    backward.register_fake(_backward_shapes)
    attend.register_autograd(_backward, setup_context=_set_up)
    return attend, backward


_attention, _attention_backward = _operators("attention")
_varlen, _varlen_backward = _operators(
    "attention_varlen",
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, ",
    "SymInt max_seqlen_q, SymInt max_seqlen_k, ",
)
