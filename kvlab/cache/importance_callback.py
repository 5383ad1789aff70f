"""Importance as a user's function, for a cache on a GPU: the host calls it, at every step.

Kernels know policies by name. A function runs on the host, so scores travel: those of new tokens before they
are planned, those of stored tokens whenever attention mass is collected, with the pages that they lie in. So
all steps are long ones (prefill.py), each layer waits for the device, and CUDA graphs are refused: a path
for research. What the function sees as observed is the mass that a token received as a page would store it, 9
percent apart; on the CPU it is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.store import UNIT
from kvlab.pages import decode_importance, encode_importance

if TYPE_CHECKING:
    from kvlab.cache.step import DeviceCache

__all__ = ["score_new", "score_stored"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def score_new(cache: DeviceCache, layer: int, codes: Any, valid: Any) -> None:
    """Let the function score the new tokens of a step.

    codes uint8 (batch * num_heads_kv, steps): what they received; becomes their importance.
    valid (batch, steps) bool or None: False is padding.
    """
    store, length, steps = cache.store, cache.lengths[layer], codes.shape[1]
    to_host = cache.executor.to_host
    use = np.ones((store.batch, steps), bool) if valid is None else to_host(valid)
    host = to_host(codes).reshape(store.batch, store.heads, steps).copy()
    for row in range(store.batch):
        observed = decode_importance(host[row][:, use[row]])
        position = np.broadcast_to(length + np.flatnonzero(use[row]), observed.shape)
        score = cache.layers[layer].policy.update(None, observed, position, length + steps, 0)
        host[row][:, use[row]] = encode_importance(score)
    cache.executor.overwrite(codes, host.reshape(-1, steps))


def score_stored(cache: DeviceCache, layer: int, scores: Any, lse: Any, stream: int) -> None:
    """Let the function score the tokens in pages of a layer; `scores` and `lse` as for `Collector.score`.

    The kernel writes what tokens received in place of their importance, which is read before and after, and
    put back if the function fails.
    """
    arena, to_host = cache.store.arenas[layer], cache.executor.to_host
    before = to_host(arena).copy()
    result = before
    try:
        cache.collector.score(layer, scores, lse, 1, 0, stream)
        result = _scored(cache, layer, before, to_host(arena).copy())
    finally:
        cache.executor.overwrite(arena, result)


def _scored(cache: DeviceCache, layer: int, before: Bytes, after: Bytes) -> Bytes:
    """Put the function's scores into `after`, which has what tokens received; `before` has importance."""
    store, length, to_host = cache.store, cache.lengths[layer], cache.executor.to_host
    tables = {name: to_host(store.tables[name][layer]) for name in ("rung", "count", "index", "base")}
    live = np.arange(store.entries) < to_host(store.tables["num_pages"][layer])[..., None]
    for row in range(store.batch):
        at, position = _places(
            cache, layer, {name: table[row] for name, table in tables.items()}, live[row], after
        )
        previous, observed = decode_importance(before[at]), decode_importance(after[at])
        after[at] = encode_importance(
            cache.layers[layer].policy.update(previous, observed, position, length, 1)
        )
    return after


def _places(
    cache: DeviceCache, layer: int, tables: dict[str, NDArray[Any]], live: NDArray[np.bool_], arena: Bytes
) -> tuple[Ints, Ints]:
    """Where in the arena the importance of each token of a row lies, by head and page, and its position."""
    places, positions = [], []
    for head, entry in np.argwhere(live):
        rung, count, index, base = (
            int(tables[name][head, entry]) for name in ("rung", "count", "index", "base")
        )
        layout = cache.store.layouts(layer)[rung]
        start = (index & 0xFFFFFFFF) * UNIT
        lower = arena[start + layout.positions : start + layout.importance].view("<u2")[:count]
        places.append(start + layout.importance + np.arange(count))
        positions.append(((base & 0xFFFF) << 16) + lower.astype(np.int64))
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *places]), np.concatenate([nothing, *positions])
