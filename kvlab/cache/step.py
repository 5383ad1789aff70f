"""The layers of a `MixedPrecisionCache` on any device: what a step launches, and when room is made.

A decode step of a layer is two launches: packed attention over the stored tokens, and the append, which adds
the new ones to its result and stores them in open pages. A step whose arrays lie as those of the last one
takes the host a short way (launches.py). Open pages count as live as soon as a plan has made them, so no
decode step changes a byte of the budget. When the open pages of a layer are full, a plan for all layers at
once chooses widths anew and opens others; the device does all of it and the host waits for nothing.
Steps of many tokens are planned and written at once (prefill.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.importance import Collector
from kvlab.cache.launches import KnownStep, Lse, StepCalls
from kvlab.cache.layers import Layer
from kvlab.cache.reallocation import LOOKAHEAD, Reallocator
from kvlab.cache.store import DeviceStore, move_rows, reorder_rows
from kvlab.cache.waiting import Merged, Waiting, merged_tokens
from kvlab.device import translated_out_of_memory
from kvlab.ops.cuda.plan import Workspace
from kvlab.ops.layer_state import MAX_NEW, new_tokens
from kvlab.ops.plan import first_seen
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.cache.budget import RowBudgets
    from kvlab.cache.options import Settings

__all__ = ["DeviceCache", "RowBudgetsOf"]

RowBudgetsOf = Callable[[int], "RowBudgets"]
NO_TOKENS = CudaView(0, (0, 0, 0, 0), (0, 0, 0, 0), "float16", 0)


class PlanMemory(NamedTuple):
    """What a plan works in, taken before anything changes.

    `merged`: tokens that wait, if any may, and the plan that takes them in. `tight`: plans of a layer that
    follow until one reports nothing, where bytes are few.
    """

    merged: tuple[Merged, Workspace] | None
    tight: Workspace | None


class DeviceCache:
    """The layers of a cache on one device: arenas, tables, workspaces and what works on them.

    Parameters
    ----------
    layers : sequence of Layer
    batch : int
    settings : Settings
    executor : Executor
        Who carries out what the host decides.
    like : array
        On the device; memory comes from its framework.
    capacity : int
        Tokens of a row that there is room for.
    row_budgets_of : callable
        From the length of a row to the bytes that it may take in each layer; None: no limit.
    """

    def __init__(
        self, layers: Sequence[Layer], batch: int, settings: Settings, executor: Any, like: Any,
        capacity: int, row_budgets_of: RowBudgetsOf,
    ) -> None:  # fmt: skip
        self.layers, self.settings, self.executor, self.like = layers, settings, executor, like
        self.device = executor.view(like, "q").device
        self.group = settings.num_heads_q // layers[0].store.num_heads_kv
        self.lengths, self.since, self.lookahead, self.dropped = ([0] * len(layers) for _ in range(4))
        windows = [layer.sliding_window for layer in layers if layer.sliding_window]
        self.max_new = min([MAX_NEW, *windows])  # tokens of a step that all see each other
        self.observes = [layer.observes for layer in layers]
        self.memory_epoch = 0
        self.make(batch, capacity, row_budgets_of)
        self.store.clear_arenas()

    def make(
        self, batch: int, capacity: int, row_budgets_of: RowBudgetsOf,
        fill: Callable[[DeviceStore], None] | None = None,
    ) -> None:  # fmt: skip
        """Take memory for so many tokens of a row, and forget the old; `fill` is given the pages at once."""
        row_budgets, holds = row_budgets_of(capacity), self._holds_waiting(row_budgets_of)
        with translated_out_of_memory(f"a cache of {capacity} tokens a row"):
            store = DeviceStore(
                self.layers, batch, self.executor, self.like, capacity, row_budgets, holds,
                self.settings.rewind,
            )  # fmt: skip
            if fill is not None:
                fill(store)
            reallocator = Reallocator(store, self.settings)
        self.row_budgets_of, self.waiting = row_budgets_of, Waiting(store)
        self._use(reallocator)

    def _holds_waiting(self, row_budgets_of: RowBudgetsOf) -> list[bool]:
        """By layer: whether rows have bytes for tokens that wait."""
        row_budgets = row_budgets_of(0)
        if row_budgets is None:
            return [layer.takes_mean for layer in self.layers]
        kinds = [*zip(self.layers, row_budgets, strict=True)]
        found = {kind: kind[0].waits_within(kind[1]) for kind in set(kinds)}  # layers are often alike
        return [found[kind] for kind in kinds]

    def _use(self, reallocator: Reallocator) -> None:
        """Work on the pages of a reallocator from now on."""
        self.reallocator, settings = reallocator, self.settings
        self.store, self.kernels = reallocator.store, reallocator.kernels
        self.memory_epoch += 1
        heads = settings.num_heads_q
        decay = settings.ema_decay if settings.function is None else 0.0  # only what was received last counts
        self.collector = Collector(self.kernels, heads, settings.importance, decay)
        self.calls = StepCalls(self.kernels, heads, self.collector, self.waiting)
        self.known_steps: list[KnownStep | None] = [None] * len(self.layers)

    # ---- sizes ---------------------------------------------------------------------------------------------

    def read(self, *names: str) -> list[NDArray[Any]]:
        """Copies of tables on the host; waits for the device."""
        self.reallocator.synchronize()
        return self.store.read(*names)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of device memory held: arenas, tables and workspaces."""
        return self.reallocator.nbytes + self.calls.nbytes + self.collector.nbytes

    # ---- pages ---------------------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether scores are kept, or new tokens may not be in yet, so that pages must not change."""
        return self.collector.has_pending or self.reallocator.has_pending

    def flush(self, stream: int) -> None:
        """Bring importance up to date and see that new tokens are in, before anything changes pages."""
        self.collector.flush(stream)
        self.reallocator.synchronize()

    def freeze(
        self,
        layer: int,
        new: Any,
        merged: Merged | None,
        lookahead: int,
        stream: int,
        *,
        queries: CudaView | None = None,
        force: bool = False,
    ) -> None:
        """Take the frames that are due, and see to tokens that wait: see `kernels.freeze_means`."""
        addresses, pointer = [0] * 5, self.executor.pointer
        if merged is not None:
            arrays = merged.k, merged.v, merged.valid, merged.importance, merged.positions
            addresses = [0 if x is None else pointer(x) for x in arrays]
        before, force = 0 if merged is None else merged.before, force or not self.waiting.holds[layer]
        self.kernels.freeze_means(
            layer, new, addresses, before, stream, lookahead=lookahead, force=force, queries=queries
        )
        self.known_steps[layer] = None

    # ---- what a step does ----------------------------------------------------------------------------------

    def step(
        self, layer: int, q: Any, views: list[CudaView], valid: int, scale: float, softcap: float
    ) -> Any:
        """A step of few tokens, for which there is room: `views` of q, k and v, `valid` an address or 0."""
        query, executor = views[0], self.executor
        out = executor.empty(query.shape, query.dtype, q)
        address = executor.view(out, "out").pointer
        self.attend_stored(layer, q, query, address, scale, softcap)
        self.add_new(layer, q, views, valid, address, scale, softcap)
        return out

    def attend_stored(
        self, layer: int, q: Any, view: CudaView, out: int, scale: float, softcap: float
    ) -> None:
        """The first half of a step: attention over stored tokens, written to the address `out`."""
        num_new, stream = view.shape[1], self.executor.stream(q)
        self.reallocator.synchronize()
        attend, _, lse = self._calls(layer, q, num_new, scale, softcap)
        self.collector.before(layer, num_new, self.since[layer] + num_new, stream)
        if self.lengths[layer]:
            attend(view, out, lse.pointer, stream)

    def add_new(
        self, layer: int, q: Any, views: list[CudaView], valid: int, out: int, scale: float, softcap: float
    ) -> None:
        """The second half: new tokens are added to the result, and stored."""
        num_new, stream = views[0].shape[1], self.executor.stream(q)
        collects = self.collects(layer, num_new)
        _, append, lse = self._calls(layer, q, num_new, scale, softcap)
        if valid:
            self.waiting.mask(layer)
        append(*views, valid, out, lse.pointer, self.lengths[layer] > 0, stream)
        self.collector.after(layer, num_new, collects, stream)
        self.count(layer, num_new, collects)

    def _calls(self, layer: int, q: Any, num_new: int, scale: float, softcap: float) -> tuple[Any, Any, Lse]:
        return self.calls.step(layer, q, num_new, scale, softcap, self.collects(layer, num_new))

    def opens_pages(self, layer: int, num_new: int, row_budgets: RowBudgets) -> bool:
        """Whether the bytes of a row hold open pages for `num_new` tokens; else a plan takes them in now."""
        return self.waiting.mode(layer) == "all" or self.reallocator.holds(
            layer, self.lengths[layer], row_budgets, num_new
        )

    def is_decode(self, num_new: int) -> bool:
        """Whether a step of so many tokens is launched by `step`, not by `prefill.step`."""
        fits = 0 < num_new <= self.max_new and self.group <= self.executor.max_group
        return fits and self.settings.function is None

    def append(self, layer: int, k: Any, views: list[CudaView], valid: int) -> None:
        """Store few tokens, for which there is room; arguments as in `step`."""
        num_new, stream = views[0].shape[1], self.executor.stream(k)
        call = self.calls.append(layer, num_new, 1.0, 0.0, has_queries=False)
        self.flush(stream)
        if valid:
            self.waiting.mask(layer)
        call(None, views[0], views[1], valid, 0, 0, False, stream)
        self.count(layer, num_new, False)

    def attend(self, layer: int, q: Any, scale: float, softcap: float) -> Any:
        """See `MixedPrecisionCache.attend`."""
        self.reallocator.synchronize()
        out: Any = self.calls.attend(layer, q, self.executor.view(q, "q"), scale, softcap, 0)[0]
        self.calls.forget()
        return out

    def count(self, layer: int, num_new: int, collected: bool) -> None:
        """Count a step that was launched."""
        self.lengths[layer] += num_new
        self.since[layer] = 0 if collected else self.since[layer] + num_new
        self.lookahead[layer] -= num_new

    def collects(self, layer: int, num_new: int) -> bool:
        """Whether a step collects the attention mass of stored tokens."""
        due = self.since[layer] + num_new >= self.settings.realloc_every
        return due and self.lengths[layer] > 0 and self.observes[layer] == "mass"

    # ---- room ----------------------------------------------------------------------------------------------

    def row_budgets(self, layer: int, num_new: int) -> RowBudgets:
        """Bytes that a row may take in each layer, with so many new tokens of one."""
        return self.row_budgets_of(self.lengths[layer] + num_new)

    def ensure_open_pages(self, layer: int, num_new: int) -> bool:
        """See to open pages for a step; false where bytes are too few, so that a plan takes its tokens in.

        Layers that stand alike are planned together. Where pages may have holes all layers are planned in any
        case: only together do they lose their holes.
        """
        if self.lookahead[layer] >= num_new:
            return True
        row_budgets = self.row_budgets(layer, num_new)
        opens = self.opens_pages(layer, num_new, row_budgets)
        if opens:
            alike = len(set(zip(self.lengths, self.lookahead, strict=True))) == 1
            whole = alike or not self.reallocator.without_holes
            self._plan(0 if whole else layer, len(self.layers) if whole else 1, num_new, row_budgets)
        return opens

    def reallocate(self, num_new: int, row_budgets: RowBudgets) -> None:
        """Choose widths anew for all layers and make room for the next `num_new` tokens or more."""
        self._plan(0, len(self.layers), num_new, row_budgets)

    def _plan(
        self, first: int, n: int, num_new: int, row_budgets: RowBudgets, memory: PlanMemory | None = None
    ) -> None:
        stream, layers = self.executor.stream(self.like), range(first, first + n)
        self.flush(stream)
        self.reallocator.set_row_budgets(row_budgets)
        is_tight, lengths = self.reallocator.is_tight, self.lengths
        tight = any(is_tight(layer, lengths[layer] + LOOKAHEAD, row_budgets) for layer in layers)
        # Where bytes are few, another layer may have too few of them for an open page.
        opens = [not tight or self.opens_pages(layer, num_new, row_budgets) for layer in layers]
        lookaheads = [(num_new if tight else LOOKAHEAD) * opened for opened in opens]
        memory = self._memory_of_plan(layers, tight) if memory is None else memory
        for layer in layers:
            self.count_dropped(layer, lengths[layer])
        if memory.merged is None:
            self.reallocator.reallocate(first, n, stream, lookaheads, memory.tight)
            self.lookahead[first : first + n] = lookaheads
            return
        merged, workspace = memory.merged
        for layer, opened, lookahead in zip(layers, opens, lookaheads, strict=True):
            self.lookahead[layer] = self._look_after_waiting(
                layer, num_new * opened, lookahead, merged, workspace, memory.tight, stream
            )

    def _memory_of_plan(self, layers: Sequence[int], tight: bool) -> PlanMemory:
        """Take what `_plan` needs, before anything changes."""
        repeats = self.reallocator.tight_workspace() if tight else None
        if not any(self.waiting.any(layer) for layer in layers):
            return PlanMemory(None, repeats)
        return PlanMemory(self._merged(layers, tight), repeats)

    def _merged(self, layers: Sequence[int], tight: bool) -> tuple[Merged, Workspace]:
        """Memory for the waiting tokens of any layer, taken before anything changes."""
        store = self.layers[0].store
        shape = self.store.batch, 0, store.num_heads_kv, store.head_dim
        dtype = self.executor.input_dtype(store.dtype)
        merged = merged_tokens(shape, self.executor, self.like, dtype, waiting=True)
        stored = tight or any(self.waiting.mode(layer) != "all" for layer in layers)
        return merged, self.reallocator.write_workspace(merged.before, stored)

    def _look_after_waiting(
        self, layer: int, num_new: int, lookahead: int, merged: Merged, workspace: Workspace,
        tight: Workspace | None, stream: int,
    ) -> int:  # fmt: skip
        """Open pages for the next tokens of a layer whose rows may wait, and return for how many."""
        waiting, length = self.waiting, self.lengths[layer]
        waiting.advance(layer, length)
        mode, ahead = waiting.mode(layer), max(num_new, lookahead)
        freezes = waiting.may_freeze(layer, length + ahead)
        with_tokens = freezes and waiting.holds[layer]
        if not freezes:
            ahead = waiting.lookahead(layer, num_new, lookahead)
        nothing = new_tokens(NO_TOKENS, NO_TOKENS, 0, 0, 0, length)
        self.freeze(layer, nothing, merged if with_tokens else None, ahead, stream)
        waiting.frozen(layer, length + ahead)
        if with_tokens:
            new = merged.new_tokens(NO_TOKENS, NO_TOKENS, 0, length)
            self.reallocator.take_waiting(layer, new, workspace, stream, ahead, tight is not None)
        elif mode != "all":
            self.reallocator.reallocate(layer, 1, stream, [ahead], tight)
        return waiting.lookahead(layer, num_new, ahead)

    def count_dropped(self, layer: int, length: int) -> None:
        """Say that a plan of a layer with so many tokens drops those that its sliding window has passed."""
        self.dropped[layer] = max(self.dropped[layer], first_seen(length, self.store.reach(layer)))

    # ---- rare operations -----------------------------------------------------------------------------------

    def check_crop(self, end: int) -> None:
        """Refuse to forget the time steps from `end` on, if what is then seen was dropped."""
        for layer, dropped in enumerate(self.dropped):
            window = self.layers[layer].sliding_window
            if window and end and first_seen(end, window) < dropped:
                raise ValueError(
                    f"n={self.lengths[layer] - end}: at position {end} the sliding window of layer {layer}, "
                    f"{window} tokens, begins at {first_seen(end, window)}, and tokens before {dropped} "
                    "have left it and were dropped: crop no more tokens than the option `rewind` says "
                    f"({self.settings.rewind}), or read the text again"
                )

    def crop(self, end: int, row_budgets: RowBudgets) -> None:
        """Forget the time steps from `end` on, and keep to `row_budgets` bytes a row of each layer."""
        stream, layers = self.executor.stream(self.like), range(len(self.layers))
        self.flush(stream)
        # Where bytes are few, tokens are dropped first and the rest planned then, in memory taken before.
        apart = any(self.reallocator.is_tight(layer, end + LOOKAHEAD, row_budgets) for layer in layers)
        memory = self._memory_of_plan(layers, True) if apart and end else None
        cropped = max(self.lengths) - end
        opened = LOOKAHEAD if end and not apart else 0  # an empty cache has no pages
        self.reallocator.crop(end, cropped, None if apart else row_budgets, opened, stream)
        for layer in layers:
            self.waiting.crop(layer, self.lengths[layer], end)
            self.lengths[layer] = end
            self.dropped[layer] = min(self.dropped[layer], end)
            self.lookahead[layer] = 0 if self.waiting.any(layer) else opened
        if memory is not None:
            self._plan(0, len(self.layers), 0, row_budgets, memory)

    def grow(self, capacity: int) -> None:
        """Make room for longer sequences."""
        self.take_rows(np.arange(self.store.batch), capacity, self.row_budgets_of)

    def take_rows(self, rows: Any, capacity: int, row_budgets_of: RowBudgetsOf) -> None:
        """Let row i become row `rows[i]`; an error leaves the cache as it was.

        As many rows for as many tokens stay in their memory; others get new memory (see `make`).
        """
        stream, store = self.executor.stream(self.like), self.store
        self.flush(stream)
        if len(rows) != store.batch or capacity != store.capacity:
            self._move_rows(rows, capacity, row_budgets_of, stream)
        elif not np.array_equal(rows, np.arange(store.batch)):
            waits = [self.waiting.mode(layer) != "none" for layer in range(len(self.layers))]
            reorder_rows(store, self.kernels, rows, waits, stream)
            self.waiting.take_rows(self.waiting, rows)

    def _move_rows(self, rows: Any, capacity: int, row_budgets_of: RowBudgetsOf, stream: int) -> None:
        old, length, source = dict(vars(self)), max(self.lengths), self.store
        now, then = row_budgets_of(length), self.row_budgets_of(length)
        fewer = any(after < before for after, before in zip(now or (), then or (), strict=False))
        ending = self._layers_without_waiting_pages(row_budgets_of)

        def move(store: DeviceStore) -> None:
            move_rows(source, store, rows, stream)

        try:
            # Where nothing has to change before, the device copies while the host lays down the rest.
            self.make(len(rows), capacity, row_budgets_of, None if ending or fewer else move)
            if ending or fewer:
                new = {name: value for name, value in vars(self).items() if value is not old[name]}
                vars(self).update(old)
                self._end_waiting(ending, stream)
                if fewer:
                    self.crop(length, now)  # drops no token
                vars(self).update(new)
                move(self.store)
        except BaseException:
            vars(self).update(old)
            raise
        self.reallocator.restart(without_holes=old["reallocator"].without_holes)
        self.waiting.take_rows(old["waiting"], rows)

    def _layers_without_waiting_pages(self, row_budgets_of: RowBudgetsOf) -> list[int]:
        """Layers with tokens that wait, for which rows of so many bytes have no pages."""
        if not self.waiting.rows.any():
            return []
        layers = [i for i, holds in enumerate(self._holds_waiting(row_budgets_of)) if not holds]
        for layer in layers:
            self.waiting.advance(layer, self.lengths[layer])
        return [layer for layer in layers if self.waiting.hold_tokens(layer)]

    def _end_waiting(self, layers: Sequence[int], stream: int) -> None:
        """Take the frames of rows that wait, however few tokens they have, and store these."""
        if not layers:
            return
        merged, workspace = self._merged(layers, False)
        for layer in layers:
            length = self.lengths[layer]
            nothing = new_tokens(NO_TOKENS, NO_TOKENS, 0, 0, 0, length)
            self.freeze(layer, nothing, merged, 0, stream, force=True)
            self.waiting.rows[layer] = False
            new = merged.new_tokens(NO_TOKENS, NO_TOKENS, 0, length)
            self.reallocator.take_waiting(layer, new, workspace, stream, 0)
            self.lookahead[layer] = 0
            self.count_dropped(layer, length)

    def allow_rewind(self, tokens: int, row_budgets_of: RowBudgetsOf) -> None:
        """Let plans keep so many tokens beyond sliding windows from now on; an error changes nothing."""
        before, self.settings = self.settings, replace(self.settings, rewind=tokens)
        if any(layer.sliding_window for layer in self.layers):
            stream = self.executor.stream(self.like)
            try:
                self.flush(stream)
                self._move_rows(np.arange(self.store.batch), self.store.capacity, row_budgets_of, stream)
            except BaseException:
                self.settings = before
                raise

    def copy(self) -> DeviceCache:
        """Return another cache that holds the same."""
        self.flush(self.executor.stream(self.like))
        other = object.__new__(DeviceCache)
        vars(other).update({name: x.copy() if isinstance(x, list) else x for name, x in vars(self).items()})
        other.waiting = Waiting(self.store)
        other.waiting.take_rows(self.waiting, np.arange(self.store.batch))
        other._use(self.reallocator.copy())
        return other

    def clear(self) -> None:
        """Forget everything."""
        self.collector.forget()
        self.store.clear()
        self.waiting.clear()
        self.lengths, self.since, self.lookahead, self.dropped = ([0] * len(self.layers) for _ in range(4))
        self.reallocator.restart(without_holes=True)
