"""How important a token is: one non-negative score per token, updated when attention mass is collected.

A policy observes the attention mass of a token, the norm of its key, or nothing, and says how an observation
changes the score. Scores live in the pages, one byte each on a logarithmic scale (pages.py); the allocator
spends bytes where score times predicted error is largest. Kernels know policies by name
(`kvlab.reference.importance` says what they do); a user's function observes attention mass on the host.

Bringing the importance of one layer up to date is little work, which mostly waits for its launch and for
memory: 4.8 us at batch 1 and 32K tokens on an H200, where attention takes 17. So neighbouring layers of a
collecting step keep their scores side by side, and the last one has all of them brought up to date
(`Collector`). Pages must not change before that: code that changes them calls `flush` first.

Sources: attention mass as in H2O (Zhang et al. 2023, arXiv 2306.14048), here with exponential forgetting; key
norms as in Devoto et al. 2024 (arXiv 2406.11430): keys of small norm collect attention.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import choice
from kvlab.pages import QUAD

__all__ = [
    "POLICIES",
    "Collector",
    "Importance",
    "UpdateFunction",
    "ask",
    "observed_by",
    "weight_of_collection",
]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
UpdateFunction = Callable[[Floats | None, Floats, Ints, int], NDArray[np.floating]]
"""`update(previous, observed, positions, seqlen) -> scores`, arrays of one shape.

`observed` is the probability that a token received, mean over query rows and the heads of its group. Of
tokens seen for the first time `previous` is None.
"""
Importance = str | UpdateFunction
MAX_TOKENS = 64
"""Tokens that one collection of attention mass stands for at most: the query rows of which it is the mean."""
SPAN = 2 * MAX_TOKENS
"""Age in tokens up to which only the newest of such collections counts."""
_MAX_LAYERS = 8
_MAX_BYTES = 24 << 20  # what stays in the second-level cache of a large GPU until it is read
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
        Weight of the old score of an old token after `MAX_TOKENS` tokens.
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
    tokens = max(min(tokens, MAX_TOKENS), 1)
    return 1 - decay ** (tokens / MAX_TOKENS), SPAN * tokens // MAX_TOKENS


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


class Collector:
    """Scores and log-sum-exps of collecting steps of one `DeviceStore`.

    Parameters
    ----------
    kernels : Kernels
        Of the store.
    num_heads_q : int
    importance : str
        As for `score_stored` of the kernels.
    decay : float
        As for `weight_of_collection`.
    """

    def __init__(self, kernels: Any, num_heads_q: int, importance: str, decay: float) -> None:
        self._kernels, self._store, self._num_heads_q = kernels, kernels.store, num_heads_q
        self._importance, self._decay = importance, decay
        self._kept: dict[int, tuple[Any, Any]] = {}  # by steps: scores and lse of a group of layers
        self._num_new, self._tokens, self._pending = 0, 0, range(0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(int(x.nbytes) for kept in self._kept.values() for x in kept)

    @property
    def has_pending(self) -> bool:
        """Whether scores are kept that importance does not know of yet."""
        return len(self._pending) > 0

    def memory_of(self, layer: int, num_new: int) -> tuple[Any, Any]:
        """Where a layer keeps scores, (batch, heads, quads, nbytes), and lse, (batch, heads_q, num_new)."""
        if num_new not in self._kept:
            group, store = self._group(num_new), self._store
            empty = store.executor.empty
            lse = empty((group, store.batch, self._num_heads_q, num_new), "float32", store.like)
            scores = store.executor.score_memory((group, *self.shape(num_new)), store.like)
            self._kept[num_new] = scores, lse
        scores, lse = self._kept[num_new]
        return scores[layer % len(scores)], lse[layer % len(lse)]

    def before(self, layer: int, num_new: int, tokens: int, stream: int) -> None:
        """Make way for a step of a layer: unless it goes on where the last one ended, flush.

        `tokens`: how many have come since the last collection of the layer, with this step.
        """
        goes_on = layer == self._pending.stop and (num_new, tokens) == (self._num_new, self._tokens)
        if self._pending and not goes_on:
            self.flush(stream)
        self._num_new, self._tokens = num_new, tokens

    def after(self, layer: int, num_new: int, collected: bool, stream: int) -> None:
        """Count in a step of a layer; the last layer of a group flushes."""
        if collected:
            self._pending = range(self._pending.start if self._pending else layer, layer + 1)
        group_ends = (layer + 1) % self._group(num_new) == 0 if self._pending else False
        if group_ends or layer + 1 == len(self._store.stores):
            self.flush(stream)

    def flush(self, stream: int) -> None:
        """Bring importance up to date with all that is kept."""
        if not self._pending:
            return
        scores, lse = self._kept[self._num_new]
        slots = slice(self._pending.start % len(scores), (self._pending.stop - 1) % len(scores) + 1)
        self.score(self._pending.start, scores[slots], lse[slots], self._tokens, self._num_new, stream)
        self._pending = range(0)

    def score(self, first: int, scores: Any, lse: Any, tokens: int, counted: int, stream: int) -> None:
        """Bring importance of len(scores) layers up to date with `tokens` since the last collection.

        Other arguments as of `score_stored` of the kernels.
        """
        take, span = weight_of_collection(self._decay, tokens)
        self._kernels.score_stored(
            first, scores, lse,
            importance=self._importance, take=take, span=span, counted=counted, stream=stream,
        )  # fmt: skip

    def forget(self) -> None:
        """Drop what is kept."""
        self._pending = range(0)

    def shape(self, num_new: int) -> tuple[int, ...]:
        """Of the scores that a layer keeps of so many query tokens."""
        store = self._store
        nbytes = self._kernels.saved_quad_bytes(num_new * (self._num_heads_q // store.heads))
        return store.batch, store.heads, store.entries // QUAD, nbytes

    def _group(self, num_new: int) -> int:
        nbytes = max(math.prod(self.shape(num_new)), 1)  # 0 in an empty batch
        return max(1, min(_MAX_LAYERS, len(self._store.stores), _MAX_BYTES // nbytes))
