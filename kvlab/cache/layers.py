"""The constants of one layer of a cache: pages of its ladder, windows, what importance observes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ladder import EXACT, Ladder, Rung, loss_of
from kvlab.ops import plan
from kvlab.ops.layer_state import WAITING_ENTRIES, WAITING_PAGES
from kvlab.pages import PAGE_TABLE_BYTES, PageLayout

__all__ = ["Layer", "LayerFormat"]


@dataclass(frozen=True, eq=False)
class LayerFormat:
    """Pages of one layer.

    Parameters
    ----------
    whole_ladder : tuple of Rung
        Rungs in use, lowest first; a first rung of width 0 means that tokens may be evicted.
    num_heads_kv, head_dim : int
    dtype : {"float16", "bfloat16", "float32"}
        What width 16 stands for.
    """

    whole_ladder: Ladder
    num_heads_kv: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.in_blocks and self.head_dim % 64:
            named = next(rung for rung in self.ladder if isinstance(rung.bits_k, tuple))
            raise ValueError(
                f"bits: rung {named} has a profile for K, which needs a head_dim that is a multiple of 64, "
                f"got {self.head_dim}; name rungs of one width instead, such as 'k4v3'"
            )

    @cached_property
    def in_blocks(self) -> bool:
        """Whether keys are kept in blocks of channels."""
        return any(isinstance(rung.bits_k, tuple) for rung in self.ladder)

    @cached_property
    def evicts(self) -> bool:
        """Whether tokens may be dropped."""
        return self.whole_ladder[0].total == 0

    @cached_property
    def ladder(self) -> Ladder:
        """The rungs that have pages."""
        return self.whole_ladder[1:] if self.evicts else self.whole_ladder

    @cached_property
    def layouts(self) -> tuple[PageLayout, ...]:
        """The pages of each rung."""
        return tuple(self._layout(rung) for rung in self.ladder)

    @cached_property
    def levels(self) -> plan.Ladder:
        """What a page of each rung costs and loses, as plans want it; level 0 may be eviction."""
        cost = [self.page_bytes(r) for r in range(len(self.ladder))]
        return plan.Ladder((0,) * self.evicts + tuple(cost), tuple(map(loss_of, self.whole_ladder)))

    @cached_property
    def is_narrow(self) -> bool:
        """Whether there is no width of 8 for keys, so that means are those of `key_mean(narrow=True)`."""
        return all(rung.blocks != (8,) * 4 for rung in self.ladder)

    @cached_property
    def exact_layout(self) -> PageLayout:
        """Pages of the cache's dtype, unchanged."""
        return self._layout(EXACT)

    def _layout(self, rung: Rung) -> PageLayout:
        return PageLayout(self.head_dim, rung.bits_k, rung.bits_v, 4 if self.dtype == "float32" else 2)

    def page_bytes(self, rung: int) -> int:
        """Bytes that a page of a rung counts: its record and its entry in the page table."""
        return self.layouts[rung].nbytes + PAGE_TABLE_BYTES

    @cached_property
    def fixed_nbytes(self) -> int:
        """Bytes that a row takes without any page: number of pages, key frame and ratios of each head."""
        half = self.head_dim // 2
        return self.num_heads_kv * (6 + 5 * half + (3 * half + 16) * self.in_blocks)

    @cached_property
    def waiting_nbytes(self) -> int:
        """Bytes that the tokens of a head take while they wait: their pages and sums of queries."""
        return WAITING_PAGES * (self.exact_layout.nbytes + PAGE_TABLE_BYTES) + 4 * self.head_dim


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: the pages of its ladder, its residual window, what importance observes, its sliding window.

    `observed`: a value of `kvlab.cache.importance.POLICIES`. `sliding_window`: how many tokens a query sees,
    itself the last one; 0: all. `frame`: that of its heads, if it is given. `mean_factor`: what means of keys
    are multiplied by, if they are (`kvlab.ops.frame.mean_factors`).
    """

    store: LayerFormat
    residual: int
    observed: str
    sliding_window: int = 0
    frame: dict[str, Any] | None = None
    mean_factor: NDArray[np.float32] | None = None

    @cached_property
    def stored(self) -> LayerFormat:
        """Pages that the layer has: those of its ladder, and of width 16 those of a residual window.

        Every new token goes to a page of the highest rung, which the window's is.
        """
        if not self.residual:
            return self.store
        store = self.store
        return LayerFormat((*store.whole_ladder, EXACT), store.num_heads_kv, store.head_dim, store.dtype)

    @property
    def observes(self) -> str:
        """What the policy observes; where there is only one rung no score decides anything."""
        return self.observed if len(self.store.whole_ladder) > 1 else "one"

    @cached_property
    def takes_mean(self) -> bool:
        """Whether rows take their frame from their first tokens: if none is given and tokens are packed."""
        packed = (rung.bits_k != 16 or rung.bits_v != 16 for rung in self.store.ladder)
        return self.frame is None and any(packed)

    def waits_within(self, row_budget: int) -> bool:
        """Whether so many bytes hold the waiting pages of a row, and then the pages that its tokens go to."""
        store, cost = self.store, self.store.levels.cost
        max_nbytes = max(store.waiting_nbytes, WAITING_ENTRIES * cost[0] + 3 * cost[-1])
        return self.takes_mean and store.num_heads_kv * max_nbytes + store.fixed_nbytes <= row_budget

    def ample_nbytes(self, tokens: int, rewind: int) -> int:
        """Bytes of a row of so many tokens with which no plan has to be compact."""
        return self._nbytes(plan.ample_nbytes, tokens, rewind)

    def smallest_nbytes(self, tokens: int, rewind: int, lookahead: int = 0) -> int:
        """Bytes with which a row holds so many tokens for certain, and open pages for `lookahead` more."""
        return self._nbytes(plan.smallest_nbytes, tokens, rewind, lookahead=lookahead)

    def _nbytes(self, of: Callable[..., int], tokens: int, rewind: int, **options: int) -> int:
        geometry, reach = (self.store.num_heads_kv, self.stored.levels), self.reach(rewind)
        return of(tokens, *geometry, self.store.fixed_nbytes, window=self.residual, reach=reach, **options)

    def reach(self, rewind: int) -> int:
        """How many tokens plans keep, where crops may take back `rewind`; 0: all."""
        return plan.reach_of(self.sliding_window, rewind)
