"""Attention of a sequence over several ranks that gathers keys and values: zigzag-llama3 and llama3.

KV heads go in strides: while a rank computes with the heads of one stride, those of the next are under way.
What a rank sees of its own keys is computed before the first gather is waited for. Backward gathers again,
adds dk and dv of all ranks in float32 where they lie, and sends each rank the sum of its own (reduce-scatter)
while the next stride is computed.

Memory beside the result: the keys and values of all ranks for two strides of heads, and backward as many
gradients in float32.

Sources: Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2; Zhu, ring-flash-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.parallel.collectives import Pending, all_gather, filled, reduce_scatter
from kvlab.parallel.layout import Plan
from kvlab.parallel.parts import (
    Options,
    add_gradients,
    add_rows,
    attend,
    attend_prefixes,
    empty_result,
    rows_of,
)

__all__ = ["GatheredAttention"]


@dataclass(frozen=True)
class GatheredAttention:
    """Forward and backward of one call.

    Parameters
    ----------
    plan : Plan
    group : process group, or None
    world_size : int
    stride : int
        KV heads that are gathered at once.
    options : Options
    """

    plan: Plan
    group: Any
    world_size: int
    stride: int
    options: Options

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return out, dtype of q, and lse of a rank's queries."""
        out, lse = empty_result(q)
        pending = self._gather(k, v, 0)
        for first in range(0, k.shape[1], self.stride):
            heads, queries = self._heads(first, q, k)
            result = out[:, queries], lse[queries]
            attend(result, q[:, queries], k[:, heads], v[:, heads], self.plan.local, self.options)
            now, pending = pending, self._gather(k, v, first + self.stride)
            keys, values = (_wait(one) for one in now)
            if self.options.implementation in (None, "separate"):
                attend(result, q[:, queries], keys, values, self.plan.gathered, self.options)
            elif self.plan.prefixes:
                attend_prefixes(result, q[:, queries], keys, values, self.plan.prefixes, self.options)
        return out.to(q.dtype), lse

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any, Any]:
        """Return dq, dk and dv of a rank's tokens, dtype of q."""
        dq, dk, dv = (filled(tuple(x.shape), 0.0, x) for x in (q, k, v))
        pending = self._gather(k, v, 0)
        sent: list[tuple[Any, list[Pending]]] = []
        for first in range(0, k.shape[1], self.stride):
            heads, queries = self._heads(first, q, k)
            mine = dout[:, queries], q[:, queries]
            rest = out[:, queries], lse[queries]
            sums = dq[:, queries], dk[:, heads], dv[:, heads]
            add_gradients(sums, (*mine, k[:, heads], v[:, heads], *rest), self.plan.local, self.options)
            now, pending = pending, self._gather(k, v, first + self.stride)
            keys, values = (_wait(one) for one in now)
            gathered = filled(tuple(keys.shape), 0.0, q), filled(tuple(values.shape), 0.0, q)
            add_gradients(
                (dq[:, queries], *gathered), (*mine, keys, values, *rest), self.plan.gathered, self.options
            )
            _take(sent, self.plan)
            sent = [
                (total, [reduce_scatter(x, self.group) for x in self._pieces(sums_of_all)])
                for total, sums_of_all in zip(sums[1:], gathered, strict=True)
            ]
        _take(sent, self.plan)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _heads(self, first: int, q: Any, k: Any) -> tuple[slice, slice]:
        """The KV heads of a stride, and the query heads that read them."""
        group = q.shape[1] // k.shape[1]
        last = min(first + self.stride, k.shape[1])
        return slice(first, last), slice(first * group, last * group)

    def _gather(self, k: Any, v: Any, first: int) -> tuple[list[Pending], ...]:
        """Start to gather the heads of a stride; nothing behind the last."""
        if first >= k.shape[1]:
            return ()
        return tuple(self._gather_one(x[:, first : first + self.stride]) for x in (k, v))

    def _gather_one(self, x: Any) -> list[Pending]:
        parts = [rows_of(x, rows).contiguous() for rows in self.plan.sends]
        total = sum(len(part) for part in parts) * self.world_size
        buffer = x.new_empty(total, *x.shape[1:])
        return [
            all_gather(part, out, self.group)._replace(result=buffer)
            for part, out in zip(parts, self._pieces(buffer), strict=True)
        ]

    def _pieces(self, buffer: Any) -> list[Any]:
        """The parts of a buffer of all ranks that one gather fills, and one reduce-scatter sends."""
        pieces = len(self.plan.sends)
        rows = len(buffer) // pieces
        return [buffer[n * rows : (n + 1) * rows] for n in range(pieces)]


def _wait(pending: list[Pending]) -> Any:
    """Wait for the gathers of one buffer; return it."""
    for one in pending:
        buffer = one.wait()
    return buffer


def _take(sent: list[tuple[Any, list[Pending]]], plan: Plan) -> None:
    """Add the sums that have come to a rank's own gradients."""
    for total, pending in sent:
        for rows, one in zip(plan.sends, pending, strict=True):
            add_rows(total, rows, one.wait())
