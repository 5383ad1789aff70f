"""The byte budget of a cache, and the lengths that it holds.

An absolute budget (`"6GiB"`, an int) is a cap on all live buffers of the cache. A relative one (`0.35`,
`"35%"`, `"4.25bpe"`) is a fraction of the bytes that a float16 cache would take at
`max(present length, plan_length)`, so that it grows with the sequence; 1 bpe is a sixteenth. Either way each
row owns 1/batch of it, so that a row never depends on its batch mates. Layers get equal shares, but one with
a sliding window counts no more tokens than it keeps. `Limit` is the budget of one cache: it says which
lengths fit, and refuses the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

from kvlab.arguments import LONGEST
from kvlab.cache.layers import Layer
from kvlab.errors import BudgetError
from kvlab.ops.plan import reach_of
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.sizes import MAX_FRACTION, parse_budget

__all__ = ["Limit", "RowBudgets"]

RowBudgets = Sequence[int] | None
"""Bytes that a row may take in each layer; None: no limit."""
_FAR = 1024
"""Among so many more tokens a length that fits is looked for where not all from some length on do."""


@lru_cache(maxsize=64)  # layers are often the same
def _smallest_nbytes(layer: Layer, seqlen: int, rewind: int) -> int:
    return layer.smallest_nbytes(seqlen, rewind)


class Limit:
    """The budget of one cache, for rows of any length.

    A relative budget never gives a row less than an empty one takes; an absolute one that does is refused.
    Shares of an absolute one are in proportion to the tokens that layers keep, when there are `max_seqlen` of
    them, or else `plan_length`.

    Parameters
    ----------
    budget : float, int, str or None
        As users write it.
    layers : sequence of Layer
    batch, plan_length, max_seqlen, rewind
        Options of the cache.

    Raises
    ------
    BudgetError
        If not even an empty cache fits.
    """

    def __init__(
        self, budget: float | int | str | None, layers: Sequence[Layer], *, batch: int, plan_length: int,
        max_seqlen: int | None, rewind: int,
    ) -> None:  # fmt: skip
        self.budget, store = parse_budget(budget), layers[0].store
        self._layers, self.rewind, self._plan_length = layers, rewind, plan_length
        self._residual = layers[0].residual
        self._fixed_nbytes = store.fixed_nbytes  # of a row without tokens, in any layer
        self._fp16_token = 2 * 2 * store.num_heads_kv * store.head_dim
        self._windows = [layer.sliding_window for layer in layers]
        self._refuses_at_once = max_seqlen is not None
        self._expected = max(max_seqlen or plan_length, 1)
        self._layer_tokens = self._tokens_kept(self._expected)
        if not self._holds_rows(batch):
            needed = self._empty_nbytes(batch)
            raise BudgetError(
                f"budget={budget!r} is {self.budget.nbytes} bytes and an empty cache takes {needed} "
                "already. Write a fraction of float16's bytes as 0.3 or '30%', bits per element as '4bpe', "
                "bytes with a unit, '8MiB'",
                needed_bytes=needed,
            )

    def row_budgets(self, seqlen: int, batch: int) -> RowBudgets:
        """Bytes that one row may take in each layer at a length; None: no limit."""
        if self.budget.nbytes is not None:
            of_row, whole = self.budget.nbytes // max(batch, 1), sum(self._layer_tokens)
            return [of_row * tokens // whole for tokens in self._layer_tokens]
        if self.budget.fraction is None:
            return None
        given = {}  # layers are often alike
        for window in set(self._windows):
            nbytes = int(self.budget.fraction * self._fp16_nbytes(seqlen, window))
            given[window] = max(nbytes, self._fixed_nbytes)
        return [given[window] for window in self._windows]

    def _fp16_nbytes(self, seqlen: int, window: int) -> int:
        """Bytes of a layer that a relative budget is a fraction of."""
        length = max(seqlen, self._plan_length)
        return self._fp16_token * min(length, reach_of(window, self.rewind) or length)

    def smallest_nbytes(self, seqlen: int) -> int:
        """Bytes of a row, in all layers by their shares, with which so many tokens fit for certain."""
        return self._row_nbytes([self._smallest(layer, seqlen) for layer in range(len(self._layers))])

    def _row_nbytes(self, needed: Sequence[int]) -> int:
        """Bytes of which every layer's share is what it needs."""
        whole = sum(self._layer_tokens)
        return max(-(-n * whole // tokens) for n, tokens in zip(needed, self._layer_tokens, strict=True))

    def _smallest(self, layer: int, seqlen: int) -> int:
        """Bytes with which a row does, however its tokens come, at the lowest widths."""
        return _smallest_nbytes(self._layers[layer], seqlen, self.rewind)

    def check(self, seqlen: int, batch: int) -> None:
        """Refuse rows of a length that do not fit for certain, with BudgetError."""
        budgets = self.row_budgets(seqlen, batch) or ()
        kinds = set(zip(self._layers, budgets, strict=False))  # layers are often alike
        if any(_smallest_nbytes(layer, seqlen, self.rewind) > given for layer, given in kinds):
            raise self._refusal(seqlen, batch)

    def _short(self, seqlen: int, batch: int) -> list[tuple[int, int]]:
        """Layers that so many tokens do not fit, and the bytes that they have for a row."""
        budgets = self.row_budgets(seqlen, batch) or ()
        return [(n, given) for n, given in enumerate(budgets) if self._smallest(n, seqlen) > given]

    def _refusal(self, seqlen: int, batch: int) -> BudgetError:
        """The error for a length that does not fit: it names lengths that do, and the bytes needed."""
        rows, fraction = max(batch, 1), self.budget.fraction
        needed, given = self.smallest_nbytes(seqlen) * rows, sum(self.row_budgets(seqlen, batch) or ()) * rows
        of_rows = "" if batch == 1 else f" in each of {batch} rows"
        fault = f"{seqlen} tokens{of_rows} need at least {needed} bytes at the lowest widths and the "
        error = partial(BudgetError, needed_bytes=needed)
        if not self._holds_rows(batch):
            return error(
                f"{fault}budget gives {given}; so many rows take {self._empty_nbytes(batch)} without any "
                "token. Raise the budget or keep fewer rows"
            )
        low, budget = self._longest(seqlen, batch), "budget"
        longest = f"the longest length that fits is {low}"
        if help_for_window := self._help_for_window(seqlen, batch, needed):
            return error(f"{seqlen} tokens{of_rows}: {help_for_window}; {longest}", longest_length=low)
        if fraction is not None:
            if enough := self._enough(seqlen, batch):
                budget = f"budget or plan_length (to {enough})"
            if high := self._shortest(seqlen, enough or seqlen + self._residual + _FAR, batch):
                longest = (
                    f"the longest length that fits below {seqlen} is {low}, the shortest above is {high}"
                )
        early = "" if self._refuses_at_once else ". With max_seqlen it is refused before the first token"
        return error(
            f"{fault}budget gives {given}; {longest}. Raise the {budget}, add a lower width to bits (with a "
            f"width 0 the least important tokens are dropped) or shorten the sequence{early}",
            longest_length=low,
        )

    def _help_for_window(self, seqlen: int, batch: int, needed: int) -> str:
        """What to do where the budget is enough and the share of a sliding window is not; else no words."""
        budgets = self.row_budgets(seqlen, batch) or ()
        smallest = [self._smallest(layer, seqlen) for layer in range(len(self._layers))]
        short = [layer for layer, _ in self._short(seqlen, batch)]
        narrow = [layer for layer in short if self._windows[layer]]
        if not narrow or sum(budgets) < sum(smallest):
            return ""
        layer = narrow[0]
        fault = (
            f"layer {layer}, with a sliding window of {self._windows[layer]} tokens, needs {smallest[layer]} "
            f"bytes a row at the lowest widths, and its share of the budget is {budgets[layer]}"
        )
        if self.budget.fraction is not None:
            most = max(1000 * smallest[n] // self._fp16_nbytes(seqlen, self._windows[n]) for n in short) + 1
            if most <= 1000 * MAX_FRACTION:
                return f"{fault}. Raise the budget to {most / 1000:.3f}, or add a lower width to bits"
        lengths = range(seqlen, self._expected)
        held = bisect_left(lengths, True, key=lambda n: not self._shares_hold(n, batch))
        if self.budget.fraction is None and held:
            return (
                f"{fault}: layers share it as they keep tokens of {self._expected} (max_seqlen, or "
                f"plan_length). Pass max_seqlen={lengths[held - 1]}, or raise the budget to {needed} bytes"
            )
        return f"{fault}. Raise the budget to {needed} bytes, or add a lower width to bits"

    def _shares_hold(self, longest: int, batch: int) -> bool:
        """Whether an absolute budget holds so many tokens if layers share it as they keep tokens of them."""
        of_row = (self.budget.nbytes or 0) // max(batch, 1)
        tokens = self._tokens_kept(longest)
        return all(
            self._smallest(layer, longest) <= of_row * n // sum(tokens) for layer, n in enumerate(tokens)
        )

    def _tokens_kept(self, seqlen: int) -> list[int]:
        """How many of so many tokens each layer keeps."""
        return [min(seqlen, window or seqlen) for window in self._windows]

    def _longest(self, seqlen: int, batch: int) -> int:
        """The longest length up to one that fits; what a relative budget gives it bounds all shorter ones."""
        while seqlen > 0 and (short := self._short(seqlen, batch)):
            seqlen = min(
                bisect_right(range(seqlen), given, key=partial(self._smallest, layer)) - 1
                for layer, given in short
            )
        return seqlen

    # A page takes the same bytes however full it is and a relative budget grows with each token, so a length
    # may be refused and longer ones fit.

    def _tokens_for(self, seqlen: int, layers: Iterable[int]) -> int:
        """How many tokens a relative budget counts where it gives layers what a length takes."""
        of_token = (self.budget.fraction or 0) * self._fp16_token
        return max(int(self._smallest(layer, seqlen) / of_token) for layer in layers)

    def _shortest(self, seqlen: int, end: int, batch: int) -> int:
        """The shortest length of `seqlen` to `end` that fits; 0: there is none."""
        while seqlen <= end and (short := self._short(seqlen, batch)):
            seqlen = max(seqlen + 1, self._tokens_for(seqlen, (layer for layer, _ in short)))
        return seqlen if seqlen <= end else 0

    def _enough(self, seqlen: int, batch: int) -> int:
        """The `plan_length` with which every length fits, where such a one does not; 0: there is none."""
        begins = range(self._residual + 1, LONGEST, TOKENS_PER_PAGE)  # of pages; there most bytes are missing
        if self._short(begins[-1], batch):
            return 0
        fitting = bisect_left(begins, True, key=lambda n: not self._short(n, batch))
        last = max(seqlen, self._residual, begins[fitting] - TOKENS_PER_PAGE)  # that is refused
        return self._tokens_for(last, range(len(self._layers))) + 1

    def _holds_rows(self, batch: int) -> bool:
        """Whether rows without tokens fit."""
        budgets = self.row_budgets(0, batch)
        return budgets is None or min(budgets) >= self._fixed_nbytes

    def _empty_nbytes(self, batch: int) -> int:
        return self._row_nbytes([self._fixed_nbytes] * len(self._layers)) * max(batch, 1)
