"""How important a token is: one non-negative score per token, updated when attention mass is collected.

A policy says what it observes (the attention mass of a token, the norm of its key, or nothing) and how a new
observation changes the score. Scores live in the pages, one byte each on a logarithmic scale (pages.py); the
allocator spends bytes where score times predicted error is largest.

Sources: attention mass as in H2O (Zhang et al. 2023, arXiv 2306.14048), here with exponential forgetting; key
norms as in Devoto et al. 2024 (arXiv 2406.11430): keys of small norm collect attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["POLICIES", "Importance", "Policy", "UpdateFunction", "make_policy"]

Floats = NDArray[np.float32]
UpdateFunction = Callable[[Floats | None, Floats, NDArray[np.int64], int], NDArray[np.floating]]
Importance = str | UpdateFunction
POLICIES = ("attention", "forecast", "key_norm", "recency", "uniform")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a score is made from.

    Attributes
    ----------
    observes : {"mass", "key_norm", "nothing"}
        "mass": probability that the token received, mean over query rows and the heads of its group.
        "key_norm": the norm of its key, once. "nothing": the observation is 1.
    update : callable
        `update(previous, observed, positions, seqlen) -> scores`, arrays of one shape; `previous` is None
        for tokens seen for the first time.
    by_position : bool
        The score follows from position and length alone, so it is computed anew whenever it is needed.
    """

    observes: Literal["mass", "key_norm", "nothing"]
    update: UpdateFunction
    by_position: bool = False


def make_policy(importance: Importance, decay: float) -> Policy:
    """Return the policy that a name or a user's function stands for.

    Parameters
    ----------
    importance : str or callable
        One of `POLICIES`, or an update function as in `Policy.update` that observes attention mass.
    decay : float
        Weight of the old score at each collection, 0 to 1.

    Examples
    --------
    >>> policy = make_policy("attention", 0.75)
    >>> policy.update(np.float32([1.0]), np.float32([0.0]), np.array([5]), 10)
    array([0.75], dtype=float32)
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"ema_decay={decay} must lie between 0 and 1")
    if callable(importance):
        return Policy("mass", importance)
    keep, take = np.float32(decay), np.float32(1 - decay)

    def attention(
        previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
    ) -> Floats:
        return observed if previous is None else keep * previous + take * observed

    def forecast(
        previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
    ) -> Floats:
        # The level moves as in "attention"; kept is where it will be if it moves on as it just did.
        if previous is None:
            return observed
        step = take * (observed - previous)
        return np.maximum(previous + 2 * step, np.float32(0))

    def recency(
        previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
    ) -> Floats:
        return (1.0 / np.maximum(seqlen - positions, 1)).astype(np.float32)

    def key_norm(
        previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
    ) -> Floats:
        if previous is not None:
            return previous
        inverse: Floats = np.reciprocal(np.maximum(observed, np.float32(1e-6)))
        return inverse

    def uniform(
        previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
    ) -> Floats:
        return np.ones_like(observed)

    policies = {
        "attention": Policy("mass", attention),
        "forecast": Policy("mass", forecast),
        "key_norm": Policy("key_norm", key_norm),
        "recency": Policy("nothing", recency, by_position=True),
        "uniform": Policy("nothing", uniform),
    }
    if importance not in policies:
        raise ValueError(
            f"importance={importance!r} is not known; choose one of {POLICIES} or pass a function"
        )
    return policies[importance]
