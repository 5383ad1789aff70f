"""Attention of several groups of queries that see prefixes of the same keys, in float64, and its gradients.

Group g sees in sequence b the first prefix_lens[g][b] keys: its attention is that of its rows and this
prefix, and nothing else. Gradients of keys are sums over groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.reference.attention import attend_rows, visible_keys
from kvlab.reference.attention_backward import backward_rows

__all__ = ["grouped_attention_varlen", "grouped_attention_varlen_backward"]

Float64 = NDArray[np.float64]


def grouped_attention_varlen(
    q_groups: Sequence[ArrayLike],
    k: ArrayLike,
    v: ArrayLike,
    *,
    cu_seqlens_q_groups: Sequence[ArrayLike],
    cu_seqlens_k: ArrayLike,
    prefix_lens: Sequence[ArrayLike],
    causal: bool = True,
    scale: float | None = None,
) -> tuple[list[Float64], list[Float64]]:
    """Attention of each group to the prefixes of its sequences.

    Parameters
    ----------
    q_groups : list of real arrays, (total_q of the group, num_heads_q, head_dim)
    k, v : real arrays, (total_k, num_heads_kv, head_dim)
    cu_seqlens_q_groups : list of int arrays, (batch + 1,)
    cu_seqlens_k : int array, (batch + 1,)
    prefix_lens : list of int arrays, (batch,)
    causal, scale
        As in `kvlab.reference.attention.attention`.

    Returns
    -------
    outs, lses : lists of float64 arrays, shaped as q_groups and (num_heads_q, total_q of the group)

    Examples
    --------
    >>> q, v = np.ones((1, 1, 2)), np.arange(8.0).reshape(4, 1, 2)
    >>> outs, lses = grouped_attention_varlen(
    ...     [q, q], np.zeros((4, 1, 2)), v,
    ...     cu_seqlens_q_groups=[[0, 1], [0, 1]], cu_seqlens_k=[0, 4], prefix_lens=[[2], [4]],
    ... )
    >>> [out.ravel().tolist() for out in outs], np.exp(lses[1]).round(9).tolist()
    ([[1.0, 2.0], [3.0, 4.0]], [[4.0]])
    """
    keys, values = np.asarray(k, np.float64), np.asarray(v, np.float64)
    outs, lses = [], []
    for q, cu_q, lens in zip(q_groups, cu_seqlens_q_groups, prefix_lens, strict=True):
        rows = np.asarray(q, np.float64)
        out, lse = np.zeros(rows.shape), np.full((rows.shape[1], len(rows)), -np.inf)
        for own, seen in _spans(cu_q, cu_seqlens_k, lens):
            visible = visible_keys(own.stop - own.start, seen.stop - seen.start, causal=causal)
            out[own], lse[:, own] = attend_rows(rows[own], keys[seen], values[seen], visible, scale=scale)
        outs.append(out)
        lses.append(lse)
    return outs, lses


def grouped_attention_varlen_backward(
    douts: Sequence[ArrayLike],
    q_groups: Sequence[ArrayLike],
    k: ArrayLike,
    v: ArrayLike,
    outs: Sequence[ArrayLike],
    lses: Sequence[ArrayLike],
    *,
    cu_seqlens_q_groups: Sequence[ArrayLike],
    cu_seqlens_k: ArrayLike,
    prefix_lens: Sequence[ArrayLike],
    causal: bool = True,
    scale: float | None = None,
) -> tuple[list[Float64], Float64, Float64]:
    """Gradients of `grouped_attention_varlen`: those of each group, and of k and v the sums over groups.

    Parameters
    ----------
    douts, outs : lists of real arrays, as q_groups
    lses : list of real arrays, (num_heads_q, total_q of the group)
    q_groups, k, v, cu_seqlens_q_groups, cu_seqlens_k, prefix_lens, causal, scale
        Those of the forward call.

    Returns
    -------
    dq_groups : list of float64 arrays
    dk, dv : float64 arrays

    Examples
    --------
    Two groups of one row that sees one key: dv is the sum of both douts.

    >>> x, one = np.ones((1, 1, 2)), {"cu_seqlens_q_groups": [[0, 1]] * 2, "cu_seqlens_k": [0, 1]}
    >>> one["prefix_lens"] = [[1], [1]]
    >>> outs, lses = grouped_attention_varlen([x, x], x, x, **one)
    >>> grouped_attention_varlen_backward([x, 4 * x], [x, x], x, x, outs, lses, **one)[2].ravel()
    array([5., 5.])
    """
    keys, values = np.asarray(k, np.float64), np.asarray(v, np.float64)
    dk, dv = np.zeros(keys.shape), np.zeros(values.shape)
    dq_groups = []
    arrays = zip(douts, q_groups, outs, lses, cu_seqlens_q_groups, prefix_lens, strict=True)
    for *of_rows, lse, cu_q, lens in arrays:
        dout, q, out = (np.asarray(x, np.float64) for x in of_rows)
        dq, logs = np.zeros(q.shape), np.asarray(lse, np.float64)
        for own, seen in _spans(cu_q, cu_seqlens_k, lens):
            visible = visible_keys(own.stop - own.start, seen.stop - seen.start, causal=causal)
            dq[own], more_dk, more_dv = backward_rows(
                dout[own], q[own], keys[seen], values[seen], out[own], logs[:, own], visible, scale=scale
            )
            dk[seen] += more_dk
            dv[seen] += more_dv
        dq_groups.append(dq)
    return dq_groups, dk, dv


def _spans(cu_q: ArrayLike, cu_k: ArrayLike, lens: ArrayLike) -> list[tuple[slice, slice]]:
    """Return the rows of a group and the keys that they see, for each sequence."""
    rows, keys, seen = (np.asarray(x).tolist() for x in (cu_q, cu_k, lens))
    return [(slice(rows[b], rows[b + 1]), slice(keys[b], keys[b] + count)) for b, count in enumerate(seen)]
