"""One layer of a cache: exact tokens, pages and importance of every row, and how new tokens enter.

A new token first joins the exact window of its row. What the window does not keep goes to pages, at the
highest rung if its row has an open page there, else by a plan for all tokens of the row under the bytes it
may take. Every row is planned before anything changes, so that a refused commit leaves the layer as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.allocator import Method
from kvlab.cache.frame import LAST, key_mean
from kvlab.cache.importance import Policy
from kvlab.cache.ladder import Ladder
from kvlab.cache.store import LayerStore, NewTokens, Plan, Tokens, Weigh
from kvlab.cache.window import Window
from kvlab.errors import BudgetError
from kvlab.pages import decode_importance, encode_importance

__all__ = ["Arrival", "Layer"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
SINK_WEIGHT, RECENT_WEIGHT = np.float32(1e9), np.float32(1e4)
"""Least weights of a sink and of a recent token: they stay in the highest rung as long as anything does."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """New tokens of a step.

    Attributes
    ----------
    k, v : (B, S, Hkv, D) float32
    valid : (B, S) bool
        False: padding, not stored.
    mass : (B, Hkv, W + S) float32, optional
        Attention mass of the exact tokens, windows aligned before the new tokens.
    stored_mass : (B, Hkv, pages, 64) float32, optional
        Attention mass of the tokens in pages, if this step collects it.
    """

    k: Floats
    v: Floats
    valid: NDArray[np.bool_]
    mass: Floats | None = None
    stored_mass: Floats | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """What a commit does to one row."""

    tokens: Tokens
    new: NewTokens
    plan: Plan | None
    window: Window
    mean: NDArray[np.float16] | None


class Layer:
    """State of one layer; see the module's description.

    Parameters
    ----------
    ladder : tuple of Rung
    batch, num_heads_kv, head_dim : int
    dtype : str
        Of the cache.
    residual, sink, recent : int
        Newest tokens kept exact, first and newest tokens kept at the highest rung.
    policy : Policy
    allocator : {"greedy", "dp", "uniform"}
    sinks_wait : bool
        Whether sinks stay exact while no page of the highest rung can take them.
    """

    def __init__(
        self,
        ladder: Ladder,
        batch: int,
        num_heads_kv: int,
        head_dim: int,
        dtype: str,
        *,
        residual: int,
        sink: int,
        recent: int,
        policy: Policy,
        allocator: Method,
        sinks_wait: bool = True,
    ) -> None:
        self.store = LayerStore(ladder, batch, num_heads_kv, head_dim, dtype)
        self.residual, self.sink, self.recent = residual, sink, recent
        self.policy, self.allocator, self.sinks_wait = policy, allocator, sinks_wait
        # Where there is only one rung no score decides anything, and none is collected.
        self.observes = policy.observes if len(ladder) > 1 else "nothing"
        # The first tokens lie far from the mean; where they cannot stay at a high width it does harm.
        widths = [rung.bits_k for rung in self.store.ladder]
        self.takes_mean = min(widths) < 16 and max(widths) >= 8
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """All but the policy, whose functions no pickle holds; a copy gets that of its cache."""
        return {name: value for name, value in vars(self).items() if name != "policy"}

    def clear(self) -> None:
        """Forget everything."""
        store = self.store
        store.clear()
        self.windows = [
            Window.empty(store.num_heads_kv, store.head_dim, store.dtype) for _ in range(store.batch)
        ]
        self.has_mean = np.full(store.batch, not self.takes_mean)
        self.seqlen = 0
        self.since_collection = 0

    # ---- sizes ---------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes in live buffers."""
        return int(self.store.nbytes().sum()) + sum(window.nbytes for window in self.windows)

    def reserved_nbytes(self) -> int:
        """Bytes of the pools, tables and windows."""
        return self.store.reserved_nbytes + sum(window.nbytes for window in self.windows)

    def smallest_nbytes(self, tokens: int) -> int:
        """Bytes that a row of `tokens` tokens needs at least."""
        exact = min(tokens, self.residual)
        empty = Window.empty(self.store.num_heads_kv, self.store.head_dim, self.store.dtype)
        return self.store.smallest_nbytes(tokens - exact) + exact * empty.token_nbytes

    def tokens(self) -> int:
        """Number of tokens held, summed over rows and heads."""
        exact = sum(len(window) for window in self.windows) * self.store.num_heads_kv
        return exact + int(self.store.count[self.store.live()].sum())

    # ---- storing -------------------------------------------------------------------------------------------

    def commit(self, arrival: Arrival, share: int | None) -> None:
        """Store new tokens so that no row takes more than `share` bytes.

        Raises
        ------
        BudgetError
            If a row cannot; the layer is as it was.
        """
        changes = [self._prepare(row, arrival, share) for row in range(self.store.batch)]
        for row, change in enumerate(changes):
            if arrival.stored_mass is not None:
                self.store.set_importance(row, change.tokens)
            self._carry_out(row, change)
        steps = arrival.k.shape[1]
        self.seqlen += steps
        self.since_collection = 0 if arrival.stored_mass is not None else self.since_collection + steps

    def _prepare(self, row: int, arrival: Arrival, share: int | None) -> _Change:
        store, before = self.store, self.windows[row]
        use = np.flatnonzero(arrival.valid[row])
        observed = self._observe(row, arrival, use)
        exact = before.extended(arrival.k[row, use], arrival.v[row, use], self.seqlen + use, observed)
        end = self.seqlen + arrival.k.shape[1]
        mean, leaving = self._leaving(row, exact, share)
        tokens = store.tokens(row)
        if arrival.stored_mass is not None:
            since = self.since_collection + arrival.k.shape[1]
            tokens = self._observed(tokens, arrival.stored_mass[row], since)

        def change(window: Window, new: NewTokens) -> _Change:
            room = None if share is None else share - window.nbytes
            return _Change(tokens, new, self._plan(row, tokens, new, room, end), window, mean)

        new, sinks = self._new_tokens(exact.part(0, leaving), end), self._sinks(exact, leaving)
        if sinks and share is not None and mean is None:
            window, others = exact.without(sinks, leaving), new.behind(sinks)
            fits = int(store.nbytes()[row]) <= share - window.nbytes
            if fits and store.open_pages(row, others) is not None:
                return change(window, others)  # nothing is planned for sinks that wait, token by token
        return self._keeping_sinks(exact, new, sinks, change)

    def _leaving(self, row: int, exact: Window, share: int | None) -> tuple[NDArray[np.float16] | None, int]:
        """The key mean if it is to be taken now, and how many exact tokens need not stay."""
        mean = None
        if not self.has_mean[row]:
            # No token of this row has left its window yet, so the window holds its first tokens: the mean is
            # taken when there are enough, or when they become too many to hold.
            held = self.store.fixed_nbytes + exact.nbytes
            if len(exact) >= LAST or (share is not None and held > share):
                mean = key_mean(exact.k[:LAST].astype(np.float32))
        keeps = self.residual if mean is not None or self.has_mean[row] else len(exact)
        return mean, max(len(exact) - keeps, 0)

    def _sinks(self, exact: Window, leaving: int) -> int:
        """How many of the first `leaving` exact tokens are sinks that may stay exact."""
        return int((exact.position[:leaving] < self.sink).sum()) if self.sinks_wait else 0

    def _keeping_sinks(
        self, exact: Window, new: NewTokens, sinks: int, change: Callable[[Window, NewTokens], _Change]
    ) -> _Change:
        """The change by which `new` leaves the exact tokens, all but those first ones, sinks, that lose bits.

        What is demoted stays so, and a short sequence may take fewer bytes than a page of the highest rung
        for each head. So sinks stay exact until such pages are there, only the first where not all can.
        """
        leaving = len(new.position)
        found = change(exact.without(0, leaving), new)
        top = len(self.store.ladder) - 1
        while sinks and found.plan is not None and (found.plan.new[:, :sinks] < top).any():
            try:
                return change(exact.without(sinks, leaving), new.behind(sinks))
            except BudgetError:
                sinks //= 2
        return found

    def _carry_out(self, row: int, change: _Change) -> None:
        if change.mean is not None:
            self.store.k_mean[row], self.has_mean[row] = change.mean, True
        if change.plan is None:
            self.store.append(row, change.new)
        else:
            self.store.apply(row, change.plan, change.new)
        self.windows[row] = change.window

    def _observe(self, row: int, arrival: Arrival, use: Ints) -> Floats:
        """What the policy sees of a row's exact tokens, (Hkv, window + new)."""
        before = self.windows[row]
        if self.observes == "nothing":
            return np.ones((self.store.num_heads_kv, len(before) + len(use)), np.float32)
        if arrival.mass is not None:
            first_new = arrival.mass.shape[2] - arrival.k.shape[1]
            column = np.concatenate([np.arange(first_new - len(before), first_new), first_new + use])
            mass: Floats = np.nan_to_num(arrival.mass[row][:, column])
            return mass
        norm = np.sqrt((arrival.k[row, use].astype(np.float64) ** 2).sum(-1)).astype(np.float32).T
        # Without queries there is no attention to see; keys of small norm collect it.
        new = norm if self.policy.observes == "key_norm" else 1 / np.maximum(norm, np.float32(1e-6))
        return np.concatenate([before.observed, np.nan_to_num(new)], 1)

    def _new_tokens(self, exact: Window, seqlen: int) -> NewTokens:
        position = np.broadcast_to(exact.position, exact.observed.shape)
        score = self.policy.update(None, exact.observed, position, seqlen, 0)
        k, v = exact.k.astype(np.float32), exact.v.astype(np.float32)
        return NewTokens(k, v, exact.position, encode_importance(score))

    def _observed(self, tokens: Tokens, mass: Floats, since: int) -> Tokens:
        """Tokens with their importance updated by their mass, `since` tokens after the last collection."""
        observed = np.nan_to_num(mass[tokens.head, tokens.page, tokens.slot])
        previous = decode_importance(tokens.code)
        score = self.policy.update(previous, observed, tokens.position, self.seqlen, since)
        return replace(tokens, code=encode_importance(score))

    def _plan(self, row: int, tokens: Tokens, new: NewTokens, room: int | None, seqlen: int) -> Plan | None:
        """The change that stores `new` within `room` bytes; None: it goes into open pages as they are."""
        fits = room is None or int(self.store.nbytes()[row]) <= room
        if fits and self.store.open_pages(row, new) is not None:
            return None
        return self.store.plan(tokens, new, room, self._weigher(seqlen), self.allocator)

    def _weigher(self, seqlen: int) -> Weigh:
        def weigh(code: NDArray[np.uint8], position: Ints) -> Floats:
            score = decode_importance(code)
            if self.policy.by_position:
                score = np.asarray(
                    self.policy.update(None, np.ones_like(score), position, seqlen, 0), np.float32
                )
            weight = np.where(position < self.sink, SINK_WEIGHT, score)
            return np.where(position >= seqlen - self.recent, np.maximum(weight, RECENT_WEIGHT), weight)

        return weigh

    # ---- rows and lengths ----------------------------------------------------------------------------------

    def plan_crop(self, end: int, share: int | None) -> list[_Change]:
        """Changes, one a row, that forget the tokens from position `end` on and take at most `share` bytes.

        A relative budget falls with the length, so what stays may have to be demoted. Errors as of `commit`.
        """
        return [self._cropped(row, end, share) for row in range(self.store.batch)]

    def _cropped(self, row: int, end: int, share: int | None) -> _Change:
        tokens, before = self.store.tokens(row), self.windows[row]
        exact = before.part(0, int((before.position < end).sum()))
        mean, leaving = self._leaving(row, exact, share)
        kept = np.flatnonzero(tokens.position < end)
        stays, stored = tokens.part(kept), np.full(len(tokens), -1)
        stored[kept] = stays.rung

        def change(window: Window, new: NewTokens) -> _Change:
            room = None if share is None else share - window.nbytes
            if not len(new.position) and (room is None or self.store.packed_nbytes(stays) <= room):
                plan = Plan(tokens, stored, np.empty(new.code.shape, np.int64))
            else:
                found = self.store.plan(stays, new, room, self._weigher(end), self.allocator)
                target = stored.copy()
                target[kept] = found.stored
                plan = Plan(tokens, target, found.new)
            return _Change(tokens, new, plan, window, mean)

        leaves = self._new_tokens(exact.part(0, leaving), end)
        return self._keeping_sinks(exact, leaves, self._sinks(exact, leaving), change)

    def crop(self, end: int, changes: list[_Change]) -> None:
        """Forget the tokens from position `end` on, as `plan_crop` has planned it."""
        for row, change in enumerate(changes):
            self._carry_out(row, change)
        self.seqlen = end

    def shrink(self, rows: Ints, share: int | None) -> list[tuple[int, _Change]]:
        """Changes by which the given rows take at most `share` bytes; see `commit` for errors."""
        store = self.store
        shape = (store.batch, 0, store.num_heads_kv, store.head_dim)
        none = np.empty(shape, np.float32)
        nothing = Arrival(none, none, np.empty(shape[:2], bool))
        return [(row, self._prepare(row, nothing, share)) for row in map(int, rows)]

    def carry_out(self, changes: list[tuple[int, _Change]]) -> None:
        """Apply the changes of `shrink`."""
        for row, change in changes:
            self._carry_out(row, change)

    def take_rows(self, rows: Ints) -> None:
        """Make row i a copy of the present row `rows[i]`; the batch becomes `len(rows)`."""
        self.store.take_rows(rows)
        self.windows = [self.windows[row] for row in rows]
        self.has_mean = self.has_mean[rows]
