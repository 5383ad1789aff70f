"""Scaled dot-product attention in float64: the answer that every attention kernel is judged against.

For query row i of one head, over the keys j that the mask lets it see:

    s[i, j] = scale * <q[i], k[j]>                  the score of key j
    s[i, j] = softcap * tanh(s[i, j] / softcap)     only if softcap > 0
    lse[i]  = log sum_j exp s[i, j]                 natural log; -inf if the row sees no key
    p[i, j] = exp(s[i, j] - lse[i])                 0 for a hidden key
    out[i]  = sum_j p[i, j] v[j]                    0 if the row sees no key

Everything else is book-keeping: query head h reads KV head h // (num_heads_q // num_heads_kv), the mask is
aligned to the last row and the last key, and sequences of different lengths are slices of one long array. So
there is one function for one sequence, `attend_rows`, and the others call it once a sequence. All scores of a
sequence exist at once, on purpose: nothing here is blocked, so nothing here shares a mistake with a kernel
that is.

The formula is equation 1 of Vaswani et al., "Attention is all you need" (2017); grouped heads are those of
Ainslie et al., "GQA" (2023), the soft cap that of the Gemma 2 report (2024), section 2. NaN and infinities go
through without a warning. A hidden key has probability 0, but 0 * NaN is NaN: hidden values must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def visible_keys(
    seqlen_q: int, seqlen_k: int, *, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> NDArray[np.bool_]:
    """Say which keys each query row sees.

    Row i stands at key i + seqlen_k - seqlen_q, so the last row stands at the last key. It sees its own
    position, `left` keys before and `right` keys after it; -1 means no limit, and `causal` means right = 0.
    This is the convention of flash-attn since version 2.1.

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        Number of query rows and of keys. With seqlen_q > seqlen_k and `causal`, the first rows see nothing.
    causal : bool
        Hide the keys after the row's own position.
    window : (int, int)
        (left, right), each -1 or a number of keys.

    Returns
    -------
    bool, (seqlen_q, seqlen_k)

    Raises
    ------
    ValueError
        If a side of the window is below -1.

    Examples
    --------
    >>> visible_keys(2, 4, causal=True).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> visible_keys(3, 3, window=(1, 0)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window is {(left, right)}: each side must be -1 (no limit) or a number of keys")
    if causal:
        right = 0
    position = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance = np.arange(seqlen_k)[None, :] - position
    visible = np.ones((seqlen_q, seqlen_k), dtype=np.bool_)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


@np.errstate(divide="ignore", invalid="ignore")
def softmax_rows(
    q: Float64, k: Float64, visible: NDArray[np.bool_], *, scale: float | None = None, softcap: float = 0.0
) -> tuple[Float64, Float64]:
    """Compute the probabilities of one sequence, all heads, and the log-sum-exp of its scores.

    Parameters
    ----------
    q : float64, (seqlen_q, num_heads_q, head_dim)
    k : float64, (seqlen_k, num_heads_kv, head_dim)
    visible : bool, (seqlen_q, seqlen_k)
    scale : float, optional
        Factor on the scores; 1 / sqrt(head_dim) if not given.
    softcap : float
        Bound on the magnitude of the scores; 0 means none.

    Returns
    -------
    probabilities : float64, (num_heads_q, seqlen_q, seqlen_k)
        Rows sum to one; all zero where a row sees no key.
    lse : float64, (num_heads_q, seqlen_q)

    Raises
    ------
    ValueError
        If num_heads_q is no multiple of num_heads_kv, or softcap is negative.

    Examples
    --------
    >>> probabilities, lse = softmax_rows(np.ones((1, 1, 4)), np.zeros((2, 1, 4)), visible_keys(1, 2))
    >>> probabilities, bool(lse[0, 0] == np.log(2))
    (array([[[0.5, 0.5]]]), True)
    """
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}: it must be 0 (none) or positive")
    seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_kv, _ = k.shape
    if scale is None:
        scale = 1.0 / np.sqrt(head_dim)

    q_grouped = q.reshape(seqlen_q, num_heads_kv, _group_size(num_heads_q, num_heads_kv), head_dim)
    scores = scale * np.einsum("qhgd,khd->hgqk", q_grouped, k, optimize=True)
    scores = scores.reshape(num_heads_q, seqlen_q, seqlen_k)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores, -np.inf)

    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    largest = np.where(largest == -np.inf, 0.0, largest)  # a row without keys: exp(-inf - 0) is 0
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (largest + np.log(total))[..., 0]
    return weights / np.where(total == 0, 1.0, total), lse


@np.errstate(invalid="ignore")
def attend_rows(
    q: Float64,
    k: Float64,
    v: Float64,
    visible: NDArray[np.bool_],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Float64, Float64]:
    """Compute attention of one sequence, all heads: out (seqlen_q, num_heads_q, head_dim) and lse.

    Arguments, lse and errors as in `softmax_rows`; v is float64, (seqlen_k, num_heads_kv, head_dim).

    Examples
    --------
    >>> v = np.arange(8.0).reshape(2, 1, 4)
    >>> out, lse = attend_rows(np.ones((1, 1, 4)), np.zeros((2, 1, 4)), v, visible_keys(1, 2))
    >>> out
    array([[[2., 3., 4., 5.]]])
    """
    probabilities, lse = softmax_rows(q, k, visible, scale=scale, softcap=softcap)
    out = np.einsum("hgqk,khd->qhgd", _by_kv_head(probabilities, k.shape[1]), v, optimize=True)
    return out.reshape(*q.shape[:2], v.shape[-1]), lse


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Float64 | tuple[Float64, Float64]:
    """Attention over sequences of one length.

    Parameters
    ----------
    q : real array, (batch, seqlen_q, num_heads_q, head_dim)
    k, v : real arrays, (batch, seqlen_k, num_heads_kv, head_dim)
    causal, window
        The mask, as in `visible_keys`.
    scale, softcap
        The scores, as in `softmax_rows`.
    return_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    out : float64, (batch, seqlen_q, num_heads_q, head_dim)
        0 for rows that see no key.
    lse : float64, (batch, num_heads_q, seqlen_q), only if return_lse
        -inf for rows that see no key.

    Raises
    ------
    ValueError
        If num_heads_q is no multiple of num_heads_kv, a side of window is below -1, or softcap is negative.

    Examples
    --------
    Two query rows, one key: the causal mask leaves the first row without a key.

    >>> q, k, v = np.ones((1, 2, 1, 4)), np.ones((1, 1, 1, 4)), np.full((1, 1, 1, 4), 7.0)
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out[0, :, 0, 0], lse[0, 0]
    (array([0., 7.]), array([-inf,   2.]))
    """
    q, k, v = _float64(q), _float64(k), _float64(v)
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = np.zeros((batch, seqlen_q, num_heads_q, v.shape[-1]))
    lse = np.zeros((batch, num_heads_q, seqlen_q))
    visible = visible_keys(seqlen_q, k.shape[1], causal=causal, window=window)
    for b in range(batch):
        out[b], lse[b] = attend_rows(q[b], k[b], v[b], visible, scale=scale, softcap=softcap)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Float64 | tuple[Float64, Float64]:
    """Attention over sequences of different lengths, laid end to end.

    Sequence b has the query rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1] and the keys from
    cu_seqlens_k[b] up to cu_seqlens_k[b + 1]; either may be empty. The mask is aligned within each sequence.

    Parameters
    ----------
    q : real array, (total_q, num_heads_q, head_dim)
    k, v : real arrays, (total_k, num_heads_kv, head_dim)
    cu_seqlens_q, cu_seqlens_k : int array, (batch + 1,)
        Prefix sums of the lengths: 0, ..., total.
    max_seqlen_q, max_seqlen_k : int
        At least the longest length.
    causal, scale, window, softcap, return_lse
        As in `attention`.

    Returns
    -------
    out : float64, (total_q, num_heads_q, head_dim)
    lse : float64, (num_heads_q, total_q), only if return_lse

    Raises
    ------
    ValueError
        As `attention`; also if cu_seqlens do not rise from 0 to the total, name different numbers of
        sequences, or hold one that is longer than max_seqlen.

    Examples
    --------
    Three sequences with 1, 0 and 1 query rows and 2, 1 and 0 keys.

    >>> q, k, v = np.ones((2, 1, 4)), np.zeros((3, 1, 4)), np.arange(12.0).reshape(3, 1, 4)
    >>> attention_varlen(q, k, v, [0, 1, 1, 2], [0, 2, 3, 3], 1, 2)[:, 0]
    array([[2., 3., 4., 5.],
           [0., 0., 0., 0.]])
    """
    q, k, v = _float64(q), _float64(k), _float64(v)
    slices_q = _sequences("q", cu_seqlens_q, max_seqlen_q, len(q))
    slices_k = _sequences("k", cu_seqlens_k, max_seqlen_k, len(k))
    if len(slices_q) != len(slices_k):
        raise ValueError(f"cu_seqlens_q names {len(slices_q)} sequences, cu_seqlens_k names {len(slices_k)}")
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    lse = np.zeros((q.shape[1], len(q)))
    for rows, keys in zip(slices_q, slices_k, strict=True):
        visible = visible_keys(len(q[rows]), len(k[keys]), causal=causal, window=window)
        out[rows], lse[:, rows] = attend_rows(
            q[rows], k[keys], v[keys], visible, scale=scale, softcap=softcap
        )
    return (out, lse) if return_lse else out


def attention_mass(
    q: ArrayLike,
    k: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Float64:
    """How much attention each key receives: its probability, summed over the rows and heads that read it.

    The default importance of tokens in the cache; Zhang et al., "H2O" (2023) accumulate the same sum.

    Parameters
    ----------
    q, k, causal, scale, window, softcap
        As in `attention`.

    Returns
    -------
    float64, (batch, num_heads_kv, seqlen_k)
        Sums over the keys to (num_heads_q // num_heads_kv) * (number of rows that see a key).

    Raises
    ------
    ValueError
        As `attention`.

    Examples
    --------
    Two query heads read one KV head; the second key is hidden from the first row.

    >>> attention_mass(np.ones((1, 2, 2, 4)), np.zeros((1, 2, 1, 4)), causal=True)
    array([[[3., 1.]]])
    """
    q, k = _float64(q), _float64(k)
    batch, seqlen_k, num_heads_kv, _ = k.shape
    mass = np.zeros((batch, num_heads_kv, seqlen_k))
    visible = visible_keys(q.shape[1], seqlen_k, causal=causal, window=window)
    for b in range(batch):
        probabilities, _ = softmax_rows(q[b], k[b], visible, scale=scale, softcap=softcap)
        mass[b] = _by_kv_head(probabilities, num_heads_kv).sum(axis=(1, 2))
    return mass


@np.errstate(divide="ignore", invalid="ignore")
def merge_attention(outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]) -> tuple[Float64, Float64]:
    """Attention over all keys, from attention over disjoint parts of them.

    With lse = log sum_i exp lse_i, out = sum_i exp(lse_i - lse) out_i. The merge is exact, and the same for
    every grouping and order of the parts (Milakov and Gimelshein, "Online normalizer calculation for
    softmax", 2018). A part in which a row saw no key (lse_i = -inf) adds nothing to that row, whatever its
    out_i holds.

    Parameters
    ----------
    outs : sequence of real arrays
        Each (batch, seqlen_q, num_heads_q, head_dim), or (total_q, num_heads_q, head_dim).
    lses : sequence of real arrays
        Each (batch, num_heads_q, seqlen_q), or (num_heads_q, total_q).

    Returns
    -------
    out, lse : float64, shaped as one of the outs and one of the lses

    Raises
    ------
    ValueError
        If there is no part, or outs and lses differ in number.

    Examples
    --------
    A part of one key and a part of three, all scores zero: the weights are 1/4 and 3/4.

    >>> outs, lses = [np.full((1, 1, 1), 4.0), np.full((1, 1, 1), 8.0)], [np.log([[1.0]]), np.log([[3.0]])]
    >>> out, lse = merge_attention(outs, lses)
    >>> out.round(12), bool(np.isclose(lse[0, 0], np.log(4)))
    (array([[[7.]]]), True)
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts, lses {len(lses)}: pass equally many, at least one")
    out_parts = np.stack([_float64(out) for out in outs])
    lse_parts = np.stack([_float64(lse) for lse in lses])
    largest = lse_parts.max(axis=0)
    largest = np.where(largest == -np.inf, 0.0, largest)
    weights = np.exp(lse_parts - largest)
    total = weights.sum(axis=0)
    weights = weights / np.where(total == 0, 1.0, total)
    weights = np.swapaxes(weights, -1, -2)[..., None]  # (..., heads, rows) -> (..., rows, heads, 1), as out
    out = (weights * np.where(weights == 0, 0.0, out_parts)).sum(axis=0)
    return out, largest + np.log(total)


def _float64(array: ArrayLike) -> Float64:
    return np.asarray(array, dtype=np.float64)


def _group_size(num_heads_q: int, num_heads_kv: int) -> int:
    if num_heads_kv == 0 or num_heads_q % num_heads_kv != 0:
        raise ValueError(
            f"num_heads_q is {num_heads_q}: it must be a multiple of num_heads_kv={num_heads_kv}"
        )
    return num_heads_q // num_heads_kv


def _by_kv_head(probabilities: Float64, num_heads_kv: int) -> Float64:
    num_heads_q, seqlen_q, seqlen_k = probabilities.shape
    return probabilities.reshape(num_heads_kv, num_heads_q // num_heads_kv, seqlen_q, seqlen_k)


def _sequences(which: str, cu_seqlens: ArrayLike, max_seqlen: int, total: int) -> list[slice]:
    bounds = [int(bound) for bound in np.asarray(cu_seqlens)]
    lengths = np.diff(bounds)
    if not bounds or bounds[0] != 0 or bounds[-1] != total or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens_{which} is {bounds}: it must rise from 0 to {total}, the rows of {which}"
        )
    if lengths.max(initial=0) > max_seqlen:
        raise ValueError(f"max_seqlen_{which} is {max_seqlen}, but one sequence has {lengths.max()} rows")
    return [slice(start, stop) for start, stop in pairwise(bounds)]
