"""Which rung every token of a row gets: planned for all of them at once, before anything changes.

Tokens of each (head, position segment) are sorted by their present rung and importance and cut into chunks of
64; the allocator gives each chunk a rung under the byte budget. So rungs hold whole pages of tokens, but for
one partial chunk. A segment is a run of 65,536 positions: pages keep 16-bit positions, the page table their
upper part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.allocator import Method, allocate
from kvlab.errors import BudgetError
from kvlab.pages import TOKENS_PER_PAGE

__all__ = ["ERRORS", "NewTokens", "Plan", "Rates", "Tokens", "Weigh", "plan_row"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Weigh = Callable[[NDArray[np.uint8], Ints], Floats]

ERRORS = {16: 0.0, 8: 5.0e-5, 4: 0.0090, 3: 0.0327, 2: 0.1115, 0: 1.0}
"""Relative mean squared error of a K or V vector at each width, as measured on SmolLM2-135M."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Stored tokens of one row, one entry each; `page` is the place in the page table of (row, head)."""

    head: Ints
    page: Ints
    slot: Ints
    rung: Ints
    position: Ints
    code: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.head)

    def part(self, which: Ints) -> Tokens:
        """The given ones, in the given order."""
        return Tokens(
            self.head[which],
            self.page[which],
            self.slot[which],
            self.rung[which],
            self.position[which],
            self.code[which],
        )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one row that are not stored yet: `k`, `v` (n, heads, head_dim) float32, `code` (heads, n)."""

    k: Floats
    v: Floats
    position: Ints
    code: NDArray[np.uint8]

    @staticmethod
    def none(num_heads_kv: int, head_dim: int) -> NewTokens:
        values = np.empty((0, num_heads_kv, head_dim), np.float32)
        return NewTokens(values, values, np.empty(0, np.int64), np.empty((num_heads_kv, 0), np.uint8))

    def behind(self, n: int) -> NewTokens:
        """All but the first `n`."""
        return NewTokens(self.k[n:], self.v[n:], self.position[n:], self.code[:, n:])


@dataclass(frozen=True, slots=True)
class Plan:
    """Target rung of every stored token and of every new token (heads, n); -1: evicted."""

    tokens: Tokens
    stored: Ints
    new: Ints


@dataclass(frozen=True, slots=True)
class Rates:
    """What a page loses and costs in bytes at each rung; where tokens may be evicted, that comes first."""

    loss: NDArray[np.float64]
    cost: Ints
    evicts: bool

    @property
    def top(self) -> int:
        """The highest rung that pages have."""
        return len(self.cost) - self.evicts - 1


def plan_row(
    tokens: Tokens, new: NewTokens, room: int | None, weigh: Weigh, method: Method, rates: Rates
) -> Plan:
    """Choose a rung for every token of a row.

    Parameters
    ----------
    tokens : Tokens
        All stored tokens of the row.
    new : NewTokens
        Tokens to add to every head.
    room : int or None
        Bytes that pages and their entries in the page table may take; None: no limit.
    weigh : callable
        `weigh(code, position) -> float32`: what an error of these tokens costs, not negative; larger is more
        important.
    method : {"greedy", "dp", "uniform"}
    rates : Rates

    Raises
    ------
    BudgetError
        If even the lowest rung does not fit; without any token, if `room` is negative.
    """
    from kvlab.numba_kernels.cpu.plan import order_tokens

    if room is not None and room < 0:
        raise BudgetError(f"what lies outside pages takes {-room} bytes more than a row may")
    heads, n = new.code.shape
    head = np.concatenate([tokens.head, np.repeat(np.arange(heads), n)])
    position = np.concatenate([tokens.position, np.tile(new.position, heads)])
    target = np.concatenate([tokens.rung, np.full(heads * n, rates.top)])
    if room is not None and len(head):
        weight = np.asarray(weigh(np.concatenate([tokens.code, new.code.ravel()]), position), np.float32)
        segment = position >> 16
        order = order_tokens(head, segment, target, weight.view(np.uint32))
        group = (head << 32) + segment
        rung = _allocate(group[order], target[order], weight[order], room, method, rates)
        target = np.empty_like(target)
        target[order] = rung
    return Plan(tokens, target[: len(tokens)], target[len(tokens) :].reshape(heads, n))


def _allocate(group: Ints, ceiling: Ints, weight: Floats, room: int, method: Method, rates: Rates) -> Ints:
    """Rung of every token, given tokens sorted by group, ceiling and weight."""
    from kvlab.numba_kernels.cpu.plan import chunks

    start = chunks(group, ceiling, rates.top)
    if len(start) * rates.cost[0] > room:
        # As few pages as can be: nothing stands apart from the rest of its head any more.
        start = chunks(group, ceiling, rates.top + 1)
    length = np.diff(start, append=len(group))
    # A partial chunk is judged as if it were full: the page it opens is for the tokens to come.
    total = np.add.reduceat(weight.astype(np.float64), start) * (TOKENS_PER_PAGE / length)
    loss = total[:, None] * rates.loss
    limit = ceiling[start] + rates.evicts
    rung = allocate(loss, rates.cost, room, ceiling=limit, method=method) - rates.evicts
    return np.repeat(rung, length)
