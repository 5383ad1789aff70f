"""The byte budget: what people write, and how many bytes one row of one layer may take.

An absolute budget (`"6GiB"`, an int) is a cap on all live buffers of the cache. A relative one (`0.35`,
`"35%"`, `"4.25bpe"`) is a fraction of the bytes that a float16 cache would take at
`max(present length, plan_length)`, so that it grows with the sequence; 1 bpe is a sixteenth. Either way each
row owns 1/batch of it and each layer an equal share, so that a row never depends on its batch mates. `Limit`
is the budget of one cache: it says which lengths fit, and refuses the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache.options import CacheOptions
from kvlab.errors import BudgetError
from kvlab.sizes import parse_size

__all__ = ["Budget", "Limit", "parse_budget"]

_UNITS = {"bpe": (16, "bits per element"), "%": (100, "per cent of float16's bytes")}
MOST_FRACTION = 16
"""Larger ones were meant as bytes: pages of 32 bits take twice those of float16, open pages little more."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed budget; exactly one of `nbytes` and `fraction` is set, or neither: no limit."""

    nbytes: int | None = None
    fraction: float | None = None

    def row_budget(self, num_layers: int, batch: int, fp16_row_bytes: int) -> int | None:
        """Bytes that one row of one layer may take.

        Parameters
        ----------
        num_layers, batch : int
            Between whom an absolute budget is divided.
        fp16_row_bytes : int
            What a float16 cache takes for one row of one layer at the length that counts.

        Returns
        -------
        int or None
            None: no limit.
        """
        if self.nbytes is not None:
            return self.nbytes // (num_layers * batch)
        return None if self.fraction is None else int(self.fraction * fp16_row_bytes)


def parse_budget(budget: float | int | str | None) -> Budget:
    """Parse a budget as users write it.

    Examples
    --------
    >>> parse_budget("6GiB").nbytes, parse_budget(0.35).fraction, parse_budget("4bpe").fraction
    (6442450944, 0.35, 0.25)
    >>> parse_budget("30%").fraction
    0.3
    >>> parse_budget(None)
    Budget(nbytes=None, fraction=None)
    """
    if budget is None:
        return Budget()
    number: Any = budget
    if isinstance(number, (np.integer, np.floating)):
        budget = number.item()
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(
            f"budget={budget!r} must be a fraction, bytes, a string such as '6GiB' or '4.25bpe', or None"
        )
    unit = re.search("(bpe|%)$", budget.strip().lower()) if isinstance(budget, str) else None
    if isinstance(budget, str) and unit:
        text, (whole, what) = budget.strip()[: unit.start()], _UNITS[unit[0]]
        try:
            fraction = float(text) / whole
        except ValueError:
            raise ValueError(f"budget={budget!r}: {text!r} is no number of {what}") from None
    elif isinstance(budget, float):
        fraction = budget
    else:
        try:
            nbytes = parse_size(budget, "budget")
        except ValueError as error:
            raise ValueError(
                f"{error}; or a fraction of float16's bytes, 0.35 or '35%', bits per element, '4.25bpe', "
                "or None"
            ) from None
        if nbytes <= 0:
            raise ValueError(f"budget={budget!r} must be positive")
        return Budget(nbytes=nbytes)
    if not 0 < fraction < float("inf"):
        raise ValueError(f"budget={budget!r} must be positive and finite")
    if fraction > MOST_FRACTION:
        raise ValueError(
            f"budget={budget!r} is a fraction of float16's bytes; no cache takes {MOST_FRACTION} times as "
            "many. Write a number of bytes as a whole number or with a unit: 500_000, '6GiB'"
        )
    return Budget(fraction=fraction)


class Limit:
    """The budget of one cache, for rows of any length.

    A relative budget never gives a row less than an empty one takes; an absolute one that does is refused.

    Parameters
    ----------
    options : CacheOptions
    smallest_nbytes : callable
        From the tokens of a row to the bytes with which it does in any layer, at the lowest widths.
    fixed_nbytes : int
        Bytes of a row without tokens, in any layer.

    Raises
    ------
    BudgetError
        If not even an empty cache fits.
    """

    def __init__(
        self, options: CacheOptions, smallest_nbytes: Callable[[int], int], fixed_nbytes: int
    ) -> None:
        self.budget = parse_budget(options.budget)
        self.smallest_nbytes, self._fixed_nbytes = smallest_nbytes, fixed_nbytes
        self._num_layers, self._plan_length = options.num_layers, options.plan_length
        self._fp16_token = 2 * 2 * options.num_heads_kv * options.head_dim
        if not self._holds_rows(options.batch):
            needed = self._empty_nbytes(options.batch)
            raise BudgetError(
                f"budget={options.budget!r} is {self.budget.nbytes} bytes and an empty cache takes {needed} "
                "already. Write a fraction of float16's bytes as 0.3 or '30%', bits per element as '4bpe', "
                "bytes with a unit, '8MiB'",
                needed_bytes=needed,
            )

    def row_budget(self, seqlen: int, batch: int) -> int | None:
        """Bytes that one row of one layer may take at a length; None: no limit."""
        fp16 = self._fp16_token * max(seqlen, self._plan_length)
        row_budget = self.budget.row_budget(self._num_layers, max(batch, 1), fp16)
        if row_budget is None or self.budget.fraction is None:
            return row_budget
        return max(row_budget, self._fixed_nbytes)

    def fits(self, seqlen: int, batch: int) -> bool:
        """Whether rows of a length fit for certain."""
        row_budget = self.row_budget(seqlen, batch)
        return row_budget is None or self.smallest_nbytes(seqlen) <= row_budget

    def refusal(self, seqlen: int, batch: int) -> BudgetError:
        """The error for a length that does not fit: it names the longest that does and the bytes needed."""
        parts = self._num_layers * max(batch, 1)
        needed, given = self.smallest_nbytes(seqlen) * parts, (self.row_budget(seqlen, batch) or 0) * parts
        fault = f"{seqlen} tokens in {batch} rows need at least {needed} bytes at the lowest widths and the "
        if not self._holds_rows(batch):
            return BudgetError(
                f"{fault}budget gives {given}; so many rows take {self._empty_nbytes(batch)} without any "
                "token. Raise the budget or keep fewer rows",
                needed_bytes=needed,
            )
        low, high = 0, seqlen
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, batch) else (low, middle)
        budget = "budget" if self.budget.fraction is None else "budget or plan_length"
        return BudgetError(
            f"{fault}budget gives {given}; the longest length that fits is {low}. Raise the {budget}, add a "
            f"lower width to bits (0 evicts) or shorten the sequence",
            needed_bytes=needed,
            longest_length=low,
        )

    def _holds_rows(self, batch: int) -> bool:
        """Whether rows without tokens fit."""
        row_budget = self.row_budget(0, batch)
        return row_budget is None or self._fixed_nbytes <= row_budget

    def _empty_nbytes(self, batch: int) -> int:
        return self._fixed_nbytes * self._num_layers * max(batch, 1)
