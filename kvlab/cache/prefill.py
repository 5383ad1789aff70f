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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import dtype_name
from kvlab.cache.importance import MAX_TOKENS, UpdateFunction, ask
from kvlab.cache.reallocation import PendingWrite
from kvlab.cache.waiting import Merged, merged_tokens, put_new
from kvlab.ops.attention import attention, attention_varlen
from kvlab.ops.layer_state import UNIT, new_tokens
from kvlab.pages import decode_importance, encode_importance, named_pages
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.cache.step import DeviceCache

__all__ = ["append", "step"]

Ints = NDArray[np.int64]

MIN_ROWS, MAX_SCORE_NBYTES = 16, 256 << 20
"""Of the last 64 query rows of a prefill, all those whose attention to stored tokens is collected for which
scores have room in so many bytes, and at least so many; evenly spread, since neighbours see much the same."""


def step(
    cache: DeviceCache, layer: int, arrays: list[Any], views: list[CudaView], valid: Any, scale: float,
    softcap: float,
) -> Any:  # fmt: skip
    """A step of many tokens: `arrays` and `views` of q, k and v; the last layer waits for the device."""
    (q, k, v), (query, *views), executor = arrays, views, cache.executor
    observed = cache.observes[layer] == "mass"
    if observed:
        (q, query), (k, views[0]) = _in_units(executor, q, query), _in_units(executor, k, views[0])
    rules: dict[str, Any] = {"scale": scale, "softcap": softcap}
    window = _window(cache, layer, valid, query.shape[1])
    new = _NewTokens(cache, layer, [k, v], views, valid)
    codes = new.codes()  # all memory is taken before anything changes
    out, lse = attend_new(executor, q, k, v, valid, window=window, **rules)
    collects = cache.collects(layer, new.num_new)
    received = None
    if new.length:
        received = _attend_stored(cache, layer, q, query, (out, lse), valid, collects, new.stream, **rules)
    if observed:
        cache.kernels.score_new(query, views[0], lse, codes, rows=MAX_TOKENS, stream=new.stream, **rules)
        _ask_function(cache, layer, codes, valid)
    else:
        cache.kernels.score_norms(k, codes, cache.settings.importance, new.stream)
    if received is not None:  # behind what a user's function says of new tokens: if it fails, nothing changed
        _score_stored(cache, layer, *received, new.num_new, new.stream)
    new.enqueue(codes, query)
    cache.count(layer, new.num_new, collects)
    if layer == len(cache.layers) - 1:
        cache.calls.forget()
    return out


def append(cache: DeviceCache, layer: int, arrays: list[Any], views: list[CudaView], valid: Any) -> None:
    """Store many tokens: `arrays` and `views` of k and v; the last layer waits for the device."""
    new = _NewTokens(cache, layer, arrays, views, valid)
    codes = new.codes()
    cache.kernels.score_norms(arrays[0], codes, cache.settings.importance, new.stream)
    if cache.observes[layer] == "mass":
        _ask_function(cache, layer, codes, valid)
    new.enqueue(codes)
    cache.count(layer, new.num_new, False)


class _NewTokens:
    """New tokens of a layer, and the memory in which they are planned, taken before anything changes."""

    def __init__(
        self, cache: DeviceCache, layer: int, arrays: list[Any], views: list[CudaView], valid: Any
    ) -> None:
        self._cache, self._layer = cache, layer
        self.num_new, self.length = views[0].shape[1], cache.lengths[layer]
        self._row_budgets = row_budgets = cache.row_budgets(layer, self.num_new)
        self.stream: int = cache.executor.stream(arrays[0])
        cache.collector.flush(self.stream)
        if cache.reallocator.is_pending(layer):
            cache.reallocator.synchronize()
        self._merge(arrays[0], valid)
        total = self.num_new if self._merged is None else self._merged.before + self.num_new
        opened = self.length > 0 or cache.lookahead[layer] > 0  # pages, or open ones
        again = opened or cache.reallocator.is_tight(layer, self.length + self.num_new, row_budgets)
        self._workspace = cache.reallocator.write_workspace(total, again)
        self._arrays, self._views, self._valid = arrays, views, valid
        # Tokens that find no room in a first plan are read again behind the last layer's step, when the
        # caller may have put those of another layer in their place. Only a budget, or a sliding window, and
        # tokens in pages leave too little room.
        if self.length and (row_budgets is not None or cache.layers[layer].sliding_window):
            copied, view = cache.executor.copied, cache.executor.view
            self._arrays = [copied(x) for x in arrays]
            self._views = [view(x, "x") for x in self._arrays]
            self._valid = None if valid is None else copied(valid)

    def _merge(self, k: Any, valid: Any) -> None:
        """Where rows may wait for their frame: count tokens, and take memory for them beside those that wait.

        It is not needed where all rows get their frame by the new tokens alone.
        """
        waiting, executor, layer = self._cache.waiting, self._cache.executor, self._layer
        self._counts: NDArray[np.int64] | None = None
        self._merged: Merged | None = None
        if waiting.any(layer):
            waiting.advance(layer, self.length)
            batch = len(k)
            self._counts = (
                np.full(batch, self.num_new, np.int64) if valid is None else executor.to_host(valid).sum(1)
            )
            held = waiting.hold_tokens(layer)
            if held or not waiting.must_freeze(layer, self._counts).all():
                self._merged = merged_tokens(tuple(k.shape), executor, k, dtype_name(k), waiting=held)

    def codes(self) -> Any:
        """Memory for the importance of the tokens, (batch * num_heads_kv, num_new)."""
        return self._cache.executor.empty((self._cache.store.num_bh, self.num_new), "uint8", self._arrays[0])

    def enqueue(self, codes: Any, queries: CudaView | None = None) -> None:
        """Plan and write the tokens."""
        cache, layer, pointer = self._cache, self._layer, self._cache.executor.pointer
        (k, v), valid, end = self._views, self._valid, self.length + self.num_new
        mask = 0 if valid is None else pointer(valid)
        tokens = new_tokens(k, v, mask, pointer(codes), self.num_new, self.length)
        cache.reallocator.set_row_budgets(self._row_budgets)
        arrays = (*self._arrays, codes) if valid is None else (*self._arrays, codes, valid)
        merged = self._merged
        if self.length and queries is not None and cache.layers[layer].stored.in_blocks:
            cache.kernels.refit_frames(layer, tokens, queries, self.stream)
        if self._counts is not None:
            if merged is not None:
                put_new(merged, self._arrays[0], self._arrays[1], codes)
            cache.freeze(layer, tokens, merged, 1, self.stream, queries=queries)
            cache.waiting.add(layer, end, self._counts)
            cache.waiting.frozen(layer, end + 1)
            if merged is not None:
                tokens = merged.new_tokens(k, v, pointer(codes), self.length)
                arrays = (*arrays, *merged.arrays)
        # No room for tokens to come: if more parts follow, open pages would have taken bytes from these.
        write = PendingWrite(layer, tokens, self._workspace, self.stream, arrays)
        cache.reallocator.enqueue(write, last=layer == len(cache.layers) - 1)
        cache.lookahead[layer] = self.num_new  # less these steps, which are counted next
        cache.count_dropped(layer, end)


def _in_units(executor: Any, x: Any, view: CudaView) -> tuple[Any, CudaView]:
    """An array whose vectors `score_new` can read in units of 16 bytes: itself, or a copy."""
    if executor.aligned(view):
        return x, view
    x = executor.contiguous(x, "x")
    return x, executor.view(x, "x")


def _window(cache: DeviceCache, layer: int, valid: Any, num_new: int) -> int:
    """How many tokens a new one sees among `num_new` new ones; -1: all before it.

    Rows are attended without their padding, so what lies between two tokens must be no padding.
    """
    window = cache.layers[layer].sliding_window
    if not window or num_new <= window:
        return -1
    if valid is not None:
        for row, use in enumerate(cache.executor.to_host(valid).astype(bool)):
            seen = np.flatnonzero(use)
            if len(seen) and seen[-1] - seen[0] >= len(seen):
                raise NotImplementedError(
                    f"valid: row {row} has padding between its tokens, in {num_new} tokens of layer {layer}, "
                    f"whose sliding window is {window}: pass at most {window} at a time, or padding at "
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
    cache: DeviceCache, layer: int, q: Any, view: CudaView, results: tuple[Any, Any], valid: Any,
    collects: bool, stream: int, *, scale: float, softcap: float,
) -> tuple[Any, Any] | None:  # fmt: skip
    """Merge attention over stored tokens into out and lse; the scores and lse of a step that `collects`.

    The lse of padding is infinite behind it: it counts nothing for the importance of any token.
    """
    (out, lse), num_new, executor = results, q.shape[1], cache.executor
    rows, whole = _observed_rows(cache, num_new) if collects else (slice(0), False)
    score_rows = len(range(num_new)[rows]) if whole else 0
    stored, stored_lse, scores = cache.calls.attend(layer, q, view, scale, softcap, score_rows)
    addresses = [executor.pointer(x) for x in (out, lse, stored, stored_lse)]
    cache.kernels.merge_rows(addresses, tuple(q.shape[:3]), stream)
    if valid is not None:
        out[~valid], lse.swapaxes(1, 2)[~valid] = 0, float("inf")
    if not collects:
        return None
    total = lse
    if score_rows != num_new:
        some = q[:, rows]  # in a sliding window's layer as if neighbours: that hides no token that stays
        if not whole:
            own = executor.view(some, "q")
            scores = cache.calls.attend(layer, some, own, scale, softcap, some.shape[1])[2]
        total = executor.empty((len(q), q.shape[2], some.shape[1]), "float32", q)
        total[...] = lse[:, :, rows]
    return scores[None], total[None]


def _observed_rows(cache: DeviceCache, num_new: int) -> tuple[slice, bool]:
    """Query rows of a prefill that are observed, and whether these are its last ones without a gap."""
    last = min(num_new, MAX_TOKENS)
    nbytes = math.prod(cache.collector.shape(last)) // last
    max_rows = min(max(MIN_ROWS, MAX_SCORE_NBYTES // max(nbytes, 1)), cache.calls.max_query_tokens)
    stride = -(-last // max(min(last, max_rows), 1))
    return slice(num_new - 1 - (last - 1) // stride * stride, num_new, stride), stride == 1


def _score_stored(cache: DeviceCache, layer: int, scores: Any, lse: Any, num_new: int, stream: int) -> None:
    """Bring the importance of stored tokens up to date with what they received."""
    update = cache.settings.function
    if update is None:
        cache.collector.score(layer, scores, lse, cache.since[layer] + num_new, 0, stream)
    else:
        _call_on_stored(update, cache, layer, scores, lse, stream)


# ---- importance as a user's function -----------------------------------------------------------------------


def _ask_function(cache: DeviceCache, layer: int, codes: Any, valid: Any) -> None:
    """Let a user's function, if importance is one, score the new tokens of a step.

    codes uint8 (batch * num_heads_kv, num_new): what they received; becomes their importance.
    valid (batch, num_new) bool or None: False is padding.
    """
    if (update := cache.settings.function) is None:
        return
    store, length, num_new = cache.store, cache.lengths[layer], codes.shape[1]
    to_host = cache.executor.to_host
    use = np.ones((store.batch, num_new), bool) if valid is None else to_host(valid)
    host = to_host(codes).reshape(store.batch, store.heads, num_new).copy()
    for row in range(store.batch):
        observed = decode_importance(host[row][:, use[row]])
        position = np.broadcast_to(length + np.flatnonzero(use[row]), observed.shape)
        host[row][:, use[row]] = encode_importance(ask(update, None, observed, position, length + num_new))
    cache.executor.overwrite(codes, host.reshape(-1, num_new))


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
        after = to_host(arena).copy()
        for at, position in _importance_of_rows(cache, layer, after):
            previous, observed = decode_importance(before[at]), decode_importance(after[at])
            after[at] = encode_importance(ask(update, previous, observed, position, cache.lengths[layer]))
        result = after
    finally:
        cache.executor.overwrite(arena, result)


def _importance_of_rows(
    cache: DeviceCache, layer: int, arena: NDArray[np.uint8]
) -> Iterator[tuple[Ints, Ints]]:
    """Of each row: where in the arena the importance of its tokens lies, and their positions."""
    names = "rung", "count", "index", "base", "num_pages"
    tables = {name: cache.executor.to_host(cache.store.tables[name][layer]) for name in names}
    live, layouts = named_pages(tables), cache.store.layouts(layer)
    index, base = tables["index"].view(np.uint32), tables["base"].view(np.uint16)
    for row in range(cache.store.batch):
        offsets, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for head, entry in np.argwhere(live[row]):
            at = row, head, entry
            layout, count = layouts[tables["rung"][at]], int(tables["count"][at])
            start = int(index[at]) * UNIT
            lower = arena[start + layout.positions : start + layout.importance].view("<u2")[:count]
            offsets.append(start + layout.importance + np.arange(count))
            positions.append((int(base[at]) << 16) + lower.astype(np.int64))
        yield np.concatenate(offsets), np.concatenate(positions)
