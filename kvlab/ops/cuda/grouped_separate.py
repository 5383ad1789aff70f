"""Attention of groups of queries on a GPU by a call for each group, of any backend.

A prefix is a sequence, and behind it lies a gap, a sequence of keys without queries. One launch cuts the
sequences of all groups so (kernels/cuda/attention/prefixes.cu); then each group is an ordinary call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.jit.launch import cuda_kernel
from kvlab.jit.structs import ADDRESS, Struct
from kvlab.ops.array_kinds import allocator
from kvlab.ops.attention import attention_varlen
from kvlab.ops.attention_arguments import check_bounds
from kvlab.ops.device_arrays import launch

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall

__all__ = ["attend_with", "check_lengths", "separate_sequences"]

_THREADS = 128
_EACH = range(16)

_CALL = Struct(
    **{f"cu_q{g}": ADDRESS for g in _EACH},
    **{f"prefix_lens{g}": ADDRESS for g in _EACH},
    cu_k=ADDRESS, bounds=ADDRESS, sequences="i", unused="i",
)  # fmt: skip


def attend_with(
    backend: str, call: GroupedCall, arrays: GroupedArrays, addresses: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Return outs and lses of separate calls of a backend."""
    outs, lses = [], []
    for q, (cu_q, cu_k) in zip(arrays.q_groups, separate_sequences(call, addresses), strict=True):
        found: Any = attention_varlen(
            q, arrays.k, arrays.v, cu_q, cu_k, *call.longest, causal=call.scores.right == 0,
            scale=call.scores.scale, return_lse=True, sm_margin=call.sm_margin, backend=backend,
        )  # fmt: skip
        outs.append(found[0])
        lses.append(found[1])
    return outs, lses


def separate_sequences(call: GroupedCall, addresses: Sequence[int]) -> list[tuple[Any, Any]]:
    """Return cu_seqlens_q and cu_seqlens_k for a call of each group."""
    check_lengths(call)
    count, sequences = call.groups, call.sizes["batch"]
    bounds, at = allocator((count, 2, 2 * sequences + 1), "int32", call.kinds[0])()
    values: dict[str, Any] = {"sequences": sequences, "unused": 0}
    argument = _CALL.array(values)[0]
    for g in range(count):
        argument[f"cu_q{g}"], argument[f"prefix_lens{g}"] = (
            addresses[count + 2 + g],
            addresses[2 * count + 2 + g],
        )
    argument["cu_k"], argument["bounds"] = addresses[-1], at
    kernel = cuda_kernel("attention/prefixes", "cut_prefixes", (), call.device.index)
    grid = sequences // _THREADS + 1, count
    launch(kernel, grid, (_THREADS,), [np.frombuffer(argument.tobytes(), f"V{_CALL.size}")[0]], bounds)
    return [(bounds[g][0], bounds[g][1]) for g in range(count)]


def check_lengths(call: GroupedCall) -> None:
    """Refuse arrays of lengths that kernels cannot read."""
    for name, view in zip(call.names, call.views, strict=True):
        if len(view.shape) == 1:
            check_bounds(name, view)
