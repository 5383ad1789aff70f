"""Budgets of a GPU cache that are nearly used up: what a plan takes at least, and how little will do.

A plan moves 64 tokens at a time. What fills no page stays where it is, for every head in a page of its rung,
and tokens to come get open pages at the top rung. Where bytes allow that, nobody has to count
(`kvlab.cache.cuda.plan.smallest_nbytes`). Where they do not, the host counts what the next plan would take
(`least_nbytes`), makes no more room than the step needs, and, if even that is too much, has the CPU put all
tokens into as few pages as can be. So a cache on a GPU needs one page a head more than one on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cuda.plan import Ladder
from kvlab.pages import TOKENS_PER_PAGE as PAGE

__all__ = ["guaranteed_nbytes", "least_nbytes", "reserve_nbytes"]

Ints = NDArray[np.int64]
SEGMENT = 16  # positions of a page share all but so many bits


def guaranteed_nbytes(tokens: int, heads: int, ladder: Ladder, fixed_nbytes: int) -> int:
    """Return the bytes with which a row of `tokens` tokens does, however they came.

    Full pages at the lowest level, one partly filled there, and one open at the top rung, for each head.

    Examples
    --------
    >>> guaranteed_nbytes(1000, 2, Ladder((8520, 16712), (0.018, 1e-4)), fixed_nbytes=520)
    306584
    """
    segments = max(tokens - 1, 0) // (1 << SEGMENT) + 1
    low = tokens // PAGE + segments
    return heads * (low * ladder.cost[0] + min(segments, 2) * ladder.cost[-1]) + fixed_nbytes


def reserve_nbytes(
    length: int, steps: int, stored: bool, heads: int, ladder: Ladder, *, padded: bool = False
) -> int:
    """Return the bytes that `steps` tokens behind `length` others take at least, whatever stands there.

    `stored`: they are to come into open pages one by one; else they are stored at once. `padded`: any of them
    may be padding, so whatever their number, a page may be filled in part.
    """
    first, last = length >> SEGMENT, max(length + steps - 1, 0) >> SEGMENT
    parts = [
        min(length + steps, (segment + 1) << SEGMENT) - max(length, segment << SEGMENT)
        for segment in range(first, last + 1)
    ]
    low = 0 if stored else sum((n - (padded and n > 0)) // PAGE for n in parts)
    top = sum(n > 0 if stored or padded else n % PAGE > 0 for n in parts)
    return heads * (low * ladder.cost[0] + top * ladder.cost[-1])


def least_nbytes(
    tables: dict[str, NDArray[Any]],
    ladder: Ladder,
    evicts: bool,
    fixed_nbytes: int,
    *,
    length: int,
    new: NDArray[np.bool_] | None = None,
    room: int = 0,
) -> Ints:
    """Return the bytes that every row takes if the next plan puts all it can at the lowest level.

    Parameters
    ----------
    tables : dict of arrays
        "rung", "count", "base" (batch, heads, entries) and "num_pages" (batch, heads) of a layer.
    ladder : Ladder
    evicts : bool
        Whether its first level holds nothing.
    fixed_nbytes : int
        Bytes of a row beside its pages.
    length : int
        Time steps so far.
    new : bool array (batch, steps), optional
        Tokens that the plan takes in, False for padding.
    room : int
        Tokens behind those that it opens pages for.

    Returns
    -------
    (batch,) int64
    """
    batch, heads, entries = tables["rung"].shape
    steps = 0 if new is None else new.shape[1]
    segments = (max(length + steps + room - 1, 0) >> SEGMENT) + 1
    rungs = len(ladder.cost) - evicts
    live = np.arange(entries) < tables["num_pages"][..., None]
    tokens = np.zeros((batch, heads, segments, rungs), np.int64)
    # An open page without a token may lie farther ahead than this plan looks, which drops it.
    row, head, entry = np.nonzero(live & (tables["count"] > 0))
    at = row, head, entry
    place = row, head, tables["base"][at].astype(np.int64), tables["rung"][at].astype(np.int64)
    np.add.at(tokens, place, tables["count"][at].astype(np.int64))
    fresh = np.zeros((batch, 1, segments), np.int64)
    if new is not None:
        of = (length + np.arange(steps)) >> SEGMENT
        for segment in range(segments):
            fresh[:, 0, segment] = new[:, of == segment].sum(1)
    cost = np.array(ladder.cost)
    total = (tokens // PAGE * cost[0] + (tokens % PAGE > 0) * cost[evicts:]).sum(-1)
    total += fresh // PAGE * cost[0] + (fresh % PAGE > 0) * cost[-1]
    left = np.where(fresh % PAGE > 0, fresh % PAGE, tokens[..., -1] % PAGE)
    end = length + steps
    borders = np.arange(segments + 1) << SEGMENT
    come = np.minimum(borders[1:], end + room) - np.maximum(borders[:-1], end)
    total += (np.where(left > 0, PAGE - left, 0) < np.maximum(come, 0)) * cost[-1]
    found: Ints = total.sum((1, 2)) + fixed_nbytes
    return found
