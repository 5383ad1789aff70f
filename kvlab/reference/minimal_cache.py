"""The packed cache on one page: quantise, choose, attend, in NumPy, for one layer and one KV head.

`kvlab.MixedPrecisionCache` is this idea for many layers, rows and heads, with real bits and fused kernels:

1. *Quantise.* Subtract the mean of the keys, rotate with a Hadamard matrix, round to 2**bits levels.
   The mean adds the same number to all scores of a query, so the softmax does not see that it is missing.
   The rotation spreads outliers over all channels, so one scale for a vector is enough.
2. *Choose.* Tokens that received much attention keep more bits. They are sorted by importance and cut into
   pages of 16; every page climbs the ladder of widths as far as the loss that it saves is worth the bytes.
3. *Attend.* Pages are read in any order, each at its own width, and merged by log-sum-exp. Queries are
   rotated once; the output is rotated back once.

What is left out here: packing codes into words (`kvlab.reference.pages`), positions, several rows, importance
that is updated as attention is collected, demoting tokens that are stored already, rungs with unlike widths
for K and V or for blocks of channels of K (the default ladder of the cache has such), signs of values before
they are rotated, and scales of channels of keys that are too large.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cache", "Page", "attend", "build", "choose_widths", "dequantise", "hadamard", "quantise"]

Floats = NDArray[np.float64]

PAGE = 16  # tokens
ERROR = {2: 0.1115, 3: 0.0327, 4: 0.0090, 8: 5e-5}  # relative squared error of a rotated vector at each width


class Page(NamedTuple):
    """Up to 16 tokens at one width: codes (n, head_dim) below 2**bits and scales (n,), of K and of V."""

    bits: int
    k_codes: NDArray[np.uint8]
    k_scale: Floats
    v_codes: NDArray[np.uint8]
    v_scale: Floats

    @property
    def nbytes(self) -> int:
        """Bytes that a real page takes, full or not."""
        return _page_nbytes(self.k_codes.shape[1], self.bits)


def _page_nbytes(head_dim: int, bits: int) -> int:
    """Codes of K and V for 16 slots, and for each a byte of scale (K, V), 2 of position, 1 of importance."""
    return PAGE * (2 * head_dim * bits // 8 + 2 + 2 + 1)


class Cache(NamedTuple):
    """All pages of one head, and the mean that was taken off its keys."""

    pages: list[Page]
    k_mean: Floats


def hadamard(head_dim: int) -> Floats:
    """Return the orthonormal Hadamard matrix of a power of two: symmetric, and its own inverse.

    Examples
    --------
    >>> (hadamard(4) * 2).astype(int).tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    matrix = np.ones((1, 1))
    while len(matrix) < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    result: Floats = matrix / np.sqrt(head_dim)
    return result


def quantise(x: Floats, bits: int) -> tuple[NDArray[np.uint8], Floats]:
    """Round rotated vectors (n, head_dim) to 2**bits levels: codes (n, head_dim) and scales (n,).

    The levels are (2 code + 1 - 2**bits) * scale: symmetric, without a zero. The scale is the best of 32
    fractions of the one that reaches the largest element: below 8 bits it pays to clip the tails.
    """
    reach = np.abs(x).max(axis=1) / (2**bits - 1)
    best, error = reach, np.full(len(x), np.inf)
    for fraction in np.linspace(1 / 32, 1, 32):
        scale = reach * fraction
        found = np.square(x - dequantise(_codes(x, scale, bits), scale, bits)).sum(axis=1)
        best, error = np.where(found < error, scale, best), np.minimum(found, error)
    return _codes(x, best, bits), best


def _codes(x: Floats, scale: Floats, bits: int) -> NDArray[np.uint8]:
    levels = np.floor(x / np.maximum(2 * scale, 1e-300)[:, None]) + 2 ** (bits - 1)
    codes: NDArray[np.uint8] = np.clip(levels, 0, 2**bits - 1).astype(np.uint8)
    return codes


def dequantise(codes: NDArray[np.uint8], scale: Floats, bits: int) -> Floats:
    """Return the values of codes (n, head_dim) with scales (n,); still rotated."""
    values: Floats = (2.0 * codes + 1 - 2**bits) * scale[:, None]
    return values


def choose_widths(importance: Floats, head_dim: int, budget: int, ladder: tuple[int, ...]) -> list[int]:
    """Choose the width of each page of 16 tokens, most important page first, within `budget` bytes.

    Each step up the ladder saves `importance * (error before - error after)` for so many bytes. The steps are
    taken in the order of what they save for a byte: the greedy solution of a multiple-choice knapsack.
    """
    weight = np.array([importance[i : i + PAGE].sum() for i in range(0, len(importance), PAGE)])
    cost = {bits: _page_nbytes(head_dim, bits) for bits in ladder}
    left = budget - len(weight) * cost[ladder[0]]
    if left < 0:
        raise ValueError(f"budget={budget} bytes do not hold {len(importance)} tokens at {ladder[0]} bits")
    raised = [
        (-weight[page] * (ERROR[low] - ERROR[high]) / (cost[high] - cost[low]), page, high)
        for page in range(len(weight))
        for low, high in pairwise(ladder)
    ]
    widths = [ladder[0]] * len(weight)
    for _, page, high in sorted(raised):
        if cost[high] - cost[widths[page]] <= left:
            left -= cost[high] - cost[widths[page]]
            widths[page] = high
    return widths


def build(
    k: Floats, v: Floats, importance: Floats, budget: int, ladder: tuple[int, ...] = (2, 3, 4, 8)
) -> Cache:
    """Store keys and values (n, head_dim) in at most `budget` bytes; `importance` (n,) is not negative."""
    rotation, k_mean = hadamard(k.shape[1]), k[4:64].mean(axis=0)  # the first tokens are not typical
    order = np.argsort(-importance, kind="stable")
    k, v = (k - k_mean)[order] @ rotation, v[order] @ rotation
    widths = choose_widths(importance[order], k.shape[1], budget, ladder)
    return Cache(
        [
            Page(bits, *quantise(k[i : i + PAGE], bits), *quantise(v[i : i + PAGE], bits))
            for i, bits in zip(range(0, len(k), PAGE), widths, strict=True)
        ],
        k_mean,
    )


def attend(q: Floats, cache: Cache) -> Floats:
    """Attention of queries (m, head_dim) over all stored tokens, in any order of the pages.

    Scores are q . (k - mean); the missing q . mean is the same for all keys of a query, so it cancels.
    """
    head_dim = q.shape[1]
    rotation = hadamard(head_dim)
    q = q @ rotation / np.sqrt(head_dim)
    row_max, row_sum, out = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros(q.shape)
    for page in cache.pages:
        scores = q @ dequantise(page.k_codes, page.k_scale, page.bits).T
        new_max = np.maximum(row_max, scores.max(axis=1))
        p, rescale = np.exp(scores - new_max[:, None]), np.exp(row_max - new_max)
        row_sum = row_sum * rescale + p.sum(axis=1)
        out = out * rescale[:, None] + p @ dequantise(page.v_codes, page.v_scale, page.bits)
        row_max = new_max
    result: Floats = (out / row_sum[:, None]) @ rotation
    return result
