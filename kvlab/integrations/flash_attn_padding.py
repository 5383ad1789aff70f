"""flash-attn's ``bert_padding``: padded batches to sequences one after the other, and back.

Models that take padded batches pack their tokens with these before a call of variable length, and spread the
results again. Names, arguments and results are flash-attn's; gradients are those of torch's own indexing.
"""

from __future__ import annotations

from typing import Any

import torch

from kvlab.shapes import match_shapes

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]

Tensor = torch.Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows `indices` of the first axis.

    Parameters
    ----------
    input : tensor, (rows, ...)
    indices : int64 tensor, (count,)

    Returns
    -------
    tensor, (count, ...)

    Examples
    --------
    >>> index_first_axis(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([2, 0])).tolist()
    [[5, 6], [1, 2]]
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return `first_axis_dim` rows: `values` at `indices`, zeros elsewhere.

    Parameters
    ----------
    values : tensor, (count, ...)
    indices : int64 tensor, (count,)
        All different.
    first_axis_dim : int

    Returns
    -------
    tensor, (first_axis_dim, ...)

    Examples
    --------
    >>> index_put_first_axis(torch.tensor([[5, 6]]), torch.tensor([1]), 2).tolist()
    [[0, 0], [5, 6]]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """Take the padding out of a batch; waits for the GPU, since the host has to know the longest sequence.

    Parameters
    ----------
    hidden_states : tensor, (batch, seqlen, ...)
    attention_mask : bool or int tensor, (batch, seqlen)
        1 for tokens, 0 for padding.
    unused_mask : bool or int tensor, (batch, seqlen), optional
        1 for tokens that keep their places but do not count as used.

    Returns
    -------
    tokens : tensor, (total, ...)
    indices : int64 tensor, (total,)
        Where they were among batch * seqlen; what `pad_input` wants.
    cu_seqlens : int32 tensor, (batch + 1,)
    max_seqlen : int
    used : int32 tensor, (batch,)
        Tokens of each sequence that are not in `unused_mask`.

    Raises
    ------
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> tokens, indices, cu_seqlens, longest, used = unpad_input(torch.arange(6.0).view(2, 3, 1), mask)
    >>> tokens.ravel().tolist(), indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
    ([0.0, 1.0, 3.0], [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    match_shapes(
        {
            "hidden_states": (hidden_states.shape[:2], ("batch", "seqlen")),
            "attention_mask": (attention_mask.shape, ("batch", "seqlen")),
        }
        | ({} if unused_mask is None else {"unused_mask": (unused_mask.shape, ("batch", "seqlen"))})
    )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    longest = int(lengths.max()) if len(lengths) else 0
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back where `unpad_input` found them, zeros where padding was.

    Parameters
    ----------
    hidden_states : tensor, (total, ...)
    indices : int64 tensor, (total,)
    batch, seqlen : int

    Returns
    -------
    tensor, (batch, seqlen, ...)

    Examples
    --------
    >>> pad_input(torch.tensor([[7.0], [8.0]]), torch.tensor([0, 3]), 2, 2).ravel().tolist()
    [7.0, 0.0, 0.0, 8.0]
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])
