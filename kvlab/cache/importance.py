"""How important a token is: one non-negative score per token, updated when attention mass is collected.

A policy says what it observes (the attention mass of a token, the norm of its key, or nothing) and how a new
observation changes the score. Scores live in the pages, one byte each on a logarithmic scale (pages.py); the
allocator spends bytes where score times predicted error is largest.

Sources: attention mass as in H2O (Zhang et al. 2023, arXiv 2306.14048), here with exponential forgetting; key
norms as in Devoto et al. 2024 (arXiv 2406.11430): keys of small norm collect attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import choice, number

__all__ = ["POLICIES", "Importance", "Policy", "UpdateFunction", "make_policy", "weight_of_collection"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
UpdateFunction = Callable[[Floats | None, Floats, Ints, int], NDArray[np.floating]]
PolicyFunction = Callable[[Floats | None, Floats, Ints, int, int], Floats]
Importance = str | UpdateFunction
MOST_TOKENS = 64
"""Tokens that one collection of attention mass stands for at most: the query rows of which it is the mean."""
SPAN = 2 * MOST_TOKENS
"""Age in tokens up to which only the newest of such collections counts."""
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
        `update(previous, observed, positions, seqlen, tokens) -> scores`, arrays of one shape; `previous` is
        None for tokens seen for the first time, `tokens` have come since the last collection.
    made_from : tuple
        Arguments of `make_policy`, from which a pickle makes it again: functions inside others have none.
    """

    observes: Literal["mass", "key_norm", "nothing"]
    update: PolicyFunction
    made_from: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return make_policy, self.made_from


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


def make_policy(importance: Importance, decay: float) -> Policy:
    """Return the policy that a name or a user's function stands for.

    Parameters
    ----------
    importance : str or callable
        One of `POLICIES`, or a function `update(previous, observed, positions, seqlen)` as in `Policy.update`
        that observes attention mass.
    decay : float
        Weight of the old score after `MOST_TOKENS` tokens, 0 to 1; see `weight_of_collection`.

    Examples
    --------
    >>> policy = make_policy("attention", 0.75)
    >>> policy.update(np.float32([1, 1, 1]), np.float32([0, 0, 0]), np.array([0, 800, 990]), 1000, 64)
    array([0.75, 0.5 , 0.  ], dtype=float32)
    """
    decay = number(decay, "ema_decay", 0, 1)
    if callable(importance):
        return Policy("mass", _checked(importance), made_from=(importance, decay))

    def weights(positions: Ints, seqlen: int, tokens: int) -> tuple[Floats, np.float32]:
        share, span = weight_of_collection(decay, tokens)
        least = np.float32(share)
        collections = (1 + (seqlen - positions) // span).astype(np.float32)
        return np.maximum(least, np.reciprocal(collections)), least

    def attention(
        previous: Floats | None, observed: Floats, positions: Ints, seqlen: int, tokens: int
    ) -> Floats:
        if previous is None:
            return observed
        return previous + weights(positions, seqlen, tokens)[0] * (observed - previous)

    def forecast(
        previous: Floats | None, observed: Floats, positions: Ints, seqlen: int, tokens: int
    ) -> Floats:
        # The level moves as in "attention"; kept is where it will be one collection later.
        if previous is None:
            return observed
        weight, least = weights(positions, seqlen, tokens)
        return np.maximum(previous + (weight + least) * (observed - previous), np.float32(0))

    def recency(
        previous: Floats | None, observed: Floats, positions: Ints, seqlen: int, tokens: int
    ) -> Floats:
        return (1.0 / np.maximum(seqlen - positions, 1)).astype(np.float32)

    def key_norm(
        previous: Floats | None, observed: Floats, positions: Ints, seqlen: int, tokens: int
    ) -> Floats:
        if previous is not None:
            return previous
        inverse: Floats = np.reciprocal(np.maximum(observed, np.float32(1e-6)))
        return inverse

    def uniform(
        previous: Floats | None, observed: Floats, positions: Ints, seqlen: int, tokens: int
    ) -> Floats:
        return np.ones_like(observed)

    policies = {
        "attention": Policy("mass", attention),
        "forecast": Policy("mass", forecast),
        "key_norm": Policy("key_norm", key_norm),
        "recency": Policy("nothing", recency),
        "uniform": Policy("nothing", uniform),
    }
    return replace(policies[choice(importance, "importance", POLICIES)], made_from=(importance, decay))


def _checked(update: UpdateFunction) -> PolicyFunction:
    """A user's function that refuses to give anything but a score for every token."""
    try:
        signature = inspect.signature(update)
    except ValueError:  # of something built in
        signature = inspect.Signature.from_callable(lambda previous, observed, positions, seqlen: None)
    try:
        signature.bind(None, None, None, None)
    except TypeError:
        raise TypeError(
            f"importance: the function {update} takes {signature}; it is called with (previous, observed, "
            "positions, seqlen)"
        ) from None

    def checked(
        previous: Floats | None, observed: Floats, positions: Ints, seqlen: int, tokens: int
    ) -> Floats:
        scores = np.asarray(update(previous, observed, positions, seqlen))
        if scores.shape != observed.shape or scores.dtype.kind not in "fiu":
            raise ValueError(
                f"importance: the function {update} gave {scores.dtype} {scores.shape} for {observed.shape} "
                f"tokens; it must give one real number for each"
            )
        if not (scores >= 0).all():
            raise ValueError(f"importance: the function {update} gave a score that is negative or NaN")
        return scores.astype(np.float32)

    return checked
