"""Gradients of attention in float64: the answer that every backward kernel is judged against.

With s the scores of `kvlab.reference.attention` and lse and out its results, for one head:

    p[i, j]  = exp(s[i, j] - lse[i])                     0 for a hidden key, and in a row without keys
    dp[i, j] = <dout[i], v[j]>
    ds[i, j] = p[i, j] * (dp[i, j] - <dout[i], out[i]>)  times 1 - tanh^2 of the uncapped score, if capped
    dq[i] = scale * sum_j ds[i, j] k[j]
    dk[j] = scale * sum_i ds[i, j] q[i]                  over the rows of every head that reads the KV head
    dv[j] = sum_i p[i, j] dout[i]                        likewise

This is appendix B.2 of Dao et al., "FlashAttention" (2022). `lse` and `out` are arguments and not computed
again, because they may be those of more keys: given the results over all keys, the gradients of parts of the
keys are parts of the gradient, and those of the queries add up.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.reference.attention import visible_keys

Float64 = NDArray[np.float64]


@np.errstate(invalid="ignore")
def backward_rows(
    dout: Float64,
    q: Float64,
    k: Float64,
    v: Float64,
    out: Float64,
    lse: Float64,
    visible: NDArray[np.bool_],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Float64, Float64, Float64]:
    """Compute the gradients of one sequence, all heads.

    Parameters
    ----------
    dout, q, out : float64, (seqlen_q, num_heads_q, head_dim)
    k, v : float64, (seqlen_k, num_heads_kv, head_dim)
    lse : float64, (num_heads_q, seqlen_q)
    visible, scale, softcap
        As in `kvlab.reference.attention.softmax_rows`.

    Returns
    -------
    dq, dk, dv : float64, shaped as q, k, v

    Examples
    --------
    Two keys of equal score: v gets half of dout each; k what moves weight to the larger value.

    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((2, 1, 1)), np.array([[[1.0]], [[3.0]]])
    >>> out, lse = np.array([[[2.0]]]), np.log([[2.0]])
    >>> dq, dk, dv = backward_rows(q, q, k, v, out, lse, visible_keys(1, 2), scale=1.0)
    >>> dk.ravel().round(12), dv.ravel().round(12)
    (array([-0.5,  0.5]), array([0.5, 0.5]))
    """
    seqlen_q, num_heads_q, head_dim = q.shape
    num_heads_kv = k.shape[1]
    scale = 1.0 / np.sqrt(head_dim) if scale is None else scale
    grouped = (seqlen_q, num_heads_kv, num_heads_q // num_heads_kv, head_dim)
    q, dout, out = q.reshape(grouped), dout.reshape(grouped), out.reshape(grouped)
    logs = lse.reshape(*grouped[1:3], seqlen_q, 1)

    scores = scale * np.einsum("qhgd,khd->hgqk", q, k, optimize=True)
    bend = np.ones(())
    if softcap > 0:
        # 1 - tanh^2, of which a tanh near 1 has lost all digits.
        bend = np.cosh(np.minimum(np.abs(scores / softcap), 350.0)) ** -2.0
        scores = softcap * np.tanh(scores / softcap)
    seen = visible & (logs > -np.inf)
    p = np.exp(np.where(seen, scores - np.where(logs > -np.inf, logs, 0.0), -np.inf))
    dp = np.einsum("qhgd,khd->hgqk", dout, v, optimize=True)
    delta = (dout * out).sum(axis=-1).transpose(1, 2, 0)[..., None]
    ds = np.where(seen, p * (dp - delta) * bend, 0.0)

    dq = scale * np.einsum("hgqk,khd->qhgd", ds, k, optimize=True)
    dk = scale * np.einsum("hgqk,qhgd->khd", ds, q, optimize=True)
    dv = np.einsum("hgqk,qhgd->khd", p, dout, optimize=True)
    return dq.reshape(seqlen_q, num_heads_q, head_dim), dk, dv


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Float64, Float64, Float64]:
    """Gradients of attention over sequences of one length.

    Parameters
    ----------
    dout, q, out : real arrays, (batch, seqlen_q, num_heads_q, head_dim)
    k, v : real arrays, (batch, seqlen_k, num_heads_kv, head_dim)
    lse : real array, (batch, num_heads_q, seqlen_q)
    causal, window, scale, softcap
        As in `kvlab.reference.attention.attention`.

    Returns
    -------
    dq, dk, dv : float64, shaped as q, k, v
        0 for rows that see no key and for keys that no row sees.

    Examples
    --------
    A row with one key has no choice, so only v matters.

    >>> x = np.full((1, 1, 1, 2), 3.0)
    >>> [dx.ravel().tolist() for dx in attention_backward(x, x, x, x, x, np.full((1, 1, 1), 18 / 2**0.5))]
    [[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]]
    """
    dout, q, k, v, out, lse = (np.asarray(x, np.float64) for x in (dout, q, k, v, out, lse))
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    visible = visible_keys(q.shape[1], k.shape[1], causal=causal, window=window)
    for b in range(len(q)):
        dq[b], dk[b], dv[b] = backward_rows(
            dout[b], q[b], k[b], v[b], out[b], lse[b], visible, scale=scale, softcap=softcap
        )
    return dq, dk, dv


def attention_varlen_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Float64, Float64, Float64]:
    """Gradients of attention over sequences of different lengths, laid end to end.

    Parameters
    ----------
    dout, q, out : real arrays, (total_q, num_heads_q, head_dim)
    k, v : real arrays, (total_k, num_heads_kv, head_dim)
    lse : real array, (num_heads_q, total_q)
    cu_seqlens_q, cu_seqlens_k : int array, (batch + 1,)
    causal, window, scale, softcap
        As in `attention_backward`.

    Returns
    -------
    dq, dk, dv : float64, shaped as q, k, v

    Examples
    --------
    >>> x, bounds = np.full((1, 1, 2), 3.0), [0, 1]
    >>> lse = np.full((1, 1), 18 / 2**0.5)
    >>> [dx.ravel().tolist() for dx in attention_varlen_backward(x, x, x, x, x, lse, bounds, bounds)]
    [[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]]
    """
    dout, q, k, v, out, lse = (np.asarray(x, np.float64) for x in (dout, q, k, v, out, lse))
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    bounds = pairwise(np.asarray(cu_seqlens_q)), pairwise(np.asarray(cu_seqlens_k))
    for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
        visible = visible_keys(q1 - q0, k1 - k0, causal=causal, window=window)
        dq[q0:q1], dk[k0:k1], dv[k0:k1] = backward_rows(
            dout[q0:q1], q[q0:q1], k[k0:k1], v[k0:k1], out[q0:q1], lse[:, q0:q1], visible,
            scale=scale, softcap=softcap,
        )  # fmt: skip
    return dq, dk, dv
