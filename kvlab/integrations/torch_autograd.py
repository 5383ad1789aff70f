"""Attention that torch can differentiate and compile.

`attention` and `attention_varlen` are those of kvlab, for tensors, with gradients. Underneath are four custom
operators, ``kvlab::attention``, ``kvlab::attention_varlen`` and their backwards, each with a rule that says
what shapes it returns. So `torch.compile` and `torch.export` treat a call as one node,
and its backward as another. The registry chooses the best backend on the tensors' device that supports their
dtype; float64, for `torch.autograd.gradcheck`, runs on the CPU by the reference.

The log-sum-exp is for merging parts and has no gradient here; a second derivative is not offered either.
"""

from typing import Any

import torch

import kvlab
from kvlab.arguments import LONGEST, flag, number, sides_of_window, whole_number

__all__ = ["attention", "attention_varlen", "options_of", "with_contiguous_rows"]

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`kvlab.attention` with gradients.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, num_heads_q, head_dim)
    k, v : tensor, (batch, seqlen_k, num_heads_kv, head_dim)
        float16, bfloat16 or float32, on the CPU also float64. Copied if the last axis is not contiguous.
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
    options = _checked(causal, scale, window, softcap, deterministic)
    out, lse = _attention(*with_contiguous_rows(q, k, v), *options)
    return (out, lse) if flag(return_lse, "return_lse") else out


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
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`kvlab.attention_varlen` with gradients.

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
    options = _checked(causal, scale, window, softcap, deterministic)
    max_seqlen_q = whole_number(max_seqlen_q, "max_seqlen_q", 0, LONGEST)
    max_seqlen_k = whole_number(max_seqlen_k, "max_seqlen_k", 0, LONGEST)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = _varlen(*with_contiguous_rows(q, k, v), *sequences, *options)
    return (out, lse) if flag(return_lse, "return_lse") else out


def with_contiguous_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with their last axis contiguous: themselves, or copies."""
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"q, k and v must be tensors of torch, got {type(x).__name__}: kvlab.attention takes others"
            )
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in tensors)


def _checked(
    causal: bool, scale: float | None, window: tuple[int, int], softcap: float, deterministic: bool
) -> tuple[bool, float | None, int, int, float, bool]:
    """Check the options, under their names; the schemas of the operators would name none."""
    return (
        flag(causal, "causal"),
        None if scale is None else number(scale, "scale"),
        *sides_of_window(window),
        number(softcap, "softcap", least=0),
        flag(deterministic, "deterministic"),
    )


def options_of(causal: bool, scale: float | None, left: int, right: int, softcap: float) -> dict[str, Any]:
    """Return keyword arguments of `kvlab.attention` for the options of an operator."""
    return {"causal": causal, "scale": scale, "window": (left, right), "softcap": softcap}


# ---- fixed length


@torch.library.custom_op("kvlab::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        options = options_of(causal, scale, left, right, softcap)
        out, lse = kvlab.attention(q, k, v, return_lse=True, **options)
    return out, lse


@_attention.register_fake
def _attention_shapes(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen, heads, _head_dim = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen), dtype=torch.float32)


@torch.library.custom_op("kvlab::attention_backward", mutates_args=())
def _attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> Three:
    with torch.no_grad():
        options = options_of(causal, scale, left, right, softcap)
        return kvlab.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)


@_attention_backward.register_fake
def _attention_backward_shapes(dout: torch.Tensor, *inputs: Any) -> Three:
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs[:3])
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: torch.Tensor, _dlse: Any) -> tuple[Any, ...]:
    gradients = _attention_backward(*with_contiguous_rows(dout), *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *(None for _ in ctx.numbers)


_attention.register_autograd(_differentiate, setup_context=_keep)


# ---- variable length


@torch.library.custom_op("kvlab::attention_varlen", mutates_args=())
def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        options = options_of(causal, scale, left, right, softcap)
        out, lse = kvlab.attention_varlen(q, k, v, *sequences, return_lse=True, **options)
    return out, lse


@_varlen.register_fake
def _varlen_shapes(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, heads, _head_dim = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, total), dtype=torch.float32)


@torch.library.custom_op("kvlab::attention_varlen_backward", mutates_args=())
def _varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> Three:
    with torch.no_grad():
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        options = options_of(causal, scale, left, right, softcap) | {"deterministic": deterministic}
        return kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *sequences, **options)


_varlen_backward.register_fake(_attention_backward_shapes)


def _keep_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(output[1])


def _differentiate_varlen(ctx: Any, dout: torch.Tensor, _dlse: Any) -> tuple[Any, ...]:
    gradients = _varlen_backward(*with_contiguous_rows(dout), *ctx.saved_tensors, *ctx.numbers)
    return *gradients, None, None, *(None for _ in ctx.numbers)


_varlen.register_autograd(_differentiate_varlen, setup_context=_keep_varlen)
