"""Attention of groups of queries on the CPU, and gradients: launchers of the backend "cpu".

One call of the kernel for all groups. Listed, each (sequence, group) is a sequence of its own. Paired, the
rows of all groups of a sequence are one sequence, in the order of the keys that they see: so 192 rows that
share a tile of keys may be of several groups. Queries are copied into that order, and results out of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.new_arrays import like_first
from kvlab.ops.cpu.attention import Views, attend_sequences, bounds_of, worth_sharing
from kvlab.ops.cpu.attention import attend as attend_one
from kvlab.ops.cpu.attention_backward import attend_backward as backward_of_one
from kvlab.views import to_numpy_view

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall
    from kvlab.ops.grouped_backward import Results

__all__ = ["attend", "attend_backward", "keys_of", "lengths_of"]


def lengths_of(
    call: GroupedCall, arrays: GroupedArrays
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return bounds of the rows of each group and of the keys, and prefixes; refuses what does not fit."""
    longest_q, longest_k = call.longest
    total_k = len(keys_of(call, arrays)[0])
    cu_k = bounds_of("cu_seqlens_k", arrays.cu_k, longest_k, total_k)
    cu_q, lens = [], []
    for g, (bounds, prefix) in enumerate(zip(arrays.cu_q, arrays.prefix_lens, strict=True)):
        cu_q.append(bounds_of(f"cu_seqlens_q_groups[{g}]", bounds, longest_q, call.rows[g]))
        lens.append(to_numpy_view(prefix, f"prefix_lens[{g}]").astype(np.int64))
        wrong = np.flatnonzero((lens[g] < 0) | (lens[g] > np.diff(cu_k)))
        if len(wrong):
            b = int(wrong[0])
            raise ValueError(
                f"prefix_lens[{g}][{b}] is {lens[g][b]}: sequence {b} has {np.diff(cu_k)[b]} keys, and a "
                "prefix 0 up to as many"
            )
    return cu_q, cu_k, lens


def keys_of(call: GroupedCall, arrays: GroupedArrays) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return k and v with the keys of each sequence in a row: as they are, or copied out of segments."""
    k, v = to_numpy_view(arrays.k, "k"), to_numpy_view(arrays.v, "v")
    if call.segment_len is None:
        return k, v
    table = to_numpy_view(arrays.segments, "segment_table").astype(np.int64)
    lengths = np.diff(to_numpy_view(arrays.cu_k, "cu_seqlens_k").astype(np.int64))
    max_keys = table.shape[1] * call.segment_len
    if (lengths < 0).any() or (lengths > max_keys).any():
        raise ValueError(
            f"cu_seqlens_k says that sequences have {lengths.tolist()} keys: they may have 0 up to "
            f"{max_keys}, those of the segments in a row of segment_table"
        )
    rows = (table[:, :, None] * call.segment_len + np.arange(call.segment_len)).reshape(len(table), max_keys)
    own = np.concatenate([np.zeros(0, np.int64), *(row[:n] for row, n in zip(rows, lengths, strict=True))])
    if len(own) and not 0 <= own.min() <= own.max() < len(k):
        raise ValueError(
            f"segment_table names rows {own.min()} to {own.max()}, k has {len(k)}: segments of "
            f"{call.segment_len} rows must lie in k as far as sequences reach"
        )
    return k[own], v[own]


def attend(call: GroupedCall, arrays: GroupedArrays, _addresses: Any) -> tuple[list[Any], list[Any]]:
    """Launcher of backend "cpu": outs and lses, lists with one array a group."""
    views = [to_numpy_view(q, f"q_groups[{g}]") for g, q in enumerate(arrays.q_groups)]
    cu_q, cu_k, lens = lengths_of(call, arrays)
    k, v = keys_of(call, arrays)
    if call.implementation == "separate":
        results = [
            attend_one(q, k, v, _sequences_of(call, own, cu_k, prefix), call.scores)
            for q, own, prefix in zip(arrays.q_groups, cu_q, lens, strict=True)
        ]
        return [out for out, _ in results], [lse for _, lse in results]
    starts = np.cumsum([0, *(len(q) for q in views)])
    keys = np.stack(lens)  # (groups, sequences)
    rows = np.stack([np.diff(x) for x in cu_q])
    limits = np.empty(0, np.int64)
    if call.implementation == "listed":
        first_row = np.stack([x[:-1] + start for x, start in zip(cu_q, starts, strict=False)])
        seq_info = np.zeros((rows.size, 5), np.int64)
        seq_info[:, 1], seq_info[:, 2], seq_info[:, 4] = first_row.ravel(), rows.ravel(), keys.ravel()
        seq_info[:, 3] = np.tile(cu_k[:-1], len(views))
        own: list[Any] = [slice(*starts[g : g + 2]) for g in range(len(views))]
    else:
        order, limits = _by_keys(rows, keys, call.scores.right == 0)
        seq_info = np.zeros((rows.shape[1], 5), np.int64)
        seq_info[:, 2] = rows.sum(axis=0)
        seq_info[:, 1] = np.cumsum(seq_info[:, 2]) - seq_info[:, 2]
        seq_info[:, 3], seq_info[:, 4] = cu_k[:-1], keys.max(axis=0)
        own = np.split(np.argsort(order), starts[1:-1])
    # Rows of all groups, and which of them are a group's own.
    q = np.empty((starts[-1], *views[0].shape[1:]), views[0].dtype)
    for indices, x in zip(own, views, strict=True):
        q[indices] = x
    all_rows = Views(q[None], k[None], v[None], seq_info)
    found, logs = attend_sequences(
        all_rows, call.scores, limits, alone=not worth_sharing(all_rows, products=1)
    )
    first = arrays.q_groups[0]
    return (
        [like_first(found[0][indices], first) for indices in own],
        [like_first(np.ascontiguousarray(logs[0][:, indices]), first) for indices in own],
    )


def attend_backward(
    call: GroupedCall,
    arrays: GroupedArrays,
    _addresses: Any,
    results: Results,
    _deterministic: bool,
    float32_dk_dv: bool,
) -> tuple[list[Any], Any, Any]:
    """Launcher of backend "cpu": dq of each group, dk and dv."""
    cu_q, cu_k, lens = lengths_of(call, arrays)
    dq_groups = []
    sums = [np.zeros((call.sizes["total_k"], call.sizes["Hk"], call.sizes["D"]), np.float32) for _ in "kv"]
    for g, (q, dout, out, lse) in enumerate(zip(arrays.q_groups, *results[:3], strict=True)):
        sequences = _sequences_of(call, cu_q[g], cu_k, lens[g])
        dq, *of_keys = backward_of_one(
            dout, q, arrays.k, arrays.v, out, lse, sequences, call.scores, deterministic=True,
            float32_dk_dv=True,
        )  # fmt: skip
        dq_groups.append(dq)
        for total, part in zip(sums, of_keys, strict=True):
            total += to_numpy_view(part, "dk")
    dtype = np.dtype(np.float32) if float32_dk_dv else to_numpy_view(arrays.k, "k").dtype
    dk, dv = (like_first(x.astype(dtype, copy=False), results.douts[0]) for x in sums)
    return dq_groups, dk, dv


def _sequences_of(
    call: GroupedCall, cu_q: NDArray[np.int64], cu_k: NDArray[np.int64], lens: NDArray[np.int64]
) -> Any:
    """Return the sequences of a separate call: each prefix, and behind it a gap without queries."""
    from kvlab.ops.attention_call import Sequences

    bounds = np.zeros((2, 2 * len(lens) + 1), np.int32)
    bounds[0, :-1], bounds[0, -1] = np.repeat(cu_q, 2)[1:-1], cu_q[-1]
    bounds[1, :-1:2], bounds[1, 1::2], bounds[1, -1] = cu_k[:-1], cu_k[:-1] + lens, cu_k[-1]
    return Sequences(bounds[0], bounds[1], *call.longest)


def _by_keys(
    rows: NDArray[np.int64], keys: NDArray[np.int64], causal: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of all rows, group after group, by sequence and the keys they see, and how many.

    rows, keys: (groups, sequences).
    """
    count, (_, sequences) = rows.ravel(), rows.shape
    of = np.repeat(np.arange(count.size), count)  # (group, sequence) of each row
    inside = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    limit = keys.ravel()[of]
    if causal:
        limit = np.maximum(0, limit - count[of] + inside + 1)
    order = np.lexsort((limit, of % max(sequences, 1)))
    return order, limit[order]
