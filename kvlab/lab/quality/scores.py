"""Scores of each cache of a quality run, and how parts of a run are joined.

A score keeps the means of every scored chunk of every window, so that parts of a run can be joined, a run can
be restricted to the windows that another one has read too, and standard errors need no assumption about
tokens of one chunk, which are not independent. Nothing here needs torch: results can be read anywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

__all__ = ["FULL_PRECISION", "Blocks", "Continuation", "Score", "common_windows", "join", "mean_and_error"]

FULL_PRECISION = "full precision"
Blocks = list[list[float]]
"""Means over scored chunks: one list for each window, one number for each chunk."""


@dataclass(slots=True)
class Score:
    """What one cache cost and kept."""

    name: str  # as kind and budget of the `kvlab.lab.quality.measure.Case`
    kind: str
    budget: float | None
    starts: list[int] = field(default_factory=list)  # windows, as in `kvlab.lab.quality.text.Windows`
    nbytes: int = 0  # of the cache of one window at its end, mean over windows; everything is counted
    bits_per_element: float = 0.0  # the same, of K and V
    tokens_per_second: float = 0.0  # of the whole model while it read the scored chunks
    widths: dict[str, float] = field(default_factory=dict)
    """Part of the pages at each width; empty for caches of transformers."""
    kl: Blocks = field(default_factory=list)  # divergence from full precision
    nll: Blocks = field(default_factory=list)  # negative log-likelihood of the text
    agreement: Blocks = field(default_factory=list)  # how often full precision has the same best token


@dataclass(frozen=True, slots=True)
class Continuation:
    """New text after a prompt."""

    text: str
    tokens: list[int]
    seconds: float  # for the prompt and the new tokens
    nbytes: int  # that the cache held at the end


def mean_and_error(blocks: Blocks) -> tuple[float, float]:
    """Mean over all chunks and its standard error; the error of a single chunk is nan.

    Examples
    --------
    >>> mean_and_error([[1.0, 3.0], [1.0, 3.0]])
    (2.0, 0.577...)
    """
    means = np.asarray(blocks, np.float64).ravel()
    error = means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return float(means.mean()), float(error)


def join(parts: Sequence[Sequence[Score]]) -> list[Score]:
    """Put parts together, each with scores of the same cases in the same order on windows of its own.

    Sizes and widths are means over windows, speeds are of all tokens.

    Examples
    --------
    >>> a = Score("mixed 0.2", "mixed", 0.2, [0], 100, 3.0, 50.0, {"2": 1.0}, kl=[[0.1]])
    >>> b = Score("mixed 0.2", "mixed", 0.2, [9], 120, 3.2, 100.0, {"2": 0.5, "4": 0.5}, kl=[[0.3]])
    >>> (joined,) = join([[a], [b]])
    >>> joined.starts, joined.nbytes, joined.kl, joined.widths
    ([0, 9], 110, [[0.1], [0.3]], {'2': 0.75, '4': 0.25})
    """
    return [_join_one(scores) for scores in zip(*parts, strict=True)]


def _join_one(scores: Sequence[Score]) -> Score:
    first = scores[0]
    if len({(score.name, score.kind, score.budget) for score in scores}) > 1:
        raise ValueError(f"scores of different caches do not join: {[score.name for score in scores]}")
    counts = [len(score.starts) for score in scores]
    total = sum(counts)
    names = sorted({width for score in scores for width in score.widths}, key=_mean_bits)

    def mean(values: Sequence[float]) -> float:
        return sum(n * value for n, value in zip(counts, values, strict=True)) / total

    return replace(
        first,
        starts=[start for score in scores for start in score.starts],
        nbytes=round(mean([score.nbytes for score in scores])),
        bits_per_element=mean([score.bits_per_element for score in scores]),
        tokens_per_second=1 / mean([1 / score.tokens_per_second for score in scores]),
        widths={name: mean([score.widths.get(name, 0.0) for score in scores]) for name in names},
        kl=[window for score in scores for window in score.kl],
        nll=[window for score in scores for window in score.nll],
        agreement=[window for score in scores for window in score.agreement],
    )


def _mean_bits(rung: str) -> float:
    """Bits an element of a rung, by its name: "4" or "k3v2"."""
    widths = [int(width) for width in re.findall(r"\d+", rung)]
    return sum(widths) / len(widths)


def common_windows(scores: Sequence[Score], starts: Sequence[int]) -> list[Score]:
    """Restrict scores to those of the windows `starts` that they have; to all they have if there are none.

    Sizes and speeds stay those of all windows.
    """
    chosen = []
    for score in scores:
        wanted = [i for i, start in enumerate(score.starts) if start in set(starts)]
        wanted = wanted or list(range(len(score.starts)))
        chosen.append(
            replace(
                score,
                starts=[score.starts[i] for i in wanted],
                kl=[score.kl[i] for i in wanted],
                nll=[score.nll[i] for i in wanted],
                agreement=[score.agreement[i] for i in wanted],
            )
        )
    return chosen
