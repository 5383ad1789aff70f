"""Grouped attention that torch can differentiate: one node of autograd for all groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import kvlab
from kvlab.arguments import flag
from kvlab.integrations.torch_autograd import refuse_transforms, refusing_second, with_contiguous_rows
from kvlab.torch_compile import opaque

__all__ = ["grouped_attention_varlen"]


@opaque
def grouped_attention_varlen(
    q_groups: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q_groups: Sequence[torch.Tensor],
    cu_seqlens_k: torch.Tensor,
    prefix_lens: Sequence[torch.Tensor],
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> list[torch.Tensor] | tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`kvlab.grouped_attention_varlen` with gradients.

    It takes no `segment_table` and no `into`, which have no gradients, and no `sm_margin`.

    Parameters
    ----------
    q_groups : list of tensors, (total_q of the group, num_heads_q, head_dim)
    k, v : tensor, (total_k, num_heads_kv, head_dim)
    cu_seqlens_q_groups, cu_seqlens_k, prefix_lens, causal, scale, return_lse, implementation, max_seqlen_q, \
max_seqlen_k
        As in `kvlab.grouped_attention_varlen`.
    deterministic : bool
        Give the same bits in every backward.

    Returns
    -------
    outs : list of tensors, as q_groups
    lses : list of float32 tensors, (num_heads_q, total_q of the group), only if return_lse
        Without gradient.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `kvlab.grouped_attention_varlen`.

    Examples
    --------
    >>> import torch
    >>> x, one = torch.ones(1, 1, 2, requires_grad=True), torch.tensor([1], dtype=torch.int32)
    >>> bounds = torch.tensor([0, 1], dtype=torch.int32)
    >>> outs = grouped_attention_varlen(
    ...     [x, x], x, x, cu_seqlens_q_groups=[bounds] * 2, cu_seqlens_k=bounds, prefix_lens=[one] * 2
    ... )
    >>> (outs[0] + outs[1]).sum().backward()
    >>> x.grad.ravel()
    tensor([2., 2.])
    """
    if not isinstance(q_groups, list | tuple):
        raise TypeError(f"q_groups must be a list or tuple of tensors, got {type(q_groups).__name__}")
    shared = {
        "cu_seqlens_q_groups": cu_seqlens_q_groups, "cu_seqlens_k": cu_seqlens_k, "prefix_lens": prefix_lens,
        "causal": causal, "scale": scale, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    options = shared, flag(deterministic, "deterministic"), implementation
    refuse_transforms(k, v, *q_groups)
    found = _record(options, *with_contiguous_rows(k, v, *q_groups))
    outs, lses = list(found[: len(q_groups)]), list(found[len(q_groups) :])
    return (outs, lses) if flag(return_lse, "return_lse") else outs


class _Recorded(torch.autograd.Function):
    """A call as a node of autograd: options, k, v and the queries of each group."""

    @staticmethod
    def forward(ctx: Any, options: Any, k: torch.Tensor, v: torch.Tensor, *q_groups: torch.Tensor) -> Any:
        shared, _, implementation = options
        found: Any = kvlab.grouped_attention_varlen(
            q_groups, k, v, return_lse=True, implementation=implementation, **shared
        )
        # Views of one array may not leave a function of autograd, as they could be written in place.
        outs, lses = ([x.detach() if x._is_view() else x for x in part] for part in found)
        ctx.options = options
        ctx.save_for_backward(k, v, *q_groups, *outs, *lses)
        ctx.mark_non_differentiable(*lses)
        ctx.set_materialize_grads(False)  # else each backward fills gradients of log-sum-exps with zeros
        return *outs, *lses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, *gradients)


def _gradients(ctx: Any, *gradients: torch.Tensor | None) -> Any:
    shared, deterministic, _ = ctx.options
    k, v, *rest = ctx.saved_tensors
    count = len(rest) // 3
    q_groups, outs, lses = rest[:count], rest[count : 2 * count], rest[2 * count :]
    given = [
        torch.zeros_like(out) if x is None else x for x, out in zip(gradients[:count], outs, strict=True)
    ]
    dq_groups, dk, dv = kvlab.grouped_attention_varlen_backward(
        with_contiguous_rows(*given), q_groups, k, v, outs, lses, deterministic=deterministic, **shared
    )
    return None, dk, dv, *dq_groups


_record: Any = super(torch.autograd.Function, _Recorded).apply  # as in torch_autograd
_gradients_once = refusing_second(_gradients)
