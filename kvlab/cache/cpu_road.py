"""What `MixedPrecisionCache` calls when its arrays are in CPU memory: sizes, and steps.

A step attends stored tokens straight from their pages, and the window and the new tokens exactly; both parts
are merged by their log-sum-exp. Then the new tokens are stored. `cuda.road.GpuRoad` has the same methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, ArrayT, like_first, to_numpy_view
from kvlab.cache import inputs
from kvlab.cache.budget import Limit
from kvlab.cache.cuda.window import EXACT, joined
from kvlab.cache.layer import Arrival, Layer
from kvlab.cache.options import CacheOptions
from kvlab.cache.window import stack
from kvlab.errors import BudgetError
from kvlab.ops.cpu.exact import attend_exact
from kvlab.ops.packed import mass_from_scores, packed_attention
from kvlab.pages import LayerPages

__all__ = ["CpuRoad", "smallest_on_cpu"]

MASS_ROWS = 64
"""Query rows, the last of a step, over which attention mass is collected."""


def smallest_on_cpu(layers: Sequence[Layer]) -> Callable[[int], int]:
    """Return what tells from the tokens of a row the bytes with which it does in any layer for certain."""
    return lambda tokens: max(layer.smallest_nbytes(tokens) for layer in layers)


class CpuRoad:
    """The CPU side of one cache.

    Parameters
    ----------
    options : CacheOptions
        The cache itself, whose batch may change; it is not kept alive.
    layers : sequence of Layer
    limit : Limit
    """

    def __init__(self, options: CacheOptions, layers: Sequence[Layer], limit: Limit) -> None:
        self._options: CacheOptions = weakref.proxy(options)
        self._layers, self._limit = layers, limit

    # ---- sizes ---------------------------------------------------------------------------------------------

    def seqlen(self, layer: int) -> int:
        """Time steps that a layer has seen."""
        return self._layers[layer].seqlen

    def nbytes(self) -> int:
        """Bytes in live pages, tables and windows."""
        return sum(layer.nbytes() for layer in self._layers)

    def reserved_nbytes(self) -> int:
        """Bytes of the pools and tables that hold them."""
        return sum(layer.reserved_nbytes() for layer in self._layers)

    def tokens(self) -> int:
        """Tokens held, over layers, rows and heads."""
        return sum(layer.tokens() for layer in self._layers)

    def page_counts(self, layer: int) -> NDArray[np.int64]:
        """Pages of each rung, (batch, heads, rungs)."""
        return self._layers[layer].store.page_counts()

    def pages(self, layer: int) -> LayerPages:
        """`MixedPrecisionCache.pages`."""
        state = self._layers[layer]
        exact = state.residual or any(map(len, state.windows))
        return (joined(state, (*state.store.whole_ladder, EXACT)) if exact else state.store).view()

    def begin(self) -> None:
        """The layers hold everything."""

    # ---- what a model calls --------------------------------------------------------------------------------

    def step(
        self, layer: int, q: ArrayT, k: Array, v: Array, scale: float, softcap: float, valid: Array | None
    ) -> ArrayT:
        """`MixedPrecisionCache.step` on the CPU."""
        queries = inputs.queries(self._options, q)
        new = inputs.new_keys(self._options, k, v, valid, queries)
        state, rows = self._layers[layer], queries.shape[1]
        kept = min(rows, MASS_ROWS) if state.observes == "mass" else 0
        collect = kept > 0 and state.since_collection + rows >= self._options.realloc_every
        view = state.store.view()
        stored = packed_attention(
            queries, view, scale=scale, softcap=softcap, keep_scores=kept if collect else 0
        )
        exact_k, exact_v, visible = stack(state.windows, *new)
        exact = attend_exact(queries, exact_k, exact_v, visible, scale=scale, softcap=softcap, keep_rows=kept)
        out, lse = exact.merged(stored.out, stored.lse)
        if valid is not None:  # a query of padding sees nothing, and gives no token importance
            out[~new.valid] = 0
            lse.swapaxes(1, 2)[~new.valid] = np.inf
        mass = exact.mass(lse) if kept else None
        stored_mass = None if stored.scores is None else mass_from_scores(stored.scores, lse, view)
        self._commit(layer, Arrival(*new, mass, stored_mass))
        return like_first(out.astype(to_numpy_view(q, "q").dtype, copy=False), q)

    def append(self, layer: int, k: Array, v: Array, valid: Array | None) -> None:
        """`MixedPrecisionCache.append` on the CPU."""
        self._commit(layer, Arrival(*inputs.new_keys(self._options, k, v, valid)))

    def attend(self, layer: int, q: ArrayT, scale: float, softcap: float) -> ArrayT:
        """`MixedPrecisionCache.attend` on the CPU."""
        queries = inputs.queries(self._options, q)
        state, (batch, rows, _, head_dim) = self._layers[layer], queries.shape
        stored = packed_attention(queries, state.store.view(), scale=scale, softcap=softcap)
        # Every row sees the whole window: invisible keys behind it, one a row but the last, align them.
        behind = np.zeros((batch, max(rows - 1, 0), self._options.num_heads_kv, head_dim), np.float32)
        exact_k, exact_v, visible = stack(state.windows, behind, behind, np.zeros(behind.shape[:2], bool))
        exact = attend_exact(queries, exact_k, exact_v, visible, scale=scale, softcap=softcap, keep_rows=0)
        out, _ = exact.merged(stored.out, stored.lse)
        return like_first(out.astype(to_numpy_view(q, "q").dtype, copy=False), q)

    def _commit(self, layer: int, arrival: Arrival) -> None:
        seqlen, batch = self._layers[layer].seqlen + arrival.k.shape[1], self._options.batch
        try:
            self._layers[layer].commit(arrival, self._limit.share(seqlen, batch))
        except BudgetError:
            raise self._limit.refusal(seqlen, batch) from None

    # ---- what only a GPU has -------------------------------------------------------------------------------

    def prepare(self, steps: int) -> tuple[Hashable, ...]:
        """`MixedPrecisionCache.prepare`, which the CPU refuses."""
        _refuse("prepare")

    def recording(self) -> AbstractContextManager[None]:
        """`MixedPrecisionCache.recording`, which the CPU refuses."""
        _refuse("recording")

    def replayed(self, steps: int) -> None:
        """`MixedPrecisionCache.replayed`, which the CPU refuses."""
        _refuse("replayed")

    def crop(self, end: int) -> bool:
        """The layers are cropped by whoever holds them."""
        return False

    def take_rows(self, rows: NDArray[np.int64]) -> bool:
        """The layers' rows are changed by whoever holds them."""
        return False

    def clear(self) -> None:
        """Nothing is held but what the layers hold."""

    def on_host(self, changes: bool = True) -> AbstractContextManager[None]:
        """The layers hold everything as it is."""
        return nullcontext()


def _refuse(method: str) -> NoReturn:
    raise NotImplementedError(f"{method}() is for caches with device='cuda'; call step() here")
