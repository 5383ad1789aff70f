"""The four functions of flash-attn that are private and that other libraries import all the same.

They expose intermediate results of autograd: a forward returns the log-sum-exp; a backward takes it and
writes gradients into arrays of the caller. With these, attention over parts of the keys can be merged, as
ring-flash-attn does. As in flash-attn, most of their arguments have no default.
"""

from __future__ import annotations

import torch

import kvlab
from kvlab.arguments import flag, refuse_unsupported
from kvlab.integrations.flash_attn_arguments import score_options_of_sides
from kvlab.integrations.torch_autograd import with_contiguous_rows

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
]

Tensor = torch.Tensor


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, softmax_lse, and two tensors that are empty without dropout."""
    refuse_unsupported(dropout_p, alibi_slopes)
    q, k, v = with_contiguous_rows(q, k, v)
    with torch.no_grad():
        out, lse = kvlab.attention(
            q, k, v, return_lse=True,
            **score_options_of_sides(causal, softmax_scale, window_size_left, window_size_right, softcap),
        )  # fmt: skip
    return out, lse, q.new_empty(0), q.new_empty(0, dtype=torch.int64)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, softmax_lse (nheads, total_q), and two tensors that are empty without dropout."""
    refuse_unsupported(dropout_p, alibi_slopes)
    for name, value in (("block_table", block_table), ("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if value is not None:
            raise NotImplementedError(f"{name}: call flash_attn_with_kvcache, which takes such caches")
    q, k, v = with_contiguous_rows(q, k, v)
    with torch.no_grad():
        out, lse = kvlab.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            return_lse=True,
            **score_options_of_sides(causal, softmax_scale, window_size_left, window_size_right, softcap),
        )  # fmt: skip
    return out, lse, q.new_empty(0), q.new_empty(0, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients to dq, dk and dv; returns an empty tensor for flash-attn's scratch softmax_d."""
    refuse_unsupported(dropout_p, alibi_slopes)
    dout, q, k, v, out = with_contiguous_rows(dout, q, k, v, out)
    with torch.no_grad():
        gradients = kvlab.attention_backward(
            dout, q, k, v, out, softmax_lse, deterministic=flag(deterministic, "deterministic"),
            **score_options_of_sides(causal, softmax_scale, window_size_left, window_size_right, softcap),
        )  # fmt: skip
        _write(gradients, (dq, dk, dv))
    return q.new_empty(0, dtype=torch.float32)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients to dq, dk and dv; returns an empty tensor for flash-attn's scratch softmax_d."""
    refuse_unsupported(dropout_p, alibi_slopes)
    dout, q, k, v, out = with_contiguous_rows(dout, q, k, v, out)
    with torch.no_grad():
        gradients = kvlab.attention_varlen_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, deterministic=flag(deterministic, "deterministic"),
            **score_options_of_sides(causal, softmax_scale, window_size_left, window_size_right, softcap),
        )  # fmt: skip
        _write(gradients, (dq, dk, dv))
    return q.new_empty(0, dtype=torch.float32)


def _write(gradients: tuple[Tensor, ...], buffers: tuple[Tensor | None, ...]) -> None:
    for gradient, buffer in zip(gradients, buffers, strict=True):
        if buffer is not None:
            buffer.copy_(gradient)
