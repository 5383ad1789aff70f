"""How scores of stored tokens follow the attention mass that they receive: "attention" and "forecast"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["updated_scores"]

Floats = NDArray[np.float32]


def updated_scores(
    importance: str,
    previous: Floats,
    observed: Floats,
    positions: NDArray[np.int64],
    seqlen: int,
    least: float,
    span: int,
) -> Floats:
    """Return the scores (n,) of tokens behind a collection of attention mass.

    Parameters
    ----------
    importance : {"attention", "forecast"}
        The level moves by a weight of 1 / (1 + age // span), but no less than `least`, towards what was
        observed. With "forecast" it is kept where it will be one collection later.
    previous, observed : float32, (n,)
        The score before, and the mass received.
    positions : int, (n,)
        Of each token; the age is `seqlen` less that.
    seqlen, least, span
        From `kvlab.cache.importance.weight_of_collection`.

    Examples
    --------
    >>> ages = np.array([1000, 200, 10])
    >>> one = np.float32([1, 1, 1])
    >>> updated_scores("attention", one, 0 * one, 1000 - ages, 1000, 0.25, 128)
    array([0.75, 0.5 , 0.  ], dtype=float32)
    """
    floor = np.float32(least)
    collections = (1 + (seqlen - positions) // span).astype(np.float32)
    weight = np.maximum(floor, np.reciprocal(collections)) + (floor if importance == "forecast" else 0)
    found: Floats = np.maximum(previous + weight * (observed - previous), np.float32(0))
    return found
