"""The functions of ring-flash-attn whose keys and values go round the ranks; others are in functions.py."""

from __future__ import annotations

from typing import Any

from kvlab.arguments import flag, refuse_unsupported
from kvlab.parallel.arguments import (
    NO_WINDOW,
    Window,
    answer,
    check_longest,
    check_tokens,
    lengths_of,
    options_of,
)
from kvlab.parallel.collectives import check_tensors, group_of, rank_and_size, with_gradients
from kvlab.parallel.layout import Shard
from kvlab.parallel.parts import Options
from kvlab.parallel.ring import RingAttention
from kvlab.shapes import match_shapes
from kvlab.torch_compile import opaque

__all__ = [
    "ring_flash_attn_func",
    "ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_varlen_func",
]

_OF_Q, _OF_K = ("B", "Sq", "Hq", "D"), ("B", "Sq", "Hk", "D")  # a rank has as many keys as queries


@opaque
def ring_flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """Attention of sequences of one length of which each rank holds one chunk, with keys that go round.

    Parameters
    ----------
    q, k, v : tensor, (batch, seqlen / ranks, heads, head_dim)
        This rank's chunk; q may have more heads.
    dropout_p, alibi_slopes, softmax_scale, causal, deterministic, return_attn_probs, group
        As in `llama3_flash_attn_varlen_func`. If causal, ranks with late chunks do more work than others:
        `zigzag_ring_flash_attn_func` shares it out evenly.
    window_size : (int, int)
        (-1, -1): a ring has no windows.

    Returns
    -------
    out : tensor, shape and dtype of q

    Raises
    ------
    ValueError, TypeError, NotImplementedError, kvlab.errors.RankError
        As `llama3_flash_attn_varlen_func`; also for a window.
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    options = options_of(softmax_scale, window_size, deterministic)
    return _ring_of_batch(q, k, v, causal, options, return_attn_probs, group, zigzag=False)


@opaque
def zigzag_ring_flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """Compute `ring_flash_attn_func` on ranks that hold an early and a late chunk of each sequence.

    Parameters
    ----------
    q, k, v : tensor, (batch, seqlen / ranks, heads, head_dim)
        This rank's chunks, the early one before the late one; q may have more heads.
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        As in `ring_flash_attn_func`.

    Returns
    -------
    out : tensor, shape and dtype of q

    Raises
    ------
    ValueError, TypeError, NotImplementedError, kvlab.errors.RankError
        As `ring_flash_attn_func`.
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    options = options_of(softmax_scale, window_size, deterministic)
    return _ring_of_batch(q, k, v, causal, options, return_attn_probs, group, zigzag=True)


@opaque
def ring_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """`ring_flash_attn_func` for sequences of several lengths.

    Parameters
    ----------
    q, k, v : tensor, (total_tokens / ranks, heads, head_dim)
        This rank's tokens as ``extract_local(..., zigzag=False)`` gives them.
    cu_seqlens : sequence or tensor of int, (batch + 1,)
        Prefix sums of the tokens of each sequence on a rank.
    max_seqlen : int
        At least the longest of these.
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        As in `ring_flash_attn_func`.

    Returns
    -------
    out : tensor, shape and dtype of q

    Raises
    ------
    ValueError, TypeError, NotImplementedError, kvlab.errors.RankError
        As `ring_flash_attn_func`.
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    options = options_of(softmax_scale, window_size, deterministic)
    return _ring_of_lengths(
        q, k, v, cu_seqlens, max_seqlen, causal, options, return_attn_probs, group, zigzag=False
    )


@opaque
def zigzag_ring_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """Compute `ring_flash_attn_varlen_func` on ranks that hold an early and a late chunk of each sequence.

    Parameters
    ----------
    q, k, v : tensor, (total_tokens / ranks, heads, head_dim)
        This rank's tokens as `extract_local` gives them.
    cu_seqlens, max_seqlen
        As in `ring_flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        As in `ring_flash_attn_func`.

    Returns
    -------
    out : tensor, shape and dtype of q

    Raises
    ------
    ValueError, TypeError, NotImplementedError, kvlab.errors.RankError
        As `ring_flash_attn_func`.
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    options = options_of(softmax_scale, window_size, deterministic)
    return _ring_of_lengths(
        q, k, v, cu_seqlens, max_seqlen, causal, options, return_attn_probs, group, zigzag=True
    )


def _ring_of_lengths(
    q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, causal: bool, options: Options,
    return_lse: bool, group: Any, *, zigzag: bool,
) -> Any:  # fmt: skip
    check_tensors(q=q, k=k, v=v)
    lengths = lengths_of(cu_seqlens, "cu_seqlens")
    check_longest(lengths, max_seqlen, "max_seqlen")
    return _ring(q, k, v, lengths, causal, options, return_lse, group, zigzag=zigzag)


def _ring_of_batch(
    q: Any, k: Any, v: Any, causal: bool, options: Options, return_lse: bool, group: Any, *, zigzag: bool
) -> Any:
    check_tensors(q=q, k=k, v=v)
    sizes = match_shapes({"q": (q.shape, _OF_Q), "k": (k.shape, _OF_K), "v": (v.shape, _OF_K)})
    lengths = (sizes["Sq"],) * sizes["B"]
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    result = _ring(flat_q, flat_k, flat_v, lengths, causal, options, return_lse, group, zigzag=zigzag)
    if not return_lse:
        return result.view(q.shape)
    out, lse, nothing = result
    return out.view(q.shape), lse.unflatten(1, (sizes["B"], -1)).transpose(0, 1), nothing


def _ring(
    q: Any,
    k: Any,
    v: Any,
    local_lengths: tuple[int, ...],
    causal: bool,
    options: Options,
    return_lse: bool,
    group: Any,
    *,
    zigzag: bool,
) -> Any:
    if options.window != NO_WINDOW:
        raise NotImplementedError(
            f"window_size={options.window}: a ring has no windows; zigzag_llama3_flash_attn_varlen_func has"
        )
    rank, world_size = rank_and_size(group)
    shard = Shard(tuple(n * world_size for n in local_lengths), rank, world_size, zigzag)
    check_tokens(q.shape, k.shape, v.shape, int(shard.cu_seqlens[-1]))
    call = RingAttention(shard, group_of(group), flag(causal, "causal"), options)
    return answer(with_gradients(call, q, k, v), return_lse)
