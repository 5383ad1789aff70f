"""Rows whose first tokens wait for the mean of their keys, as far as the host knows them.

The mean of a row is that of its valid tokens 4 to 63, whatever calls they come in (kvlab/ops/frame.py).
Until a row has seen 64, its tokens wait in five pages of width 16 a KV head. Appends fill these pages,
attention and importance read them like any others, and plans leave them alone. `freeze_means`
(kernels/cuda/pages/means.cu) then takes the mean and hands the tokens to the next plan as new ones, with
those of the call.

Only the device knows how many tokens of a row are valid. The host has bounds: a step with a mask on the
device raises the upper one alone. The bounds tell which appends a step launches (for waiting rows, for the
others, for both) and when a plan has to look after waiting rows.

A budget that cannot hold the waiting pages makes no row wait: the first call then gives the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.frame import LAST
from kvlab.ops.layer_state import WAITING_PAGES, new_tokens
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.cache.store import DeviceStore

__all__ = ["Merged", "Waiting", "merged_tokens", "put_new"]

CAPACITY = WAITING_PAGES * TOKENS_PER_PAGE
"""Tokens that the waiting pages of a row hold."""


class Waiting:
    """Bounds of the valid tokens of rows that wait.

    Parameters
    ----------
    store : DeviceStore
        Its layers say whether they take means, and it for which of them rows wait.
    """

    def __init__(self, store: DeviceStore) -> None:
        self.holds, self._batch, self.recording = store.holds_waiting, store.batch, False
        self._takes = np.array([layer.takes_mean for layer in store.layers])
        self.clear()

    def clear(self) -> None:
        """All layers are empty."""
        layers = len(self.holds)
        self.rows = np.repeat(self._takes[:, None], self._batch, 1)  # those that may wait
        self._certain = self.rows.copy()  # those that wait for certain
        self._low, self._high = np.zeros((2, layers, self._batch), np.int64)
        self._length, self._masked = [0] * layers, [False] * layers
        self._replayed = [False] * layers  # a graph has steps with a mask, and may be replayed at any time

    def mode(self, layer: int) -> str:
        """Which rows wait: "none", "all" or "some", of which the device knows more."""
        if not self.holds[layer] or not self.rows[layer].any():
            return "none"
        return "all" if self._certain[layer].all() else "some"

    def modes(self) -> tuple[str, ...]:
        """`mode` of every layer, asked before every step: most of the time no row waits."""
        layers = range(len(self.holds))
        return tuple(map(self.mode, layers)) if self.rows.any() else ("none",) * len(layers)

    def any(self, layer: int) -> bool:
        """Whether rows of a layer may lack their mean."""
        return bool(self.rows[layer].any())

    def mask(self, layer: int) -> None:
        """Say that the next step has a mask that the host does not read."""
        self._masked[layer] = True
        self._replayed[layer] |= self.recording

    def advance(self, layer: int, length: int) -> None:
        """Count the tokens up to a length, which came in steps of few tokens."""
        num_new = length - self._length[layer]
        self._high[layer] += num_new
        self._low[layer] += 0 if self._masked[layer] or self._replayed[layer] else num_new
        self._length[layer], self._masked[layer] = length, False

    def add(self, layer: int, length: int, counts: NDArray[np.int64]) -> None:
        """Count the valid tokens (batch,) of a step that the host has read; `length` is that behind it."""
        self._low[layer] += counts
        self._high[layer] += counts
        self._length[layer] = length

    def crop(self, layer: int, before: int, length: int) -> None:
        """Count the tokens that a crop from a length to another has left."""
        self.advance(layer, before)
        self._low[layer] = np.maximum(self._low[layer] - (before - length), 0)
        # A row that may have its mean keeps it, and so must not be taken for one that waits for certain.
        fewer = np.minimum(self._high[layer], length)
        self._high[layer] = np.where(self._certain[layer], fewer, self._high[layer])
        self._length[layer] = length

    def take_rows(self, other: Waiting, rows: NDArray[np.int64]) -> None:
        """Let row i stand as row `rows[i]` of a cache does."""
        self.rows, self._certain, self._low, self._high = (
            x[:, rows] for x in (other.rows, other._certain, other._low, other._high)
        )
        self._length, self._masked = list(other._length), list(other._masked)
        self._replayed = list(other._replayed)

    def hold_tokens(self, layer: int) -> bool:
        """Whether tokens may wait."""
        return bool((self.rows[layer] & (self._high[layer] > 0)).any())

    def may_freeze(self, layer: int, end: int, counts: NDArray[np.int64] | int = 0) -> bool:
        """Whether a row may get its mean, with `counts` more tokens and positions below `end`."""
        enough = self._high[layer] + counts >= LAST
        return not self.holds[layer] or end - 1 >> 16 > 0 or bool((self.rows[layer] & enough).any())

    def must_freeze(self, layer: int, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows (batch,) whose tokens go to pages of the ladder, with `counts` more of them."""
        if not self.holds[layer]:
            return np.ones(self._batch, bool)
        found: NDArray[np.bool_] = ~self.rows[layer] | (self._low[layer] + counts >= LAST)
        return found

    def frozen(self, layer: int, end: int) -> None:
        """Take over what `freeze_means` has done, for positions below `end`."""
        if not self.holds[layer]:
            self.rows[layer] = False
        freed = end - 1 >> 16 > 0  # tokens do not wait beyond a border of positions
        self.rows[layer] &= self._low[layer] < LAST
        self._certain[layer] = self.rows[layer] & (self._high[layer] < LAST) & (not freed)

    def lookahead(self, layer: int, num_new: int, lookahead: int) -> int:
        """Tokens until the next plan: `lookahead`, or `num_new` and those that bring a row its mean."""
        if self.mode(layer) == "none":
            return lookahead
        left = LAST - self._high[layer][self._certain[layer]]
        return max(num_new, min(lookahead, int(left.min(initial=lookahead))))

    def set(self, layer: int, rows: NDArray[np.bool_], counts: NDArray[np.int64], length: int) -> None:
        """Say which rows of a layer wait, and with how many tokens."""
        self.rows[layer] = rows & self._takes[layer]
        self._certain[layer] = self.rows[layer] & (counts < LAST)
        self._low[layer] = self._high[layer] = np.where(self.rows[layer], counts, LAST)
        self._length[layer], self._masked[layer] = length, False


class Merged(NamedTuple):
    """New tokens of a call behind waiting ones, `before` of them, as a plan takes them in.

    With n = before + num_new: k, v (batch, n, heads, head_dim), valid (batch, n) uint8, importance
    (batch * heads, n) uint8 and positions (batch, n) int32, which the device fills.
    Without waiting tokens there is `valid` alone.
    """

    executor: Any
    before: int
    num_new: int
    valid: Any
    k: Any = None
    v: Any = None
    importance: Any = None
    positions: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Those that there are."""
        return tuple(x for x in self[3:] if x is not None)

    def new_tokens(self, k: CudaView, v: CudaView, codes: int, length: int) -> Any:
        """A `NewTokens` struct; `k`, `v` and `codes` are those of the call, behind `length` others."""
        view, pointer = self.executor.view, self.executor.pointer
        total, valid = self.before + self.num_new, pointer(self.valid)
        if not self.before:
            return new_tokens(k, v, valid, codes, total, length)
        views = view(self.k, "k"), view(self.v, "v")
        positions = pointer(self.positions)
        return new_tokens(*views, valid, pointer(self.importance), total, length - self.before, positions)


def merged_tokens(shape: tuple[int, ...], executor: Any, like: Any, dtype: str, *, waiting: bool) -> Merged:
    """Take memory for new tokens of a shape (batch, num_new, heads, head_dim), and for waiting ones."""
    (batch, num_new, heads, head_dim), empty = shape, executor.empty
    before = CAPACITY if waiting else 0
    total = before + num_new
    valid = empty((batch, total), "uint8", like)
    if not waiting:
        return Merged(executor, 0, num_new, valid)
    k, v = (empty((batch, total, heads, head_dim), dtype, like) for _ in range(2))
    importance = empty((batch * heads, total), "uint8", like)
    positions = empty((batch, total), "int32", like)
    return Merged(executor, before, num_new, valid, k, v, importance, positions)


def put_new(merged: Merged, k: Any, v: Any, codes: Any) -> None:
    """Copy the new tokens of a call behind the places of waiting ones."""
    if merged.before and merged.num_new:
        merged.k[:, merged.before :], merged.v[:, merged.before :] = k, v
        merged.importance[:, merged.before :] = codes
