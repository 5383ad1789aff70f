"""Attention of groups of queries on a GPU, and gradients: a call of the same backend for each group.

A prefix is a sequence, and behind it lies a gap, a sequence of keys without queries. One launch cuts the
sequences of all groups so (kernels/cuda/attention/prefixes.cu); then each group is an ordinary call.
Gradients of keys are added up by attention/add_groups.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.jit.launch import cuda_kernel
from kvlab.jit.structs import ADDRESS, Struct
from kvlab.ops.array_kinds import allocator, kinds_of
from kvlab.ops.attention import attention_varlen
from kvlab.ops.attention_arguments import check_bounds
from kvlab.ops.attention_backward import attention_varlen_backward
from kvlab.ops.attention_call import MAX_GROUPS
from kvlab.ops.device_arrays import launch, multiprocessors
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall
    from kvlab.ops.grouped_backward import Results

__all__ = ["attend", "attend_backward", "check_lengths", "check_separate"]

_THREADS, _SUM_THREADS = 128, 256
_EACH = range(MAX_GROUPS)

_CALL = Struct(
    **{f"cu_q{g}": ADDRESS for g in _EACH},
    **{f"prefix_lens{g}": ADDRESS for g in _EACH},
    cu_k=ADDRESS, bounds=ADDRESS, sequences="i", unused="i",
)  # fmt: skip

_SUM = Struct(**{f"part{g}": ADDRESS for g in _EACH}, sum=ADDRESS, count="q", groups="i", unused="i")


def attend(call: GroupedCall, arrays: GroupedArrays, addresses: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Launcher of backends "cuda" and "numba": outs and lses, lists with one array a group."""
    outs, lses = [], []
    for q, (cu_q, cu_k) in zip(arrays.q_groups, _separate_sequences(call, addresses), strict=True):
        found: Any = attention_varlen(
            q, arrays.k, arrays.v, cu_q, cu_k, *call.longest, causal=call.scores.right == 0,
            scale=call.scores.scale, return_lse=call.return_lse, sm_margin=call.sm_margin,
            backend=call.row.backend,
        )  # fmt: skip
        outs.append(found[0] if call.return_lse else found)
        if call.return_lse:
            lses.append(found[1])
    return outs, lses


def _separate_sequences(call: GroupedCall, addresses: Sequence[int]) -> list[tuple[Any, Any]]:
    """Return cu_seqlens_q and cu_seqlens_k for a call of each group."""
    if call.segment_len is not None:
        raise NotImplementedError(
            "segment_table: these arrays are computed by separate calls, which want the keys of a sequence "
            "in a row; pass a copy in order"
        )
    check_lengths(call)
    count, sequences = call.groups, call.sizes["batch"]
    (bounds,), (at,) = allocator(call.kinds[0], ((count, 2, 2 * sequences + 1), "int32"))()
    values: dict[str, Any] = {"sequences": sequences, "unused": 0}
    argument = _CALL.array(values)[0]
    for g in range(count):
        argument[f"cu_q{g}"], argument[f"prefix_lens{g}"] = (
            addresses[count + 2 + g],
            addresses[2 * count + 2 + g],
        )
    argument["cu_k"], argument["bounds"] = addresses[3 * count + 2], at
    kernel = cuda_kernel("attention/prefixes", "cut_prefixes", (), call.device.index)
    grid = sequences // _THREADS + 1, count
    launch(kernel, grid, (_THREADS,), [np.frombuffer(argument.tobytes(), f"V{_CALL.size}")[0]], bounds)
    return [(bounds[g][0], bounds[g][1]) for g in range(count)]


def check_separate(call: GroupedCall) -> None:
    """Refuse to compute a call group by group if its caller asked for one launch."""
    if call.implementation is not None:
        raise NotImplementedError(
            f"implementation={call.implementation!r}: the scale must be positive, and rows of all arrays "
            "must begin at multiples of 16 bytes, in memory that no two elements share; pass copies, or "
            "implementation='separate'"
        )


def attend_backward(
    call: GroupedCall,
    arrays: GroupedArrays,
    addresses: Sequence[int],
    results: Results,
    deterministic: bool,
    float32_dk_dv: bool,
) -> tuple[list[Any], Any, Any]:
    """Launcher of backends "cuda" and "numba": dq of each group, dk and dv."""
    found = [
        attention_varlen_backward(
            dout, q, arrays.k, arrays.v, out, lse, cu_q, cu_k, *call.longest,
            causal=call.scores.right == 0, scale=call.scores.scale, deterministic=deterministic,
            sm_margin=call.sm_margin, backend=call.row.backend,
        )
        for q, dout, out, lse, (cu_q, cu_k) in zip(
            arrays.q_groups, *results[:3], _separate_sequences(call, addresses), strict=True
        )
    ]  # fmt: skip
    of_keys = [[one[i] for one in found] for i in (1, 2)]
    wide = float32_dk_dv and call.dtype != "float32"
    dk, dv = (parts[0] if call.groups == 1 and not wide else _add(call, parts, wide) for parts in of_keys)
    return [one[0] for one in found], dk, dv


def _add(call: GroupedCall, parts: Sequence[Any], wide: bool) -> Any:
    """Return the sum of arrays in the shape of k, in their dtype or in float32."""
    shape = tuple(parts[0].shape)
    (sums,), (at,) = allocator(call.kinds[0], (shape, "float32" if wide else call.dtype))()
    _, addresses = kinds_of(parts, [f"dk[{g}]" for g in range(len(parts))])
    count = int(np.prod(shape))
    argument = _SUM.array({"count": count, "groups": len(parts), "unused": 0})[0]
    for g, address in enumerate(addresses):
        argument[f"part{g}"] = address
    argument["sum"] = at
    macros = {
        "FLOAT32": int(call.dtype == "float32"),
        "BF16": int(call.dtype == "bfloat16"),
        "WIDE": int(wide),
    }
    kernel = cuda_kernel("attention/add_groups", "add_groups", tuple(macros.items()), call.device.index)
    blocks = min(-(-count // (4 * _SUM_THREADS)), 8 * multiprocessors(call.device.index))
    launch(kernel, (blocks,), (_SUM_THREADS,), [np.frombuffer(argument.tobytes(), f"V{_SUM.size}")[0]], sums)
    return sums


def check_lengths(call: GroupedCall) -> None:
    """Refuse arrays of lengths that kernels cannot read."""
    for name, view in zip(call.names, call.views, strict=True):
        if len(view.shape) == 1 or name == "segment_table":
            check_bounds(name, CudaView(0, view.shape[-1:], view.strides[-1:], *view[3:]))
        if name == "segment_table" and view.shape[0] > 1 and view.strides[0] != view.shape[1]:
            raise NotImplementedError(f"segment_table has strides {view.strides}: pass a contiguous copy")
