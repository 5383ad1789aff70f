"""What the CPU does for a cache on a GPU: rare operations, and plans for which there is no kernel.

The layers of the CPU are empty while a cache is on a GPU. For crops, other rows and files they borrow what it
holds (exchange.py), and give it back changed. So do they where widths are chosen by another allocator
than "greedy", where a residual window is kept (window.py), and where bytes are so few that partly filled
pages have to be closed up (tight.py). All of it waits for the device, which keeps what it holds until it gets
that back: an error on the way changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cuda.changes import ladder_of
from kvlab.cache.cuda.exchange import from_layer, to_layers
from kvlab.cache.cuda.state import DeviceState
from kvlab.cache.cuda.tight import guaranteed_nbytes, reserve_nbytes
from kvlab.cache.cuda.waiting import takes_mean
from kvlab.cache.cuda.window import window_nbytes
from kvlab.cache.frame import LAST, key_mean
from kvlab.cache.layer import Arrival, Layer
from kvlab.device import translated_out_of_memory
from kvlab.pages import decode_importance

__all__ = [
    "admit",
    "borrowed",
    "choose",
    "consolidate",
    "lent",
    "take_back",
]

ALL = slice(None)


@contextmanager
def lent(cache: DeviceState, which: slice = ALL) -> Iterator[None]:
    """Let some layers of the CPU hold what the device does; in the end they are empty again."""
    layers = cache.layers[which]
    try:
        with translated_out_of_memory("the pages of a cache on the host"):
            cache.settle(cache.executor.stream(cache.like))
            to_layers(cache.store, cache.layers, cache.lengths, range(len(cache.layers))[which])
            for layer, since, has_mean in zip(layers, cache.since[which], cache.has_mean[which], strict=True):
                layer.since_collection = since
                if not takes_mean(layer):
                    layer.has_mean[:] = has_mean
            yield
    finally:
        for layer in layers:
            layer.store.batch = cache.store.batch  # another one if the rows were to change and did not
            layer.clear()


def take_back(cache: DeviceState, which: slice = ALL) -> None:
    """Move what layers of the CPU hold to the device, in place of what it has of them."""
    for number in range(len(cache.layers))[which]:
        layer = cache.layers[number]
        _end_waiting(cache, number)
        from_layer(cache.store, layer, number)
        cache.lengths[number], cache.since[number] = layer.seqlen, layer.since_collection
        cache.room[number], cache.repeated[number] = 0, None
        cache.has_mean[number] = layer.has_mean.copy()
        exact = np.array([len(window) for window in layer.windows], np.int64)
        cache.waiting.set(number, ~layer.has_mean, exact, layer.seqlen)
        cache.changes.restart(tidy=False)


def _end_waiting(cache: DeviceState, number: int) -> None:
    """Pack exact tokens that have no place on the device: of rows with a mean, or with too few bytes."""
    layer = cache.layers[number]
    if layer.residual:
        return
    for row in np.flatnonzero(~layer.has_mean):
        position = layer.windows[row].position
        if not len(position):
            continue
        if not cache.waiting.holds[number] or position[0] >> 16 != position[-1] >> 16:
            _take_mean(layer, int(row))
    if any(len(window) for window, has in zip(layer.windows, layer.has_mean, strict=True) if has):
        since = layer.since_collection
        layer.commit(_nothing(layer), cache.share_of(layer.seqlen))
        layer.since_collection = since


def _take_mean(layer: Layer, row: int) -> None:
    """Freeze the mean of a row on the CPU, of the tokens that there are."""
    layer.store.k_mean[row] = key_mean(layer.windows[row].k[:LAST].astype(np.float32))
    layer.has_mean[row] = True


def _nothing(layer: Layer) -> Arrival:
    """No new tokens."""
    store = layer.store
    vectors = np.zeros((store.batch, 0, store.num_heads_kv, store.head_dim), np.float32)
    return Arrival(vectors, vectors, np.zeros((store.batch, 0), bool))


@contextmanager
def borrowed(cache: DeviceState, which: slice = ALL) -> Iterator[None]:
    """Let some layers of the CPU change what they hold, rows and lengths aside."""
    with lent(cache, which):
        yield
        take_back(cache, which)


def admit(
    cache: DeviceState, layer: int, new: tuple[Any, Any], valid: Any, codes: Any, share: int | None
) -> None:
    """Let the CPU store new tokens of one layer; `codes` say their attention mass, if it was observed."""
    state, since, steps = cache.layers[layer], cache.since[layer], new[0].shape[1]
    to_host = cache.executor.to_host
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


def choose(cache: DeviceState, which: slice, share: int | None) -> None:
    """Let the CPU choose widths and what leaves the window."""
    with borrowed(cache, which):
        for number, layer in list(enumerate(cache.layers))[which]:
            none = _nothing(layer)
            layer.commit(none, _share(cache, number, share, cache.changes.room, none.valid))
    cache.changes.set_share(share)


def _share(
    cache: DeviceState, layer: int, share: int | None, room: int, new: NDArray[np.bool_]
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
    held = np.array([len(window) + int(use.sum()) for window, use in zip(state.windows, new, strict=True)])
    widest, ladder = store.page_bytes(len(store.ladder) - 1), ladder_of(state.store)

    def pages_of(exact: Any) -> int:
        return window_nbytes(int(max(exact.max(), cache.settings.residual)), store.num_heads_kv, widest)

    exact = _exact(state, held)
    packed = guaranteed_nbytes(cache.lengths[layer], store.num_heads_kv, ladder, store.fixed_nbytes)
    if pages_of(exact) + packed > share:
        for row in np.flatnonzero(~state.has_mean & (held < LAST)):  # bytes are too few to wait
            _take_mean(state, int(row))
        exact = _exact(state, held)
    return share - pages_of(exact) + int(exact.min()) * state.windows[0].token_nbytes


def _exact(layer: Layer, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each row that stay in its window, given how many there are with new ones."""
    return np.where(layer.has_mean | (held >= LAST), np.minimum(held, layer.residual), held)


def consolidate(cache: DeviceState, steps: int, share: int, *, to_come: bool, padded: bool = False) -> None:
    """Let the CPU put all tokens into as few pages as leave room for `steps` more; see `reserve_nbytes`."""
    with borrowed(cache):
        for layer, length, ladder in zip(cache.layers, cache.lengths, cache.changes.ladders, strict=True):
            reserve = reserve_nbytes(length, steps, to_come, layer.store.num_heads_kv, ladder, padded=padded)
            layer.carry_out(layer.shrink(np.flatnonzero(layer.has_mean), share - reserve))
    cache.changes.set_share(share)
