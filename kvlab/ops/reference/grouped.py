"""Attention of groups of queries in float64, and gradients: launchers of the backend "reference"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.new_arrays import like_first
from kvlab.ops.cpu.grouped import keys_of, lengths_of
from kvlab.reference import grouped as reference
from kvlab.views import to_numpy_view

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall
    from kvlab.ops.grouped_backward import Results

__all__ = ["attend", "attend_backward"]


def attend(call: GroupedCall, arrays: GroupedArrays, _addresses: Any) -> tuple[list[Any], list[Any]]:
    """Launcher of backend "reference"; arguments as `kvlab.ops.cpu.grouped.attend`."""
    views = [to_numpy_view(q, f"q_groups[{g}]") for g, q in enumerate(arrays.q_groups)]
    cu_q, cu_k, lens = lengths_of(call, arrays)
    outs, lses = reference.grouped_attention_varlen(
        views, *keys_of(call, arrays), cu_seqlens_q_groups=cu_q,
        cu_seqlens_k=cu_k, prefix_lens=lens, causal=call.scores.right == 0, scale=call.scores.scale,
    )  # fmt: skip
    first = arrays.q_groups[0]
    return (
        [like_first(out.astype(views[0].dtype), first) for out in outs],
        [like_first(lse.astype(np.float32), first) for lse in lses],
    )


def attend_backward(
    call: GroupedCall,
    arrays: GroupedArrays,
    _addresses: Any,
    results: Results,
    _deterministic: bool,
    float32_dk_dv: bool,
) -> tuple[list[Any], Any, Any]:
    """Launcher of backend "reference"; arguments as `kvlab.ops.cpu.grouped.attend_backward`."""
    cu_q, cu_k, lens = lengths_of(call, arrays)
    views = [
        [to_numpy_view(x, f"{name}[{g}]") for g, x in enumerate(groups)]
        for name, groups in zip(
            ("douts", "outs", "lses", "q_groups"), (*results[:3], arrays.q_groups), strict=True
        )
    ]
    douts, outs, lses, q_groups = views
    dq_groups, dk, dv = reference.grouped_attention_varlen_backward(
        douts, q_groups, to_numpy_view(arrays.k, "k"), to_numpy_view(arrays.v, "v"), outs, lses,
        cu_seqlens_q_groups=cu_q, cu_seqlens_k=cu_k, prefix_lens=lens, causal=call.scores.right == 0,
        scale=call.scores.scale,
    )  # fmt: skip
    first, dtype = results.douts[0], q_groups[0].dtype
    wide = np.dtype(np.float32) if float32_dk_dv else dtype
    return (
        [like_first(dq.astype(dtype), first) for dq in dq_groups],
        like_first(dk.astype(wide), first),
        like_first(dv.astype(wide), first),
    )
