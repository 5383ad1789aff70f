"""Attention over the exact tokens of a step: the residual window and the new tokens, causal, in float32.

These keys and values are the caller's own and a few recent ones, dense and short; stored tokens are read by
`kvlab.ops.packed`. Both parts meet by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cpu.attention import score_factors
from kvlab.threads import run_parallel

__all__ = ["NO_REST", "ExactResult", "attend_exact", "exact_mass", "merge_two"]

Floats = NDArray[np.float32]
_WORTH_SHARING = 8_000_000  # multiplications, about a quarter of a millisecond
NO_REST: Floats = np.empty((0, 0, 0), np.float32)
"""Of a log-sum-exp that lost nothing when it was rounded, or of which that is not known."""


def merge_two(out_a: Any, lse_a: Any, rest_a: Any, out_b: Any, lse_b: Any) -> tuple[Floats, Floats]:
    """Out and lse, float32, over the keys of two parts; rest_a: what lse_a lost when it was rounded."""
    from kvlab.numba_kernels.cpu import exact as kernels

    first = [np.ascontiguousarray(x, np.float32) for x in (out_a, lse_a, rest_a)]
    second = np.ascontiguousarray(out_b, np.float32), np.ascontiguousarray(lse_b, np.float64)
    both, total = np.empty_like(first[0]), np.empty_like(first[1])
    kernels.merge_two(*first, *second, both, total)
    return both, total


@dataclass(frozen=True, slots=True)
class ExactResult:
    """Result of `attend_exact`: `out` (B, Sq, Hq, D), `lse` (B, Hq, Sq) in float64, and what `mass` needs."""

    out: Floats
    lse: NDArray[np.float64]
    queries: Floats  # (B, rows, Hq, D), the last rows
    k: Floats
    visible: NDArray[np.bool_]
    scale: np.float32
    softcap: np.float32

    def merged(self, out: Floats, lse: Floats, rest: Floats = NO_REST) -> tuple[Floats, Floats]:
        """Out and lse over these keys and those of another part.

        Its out and lse are given, and what lse lost when it was rounded, of its shape, if that is known: at
        50 it takes 2e-6 of all weights.
        """
        return merge_two(out, lse, rest, self.out, self.lse)

    def mass(self, lse: Floats) -> Floats:
        """Probability that each key received, mean over the kept rows and the heads of a group, (B, Hkv, Sk).

        `lse` (B, Hq, Sq) is the log-sum-exp over all keys of the step, stored ones included; a row with +inf,
        padding for example, gives none, whatever its query is.
        """
        return exact_mass(self.queries, self.k, self.visible, float(self.scale), float(self.softcap), lse)


def exact_mass(
    q: Floats, k: Floats, visible: NDArray[np.bool_], scale: float, softcap: float, lse: Floats
) -> Floats:
    """What `ExactResult.mass` returns, of the last query rows q and contiguous arrays."""
    from kvlab.numba_kernels.cpu.exact import sum_exact_mass

    batch, rows = q.shape[:2]
    mass = np.empty((batch, k.shape[2], k.shape[1]), np.float32)
    last = np.ascontiguousarray(lse[:, :, lse.shape[2] - rows :], np.float32)
    left_out = np.isposinf(last).swapaxes(1, 2)
    if left_out.any():
        q = np.where(left_out[..., None], np.float32(0), q)
    run_parallel(
        sum_exact_mass, np.zeros(1, np.int64), q, k, visible, np.float32(scale), np.float32(softcap), last,
        mass, alone=q.size * mass.shape[2] < _WORTH_SHARING,
    )  # fmt: skip
    return mass


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
        D is a multiple of 4.
    k, v : (B, Sk, Hkv, D) float32
        Sk >= Sq.
    visible : (B, Sk) bool
        False: a padding token, which no row sees.
    scale, softcap : float
        As in `kvlab.attention`.
    keep_rows : int
        Number of last query rows that `ExactResult.mass` is about.
    """
    from kvlab.numba_kernels.cpu import exact as kernels

    queries, keys, values = (np.ascontiguousarray(x, np.float32) for x in (q, k, v))
    seen = np.ascontiguousarray(visible)
    batch, rows, heads_q, _ = queries.shape
    out, lse = np.empty(queries.shape, np.float32), np.empty((batch, heads_q, rows), np.float64)
    factors = score_factors(scale, softcap, float(kernels.LOG2_E))
    run_parallel(
        kernels.attend_exact, np.zeros(1, np.int64), queries, keys, values, seen, *factors, out, lse,
        alone=queries.size * keys.shape[1] < _WORTH_SHARING,
    )  # fmt: skip
    last = np.ascontiguousarray(queries[:, rows - keep_rows :])
    return ExactResult(out, lse, last, keys, seen, np.float32(scale), np.float32(softcap))
