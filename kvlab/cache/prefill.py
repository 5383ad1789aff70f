"""Prefill: steps of more tokens than an append takes, be they a prompt or a part of one.

`kvlab.attention` attends the new tokens, packed attention the stored ones, and the results are merged. The
attention that a token gets from the last query rows is its importance. Then a plan for the layer takes the
new tokens in. The host waits for the device once, behind the last layer (reallocation.py), and takes memory
that all layers need once: a part of few tokens has little to do on the device, so the host decides its time.

Kernels know policies of importance by name. A user's function runs on the host, so scores go there and back:
those of new tokens before they are planned, those of stored tokens with their pages whenever attention mass
is collected. So all steps of such a cache are prefills, each layer waits for the device, and CUDA graphs are
refused: a path for research. The function is given the mass as a page would store it, in steps of 9 percent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import CudaView, dtype_name
from kvlab.cache.importance import MOST_TOKENS, UpdateFunction, ask
from kvlab.cache.reallocation import PendingWrite
from kvlab.cache.waiting import Merged, merged_tokens, put_new
from kvlab.ops.attention import attention, attention_varlen
from kvlab.ops.cuda.plan import Workspace
from kvlab.ops.layer_state import UNIT, new_tokens
from kvlab.pages import decode_importance, encode_importance, named_pages

if TYPE_CHECKING:
    from kvlab.cache.options import RowBudgets
    from kvlab.cache.step import DeviceCache

__all__ = ["append", "step"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

MIN_ROWS, MAX_SCORE_NBYTES = 16, 256 << 20
"""Of the last 64 query rows of a prefill, all those whose attention to stored tokens is collected for which
scores have room in so many bytes, and at least so many; evenly spread, since neighbours see much the same."""


def step(
    cache: DeviceCache,
    layer: int,
    arrays: list[Any],
    views: list[CudaView],
    valid: Any,
    scale: float,
    softcap: float,
    row_budgets: RowBudgets,
) -> Any:
    """A step of many tokens: `arrays` and `views` of q, k and v; the last layer waits for the device."""
    executor, steps, observed = cache.executor, views[0].shape[1], cache.observes[layer] == "mass"
    stream = executor.stream(arrays[0])
    if observed:
        both = [_in_units(executor, x, view) for x, view in zip(arrays[:2], views[:2], strict=True)]
        arrays[:2], views[:2] = zip(*both, strict=True)
    q, k, v = arrays
    window = _window(cache, layer, valid, steps)
    memory = _begin(cache, layer, [k, v], valid, row_budgets, stream)
    new = _kept(cache, layer, [k, v], views[1:], valid, row_budgets)
    codes = executor.empty((cache.num_bh, steps), "uint8", k)  # all memory is taken before anything changes
    out, lse = attend_new(executor, q, k, v, valid, scale, softcap, window)
    collects = cache.collects(layer, steps)
    received = None
    if cache.lengths[layer]:
        received = _attend_stored(
            cache, layer, q, views[0], out, lse, valid, scale, softcap, collects, stream
        )
    if observed:
        cache.kernels.score_new(
            views[0], views[1], lse, codes, rows=MOST_TOKENS, scale=scale, softcap=softcap, stream=stream
        )
        _ask_function(cache, layer, codes, valid)
    else:
        cache.kernels.score_norms(k, codes, cache.settings.importance, stream)
    if received is not None:  # behind what a user's function says of new tokens: if it fails, nothing changed
        _score_stored(cache, layer, *received, steps, stream)
    _enqueue(cache, layer, *new, codes, row_budgets, memory, stream, views[0])
    cache.count(layer, steps, collects)
    if layer == len(cache.layers) - 1:
        cache.calls.forget()
    return out


def append(
    cache: DeviceCache,
    layer: int,
    arrays: list[Any],
    views: list[CudaView],
    valid: Any,
    row_budgets: RowBudgets,
) -> None:
    """Store many tokens: `arrays` and `views` of k and v; the last layer waits for the device."""
    k, steps, executor = arrays[0], views[0].shape[1], cache.executor
    stream = executor.stream(k)
    memory = _begin(cache, layer, arrays, valid, row_budgets, stream)
    new = _kept(cache, layer, arrays, views, valid, row_budgets)
    codes = executor.empty((cache.num_bh, steps), "uint8", k)
    cache.kernels.score_norms(k, codes, cache.settings.importance, stream)
    if cache.observes[layer] == "mass":
        _ask_function(cache, layer, codes, valid)
    _enqueue(cache, layer, *new, codes, row_budgets, memory, stream)
    cache.count(layer, steps, False)


class _Memory(NamedTuple):
    """What a layer's new tokens are planned in.

    counts (batch,): how many are valid, where rows may wait for the mean of their keys. `merged`: tokens that
    wait and new ones, unless all rows get their mean by the new ones alone.
    """

    workspace: Workspace
    counts: NDArray[np.int64] | None
    merged: Merged | None


def _begin(
    cache: DeviceCache, layer: int, new: list[Any], valid: Any, row_budgets: RowBudgets, stream: int
) -> _Memory:
    """Leave nothing undone that pages of this layer wait for, and take memory for the plan."""
    cache.collector.flush(stream)
    if cache.reallocator.is_pending(layer):
        cache.reallocator.synchronize()
    waiting, length, counts, merged = cache.waiting, cache.lengths[layer], None, None
    shape = tuple(new[0].shape)
    batch, steps = shape[:2]
    if waiting.any(layer):
        waiting.advance(layer, length)
        counts = np.full(batch, steps, np.int64) if valid is None else cache.executor.to_host(valid).sum(1)
        held = waiting.hold_tokens(layer)
        if held or not waiting.must_freeze(layer, counts).all():
            merged = merged_tokens(shape, cache.executor, new[0], dtype_name(new[0]), waiting=held)
    total = steps if merged is None else merged.before + steps
    again = length > 0 or cache.reallocator.is_tight(layer, length + steps, row_budgets)
    return _Memory(cache.reallocator.write_workspace(total, again), counts, merged)


def _in_units(executor: Any, x: Any, view: CudaView) -> tuple[Any, CudaView]:
    """An array whose vectors `score_new` can read in units of 16 bytes: itself, or a copy."""
    if executor.aligned(view):
        return x, view
    x = executor.contiguous(x, "x")
    return x, executor.view(x, "x")


def _kept(
    cache: DeviceCache, layer: int, new: list[Any], views: list[CudaView], valid: Any, row_budgets: RowBudgets
) -> tuple[list[Any], list[CudaView], Any]:
    """New keys and values, their views and mask, which stay as they are until `Reallocator.synchronize`.

    Tokens that find no room in a first plan are read again behind the last layer's step, when the caller may
    have put those of another layer in their place. Only a budget, or a sliding window, and tokens in pages
    leave too little room.
    """
    limited = row_budgets is not None or cache.layers[layer].sliding_window
    if not limited or not cache.lengths[layer]:
        return new, views, valid
    copied, view = cache.executor.copied, cache.executor.view
    new = [copied(x) for x in new]
    return new, [view(x, "x") for x in new], None if valid is None else copied(valid)


def _window(cache: DeviceCache, layer: int, valid: Any, steps: int) -> int:
    """How many tokens a new one sees among `steps` new ones; -1: all before it.

    Rows are attended without their padding, so what lies between two tokens must be no padding.
    """
    window = cache.layers[layer].sliding_window
    if not window or steps <= window:
        return -1
    if valid is not None:
        for row, use in enumerate(cache.executor.to_host(valid).astype(bool)):
            seen = np.flatnonzero(use)
            if len(seen) and seen[-1] - seen[0] >= len(seen):
                raise NotImplementedError(
                    f"valid: row {row} has padding between its tokens, in {steps} steps of layer {layer}, "
                    f"whose sliding window is {window}: pass at most {window} steps at a time, or padding at "
                    "the ends alone"
                )
    return window - 1


def attend_new(
    executor: Any, q: Any, k: Any, v: Any, valid: Any, scale: float, softcap: float, window: int = -1
) -> tuple[Any, Any]:
    """Attend new tokens causally among themselves: out (B, S, Hq, D) and lse (B, Hq, S).

    Each sees `window` tokens before it; -1: all. With padding this waits for the device: rows of unequal
    length are packed one behind the other.
    """
    rules: dict[str, Any] = {"causal": True, "scale": scale, "softcap": softcap, "window": (window, -1)}
    if valid is None:
        return attention(q, k, v, **rules, return_lse=True)
    counts, empty = executor.to_host(valid).sum(1), executor.empty
    ends = executor.to_device(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), q)
    longest = int(counts.max(initial=0))
    packed_out, packed_lse = attention_varlen(
        q[valid], k[valid], v[valid], ends, ends, longest, longest, **rules, return_lse=True
    )
    out, lse = empty(q.shape, dtype_name(q), q), empty((q.shape[0], q.shape[2], q.shape[1]), "float32", q)
    out[...], lse[...] = 0, float("-inf")
    out[valid] = packed_out
    lse.swapaxes(1, 2)[valid] = packed_lse.T
    return out, lse


def _attend_stored(
    cache: DeviceCache,
    layer: int,
    q: Any,
    view: CudaView,
    out: Any,
    lse: Any,
    valid: Any,
    scale: float,
    softcap: float,
    collects: bool,
    stream: int,
) -> tuple[Any, Any] | None:
    """Merge attention over stored tokens into `out` and `lse`; the scores and lse of a step that `collects`.

    `lse` of padding is infinite behind it: it counts nothing for the importance of any token.
    """
    steps, executor = q.shape[1], cache.executor
    rows, whole = _observed_rows(cache, steps) if collects else (slice(0), False)
    kept = len(range(steps)[rows]) if whole else 0
    stored, stored_lse, scores = cache.calls.attend(layer, q, view, scale, softcap, kept)
    addresses = [cache.executor.pointer(x) for x in (out, lse, stored, stored_lse)]
    cache.kernels.merge_rows(addresses, tuple(q.shape[:3]), stream)
    if valid is not None:
        out[~valid], lse.swapaxes(1, 2)[~valid] = 0, float("inf")
    if not collects:
        return None
    total = lse
    if kept != steps:
        some = q[:, rows]  # in a sliding window's layer as if neighbours: that hides no token that stays
        if not whole:
            scores = cache.calls.attend(layer, some, executor.view(some, "q"), scale, softcap, some.shape[1])[
                2
            ]
        total = executor.empty((len(q), q.shape[2], some.shape[1]), "float32", q)
        total[...] = lse[:, :, rows]
    return scores[None], total[None]


def _score_stored(cache: DeviceCache, layer: int, scores: Any, lse: Any, steps: int, stream: int) -> None:
    """Bring the importance of stored tokens up to date with what they received."""
    update = cache.settings.function
    if update is None:
        cache.collector.score(layer, scores, lse, cache.since[layer] + steps, 0, stream)
    else:
        _call_on_stored(update, cache, layer, scores, lse, stream)


def _ask_function(cache: DeviceCache, layer: int, codes: Any, valid: Any) -> None:
    """Let a user's function, if importance is one, score new tokens."""
    if cache.settings.function is not None:
        _call_on_new(cache.settings.function, cache, layer, codes, valid)


def _observed_rows(cache: DeviceCache, steps: int) -> tuple[slice, bool]:
    """Query rows of a prefill that are observed, and whether these are its last ones without a gap."""
    last = min(steps, MOST_TOKENS)
    nbytes = math.prod(cache.collector.shape(last)) // last
    most = min(max(MIN_ROWS, MAX_SCORE_NBYTES // max(nbytes, 1)), cache.calls.most_query_tokens)
    apart = -(-last // max(min(last, most), 1))
    return slice(steps - 1 - (last - 1) // apart * apart, steps, apart), apart == 1


def _enqueue(
    cache: DeviceCache,
    layer: int,
    new: list[Any],
    views: list[CudaView],
    valid: Any,
    codes: Any,
    row_budgets: RowBudgets,
    memory: _Memory,
    stream: int,
    queries: CudaView | None = None,
) -> None:
    """Plan and write new keys and values of one layer."""
    steps, length = views[0].shape[1], cache.lengths[layer]
    (workspace, counts, merged), pointer = memory, cache.executor.pointer
    mask = 0 if valid is None else pointer(valid)
    fresh = new_tokens(views[0], views[1], mask, pointer(codes), steps, length)
    reallocator = cache.reallocator
    reallocator.set_row_budgets(row_budgets)
    arrays = (*new, codes) if valid is None else (*new, codes, valid)
    if counts is not None:
        if merged is not None:
            put_new(merged, new[0], new[1], codes)
        cache.freeze(layer, fresh, merged, 1, stream, queries=queries)
        cache.waiting.add(layer, length + steps, counts)
        cache.waiting.frozen(layer, length + steps + 1)
        if merged is not None:
            fresh = merged.new_tokens(views[0], views[1], pointer(codes), length)
            arrays = (*arrays, *merged.arrays)
    # No room for tokens to come: if more parts follow, open pages would have taken bytes from these tokens.
    last = layer == len(cache.layers) - 1
    reallocator.enqueue(PendingWrite(layer, fresh, workspace, stream, arrays), last=last)
    cache.lookahead[layer] = steps  # less these steps, which are counted next
    cache.count_dropped(layer, length + steps)


# ---- importance as a user's function -----------------------------------------------------------------------


def _call_on_new(update: UpdateFunction, cache: DeviceCache, layer: int, codes: Any, valid: Any) -> None:
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
        score = ask(update, None, observed, position, length + steps)
        host[row][:, use[row]] = encode_importance(score)
    cache.executor.overwrite(codes, host.reshape(-1, steps))


def _call_on_stored(
    update: UpdateFunction, cache: DeviceCache, layer: int, scores: Any, lse: Any, stream: int
) -> None:
    """Let the function score the tokens in pages of a layer; `scores` and `lse` as for `Collector.score`.

    The kernel writes what tokens received in place of their importance, which is read before and after, and
    put back if the function fails.
    """
    arena, to_host = cache.store.arenas[layer], cache.executor.to_host
    before = to_host(arena).copy()
    result = before
    try:
        cache.collector.score(layer, scores, lse, 1, 0, stream)
        result = _scored(update, cache, layer, before, to_host(arena).copy())
    finally:
        cache.executor.overwrite(arena, result)


def _scored(update: UpdateFunction, cache: DeviceCache, layer: int, before: Bytes, after: Bytes) -> Bytes:
    """Put the function's scores into `after`, which has what tokens received; `before` has importance."""
    store, length, to_host = cache.store, cache.lengths[layer], cache.executor.to_host
    names = "rung", "count", "index", "base", "num_pages"
    tables = {name: to_host(store.tables[name][layer]) for name in names}
    live = named_pages(tables)
    for row in range(store.batch):
        at, position = _importance_offsets(
            cache, layer, {name: table[row] for name, table in tables.items()}, live[row], after
        )
        previous, observed = decode_importance(before[at]), decode_importance(after[at])
        after[at] = encode_importance(ask(update, previous, observed, position, length))
    return after


def _importance_offsets(
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
