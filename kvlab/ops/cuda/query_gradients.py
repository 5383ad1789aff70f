"""Gradients of queries whose keys lie in several arrays, on Hopper: one workspace, one launch for each array.

With a call for each array of keys, every call would prepare a workspace and write a dq of its own, and these
would have to be added up. Here a workspace is prepared once and dq is finished once. Between these there is a
launch for each array, on several streams if that helps: it gives dk and dv, and adds to dq in memory, in
float32. So dq is rounded once, however many arrays there are.

Queries are rows of one array in groups of equal size, one behind the other; a group sees a prefix of each
array of keys (kvlab/ops/grouped.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvlab.ops.array_kinds import kinds_of
from kvlab.ops.cuda.grouped_backward import ListedCall, listed_call
from kvlab.ops.grouped import GroupedArrays, call_of
from kvlab.ops.grouped_backward import BACKWARD, names_of_results

__all__ = ["QueryGradients", "Seen", "begin_sum"]

_PAIRED = "kvlab.ops.cuda.grouped_backward:attend_backward"


class Seen(NamedTuple):
    """How many keys of an array each group of queries sees."""

    cu_q: Any
    """int32, (2,): 0 and the rows of a group."""
    cu_k: Any
    """int32, (2,): 0 and the keys of the array."""
    prefix_lens: Sequence[Any]
    """For each group, int32, (1,)."""
    causal: bool
    longest: tuple[int, int]
    """Rows of a group and keys of the array."""
    name: Any
    """Equal for equal values of these, and for no others."""


class QueryGradients:
    """A sum of dq over several arrays of keys; dk and dv of each. `begin_sum` begins it.

    Each array is added on the current stream, which must be behind that on which the sum began, and that of
    `finish` behind it.
    """

    def __init__(self, queries: _Queries, dq: int, keys: tuple[Any, Any], own: _Call) -> None:
        self._queries, self._dq, self._keys, self._own = queries, dq, keys, own
        self._workspace = own.listed.new_workspace()
        self._around(0)

    def add_own(self) -> tuple[Any, Any]:
        """Return dk and dv, float32, of the keys that the sum began with, and add to dq what they give."""
        return self._add(self._own)

    def add(self, k: Any, v: Any, seen: Seen) -> tuple[Any, Any]:
        """Return dk and dv, float32, and add to dq what these keys give."""
        call = _call_of(self._queries, k, v, seen, self._own.listed.long_steps)
        if call is None:
            raise ValueError("k, v: these arrays are of another kind than the first ones")
        return self._add(call)

    def _add(self, call: _Call) -> tuple[Any, Any]:
        return call.listed.add(call.addresses, self._queries.of_results, self._workspace[1])

    def finish(self) -> None:
        """Write dq."""
        self._around(2)

    def _around(self, which: int) -> None:
        own = self._own
        own.listed.around(which, own.addresses, self._queries.of_results, self._dq, self._workspace[1])


class _Queries(NamedTuple):
    """What calls with different keys have in common."""

    q_groups: list[Any]
    scale: float | None
    kinds: tuple[Any, ...]  # of dout, out and lse of each group
    of_results: list[int]  # their addresses
    dq_kind: Any


class _Call(NamedTuple):
    """A prepared call, and addresses of its arrays."""

    listed: ListedCall
    addresses: list[int]


def begin_sum(
    queries: tuple[Any, ...], scale: float | None, dq: Any, k: Any, v: Any, seen: Seen
) -> QueryGradients | None:
    """Begin a sum of dq, on the current stream; None where there are no kernels for it.

    Parameters
    ----------
    queries : tuple of arrays
        dout, q, out, (rows, num_heads_q, head_dim), and lse, (num_heads_q, rows), that over all keys.
    scale : float, optional
    dq : array, as q
        To write.
    k, v, seen
        The first keys, for `QueryGradients.add_own`.
    """
    *by_row, lse = queries
    groups, rows = len(seen.prefix_lens), seen.longest[0]
    spans = [slice(rows * g, rows * (g + 1)) for g in range(groups)]
    douts, q_groups, outs = [[x[span] for span in spans] for x in by_row]
    lses = [lse[:, span] for span in spans]
    kinds, addresses = kinds_of([*douts, *outs, *lses], names_of_results(groups))
    (dq_kind,), (dq_at,) = kinds_of((dq,), ("dq",))
    common = _Queries(q_groups, scale, kinds, addresses, dq_kind)
    own = _call_of(common, k, v, seen, None)
    return None if own is None else QueryGradients(common, dq_at, (k, v), own)


def _call_of(queries: _Queries, k: Any, v: Any, seen: Seen, long_steps: bool | None) -> _Call | None:
    arrays = GroupedArrays(
        queries.q_groups, k, v, [seen.cu_q] * len(queries.q_groups), seen.prefix_lens, seen.cu_k
    )
    call, addresses = call_of(BACKWARD, arrays, seen.causal, queries.scale, None, seen.longest, 0, None)
    if call.row.launcher != _PAIRED:
        return None
    listed = listed_call(call, queries.kinds, False, True, queries.dq_kind, seen.name, long_steps)
    return None if listed is None else _Call(listed, addresses)
