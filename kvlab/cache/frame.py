"""The key frame of one (row, layer, KV head): in which keys are packed, less a mean and with scaled channels.

Keys have an offset in each channel. It costs the quantiser range and carries no information: it adds the same
q . mean to every score. Some models have channels many times larger than others; the transform would spread
them over all. These are scaled down by powers of 2. A frame is frozen once, from the first tokens of the row;
attention pays nothing for it:

    stored = H((k - mean) / 2^shift)        q . k = H(q 2^shift) . stored + q . mean

Measured on SmolLM2-135M, mixed widths, 3.15 bits per element: KL divergence .0175 with it, .0255 without.
The first key, on which attention rests, lies far from that mean, so it must stay at a high width. A ladder
without a width of 8 for keys is narrow: there a channel has a mean only if that does not make the first key
longer (docs/performance/quality.md). Scaling ordinary channels, too, brought nothing more; values need no
frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ASKING", "FIRST", "LAST", "MOST_SHIFT", "add_queries", "awaiting", "key_mean", "key_shift"]

FIRST, LAST = 4, 64
"""Tokens of a row, counted without padding, that make its mean; those before are sinks, not typical.

No more than a page takes: a prompt in parts of 64 under a tight budget cannot wait for more of them, and the
mean is to be the same however a prompt is cut.
"""
FEWEST = 16
"""With fewer tokens than this the mean stays 0, and so do the shifts."""
ASKING = 48
"""The first of these tokens whose queries count, too."""
LEAST, LEAST_ALONE = 9, 64
"""From which ratio on a pair is large, with queries and without; its power of 2 is next to the root."""
MOST_SHIFT = 14
"""The least power of 2 that float16 has with all its bits is 2**-14."""


def key_mean(k: NDArray[np.float32], *, narrow: bool = False) -> NDArray[np.float16]:
    """Return the mean (Hkv, D) of a row's keys.

    Parameters
    ----------
    k : (n, Hkv, D) float32
        Keys of the row's first tokens, all that are at hand.
    narrow : bool
        No width of 8 is there for the first tokens: channels whose mean makes the first key longer have none.

    Examples
    --------
    >>> key_mean(np.full((64, 1, 2), 3, np.float32))
    array([[3., 3.]], dtype=float16)
    """
    sample = k[FIRST:LAST].astype(np.float64)
    mean = sample.mean(0) if len(sample) >= FEWEST else np.zeros(k.shape[1:])
    if narrow:
        first = k[:1].astype(np.float64).sum(0)  # 0 if there is none
        mean = np.where(mean * mean <= 2 * mean * first, mean, 0)
    limit = float(np.finfo(np.float16).max)
    # A channel that is not finite, or too large for float16, is left as it is.
    return np.where(np.abs(mean) <= limit, mean, 0).astype(np.float16)


def add_queries(asked: NDArray[np.float32], q: NDArray[Any]) -> None:
    """Add the sizes of queries (m, Hq, D) to `asked` (Hkv, D), one after the other."""
    heads, head_dim = asked.shape
    sizes = np.abs(q.astype(np.float32)).reshape(len(q), heads, q.shape[1] // heads, head_dim)
    for of_token in sizes:
        for i in range(sizes.shape[2]):
            asked += of_token[:, i]


def key_shift(
    k: NDArray[np.float32], mean: NDArray[np.float16], asked: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Return by how many binary orders (Hkv, D) the channels of a row's keys are scaled down.

    A pair of channels i and i + D / 2, which RoPE rotates into each other, is as large as its keys without
    their mean, over its queries. One that is `LEAST` times the median or more is multiplied, and its queries
    divided, by the power of 2 that brings it next to the median. Keys alone cannot tell which channels
    matter: without queries only those above 16 times the median are brought down, to twice it.

    Parameters
    ----------
    k : (n, Hkv, D) float32
        As for `key_mean`.
    mean : (Hkv, D) float16
        What it returned.
    asked : (Hkv, D) float32
        What `add_queries` has added up for tokens `ASKING` to `LAST - 1`; 0 without queries.

    Examples
    --------
    >>> k = np.random.default_rng(0).standard_normal((64, 1, 8), dtype=np.float32)
    >>> k[..., [1, 5]] *= 45
    >>> key_shift(k, key_mean(k), np.zeros((1, 8), np.float32))
    array([[0, 4, 0, 0, 0, 4, 0, 0]], dtype=uint8)
    >>> key_shift(k, key_mean(k), np.ones((1, 8), np.float32))
    array([[0, 3, 0, 0, 0, 3, 0, 0]], dtype=uint8)
    """
    sample, (heads, head_dim) = k[FIRST:LAST].astype(np.float64), k.shape[1:]
    if len(sample) < FEWEST:
        return np.zeros((heads, head_dim), np.uint8)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sizes, queries = np.abs(sample - mean.astype(np.float64)).sum(0), asked.astype(np.float64)
        size, energy = (x[:, : head_dim // 2] + x[:, head_dim // 2 :] for x in (sizes, queries))
        has_queries = (energy > 0).any(1, keepdims=True)
        size = np.where(has_queries, size / energy, size)
        size = np.where(size < np.inf, size, np.inf)
        ratio = size / np.sort(size)[:, (head_dim // 2 - 1) // 2, None]
        ratio = np.where(has_queries, ratio, ratio * ratio / 4)
        large = (ratio >= np.where(has_queries, LEAST, LEAST_ALONE)) & (ratio < np.inf)
    orders = np.frexp(2 * np.where(large, ratio, 1))[1] - 1  # half of them, to the nearest
    return np.tile(np.where(large, np.minimum(orders >> 1, MOST_SHIFT), 0), 2).astype(np.uint8)


def awaiting(has_mean: NDArray[np.bool_], num_pages: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Say of which rows tokens wait for their frame.

    Parameters
    ----------
    has_mean : bool, (batch,)
    num_pages : int32, (batch, Hkv)

    Examples
    --------
    >>> awaiting(np.array([True, False, False]), np.array([[2], [1], [0]], np.int32))
    array([False,  True, False])
    """
    return ~has_mean & (num_pages > 0).any(axis=1)
