"""The key frame: the mean that is taken off the keys of one (row, layer, KV head) before they are packed.

Keys have an offset in each channel. It costs the quantiser range and carries no information: it adds the same
q . mean to every score. The mean is frozen once, from the first tokens of the row; attention pays nothing for
it:

    stored = H(k - mean)        q . k = H(q) . stored + q . mean

Measured on SmolLM2-135M, mixed widths, 3.15 bits per element: KL divergence .0175 with it, .0255 without.
The first key, on which attention rests, lies far from that mean, so it must stay at a high width. A ladder
without a width of 8 for keys is narrow: there a channel has a mean only if that does not make the first key
longer (docs/performance/quality.md). Scaling the channels besides, by the energy of queries and keys, brought
nothing more; values need no frame.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIRST", "LAST", "key_mean"]

FIRST, LAST = 4, 64
"""Tokens of a row, counted without padding, that make its mean; those before are sinks, not typical.

No more than a page takes: a prompt in parts of 64 under a tight budget cannot wait for more of them, and the
mean is to be the same however a prompt is cut.
"""
FEWEST = 16
"""With fewer tokens than this the mean stays 0."""


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
