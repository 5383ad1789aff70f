"""What a cache holds on a GPU: memory of all layers, and what the host counts of each.

`layers.DeviceCache` does the work of steps with it, and `host` what the CPU does for it. The host
knows lengths and how much room it has made, nothing else of what lies in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kvlab.cache.frame import LAST
from kvlab.cache.launches import KnownStep, StepCalls
from kvlab.cache.layer import Layer
from kvlab.cache.reallocation import MOST_ROOM, Changes, ladder_of
from kvlab.cache.score import Collector
from kvlab.cache.waiting import Merged, Waiting, waits_within
from kvlab.ops.cuda.pages import MAX_STEPS
from kvlab.pages import TOKENS_PER_PAGE

__all__ = ["DeviceState", "Settings", "ShareOf"]

ShareOf = Callable[[int], "int | None"]


@dataclass(frozen=True)
class Settings:
    """What a cache is told once; names as for `MixedPrecisionCache`.

    `by_function`: importance is a function of attention mass, called on the host, and `importance` that of
    kernels which give the mass.
    """

    num_heads_q: int
    sink: int
    recent: int
    residual: int
    allocator: str
    realloc_every: int
    ema_decay: float
    importance: str
    by_function: bool


class DeviceState:
    """Arenas, tables and workspaces of all layers on one GPU.

    Parameters
    ----------
    layers : sequence of Layer
    batch : int
    settings : Settings
    executor : Executor
        Who carries out what the host decides.
    like : array
        On the GPU; memory comes from its framework.
    capacity : int
        Tokens of a row that there is room for.
    share_of : callable
        From the length of a row to the bytes that it may take in a layer; None: no limit.
    """

    def __init__(
        self, layers: Sequence[Layer], batch: int, settings: Settings, executor: Any, like: Any,
        capacity: int, share_of: ShareOf,
    ) -> None:  # fmt: skip
        store, self.executor, self.batch = layers[0].store, executor, batch
        self.layers, self.settings, self.like = layers, settings, like
        self.device = executor.view(like, "q").device
        self.pairs, self.group = batch * store.num_heads_kv, settings.num_heads_q // store.num_heads_kv
        self.lengths, self.since, self.room = ([0] * len(layers) for _ in range(3))
        self.observes = [layer.observes for layer in layers]
        self.generation = 0
        self.make(capacity, share_of)
        self.store.clear_arenas()

    def make(self, capacity: int, share_of: ShareOf) -> None:
        """Take memory for so many tokens of a row, and forget the old."""
        takes = [layer.takes_mean for layer in self.layers]
        share = share_of(0)
        holds = [waits_within(layer, ladder_of(layer.store), share) for layer in self.layers]
        settings = self.settings
        often = max(settings.realloc_every, MOST_ROOM if settings.allocator == "dp" else MAX_STEPS)
        self.changes = Changes(
            [layer.stored for layer in self.layers],
            self.batch,
            self.executor,
            self.like,
            capacity,
            _arena_share(self.layers, capacity, share_of(capacity)),
            sink=settings.sink,
            recent=settings.recent,
            room=min(often, MOST_ROOM),
            by_position=settings.importance == "recency",
            window=settings.residual,
            allocator=settings.allocator,
            takes_mean=takes,
            holds_waiting=holds,
        )
        self.store, self.kernels = self.changes.store, self.changes.kernels
        self.capacity, self.share_of = capacity, share_of
        self.waiting = Waiting(takes, holds, self.store.batch)
        self.generation += 1
        heads = settings.num_heads_q
        decay = 0.0 if settings.by_function else settings.ema_decay  # only what was received last counts
        self.collector = Collector(self.kernels, heads, settings.importance, decay)
        self.calls = StepCalls(self.kernels, heads, self.collector, self.waiting)
        self.repeated: list[KnownStep | None] = [None] * len(self.layers)

    # ---- sizes ---------------------------------------------------------------------------------------------

    def used(self) -> Any:
        """Number of live pages, (layers, rungs), waiting ones behind the last rung; waits for the device."""
        used, waits, num_pages = self.read("used", "waits", "num_pages")
        for layer, pages in enumerate((num_pages * (waits > 0)[..., None]).sum((1, 2))):
            if self.store.holds_waiting[layer]:
                used[layer, len(self.store.stores[layer].layouts)] = pages
        return used

    def read(self, *names: str) -> list[NDArray[Any]]:
        """Copies of tables on the host; waits for the device."""
        self.changes.confirm()
        return self.store.read(*names)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of device memory held: arenas, tables and workspaces."""
        return self.changes.nbytes + self.calls.nbytes + self.collector.nbytes

    # ---- pages ---------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether scores are kept, or new tokens may not be in yet, so that pages must not change."""
        return self.collector.pending or self.changes.unconfirmed

    def settle(self, stream: int) -> None:
        """Bring importance up to date and see that new tokens are in, before anything changes pages."""
        self.collector.settle(stream)
        self.changes.confirm()

    def freeze(
        self, layer: int, fresh: Any, merged: Merged | None, room: int, stream: int, *, force: bool = False
    ) -> None:
        """Take the means that are due, and see to tokens that wait: see `kernels.freeze_means`."""
        addresses, pointer = [0] * 5, self.executor.pointer
        if merged is not None:
            arrays = merged.k, merged.v, merged.valid, merged.importance, merged.positions
            addresses = [0 if x is None else pointer(x) for x in arrays]
        before, force = 0 if merged is None else merged.before, force or not self.waiting.holds[layer]
        self.kernels.freeze_means(layer, fresh, addresses, before, stream, room=room, force=force)
        self.repeated[layer] = None


def _arena_share(layers: Sequence[Layer], capacity: int, share: int | None) -> int | None:
    """Bytes of a row to have memory for; None: all tokens at the top rung, which may be the window's."""
    if share is not None or not layers[0].residual:
        return share
    needs = []
    for layer in layers:
        store, exact = layer.store, layer.stored.page_bytes(len(layer.stored.ladder) - 1)
        pages = capacity // TOKENS_PER_PAGE + (1 + (capacity >> 16)) * len(store.ladder)
        longest = max(layer.residual, LAST - 1) if layer.takes_mean else layer.residual
        window = -(-longest // TOKENS_PER_PAGE) + 2
        packed = pages * store.page_bytes(len(store.ladder) - 1)
        needs.append(store.num_heads_kv * (packed + window * exact) + store.fixed_nbytes)
    return max(needs)
