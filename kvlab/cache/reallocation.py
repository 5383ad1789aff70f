"""Reallocation of pages, decided and carried out: a plan, its moves and its page copies.

At decode a plan serves any number of layers at once, and the host waits for nothing. New tokens of a prefill
are enqueued layer by layer: where the arena cannot hold old and new pages at the same time, a plan demotes
what it can and reports RETRY, and the next one takes the tokens in. For that status the host waits, once for
all layers of a step (`synchronize`): waiting for each took as long as its launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.device import translated_out_of_memory
from kvlab.ops.cuda.plan import Workspace, workspace_nbytes
from kvlab.ops.layer_state import MAX_NEW, NEW_TOKENS
from kvlab.ops.plan import (
    OVER_BUDGET,
    RETRY,
    PlanShape,
    crop_bounds,
)
from kvlab.pages import QUAD, TOKENS_PER_PAGE

if TYPE_CHECKING:
    from kvlab.cache.budget import RowBudgets
    from kvlab.cache.options import Settings
    from kvlab.cache.store import DeviceStore

__all__ = ["LOOKAHEAD", "Reallocator"]

LOOKAHEAD = MAX_NEW
"""Tokens that a plan makes room for: with the 15 that a page may hold, they fit two pages."""
MAX_PENDING_NBYTES = 64 << 20
"""Bytes of new tokens that may wait for the word that they were taken in, or that a rare plan works in."""


class PendingWrite(NamedTuple):
    """New tokens of a layer that a plan was asked to take in."""

    layer: int
    new: Any
    workspace: Workspace
    stream: int
    arrays: tuple[Any, ...]  # what `new` has the addresses of


class Reallocator:
    """Chooses widths anew, and moves the tokens and pages of a store as they say.

    Parameters
    ----------
    store : DeviceStore
    settings : Settings

    Attributes
    ----------
    kernels : Kernels
        Launches for the store.
    ladders : list of Ladder
        The levels of each layer.
    without_holes : bool
        Whether no page but the last of its kind has holes, as plans leave it.
    """

    def __init__(self, store: DeviceStore, settings: Settings) -> None:
        self.store, self._longest = store, store.capacity + LOOKAHEAD
        self._rules: dict[str, Any] = {
            "sink": settings.sink,
            "recent": settings.recent,
            "by_position": settings.importance == "recency",
            "window": settings.residual,
            "floor": round(settings.floor * 2**32),
            "allocator": settings.allocator,
            "rewind": settings.rewind,
        }
        self.ladders = [of.levels for of in store.stores]
        self.kernels, shape = store.executor.kernels(store), self._shape(0)
        # Also for crops by a quad of tokens, whose bytes a relative budget takes away.
        quad_nbytes = max(QUAD * store.heads * ladder.cost[-1] for ladder in self.ladders)
        new_pages, dropped = self._crop_bounds(shape, QUAD * TOKENS_PER_PAGE, quad_nbytes)
        self._decode: Workspace = self.kernels.make_workspace(shape, len(self.ladders), new_pages, dropped)
        self.restart(without_holes=True)

    def copy(self) -> Reallocator:
        """Return one with the same rules, for a store with the same tables: see `DeviceStore.copy`."""
        other, kept = copy(self), self._decode
        with translated_out_of_memory("a copy of a cache"):
            other.store = self.store.copy()
            other.kernels = self.store.executor.kernels(other.store)
            other._decode = other.kernels.make_workspace(
                kept.shape, len(self.ladders), kept.max_new_pages, kept.max_dropped
            )
        other.restart(without_holes=self.without_holes)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes on the device: the store and what plans work in."""
        return int(self.store.reserved_nbytes + self._decode.nbytes)

    def _shape(self, new_tokens: int) -> PlanShape:
        store = self.store
        evicts = any(layer.evicts for layer in store.stores)
        segments = ((self._longest - 1) >> 16) + 1
        return PlanShape(
            store.batch, store.heads, store.entries, store.num_rungs, evicts, segments, new_tokens
        )

    def restart(self, *, without_holes: bool) -> None:
        """Say that the store's tables are others: whether the pages in them have no holes."""
        self.without_holes = without_holes
        self._row_budgets: RowBudgets = ()
        self._pending: list[PendingWrite] = []
        self._write_workspace: tuple[tuple[int, bool], Workspace] | None = None  # for the layers of one step

    def set_row_budgets(self, row_budgets: RowBudgets) -> None:
        """Set the bytes that a row may take in each layer."""
        if row_budgets != self._row_budgets:
            self.synchronize()
            budget = self.store.tables["budget"]
            if row_budgets is None or len(set(row_budgets)) == 1:
                budget[...] = int(np.iinfo(np.int64).max) if row_budgets is None else row_budgets[0]
            else:
                of_rows = np.repeat(np.array(row_budgets, np.int64)[:, None], self.store.batch, 1)
                self.store.executor.overwrite(budget, of_rows)
            self._row_budgets = row_budgets

    def status(self, layer: int) -> int:
        """Bits of `PlanStatus` that a layer has met; waits for the device."""
        return int(self.store.executor.to_host(self.store.tables["status"][layer])[0])

    def is_tight(self, layer: int, length: int, row_budgets: RowBudgets) -> bool:
        """Whether so many bytes of a row may be too few for a plan of `length` tokens that is not compact."""
        of, rewind = self.store.layers[layer], self.store.rewind
        return row_budgets is not None and of.ample_nbytes(length, rewind) > row_budgets[layer]

    def holds(self, layer: int, length: int, row_budgets: RowBudgets, lookahead: int) -> bool:
        """Whether the bytes of a row hold `length` tokens and open pages for `lookahead` more."""
        of, rewind = self.store.layers[layer], self.store.rewind
        return row_budgets is None or of.smallest_nbytes(length, rewind, lookahead) <= row_budgets[layer]

    def reallocate(
        self,
        first: int,
        n: int,
        stream: int,
        lookaheads: Sequence[int],
        tight: Workspace | None = None,
    ) -> None:
        """Choose widths anew for n layers, and open pages for so many tokens of each.

        `tight`, from `tight_workspace`: bytes are few, so plans follow in it until one reports nothing; that
        waits for the device. Else `lookaheads` are the same for all.
        """
        if tight is not None:
            for layer, lookahead in enumerate(lookaheads, first):
                self._plan_again(layer, tight, stream, None, lookahead)
        else:  # where any page may have holes, any tokens may have to move
            workspace = self._decode if self.without_holes else self.tight_workspace(n)
            self._plan(first, n, workspace, stream, None, lookaheads[0])
        self.without_holes = self.without_holes or n == len(self.ladders)

    def tight_workspace(self, layers: int = 1) -> Workspace:
        """Take memory for plans of so many layers in which all their pages may change."""
        pages = self.store.batch * self.store.heads * self.store.entries
        return self._workspace(layers, pages, pages)

    def crop(self, end: int, cropped: int, row_budgets: RowBudgets, lookahead: int, stream: int) -> None:
        """Shorten all rows by `cropped` time steps to `end`, and plan them under `row_budgets` bytes.

        Open pages then have room for `lookahead` tokens. Waits for the device if rows have fewer bytes now.
        """
        shape, layers = self._shape(0), len(self.ladders)
        both = zip(self._row_budgets or (), row_budgets or (), strict=False)
        fallen = max((max(before - after, 0) for before, after in both), default=0)
        new_pages = dropped = shape.batch * shape.heads * shape.entries
        if self.without_holes:
            left_windows = LOOKAHEAD if any(layer.sliding_window for layer in self.store.layers) else 0
            new_pages, dropped = self._crop_bounds(shape, cropped + left_windows, fallen)
        workspace = self._workspace(layers, new_pages, dropped)
        self.set_row_budgets(row_budgets)
        self.kernels.crop_rows(end, stream)
        if fallen:
            self.store.tables["status"][...] &= ~RETRY
        self._plan(0, layers, workspace, stream, None, lookahead, cropped=True)
        self.without_holes = True
        if fallen:  # all demotions at once may take more memory than there is
            for layer in np.flatnonzero(self.store.executor.to_host(self.store.tables["status"]) & RETRY):
                self._plan_again(int(layer), workspace, stream, None, lookahead)

    def _crop_bounds(self, shape: PlanShape, tokens: int, nbytes: int) -> tuple[int, int]:
        """`crop_bounds` for all layers."""
        bounds = [crop_bounds(shape, ladder, tokens, nbytes) for ladder in set(self.ladders)]
        new_pages, dropped = (max(found) for found in zip(*bounds, strict=True))
        return new_pages, dropped

    def _workspace(self, layers: int, new_pages: int, dropped: int) -> Workspace:
        """Take memory for plans without new tokens, of `layers` layers at once or of fewer."""
        shape, kept = self._shape(0), self._decode
        if new_pages <= kept.max_new_pages and dropped <= kept.max_dropped:
            return kept
        each = max(workspace_nbytes(shape, new_pages, dropped), 1)
        at_once = max(1, min(layers, MAX_PENDING_NBYTES // each))
        with translated_out_of_memory("a plan of all pages"):
            made: Workspace = self.kernels.make_workspace(shape, at_once, new_pages, dropped)
        return made

    def take_waiting(
        self, layer: int, new: Any, workspace: Workspace, stream: int, lookahead: int, tight: bool = False
    ) -> None:
        """Plan a layer with tokens that have waited, and open pages for the next `lookahead`.

        Their pages are outside the plan's memory, so the new ones always find room; nothing waits, but where
        bytes are `tight`.
        """
        self._plan(layer, 1, workspace, stream, new, lookahead)
        if tight:
            self._plan_again(layer, workspace, stream, None, lookahead)

    def write_workspace(self, num_new: int, moves_stored: bool) -> Workspace:
        """Memory for `enqueue` of so many steps, the same until `synchronize`; taken before anything changes.

        `moves_stored`: plans may change pages of stored tokens, too.
        """
        if self._write_workspace is None or self._write_workspace[0] != (num_new, moves_stored):
            num_bh, shape = self.store.batch * self.store.heads, self._shape(num_new)
            pages = num_bh * self.store.entries if moves_stored else 0
            new_pages = num_bh * (num_new // TOKENS_PER_PAGE + 2 + shape.segments) + pages
            with translated_out_of_memory(f"the plan of {num_new} new tokens"):
                workspace = self.kernels.make_workspace(shape, 1, new_pages, max(pages, 1))
            self._write_workspace = (num_new, moves_stored), workspace
        return self._write_workspace[1]

    def enqueue(self, write: PendingWrite, *, last: bool) -> None:
        """Take in new tokens of a layer; `last`: of a step, so that the host waits for all of them.

        Until `synchronize`, which is called where many bytes wait for it, too, `write` keeps its arrays.
        """
        if not self._pending:
            self.store.tables["status"][...] &= ~(RETRY | OVER_BUDGET)
        self._plan(write.layer, 1, write.workspace, write.stream, write.new, 0)
        self._pending.append(write)
        kept = sum([int(x.nbytes) for x in write.arrays])  # as much as that of every layer before
        if last or kept * len(self._pending) > MAX_PENDING_NBYTES:
            self.synchronize()

    @property
    def has_pending(self) -> bool:
        """Whether new tokens may not be in yet, so that nothing may be done with their layers."""
        return len(self._pending) > 0

    def is_pending(self, layer: int) -> bool:
        """Whether new tokens of a layer may not be in yet."""
        return any(write.layer == layer for write in self._pending)

    def synchronize(self) -> None:
        """See to it that all new tokens are in; waits for the device if there are any."""
        waiting, self._pending, self._write_workspace = self._pending, [], None
        if not waiting:
            return
        status = self.store.executor.to_host(self.store.tables["status"])
        for write in waiting:
            if status[write.layer, 0]:
                new = write.new if status[write.layer, 0] & RETRY else None
                self._plan_again(write.layer, write.workspace, write.stream, new, 0)

    def _plan_again(self, layer: int, workspace: Workspace, stream: int, new: Any, lookahead: int) -> None:
        """Plan until a plan reports nothing: `new` tokens are in, all bytes within the budget.

        Where there was too little memory a plan has demoted what it could; where it had to make short chunks,
        the next one closes them up.
        """
        tables, to_host = self.store.tables, self.store.executor.to_host
        before: list[int] = []
        while True:
            tables["status"][layer] = 0
            self._plan(layer, 1, workspace, stream, new, lookahead)
            status = self.status(layer)
            if not status:
                return
            new = new if status & RETRY else None
            used = [status, *to_host(tables["used"][layer]).tolist()]
            if used == before:  # nothing was demoted, and nothing would be the next time
                raise RuntimeError(
                    f"the plan of layer {layer} has status {status}: its tables or its arena are too small"
                )
            before = used

    def _plan(
        self, first: int, n: int, workspace: Workspace, stream: int, new: Any, lookahead: int, **rules: Any
    ) -> None:
        """Plan as many layers at once as have one ladder and as the workspace is for."""
        for start in range(first, first + n, workspace.layers):
            part = range(start, min(start + workspace.layers, first + n))
            for _, alike in groupby(part, lambda i: (self.ladders[i], self.store.stores[i].in_blocks)):
                begin, *others = alike
                self._plan_run(begin, 1 + len(others), workspace, stream, new, lookahead, **rules)

    def _plan_run(
        self, first: int, n: int, workspace: Workspace, stream: int, new: Any, lookahead: int, **rules: Any
    ) -> None:
        """Plan layers of one ladder, and move tokens and pages as the plan says."""
        store, call = self.store.stores[first], dict[str, Any]()
        if new is not None:
            call = {"codes": int(new["importance"]), "valid": int(new["valid"])}
            call |= {"num_new": int(new["num_new"]), "first_position": int(new["first"])}
            call |= {"positions": int(new["positions"])}
        self.kernels.launch_plan(
            first, n, workspace, self.ladders[first], stream,
            fixed_nbytes=store.fixed_nbytes, lookahead=lookahead, **self._rules, **rules, **call,
        )  # fmt: skip
        nothing = np.zeros(1, NEW_TOKENS)[0]
        for phase, tokens in enumerate((nothing if new is None else new, nothing)):
            lists, groups = workspace.move_lists(phase), workspace.max_groups(phase)
            self.kernels.write_tokens(first, n, lists, groups, tokens, stream)
        copies = workspace.max_dropped
        self.kernels.copy_pages(first, n, workspace.move_lists(1), copies, stream)
