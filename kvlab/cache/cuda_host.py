"""What the CPU does for a cache on a GPU: rare operations, and plans for which there is no kernel.

The layers of the CPU are empty while a cache is on a GPU. For crops, other rows and files they borrow what it
holds (cuda_exchange.py), and give it back changed. So do they where widths are chosen by another allocator
than "greedy", where a residual window is kept (cuda_window.py), and where bytes are so few that partly filled
pages have to be closed up (cuda_tight.py). All of it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import current_stream, to_host
from kvlab.cache.cuda_exchange import from_layers, to_layers
from kvlab.cache.cuda_tight import reserve_nbytes
from kvlab.cache.cuda_window import ladder_on_gpu, window_nbytes
from kvlab.cache.layer import Arrival, Layer
from kvlab.cache.pages import TOKENS_PER_PAGE, decode_importance
from kvlab.cache.store import LayerStore

if TYPE_CHECKING:
    from kvlab.cache.cuda_cache import DeviceCache

__all__ = [
    "admit",
    "arena_share",
    "borrowed",
    "choose",
    "consolidate",
    "lend",
    "store_on_gpu",
    "take_back",
]

ALL = slice(None)


def store_on_gpu(layer: Layer) -> LayerStore:
    """The shape of a layer's pages on the GPU: that on the CPU, or one with a rung for the window."""
    store = layer.store
    if not layer.residual:
        return store
    ladder = ladder_on_gpu(store.whole_ladder, layer.residual)
    return LayerStore(ladder, store.batch, store.num_heads_kv, store.head_dim, store.dtype)


def arena_share(layers: Sequence[Layer], capacity: int, share: int | None) -> int | None:
    """Bytes of a row to have memory for; None: all tokens at the top rung, which may be the window's."""
    if share is not None or not layers[0].residual:
        return share
    needs = []
    for layer in layers:
        store, exact = layer.store, store_on_gpu(layer)
        pages = capacity // TOKENS_PER_PAGE + (1 + (capacity >> 16)) * len(store.ladder)
        window = exact.page_bytes(len(exact.ladder) - 1)
        needs.append(
            store.num_heads_kv * pages * store.page_bytes(len(store.ladder) - 1)
            + window_nbytes(layer.residual, store.num_heads_kv, window)
            + store.fixed_nbytes
        )
    return max(needs)


def lend(cache: DeviceCache, which: slice = ALL) -> None:
    """Fill layers of the CPU with what the device holds."""
    cache.settle(current_stream(cache.like))
    numbers = range(len(cache.layers))[which]
    to_layers(cache.store, cache.layers, cache.lengths, numbers)
    for number in numbers:
        cache.layers[number].since_collection = cache.since[number]


def take_back(cache: DeviceCache, which: slice = ALL) -> None:
    """Move what layers of the CPU hold to the device, which has none of it."""
    numbers = range(len(cache.layers))[which]
    from_layers(cache.store, cache.layers, numbers)
    for number in numbers:
        layer = cache.layers[number]
        cache.lengths[number], cache.since[number] = layer.seqlen, layer.since_collection
        cache.room[number] = 0
        layer.clear()
    cache.changes.restart(tidy=False)


@contextmanager
def borrowed(cache: DeviceCache, which: slice = ALL) -> Iterator[None]:
    """Let some layers of the CPU change what they hold, rows and lengths aside."""
    lend(cache, which)
    try:
        yield
    finally:
        cache.store.clear(which)
        take_back(cache, which)


def admit(
    cache: DeviceCache, layer: int, new: tuple[Any, Any], valid: Any, codes: Any, share: int | None
) -> None:
    """Let the CPU store new tokens of one layer; `codes` say their attention mass, if it was observed."""
    state, since, steps = cache.layers[layer], cache.since[layer], new[0].shape[1]
    k, v = (to_host(x.float() if hasattr(x, "float") else x).astype(np.float32) for x in new)
    use = np.ones(k.shape[:2], bool) if valid is None else to_host(valid)
    with borrowed(cache, slice(layer, layer + 1)):
        mass = None
        if codes is not None:
            seen = decode_importance(to_host(codes)).reshape(len(k), -1, steps)
            longest = max(map(len, state.windows), default=0)
            mass = np.zeros((*seen.shape[:2], longest + steps), np.float32)
            mass[:, :, longest:] = seen
            for row, window in enumerate(state.windows):
                mass[row, :, longest - len(window) : longest] = window.observed
        state.commit(Arrival(k, v, use, mass), _share(cache, layer, share, 0, use))
    cache.lengths[layer], cache.since[layer] = cache.lengths[layer] - steps, since  # counted by the caller
    cache.room[layer] = steps


def choose(cache: DeviceCache, which: slice, share: int | None) -> None:
    """Let the CPU choose widths and what leaves the window."""
    with borrowed(cache, which):
        for number, layer in list(enumerate(cache.layers))[which]:
            store = layer.store
            nothing = np.zeros((store.batch, 0, store.num_heads_kv, store.head_dim), np.float32)
            none = Arrival(nothing, nothing, np.zeros((store.batch, 0), bool))
            layer.commit(none, _share(cache, number, share, cache.changes.room, none.valid))
    cache.changes.set_share(share)


def _share(
    cache: DeviceCache, layer: int, share: int | None, room: int, new: NDArray[np.bool_]
) -> int | None:
    """Bytes of a row for the CPU, if pages of the window and for tokens to come are to fit, too.

    The CPU counts the tokens of a window, which holds `new` ones (batch, steps) as well, not its pages.
    """
    if share is None or not len(new):
        return share
    state, store = cache.layers[layer], cache.changes.store.stores[layer]
    if not cache.settings.residual:
        ladder = cache.changes.ladders[layer]
        return share - reserve_nbytes(cache.lengths[layer], room, True, store.num_heads_kv, ladder)
    pages = window_nbytes(
        cache.settings.residual, store.num_heads_kv, store.page_bytes(len(store.ladder) - 1)
    )
    exact = min(len(window) + int(use.sum()) for window, use in zip(state.windows, new, strict=True))
    return share - pages + min(exact, cache.settings.residual) * state.windows[0].token_nbytes


def consolidate(cache: DeviceCache, steps: int, share: int | None, *, to_come: bool) -> None:
    """Let the CPU put all tokens into as few pages as leave room for `steps` more."""
    assert share is not None
    with borrowed(cache):
        for layer, length, ladder in zip(cache.layers, cache.lengths, cache.changes.ladders, strict=True):
            reserve = reserve_nbytes(length, steps, to_come, layer.store.num_heads_kv, ladder)
            layer.carry_out(layer.shrink(np.arange(layer.store.batch), share - reserve))
    cache.changes.set_share(share)
