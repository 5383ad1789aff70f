"""How important a token is: one non-negative score per token, updated when attention mass is collected.

A policy observes the attention mass of a token, the norm of its key, or nothing, and says how an observation
changes the score. Scores live in the pages, one byte each on a logarithmic scale (pages.py); the allocator
spends bytes where score times predicted error is largest. Kernels know policies by name
(`kvlab.reference.importance` says what they do); a user's function observes attention mass on the host.

Sources: attention mass as in H2O (Zhang et al. 2023, arXiv 2306.14048), here with exponential forgetting; key
norms as in Devoto et al. 2024 (arXiv 2406.11430): keys of small norm collect attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import choice

__all__ = ["POLICIES", "Importance", "UpdateFunction", "ask", "observed_by", "weight_of_collection"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
UpdateFunction = Callable[[Floats | None, Floats, Ints, int], NDArray[np.floating]]
"""`update(previous, observed, positions, seqlen) -> scores`, arrays of one shape.

`observed` is the probability that a token received, mean over query rows and the heads of its group. Of
tokens seen for the first time `previous` is None.
"""
Importance = str | UpdateFunction
MOST_TOKENS = 64
"""Tokens that one collection of attention mass stands for at most: the query rows of which it is the mean."""
SPAN = 2 * MOST_TOKENS
"""Age in tokens up to which only the newest of such collections counts."""
POLICIES = {
    "attention": "mass",
    "forecast": "mass",
    "key_norm": "norm",
    "recency": "one",
    "uniform": "one",
}
"""What each policy observes, of `kvlab.ops.layer_state.OBSERVED`."""


def weight_of_collection(decay: float, tokens: int) -> tuple[float, int]:
    """How much a collection of attention mass weighs in the score of a token.

    What its neighbours pay to a token says little about what it will get later. So the weight at an age is
    1 / (1 + age // span): first only the newest collection counts, then a mean in which they count more and
    more alike. It is never less than `least`, so at last the score is a moving average. Both follow from the
    time since the last collection, so parts of a prefill of any size come to nearly the same scores, and
    nothing must be stored for it.

    Parameters
    ----------
    decay : float
        Weight of the old score of an old token after `MOST_TOKENS` tokens.
    tokens : int
        Tokens since the last collection.

    Returns
    -------
    least : float
    span : int

    Examples
    --------
    >>> weight_of_collection(0.81, 64), weight_of_collection(0.81, 32)
    ((0.18999999999999995, 128), (0.09999999999999998, 64))
    """
    tokens = max(min(tokens, MOST_TOKENS), 1)
    return 1 - decay ** (tokens / MOST_TOKENS), SPAN * tokens // MOST_TOKENS


def observed_by(importance: Importance) -> str:
    """What a policy observes; refuses what is none.

    Examples
    --------
    >>> observed_by("recency"), observed_by(lambda previous, observed, positions, seqlen: observed)
    ('one', 'mass')
    """
    if not callable(importance):
        return POLICIES[choice(importance, "importance", tuple(POLICIES))]
    try:
        signature = inspect.signature(importance)
    except ValueError:  # of something built in
        return "mass"
    try:
        signature.bind(None, None, None, None)
    except TypeError:
        raise TypeError(
            f"importance: the function {importance} takes {signature}; it is called with (previous, "
            "observed, positions, seqlen)"
        ) from None
    return "mass"


def ask(
    update: UpdateFunction, previous: Floats | None, observed: Floats, positions: Ints, seqlen: int
) -> Floats:
    """The scores that a user's function gives; refuses anything but a score for every token."""
    scores = np.asarray(update(previous, observed, positions, seqlen))
    if scores.shape != observed.shape or scores.dtype.kind not in "fiu":
        raise ValueError(
            f"importance: the function {update} gave {scores.dtype} {scores.shape} for {observed.shape} "
            f"tokens; it must give one real number for each"
        )
    if not (scores >= 0).all():
        raise ValueError(f"importance: the function {update} gave a score that is negative or NaN")
    return scores.astype(np.float32)
