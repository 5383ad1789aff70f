"""Attention of a sequence over several ranks that gathers keys and values: zigzag-llama3 and llama3.

KV heads are gathered in strides, two of which are under way at a time. If two strides are all heads, the
forward takes them together. With copy engines one kernel attends a rank's own keys and those of others, and
waits for these itself (kvlab/ops/cuda/gathered.py). Without, a rank attends its own keys before it waits for
the first gather, and results are merged.

The backward gathers again. It sends each rank the gradients of that rank's keys, in float32, while it
computes with its own keys or with the next stride; a rank adds what it receives to its own dk and dv. Where
there are kernels for it, dq of one sequence is summed over all keys in one workspace
(kvlab/ops/cuda/query_gradients.py); elsewhere partial sums are added up.

Memory beside the result: the keys and values of all ranks for two strides of heads (with copy engines four);
in the backward also their gradients, twice, and dq of two strides, in float32.

Sources: Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2; Zhu, ring-flash-attention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cuda.gathered import attend_runs
from kvlab.ops.cuda.query_gradients import QueryGradients, Seen, begin_sum
from kvlab.parallel.collectives import Pending, all_to_all, filled, joined, on_device, put_sum
from kvlab.parallel.lanes import Lanes
from kvlab.parallel.layout import Plan, Rows
from kvlab.parallel.parts import (
    Options,
    add_rows,
    attend,
    attend_prefixes,
    attention_of,
    empty_result,
    gradients,
    merged,
)

__all__ = ["GatheredAttention"]

_AHEAD = 2
"""Strides whose keys are under way at a time."""


_Queries = tuple[Any, Any, Any, Any]
"""dout, q, out and lse of a stride of heads."""
_Own = list[tuple[slice, tuple[Any, Any]]]
"""KV heads, and dk and dv of own keys."""


class _Sum:
    """The way back of a stride of heads whose dq is summed by kernels, own keys and those of others.

    Parameters
    ----------
    total : QueryGradients
    theirs : Seen
    num_keys : int
        Keys of others.
    """

    def __init__(self, total: QueryGradients, theirs: Seen, num_keys: int) -> None:
        self._total, self.parts, self.portions = total, (theirs,), [slice(None)]
        self.key_rows: list[Rows] = [slice(0, num_keys)]  # of the keys of each part

    def add_own(self, _: slice) -> tuple[Any, Any]:
        """Return dk and dv of own keys."""
        return self._total.add_own()

    def add(self, part: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return dk and dv of a part."""
        return self._total.add(k, v, part)

    def finish(self) -> None:
        """Write dq, on the stream on which the sum began."""
        self._total.finish()


class _Parts:
    """The same by separate calls, each of which has a dq.

    Parameters
    ----------
    plan : Plan
    options : Options
    mine : _Queries
    keys : tuple of tensors
        Own k and v.
    dq : tensor
        To write.
    portions : list of slice
        KV heads of own keys that are computed together.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        mine: _Queries,
        keys: tuple[Any, Any],
        dq: Any,
        portions: list[slice],
    ) -> None:
        self._local, self.parts = plan.local, plan.gathered
        self.key_rows = [part.k_rows for part in self.parts]
        self._mine, self._keys, self._dq, self._options = mine, keys, dq, options
        self.portions = portions
        self._own: list[tuple[slice, Any]] = []  # query heads, and dq of own keys
        self._found: list[tuple[Rows, Any]] = []

    def add_own(self, portion: slice) -> tuple[Any, Any]:
        """Return dk and dv of a portion of own keys."""
        k, v = (x[:, portion] for x in self._keys)
        *by_row, lse = self._mine
        queries = _query_heads(portion, by_row[0], self._keys[0])
        dout, q, out = (x[:, queries] for x in by_row)
        if self._local:
            (part,) = self._local
            dq, dk, dv = gradients(dout, q, out, lse[queries], k, v, part, self._options)
        else:
            dq, dk, dv = (filled(tuple(x.shape), 0.0, x) for x in (q, k, v))
        self._own.append((queries, dq))
        return dk, dv

    def add(self, part: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return dk and dv of a part."""
        dq, dk, dv = gradients(*self._mine, k, v, part, self._options)
        self._found.append((part.q_rows, dq))
        return dk, dv

    def finish(self) -> None:
        """Write the sum of dq of all parts, own and gathered."""
        for queries, total in self._own:
            result = self._dq[:, queries]
            found = [(rows, addend[:, queries]) for rows, addend in self._found]
            *first, (rows, addend) = found or [(slice(0, 0), total[:0])]
            for some, other in first:
                add_rows(total, some, other)
            if isinstance(rows, slice):
                put_sum(result, total, rows, addend)
            else:
                add_rows(total, rows, addend)
                result.copy_(total)


@dataclass(frozen=True)
class GatheredAttention:
    """Forward and backward of one call.

    Parameters
    ----------
    plan : Plan
    group : process group, or None
    rank : int
    stride : int
        KV heads that are gathered at once.
    options : Options
    """

    plan: Plan
    group: Any
    rank: int
    stride: int
    options: Options

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return out, dtype of q, and lse of a rank's queries."""
        outs, lses = [], []
        stride = self.forward_stride(k.shape[1])
        strides = range(0, k.shape[1], stride)
        gathers = [self.gather(k, v, first, stride, self.stride) for first in strides[:_AHEAD]]
        for step, first in enumerate(strides):
            heads, queries = _heads(first, stride, q, k)
            mine, pending = q[:, queries], gathers[step]
            result = self._attend_runs(mine, k[:, heads], v[:, heads], pending)
            if result is None:
                result = self._attend_parts(mine, k[:, heads], v[:, heads], pending)
            pending.wait()
            pending.free()
            later = strides[step + _AHEAD : step + _AHEAD + 1]
            gathers += [self.gather(k, v, first, stride, self.stride) for first in later]
            out, lse = result or empty_result(mine)
            outs.append(out)
            lses.append(lse)
        return joined(outs, 1).to(q.dtype), joined(lses, 0)

    def forward_stride(self, heads: int) -> int:
        """KV heads that a forward gathers at once: all where its strides would be under way together."""
        return heads if heads <= _AHEAD * self.stride else self.stride

    def backward_stride(self, heads: int) -> int:
        """KV heads that a backward gathers at once: the same of several sequences, where the host, which has
        as much to do for few heads, would be waited for; else a stride, beside which the next is sent."""
        is_one = all(part.is_one for part in self.plan.local)
        return self.stride if is_one else self.forward_stride(heads)

    def _attend_runs(self, q: Any, k: Any, v: Any, pending: Pending) -> Any:
        """Attend own keys and those of others by one kernel, which waits for these; None if there is none."""
        plan, options = self.plan, self.options
        if plan.runs is None or pending.arrival is None or options.implementation is not None:
            return None
        return attend_runs(q, (k, v), pending.result, plan.runs, pending.arrival, options.scale)

    def _attend_parts(self, q: Any, k: Any, v: Any, pending: Pending) -> Any:
        """Attend own keys, then those of others, and merge; None if there are no keys."""
        lanes = Lanes(q.device, len(self.plan.gathered))
        result = attend(None, q, k, v, self.plan.local, self.options)
        if self.options.implementation in (None, "separate"):
            return self._attend_gathered(result, q, pending, lanes)
        if self.plan.prefixes:
            keys, values = pending.wait()
            return attend_prefixes(result, q, keys, values, self.plan.prefixes, self.options)
        return result

    def _attend_gathered(self, result: Any, q: Any, pending: Pending, lanes: Lanes) -> Any:
        """Merge attention over the keys of others into `result`."""
        parts, found = self.plan.gathered, []
        for part, lane in zip(parts, lanes, strict=True):
            with lane:
                keys, values = pending.wait()
                found.append(attention_of(q, keys, values, part, self.options))
        lanes.join()
        for part, one in zip(parts, found, strict=True):
            result = merged(result, part.q_rows, one, q)
        return result

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any, Any]:
        """Return dq, dk and dv of a rank's tokens, dtype of q."""
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        stride = self.backward_stride(k.shape[1])
        strides = range(0, k.shape[1], stride)

        def begin(first: int) -> _Sum | _Parts:
            heads, queries = _heads(first, stride, q, k)
            mine = dout[:, queries], q[:, queries], out[:, queries], lse[queries]
            return self._begin(mine, (k[:, heads], v[:, heads]), dq[:, queries], len(strides) == 1)

        gathers = [self.gather(k, v, first, stride) for first in strides[:_AHEAD]]
        begun = deque(map(begin, strides[:_AHEAD]))
        finish: Callable[[], None] | None = None
        for number, first in enumerate(strides):
            # Own keys come first while the first keys of others are awaited, else last: what is sent is on
            # its way meanwhile. Of a single stride a portion comes first, and one last.
            step, pending = begun.popleft(), gathers[number]
            lanes, theirs = Lanes(q.device, len(step.parts), number), []
            before = [] if number else step.portions[:1]
            own = [(portion, step.add_own(portion)) for portion in before]
            for part, lane in zip(step.parts, lanes, strict=True):
                with lane:
                    theirs.append(step.add(part, *pending.wait()))
            heads, _ = _heads(first, stride, q, k)
            with lanes.behind_all():
                sending = self._send(step.key_rows, theirs, k[:0, heads])
                pending.wait()
                pending.free()
                later = strides[number + _AHEAD : number + _AHEAD + 1]
                gathers += [self.gather(k, v, first, stride) for first in later]
            own += [(portion, step.add_own(portion)) for portion in step.portions[len(before) :]]
            # What ends a stride comes behind the kernels of the next, which fill the end of its own ones.
            if finish:
                finish()
            begun += map(begin, later)
            finish = partial(self._finish, step, lanes, sending, own, (dk[:, heads], dv[:, heads]))
        if finish:
            finish()
        return dq, dk, dv

    def _begin(self, mine: _Queries, keys: tuple[Any, Any], dq: Any, is_single: bool) -> _Sum | _Parts:
        """Start the way back of a stride, which may be the single one."""
        seen, options = self.plan.seen, self.options
        if seen is not None and not options.deterministic and not options.implementation:
            own, theirs = (_on_device(one, dq.device) for one in seen)
            total = begin_sum(mine, options.scale, dq, *keys, own)
            if total is not None:
                return _Sum(total, theirs, sum(self._incoming.rows))
        is_both = bool(self.plan.local and self.plan.gathered)
        half = keys[0].shape[1] // 2 if is_single and is_both else 0
        portions = [slice(0, half), slice(half, None)] if half else [slice(None)]
        return _Parts(self.plan, options, mine, keys, dq, portions)

    def _finish(
        self, step: _Sum | _Parts, lanes: Lanes, sending: Pending, own: _Own, results: tuple[Any, Any]
    ) -> None:
        """Write the gradients of a stride when all parts of it have been started."""
        lanes.join()
        step.finish()
        self._take(sending, own, results)

    @cached_property
    def tokens(self) -> int | None:
        """Of this rank, where its plan says so."""
        return sum(int(part.cu_q[-1]) for part in self.plan.local) or None

    @cached_property
    def _incoming(self) -> _Counts:
        return _counts(self.plan.takes, self.rank)

    @cached_property
    def _outgoing(self) -> _Counts:
        return _counts(self.plan.takes.T, self.rank)

    def gather(self, k: Any, v: Any, first: int, stride: int, width: int | None = None) -> Pending:
        """Start to gather the heads of a stride, so many at a time; all if that is not given."""
        arrays = (k, v) if stride >= k.shape[1] else (x[:, first : first + stride] for x in (k, v))
        pieces = [[x[:rows] for rows in self._outgoing.rows] for x in arrays]
        taken = self._incoming
        what = "gather of keys and values"
        return all_to_all(pieces, taken.rows, taken.begins, taken.most, self.group, what, width)

    def _send(self, key_rows: Sequence[Rows], theirs: list[tuple[Any, Any]], keys: Any) -> Pending:
        """Start to send every rank the gradients of its keys; `keys` are none of this stride."""
        spans, back = self._incoming.spans, self._outgoing
        pieces = [_blocks(spans, key_rows, [found[n] for found in theirs], keys) for n in (0, 1)]
        return all_to_all(pieces, back.rows, back.begins, back.most, self.group, "exchange of gradients")

    def _take(self, sending: Pending, own: _Own, results: tuple[Any, Any]) -> None:
        """Add what has come to a rank's own gradients."""
        buffers = sending.wait()
        spans = [span for span in self._outgoing.spans if span.stop > span.start] or [slice(0, 0)]
        for portion, sums in own:
            for total, buffer, result in zip(sums, buffers, results, strict=True):
                *first, last = (buffer[span, portion] for span in spans)
                for piece in first:
                    total[: len(piece)] += piece
                put_sum(result[:, portion], total, slice(0, len(last)), last)
        sending.free()


class _Counts(NamedTuple):
    """What a rank gets from all others.

    Attributes
    ----------
    rows : list of int
        From each rank.
    spans : list of slice
        Where they lie.
    begins : list of int
        Where in the buffer of each rank what this one sends begins.
    most : int
        Rows of the largest buffer of any rank.
    """

    rows: list[int]
    spans: list[slice]
    begins: list[int]
    most: int


def _on_device(seen: Seen, device: Any) -> Seen:
    cu_q, cu_k, *lens = (on_device(x, device) for x in (seen.cu_q, seen.cu_k, *seen.prefix_lens))
    return seen._replace(cu_q=cu_q, cu_k=cu_k, prefix_lens=lens)


def _heads(first: int, stride: int, q: Any, k: Any) -> tuple[slice, slice]:
    """The KV heads of a stride, and the query heads that read them."""
    heads = slice(first, min(first + stride, k.shape[1]))
    return heads, _query_heads(heads, q, k)


def _query_heads(heads: slice, q: Any, k: Any) -> slice:
    """The query heads that read KV heads."""
    first, last, _ = heads.indices(k.shape[1])
    group = q.shape[1] // k.shape[1]
    return slice(first * group, last * group)


def _counts(takes: NDArray[np.int64], rank: int) -> _Counts:
    """What a rank gets if rank r takes takes[r, s] rows from rank s."""
    ends, rows = np.cumsum(takes[rank]).tolist(), takes[rank].tolist()
    spans = [slice(end - n, end) for end, n in zip(ends, rows, strict=True)]
    return _Counts(rows, spans, takes[:, :rank].sum(1).tolist(), int(takes.sum(1).max()))


def _blocks(spans: list[slice], key_rows: Sequence[Rows], found: list[Any], like: Any) -> list[Any]:
    """Gradients of the rows of the buffer, rank by rank: views where one part has all that a rank gets."""
    views: list[Any] = []
    for span in spans:
        for keys, x in zip(key_rows, found, strict=True):
            if isinstance(keys, slice) and (keys.start or 0) <= span.start < span.stop <= keys.stop:
                views.append(x[span.start - (keys.start or 0) : span.stop - (keys.start or 0)])
                break
        else:
            if span.start < span.stop:
                break
            views.append(found[0][:0] if found else filled((0, *like.shape[1:]), 0.0, like))
    if len(views) == len(spans):
        return views
    total = filled((spans[-1].stop, *like.shape[1:]), 0.0, like)
    for keys, x in zip(key_rows, found, strict=True):
        add_rows(total, keys, x)
    return [total[span] for span in spans]
