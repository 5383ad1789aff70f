"""What the layers of the CPU do for a cache on a device: files and copies.

They are empty while a cache is on a device. For files they borrow what it holds (exchange.py). That waits for
the device, which keeps what it holds: an error on the way changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvlab.cache.cuda.exchange import from_layer, to_layers
from kvlab.cache.cuda.state import DeviceState
from kvlab.cache.frame import LAST, key_mean
from kvlab.cache.layer import Arrival, Layer
from kvlab.device import translated_out_of_memory

__all__ = [
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
            for layer, since in zip(layers, cache.since[which], strict=True):
                layer.since_collection = since
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
        exact = np.array([len(window) for window in layer.windows], np.int64)
        cache.waiting.set(number, ~layer.has_mean, exact, layer.seqlen)
        cache.changes.restart(tidy=False)


def _end_waiting(cache: DeviceState, number: int) -> None:
    """Pack exact tokens that have no place on the device: of rows with a mean, or with too few bytes."""
    layer = cache.layers[number]
    packs = not layer.residual and any(
        len(x) for x, has in zip(layer.windows, layer.has_mean, strict=True) if has
    )
    for row in np.flatnonzero(~layer.has_mean):
        position = layer.windows[row].position
        if not len(position):
            continue
        if not cache.waiting.holds[number] or position[0] >> 16 != position[-1] >> 16:
            _take_mean(layer, int(row))
            packs = True
    if packs:
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
