"""What is fixed of a layer of a cache: what its pages look like, what its importance observes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvlab.cache.importance import Policy
from kvlab.cache.ladder import EXACT, Ladder, Rung
from kvlab.pages import PAGE_TABLE_BYTES, PageLayout

__all__ = ["Layer", "LayerFormat"]


@dataclass(frozen=True)
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

    @property
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
    def exact_layout(self) -> PageLayout:
        """Pages of the cache's dtype, unchanged."""
        return self._layout(EXACT)

    def _layout(self, rung: Rung) -> PageLayout:
        return PageLayout(self.head_dim, *rung, 4 if self.dtype == "float32" else 2)

    def page_bytes(self, rung: int) -> int:
        """Bytes that a page of a rung counts: its record and its entry in the page table."""
        return self.layouts[rung].nbytes + PAGE_TABLE_BYTES

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that a row takes without any page: number of pages and key mean of each head."""
        return self.num_heads_kv * (4 + 2 * self.head_dim)


@dataclass(frozen=True)
class Layer:
    """One layer: the pages of its ladder, its residual window, the policy of importance."""

    store: LayerFormat
    residual: int
    policy: Policy

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
        return self.policy.observes if len(self.store.whole_ladder) > 1 else "nothing"

    @property
    def takes_mean(self) -> bool:
        """Whether the mean of keys is taken off them.

        The first tokens lie far from it; where they cannot stay at a high width it does harm.
        """
        widths = [rung.bits_k for rung in self.store.ladder]
        return min(widths) < 16 and max(widths) >= 8
