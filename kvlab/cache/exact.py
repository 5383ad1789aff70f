"""Attention over the exact tokens of a step: the residual window and the new tokens, causal, in float32.

These keys and values are the caller's own and a few recent ones, dense and short, so blocks of matrix
products do; stored tokens are read by `kvlab.ops.packed`. Both parts meet by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExactResult", "attend_exact"]

Floats = NDArray[np.float32]
ROWS_PER_BLOCK = 256


@dataclass(frozen=True, slots=True)
class ExactResult:
    """Result of `attend_exact`: `out` (B, Sq, Hq, D), `lse` (B, Hq, Sq), and the scores of the last rows."""

    out: Floats
    lse: Floats
    scores: Floats  # (B, Hkv, G, rows, Sk), -inf where a row does not see a key

    def mass(self, lse: Floats) -> Floats:
        """Probability that each key received, mean over the kept rows and the heads of a group, (B, Hkv, Sk).

        `lse` (B, Hq, Sq) is the log-sum-exp over all keys of the step, stored ones included.
        """
        batch, heads, group, rows, _ = self.scores.shape
        last = lse[:, :, lse.shape[2] - rows :].reshape(batch, heads, group, rows, 1)
        total = np.exp(self.scores - np.where(np.isfinite(last), last, np.float32(0)))
        mean: Floats = total.mean((2, 3), dtype=np.float32)
        return mean


def attend_exact(
    q: Floats,
    k: Floats,
    v: Floats,
    visible: NDArray[np.bool_],
    *,
    scale: float,
    softcap: float,
    keep_rows: int,
) -> ExactResult:
    """Attend the last keys causally, aligned at the end: the last query row sees the last key.

    Parameters
    ----------
    q : (B, Sq, Hq, D) float32
    k, v : (B, Sk, Hkv, D) float32
        Sk >= Sq.
    visible : (B, Sk) bool
        False: a padding token, which no row sees.
    scale, softcap : float
        As in `kvlab.attention`.
    keep_rows : int
        Number of last query rows whose scores are kept for `ExactResult.mass`.
    """
    batch, rows, heads_q, dim = q.shape
    keys, heads = k.shape[1:3]
    group = heads_q // heads
    out = np.zeros((batch, heads, group, rows, dim), np.float32)
    lse = np.full((batch, heads, group, rows), -np.inf, np.float32)
    kept = np.full((batch, heads, group, keep_rows, keys), -np.inf, np.float32)
    queries = q.reshape(batch, rows, heads, group, dim).transpose(0, 2, 3, 1, 4)
    for first in range(0, rows, ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, rows)
        seen = keys - rows + last  # no row of the block sees a later key
        causal = np.arange(seen) <= np.arange(first, last)[:, None] + keys - rows
        k_block, v_block = k[:, :seen].transpose(0, 2, 3, 1), v[:, :seen].transpose(0, 2, 1, 3)
        block = np.ascontiguousarray(queries[:, :, :, first:last]).reshape(batch, heads, -1, dim)
        scores = (block @ k_block).reshape(batch, heads, group, last - first, seen) * np.float32(scale)
        if softcap:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        mask = causal & visible[:, None, None, None, :seen]
        scores = np.where(mask, scores, np.float32(-np.inf))
        top = scores.max(-1, initial=-np.inf)
        base = np.where(np.isneginf(top), np.float32(0), top)
        weights = np.exp(scores - base[..., None])
        total = weights.sum(-1)
        with np.errstate(divide="ignore"):
            lse[:, :, :, first:last] = base + np.log(total)
        flat = weights.reshape(batch, heads, group * (last - first), seen)
        # An invisible token may hold anything; 0 * NaN must not reach the sum.
        clean = np.where(visible[:, None, :seen, None], v_block, np.float32(0))
        result = (flat @ clean).reshape(batch, heads, group, last - first, dim)
        out[:, :, :, first:last] = result / np.maximum(total, np.float32(1e-37))[..., None]
        overlap = last - max(first, rows - keep_rows)
        if overlap > 0:
            to = last - (rows - keep_rows)
            kept[:, :, :, to - overlap : to, :seen] = scores[:, :, :, last - first - overlap :]
    return ExactResult(
        out.transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads_q, dim),
        lse.reshape(batch, heads_q, rows),
        kept,
    )
