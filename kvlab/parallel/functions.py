"""The functions of ring-flash-attn, computed by kvlab: the same names, arguments and order, on CPUs and GPUs.

Every rank of a process group calls the function with its own tokens and gets their result; gradients go the
same way. `extract_local` takes a rank's tokens out of a whole sequence, `position_ids` says where they stand.
Here keys and values are gathered; in ring_functions.py they go round.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvlab.arguments import LONGEST, flag, refuse_unsupported, whole_number
from kvlab.parallel.arguments import (
    NO_WINDOW,
    Window,
    answer,
    bounds_of,
    check_longest,
    check_pieces,
    check_slice,
    check_tokens,
    check_total,
    implementation_of,
    lengths_of,
    numbers_of,
    options_of,
)
from kvlab.parallel.collectives import (
    check_tensors,
    device_of,
    group_of,
    on_device,
    rank_and_size,
    with_gradients,
)
from kvlab.parallel.gathered import GatheredAttention
from kvlab.parallel.layout import Part, Plan, Shard, llama3_plan, zigzag_llama3_plan
from kvlab.parallel.parts import Options
from kvlab.torch_compile import opaque

__all__ = [
    "extract_local",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "position_ids",
    "scatter_local",
    "zigzag_llama3_flash_attn_varlen_func",
]


# ---- what a rank holds


@opaque
def extract_local(x: Any, cu_seqlens: Any, *, group: Any = None, zigzag: bool = True) -> Any:
    """Take this rank's tokens out of those of all ranks.

    Parameters
    ----------
    x : tensor, (total_tokens, ...)
    cu_seqlens : sequence or tensor of int, (batch + 1,)
        Prefix sums of the lengths of whole sequences, 0, ..., total_tokens. A tensor on a GPU is read by the
        host, here and in the other functions, which waits for the GPU; one on the CPU is not.
    group : process group or DeviceMesh, optional
        All ranks if not given. A mesh has one axis, as ``mesh["cp"]`` of one with data parallelism.
    zigzag : bool
        An early and a late chunk of every sequence, else one chunk.

    Returns
    -------
    tensor, (total_tokens / ranks, ...)
        Sequence by sequence, the early chunk before the late one.

    Raises
    ------
    ValueError
        If a sequence is no multiple of the number of chunks, or x has another number of tokens.
    """
    check_tensors(x=x)
    shard = _shard(lengths_of(cu_seqlens, "cu_seqlens"), group, zigzag)
    check_total(x, "x", sum(shard.lengths))
    return x.index_select(0, on_device(shard.rows, x.device))


@opaque
def scatter_local(whole: Any, local: Any, cu_seqlens: Any, *, group: Any = None, zigzag: bool = True) -> Any:
    """Write this rank's tokens where they stand among those of all ranks, in place; return `whole`.

    Parameters
    ----------
    whole : tensor, (total_tokens, ...)
    local : tensor, (total_tokens / ranks, ...)
    cu_seqlens, group, zigzag
        As in `extract_local`.

    Returns
    -------
    tensor, (total_tokens, ...)
        `whole`, of which the rows of other ranks are as they were.

    Raises
    ------
    ValueError
        If a sequence is no multiple of the number of chunks, or `local` has another number of tokens.
    """
    check_tensors(whole=whole, local=local)
    shard = _shard(lengths_of(cu_seqlens, "cu_seqlens"), group, zigzag)
    check_total(whole, "whole", sum(shard.lengths))
    check_total(local, "local", len(shard.rows))
    return whole.index_copy_(0, on_device(shard.rows, whole.device), local)


@opaque
def position_ids(cu_seqlens: Any, like: Any, *, group: Any = None, zigzag: bool = True) -> Any:
    """Return the position of each of this rank's tokens in its sequence, as rotary embeddings want it.

    Parameters
    ----------
    cu_seqlens, group, zigzag
        As in `extract_local`.
    like : tensor
        On the device where the result shall be.

    Returns
    -------
    int64 tensor, (total_tokens / ranks,)

    Raises
    ------
    ValueError
        If a sequence is no multiple of the number of chunks.
    """
    check_tensors(like=like)
    shard = _shard(lengths_of(cu_seqlens, "cu_seqlens"), group, zigzag)
    return on_device(shard.position_ids, like.device)


# ---- keys and values are gathered


@opaque
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Any, causal: bool, rank: int, world_size: int
) -> tuple[Any, Any, int, int, slice]:
    """Return what a rank passes to `llama3_flash_attn_varlen_func`.

    Parameters
    ----------
    cu_seqlens : int32 tensor, (batch + 1,)
        Prefix sums of the lengths of whole sequences; their total is a multiple of world_size.
    causal : bool
    rank, world_size : int

    Returns
    -------
    cu_seqlens_q, cu_seqlens_k : int32 tensor
        Of the pieces of sequences that the rank holds, and of the keys that they see.
    max_seqlen_q, max_seqlen_k : int
    local_k_slice : slice
        These keys among those of all ranks.
    """
    size = whole_number(world_size, "world_size", 1, LONGEST)
    own = whole_number(rank, "rank", 0, size - 1)
    (part,) = llama3_plan(lengths_of(cu_seqlens, "cu_seqlens"), own, size, flag(causal, "causal")).gathered
    longest = [int((bounds[1:] - bounds[:-1]).max(initial=0)) for bounds in (part.cu_q, part.cu_k)]
    bounds = [on_device(b, device_of(cu_seqlens)) for b in (part.cu_q, part.cu_k)]
    return bounds[0], bounds[1], longest[0], longest[1], part.k_rows  # type: ignore[return-value]


@opaque
def llama3_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """Attention of a stream that is cut into equal pieces, wherever sequences end.

    Simple, and unequal work for the ranks if causal: `zigzag_llama3_flash_attn_varlen_func` shares it out
    evenly.

    Parameters
    ----------
    q, k, v : tensor, (total_tokens / ranks, heads, head_dim)
        This rank's piece; q may have more heads.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice
        From `llama3_flash_attn_prepare_cu_seqlens`.
    heads_k_stride : int
        KV heads that are gathered at once.
    dropout_p, alibi_slopes
        0.0 and None.
    softmax_scale, causal, window_size, deterministic
        As `scale`, ... of `kvlab.attention_varlen`.
    return_attn_probs : bool
        Return (out, lse, None).
    group : process group or DeviceMesh, optional

    Returns
    -------
    out : tensor, shape and dtype of q

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `kvlab.attention_varlen`; also for heads_k_stride out of range.
    kvlab.errors.RankError
        If another rank does not answer.
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    bounds = (bounds_of(cu_seqlens_q, "cu_seqlens_q"), bounds_of(cu_seqlens_k, "cu_seqlens_k"))
    check_tensors(q=q, k=k, v=v)
    check_pieces(q, *bounds, max_seqlen_q, max_seqlen_k)
    part = Part(slice(None), local_k_slice, *bounds, flag(causal, "causal"))
    rank, size = rank_and_size(group)
    check_slice(local_k_slice, len(q) * size, int(bounds[1][-1]))
    plan = Plan(np.full((size, size), len(q)), (), (part,))
    options = options_of(softmax_scale, window_size, deterministic)
    stride = whole_number(heads_k_stride, "heads_k_stride", 1, LONGEST)
    call = GatheredAttention(plan, group_of(group), rank, stride, options)
    return _attend(call, q, k, v, return_attn_probs)


@opaque
def zigzag_llama3_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
    implementation: str | None = None,
    use_triton_grouped: bool = False,
    use_grouped_attention: bool = False,
) -> Any:
    """Attention of sequences of which each rank holds an early and a late chunk, with gathered keys.

    Parameters
    ----------
    q, k, v : tensor, (total_tokens / ranks, heads, head_dim)
        This rank's tokens as `extract_local` gives them; q may have more heads.
    cu_seqlens_q : sequence or tensor of int, (batch + 1,)
        Prefix sums of the tokens of each sequence on a rank.
    cu_seqlens_k : sequence or tensor of int, (batch + 1,)
        Prefix sums of the lengths of whole sequences, which are multiples of 2 * ranks.
    max_seqlen_q, max_seqlen_k : int
        At least the longest of either.
    heads_k_stride : int
        KV heads that are gathered at once: few for small buffers and a short first wait, many for few
        launches.
    local_k_slice : slice, optional
        All keys, as a zigzag rank needs.
    dropout_p, alibi_slopes, softmax_scale, causal, window_size, deterministic, return_attn_probs, group
        As in `llama3_flash_attn_varlen_func`.
    implementation : {"separate", "listed", "paired"}, optional
        How the forward attends gathered keys: by a call for each chunk, or by one call for both (see
        `kvlab.grouped_attention_varlen`), which reads keys of several sequences where they lie. By default
        one kernel for own and gathered keys where copy engines bring these (ranks of one host, compute
        capability 9.0, 16 bits, causal, no window, chunks of a multiple of 8 tokens), else separate.
    use_triton_grouped, use_grouped_attention : bool
        Words of other callers for ``"paired"`` and ``"separate"``.

    Returns
    -------
    out : tensor, shape and dtype of q

    Raises
    ------
    ValueError
        If lengths are no multiples of 2 * ranks, or arguments contradict each other.
    TypeError, NotImplementedError
        As `kvlab.attention_varlen`; for ``"listed"`` and ``"paired"`` also with a window or without causal,
        and on a GPU if the chunks of sequences are no multiples of 8 tokens.
    kvlab.errors.RankError
        If another rank does not answer.
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    check_tensors(q=q, k=k, v=v)
    options = options_of(softmax_scale, window_size, deterministic)
    options = options._replace(
        implementation=implementation_of(implementation, use_triton_grouped, use_grouped_attention)
    )
    word = options.implementation
    if word not in (None, "separate") and (options.window != NO_WINDOW or not causal):
        raise NotImplementedError(
            f"implementation={word!r}: one call for both chunks needs causal=True and no window; leave it out"
        )
    if local_k_slice is not None and not isinstance(local_k_slice, slice):
        raise TypeError(f"local_k_slice={local_k_slice!r}: zigzag chunks need all keys; pass None")
    call = _zigzag_llama3_call(
        numbers_of(cu_seqlens_q, "cu_seqlens_q"), numbers_of(cu_seqlens_k, "cu_seqlens_k"),
        whole_number(max_seqlen_q, "max_seqlen_q", 0, LONGEST),
        whole_number(max_seqlen_k, "max_seqlen_k", 0, LONGEST),
        local_k_slice and (local_k_slice.start, local_k_slice.stop, local_k_slice.step),
        flag(causal, "causal"), options, whole_number(heads_k_stride, "heads_k_stride", 1, LONGEST),
        group_of(group), rank_and_size(group),
    )  # fmt: skip
    return _attend(call, q, k, v, return_attn_probs)


@lru_cache(maxsize=256, typed=True)
def _zigzag_llama3_call(
    cu_seqlens_q: tuple[int, ...],
    cu_seqlens_k: tuple[int, ...],
    max_seqlen_q: int,
    max_seqlen_k: int,
    local_k_slice: tuple[Any, ...] | None,
    causal: bool,
    options: Options,
    stride: int,
    group: Any,
    ranks: tuple[int, int],
) -> GatheredAttention:
    """Check and plan what does not depend on tensors; a model calls with the same again and again."""
    shard = Shard(lengths_of(cu_seqlens_k, "cu_seqlens_k"), *ranks)
    mine, total = shard.cu_seqlens, sum(shard.lengths)
    given = bounds_of(cu_seqlens_q, "cu_seqlens_q")
    if given.tolist() != mine.tolist():
        raise ValueError(
            f"cu_seqlens_q={given.tolist()}: on {shard.world_size} ranks cu_seqlens_k means {mine.tolist()}"
        )
    if local_k_slice is not None and slice(*local_k_slice).indices(total) != (0, total, 1):
        raise ValueError(f"local_k_slice={slice(*local_k_slice)}: zigzag chunks need all keys; pass None")
    check_longest(tuple(np.diff(mine).tolist()), max_seqlen_q, "max_seqlen_q")
    check_longest(shard.lengths, max_seqlen_k, "max_seqlen_k")
    plan = zigzag_llama3_plan(shard, causal, options.window)
    return GatheredAttention(plan, group, ranks[0], stride, options)


# ---- results


def _attend(call: GatheredAttention, q: Any, k: Any, v: Any, return_lse: bool) -> Any:
    check_tokens(q.shape, k.shape, v.shape, call.tokens)
    whole_number(call.stride, "heads_k_stride", 1, max(1, k.shape[1]))
    return answer(with_gradients(call, q, k, v), return_lse)


def _shard(lengths: tuple[int, ...], group: Any, zigzag: bool) -> Shard:
    return Shard(lengths, *rank_and_size(group), zigzag=flag(zigzag, "zigzag"))
